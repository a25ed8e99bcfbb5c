"""AWQ's search over the scale exponent (Lin et al. 2023): channels with large inputs get finer steps.

    x W^T = (x / s) (W s)^T,      s = size ** exponent, size a channel's root mean square over the calibration inputs

W s is what gets quantized. The division belongs into what makes x, a norm or a linear layer in front, since the format stores
no scale a column: ``divide_producer``. Where nothing in front can take it, a calibration of the format's own ``quantize`` is
the way (calibrated.py): it needs no scale, and is better still.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kitchen_core.calibration import Calibration, check_calibration
from kitchen_core.errors import UnsupportedError
from kitchen_core.reference.awq import dequantize_awq

from .quantizer import quantize_awq

logger = logging.getLogger("kitchen.awq")

STEPS = 20  # exponents tried: 0, 1/20, .. 19/20
CHUNK_ELEMENTS = 2**22  # of a weight at a time: 16 MiB a temporary
SMALLEST = 1e-4  # scale, relative to the middle of all
# An exponent other than 0 must lower the squared error to this, on all inputs and on the kept sample. Smaller gains do not
# always carry over to other inputs: 0.956 became 1.013 in one of 222 cases (bench/quality.py, 2026-11-30).
MARGIN = 0.95

Progress = Callable[[str, int, int], None]


class ChannelScales(NamedTuple):
    """``scales`` fp32 [K], by which columns of the weight are multiplied; ones where ``exponent`` is 0.

    ``error`` and ``plain_error``: squared output error per input row, summed over outputs, with and without scales.
    """

    scales: torch.Tensor
    exponent: float
    error: float
    plain_error: float


def search_channel_scales(
    weights: Sequence[torch.Tensor],
    calibration: Calibration,
    group_size: int = 64,
    steps: int = STEPS,
    progress: Progress | None = None,
) -> ChannelScales:
    """One set of channel scales for all ``weights`` that share an input (q, k and v; gate and up).

    Shapes: each weight [N, K]; scales [K].
    Dtypes and units: float weights; a scaled weight is rounded to its own dtype before it is quantized.
    Layout: any strides. Beside its operands a call holds the Gram matrix [K, K] and a few temporaries of 16 MiB.
    Returns: ChannelScales of least error; exponent 0, plain min/max, unless another is better on all inputs and on the sample.
    Raises: UnsupportedError for no weights, weights of different K, or a calibration that does not fit.
    Devices: any; that of the first weight.
    Source: Lin et al. 2023, section 3.2; the error is the exact one over the calibration's second moment.
    """
    if not weights or steps < 1:
        raise UnsupportedError(f"needs a weight and a step or more, got {len(weights)} weights and {steps} steps")
    k = weights[0].shape[1]
    if any(w.dim() != 2 or w.shape[1] != k for w in weights):
        raise UnsupportedError(f"weights that share an input are [N, K={k}], got {[list(w.shape) for w in weights]}")
    check_calibration(calibration, k)
    device = weights[0].device
    moment = calibration.mean_moment(device)
    sample = calibration.sample.to(device)
    sizes = moment.diagonal().clamp_min(0).sqrt()
    tried: list[ChannelScales] = []
    held_out: list[float] = []
    for step in range(steps):
        exponent = step / steps
        scales = scales_of(sizes, exponent)
        errors = [_errors(w, scales, moment, sample, group_size) for w in weights]
        error, on_sample = (sum(values) for values in zip(*errors, strict=True))
        tried.append(ChannelScales(scales, exponent, error, tried[0].error if tried else error))
        held_out.append(on_sample)
        if progress:
            progress("searching channel scales", step + 1, steps)
    better = [
        i for i in range(1, steps) if tried[i].error <= MARGIN * tried[0].error and held_out[i] <= MARGIN * held_out[0]
    ]
    best = tried[min(better, key=lambda i: tried[i].error)] if better else tried[0]
    logger.debug("channel scales: exponent %.2f, error %.4g, plain %.4g", best.exponent, best.error, best.plain_error)
    return best


def scales_of(sizes: torch.Tensor, exponent: float) -> torch.Tensor:
    """sizes ** exponent, about 1 in the middle of their range; channels that never carry anything have 1."""
    alive = sizes > 0
    if exponent == 0 or not bool(alive.any()):
        return torch.ones_like(sizes)
    scales = torch.where(alive, sizes, 1.0).pow(exponent)
    middle = (scales[alive].max() * scales[alive].min()).sqrt()
    return torch.where(alive, (scales / middle).clamp_min(SMALLEST), 1.0)


def _errors(weight, scales, moment, sample, group_size) -> tuple[float, float]:
    """Squared output error of the quantized weight per input: over all inputs, and over the sample."""
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    kept = torch.zeros_like(total)
    rows = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for part in weight.split(rows):
        scaled = scale_columns(part, scales)
        dense = dequantize_awq(*quantize_awq(scaled, group_size), group_size, torch.float32)
        difference = dense / scales - part.float()
        total += ((difference @ moment) * difference).sum(dtype=torch.float64)
        kept += (sample @ difference.t()).square().sum(dtype=torch.float64)
    return float(total), float(kept) / max(1, sample.shape[0])


def scale_columns(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """W s in the weight's dtype: what is quantized."""
    return (weight.float() * scales).to(weight.dtype)


def divide_producer(
    scales: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of what makes x, divided by the scales, in fp32 with one rounding.

    Shapes: weight [K] of a norm, or [K, K'] of a linear layer; bias [K].
    """
    shape = (-1, *[1] * (weight.dim() - 1))
    divided = (weight.float() / scales.reshape(shape)).to(weight.dtype)
    return divided, None if bias is None else (bias.float() / scales).to(bias.dtype)
