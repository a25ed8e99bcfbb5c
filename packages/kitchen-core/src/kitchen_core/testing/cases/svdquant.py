"""Cases of the SVDQuant ops."""

from __future__ import annotations

import torch

from .. import unit_roundoff
from .maker import OUT_FEATURES, Case, Maker
from .truth import V, activated, finished, nibbles

WIDTHS = (64, 128, 192, 320, 512)
RANKS = (0, 1, 8, 16, 24, 32, 48, 96, 128)
SHIFT = 0.171875


def grid(h: torch.Tensor, error: torch.Tensor, unsigned: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What codes * scale stand for [..., K], its error, and the scales [K/64, M]: half a step of each group's absmax.

    A group that is not finite has the scale NaN; unsigned codes clip negatives to 0.
    """
    groups, spread = h.unflatten(-1, (-1, 64)), error.unflatten(-1, (-1, 64))
    absmax = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(torch.isfinite(absmax), absmax.clamp_min(1e-10) / (15 if unsigned else 7), float("nan"))
    step = scale * (1 + 2 * V) + spread.amax(-1, keepdim=True) / 7
    off = 0.5 * step * (1 + 64 * V) + spread
    meant = torch.where(torch.isnan(scale), float("nan"), groups.clamp_min(0.0) if unsigned else groups)
    return meant.flatten(-2), off.flatten(-2), scale.reshape(-1, h.shape[-1] // 64).T


def low_rank(h: torch.Tensor, error: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """h @ proj_down, summed in fp32."""
    down = down.double()
    return h @ down, (error + (h.shape[-1] + 2) * V * h.abs()) @ down.abs()


def quantizer(op: str, m: Maker) -> Case:
    k, rank, lead = m.pick("K", WIDTHS), m.pick("R", RANKS), m.lead()
    x = m.x(lead, k)
    smooth, down = (m.rand(k) + 0.5).to(m.float_dtype()), m.randn(k, rank).to(m.float_dtype())
    unsigned = m.wants("act_unsigned")
    lora_x = m.strided("lora_x layout", m.randn(*lead, k).to(m.float_dtype())) if m.wants("lora_x") else None
    h = x.double().reshape(-1, k) / smooth.double()
    meant, off, scale = grid(h, V * h.abs(), unsigned)
    branch = (x if lora_x is None else lora_x).double().reshape(-1, k)
    lora, lora_off = low_rank(branch, torch.zeros_like(branch), down)

    def stands_for(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        codes, ascales, lora_act = outputs
        levels = nibbles(codes, signed=not unsigned).double()
        assert unsigned or levels.numel() == 0 or levels.min() >= -7, "signed codes are -7 to 7"
        return [(levels.unflatten(-1, (-1, 64)) * ascales.double().T.unsqueeze(-1)).flatten(-2), ascales, lora_act]

    bounds, dtypes = [off, 4 * V * scale + 1e-17, lora_off], (torch.int8, torch.float32, torch.float32)
    return Case(
        op, [x, smooth, down, unsigned, lora_x], [meant, scale, lora], bounds, [True, True, False], dtypes, stands_for
    )


def tail(m: Maker, n: int, rank: int, shape: tuple[int, ...]):
    """proj_up, bias, residual and residual_scale."""
    return m.randn(n, rank).to(m.float_dtype()), m.vector("bias", n), *m.residual(shape)


def weight_of(m: Maker, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes (-8 among them), wscales [K/64, N], and the dense 4-bit part [N, K]."""
    packed = m.strided("weight layout", m.integers(-128, 128, n, k // 2))
    wscales = m.strided("wscales layout", (m.rand(k // 64, n) * 0.05).to(m.float_dtype()))
    dense = nibbles(packed, signed=True).double() * wscales.double().T.repeat_interleave(64, dim=1)
    return packed, wscales, dense


def multiplied(h, off, dense, lora, lora_off, up, out_dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups, each rounded three times and added in turn, and the low-rank product, summed in fp32.

    The Hopper kernel multiplies the branch in bfloat16 (`rounds_branch` in `kitchen_svdquant/_hopper.py`): beside a bfloat16
    proj_up, for a bfloat16 output, the other factor is rounded, u = 2^-8 of it. Else factors are cut in two parts, of which the
    second is at most u of the factor and rounded to u of itself: u^2 of each that is cut, and u^2 for the product of the second
    parts, which is left out where both are.
    """
    u = unit_roundoff(torch.bfloat16)
    rounds, one_is_cut = torch.bfloat16 == up.dtype == out_dtype, up.dtype == torch.bfloat16
    branch = u if rounds else u * u if one_is_cut else 3 * u * u
    size, up = dense.abs(), up.double()
    groups = dense.shape[1] // 64
    bound = off @ size.T + (groups + 4) * V * ((h.abs() + off) @ size.T)
    bound = bound + (lora_off + (branch + (up.shape[1] + 4) * V) * lora.abs()) @ up.abs().T
    return h @ dense.T + lora @ up.T, bound


def scaled_mm(op: str, m: Maker) -> Case:
    k, n, rank, rows = (
        m.pick("K", WIDTHS),
        m.pick("N", OUT_FEATURES),
        m.pick("R", RANKS),
        m.pick("M", (0, 1, 7, 16, 65)),
    )
    unsigned = m.wants("act_unsigned")
    codes = m.strided("codes layout", m.integers(-128, 128, rows, k // 2))
    ascales, lora = m.rand(k // 64, rows) * 0.1, m.randn(rows, rank)
    weight, wscales, dense = weight_of(m, n, k)
    up, bias, residual, residual_scale = tail(m, n, rank, (rows, n))
    out = m.out_dtype(torch.bfloat16)
    h = nibbles(codes, signed=not unsigned).double() * ascales.double().T.repeat_interleave(64, dim=1)
    y = multiplied(h, torch.zeros_like(h), dense, lora.double(), torch.zeros_like(lora).double(), up, out)
    y, bound = finished(*y, bias, residual, residual_scale, out)
    arguments = [
        codes, weight, ascales, wscales, lora, up, bias, unsigned, out, residual, residual_scale, *m.part(n),
    ]  # fmt: skip
    return Case(op, arguments, [y], [bound], [False], (out,))


def linear(op: str, m: Maker) -> Case:
    k, n, rank, lead = m.pick("K", WIDTHS), m.pick("N", OUT_FEATURES), m.pick("R", RANKS), m.lead()
    weight, wscales, dense = weight_of(m, n, k)
    smooth, down = (m.rand(k) + 0.5).to(m.float_dtype()), m.randn(k, rank).mul(0.1).to(m.float_dtype())
    unsigned = m.wants("act_unsigned")
    act, act_weight, eps, width = m.activation(k)
    x = m.x(lead, width)
    up, bias, residual, residual_scale = tail(m, n, rank, (*lead, n))
    out = m.out_dtype(None, x.dtype)
    raw, error = activated(x, act, act_weight, eps)
    shifted = raw + SHIFT if unsigned else raw
    h = shifted / smooth.double()
    spread = (error + V * shifted.abs()) / smooth.double() + V * h.abs()
    meant, off, _ = grid(h, spread, unsigned)
    y = multiplied(meant, off, dense, *low_rank(raw, error, down), up, out or x.dtype)
    y, bound = finished(*y, bias, residual, residual_scale, out or x.dtype)
    spoiled = ~torch.isfinite(raw).all(-1, keepdim=True)
    y = torch.where(spoiled, float("nan"), y)
    arguments = [
        x, weight, wscales, smooth, down, up, bias, unsigned, out, act, act_weight, eps, residual, residual_scale,
        *m.part(n),
    ]  # fmt: skip
    return Case(op, arguments, [y], [bound], [False], (out or x.dtype,))


BUILDERS = {"quantize_svdquant_w4a4": quantizer, "scaled_mm_svdquant_w4a4": scaled_mm, "svdquant_linear": linear}
