"""The resident layout: codes and scales of a weight interleaved in the order in which the kernel for few rows of x takes them.

It lives in memory only and is never saved. A weight [N, K] is cut into blocks of 16 rows and steps of 256 columns; each makes a
record, and the records lie one behind the other, steps within blocks: uint8 [N/16, K/256, bytes], which stored codes never are.
In a record lane (g, q), g < 8 and q < 4, has rows g and g + 8 (i = 0 and 1) and in either half of the columns, h = 0 and 1, the
32 from 128 h + 32 q on:

    [h][i][g][q] 16 bytes of nibbles
    [i][g][q][h]  8 bytes of top bits (6 bits)
    [g][q][i][h]  2 scales, e4m3, where groups have 16 columns; else [16, 256/g] scales by row

so that a warp reads memory from end to end, 512 bytes at once. The bytes are as many as those of codes and scales.
docs/formats/asym_w4a8_int8.md says what becomes of such a weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kitchen_core.errors import FormatError

ROWS, COLUMNS = 16, 256  # of a record
GROUPS = (16, 32, 64, 128, 256)  # that share a scale
STRIP_BYTES = 32 << 20  # of a weight that are moved at once


class Shape(NamedTuple):
    """What records are of."""

    n: int
    k: int
    bits: int
    group: int

    @property
    def code_bytes(self) -> int:
        """Of a row."""
        return self.k * self.bits // 8

    @property
    def row_bytes(self) -> int:
        """Codes and scales of a row."""
        return self.code_bytes + self.k // self.group


# of a record, by bits of the weight: each tells width and groups
RECORD_BYTES = {bits: tuple(ROWS * (COLUMNS * bits // 8 + COLUMNS // group) for group in GROUPS) for bits in (4, 6)}


def is_resident(codes: torch.Tensor | None, bits: int) -> bool:
    """Whether codes are the records of a weight of so many bits."""
    if codes is None or codes.dtype != torch.uint8 or codes.dim() != 3:
        return False
    return codes.shape[2] in RECORD_BYTES[bits]


def shape_of(records: torch.Tensor, bits: int, group: int) -> Shape:
    """What records are of. Raises FormatError where they are of other groups."""
    blocks, steps, record_bytes = records.shape
    shape = Shape(blocks * ROWS, steps * COLUMNS, bits, group)
    if ROWS * shape.row_bytes != steps * record_bytes:
        raise FormatError(
            f"the weight holds records of {record_bytes} bytes (the resident layout), which at {bits} bits are not of groups "
            f"of {group}; they are those of another weight"
        )
    return shape


def pack(buffer: torch.Tensor, shape: Shape) -> torch.Tensor:
    """``buffer``, uint8 [N * row_bytes], holds the codes and behind them the scales: the records, in its memory.

    It is written at once, when all records are made: whatever fails before leaves it as it is.
    """
    kept = buffer.view(shape.n // ROWS, shape.k // COLUMNS, -1)
    codes, scales = buffer.split((shape.n * shape.code_bytes, shape.n * shape.k // shape.group))
    codes, scales = codes.view(shape.n, -1), scales.view(shape.n, -1)
    made = torch.empty_like(buffer)
    for start, stop in _strips(shape):
        records = _records(codes[start:stop], scales[start:stop], shape)
        made[start * shape.row_bytes : stop * shape.row_bytes] = records
    with torch.inference_mode(buffer.is_inference()):  # such tensors are written in that mode only
        buffer.copy_(made)
    return kept


def unpack(records: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 [N, code_bytes], and the bytes of the scales, [N, K/g], of records: new tensors."""
    buffer = records.reshape(-1)
    codes = buffer.new_empty((shape.n, shape.code_bytes))
    scales = buffer.new_empty((shape.n, shape.k // shape.group))
    for start, stop in _strips(shape):
        strip = buffer[start * shape.row_bytes : stop * shape.row_bytes]
        codes[start:stop], scales[start:stop] = _stored(strip, stop - start, shape)
    return codes, scales


def _strips(shape: Shape) -> list[tuple[int, int]]:
    """Rows that are moved at once: whole blocks."""
    step = max(1, STRIP_BYTES // (ROWS * shape.row_bytes)) * ROWS
    return [(start, min(start + step, shape.n)) for start in range(0, shape.n, step)]


def _records(codes: torch.Tensor, scales: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The bytes of the records of some rows."""
    blocks, steps, half = len(codes) // ROWS, shape.k // COLUMNS, shape.k // 2
    nibbles = codes[:, :half].reshape(blocks, 2, 8, steps, 2, 4, 16)  # block, i, g, step, h, q
    parts = [nibbles.permute(0, 3, 4, 1, 2, 5, 6)]
    if shape.bits == 6:
        parts.append(codes[:, half:].reshape(blocks, 2, 8, steps, 2, 4, 8).permute(0, 3, 1, 2, 5, 4, 6))
    if shape.group == 16:
        parts.append(scales.reshape(blocks, 2, 8, steps, 2, 4, 2).permute(0, 3, 2, 5, 1, 4, 6))
    else:
        parts.append(scales.reshape(blocks, ROWS, steps, COLUMNS // shape.group).transpose(1, 2))
    return torch.cat([part.reshape(blocks, steps, -1) for part in parts], 2).flatten()


def _stored(records: torch.Tensor, count: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of ``count`` rows."""
    blocks, steps = count // ROWS, shape.k // COLUMNS
    nibble_bytes, top_bytes = ROWS * COLUMNS // 2, ROWS * COLUMNS // 4 if shape.bits == 6 else 0
    nibbles, tops, scales = records.view(blocks, steps, -1).split(
        (nibble_bytes, top_bytes, ROWS * COLUMNS // shape.group), 2
    )
    planes = [nibbles.reshape(blocks, steps, 2, 2, 8, 4, 16).permute(0, 3, 4, 1, 2, 5, 6).reshape(count, -1)]
    if shape.bits == 6:
        planes.append(tops.reshape(blocks, steps, 2, 8, 4, 2, 8).permute(0, 2, 3, 1, 5, 4, 6).reshape(count, -1))
    if shape.group == 16:
        scales = scales.reshape(blocks, steps, 8, 4, 2, 2, 2).permute(0, 4, 2, 1, 5, 3, 6)
    else:
        scales = scales.reshape(blocks, steps, ROWS, -1).transpose(1, 2)
    return torch.cat(planes, 1), scales.reshape(count, -1)
