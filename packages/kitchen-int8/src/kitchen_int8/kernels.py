"""What kitchen-int8 offers, and when: the records of its CUDA kernels."""

from __future__ import annotations

from functools import partial

from kitchen_core.arithmetic import MAX_EXACT_INT32_K
from kitchen_core.devices import DeviceFacts
from kitchen_core.launch import DTYPE_CODES
from kitchen_core.registry import Kernel, Problem, Provider

from . import _dequantize, _gemm, _linear, _quantize, _swiglu, _tensorwise
from ._extension import EXTENSION

DECODE_SM90_PRIORITY, FEW_ROWS_PRIORITY, CUDA_PRIORITY = 120, 110, 100
# Rows of x up to which a kernel serves. With more than 16, int8/sm90 is faster than int8/decode_sm90 was, by 4 to 7% in the
# mean over shapes: one H200, 2026-11-30, docs/kernels/int8_decode.md.
DECODE_SM90_ROWS, DECODE_ROWS, FEW_ROWS = 16, 64, 16
DECODE_PRIORITY = 60  # runs where it is forced: measured on an H200 alone, where int8/decode_sm90 uses it
SM80_PRIORITY, SM75_PRIORITY = 80, 70  # the portable GEMMs: below kernels of one chip, above other packages' fallbacks
MAX_ROWS = 2**30  # of x and of the weight


def _quantizer_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = EXTENSION.why_not(facts)
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


def _tensorwise_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    return EXTENSION.why_not(facts)


def _dequantizer_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if problem.M >= 2**31:
        return f"takes at most {2**31 - 1} rows, the call has {problem.M}"
    return _quantizer_supports(problem, facts)


def _dequantizer(op: str, function) -> Kernel:
    return Kernel(op, "dequantize", function, _dequantizer_supports, CUDA_PRIORITY, "int8")


def _portable_gemm_supports(path: str, problem: Problem, facts: DeviceFacts) -> str | None:
    reason = EXTENSION.why_not_path(facts, path)
    if reason is not None:
        return reason
    if not facts.int8_tensor_cores:
        return f"needs INT8 tensor cores, {facts} has none"
    if path == "sm80" and facts.sm < 80:
        return f"needs sm_80 or later (cp.async), the device is {facts}"
    return _gemm_reason(problem)


def _hopper_gemm_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if facts.sm != 90:
        return f"needs sm_90 (wgmma), the device is {facts}"
    reason = EXTENSION.why_not_path(facts, "sm90")
    if reason is not None:
        return reason
    if problem.K % 16:
        return f"loads by TMA, so K must be a multiple of 16; the call has {problem.K}"
    return _gemm_reason(problem)


def _swiglu_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = _hopper_linear_supports(problem, facts)
    if reason is None and problem.M > MAX_ROWS // 2:
        return f"takes at most {MAX_ROWS // 2} rows of x, the call has {problem.M}"
    return reason


def _few_rows_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Where the portable kernel, which splits K over the chip, beats wgmma tiles: measured on an H200, 2026-11-30."""
    return _portable_gemm_supports("sm80", problem, facts) or _too_many_rows(problem, FEW_ROWS)


def _decode_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = _portable_gemm_supports("sm80", problem, facts) or _too_many_rows(problem, DECODE_ROWS)
    if reason is None and problem.K % 16:
        return f"reads 16 bytes at a time, so K must be a multiple of 16; the call has {problem.K}"
    return reason


def _decode_sm90_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    return _hopper_gemm_supports(problem, facts) or _too_many_rows(problem, DECODE_SM90_ROWS)


def _too_many_rows(problem: Problem, most: int) -> str | None:
    """Said last: what the device lacks, more rows or fewer would not mend."""
    return None if most >= problem.M else f"for M of at most {most}, the call has {problem.M}"


def _decode_linear_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    return _decode_sm90_supports(problem, facts) or _quantizer_supports(problem, facts)


def _hopper_linear_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    return _hopper_gemm_supports(problem, facts) or _quantizer_supports(problem, facts)


def _gemm_reason(problem: Problem) -> str | None:
    """What every INT8 GEMM here asks of a problem."""
    if not 1 <= problem.K <= MAX_EXACT_INT32_K:
        return f"sums in int32, which is exact for K from 1 to {MAX_EXACT_INT32_K}; the call has {problem.K}"
    if max(problem.M, problem.N) > MAX_ROWS:
        return f"takes at most {MAX_ROWS} rows of x and of the weight, the call has M={problem.M} N={problem.N}"
    if problem.out_dtype not in DTYPE_CODES:
        return f"writes float32, float16 or bfloat16, the call asks for {problem.out_dtype}"
    return None


def _portable_gemm(path: str, code: int, priority: int) -> Kernel:
    supports = partial(_portable_gemm_supports, path)
    return Kernel("int8_scaled_mm", path, partial(_gemm.scaled_mm, code), supports, priority, "int8")


provider = Provider(
    name="kitchen-int8",
    kernels=(
        _quantizer("quantize_int8_rowwise", _quantize_rowwise),
        _quantizer("quantize_and_rotate_rowwise", _quantize.quantize_rowwise),
        _quantizer("quantize_int8_convrot_weight", _quantize_convrot_weight),
        Kernel(
            "quantize_int8_tensorwise",
            "tensorwise",
            _tensorwise.quantize_tensorwise,
            _tensorwise_supports,
            CUDA_PRIORITY,
            "int8",
        ),
        _dequantizer("dequantize_int8", _dequantize.dequantize),
        _dequantizer("dequantize_int8_embedding", _dequantize.dequantize_embedding),
        Kernel(
            "int8_linear",
            "decode_sm90",
            _linear.decode_linear,
            _decode_linear_supports,
            DECODE_SM90_PRIORITY,
            "int8",
        ),
        Kernel("int8_linear", "sm90", _linear.hopper_linear, _hopper_linear_supports, CUDA_PRIORITY, "int8"),
        Kernel(
            "int8_scaled_mm",
            "decode_sm90",
            _gemm.decode_sm90_scaled_mm,
            _decode_sm90_supports,
            DECODE_SM90_PRIORITY,
            "int8",
        ),
        Kernel(
            "int8_scaled_mm",
            "few_rows",
            partial(_gemm.scaled_mm, _gemm.SM80),
            _few_rows_supports,
            FEW_ROWS_PRIORITY,
            "int8",
        ),
        Kernel("int8_scaled_mm", "sm90", _gemm.hopper_scaled_mm, _hopper_gemm_supports, CUDA_PRIORITY, "int8"),
        _portable_gemm("sm80", _gemm.SM80, SM80_PRIORITY),
        Kernel("int8_scaled_mm", "decode", _gemm.decode_scaled_mm, _decode_supports, DECODE_PRIORITY, "int8"),
        _portable_gemm("sm75", _gemm.SM75, SM75_PRIORITY),
        Kernel("int8_swiglu_mlp", "swiglu_sm90", _swiglu.swiglu_mlp, _swiglu_supports, CUDA_PRIORITY, "int8"),
    ),
    doctor=EXTENSION.describe,
)
