"""What kitchen-fallback-volta offers, and when: the records of its kernels for GPUs without INT8 tensor cores."""

from __future__ import annotations

import torch

from kitchen_core.arithmetic import MAX_EXACT_INT32_K
from kitchen_core.devices import DeviceFacts
from kitchen_core.registry import Kernel, Problem, Provider

from . import _gemm, _quantize, policy, torch_path
from ._extension import EXTENSION

PROVIDER = "fallback-volta"
WMMA_PRIORITY = 30  # over the torch path
TORCH_PRIORITY = 20  # over the composition of kitchen-core (10), below compiled kernels


def _kernel_reason(problem: Problem, facts: DeviceFacts) -> str | None:
    """What the compiled GEMM asks of a device and of a problem."""
    reason = EXTENSION.why_not(facts)
    if reason is not None:
        return reason
    if not 1 <= problem.K <= MAX_EXACT_INT32_K:
        return f"sums in int32, which is exact for K from 1 to {MAX_EXACT_INT32_K}; the call has {problem.K}"
    return None


def _linear(problem: Problem, facts: DeviceFacts) -> str | None:
    return policy.linear(problem, facts) or _kernel_reason(problem, facts)


def _scaled_mm(problem: Problem, facts: DeviceFacts) -> str | None:
    return policy.scaled_mm(problem, facts) or _kernel_reason(problem, facts)


def _linear_fp16(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = policy.not_cuda(problem, facts)
    if reason is None and policy.wrong_device(facts):
        return f"written for sm_70; on {facts.arch} the torch path is faster, as cuBLAS is"
    if reason is None and "fp16_activations" in problem.options:
        return "multiplies INT8 codes; fp16_activations are the torch path's"
    return reason or _kernel_reason(problem, facts)


def _quantizer(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = policy.wrong_device(facts) or EXTENSION.why_not(facts)
    if reason is not None:
        return reason
    if problem.rotation > _quantize.MAX_GROUP:
        return f"rotates groups of at most {_quantize.MAX_GROUP} columns, the call has {problem.rotation}"
    if not 1 <= problem.K <= _quantize.MAX_COLUMNS or problem.M > _quantize.MAX_ROWS:
        return (
            f"takes K from 1 to {_quantize.MAX_COLUMNS} and M to {_quantize.MAX_ROWS}, not M={problem.M} K={problem.K}"
        )
    return None


def _compiled(op: str, function, supports) -> Kernel:
    return Kernel(op, "wmma", function, supports, WMMA_PRIORITY, PROVIDER)


def _rows(op: str, function) -> Kernel:
    return Kernel(op, "rowwise", function, _quantizer, WMMA_PRIORITY, PROVIDER)


WMMA_KERNELS = (
    _compiled("int8_linear_fp16", _gemm.int8_linear_fp16, _linear_fp16),
    _compiled("int8_linear", _gemm.int8_linear, _linear),
    _compiled("int8_scaled_mm", _gemm.int8_scaled_mm, _scaled_mm),
)
QUANTIZERS = (
    _rows("quantize_int8_rowwise", _quantize.quantize_int8_rowwise),
    _rows("quantize_and_rotate_rowwise", _quantize.quantize_rowwise),
    _rows("quantize_int8_convrot_weight", _quantize.quantize_int8_convrot_weight),
)
# slow: where the policy would take the compiled kernel and it is missing, the user hears of it. int8_linear_fp16 is called by
# name, on GPUs where this is the faster of the two.
TORCH_KERNELS = (
    Kernel("int8_linear_fp16", "torch", torch_path.int8_linear_fp16, policy.not_cuda, TORCH_PRIORITY, PROVIDER),
    Kernel("int8_linear", "torch", torch_path.int8_linear, policy.linear, TORCH_PRIORITY, PROVIDER, slow=True),
    Kernel("int8_scaled_mm", "torch", torch_path.int8_scaled_mm, policy.scaled_mm, TORCH_PRIORITY, PROVIDER, slow=True),
)


def doctor() -> list[str]:
    """Lines for `kitchen doctor`: which kernels there are, the user's setting, and whether this torch can serve a V100."""
    lines = EXTENSION.describe()
    word = policy.setting()
    if word != policy.ON:
        lines.append(f"{policy.VARIABLE}={word}")
    archs = torch.cuda.get_arch_list()
    if archs and "sm_70" not in archs:
        lines.append(
            f"torch {torch.__version__} has no sm_70 code: a V100 needs one that has; the last on PyPI is "
            'pip install "torch==2.10.*"'
        )
    return lines


provider = Provider(name="kitchen-fallback-volta", kernels=(*WMMA_KERNELS, *QUANTIZERS, *TORCH_KERNELS), doctor=doctor)
