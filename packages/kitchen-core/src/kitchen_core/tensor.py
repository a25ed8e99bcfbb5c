"""QuantizedTensor: a weight in a storage format that behaves as a tensor.

Its inner tensors are plain tensors, reachable as attributes by the format's names (``w.qdata``, ``w.scale``). ``linear``,
``mm`` and ``addmm`` run the format's fused op; ``t`` flips a flag; copying, moving and saving work; any other op works on
the dequantized weight, with one warning; an in-place op that cannot be honoured raises.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from .activation import QuantizedActivation, cast_for_autocast
from .errors import FormatError, InferenceOnlyError, UnsupportedError
from .formats import Format, Tensors, config_of, get_format
from .pickling import hide_float8, restore_float8

log = logging.getLogger("kitchen")
aten = torch.ops.aten
_dequantized_ops: set[str] = set()


class QuantizedTensor(torch.Tensor):
    """A weight [N, K] (or its transpose) held in a format.

    Make one with ``QuantizedTensor.quantize(weight, "int8")`` or, from stored tensors, by the constructor:
    ``tensors`` by the format's names, ``format`` a Format class or its name, ``config`` of the format's Config class,
    ``dtype`` the float dtype that the weight stands for.
    """

    _format: type[Format]
    config: Any
    transposed: bool

    @staticmethod
    def __new__(
        cls, tensors: Tensors, format: type[Format] | str, config: Any, dtype: torch.dtype, transposed: bool = False
    ) -> QuantizedTensor:
        format = get_format(format) if isinstance(format, str) else format
        format.check_names(tensors)
        format.check(tensors, config)
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise UnsupportedError(f"dtype is the float dtype that the weight stands for, got {dtype}")
        return cls._around(tensors, format, config, dtype, transposed)

    @classmethod
    def _around(
        cls, tensors: Tensors, format: type[Format], config: Any, dtype: torch.dtype, transposed: bool,
        outer: tuple[Any, Any] | None = None,
    ) -> QuantizedTensor:  # fmt: skip
        """Unchecked: of tensors that another QuantizedTensor held. ``outer``: sizes and strides, where they are known."""
        if outer is None:
            n, k = format.shape(tensors, config)
            outer = ((k, n), (1, k)) if transposed else ((n, k), (k, 1))
        sizes, strides = outer
        device = tensors[format.tensors[0].name].device
        self = torch.Tensor._make_wrapper_subclass(cls, sizes, strides=strides, dtype=dtype, device=device)
        self._format = format
        self.config = config
        self.transposed = transposed
        self._hold({spec.name: tensors[spec.name] for spec in format.tensors if tensors.get(spec.name) is not None})
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is set in __new__."""

    @classmethod
    def quantize(
        cls, weight: torch.Tensor, format: type[Format] | str, seed: int = 0, **options: Any
    ) -> QuantizedTensor:
        """Quantize a float weight [N, K]; ``options`` are those of the format's ``config_for``."""
        format = get_format(format) if isinstance(format, str) else format
        config = config_of(format, weight, options)
        return cls(format.quantize(weight, config, seed=seed), format, config, weight.dtype)

    # ------------------------------------------------------------------------------------------ what it holds

    @property
    def format(self) -> type[Format]:
        """The format class."""
        return self._format

    def inner(self) -> Tensors:
        """The format's tensors by name. Not to be changed."""
        return self._tensors

    def _hold(self, tensors: Tensors) -> None:
        for name in self.__dict__.get("_tensors", {}).keys() - tensors.keys():
            delattr(self, name)
        self._tensors = tensors
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def relay_(self, tensors: Tensors) -> QuantizedTensor:
        """For formats with a resident layout: hold the same weight as these tensors, in place for whoever has this object."""
        self._hold(tensors)
        return self

    def _stored(self) -> Tensors:
        return self._format.stored(self.inner(), self.config)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.nbytes for t in self.inner().values())

    def state_dict(self, prefix: str = "weight") -> Tensors:
        """The stored tensors by checkpoint key: ``prefix`` is the parameter's name, "blocks.0.proj.weight"."""
        if self.transposed:
            raise FormatError("a transposed view cannot be saved; save the weight that it is a view of")
        layer = prefix.removesuffix("weight")
        return self._format.state_dict(self._stored(), layer)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense weight, rounded once to ``dtype`` (its own where None)."""
        dense = self._format.dequantize(self.inner(), self.config, dtype or self.dtype)
        return dense.t() if self.transposed else dense

    def requantize(self, weight: torch.Tensor, seed: int = 0) -> QuantizedTensor:
        """Another float weight in this format and config, for merging LoRA; ``seed`` > 0 rounds stochastically."""
        if tuple(weight.shape) != tuple(self.shape) or self.transposed:
            raise UnsupportedError(f"requantize takes a weight of shape {list(self.shape)}, got {list(weight.shape)}")
        return self._with(self._format.requantize(self.inner(), self.config, weight, seed))

    def _with(
        self, tensors: Tensors, dtype: torch.dtype | None = None, transposed: bool | None = None
    ) -> QuantizedTensor:
        transposed = self.transposed if transposed is None else transposed
        return QuantizedTensor._around(tensors, self._format, self.config, dtype or self.dtype, transposed)

    # ------------------------------------------------------------------------------------------------ linears

    def linear(
        self,
        x: torch.Tensor | QuantizedActivation,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        residual_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [..., K], or a QuantizedActivation, through the fused op: [..., N] in x's dtype."""
        return self.linear_input_act(x, bias, residual=residual, residual_scale=residual_scale)

    def linear_input_act(
        self,
        x: torch.Tensor | QuantizedActivation,
        bias: torch.Tensor | None = None,
        input_act: str = "none",
        input_act_weight: torch.Tensor | None = None,
        input_act_eps: float = 0.0,
        residual: torch.Tensor | None = None,
        residual_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """linear with an activation in front and residual + residual_scale * y behind, for every format.

        Shapes: x [..., K] (2K for swiglu and situ); bias [N]; residual [..., N]; residual_scale 1 or N elements.
        Raises UnsupportedError for a transposed weight, and for an activation on an already quantized x.
        """
        if self.transposed:
            raise UnsupportedError("linear takes the weight [N, K]; this one is transposed, use mm or take .t() of it")
        if isinstance(x, QuantizedActivation):
            if input_act != "none":
                raise UnsupportedError("input_act belongs to quantize_activation; this activation is quantized already")
            self._check_fits(x)
            return self._format.linear_quantized(
                x, self.inner(), self.config, bias, x.dtype, residual, residual_scale
            )  # fmt: skip
        return self._format.linear(
            x, self.inner(), self.config, bias, None, input_act, input_act_weight, input_act_eps, residual,
            residual_scale,
        )  # fmt: skip

    def quantize_activation(self, x: torch.Tensor, **input_act: Any) -> QuantizedActivation:
        """x quantized for this weight and for every other that shares its traits.

        ``input_act``, ``input_act_weight`` and ``input_act_eps`` as in linear_input_act.
        """
        return self._format.quantize_activation(x, self.inner(), self.config, **input_act)

    def _check_fits(self, activation: QuantizedActivation) -> None:
        traits = self._format.activation_traits(self.inner(), self.config)
        activation.check_fits(self._format.activation_kind, traits, self.shape[1], self.dtype, self.device)

    # --------------------------------------------------------------------------------- copying, saving, compiling

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # the layout is there for the guards of torch.compile, which look at this and not at the inner tensors
        layout = self._format.is_resident(self._tensors)
        return list(self._tensors), (self._format.name, self.config, self.dtype, self.transposed, layout)

    @classmethod
    def __tensor_unflatten__(cls, inner: Tensors, context: Any, outer_size: Any, outer_stride: Any) -> QuantizedTensor:
        name, config, dtype, transposed, _ = context
        # outer sizes are symbols of their own in a graph: not what the symbols of inner sizes make
        return cls._around(inner, get_format(name), config, dtype, transposed, (outer_size, outer_stride))

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        made = self._with({name: copy.deepcopy(t, memo) for name, t in self.inner().items()})
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=False)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        config = dataclasses.asdict(self.config)
        is_parameter = isinstance(self, torch.nn.Parameter)
        tensors, hidden = hide_float8(self._stored())
        return _rebuild, (self._format.name, config, tensors, hidden, self.dtype, self.transposed, is_parameter)

    def share_memory_(self) -> QuantizedTensor:
        """Move the stored tensors to shared memory."""
        for tensor in self._tensors.values():
            tensor.share_memory_()
        return self

    def apply_(self, *args: Any) -> Any:
        """Refused: a function cannot be applied to codes in place."""
        return _refuse_in_place("apply_")

    map_ = map2_ = apply_

    def data_ptr(self) -> int:
        """Refused: the weight has several storages; take the pointer of one of inner()."""
        raise UnsupportedError("a quantized weight has no single storage; use data_ptr() of a tensor of weight.inner()")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("a quantized weight has no dlpack form; use weight.dequantize() or a tensor of inner()")

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedTensor:
        """Quantized weights have no gradient: only False is taken."""
        if requires_grad:
            raise InferenceOnlyError(
                "a quantized weight has no gradient; use nn.Parameter(weight, requires_grad=False), "
                "or train a LoRA beside it (gradients of x, bias and residual are right)"
            )
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        view = ", transposed" if self.transposed else ""
        view += ", resident layout" if self._format.is_resident(self._tensors) else ""
        return f"QuantizedTensor({list(self.shape)}, {self._format.name}, {self.config}, {self.dtype}, {self.device}{view})"

    # ----------------------------------------------------------------------------------------------- dispatch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if forward_ad._current_level >= 0 and func in _FORWARD_MODE and kwargs.keys() <= {"beta", "alpha"}:
            result = _FORWARD_MODE[func](func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is torch.Tensor.__setitem__:
            _refuse_in_place("__setitem__")
        if getattr(func, "__self__", None) is torch.Tensor.data and func.__name__ == "__set__":
            return _set_data(*args)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        # for forward mode's rule a tangent is one more x, which an op would round to its grid: such a call runs dense
        if handler is not None and not (forward_ad._current_level >= 0 and handler in _LINEAR_HANDLERS):
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable:
            _refuse_mutation(func, args, kwargs)
        return _run_dequantized(func, args, kwargs)


def _rebuild(
    format_name: str,
    config: dict[str, Any],
    tensors: Tensors,
    hidden: dict[str, torch.dtype],
    dtype: torch.dtype,
    transposed: bool,
    is_parameter: bool,
) -> QuantizedTensor:
    """Undo __reduce_ex__. It takes plain values only, so that torch.load(weights_only=True) can call it."""
    format = get_format(format_name)
    tensors = restore_float8(tensors, hidden)
    made = QuantizedTensor(tensors, format, format.Config(**config), dtype, transposed)
    return torch.nn.Parameter(made, requires_grad=False) if is_parameter else made


torch.serialization.add_safe_globals([_rebuild])


def _linear(input: Any, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, QuantizedTensor) or isinstance(input, QuantizedTensor) or weight.transposed:
        plain = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (input, weight, bias))
        return F.linear(*plain)
    return weight._format.linear(cast_for_autocast(input), weight._tensors, weight.config, bias)


def _set_data(self: QuantizedTensor, value: Any) -> None:
    """``w.data = other``: the offloaders' way to swap storage. Inner tensors are swapped, or the call is refused."""
    if not isinstance(value, QuantizedTensor) or value._format is not self._format or value.config != self.config:
        raise UnsupportedError(
            f".data of a quantized weight ({self._format.name}) can only be set to one of the same format and config, "
            f"got {type(value).__name__}; use the module form (QuantizedLinear) with frameworks that swap .data"
        )
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(self, value)
    self.transposed = value.transposed
    self._hold(dict(value.inner()))


# --------------------------------------------------------------------------------------------------- aten handlers


def _map(func: Any, self: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    """Apply an op that keeps shape and dtype to every inner tensor: detach, clone, pin_memory."""
    kwargs.pop("memory_format", None)
    return self._with({name: func(t, *args, **kwargs) for name, t in self.inner().items()})


def _to_copy(func: Any, self: QuantizedTensor, *, dtype: Any = None, **kwargs: Any) -> QuantizedTensor:
    """.to(): inner tensors move, their dtypes stay; only the dtype that the weight stands for changes."""
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    kwargs.pop("memory_format", None)
    layout = kwargs.pop("layout", None)
    if layout not in (None, torch.strided):
        return NotImplemented
    tensors = {name: func(t, **kwargs) for name, t in self.inner().items()}
    return self._with(tensors, dtype=dtype)


def _transpose(func: Any, self: QuantizedTensor, *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 else dims
    if {d % 2 for d in order} != {0, 1}:
        return NotImplemented
    swapped = func is not aten.permute.default or tuple(d % 2 for d in order) == (1, 0)
    tensors = {name: aten.alias.default(t) for name, t in self.inner().items()}
    return self._with(tensors, transposed=self.transposed != swapped)


def _t(func: Any, self: QuantizedTensor) -> QuantizedTensor:
    return _transpose(func, self, 0, 1)


def _empty_like(func: Any, self: QuantizedTensor, *, dtype: Any = None, **kwargs: Any) -> QuantizedTensor:
    kwargs.pop("memory_format", None)
    return self._with({name: func(t, **kwargs) for name, t in self.inner().items()}, dtype=dtype)


def _copy_(func: Any, self: Any, source: Any, non_blocking: bool = False) -> Any:
    """Between weights of one format and config, tensor by tensor; anything else is refused, nothing broadcasts.

    Where only one of them is in the resident layout, the target holds what is stored from then on.
    """
    if not isinstance(self, QuantizedTensor):
        return func(self, source.dequantize(), non_blocking)
    if not isinstance(source, QuantizedTensor):
        taken = f"copy_ into a quantized weight takes a quantized weight ({self._format.name}), got"
        if source.dtype.is_floating_point:
            raise UnsupportedError(f"{taken} a dense {list(source.shape)} tensor; use weight.requantize(dense)")
        raise UnsupportedError(
            f"{taken} {source.dtype} {list(source.shape)}; of all stored tensors, as a state dict has them, make one: "
            "QuantizedTensor(format.from_state_dict(state, prefix), format, config, dtype)"
        )
    mine, theirs, format = self.inner(), source.inner(), self._format
    same = source._format is format and source.config == self.config and source.transposed == self.transposed
    if same and format.is_resident(mine) != format.is_resident(theirs):
        mine, theirs = self._stored(), source._stored()
    if not same or {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in theirs.items()}:
        raise UnsupportedError(
            f"copy_ needs the same format, config and shapes; got {source!r} for {self!r}. Assign the parameter instead"
        )
    if mine is not self.inner():
        self.relay_(mine)
    for name, tensor in mine.items():
        tensor.copy_(theirs[name], non_blocking)
    return self


def _mm(func: Any, a: Any, b: Any) -> Any:
    if isinstance(b, QuantizedTensor) and not isinstance(a, QuantizedTensor) and b.transposed:
        return b.t().linear(a)
    return NotImplemented


def _addmm(func: Any, addend: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta * addend + alpha * (a @ b), in fp32 with one rounding unless it is the op's own bias."""
    if not isinstance(b, QuantizedTensor) or isinstance(a, QuantizedTensor) or not b.transposed:
        return NotImplemented
    weight = b.t()
    if beta == 1 and alpha == 1 and addend.dim() == 1 and addend.shape[0] == weight.shape[0]:
        return weight.linear(a, addend)
    product = weight.format.linear(a, weight.inner(), weight.config, None, torch.float32)
    total = alpha * product if beta == 0 else torch.add(beta * addend.float(), product, alpha=alpha)
    return total.to(a.dtype)


def _linear_aten(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(weight, QuantizedTensor) and not isinstance(x, QuantizedTensor) and not weight.transposed:
        return weight.linear(x, bias)
    return NotImplemented


def _record_stream(func: Any, self: QuantizedTensor, stream: Any) -> None:
    for tensor in self.inner().values():
        func(tensor, stream)


def _is_pinned(func: Any, self: QuantizedTensor, *args: Any, **kwargs: Any) -> bool:
    return all(t.is_pinned() for t in self.inner().values())


def _shallow_copy_type(func: Any, self: Any, other: Any) -> bool:
    return type(self) is type(other)


_HANDLERS = {
    aten.detach.default: _map,
    aten.alias.default: _map,
    aten.clone.default: _map,
    aten.contiguous.default: _map,
    aten._pin_memory.default: _map,
    aten._to_copy.default: _to_copy,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _transpose,
    aten.numpy_T.default: _t,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.linear.default: _linear_aten,
    aten.record_stream.default: _record_stream,
    aten.is_pinned.default: _is_pinned,
    aten._has_compatible_shallow_copy_type.default: _shallow_copy_type,
}


def _flipped(func: Any, self: QuantizedTensor, *_: Any) -> QuantizedTensor:
    """The transpose of a constant: torch.func would hide what it is."""
    return self._with(self.inner(), transposed=not self.transposed)


_LINEAR_HANDLERS = (_mm, _addmm, _linear_aten)
# What is done above forward mode, where such a call is a linear, which has the derivative of its own.
_FORWARD_MODE = {
    **dict.fromkeys((torch.t, torch.Tensor.t, torch.Tensor.T.__get__, torch.Tensor.mT.__get__), _flipped),
    **dict.fromkeys((torch.mm, torch.matmul, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__), _mm),
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _addmm),
}


def _refuse_in_place(op: str) -> None:
    raise UnsupportedError(
        f"in-place {op} on a quantized weight would be lost, so it is refused; "
        "use weight.requantize(weight.dequantize() + delta) and assign the result"
    )


def _refuse_mutation(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where an op writes to a QuantizedTensor; writing to a dense tensor from one is fine."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        value = given.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        if written and any(isinstance(v, QuantizedTensor) for v in values):
            _refuse_in_place(func._schema.name)


def _run_dequantized(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name
    if name not in _dequantized_ops:
        _dequantized_ops.add(name)
        log.warning(
            "kitchen: %s has no quantized form: it runs on a dequantized copy of the weight (said once per op); "
            "writes to its result do not reach the weight",
            name,
        )
    args, kwargs = tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, (args, kwargs))
    return func(*args, **kwargs)
