"""What kitchen-awq offers, and when: the records of its CUDA kernels, and where one route hands over to the next.

awq_linear has six routes. Where more than one can run, the number of rows of x decides (measured: docs/kernels/awq.md):

    awq/stream        Hopper, few rows: weights stream through shared memory, are decoded in registers, wgmma
    awq/decode        few rows, of any group and type of scales: weights stream through registers, mma.sync; sm_80 and later
    awq/decode_sm75   the same for float16 on sm_75
    awq/sm90          Hopper, any number of rows: weights are decoded in registers, wgmma
    awq/float32       few rows of float32 x, or x with an activation in front: fp32 products, weights stream through registers
    awq/dequantized   the rest: pieces of the weight are decoded to memory and multiplied by cuBLAS
"""

from __future__ import annotations

from functools import partial

import torch

from kitchen_core.devices import DeviceFacts
from kitchen_core.registry import Kernel, Problem, Provider

from . import _dequantized, _launch, resident, resident_ops
from ._extension import EXTENSION

STREAM_PRIORITY, HOPPER_PRIORITY, DECODE_PRIORITY, TURING_PRIORITY, CUDA_PRIORITY = 130, 120, 110, 105, 100
STREAM_ROWS, MOST_DECODE_ROWS, TURING_ROWS = 64, 64, 16  # that they take
FLOAT32_ROWS, FLOAT32_PRIORITY = 16, 103  # rows of float32 x; the matrix product of cuBLAS beyond
MAX_FUSED_K, MAX_N, MAX_HOPPER_ROWS = 2**19 - 1, 2**30, 2**30


def _supports_any(problem: Problem, facts: DeviceFacts) -> str | None:
    return EXTENSION.why_not(facts)


def _fused_reason(problem: Problem, facts: DeviceFacts, path: str) -> str | None:
    """What both kernels that decode as they multiply ask for."""
    reason = EXTENSION.why_not_path(facts, path)
    if reason is not None:
        return reason
    if not facts.bf16_tensor_cores:
        return f"needs bf16 and fp16 tensor cores of sm_80 or later, the device is {facts}"
    return _shape_reason(problem, (torch.bfloat16, torch.float16))


def _shape_reason(problem: Problem, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """What kernels that decode as they multiply ask of a call, on whatever device."""
    if problem.dtype not in dtypes:
        return f"takes {' and '.join(str(d).removeprefix('torch.') for d in dtypes)} x, the call has {problem.dtype}"
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
    if problem.part is not None and (problem.part[0] % 8 or problem.part[1] % 8):
        return f"takes weights, and parts of them, at multiples of 8 rows; the call has {problem}"
    if problem.group % 32 or problem.N % 8:
        return f"takes groups of multiples of 32 and N of 8, the call has group {problem.group} and N={problem.N}"
    if _scales_of_x(problem) not in problem.options:
        return f"takes scales and zeros of x's type, the call has {' '.join(problem.options)}"
    return None


def _stream_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if problem.M > STREAM_ROWS:
        return f"for M of at most {STREAM_ROWS}, the call has {problem.M}"
    copied = 2 * STREAM_ROWS * problem.K  # of x, in the weights' order
    if copied > _launch.WORKSPACE_BYTES:
        most = _launch.WORKSPACE_BYTES // (2 * STREAM_ROWS)
        return f"takes K up to {most}, whose copy of x fits its workspace, the call has {problem.K}"
    reason = _hopper_reason(problem, facts)
    if reason is None and resident_ops.WORD in problem.options:
        return resident.group_reason(problem.group)
    return reason


def _decode_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if problem.M > MOST_DECODE_ROWS:
        return f"for M of at most {MOST_DECODE_ROWS}, the call has {problem.M}"
    return _fused_reason(problem, facts, "sm80")


def _turing_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Built for sm_90a too, where it runs forced: any other route is faster there."""
    reason = EXTENSION.why_not_path(facts, "sm75")
    if reason is not None:
        return reason
    if problem.M > TURING_ROWS:
        return f"for M of at most {TURING_ROWS}, the call has {problem.M}"
    if not facts.fp16_tensor_cores:
        return f"needs fp16 tensor cores, the device is {facts}"
    return _shape_reason(problem, (torch.float16,))


def _hopper_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if problem.M > MAX_HOPPER_ROWS:
        return f"for M of at most {MAX_HOPPER_ROWS}, the call has {problem.M}"
    return _hopper_reason(problem, facts)


def _float32_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """x that multiplies in fp32: what has an activation in front, is float32, or wants another type of weight."""
    reason = EXTENSION.why_not(facts)
    if reason is not None:
        return reason
    wide = problem.dtype == torch.float32 or any(w.startswith(("input_act=", "weight_dtype=")) for w in problem.options)
    if not wide:
        return f"multiplies float32 x, and x with an activation in front, the call has {problem.dtype} x as it is"
    if problem.M > FLOAT32_ROWS:
        return f"for M of at most {FLOAT32_ROWS}, the call has {problem.M}"
    if problem.K % 8 or problem.group % 8:
        return f"takes K and groups of multiples of 8, the call has K={problem.K} and group {problem.group}"
    return None if problem.N <= MAX_N else f"takes N up to {MAX_N}, the call has {problem.N}"


def _linear(name: str, function, supports, priority: int) -> Kernel:
    return Kernel("awq_linear", name, function, supports, priority, "awq")


provider = Provider(
    name="kitchen-awq",
    kernels=(
        Kernel("dequantize_awq", "dequantize", _launch.dequantize, _supports_any, CUDA_PRIORITY, "awq"),
        _linear("stream", partial(_launch.fused_linear, _launch.STREAM), _stream_supports, STREAM_PRIORITY),
        _linear("decode", partial(_launch.fused_linear, _launch.DECODE), _decode_supports, DECODE_PRIORITY),
        _linear("decode_sm75", partial(_launch.fused_linear, _launch.TURING), _turing_supports, TURING_PRIORITY),
        _linear("sm90", partial(_launch.fused_linear, _launch.HOPPER), _hopper_supports, HOPPER_PRIORITY),
        _linear("float32", _launch.float32_linear, _float32_supports, FLOAT32_PRIORITY),
        _linear("dequantized", _dequantized.linear, _supports_any, CUDA_PRIORITY),
    ),
    doctor=EXTENSION.describe,
)
