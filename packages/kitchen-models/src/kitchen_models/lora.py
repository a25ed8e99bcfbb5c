"""LoRA on quantized layers: attach, change the strength, stack, remove (bit for bit), merge.

An attached LoRA is a low-rank branch beside the quantized weight: y = layer(x) + up (down x). It is exact however small it is,
and the layer's own kernel runs. All LoRAs of a layer share one branch, so the cost grows with the sum of their ranks. A merge
puts them into the codes, which loses what is smaller than a step of the grid; the report says how much. docs/guides/lora.md
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kitchen_core import QuantizedLinear
from kitchen_core.arithmetic import apply_input_act
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.formats import Format, Tensors, TensorSpec

from .files import Checkpoint, parse_bounded_json, printable
from .foreign import MAX_CONFIG

SVDQUANT = "svdquant_w4a4"
BRANCH = (TensorSpec("branch_down", "branch_down"), TensorSpec("branch_up", "branch_up"))
PREFIXES = (
    "base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet.", "text_encoder.",
)  # fmt: skip
UNDERSCORED = ("lora_unet_", "lora_transformer_", "lora_te_", "lora_te1_", "lora_te2_", "lycoris_")
PEFT_FILE = "adapter_model.safetensors"
Configs = dict[str, dict[str, Any]]
_DOWN = (".lora_A.weight", ".lora_A.default.weight", ".lora_down.weight", ".lora.down.weight")
_UP = (".lora_B.weight", ".lora_B.default.weight", ".lora_up.weight", ".lora.up.weight")


@dataclass
class _Lora:
    down: torch.Tensor  # [r, K]
    up: torch.Tensor  # [N, r], times alpha / r
    strength: float


@dataclass
class _Held:
    """What a layer remembers while LoRAs are attached: they themselves, and what its removal puts back."""

    format: Any = None
    config: Any = None
    branch: dict[str, torch.Tensor] = field(default_factory=dict)  # SVDQuant: its own proj_down and proj_up
    loras: dict[str, _Lora] = field(default_factory=dict)


class Branched:
    """A format whose layers have a low-rank branch beside the stored weight; in all else it is the format that it is given.

    It takes the format's place in a QuantizedLinear, so that the module, its hooks and its parameters stay what they are.
    """

    def __init__(self, base: type[Format]) -> None:
        self.base = base
        self.tensors = (*base.tensors, *BRANCH)

    def __getattr__(self, name: str) -> Any:
        if name in ("base", "tensors"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def linear(
        self, x, tensors, config, bias=None, out_dtype=None, input_act="none", input_act_weight=None, input_act_eps=0.0,
        residual=None, residual_scale=None, **part,
    ):  # fmt: skip
        """The branch joins as a residual, which the kernels add in their epilogue, before the one rounding."""
        h = x
        if input_act != "none":
            h = apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
        low = _low_rank(h, tensors["branch_down"], tensors["branch_up"]).to(out_dtype or x.dtype)
        if residual is not None:
            low = (
                residual + low if residual_scale is None else torch.addcmul(residual, residual_scale.to(low.dtype), low)
            )
        return self.base.linear(
            x, _own(tensors), config, bias, out_dtype, input_act, input_act_weight, input_act_eps, low, residual_scale,
            **part,
        )  # fmt: skip

    def dequantize(self, tensors: Tensors, config: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dense weight with the branch in it."""
        dense = self.base.dequantize(_own(tensors), config, torch.float32)
        return (dense + tensors["branch_up"].float() @ tensors["branch_down"].float()).to(dtype)

    def quantize_activation(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the branch takes x itself."""
        raise UnsupportedError(
            "a shared quantized activation has no x for the branch of a LoRA; call the layer with x, or merge"
        )

    linear_quantized = quantize_activation

    def requantize(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the weight as dequantized has the branch in it, which would stay beside it and count twice."""
        raise UnsupportedError("the layer has a LoRA attached; merge or remove it before its weight is replaced")

    def state_dict(self, tensors: Tensors, prefix: str = "") -> Tensors:
        """The format's tensors and the branch."""
        branch = {prefix + spec.key: tensors[spec.name] for spec in BRANCH if spec.name in tensors}
        return {**self.base.state_dict(_own(tensors), prefix), **branch}

    def from_state_dict(self, state: Tensors, prefix: str = "") -> Tensors:
        """As the format, with the branch where the dict has it."""
        branch = {spec.name: state[prefix + spec.key] for spec in BRANCH if prefix + spec.key in state}
        return {**self.base.from_state_dict(state, prefix), **branch}


def _own(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in ("branch_down", "branch_up")}


def _low_rank(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x.to(down.dtype), down), up)


class BranchedLinear(nn.Linear):
    """A dense nn.Linear with LoRAs: the same object and weight, its class changed while they are attached."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y = x W^T + bias + the branch"""
        y = super().forward(x)
        return y + _low_rank(x, self.branch_down, self.branch_up).to(y.dtype)


# ---------------------------------------------------------------------------------------------------------- reading


def read_lora(
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(down [r, K], up [N, r] times alpha / r) by the layer's name as the LoRA spells it, from a file or a state dict.

    Spellings: ``lora_A``/``lora_B`` (PEFT, diffusers), ``lora_down``/``lora_up``/``alpha`` (kohya, ComfyUI), ``lora.down``.
    Alphas are those among the tensors, else of the config that PEFT and diffusers write with a file; else alpha is r.
    Raises FormatError, naming the key, for any other: a part that was left out would pass as a weak LoRA.
    """
    configs: Configs = {}
    if isinstance(source, Mapping):
        state = dict(source)
    else:
        path = Path(source) / PEFT_FILE if Path(source).is_dir() else Path(source)
        checkpoint = Checkpoint.open(path)
        state = {info.name: checkpoint.read(info.name) for info in checkpoint.in_file_order()}
        configs = _configs(path, checkpoint.metadata)
        checkpoint.close()
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        for part, endings in (("down", _DOWN), ("up", _UP), ("alpha", (".alpha",))):
            ending = next((e for e in endings if key.endswith(e)), None)
            if ending:
                parts = found.setdefault(key.removesuffix(ending), {})
                if part in parts:
                    raise FormatError(f"{printable(key)!r} is there in two spellings; one of them is of another LoRA")
                parts[part] = tensor
                break
        else:
            raise FormatError(
                f"{printable(key)!r} is no part of a LoRA that is known here: lora_A and lora_B, or lora_down, lora_up, alpha. "
                "LoHa, LoKr, DoRA and full differences are not applied: merge them into the float model and quantize that"
            )
    if not found:
        raise FormatError("the LoRA is empty")
    return {name: _pair(name, parts, configs) for name, parts in found.items()}


def _pair(name: str, parts: dict[str, torch.Tensor], configs: Configs) -> tuple[torch.Tensor, torch.Tensor]:
    down, up, alpha = parts.get("down"), parts.get("up"), parts.get("alpha")
    shapes = {part: (str(tensor.dtype), list(tensor.shape)) for part, tensor in parts.items()}
    if (
        down is None or up is None or down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]
        or not down.shape[0] or not (down.is_floating_point() and up.is_floating_point())
        or (alpha is not None and alpha.numel() != 1)
    ):  # fmt: skip
        raise FormatError(
            f"LoRA layer {printable(name)!r} needs down [r, K] and up [N, r] in floats, r at least 1, and of an alpha one "
            f"number; got {shapes}"
        )
    rank = down.shape[0]
    scale = _scale_in(configs, name, rank) if alpha is None else float(alpha) / rank
    return down.detach(), up.detach() if scale == 1.0 else up.detach().float() * scale


def _configs(path: Path, metadata: Mapping[str, str]) -> Configs:
    """PEFT's config of a file by what names in it start with: from its folder, or from diffusers' header."""
    beside = path.parent / "adapter_config.json"
    try:
        if path.name == PEFT_FILE and beside.is_file() and beside.stat().st_size <= MAX_CONFIG:
            return {"": dict(parse_bounded_json(beside.read_bytes()))}
        configs: Configs = {}
        for key, value in parse_bounded_json(metadata.get("lora_adapter_metadata", "{}").encode()).items():
            component, _, rest = key.partition(".")
            configs.setdefault(f"{component}.", {})[rest] = value
        return configs
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"the config of {str(path)!r}, which says its alphas, cannot be read: {error}") from error


def _scale_in(configs: Configs, name: str, rank: int) -> float:
    """alpha / r as PEFT has it; 1 where no config says an alpha."""
    prefix = next((p for p in configs if name.startswith(p)), None)
    config = {} if prefix is None else configs[prefix]
    layer = name.removeprefix(prefix or "").removeprefix("base_model.model.")
    alpha, patterns = config.get("lora_alpha", rank), config.get("alpha_pattern") or {}
    for pattern, value in patterns.items():
        whole = pattern.removeprefix("^")
        if not re.fullmatch(r"[\w.]+", whole):
            raise FormatError(
                f"alpha_pattern {printable(pattern)!r} is a regular expression; layers by name are known here"
            )
        if layer == whole or (whole == pattern and layer.endswith(f".{whole}")):
            alpha = value
            break
    if type(alpha) not in (int, float):
        raise FormatError(f"the alpha of LoRA layer {printable(name)!r} must be a number, got {str(alpha)[:60]!r}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _places(model: nn.Module, names: list[str]) -> dict[str, str | None]:
    """The model's module for each name of a LoRA; None where there is none."""
    modules = model.named_modules(remove_duplicate=False)  # a module with two names answers to both
    linears = {name.replace("_orig_mod.", ""): name for name, module in modules if isinstance(module, nn.Linear)}
    flat: dict[str, list[str]] = {}
    for name in linears:
        flat.setdefault(name.replace(".", "_"), []).append(name)
    places: dict[str, str | None] = {}
    for name in names:
        cut = [name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)]
        exact = next((candidate for candidate in (name, *cut) if candidate in linears), None)
        if exact is None:
            candidates = [name.removeprefix(prefix) for prefix in (*UNDERSCORED, "")]
            fitting = next((flat[c] for c in candidates if c in flat), [])
            if len(fitting) > 1:
                raise FormatError(f"LoRA layer {printable(name)!r} may mean {' or '.join(sorted(fitting))}")
            exact = fitting[0] if fitting else None
        places[name] = None if exact is None else linears[exact]
    return places


# -------------------------------------------------------------------------------------------------- attach and remove


def attach(
    model: nn.Module,
    lora: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    strength: float = 1.0,
    name: str = "lora",
    strict: bool = True,
) -> tuple[str, ...]:
    """Put a LoRA beside the layers of a model, quantized or not; the names of the layers.

    Another ``name`` is another LoRA, and their sum is applied; a ``name`` that is attached already is refused. All is checked
    before the first layer is changed. With ``strict`` a LoRA layer that the model lacks is an error, else it is left out.
    Raises FormatError for a file, a name or a shape that does not fit, UnsupportedError for a name that is taken.
    """
    if name in attached(model):
        raise UnsupportedError(f"a LoRA {name!r} is attached already; set_strength changes it, remove takes it away")
    pairs = read_lora(lora)
    places = _places(model, list(pairs))
    missing = [key for key, place in places.items() if place is None]
    if (missing and strict) or len(missing) == len(places):
        raise FormatError(
            f"{len(missing)} of {len(places)} LoRA layers fit no linear of the model, such as {printable(missing[0])!r}; it "
            "is of another model or its names need a prefix cut; strict=False leaves them out"
        )
    chosen: dict[nn.Module, _Lora] = {}
    for key, place in places.items():
        if place is None:
            continue
        layer = model.get_submodule(place)
        if layer in chosen:
            raise FormatError(f"two LoRA layers fit {place!r}, one of them {printable(key)!r}")
        chosen[layer] = _Lora(*pairs[key], float(strength))
        _check_layer(place, layer, chosen[layer])
    for layer, made in chosen.items():
        _held(layer).loras[name] = made
        _refresh(layer)
    return tuple(place for place in places.values() if place is not None)


def _check_layer(name: str, layer: nn.Module, lora: _Lora) -> None:
    wanted, found = (layer.out_features, layer.in_features), (lora.up.shape[0], lora.down.shape[1])
    if wanted != found:
        raise FormatError(
            f"layer {name!r} has {wanted} features out and in, its LoRA {found}; the LoRA is of another model, give one of this"
        )
    _check_present(name, layer)
    _check_finite(name, layer, lora)
    if isinstance(layer, QuantizedLinear | BranchedLinear):
        return
    if type(layer) is not nn.Linear:
        raise UnsupportedError(f"layer {name!r} is a {type(layer).__name__}, which has a way of its own to take a LoRA")
    if "forward" in layer.__dict__ or hasattr(layer, "_hf_hook"):
        raise UnsupportedError(
            f"layer {name!r} has its forward replaced by an offloader already; attach the LoRA before that"
        )


def _check_present(name: str, layer: nn.Module) -> None:
    if layer.weight.is_meta:
        raise UnsupportedError(
            f"layer {name!r} is on the meta device: an offloader holds its weights and would not know of a LoRA that comes, "
            "changes or goes; attach it before, and take the offloader away to change it"
        )


def _check_finite(name: str, layer: nn.Module, lora: _Lora) -> None:
    dtype = _branch_dtype(layer)
    if not all(tensor.isfinite().all() for tensor in _joined([lora], dtype, layer.weight.device)):
        raise FormatError(
            f"the LoRA of layer {name!r} at strength {lora.strength} has inf or NaN in {dtype}; it is damaged, or the strength "
            "too large"
        )


def _branch_dtype(layer: nn.Module) -> torch.dtype:
    if not isinstance(layer, QuantizedLinear):
        return layer.weight.dtype
    return layer.proj_up.dtype if layer.format.name == SVDQUANT else layer.compute_dtype


def _held(layer: nn.Module) -> _Held:
    held = layer.__dict__.get("_kitchen_loras")
    if held is None:
        held = layer.__dict__["_kitchen_loras"] = _Held()
        if isinstance(layer, QuantizedLinear):
            held.format, held.config = layer.format, layer.config
            if layer.format.name == SVDQUANT:
                held.branch = {key: layer._parameters[key].data for key in ("proj_down", "proj_up")}
    return held


def _refresh(layer: nn.Module) -> None:
    """Make the layer's branch anew from all its LoRAs: strengths replace each other, they never add up."""
    held = layer.__dict__["_kitchen_loras"]
    if not held.loras:
        _restore(layer, held)
        return
    if held.branch:
        _extend_own_branch(layer, held)
        return
    down, up = _joined(held.loras.values(), _branch_dtype(layer), layer.weight.device)
    for key, tensor in (("branch_down", down), ("branch_up", up)):
        layer.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    if isinstance(layer, QuantizedLinear):
        layer.format = Branched(held.format)
    else:
        layer.__class__ = BranchedLinear


def _joined(loras: Any, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(down [sum of r, K], up [N, sum of r]), strengths multiplied into up in fp32 and rounded once."""
    loras = list(loras)
    down = torch.cat([lora.down.to(device, dtype) for lora in loras])
    up = torch.cat([(lora.up.to(device).float() * lora.strength).to(dtype) for lora in loras], dim=1)
    return down.contiguous(), up.contiguous()


def _extend_own_branch(layer: QuantizedLinear, held: _Held) -> None:
    """SVDQuant has a branch, which takes the raw x: its rank grows."""
    own_down, own_up = held.branch["proj_down"], held.branch["proj_up"]
    device = layer.weight.device
    down, up = _joined(held.loras.values(), torch.float32, device)
    made = {
        "proj_down": torch.cat([own_down.to(device), down.t().to(own_down.dtype)], 1).contiguous(),
        "proj_up": torch.cat([own_up.to(device), up.to(own_up.dtype)], 1).contiguous(),
    }
    for key, tensor in made.items():
        layer._parameters[key] = nn.Parameter(tensor, requires_grad=False)
    layer.config = replace(held.config, rank=made["proj_down"].shape[1])


def _restore(layer: nn.Module, held: _Held) -> None:
    del layer.__dict__["_kitchen_loras"]
    for key in ("branch_down", "branch_up"):
        layer._parameters.pop(key, None)
    if not isinstance(layer, QuantizedLinear):
        layer.__class__ = nn.Linear
        return
    layer.format, layer.config = held.format, held.config
    for key, tensor in held.branch.items():
        layer._parameters[key] = nn.Parameter(tensor.to(layer.weight.device), requires_grad=False)


def _with_loras(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if "_kitchen_loras" in module.__dict__}


def attached(model: nn.Module) -> dict[str, float]:
    """The strengths of the attached LoRAs by name."""
    found = {}
    for module in _with_loras(model).values():
        found |= {name: lora.strength for name, lora in module.__dict__["_kitchen_loras"].loras.items()}
    return found


def set_strength(model: nn.Module, strength: float, name: str = "lora") -> None:
    """Replace the strength of an attached LoRA; at 0 it has no effect. Raises UnsupportedError for no such name."""
    layers = _layers_of(model, name)
    for place, layer in layers.items():
        lora = layer.__dict__["_kitchen_loras"].loras[name]
        _check_finite(place, layer, replace(lora, strength=float(strength)))
    for layer in layers.values():
        layer.__dict__["_kitchen_loras"].loras[name].strength = float(strength)
        _refresh(layer)


def remove(model: nn.Module, name: str | None = None) -> None:
    """Take a LoRA, or all, away; then layers are bit for bit what they were. Raises UnsupportedError for no such name."""
    for layer in _layers_of(model, name).values():
        loras = layer.__dict__["_kitchen_loras"].loras
        for key in [name] if name is not None else list(loras):
            del loras[key]
        _refresh(layer)


def _layers_of(model: nn.Module, name: str | None) -> dict[str, nn.Module]:
    """The layers by name that have this LoRA, or any; all of them can be changed."""
    found = _with_loras(model)
    layers = {n: m for n, m in found.items() if name is None or name in m.__dict__["_kitchen_loras"].loras}
    if not layers and name is not None:
        raise UnsupportedError(f"no LoRA {name!r} is attached; attached are {', '.join(attached(model)) or 'none'}")
    for place, layer in layers.items():
        _check_present(place, layer)
    return layers


# ------------------------------------------------------------------------------------------------------------ merging


def merge_(model: nn.Module, seed: int = 0) -> dict[str, float]:
    """Put all attached LoRAs into the weights; the relative error of what arrived there, by layer.

    Codes and scales are made anew from the dense weight plus the LoRAs, in the same format and config, with the same tables;
    ``seed`` above 0 rounds stochastically, so that a change below a step of the grid arrives on average. An SVDQuant layer
    takes them into its own branch instead, and loses nothing but their rounding. A merge cannot be undone.
    The error is |arrived - wanted| / |wanted| of the change itself: 1 means that it was lost.
    """
    layers = _layers_of(model, None)
    _refuse_shared(model, layers)
    return {name: _merge_layer(layer, seed + n if seed else 0) for n, (name, layer) in enumerate(layers.items())}


def _refuse_shared(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    owners = {id(layer.weight): name for name, layer in layers.items() if not layer.__dict__["_kitchen_loras"].branch}
    for name, module in model.named_modules():
        owner = owners.get(id(module._parameters.get("weight")), name)
        if owner != name:
            raise UnsupportedError(
                f"layers {owner!r} and {name!r} share one weight, so a merge into one would change both; give each its own, or "
                "leave the LoRA attached"
            )


def _merge_layer(layer: nn.Module, seed: int) -> float:
    held = layer.__dict__["_kitchen_loras"]
    down, up = _joined(held.loras.values(), torch.float32, layer.weight.device)
    wanted = up @ down
    if held.branch:
        rank = held.config.rank
        arrived = layer._parameters["proj_up"][:, rank:].float() @ layer._parameters["proj_down"][:, rank:].float().t()
        del layer.__dict__["_kitchen_loras"]
        return _loss(arrived, wanted)
    held.loras.clear()
    _refresh(layer)
    if isinstance(layer, QuantizedLinear):
        before = layer.dequantize(torch.float32)
        layer.requantize_(before + wanted, seed)
        return _loss(layer.dequantize(torch.float32) - before, wanted)
    before = layer.weight.data.float()
    layer.weight.data = (before + wanted).to(layer.weight.dtype)
    return _loss(layer.weight.data.float() - before, wanted)


def _loss(arrived: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = wanted.double().norm()
    return float((arrived.double() - wanted.double()).norm() / norm) if norm else 0.0
