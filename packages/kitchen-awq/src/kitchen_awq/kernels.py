"""What kitchen-awq offers, and when: the records of its CUDA kernels, and where one route hands over to the next.

awq_linear has four routes. Where more than one can run, the number of rows of x decides (measured: docs/kernels/awq.md):

    awq/stream        Hopper, very few rows: weights stream through shared memory, mma.sync
    awq/decode        few rows, of any group and type of scales: weights stream through registers, mma.sync; sm_80 and later
    awq/sm90          Hopper, up to HOPPER_ROWS: weights are decoded in registers, wgmma
    awq/dequantized   the rest: pieces of the weight are decoded to memory and multiplied by cuBLAS
"""

from __future__ import annotations

from functools import partial

import torch

from kitchen_core.devices import DeviceFacts
from kitchen_core.registry import Kernel, Problem, Provider

from . import _dequantized, _launch
from ._extension import EXTENSION

STREAM_PRIORITY, HOPPER_PRIORITY, DECODE_PRIORITY, CUDA_PRIORITY = 130, 120, 110, 100
STREAM_ROWS, MOST_DECODE_ROWS = 16, 64  # that they take
PACKED_DECODE_ROWS = 16  # groups of 32n, scales of x's type: the variant for 64 rows has not run on a GPU yet
HOPPER_ROWS = 1280  # beyond, cuBLAS on the decoded weight is faster
MAX_FUSED_K, MAX_N = 2**19 - 1, 2**30


def _supports_any(problem: Problem, facts: DeviceFacts) -> str | None:
    return EXTENSION.why_not(facts)


def _fused_reason(problem: Problem, facts: DeviceFacts, path: str) -> str | None:
    """What both kernels that decode as they multiply ask for."""
    reason = EXTENSION.why_not_path(facts, path)
    if reason is not None:
        return reason
    if not facts.bf16_tensor_cores:
        return f"needs bf16 and fp16 tensor cores of sm_80 or later, the device is {facts}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16 x, the call has {problem.dtype}"
    for word in problem.options:
        if word.startswith(("input_act=", "weight_dtype=")):
            return f"multiplies x as it is by weights of its type, the call has {word}"
    if problem.K % 32 or problem.K > MAX_FUSED_K or problem.N > MAX_N:
        found = f"the call has K={problem.K} N={problem.N}"
        return f"takes K in multiples of 32 up to {MAX_FUSED_K} and N up to {MAX_N}, {found}"
    if problem.group % 8:
        return f"decodes groups of multiples of 8 columns, the call has {problem.group}"
    return None


def _scales_of_x(problem: Problem) -> str:
    """The option of a call whose scales and zeros have x's type."""
    return f"scales={str(problem.dtype).removeprefix('torch.')}"


def _hopper_reason(problem: Problem, facts: DeviceFacts) -> str | None:
    """Why the Hopper kernels cannot run, whatever the number of rows."""
    if facts.sm != 90:
        return f"needs sm_90, the device is {facts}"
    reason = _fused_reason(problem, facts, "sm90")
    if reason is not None:
        return reason
    if problem.group % 32 or problem.N % 8:
        return f"takes groups of multiples of 32 and N of 8, the call has group {problem.group} and N={problem.N}"
    if _scales_of_x(problem) not in problem.options:
        return f"takes scales and zeros of x's type, the call has {' '.join(problem.options)}"
    return None


def _stream_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if problem.M > STREAM_ROWS:
        return f"for M of at most {STREAM_ROWS}, the call has {problem.M}"
    reason = _hopper_reason(problem, facts)
    if reason is not None:
        return reason
    need, have = _launch.stream_shared_bytes(problem), facts.shared_memory_optin
    return None if need <= have else f"needs {need} bytes of shared memory for x, the device has {have}"


def _decode_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    packed = problem.group % 32 == 0 and _scales_of_x(problem) in problem.options
    most = PACKED_DECODE_ROWS if packed else MOST_DECODE_ROWS
    if most < problem.M:
        return f"for M of at most {most}, the call has {problem.M}"
    return _fused_reason(problem, facts, "sm80")


def _hopper_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if problem.M > HOPPER_ROWS:
        return f"for M of at most {HOPPER_ROWS}, the call has {problem.M}"
    return _hopper_reason(problem, facts)


def _linear(name: str, function, supports, priority: int) -> Kernel:
    return Kernel("awq_linear", name, function, supports, priority, "awq")


provider = Provider(
    name="kitchen-awq",
    kernels=(
        Kernel("dequantize_awq", "dequantize", _launch.dequantize, _supports_any, CUDA_PRIORITY, "awq"),
        _linear("stream", partial(_launch.fused_linear, _launch.STREAM), _stream_supports, STREAM_PRIORITY),
        _linear("decode", partial(_launch.fused_linear, _launch.DECODE), _decode_supports, DECODE_PRIORITY),
        _linear("sm90", partial(_launch.fused_linear, _launch.HOPPER), _hopper_supports, HOPPER_PRIORITY),
        _linear("dequantized", _dequantized.linear, _supports_any, CUDA_PRIORITY),
    ),
    doctor=EXTENSION.describe,
)
