"""Launches the INT8 GEMM kernels on tensors. Arguments have been checked by the op; here only what a kernel needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from kitchen_core.arithmetic import add_residual
from kitchen_core.launch import DTYPE_CODES, current_stream, pointer

from ._extension import EXTENSION

log = logging.getLogger("kitchen")

SM75, SM80 = 75, 80  # the portable paths
MAX_PITCH = 2**31 - 1  # bytes between rows that a kernel can step over
# From so many rows of x on, operands whose rows are not aligned to 16 bytes are copied first. On an H200, K = N = 3072
# (2026-11-30): sm80 18 us in place and 27 copied at M = 1, 41 and 28 at 16, 198 and 65 at 1024; sm75 24 in place at 64.
COPY_ROWS = {SM80: 16, SM75: 256}

Plan = tuple[int, int, int, int]  # tile, stages, splits, raster_group: portable::LinearPlan of csrc
HopperPlan = tuple[int, int, int, int]  # variant, grid, raster_group, splits, 0 for the usual: LinearPlan of csrc
DecodePlan = tuple[bool, int, int]  # through shared memory or registers, variant, splits: FewRowsPlan of csrc


class PlanAnswer(NamedTuple):
    """A plan, the workspace it needs, itself in words, and why it cannot run ('' where it can)."""

    plan: Plan
    workspace_bytes: int
    words: str
    reason: str


class Operands(NamedTuple):
    """The arguments of one GEMM as the kernels take them; ``keep`` holds tensors made here until the launch."""

    M: int
    N: int
    K: int
    aligned: bool
    arguments: dict[str, Any]
    keep: tuple[torch.Tensor | None, ...]


def scaled_mm(path: int, *arguments, plan: Plan | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """int8_scaled_mm on a portable path. ``plan`` forces one, and ``out`` gives the memory (tests and measurements only)."""
    return _scaled_mm(partial(_launch_portable, path), plan, out, *arguments)


def hopper_scaled_mm(*arguments, plan: HopperPlan | None = None) -> torch.Tensor:
    """int8_scaled_mm by TMA and wgmma; with fewer tiles than SMs, K is split over clusters."""
    return _scaled_mm(partial(_launch_packed, "int8_gemm_sm90"), plan, None, *arguments)


def decode_scaled_mm(*arguments, plan: tuple[int, int] | None = None) -> torch.Tensor:
    """int8_scaled_mm for few rows of x: weights stream through registers, K is split over a cluster."""
    return _scaled_mm(partial(_launch_packed, "int8_decode"), plan, None, *arguments)


def decode_sm90_scaled_mm(*arguments, plan: DecodePlan | None = None) -> torch.Tensor:
    """int8_scaled_mm for few rows of x on Hopper: weights stream through registers, or by TMA through shared memory."""
    return _scaled_mm(partial(_launch_packed, "int8_decode_sm90"), plan, None, *arguments)


def _scaled_mm(
    launch: Callable[..., None],
    plan: tuple[int, ...] | None,
    out: torch.Tensor | None,
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """What all GEMMs have in common: ``launch(plan, out, operands)`` computes into ``out``, which is made here if not given."""
    if residual is not None and residual.dtype != out_dtype:
        y = _scaled_mm(launch, plan, None, codes, x_scale, weight, weight_scale, bias, torch.float32)
        return add_other_residual(y, residual, residual_scale, out_dtype)
    if out is None:
        out = codes.new_empty((*codes.shape[:-1], weight.shape[0]), dtype=out_dtype)
    if out.numel() > 0:
        launch(plan, out, codes, x_scale, weight, weight_scale, bias, residual, residual_scale)
    return out


def add_other_residual(
    y: torch.Tensor, residual: torch.Tensor, residual_scale: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Rare: the kernels add a residual of the output's dtype alone. ``y`` is float32, and rounded once, here."""
    scale = None if residual_scale is None else residual_scale.reshape(-1)
    return add_residual(y, residual, scale).to(out_dtype)


def _launch_portable(path: int, plan: Plan | None, out: torch.Tensor, codes: torch.Tensor, *rest) -> None:
    """Rows at any distance, of any alignment; many rows that are not aligned are copied first."""
    copy = plan is None and codes.numel() >= COPY_ROWS[path] * codes.shape[-1]
    operands = gather(codes, *rest, align=copy)
    answer = plan_of(path, operands.M, operands.N, operands.K, operands.aligned, codes.device.index, plan)
    workspace = None
    if answer.workspace_bytes:
        workspace = torch.empty(answer.workspace_bytes, dtype=torch.uint8, device=codes.device)
    launch = EXTENSION.module.int8_gemm_sm80 if path == SM80 else EXTENSION.module.int8_gemm_sm75
    launch(
        **operands.arguments, out=out.data_ptr(), out_type=DTYPE_CODES[out.dtype], workspace=pointer(workspace),
        plan=answer.plan, device=codes.device.index, stream=current_stream(codes.device.index),
    )  # fmt: skip


def _launch_packed(
    name: str,
    plan: tuple[int, ...] | None,
    out: torch.Tensor,
    codes: torch.Tensor,
    x_scale,
    weight: torch.Tensor,
    *rest,
) -> None:
    """For the kernels that want rows without gaps, aligned to 16 bytes; others are copied, which is said once."""
    codes, weight = packed_rows(codes.reshape(-1, codes.shape[-1])), packed_rows(weight)
    arguments = gather(codes, x_scale, weight, *rest).arguments
    del arguments["a_pitch"], arguments["b_pitch"]
    getattr(EXTENSION.module, name)(
        **arguments, out=out.data_ptr(), out_type=DTYPE_CODES[out.dtype], plan=plan, device=codes.device.index,
        stream=current_stream(codes.device.index),
    )  # fmt: skip


def packed_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The int8 matrix itself where its rows lie without gaps from an address aligned to 16 bytes on, else a copy that does."""
    if matrix.is_contiguous() and matrix.data_ptr() % 16 == 0:
        return matrix
    _tell_of_copies(*matrix.shape)
    return matrix.new_empty(matrix.shape).copy_(matrix)


@lru_cache(maxsize=1024)
def _tell_of_copies(rows: int, columns: int) -> None:
    """Once per shape: every call pays for the copy."""
    log.warning(
        "kitchen-int8: an int8 [%d, %d] operand has gaps between its rows or does not start at a multiple of 16 bytes; "
        "it is copied at every call, said once (make it contiguous to avoid that)", rows, columns,
    )  # fmt: skip


def gather(
    codes, x_scale, weight, weight_scale, bias=None, residual=None, residual_scale=None, *, align=False
) -> Operands:
    """Tensors to pointers and pitches; what is not rows is made contiguous.

    Rows of codes and weight are read in place at any pitch, or, with ``align``, copied unless they are aligned to 16 bytes.
    """
    a, b = byte_rows(codes.reshape(-1, codes.shape[-1])), byte_rows(weight)
    if align:
        a, b = aligned_rows(a), aligned_rows(b)
    (M, K), N = a.shape, b.shape[0]
    a_pitch, b_pitch = _pitch(a), _pitch(b)
    a_scale, b_scale = x_scale.reshape(-1).contiguous(), weight_scale.reshape(-1).contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    residual_scale = None if residual_scale is None else residual_scale.reshape(-1).contiguous()
    arguments = {
        "M": M, "N": N, "K": K, "a": a.data_ptr(), "a_pitch": a_pitch, "a_scale": a_scale.data_ptr(),
        "b": b.data_ptr(), "b_pitch": b_pitch, "b_scale": b_scale.data_ptr(), "b_scale_stride": _stride(b_scale),
        "bias": pointer(bias), "bias_type": 0 if bias is None else DTYPE_CODES[bias.dtype],
        "residual": pointer(residual), "residual_scale": pointer(residual_scale),
        "residual_scale_type": 0 if residual_scale is None else DTYPE_CODES[residual_scale.dtype],
        "residual_scale_stride": 0 if residual_scale is None else _stride(residual_scale),
    }  # fmt: skip
    aligned = (arguments["a"] | arguments["b"] | a_pitch | b_pitch) % 16 == 0
    return Operands(M, N, K, aligned, arguments, (a, b, a_scale, b_scale, bias, residual, residual_scale))


def byte_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The int8 matrix itself where its rows are contiguous and near enough to each other, else a copy."""
    contiguous = matrix.stride(1) == 1 or matrix.shape[1] == 1
    return matrix if contiguous and matrix.stride(0) <= MAX_PITCH else matrix.contiguous()


def aligned_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The int8 matrix itself where its rows are aligned to 16 bytes, else a copy whose rows are."""
    if (matrix.data_ptr() | _pitch(matrix)) % 16 == 0:
        return matrix
    rows, columns = matrix.shape
    return matrix.new_empty(rows, (columns + 15) // 16 * 16)[:, :columns].copy_(matrix)


@lru_cache(maxsize=8192)
def plan_of(path: int, M: int, N: int, K: int, aligned: bool, device: int, plan: Plan | None = None) -> PlanAnswer:
    """The plan that a path chooses on a device (or the given one), and the workspace that it needs."""
    gpu = torch.cuda.get_device_properties(device)
    return PlanAnswer(
        *EXTENSION.module.int8_gemm_portable_plan(
            path, M, N, K, aligned, gpu.multi_processor_count, gpu.shared_memory_per_block_optin,
            gpu.shared_memory_per_multiprocessor, plan,
        )
    )  # fmt: skip


def _pitch(rows: torch.Tensor) -> int:
    return rows.stride(0) if rows.shape[0] > 1 else 0


def _stride(vector: torch.Tensor) -> int:
    return 0 if vector.numel() == 1 else 1
