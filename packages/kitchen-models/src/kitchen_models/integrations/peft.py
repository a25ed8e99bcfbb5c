"""PEFT's LoRA on quantized layers: attach, train, merge, unmerge.

PEFT wraps a quantized layer as it does every nn.Linear, and only its merge needs help, since it would add floats to codes:

    from kitchen_models.integrations import peft
    peft.register()  # the adapters to diffusers and transformers have done it already

A merge makes codes and scales anew from the dense weight and all merged adapters, so it rounds once; SVDQuant layers take
the adapter into their own low-rank branch. Unmerging puts back what was there, bit for bit; it is kept for that.
"""

from __future__ import annotations

from typing import Any

import torch

from kitchen_core import QuantizedLinear
from kitchen_core.errors import UnsupportedError

from .. import lora

try:
    from peft.tuners.lora import layer as peft_layers
    from peft.tuners.lora import model as peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
except ImportError as error:
    raise UnsupportedError(f"peft cannot be imported ({error}); install peft>=0.17") from error

_plain_dispatch = getattr(peft_model.dispatch_default, "_kitchen_wraps", peft_model.dispatch_default)


class LoraQuantizedLinear(peft_layers.Linear):
    """PEFT's layer over a QuantizedLinear. Its forward is PEFT's own."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge the active adapters, or those named. Raises UnsupportedError for a variant of LoRA, ValueError for NaNs."""
        if not isinstance(self.get_base_layer(), QuantizedLinear):  # the model was dequantized since
            super().merge(safe_merge, adapter_names)
            return
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        for name in names:
            if name in self.lora_variant:
                raise UnsupportedError(
                    f"adapter {name!r} is {type(self.lora_variant[name]).__name__}, and only plain LoRA merges into a "
                    "quantized layer; merge it into the float model and quantize that"
                )
            if not torch.isfinite(self.get_delta_weight(name)).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        if names:
            if "_kitchen_loras" in self.get_base_layer().__dict__:
                raise UnsupportedError(
                    "a LoRA of kitchen_models.lora is attached to the layer; merge or remove it first"
                )
            self._put(names)

    @torch.no_grad()
    def _put(self, names: list[str]) -> None:
        layer: QuantizedLinear = self.get_base_layer()
        if "_before_merge" not in self.__dict__:
            self.__dict__["_before_merge"] = (
                layer.config,
                {k: p.data for k, p in layer._parameters.items() if p is not None},
            )
        config, before = self.__dict__["_before_merge"]
        for name in names:
            self._add_bias(layer, name)
        self.merged_adapters.extend(names)
        if layer.format.name == lora.SVDQUANT:
            ups = {n: self.lora_B[n].weight.detach().float() * self.scaling[n] for n in self.merged_adapters}
            loras = {n: lora._Lora(self.lora_A[n].weight.detach(), up, 1.0) for n, up in ups.items()}
            own = {key: before[key] for key in ("proj_down", "proj_up")}
            lora._extend_own_branch(layer, lora._Held(layer.format, config, own, loras))
            return
        delta = sum(self.get_delta_weight(name).float() for name in self.merged_adapters)
        stored = {spec.name: before[spec.key] for spec in layer.format.tensors if spec.key in before}
        original = layer.format.dequantize(
            {name: tensor.to(layer.weight.device) for name, tensor in stored.items()}, config, torch.float32
        )
        layer.requantize_(original + delta.to(original.device))

    def _add_bias(self, layer: QuantizedLinear, name: str) -> None:
        if self.lora_bias[name]:
            if layer.bias is None:
                raise RuntimeError("Impossible to merge LoRA with `lora_bias=True` because the base layer has no bias.")
            layer.bias.data = layer.bias.data + self.lora_B[name].bias.detach() * self.scaling[name]

    def unmerge(self) -> None:
        """Put back what was there before the first merge."""
        before = self.__dict__.pop("_before_merge", None)
        if before is None or not isinstance(self.get_base_layer(), QuantizedLinear):
            super().unmerge()  # which says so where there is nothing to do
            return
        layer = self.get_base_layer()
        layer.config = before[0]
        for key, tensor in before[1].items():
            layer._parameters[key].data = tensor.to(layer.weight.device)
        self.merged_adapters.clear()


def register() -> None:
    """Make PEFT put LoraQuantizedLinear over quantized layers. Calling it again changes nothing."""
    if peft_model.dispatch_default is not _dispatch:
        peft_model.dispatch_default = _dispatch


def _dispatch(target: torch.nn.Module, adapter_name: str, config: Any, **options: Any) -> torch.nn.Module | None:
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if not isinstance(base, QuantizedLinear):
        return _plain_dispatch(target, adapter_name, config, **options)
    if config.use_dora:
        raise UnsupportedError(
            "DoRA needs the norm of the float weight, which a quantized layer does not have; use plain LoRA"
        )
    if options.pop("parameter_name", None) is not None:
        raise UnsupportedError("target_parameters names a tensor of codes; use target_modules for quantized layers")
    return LoraQuantizedLinear(target, adapter_name, config=config, **options)


_dispatch._kitchen_wraps = _plain_dispatch
