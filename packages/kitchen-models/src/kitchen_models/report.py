"""``kitchen report``: errors, distributions and bytes of a quantized checkpoint as pictures and one page of HTML.

The page has everything in it, pictures included: it can be mailed or kept beside the checkpoint.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kitchen_core.errors import FormatError

from .calibrations import Calibrations
from .console import counted, size, unit_of
from .dialect import find_layers
from .distributions import BINS_PER_OCTAVE, SHOWN, Distribution
from .files import Checkpoint, parse_bounded_json, printable
from .quantize import natural
from .verify import LayerError, Verification, verify_files

NAMED = 6  # worst layers that are named in the picture of errors
LABEL = 40  # letters of a layer's name in a picture


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer: its error, why it got its format, and what its weight looks like."""

    error: LayerError
    weights: Distribution
    config: Mapping[str, Any]
    rule: str
    calibrated: bool

    def as_json(self) -> dict[str, Any]:
        """Plain values; words where a number is not finite."""
        found = {
            **asdict(self.error), "weights": self.weights.count, "rms": self.weights.rms, "kurtosis": self.weights.kurtosis,
            "largest_over_rms": self.weights.largest_over_rms, "channel_ratio": self.weights.channel_ratio,
            "config": dict(self.config), "rule": self.rule, "calibrated": self.calibrated,
        }  # fmt: skip
        return {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in found.items()
        }


@dataclass(frozen=True)
class ModelReport:
    """All layers in the order of their names, what was left and why, and the bytes of both files."""

    layers: tuple[LayerReport, ...]
    left: Mapping[str, str]
    verification: Verification
    names: tuple[str, str]
    bytes_before: int
    bytes_after: int

    def by_format(self) -> dict[str, dict[str, float]]:
        """Per format: layers, weights, bytes before and after, bits a weight, relative L2 over all, the worst layer's."""
        made: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(layer.error.format for layer in self.layers):
            mine = [layer for layer in self.layers if layer.error.format == name]
            count = sum(layer.weights.count for layer in mine)
            squares = sum(layer.weights.squares for layer in mine)
            lost = sum(layer.error.relative_l2**2 * layer.weights.squares for layer in mine)
            after = sum(layer.error.bytes_after for layer in mine)
            made[name] = {
                "layers": len(mine), "weights": count, "bytes_before": sum(layer.error.bytes_before for layer in mine),
                "bytes_after": after, "bits": 8 * after / count if count else 0.0,
                "relative_l2": math.sqrt(lost / squares) if squares else 0.0,
                "worst": max(layer.error.relative_l2 for layer in mine),
            }  # fmt: skip
        return made

    def summary(self) -> str:
        """One line."""
        formats = ", ".join(f"{int(entry['layers'])} {name}" for name, entry in self.by_format().items()) or "none"
        sizes = f"{size(self.bytes_before)} -> {size(self.bytes_after)}"
        return (
            f"{counted(len(self.layers), 'layer')} quantized ({formats}), {sizes}, relative L2 "
            f"{self.verification.relative_l2:.3e}, worst layer {self.verification.worst:.3e}"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "original": self.names[0], "quantized": self.names[1], "summary": self.summary(),
            "bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "by_format": self.by_format(),
            "layers": [layer.as_json() for layer in self.layers], "left": dict(self.left),
            "missing": list(self.verification.missing), "added": list(self.verification.added),
        }  # fmt: skip


def examine(
    original: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    calibration: Calibrations | str | os.PathLike[str] | None = None,
) -> ModelReport:
    """Read both checkpoints, one layer in memory at a time. Raises FormatError as ``verify_files`` does."""
    weights: dict[str, Distribution] = {}

    def watch(layer: str, format: str, rows: torch.Tensor) -> None:
        weights.setdefault(layer, Distribution()).add(rows)

    found = verify_files(original, quantized, calibration, watch)
    before, after = Checkpoint.open(original), Checkpoint.open(quantized)
    recipe = _recipe(after.metadata)
    markers = {name: layer.marker for name, layer in find_layers(after).items()}
    layers = []
    for error in sorted(found.layers, key=lambda e: natural(e.name)):
        if error.name not in weights:  # a plain tensor that changed
            continue
        said = recipe["layers"].get(error.name, {})
        config = said.get("config") or {k: v for k, v in markers[error.name].items() if k != "format"}
        layers.append(
            LayerReport(
                error, weights[error.name], config, str(said.get("rule", "")), said.get("calibrated") is True
            )
        )  # fmt: skip
    names = (Path(original).name, Path(quantized).name)
    made = ModelReport(tuple(layers), recipe["left"], found, names, before.file_bytes, after.file_bytes)
    before.close()
    after.close()
    return made


def _recipe(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What the file says of its making; empty where another tool wrote it."""
    try:
        recipe = parse_bounded_json(metadata.get("kitchen_recipe", "{}").encode())
    except ValueError:
        recipe = {}
    made = {"layers": {}, "left": {}}
    for key in made:
        table = recipe.get(key) if isinstance(recipe, dict) else None
        made[key] = table if isinstance(table, dict) else {}
    made["layers"] = {name: entry for name, entry in made["layers"].items() if isinstance(entry, dict)}
    return made


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raises FormatError where a report could not be written to ``folder``: to be asked before long work. Nothing is made."""
    folder = Path(os.path.abspath(folder))
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        what = "is a file" if not there.is_dir() else "cannot be written"
        raise FormatError(f"a report cannot go to {str(folder)!r}: {str(there)!r} {what}; give another folder")


def write_report(
    original: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    calibration: Calibrations | str | os.PathLike[str] | None = None,
) -> ModelReport:
    """Write error.png, weights.png, outliers.png, bytes.png, report.json and report.html, which has all of it, to ``folder``.

    ``calibration`` as in ``verify_files``. The folder is made. Raises FormatError where it cannot be written.
    """
    folder = Path(folder)
    report = examine(original, quantized, calibration)
    pictures = {name: draw(report) for name, draw in PICTURES.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in pictures.items():
            (folder / f"{name}.png").write_bytes(data)
        (folder / "report.json").write_text(json.dumps(report.as_json(), indent=1))
        (folder / "report.html").write_text(page(report, pictures), encoding="utf-8")
    except OSError as error:
        raise FormatError(
            f"cannot write the report to {str(folder)!r}: {error.strerror}; give a folder that can be written"
        ) from error
    return report


# ---------------------------------------------------------------------------------------------------------- pictures


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()


def _colours(report: ModelReport) -> dict[str, str]:
    return {name: f"C{index % 10}" for index, name in enumerate(sorted({e.error.format for e in report.layers}))}


def _label(name: str) -> str:
    short = printable(name).encode("ascii", "backslashreplace").decode()
    return short if len(short) <= LABEL else f"...{short[-LABEL:]}"


def _ticks(axes: Any, values: Sequence[float]) -> None:
    """Whole layers below; on the logarithmic scale at the left numbers as they are written, few and where the dots are."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    few = not values or max(values) < 10 * min(values)
    axes.yaxis.set_major_locator(MaxNLocator(5) if few else LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _by_layer(axes: Any, report: ModelReport, values: Sequence[float], what: str, named: Sequence[int] = ()) -> None:
    """A dot for each layer, in the order of the names, coloured by format, on a logarithmic scale.

    The dots of ``named`` get numbers, and the legend at the right says their names.
    """
    for name, colour in _colours(report).items():
        places = [i for i, layer in enumerate(report.layers) if layer.error.format == name]
        shown = [i for i in places if math.isfinite(values[i]) and values[i] > 0]
        axes.plot(shown, [values[i] for i in shown], "o", markersize=3.5, color=colour, label=name)
    for number, i in enumerate(named, 1):
        axes.annotate(str(number), (i, values[i]), (0, 4), textcoords="offset points", fontsize=6, ha="center")
        axes.plot([], [], " ", label=f"{number}  {_label(report.layers[i].error.name)}")
    axes.set_yscale("log")
    axes.set_ylabel(what)
    axes.set_xlabel("layer, in the order of the names")
    axes.margins(y=0.1)
    axes.grid(alpha=0.3)
    _ticks(axes, [v for v in values if math.isfinite(v) and v > 0])
    if report.layers:
        legend = axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)


def draw_errors(report: ModelReport) -> bytes:
    """Relative L2 error of each layer's weight, and of its outputs where there is a calibration; the worst are named."""
    outputs = [layer.error.output_l2 or math.nan for layer in report.layers]
    panels = 2 if any(map(math.isfinite, outputs)) else 1
    figure = _figure(10, 3.6 * panels)
    axes = figure.subplots(panels, squeeze=False)[:, 0]
    errors = [layer.error.relative_l2 for layer in report.layers]
    worst = sorted((i for i, e in enumerate(errors) if math.isfinite(e) and e > 0), key=lambda i: -errors[i])[:NAMED]
    _by_layer(axes[0], report, errors, "relative L2 error of the weight", worst)
    if panels == 2:
        _by_layer(axes[1], report, outputs, "relative L2 error of the output")
    return _png(figure)


def draw_weights(report: ModelReport) -> bytes:
    """Magnitudes over the layer's root mean square: a column for each layer, and beside it the mean by format."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(10, 3.8)
    left, right = figure.subplots(1, 2, width_ratios=[2, 1], sharey=True)
    edges = [SHOWN[0] + i / BINS_PER_OCTAVE for i in range((len(SHOWN) - 1) * BINS_PER_OCTAVE + 1)]
    if report.layers:
        columns = torch.stack([layer.weights.around_rms() for layer in report.layers], 1)
        shares = columns.clamp_min(1e-9).log10()
        places = [i - 0.5 for i in range(len(report.layers) + 1)]
        mesh = left.pcolormesh(places, edges, shares.numpy(), vmin=-9, vmax=-1, cmap="viridis", rasterized=True)
        figure.colorbar(mesh, ax=left, label="share of the weights, power of ten", location="left")
        middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        for name, colour in _colours(report).items():
            mine = [i for i, layer in enumerate(report.layers) if layer.error.format == name]
            right.plot(columns[:, mine].mean(1).clamp_min(1e-9).numpy(), middles, color=colour, label=name)
        right.set_xscale("log")
        right.legend(fontsize=8)
    left.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    left.set_xlabel("layer, in the order of the names")
    left.set_ylabel("|w| over the root mean square, power of two")
    right.set_xlabel("share of the weights")
    right.grid(alpha=0.3)
    return _png(figure)


def draw_outliers(report: ModelReport) -> bytes:
    """How far the largest weight stands out, and how far the largest input channel."""
    figure = _figure(12, 3.6)
    left, right = figure.subplots(1, 2)
    _by_layer(
        left, report, [layer.weights.largest_over_rms for layer in report.layers], "largest |w| / root mean square"
    )
    _by_layer(right, report, [layer.weights.channel_ratio for layer in report.layers], "largest / median input channel")
    return _png(figure)


def draw_bytes(report: ModelReport) -> bytes:
    """Both files as bars, divided by format; what is no weight of a quantized layer is grey."""
    figure = _figure(10, 2.2)
    axes = figure.subplots()
    totals = report.by_format()
    word, unit = unit_of(max(report.bytes_before, report.bytes_after))
    for place, (key, whole) in enumerate((("bytes_before", report.bytes_before), ("bytes_after", report.bytes_after))):
        start = 0.0
        for name, colour in _colours(report).items():
            width = totals[name][key] / unit
            axes.barh(place, width, left=start, color=colour, label=name if place == 0 else None)
            start += width
        axes.barh(place, whole / unit - start, left=start, color="0.75", label="not quantized" if place == 0 else None)
        axes.annotate(f" {size(whole)}", (whole / unit, place), va="center", fontsize=8)
    axes.set_yticks([0, 1], ["before", "after"])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(word)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _png(figure)


PICTURES = {"error": draw_errors, "weights": draw_weights, "outliers": draw_outliers, "bytes": draw_bytes}

# -------------------------------------------------------------------------------------------------------------- page

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em } img { max-width: 100% }
table { border-collapse: collapse; font-size: 0.85em }
th, td { padding: 0.2em 0.7em; border-bottom: 1px solid #ddd; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
th { cursor: pointer; background: #f4f4f4; position: sticky; top: 0 }
"""
# A click on a column's head sorts by it: numbers by their data-v, words as they are; a second click turns the order round.
SCRIPT = """
for (const th of document.querySelectorAll("table.sort th")) th.onclick = () => {
  const body = th.closest("table").tBodies[0], at = th.cellIndex, down = th.dataset.down = th.dataset.down === "1" ? "0" : "1";
  const key = row => { const cell = row.cells[at]; return cell.dataset.v === undefined ? cell.textContent : +cell.dataset.v };
  const compare = (a, b) => { const x = key(a), y = key(b); return x < y ? -1 : x > y ? 1 : 0 };
  body.append(...[...body.rows].sort((a, b) => down === "1" ? compare(b, a) : compare(a, b)));
};
"""
TITLES = {
    "error": "Error by layer",
    "weights": "Distribution of the weights",
    "outliers": "Outliers",
    "bytes": "Bytes by format",
}


def page(report: ModelReport, pictures: Mapping[str, bytes]) -> str:
    """The report as one HTML page that loads nothing from elsewhere."""
    names = [html.escape(printable(name)) for name in report.names]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{names[1]}</title><style>{STYLE}</style>",
        f"<h1>{names[1]}, quantized from {names[0]}</h1><p>{html.escape(report.summary())}</p>",
        _formats_table(report),
    ]
    for name, data in pictures.items():
        text = base64.b64encode(data).decode()
        parts.append(f'<h2>{TITLES[name]}</h2><img alt="{TITLES[name]}" src="data:image/png;base64,{text}">')
    parts += [
        _layers_table(report),
        _left_table(report.left),
        *(
            _names_list(title, names)
            for title, names in (
                ("Missing in the quantized file", report.verification.missing),
                ("Only in the quantized file", report.verification.added),
            )
        ),
        f"<script>{SCRIPT}</script></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Cells are words, or pairs (number, as it is shown)."""
    numeric = {i for row in rows for i, cell in enumerate(row) if isinstance(cell, tuple)}
    head = "".join(f"<th{' class=n' if i in numeric else ''}>{html.escape(c)}</th>" for i, c in enumerate(columns))
    lines = []
    for row in rows:
        cells = [
            f'<td class=n data-v="{cell[0]}">{html.escape(cell[1])}</td>'
            if isinstance(cell, tuple)
            else f"<td>{html.escape(printable(str(cell)))}</td>"
            for cell in row
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table class=sort><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _number(value: float, shown: str = ".3e") -> tuple[float, str]:
    return value, format(value, shown)


def _bytes(value: float) -> tuple[float, str]:
    return value, size(value)


def _formats_table(report: ModelReport) -> str:
    rows = [
        [
            name, _number(entry["layers"], "d"), _number(entry["weights"], ",d"), _bytes(entry["bytes_before"]),
            _bytes(entry["bytes_after"]), _number(entry["bits"], ".2f"), _number(entry["relative_l2"]), _number(entry["worst"]),
        ]
        for name, entry in report.by_format().items()
    ]  # fmt: skip
    return _table(
        ["format", "layers", "weights", "before", "after", "bits a weight", "relative L2", "worst layer"], rows
    )


def _layers_table(report: ModelReport) -> str:
    rows = []
    for layer in report.layers:
        e, w = layer.error, layer.weights
        config = ", ".join(f"{key}={value}" for key, value in layer.config.items())
        output = ("", "") if e.output_l2 is None else _number(e.output_l2)
        rows.append([
            e.name, e.format, config, layer.rule, _number(e.relative_l2), output, _number(e.max_abs),
            _number(w.largest_over_rms, ".1f"), _number(w.channel_ratio, ".1f"), _number(w.kurtosis, ".1f"),
            _bytes(e.bytes_before), _bytes(e.bytes_after),
        ])  # fmt: skip
    columns = [
        "layer", "format", "config", "rule", "relative L2", "of the output", "largest error", "largest / rms",
        "channel / median", "kurtosis", "before", "after",
    ]  # fmt: skip
    return f"<h2>Layers</h2>{_table(columns, rows)}"


def _left_table(left: Mapping[str, str]) -> str:
    if not left:
        return ""
    rows = [[name, str(reason)] for name, reason in left.items()]
    return f"<h2>Matrices left as they are</h2>{_table(['layer', 'reason'], rows)}"


def _names_list(title: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    items = "".join(f"<li>{html.escape(printable(name))}</li>" for name in names)
    return f"<h2>{title}</h2><ul>{items}</ul>"
