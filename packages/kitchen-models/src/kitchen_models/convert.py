"""Converting a quantized checkpoint from the dialect of one toolkit to that of another, layer by layer.

Nothing is quantized or dequantized: codes and scales are put into another order under other names. What the target cannot
hold exactly is refused with the layer's name and the reason, before anything is written where headers can tell.
docs/guides/convert.md
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kitchen_core.errors import FormatError, KitchenError
from kitchen_core.formats import Tensors
from kitchen_core.layouts import nunchaku

from .console import counted, grouped, size
from .dialect import (
    MARKER,
    StoredLayer,
    config_of,
    header_metadata,
    marker_bytes,
    naming,
    recipe_dtypes,
    unmarked_codes,
)
from .files import TORCH_DTYPES, Checkpoint, TensorInfo, printable
from .foreign import MAX_CONFIG, ForeignLayer, Hints
from .quantize import sha256_of, source_hash
from .recognise import AnyLayer, describe, dialect_of, find_all_layers
from .rules import config_as_json, layer_of
from .staging import FilePlan, Stage, staging
from .systems import same_file
from .targets import TARGETS, Entry, Job, Target
from .writer import Planned, layout, refuse_name, writable_target

Progress = Callable[[str, int, int], None]
SHARD_BYTES = 5 * 10**9
ENDINGS = (".safetensors", ".safetensors.index.json")
_OWN_STRINGS = ("quantization_config", "_quantization_metadata", "kitchen_recipe", "kitchen_version", "source_sha256")


@dataclass(frozen=True)
class ConvertReport:
    """What was, or would be, converted. ``layers``: form and format by name; ``left``: why a weight stayed, by name."""

    target: str
    layers: dict[str, dict[str, str]]
    left: dict[str, str]
    dropped: tuple[str, ...]
    rounded: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    files: tuple[str, ...]
    config: dict[str, Any] | None
    unsigned: tuple[str, ...] = ()
    interleaved: tuple[str, ...] = ()
    config_file: str = ""  # a config.json that was written beside the target
    seconds: float = 0.0

    def by_format(self) -> dict[str, int]:
        """How many layers each format has."""
        return dict(Counter(entry["format"] for entry in self.layers.values()))

    def summary(self) -> str:
        """One line: layers by format and form, bytes before and after, what was left and why, what was assumed."""
        counts = Counter((entry["format"], entry["form"]) for entry in self.layers.values())
        formats = ", ".join(f"{count} {name} from {form}" for (name, form), count in sorted(counts.items()))
        reasons = Counter(self.left.values())
        left = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(3)) or "no weight matrix"
        notes = [
            f"{counted(len(names), kind)} {words}"
            for names, kind, words in (
                (self.unsigned, "layer", "taken as unsigned by name"), (self.interleaved, "layer", "de-interleaved by name"),
                (self.rounded, "layer", "with zeros rounded once to their dtype"),
                (self.dropped, "tensor", "dropped: no run needs it"),
            )
            if names
        ]  # fmt: skip
        sizes = f"{size(self.bytes_before)} -> {size(self.bytes_after)}"
        return "; ".join(
            [f"{counted(len(self.layers), 'layer')} to {self.target} ({formats}), {sizes}", f"left: {left}", *notes]
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "target": self.target, "layers": self.layers, "left": self.left, "dropped": list(self.dropped),
            "rounded": list(self.rounded), "unsigned": list(self.unsigned), "interleaved": list(self.interleaved),
            "by_format": self.by_format(), "bytes_before": self.bytes_before, "bytes_after": self.bytes_after,
            "files": list(self.files), "quantization_config": self.config, "config_file": self.config_file,
            "seconds": self.seconds,
        }  # fmt: skip


@dataclass
class _Unit:
    """What is written in one step: a layer, or one tensor that stays as it is."""

    key: str
    job: Job | None
    layer: AnyLayer | None
    entries: dict[str, Entry]  # by full key
    copies: dict[str, str] = field(default_factory=dict)  # of a layer: tensors whose bytes stay, new key -> old key

    @property
    def planned(self) -> list[Planned]:
        return [Planned(name, *entry) for name, entry in self.entries.items()]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.planned)


def convert_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str = "comfy",
    hints: Hints | None = None,
    shard_bytes: int = SHARD_BYTES,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a safetensors file, or a sharded one by its index, to the dialect ``to``.

    ``target`` is a ``.safetensors`` file, or a ``.safetensors.index.json``, beside which shards of ``shard_bytes`` appear.
    One layer is in memory at a time. Files appear complete or not at all; a killed run is taken up by the same call.
    Raises FormatError or PluginError, naming the layer, for what cannot be read or what ``to`` cannot hold exactly.
    """
    started = time.perf_counter()
    if to not in TARGETS:
        raise FormatError(f"a target is one of {', '.join(TARGETS)}, got {to!r}")
    if not dry_run:
        writable_target(Path(target))
    refuse_name(Path(target), ENDINGS)
    hints, target = hints or Hints(), Path(os.path.realpath(target))
    checkpoint = Checkpoint.open(source)
    layers = find_all_layers(checkpoint, hints)
    _refuse_contradiction(checkpoint, layers, hints)
    _refuse_unexplained(checkpoint, layers)
    units, left = _plan(checkpoint, layers, TARGETS[to], hints)
    jobs = [unit.job for unit in units if unit.job is not None]
    if not jobs:
        raise FormatError(
            f"{str(source)!r} has no quantized layer, so there is nothing to convert; see `kitchen inspect`"
        )
    config = TARGETS[to].config(jobs, list(left)) if TARGETS[to].config else None
    shards = _shards(units, target, shard_bytes)
    names = _shard_names(target, len(shards))
    _refuse_source(checkpoint, [target, *(target.parent / name for name in names)])
    after = sum(unit.nbytes for unit in units)
    rounded: list[str] = []
    config_file = ""
    if not dry_run:
        files = _file_plans(checkpoint, shards, names, to, config, jobs, progress)
        fingerprint = _fingerprint(checkpoint, files, to, hints)
        with staging(target, files, fingerprint) as stage:
            _stream(checkpoint, units, TARGETS[to], stage, progress)
            rounded = list(dict.fromkeys(stage.remarks))
            config_file = _write_config(checkpoint, stage, config or {"quant_method": "kitchen"})
        after = sum(layout(file.planned, file.metadata)[2] for file in files)
    checkpoint.close()
    return ConvertReport(
        to,
        {unit.layer.name: {"form": describe(unit.layer), "format": unit.job.format.name} for unit in units if unit.job},
        left,
        tuple(key for unit in units if unit.layer for key in _dropped(unit.layer)),
        tuple(rounded), checkpoint.file_bytes, after, tuple(names), config,
        tuple(n for n, x in layers.items() if isinstance(x, ForeignLayer) and x.marker.get("act_unsigned")),
        tuple(n for n, x in layers.items() if isinstance(x, ForeignLayer) and x.splits),
        config_file, time.perf_counter() - started,
    )  # fmt: skip


def _dropped(layer: AnyLayer) -> list[str]:
    return [layer.prefix + rest for rest in layer.dropped] if isinstance(layer, ForeignLayer) else []


def _refuse_contradiction(checkpoint: Checkpoint, layers: Mapping[str, AnyLayer], hints: Hints) -> None:
    """Raises FormatError where ``--from`` names a dialect of which the file has no layer, and has those of another."""
    if hints.dialect is None:
        return
    found = find_all_layers(checkpoint)  # without the hint
    if found and not any(
        dialect_of(x) == hints.dialect.removesuffix("_v2") for x in (*layers.values(), *found.values())
    ):
        counts = Counter(map(describe, found.values()))
        words = ", ".join(f"{counted(count, 'layer')} of {form}" for form, count in counts.items())
        raise FormatError(
            f"--from says {hints.dialect}, and by its keys {str(checkpoint.path)!r} has {words}; leave --from away, or give "
            "the file that was meant"
        )


def _refuse_unexplained(checkpoint: Checkpoint, layers: Mapping[str, AnyLayer]) -> None:
    found = unmarked_codes(checkpoint, layers)
    if found:
        raise FormatError(
            f"{len(found)} integer weights have neither a comfy_quant marker nor the keys of a known toolkit, such as "
            f"{printable(found[0].name)!r} ({found[0].dtype} {list(found[0].shape)}); what their codes mean would be a guess. "
            "Known are comfy, nunchaku, AutoAWQ, GPTQ and compressed-tensors; say which with --from, or put "
            "its config.json beside it"
        )


# -------------------------------------------------------------------------------------------------------- planning


def _plan(
    checkpoint: Checkpoint, layers: Mapping[str, AnyLayer], target: Target, hints: Hints
) -> tuple[list[_Unit], dict[str, str]]:
    """All units in the order of the source, and why each other weight stays. Raises for all refusals at once."""
    units: list[_Unit] = []
    refused: list[tuple[str, KitchenError]] = []  # layer and why
    left: dict[str, str] = {}
    begun: set[str] = set()
    for info in checkpoint.in_file_order():
        name, _, rest = info.name.rpartition(".")
        layer = layers.get(name)
        if layer is None:
            if rest == MARKER:  # of a layer that is not quantized: its marker is empty
                continue
            units.append(_Unit(info.name, None, None, {info.name: (info.dtype, info.shape)}))
            plain = layer_of(info.name)
            if plain is not None and len(info.shape) >= 2:
                is_float = info.dtype in ("F64", "F32", "F16", "BF16")
                left[plain] = "float in the source" if is_float else f"{info.dtype} without a marker"
        elif name not in begun:
            begun.add(name)
            try:
                units.append(_layer_unit(checkpoint, layer, target, hints))
            except KitchenError as error:
                refused.append((name, error))
    for name, layer in layers.items():  # the header may describe layers of which the file has no tensor
        if name not in begun and layer.problems:
            refused.append((name, FormatError(layer.problems[0])))
    if refused:
        raise type(refused[0][1])(_grouped(refused))
    _refuse_twice(units)
    return units, left


def _grouped(refused: list[tuple[str, KitchenError]]) -> str:
    """Which layers are refused and why: what many of them say is said once, and three reasons at most."""
    named = [(f"layer {printable(name)!r}", str(error)) for name, error in refused]
    reasons = grouped((name, error.removeprefix(f"{name}: ")) for name, error in named)
    shown = reasons[:3] + ([counted(len(reasons) - 3, "more reason")] if len(reasons) > 3 else [])
    return (f"{len(refused)} layers are refused. " if len(refused) > 1 else "") + "; ".join(shown)


def _refuse_twice(units: Iterable[_Unit]) -> None:
    seen: dict[str, str] = {}
    for unit in units:
        for name in unit.entries:
            if name in seen:
                raise FormatError(
                    f"both {printable(seen[name])!r} and {printable(unit.key)!r} would become {printable(name)!r}"
                )
            seen[name] = unit.key


def _layer_unit(checkpoint: Checkpoint, layer: AnyLayer, target: Target, hints: Hints) -> _Unit:
    format, config, meta = layer.resolve()
    with naming(layer.name):
        marker = _marker(layer, format, config, meta)
        bias = _bias_dtype(layer, format.shape(meta, config)[0])
        job = Job(layer.name, format, config, marker, meta, bias, hints, _is_symmetric(checkpoint, layer, format.name))
        plan, _ = target.form(job)
        entries = {layer.prefix + rest: entry for rest, entry in plan(job).items()}
        unit = _Unit(layer.name, job, layer, entries)
        if isinstance(layer, StoredLayer):
            known = {key for spec in format.tensors for key in (spec.key, *spec.aliases)} | {MARKER, "bias"}
            others = sorted(set(layer.tensors) - known)
            if others and not target.marked:
                raise FormatError(
                    f"it also holds {', '.join(map(printable, others))}, for which {target.name} has no place"
                )
            for rest in others:
                info = layer.tensors[rest]
                unit.entries[info.name], unit.copies[info.name] = (info.dtype, info.shape), info.name
            if target.marked:
                _add_copies(unit, layer, format)
        return unit


def _marker(layer: AnyLayer, format: Any, config: Any, meta: Tensors) -> dict[str, Any]:
    """Ours, the superset of fields, and what the file's marker says besides."""
    said = {key: value for key, value in layer.marker.items() if key not in ("params", "layout")}
    marker = {**said, **format.marker(config)}
    if config_of(format, marker, meta) != config:
        raise FormatError(f"its marker {str(layer.marker)[:120]} cannot be written again as one that means the same")
    return marker


def _bias_dtype(layer: AnyLayer, out_features: int) -> str | None:
    info = layer.tensors.get("bias")
    if info is None:
        return None
    if info.shape != (out_features,) or info.dtype not in ("F32", "F16", "BF16"):
        raise FormatError(f"its bias must be float [{out_features}], got {info.dtype} {list(info.shape)}")
    return layer.bias_dtype() if isinstance(layer, ForeignLayer) else info.dtype


def _is_symmetric(checkpoint: Checkpoint, layer: AnyLayer, format_name: str) -> bool:
    """Whether the zeros of an AWQ layer are 0 everywhere, where that can be told without unpacking it."""
    if format_name != "awq_w4a16":
        return False
    if isinstance(layer, ForeignLayer):
        return layer.kind.dialect == "compressed-tensors" and "weight_zero_point" not in layer.tensors
    key = next(rest for rest in ("weight_zeros", "weight_zero") if rest in layer.tensors)
    return not bool((checkpoint.read(layer.prefix + key) != 0).any())


def _add_copies(unit: _Unit, layer: StoredLayer, format: Any) -> None:
    """Notes which tensors keep their bytes, so that they are copied in blocks and never held whole."""
    spellings = {spec.key: (spec.key, *spec.aliases) for spec in format.tensors}
    spellings["weight_zero"] = ("weight_zeros", "weight_zero")
    for key, (dtype, shape) in unit.entries.items():
        rest = key.removeprefix(layer.prefix)
        for spelling in spellings.get(rest, (rest,)):
            info = layer.tensors.get(spelling)
            if rest != MARKER and info is not None and info.shape == shape and _same_bytes(info, dtype):
                unit.copies[key] = info.name
                break


def _same_bytes(info: TensorInfo, dtype: str) -> bool:
    return info.dtype == dtype or (info.dtype, dtype) == ("U8", "F8_E4M3")


# ------------------------------------------------------------------------------------------------------------ files


def _shards(units: list[_Unit], target: Path, shard_bytes: int) -> list[list[_Unit]]:
    """The units of each file: one for a ``.safetensors``, else as many as fit ``shard_bytes``; a layer is never split."""
    if target.suffix != ".json":
        return [units]
    if shard_bytes < 1:
        raise FormatError(f"a shard takes at least one byte, got {shard_bytes}")
    shards: list[list[_Unit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    return shards


def _shard_names(target: Path, count: int) -> list[str]:
    if target.suffix != ".json":
        return [target.name]
    refuse_name(target, ENDINGS)  # a link may lead to another name than it has
    stem = target.name.removesuffix(".safetensors.index.json")
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _refuse_source(checkpoint: Checkpoint, targets: list[Path]) -> None:
    for target in targets:
        for file in (checkpoint.path, *checkpoint.files):
            if same_file(target, file):
                raise FormatError(
                    f"{str(target)!r} is the source itself; write to another file, and delete the source after"
                )


def _file_plans(
    checkpoint: Checkpoint, shards: list[list[_Unit]], names: list[str], to: str, config: Any, jobs: list[Job],
    progress: Progress | None,
) -> list[FilePlan]:  # fmt: skip
    hashes = {file.name: sha256_of(file, progress) for file in checkpoint.files}
    known = recipe_dtypes(checkpoint.metadata)
    recipe = {"made_by": "kitchen_models.convert_file", "to": to, "source": hashes, "layers": _recipe(jobs, known)}
    kept = {key: value for key, value in checkpoint.metadata.items() if key not in _OWN_STRINGS}
    plans = []
    for name, units in zip(names, shards, strict=True):
        markers = {unit.job.name: unit.job.marker for unit in units if unit.job} if TARGETS[to].marked else {}
        strings = {**kept, **header_metadata(markers, recipe), "source_sha256": source_hash(hashes)}
        if config is not None:
            strings["quantization_config"] = json.dumps(config, sort_keys=True)
        plans.append(FilePlan(name, tuple(p for unit in units for p in unit.planned), strings))
    return plans


def _recipe(jobs: list[Job], known: Mapping[str, torch.dtype]) -> dict[str, dict[str, Any]]:
    made = {}
    for job in jobs:
        floats = [t.dtype for t in job.meta.values() if t.dtype in (torch.float16, torch.bfloat16)]
        dtype = known.get(job.name) or (floats[0] if floats else TORCH_DTYPES.get(job.bias or "", torch.bfloat16))
        word = str(dtype).removeprefix("torch.")
        made[job.name] = {"format": job.format.name, "config": config_as_json(job.config), "dtype": word}
    return made


def _write_config(checkpoint: Checkpoint, stage: Stage, config: dict[str, Any]) -> str:
    """The source's config.json with the new ``quantization_config``, beside the target, where there is none; its path or ""."""
    source, made = checkpoint.path.parent / "config.json", stage.target.parent / "config.json"
    if not source.is_file() or source.stat().st_size > MAX_CONFIG or made.exists():
        return ""
    try:
        table = json.loads(source.read_text(encoding="utf-8"))
    except ValueError:
        return ""
    if not isinstance(table, dict) or "model_type" not in table:
        return ""
    table.pop("compression_config", None)
    hidden = stage.work / made.name
    hidden.write_text(json.dumps({**table, "quantization_config": config}, indent=2) + "\n", encoding="utf-8")
    os.replace(hidden, made)
    return str(made)


def _fingerprint(checkpoint: Checkpoint, files: list[FilePlan], to: str, hints: Hints) -> str:
    """Equal for two runs that would write the same bytes: the sources' hashes are in the metadata."""
    text = repr((to, hints, [(file.name, file.planned, sorted(file.metadata.items())) for file in files]))
    return hashlib.sha256(text.encode()).hexdigest()


# -------------------------------------------------------------------------------------------------------- streaming


def _stream(
    checkpoint: Checkpoint, units: list[_Unit], target: Target, stage: Stage, progress: Progress | None
) -> None:
    """Write all units that an earlier run did not; the layers whose zeros are rounded become remarks."""
    done, total = 0, sum(unit.nbytes for unit in units)
    for unit in units:
        if progress:
            progress(printable(unit.key), done, total)
        done += unit.nbytes
        missing = [key for key in unit.entries if key not in stage.done]
        if not missing or stage.publishing:
            continue
        if unit.job is None:
            stage.put_blocks(unit.key, checkpoint.blocks(unit.key))
            continue
        to_make = []
        for key in missing:
            if key in unit.copies:
                stage.put_blocks(key, checkpoint.blocks(unit.copies[key]))
            elif target.marked and key == unit.layer.prefix + MARKER:
                stage.put(key, marker_bytes(unit.job.marker))
            else:
                to_make.append(key)
        if to_make:
            made, rounded = _converted(checkpoint, unit, target)
            if rounded:
                stage.remark(unit.job.name)
            for key in to_make:
                stage.put(key, made[key])
    if progress:
        progress("done", total, total)


def _converted(checkpoint: Checkpoint, unit: _Unit, target: Target) -> tuple[Tensors, bool]:
    """(a layer's tensors by their new keys, whether a zero was rounded on the way)"""
    job, layer = unit.job, unit.layer
    with naming(layer.name):
        if isinstance(layer, ForeignLayer):
            tensors, bias = layer.unpack(checkpoint)
            rounded = layer.rounded and (target.marked or target.name.startswith("nunchaku"))  # else integers again
        else:
            tensors, bias, rounded = *_read_stored(checkpoint, layer, job), False
        job.format.check(tensors, job.config)
        made = target.form(job)[1](job, tensors, bias)
        if "wzeros" in made:
            exact = tensors["zeros"].double() - 8 * tensors["scale"].double()
            rounded |= not torch.equal(exact, nunchaku.pack_awq_zeros(tensors["zeros"], tensors["scale"]).double())
        return {layer.prefix + rest: tensor for rest, tensor in made.items()}, rounded


def _read_stored(checkpoint: Checkpoint, layer: StoredLayer, job: Job) -> tuple[Tensors, torch.Tensor | None]:
    known = {key for spec in job.format.tensors for key in (spec.key, *spec.aliases)} & set(layer.tensors)
    state = {layer.prefix + rest: checkpoint.read(layer.prefix + rest) for rest in sorted(known)}
    bias = checkpoint.read(layer.prefix + "bias") if "bias" in layer.tensors else None
    return job.format.from_state_dict(state, layer.prefix), bias
