"""What kitchen-svdquant offers, and when: the records of its CUDA kernels."""

from __future__ import annotations

from functools import partial

from kitchen_core.devices import DeviceFacts
from kitchen_core.reference.svdquant import GROUP
from kitchen_core.registry import Kernel, Problem, Provider

from . import _hopper, _quantize, _stream
from ._extension import EXTENSION

PACKED_PRIORITY, FEW_ROWS_PRIORITY = 120, 110
CUDA_PRIORITY, INT4_PRIORITY, SM80_PRIORITY, SM75_PRIORITY = 100, 85, 80, 70
FEW_ROWS = 64  # up to here the weight is streamed: docs/kernels/svdquant.md
FEW_ROWS_K, FEW_ROWS_NUMBERS = 2**25, 2**30  # what 32-bit offsets reach: of K, and of scales or of numbers of proj_up
# For these M codes are decoded where they are multiplied (the same page): of narrow layers, of wide ones, and of others.
PACKED_ROWS, PACKED_ROWS_WIDE, PACKED_ROWS_ELSE = range(33, 129), range(17, 65), range(17, 97)
PACKED_REFUSES = ("scales=float32", "proj_up=float16", "proj_up=float32")
MAX_ROWS = 2**30  # of x and of the weight


def _too_large(problem: Problem) -> str | None:
    if max(problem.M, problem.N, problem.K) > MAX_ROWS:
        return f"takes M, N and K up to {MAX_ROWS}, the call has M={problem.M} N={problem.N} K={problem.K}"
    return None


def _quantizer_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    return EXTENSION.why_not(facts) or _too_large(problem)


def _hopper_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if facts.kind == "cuda" and facts.sm != 90:
        return f"needs sm_90 (wgmma), the device is {facts}"
    return EXTENSION.why_not_path(facts, "sm90") or _too_large(problem)


def _stream_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = EXTENSION.why_not_path(facts, "sm80")
    if reason is not None:
        return reason
    if facts.sm < 80:
        return f"needs sm_80 or later, the device is {facts}"
    return _too_large(problem)


def _turing_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    reason = EXTENSION.why_not_path(facts, "sm75")
    if reason is None and not facts.int8_tensor_cores:
        reason = f"needs INT8 tensor cores, the device is {facts}"
    return reason or _too_large(problem)


def _int4_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    if facts.kind == "cuda" and facts.sm >= 100:
        return f"4-bit MMA exists on sm_80 to sm_90, the device is {facts}"
    return _stream_supports(problem, facts)


def _few_rows_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Where streaming the weight beats tiles of 128 rows; measured on an H200, 2026-11-30."""
    if problem.M > FEW_ROWS:
        return f"for M of at most {FEW_ROWS}, the call has {problem.M}"
    reason = _stream_supports(problem, facts)
    if reason is None and facts.sm < 90:
        reason = f"multiplies 8-bit integers, and {facts} has 4-bit MMA"
    if reason is not None or facts.sm != 90:
        return reason
    columns = _columns_of_whole(problem)
    if problem.K > FEW_ROWS_K or columns * max(problem.K // GROUP, problem.rank) > FEW_ROWS_NUMBERS:
        found = f"the call has K={problem.K}, {columns} output columns and rank {problem.rank}"
        return f"takes K up to {FEW_ROWS_K}, and up to {FEW_ROWS_NUMBERS} scales of the weight, or numbers of proj_up; {found}"
    return None


def _columns_of_whole(problem: Problem) -> int:
    """A part of a weight goes where the whole does."""
    return problem.N if problem.part is None else problem.part[1]


def _packed_rows(columns: int, sm_count: int) -> range:
    """For how many rows packed is faster than few_rows and sm90: by how many of its tiles of 96 columns an SM has."""
    if columns <= 24 * sm_count:
        return PACKED_ROWS
    if columns >= 64 * sm_count and not 84 * sm_count <= columns <= 96 * sm_count:
        return PACKED_ROWS_WIDE
    return PACKED_ROWS_ELSE


def _packed_supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Where tiles of four bits a code beat streaming the weight, and decoding it first; measured on an H200, 2026-12-01."""
    reason = _hopper_supports(problem, facts)
    if reason is not None:
        return reason
    columns = _columns_of_whole(problem)
    rows = _packed_rows(columns, facts.sm_count)
    if problem.M and problem.M not in rows:
        return f"with {columns} output columns, for M of {rows[0]} to {rows[-1]}; the call has {problem.M}"
    if problem.rank % 2:
        return f"takes an even rank, the call has rank {problem.rank}"
    found = [word for word in problem.options if word in PACKED_REFUSES]
    if found:
        return f"takes scales of 16 bits and a bfloat16 proj_up, the call has {' and '.join(found)}"
    return None


def _scaled_mm(name: str, function, supports, priority: int) -> Kernel:
    return Kernel("scaled_mm_svdquant_w4a4", name, function, supports, priority, "svdquant")


def _linear(name: str, function, supports, priority: int) -> Kernel:
    return Kernel("svdquant_linear", name, function, supports, priority, "svdquant")


provider = Provider(
    name="kitchen-svdquant",
    kernels=(
        Kernel(
            "quantize_svdquant_w4a4", "groups", _quantize.quantize_w4a4, _quantizer_supports, CUDA_PRIORITY, "svdquant"
        ),
        _scaled_mm("packed", partial(_stream.scaled_mm, _stream.PACKED), _packed_supports, PACKED_PRIORITY),
        _scaled_mm("few_rows", partial(_stream.scaled_mm, _stream.FEW_ROWS), _few_rows_supports, FEW_ROWS_PRIORITY),
        _scaled_mm("sm90", _hopper.scaled_mm, _hopper_supports, CUDA_PRIORITY),
        _scaled_mm("int4", partial(_stream.scaled_mm, _stream.INT4), _int4_supports, INT4_PRIORITY),
        _scaled_mm("sm80", partial(_stream.scaled_mm, _stream.BYTES), _stream_supports, SM80_PRIORITY),
        _scaled_mm("sm75", partial(_stream.scaled_mm, _stream.TURING), _turing_supports, SM75_PRIORITY),
        _linear("packed", partial(_stream.linear, _stream.PACKED), _packed_supports, PACKED_PRIORITY),
        _linear("few_rows", partial(_stream.linear, _stream.FEW_ROWS), _few_rows_supports, FEW_ROWS_PRIORITY),
        _linear("sm90", _hopper.linear, _hopper_supports, CUDA_PRIORITY),
    ),
    doctor=EXTENSION.describe,
)
