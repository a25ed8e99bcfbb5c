"""Quantizing a checkpoint file, streamed layer by layer, and a model in memory."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kitchen_core import Calibration, QuantizedLinear
from kitchen_core.errors import FormatError, UnsupportedError

from .calibrations import Calibrations, calibrated_layers, load_calibration
from .console import counted, size
from .dialect import MARKER, StoredLayer, find_layers, header_metadata, marker_bytes, naming
from .files import TORCH_DTYPES, Checkpoint, TensorInfo, open_binary, printable
from .ranks import Team, team, writing_together
from .recognise import codes_of_others
from .rows import check_finite, output_shapes, quantize_rows
from .rules import UNMATCHED, Decision, Rules, decide, layer_of
from .systems import same_file
from .writer import Planned, refuse_name, writable_target

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all
QUANTIZING_COST = 10.0  # of a byte that is quantized, over one that is copied: for sharing out the work
ALREADY = "quantized already"


@dataclass(frozen=True)
class Report:
    """What was, or would be, done to each layer. ``bytes_*`` are file sizes, or bytes of the weights of a model."""

    decisions: tuple[Decision, ...]
    bytes_before: int
    bytes_after: int
    seconds: float = 0.0
    path: str = ""
    calibrated: frozenset[str] = frozenset()
    rank: int = 0  # of several processes that made one file together, this one's number

    @property
    def quantized(self) -> tuple[Decision, ...]:
        """The layers that got a format."""
        return tuple(d for d in self.decisions if d.format is not None)

    @property
    def left(self) -> tuple[Decision, ...]:
        """The float matrices that stayed as they are; their ``reason`` says why."""
        return tuple(d for d in self.decisions if d.format is None and d.is_matrix)

    @property
    def uncalibrated(self) -> dict[str, int]:
        """How many layers of each format that uses a calibration got none."""
        return dict(
            Counter(
                d.format.name for d in self.quantized if d.format.uses_calibration and d.layer not in self.calibrated
            )
        )

    def by_format(self) -> dict[str, int]:
        """How many layers each format got."""
        return dict(Counter(d.format.name for d in self.quantized))

    def summary(self) -> str:
        """One line: layers by format, bytes before and after, what was left and why."""
        formats = ", ".join(f"{count} {name}" for name, count in self.by_format().items())
        formats += f"; {len(self.calibrated)} calibrated" if self.calibrated else ""
        done = f"{counted(len(self.quantized), 'layer')} quantized" + (f" ({formats})" if formats else "")
        return f"{done}, {size(self.bytes_before)} -> {size(self.bytes_after)}; {self._stayed()}"

    def _stayed(self) -> str:
        """The matrices that stayed as they are, float or not, by reason."""
        stayed = Counter(d.reason for d in self.decisions if d.format is None and len(d.shape) == 2)
        if not stayed:
            return f"there is no {'other ' if self.quantized else ''}weight matrix"
        shown = ", ".join(f"{count} ({reason})" for reason, count in stayed.most_common(3))
        more = f", {counted(len(stayed) - 3, 'more reason')}" if len(stayed) > 3 else ""
        return f"{counted(stayed.total(), 'matrix')} left as {'it is' if stayed.total() == 1 else 'they are'}: {shown}{more}"

    def refuse_nothing(self) -> None:
        """Raises UnsupportedError, saying why and what to do, where no layer is quantized."""
        if self.quantized:
            return
        advice = []
        if any(d.reason.startswith(ALREADY) for d in self.decisions):
            advice.append(
                "give the float file that the quantized layers were made from: quantizing their codes again would add a second "
                "error to the first. `kitchen convert` puts codes as they are into another toolkit's form"
            )
        if any(d.reason.startswith("float8") for d in self.decisions):
            advice.append(
                "give the file that the float8 weights were made from, or make them bfloat16 first (times their scales, if "
                "they have some)"
            )
        named = [repr(printable(d.layer)) for d in self.left if d.rule or d.reason == UNMATCHED]
        if any(" cannot hold " in d.reason for d in self.left):
            advice.append(
                "give the format other options, or take another format (options of the command: --group-size, "
                "--convrot-groupsize, --rank, --option)"
            )
        elif named:
            names = ", ".join([*named[:3], *(["..."] if len(named) > 3 else [])])
            advice.append(f"a rule that names a float layer ({names}) quantizes it all the same")
            advice += ["--dry-run lists every reason"] if self.path else []
        if not advice:
            advice = [
                "`kitchen inspect` lists what is in the file" if self.path else "plain nn.Linear is quantized alone"
            ]
        raise UnsupportedError(f"nothing to do: {self._stayed()}; {'; '.join(advice)}")

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "layers": [d.as_json() for d in self.decisions],
            "by_format": self.by_format(),
            "calibrated": sorted(self.calibrated),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "seconds": self.seconds,
            "path": self.path,
        }


# ------------------------------------------------------------------------------------------------------------ files


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rules: Any = (),
    format: str | None = None,
    options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    calibration: Calibrations | str | os.PathLike[str] | None = None,
) -> Report:
    """Quantize a safetensors file, or a sharded one by its index, into one file in the comfy dialect.

    Layers are read, quantized and written one at a time, so that memory does not grow with the file. The target appears
    complete or not at all. ``rules``, ``format`` and ``options`` as in ``Rules.of``. Layers that are quantized already
    are copied with their markers; everything else is copied byte for byte. ``calibration``: what ``calibrate`` returned,
    or the path where ``save_calibration`` put it; a layer that it has, in a format that uses it, is read as a whole.
    Where torchrun started several processes with this call, they share the layers out and make the one file together.
    Raises FormatError for a bad source or a target that is not called ``.safetensors``, UnsupportedError, naming the
    layer, for a weight with inf or NaN, and, but for a dry run, where no layer at all would be quantized; nothing is
    written then.
    """
    started = time.perf_counter()
    rules = Rules.of(rules, format, options)
    if not dry_run:
        writable_target(Path(target))
    refuse_name(Path(target))
    checkpoint = Checkpoint.open(source)
    _refuse_same(checkpoint, Path(target))
    stored = find_layers(checkpoint)
    decisions = plan(checkpoint, stored, rules)
    chosen = {d.layer: d for d in decisions if d.format is not None}
    if not chosen:
        report = Report(decisions, checkpoint.file_bytes, checkpoint.file_bytes, path=str(target))
        if not dry_run:
            report.refuse_nothing()
        return report
    if isinstance(calibration, str | os.PathLike):
        calibration = load_calibration(calibration)
    calibrated = calibrated_layers(calibration, decisions)
    outputs, markers = _outputs(checkpoint, chosen)
    markers |= {name: layer.marker for name, layer in stored.items()}
    planned = [p for made in outputs.values() for p in made]
    bytes_after = sum(p.nbytes for p in planned)
    with team() as members:
        if not dry_run:
            _refuse_clashes(planned)
            metadata = _metadata(checkpoint, decisions, markers, calibrated, members, progress)
            sources = checkpoint.in_file_order()
            mine = members.share(sources, [_cost(info, chosen) for info in sources])
            names = [p.name for info in mine for p in outputs[info.name]]
            with writing_together(members, Path(target), planned, names, metadata) as writer:
                given = dict.fromkeys(calibrated, calibration)
                _stream(checkpoint, mine, chosen, given, writer, progress)
                bytes_after = writer.file_bytes
    checkpoint.close()
    seconds = time.perf_counter() - started
    return Report(decisions, checkpoint.file_bytes, bytes_after, seconds, str(target), calibrated, members.rank)


def plan(checkpoint: Checkpoint, stored: Mapping[str, StoredLayer], rules: Rules) -> tuple[Decision, ...]:
    """What the rules say of each weight of a checkpoint, in the order of its names; headers only."""
    made = []
    for key in checkpoint.tensors:
        layer = layer_of(key)
        if layer is None:
            continue
        info = checkpoint.tensors[key]
        keep = f"{ALREADY}: {stored[layer].format_name}" if layer in stored else ""
        if not keep and info.dtype not in TORCH_DTYPES:
            keep = f"{info.dtype}, which this torch cannot hold"
        made.append(decide(layer, info.shape, TORCH_DTYPES.get(info.dtype), rules, keep))
    for layer, info in codes_of_others(checkpoint, stored).items():
        keep = f"{ALREADY}, by a toolkit whose file has a {info.name.rpartition('.')[2]}"
        made.append(decide(layer, info.shape, TORCH_DTYPES.get(info.dtype), rules, keep))
    rules.warn_of_unmatched(d.layer for d in made)
    return tuple(sorted(made, key=lambda d: natural(d.layer)))


def natural(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, the numbers in them as numbers."""
    return [(int(word), "") if word.isdecimal() and len(word) < 19 else (-1, word) for word in name.split(".")]


def _key(layer: str, rest: str) -> str:
    return f"{layer}.{rest}" if layer else rest


def _outputs(
    checkpoint: Checkpoint, chosen: Mapping[str, Decision]
) -> tuple[dict[str, list[Planned]], dict[str, dict[str, Any]]]:
    """The tensors of the new file by that of the source which they are made from, and the markers of the new layers."""
    outputs, markers = {}, {}
    for info in checkpoint.in_file_order():
        decision = chosen.get(layer_of(info.name)) if layer_of(info.name) is not None else None
        if decision is None:
            outputs[info.name] = [Planned(info.name, info.dtype, info.shape)]
            continue
        with naming(decision.layer):
            shapes = output_shapes(decision.format, decision.config, *decision.shape, decision.dtype)
            empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in shapes.items()}
            decision.format.check_names(empty)
            state = decision.format.state_dict(empty, _key(decision.layer, ""))
            markers[decision.layer] = decision.format.marker(decision.config)
            state[_key(decision.layer, MARKER)] = marker_bytes(markers[decision.layer])
            outputs[info.name] = [Planned.of(key, tensor) for key, tensor in state.items()]
    return outputs, markers


def _cost(info: TensorInfo, chosen: Mapping[str, Decision]) -> float:
    return info.nbytes * (QUANTIZING_COST if layer_of(info.name) in chosen else 1.0)


def _stream(
    checkpoint: Checkpoint, mine: Sequence[TensorInfo], chosen: Mapping[str, Decision], given: Mapping[str, Calibrations],
    writer: Any, progress: Progress | None,
) -> None:  # fmt: skip
    """``given`` has the calibrations to look in for each layer that uses one: they may lie in a file."""
    done, total = 0, sum(info.nbytes for info in mine)
    for info in mine:
        layer = layer_of(info.name)
        if progress:
            progress(printable(info.name), done, total)
        if layer is None or layer not in chosen:
            writer.put_blocks(info.name, checkpoint.blocks(info.name))
        else:
            calibration = given[layer][layer] if layer in given else None
            _put_layer(checkpoint, chosen[layer], info.name, writer, calibration)
        done += info.nbytes
    if progress:
        progress("done", done, total)


def _put_layer(
    checkpoint: Checkpoint, decision: Decision, key: str, writer: Any, calibration: Calibration | None
) -> None:
    format, config = decision.format, decision.config
    with naming(decision.layer):
        tensors = quantize_rows(
            lambda rows: checkpoint.read(key, rows), format, config, decision.shape, decision.dtype, calibration
        )  # fmt: skip
        format.check(tensors, config)
        for name, tensor in format.state_dict(tensors, _key(decision.layer, "")).items():
            writer.put(name, tensor)
        writer.put(_key(decision.layer, MARKER), marker_bytes(format.marker(config)))


def _metadata(
    checkpoint: Checkpoint,
    decisions: tuple[Decision, ...],
    markers: dict[str, dict[str, Any]],
    calibrated: frozenset[str],
    members: Team,
    progress: Progress | None,
) -> dict[str, str]:
    entries = {d.layer: d.as_json() for d in decisions if d.format is not None}
    for entry in entries.values():
        if entry.pop("layer") in calibrated:
            entry["calibrated"] = True
        del entry["shape"]
    left = {d.layer: d.reason for d in decisions if d.format is None and d.is_matrix}
    sizes = [file.stat().st_size for file in checkpoint.files]
    found = members.gather({f.name: sha256_of(f, progress) for f in members.share(checkpoint.files, sizes)})
    hashes = {name: value for part in found for name, value in part.items()}  # ranks have consecutive files: in order
    recipe = {"made_by": "kitchen_models.quantize_file", "layers": entries, "left": left, "source": hashes}
    return {**checkpoint.metadata, **header_metadata(markers, recipe), "source_sha256": source_hash(hashes)}


def source_hash(hashes: Mapping[str, str]) -> str:
    """The SHA-256 of the source file; of a sharded one, that of the lines ``<sha256>  <file name>``, as sha256sum has them."""
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    return hashlib.sha256("".join(f"{value}  {name}\n" for name, value in hashes.items()).encode()).hexdigest()


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a whole file, read in blocks."""
    digest, size, done = hashlib.sha256(), path.stat().st_size, 0
    with open_binary(path) as stream:
        while block := stream.read(8 << 20):
            digest.update(block)
            done += len(block)
            if progress:
                progress(f"hashing {path.name}", done, size)
    return digest.hexdigest()


def _refuse_same(checkpoint: Checkpoint, target: Path) -> None:
    for file in (checkpoint.path, *checkpoint.files):
        if same_file(target, file):
            raise FormatError(
                f"{str(target)!r} is the source itself; quantizing loses precision, so write to another file"
            )


def _refuse_clashes(planned: list[Planned]) -> None:
    seen: set[str] = set()
    for p in planned:
        if p.name in seen:
            raise FormatError(
                f"the source has a tensor {printable(p.name)!r} and quantizing its layer makes another of that name; "
                "leave the layer as it is with a rule LAYER=none"
            )
        seen.add(p.name)


# ----------------------------------------------------------------------------------------------------------- models


def quantize_(
    model: nn.Module,
    rules: Any = (),
    format: str | None = None,
    options: Mapping[str, Any] | None = None,
    calibration: Calibrations | None = None,
) -> Report:
    """Replace the nn.Linear modules of a model by QuantizedLinear, in place, as the rules say.

    ``quantize_(model, "int8")`` takes the default rules; else as in ``Rules.of``. ``calibration``: what ``calibrate``
    returned for this model. The result is bit for bit that of ``quantize_file`` and ``load_into``. Every rule is applied
    and every weight looked at before the first module is replaced: an error leaves the model as it was.
    Raises UnsupportedError, naming the layer, for a weight with inf or NaN or on the meta device, and where no layer at all
    would be quantized.
    """
    if not isinstance(model, nn.Module):
        found = repr(str(model)) if isinstance(model, str | os.PathLike) else type(model).__name__
        raise UnsupportedError(
            f"quantize_ takes a model, an nn.Module, got {found}; quantize_file(source, target, ...) takes a checkpoint"
        )
    started = time.perf_counter()
    rules = Rules.of(rules, format, options)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    decisions = decisions_of(model, rules)
    chosen = [d for d in decisions if d.format is not None]
    before = sum(module.weight.nbytes for module in linears.values())
    Report(decisions, before, before).refuse_nothing()
    calibrated = calibrated_layers(calibration, decisions)
    for decision in chosen:
        with naming(decision.layer):
            weight = linears[decision.layer].weight
            if weight.is_meta:
                raise UnsupportedError("its weight is on the meta device; load the model's weights before quantizing")
            check_finite(weight.detach())
    saved = 0
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    for decision in chosen:
        linear = linears[decision.layer]
        with naming(decision.layer):
            given = calibration[decision.layer] if decision.layer in calibrated else None
            made = quantized_linear(linear, linear.weight.detach(), decision, given)
        saved += linear.weight.nbytes - sum(t.nbytes for t in made.inner().values())
        for name in names[id(linear)]:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, made)
    return Report(decisions, before, before - saved, time.perf_counter() - started, "", calibrated)


def decisions_of(
    model: nn.Module, rules: Rules, dtype: torch.dtype | None = None, kept: Mapping[str, str] | None = None
) -> tuple[Decision, ...]:
    """What the rules say of each nn.Linear of a model, which may be on the meta device.

    ``dtype`` is the float dtype the weights will have, where not the one they have; ``kept`` has reasons by layer's name to
    leave it as it is.
    """
    tied, kept, made = _tied_to_others(model), kept or {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            keep = _keep_reason(name, module, tied) or kept.get(name, "")
            shape = (module.out_features, module.in_features)
            made.append(decide(name, shape, dtype or module.weight.dtype, rules, keep))
    rules.warn_of_unmatched(d.layer for d in made)
    return tuple(made)


def quantized_linear(
    linear: nn.Linear, weight: torch.Tensor, decision: Decision, calibration: Calibration | None = None
) -> QuantizedLinear:
    """The layer that takes the place of ``linear`` with ``weight`` [N, K], on the weight's device; it keeps the bias."""
    tensors = quantize_rows(
        lambda rows: weight if rows is None else weight[rows], decision.format, decision.config, decision.shape,
        weight.dtype, calibration,
    )  # fmt: skip
    tensors = {name: tensor.to(weight.device) for name, tensor in tensors.items()}
    bias = None if linear.bias is None else linear.bias.detach()
    return QuantizedLinear(tensors, decision.format, decision.config, bias, weight.dtype).train(linear.training)


def _tied_to_others(model: nn.Module) -> dict[int, str]:
    """Parameters of modules that are no nn.Linear, by identity: a linear weight among them is tied."""
    return {
        id(parameter): f"{name}.{key}"
        for name, module in model.named_modules()
        if not isinstance(module, nn.Linear)
        for key, parameter in module.named_parameters(recurse=False)
    }


def _keep_reason(name: str, module: nn.Linear, tied: Mapping[int, str]) -> str:
    """Why a module cannot be swapped, whatever the rules say; empty where it can."""
    if not name:
        return "the model itself is this layer: use QuantizedLinear.from_linear"
    if isinstance(module, QuantizedLinear):
        return f"{ALREADY}: {module.format.name}"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__}: others may read its weight directly, so only plain nn.Linear is replaced"
    return f"its weight is tied to {tied[id(module.weight)]!r}" if id(module.weight) in tied else ""
