"""Launches the activation quantizer and the decoder of 4-bit codes. Arguments have been checked by the ops."""

from __future__ import annotations

from functools import lru_cache

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


def quantize_rows(
    rows: torch.Tensor, smooth: torch.Tensor, act_unsigned: bool, form: int = PACKED, shift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [M, K] -> codes of ``(rows + shift) / smooth`` and their scales.

    PACKED: int8 [M, K/2] and float32 [K/64, M]. E4M3: the codes as e4m3 numbers,
    uint8 [M, K], scales as parts in blocks of 64 rows.
    """
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    (m, k), device = rows.shape, rows.device
    if form == E4M3:
        codes, scales = torch.empty((m, k), dtype=torch.uint8, device=device), block_scales(m, k, A_BLOCK, device)
    else:
        codes = torch.empty((m, k // 2), dtype=torch.int8, device=device)
        scales = torch.empty((k // GROUP, m), dtype=torch.float32, device=device)
    smooth = smooth.reshape(-1).contiguous()
    EXTENSION.module.quantize_svdquant_w4a4(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[rows.dtype], smooth.data_ptr(), DTYPE_CODES[smooth.dtype],
        codes.data_ptr(), scales.data_ptr(), m, k, shift, act_unsigned, form, device.index, stream_of(rows),
    )  # fmt: skip
    return codes, scales


def aligned_codes(codes: torch.Tensor) -> torch.Tensor:
    """Packed codes whose rows follow each other and start at a multiple of 16 bytes; copied where they do not."""
    codes = codes.contiguous()
    return codes if codes.data_ptr() % 16 == 0 else codes.clone()


def decode(
    codes: torch.Tensor, scales: torch.Tensor, block: int, *, is_a: bool, act_unsigned: bool = False,
    lora_act: torch.Tensor | None = None, low: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Packed codes [rows, K/2] to e4m3 numbers, uint8 [rows, K], and scales [K/64, rows] to parts in blocks.

    ``codes`` as ``aligned_codes`` gives them; rows of ``scales`` are contiguous. On the way lora_act float32 [M, R] is rounded
    into ``low`` bfloat16 [M, >= R].
    """
    rows, k = codes.shape[0], 2 * codes.shape[1]
    out, blocks = (
        torch.empty((rows, k), dtype=torch.uint8, device=codes.device),
        block_scales(rows, k, block, codes.device),
    )
    branch = (0, 0, 0, 0, 0)
    if low is not None:
        branch = (lora_act.data_ptr(), low.data_ptr(), low.shape[0], lora_act.shape[1], low.shape[1])
    EXTENSION.module.decode_svdquant(
        codes.data_ptr(), scales.data_ptr(), scales.stride(0), DTYPE_CODES[scales.dtype], out.data_ptr(),
        blocks.data_ptr(), rows, k, block, is_a, act_unsigned, *branch, codes.device.index, stream_of(codes),
    )  # fmt: skip
    return out, blocks


def few_rows_supported(rows: torch.Tensor, rank: int) -> bool:
    """Whether one launch quantizes these rows and multiplies them by proj_down: few rows, on a GPU with clusters."""
    if rows.shape[0] == 0 or rows.shape[0] > 16 or rank == 0:
        return False
    return _has_clusters(rows.device.index) and EXTENSION.module.quantize_few_rows_supports(*rows.shape)


@lru_cache(maxsize=64)
def _has_clusters(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def quantize_few_rows(
    rows: torch.Tensor, smooth: torch.Tensor, proj_down: torch.Tensor, act_unsigned: bool, shift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes of ``(rows + shift) / smooth``, their scales float32 [K/64, M], and rows @ proj_down float32 [M, R]."""
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    (m, k), rank, device = rows.shape, proj_down.shape[1], rows.device
    codes = torch.empty((m, k // 2), dtype=torch.int8, device=device)
    scales = torch.empty((k // GROUP, m), dtype=torch.float32, device=device)
    lora_act = torch.empty((m, rank), dtype=torch.float32, device=device)
    smooth, proj_down = smooth.reshape(-1).contiguous(), proj_down.contiguous()
    EXTENSION.module.quantize_few_rows(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[rows.dtype], smooth.data_ptr(), DTYPE_CODES[smooth.dtype],
        codes.data_ptr(), scales.data_ptr(), m, k, shift, act_unsigned, proj_down.data_ptr(),
        DTYPE_CODES[proj_down.dtype], lora_act.data_ptr(), rank, device.index, stream_of(rows),
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
    if lora_x is None and few_rows_supported(rows, proj_down.shape[1]):
        return quantize_few_rows(rows, smooth, proj_down, act_unsigned)
    codes, scales = quantize_rows(rows, smooth, act_unsigned)
    raw = rows if lora_x is None else lora_x.reshape(rows.shape)
    return codes, scales, low_rank_product(raw, proj_down)
