"""``kitchen verify``: how far the weights of a quantized checkpoint are from those of the original, layer by layer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kitchen_core import Calibration
from kitchen_core.errors import FormatError

from .calibrations import Calibrations, load_calibration
from .checkpoint import load_layer
from .console import counted, print_table, size
from .dialect import MARKER, StoredLayer, find_layers, refuse_unmarked
from .files import Checkpoint, TensorInfo, printable

BLOCK_ELEMENTS = 8 << 20  # compared at once
PLOTTED_LAYERS = 60
CHANGED = ", changed"  # behind the dtype of a tensor that is not quantized

Watch = Callable[[str, str, torch.Tensor], None]


@dataclass(frozen=True)
class LayerError:
    """``relative_l2`` is the norm of the difference over the norm of the original; 0 where both are zero.

    ``output_l2`` is the same of the layer's outputs on the inputs that its calibration saw; None without one.
    """

    name: str
    format: str
    relative_l2: float
    max_abs: float
    bytes_before: int
    bytes_after: int
    output_l2: float | None = None


@dataclass(frozen=True)
class Verification:
    """Errors of all quantized layers and of all plain tensors that changed, worst first; names that only one file has."""

    layers: tuple[LayerError, ...]
    identical: int
    missing: tuple[str, ...]
    added: tuple[str, ...]
    relative_l2: float

    @property
    def worst(self) -> float:
        """The largest relative error of a layer."""
        return max((e.relative_l2 for e in self.layers), default=0.0)

    @property
    def compared(self) -> bool:
        """Whether the quantized file has a layer that is float in the original."""
        return any(not e.format.endswith(CHANGED) for e in self.layers)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values; JSON has no NaN and no inf, so these become words."""

        def plain(value: Any) -> Any:
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value

        made = {key: plain(value) for key, value in asdict(self).items()}
        made["layers"] = [{key: plain(value) for key, value in asdict(e).items()} for e in self.layers]
        return {**made, "worst": plain(self.worst)}


@dataclass
class _Sums:
    difference: float = 0.0
    original: float = 0.0
    max_abs: float = 0.0

    def add(self, original: torch.Tensor, other: torch.Tensor) -> None:
        """Take in a block of both, as flat tensors of equal length."""
        a, b = original.to(torch.float32), other.to(torch.float32)
        d = b - a
        self.difference += float(d.square().sum(dtype=torch.float64))
        self.original += float(a.square().sum(dtype=torch.float64))
        self.max_abs = max(self.max_abs, float(d.abs().max()) if d.numel() else 0.0)

    def add_outputs(self, original: torch.Tensor, other: torch.Tensor, moment: torch.Tensor) -> None:
        """Take in rows of both weights as what they put out on inputs of this second moment [K, K]."""
        a, d = original.to(torch.float32), other.to(torch.float32) - original.to(torch.float32)
        self.difference += max(0.0, float(((d @ moment) * d).sum(dtype=torch.float64)))
        self.original += max(0.0, float(((a @ moment) * a).sum(dtype=torch.float64)))

    @property
    def relative_l2(self) -> float:
        """0 for no difference at all, inf for a difference from zero, NaN where a value is NaN."""
        if math.isnan(self.difference) or self.original == 0.0:
            return 0.0 if self.difference == 0.0 else math.inf if not math.isnan(self.difference) else math.nan
        return math.sqrt(self.difference / self.original)


def verify_files(
    original: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    calibration: Calibrations | str | os.PathLike[str] | None = None,
    watch: Watch | None = None,
) -> Verification:
    """Compare a quantized checkpoint with its original, one layer in memory at a time.

    Plain tensors are compared bit by bit; those that differ are listed as well. ``calibration``: what ``calibrate``
    returned, or the path of its file; layers that it has get their ``output_l2``. ``watch(layer, format, rows)`` is given
    every weight that is quantized, a block of its rows at a time. Raises FormatError for a bad file, where a layer has
    another shape than its original, and where the files are in the wrong order.
    """
    if isinstance(calibration, str | os.PathLike):
        calibration = load_calibration(calibration)
    before, after = Checkpoint.open(original), Checkpoint.open(quantized)
    stored = find_layers(after)
    refuse_unmarked(after, stored)
    if not stored:
        _refuse_swapped(before, after)
    # Layers that the original has quantized too are compared bit by bit, as plain tensors are.
    marked = {key.rpartition(".")[0] for key in before.tensors if key.rpartition(".")[2] == MARKER}
    stored = {name: layer for name, layer in stored.items() if name not in marked}
    errors, total = [], _Sums()
    for name, layer in sorted(stored.items()):
        info = before.tensors.get(f"{layer.prefix}weight")
        if info is not None:
            given = calibration[name] if calibration is not None and name in calibration else None
            errors.append(_compare_layer(before, after, layer, info, total, given, watch))
    owned = {layer.prefix + rest for layer in stored.values() for rest in layer.tensors if rest != "bias"}
    plain = [info for info in after.in_file_order() if info.name not in owned]
    identical = 0
    for info in plain:
        if info.name in before.tensors:
            error = _compare_plain(before, after, info)
            identical += error is None
            errors += [error] if error else []
    weights = {f"{layer.prefix}weight" for layer in stored.values()}
    missing = tuple(n for n in before.tensors if n not in after.tensors and n not in weights)
    added = tuple(i.name for i in plain if i.name not in before.tensors)
    added += tuple(weight for weight in sorted(weights) if weight not in before.tensors)
    errors.sort(key=lambda e: (math.inf if math.isnan(e.relative_l2) else e.relative_l2, e.name), reverse=True)
    before.close()
    after.close()
    return Verification(tuple(errors), identical, missing, added, total.relative_l2)


def _refuse_swapped(before: Checkpoint, after: Checkpoint) -> None:
    for layer in find_layers(before).values():
        info = after.tensors.get(f"{layer.prefix}weight")
        if info is not None and info.torch_dtype().is_floating_point:
            raise FormatError(
                f"layer {printable(layer.name)!r} is quantized in {str(before.path)!r} and float in {str(after.path)!r}: the "
                "first file is the quantized one; swap them"
            )


def _compare_layer(
    before: Checkpoint, after: Checkpoint, layer: StoredLayer, info: TensorInfo, total: _Sums,
    calibration: Calibration | None, watch: Watch | None,
) -> LayerError:  # fmt: skip
    name = layer.name
    made, _ = load_layer(after, layer, "cpu", torch.float32)
    shape = (made.out_features, made.in_features)
    if info.shape != shape or not info.torch_dtype().is_floating_point:
        raise FormatError(
            f"layer {printable(name)!r} is {list(shape)} in the quantized file and {info.dtype} {list(info.shape)} in the "
            "original; these files are not of one model"
        )
    sums, outputs = _Sums(), _Sums()
    dense = made.dequantize(torch.float32)
    step = max(1, BLOCK_ELEMENTS // shape[1])
    for row in range(0, shape[0], step):
        rows = slice(row, min(row + step, shape[0]))
        source = before.read(info.name, rows)
        sums.add(source, dense[rows])
        total.add(source, dense[rows])
        if calibration is not None:
            outputs.add_outputs(source, dense[rows], calibration.second_moment)
        if watch is not None:
            watch(name, layer.format_name, source)
    weight_bytes = layer.nbytes - (layer.tensors["bias"].nbytes if "bias" in layer.tensors else 0)
    output_l2 = None if calibration is None else outputs.relative_l2
    return LayerError(name, layer.format_name, sums.relative_l2, sums.max_abs, info.nbytes, weight_bytes, output_l2)


def _compare_plain(before: Checkpoint, after: Checkpoint, info: TensorInfo) -> LayerError | None:
    """None where both hold the same bytes."""
    old = before.tensors[info.name]
    if (old.dtype, old.shape) == (info.dtype, info.shape):
        pairs = zip(before.blocks(info.name), after.blocks(info.name), strict=True)
        if all(a == b for a, b in pairs):
            return None
    sums = _Sums()
    if old.shape == info.shape:
        sums.add(before.read(info.name).reshape(-1), after.read(info.name).reshape(-1))
    else:
        sums.difference = sums.original = sums.max_abs = math.nan
    kind = info.dtype if info.dtype == old.dtype else f"{old.dtype} -> {info.dtype}"
    return LayerError(info.name, f"{kind}{CHANGED}", sums.relative_l2, sums.max_abs, old.nbytes, info.nbytes)


# --------------------------------------------------------------------------------------------------------- showing


def render(result: Verification) -> None:
    """Print the table, worst layers first, and the totals."""
    rows = [
        [
            printable(e.name),
            e.format,
            f"{e.relative_l2:.3e}",
            f"{e.max_abs:.3e}",
            size(e.bytes_before),
            size(e.bytes_after),
        ]
        for e in result.layers
    ]
    columns = ["layer", "format", "relative L2", "max abs", "before", "after"]
    print_table(columns, rows, right=columns[2:])
    total = (
        f"relative L2 over all quantized weights {result.relative_l2:.3e}"
        if result.compared
        else "no float layer of IN is quantized in OUT"
    )
    print(
        f"{counted(len(result.layers), 'layer')} changed, {counted(result.identical, 'plain tensor')} identical; {total}, "
        f"worst layer {result.worst:.3e}"
    )
    for words, names in (
        ("missing in the quantized file", result.missing),
        ("only in the quantized file", result.added),
    ):
        if names:
            more = ", ..." if len(names) > 5 else ""
            print(f"{counted(len(names), 'tensor')} {words}: {', '.join(map(printable, names[:5]))}{more}")


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raises FormatError for a name that no plot can have: to be asked before long work. Nothing is made."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if Path(path).suffix[1:].lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise FormatError(
            f"cannot write the plot {str(path)!r}: its ending says what to write; give a path ending in .png, .pdf or .svg"
        )


def plot(result: Verification, path: str | os.PathLike[str]) -> None:
    """Draw the worst layers as bars, coloured by format, to a PNG, PDF or SVG file. Raises FormatError if it cannot."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [e for e in result.layers if math.isfinite(e.relative_l2)][:PLOTTED_LAYERS]
    figure = Figure(figsize=(9, 1.6 + 0.22 * max(len(shown), 4)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    formats = sorted({e.format for e in shown})
    for index, format in enumerate(formats):
        places = [i for i, e in enumerate(shown) if e.format == format]
        axes.barh(places, [shown[i].relative_l2 for i in places], color=f"C{index % 10}", label=format)
    axes.set_yticks(range(len(shown)), [_ascii(e.name)[-60:] for e in shown], fontsize=7, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("relative L2 error of the weight")
    more = f", the worst {len(shown)} of {len(result.layers)}" if len(shown) < len(result.layers) else ""
    axes.set_title(f"quantized against original{more}", fontsize=10)
    if formats:
        axes.legend(fontsize=8, loc="lower right")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise FormatError(
            f"cannot write the plot {str(path)!r}: {error.strerror}; give a path in a folder that is there and can be written"
        ) from error


def _ascii(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode()
