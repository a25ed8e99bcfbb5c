"""kitchen as a quantization method of transformers: quantize while loading, save, and load again.

Importing this module imports transformers and registers the method "kitchen" with it:

    from kitchen_models.integrations.transformers import KitchenConfig
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KitchenConfig("int8"), dtype="auto")
    model.save_pretrained(target)  # from_pretrained(target) reads it again, with this module imported

Quantized layers become QuantizedLinear, an nn.Linear over plain tensors, so that LoRA and torch.compile treat them as any
module. A saved folder holds kitchen's own checkpoint format: `kitchen inspect` reads its files.

Memory: weights are read one at a time, quantized on their device, and dropped, so that the peak is the quantized model plus
one float weight and the quantizer's working memory. Only a weight that transformers makes from a fused one of the file may
wait as float until all are loaded. Weights that the files lack, such as a new head's, are initialized and stay float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kitchen_core import QuantizedLinear
from kitchen_core.errors import FormatError, KitchenError, UnsupportedError

from ..dialect import MARKER, find_layers, naming, refuse_unmarked
from ..files import Checkpoint
from ..quantize import decisions_of, quantized_linear
from ..rows import output_shapes
from ..rules import Decision, layer_of
from ._layers import (
    Method,
    RulesConfig,
    chosen_layers,
    dequantize_,
    finish,
    help_peft,
    make_places,
    metadata_of,
    open_files,
    quantized_layers,
    replace,
)

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        ConversionOps,
        WeightConverter,
        WeightRenaming,
        build_glob_alternation,
        rename_source_key,
    )
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise UnsupportedError(f"transformers 5 cannot be imported ({error}); install transformers>=5") from error


@register_quantization_config(Method.KITCHEN.value)
class KitchenConfig(RulesConfig, QuantizationConfigMixin):
    __doc__ = RulesConfig.__doc__


class QuantizeWeights(ConversionOps):
    """Runs where transformers has read one weight: quantizes it and swaps its layer, so that no float weight stays.

    transformers turns an error in here into text; ours are kept in ``quantizer.error`` and raised after loading.
    """

    def __init__(self, quantizer: KitchenQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], model: Any = None, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns what is not to be quantized, for transformers to put in its place."""
        left = {}
        if missing_keys is not None:
            self.quantizer.missing = missing_keys
        for key, value in input_dict.items():
            decision = self.quantizer.decision(key)
            if decision is None:
                left[key] = value
                continue
            self.quantizer.missing.discard(key)
            if self.quantizer.error is None:
                try:
                    self.quantizer.swap(model, decision, value[0] if isinstance(value, list) else value)
                except KitchenError as error:
                    self.quantizer.error = error
        return left


@register_quantizer(Method.KITCHEN.value)
class KitchenQuantizer(HfQuantizer):
    """What transformers calls while it loads a model."""

    def __init__(self, quantization_config: KitchenConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.decisions: dict[str, Decision] = {}  # by layer, when quantizing
        self.stored: set[str] = set()  # the model's keys of quantized layers, when loading what was quantized before
        self.missing: set[str] = set()  # transformers' own set of keys that the files have not given yet
        self.error: KitchenError | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises UnsupportedError for a device map with "disk" or "meta"."""
        devices = {str(device) for device in (device_map.values() if isinstance(device_map, dict) else [device_map])}
        for device in sorted(devices & {"disk", "meta"}):
            raise UnsupportedError(f"quantized layers cannot be on {device!r}; map these modules to 'cpu' or a GPU")

    # ------------------------------------------------------------------------------------------------ before loading

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        files = [str(file) for file in checkpoint_files or []]
        with torch.device("cpu"):  # transformers calls this with meta as the default device
            if self.pre_quantized or self._hold_quantized_layers(files):
                self.pre_quantized = True
                self._make_places(model, open_files(files))
            else:
                rules = self.quantization_config.as_rules()
                self.decisions = chosen_layers(decisions_of(model, rules, kept=_kept(model)))

    def _hold_quantized_layers(self, files: list[str]) -> bool:
        """Whether files whose config.json does not say so are quantized. Raises FormatError where a rule wants them dense."""
        if not files or not all(file.endswith(".safetensors") for file in files):
            return False
        checkpoints = [Checkpoint.open(file) for file in files]
        if not any(find_layers(checkpoint) for checkpoint in checkpoints):
            for checkpoint in checkpoints:
                refuse_unmarked(checkpoint, {})
            return False
        if self.quantization_config.as_rules().rules:
            raise FormatError(
                f"{files[0]!r} holds quantized layers already, so no rule applies; pass KitchenConfig() to load it as it is"
            )
        return True

    def _make_places(self, model: Any, checkpoint: Checkpoint) -> None:
        self.stored = make_places(model, checkpoint, self._name_in_model(model))
        checkpoint.close()
        if not self.stored:
            raise FormatError(f"{str(checkpoint.path)!r} has no quantized layer of the model; load it without kitchen")
        markers = rf"\.{MARKER}$"  # they may be in the header alone, and are none of the user's concern
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), markers}

    def _name_in_model(self, model: Any) -> Callable[[str], str | None]:
        """From a layer's name in the files to the model's, by the renamings that transformers will apply to its tensors."""
        conversions = get_model_conversion_mapping(model, None, self)
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        prefix, state = model.base_model_prefix, model.state_dict()

        def name_in_model(stored: str) -> str | None:
            key = f"{stored}.weight"
            renamed, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if renamed not in state and key in state:
                renamed, pattern = rename_source_key(key, [], [], prefix, state)
            if pattern is not None:
                raise FormatError(
                    "transformers splits or joins this weight while loading, which quantized weights do not allow; quantize "
                    "the model with from_pretrained(quantization_config=KitchenConfig(...)) and save that"
                )
            return layer_of(renamed) if renamed in state else None  # transformers reports what is left over

        return name_in_model

    # ------------------------------------------------------------------------------------------------- while loading

    def decision(self, key: str) -> Decision | None:
        """What becomes of the weight with this key; None for tensors that stay as they are."""
        layer = layer_of(key)
        return None if layer is None else self.decisions.get(layer)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether ``QuantizeWeights`` takes this tensor. True for stored markers as well: it lifts the check of shapes."""
        if self.pre_quantized:
            return param_name in self.stored and param_name.endswith(f".{MARKER}")
        return self.decision(param_name) is not None

    def get_quantize_ops(self) -> ConversionOps:
        """The operation for a weight that is to be quantized."""
        return QuantizeWeights(self)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """None, which is no cast, for the tensors of quantized layers."""
        return None if self.stored & set(converter.target_patterns) else super().get_new_dtype(converter, param, dtype)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes for one element, scales included, by which transformers plans devices and reserves memory."""
        decision = self.decision(param_name)
        if decision is None:
            return param.element_size()
        shapes = output_shapes(decision.format, decision.config, *decision.shape, decision.dtype)
        nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in shapes.values())
        return nbytes / torch.Size(decision.shape).numel()

    def swap(self, model: nn.Module, decision: Decision, weight: torch.Tensor) -> None:
        """Quantizes one weight and puts its layer in the model. Raises UnsupportedError, naming the layer."""
        with naming(decision.layer):
            if tuple(weight.shape) != decision.shape:
                raise UnsupportedError(
                    f"the file has a weight {list(weight.shape)}, the model {list(decision.shape)}; quantizing while loading "
                    "takes whole weights only: load without tensor parallelism, from a file that fits the model"
                )
            made = quantized_linear(model.get_submodule(decision.layer), weight.detach(), decision)
        for tensor in made.state_dict(keep_vars=True).values():
            if not tensor.is_meta:  # a bias that is still to come is marked when it is there
                tensor._is_hf_initialized = True  # else transformers would initialize it
        replace(model, decision.layer, made)

    # ------------------------------------------------------------------------------------------------- after loading

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
            raise UnsupportedError(
                "the device map puts modules on disk, where quantized layers cannot be; map them to 'cpu'"
            )
        if self.error is not None:
            raise self.error
        for decision in self.decisions.values():
            module = model.get_submodule(decision.layer)
            new = f"{decision.layer}.weight" in self.missing  # a head that is still to be trained stays as it is
            if not isinstance(module, QuantizedLinear) and not new:
                self.swap(model, decision, module.weight)
        finish(model)
        help_peft()
        for layer in quantized_layers(model).values():
            for parameter in layer.parameters():  # transformers asks for gradients of all floats, so of scales too
                parameter.requires_grad_(False)
        # Reverting renames tensors but not the header's layers, and joins codes as if they were floats: files keep our names.
        model._weight_conversions = []
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        """None for the state dict, which is taken as it is, and the header's strings as `kitchen_models.save` writes them."""
        if getattr(model, "_hf_peft_config_loaded", False):  # then only the adapter is saved
            return None, {}
        return None, metadata_of(model, "transformers save_pretrained")

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        return dequantize_(model, dtype)

    def is_serializable(self) -> bool:
        """save_pretrained works."""
        return True

    is_trainable = True  # which means adapters beside the layers
    is_compileable = True


def _kept(model: Any) -> dict[str, str]:
    """Reasons, by layer, to leave a layer as it is that only transformers knows: dtypes of their own and tied weights."""
    dtype = model.config.dtype
    plan = model._get_dtype_plan(dtype)
    pattern = build_glob_alternation(list(plan))[0] if plan else None
    kept = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and pattern and pattern.search(f"{name}.weight"):
            kept[name] = "the model keeps it in float32"
        elif isinstance(module, nn.Linear) and module.weight.dtype != dtype:
            kept[name] = f"the model makes it in {module.weight.dtype}, other layers in {dtype}"
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for key, other in [*tied.items(), *((source, target) for target, source in tied.items())]:
        kept[layer_of(key) or key] = f"its weight is tied to {other!r}"
    return kept
