"""How a float weight becomes svdquant_w4a4 tensors.

W is taken to the smoothed basis, W * smooth; its largest singular directions become the low-rank branch; what is left is
rounded to 4 bits. Then in turns: the branch is fitted to W minus the rounded part, and the rest is rounded again. Every
float tensor is rounded to the stored dtype before the 4-bit codes are chosen, so that the codes absorb the rounding.
Which smooth factor and which turn is kept is decided by one number: the error of the layer's own output on sample rows.

Memory: besides the weight in fp32, three temporaries of its size and a few of one chunk of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kitchen_core.arithmetic import round_codes
from kitchen_core.errors import UnsupportedError
from kitchen_core.packing import pack_nibbles, unpack_nibbles
from kitchen_core.reference.svdquant import GROUP, UNSIGNED_SHIFT, quantize_svdquant_w4a4

CHUNK_ELEMENTS = 2**22  # of the residual at a time: 16 MiB a temporary
SAMPLE_ROWS = 128
TURNS = 4
EXACT_SVD_SIZE = 256  # above, a randomized range finder gives the few directions wanted at a fraction of the cost
SCALE_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of absmax / 7: clipping the largest of 64 often lowers the error


class Parts(NamedTuple):
    """The stored tensors under the format's names."""

    qdata: torch.Tensor
    scale: torch.Tensor
    proj_down: torch.Tensor
    proj_up: torch.Tensor
    smooth_factor: torch.Tensor


def quantize_svdquant(
    weight: torch.Tensor,
    rank: int,
    act_unsigned: bool = False,
    seed: int = 0,
    calibration: torch.Tensor | None = None,
    smooth: torch.Tensor | None = None,
) -> Parts:
    """weight [N, K] -> Parts, in the weight's dtype.

    ``calibration``: activations [..., K] of this layer, or their absmax per channel [K]. ``smooth`` [K]: keep this factor
    instead of looking for one. ``seed`` > 0 rounds the final codes stochastically.
    """
    w = weight.float()
    absmax, sample = _calibration(calibration, w, act_unsigned)
    expected = sample @ w.t()
    factors = [smooth.float()] if smooth is not None else _smooth_factors(w, absmax)
    factors = [storable(factor, weight.dtype) for factor in factors]

    def fit(factor: torch.Tensor, turns: int) -> tuple[float, Parts]:
        return _fit(w, factor, rank, weight.dtype, turns, act_unsigned, sample, expected)

    chosen = factors[0]
    if len(factors) > 1:
        errors = [fit(factor, 1)[0] for factor in factors]
        chosen = factors[errors.index(min(errors))]
    parts = fit(chosen, TURNS if rank else 1)[1]
    if seed > 0:
        qdata, scale, _ = _round_residual(w, chosen.float(), parts.proj_up, parts.proj_down, seed)
        parts = parts._replace(qdata=qdata, scale=scale)
    return parts


# ------------------------------------------------------------------------------------- calibration and smoothing


def _calibration(calibration: torch.Tensor | None, w: torch.Tensor, act_unsigned: bool):
    """Absmax per channel (None without calibration) and sample rows [M, K]: real ones, or Gaussian ones of that absmax."""
    k = w.shape[1]
    if calibration is not None and (calibration.dim() == 0 or calibration.shape[-1] != k):
        raise UnsupportedError(
            f"calibration must be activations [..., K={k}] or their absmax per channel [K], got {list(calibration.shape)}"
        )
    if calibration is not None and calibration.dim() > 1 and calibration.numel():
        rows = calibration.reshape(-1, k).to(w.device)
        sample = rows[:: -(-rows.shape[0] // SAMPLE_ROWS)].float()
        return rows.abs().amax(0).float(), sample
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(SAMPLE_ROWS, k, generator=generator, dtype=torch.float32, device="cpu").to(w.device)
    if act_unsigned:
        sample = sample.abs()
    absmax = None
    if calibration is not None and calibration.dim() == 1:
        absmax = calibration.float().abs().to(w.device)
        sample = sample * (absmax / sample.abs().amax(0))
    return absmax, sample - UNSIGNED_SHIFT if act_unsigned else sample


def _smooth_factors(w: torch.Tensor, absmax: torch.Tensor | None) -> list[torch.Tensor]:
    """Candidates: none (ones), and absmax_x^a / absmax_w^(1-a), which moves the spread of channels from x to W."""
    columns = floored(w.abs().amax(0))
    ones = torch.ones_like(columns)
    if absmax is None:
        return [ones, centred(columns**-0.5)]
    spread = floored(absmax)
    return [ones, *(centred(spread**alpha * columns ** (alpha - 1)) for alpha in (0.3, 0.5, 0.7, 0.9))]


def floored(absmax: torch.Tensor) -> torch.Tensor:
    """Dead channels count as a thousandth of the largest one, so that no factor becomes extreme."""
    return absmax.clamp_min(max(absmax.max().item() * 1e-3, torch.finfo(torch.float32).tiny))


def centred(factor: torch.Tensor) -> torch.Tensor:
    """Scaled to a geometric mean of 1, which keeps both x / smooth and W * smooth in range."""
    return factor / factor.log().mean().exp()


def storable(factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded to the stored dtype, and never to zero: x is divided by it."""
    return factor.clamp(torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max).to(dtype)


# ---------------------------------------------------------------------------------------- branch and residual


def _fit(w, factor, rank, dtype, count, act_unsigned, sample, expected) -> tuple[float, Parts]:
    """The best of ``count`` turns, with its output error."""
    smooth = factor.float()
    dense, best = None, None
    for _ in range(count):
        target = w * smooth if dense is None else w * smooth - dense
        up, down = low_rank(target, rank)
        del target
        up, down = up.to(dtype).contiguous(), (down / smooth.unsqueeze(1)).to(dtype).contiguous()
        qdata, scale, dense = _round_residual(w, smooth, up, down)
        parts = Parts(qdata, scale, down, up, factor)
        error = output_error(parts, dense, act_unsigned, sample, expected)
        if best is None or error < best[0]:
            best = error, parts
    return best


def low_rank(a: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """up [N, R] and down [K, R] whose product up @ down.T is the best approximation of ``a`` of that rank.

    Large matrices: subspace iteration from a seeded random start, eight directions more than wanted, so that equal
    weights give equal tensors.
    """
    basis = None
    if min(a.shape) > EXACT_SVD_SIZE and 4 * (rank + 8) < min(a.shape):
        generator = torch.Generator().manual_seed(rank)
        start = torch.randn(a.shape[1], rank + 8, generator=generator, dtype=torch.float32, device="cpu").to(a.device)
        basis = torch.linalg.qr(a @ start).Q
        for _ in range(2):
            basis = torch.linalg.qr(a @ torch.linalg.qr(a.t() @ basis).Q).Q
    u, s, vh = torch.linalg.svd(a if basis is None else basis.t() @ a, full_matrices=False)
    u = u[:, :rank] if basis is None else basis @ u[:, :rank]
    root = s[:rank].sqrt()
    return u * root, vh[:rank].t() * root


def _round_residual(
    w: torch.Tensor, smooth: torch.Tensor, up: torch.Tensor, down: torch.Tensor, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes int8 [N, K/2], scales [K/64, N], and the dense fp32 values [N, K], of W - up @ down.T in the smoothed basis."""
    n, k = w.shape
    codes = w.new_empty(n, k // 2, dtype=torch.int8)
    scales = w.new_empty(n, k // GROUP, dtype=up.dtype)
    dense = torch.empty_like(w)
    rows = max(1, CHUNK_ELEMENTS // k)
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        residual = (w[part] - up[part].float() @ down.float().t()) * smooth
        levels, scale = _round_groups(residual.unflatten(-1, (-1, GROUP)), up.dtype, seed, first * k)
        codes[part] = pack_nibbles(levels.to(torch.int8).flatten(1))
        scales[part] = scale.squeeze(-1)
        dense[part] = (levels * scale.float()).flatten(1)
    return codes, scales.t().contiguous(), dense


def _round_groups(
    groups: torch.Tensor, dtype: torch.dtype, seed: int, first_element: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels -8..7 (fp32) and scales (stored dtype) of groups [rows, K/64, 64]: of several scales the best of each group."""
    absmax = groups.abs().amax(-1, keepdim=True)
    best_error, best_scale = None, None
    for shrink in SCALE_SHRINKS:
        scale = (absmax * (shrink / 7)).to(dtype)
        error = (_levels(groups, scale) * scale.float() - groups).square().sum(-1, keepdim=True)
        if best_error is None:
            best_error, best_scale = error, scale
        else:
            best_scale = torch.where(error < best_error, scale, best_scale)
            best_error = torch.minimum(error, best_error)
    return _levels(groups, best_scale, seed, first_element), best_scale


def _levels(groups: torch.Tensor, scale: torch.Tensor, seed: int = 0, first_element: int = 0) -> torch.Tensor:
    """RNE(group / scale) in -8..7; 0 where the scale underflowed to 0."""
    step = torch.where(scale == 0, float("inf"), scale.float())
    return round_codes(groups / step, -8, 7, seed, first_element)


def output_error(parts: Parts, dense, act_unsigned: bool, sample, expected) -> float:
    """||y - expected|| on the sample rows, with x quantized as the layer does it."""
    shifted = sample + UNSIGNED_SHIFT if act_unsigned else sample
    codes, scale, low_rank = quantize_svdquant_w4a4(shifted, parts.smooth_factor, parts.proj_down, act_unsigned, sample)
    x = unpack_nibbles(codes, signed=not act_unsigned).unflatten(-1, (-1, GROUP)) * scale.t().unsqueeze(-1)
    y = x.flatten(1) @ dense.t() + low_rank @ parts.proj_up.float().t()
    if act_unsigned:
        y = y - UNSIGNED_SHIFT * (dense / parts.smooth_factor.float()).sum(-1)
    return (y - expected).norm().item()
