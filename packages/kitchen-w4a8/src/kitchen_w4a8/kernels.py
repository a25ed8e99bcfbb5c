"""What kitchen-w4a8 offers, and when: the records of its CUDA kernels."""

from __future__ import annotations

from functools import partial

from kitchen_core.arithmetic import MAX_EXACT_INT32_K
from kitchen_core.devices import DeviceFacts
from kitchen_core.launch import DTYPE_CODES
from kitchen_core.registry import Kernel, Problem, Provider

from . import _launch
from ._extension import EXTENSION
from .resident import GROUPS  # that all kernels which decode on the fly take

RESIDENT_PRIORITY, FEW_ROWS_PRIORITY, HOPPER_PRIORITY, DECODED_PRIORITY = 120, 110, 100, 60
ACTIVATION_PRIORITY = 50  # of the quantizer of activations: below kitchen-int8's own record of the same kernel
FEW_ROWS = 16  # of x, that the streaming kernel takes
RESIDENT = "resident"  # the word of a problem whose weight is in that layout (resident_ops.py)
RESIDENT_ROWS = 32  # that the kernel for it takes
QUANTIZED_GROUPS = (4, 8, 16, 32, 64, 128, 256, 512)  # that the weight quantizer takes
MAX_N = 2**30


def _decode_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = EXTENSION.why_not(facts)
    if reason is not None:
        return reason
    weights = (problem.N or problem.M) * problem.K  # an op without x has its N in M
    if weights > _launch.MAX_DECODED:
        return f"decodes at most {_launch.MAX_DECODED} weights at once, the call has {weights}"
    return None


def _quantize_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = EXTENSION.why_not(facts)
    if reason is not None:
        return reason
    if problem.group not in QUANTIZED_GROUPS:
        return f"takes groups of {', '.join(map(str, QUANTIZED_GROUPS))}, the call asks for {problem.group}"
    if _launch.quantize_shared_bytes(problem.K, problem.group) > facts.shared_memory_optin - 1024:
        return f"keeps a row in shared memory, and {problem.K} weights are too many for {facts}"
    return None


def _activation_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    return EXTENSION.why_not(facts) or _rotation_reason(problem)


def _rotation_reason(problem: Problem) -> str | None:
    if problem.rotation > _launch.MAX_ROTATION:
        return f"rotates groups of at most {_launch.MAX_ROTATION} columns, the call has {problem.rotation}"
    return None


def _decoded_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if problem.out_dtype not in DTYPE_CODES:
        return f"writes float32, float16 or bfloat16, the call asks for {problem.out_dtype}"
    if problem.K > MAX_EXACT_INT32_K:
        return f"sums in int32, which is exact for K up to {MAX_EXACT_INT32_K}; the call has {problem.K}"
    return _decode_supports(problem, facts)


def _dequantize_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if "correction" in problem.options:
        return "takes no correction (levels='asymmetric')"
    return _decode_supports(problem, facts)


def _stream_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if problem.M > FEW_ROWS:
        return f"for M of at most {FEW_ROWS}, the call has {problem.M}"
    if facts.kind == "cuda" and facts.sm < 80:
        return f"needs sm_80 or later (cp.async), the device is {facts}"
    reason = EXTENSION.why_not_path(facts, "sm80") or _on_the_fly_reason(problem)
    if reason is None and _launch.stream_shared_bytes(problem, facts) > facts.shared_memory_optin:
        return f"keeps {problem.M} rows of {problem.K} codes in shared memory, too many for {facts}"
    return reason


def _resident_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if facts.kind == "cuda" and facts.sm != 90:
        return f"needs sm_90 (bulk copies), the device is {facts}"
    reason = EXTENSION.why_not_path(facts, "sm90") or _on_the_fly_reason(problem)
    if reason is not None:
        return reason
    if RESIDENT not in problem.options:
        return "reads weights in the resident layout (kitchen_w4a8.optimize_for_decode), this one is as it is stored"
    if problem.M > RESIDENT_ROWS:
        return f"for M of at most {RESIDENT_ROWS}, the call has {problem.M}"
    if _launch.resident_shared_bytes(problem) > facts.shared_memory_optin:
        return f"keeps {problem.M} rows of {problem.K} codes in shared memory, too many for {facts}"
    return None


def _hopper_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if facts.kind == "cuda" and facts.sm != 90:
        return f"needs sm_90 (wgmma), the device is {facts}"
    return EXTENSION.why_not_path(facts, "sm90") or _on_the_fly_reason(problem)


def _on_the_fly_reason(problem: Problem) -> str | None:
    """What every kernel that decodes on the fly asks of a problem."""
    if "correction" in problem.options:
        return "takes no correction (levels='asymmetric')"
    if "fp32_scales" in problem.options:
        return "decodes e4m3 scales, the weight's s_rel is float32"
    if problem.group not in GROUPS:
        return f"takes groups of {', '.join(map(str, GROUPS))}, the weight has {problem.group}"
    unit = 32 if problem.bits == 4 else 64
    if problem.K % unit:
        return (
            f"reads codes 16 bytes at a time: K must be a multiple of {unit} at {problem.bits} bits, it is {problem.K}"
        )
    if problem.K > MAX_EXACT_INT32_K:
        return f"sums in int32, which is exact for K up to {MAX_EXACT_INT32_K}; the call has {problem.K}"
    if problem.N > MAX_N:
        return f"takes at most {MAX_N} rows of the weight, the call has N={problem.N}"
    if problem.out_dtype not in DTYPE_CODES:
        return f"writes float32, float16 or bfloat16, the call asks for {problem.out_dtype}"
    return _rotation_reason(problem)


def _on_the_fly(name: str, launch: str, supports, priority: int) -> tuple[Kernel, Kernel]:
    return (
        Kernel("w4a8_scaled_mm", name, partial(_launch.scaled_mm, launch), supports, priority, "w4a8"),
        Kernel("w4a8_linear", name, partial(_launch.linear, launch), supports, priority, "w4a8"),
    )


provider = Provider(
    name="kitchen-w4a8",
    kernels=(
        Kernel("quantize_w4a8_weight", "quantize", _launch.quantize, _quantize_supports, FEW_ROWS_PRIORITY, "w4a8"),
        Kernel(
            "quantize_and_rotate_rowwise",
            "rowwise",
            _launch.quantize_activation,
            _activation_supports,
            ACTIVATION_PRIORITY,
            "w4a8",
        ),
        Kernel("decode_w4a8_weight", "decode", _launch.decode, _decode_supports, FEW_ROWS_PRIORITY, "w4a8"),
        Kernel("dequantize_w4a8_weight", "decoded", _launch.dequantize, _dequantize_supports, DECODED_PRIORITY, "w4a8"),
        *_on_the_fly("resident", _launch.RESIDENT, _resident_supports, RESIDENT_PRIORITY),
        *_on_the_fly("stream", _launch.STREAM, _stream_supports, FEW_ROWS_PRIORITY),
        *_on_the_fly("hopper", _launch.HOPPER, _hopper_supports, HOPPER_PRIORITY),
        Kernel("w4a8_scaled_mm", "decoded", _launch.decoded_scaled_mm, _decoded_supports, DECODED_PRIORITY, "w4a8"),
    ),
    doctor=EXTENSION.describe,
)
