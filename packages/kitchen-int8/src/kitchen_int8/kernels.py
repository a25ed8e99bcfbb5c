"""What kitchen-int8 offers, and when: the records of its CUDA kernels."""

from __future__ import annotations

from kitchen_core.devices import DeviceFacts
from kitchen_core.registry import Kernel, Problem, Provider

from . import _extension, _quantize

CUDA_PRIORITY = 100


def _quantizer_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = _extension.why_not(facts)
    if reason is not None:
        return reason
    if problem.rotation > _quantize.MAX_GROUP:
        return f"rotates groups of at most {_quantize.MAX_GROUP} columns, the call has {problem.rotation}"
    if not 1 <= problem.K <= _quantize.MAX_COLUMNS:
        return f"takes K from 1 to {_quantize.MAX_COLUMNS}, the call has {problem.K}"
    return None


def _quantize_rowwise(x, seed=0):
    return _quantize.quantize_rowwise(x, seed=seed)


def _quantize_convrot_weight(weight, convrot_groupsize=256, seed=0):
    return _quantize.quantize_rowwise(weight, convrot_groupsize, seed=seed)


def _quantizer(op: str, function) -> Kernel:
    return Kernel(op, "rowwise", function, _quantizer_supports, CUDA_PRIORITY, "int8")


provider = Provider(
    name="kitchen-int8",
    kernels=(
        _quantizer("quantize_int8_rowwise", _quantize_rowwise),
        _quantizer("quantize_and_rotate_rowwise", _quantize.quantize_rowwise),
        _quantizer("quantize_int8_convrot_weight", _quantize_convrot_weight),
    ),
    doctor=_extension.describe,
)
