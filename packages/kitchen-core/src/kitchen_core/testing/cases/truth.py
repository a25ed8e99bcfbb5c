"""The meaning of the ops in float64, and by how much a right computation in fp32 may be off. ``V`` is fp32's unit roundoff.

Functions take and return pairs (value, error): the exact number, and the most by which what fp32 holds may differ from it.
"""

from __future__ import annotations

import torch

from .. import unit_roundoff

V = 2.0**-24
TINY = 2.0**-126  # what a flushed subnormal of fp32 may lose


def rotation_matrix(group: int) -> torch.Tensor:
    """The regular Hadamard matrix of a power of 4, over sqrt(group), by its Kronecker definition."""
    base = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64) / 2
    made = torch.ones(1, 1, dtype=torch.float64)
    while made.shape[0] < group:
        made = torch.kron(made, base)
    return made


def activated(x: torch.Tensor, act: str, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation in front.

    gelu: tanh's argument is off by 4V relative, which moves tanh by at most 0.45 * 4V, and tanh by 4V of its own. Behind
    sigmoid(g) the relative error is 2|g|(1 - sigmoid(g))V (the rounded exponent) and a few V. rms_norm sums K squares: K/2 V
    after the root.
    """
    x = x.double()
    if act == "none":
        return x, torch.zeros_like(x)
    if act == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner)), 8 * V * x.abs() + TINY
    if act == "rms_norm":
        h = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()
        return h, (x.shape[-1] / 2 + 8) * V * h.abs() + TINY
    first, second = x.chunk(2, dim=-1)
    if act == "swiglu":
        h, gate, size = first * torch.sigmoid(first) * second, first, (first * second).abs()
    else:  # situ
        h, gate = 100 * torch.tanh(second / 4) * torch.sigmoid(second) * torch.tanh(first / 25), second
        size = torch.ones_like(h)
    slope = (gate.abs() * torch.sigmoid(-gate)).nan_to_num(0.0, posinf=0.0)
    return h, (2 * slope + 24) * V * h.abs() + TINY * (1 + size)


def rotated(h: torch.Tensor, error: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ConvRot: four roundings a stage, each relative to at most the sum of the block's magnitudes."""
    if group == 0:
        return h, error
    matrix = rotation_matrix(group)
    blocks, spread = h.unflatten(-1, (-1, group)), error.unflatten(-1, (-1, group))
    stages = (group.bit_length() - 1) // 2
    off = (spread + 4 * stages * V * blocks.abs()) @ matrix.abs()
    return (blocks @ matrix).flatten(-2), off.flatten(-2)


def int8_grid(h: torch.Tensor, error: torch.Tensor, whole_step: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Row scales absmax / 127, and by how much codes * scale may be off from h: half a step, or a whole one.

    A row with an inf or NaN has the scale NaN. The scale is off by the error of the maximum and by two roundings; a quotient
    of up to 127 is off by 127 V, so that a code may be the next one where it is that near to a tie.
    """
    absmax = h.abs().amax(-1, keepdim=True)
    scale = torch.where(torch.isfinite(absmax), (absmax / 127).clamp_min(1e-30), float("nan"))
    step = scale * (1 + 2 * V) + error.amax(-1, keepdim=True) / 127
    return scale, (1.0 if whole_step else 0.5) * step * (1 + 512 * V) + error


def product(h: torch.Tensor, off: torch.Tensor, dense: torch.Tensor, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """h @ dense.T: what h is off by, and the fp32 roundings of ``terms`` additions and four operations besides."""
    size = dense.abs()
    return h @ dense.T, off @ size.T + (terms + 4) * V * ((h.abs() + off) @ size.T)


def finished(
    y: torch.Tensor,
    bound: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bias, residual, and the one rounding to ``out_dtype`` (to its subnormals too)."""
    if bias is not None:
        bound = bound + 2 * V * (y.abs() + bias.double().abs())
        y = y + bias.double()
    if residual is not None:
        scale = 1.0 if residual_scale is None else residual_scale.double().reshape(-1)
        bound = abs(scale) * bound + 3 * V * (abs(scale) * y.abs() + residual.double().abs())
        y = scale * y + residual.double()
    u = unit_roundoff(out_dtype)
    return y, bound + u * (y.abs() + bound) + u * torch.finfo(out_dtype).smallest_normal + TINY


def nibbles(packed: torch.Tensor, signed: bool) -> torch.Tensor:
    """4-bit codes by integer arithmetic: byte j holds columns 2j (low) and 2j + 1."""
    whole = packed.to(torch.int64) & 255
    codes = torch.stack((whole % 16, whole // 16), -1).flatten(-2)
    return torch.where(codes >= 8, codes - 16, codes) if signed else codes


def six_bits(packed: torch.Tensor) -> torch.Tensor:
    """6-bit codes of two planes: K/2 bytes of low nibbles, then K/4 bytes whose pairs of bits are the top of four columns."""
    width = packed.shape[-1] // 3 * 4
    low = nibbles(packed[..., : width // 2], signed=False)
    pairs = packed[..., width // 2 :].to(torch.int64) & 255
    return low + 16 * torch.stack([pairs // 4**i % 4 for i in range(4)], -1).flatten(-2)
