"""The AWQ ops: schemas, checks and fakes, and the public functions of the same names."""

from __future__ import annotations

import torch

from ..errors import UnsupportedError
from ..reference import awq as reference
from ..registry import Problem
from ._autograd import check_constant, linear_call, wants_grad
from ._check import (
    FLOAT_DTYPES,
    check_dtype,
    check_float,
    check_four_bits,
    check_input_act,
    check_part,
    check_residual,
    check_same_device,
    check_shape,
    check_x,
    names,
    rows,
    words,
)
from ._define import define
from ._forward_mode import call

__all__ = ["awq_linear", "dequantize_awq", "gemv_awq_w4a16"]


# ---------------------------------------------------------------------------------------------------- checks


def _check_scales(name: str, tensor: torch.Tensor, n: int, k: int, group_size: int) -> None:
    check_float(name, tensor)
    groups = k // group_size
    if tuple(tensor.shape) == (groups, n):
        return
    hint = ""
    if tensor.dim() == 2 and tensor.shape[1] == n and tensor.shape[0] and k % tensor.shape[0] == 0:
        hint = f"; {tensor.shape[0]} rows fit group_size {k // tensor.shape[0]}"
    raise UnsupportedError(
        f"{name} must have shape [K/g, N] = {[groups, n]} for group_size {group_size}, got {list(tensor.shape)}{hint}"
    )


def _check_group(group_size: int, k: int) -> None:
    if k == 0 or k % 2:
        raise UnsupportedError(f"in_features K must be even and positive, as two codes share a byte, got K={k}")
    if group_size < 1 or k % group_size:
        raise UnsupportedError(
            f"group_size must be a positive divisor of in_features K={k}, got {group_size}; one group for a whole row is "
            f"group_size {k}"
        )


def _check_sizes(problem: Problem) -> None:
    _check_group(problem.group, problem.K)
    check_four_bits(problem)


def _check_weight(qweight, wscales, wzeros, group_size) -> tuple[int, int]:
    check_dtype("qweight", qweight, torch.int8)
    if qweight.dim() != 2:
        raise UnsupportedError(f"qweight must be int8 [N, K/2], got shape {list(qweight.shape)}")
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    _check_group(group_size, k)
    _check_scales("wscales", wscales, n, k, group_size)
    _check_scales("wzeros", wzeros, n, k, group_size)
    return n, k


def _check_decoded(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise UnsupportedError(f"{name} must be one of {names(FLOAT_DTYPES)}, got {names((dtype,))}")


def _scales_type(wscales: torch.Tensor, wzeros: torch.Tensor) -> str:
    """The type in which kernels take scales and zeros: where the two differ, both are widened to float32."""
    return names((wscales.dtype if wscales.dtype == wzeros.dtype else torch.float32,))


def _dequantize_problem(qweight, wscales, wzeros, group_size=64, out_dtype=None):
    n, k = _check_weight(qweight, wscales, wzeros, group_size)
    _check_decoded("out_dtype", out_dtype)
    check_same_device(qweight, wscales=wscales, wzeros=wzeros)
    options = words(scales=_scales_type(wscales, wzeros))
    return Problem(
        "dequantize_awq", qweight.device, torch.int8, out_dtype or torch.float32, 0, n, k, group=group_size, bits=4,
        options=options,
    )  # fmt: skip


def _dequantize_fake(qweight, wscales, wzeros, group_size=64, out_dtype=None):
    return qweight.new_empty((qweight.shape[0], 2 * qweight.shape[1]), dtype=out_dtype or torch.float32)


def _linear_problem(
    x, qweight, wscales, wzeros, bias=None, group_size=64, out_dtype=None,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None, weight_dtype=None,
    part_first=None, part_of=None,
):  # fmt: skip
    n, k = _check_weight(qweight, wscales, wzeros, group_size)
    _check_decoded("weight_dtype", weight_dtype)
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, (n,), "[N]")
    check_input_act(input_act, input_act_weight, k)
    check_x(x, k, input_act)
    check_residual(x, n, residual, residual_scale)
    check_same_device(
        x, qweight=qweight, wscales=wscales, wzeros=wzeros, bias=bias, input_act_weight=input_act_weight,
        residual=residual, residual_scale=residual_scale,
    )  # fmt: skip
    decoded = None if weight_dtype in (None, x.dtype) else names((weight_dtype,))
    options = words(
        bias=bias, input_act=input_act, residual=residual, scales=_scales_type(wscales, wzeros), weight_dtype=decoded
    )
    return Problem(
        "awq_linear", x.device, x.dtype, out_dtype or x.dtype, rows(x), n, k, group=group_size, bits=4, options=options,
        part=check_part(n, part_first, part_of),
    )  # fmt: skip


def _linear_fake(x, qweight, wscales, wzeros, bias=None, group_size=64, out_dtype=None, *args, **kwargs):
    return x.new_empty((*x.shape[:-1], qweight.shape[0]), dtype=out_dtype or x.dtype)


# ---------------------------------------------------------------------------------------------- declarations

define(
    "dequantize_awq(Tensor qweight, Tensor wscales, Tensor wzeros, int group_size=64, ScalarType? out_dtype=None) "
    "-> Tensor",
    problem=_dequantize_problem, fake=_dequantize_fake, reference=reference.dequantize_awq,
    sizes=_check_sizes,
)  # fmt: skip
define(
    "awq_linear(Tensor x, Tensor qweight, Tensor wscales, Tensor wzeros, Tensor? bias=None, int group_size=64, "
    "ScalarType? out_dtype=None, str input_act='none', Tensor? input_act_weight=None, float input_act_eps=0.0, "
    "Tensor? residual=None, Tensor? residual_scale=None, ScalarType? weight_dtype=None, int? part_first=None, "
    "int? part_of=None) -> Tensor",
    problem=_linear_problem, fake=_linear_fake, reference=reference.awq_linear, sizes=_check_sizes,
)  # fmt: skip


# ------------------------------------------------------------------------------------------- public functions


def dequantize_awq(
    qweight: torch.Tensor,
    wscales: torch.Tensor,
    wzeros: torch.Tensor,
    group_size: int = 64,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The dense weight: fma(q - 8, scale, zero) in fp32, rounded once.

    Shapes: qweight [N, K/2]; wscales and wzeros [K/g, N].
    Dtypes and units: qweight int8, two codes 0..15 a byte; wscales and wzeros float32, float16 or bfloat16.
    Layout: any strides. ``group_size`` g is any divisor of K; g = K is one scale a row.
    Returns: ``out_dtype`` (float32 where None) [N, K].
    Raises: UnsupportedError for a group that does not divide K, or scales of another shape (the group that would fit is
        named).
    Devices: any.
    Source: docs/formats/awq_w4a16.md.
    """
    return call(torch.ops.kitchen.dequantize_awq.default, qweight, wscales, wzeros, group_size, out_dtype)


def awq_linear(
    x: torch.Tensor,
    qweight: torch.Tensor,
    wscales: torch.Tensor,
    wzeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    group_size: int = 64,
    out_dtype: torch.dtype | None = None,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    weight_dtype: torch.dtype | None = None,
    part_first: int | None = None,
    part_of: int | None = None,
) -> torch.Tensor:
    """AWQ W4A16 linear: x @ W.T + bias with W decoded from 4 bits, accumulated in fp32.

    Shapes: x [..., K], or [..., 2K] for swiglu and situ; qweight [N, K/2]; wscales and wzeros [K/g, N]; bias [N];
        residual [..., N]; residual_scale 1 or N elements.
    Dtypes and units: x float32, float16 or bfloat16; qweight int8, two codes 0..15 a byte; wscales and wzeros float;
        W = (q - 8) * scale + zero, zero being a float.
    Layout: any strides; ``group_size`` g is any divisor of K. ``part_first`` and ``part_of``, for weights that are divided
        by outputs: the N rows are those from ``part_first`` on of a weight of ``part_of`` rows, and fused kernels add in
        the order in which they would for the whole, where both numbers and N are multiples of 8: bit for bit its outputs.
    Returns: ``out_dtype`` (x's where None) [..., N], rounded once. The weight decodes to ``weight_dtype``, x's dtype
        where None: with float16 or bfloat16 x it is rounded to that dtype, with float32 x it is not rounded. A row of x
        with inf or NaN spoils that row alone.
    Raises: UnsupportedError for shapes, dtypes, devices, groups or activations that do not fit.
    Devices: any. Differentiable in x, bias and residual.
    Source: docs/formats/awq_w4a16.md.
    """
    op = torch.ops.kitchen.awq_linear.default
    decoded = weight_dtype or x.dtype
    if wants_grad(x, bias, residual, residual_scale, input_act_weight):

        def run(h, bias, residual, residual_scale):
            return op(
                h, qweight, wscales, wzeros, bias, group_size, out_dtype or x.dtype, "none", None, 0.0, residual,
                residual_scale, decoded, part_first, part_of,
            )  # fmt: skip

        def dense_weight():
            return dequantize_awq(qweight, wscales, wzeros, group_size, decoded)

        return linear_call(
            x, bias, input_act, input_act_weight, input_act_eps, residual, residual_scale, run, dense_weight,
            (qweight, wscales, wzeros),
        )  # fmt: skip
    check_constant(qweight, wscales, wzeros)
    return op(
        x, qweight, wscales, wzeros, bias, group_size, out_dtype, input_act, input_act_weight, input_act_eps, residual,
        residual_scale, weight_dtype, part_first, part_of,
    )  # fmt: skip


gemv_awq_w4a16 = awq_linear  # the name that other toolkits know it by; any number of rows is taken
