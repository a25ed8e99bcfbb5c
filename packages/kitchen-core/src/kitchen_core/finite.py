"""A debug switch that names the first op whose output is not finite, for pictures that come out black."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from . import _overrides
from ._environment import is_on
from ._overrides import override
from .errors import NonFiniteError
from .registry import Kernel, Problem

_ALWAYS = is_on("KITCHEN_CHECK_FINITE")
_checking: ContextVar[bool] = ContextVar("kitchen_check_finite", default=_ALWAYS)

if _ALWAYS:  # for the whole process: calls never take the short way, which does not look at results
    _overrides.depth += 1


@contextlib.contextmanager
def check_finite() -> Iterator[None]:
    """Within the block and this thread, an op of kitchen whose output has an inf or a NaN raises NonFiniteError.

    The message names the op, the kernel, the call, the first such element, and the arguments that were not finite already;
    the traceback leads to the layer. KITCHEN_CHECK_FINITE=1 does the same for a whole process. It waits for the GPU after
    every op; while a CUDA graph is captured nothing is looked at.
    """
    with override(_checking, True):
        yield


def checking() -> bool:
    """Whether outputs are looked at in this thread."""
    return _checking.get()


def require_finite(result: object, arguments: tuple, kernel: Kernel, problem: Problem) -> None:
    """Raises NonFiniteError where an output of a call has an inf or a NaN."""
    outputs = result if isinstance(result, tuple) else (result,)
    if any(o.is_cuda for o in outputs) and torch.cuda.is_current_stream_capturing():
        return
    for output in outputs:
        where = _not_finite(output)
        if where is None:
            continue
        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        spoiled = [f"argument {i} (shape {list(t.shape)})" for i, t in enumerate(tensors) if _not_finite(t) is not None]
        source = f"not finite before: {', '.join(spoiled)}" if spoiled else "all its inputs are finite"
        raise NonFiniteError(
            f"{problem.op} on {kernel.id} gave {output[tuple(where)].item()} at {where} of {list(output.shape)} "
            f"({problem}); {source}. Without check_finite (KITCHEN_CHECK_FINITE) the call returns it"
        )


def _not_finite(tensor: torch.Tensor) -> list[int] | None:
    """Where the first inf or NaN is; None without one."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return None
    bad = ~torch.isfinite(tensor)
    return bad.nonzero()[0].tolist() if bad.any() else None
