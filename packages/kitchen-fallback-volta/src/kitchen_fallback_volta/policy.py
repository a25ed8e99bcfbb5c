"""When an INT8 linear runs as an FP16 GEMM: by the facts of the tensor's own device, by activation dtype, by the user.

Each answer is None (take it) or the reason in words why not; ``kitchen explain`` and ``kitchen doctor`` show them.
"""

from __future__ import annotations

import os

import torch

from kitchen_core import fallback
from kitchen_core.devices import DeviceFacts
from kitchen_core.fallback import FP32_TOO, OFF, ON
from kitchen_core.registry import Problem

VARIABLE = "KITCHEN_INT8_FP16_FALLBACK"


def setting() -> str:
    """The user's word, read whenever a kernel is chosen: "0" off, "1" (also unset or empty) on, "fp32" on for FP32 too."""
    return fallback.asked() or os.environ.get(VARIABLE, "").strip().lower() or ON


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
        return "switched off by the caller (fp16_fallback)" if fallback.asked() else f"switched off by {VARIABLE}=0"
    if word not in (ON, FP32_TOO):
        return f"{VARIABLE}={word!r} is not one of {OFF}, {ON}, {FP32_TOO}; correct or unset it"
    return None


def _wrong_dtype(activations: torch.dtype) -> str | None:
    if activations == torch.float32 and setting() != FP32_TOO:
        return f"float32 activations stay on the INT8 path; ask with {VARIABLE}=fp32, or call int8_linear_fp16"
    return None


def linear(problem: Problem, facts: DeviceFacts) -> str | None:
    """For int8_linear: the right device, not switched off, and x not in FP32 (unless asked)."""
    return wrong_device(facts) or _wrong_setting() or _wrong_dtype(problem.dtype)


def scaled_mm(problem: Problem, facts: DeviceFacts) -> str | None:
    """For int8_scaled_mm, to which w4a8 and w6a8 come: a composition tells the dtype of its activations, else the output's
    stands for it.
    """
    return wrong_device(facts) or _wrong_setting() or _wrong_dtype(fallback.activation_dtype(problem.out_dtype))
