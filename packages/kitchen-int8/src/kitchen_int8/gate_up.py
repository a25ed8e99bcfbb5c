"""pack_gate_up: gate and up projection of a SwiGLU MLP in one storage, so that one GEMM computes both.

The two layers keep their parameters, under their names and in their shapes: these become views of one storage. Nothing
else refers to that storage. On each forward the op ``int8_gate_up_mlp`` looks whether gate and up still lie together.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor

from kitchen_core.activation import cast_for_autocast
from kitchen_core.errors import UnsupportedError
from kitchen_core.formats import Tensors
from kitchen_core.linear import QuantizedLinear
from kitchen_core.ops import int8_gate_up_mlp
from kitchen_core.ops._autograd import wants_grad
from kitchen_core.reference.int8 import stacked_rows
from kitchen_core.tensor import QuantizedTensor

from .format import Int8Config, Int8Format

log = logging.getLogger("kitchen")

REPACKS_ON = ("cuda",)  # device types on which a move packs again; on the CPU it would cost a copy and gain nothing
PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)  # the last is what torch.export traces with
LARGEST_ERROR = 1 / 16  # relative; every code of the hidden rows off by one makes about half of it
_packed_classes: dict[type, type] = {}
_said: set[str] = set()


class Names(NamedTuple):
    """Attributes of the MLP module."""

    gate: str
    up: str
    down: str
    activation: str

    @property
    def layers(self) -> tuple[str, str, str]:
        return self.gate, self.up, self.down


class Projection(NamedTuple):
    """One INT8 layer: its format's tensors by name, its config and its bias."""

    tensors: Tensors
    config: Int8Config
    bias: torch.Tensor | None


def pack_gate_up(
    module: nn.Module,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    activation: str = "act_fn",
) -> nn.Module:
    """Pack the gate and up projection of ``module``, in place, and run its forward as one op from now on.

    ``module`` computes ``down(silu(gate(x)) * up(x))`` of its three layers, each a QuantizedLinear or an nn.Linear that
    holds a QuantizedTensor, of format int8_tensorwise. Names of layers may be dotted paths. Where ``module`` has an
    attribute of the name ``activation``, it must be silu; where it has none, the caller vouches for it. Before packing,
    the module's forward is compared with that formula on two random rows, to a relative error of 1/16: it finds a
    residual or a dropout that is on, but not one that is off, as in eval mode, nor anything that small. Nothing is
    compared where something is in the way, as below.

    The forward falls back to the module's own, bit for bit, and says once why, while something is in the way: a layer
    that was wrapped (LoRA) or hooked (an offloader), an activation that was hooked or replaced, a tensor on the meta
    device, of a tensor subclass (DTensor) or not of the layer's whole shape (a shard); and, silently, where a gradient
    is wanted or more than x is given. Where only the storages are apart (parameters swapped one by one), the op runs
    the three layers, with the same bits.
    ``module.to()``, loading a state dict, copying and unpickling pack again on a GPU. Calling this again packs again.

    Shapes: gate and up [I, K] with a scale per row; down [N, I]; x of the forward [..., K].
    Dtypes and units: those of the layers; gate and up packed round less often than apart (int8_swiglu_mlp).
    Layout: names, shapes and dtypes of the layers stay; weights, scales and biases of gate and up become views of one
        storage each. While packing, both copies exist. Parameters stay the same objects, unless they are inference
        tensors: these are replaced. The state dict has the same entries; those of gate and up are copies with storages
        of their own, so that savers which refuse shared storage take them (with keep_vars, the parameters themselves).
    Returns: ``module``, whose class is now a subclass of its class.
    Raises: UnsupportedError where a named layer is missing, another activation than silu is found, a layer is of
        another format or not quantized, or the module's forward is replaced on the instance or computes something else.
        The module is then as before.
    Devices: any; the gain is on a GPU: kernel int8/swiglu_sm90, else one GEMM for gate and up.
    Source: docs/kernels/int8_swiglu.md.
    """
    names = Names(gate, up, down, activation)
    packed_as = getattr(module, "_kitchen_gate_up", None)
    if packed_as is None:
        _check_module(module, names)
        _check_forward(module, names)
        reason = _become_packed(module, names)
    elif packed_as == names:
        reason = _pack(module, names)
    else:
        raise UnsupportedError(f"the module is packed already, with {packed_as}, not {names}")
    if reason is not None:
        _say(reason)
    return module


class PackedGateUp(nn.Module):
    """What pack_gate_up adds to a module's class. ``_kitchen_gate_up`` holds the names of its layers.

    An instance made from the class itself has no names, and runs the forward that it inherits.
    """

    _kitchen_gate_up: Names | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The module's forward, through one op where nothing is in the way."""
        names = self._kitchen_gate_up
        if names is None or len(args) != 1 or kwargs or type(args[0]) not in PLAIN:
            return super().forward(*args, **kwargs)
        found = _projections(self, names)
        if isinstance(found, str):
            _say(found)
            return super().forward(*args)
        x = cast_for_autocast(args[0])
        gate, up, down = found
        if any(wants_grad(x, layer.bias) for layer in found):
            return super().forward(*args)
        return int8_gate_up_mlp(
            x, gate.tensors["qdata"], gate.tensors["scale"], up.tensors["qdata"], up.tensors["scale"],
            down.tensors["qdata"], down.tensors["scale"], gate.bias, up.bias, down.bias, None,
            gate.config.convrot_groupsize, down.config.convrot_groupsize,
        )  # fmt: skip

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        _pack_where_it_pays(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _pack_where_it_pays(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        base = _base_class(type(self))
        if type(self) is not _packed_class(base):  # a subclass of ours keeps its class, which has to be importable
            return super().__reduce_ex__(protocol)
        return _empty_module, (base,), self.__getstate__()


def _become_packed(module: nn.Module, names: Names) -> str | None:
    """Class, names, hooks and packed tensors; or why the tensors stay apart. On an error the module is as before."""
    before = type(module)
    module.__class__ = before if isinstance(module, PackedGateUp) else _packed_class(before)
    try:
        reason = _pack(module, names)
    except BaseException:
        module.__class__ = before
        raise
    module._kitchen_gate_up = names
    module.register_load_state_dict_post_hook(_after_loading)
    module.register_state_dict_post_hook(_own_storages)
    return reason


def _base_class(made: type) -> type:
    """The class that was packed: what follows PackedGateUp, whatever stands in front."""
    order = made.__mro__
    return order[order.index(PackedGateUp) + 1]


def _packed_class(base: type) -> type:
    """A subclass of ``base`` with PackedGateUp in front, of the same name; one for each base."""
    if base not in _packed_classes:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        _packed_classes[base] = type(base.__name__, (PackedGateUp, base), names)
    return _packed_classes[base]


def _empty_module(base: type) -> nn.Module:
    """For pickle and deepcopy, which can name ``base`` and not the class made from it."""
    made = _packed_class(base)
    return made.__new__(made)


def _after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    _pack_where_it_pays(module)


def _own_storages(module: PackedGateUp, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Copies in the place of views: savers drop or refuse tensors that share a storage."""
    names = module._kitchen_gate_up
    if names is None:
        return
    of_layers = tuple(f"{prefix}{name}." for name in (names.gate, names.up))
    for key, value in state_dict.items():
        if key.startswith(of_layers) and not isinstance(value, nn.Parameter) and _is_part(value):
            state_dict[key] = value.clone()


def _is_part(value: Any) -> bool:
    """Whether it is a plain tensor, or made of such, that covers only part of its storage."""
    tensors = value.inner().values() if isinstance(value, QuantizedTensor) else [value]
    return any(
        type(t) in (torch.Tensor, nn.Parameter) and t.untyped_storage().nbytes() > t.numel() * t.element_size()
        for t in tensors
    )


# ----------------------------------------------------------------------------------------------- what is there


def _check_module(module: nn.Module, names: Names) -> None:
    """Raises UnsupportedError for what no later event can mend."""
    if "forward" in vars(module):
        raise UnsupportedError(
            "pack_gate_up: the module's forward is replaced on the instance (a hook of an offloader?); pack first, "
            "then add hooks"
        )
    if not all(names.layers) or len(set(names.layers)) < 3:
        raise UnsupportedError(
            f"pack_gate_up: gate, up and down must name three different layers of {type(module).__name__}, "
            f"got {list(names.layers)}"
        )
    for name in names.layers:
        try:
            layer = module.get_submodule(name)
        except AttributeError as error:
            raise UnsupportedError(
                f"pack_gate_up: {type(module).__name__} has no layer {name!r}; give the names of its gate, up and down "
                "projection"
            ) from error
        weight = getattr(layer, "weight", None)
        dense = type(layer) is nn.Linear and not isinstance(weight, QuantizedTensor)
        format = getattr(layer, "format", None) or getattr(weight, "format", None)
        if dense or (format is not None and format is not Int8Format):
            found = "a dense nn.Linear" if dense else f"of format {format.name}"
            raise UnsupportedError(f"pack_gate_up: {name} is {found}; gate, up and down must be int8_tensorwise")
    found = getattr(module, names.activation, None)
    if found is not None and not _is_silu(found):
        raise UnsupportedError(
            f"pack_gate_up: {names.activation} of {type(module).__name__} is {found!r}; only silu can be fused"
        )


def _check_forward(module: nn.Module, names: Names) -> None:
    """Raises UnsupportedError where the module's own forward is visibly another than that of a plain MLP."""
    found = _projections(module, names)
    if isinstance(found, str):
        return
    codes = found[0].tensors["qdata"]
    gate, up, down = (module.get_submodule(name) for name in names.layers)
    dtype = gate.compute_dtype if type(gate) is QuantizedLinear else gate.weight.dtype
    x = torch.randn(1, 2, codes.shape[1], generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    if FakeTensor in (type(codes), type(x)):
        return
    x = x.to(codes.device, dtype)
    with torch.no_grad():
        own, plain = module.forward(x), down(nn.functional.silu(gate(x)) * up(x))
        if not isinstance(own, torch.Tensor) or own.shape != plain.shape:
            what = f"{list(own.shape)}" if isinstance(own, torch.Tensor) else f"a {type(own).__name__}"
            raise UnsupportedError(
                f"pack_gate_up: the forward of {type(module).__name__} gives {what} for x {list(x.shape)}, not the "
                f"{list(plain.shape)} of down(silu(gate(x)) * up(x)); only a plain MLP can be packed"
            )
        own, plain = own.cpu().double(), plain.cpu().double()
        error, size = (own - plain).norm().item(), plain.norm().item()
    if error > LARGEST_ERROR * size:  # not where a weight that is not loaded yet gives nan
        raise UnsupportedError(
            f"pack_gate_up: the forward of {type(module).__name__} is not down(silu(gate(x)) * up(x)) (a residual, "
            f"dropout?): on two random rows it differs by {error:.3g} of {size:.3g}; only a plain MLP can be packed"
        )


def _is_silu(function: Any) -> bool:
    by_name = type(function).__name__ == "SiLUActivation"  # of transformers, which need not be installed
    return function is nn.functional.silu or type(function) is nn.SiLU or by_name


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _projections(module: nn.Module, names: Names) -> tuple[Projection, Projection, Projection] | str:
    """Gate, up and down, or what is in the way of running them as one op."""
    activation = getattr(module, names.activation, None)
    if activation is not None and not _is_silu(activation):
        return f"{names.activation} is a {getattr(activation, '__name__', type(activation).__name__)}, not silu"
    if isinstance(activation, nn.Module) and _is_hooked(activation):
        return f"{names.activation} has forward hooks, which one op for the whole MLP would skip"
    found = []
    for name in (names.gate, names.up, names.down):  # torch 2.10 cannot trace a property of a named tuple
        layer = module.get_submodule(name)
        projection = _projection(name, layer)
        if isinstance(projection, str):
            return projection
        found.append(projection)
    gate, up, down = found
    rows, columns = gate.tensors["qdata"].shape
    if gate.config != up.config:
        return f"gate and up are rotated differently: {gate.config} and {up.config}"
    if up.tensors["qdata"].shape != (rows, columns) or down.tensors["qdata"].shape[1] != rows:
        shapes = [list(p.tensors["qdata"].shape) for p in found]
        return f"the weights do not fit each other: gate {shapes[0]}, up {shapes[1]}, down {shapes[2]}"
    return gate, up, down


def _projection(name: str, layer: nn.Module) -> Projection | str:
    """One layer's tensors, or what is in the way."""
    if type(layer) not in (QuantizedLinear, nn.Linear):
        return f"{name} is a {type(layer).__name__}, not a plain quantized linear (a LoRA or another wrapper?)"
    if _is_hooked(layer):
        return f"{name} has forward hooks (of an offloader?), which one op for the whole MLP would skip"
    if type(layer) is QuantizedLinear:
        format, config, tensors = layer.format, layer.config, layer.inner()
    elif isinstance(layer.weight, QuantizedTensor) and not layer.weight.transposed:
        weight = layer.weight
        format, config = weight._format, weight.config
        tensors = {"qdata": weight.qdata, "scale": weight.scale} if format is Int8Format else {}
    else:
        return f"{name} holds a {type(layer.weight).__name__}, not an INT8 weight"
    if format is not Int8Format:
        return f"{name} is of format {format.name}, not int8_tensorwise"
    for key, tensor in (*tensors.items(), ("bias", layer.bias)):
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            return f"{name}'s {key} is a {type(tensor).__name__} (sharded?)"
        if tensor.device.type == "meta":
            return f"{name}'s {key} is a placeholder on the meta device (offloaded?)"
    shape, whole = tuple(tensors["qdata"].shape), (layer.out_features, layer.in_features)
    if shape != whole:
        return f"{name} holds {list(shape)} of a weight of {list(whole)} (sharded?)"
    return Projection(tensors, config, layer.bias)


def _say(reason: str) -> None:
    """Once per reason. Not while a graph is traced: the module runs before and after as it did."""
    if torch.compiler.is_compiling() or reason in _said:
        return
    _said.add(reason)
    log.warning("kitchen: gate and up projection run apart: %s (said once)", reason)


# --------------------------------------------------------------------------------------------------------- packing


def _pack_where_it_pays(module: PackedGateUp) -> None:
    names = module._kitchen_gate_up
    found = "not packed" if names is None else _projections(module, names)
    if not isinstance(found, str) and found[0].tensors["qdata"].device.type in REPACKS_ON:
        _pack(module, names)


def _pack(module: nn.Module, names: Names) -> str | None:
    """Put gate and up into one storage each for weight, scale and bias, unless they are; or why that cannot be."""
    found = _projections(module, names)
    if isinstance(found, str):
        return found
    gate, up, _ = found
    reason = _cannot_stack(gate, up)
    if reason is not None:
        return reason
    with torch.no_grad(), torch.inference_mode(False):
        for name, one, projection in zip((names.gate, names.up), _halves(gate, up), (gate, up), strict=True):
            if one:
                _put(module.get_submodule(name), one, projection)
    return None


def _cannot_stack(gate: Projection, up: Projection) -> str | None:
    scale = gate.tensors["scale"]
    if scale.dim() == 0 or scale.numel() != gate.tensors["qdata"].shape[0]:
        return "gate and up have one scale for all rows each, which cannot be stacked into a scale per row"
    for name, first, second in _pairs(gate, up):
        if (first is None) != (second is None):
            return f"only one of gate and up has a {name}"
        if first is None:
            continue
        one, other = ((list(t.shape), t.dtype, str(t.device)) for t in (first, second))
        if one != other:
            return f"gate and up differ in their {name}: {one} and {other}"
    return None


def _pairs(gate: Projection, up: Projection) -> list[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    return [
        ("weight", gate.tensors["qdata"], up.tensors["qdata"]),
        ("scale", gate.tensors["scale"], up.tensors["scale"]),
        ("bias", gate.bias, up.bias),
    ]


def _halves(gate: Projection, up: Projection) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """By name, the tensors of gate and of up that have to be replaced, as views of a new storage."""
    of_gate, of_up = {}, {}
    for name, first, second in _pairs(gate, up):
        if first is None or not isinstance(stacked_rows(first, second), str):
            continue
        both = first.new_empty((2 * first.shape[0], *first.shape[1:]))
        of_gate[name], of_up[name] = both[: first.shape[0]].copy_(first), both[first.shape[0] :].copy_(second)
    return of_gate, of_up


def _put(layer: nn.Module, made: dict[str, torch.Tensor], projection: Projection) -> None:
    """Into the parameters themselves, which stay the same objects where torch allows it."""
    if "bias" in made:
        _set(layer, "bias", made["bias"])
    codes, scale = projection.tensors["qdata"], projection.tensors["scale"]
    inner = {"qdata": made.get("weight", codes), "scale": made.get("scale", scale)}
    if type(layer) is QuantizedLinear:
        for key, tensor in Int8Format.state_dict(inner).items():
            _set(layer, key, tensor)
    else:
        weight = layer.weight
        _set(layer, "weight", QuantizedTensor(inner, Int8Format, weight.config, weight.dtype))


def _set(layer: nn.Module, key: str, tensor: torch.Tensor) -> None:
    parameter = getattr(layer, key)
    if tensor is parameter:
        return
    if parameter.is_inference():  # made in inference mode: torch refuses to change its .data
        layer._parameters[key] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    else:
        parameter.data = tensor
