"""AutoAWQ's three stored forms (GEMM, GEMV, GEMVFast), to and from canonical awq_w4a16 tensors. formats.md 4.4.

AutoAWQ's zeros are integers, W = (q - zi) s; ours are floats, W = (q - 8) s + z, so z = (8 - zi) s. That is computed in
fp32 and rounded once to the dtype of the scales. Back: zi = 8 - z / s must be an integer, up to what that rounding can do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import FormatError
from ..packing import pack_nibbles, unpack_nibbles
from . import nunchaku

INTEGER_SLACK = 1e-3  # how far from an integer a zero may lie besides the rounding of z, before it is refused


class Canonical(NamedTuple):
    """qdata int8 [N, K/2] with codes 0..15; scale and zeros [K/g, N]."""

    qdata: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor


class Packed(NamedTuple):
    """The three tensors of an AutoAWQ layer under their names in its files."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor


# --------------------------------------------------------------------------------------------------------- GEMM


def unpack_gemm(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Canonical:
    """A GEMM layer as canonical tensors.

    Shapes: qweight [K, N/8]; qzeros [K/g, N/8]; scales [K/g, N].
    Dtypes and units: qweight and qzeros int32 words of eight 4-bit codes; scales float16 (any float is taken).
    Layout: nibbles 0..7 of a word hold output columns 0 2 4 6 1 3 5 7.
    Returns: Canonical; zeros = (8 - qzeros) * scales, in the dtype of scales.
    Raises: FormatError for dtypes or shapes that do not fit.
    Devices: any (little-endian).
    Source: formats.md 4.4.
    """
    _check_words("qweight", qweight)
    _check_words("qzeros", qzeros)
    n = 8 * qweight.shape[1]
    groups = qzeros.shape[0]
    _check_shape("scales", scales, (groups, n), "[K/g, N]")
    _check_shape("qzeros", qzeros, (groups, n // 8), "[K/g, N/8]")
    if groups == 0 or qweight.shape[0] % groups or qweight.shape[0] % 2:
        raise FormatError(f"GEMM qweight has K={qweight.shape[0]} rows, which {groups} groups (and 2) must divide")
    codes = _columns_from_words(qweight).t()
    return Canonical(pack_nibbles(codes), scales, _float_zeros(_columns_from_words(qzeros), scales))


def pack_gemm(canonical: Canonical, layer: str = "") -> Packed:
    """Undo unpack_gemm. N must be a multiple of 8. Raises FormatError, naming layer and group, for zeros not integer."""
    _check_multiple_of_8(canonical, layer)
    zeros = integer_zeros(canonical.scale, canonical.zeros, layer)
    codes = unpack_nibbles(canonical.qdata)
    return Packed(_words_from_columns(codes.t()), _words_from_columns(zeros), canonical.scale)


def _columns_from_words(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, N/8] -> codes int8 [rows, N]: column offset 2 lo + hi sits in nibble 4 hi + lo."""
    nibbles = unpack_nibbles(words.contiguous().view(torch.int8)).unflatten(-1, (-1, 2, 4))
    return nibbles.transpose(-1, -2).reshape(words.shape[0], -1)


def _words_from_columns(codes: torch.Tensor) -> torch.Tensor:
    digits = codes.unflatten(-1, (-1, 4, 2)).transpose(-1, -2)
    return pack_nibbles(digits.reshape(codes.shape[0], -1)).view(torch.int32)


# --------------------------------------------------------------------------------------------------------- GEMV


def unpack_gemv(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> Canonical:
    """A GEMV layer as canonical tensors; the pad of zeros and scales is dropped.

    Shapes: qweight [N, K/8]; qzeros [N, P/8]; scales [N, P], P = ``nunchaku.awq_padded_groups(K, g)`` or K/g and more.
    Dtypes and units: qweight and qzeros int32 words of eight 4-bit codes in natural order; scales float16.
    Layout: natural nibble order: the bytes of qweight are the canonical ones.
    Returns: Canonical, in the dtype of scales.
    Raises: FormatError for dtypes or shapes that do not fit.
    Devices: any (little-endian).
    Source: formats.md 4.4.
    """
    _check_words("qweight", qweight)
    _check_words("qzeros", qzeros)
    n, k = qweight.shape[0], 8 * qweight.shape[1]
    groups = _groups(k, group_size)
    if qzeros.shape[0] != n or 8 * qzeros.shape[1] < groups or scales.dim() != 2 or scales.shape[0] != n:
        raise FormatError(
            f"GEMV qzeros and scales must be [N={n}, ...] with at least K/g={groups} groups, got {list(qzeros.shape)} and "
            f"{list(scales.shape)}"
        )
    if scales.shape[1] < groups:
        raise FormatError(f"GEMV scales hold {scales.shape[1]} groups, group_size {group_size} needs K/g={groups}")
    integers = unpack_nibbles(qzeros.contiguous().view(torch.int8))[:, :groups].t()
    scale = scales[:, :groups].t().contiguous()
    return Canonical(qweight.contiguous().view(torch.int8), scale, _float_zeros(integers, scale))


def pack_gemv(canonical: Canonical, layer: str = "") -> Packed:
    """Undo unpack_gemv, padding with zeros as AutoAWQ does. K must be a multiple of 8."""
    half_k = canonical.qdata.shape[1]
    if half_k % 4:
        raise FormatError(f"layer {layer!r}: GEMV words hold 8 columns, K={2 * half_k} is no multiple of 8")
    groups = canonical.scale.shape[0]
    padded = nunchaku.awq_padded_groups(2 * half_k, 2 * half_k // groups)
    zeros = integer_zeros(canonical.scale, canonical.zeros, layer).t()
    qzeros = pack_nibbles(nunchaku.pad(zeros, 1, padded).contiguous()).view(torch.int32)
    scales = nunchaku.pad(canonical.scale.t(), 1, padded).contiguous()
    return Packed(canonical.qdata.contiguous().view(torch.int32), qzeros, scales)


# ----------------------------------------------------------------------------------------------------- GEMVFast


def unpack_gemv_fast(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> Canonical:
    """A GEMVFast layer as canonical tensors; the pad of zeros and scales is dropped.

    Shapes: qweight [N/4, K]; qzeros and scales [P, N] with P >= K/g.
    Dtypes and units: qweight int16; qzeros are scaled and negative, -zi * s, in the dtype of scales.
    Layout: the word order of nunchaku's gemv_awq.
    Returns: Canonical; zeros = qzeros + 8 * scales, rounded once.
    Raises: FormatError for dtypes or shapes that do not fit.
    Devices: any (little-endian).
    Source: formats.md 4.3 and 4.4.
    """
    codes = nunchaku.unpack_awq_qweight(qweight)
    n, k = codes.shape[0], 2 * codes.shape[1]
    groups = _groups(k, group_size)
    for name, tensor in (("qzeros", qzeros), ("scales", scales)):
        if tensor.dim() != 2 or tensor.shape[1] != n or tensor.shape[0] < groups:
            raise FormatError(
                f"GEMVFast {name} must be [K/g padded, N] with at least {groups} rows and N={n}, got {list(tensor.shape)}"
            )
    scale = scales[:groups].contiguous()
    return Canonical(codes, scale, nunchaku.unpack_awq_zeros(qzeros[:groups], scale))


def pack_gemv_fast(canonical: Canonical, layer: str = "") -> Packed:
    """Undo unpack_gemv_fast. The zeros are written as AutoAWQ does, -(zi * s) from the integer zi, so bytes come back."""
    k = 2 * canonical.qdata.shape[1]
    padded = nunchaku.awq_padded_groups(k, k // canonical.scale.shape[0])
    integers = integer_zeros(canonical.scale, canonical.zeros, layer)
    scaled = -(integers.float() * canonical.scale.float()).to(canonical.scale.dtype)
    pads = (nunchaku.pad(t, padded, 1) for t in (scaled, canonical.scale))
    return Packed(nunchaku.pack_awq_qweight(canonical.qdata, torch.int16), *pads)


# -------------------------------------------------------------------------------------------------------- zeros


def integer_zeros(scale: torch.Tensor, zeros: torch.Tensor, layer: str = "") -> torch.Tensor:
    """zi = 8 - z / s of canonical float zeros, int8 [K/g, N].

    z was rounded once to its dtype, by at most half a unit of |z| <= 15 s (of 15 s + |z| where it came from GEMVFast,
    whose own zeros are rounded too); so z / s may miss an integer by that much and by INTEGER_SLACK. More is refused, with
    the layer, the group and the output named, and so is an integer outside 0..15. A group of scale 0 must have zero 0 (it
    decodes to 0 under any zi; 8 is written).
    """
    s, z = scale.float(), zeros.float()
    ratio = torch.where(s == 0, z * float("inf"), z / s)
    ratio = torch.where((s == 0) & (z == 0), 0.0, ratio)
    slack = INTEGER_SLACK + 0.5 * torch.finfo(zeros.dtype).eps * (ratio.abs() + 15.0)
    nearest = ratio.round()
    wrong = ((ratio - nearest).abs() > slack) | ~torch.isfinite(ratio) | (nearest < -7) | (nearest > 8)
    if wrong.any():
        group, output = wrong.nonzero()[0].tolist()
        raise FormatError(
            f"layer {layer!r}: {int(wrong.sum())} zeros are no integers 0..15 of AutoAWQ; the first is group {group}, output "
            f"{output}: zero {z[group, output].item():.6g} / scale {s[group, output].item():.6g} = "
            f"{ratio[group, output].item():.6g}, so zi = {8 - ratio[group, output].item():.6g}. Its zeros are floats: keep the "
            "layer in awq_w4a16"
        )
    return (8 - nearest).to(torch.int8)


def _float_zeros(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """z = (8 - zi) s in fp32, rounded once."""
    zeros = ((8 - integers.float()) * scales.float()).to(scales.dtype)
    if zeros.device.type != "meta" and not torch.isfinite(zeros).all():
        group, output = (~torch.isfinite(zeros)).nonzero()[0].tolist()
        raise FormatError(
            f"scales of group {group}, output {output}: {scales[group, output].item()} is not finite, or 8 times it does "
            f"not fit {scales.dtype}; convert scales to float32 first"
        )
    return zeros


# ------------------------------------------------------------------------------------------------------- checks


def _check_words(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise FormatError(f"{name} must be an int32 matrix, got {tensor.dtype} {list(tensor.shape)}")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != shape:
        raise FormatError(f"{name} must have shape {meaning} = {list(shape)}, got {list(tensor.shape)}")


def _check_multiple_of_8(canonical: Canonical, layer: str) -> None:
    if canonical.qdata.shape[0] % 8:
        raise FormatError(
            f"layer {layer!r}: GEMM words hold 8 outputs, N={canonical.qdata.shape[0]} is no multiple of 8"
        )


def _groups(k: int, group_size: int) -> int:
    if group_size < 1 or k % group_size:
        raise FormatError(f"group_size must be a positive divisor of K={k}, got {group_size} (-1 in a file means K)")
    return k // group_size
