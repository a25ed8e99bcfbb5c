"""QuantizedLinear: the module form, an nn.Linear over a format's plain tensors.

For frameworks that swap ``.data``, wrap ``nn.Linear`` (PEFT), or walk parameters and state dicts (offloaders,
safetensors). Its state dict is the checkpoint: the format's keys and the ``comfy_quant`` marker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .activation import QuantizedActivation, cast_for_autocast
from .errors import FormatError, InferenceOnlyError, UnsupportedError
from .formats import Format, Tensors, config_of, get_format, marker_tensor, read_marker
from .pickling import hide_float8, restore_float8

MARKER = "comfy_quant"


class QuantizedLinear(nn.Linear):
    """A quantized nn.Linear. ``in_features``, ``out_features``, ``bias`` and ``weight.device`` tell the truth;
    ``weight`` holds the codes, ``compute_dtype`` the float dtype that the layer stands for.
    """

    def __init__(
        self,
        tensors: Tensors,
        format: type[Format] | str,
        config: Any,
        bias: torch.Tensor | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: no dense weight is allocated
        self.format = get_format(format) if isinstance(format, str) else format
        self.config = config
        self.compute_dtype = compute_dtype
        self.format.check_names(tensors)
        self.format.check(tensors, config)
        self.out_features, self.in_features = self.format.shape(tensors, config)
        for key, tensor in self.format.state_dict(tensors).items():
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        device = tensors[self.format.tensors[0].name].device
        self.register_buffer(MARKER, marker_tensor(self.format.marker(config)).to(device))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, format: type[Format] | str, seed: int = 0, calibration: Any = None, **options: Any
    ) -> QuantizedLinear:
        """Quantize an nn.Linear; ``options`` are those of the format's ``config_for``. Keeps device, dtype and bias."""
        if not isinstance(linear, nn.Linear):
            raise UnsupportedError(
                f"from_linear takes an nn.Linear, got {type(linear).__name__}; another layer with a weight [N, K] is put into "
                "one first (a transposed weight, as of a Conv1D, is not such a layer)"
            )
        format = get_format(format) if isinstance(format, str) else format
        weight = linear.weight.detach()
        config = config_of(format, weight, options)
        given = {} if calibration is None else {"calibration": calibration}
        tensors = format.quantize(weight, config, seed=seed, **given)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(tensors, format, config, bias, weight.dtype)

    # ------------------------------------------------------------------------------------------------- running

    def inner(self) -> Tensors:
        """The format's tensors by name, without copies."""
        parameters = self._parameters
        found = {s.name: parameters[s.key] for s in self.format.tensors if parameters.get(s.key) is not None}
        if self.format.tensors[0].name not in found:  # replicas and parametrized modules hold them elsewhere
            held = {s.name: getattr(self, s.key, None) for s in self.format.tensors}
            found = {name: tensor for name, tensor in held.items() if tensor is not None}
        return found

    def forward(
        self,
        x: torch.Tensor | QuantizedActivation,
        input_act: str = "none",
        input_act_weight: torch.Tensor | None = None,
        input_act_eps: float = 0.0,
        residual: torch.Tensor | None = None,
        residual_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [..., K] (2K for swiglu and situ), or a QuantizedActivation -> [..., N] in x's dtype."""
        tensors = self.inner()
        if isinstance(x, QuantizedActivation):
            traits = self.format.activation_traits(tensors, self.config)
            x.check_fits(self.format.activation_kind, traits, self.in_features, self.compute_dtype, self.weight.device)
            return self.format.linear_quantized(
                x, tensors, self.config, self.bias, x.dtype, residual, residual_scale
            )  # fmt: skip
        if not isinstance(x, torch.Tensor):
            raise UnsupportedError(
                f"x must be a tensor [..., {self.in_features}] or a QuantizedActivation, got {type(x).__name__}"
            )
        x = cast_for_autocast(x)
        return self.format.linear(
            x, tensors, self.config, self.bias, None, input_act, input_act_weight, input_act_eps, residual,
            residual_scale,
        )  # fmt: skip

    linear_input_act = forward

    def quantize_activation(self, x: torch.Tensor, **input_act: Any) -> QuantizedActivation:
        """x quantized for this layer and for every other that shares its traits."""
        return self.format.quantize_activation(x, self.inner(), self.config, **input_act)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense weight [N, K], rounded once to ``dtype`` (the layer's compute dtype where None)."""
        return self.format.dequantize(self.inner(), self.config, dtype or self.compute_dtype)

    def requantize_(self, weight: torch.Tensor, seed: int = 0) -> QuantizedLinear:
        """Replace the weight by another float weight in the same format and config (to merge a LoRA)."""
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise UnsupportedError(
                f"requantize_ takes a weight of shape {[self.out_features, self.in_features]}, got {list(weight.shape)}"
            )
        made = self.format.requantize(self.inner(), self.config, weight, seed)
        for key, tensor in self.format.state_dict(made).items():
            self._parameters[key].data = tensor.to(self._parameters[key].device)
        return self

    def relay_(self, tensors: Tensors) -> QuantizedLinear:
        """For formats with a resident layout: hold the same weight as these tensors."""
        for spec in self.format.tensors:
            tensor = tensors.get(spec.name)
            if tensor is not None:
                # another parameter always: who remembers the old one, as offloading does, sees the change
                self._parameters[spec.key] = nn.Parameter(tensor.detach(), requires_grad=False)
            elif spec.key in self._parameters:
                # kept as None: the order of keys, and a place for stored tensors to come to
                self._parameters[spec.key] = None
        return self

    @property
    def _is_resident(self) -> bool:
        return self.format.is_resident(self.inner())

    def _stored(self) -> Tensors:
        """The tensors by key, as they are saved."""
        return self.format.state_dict(self.format.stored(self.inner(), self.config))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """What is stored, in whatever layout it is held here, and in the same order."""
        made: dict[str, torch.Tensor] = {}
        super()._save_to_state_dict(made, prefix, keep_vars)
        if self._is_resident:
            made |= {prefix + key: tensor.detach() for key, tensor in self._stored().items()}
            first = [prefix + key for key in self._parameters if prefix + key in made]
            made = {key: made[key] for key in first} | made
        destination.update(made)

    def __getstate__(self) -> dict[str, Any]:
        held = dict(self._parameters)
        if self._is_resident:
            held |= {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in self._stored().items()}
        present, hidden = hide_float8({k: p for k, p in held.items() if p is not None})
        return {**self.__dict__, "_parameters": {**held, **present}, "_hidden_float8": hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        hidden = state.pop("_hidden_float8")
        shown = restore_float8({k: state["_parameters"][k] for k in hidden}, hidden)
        parameters = {k: nn.Parameter(t, requires_grad=False) for k, t in shown.items()}
        super().__setstate__({**state, "_parameters": {**state["_parameters"], **parameters}})

    def extra_repr(self) -> str:
        """in_features=..., out_features=..., bias=..., format, config"""
        layout = ", resident layout" if self._is_resident else ""
        return f"{super().extra_repr()}, {self.format.name}, {self.config}{layout}"

    # ------------------------------------------------------------------------------------- moving and loading

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module. Raises UnsupportedError where a part is put in place of a whole tensor, as torch's own tensor-parallel
        styles do; the layer is as it was then.
        """
        held = self._parameters.get(name)
        cut = any(placement.is_shard() for placement in getattr(param, "placements", ()))  # of a DTensor
        if cut and held is not None and not hasattr(held, "placements"):
            raise UnsupportedError(
                f"{name} of a QuantizedLinear would be divided over devices by what does not know {self.format.name}, such as "
                "torch's ColwiseParallel and RowwiseParallel; use the styles of these names of kitchen_models.parallel"
            )
        super().register_parameter(name, param)

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedLinear:
        """Quantized layers are inference only."""
        if requires_grad:
            raise InferenceOnlyError("a quantized layer has no weight gradient; train a LoRA beside it")
        return self

    def _apply(self, fn: Callable, recurse: bool = True) -> QuantizedLinear:
        """.to(), .half(), .cuda(): stored tensors move and keep their dtypes; bias and compute_dtype follow."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            probe = fn(tensor.new_empty(0))
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight.device)).dtype
        bias = self._parameters.pop("bias")
        try:
            super()._apply(keep_dtype, recurse)
        finally:
            self._parameters["bias"] = bias
        if bias is not None:
            self._parameters["bias"] = nn.Parameter(fn(bias.detach()), requires_grad=False)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        """Accept every spelling and packing that the format reads; refuse a marker that says another config. A weight in a
        resident layout is held as stored from then on.
        """
        if self._is_resident:
            self.relay_(self.format.stored(self.inner(), self.config))
        found = self.format.from_state_dict(state_dict, prefix)
        for spec in self.format.tensors:
            for key in (spec.key, *spec.aliases):
                state_dict.pop(prefix + key, None)
            given, mine = found.get(spec.name), self._parameters.get(spec.key)
            if given is not None:
                as_bytes = mine is not None and (mine.dtype, given.dtype) == (torch.float8_e4m3fn, torch.uint8)
                state_dict[prefix + spec.key] = given.view(mine.dtype) if as_bytes else given
        self._check_given(prefix, state_dict)
        marker = state_dict.get(prefix + MARKER)
        if marker is not None and marker.device.type != "meta":
            self._check_marker(prefix, read_marker(marker))
            state_dict = {**state_dict, prefix + MARKER: self._buffers[MARKER]}  # ours says the superset of fields
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if prefix + MARKER in missing:
            missing.remove(prefix + MARKER)

    def _check_given(self, prefix: str, state_dict: Any) -> None:
        """Tensors of another dtype would be cast into codes or scales without a word: refused by name."""
        for spec in self.format.tensors:
            given, mine = state_dict.get(prefix + spec.key), self._parameters.get(spec.key)
            if given is not None and mine is not None and given.dtype != mine.dtype:
                raise FormatError(
                    f"{prefix}{spec.key} is {given.dtype} in the state dict, {self.format.name} here holds {mine.dtype}; "
                    "it is not converted, since its bits have a meaning: load the file with kitchen_models.load"
                )

    def _check_marker(self, prefix: str, marker: dict[str, Any]) -> None:
        if not marker:
            return
        shapes = {name: tuple(t.shape) for name, t in self.inner().items()}
        found = get_format(marker.get("format", self.format.name))
        own = getattr(self.format, "base", self.format)  # with a LoRA attached the format is one of its own
        config = found.config_from_marker(marker, shapes) if found is own else None
        if config != self.config:
            raise FormatError(
                f"layer {prefix.rstrip('.')!r}: the file says {marker}, the module was made for {self.format.name} with "
                f"{self.config}; load the file with kitchen_models.load, which reads each layer's own marker"
            )
