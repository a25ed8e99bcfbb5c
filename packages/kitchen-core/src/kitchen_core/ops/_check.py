"""Argument checks shared by the ops. Each message says what was given, what is allowed, and what to do."""

from __future__ import annotations

import torch

from ..arithmetic import INPUT_ACTS, input_width
from ..errors import InferenceOnlyError, UnsupportedError
from ..registry import Problem

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATION_SCHEMA = "str input_act='none', Tensor? input_act_weight=None, float input_act_eps=0.0"


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """float32, float16, bfloat16"""
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_float(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...] = FLOAT_DTYPES) -> None:
    """``tensor`` is dense and has one of the allowed dtypes."""
    if tensor.is_sparse or tensor.is_sparse_csr:  # (asking for the layout is not allowed in a compiled backward)
        raise UnsupportedError(f"{name} must be a dense tensor, got a sparse one; pass {name}.to_dense()")
    if tensor.dtype not in allowed:
        raise UnsupportedError(f"{name} must be {names(allowed)}, got {names((tensor.dtype,))}; convert it first")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """``tensor`` has exactly this dtype."""
    if tensor.dtype != dtype:
        raise UnsupportedError(f"{name} must be {names((dtype,))}, got {names((tensor.dtype,))}")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """``tensor`` has exactly this shape; ``meaning`` spells it in symbols, such as "[K/g, N]"."""
    if tuple(tensor.shape) != shape:
        raise UnsupportedError(f"{name} must have shape {meaning} = {list(shape)}, got {list(tensor.shape)}")


def check_vector(name: str, tensor: torch.Tensor | None, length: int, meaning: str, scalar: bool = False) -> None:
    """``tensor`` is None or holds ``length`` elements in any shape (or one, where ``scalar`` allows it)."""
    if tensor is None or tensor.numel() == length or (scalar and tensor.numel() == 1):
        return
    allowed = f"1 or {meaning} = {length}" if scalar else f"{meaning} = {length}"
    raise UnsupportedError(f"{name} must hold {allowed} elements, got shape {list(tensor.shape)}")


def check_same_device(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Every given tensor lives where x lives."""
    device = x.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise UnsupportedError(f"{name} is on {tensor.device}, x is on {device}; move all tensors to one device")


def check_x(x: torch.Tensor, in_features: int, input_act: str = "none") -> None:
    """x is a float tensor of at least one dim whose last one fits ``in_features`` and the activation in front."""
    check_float("x", x)
    if x.dim() == 0:
        raise UnsupportedError("x must have at least one dim, [..., K], got a 0-dim tensor")
    width = input_width(in_features, input_act)
    if x.shape[-1] != width:
        halves = f" (two halves of K={in_features} for input_act={input_act!r})" if width != in_features else ""
        raise UnsupportedError(
            f"x has {x.shape[-1]} columns (shape {list(x.shape)}), the weight takes K={width}{halves}; "
            "the last dim of x must be the layer's in_features"
        )


def check_input_act(input_act: str, weight: torch.Tensor | None, in_features: int) -> None:
    """A known activation, with its weight exactly where it takes one."""
    if input_act not in INPUT_ACTS:
        raise UnsupportedError(f"unsupported input_act {input_act!r}; allowed: {', '.join(INPUT_ACTS)}")
    if (weight is not None) != (input_act == "rms_norm"):
        given = "was given" if weight is not None else "is missing"
        raise UnsupportedError(f"input_act_weight {given} for input_act={input_act!r}; only rms_norm takes one, of [K]")
    check_vector("input_act_weight", weight, in_features, "K")
    if weight is not None:
        check_float("input_act_weight", weight)


def check_residual(
    x: torch.Tensor, out_features: int, residual: torch.Tensor | None, residual_scale: torch.Tensor | None
) -> None:
    """residual has the output's shape, residual_scale N elements or one; a scale without a residual is refused."""
    if residual is None:
        if residual_scale is not None:
            raise UnsupportedError("residual_scale was given without residual; give both or neither")
        return
    check_float("residual", residual)
    check_shape("residual", residual, (*x.shape[:-1], out_features), "[..., N]")
    check_vector("residual_scale", residual_scale, out_features, "N", scalar=True)
    if residual_scale is not None:
        check_float("residual_scale", residual_scale)


def check_part(out_features: int, first: int | None, rows_of_whole: int | None) -> tuple[int, int] | None:
    """(first, rows) of a weight that is a part of a larger one, which has to hold it; None for a weight that is whole."""
    if first is None and rows_of_whole is None:
        return None
    if first is None or rows_of_whole is None:
        missing = "part_first" if first is None else "part_of"
        raise UnsupportedError(f"{missing} is missing; a part of a weight is told by part_first and part_of, both")
    _check_rows(part_first=first, part_of=rows_of_whole)
    if first < 0 or first + out_features > rows_of_whole:
        raise UnsupportedError(
            f"a weight of N={out_features} rows, from row {first} on, is no part of one of {rows_of_whole} rows; part_first "
            "must be at least 0, and part_first + N at most part_of"
        )
    return None if out_features == rows_of_whole else (first, rows_of_whole)


def part_numbers(part: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """part_first and part_of, as ops take them, of the ``part`` that formats take; None and None for a weight that is whole."""
    if part is None:
        return None, None
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise UnsupportedError(
            f"part must be (part_first, part_of), the weight's first row and the rows of the whole, got {part!r}; leave it out "
            "for a weight that is whole"
        )
    first, rows_of_whole = part
    _check_rows(part_first=first, part_of=rows_of_whole)
    return first, rows_of_whole


def _check_rows(**numbers: object) -> None:
    for name, number in numbers.items():
        whole = isinstance(number, torch.SymInt) or (isinstance(number, int) and -(2**63) <= number < 2**63)
        if number is not None and not whole:
            raise UnsupportedError(f"{name} must be a whole number of 64 bits, a row of the weight, got {number!r}")


def loose(matrix: torch.Tensor) -> bool:
    """Whether rows have gaps between them or do not start at a multiple of 16 bytes, by its place in the storage.

    No choice depends on it, since kernels are remembered by shapes alone; ``explain`` says it, because some copy such rows.
    """
    return not matrix.is_contiguous() or matrix.storage_offset() * matrix.element_size() % 16 != 0


def check_four_bits(problem: Problem) -> None:
    """For ops of 4-bit weights: a Problem says 4, or nothing."""
    if problem.bits not in (4, Problem._field_defaults["bits"]):
        raise UnsupportedError(f"{problem.op} takes weights of 4 bits, got bits {problem.bits}; leave it out")


def no_gradient(op: str, instead: str) -> InferenceOnlyError:
    """For an op that was asked for one."""
    return InferenceOnlyError(
        f"{op} was asked for a gradient, which it has not; the linears kitchen_core.int8_linear, w4a8_linear, "
        f"svdquant_linear and awq_linear are differentiable in x, bias and residual; else {instead}"
    )


def check_seed(seed: int) -> None:
    """0 rounds ties to even, a positive seed stochastically; kernels take it as an unsigned number."""
    if seed < 0:
        raise UnsupportedError(f"seed must be 0 (ties to even) or positive (stochastic rounding), got {seed}")


def rows(x: torch.Tensor) -> int:
    """The product of the leading dims of x: M."""
    count = 1
    for size in x.shape[:-1]:
        count = count * size
    return count


def words(**flags: object) -> tuple[str, ...]:
    """Option words for a Problem: the names of what is given and true; ``name=value`` for a string other than none."""
    found = []
    for name, value in flags.items():
        if isinstance(value, str):
            if value != "none":
                found.append(f"{name}={value}")
        elif value is not None and value is not False:
            found.append(name)
    return tuple(found)
