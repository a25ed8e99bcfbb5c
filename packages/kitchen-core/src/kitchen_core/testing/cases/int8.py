"""Cases of the INT8 ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import unit_roundoff
from .maker import OUT_FEATURES, Case, Maker
from .truth import V, activated, finished, int8_grid, product, rotated

CODES = (torch.int8, torch.float32)
WIDTHS = (1, 7, 16, 32, 64, 100, 128, 192, 256, 320, 512, 1111)


def rotation(m: Maker, name: str, width: int) -> int:
    """The optional ConvRot group."""
    groups = [g for g in (4, 16, 64, 256) if width % g == 0]
    return m.pick(name, groups) if groups and m.wants(name) else 0


def width_of(m: Maker, widths: Sequence[int] = WIDTHS) -> int:
    rotates = m.must_have == "convrot_groupsize"
    return m.pick("K", [k for k in widths if not rotates or k % 4 == 0])


def weight_of(m: Maker, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the whole range with any strides; scales of 1 or N elements, dead rows (0 or 1e-23) among them."""
    codes = m.strided("weight layout", m.integers(-128, 128, n, k))
    scale = m.rand(*m.draw(((), (1,), (n,), (n, 1)))) * 0.01
    if m.pick("weight scales", ("positive", "positive", "dead rows")) == "dead rows" and scale.dim():
        scale[::2], scale[1::3] = 0.0, 1e-23
    return codes, scale


def dense(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.double() * scale.double().reshape(-1, 1)


def stands_for(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Codes times scales, and the scales; a NaN scale needs codes of 0."""
    codes, scale = outputs
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert (codes[torch.isnan(scale).expand(codes.shape)] == 0).all(), "codes of a row with inf or NaN must be 0"
    return [codes.double() * scale.double(), scale]


def quantizer(op: str, m: Maker) -> Case:
    """codes * scale is h to half a step (stochastic: a whole one), the scale absmax / 127."""
    k = width_of(m)
    group = 0 if op == "quantize_int8_rowwise" else rotation(m, "convrot_groupsize", k)
    act, act_weight, eps, width = m.activation(k) if "rotate" in op else ("none", None, 0.0, k)
    x = m.x((m.pick("N", OUT_FEATURES),) if "weight" in op else m.lead(), width)
    seed = m.pick("seed", (1, 12345)) if m.wants("seed") else 0
    h, error = rotated(*activated(x, act, act_weight, eps), group)
    scale, off = int8_grid(h, error, seed > 0)
    h = torch.where(torch.isnan(scale), float("nan"), h)
    arguments = [x, group, act, act_weight, eps, seed]
    if op == "quantize_int8_rowwise":
        arguments = [x, seed]
    elif op == "quantize_int8_convrot_weight":
        arguments = [x, group, seed]
    bounds = [off, error.amax(-1, keepdim=True) / 127 + 4 * V * scale]
    return Case(op, arguments, [h, scale], bounds, [act == "none"] * 2, CODES, stands_for)


def tensorwise(op: str, m: Maker) -> Case:
    x = m.x(m.lead(), width_of(m))
    h = x.double().reshape(1, -1) if x.numel() else torch.zeros(1, 1, dtype=torch.float64)
    seed = m.pick("seed", (1, 12345)) if m.wants("seed") else 0
    scale, off = int8_grid(h, torch.zeros_like(h), seed > 0)
    given = None
    if m.wants("scale"):
        given = (scale.nan_to_num(1.0).clamp_min(1e-3) * 1.5).float().reshape(m.draw(((), (1,))))
        scale = given.double().reshape(1, 1)
        off = (1.0 if seed else 0.5) * scale * (1 + 512 * V) * torch.ones_like(h)
    finite = torch.isfinite(h) & torch.isfinite(scale)
    if given is not None and not torch.isfinite(h).all():  # judged where it means something: the finite elements
        h, off = torch.where(finite, h, 0.0), torch.where(finite, off, float("inf"))
    else:
        h = torch.where(torch.isnan(scale), float("nan"), h)
    h, off = (t.reshape(-1)[: x.numel()].reshape(x.shape) for t in (h, off))
    scale = scale.reshape(())
    return Case(op, [x, given, seed], [h, scale], [off, 4 * V * scale], [True, True], CODES, stands_for)


def dequantizer(op: str, m: Maker) -> Case:
    k = width_of(m)
    group = rotation(m, "convrot_groupsize", k)
    embedding = op == "dequantize_int8_embedding"
    lead = (m.pick("V", (1, 7, 50)),) if embedding else m.lead()
    codes = m.strided("codes layout", m.integers(-128, 128, *lead, k))
    scale = m.rand(*m.draw(((), (1,), (*lead, 1))))
    out = m.out_dtype(None, torch.float32)
    values = codes.double() * (scale.double() if scale.numel() == 1 else scale.double().reshape(*lead, 1))
    arguments = [codes, scale, out, group]
    if embedding:
        indices = m.integers(-lead[0], lead[0], *m.lead(), dtype=m.draw((torch.int64, torch.int32)))
        values = values[indices.long()]
        arguments = [codes, scale, indices, out, group]
    y, bound = finished(*rotated(values, V * values.abs(), group), None, None, None, out or torch.float32)
    return Case(op, arguments, [y], [bound], [True], (out or torch.float32,))


def scaled_mm(op: str, m: Maker) -> Case:
    k, n, lead = width_of(m), m.pick("N", OUT_FEATURES), m.lead()
    codes = m.strided("codes layout", m.integers(-128, 128, *lead, k))
    x_scale = m.rand(*lead, 1) * 0.01
    weight, scale = weight_of(m, n, k)
    bias, out = m.vector("bias", n), m.out_dtype(torch.bfloat16)
    residual, residual_scale = m.residual((*lead, n))
    h = codes.double() * x_scale.double()
    y = product(h, torch.zeros_like(h), dense(weight, scale), 0)
    y, bound = finished(*y, bias, residual, residual_scale, out)
    return Case(op, [codes, x_scale, weight, scale, bias, out, residual, residual_scale], [y], [bound], [True], (out,))


def linear(op: str, m: Maker) -> Case:
    k, n, lead = width_of(m), m.pick("N", OUT_FEATURES), m.lead()
    weight, scale = weight_of(m, n, k)
    group = rotation(m, "convrot_groupsize", k)
    act, act_weight, eps, width = m.activation(k)
    x = m.x(lead, width)
    bias, out = m.vector("bias", n), m.out_dtype(None, x.dtype)
    residual, residual_scale = m.residual((*lead, n))
    arguments = [x, weight, scale, bias, out, group, act, act_weight, eps, residual, residual_scale]
    h, error = rotated(*activated(x, act, act_weight, eps), group)
    step, off = int8_grid(h, error)
    terms, bits = 0, act == "none"
    if op == "int8_linear_fp16":
        arguments.append(m.wants("fp16_activations"))
        if arguments[-1]:  # rows taken to [1, 2) by a power of two and held in fp16; summed in fp32
            terms, bits = k, False
            off = error + 2.0**-11 * h.abs() + 2.0**-23 * h.abs().amax(-1, keepdim=True)
    y = product(h, off, dense(weight, scale), terms)
    y, bound = finished(*y, bias, residual, residual_scale, out or x.dtype)
    y = torch.where(torch.isnan(step), float("nan"), y)  # a row that is not finite is NaN as a whole
    return Case(op, arguments, [y], [bound], [bits], (out or x.dtype,))


def mlp(op: str, m: Maker) -> Case:
    """gate and up, rounded to x's dtype; silu(gate) * up; quantized again, and down."""
    k, inner, n, lead = width_of(m), m.pick("I", (16, 64, 96, 256)), m.pick("N", OUT_FEATURES), m.lead()
    x = m.x(lead, k)
    reach = x.double().nan_to_num(0.0, posinf=0.0).abs().amax().item() if x.numel() else 1.0
    group, down_group = rotation(m, "convrot_groupsize", k), rotation(m, "down_convrot_groupsize", inner)
    gate, up, down = (weight_of(m, *shape) for shape in ((inner, k), (inner, k), (n, inner)))
    # halves of about 4, so that neither they nor their product leave fp16
    shrink = 4 / (max(reach, 1e-6) * k**0.5 * 0.4)
    pairs = [(codes, (scale * shrink).reshape(-1).expand(inner).clone()) for codes, scale in (gate, up)]
    if op == "int8_swiglu_mlp":
        stacked = m.vector("gate_up_bias", 2 * inner, 0.1)
        biases = [None, None] if stacked is None else list(stacked.chunk(2))
        head = [x, *(torch.cat(both) for both in zip(*pairs, strict=True)), *down, stacked]
    else:
        biases = [m.vector(name, inner, 0.1) for name in ("gate_bias", "up_bias")]
        head = [x, *pairs[0], *pairs[1], *down, *biases]
    down_bias, out = m.vector("down_bias", n), m.out_dtype(None, x.dtype)
    h, error = rotated(*activated(x, "none", None, 0.0), group)
    step, off = int8_grid(h, error)
    halves = [
        finished(*product(h, off, dense(*pair), 0), bias, None, None, x.dtype)
        for pair, bias in zip(pairs, biases, strict=True)
    ]
    y = product(*_hidden(*halves, down_group, x.dtype), dense(*down), 0)
    y, bound = finished(*y, down_bias, None, None, out or x.dtype)
    y = torch.where(torch.isnan(step), float("nan"), y)
    return Case(op, [*head, down_bias, out, group, down_group], [y], [bound], [False], (out or x.dtype,))


def _hidden(gate, up, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up as the down projection quantizes it, and by how much that may be off.

    The slope of silu is at most 1.1; where the halves lie apart, silu and the product are each rounded to ``dtype``.
    """
    (g, g_off), (u, u_off) = gate, up
    r = unit_roundoff(dtype)
    silu = g * torch.sigmoid(g)
    silu_off = 1.1 * g_off + (r + (2 * g.abs() + 24) * V) * (silu.abs() + 1.1 * g_off)
    hidden = silu * u
    off = silu_off * (u.abs() + u_off) + silu.abs() * u_off
    off = off + r * (hidden.abs() + off) + torch.finfo(dtype).smallest_normal * (1 + u.abs())
    second, second_off = rotated(hidden, off, group)
    return second, int8_grid(second, second_off)[1]


BUILDERS = {
    "quantize_int8_tensorwise": tensorwise,
    "quantize_int8_rowwise": quantizer,
    "quantize_and_rotate_rowwise": quantizer,
    "quantize_int8_convrot_weight": quantizer,
    "dequantize_int8": dequantizer,
    "dequantize_int8_embedding": dequantizer,
    "int8_scaled_mm": scaled_mm,
    "int8_linear": linear,
    "int8_linear_fp16": linear,
    "int8_swiglu_mlp": mlp,
    "int8_gate_up_mlp": mlp,
}
