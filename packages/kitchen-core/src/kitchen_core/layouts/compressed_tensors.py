"""compressed-tensors' ``pack-quantized`` W4A16, to and from canonical awq_w4a16 tensors. docs/formats/compressed_tensors.md.

Codes are signed there, W = (q - zp) s with q and zp in -8..7, both stored with 8 added. Symmetric files have no zero points.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import FormatError
from ..packing import pack_nibbles, unpack_nibbles
from .autoawq import Canonical, _check_words, _float_zeros, integer_zeros


class Packed(NamedTuple):
    """The tensors of a layer under their names in the files; ``weight_zero_point`` is None in symmetric ones."""

    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_shape: torch.Tensor
    weight_zero_point: torch.Tensor | None


def unpack(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor | tuple[int, int],
    weight_zero_point: torch.Tensor | None = None,
) -> Canonical:
    """A ``pack-quantized`` layer of 4 bits as canonical tensors.

    Shapes: weight_packed [N, ceil(K/8)]; weight_scale [N, K/g] (one column: a scale a row); weight_shape two numbers, N
        and K; weight_zero_point [ceil(N/8), K/g].
    Dtypes and units: weight_packed and weight_zero_point int32 words of eight 4-bit numbers plus 8; weight_scale float.
    Layout: natural nibble order, along K in weight_packed and along N in weight_zero_point.
    Returns: Canonical; zeros = (8 - stored zero point) * scale, 0 without zero points, in the dtype of the scale.
    Raises: FormatError for dtypes or shapes that do not fit.
    Devices: any (little-endian).
    Source: docs/formats/compressed_tensors.md.
    """
    _check_words("weight_packed", weight_packed)
    n, k = (int(size) for size in weight_shape)
    if tuple(weight_packed.shape) != (n, -(-k // 8)) or k % 2:
        raise FormatError(
            f"weight_packed must be [N, K/8] = {[n, -(-k // 8)]} for weight_shape {[n, k]} with an even K, got "
            f"{list(weight_packed.shape)}"
        )
    if weight_scale.dim() != 2 or weight_scale.shape[0] != n or not weight_scale.shape[1] or k % weight_scale.shape[1]:
        raise FormatError(
            f"weight_scale must be [N, K/g] with N={n} and groups that divide K={k}, got {list(weight_scale.shape)}"
        )
    scale = weight_scale.t().contiguous()
    codes = unpack_nibbles(weight_packed.contiguous().view(torch.int8))[:, :k]
    if weight_zero_point is None:
        return Canonical(pack_nibbles(codes), scale, torch.zeros_like(scale))
    _check_words("weight_zero_point", weight_zero_point)
    if tuple(weight_zero_point.shape) != (-(-n // 8), scale.shape[0]):
        raise FormatError(
            f"weight_zero_point must be [N/8, K/g] = {[-(-n // 8), scale.shape[0]]}, got {list(weight_zero_point.shape)}"
        )
    integers = unpack_nibbles(weight_zero_point.t().clone(memory_format=torch.contiguous_format).view(torch.int8))[
        :, :n
    ]
    return Canonical(pack_nibbles(codes), scale, _float_zeros(integers, scale))


def pack(canonical: Canonical, layer: str = "") -> Packed:
    """Undo unpack; zero points are left out where all are 0.

    Raises FormatError, naming layer and group, for zeros that are no integers.
    """
    n, k = canonical.qdata.shape[0], 2 * canonical.qdata.shape[1]
    zeros = integer_zeros(canonical.scale, canonical.zeros, layer)
    words = _words(unpack_nibbles(canonical.qdata))
    points = None if bool((zeros == 8).all()) else _words(zeros).t().contiguous()
    return Packed(words, canonical.scale.t().contiguous(), torch.tensor([n, k], device="cpu"), points)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [rows, columns] -> int32 [rows, ceil(columns / 8)], the rest of the last word zero."""
    padded = torch.nn.functional.pad(codes.to(torch.int8), (0, -codes.shape[1] % 8))
    return pack_nibbles(padded).view(torch.int32)
