"""The linear of weights in the resident layout: an op around awq_linear.

It is that op on other bytes, and chooses among the same kernels, for a problem that says "resident". One kernel reads that
layout; for what it does not take the codes are put back as they are stored, and the op itself runs.
"""

from __future__ import annotations

from typing import Any

import torch

from kitchen_core import _overrides, ops
from kitchen_core.ops._autograd import wants_grad
from kitchen_core.ops._define import define_around, problem_builders
from kitchen_core.registry import Kernel, overridden, remember, remembered, select

from . import _launch, resident

WORD = "resident"  # of a problem's options
KERNEL = "awq/stream"  # that reads the layout


def linear(
    x, codes, wscales, wzeros, bias, group_size, out_dtype, input_act, input_act_weight, input_act_eps, residual,
    residual_scale, weight_dtype=None,
):  # fmt: skip
    """ops.awq_linear of a resident weight; a gradient is that of the stored one."""
    rest = (
        wscales, wzeros, bias, group_size, out_dtype, input_act, input_act_weight, input_act_eps, residual, residual_scale,
        weight_dtype,
    )  # fmt: skip
    if wants_grad(x, bias, residual, residual_scale, input_act_weight):
        with torch._C._DisableFuncTorch():  # the weight is no part of a transform of torch.func
            stored = unpack(codes)
        return ops.awq_linear(x, stored, *rest)
    return torch.ops.kitchen.awq_resident_linear.default(x, codes, *rest)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """Resident codes as they are stored: a new tensor."""
    return torch.ops.kitchen.unpack_awq_codes.default(codes)


def _as_stored(codes: torch.Tensor) -> torch.Tensor:
    """The bytes of resident codes in the shape and type of stored ones, for checks; their values mean nothing."""
    return codes.view(torch.int8).view(codes.shape[0], -1)


def _chosen(x: torch.Tensor, codes: torch.Tensor, *rest: Any) -> Kernel:
    """The kernel of awq_linear for these arguments, the codes being resident. Choices are kept as those of ops are."""
    given = (x, codes, *rest)
    signature = (WORD, *[(a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in given])
    kernel = None if _overrides.depth else remembered(signature)
    if kernel is None:
        problem = problem_builders()["awq_linear"](x, _as_stored(codes), *rest)
        kernel = select(problem._replace(options=tuple(sorted((*problem.options, WORD)))))
        if not overridden():
            remember(signature, kernel)
    return kernel


def _linear(x, codes, *rest):
    if _chosen(x, codes, *rest).id == KERNEL:
        return _launch.fused_linear(_launch.STREAM, x, codes, *rest, resident=True)
    return torch.ops.kitchen.awq_linear.default(x, unpack(codes), *rest)


def _linear_fake(
    x, codes, wscales, wzeros, bias=None, group_size=64, out_dtype=None, input_act="none", input_act_weight=None,
    input_act_eps=0.0, residual=None, residual_scale=None, weight_dtype=None,
):  # fmt: skip
    problem_builders()["awq_linear"](
        x, _as_stored(codes), wscales, wzeros, bias, group_size, out_dtype, input_act, input_act_weight, input_act_eps,
        residual, residual_scale, weight_dtype,
    )  # fmt: skip
    return x.new_empty((*x.shape[:-1], codes.shape[0]), dtype=out_dtype or x.dtype)


def _unpack_fake(codes):
    return codes.new_empty((codes.shape[0], codes.shape[1] * resident.STEP_BYTES), dtype=torch.int8)


define_around(
    "awq_resident_linear(Tensor x, Tensor codes, Tensor wscales, Tensor wzeros, Tensor? bias=None, int group_size=64, "
    "ScalarType? out_dtype=None, str input_act='none', Tensor? input_act_weight=None, float input_act_eps=0.0, "
    "Tensor? residual=None, Tensor? residual_scale=None, ScalarType? weight_dtype=None) -> Tensor",
    function=_linear, fake=_linear_fake,
)  # fmt: skip
define_around("unpack_awq_codes(Tensor codes) -> Tensor", function=resident.unpack, fake=_unpack_fake)
