"""nunchaku's byte orders, to and from canonical tensors. formats.md 3.5 (SVDQuant tiles) and 4.3 (gemv_awq).

Every SVDQuant order is a permutation of index digits: a buffer of the same size is viewed with one axis per digit, the
axes are permuted, and the result is viewed again. The letters of the digits are those of formats.md. Sizes are the padded
ones: N and K multiples of 128 (64 for K suffices for the byte order), R a multiple of 16; ``pad`` adds zeros and the
caller slices them off.
"""

from __future__ import annotations

import torch

from ..errors import FormatError
from ..packing import pack_nibbles, unpack_nibbles

# ------------------------------------------------------------------------------------------------ svdquant int4


def unpack_qweight(buffer: torch.Tensor) -> torch.Tensor:
    """qweight buffer int8 [N, K/2] -> canonical int8 [N, K/2], signed nibbles.

    Shapes: N a multiple of 128, K of 64.
    Dtypes and units: int8; two 4-bit codes a byte on both sides.
    Layout: byte digits (nt, kt, a, c, e, b, d, f/2) -> (nt, a, b, c, kt, d, e, f/2): nibble pairs stay together.
    Returns: a contiguous int8 tensor.
    Raises: FormatError for another dtype or size.
    Devices: any.
    Source: formats.md 3.5.
    """
    n, k = _qweight_sizes(buffer)
    digits = buffer.reshape(n // 128, k // 64, 8, 8, 4, 2, 2, 4)
    return digits.permute(0, 2, 5, 3, 1, 6, 4, 7).reshape(n, k // 2)


def pack_qweight(codes: torch.Tensor) -> torch.Tensor:
    """Undo unpack_qweight: canonical int8 [N, K/2] -> buffer int8 [N, K/2]."""
    n, k = _qweight_sizes(codes)
    digits = codes.reshape(n // 128, 8, 2, 8, k // 64, 2, 4, 4)
    return digits.permute(0, 4, 1, 3, 6, 2, 5, 7).reshape(n, k // 2)


def unpack_wscales(buffer: torch.Tensor) -> torch.Tensor:
    """wscales buffer [K/64, N] -> canonical [K/64, N]: digits (nt, group, a, c, b, d) -> (group, nt, a, b, c, d).

    Raises FormatError unless it is a matrix with N a multiple of 128.
    """
    groups, n = _matrix("wscales", buffer, 1, 128)
    digits = buffer.reshape(n // 128, groups, 8, 4, 2, 2)
    return digits.permute(1, 0, 2, 4, 3, 5).reshape(groups, n)


def pack_wscales(scales: torch.Tensor) -> torch.Tensor:
    """Undo unpack_wscales."""
    groups, n = _matrix("wscales", scales, 1, 128)
    digits = scales.reshape(groups, n // 128, 8, 2, 4, 2)
    return digits.permute(1, 0, 2, 4, 3, 5).reshape(groups, n)


def unpack_vector(buffer: torch.Tensor) -> torch.Tensor:
    """bias [N], smooth or smooth_orig [K] -> natural order: digits (nt, a, c, b, d) -> (nt, a, b, c, d).

    Raises FormatError unless it is 1-D with a multiple of 128 elements.
    """
    size = _vector(buffer)
    return buffer.reshape(size // 128, 8, 4, 2, 2).transpose(2, 3).reshape(size)


def pack_vector(vector: torch.Tensor) -> torch.Tensor:
    """Undo unpack_vector."""
    size = _vector(vector)
    return vector.reshape(size // 128, 8, 2, 4, 2).transpose(2, 3).reshape(size)


def unpack_lora_down(buffer: torch.Tensor) -> torch.Tensor:
    """lora_down buffer [K, R] -> canonical proj_down [K, R].

    Digits (kp, rp, c, e, b, d, f) -> (kp, d, e, f, rp, b, c). Raises FormatError unless 16 divides K and R.
    """
    k, rank = _matrix("lora_down", buffer, 16, 16)
    digits = buffer.reshape(k // 16, rank // 16, 8, 4, 2, 2, 2)
    return digits.permute(0, 5, 3, 6, 1, 4, 2).reshape(k, rank)


def pack_lora_down(proj_down: torch.Tensor) -> torch.Tensor:
    """Undo unpack_lora_down."""
    k, rank = _matrix("lora_down", proj_down, 16, 16)
    digits = proj_down.reshape(k // 16, 2, 4, 2, rank // 16, 2, 8)
    return digits.permute(0, 4, 6, 2, 5, 1, 3).reshape(k, rank)


def unpack_lora_up(buffer: torch.Tensor) -> torch.Tensor:
    """lora_up buffer [N, R] -> canonical proj_up [N, R].

    Digits (np, rp, c, e, b, d, f) -> (np, b, c, rp, d, e, f). Raises FormatError unless 16 divides N and R.
    """
    n, rank = _matrix("lora_up", buffer, 16, 16)
    digits = buffer.reshape(n // 16, rank // 16, 8, 4, 2, 2, 2)
    return digits.permute(0, 4, 2, 1, 5, 3, 6).reshape(n, rank)


def pack_lora_up(proj_up: torch.Tensor) -> torch.Tensor:
    """Undo unpack_lora_up."""
    n, rank = _matrix("lora_up", proj_up, 16, 16)
    digits = proj_up.reshape(n // 16, 2, 8, rank // 16, 2, 4, 2)
    return digits.permute(0, 3, 2, 5, 1, 4, 6).reshape(n, rank)


def pad(tensor: torch.Tensor, *multiples: int) -> torch.Tensor:
    """``tensor`` with zeros behind each dim, up to the next multiple: ``pad(proj_up, 128, 16)``."""
    widths = [(-size) % multiple for size, multiple in zip(tensor.shape, multiples, strict=True)]
    pairs = [amount for width in reversed(widths) for amount in (0, width)]
    return torch.nn.functional.pad(tensor, pairs) if any(widths) else tensor


# ----------------------------------------------------------------------------------------------------- gemv_awq


def unpack_awq_qweight(buffer: torch.Tensor) -> torch.Tensor:
    """gemv_awq qweight, int32 [N/4, K/2] or int16 [N/4, K] -> canonical int8 [N, K/2], unsigned nibbles.

    Shapes: N a multiple of 4, K of 64.
    Dtypes and units: int32 or int16 words of 4-bit codes 0..15.
    Layout: n = 4a + b, k = 64 kt + 32 d + 8 e + f: word16 digits (a, kt, b, d, f), nibble e of it.
    Returns: a contiguous int8 tensor.
    Raises: FormatError for another dtype or size.
    Devices: any (little-endian).
    Source: formats.md 4.3; AutoAWQ's GEMVFast has the same order.
    """
    if buffer.dtype not in (torch.int32, torch.int16) or buffer.dim() != 2:
        raise FormatError(
            f"gemv_awq qweight is int32 [N/4, K/2] or int16 [N/4, K], got {buffer.dtype} {list(buffer.shape)}"
        )
    n, k = 4 * buffer.shape[0], buffer.shape[1] * buffer.dtype.itemsize // 2
    if k == 0 or k % 64:
        raise FormatError(f"gemv_awq qweight has K={k}; K must be a multiple of 64")
    nibbles = unpack_nibbles(buffer.contiguous().view(torch.int8)).reshape(n // 4, k // 64, 4, 2, 8, 4)
    return pack_nibbles(nibbles.permute(0, 2, 1, 3, 5, 4).reshape(n, k))


def pack_awq_qweight(codes: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Undo unpack_awq_qweight: canonical int8 [N, K/2] -> int32 [N/4, K/2] (or int16 [N/4, K] as ``dtype`` says)."""
    n, half_k = _matrix("qweight", codes, 4, 32)
    nibbles = unpack_nibbles(codes).reshape(n // 4, 4, half_k // 32, 2, 4, 8)
    words = pack_nibbles(nibbles.permute(0, 2, 1, 3, 5, 4).reshape(n // 4, 8 * half_k))
    return words.view(dtype)


def unpack_awq_zeros(scaled_zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """zn of W = q s + zn -> z of W = (q - 8) s + z: zn + 8 s in fp32, rounded once to zn's dtype."""
    return (scaled_zeros.float() + 8.0 * scales.float()).to(scaled_zeros.dtype)


def pack_awq_zeros(zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """z -> zn = z - 8 s in fp32, rounded once to z's dtype."""
    return (zeros.float() - 8.0 * scales.float()).to(zeros.dtype)


def awq_padded_groups(in_features: int, group_size: int) -> int:
    """Rows of padded scales and zeros: K/g up to a multiple of 8 (g >= 128), 16 (g = 64) or 32 (g = 32).

    Raises FormatError for a group that those kernels do not know.
    """
    multiple = {32: 32, 64: 16}.get(group_size, 8 if group_size >= 128 else 0)
    if not multiple or in_features % group_size:
        raise FormatError(
            f"gemv layouts take groups of 32, 64, or 128 and more that divide K={in_features}, got {group_size}"
        )
    return -(-(in_features // group_size) // multiple) * multiple


# --------------------------------------------------------------------------------------------------- adaLN rows


def deinterleave_rows(tensor: torch.Tensor, splits: int, dim: int = 0) -> torch.Tensor:
    """Undo the interleaving of adaLN outputs along ``dim`` (0 or 1): stored c * S + j -> logical j * (N / S) + c."""
    _check_splits(tensor.shape[dim], splits)
    return tensor.unflatten(dim, (-1, splits)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def interleave_rows(tensor: torch.Tensor, splits: int, dim: int = 0) -> torch.Tensor:
    """Undo deinterleave_rows: logical j * (N / S) + c -> stored c * S + j."""
    _check_splits(tensor.shape[dim], splits)
    return tensor.unflatten(dim, (splits, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def remove_folded_one(bias: torch.Tensor, splits: int) -> torch.Tensor:
    """Take the 1 off the scale segments of an adaLN bias in logical order, in fp32 with one rounding.

    Segments 1 and S - 2 hold the scales; for S = 3 they are one and the same, and 1 is taken once.
    """
    return _add_to_scale_segments(bias, splits, -1.0)


def add_folded_one(bias: torch.Tensor, splits: int) -> torch.Tensor:
    """Undo remove_folded_one."""
    return _add_to_scale_segments(bias, splits, 1.0)


def _add_to_scale_segments(bias: torch.Tensor, splits: int, amount: float) -> torch.Tensor:
    _check_splits(bias.shape[0], splits)
    segments = bias.float().reshape(splits, -1).clone()
    for j in {1, splits - 2}:
        segments[j] += amount
    return segments.reshape(-1).to(bias.dtype)


# -------------------------------------------------------------------------------------------------------- checks


def _matrix(name: str, tensor: torch.Tensor, rows: int, columns: int) -> tuple[int, int]:
    if tensor.dim() != 2 or tensor.shape[0] % rows or tensor.shape[1] % columns:
        raise FormatError(
            f"{name} must be a matrix of a multiple of {rows} rows and a multiple of {columns} columns for nunchaku's "
            f"order, got shape {list(tensor.shape)}; pad it with kitchen_core.layouts.nunchaku.pad"
        )
    return tensor.shape[0], tensor.shape[1]


def _qweight_sizes(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.dtype not in (torch.int8, torch.uint8):
        raise FormatError(
            f"qweight must be int8 [N, K/2], got {tensor.dtype} {list(tensor.shape)}; FP4 files (nvfp4) are not supported"
        )
    n, half_k = _matrix("qweight", tensor, 128, 32)
    return n, 2 * half_k


def _vector(tensor: torch.Tensor) -> int:
    if tensor.dim() != 1 or tensor.shape[0] % 128:
        raise FormatError(
            f"a packed bias or smooth is 1-D with a multiple of 128 elements, got shape {list(tensor.shape)}"
        )
    return tensor.shape[0]


def _check_splits(size: int, splits: int) -> None:
    if splits not in (3, 6) or size % splits:
        raise FormatError(f"adaLN outputs come in 3 or 6 splits of one size, got {splits} splits of {size} rows")
