"""When an INT8 linear runs as an FP16 GEMM: by the facts of the tensor's own device, by activation dtype, by the user.

Each answer is None (take it) or the reason in words why not; ``kitchen explain`` and ``kitchen doctor`` show them.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch

from kitchen_core.devices import DeviceFacts
from kitchen_core.registry import Problem, choose_anew

VARIABLE = "KITCHEN_INT8_FP16_FALLBACK"
OFF, ON, FP32_TOO = "0", "1", "fp32"

_in_block: ContextVar[str] = ContextVar("kitchen_int8_fp16_fallback", default="")


def fp16_fallback(allowed: bool, fp32_activations: bool = False) -> AbstractContextManager[None]:
    """For a ``with`` block in this thread: whether int8_linear and w4a8 may run as FP16 GEMMs. Goes before the variable.

    ``with fp16_fallback(False):`` keeps the block on the INT8 path; ``fp32_activations`` allows it for FP32 ones too.
    int8_linear_fp16, which is called by name, is not concerned.
    """
    return choose_anew(_in_block, OFF if not allowed else FP32_TOO if fp32_activations else ON)


def setting() -> str:
    """The user's word, read whenever a kernel is chosen: "0" off, "1" (also unset or empty) on, "fp32" on for FP32 too."""
    return _in_block.get() or os.environ.get(VARIABLE, "").strip().lower() or ON


def not_cuda(problem: Problem, facts: DeviceFacts) -> str | None:
    """For int8_linear_fp16, which is asked for by name: any CUDA device will do."""
    if facts.kind == "cuda":
        return None
    return f"needs a CUDA device, the tensors are on {facts.arch}; the eager reference gives the same bits there"


def wrong_device(facts: DeviceFacts) -> str | None:
    """Why INT8 does not become FP16 on a device: it has INT8 tensor cores, or no FP16 ones."""
    if facts.kind != "cuda":
        return f"for GPUs without INT8 tensor cores; the tensors are on {facts.arch}"
    if facts.int8_tensor_cores:
        return f"{facts.arch} has INT8 tensor cores, which are faster than an FP16 GEMM"
    if not facts.fp16_tensor_cores:
        return f"{facts.name} has no FP16 tensor cores, so an FP16 GEMM gains nothing over INT8"
    return None


def _wrong_setting() -> str | None:
    word = setting()
    if word == OFF:
        return "switched off by fp16_fallback(False)" if _in_block.get() else f"switched off by {VARIABLE}=0"
    if word not in (ON, FP32_TOO):
        return f"{VARIABLE}={word!r} is not one of {OFF}, {ON}, {FP32_TOO}; correct or unset it"
    return None


def linear(problem: Problem, facts: DeviceFacts) -> str | None:
    """For int8_linear: the right device, not switched off, and x not in FP32 (unless asked)."""
    reason = wrong_device(facts) or _wrong_setting()
    if reason is None and problem.dtype == torch.float32 and setting() != FP32_TOO:
        return f"float32 activations stay on the INT8 path; ask with {VARIABLE}=fp32, or call int8_linear_fp16"
    return reason


def scaled_mm(problem: Problem, facts: DeviceFacts) -> str | None:
    """For int8_scaled_mm, to which w4a8 and w6a8 come: its codes carry no activation dtype, so the output's stands for it."""
    reason = wrong_device(facts) or _wrong_setting()
    if reason is None and problem.out_dtype == torch.float32 and setting() != FP32_TOO:
        return f"a float32 output stands for float32 activations, which stay on the INT8 path; ask with {VARIABLE}=fp32"
    return reason
