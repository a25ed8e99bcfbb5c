"""Launches the dequantizer kernels on tensors. Arguments have been checked by the op; here only what the kernels need."""

from __future__ import annotations

import torch

from kitchen_core.launch import DTYPE_CODES, current_stream

from ._extension import EXTENSION


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
) -> torch.Tensor:
    """codes [..., K] on a CUDA device and one scale, or one a row -> ``out_dtype`` [..., K] (float32 where None)."""
    rows = codes.reshape(-1, codes.shape[-1])
    return _launch(rows, scale, None, codes.shape, out_dtype, convrot_groupsize)


def dequantize_embedding(
    codes: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
) -> torch.Tensor:
    """Rows ``indices`` [...] of codes [V, K] -> ``out_dtype`` [..., K]. An index that names no row gives a row of NaN."""
    shape = (*indices.shape, codes.shape[1])
    return _launch(codes, scale, indices.reshape(-1).contiguous(), shape, out_dtype, convrot_groupsize)


def _launch(rows, scale, indices, shape, out_dtype, group) -> torch.Tensor:
    """Rows at any pitch are read in place; rows whose columns are not neighbours are copied first."""
    out = torch.empty(shape, dtype=out_dtype or torch.float32, device=rows.device)
    if out.numel() == 0:
        return out
    if rows.shape[0] == 0:  # every index is out of range, and there is no row to read
        return out.fill_(float("nan"))
    if rows.stride(-1) != 1 and rows.shape[1] > 1:
        rows = rows.contiguous()
    scale = scale.reshape(-1).contiguous()
    device = rows.device
    EXTENSION.module.dequantize_int8(
        rows.data_ptr(), rows.stride(0), rows.shape[0], rows.shape[1], scale.data_ptr(), 0 if scale.numel() == 1 else 1,
        0 if indices is None else indices.data_ptr(), indices is not None and indices.dtype == torch.int32,
        out.data_ptr(), DTYPE_CODES[out.dtype], rows.shape[0] if indices is None else indices.numel(), group,
        device.index, current_stream(device.index),
    )  # fmt: skip
    return out
