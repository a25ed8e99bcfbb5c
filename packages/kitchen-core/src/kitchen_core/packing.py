"""Canonical packing of 4-bit and 6-bit codes along the last dim: the byte order of every checkpoint format.

Nibbles: byte j holds column 2j in bits 0-3 and column 2j+1 in bits 4-7. 6 bits: a row is a nibble plane of K/2 bytes
with the low four bits, then a high plane of K/4 bytes with the top two bits of column c in byte c//4 at bit 2*(c%4).
Layouts that are resident only (tiles for a kernel) belong to their format; nothing here depends on a device.
"""

from __future__ import annotations

import torch

from .errors import UnsupportedError


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes, two to a byte. Only the low four bits are taken, so -8..7 and 0..15 both pack as they are.

    Shapes: codes [..., K], K even.
    Dtypes and units: codes int8 or uint8 (or a wider integer).
    Layout: any strides; the result is contiguous.
    Returns: int8 [..., K/2].
    Raises: UnsupportedError for an odd K, a 0-dim tensor or a dtype that is no integer.
    Devices: any.
    Source: docs/formats/asym_w4a8_int8.md.
    """
    pairs = _split(_bytes(codes, "codes"), 2)
    return ((pairs[..., 0] & 15) | (pairs[..., 1] << 4)).contiguous().view(torch.int8)


def unpack_nibbles(packed: torch.Tensor, signed: bool = False) -> torch.Tensor:
    """Undo pack_nibbles: codes 0..15, or -8..7 (two's complement) where ``signed``.

    Shapes: packed [..., K/2].
    Dtypes and units: packed int8 or uint8.
    Layout: any strides; the result is contiguous.
    Returns: int8 [..., K].
    Raises: UnsupportedError for a 0-dim tensor or a dtype that is no integer.
    Devices: any.
    Source: docs/formats/asym_w4a8_int8.md.
    """
    raw = _bytes(packed, "packed")
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2).view(torch.int8)
    return (codes ^ 8) - 8 if signed else codes


def pack_6bit(codes: torch.Tensor) -> torch.Tensor:
    """Pack 6-bit codes 0..63 in two planes, 0.75 bytes a code. Only the low six bits are taken.

    Shapes: codes [..., K], K a multiple of 4.
    Dtypes and units: codes int8 or uint8 (or a wider integer), level + 32.
    Layout: any strides; the result is contiguous.
    Returns: int8 [..., 3K/4]: K/2 bytes of low nibbles, then K/4 bytes of top bits.
    Raises: UnsupportedError for a K that 4 does not divide, a 0-dim tensor or a dtype that is no integer.
    Devices: any.
    Source: docs/formats/asym_w4a8_int8.md.
    """
    raw = _bytes(codes, "codes")
    top = _split((raw >> 4) & 3, 4)
    high = top[..., 0] | (top[..., 1] << 2) | (top[..., 2] << 4) | (top[..., 3] << 6)
    return torch.cat((pack_nibbles(raw), high.view(torch.int8)), dim=-1)


def unpack_6bit(packed: torch.Tensor) -> torch.Tensor:
    """Undo pack_6bit: codes 0..63.

    Shapes: packed [..., 3K/4].
    Dtypes and units: packed int8 or uint8.
    Layout: any strides; the result is contiguous.
    Returns: int8 [..., K].
    Raises: UnsupportedError for a last dim that 3 does not divide, a 0-dim tensor or a dtype that is no integer.
    Devices: any.
    Source: docs/formats/asym_w4a8_int8.md.
    """
    raw = _bytes(packed, "packed")
    if raw.shape[-1] % 3:
        raise UnsupportedError(
            f"6-bit rows are 3K/4 bytes, so their length is a multiple of 3, got shape {list(packed.shape)}; "
            "is this a 4-bit weight?"
        )
    k = raw.shape[-1] // 3 * 4
    high = raw[..., k // 2 :]
    top = torch.stack((high & 3, (high >> 2) & 3, (high >> 4) & 3, high >> 6), dim=-1).flatten(-2)
    return unpack_nibbles(raw[..., : k // 2]) | (top << 4).view(torch.int8)


def _bytes(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 of the same low bits: shifts of uint8 are logical on every device."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool or tensor.dim() == 0:
        raise UnsupportedError(
            f"{name} must be an integer tensor of at least one dim, got {tensor.dtype} of shape {list(tensor.shape)}"
        )
    return (tensor if tensor.dtype.itemsize == 1 else tensor & 255).to(torch.uint8)


def _split(raw: torch.Tensor, size: int) -> torch.Tensor:
    """[..., K] as [..., K/size, size]."""
    if raw.shape[-1] % size:
        raise UnsupportedError(f"the last dim must be a multiple of {size} to be packed, got shape {list(raw.shape)}")
    return raw.unflatten(-1, (raw.shape[-1] // size, size))
