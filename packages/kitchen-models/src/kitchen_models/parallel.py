"""Tensor parallelism: quantized linears whose stored tensors are divided over the ranks of a device mesh.

``ColwiseParallel`` and ``RowwiseParallel`` are used as torch's own, in ``parallelize_module`` or in ``parallelize`` of this
module, which checks every layer before it changes one. Plain modules are given to torch's styles.

Colwise divides the rows of the stored weight [N, K]: each rank makes some outputs, and adds their sums in the order of the
whole layer's, so that they are those of one device. Rowwise divides its columns: each rank takes some inputs, and the ranks'
outputs are summed in fp32. A quantization group or a rotation block lies on one rank or the layer is refused.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from kitchen_core import QuantizedLinear, QuantizedTensor
from kitchen_core.activation import QuantizedActivation, cast_for_autocast
from kitchen_core.errors import KitchenError, UnsupportedError
from kitchen_core.formats import Format, Tensors
from kitchen_core.ops._check import FLOAT_DTYPES

from .dialect import naming
from .rows import output_shapes

OUTPUTS, INPUTS = "outputs", "inputs"  # what is divided: rows of the stored weight, or its columns
WHOLE_ROW_ACTS = ("rms_norm",)  # activations that need all inputs of a row


class ColwiseParallel(TorchColwiseParallel):
    """torch's style for any format: the outputs are divided. Bit for bit what one device of the same kind computes.

    Two formats sum in floats and hold that for 8, 16, 24, .. outputs a rank: svdquant always, awq in its fused kernels; its
    ``awq/dequantized`` leaves the order to cuBLAS, which chooses by the number of outputs, and agrees within rounding. To
    add in the order of the whole layer takes a part more time than an order of its own would, which ``bit_equal=False`` lets
    it have: docs/guides/tensor_parallel.md.
    """

    def __init__(self, *, bit_equal: bool = True, **layouts: Any) -> None:
        super().__init__(**layouts)
        if not isinstance(bit_equal, bool):
            raise UnsupportedError(f"bit_equal is True or False, got {bit_equal!r}")
        self.bit_equal = bit_equal

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, QuantizedLinear):
            _refuse_quantized_tensor(module)
            return super()._apply(module, device_mesh)
        return divide(module, device_mesh, OUTPUTS, self)


class RowwiseParallel(TorchRowwiseParallel):
    """torch's style for any format: the inputs are divided, each rank quantizes its own part of x with its own scale, and the
    outputs are summed in ``sum_dtype``, fp32 unless another is given, which halves what is sent and rounds more.
    """

    def __init__(self, *, sum_dtype: torch.dtype = torch.float32, **layouts: Any) -> None:
        super().__init__(**layouts)
        if sum_dtype not in FLOAT_DTYPES:
            raise UnsupportedError(f"sum_dtype is one of {', '.join(map(str, FLOAT_DTYPES))}, got {sum_dtype!r}")
        self.sum_dtype = sum_dtype

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, QuantizedLinear):
            _refuse_quantized_tensor(module)
            return super()._apply(module, device_mesh)
        return divide(module, device_mesh, INPUTS, self)


STYLES = (ColwiseParallel, RowwiseParallel)


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> nn.Module:
    """``torch.distributed.tensor.parallel.parallelize_module``, after every layer that the plan names was checked.

    Raises UnsupportedError, naming the layer, for a split that would cut a group or a rotation block, for a pattern that names
    no module, for a layer that is named twice, and for a style of torch's own where the layer is quantized; the model is as it
    was then. ``model`` is changed in place and returned.
    """
    _check_mesh(mesh)
    if not isinstance(plan, Mapping):
        raise UnsupportedError(f"the plan must give each name its style, {{'mlp.up': ColwiseParallel()}}, got {plan!r}")
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, str] = {}  # of the layers that the plan divides
    for pattern, style in plan.items():
        found = [name for name in modules if _matches(name, pattern)]
        if not found:
            raise UnsupportedError(
                f"the plan's {pattern!r} names no module; it has {', '.join(list(modules)[1:4])}, ..., and * stands for one "
                "part of a name"
            )
        if not isinstance(style, ParallelStyle):
            raise UnsupportedError(
                f"the plan's {pattern!r} must have a style, such as ColwiseParallel(), got {style!r}"
            )
        if not isinstance(style, STYLES) and type(style) not in (TorchColwiseParallel, TorchRowwiseParallel):
            continue  # what others do is theirs to check
        for name in found:
            layer = modules[name]
            with naming(name):
                if layer in names:
                    raise UnsupportedError(f"the plan names it as {names[layer]!r} as well; leave one of them out")
                names[layer] = name
                _check_layer(layer, style, mesh.size())
    return parallelize_module(model, mesh, dict(plan))


def _check_layer(layer: nn.Module, style: ParallelStyle, parts: int) -> None:
    """Raises UnsupportedError where this style cannot divide this layer; the layer stays as it is."""
    _refuse_quantized_tensor(layer)
    if isinstance(layer, QuantizedLinear):
        if not isinstance(style, STYLES):
            raise UnsupportedError(
                f"torch's {type(style).__name__} does not know {layer.format.name}, the layer's format; use the style of that "
                f"name of {__name__}"
            )
        check_split(layer, OUTPUTS if isinstance(style, ColwiseParallel) else INPUTS, parts)
    elif not isinstance(layer, (nn.Linear, nn.Embedding)):
        raise UnsupportedError(
            f"{type(style).__name__} divides an nn.Linear, an nn.Embedding or a QuantizedLinear, this is a "
            f"{type(layer).__name__}; name the layers in it"
        )
    elif getattr(layer, "_distribute_module_applied", False):  # torch's own mark
        raise UnsupportedError("torch has divided the layer already; leave it out of the plan")
    else:
        _check_plain(layer)


def _check_plain(layer: nn.Module) -> None:
    """Raises UnsupportedError for what torch's styles fail at, or make a dense copy of, after they changed other layers."""
    if is_parametrized(layer) or layer._parameters.get("weight") is None:
        raise UnsupportedError(
            "its weight is made of other tensors (parametrized), and torch divides parameters; divide it before, or make it a "
            "parameter again: torch.nn.utils.parametrize.remove_parametrizations"
        )
    for name, parameter in layer.named_parameters():
        if is_lazy(parameter):
            raise UnsupportedError(f"its {name} has no shape yet; run the model once, then divide it")
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"its {name} is distributed already, by something else; divide the layer while each rank holds it whole"
            )


def _check_mesh(mesh: DeviceMesh) -> None:
    if not hasattr(mesh, "ndim"):
        raise UnsupportedError(f"mesh must be a DeviceMesh, as init_device_mesh makes one, got {mesh!r}")
    if mesh.ndim != 1:
        raise UnsupportedError(f"a layer is divided over one dim of a mesh, got {mesh.ndim} dims; take one: mesh['tp']")


def _refuse_quantized_tensor(layer: nn.Module) -> None:
    weight = getattr(layer, "weight", None)
    if isinstance(weight, QuantizedTensor):
        raise UnsupportedError(
            "its weight is a QuantizedTensor, of which each rank would get a dense part; divide a QuantizedLinear: "
            "QuantizedLinear(weight.inner(), weight.format, weight.config, bias, weight.dtype)"
        )


def _matches(name: str, pattern: str) -> bool:
    """As torch matches plans: part by part, and the model itself by "" alone."""
    if not name or not pattern:
        return name == pattern
    words, wanted = name.split("."), pattern.split(".")
    return len(words) == len(wanted) and all(map(fnmatch.fnmatchcase, words, wanted))


# ------------------------------------------------------------------------------------------------------------ splits


def divided_dims(format: type[Format], config: Any, tensors: Tensors, what: str) -> dict[str, int | None]:
    """For each stored tensor the dim that runs over the layer's outputs, or inputs; None for those that each rank needs whole.

    Found by asking the format for the shapes of a weight of twice as many outputs, or inputs.
    """
    n, k = format.shape(tensors, config)
    here = output_shapes(format, config, n, k, torch.float32)
    wide = output_shapes(format, config, *((2 * n, k) if what == OUTPUTS else (n, 2 * k)), torch.float32)
    dims: dict[str, int | None] = {}
    unknown = sorted(set(tensors) - set(here))
    if unknown:
        raise UnsupportedError(
            f"{format.name} says nothing of {', '.join(unknown)}, which this layer stores, so nobody knows how to divide it; "
            "leave the layer out of the plan"
        )
    for name, tensor in tensors.items():
        changed = [d for d, (a, b) in enumerate(zip(here[name][1], wide[name][1], strict=True)) if a != b]
        dims[name] = changed[0] if changed and tensor.numel() > 1 else None
    return dims


def check_split(layer: QuantizedLinear, what: str, parts: int) -> dict[str, int | None]:
    """The dims of ``divided_dims``. Raises UnsupportedError where a layer cannot be divided into that many parts.

    The layer is as it was in either case: of one in a resident layout, what is stored is judged.
    """
    if isinstance(layer, DividedLinear):
        raise UnsupportedError(f"the layer's {layer.what} are divided already, over {layer.parts} ranks")
    if any(hasattr(tensor, "to_local") for tensor in layer.parameters()):  # DTensors
        raise UnsupportedError(
            "the layer's tensors are distributed already, by something else; divide it while each rank holds it whole"
        )
    format = layer.format
    tensors = format.stored({name: tensor.detach().to("meta") for name, tensor in layer.inner().items()}, layer.config)
    n, k = layer.out_features, layer.in_features
    dims = divided_dims(format, layer.config, tensors, what)
    size, symbol, other = (n, "N", "RowwiseParallel") if what == OUTPUTS else (k, "K", "ColwiseParallel")
    if size % parts:
        raise UnsupportedError(
            f"{format.name} [{n}, {k}] over {parts} ranks: its {size} {what} do not divide evenly; use a number of ranks that "
            f"divides {symbol}={size}, or {other} for this layer"
        )
    if what == INPUTS:
        for block, meaning in _blocks(layer, tensors, dims).items():
            count = k // block
            if size // parts % block:
                raise UnsupportedError(
                    f"{format.name} [{n}, {k}] over {parts} ranks: {size / parts:g} inputs a rank would cut {meaning} of "
                    f"{block} columns; the K / {block} = {count} of them can be divided over {_divisors(count)} ranks. Use one "
                    "of these numbers, ColwiseParallel for this layer, or quantize it again in smaller groups"
                )
    return dims


def _blocks(layer: QuantizedLinear, tensors: Tensors, dims: Mapping[str, int | None]) -> dict[int, str]:
    """Numbers of columns that must stay together, and why: rotations from the config, the others from the stored tensors."""
    rotation = getattr(layer.config, "convrot_groupsize", 0)
    blocks = {rotation: "a ConvRot block"} if rotation else {}
    for name, dim in dims.items():
        columns = 1 if dim is None else tensors[name].shape[dim]
        if dim is not None and layer.in_features > columns and layer.in_features % columns == 0:
            meaning = f"a byte of {name}" if name == layer.format.tensors[0].name else f"a quantization group ({name})"
            blocks.setdefault(layer.in_features // columns, meaning)
    return dict(sorted(blocks.items(), reverse=True))


def _divisors(count: int) -> str:
    found = sorted({d for i in range(1, math.isqrt(count) + 1) if count % i == 0 for d in (i, count // i)})
    return ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")


def _part(tensor: torch.Tensor, dim: int | None, planes: tuple[int, ...], part: int, parts: int) -> torch.Tensor:
    """A rank's share, contiguous and with storage of its own, so that the whole can be freed."""
    if dim is None:
        return tensor.clone()
    cut = [plane.chunk(parts, dim)[part] for plane in _planes(tensor, dim, planes)]
    return torch.cat(cut, dim) if len(cut) > 1 else cut[0].contiguous().clone()


def _planes(tensor: torch.Tensor, dim: int, planes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    unit = tensor.shape[dim] // sum(planes)
    return tensor.split([unit * width for width in planes], dim)


def _planes_of(format: type[Format], name: str, what: str) -> tuple[int, ...]:
    return format.column_planes.get(name, (1,)) if what == INPUTS else (1,)


# ------------------------------------------------------------------------------------------------------------ layers


class DividedLinear(QuantizedLinear):
    """A QuantizedLinear of which this rank has a part. Its parameters are DTensors; ``in_features`` and ``out_features`` are
    those of the whole layer.
    """

    what: str
    parts: int
    mesh: DeviceMesh
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool
    sum_dtype: torch.dtype
    bit_equal: bool

    def inner(self) -> Tensors:
        """This rank's tensors by name, without copies."""
        return {name: tensor.to_local() for name, tensor in super().inner().items()}

    def forward(
        self,
        x: torch.Tensor | DTensor | QuantizedActivation,
        input_act: str = "none",
        input_act_weight: torch.Tensor | None = None,
        input_act_eps: float = 0.0,
        residual: torch.Tensor | None = None,
        residual_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As QuantizedLinear. x as the style's ``input_layouts`` says; residual as the output is, before its redistribution:
        [..., N / ranks] where the outputs are divided, whole where the inputs are. The same holds for residual_scale.
        """
        if self.what == INPUTS and input_act in WHOLE_ROW_ACTS:
            raise UnsupportedError(
                f"input_act={input_act!r} needs whole rows of x, and this rank has 1/{self.parts} of them; apply it before "
                "the layer"
            )
        if not isinstance(x, QuantizedActivation):
            x = cast_for_autocast(self._local_input(x))
        tensors = self.inner()
        bias = None if self.bias is None else self.bias.to_local()
        if self.what == OUTPUTS:
            y = self._local_linear(
                x, tensors, bias, None, input_act, input_act_weight, input_act_eps, residual, residual_scale
            )
            return self._as_asked(DTensor.from_local, y, Shard(y.dim() - 1))
        if self.mesh.get_local_rank() > 0:
            bias = None  # it is added once
        y = self._local_linear(x, tensors, bias, self.sum_dtype, input_act, input_act_weight, input_act_eps)
        return self._summed(y, x.dtype, residual, residual_scale)

    linear_input_act = forward

    def _local_linear(
        self, x: Any, tensors: Tensors, bias: Any, out_dtype: Any, input_act: str = "none", weight: Any = None,
        eps: float = 0.0, residual: Any = None, residual_scale: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        columns = self.in_features // (self.parts if self.what == INPUTS else 1)
        if isinstance(x, QuantizedActivation):
            traits = self.format.activation_traits(tensors, self.config)
            x.check_fits(self.format.activation_kind, traits, columns, self.compute_dtype, self.weight.device)
            return self.format.linear_quantized(
                x, tensors, self.config, bias, out_dtype or x.dtype, residual, residual_scale, **self._part()
            )  # fmt: skip
        return self.format.linear(
            x, tensors, self.config, bias, out_dtype, input_act, weight, eps, residual, residual_scale, **self._part()
        )  # fmt: skip

    def _part(self) -> dict[str, tuple[int, int]]:
        """Which outputs of the whole layer this rank makes, for formats that ask."""
        if self.what != OUTPUTS or not self.bit_equal or not self.format.takes_part:
            return {}
        return {"part": (self.mesh.get_local_rank() * (self.out_features // self.parts), self.out_features)}

    def _local_input(self, x: torch.Tensor | DTensor) -> torch.Tensor:
        wanted = Replicate() if self.what == OUTPUTS else Shard(x.dim() - 1)
        if not isinstance(x, DTensor):
            if _same(self.input_layout, wanted, x.dim()) and not _needs_gradient(x):
                return x
            x = DTensor.from_local(x, self.mesh, [self.input_layout], run_check=False)
        # Of a whole x each rank's outputs give a part of the gradient: it is summed on the way back.
        return x.redistribute(placements=[wanted]).to_local(
            grad_placements=[Partial() if self.what == OUTPUTS else wanted]
        )

    def _summed(
        self, y: torch.Tensor, dtype: torch.dtype, residual: torch.Tensor | None, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """The sum of all ranks' ``y``, with the residual behind it, rounded once."""

        def finished(total: torch.Tensor) -> torch.Tensor:
            if residual is not None:
                total = residual.float() + (total if scale is None else scale.float() * total)
            return total.to(dtype)

        whole = _same(self.output_layout, Replicate(), y.dim()) and self.use_local_output
        if not _needs_gradient(y) and (whole or residual is not None):
            total = finished(collectives.all_reduce(y, "sum", group=(self.mesh, 0)))
            return self._as_asked(DTensor.from_local, total, Replicate())
        made = DTensor.from_local(y, self.mesh, [Partial()], run_check=False)
        if residual is not None:
            total = finished(made.redistribute(placements=[Replicate()]).to_local())
            return self._as_asked(DTensor.from_local, total, Replicate())
        made = made.redistribute(placements=[self.output_layout]).to(dtype)
        return made.to_local() if self.use_local_output else made

    def _as_asked(self, wrap: Callable[..., DTensor], y: torch.Tensor, layout: Placement) -> torch.Tensor:
        """Local ``y`` of this layout as the style's ``output_layouts`` and ``use_local_output`` say."""
        if self.use_local_output and _same(self.output_layout, layout, y.dim()):
            return y
        made = wrap(y, self.mesh, [layout], run_check=False).redistribute(placements=[self.output_layout])
        return made.to_local() if self.use_local_output else made

    def dequantize(self, dtype: torch.dtype | None = None) -> DTensor:
        """The dense weight [N, K] as a DTensor that is divided as the layer is."""
        local = self.format.dequantize(self.inner(), self.config, dtype or self.compute_dtype)
        return DTensor.from_local(local, self.mesh, [Shard(0 if self.what == OUTPUTS else 1)], run_check=False)

    def requantize_(self, weight: torch.Tensor, seed: int = 0) -> QuantizedLinear:
        """Refused: some formats choose from the whole weight."""
        raise UnsupportedError(
            "a divided layer cannot be requantized: merge the LoRA first and divide the layer afterwards, or take the whole "
            "layer with kitchen_models.parallel.gathered"
        )

    def _apply(self, fn: Callable, recurse: bool = True) -> QuantizedLinear:
        """.half(): stored tensors keep their dtypes, bias and compute_dtype follow. Another device is refused."""
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight.device))
        if probe.device.type != self.weight.device.type:
            raise UnsupportedError(
                f"a divided layer stays on its mesh ({self.mesh.device_type}); move the model to {probe.device} first, and "
                "divide it then"
            )
        self.compute_dtype = probe.dtype
        if self.bias is not None:
            self._parameters["bias"] = nn.Parameter(self.bias.detach().to(probe.dtype), requires_grad=False)
        return self

    def relay_(self, tensors: Tensors) -> QuantizedLinear:
        """Refused: the parts are what they are."""
        raise UnsupportedError(
            "a divided layer cannot be laid out anew; do so before it is divided, or leave it as stored"
        )

    def extra_repr(self) -> str:
        """As QuantizedLinear, and what is divided."""
        return f"{super().extra_repr()}, {self.what} divided over {self.parts} ranks"


def _needs_gradient(tensor: torch.Tensor) -> bool:
    """Or a derivative of forward mode: a DTensor has none and says so, where a bare collective would drop it."""
    return forward_ad._current_level >= 0 or (torch.is_grad_enabled() and tensor.requires_grad)


def _same(a: Placement, b: Placement, dims: int) -> bool:
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim % dims == b.dim % dims
    return a == b


def divide(layer: QuantizedLinear, mesh: DeviceMesh, what: str, style: Any) -> QuantizedLinear:
    """Leave this rank its part of a layer, in place. Each rank must hold the whole layer, and the same; nothing is sent.
    A weight in a resident layout, which cannot be cut, is divided as it is stored.

    Raises UnsupportedError as ``check_split`` does, and for a mesh of more than one dim; the layer is as it was then.
    """
    _check_mesh(mesh)
    parts, part = mesh.size(), mesh.get_local_rank()
    dims = check_split(layer, what, parts)
    keys = {spec.name: spec.key for spec in layer.format.tensors}
    made = {}
    for name, tensor in layer.format.stored(layer.inner(), layer.config).items():
        local = _part(tensor.detach(), dims[name], _planes_of(layer.format, name, what), part, parts)
        made[keys[name]] = _parameter(local, mesh, dims[name])
    if layer.bias is not None:
        dim = 0 if what == OUTPUTS else None
        made["bias"] = _parameter(_part(layer.bias.detach(), dim, (1,), part, parts), mesh, dim)
    layer._parameters.update(made)
    layer.__class__ = DividedLinear
    layer.what, layer.parts, layer.mesh = what, parts, mesh
    layer.input_layout, layer.output_layout = style.input_layouts[0], style.output_layouts[0]
    layer.use_local_output = style.use_local_output
    layer.sum_dtype = getattr(style, "sum_dtype", torch.float32)
    layer.bit_equal = getattr(style, "bit_equal", True)
    return layer


def _parameter(local: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> nn.Parameter:
    placement = Replicate() if dim is None else Shard(dim)
    return nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False), requires_grad=False)


def gathered(layer: DividedLinear) -> QuantizedLinear:
    """The whole layer again, on every rank, bit for bit: to save it, say. All ranks must call this."""
    if not isinstance(layer, DividedLinear):
        raise KitchenError(f"only a layer that was divided can be gathered, got {type(layer).__name__}")
    keys = {spec.name: spec.key for spec in layer.format.tensors}
    whole = {
        name: _whole(layer._parameters[key], layer.parts, _planes_of(layer.format, name, layer.what))
        for name, key in keys.items()
        if layer._parameters.get(key) is not None
    }
    bias = None if layer.bias is None else layer.bias.detach().full_tensor()
    return QuantizedLinear(whole, layer.format, layer.config, bias, layer.compute_dtype).train(layer.training)


def _whole(parameter: DTensor, parts: int, planes: tuple[int, ...]) -> torch.Tensor:
    (placement,) = parameter.placements
    local = parameter.detach().to_local()
    if isinstance(placement, Replicate):
        return local.clone()
    as_bytes = local.dtype.itemsize == 1  # float8 is sent as bytes: not every backend knows it
    sent = local.view(torch.uint8) if as_bytes else local
    full = DTensor.from_local(sent, parameter.device_mesh, [placement], run_check=False).full_tensor()
    if len(planes) > 1:
        shares = [_planes(share, placement.dim, planes) for share in full.chunk(parts, placement.dim)]
        full = torch.cat([share[i] for i in range(len(planes)) for share in shares], placement.dim)
    return full.view(local.dtype) if as_bytes else full
