"""Linears of weights in the resident layout: ops around w4a8_linear and w4a8_scaled_mm.

They are those ops on other bytes, and choose among the same kernels, for a problem that says "resident". One kernel reads that
layout; for what it does not take the weight is unpacked, and the op itself runs.
"""

from __future__ import annotations

import torch

from kitchen_core import _overrides, ops
from kitchen_core.devices import device_facts
from kitchen_core.launch import current_stream
from kitchen_core.ops._autograd import wants_grad
from kitchen_core.ops._define import define_around, problem_builders
from kitchen_core.registry import Kernel, Problem, overridden, remember, remembered, select

from . import _launch, resident
from ._extension import EXTENSION
from .kernels import RESIDENT
from .resident import Shape

KERNEL = "w4a8/resident"  # that reads the layout


def views(records: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of contiguous records in the shapes of codes and scales, one behind the other; their values mean nothing."""
    first, row, groups = records.storage_offset(), shape.code_bytes, shape.k // shape.group
    codes = records.as_strided((shape.n, row), (row, 1), first)
    return codes, records.as_strided((shape.n, groups), (groups, 1), first + shape.n * row)


def unpack(records: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """qdata int8 and s_rel e4m3 of a resident weight, as they are stored: new tensors, the same on every device."""
    return torch.ops.kitchen.unpack_w4a8_weight.default(records, list(shape))


def linear(
    x, records, s_channel, codebook, shape, bias, out_dtype, convrot_groupsize, input_act, input_act_weight, input_act_eps,
    residual, residual_scale,
):  # fmt: skip
    """ops.w4a8_linear of a resident weight; a gradient is that of the stored one."""
    if wants_grad(x, bias, residual, residual_scale, input_act_weight):
        with torch._C._DisableFuncTorch():  # the weight is no part of a transform of torch.func
            stored = unpack(records, shape)
        return ops.w4a8_linear(
            x, *stored, s_channel, codebook, None, bias, out_dtype, shape.group, convrot_groupsize, input_act,
            input_act_weight, input_act_eps, residual, residual_scale,
        )  # fmt: skip
    return torch.ops.kitchen.w4a8_resident_linear.default(
        x, records, s_channel, codebook, list(shape), bias, out_dtype, convrot_groupsize, input_act, input_act_weight,
        input_act_eps, residual, residual_scale,
    )  # fmt: skip


def scaled_mm(codes, x_scale, records, s_channel, codebook, shape, bias, out_dtype, residual, residual_scale):
    """ops.w4a8_scaled_mm of a resident weight."""
    return torch.ops.kitchen.w4a8_resident_scaled_mm.default(
        codes, x_scale, records, s_channel, codebook, list(shape), bias, out_dtype, residual, residual_scale
    )


def _problem(op: str, x: tuple[torch.Tensor, ...], records: torch.Tensor, shape: Shape, rest: tuple) -> Problem:
    """What ``op`` is asked of a weight of that shape, checked."""
    codes, scales = views(records, shape)
    return problem_builders()[op](*x, codes.view(torch.int8), scales, *rest)


def _chosen(op: str, x: tuple[torch.Tensor, ...], records: torch.Tensor, shape: Shape, rest: tuple) -> Kernel:
    """The kernel of ``op`` for these arguments, the weight in them being resident. Choices are kept as those of ops are."""
    given = (*x, records, *rest)
    signature = (
        op,
        RESIDENT,
        shape,
        *[(a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in given],
    )
    kernel = None if _overrides.depth else remembered(signature)
    if kernel is None:
        problem = _problem(op, x, records, shape, rest)
        kernel = select(problem._replace(options=tuple(sorted((*problem.options, RESIDENT)))))
        if not overridden():
            remember(signature, kernel)
    return kernel


def _readable(records: torch.Tensor) -> torch.Tensor:
    """As the kernel reads them: without gaps, and aligned, which a cut out of a larger buffer need not be."""
    records = records.contiguous()
    return records.clone() if records.data_ptr() % 16 else records


def _linear(
    x, records, s_channel, codebook, shape, bias=None, out_dtype=None, convrot_groupsize=0, input_act="none",
    input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
):  # fmt: skip
    shape = Shape(*shape)
    rest = (
        s_channel, codebook, None, bias, out_dtype, shape.group, convrot_groupsize, input_act, input_act_weight, input_act_eps,
        residual, residual_scale,
    )  # fmt: skip
    records = _readable(records)
    if _chosen("w4a8_linear", (x,), records, shape, rest).id == KERNEL:
        return _launch.linear(_launch.RESIDENT, x, *views(records, shape), *rest)
    return torch.ops.kitchen.w4a8_linear.default(x, *unpack(records, shape), *rest)


def _linear_fake(
    x, records, s_channel, codebook, shape, bias=None, out_dtype=None, convrot_groupsize=0, input_act="none",
    input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
):  # fmt: skip
    shape = Shape(*shape)
    rest = (
        s_channel, codebook, None, bias, out_dtype, shape.group, convrot_groupsize, input_act, input_act_weight, input_act_eps,
        residual, residual_scale,
    )  # fmt: skip
    _problem("w4a8_linear", (x,), records, shape, rest)
    return x.new_empty((*x.shape[:-1], shape.n), dtype=out_dtype or x.dtype)


def _scaled_mm(
    codes, x_scale, records, s_channel, codebook, shape, bias=None, out_dtype=torch.bfloat16, residual=None,
    residual_scale=None,
):  # fmt: skip
    shape = Shape(*shape)
    rest = (s_channel, codebook, None, bias, out_dtype, shape.group, residual, residual_scale)
    records = _readable(records)
    if _chosen("w4a8_scaled_mm", (codes, x_scale), records, shape, rest).id == KERNEL:
        return _launch.scaled_mm(_launch.RESIDENT, codes, x_scale, *views(records, shape), *rest)
    return torch.ops.kitchen.w4a8_scaled_mm.default(codes, x_scale, *unpack(records, shape), *rest)


def _scaled_mm_fake(
    codes, x_scale, records, s_channel, codebook, shape, bias=None, out_dtype=torch.bfloat16, residual=None,
    residual_scale=None,
):  # fmt: skip
    shape = Shape(*shape)
    rest = (s_channel, codebook, None, bias, out_dtype, shape.group, residual, residual_scale)
    _problem("w4a8_scaled_mm", (codes, x_scale), records, shape, rest)
    return codes.new_empty((*codes.shape[:-1], shape.n), dtype=out_dtype)


def _unpack(records, shape):
    shape = Shape(*shape)
    if records.is_cuda and EXTENSION.why_not(device_facts(records.device)) is None and records.data_ptr() % 16 == 0:
        qdata = records.new_empty((shape.n, shape.code_bytes), dtype=torch.int8)
        scales = records.new_empty((shape.n, shape.k // shape.group), dtype=torch.float8_e4m3fn)
        index = records.device.index
        EXTENSION.module.unpack_w4a8_weight(
            records.data_ptr(), qdata.data_ptr(), scales.data_ptr(), shape.n, shape.k, shape.group, shape.bits, index,
            current_stream(index),
        )  # fmt: skip
        return qdata, scales
    codes, scales = resident.unpack(records, shape)
    return codes.view(torch.int8), scales.view(torch.float8_e4m3fn)


def _unpack_fake(records, shape):
    shape = Shape(*shape)
    return (
        records.new_empty((shape.n, shape.code_bytes), dtype=torch.int8),
        records.new_empty((shape.n, shape.k // shape.group), dtype=torch.float8_e4m3fn),
    )


_WEIGHT = "Tensor records, Tensor s_channel, Tensor? codebook, int[] shape"
_RESIDUAL = "Tensor? residual=None, Tensor? residual_scale=None"
define_around(
    f"w4a8_resident_linear(Tensor x, {_WEIGHT}, Tensor? bias=None, ScalarType? out_dtype=None, int convrot_groupsize=0, "
    f"str input_act='none', Tensor? input_act_weight=None, float input_act_eps=0.0, {_RESIDUAL}) -> Tensor",
    function=_linear, fake=_linear_fake,
)  # fmt: skip
define_around(
    f"w4a8_resident_scaled_mm(Tensor codes, Tensor x_scale, {_WEIGHT}, Tensor? bias=None, ScalarType out_dtype=bfloat16, "
    f"{_RESIDUAL}) -> Tensor",
    function=_scaled_mm, fake=_scaled_mm_fake,
)  # fmt: skip
define_around(
    "unpack_w4a8_weight(Tensor records, int[] shape) -> (Tensor, Tensor)", function=_unpack, fake=_unpack_fake
)
