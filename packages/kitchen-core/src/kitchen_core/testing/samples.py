"""Sample calls of every op, for tests that run over all of them.

A sample makes the op's positional arguments for x of shape [*lead, K] (for weight-side ops, a weight of M = lead rows).
A new op needs an entry here; a test fails where one is missing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import ops

N, K = 24, 128
RANK = 16
GROUP = 64  # ConvRot group and quantization group of the samples


@dataclass(frozen=True)
class Sample:
    """One call of an op. ``make(lead, dtype)`` returns its arguments; ``strided_argument`` is the index of x in them.

    ``any_rank`` tells whether ``lead`` may be of any length (x) or is one number of rows (weights); ``least_rows`` is 1
    where an empty weight is refused.
    """

    op: str
    name: str
    make: Callable[[tuple[int, ...], torch.dtype], tuple]
    any_rank: bool = True
    least_rows: int = 0
    strided_argument: int = 0

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


SAMPLES: list[Sample] = []


def _sample(op: str, name: str, **fields):
    def add(make):
        SAMPLES.append(Sample(op, name, make, **fields))
        return make

    return add


def _x(lead, dtype, width: int = K) -> torch.Tensor:
    return torch.randn(*lead, width).to(dtype)


def _int8_weight(n: int = N, k: int = K, group: int = GROUP):
    return ops.quantize_int8_convrot_weight(torch.randn(n, k), group)


def filled(key: str, t: torch.Tensor, k: int, device: torch.device | str, *seed: int) -> torch.Tensor:
    """Values for one stored tensor of a weight with K = ``k``, of the shape and dtype of ``t``: random codes, plausible scales.

    The same for the same key, shape and ``seed``. Nothing is quantized, so weights may be of any size.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(repr((key, t.shape, *seed)).encode()))
    if t.dtype == torch.int8:
        return torch.randint(-128, 128, t.shape, dtype=torch.int8, device=device, generator=generator)
    made = torch.rand(t.shape, device=device, generator=generator)
    if key == "codebook":
        return made.mul_(2).sub_(1).sort().values.to(t.dtype)
    if key == "s_rel":  # decoded levels of up to 127
        return made.mul_(6).add_(1).to(t.dtype)
    made = made.add_(0.5) if key == "smooth_factor" else made.mul_(0.02 / k**0.5).add_(0.001 / k**0.5)
    return made.to(t.dtype)


# ----------------------------------------------------------------------------------------------------- int8


@_sample("quantize_int8_tensorwise", "plain")
def _(lead, dtype):
    return (_x(lead, dtype),)


@_sample("quantize_int8_rowwise", "plain")
def _(lead, dtype):
    return (_x(lead, dtype),)


@_sample("quantize_and_rotate_rowwise", "rms_norm, rotated")
def _(lead, dtype):
    return _x(lead, dtype), GROUP, "rms_norm", torch.rand(K).to(dtype), 1e-6


@_sample("quantize_and_rotate_rowwise", "swiglu, stochastic")
def _(lead, dtype):
    return _x(lead, dtype, 2 * K), 16, "swiglu", None, 0.0, 5


@_sample("quantize_int8_convrot_weight", "rotated", any_rank=False)
def _(lead, dtype):
    return _x(lead, dtype), GROUP


@_sample("dequantize_int8", "rotated")
def _(lead, dtype):
    codes, scale = ops.quantize_and_rotate_rowwise(_x(lead, dtype), GROUP)
    return codes, scale, dtype, GROUP


@_sample("dequantize_int8_embedding", "rotated", strided_argument=2)
def _(lead, dtype):
    codes, scale = _int8_weight(50)
    return codes, scale, torch.randint(0, 50, lead), dtype, GROUP


@_sample("int8_scaled_mm", "bias")
def _(lead, dtype):
    codes, x_scale = ops.quantize_and_rotate_rowwise(_x(lead, dtype), GROUP)
    return codes, x_scale, *_int8_weight(), torch.randn(N), dtype


@_sample("int8_linear", "plain")
def _(lead, dtype):
    return _x(lead, dtype), *_int8_weight(group=0)


@_sample("int8_linear", "rotated, gelu, bias, residual")
def _(lead, dtype):
    return (
        _x(lead, dtype), *_int8_weight(), torch.randn(N).to(dtype), dtype, GROUP, "gelu_tanh", None, 0.0,
        _x(lead, dtype, N), torch.randn(N),
    )  # fmt: skip


@_sample("int8_linear_fp16", "rotated, bias")
def _(lead, dtype):
    return _x(lead, dtype), *_int8_weight(), torch.randn(N).to(dtype), None, GROUP


@_sample("int8_swiglu_mlp", "rotated")
def _(lead, dtype):
    return _x(lead, dtype), *_int8_weight(2 * 64), *_int8_weight(N, 64), None, None, None, GROUP, GROUP


@_sample("int8_gate_up_mlp", "apart, rotated, bias")
def _(lead, dtype):
    bias = torch.randn(64).to(dtype)
    gate, up, down = _int8_weight(64), _int8_weight(64), _int8_weight(N, 64)
    return _x(lead, dtype), *gate, *up, *down, bias, bias.clone(), None, None, GROUP, GROUP


@_sample("int8_gate_up_mlp", "stacked")
def _(lead, dtype):
    codes, scale = _int8_weight(2 * 64, group=0)
    down = _int8_weight(N, 64, 0)
    return _x(lead, dtype), codes[:64], scale[:64], codes[64:], scale[64:], *down


# ----------------------------------------------------------------------------------------------- w4a8, w6a8


def _w4a8_weight(bits: int = 4, levels: str = "codebook"):
    made = ops.quantize_w4a8_weight(torch.randn(N, K), 16 if bits == 4 else 32, GROUP, bits, levels)
    return tuple(t if t is None or t.numel() else None for t in made)


@_sample("quantize_w4a8_weight", "4 bits", any_rank=False, least_rows=1)
def _(lead, dtype):
    return _x(lead, dtype), 16, GROUP, 4


@_sample("quantize_w4a8_weight", "6 bits, stochastic", any_rank=False, least_rows=1)
def _(lead, dtype):
    return _x(lead, dtype), 32, GROUP, 6, "uniform", None, True, 3


@_sample("decode_w4a8_weight", "4 bits", any_rank=False, least_rows=1)
def _(lead, dtype):
    weight, s_rel, _, codebook, _ = ops.quantize_w4a8_weight(_x(lead, torch.float32), 16, GROUP)
    return weight, s_rel, codebook, 16


@_sample("dequantize_w4a8_weight", "4 bits", any_rank=False, least_rows=1)
def _(lead, dtype):
    return *ops.quantize_w4a8_weight(_x(lead, torch.float32), 16, GROUP)[:4], None, dtype, 16, GROUP


@_sample("w4a8_scaled_mm", "4 bits, bias")
def _(lead, dtype):
    codes, x_scale = ops.quantize_and_rotate_rowwise(_x(lead, dtype), GROUP)
    return codes, x_scale, *_w4a8_weight(), torch.randn(N), dtype, 16


@_sample("w4a8_linear", "4 bits, swiglu, bias, residual")
def _(lead, dtype):
    return (
        _x(lead, dtype, 2 * K), *_w4a8_weight(), torch.randn(N).to(dtype), dtype, 16, GROUP, "swiglu", None, 0.0,
        _x(lead, dtype, N), torch.randn(1),
    )  # fmt: skip


@_sample("w4a8_linear", "6 bits")
def _(lead, dtype):
    return _x(lead, dtype), *_w4a8_weight(6, "uniform"), None, None, 32, GROUP


# --------------------------------------------------------------------------------------------------- svdquant


def _svdquant_weight(dtype: torch.dtype):
    codes = torch.randint(-128, 128, (N, K // 2), dtype=torch.int8)
    wscales, smooth = torch.rand(K // 64, N).to(dtype) * 0.1, (torch.rand(K) + 0.5).to(dtype)
    return codes, wscales, smooth, torch.randn(K, RANK).to(dtype), torch.randn(N, RANK).to(dtype)


@_sample("quantize_svdquant_w4a4", "signed")
def _(lead, dtype):
    _, _, smooth, down, _ = _svdquant_weight(dtype)
    return _x(lead, dtype), smooth, down


@_sample("scaled_mm_svdquant_w4a4", "unsigned, bias", any_rank=False)
def _(lead, dtype):
    codes, wscales, smooth, down, up = _svdquant_weight(dtype)
    x = _x(lead, dtype)
    x_codes, ascales, lora = ops.quantize_svdquant_w4a4(x + 1, smooth, down, True, x)
    return x_codes, codes, ascales, wscales, lora, up, torch.randn(N).to(dtype), True, dtype


@_sample("svdquant_linear", "unsigned, gelu, bias, residual")
def _(lead, dtype):
    return (
        _x(lead, dtype), *_svdquant_weight(dtype), torch.randn(N).to(dtype), True, dtype, "gelu_tanh", None, 0.0,
        _x(lead, dtype, N), torch.randn(N),
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- awq


def _awq_weight(dtype: torch.dtype, n: int = N):
    codes = torch.randint(-128, 128, (n, K // 2), dtype=torch.int8)
    return codes, torch.rand(K // GROUP, n).to(dtype), torch.randn(K // GROUP, n).to(dtype)


@_sample("dequantize_awq", "plain", any_rank=False)
def _(lead, dtype):
    return *_awq_weight(dtype, lead[0]), GROUP, dtype


@_sample("awq_linear", "rms_norm, bias, residual")
def _(lead, dtype):
    return (
        _x(lead, dtype), *_awq_weight(dtype), torch.randn(N).to(dtype), GROUP, None, "rms_norm",
        torch.rand(K).to(dtype), 1e-6, _x(lead, dtype, N), torch.randn(N),
    )  # fmt: skip
