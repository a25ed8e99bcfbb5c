"""The resident order of codes: what the kernel for few rows multiplies, word by word, with x as it lies in memory.

It lives in memory only and is never saved. A row is cut into steps of 256 columns, 128 bytes; such a step has for each of four
lanes t the eight words of its blocks of 32 columns, word j at byte 32t + 4j. The nibbles of that word, the lowest first, are

    columns 2t, 2t + 8, 2t + 16, 2t + 24, then 2t + 1, 2t + 9, 2t + 17, 2t + 25    of block j

so that nibbles i and i + 4 make a pair of neighbouring columns, an operand of wgmma. In the stored order a pair's columns lie
four apart, and x must be put into that order first. docs/formats/awq_w4a16.md says what becomes of such a weight.
"""

from __future__ import annotations

import torch

COLUMNS = 256  # of a step
STRIP_BYTES = 16 << 20  # of codes that are moved at once


def pack_(codes: torch.Tensor) -> None:
    """int8 [N, K/2] in the stored order, contiguous: put into the resident order, in place.

    They are written at once, when all is made: whatever fails before leaves them as they are.
    """
    made = pack(codes)
    with torch.inference_mode(codes.is_inference()):  # such tensors are written in that mode only
        codes.copy_(made)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """int8 [N, K/2] in the stored order: a new tensor in the resident one."""
    return _moved(codes, _ordered)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """int8 [N, K/2] in the resident order: a new tensor in the stored one."""
    return _moved(codes, _stored)


def _moved(codes: torch.Tensor, function) -> torch.Tensor:
    made = torch.empty_like(codes, memory_format=torch.contiguous_format)
    rows = max(1, STRIP_BYTES // max(1, codes.shape[1]))
    for start in range(0, codes.shape[0], rows):
        strip = codes[start : start + rows]
        made[start : start + rows] = function(strip.view(torch.uint8)).view(torch.int8).reshape(strip.shape)
    return made


def _ordered(stored: torch.Tensor) -> torch.Tensor:
    pairs = stored.reshape(-1, 8, 4, 4).permute(
        0, 3, 1, 2
    )  # step, block, (columns by eight), lane -> step, lane, block, ..
    low, high = pairs & 15, pairs >> 4
    return torch.stack([_bytes(low, 0), _bytes(low, 2), _bytes(high, 0), _bytes(high, 2)], -1)


def _bytes(nibbles: torch.Tensor, first: int) -> torch.Tensor:
    return nibbles[..., first] | nibbles[..., first + 1] << 4


def _stored(ordered: torch.Tensor) -> torch.Tensor:
    words = ordered.reshape(-1, 4, 8, 4)  # step, lane, block, byte
    halves = [nibble for byte in words.unbind(-1) for nibble in (byte & 15, byte >> 4)]
    pairs = torch.stack([low | high << 4 for low, high in zip(halves[:4], halves[4:], strict=True)], -1)
    return pairs.permute(0, 2, 3, 1)  # step, block, (columns by eight), lane
