"""kitchen as a quantization method of diffusers: quantize while loading, save, and load again.

Importing this module imports diffusers and makes the method "kitchen" known to it:

    from kitchen_models.integrations.diffusers import KitchenConfig
    model = FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=KitchenConfig("int8"), torch_dtype=torch.bfloat16
    )
    model.save_pretrained(target)  # from_pretrained(target) reads it again, with this module imported

Quantized layers become QuantizedLinear, an nn.Linear over plain tensors, so that offloading, LoRA and torch.compile treat
them as any module. A saved folder holds kitchen's own checkpoint format: `kitchen inspect` and ComfyUI read its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kitchen_core.errors import UnsupportedError
from kitchen_core.formats import read_marker

from ..dialect import MARKER, header_metadata, naming
from ..quantize import decisions_of, quantized_linear
from ..rules import Decision, layer_of
from ._layers import (
    Method,
    RulesConfig,
    chosen_layers,
    dequantize_,
    finish,
    help_peft,
    make_places,
    open_files,
    replace,
)

try:
    from diffusers.configuration_utils import FrozenDict
    from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
    from diffusers.quantizers.base import DiffusersQuantizer
    from diffusers.quantizers.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise UnsupportedError(f"diffusers cannot be imported ({error}); install diffusers>=0.36") from error


class KitchenConfig(RulesConfig, QuantizationConfigMixin):
    __doc__ = RulesConfig.__doc__

    def to_diff_dict(self) -> dict[str, Any]:
        """As ``to_dict``; diffusers prints a config with it."""
        return self.to_dict()


class KitchenQuantizer(DiffusersQuantizer):
    """What diffusers calls while it loads a model. Layers are quantized one by one as their weights arrive."""

    use_keep_in_fp32_modules = True
    supports_parallel_loading = False

    def __init__(self, quantization_config: KitchenConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.dtype = torch.float32
        self.files: list[str] = []
        self.decisions: dict[str, Decision] = {}  # by layer, when quantizing
        self.stored: set[str] = set()  # keys of quantized layers, when loading what was quantized before

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """The float dtype of the model. Never None, or weights would be cast to the dtype of their places."""
        self.dtype = torch_dtype or torch.float32
        return self.dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Any) -> list[str]:
        """Notes the files: their headers and markers say how each layer is stored."""
        files = [checkpoint_files] if isinstance(checkpoint_files, (str, Path)) else checkpoint_files or []
        self.files = [str(file) for file in files]
        return loaded_keys

    def _process_model_before_weight_loading(
        self, model: nn.Module, device_map: Any = None, keep_in_fp32_modules: Any = None, **kwargs: Any
    ) -> None:
        if self.pre_quantized:
            checkpoint = open_files(self.files)
            self.stored = make_places(model, checkpoint)
            checkpoint.close()
            return
        names = set(keep_in_fp32_modules or ())
        kept = {
            name: "the model keeps it in float32" for name, _ in model.named_modules() if names & set(name.split("."))
        }
        found = decisions_of(model, self.quantization_config.as_rules(), self.dtype, kept)
        self.decisions = chosen_layers(found)

    def check_if_quantized_param(
        self, model: nn.Module, param_value: torch.Tensor, param_name: str, state_dict: Mapping[str, Any], **kwargs: Any
    ) -> bool:
        """Whether ``create_quantized_param`` takes this tensor."""
        if self.pre_quantized:
            return param_name in self.stored
        return param_name.endswith("weight") and layer_of(param_name) in self.decisions

    def create_quantized_param(
        self, model: nn.Module, param_value: torch.Tensor, param_name: str, target_device: Any,
        state_dict: Mapping[str, torch.Tensor], unexpected_keys: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Puts a stored tensor in its place as it is, or quantizes a float weight and swaps its layer."""
        if self.pre_quantized:
            layer, _, key = param_name.rpartition(".")
            module, tensor = model.get_submodule(layer), state_dict[param_name]  # not param_value: its scales were cast
            if key == MARKER:
                module._buffers[key] = tensor.to(target_device)
            else:
                module._parameters[key] = nn.Parameter(tensor.to(target_device), requires_grad=False)
            return
        decision = self.decisions[layer_of(param_name)]
        with naming(decision.layer):
            linear = model.get_submodule(decision.layer)
            made = quantized_linear(linear, param_value.detach().to(target_device, self.dtype), decision)
        replace(model, decision.layer, made)

    def check_quantized_param_shape(self, *args: Any, **kwargs: Any) -> bool:
        """The headers were checked before a place was made."""
        return True

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        """Markers may be in the header alone."""
        return [key for key in missing_keys if not key.endswith(f".{MARKER}")]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        finish(model)
        help_peft()
        return model

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state dict as it is, and the header's strings: markers and recipe, as `kitchen_models.save` writes them.

        Raises UnsupportedError where a pickle is asked for: it has no header, and loading it again would not find the layers.
        """
        if not safe_serialization:
            raise UnsupportedError(
                "a quantized model is saved as safetensors alone: call save_pretrained without safe_serialization=False"
            )
        layers = [key.removesuffix(f".{MARKER}") for key in state_dict if key.endswith(f".{MARKER}")]
        markers = {layer: read_marker(state_dict[f"{layer}.{MARKER}"].cpu()) for layer in layers}
        word = str(self.dtype).removeprefix("torch.")
        recipe = {layer: {"format": marker["format"], "dtype": word} for layer, marker in markers.items()}
        return state_dict, header_metadata(markers, {"made_by": "diffusers save_pretrained", "layers": recipe})

    def _dequantize(self, model: nn.Module) -> nn.Module:
        """The dense model, whose config no longer says that it is quantized, so that it can be saved and loaded as any."""
        config = {key: value for key, value in model.config.items() if key != "quantization_config"}
        model._internal_dict = FrozenDict(config)
        return dequantize_(model)

    is_trainable = False
    is_serializable = True
    is_compileable = True


AUTO_QUANTIZER_MAPPING[Method.KITCHEN.value] = KitchenQuantizer
AUTO_QUANTIZATION_CONFIG_MAPPING[Method.KITCHEN.value] = KitchenConfig
