"""Launches the fused WMMA kernel on tensors. Arguments have been checked by the ops; here only what a kernel needs."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from kitchen_core.arithmetic import input_width
from kitchen_core.launch import DTYPE_CODES, current_stream, pointer

from ._extension import EXTENSION

OPERAND_BYTES = 56 << 20  # of codes of x and their scales that are alive at once; the package's bound is 64 MiB


class Tile(NamedTuple):
    """A tile of the GEMM, as config.h of csrc has it, and how fast it is reckoned to be on a V100.

    ``resident`` blocks fit an SM; one alone reaches ``alone`` of the SM's matrix rate, all together ``full``.
    """

    name: str
    rows: int
    columns: int
    resident: int
    alone: float
    full: float
    raster_group: int


# Numbered as kTiles of bindings.cpp. Residence by sm_70's registers and shared memory; the rates, which only have to rank the
# tiles, from its loads of fragments and from how the same blocks scale on an H200 (docs/kernels/fallback_volta.md).
TILES = (
    Tile("small", 32, 32, 2, 0.2, 0.35, 1),
    Tile("medium", 64, 64, 2, 0.35, 0.6, 8),
    Tile("large", 128, 128, 1, 0.9, 0.9, 8),
)


@lru_cache(maxsize=8192)
def choose_tile(M: int, N: int, sm_count: int) -> int:
    """The tile whose blocks are done first: rounds of as many as the GPU holds, and what is left."""

    def time(tile: Tile) -> float:
        blocks = -(-M // tile.rows) * -(-N // tile.columns)
        rounds, left = divmod(blocks, sm_count * tile.resident)
        area = tile.rows * tile.columns
        if left > sm_count:
            rounds, left = rounds + 1, 0
        return rounds * tile.resident * area / tile.full + (area / tile.alone if left else 0)

    return min(range(len(TILES)), key=lambda i: (time(TILES[i]), -i))


def _rows(matrix: torch.Tensor) -> torch.Tensor:
    """The int8 matrix itself where its rows are contiguous, else a copy."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _vector(vector: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    return None if vector is None else vector.reshape(-1).to(dtype or vector.dtype).contiguous()


def _code(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else DTYPE_CODES[tensor.dtype]


def _stride(vector: torch.Tensor | None) -> int:
    """0 lets one element serve all."""
    return 0 if vector is None or vector.numel() == 1 else 1


def _multiply(
    out, codes, x_scale, weight, weight_scale, bias, residual, residual_scale, tile: int | None = None
) -> None:
    """out [M, N] = epilogue(codes [M, K] @ weight [N, K].T); out contiguous."""
    (M, N), K = out.shape, weight.shape[1]
    if tile is None:
        tile = choose_tile(M, N, torch.cuda.get_device_properties(out.device).multi_processor_count)
    a, b = _rows(codes), _rows(weight)
    a_scale, b_scale = _vector(x_scale), _vector(weight_scale)
    bias, residual_scale = _vector(bias), _vector(residual_scale, torch.float32)
    residual = None if residual is None else residual.contiguous()
    EXTENSION.module.int8_scaled_mm(
        M, N, K, a.data_ptr(), a.stride(0) if M > 1 else K, a_scale.data_ptr(), b.data_ptr(),
        b.stride(0) if N > 1 else K, b_scale.data_ptr(), _stride(b_scale), pointer(bias), _code(bias), pointer(residual),
        _code(residual), pointer(residual_scale), _stride(residual_scale), out.data_ptr(), DTYPE_CODES[out.dtype], tile,
        TILES[tile].raster_group, out.device.index, current_stream(out.device.index),
    )  # fmt: skip


def int8_scaled_mm(
    codes, x_scale, weight, weight_scale, bias=None, out_dtype=torch.bfloat16, residual=None, residual_scale=None,
    tile: int | None = None,
):  # fmt: skip
    """The op int8_scaled_mm; ``tile`` forces one (tests and measurements only)."""
    n, k = weight.shape
    out = codes.new_empty((*codes.shape[:-1], n), dtype=out_dtype)
    if out.numel():
        rows = codes.reshape(prod(codes.shape[:-1]), k)
        residual = None if residual is None else residual.reshape(-1, n)
        _multiply(out.view(-1, n), rows, x_scale, weight, weight_scale, bias, residual, residual_scale, tile)
    return out


def int8_linear(
    x, weight, weight_scale, bias=None, out_dtype=None, convrot_groupsize=0,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
):  # fmt: skip
    """The op int8_linear: quantize_and_rotate_rowwise, then the GEMM, for as many rows as OPERAND_BYTES holds."""
    n, k = weight.shape
    quantize = torch.ops.kitchen.quantize_and_rotate_rowwise.default
    options = (convrot_groupsize, input_act, input_act_weight, input_act_eps)
    M = prod(x.shape[:-1])
    block = rows_at_once(M, k)
    if block >= M:
        codes, scale = quantize(x, *options)
        return int8_scaled_mm(codes, scale, weight, weight_scale, bias, out_dtype or x.dtype, residual, residual_scale)
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    if not out.numel():
        return out
    x_rows, y_rows = x.reshape(M, input_width(k, input_act)), out.view(M, n)
    residual = None if residual is None else residual.reshape(M, n)
    for first in range(0, M, block):
        part = slice(first, first + block)
        codes, scale = quantize(x_rows[part], *options)
        _multiply(
            y_rows[part], codes, scale, weight, weight_scale, bias, None if residual is None else residual[part],
            residual_scale,
        )  # fmt: skip
        del codes, scale  # before the next are made
    return out


def int8_linear_fp16(
    x, weight, weight_scale, bias=None, out_dtype=None, convrot_groupsize=0,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    fp16_activations=False,
):  # fmt: skip
    """The op int8_linear_fp16 on the INT8 grid; ``fp16_activations``, always False here, are the torch path's."""
    return int8_linear(
        x, weight, weight_scale, bias, out_dtype, convrot_groupsize, input_act, input_act_weight, input_act_eps,
        residual, residual_scale,
    )  # fmt: skip


def rows_at_once(m: int, k: int) -> int:
    """Rows of x whose codes and scales fit OPERAND_BYTES: ``m`` in equal blocks, of whole tiles where there is room."""
    tile, most = TILES[-1].rows, max(1, OPERAND_BYTES // (k + 4))
    if most > tile:
        most -= most % tile
    blocks = max(1, -(-m // most))
    rows = -(-m // blocks)
    return max(1, min(most, -(-rows // tile) * tile))
