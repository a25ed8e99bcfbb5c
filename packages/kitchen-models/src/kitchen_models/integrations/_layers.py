"""What the adapters to model libraries share: the config, places for stored layers, and what a saved file says of them."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kitchen_core import QuantizedLinear
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.formats import marker_tensor

from ..dialect import MARKER, find_layers, header_metadata, naming, refuse_unmarked
from ..files import Checkpoint
from ..rules import Decision, Rules, config_as_json

log = logging.getLogger("kitchen")


class Method(StrEnum):
    """The name of the method; diffusers wants an Enum member."""

    KITCHEN = "kitchen"


class RulesConfig:
    """Which layers get which format, for ``from_pretrained(quantization_config=...)``.

    Args:
        rules, format, options: as `kitchen_models.quantize_` takes them: ``KitchenConfig("int8")``, or
            ``KitchenConfig({"*.attn.*": "int8", "*": "w4a8"})``.

    Raises:
        UnsupportedError: a rule that cannot be read, an unknown keyword, or a format that is not installed.
    """

    def __init__(
        self,
        rules: Any = (),
        format: str | None = None,
        options: Mapping[str, Any] | None = None,
        quant_method: Any = Method.KITCHEN,
        **others: Any,
    ) -> None:
        if others:
            raise UnsupportedError(
                f"KitchenConfig takes rules, format and options, got {', '.join(others)}; what belongs to a format goes into "
                f"options: KitchenConfig(format='int8', options={others})"
            )
        if isinstance(rules, str) and "=" not in rules:
            rules, format = (), format or rules
        Rules.of(rules, format, options)
        self.quant_method = Method.KITCHEN
        self.rules = [str(rule) for rule in Rules.of(rules).rules]
        self.format = format
        self.options = dict(options or {})

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the library's. What a newer version wrote beside is told and left out: layers are read by their own markers."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        known = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        unknown = sorted(str(key) for key in config_dict if key not in known)
        if unknown:
            log.warning(
                "kitchen: the quantization config has %s, unknown to this version and left out", ", ".join(unknown)
            )
        return super().from_dict({key: config_dict[key] for key in config_dict if key in known}, *args, **kwargs)

    def as_rules(self) -> Rules:
        """The rules with their defaults."""
        return Rules.of(self.rules, self.format, self.options)


def chosen_layers(found: Iterable[Decision]) -> dict[str, Decision]:
    """The decisions that quantize, by layer. Raises UnsupportedError where none does."""
    found = list(found)
    chosen = {d.layer: d for d in found if d.format is not None}
    if not chosen:
        reasons = sorted({d.reason for d in found})
        raise UnsupportedError(
            f"no layer of the model would be quantized, of its {len(found)} nn.Linear: {'; '.join(reasons[:5])}; write a rule"
        )
    return chosen


def open_files(files: list[str]) -> Checkpoint:
    """The checkpoint that a library resolved to these files. Raises FormatError for others than safetensors files."""
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise FormatError(f"a quantized model is loaded from safetensors files, got {files or 'none'}")
    if len(files) == 1:
        return Checkpoint.open(files[0])
    folder = Path(files[0]).parent
    indices = sorted(folder.glob("*.safetensors.index*.json"))
    if len(indices) != 1:
        raise FormatError(f"{len(files)} files in {str(folder)!r} and {len(indices)} indices; one is needed")
    return Checkpoint.open(indices[0])


def make_places(
    model: nn.Module, checkpoint: Checkpoint, name_in_model: Callable[[str], str | None] = lambda name: name
) -> set[str]:
    """Puts a QuantizedLinear on the meta device in the place of each layer that the files hold quantized.

    ``name_in_model`` turns a layer's name in the files into the model's; None where the model has no use for the layer.
    Returns the model's keys of all stored tensors of these layers, biases excluded. Layers stand for the model's dtype.
    Raises FormatError, naming the layer, where it does not fit the model.
    """
    layers = find_layers(checkpoint)
    refuse_unmarked(checkpoint, layers)
    stored: set[str] = set()
    for name, layer in layers.items():
        format, config, tensors = layer.resolve()
        with naming(name):
            place = name_in_model(name)
            if place is None:
                continue
            linear = _linear_of(model, place)
            made = QuantizedLinear(tensors, format, config, linear.bias, linear.weight.dtype).train(linear.training)
            wanted, found = (linear.out_features, linear.in_features), (made.out_features, made.in_features)
            if wanted != found:
                raise FormatError(f"the model has {wanted} features out and in, the files {found}")
        replace(model, place, made)
        stored |= {f"{place}.{key}" for key in made.state_dict() if key != "bias"}
    return stored


def _linear_of(model: nn.Module, name: str) -> nn.Linear:
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise FormatError("the files hold it quantized, and the model has no such module") from error
    if not isinstance(module, nn.Linear):
        raise FormatError(f"the files hold a quantized linear, the model has a {type(module).__name__}")
    return module


def help_peft() -> None:
    """Lets PEFT merge into quantized layers, where it is installed."""
    if importlib.util.find_spec("peft") is None:
        return
    try:
        from . import peft
    except UnsupportedError as error:
        log.info("kitchen: LoRA cannot be merged into quantized layers: %s", error)
    else:
        peft.register()


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def finish(model: nn.Module) -> None:
    """Writes each layer's marker, which may have been in the header alone. Raises FormatError for tensors that never came."""
    for name, layer in quantized_layers(model).items():
        left = [key for key, tensor in layer.state_dict().items() if tensor.is_meta and key != MARKER]
        if left:
            raise FormatError(f"layer {name!r}: the files have no {', '.join(left)}; the folder is incomplete")
        layer._buffers[MARKER] = marker_tensor(layer.format.marker(layer.config)).to(layer.weight.device)


def metadata_of(model: nn.Module, made_by: str) -> dict[str, str]:
    """The header's strings for a model's file: markers and recipe, as ``kitchen_models.save`` writes them."""
    layers = quantized_layers(model)
    markers = {name: layer.format.marker(layer.config) for name, layer in layers.items()}
    recipe = {
        name: {
            "format": layer.format.name,
            "config": config_as_json(layer.config),
            "dtype": str(layer.compute_dtype).removeprefix("torch."),
        }
        for name, layer in layers.items()
    }
    return header_metadata(markers, {"made_by": made_by, "layers": recipe})


def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Puts a dense nn.Linear in the place of each quantized layer, in ``dtype`` or the one that the layer stands for."""
    for name, layer in quantized_layers(model).items():
        dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        dense.weight = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
        dense.bias = layer.bias
        replace(model, name, dense.train(layer.training))
    return model


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts ``module`` in the place that has this dotted name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
