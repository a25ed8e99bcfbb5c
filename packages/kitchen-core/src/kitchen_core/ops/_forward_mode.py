"""Derivatives of forward mode: torch.autograd.forward_ad, torch.func.jvp and what is made of it; and what torch.func hides.

No grad mode switches them off. A call asks whether any are at work, ``forward_ad._current_level >= 0``, and comes here then.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from ._check import no_gradient

_thread = threading.local()


@contextlib.contextmanager
def constants() -> Iterator[None]:
    """What ops are given in the block is constant, or has its derivative from elsewhere: they are not asked for one."""
    before = in_constants()
    _thread.constants = True
    try:
        with torch.no_grad():
            yield
    finally:
        _thread.constants = before


def in_constants() -> bool:
    """Whether this is in a block of constants()."""
    return getattr(_thread, "constants", False)


def as_constants(function: Callable) -> Callable:
    """``function`` in a block of constants(), where forward mode is at work when it runs."""

    def call(*args: Any) -> Any:
        if forward_ad._current_level < 0:
            return function(*args)
        with constants():
            return function(*args)

    return call


def call(op: Callable, *args: Any) -> Any:
    """Call an op that has no derivative. In forward mode too, where none of its tensors may have a tangent.

    The op cannot tell: under torch.func it gets all tensors without their tangents, and without a sign of a gradient that
    is asked for, which is refused here.
    """
    if hides_gradients(*args):
        raise no_gradient(
            op._schema.name.partition("::")[2], "use torch.no_grad(), or call it outside of torch.func.grad"
        )
    if forward_ad._current_level < 0 or any(map(_may_have_tangent, args)):
        return op(*args)
    with constants():
        return op(*args)


def hides_gradients(*args: Any) -> bool:
    """Whether a gradient of any of the arguments is asked for, in a transform of torch.func: an op makes one of zero there."""
    if torch._C._functorch.maybe_current_level() is None or torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() and any(map(_wants_gradient, args))


def _wants_gradient(value: Any) -> bool:
    while isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        if value.requires_grad:
            return True
        value = torch._C._functorch.get_unwrapped(value)  # of an outer transform
    return isinstance(value, torch.Tensor) and value.requires_grad


def aside(function: Callable, *args: Any) -> Any:
    """What ``function`` makes of tensors, outside of what torch.func transforms where none of them has a tangent there.

    Inside, whatever is made of a constant looks as if it had one, and has no address.
    """
    if forward_ad._current_level < 0 or any(map(_may_have_tangent, args)):
        return function(*args)
    with torch._C._DisableFuncTorch(), torch.no_grad():
        return function(*args)


def _may_have_tangent(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(value) or has_tangent(value)


def has_tangent(value: torch.Tensor) -> bool:
    """Whether a tensor has a tangent, of the innermost transform where several of torch.func are at work."""
    if _autograd_left_out() or torch._C._functorch.is_batchedtensor(value):  # torch cannot look then
        return False
    return forward_ad.unpack_dual(value).tangent is not None


def hides_tangents() -> bool:
    """Whether torch.func.jvp is at work on what an op is given: tensors without their tangents, whether they have any or not.

    It is not in the forward of an autograd.Function, nor under an inference_mode inside the transform, which switches
    forward mode off. One around the transform does not, but inside of an op all that shows of it is that autograd is left out.
    """
    transforms = sys.modules.get("torch._functorch.eager_transforms")
    if not getattr(transforms, "JVP_NESTING", 0):
        return False
    return forward_ad._is_fwd_grad_enabled() or (_autograd_left_out() and not torch.is_inference_mode_enabled())


def _autograd_left_out() -> bool:
    return torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.AutogradOther)
