"""``kitchen inspect``: what is in a checkpoint, from its headers and the small marker tensors alone."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

from kitchen_core.errors import FormatError, KitchenError, PluginError

from .console import counted, grouped, print_table, size
from .dialect import MARKER, unmarked_codes
from .files import Checkpoint, printable
from .foreign import ForeignLayer
from .recognise import AnyLayer, describe, find_all_layers
from .rules import config_as_json

SHOWN_METADATA = 200  # characters of one metadata string


def inspect_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a checkpoint as plain values: ``layers``, ``totals``, ``problems``, ``metadata``, sizes.

    Only headers and marker tensors are read. A layer that cannot be understood is listed with its problem; only a file
    that is no valid safetensors file raises FormatError.
    """
    checkpoint = Checkpoint.open(path)
    problems = [printable(note) for note in checkpoint.notes]
    try:
        stored = find_all_layers(checkpoint)
    except FormatError as error:
        stored = {}
        problems.append(str(error))
    layers = [_quantized_entry(layer) for layer in stored.values()]
    owned = {layer.prefix + rest for layer in stored.values() for rest in layer.tensors}
    unmarked = {info.name for info in unmarked_codes(checkpoint, stored)}
    for info in checkpoint.in_file_order():
        if info.name in owned or info.name.rpartition(".")[2] == MARKER:
            continue
        problem = "codes without a comfy_quant marker: their meaning would be a guess" if info.name in unmarked else ""
        layers.append(_entry(info.name, info.dtype, list(info.shape), info.nbytes, False, problem=problem))
    layers.sort(key=lambda entry: entry["name"])
    problems += [f"{entry['name']}: {entry['problem']}" for entry in layers if entry["problem"]]
    return {
        "path": str(path),
        "files": [str(file) for file in checkpoint.files],
        "file_bytes": checkpoint.file_bytes,
        "tensor_bytes": checkpoint.nbytes,
        "layers": layers,
        "totals": _totals(layers),
        "problems": problems,
        "metadata": checkpoint.metadata,
    }


def _entry(
    name: str, format: str, shape: list[int], nbytes: int, quantized: bool, config: Any = None, problem: str = "",
    marked_in: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    return {
        "name": printable(name), "format": format, "shape": shape, "bytes": nbytes, "quantized": quantized,
        "config": config, "marked_in": list(marked_in), "problem": problem,
    }  # fmt: skip


def _quantized_entry(layer: AnyLayer) -> dict[str, Any]:
    weight = next((layer.tensors[key] for key in ("weight", "qweight", "weight_packed") if key in layer.tensors), None)
    shape, config, problem = list(weight.shape) if weight else [], None, ""
    try:
        format, found, tensors = layer.resolve()
        shape, config = list(format.shape(tensors, found)), config_as_json(found)
    except PluginError as error:
        problem = f"{error} (shape as stored)"
    except KitchenError as error:
        problem = str(error)
    except (RuntimeError, NotImplementedError) as error:  # a format that needs values to check its tensors
        problem = f"not checked, its format cannot do it without values: {error}"
    problem = problem.removeprefix(f"layer {printable(layer.name)!r}: ")
    if isinstance(layer, ForeignLayer) and config is not None:
        config = {**config, **({"interleaved": layer.splits} if layer.splits else {})}
    entry = _entry(layer.name, layer.format_name, shape, layer.nbytes, True, config, problem, layer.marked_in)
    return {**entry, "stored_as": describe(layer)}


def _totals(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts: dict[tuple[bool, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in layers:
        total = counts[entry["quantized"], entry["format"]]
        total[0] += 1
        total[1] += entry["bytes"]
    return [
        {"format": name, "quantized": quantized, "count": count, "bytes": nbytes}
        for (quantized, name), (count, nbytes) in sorted(counts.items(), reverse=True)
    ]


def render(report: dict[str, Any]) -> None:
    """Print what ``inspect_file`` found."""
    rows = []
    for entry in report["layers"]:
        shape = "x".join(map(str, entry["shape"])) or "scalar"
        config = ", ".join(f"{key}={value}" for key, value in (entry["config"] or {}).items())
        stored_as = entry.get("stored_as", "")
        rows.append([entry["name"], entry["format"], shape, size(entry["bytes"]), stored_as, config])
    print_table(["layer or tensor", "format", "shape", "bytes", "stored as", "config"], rows, right=["bytes"])
    print()
    for total in report["totals"]:
        kind = "quantized layer" if total["quantized"] else "plain tensor"
        print(f"{total['format']}: {counted(total['count'], kind)}, {size(total['bytes'])}")
    foreign = sorted({e["stored_as"] for e in report["layers"] if e.get("stored_as", "comfy") != "comfy"})
    if foreign:
        print(
            f"stored as {', '.join(foreign)}: `kitchen convert IN OUT --to comfy` makes a file that kitchen and ComfyUI load"
        )
    files = counted(len(report["files"]), "file")
    print(f"total: {size(report['tensor_bytes'])} of tensors, {size(report['file_bytes'])} in {files}")
    for key, value in sorted(report["metadata"].items()):
        short = value if len(value) <= SHOWN_METADATA else f"{value[:SHOWN_METADATA]}... ({len(value)} characters)"
        print(f"metadata {printable(key)}: {printable(short)}")
    of_layers = [(entry["name"], entry["problem"]) for entry in report["layers"] if entry["problem"]]
    of_the_file = report["problems"][: len(report["problems"]) - len(of_layers)]
    for problem in (*of_the_file, *grouped(of_layers)):
        print(f"problem: {problem}")
