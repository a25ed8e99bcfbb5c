"""The W4A8 and W6A8 ops: schemas, checks and fakes, and the public functions of the same names."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import fallback
from ..arithmetic import check_rotation_group
from ..errors import UnsupportedError
from ..reference import w4a8 as reference
from ..registry import Problem
from ._autograd import check_constant, linear_call, wants_grad
from ._check import (
    check_dtype,
    check_float,
    check_input_act,
    check_residual,
    check_same_device,
    check_seed,
    check_shape,
    check_vector,
    check_x,
    names,
    rows,
    words,
)
from ._define import compose, define
from ._forward_mode import call
from ._w4a8_sizes import check_bits, check_sizes, check_w4a8_group, w4a8_group_sizes

__all__ = [
    "W4A8_LEVELS", "QuantizedW4A8Weight", "check_w4a8_group", "decode_w4a8_weight", "dequantize_w4a8_weight",
    "quantize_w4a8_weight", "w4a8_group_sizes", "w4a8_linear", "w4a8_scaled_mm",
]  # fmt: skip

W4A8_LEVELS = ("codebook", "uniform", "asymmetric")
SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.float32)


class QuantizedW4A8Weight(NamedTuple):
    """The stored tensors of a W4A8 or W6A8 weight; ``codebook`` and ``correction`` are None where there is none."""

    qdata: torch.Tensor
    s_rel: torch.Tensor
    s_channel: torch.Tensor
    codebook: torch.Tensor | None
    correction: torch.Tensor | None


# ------------------------------------------------------------------------------------------------------ checks


def _check_weight(weight, s_rel, codebook, group_size) -> tuple[int, int, int]:
    """N, K and the bits per weight, from shapes that fit each other."""
    check_dtype("weight", weight, torch.int8)
    if weight.dim() != 2:
        raise UnsupportedError(f"weight must be int8 [N, K*bits/8], got shape {list(weight.shape)}")
    if s_rel.dtype not in SCALE_DTYPES:
        raise UnsupportedError(f"s_rel must be {names(SCALE_DTYPES)} (e4m3 bytes), got {names((s_rel.dtype,))}")
    n, row_bytes = weight.shape
    if s_rel.dim() != 2 or s_rel.shape[0] != n:
        raise UnsupportedError(f"s_rel must have shape [N, K/g] with N={n}, got {list(s_rel.shape)}")
    k = s_rel.shape[1] * group_size
    bits = next((b for b in (4, 6) if row_bytes * 8 == k * b), None)
    if bits is None:
        raise UnsupportedError(
            f"s_rel has {s_rel.shape[1]} groups of {group_size}, so K={k} and rows of {k // 2} bytes (4 bits) or "
            f"{k * 3 // 4} bytes (6 bits) are expected, got weight {list(weight.shape)}; is group_size right?"
        )
    check_w4a8_group(group_size, k, bits)
    if codebook is not None:
        if bits == 6:
            raise UnsupportedError("codebook was given for 6-bit codes, whose level is code - 32; pass None")
        check_float("codebook", codebook)
        check_shape("codebook", codebook, (16,), "[16]")
    return n, k, bits


def _check_channel(s_channel, correction, bias, n, k, bits, group_size) -> None:
    check_dtype("s_channel", s_channel, torch.float32)
    check_vector("s_channel", s_channel, n, "N")
    if correction is not None:
        if bits == 6:
            raise UnsupportedError("correction was given for 6-bit codes, which are symmetric; pass None")
        check_float("correction", correction)
        check_shape("correction", correction, (k // group_size, n), "[K/g, N]")
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, (n,), "[N]")


# ---------------------------------------------------------------------------------------------------- problems


def _quantize_problem(
    weight, group_size=16, convrot_groupsize=256, bits=4, levels="codebook", codebook=None, scale_search=True, seed=0,
    scale_dtype=torch.float8_e4m3fn,
):  # fmt: skip
    check_float("weight", weight)
    if weight.dim() != 2:
        raise UnsupportedError(f"weight must be [N, K], got shape {list(weight.shape)}; flatten leading dims first")
    check_seed(seed)
    check_bits(bits)
    if levels not in W4A8_LEVELS:
        raise UnsupportedError(f"levels must be one of {', '.join(W4A8_LEVELS)}, got {levels!r}")
    if bits == 6 and levels == "asymmetric":
        raise UnsupportedError("6-bit weights are symmetric: levels='asymmetric' needs bits=4")
    if codebook is not None:
        if bits == 6 or levels != "codebook":
            raise UnsupportedError(
                f"a codebook belongs to bits=4, levels='codebook'; got bits={bits}, levels={levels!r}"
            )
        check_float("codebook", codebook)
        check_shape("codebook", codebook, (16,), "[16]")
    if scale_dtype not in (torch.float8_e4m3fn, torch.float32):
        raise UnsupportedError(f"scale_dtype must be float8_e4m3fn or float32, got {names((scale_dtype,))}")
    n, k = weight.shape
    check_w4a8_group(group_size, k, bits, f"{list(weight.shape)}")
    check_rotation_group(convrot_groupsize, k)
    check_same_device(weight, codebook=codebook)
    options = words(
        levels="none" if bits == 6 else levels, codebook=codebook, scale_search=bits == 6 and scale_search,
        stochastic=seed > 0, fp32_scales=scale_dtype == torch.float32,
    )  # fmt: skip
    return Problem(
        "quantize_w4a8_weight", weight.device, weight.dtype, torch.int8, n, 0, k, group_size, convrot_groupsize,
        bits=bits, options=options,
    )  # fmt: skip


def _quantize_fake(
    weight, group_size=16, convrot_groupsize=256, bits=4, levels="codebook", codebook=None, scale_search=True, seed=0,
    scale_dtype=torch.float8_e4m3fn,
):  # fmt: skip
    n, k = weight.shape
    groups = k // group_size
    return (
        weight.new_empty((n, k * bits // 8), dtype=torch.int8),
        weight.new_empty((n, groups), dtype=scale_dtype),
        weight.new_empty((n,), dtype=torch.float32),
        weight.new_empty((16 if bits == 4 and levels == "codebook" else 0,), dtype=torch.float32),
        weight.new_empty((groups, n) if levels == "asymmetric" else (0,)),
    )


def _decode_problem(weight, s_rel, codebook=None, group_size=16):
    n, k, bits = _check_weight(weight, s_rel, codebook, group_size)
    check_same_device(weight, s_rel=s_rel, codebook=codebook)
    options = words(codebook=codebook, fp32_scales=s_rel.dtype == torch.float32)
    return Problem(
        "decode_w4a8_weight", weight.device, torch.int8, torch.int8, n, 0, k, group_size, bits=bits, options=options
    )


def _decode_fake(weight, s_rel, codebook=None, group_size=16):
    return weight.new_empty((weight.shape[0], s_rel.shape[1] * group_size), dtype=torch.int8)


def _dequantize_problem(
    weight, s_rel, s_channel, codebook=None, correction=None, out_dtype=None, group_size=16, convrot_groupsize=0
):
    n, k, bits = _check_weight(weight, s_rel, codebook, group_size)
    _check_channel(s_channel, correction, None, n, k, bits, group_size)
    check_rotation_group(convrot_groupsize, k)
    check_same_device(weight, s_rel=s_rel, s_channel=s_channel, codebook=codebook, correction=correction)
    options = words(codebook=codebook, correction=correction, fp32_scales=s_rel.dtype == torch.float32)
    return Problem(
        "dequantize_w4a8_weight", weight.device, torch.int8, out_dtype or torch.float32, n, 0, k, group_size,
        convrot_groupsize, bits=bits, options=options,
    )  # fmt: skip


def _dequantize_fake(
    weight, s_rel, s_channel, codebook=None, correction=None, out_dtype=None, group_size=16, convrot_groupsize=0
):
    return weight.new_empty((weight.shape[0], s_rel.shape[1] * group_size), dtype=out_dtype or torch.float32)


def _scaled_mm_problem(
    codes, x_scale, weight, s_rel, s_channel, codebook=None, correction=None, bias=None, out_dtype=torch.bfloat16,
    group_size=16, residual=None, residual_scale=None,
):  # fmt: skip
    check_dtype("codes", codes, torch.int8)
    check_dtype("x_scale", x_scale, torch.float32)
    n, k, bits = _check_weight(weight, s_rel, codebook, group_size)
    _check_channel(s_channel, correction, bias, n, k, bits, group_size)
    if codes.dim() == 0 or codes.shape[-1] != k:
        raise UnsupportedError(f"codes must be [..., K={k}] to fit the weight, got shape {list(codes.shape)}")
    check_vector("x_scale", x_scale, rows(codes), "M")
    check_residual(codes, n, residual, residual_scale)
    check_same_device(
        codes, x_scale=x_scale, weight=weight, s_rel=s_rel, s_channel=s_channel, codebook=codebook,
        correction=correction, bias=bias, residual=residual, residual_scale=residual_scale,
    )  # fmt: skip
    options = words(
        codebook=codebook, correction=correction, bias=bias, residual=residual, fp32_scales=s_rel.dtype == torch.float32
    )
    return Problem(
        "w4a8_scaled_mm", codes.device, torch.int8, out_dtype, rows(codes), n, k, group_size, bits=bits, options=options
    )


def _scaled_mm_fake(
    codes, x_scale, weight, s_rel, s_channel, codebook=None, correction=None, bias=None, out_dtype=torch.bfloat16,
    *args, **kwargs,
):  # fmt: skip
    return codes.new_empty((*codes.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _linear_problem(
    x, weight, s_rel, s_channel, codebook=None, correction=None, bias=None, out_dtype=None, group_size=16,
    convrot_groupsize=0, input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None,
    residual_scale=None,
):  # fmt: skip
    n, k, bits = _check_weight(weight, s_rel, codebook, group_size)
    _check_channel(s_channel, correction, bias, n, k, bits, group_size)
    check_input_act(input_act, input_act_weight, k)
    check_x(x, k, input_act)
    check_rotation_group(convrot_groupsize, k)
    check_residual(x, n, residual, residual_scale)
    check_same_device(
        x, weight=weight, s_rel=s_rel, s_channel=s_channel, codebook=codebook, correction=correction, bias=bias,
        input_act_weight=input_act_weight, residual=residual, residual_scale=residual_scale,
    )  # fmt: skip
    options = words(
        codebook=codebook, correction=correction, bias=bias, input_act=input_act, residual=residual,
        fp32_scales=s_rel.dtype == torch.float32,
    )  # fmt: skip
    return Problem(
        "w4a8_linear", x.device, x.dtype, out_dtype or x.dtype, rows(x), n, k, group_size, convrot_groupsize,
        bits=bits, options=options,
    )  # fmt: skip


def _linear_fake(
    x, weight, s_rel, s_channel, codebook=None, correction=None, bias=None, out_dtype=None, *args, **kwargs
):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


# ------------------------------------------------------------------------------------------------ declarations

_ACTIVATION = "str input_act='none', Tensor? input_act_weight=None, float input_act_eps=0.0"
_RESIDUAL = "Tensor? residual=None, Tensor? residual_scale=None"
_WEIGHT = "Tensor weight, Tensor s_rel, Tensor s_channel, Tensor? codebook=None, Tensor? correction=None"

define(
    "quantize_w4a8_weight(Tensor weight, int group_size=16, int convrot_groupsize=256, int bits=4, "
    "str levels='codebook', Tensor? codebook=None, bool scale_search=True, int seed=0, "
    "ScalarType scale_dtype=float8_e4m3fn) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    problem=_quantize_problem, fake=_quantize_fake, reference=reference.quantize_w4a8_weight,
    sizes=check_sizes,
)  # fmt: skip
define(
    "decode_w4a8_weight(Tensor weight, Tensor s_rel, Tensor? codebook=None, int group_size=16) -> Tensor",
    problem=_decode_problem, fake=_decode_fake, reference=reference.decode_w4a8_weight,
    sizes=check_sizes,
)  # fmt: skip
define(
    f"dequantize_w4a8_weight({_WEIGHT}, ScalarType? out_dtype=None, int group_size=16, int convrot_groupsize=0) -> Tensor",
    problem=_dequantize_problem, fake=_dequantize_fake, reference=reference.dequantize_w4a8_weight,
    sizes=check_sizes,
)  # fmt: skip
define(
    f"w4a8_scaled_mm(Tensor codes, Tensor x_scale, {_WEIGHT}, Tensor? bias=None, ScalarType out_dtype=bfloat16, "
    f"int group_size=16, {_RESIDUAL}) -> Tensor",
    problem=_scaled_mm_problem, fake=_scaled_mm_fake, reference=reference.w4a8_scaled_mm,
    sizes=check_sizes,
)  # fmt: skip
define(
    f"w4a8_linear(Tensor x, {_WEIGHT}, Tensor? bias=None, ScalarType? out_dtype=None, int group_size=16, "
    f"int convrot_groupsize=0, {_ACTIVATION}, {_RESIDUAL}) -> Tensor",
    problem=_linear_problem, fake=_linear_fake, reference=reference.w4a8_linear,
    sizes=check_sizes,
)  # fmt: skip


def _composed_scaled_mm(
    codes, x_scale, weight, s_rel, s_channel, codebook=None, correction=None, bias=None, out_dtype=torch.bfloat16,
    group_size=16, residual=None, residual_scale=None,
):  # fmt: skip
    if correction is not None:  # an addend per output and row: no INT8 kernel takes one
        return reference.w4a8_scaled_mm(
            codes, x_scale, weight, s_rel, s_channel, codebook, correction, bias, out_dtype, group_size, residual,
            residual_scale,
        )  # fmt: skip
    decoded = torch.ops.kitchen.decode_w4a8_weight.default(weight, s_rel, codebook, group_size)
    return torch.ops.kitchen.int8_scaled_mm.default(
        codes, x_scale, decoded, s_channel, bias, out_dtype, residual, residual_scale
    )


def _composed_linear(
    x, weight, s_rel, s_channel, codebook=None, correction=None, bias=None, out_dtype=None, group_size=16,
    convrot_groupsize=0, input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None,
    residual_scale=None,
):  # fmt: skip
    codes, x_scale = torch.ops.kitchen.quantize_and_rotate_rowwise.default(
        x, convrot_groupsize, input_act, input_act_weight, input_act_eps
    )
    with fallback.codes_of(x.dtype, out_dtype or x.dtype):
        return torch.ops.kitchen.w4a8_scaled_mm.default(
            codes, x_scale, weight, s_rel, s_channel, codebook, correction, bias, out_dtype or x.dtype, group_size,
            residual, residual_scale,
        )  # fmt: skip


compose("w4a8_scaled_mm", _composed_scaled_mm, ("decode_w4a8_weight", "int8_scaled_mm"))
compose("w4a8_linear", _composed_linear, ("quantize_and_rotate_rowwise", "w4a8_scaled_mm"))


# -------------------------------------------------------------------------------------------- public functions


def quantize_w4a8_weight(
    weight: torch.Tensor,
    group_size: int = 16,
    convrot_groupsize: int = 256,
    bits: int = 4,
    levels: str = "codebook",
    codebook: torch.Tensor | None = None,
    scale_search: bool = True,
    seed: int = 0,
    scale_dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizedW4A8Weight:
    """Rotate a weight and quantize it to 4 or 6 bits whose decoded values lie on the INT8 grid of each row.

    ``levels`` (4 bits; 6 bits are always uniform): "codebook", the 16 entries of ``codebook`` or, where None, of the
    fixed or a fitted table, as the weight's distribution asks; "uniform", code - 8; "asymmetric", code - 8 and a
    correction per group. ``scale_search`` (6 bits) also tries each group scale's neighbours. ``seed`` > 0 rounds
    stochastically by a counter per element; the result depends on no chunk size and no device.

    Shapes: weight [N, K]; codebook [16].
    Dtypes and units: weight float32, float16 or bfloat16, finite; codebook any of them; ``scale_dtype`` float8_e4m3fn
        or float32.
    Layout: any strides; outputs are contiguous and in the rotated basis.
    Returns: qdata int8 [N, K*bits/8] (docs: packing), s_rel ``scale_dtype`` [N, K/g], s_channel float32 [N], codebook
        float32 [16] or None, correction [K/g, N] in the weight's dtype or None.
    Raises: UnsupportedError for a K, group, ConvRot group, width or combination that the format cannot hold.
    Devices: any.
    Source: docs/formats/asym_w4a8_int8.md.
    """
    qdata, s_rel, s_channel, table, correction = call(
        torch.ops.kitchen.quantize_w4a8_weight.default,
        weight,
        group_size,
        convrot_groupsize,
        bits,
        levels,
        codebook,
        scale_search,
        seed,
        scale_dtype,
    )
    has_table = bits == 4 and levels == "codebook"
    return QuantizedW4A8Weight(
        qdata, s_rel, s_channel, table if has_table else None, correction if levels == "asymmetric" else None
    )


def decode_w4a8_weight(
    weight: torch.Tensor, s_rel: torch.Tensor, codebook: torch.Tensor | None = None, group_size: int = 16
) -> torch.Tensor:
    """The INT8 codes that a 4-bit or 6-bit weight stands for: clamp(RNE(fp32(level * s_rel)), -127, 127).

    Shapes: weight [N, K/2] or [N, 3K/4]; s_rel [N, K/g]; codebook [16] (None: level = code - 8; 6 bits: code - 32).
    Dtypes and units: weight int8; s_rel float8_e4m3fn, the same as uint8, or float32, finite; codebook float.
    Layout: any strides; the output is contiguous.
    Returns: int8 [N, K] in the rotated basis; times s_channel it is the weight (without correction).
    Raises: UnsupportedError for shapes, dtypes or a group that do not fit each other.
    Devices: any.
    Source: docs/formats/asym_w4a8_int8.md.
    """
    return call(torch.ops.kitchen.decode_w4a8_weight.default, weight, s_rel, codebook, group_size)


def dequantize_w4a8_weight(
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    s_channel: torch.Tensor,
    codebook: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group_size: int = 16,
    convrot_groupsize: int = 0,
) -> torch.Tensor:
    """The dense weight: decoded, scaled, corrected and un-rotated in fp32, rounded once.

    Shapes: weight [N, K/2] or [N, 3K/4]; s_rel [N, K/g]; s_channel N elements; codebook [16]; correction [K/g, N].
    Dtypes and units: weight int8; s_rel float8_e4m3fn, the same as uint8, or float32; s_channel float32, multiply to
        dequantize; codebook and correction float.
    Layout: any strides. ``convrot_groupsize`` is the weight's own (0 = not rotated); it is never guessed.
    Returns: ``out_dtype`` (float32 where None) [N, K].
    Raises: UnsupportedError for shapes, dtypes or groups that do not fit each other.
    Devices: any.
    Source: docs/formats/asym_w4a8_int8.md.
    """
    return call(
        torch.ops.kitchen.dequantize_w4a8_weight.default,
        weight,
        s_rel,
        s_channel,
        codebook,
        correction,
        out_dtype,
        group_size,
        convrot_groupsize,
    )


def w4a8_scaled_mm(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    s_channel: torch.Tensor,
    codebook: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    group_size: int = 16,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The second half of w4a8_linear, for activations that are quantized already.

    Shapes: codes [..., K]; x_scale [..., 1]; weight [N, K/2] or [N, 3K/4]; s_rel [N, K/g]; s_channel N elements;
        codebook [16]; correction [K/g, N]; bias [N]; residual [..., N]; residual_scale [1] or [N].
    Dtypes and units: codes and weight int8; x_scale and s_channel float32, multiply to dequantize; s_rel float8_e4m3fn,
        the same as uint8, or float32; codebook, correction, bias and residual float.
    Layout: any strides; the rotation of codes must be the weight's.
    Returns: ``out_dtype`` [..., N]: residual + residual_scale * (codes @ weight.T * scales + bias), one rounding.
    Raises: UnsupportedError for shapes or dtypes that do not fit.
    Devices: any.
    Source: docs/formats/asym_w4a8_int8.md; order of operations: ``reference/w4a8.py``.
    """
    return call(
        torch.ops.kitchen.w4a8_scaled_mm.default,
        codes, x_scale, weight, s_rel, s_channel, codebook, correction, bias, out_dtype, group_size, residual,
        residual_scale,
    )  # fmt: skip


def w4a8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    s_channel: torch.Tensor,
    codebook: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group_size: int = 16,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """W4A8 or W6A8 linear: int8_linear whose INT8 weight is decoded from 4-bit or 6-bit codes.

    Shapes: x [..., K], or [..., 2K] for swiglu and situ; weight [N, K/2] (4 bits) or [N, 3K/4] (6 bits); s_rel [N, K/g];
        s_channel N elements; codebook [16]; correction [K/g, N]; bias [N]; residual [..., N]; residual_scale 1 or N.
    Dtypes and units: x float32, float16 or bfloat16; weight int8; s_rel float8_e4m3fn, the same as uint8, or float32;
        s_channel float32, multiply to dequantize; codebook and correction float.
    Layout: any strides. ``convrot_groupsize`` is the weight's own (0 = not rotated); it is never guessed.
    Returns: ``out_dtype`` (x's where None) [..., N], rounded once. A row of x with inf or NaN gives a row of NaN.
    Raises: UnsupportedError for shapes, dtypes, devices or activations that do not fit.
    Devices: any. Differentiable in x, bias and residual (straight through).
    Source: docs/formats/asym_w4a8_int8.md; order of operations: ``reference/w4a8.py``.
    """
    op = torch.ops.kitchen.w4a8_linear.default
    if wants_grad(x, bias, residual, residual_scale, input_act_weight):

        def run(h, bias, residual, residual_scale):
            return op(
                h, weight, s_rel, s_channel, codebook, correction, bias, out_dtype or x.dtype, group_size,
                convrot_groupsize, "none", None, 0.0, residual, residual_scale,
            )  # fmt: skip

        def dense_weight():
            return dequantize_w4a8_weight(
                weight, s_rel, s_channel, codebook, correction, None, group_size, convrot_groupsize
            )

        return linear_call(
            x, bias, input_act, input_act_weight, input_act_eps, residual, residual_scale, run, dense_weight,
            (weight, s_rel, s_channel, codebook, correction),
        )  # fmt: skip
    check_constant(weight, s_rel, s_channel, codebook, correction)
    return op(
        x, weight, s_rel, s_channel, codebook, correction, bias, out_dtype, group_size, convrot_groupsize, input_act,
        input_act_weight, input_act_eps, residual, residual_scale,
    )  # fmt: skip
