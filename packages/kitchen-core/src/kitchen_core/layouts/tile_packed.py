"""The tile-packed form of svdquant_w4a4 tensors ("kitchen_tile_packed_w4a4"), recognised by rank. formats.md 3.1.

weight [N/128, K/64, 32, 128]: the last axis is 4 rows x 32 bytes, natural row = 128 nt + 4 quad + r, byte = 32 kt + b.
weight_scale [N/128, K/64, 128] for [K/64, N]. proj_up [N/128, R, 128] for [N, R]. All else is stored naturally.
"""

from __future__ import annotations

import torch

from ..errors import FormatError

TILE_N = 128
GROUP_BYTES = 32


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """int8 [N, K/2] -> [N/128, K/64, 32, 128]. Raises FormatError unless 128 divides N and 64 divides K."""
    n, half_k = _matrix("weight", weight)
    _divides("weight", n, TILE_N, "N")
    _divides("weight", 2 * half_k, 2 * GROUP_BYTES, "K")
    tiles = weight.reshape(n // TILE_N, 32, 4, half_k // GROUP_BYTES, GROUP_BYTES)
    return tiles.permute(0, 3, 1, 2, 4).reshape(n // TILE_N, half_k // GROUP_BYTES, 32, 128)


def unpack_weight(tiles: torch.Tensor) -> torch.Tensor:
    """int8 [N/128, K/64, 32, 128] -> [N, K/2]."""
    if tiles.dim() != 4 or tuple(tiles.shape[2:]) != (32, 128):
        raise FormatError(f"a tile-packed weight is [N/128, K/64, 32, 128], got shape {list(tiles.shape)}")
    row_tiles, groups = tiles.shape[:2]
    rows = tiles.reshape(row_tiles, groups, 32, 4, GROUP_BYTES).permute(0, 2, 3, 1, 4)
    return rows.reshape(row_tiles * TILE_N, groups * GROUP_BYTES)


def pack_scale(scale: torch.Tensor) -> torch.Tensor:
    """[K/64, N] -> [N/128, K/64, 128]."""
    groups, n = _matrix("weight_scale", scale)
    _divides("weight_scale", n, TILE_N, "N")
    return scale.reshape(groups, n // TILE_N, TILE_N).transpose(0, 1).contiguous()


def unpack_scale(tiles: torch.Tensor) -> torch.Tensor:
    """[N/128, K/64, 128] -> [K/64, N]."""
    row_tiles, groups = _tiles("weight_scale", tiles, "[N/128, K/64, 128]")
    return tiles.transpose(0, 1).reshape(groups, row_tiles * TILE_N)


def pack_proj_up(proj_up: torch.Tensor) -> torch.Tensor:
    """[N, R] -> [N/128, R, 128]."""
    n, rank = _matrix("proj_up", proj_up)
    _divides("proj_up", n, TILE_N, "N")
    return proj_up.reshape(n // TILE_N, TILE_N, rank).transpose(1, 2).contiguous()


def unpack_proj_up(tiles: torch.Tensor) -> torch.Tensor:
    """[N/128, R, 128] -> [N, R]."""
    row_tiles, rank = _tiles("proj_up", tiles, "[N/128, R, 128]")
    return tiles.transpose(1, 2).reshape(row_tiles * TILE_N, rank)


def _matrix(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise FormatError(f"{name} must be a matrix to be tile-packed, got shape {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def _tiles(name: str, tensor: torch.Tensor, meaning: str) -> tuple[int, int]:
    if tensor.dim() != 3 or tensor.shape[2] != TILE_N:
        raise FormatError(f"a tile-packed {name} is {meaning}, got shape {list(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def _divides(name: str, size: int, unit: int, symbol: str) -> None:
    if size % unit:
        raise FormatError(f"{name} with {symbol}={size} cannot be tile-packed: {symbol} must be a multiple of {unit}")
