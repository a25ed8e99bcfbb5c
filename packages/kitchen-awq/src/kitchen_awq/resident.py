"""The resident layout of codes: what the kernel for few rows multiplies, word by word, with x as it lies in memory.

It lives in memory only and is never saved: uint8 [N, K/256, 128], where stored codes are int8 [N, K/2], so that neither is ever
taken for the other. A row is cut into steps of 256 columns, 128 bytes; such a step has for each of four lanes t the eight words
of its blocks of 32 columns, word j at byte 32t + 4j. The nibbles of that word, the lowest first, are

    columns 2t, 2t + 8, 2t + 16, 2t + 24, then 2t + 1, 2t + 9, 2t + 17, 2t + 25    of block j

so that nibbles i and i + 4 make a pair of neighbouring columns, an operand of wgmma. In stored codes a pair's columns lie four
apart, and x must be put into that order first. docs/formats/awq_w4a16.md says what becomes of such a weight.
"""

from __future__ import annotations

import torch

COLUMNS = 256  # of a step
STEP_BYTES = COLUMNS // 2
STRIP_BYTES = 16 << 20  # of codes that are moved at once


def is_resident(codes: torch.Tensor | None) -> bool:
    """Whether codes are in the resident layout."""
    return codes is not None and codes.dtype == torch.uint8 and codes.dim() == 3 and codes.shape[2] == STEP_BYTES


def group_reason(group: int) -> str | None:
    """Why the kernel takes no resident codes with such groups, or None if it does."""
    if group in (64, 128) or group % COLUMNS == 0:
        return None
    return f"the layout goes with groups of 64, 128 or multiples of {COLUMNS}, the weight has {group}"


def pack(codes: torch.Tensor, storage: torch.Tensor | None = None) -> torch.Tensor:
    """Stored codes, int8 [N, K/2], in the resident layout: in their memory, which is ``storage``, uint8 [N * K/2], or in new.

    ``storage`` is written at once, when all is made: whatever fails before leaves it as it is.
    """
    n, row_bytes = codes.shape
    made = codes.new_empty((n, row_bytes // STEP_BYTES, STEP_BYTES), dtype=torch.uint8)
    for strip in _strips(n, row_bytes):
        made[strip] = _laid(codes[strip].view(torch.uint8)).reshape(made[strip].shape)
    if storage is None:
        return made
    kept = storage.view(made.shape)
    with torch.inference_mode(storage.is_inference()):  # such tensors are written in that mode only
        storage.copy_(made.view(-1))
    return kept


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """Resident codes as they are stored, int8 [N, K/2]: a new tensor."""
    n, steps, _ = codes.shape
    made = codes.new_empty((n, steps * STEP_BYTES), dtype=torch.int8)
    for strip in _strips(n, steps * STEP_BYTES):
        made[strip] = _stored(codes[strip]).reshape(made[strip].shape).view(torch.int8)
    return made


def _strips(n: int, row_bytes: int) -> list[slice]:
    """Rows that are moved at once."""
    rows = max(1, STRIP_BYTES // max(1, row_bytes))
    return [slice(start, start + rows) for start in range(0, n, rows)]


def _laid(stored: torch.Tensor) -> torch.Tensor:
    pairs = stored.reshape(-1, 8, 4, 4)  # step, block, (columns by eight), lane
    pairs = pairs.permute(0, 3, 1, 2)  # step, lane, block, ..
    low, high = pairs & 15, pairs >> 4
    return torch.stack([_bytes(low, 0), _bytes(low, 2), _bytes(high, 0), _bytes(high, 2)], -1)


def _bytes(nibbles: torch.Tensor, first: int) -> torch.Tensor:
    return nibbles[..., first] | nibbles[..., first + 1] << 4


def _stored(laid: torch.Tensor) -> torch.Tensor:
    words = laid.reshape(-1, 4, 8, 4)  # step, lane, block, byte
    halves = [nibble for byte in words.unbind(-1) for nibble in (byte & 15, byte >> 4)]
    pairs = torch.stack([low | high << 4 for low, high in zip(halves[:4], halves[4:], strict=True)], -1)
    return pairs.permute(0, 2, 3, 1)  # step, block, (columns by eight), lane
