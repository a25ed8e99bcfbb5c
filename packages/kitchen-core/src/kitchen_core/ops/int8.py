"""The INT8 linears: schemas, checks and fakes, and the public functions of the same names."""

from __future__ import annotations

from functools import partial

import torch

from .. import fallback
from ..arithmetic import check_rotation_group
from ..errors import UnsupportedError
from ..reference import int8 as reference
from ..registry import Problem
from ._autograd import check_constant, linear_call, wants_grad
from ._check import (
    ACTIVATION_SCHEMA,
    check_dtype,
    check_float,
    check_input_act,
    check_residual,
    check_same_device,
    check_shape,
    check_vector,
    check_x,
    loose,
    rows,
    words,
)
from ._define import compose, define, define_around
from ._forward_mode import call
from .quantize import check_rotation, dequantize_int8

# ---------------------------------------------------------------------------------------------------- linears


def _check_weight(weight, weight_scale, bias):
    check_dtype("weight", weight, torch.int8)
    if weight.dim() != 2:
        raise UnsupportedError(f"weight must be int8 [N, K], got shape {list(weight.shape)}")
    check_dtype("weight_scale", weight_scale, torch.float32)
    check_vector("weight_scale", weight_scale, weight.shape[0], "N", scalar=True)
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, (weight.shape[0],), "[N]")


def _linear_problem(
    x, weight, weight_scale, bias=None, out_dtype=None, convrot_groupsize=0,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    *, op="int8_linear", **flags,
):  # fmt: skip
    _check_weight(weight, weight_scale, bias)
    n, k = weight.shape
    check_input_act(input_act, input_act_weight, k)
    check_x(x, k, input_act)
    check_rotation_group(convrot_groupsize, k)
    check_residual(x, n, residual, residual_scale)
    check_same_device(
        x, weight=weight, weight_scale=weight_scale, bias=bias, input_act_weight=input_act_weight, residual=residual,
        residual_scale=residual_scale,
    )  # fmt: skip
    options = words(bias=bias, input_act=input_act, residual=residual, loose_weight=loose(weight), **flags)
    return Problem(
        op, x.device, x.dtype, out_dtype or x.dtype, rows(x), n, k, rotation=convrot_groupsize, options=options
    )


def _linear_fake(x, weight, weight_scale, bias=None, out_dtype=None, *args, **kwargs):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


def _linear_fp16_problem(*args, fp16_activations=False, **kwargs):
    *args, fp16_activations = args if len(args) == 12 else (*args, fp16_activations)
    return _linear_problem(*args, **kwargs, op="int8_linear_fp16", fp16_activations=fp16_activations)


def _scaled_mm_problem(
    codes, x_scale, weight, weight_scale, bias=None, out_dtype=torch.bfloat16, residual=None, residual_scale=None
):
    check_dtype("codes", codes, torch.int8)
    check_dtype("x_scale", x_scale, torch.float32)
    _check_weight(weight, weight_scale, bias)
    n, k = weight.shape
    if codes.dim() == 0 or codes.shape[-1] != k:
        raise UnsupportedError(f"codes must be [..., K={k}] to fit the weight, got shape {list(codes.shape)}")
    check_vector("x_scale", x_scale, rows(codes), "M")
    check_residual(codes, n, residual, residual_scale)
    check_same_device(
        codes, x_scale=x_scale, weight=weight, weight_scale=weight_scale, bias=bias, residual=residual,
        residual_scale=residual_scale,
    )  # fmt: skip
    options = words(bias=bias, residual=residual, loose_weight=loose(weight), loose_codes=loose(codes))
    return Problem("int8_scaled_mm", codes.device, torch.int8, out_dtype, rows(codes), n, k, options=options)


def _scaled_mm_fake(codes, x_scale, weight, weight_scale, bias=None, out_dtype=torch.bfloat16, *args, **kwargs):
    return codes.new_empty((*codes.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _swiglu_problem(
    x, gate_up_weight, gate_up_scale, down_weight, down_scale, gate_up_bias=None, down_bias=None,
    out_dtype=None, convrot_groupsize=0, down_convrot_groupsize=0,
):  # fmt: skip
    _check_weight(gate_up_weight, gate_up_scale, gate_up_bias)
    _check_weight(down_weight, down_scale, down_bias)
    if gate_up_weight.shape[0] != 2 * down_weight.shape[1]:
        raise UnsupportedError(
            f"gate_up_weight has {gate_up_weight.shape[0]} rows, down_weight takes K={down_weight.shape[1]}; "
            "gate_up must hold the gate rows and then the up rows, 2K in all"
        )
    check_x(x, gate_up_weight.shape[1])
    check_rotation_group(convrot_groupsize, gate_up_weight.shape[1])
    check_rotation_group(down_convrot_groupsize, down_weight.shape[1])
    check_same_device(
        x, gate_up_weight=gate_up_weight, gate_up_scale=gate_up_scale, down_weight=down_weight, down_scale=down_scale,
        gate_up_bias=gate_up_bias, down_bias=down_bias,
    )  # fmt: skip
    return Problem(
        "int8_swiglu_mlp", x.device, x.dtype, out_dtype or x.dtype, rows(x), down_weight.shape[0], x.shape[-1],
        group=down_convrot_groupsize, rotation=convrot_groupsize,
        options=words(gate_up_bias=gate_up_bias, down_bias=down_bias),
    )  # fmt: skip


def _gate_up_problem(
    x, gate_weight, gate_scale, up_weight, up_scale, down_weight, down_scale, gate_bias=None, up_bias=None,
    down_bias=None, out_dtype=None, convrot_groupsize=0, down_convrot_groupsize=0,
):  # fmt: skip
    _check_weight(gate_weight, gate_scale, gate_bias)
    _check_weight(up_weight, up_scale, up_bias)
    _check_weight(down_weight, down_scale, down_bias)
    if gate_weight.shape != up_weight.shape or gate_weight.shape[0] != down_weight.shape[1]:
        raise UnsupportedError(
            f"gate_weight is {list(gate_weight.shape)}, up_weight {list(up_weight.shape)}, down_weight "
            f"{list(down_weight.shape)}; they must be [I, K], [I, K] and [N, I]"
        )
    check_x(x, gate_weight.shape[1])
    check_rotation_group(convrot_groupsize, gate_weight.shape[1])
    check_rotation_group(down_convrot_groupsize, down_weight.shape[1])
    check_same_device(
        x, gate_weight=gate_weight, gate_scale=gate_scale, up_weight=up_weight, up_scale=up_scale,
        down_weight=down_weight, down_scale=down_scale, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias,
    )  # fmt: skip
    return Problem(
        "int8_gate_up_mlp", x.device, x.dtype, out_dtype or x.dtype, rows(x), down_weight.shape[0], x.shape[-1],
        group=down_convrot_groupsize, rotation=convrot_groupsize,
        options=words(gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias),
    )  # fmt: skip


def _check_rotations(problem: Problem) -> None:
    check_rotation(problem)
    check_rotation_group(problem.group, 0)  # of the second weight, whose K is no field


def _gate_up_fake(x, gate_weight, gate_scale, up_weight, up_scale, down_weight, down_scale, *args, **kwargs):
    out_dtype = args[3] if len(args) > 3 else kwargs.get("out_dtype")
    return x.new_empty((*x.shape[:-1], down_weight.shape[0]), dtype=out_dtype or x.dtype)


def _swiglu_fake(x, gate_up_weight, gate_up_scale, down_weight, down_scale, *args, **kwargs):
    out_dtype = args[2] if len(args) > 2 else kwargs.get("out_dtype")
    return x.new_empty((*x.shape[:-1], down_weight.shape[0]), dtype=out_dtype or x.dtype)


# ---------------------------------------------------------------------------------------------- declarations

_RESIDUAL = "Tensor? residual=None, Tensor? residual_scale=None"
_LINEAR = (
    "(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None, ScalarType? out_dtype=None, "
    f"int convrot_groupsize=0, {ACTIVATION_SCHEMA}, {_RESIDUAL}"
)

define(
    "int8_scaled_mm(Tensor codes, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias=None, "
    f"ScalarType out_dtype=bfloat16, {_RESIDUAL}) -> Tensor",
    problem=_scaled_mm_problem, fake=_scaled_mm_fake, reference=reference.int8_scaled_mm,
)  # fmt: skip
define(
    f"int8_linear{_LINEAR}) -> Tensor",
    problem=_linear_problem, fake=_linear_fake, reference=reference.int8_linear, sizes=check_rotation,
)  # fmt: skip


def _linear_asked(fp16_fallback, *args, **kwargs):
    with fallback.fp16_fallback(fp16_fallback):
        return torch.ops.kitchen.int8_linear.default(*args, **kwargs)


def _linear_asked_fake(fp16_fallback, *args, **kwargs):
    _linear_problem(*args, **kwargs)
    return _linear_fake(*args, **kwargs)


# int8_linear with its caller's word on FP16: an op, because a traced function cannot set a context variable.
define_around(
    f"int8_linear_asked(bool fp16_fallback, {_LINEAR[1:]}) -> Tensor", function=_linear_asked, fake=_linear_asked_fake
)
define(
    f"int8_linear_fp16{_LINEAR}, bool fp16_activations=False) -> Tensor",
    problem=_linear_fp16_problem, fake=_linear_fake, reference=reference.int8_linear_fp16, sizes=check_rotation,
)  # fmt: skip
define(
    "int8_swiglu_mlp(Tensor x, Tensor gate_up_weight, Tensor gate_up_scale, Tensor down_weight, Tensor down_scale, "
    "Tensor? gate_up_bias=None, Tensor? down_bias=None, ScalarType? out_dtype=None, int convrot_groupsize=0, "
    "int down_convrot_groupsize=0) -> Tensor",
    problem=_swiglu_problem, fake=_swiglu_fake, reference=reference.int8_swiglu_mlp, sizes=_check_rotations,
)  # fmt: skip

define(
    "int8_gate_up_mlp(Tensor x, Tensor gate_weight, Tensor gate_scale, Tensor up_weight, Tensor up_scale, "
    "Tensor down_weight, Tensor down_scale, Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, "
    "ScalarType? out_dtype=None, int convrot_groupsize=0, int down_convrot_groupsize=0) -> Tensor",
    problem=_gate_up_problem, fake=_gate_up_fake, reference=reference.int8_gate_up_mlp, sizes=_check_rotations,
)  # fmt: skip


def _composed_linear(
    x, weight, weight_scale, bias=None, out_dtype=None, convrot_groupsize=0,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
):  # fmt: skip
    codes, x_scale = torch.ops.kitchen.quantize_and_rotate_rowwise.default(
        x, convrot_groupsize, input_act, input_act_weight, input_act_eps
    )
    out_dtype = out_dtype or x.dtype
    with fallback.codes_of(x.dtype, out_dtype):
        return torch.ops.kitchen.int8_scaled_mm.default(
            codes, x_scale, weight, weight_scale, bias, out_dtype, residual, residual_scale
        )


def _composed_swiglu_mlp(
    x, gate_up_weight, gate_up_scale, down_weight, down_scale, gate_up_bias=None, down_bias=None,
    out_dtype=None, convrot_groupsize=0, down_convrot_groupsize=0,
):  # fmt: skip
    linear = torch.ops.kitchen.int8_linear.default
    hidden = linear(x, gate_up_weight, gate_up_scale, gate_up_bias, None, convrot_groupsize)
    return linear(hidden, down_weight, down_scale, down_bias, out_dtype or x.dtype, down_convrot_groupsize, "swiglu")


def _composed_gate_up_mlp(
    x, gate_weight, gate_scale, up_weight, up_scale, down_weight, down_scale, gate_bias=None, up_bias=None,
    down_bias=None, out_dtype=None, convrot_groupsize=0, down_convrot_groupsize=0,
):  # fmt: skip
    stacked = reference.stacked_gate_up((gate_weight, gate_scale, gate_bias), (up_weight, up_scale, up_bias))
    if stacked is not None:
        weight, scale, bias = stacked
        return torch.ops.kitchen.int8_swiglu_mlp.default(
            x, weight, scale, down_weight, down_scale, bias, down_bias, out_dtype, convrot_groupsize,
            down_convrot_groupsize,
        )  # fmt: skip
    mm = torch.ops.kitchen.int8_scaled_mm.default
    codes, x_scale = torch.ops.kitchen.quantize_and_rotate_rowwise.default(x, convrot_groupsize)
    gate = mm(codes, x_scale, gate_weight, gate_scale, gate_bias, x.dtype)
    hidden = torch.nn.functional.silu(gate) * mm(codes, x_scale, up_weight, up_scale, up_bias, x.dtype)
    return torch.ops.kitchen.int8_linear.default(
        hidden, down_weight, down_scale, down_bias, out_dtype or x.dtype, down_convrot_groupsize
    )


compose("int8_linear", _composed_linear, ("quantize_and_rotate_rowwise", "int8_scaled_mm"))
compose("int8_swiglu_mlp", _composed_swiglu_mlp, ("int8_linear",))
compose("int8_gate_up_mlp", _composed_gate_up_mlp, ("int8_swiglu_mlp", "int8_linear", "int8_scaled_mm"))


# ------------------------------------------------------------------------------------------- public functions


def int8_scaled_mm(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The second half of int8_linear, for activations that are quantized already.

    Shapes: codes [..., K]; x_scale [..., 1]; weight [N, K]; weight_scale [1] or [N] in any shape; bias [N];
        residual [..., N]; residual_scale [1] or [N].
    Dtypes and units: codes and weight int8; scales float32, multiply to dequantize; bias and residual float.
    Layout: any strides; the rotation of codes must be the weight's.
    Returns: ``out_dtype`` [..., N]: residual + residual_scale * (codes @ weight.T * scales + bias), one rounding.
    Raises: UnsupportedError for shapes or dtypes that do not fit.
    Devices: any; CUDA kernels in kitchen-int8.
    Source: docs/formats/int8_tensorwise.md; order of operations: ``arithmetic.py``.
    """
    return call(
        torch.ops.kitchen.int8_scaled_mm.default,
        codes,
        x_scale,
        weight,
        weight_scale,
        bias,
        out_dtype,
        residual,
        residual_scale,
    )


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    fp16_fallback: bool | None = None,
) -> torch.Tensor:
    """INT8 W8A8 linear: activation, ConvRot, dynamic rowwise quantization of x, exact INT32 GEMM, scales, bias, residual.

    Shapes: x [..., K], or [..., 2K] for swiglu and situ; weight [N, K]; weight_scale 1 or N elements; bias [N];
        residual [..., N]; residual_scale 1 or N elements (None means 1).
    Dtypes and units: x float32, float16 or bfloat16; weight int8; weight_scale float32, multiply to dequantize.
    Layout: any strides. ``convrot_groupsize`` is the weight's own (0 = not rotated); it is never guessed.
    Returns: ``out_dtype`` (x's where None) [..., N], rounded once. A row of x with inf or NaN gives a row of NaN.
    Raises: UnsupportedError for shapes, dtypes, devices or activations that do not fit.
    Devices: any; CUDA kernels in kitchen-int8. Differentiable in x, bias and residual (straight through).
        ``fp16_fallback=False`` keeps this call on the INT8 path of a GPU without INT8 tensor cores, where
        kitchen-fallback-volta would run it as an FP16 GEMM of the same bits; None leaves that to the block
        (``kitchen_core.fp16_fallback``) or to KITCHEN_INT8_FP16_FALLBACK.
    Source: docs/formats/int8_tensorwise.md.
    """
    op = torch.ops.kitchen.int8_linear.default
    if fp16_fallback is not None:
        if not isinstance(fp16_fallback, bool):
            raise UnsupportedError(f"fp16_fallback must be True, False or None, got {fp16_fallback!r}")
        op = partial(torch.ops.kitchen.int8_linear_asked.default, fp16_fallback)
    if wants_grad(x, bias, residual, residual_scale, input_act_weight):

        def run(h, bias, residual, residual_scale):
            return op(
                h, weight, weight_scale, bias, out_dtype or x.dtype, convrot_groupsize, "none", None, 0.0, residual,
                residual_scale,
            )  # fmt: skip

        def dense_weight():
            return dequantize_int8(weight, weight_scale, convrot_groupsize=convrot_groupsize)

        return linear_call(
            x, bias, input_act, input_act_weight, input_act_eps, residual, residual_scale, run, dense_weight,
            (weight, weight_scale),
        )  # fmt: skip
    check_constant(weight, weight_scale)
    if (
        input_act == "none" and input_act_weight is residual is residual_scale is None
    ):  # fewer arguments cost less host time
        return op(x, weight, weight_scale, bias, out_dtype, convrot_groupsize)
    return op(
        x, weight, weight_scale, bias, out_dtype, convrot_groupsize, input_act, input_act_weight, input_act_eps,
        residual, residual_scale,
    )  # fmt: skip


def int8_linear_fp16(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    fp16_activations: bool = False,
) -> torch.Tensor:
    """int8_linear for GPUs with FP16 but no INT8 tensor cores: the same codes, multiplied as FP16 integers.

    Shapes: as int8_linear.
    Dtypes and units: as int8_linear. With ``fp16_activations`` x is not quantized but kept in fp16, each row scaled by
        a power of two: more accurate, and no longer equal to int8_linear.
    Layout: as int8_linear.
    Returns: as int8_linear; bit-equal to it unless ``fp16_activations``.
    Raises: UnsupportedError as int8_linear.
    Devices: any; a kernel for sm_70 is in kitchen-fallback-volta. Inference only.
    Source: docs/formats/int8_tensorwise.md.
    """
    return call(
        torch.ops.kitchen.int8_linear_fp16.default,
        x, weight, weight_scale, bias, out_dtype, convrot_groupsize, input_act, input_act_weight, input_act_eps,
        residual, residual_scale, fp16_activations,
    )  # fmt: skip


def int8_swiglu_mlp(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
    down_convrot_groupsize: int = 0,
) -> torch.Tensor:
    """The SwiGLU MLP of two INT8 linears: down(silu(gate(x)) * up(x)), gate and up stacked in one weight.

    Shapes: x [..., K]; gate_up_weight [2I, K], gate rows first; gate_up_scale [2I, 1]; down_weight [N, I];
        down_scale [N, 1]; gate_up_bias [2I]; down_bias [N].
    Dtypes and units: as int8_linear; the 2I-wide intermediate has x's dtype. A kernel may keep it in fp32 and round
        the I-wide product instead (int8/swiglu_sm90 does): no less accurate, other bits.
    Layout: any strides; each weight's own ConvRot group.
    Returns: ``out_dtype`` (x's where None) [..., N].
    Raises: UnsupportedError for shapes or dtypes that do not fit.
    Devices: any. Inference only.
    Source: docs/formats/int8_tensorwise.md.
    """
    return call(
        torch.ops.kitchen.int8_swiglu_mlp.default,
        x, gate_up_weight, gate_up_scale, down_weight, down_scale, gate_up_bias, down_bias, out_dtype,
        convrot_groupsize, down_convrot_groupsize,
    )  # fmt: skip


def int8_gate_up_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_scale: torch.Tensor,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
    down_convrot_groupsize: int = 0,
) -> torch.Tensor:
    """The SwiGLU MLP from gate and up apart: int8_swiglu_mlp on both together where they lie in one storage.

    Shapes: x [..., K]; gate_weight and up_weight [I, K]; their scales [I, 1] and biases [I]; down_weight [N, I];
        down_scale [N, 1]; down_bias [N].
    Dtypes and units: as int8_linear. Where gate and up are not stacked, silu, product and each linear round to x's
        dtype, bit for bit as three separate modules do.
    Layout: any strides. Stacked means that up's weight, scale and bias each follow gate's in the same storage
        (``kitchen_int8.pack_gate_up``); it is looked at on every call, and no copy is made.
    Returns: ``out_dtype`` (x's where None) [..., N].
    Raises: UnsupportedError for shapes or dtypes that do not fit.
    Devices: any. Inference only.
    Source: docs/formats/int8_tensorwise.md.
    """
    return call(
        torch.ops.kitchen.int8_gate_up_mlp.default,
        x, gate_weight, gate_scale, up_weight, up_scale, down_weight, down_scale, gate_bias, up_bias, down_bias,
        out_dtype, convrot_groupsize, down_convrot_groupsize,
    )  # fmt: skip
