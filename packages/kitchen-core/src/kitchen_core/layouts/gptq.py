"""GPTQ's stored form of 4-bit weights, to and from canonical awq_w4a16 tensors, as far as it maps. docs/formats/gptq.md.

GPTQ's zeros are integers, W = (q - zi) s; symmetric files have zi = 8 everywhere, which is our zero 0. Files in the older
dialect ("gptq") store zi - 1, newer ones ("gptq_v2") zi itself. Columns in another order than groups (``desc_act``) have no
canonical form: their groups are not runs of columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import FormatError
from ..packing import pack_nibbles, unpack_nibbles
from .autoawq import Canonical, _check_shape, _check_words, _float_zeros, integer_zeros


class Packed(NamedTuple):
    """The tensors of a GPTQ layer under their names in its files."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor


def unpack(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    v2: bool = False,
) -> Canonical:
    """A GPTQ layer as canonical tensors.

    Shapes: qweight [K/8, N]; qzeros [K/g, N/8]; scales [K/g, N]; g_idx [K], the group of each column, or None.
    Dtypes and units: qweight and qzeros int32 words of eight 4-bit codes; scales float16 (any float is taken).
    Layout: natural nibble order, along K in qweight and along N in qzeros. ``v2``: qzeros are the zeros, not one less.
    Returns: Canonical; zeros = (8 - zi) * scales, in the dtype of scales.
    Raises: FormatError for dtypes or shapes that do not fit, and for a g_idx that is not column // g.
    Devices: any (little-endian).
    Source: docs/formats/gptq.md.
    """
    _check_words("qweight", qweight)
    _check_words("qzeros", qzeros)
    k, n = 8 * qweight.shape[0], qweight.shape[1]
    groups = qzeros.shape[0]
    if groups == 0 or k % groups or n % 8:
        raise FormatError(f"GPTQ qweight has K={k} and N={n}; {groups} groups must divide K, and 8 must divide N")
    _check_shape("scales", scales, (groups, n), "[K/g, N]")
    _check_shape("qzeros", qzeros, (groups, n // 8), "[K/g, N/8]")
    if g_idx is not None and not torch.equal(g_idx.long().cpu(), torch.arange(k, device="cpu") // (k // groups)):
        raise FormatError(
            "g_idx is not column // group_size: the file was made with desc_act, and groups of scattered columns have no "
            "awq_w4a16 form; dequantize the layer, or quantize it again without desc_act"
        )
    codes = unpack_nibbles(qweight.t().clone(memory_format=torch.contiguous_format).view(torch.int8))
    integers = unpack_nibbles(qzeros.contiguous().view(torch.int8)).to(torch.int16) + (0 if v2 else 1)
    return Canonical(pack_nibbles(codes), scales, _float_zeros(integers, scales))


def pack(canonical: Canonical, layer: str = "", *, v2: bool = False) -> Packed:
    """Undo unpack.

    Raises FormatError, naming layer and group, for zeros that are no integers or that the dialect cannot hold.
    """
    n, k = canonical.qdata.shape[0], 2 * canonical.qdata.shape[1]
    if n % 8 or k % 8:
        raise FormatError(f"layer {layer!r}: GPTQ words hold 8 codes, N={n} and K={k} must be multiples of 8")
    zeros = integer_zeros(canonical.scale, canonical.zeros, layer)
    if not v2 and (zeros == 0).any():
        group, output = (zeros == 0).nonzero()[0].tolist()
        raise FormatError(
            f"layer {layer!r}: group {group}, output {output} has zero 0, which the dialect that stores one less cannot "
            "hold; write gptq_v2"
        )
    words = pack_nibbles(unpack_nibbles(canonical.qdata)).view(torch.int32).t().contiguous()
    stored = pack_nibbles((zeros - (0 if v2 else 1)).to(torch.int8)).view(torch.int32)
    groups = canonical.scale.shape[0]
    g_idx = (torch.arange(k, device=words.device) // (k // groups)).to(torch.int32)
    return Packed(words, stored, canonical.scale, g_idx)
