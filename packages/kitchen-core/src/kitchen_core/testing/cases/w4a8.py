"""Cases of the W4A8 and W6A8 ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codebook import fixed_codebook
from .int8 import rotation
from .maker import OUT_FEATURES, Case, Maker
from .truth import V, activated, finished, int8_grid, nibbles, product, rotated, six_bits

WIDTHS = (32, 64, 96, 128, 192, 256, 320, 512)
E4M3 = torch.float8_e4m3fn


@dataclass
class Weight:
    """A drawn weight: the op's ``tensors`` (weight, s_rel, s_channel, codebook, correction), and what they mean."""

    tensors: list
    decoded: torch.Tensor
    group: int

    @property
    def k(self) -> int:
        return self.decoded.shape[1]

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, K] in the rotated basis, and the magnitudes that were added for it."""
        scaled = self.decoded * self.tensors[2].double().reshape(-1, 1)
        if self.tensors[4] is None:
            return scaled, scaled.abs()
        addend = self.tensors[4].double().T.repeat_interleave(self.group, dim=1)
        return scaled + addend, scaled.abs() + addend.abs()


def decode(packed, scales: torch.Tensor, codebook: torch.Tensor | None, bits: int, group: int) -> torch.Tensor:
    """clamp(RNE(fp32(level * s_rel))): the product is rounded to fp32 before the tie to even."""
    codes = nibbles(packed, signed=False) if bits == 4 else six_bits(packed)
    levels = codes.double() - (8 if bits == 4 else 32) if codebook is None else codebook.double()[codes]
    return (levels * scales.repeat_interleave(group, dim=1)).float().double().round().clamp(-127, 127)


def weight_of(m: Maker, n: int) -> Weight:
    """Codes of every value, e4m3 scales of any positive finite byte (as e4m3, bytes or fp32), tables and corrections."""
    bits = m.pick("bits", (4,) if m.must_have in ("codebook", "correction") else (4, 6))
    k = m.pick("K", WIDTHS)
    groups = (4, 8, 16, 32, 64) if bits == 4 else (16, 32, 64)
    group = m.pick("group", [g for g in groups if k % g == 0 and (g != 16 or m.must_have != "group_size")])
    packed = m.strided("weight layout", m.integers(-128, 128, n, k * bits // 8))
    s_rel = m.integers(0, 0x7F, n, k // group, dtype=torch.uint8)
    scales = s_rel.view(E4M3).double()
    form = m.pick("s_rel", (E4M3, torch.uint8, torch.float32))
    given = {E4M3: s_rel.view(E4M3), torch.uint8: s_rel, torch.float32: scales.float()}[form]
    codebook = correction = None
    if bits == 4 and m.wants("codebook"):
        table = m.pick("table", ("fixed", "foreign"))
        codebook = (fixed_codebook().float() if table == "fixed" else m.randn(16)).to(m.float_dtype())
    if bits == 4 and m.wants("correction"):
        correction = m.randn(k // group, n).mul(0.01).to(m.float_dtype())
    tensors = [packed, given, m.rand(n) * 0.01, codebook, correction]
    return Weight(tensors, decode(packed, scales, codebook, bits, group), group)


def decoder(op: str, m: Maker) -> Case:
    w = weight_of(m, m.pick("N", OUT_FEATURES))
    zero = torch.zeros_like(w.decoded)
    return Case(op, [*w.tensors[:2], w.tensors[3], w.group], [w.decoded], [zero], [True], (torch.int8,))


def dequantizer(op: str, m: Maker) -> Case:
    w = weight_of(m, m.pick("N", OUT_FEATURES))
    group, out = rotation(m, "convrot_groupsize", w.k), m.out_dtype(None, torch.float32)
    dense, size = w.dense()
    y, bound = finished(*rotated(dense, 2 * V * size, group), None, None, None, out or torch.float32)
    return Case(op, [*w.tensors, out, w.group, group], [y], [bound], [True], (out or torch.float32,))


def linear(op: str, m: Maker) -> Case:
    n, lead = m.pick("N", OUT_FEATURES), m.lead()
    w = weight_of(m, n)
    whole = op == "w4a8_linear"
    if whole:
        group = rotation(m, "convrot_groupsize", w.k)
        act, act_weight, eps, width = m.activation(w.k)
        x = m.x(lead, width)
        h, error = rotated(*activated(x, act, act_weight, eps), group)
        step, off = int8_grid(h, error)
        head = [x]
    else:
        codes, x_scale = m.strided("codes layout", m.integers(-128, 128, *lead, w.k)), m.rand(*lead, 1) * 0.01
        h, act = codes.double() * x_scale.double(), "none"
        step, off = x_scale, torch.zeros_like(h)
        head = [codes, x_scale]
    bias = m.vector("bias", n)
    out = m.out_dtype(None, head[0].dtype) if whole else m.out_dtype(torch.bfloat16)
    residual, residual_scale = m.residual((*lead, n))
    dense, size = w.dense()
    y, bound = product(h, off, dense, 0)
    bound = bound + 4 * V * ((h.abs() + off) @ size.T)  # scaled codes and corrections may cancel
    result = out or head[0].dtype
    y, bound = finished(y, bound, bias, residual, residual_scale, result)
    y = torch.where(torch.isnan(step), float("nan"), y)
    middle = [group, act, act_weight, eps] if whole else []
    arguments = [*head, *w.tensors, bias, out, w.group, *middle, residual, residual_scale]
    return Case(op, arguments, [y], [bound], [act == "none"], (result,))


def quantizer(op: str, m: Maker) -> Case:
    """Whatever scales were chosen: each code names the nearest decoded level, or, stochastically, one of the two beside."""
    bits = m.pick("bits", {"bits": (6,), "scale_search": (6,)}.get(m.must_have, (4, 6)))
    levels = m.must_have in ("levels", "codebook") or bits == 4
    kinds = {"levels": ("uniform", "asymmetric"), "codebook": ("codebook",)}
    bits = 4 if m.must_have in ("levels", "codebook") else bits
    level = m.pick("levels", kinds.get(m.must_have, ("codebook", "uniform", "asymmetric")) if levels else ("codebook",))
    n, k = m.pick("N", OUT_FEATURES), m.pick("K", WIDTHS)
    groups = (4, 8, 16, 32, 64) if bits == 4 else (16, 32, 64)
    group = m.pick("group", [g for g in groups if k % g == 0 and (g != 16 or m.must_have != "group_size")])
    rotated_by = m.pick("convrot_groupsize", [0, *(g for g in (4, 16, 64) if k % g == 0)])
    weight = m.strided("x layout", m.randn(n, k).to(m.float_dtype()))
    codebook = None
    if bits == 4 and level == "codebook" and m.wants("codebook"):
        codebook = m.randn(16).clamp(-1, 1).to(m.float_dtype())
    search, seed = not m.wants("scale_search"), 7 if m.wants("seed") else 0
    form = torch.float32 if m.wants("scale_dtype") else E4M3
    h, error = rotated(weight.double(), torch.zeros(n, k, dtype=torch.float64), rotated_by)

    def excess(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """By how much each code's level is further from its target than the level that it should name."""
        packed, s_rel, s_channel, table, correction = outputs
        assert s_rel.dtype == form
        offset = correction.double().T.repeat_interleave(group, 1) if level == "asymmetric" and bits == 4 else 0.0
        target = (h - offset) / s_channel.double().reshape(-1, 1)
        scales = s_rel.double()
        # every byte of one code at all places: what that code would decode to there
        reach = torch.stack([_constant(c, bits, n, k, scales, table, group) for c in _codes(bits)])
        distance = (reach - target).abs()
        chosen = (decode(packed, scales, table if table.numel() else None, bits, group) - target).abs()
        if seed:  # the next level on either side
            infinity = torch.full_like(distance, float("inf"))
            best = torch.maximum(
                torch.where(reach >= target, distance, infinity).amin(0),
                torch.where(reach <= target, distance, infinity).amin(0),
            ).nan_to_num(posinf=float("inf"))
            best = torch.where(torch.isinf(best), distance.amin(0), best)
        else:
            best = distance.amin(0)
        # the target in fp32: its rotation, the offset's subtraction, the quotient
        inverse = 1 / s_channel.double().reshape(-1, 1)
        slack = 2 * (error * inverse + 4 * V * (target.abs() + abs(offset) * inverse))
        return [(chosen - best - slack).clamp_min(0.0)]

    zero = torch.zeros(n, k, dtype=torch.float64)
    arguments = [weight, group, rotated_by, bits, level, codebook, search, seed, form]
    dtypes = (torch.int8, form, torch.float32, torch.float32, weight.dtype)
    return Case(op, arguments, [zero], [zero], [True] * 5, dtypes, excess)


def _codes(bits: int) -> range:
    return range(16) if bits == 4 else range(1, 64)


def _constant(code: int, bits: int, n: int, k: int, scales, table: torch.Tensor, group: int) -> torch.Tensor:
    levels = torch.full((n, k), float(code - (8 if bits == 4 else 32)), dtype=torch.float64)
    if table.numel():
        levels = torch.full((n, k), table[code].item(), dtype=torch.float64)
    return (levels * scales.repeat_interleave(group, dim=1)).float().double().round().clamp(-127, 127)


BUILDERS = {
    "quantize_w4a8_weight": quantizer,
    "decode_w4a8_weight": decoder,
    "dequantize_w4a8_weight": dequantizer,
    "w4a8_scaled_mm": linear,
    "w4a8_linear": linear,
}
