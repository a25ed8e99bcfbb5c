"""Quantizing one weight in slices of rows, so that the working memory does not grow with the layer.

Whether a format's rows are independent is not assumed but tried, bit for bit, on a small weight of the same width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from kitchen_core import Calibration
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.formats import Format, Tensors

SLICE_ELEMENTS = 1 << 20  # of one slice: 4 MiB in fp32, and a format may need several dozen times that to search codes
ROW_BLOCK = 128  # slices are multiples of this many rows
_PROBE_ROWS = 2 * ROW_BLOCK

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@cache
def row_dims(format: type[Format], config: Any, in_features: int, dtype: torch.dtype) -> dict[str, int] | None:
    """For each tensor of the format, the dim that runs over the weight's rows; None where rows are not independent.

    A tensor that all rows share, such as a codebook, is a choice made from the whole weight, so it means None as well.
    """
    probe = _stand_in(_PROBE_ROWS, in_features, dtype)
    sizes = 10.0 ** (torch.arange(_PROBE_ROWS, device="cpu") % 5 - 2)  # rows of very different size
    probe *= sizes.to(dtype)[:, None]
    try:
        whole = format.quantize(probe, config)
        parts = [format.quantize(part, config) for part in probe.split(ROW_BLOCK)]
    except (UnsupportedError, RuntimeError):  # it needs more rows, or has another objection to a slice
        return None
    dims = {}
    for name, tensor in whole.items():
        if tensor is None:
            continue
        differing = [d for d, (n, m) in enumerate(zip(tensor.shape, parts[0][name].shape, strict=True)) if n != m]
        if len(differing) != 1:
            return None
        joined = torch.cat([p[name] for p in parts], differing[0])
        if joined.shape != tensor.shape or not _same_bits(joined, tensor):
            return None
        dims[name] = differing[0]
    return dims


def _stand_in(rows: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(
        rows, in_features, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32
    ).to(dtype)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@cache
def output_shapes(format: type[Format], config: Any, rows: int, in_features: int, dtype: torch.dtype) -> Shapes:
    """What quantizing a weight of this shape will make: dtype and shape of each tensor.

    Asked of the format on the meta device; of a format that cannot answer there, on a stand-in weight.
    """
    try:
        made = format.quantize(torch.empty(rows, in_features, dtype=dtype, device="meta"), config)
    except (RuntimeError, NotImplementedError):
        made = None
    if made is None:
        made = format.quantize(_stand_in(rows, in_features, dtype), config)
    return {name: (t.dtype, tuple(t.shape)) for name, t in made.items() if t is not None}


def quantize_rows(
    read: Callable[[slice | None], torch.Tensor], format: type[Format], config: Any, shape: tuple[int, int],
    dtype: torch.dtype, calibration: Calibration | None = None,
) -> Tensors:  # fmt: skip
    """Quantize a weight [N, K] that ``read`` gives as a whole or in slices of rows; as a whole with a ``calibration``.

    Raises UnsupportedError naming row and column for a weight with inf or NaN, and FormatError where a format made other
    shapes than it said.
    """
    rows, in_features = shape
    if calibration is not None:
        return _quantize(format, config, read(None), 0, calibration=calibration)
    step = max(ROW_BLOCK, SLICE_ELEMENTS // in_features // ROW_BLOCK * ROW_BLOCK)
    dims = row_dims(format, config, in_features, dtype) if rows > step else None
    if dims is None:
        return _quantize(format, config, read(None), 0)
    shapes = output_shapes(format, config, rows, in_features, dtype)
    made = {name: torch.empty(size, dtype=kind, device="cpu") for name, (kind, size) in shapes.items()}
    position = dict.fromkeys(made, 0)
    for part in _slices(rows, step):
        for name, tensor in _quantize(format, config, read(part), part.start).items():
            dim = dims[name]
            made[name].narrow(dim, position[name], tensor.shape[dim]).copy_(tensor)
            position[name] += tensor.shape[dim]
    short = [name for name, dim in dims.items() if position[name] != made[name].shape[dim]]
    if short:
        raise FormatError(
            f"{format.name} made fewer rows of {short[0]} in slices than it said; report this as a bug of it"
        )
    return made


def _slices(rows: int, step: int) -> Iterator[slice]:
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _quantize(format: type[Format], config: Any, weight: torch.Tensor, first_row: int, **given: Any) -> Tensors:
    check_finite(weight, first_row)
    return {name: tensor for name, tensor in format.quantize(weight, config, **given).items() if tensor is not None}


def check_finite(weight: torch.Tensor, first_row: int = 0) -> None:
    """Raises UnsupportedError with the place of the first inf or NaN; ``first_row`` is the row that this slice starts at."""
    if torch.isfinite(weight).all():
        return
    bad = (~torch.isfinite(weight)).nonzero()
    row, column = bad[0].tolist()
    raise UnsupportedError(
        f"its weight has {'at least ' if first_row else ''}{len(bad)} elements that are inf or NaN, the first at "
        f"[{row + first_row}, {column}] = {weight[row, column].item()}; repair the checkpoint, or leave this layer as it "
        "is with the rule 'LAYER=none'"
    )
