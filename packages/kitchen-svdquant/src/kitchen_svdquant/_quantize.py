"""Launches the activation quantizer and the decoder of 4-bit codes. Arguments have been checked by the ops."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from kitchen_core.launch import DTYPE_CODES, current_stream
from kitchen_core.reference.svdquant import GROUP

from ._extension import EXTENSION

PACKED, E4M3 = 0, 1  # svdquant::CodeForm of csrc
A_BLOCK = 64  # rows of x that share a block of scales


def stream_of(tensor: torch.Tensor) -> int:
    return current_stream(tensor.device.index)


def block_scales(rows: int, k: int, block: int, device: torch.device) -> torch.Tensor:
    """Memory for scales as the Hopper GEMM reads them: 8 bfloat16 parts each, blocks of rows, an even number of groups."""
    groups = (k // GROUP + 1) // 2 * 2
    return torch.empty(((rows + block - 1) // block * block * groups, 8), dtype=torch.bfloat16, device=device)


class Decoded(NamedTuple):
    """Codes as the Hopper GEMM reads them: e4m3 numbers uint8 [N, K] and scales in blocks of ``block`` rows."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, n: int, k: int, block: int, device: torch.device) -> Decoded:
        return cls(torch.empty((n, k), dtype=torch.uint8, device=device), block_scales(n, k, block, device))


NO_WEIGHT, NO_LOW, NONE_CLEARED = (0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0), (0, 0)


class DecodedBeside(NamedTuple):
    """A weight that a quantizer's launch decodes too: its packed codes and scales, where both go, rows of a block of scales."""

    packed: torch.Tensor
    scales: torch.Tensor
    to: Decoded
    block: int

    def arguments(self) -> tuple[int, ...]:
        """WeightArguments of csrc/bindings.cpp."""
        return (
            self.packed.data_ptr(), self.scales.data_ptr(), self.scales.stride(0), DTYPE_CODES[self.scales.dtype],
            self.to.codes.data_ptr(), self.to.scales.data_ptr(), self.packed.shape[0], self.block,
        )  # fmt: skip


def quantize_rows(
    rows: torch.Tensor, smooth: torch.Tensor, act_unsigned: bool, form: int = PACKED, shift: float = 0.0,
    weight: DecodedBeside | None = None, low: tuple[torch.Tensor, torch.Tensor] | None = None, after_product: bool = False,
    cleared: tuple[int, int] = NONE_CLEARED,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """rows [M, K] -> codes of ``(rows + shift) / smooth`` and their scales.

    PACKED: int8 [M, K/2] and float32 [K/64, M]. E4M3: the codes as e4m3 numbers,
    uint8 [M, K], scales as parts in blocks of 64 rows.
    ``weight`` is decoded beside E4M3 codes, and then lora_act is rounded to bfloat16: ``low`` is both, [M, R] and [M, >= R].
    ``after_product``: the launch before was that of ``project``, which this one runs beside.
    ``cleared``: address and count of numbers that are set to zero for the kernel behind.
    """
    given = (rows, smooth)
    rows, smooth = rows if rows.stride(-1) == 1 else rows.contiguous(), smooth.reshape(-1).contiguous()
    if (rows.data_ptr(), smooth.data_ptr()) != (given[0].data_ptr(), given[1].data_ptr()):
        after_product = False  # the launch before is that of a copy, which this one reads
    (m, k), device = rows.shape, rows.device
    codes, scales = _empty_codes(m, k, form, device)
    rounded = NO_LOW
    if low is not None:
        lora_act, to = low
        rounded = (lora_act.data_ptr(), to.data_ptr(), to.shape[0], lora_act.shape[1], to.shape[1])
    EXTENSION.module.quantize_svdquant_w4a4(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[rows.dtype], smooth.data_ptr(), DTYPE_CODES[smooth.dtype],
        codes.data_ptr(), scales.data_ptr(), m, k, shift, act_unsigned, form,
        NO_WEIGHT if weight is None else weight.arguments(), rounded, after_product, device.index, stream_of(rows), cleared,
    )  # fmt: skip
    return codes, scales


def _empty_codes(m: int, k: int, form: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if form == E4M3:
        return torch.empty((m, k), dtype=torch.uint8, device=device), block_scales(m, k, A_BLOCK, device)
    codes = torch.empty((m, k // 2), dtype=torch.int8, device=device)
    return codes, torch.empty((k // GROUP, m), dtype=torch.float32, device=device)


def aligned_codes(codes: torch.Tensor) -> torch.Tensor:
    """Packed codes whose rows follow each other and start at a multiple of 16 bytes; copied where they do not."""
    codes = codes.contiguous()
    return codes if codes.data_ptr() % 16 == 0 else codes.clone()


def decode(
    codes: torch.Tensor, scales: torch.Tensor, block: int, *, is_a: bool, act_unsigned: bool = False,
    lora_act: torch.Tensor | None = None, low: torch.Tensor | None = None,
) -> Decoded:  # fmt: skip
    """Packed codes [rows, K/2] to e4m3 numbers, uint8 [rows, K], and scales [K/64, rows] to parts in blocks.

    ``codes`` as ``aligned_codes`` gives them; rows of ``scales`` are contiguous. On the way lora_act float32 [M, R] is rounded
    into ``low`` bfloat16 [M, >= R].
    """
    rows, k = codes.shape[0], 2 * codes.shape[1]
    out, blocks = Decoded.empty(rows, k, block, codes.device)
    branch = (0, 0, 0, 0, 0)
    if low is not None:
        branch = (lora_act.data_ptr(), low.data_ptr(), low.shape[0], lora_act.shape[1], low.shape[1])
    EXTENSION.module.decode_svdquant(
        codes.data_ptr(), scales.data_ptr(), scales.stride(0), DTYPE_CODES[scales.dtype], out.data_ptr(),
        blocks.data_ptr(), rows, k, block, is_a, act_unsigned, *branch, codes.device.index, stream_of(codes),
    )  # fmt: skip
    return Decoded(out, blocks)


def project_supported(rows: torch.Tensor, proj_down: torch.Tensor) -> bool:
    """Whether ``project`` multiplies rows [M, K] by proj_down: by tensor cores, on Hopper."""
    rank = proj_down.shape[1]
    return (
        rank > 0
        and rank % 8 == 0
        and rows.shape[0] > 0
        and rows.dtype == proj_down.dtype
        and rows.dtype != torch.float32
        and is_hopper(rows.device.index)
    )


@lru_cache(maxsize=64)
def is_hopper(device: int) -> bool:
    """Whether the kernels of Hopper run there."""
    return torch.cuda.get_device_capability(device) == (9, 0) and hasattr(EXTENSION.module, "project_rows")


def project(rows: torch.Tensor, proj_down: torch.Tensor, low_dtype: torch.dtype) -> torch.Tensor:
    """rows @ proj_down [M, R] of ``low_dtype``, where ``project_supported``. ``quantize_rows`` behind it may run beside it."""
    if rows.stride(-1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        rows = _copied(rows)
    proj_down = proj_down.contiguous()
    proj_down = proj_down if proj_down.data_ptr() % 16 == 0 else proj_down.clone()
    (m, k), rank, device = rows.shape, proj_down.shape[1], rows.device
    low = torch.empty((m, rank), dtype=low_dtype, device=device)
    EXTENSION.module.project_rows(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[rows.dtype], m, k, proj_down.data_ptr(), rank, low.data_ptr(),
        low_dtype == torch.bfloat16, device.index, stream_of(rows),
    )  # fmt: skip
    return low


def _copied(rows: torch.Tensor) -> torch.Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


FEW_ROWS, FEW_ROWS_K, FEW_ROWS_RANK = 96, 2**20, 1024  # the most that quantize_few_rows takes


def few_rows_supported(rows: torch.Tensor, proj_down: torch.Tensor) -> bool:
    """Whether one launch quantizes these rows [M, K] and multiplies them by proj_down: few rows, on a GPU with clusters."""
    (m, k), rank = rows.shape, proj_down.shape[1]
    return (
        0 < m <= FEW_ROWS
        and k <= FEW_ROWS_K
        and rank % 4 == 0
        and rank <= FEW_ROWS_RANK
        and rows.dtype != torch.float32
        and rows.dtype == proj_down.dtype
        and _has_clusters(rows.device.index)
    )


@lru_cache(maxsize=64)
def _has_clusters(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def quantize_few_rows(
    rows: torch.Tensor, smooth: torch.Tensor, proj_down: torch.Tensor, act_unsigned: bool, shift: float = 0.0,
    cleared: tuple[int, int] = NONE_CLEARED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Packed codes of ``(rows + shift) / smooth``, their scales float32 [K/64, M], and rows @ proj_down float32 [M, R].

    ``cleared`` as in ``quantize_rows``.
    """
    if rows.stride(-1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        rows = _copied(rows)
    (m, k), rank, device = rows.shape, proj_down.shape[1], rows.device
    codes = torch.empty((m, k // 2), dtype=torch.int8, device=device)
    scales = torch.empty((k // GROUP, m), dtype=torch.float32, device=device)
    lora_act = torch.empty((m, rank), dtype=torch.float32, device=device)
    smooth, proj_down = smooth.reshape(-1).contiguous(), proj_down.contiguous()
    proj_down = proj_down if proj_down.data_ptr() % 4 == 0 else proj_down.clone()
    EXTENSION.module.quantize_few_rows(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[rows.dtype], smooth.data_ptr(), DTYPE_CODES[smooth.dtype],
        codes.data_ptr(), scales.data_ptr(), m, k, shift, act_unsigned, proj_down.data_ptr(),
        DTYPE_CODES[proj_down.dtype], lora_act.data_ptr(), rank, device.index, stream_of(rows), cleared,
    )  # fmt: skip
    return codes, scales, lora_act


def low_rank_product(rows: torch.Tensor, proj_down: torch.Tensor) -> torch.Tensor:
    """rows @ proj_down in fp32, [M, R], by the GPU's BLAS."""
    if rows.dtype == proj_down.dtype and rows.dtype != torch.float32 and rows.shape[0] and proj_down.shape[1]:
        return torch.mm(rows, proj_down, out_dtype=torch.float32)
    return rows.float() @ proj_down.float()


def quantize_w4a4(
    x: torch.Tensor, smooth: torch.Tensor, proj_down: torch.Tensor, act_unsigned: bool = False,
    lora_x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """quantize_svdquant_w4a4."""
    rows = x.reshape(-1, x.shape[-1])
    if lora_x is None and few_rows_supported(rows, proj_down):
        return quantize_few_rows(rows, smooth, proj_down, act_unsigned)
    raw = rows if lora_x is None else lora_x.reshape(rows.shape)
    if project_supported(raw, proj_down):
        low = project(raw, proj_down, torch.float32)
        return *quantize_rows(rows, smooth, act_unsigned, after_product=True), low
    codes, scales = quantize_rows(rows, smooth, act_unsigned)
    return codes, scales, low_rank_product(raw, proj_down)
