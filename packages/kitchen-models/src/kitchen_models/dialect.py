"""The comfy dialect: which layers of a checkpoint are quantized, and how the file says so.

A quantized layer is marked by a tensor ``<layer>.comfy_quant`` (uint8, UTF-8 JSON), by the header metadata
``_quantization_metadata`` (JSON: ``{"format_version", "layers": {layer: marker}}``), or by both. docs/formats/checkpoint.md
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kitchen_core.errors import FormatError, KitchenError
from kitchen_core.formats import Format, Tensors, canonical_name, get_format, read_marker

from .files import Checkpoint, TensorInfo, parse_bounded_json, printable

log = logging.getLogger("kitchen")

MARKER = "comfy_quant"
METADATA_KEY = "_quantization_metadata"
FORMAT_VERSION = "1.0"
MAX_MARKER = 1 << 20  # bytes of one marker; real ones have about a hundred
CODE_DTYPES = ("I8", "U8")  # a weight in these has no meaning without a marker


class NamedTensors:
    """What layers of every dialect say of the tensors under their name."""

    name: str
    tensors: dict[str, TensorInfo]

    @property
    def prefix(self) -> str:
        """What its keys start with."""
        return f"{self.name}." if self.name else ""

    @property
    def nbytes(self) -> int:
        """Bytes of everything under its name, bias and marker included."""
        return sum(info.nbytes for info in self.tensors.values())


@dataclass
class StoredLayer(NamedTensors):
    """A quantized layer as the file has it: its marker and the tensors directly under its name, by the rest of the key.

    ``problems`` says in words what is wrong with it; inspecting lists them, loading raises the first.
    """

    name: str
    marker: dict[str, Any]
    tensors: dict[str, TensorInfo]
    marked_in: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)

    @property
    def format_name(self) -> str:
        """The format by its own name, known or not; '?' where nothing says it."""
        name = self.marker.get("format", "?")
        return canonical_name(name) if isinstance(name, str) else printable(str(name))

    def resolve(self) -> tuple[type[Format], Any, Tensors]:
        """(format, config, meta tensors by name), from the header alone.

        Raises the first known problem, a PluginError for a format that is not installed, or a FormatError where marker,
        shapes and dtypes do not fit each other; the layer is named.
        """
        if self.problems:
            raise FormatError(f"layer {printable(self.name)!r}: {self.problems[0]}")
        with naming(self.name):
            format = get_format(self.marker["format"])
            state = {self.prefix + rest: info.meta() for rest, info in self.tensors.items() if rest != MARKER}
            tensors = format.from_state_dict(state, self.prefix)
            format.check_names(tensors)
            config = config_of(format, self.marker, tensors)
            format.check(tensors, config)
            if self.marker.get("full_precision_matrix_mult"):
                log.warning("kitchen: %r asks for a full-precision matmul; it runs its quantized one", self.name)
            return format, config, tensors


class naming:
    """Within the block, a KitchenError gets the layer's name in front."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        start = f"layer {printable(self.layer)!r}"
        if isinstance(error, KitchenError) and not str(error).startswith(start):
            raise type(error)(f"{start}: {error}") from error


def config_of(format: type[Format], marker: Mapping[str, Any], tensors: Tensors) -> Any:
    """The config of a stored layer; a marker whose values have wrong types is a FormatError, not a crash."""
    try:
        return format.config_from_marker(dict(marker), {name: tuple(t.shape) for name, t in tensors.items()})
    except KitchenError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise FormatError(
            f"{format.name}: the marker {str(marker)[:200]} does not describe a layer with tensors of shapes "
            f"{ {name: list(t.shape) for name, t in tensors.items()} } ({type(error).__name__}: {error}); "
            "its maker must write it anew"
        ) from error


# --------------------------------------------------------------------------------------------------------- finding


def find_layers(checkpoint: Checkpoint) -> dict[str, StoredLayer]:
    """All quantized layers by name, from the header and the marker tensors; no weight is read.

    Raises FormatError where ``_quantization_metadata`` as a whole is unusable.
    """
    children: dict[str, dict[str, TensorInfo]] = {}
    for key, info in checkpoint.tensors.items():
        layer, _, rest = key.rpartition(".")
        children.setdefault(layer, {})[rest] = info
    in_header = header_markers(checkpoint.metadata)
    layers = {}
    for name in dict.fromkeys([*(n for n, tensors in children.items() if MARKER in tensors), *in_header]):
        tensors = children.get(name, {})
        layer = StoredLayer(name, {}, tensors)
        _read_markers(checkpoint, layer, in_header.get(name))
        if not layer.problems and not layer.marker and _is_float(tensors.get("weight")):
            continue  # an empty marker beside a float weight marks nothing
        layers[name] = layer
        _complete_marker(layer)
    return layers


def _is_float(info: TensorInfo | None) -> bool:
    return info is not None and info.dtype in ("F64", "F32", "F16", "BF16")


def header_markers(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The markers of the header metadata by layer, each with its ``params`` unfolded; {} where there are none."""
    text = metadata.get(METADATA_KEY)
    if text is None or not text.strip("\0 \n"):
        return {}
    try:
        table = parse_bounded_json(text.encode())
    except ValueError as error:
        raise FormatError(f"the header's {METADATA_KEY} is not JSON: {error}; its maker must write it anew") from error
    layers = table.get("layers", {}) if isinstance(table, dict) else None
    if not isinstance(layers, dict) or not all(isinstance(m, dict) for m in layers.values()):
        raise FormatError(f"the header's {METADATA_KEY} needs an object 'layers' from layer names to objects")
    version = str(table.get("format_version", FORMAT_VERSION))
    if version.partition(".")[0] != FORMAT_VERSION.partition(".")[0]:
        raise FormatError(
            f"the header's {METADATA_KEY} has format_version {printable(version)!r}, and {FORMAT_VERSION!r} is known here; a "
            "newer file needs newer packages: pip install --upgrade kitchen-models kitchen-core"
        )
    return {name.removesuffix(".weight"): _unfolded(marker) for name, marker in layers.items()}


def _unfolded(marker: dict[str, Any]) -> dict[str, Any]:
    nested = marker.get("params")
    return {**marker, **nested} if isinstance(nested, dict) else marker


def _read_markers(checkpoint: Checkpoint, layer: StoredLayer, from_header: dict[str, Any] | None) -> None:
    info = layer.tensors.get(MARKER)
    from_tensor: dict[str, Any] = {}
    if info is not None:
        try:
            from_tensor = _marker_of(checkpoint, info)
        except KitchenError as error:
            layer.problems.append(str(error))
    layer.marked_in = tuple(w for w, there in (("tensor", info), ("header", from_header)) if there is not None)
    differing = sorted(k for k in from_tensor.keys() & (from_header or {}).keys() if from_tensor[k] != from_header[k])
    differing = [k for k in differing if k != "format" or not _same_format(from_tensor[k], from_header[k])]
    if differing:
        layer.problems.append(
            f"the marker tensor and the header disagree about {', '.join(map(printable, differing))}: "
            f"{ {k: from_tensor[k] for k in differing} } and { {k: from_header[k] for k in differing} }; "
            "one of them was edited alone, and only its maker can say which is right"
        )
    layer.marker = {**(from_header or {}), **from_tensor}
    if not layer.tensors:
        layer.problems.append("the header describes it, and the file has no tensor of this layer")


def _same_format(mine: Any, theirs: Any) -> bool:
    return isinstance(mine, str) and isinstance(theirs, str) and canonical_name(mine) == canonical_name(theirs)


def _marker_of(checkpoint: Checkpoint, info: TensorInfo) -> dict[str, Any]:
    if info.dtype not in CODE_DTYPES or len(info.shape) != 1:
        raise FormatError(f"its {MARKER} must be a 1-D U8 tensor, got {info.dtype} {list(info.shape)}")
    raw = checkpoint.read_bytes(info.name, MAX_MARKER)
    try:
        parse_bounded_json(raw.rstrip(b"\0 \n") or b"{}")
    except ValueError as error:
        raise FormatError(f"its {MARKER} must hold UTF-8 JSON, got {raw[:60]!r}: {error}") from error
    return read_marker(
        torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _complete_marker(layer: StoredLayer) -> None:
    """Markers without a format are written by some tools for INT8 only; the tensors must look like it."""
    if layer.problems or isinstance(layer.marker.get("format"), str):
        return
    if "format" in layer.marker:
        layer.problems.append(f"its format must be a name, got {str(layer.marker['format'])[:60]!r}")
    elif not layer.marker:
        layer.problems.append(
            "its marker is empty, so nothing says whether and how its weight is rotated; quantize the original anew"
        )
    elif {"weight", "weight_scale"} <= set(layer.tensors) and layer.tensors["weight"].dtype == "I8":
        layer.marker = {"format": "int8_tensorwise", **layer.marker}
    else:
        layer.problems.append(
            f"its marker {str(layer.marker)[:120]} names no format, and only an I8 weight with a weight_scale can do without"
        )


def unmarked_codes(checkpoint: Checkpoint, layers: Mapping[str, StoredLayer]) -> list[TensorInfo]:
    """Integer weights that no marker explains."""
    return [
        info
        for key, info in checkpoint.tensors.items()
        if (key == "weight" or key.endswith((".weight", ".qweight")))
        and info.dtype in (*CODE_DTYPES, "I32")
        and len(info.shape) >= 2
        and key.rpartition(".")[0] not in layers
    ]


def refuse_unmarked(checkpoint: Checkpoint, layers: Mapping[str, StoredLayer]) -> None:
    """Raises FormatError where an integer weight has no marker: its meaning would be a guess."""
    found = unmarked_codes(checkpoint, layers)
    if found:
        raise FormatError(
            f"{len(found)} integer weights have no comfy_quant marker, such as {printable(found[0].name)!r} "
            f"({found[0].dtype} {list(found[0].shape)}); what their codes mean would be a guess. Use a file whose maker "
            "writes markers, or quantize the original with `kitchen quantize`. What nunchaku, AutoAWQ, GPTQ or "
            "compressed-tensors wrote becomes such a file by `kitchen convert IN OUT --to comfy`"
        )


# --------------------------------------------------------------------------------------------------------- writing


def marker_bytes(marker: Mapping[str, Any]) -> torch.Tensor:
    """A marker as the uint8 tensor that goes into a file."""
    text = json.dumps(marker, sort_keys=True).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def header_metadata(markers: Mapping[str, Mapping[str, Any]], recipe: Mapping[str, Any]) -> dict[str, str]:
    """The metadata strings of a file: the markers, what wrote it and how. Layers sorted, so files are reproducible."""
    from . import __version__

    made = {"format": "pt", "kitchen_version": __version__, "kitchen_recipe": json.dumps(recipe, sort_keys=True)}
    if markers:
        table = {"format_version": FORMAT_VERSION, "layers": {name: dict(markers[name]) for name in sorted(markers)}}
        made[METADATA_KEY] = json.dumps(table, sort_keys=True)
    return made


def recipe_dtypes(metadata: Mapping[str, str]) -> dict[str, torch.dtype]:
    """The float dtype that each quantized layer stands for, as ``kitchen_recipe`` has it; {} where it has none."""
    try:
        layers = parse_bounded_json(metadata.get("kitchen_recipe", "{}").encode())["layers"]
        words = {name: entry["dtype"] for name, entry in layers.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return {name: known[word] for name, word in words.items() if isinstance(word, str) and word in known}
