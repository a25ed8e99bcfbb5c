"""Loading quantized checkpoints into layers and models, and saving them again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from kitchen_core import QuantizedLinear, QuantizedTensor
from kitchen_core.errors import FormatError
from kitchen_core.formats import read_marker

from .dialect import (
    MARKER,
    config_of,
    header_metadata,
    marker_bytes,
    naming,
    recipe_dtypes,
    refuse_unmarked,
)
from .files import Checkpoint, printable
from .foreign import ForeignLayer
from .recognise import AnyLayer, find_all_layers
from .rules import config_as_json
from .writer import Planned, refuse_name, writing

OTHER_MODEL = "the file is of another model: make the model by the config that came with the file"

Loaded = dict[str, QuantizedLinear | torch.Tensor]


class LoadResult(NamedTuple):
    """What ``load_into`` did: layers swapped, keys of the model the file lacks, keys of the file the model lacks."""

    layers: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load(path: str | os.PathLike[str], device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Loaded:
    """Read a checkpoint: quantized layers by their names as QuantizedLinear, all other tensors by their keys.

    ``dtype`` is the float dtype that quantized layers stand for; where None, the one in the file's recipe, else that of
    the layer's bias, else bfloat16. Tensors on the CPU share the file's memory map. Layers that nunchaku, AutoAWQ, GPTQ or
    compressed-tensors stored are read too; what their files do not say is taken as ``kitchen convert`` does without options.
    Raises FormatError for a bad file or a layer that does not fit its format, PluginError for a format whose package is
    missing; the layer is named.
    """
    checkpoint = Checkpoint.open(path)
    stored = find_all_layers(checkpoint)
    refuse_unmarked(checkpoint, stored)
    for layer in stored.values():
        layer.resolve()  # everything that the headers can tell is said before a tensor is read
    dtypes = recipe_dtypes(checkpoint.metadata)
    loaded: Loaded = {}
    taken = set()
    for name, layer in stored.items():
        loaded[name], keys = load_layer(checkpoint, layer, device, dtype or dtypes.get(name))
        taken |= keys
    for info in checkpoint.in_file_order():
        if info.name not in taken and info.name.rpartition(".")[2] != MARKER:  # an empty marker beside a float weight
            loaded[info.name] = checkpoint.read(info.name).to(device)
    checkpoint.close()
    return loaded


def load_layer(
    checkpoint: Checkpoint, layer: AnyLayer, device: str | torch.device, dtype: torch.dtype | None
) -> tuple[QuantizedLinear, set[str]]:
    """(one quantized layer, the keys it took). Raises FormatError or PluginError, naming the layer, as ``load`` does."""
    format, config, _ = layer.resolve()
    if isinstance(layer, ForeignLayer):
        return _load_foreign(checkpoint, layer, device, dtype), {layer.prefix + rest for rest in layer.tensors}
    known = {key for spec in format.tensors for key in (spec.key, *spec.aliases)} & set(layer.tensors)
    state = {layer.prefix + rest: checkpoint.read(layer.prefix + rest).to(device) for rest in sorted(known)}
    bias = checkpoint.read(layer.prefix + "bias").to(device) if "bias" in layer.tensors else None
    with naming(layer.name):
        tensors = format.from_state_dict(state, layer.prefix)
        config = config_of(format, layer.marker, tensors)
        _check_bias(bias, format.shape(tensors, config)[0])
        made = QuantizedLinear(tensors, format, config, bias, dtype or (torch.bfloat16 if bias is None else bias.dtype))
    return made, {layer.prefix + rest for rest in (*known, MARKER, "bias")}


def _load_foreign(
    checkpoint: Checkpoint, layer: ForeignLayer, device: str | torch.device, dtype: torch.dtype | None
) -> QuantizedLinear:
    format, config, _ = layer.resolve()
    tensors, bias = layer.unpack(checkpoint)
    with naming(layer.name):
        _check_bias(bias, format.shape(tensors, config)[0])
        halves = [t.dtype for t in tensors.values() if t.dtype in (torch.float16, torch.bfloat16)]
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        stands_for = dtype or (halves[0] if halves else torch.bfloat16)
        return QuantizedLinear(tensors, format, config, None if bias is None else bias.to(device), stands_for)


def _check_bias(bias: torch.Tensor | None, out_features: int) -> None:
    if bias is not None and (tuple(bias.shape) != (out_features,) or not bias.dtype.is_floating_point):
        raise FormatError(f"its bias must be float [{out_features}], got {bias.dtype} {list(bias.shape)}")


def load_into(
    model: nn.Module,
    path: str | os.PathLike[str] | Loaded,
    device: str | torch.device = "cpu",
    strict: bool = True,
    prefix: str = "",
) -> LoadResult:
    """Load a checkpoint into a model: each nn.Linear whose layer is quantized is replaced by a QuantizedLinear.

    ``path`` may also be what ``load`` returned. ``prefix`` is cut from the file's names ("model.diffusion_model.").
    A model on the meta device gets the file's tensors themselves; otherwise values are copied into the model's, and
    quantized layers stand for the model's own dtype. All is checked before the first module is replaced.
    Raises FormatError where a quantized layer has no nn.Linear of its shape in the model, or, if ``strict``, where keys
    are missing or left over; tied parameters count as present.
    """
    loaded = path if isinstance(path, Mapping) else load(path, device)
    loaded = {name.removeprefix(prefix): value for name, value in loaded.items() if name.startswith(prefix)}
    layers = {name: value for name, value in loaded.items() if isinstance(value, QuantizedLinear)}
    rest = {name: value for name, value in loaded.items() if name not in layers}
    modules = {name: _linear_of(model, name, layer) for name, layer in layers.items()}
    missing, unexpected, misfits = _compare_keys(model, layers, rest)
    if misfits:
        raise FormatError(
            f"{len(misfits)} tensors have another shape than in the model: {'; '.join(misfits[:3])}; {OTHER_MODEL}"
        )
    if strict and (missing or unexpected):
        raise FormatError(
            f"the file does not fit the model: missing {list(missing[:3])} ({len(missing)}), left over "
            f"{[printable(n) for n in unexpected[:3]]} ({len(unexpected)}); "
            "load with strict=False to accept this, or with prefix= where the names differ by one"
        )
    own = model.state_dict(keep_vars=True)
    for name, layer in layers.items():
        if not modules[name].weight.is_meta:
            _stand_for(layer, modules[name].weight.dtype)
        _replace(model, name, layer.train(modules[name].training))
    usable = {name: value for name, value in rest.items() if name not in unexpected}
    for assign in (False, True):
        part = {name: value for name, value in usable.items() if own[name].is_meta == assign}
        model.load_state_dict(part, strict=False, assign=assign)
    return LoadResult(tuple(layers), missing, unexpected)


def _linear_of(model: nn.Module, name: str, layer: QuantizedLinear) -> nn.Linear:
    shown = printable(name)
    if not name:
        raise FormatError(
            "the file is one bare layer, which cannot replace the model itself; use load(path)[''] instead"
        )
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise FormatError(
            f"layer {shown!r} of the file is not in the model; use prefix= where names differ by one"
        ) from error
    if not isinstance(module, nn.Linear):
        raise FormatError(
            f"layer {shown!r}: the file has a quantized linear, the model's is of type {type(module).__name__}"
        )
    wanted, found = (module.out_features, module.in_features), (layer.out_features, layer.in_features)
    if wanted != found or (module.bias is None) != (layer.bias is None):
        bias = [{True: "without bias", False: "with bias"}[b is None] for b in (module.bias, layer.bias)]
        raise FormatError(
            f"layer {shown!r}: the model has {wanted} {bias[0]}, the file {found} {bias[1]}; {OTHER_MODEL}"
        )
    return module


def _stand_for(layer: QuantizedLinear, dtype: torch.dtype) -> None:
    layer.compute_dtype = dtype
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.to(dtype)


def _compare_keys(model: nn.Module, layers: Loaded, rest: Mapping[str, Any]) -> tuple[tuple, tuple, list[str]]:
    """(missing keys, unexpected keys, tensors whose shape differs); tied parameters count as present."""
    own = model.state_dict(keep_vars=True)
    covered = tuple(f"{name}." if name else "" for name in layers)
    wanted = {key: value for key, value in own.items() if not key.startswith(covered)} if covered else own
    present = {id(own[key]) for key in rest if key in own}
    missing = tuple(key for key, value in wanted.items() if key not in rest and id(value) not in present)
    unexpected = tuple(key for key in rest if key not in wanted)
    misfits = [
        f"{key} {list(rest[key].shape)}, in the model {list(value.shape)}"
        for key, value in wanted.items()
        if key in rest and isinstance(value, torch.Tensor) and value.shape != rest[key].shape
    ]
    return missing, unexpected, misfits


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


# ---------------------------------------------------------------------------------------------------------- saving


def save(
    model_or_state: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model, or a dict as ``load`` returns it, to one safetensors file in the comfy dialect, atomically.

    Values of a dict may be QuantizedLinear (by layer), QuantizedTensor (by the key of the weight) and plain tensors. A
    tied parameter is written under each of its names. ``metadata`` is added to the header's strings. Raises FormatError for
    a path that does not end in ``.safetensors`` and for what a file cannot hold.
    """
    refuse_name(Path(path))
    tensors, markers, layers = _collect(model_or_state)
    recipe = {"made_by": "kitchen_models.save", "layers": layers}
    strings = {**(metadata or {}), **header_metadata(markers, recipe)}
    planned = [Planned.of(name, tensor) for name, tensor in tensors.items()]
    with writing(Path(path), planned, strings) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)


def _collect(source: Any) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """(tensors by key, markers by layer, recipe entries by layer)"""
    tensors: dict[str, torch.Tensor] = {}
    markers: dict[str, dict[str, Any]] = {}
    recipe: dict[str, dict[str, Any]] = {}

    def add_layer(name: str, format: Any, config: Any, dtype: torch.dtype) -> None:
        markers[name] = format.marker(config)
        config_json = config_as_json(config)
        recipe[name] = {"format": format.name, "config": config_json, "dtype": str(dtype).removeprefix("torch.")}
        tensors[f"{name}.{MARKER}" if name else MARKER] = marker_bytes(markers[name])

    if isinstance(source, nn.Module):
        for name, module in source.named_modules(remove_duplicate=False):
            if "_kitchen_loras" in module.__dict__:
                raise FormatError(
                    f"layer {name!r} has a LoRA attached, which no checkpoint holds; remove it or merge it first"
                )
            if isinstance(module, QuantizedLinear):
                add_layer(name, module.format, module.config, module.compute_dtype)
        source = source.state_dict()
    for name, value in source.items():
        if isinstance(value, QuantizedLinear):
            prefix = f"{name}." if name else ""
            tensors |= {prefix + key: t for key, t in value.state_dict().items()}
            add_layer(name, value.format, value.config, value.compute_dtype)
        elif isinstance(value, QuantizedTensor):
            tensors |= value.state_dict(name)
            add_layer(name.removesuffix("weight").removesuffix("."), value.format, value.config, value.dtype)
        elif isinstance(value, torch.Tensor):
            if value.is_meta:
                raise FormatError(f"tensor {name!r} is on the meta device: it has no values to save")
            tensors.setdefault(name, value)
        else:
            raise FormatError(
                f"{name!r} is of type {type(value).__name__}; only tensors and quantized layers can be saved"
            )
    for key, value in tensors.items():
        layer = key.removesuffix(MARKER).removesuffix(".")
        if (key == MARKER or key.endswith(f".{MARKER}")) and layer not in markers:  # from a plain state dict
            markers[layer] = read_marker(value.cpu())
            recipe[layer] = {"format": markers[layer].get("format")}
    return tensors, markers, recipe
