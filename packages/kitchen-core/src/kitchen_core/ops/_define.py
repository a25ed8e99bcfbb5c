"""How an op is declared: schema, checks, fake, eager reference, dispatch. One library, ``kitchen``, for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import forward_ad

from .. import _overrides, finite
from ..devices import DeviceFacts
from ..errors import UnsupportedError
from ..registry import Kernel, Problem, overridden, register, remember, remembered, select
from . import _forward_mode
from ._check import FLOAT_DTYPES, names, no_gradient

_library = torch.library.Library("kitchen", "DEF")  # a second DEF of the namespace would raise: keep the only one

_problem_builders: dict[str, Callable[..., Problem]] = {}
_size_checks: dict[str, Callable[[Problem], None]] = {}

EAGER_PRIORITY = 0
COMPOSED_PRIORITY = 10


# Under autocast the matmuls of a reference would be cast too: these run an op with autocast off, and only then cost anything.
_AUTOCAST_KEYS = (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA)


def _without_autocast(name: str, keys: torch._C.DispatchKeySet, *args, **kwargs):
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return getattr(torch.ops.kitchen, name).default(*args, **kwargs)


# Tensors whose elements are not in one strided storage. Refused by their dispatch key, as a signature does not tell them apart.
_FOREIGN_KEYS = ("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU")


def _refuse_layout(name: str, arguments: list[str], *args, **kwargs):
    for argument, value in (*zip(arguments, args, strict=False), *kwargs.items()):
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            kind = str(value.layout).removeprefix("torch.")
            raise UnsupportedError(
                f"{name}: {argument} must be a dense tensor, got layout {kind}; pass {argument}.to_dense()"
            )


def _refuse_gradients(name: str, args: tuple, kwargs: dict) -> None:
    """The ops are for inference: what autograd would see is the rounding inside, and its gradients would be wrong."""
    forward = forward_ad._current_level >= 0 and not _forward_mode.in_constants()  # it leaves requires_grad False
    hidden = forward and _forward_mode.hides_tangents()
    for value in (*args, *kwargs.values()):
        if not isinstance(value, torch.Tensor):
            continue
        if forward and value.is_floating_point() and (hidden or _forward_mode.has_tangent(value)):
            instead = (
                "call it outside of what torch.func.jvp, jacfwd or make_dual differentiates, or in the forward of a "
                "torch.autograd.Function (torch.no_grad() does not switch forward mode off)"
            )
        elif value.requires_grad and torch.is_grad_enabled():
            instead = "use torch.no_grad()"
        else:
            continue
        raise no_gradient(name, instead)


def _always(problem: Problem, facts: DeviceFacts) -> None:
    return None


def _on_cuda(problem: Problem, facts: DeviceFacts) -> str | None:
    return None if facts.kind == "cuda" else "composes GPU kernels; tensors are not on a CUDA device"


def define(
    schema: str,
    *,
    problem: Callable[..., Problem],
    fake: Callable,
    reference: Callable,
    sizes: Callable[[Problem], None] | None = None,
) -> None:
    """Declare ``torch.ops.kitchen.<name>``.

    ``problem(*args)`` checks the arguments (raising UnsupportedError) and returns the Problem; ``fake(*args)`` returns
    empty outputs of the right shape, dtype and device; ``reference(*args)`` is the meaning of the op in plain PyTorch.
    All three take the op's arguments. ``sizes(problem)`` refuses, as ``problem`` does, sizes that no call can have: for
    ``explain``, which may have no tensors. It is called once per op, when the module that holds it is imported.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    register(Kernel(name, "eager", reference, _always, EAGER_PRIORITY, slow=True))

    takes_out_dtype = "out_dtype" in schema
    check_arguments = problem
    declared = getattr(torch.ops.kitchen, name).default._schema.arguments
    arguments = [argument.name for argument in declared]
    required = [i for i, argument in enumerate(declared) if str(argument.type) == "Tensor"]

    def problem(*args, **kwargs):
        for i in required:  # torch takes None for any tensor
            if i < len(args) and args[i] is None:
                raise UnsupportedError(f"{name}: {arguments[i]} must be a tensor, got None")
        made = check_arguments(*args, **kwargs)
        if takes_out_dtype and made.out_dtype not in FLOAT_DTYPES:
            raise UnsupportedError(f"out_dtype must be {names(FLOAT_DTYPES)}, got {names((made.out_dtype,))}")
        return made

    _problem_builders[name] = problem
    if sizes is not None:
        _size_checks[name] = sizes

    def dispatch(*args, **kwargs):
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            _refuse_gradients(name, args, kwargs)
        if _overrides.depth or kwargs:
            asked = problem(*args, **kwargs)
            kernel = select(asked)
            result = kernel.function(*args, **kwargs)
            if finite.checking():
                finite.require_finite(result, (*args, *kwargs.values()), kernel, asked)
            return result
        signature = (name, *[(a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in args])
        kernel = remembered(signature)
        if kernel is None:  # checks and choice depend on nothing but the signature, so both are done once for it
            kernel = select(problem(*args))
            if not overridden():  # a context may outlive the block that forced a kernel in it
                remember(signature, kernel)
        return kernel.function(*args)

    def checked_fake(*args, **kwargs):
        problem(*args, **kwargs)
        return fake(*args, **kwargs)

    _library.impl(name, dispatch, "CompositeExplicitAutograd")
    for key in _FOREIGN_KEYS:
        _library.impl(name, partial(_refuse_layout, name, arguments), key)
    for key in _AUTOCAST_KEYS:
        _library.impl(name, partial(_without_autocast, name, torch._C.DispatchKeySet(key)), str(key).rpartition(".")[2])
    torch.library.register_fake(f"kitchen::{name}", checked_fake, lib=_library)


def define_around(schema: str, *, function: Callable, fake: Callable) -> None:
    """Declare an op that no kernel serves: ``function`` calls ops that kernels do, in a context that must hold in a graph.

    It has no record in the registry, so nothing chooses, forces or explains it; ``fake`` makes the checks too.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

    def call(*args, **kwargs):
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            _refuse_gradients(name, args, kwargs)
        return function(*args, **kwargs)

    _library.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kitchen::{name}", fake, lib=_library)


def compose(op: str, function: Callable, calls: tuple[str, ...]) -> None:
    """Register ``function``, which calls the ops ``calls``, as the way to run ``op`` on a GPU without its own kernel.

    Each inner op chooses its kernel, so one fast part is used even where the rest is eager.
    """
    register(Kernel(op, "composed", function, _on_cuda, COMPOSED_PRIORITY, calls=calls))


def check_sizes(problem: Problem) -> None:
    """Raises UnsupportedError for sizes that the op refuses whatever its tensors are."""
    for name in ("M", "N", "K", "group", "rotation", "rank", "bits"):
        size = getattr(problem, name)
        if not isinstance(size, int) or size < 0:
            raise UnsupportedError(f"{name} must be a whole number of 0 or more, got {size!r}")
    if problem.op in _size_checks:
        _size_checks[problem.op](problem)


def problem_builders() -> dict[str, Callable[..., Problem]]:
    """For each op, the function that checks its arguments and says what they ask for."""
    return _problem_builders
