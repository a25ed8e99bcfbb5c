"""Which kernel computes an op: records, selection, explanation, forcing.

An op has many kernels. Providers (plug-ins of group ``kitchen.kernels``) register records; the eager reference of
each op is itself a record, with the lowest priority. ``select`` takes the first record, by priority, whose
``supports`` has no objection; ``explain`` tells every record's answer in words.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import plugins as plugin_registry
from ._environment import is_on
from ._overrides import override
from .abi import KITCHEN_ABI
from .devices import DeviceFacts, device_facts, simulating
from .errors import UnsupportedError
from .known_formats import KERNEL_PACKAGES, install_hint
from .typical import typical

log = logging.getLogger("kitchen")

EAGER = "core/eager"
_CACHE_LIMIT = 8192  # problems remembered before the table is dropped and filled anew


class Problem(NamedTuple):
    """What a caller asks of an op, as far as the choice of a kernel may depend on it.

    ``M`` rows of x, ``N`` out features, ``K`` in features; ``group`` the quantization group and ``rotation`` the
    ConvRot group (0 = none); ``rank`` of the low-rank branch; ``bits`` per weight; ``options`` a sorted tuple of words
    such as "bias", "residual", "input_act=swiglu". ``part`` (first, rows): the N rows are those from ``first`` on of a
    weight of so many rows, in the order of whose sums they are to be added.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    out_dtype: torch.dtype
    M: int
    N: int
    K: int
    group: int = 0
    rotation: int = 0
    rank: int = 0
    bits: int = 8
    options: tuple[str, ...] = ()
    part: tuple[int, int] | None = None

    def __str__(self) -> str:
        words = [f"M={self.M} N={self.N} K={self.K}", f"{_short(self.dtype)} -> {_short(self.out_dtype)}"]
        words += [f"{name}={getattr(self, name)}" for name in ("group", "rotation", "rank") if getattr(self, name)]
        words += [f"{self.bits} bits"] if self.bits != 8 else []
        words += [f"rows {self.part[0]}.. of {self.part[1]}"] if self.part is not None else []
        return ", ".join([*words, *self.options, f"on {self.device}"])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Kernel:
    """One way to compute an op.

    ``supports(problem, facts)`` returns None, or the reason in words why it cannot run; it must not touch the GPU.
    ``function`` takes the op's arguments, already checked. ``slow`` marks a path that a GPU user should hear about.
    ``calls`` names the ops that it calls in their turn, if it is a composition of them.
    """

    op: str
    name: str
    function: Callable
    supports: Callable[[Problem, DeviceFacts], str | None]
    priority: int
    provider: str = "core"
    slow: bool = False
    calls: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """provider/name, as `use` takes it."""
        return f"{self.provider}/{self.name}"


@dataclass(frozen=True)
class Provider:
    """What an entry point of group ``kitchen.kernels`` resolves to.

    ``doctor()`` returns lines about the state of the provider's extension, for `kitchen doctor`.
    """

    name: str
    kernels: tuple[Kernel, ...] = ()
    doctor: Callable[[], list[str]] = field(default=list)
    abi: int = KITCHEN_ABI


@dataclass(frozen=True)
class Candidate:
    """One kernel's answer to one problem: ``reason`` is None where it could run."""

    kernel: Kernel
    reason: str | None


@dataclass(frozen=True)
class Explanation:
    """Every candidate for a problem, in the order in which they are asked, and the one that was chosen (or None).

    ``refused`` says why the op itself takes no such call; then no kernel was asked. ``slow_path``: what of the choice is
    slow, in words, empty where nothing is; ``missing`` then has packages that would have kernels for it, each with why not.
    """

    problem: Problem
    facts: DeviceFacts
    candidates: tuple[Candidate, ...]
    chosen: Kernel | None
    notes: tuple[str, ...] = ()
    refused: str | None = None
    slow_path: str = ""
    missing: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.problem.op}: {self.problem}", f"device: {self.facts}"]
        asked = [*(c.kernel.id for c in self.candidates), *(package for package, _ in self.missing)]
        width = max(map(len, asked), default=0)
        for candidate in self.candidates:
            mark = ">" if candidate.kernel is self.chosen else " "
            chosen = f"chosen ({self.slow_path})" if self.slow_path else "chosen"
            answer = candidate.reason or (chosen if candidate.kernel is self.chosen else "can run, lower priority")
            if candidate.kernel.calls and not candidate.reason:
                answer += f"; calls {', '.join(candidate.kernel.calls)}"
            lines.append(f"{mark} {candidate.kernel.id:{width}}  {answer}")
        lines += [f"  {package:{width}}  {reason}" for package, reason in self.missing]
        lines += [f"refused: {self.refused}"] if self.refused else []
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


_lock = threading.RLock()
_kernels: dict[str, tuple[Kernel, ...]] = {}  # replaced, never mutated: readers need no lock
_selected: dict[tuple, Kernel] = {}  # by Problem, and by the signature of a call (ops/_define.py)
_warned: set[tuple[str, str]] = set()  # (what, GPU), see _tell_if_slow
_providers_loaded = False
_forced: ContextVar[tuple[str, ...]] = ContextVar("kitchen_forced_kernels", default=())
_anew: ContextVar[bool] = ContextVar("kitchen_choose_anew", default=False)
_traced: ContextVar[list[tuple[str, str]] | None] = ContextVar("kitchen_trace", default=None)


def register(*kernels: Kernel) -> None:
    """Add records. A record of the same op and id replaces the earlier one."""
    with _lock:
        for kernel in kernels:
            others = tuple(k for k in _kernels.get(kernel.op, ()) if k.id != kernel.id)
            _kernels[kernel.op] = tuple(sorted((*others, kernel), key=lambda k: (-k.priority, k.id)))
        _selected.clear()


def unregister(*kernels: Kernel) -> None:
    """Take records back, for tests and benchmarks that register their own."""
    with _lock:
        for kernel in kernels:
            _kernels[kernel.op] = tuple(k for k in _kernels.get(kernel.op, ()) if k is not kernel)
        _selected.clear()


def load_providers() -> None:
    """Load the plug-ins of group ``kitchen.kernels`` once; a failing one is remembered and the others work."""
    global _providers_loaded
    if _providers_loaded:
        return
    with _lock:
        if not _providers_loaded:
            for plugin in plugin_registry.plugins("kitchen.kernels").values():
                provider = plugin.load()
                if provider is not None:
                    register(*provider.kernels)
            _providers_loaded = True


def kernels_of(op: str) -> tuple[Kernel, ...]:
    """The records of an op in the order in which they are asked. Raises UnsupportedError for an unknown op."""
    load_providers()
    if op not in _kernels:
        raise UnsupportedError(f"unknown op {op!r}; known: {', '.join(sorted(_kernels))}")
    return _kernels[op]


def remembered(key: tuple) -> Kernel | None:
    """The kernel chosen earlier for this key, if any; the key names the op first."""
    return _selected.get(key)


def remember(key: tuple, kernel: Kernel) -> None:
    """Keep a choice until a kernel is registered or unregistered, or the table is full."""
    if len(_selected) >= _CACHE_LIMIT:
        _selected.clear()
    _selected[key] = kernel


def overridden() -> bool:
    """Whether this context forces kernels, simulates devices or has a provider's own rules: choices are not remembered."""
    return bool(_forced.get()) or simulating() or _anew.get()


def select(problem: Problem) -> Kernel:
    """The kernel for a problem. Raises UnsupportedError, with every candidate's reason, when none can run."""
    if overridden():
        kernel = _choose(problem)
    else:
        kernel = remembered(problem)
        if kernel is None:
            kernel = _choose(problem)
            remember(problem, kernel)
    trace_list = _traced.get()
    if trace_list is not None:
        trace_list.append((problem.op, kernel.id))
    return kernel


def _choose(problem: Problem) -> Kernel:
    facts = device_facts(problem.device)
    for kernel in _candidates(problem.op):
        if _objection(kernel, problem, facts) is None:
            _tell_if_slow(kernel, problem, facts)
            return kernel
    forced = (*_forced.get(), *_forced_by_environment(problem.op))
    asked = f" ({' and '.join(forced)} was forced)" if forced else ""
    raise UnsupportedError(
        f"no kernel can run {problem.op}{asked}. Every candidate and its reason:\n{explain_problem(problem)}\n"
        "Install the package of a listed kernel, change the call as a reason says, or drop the forcing"
    )


def _objection(kernel: Kernel, problem: Problem, facts: DeviceFacts) -> str | None:
    """The kernel's reason against a problem; an exception in its ``supports`` is one, and takes no other kernel with it."""
    try:
        return kernel.supports(problem, facts)
    except Exception as error:
        return f"its supports() failed: {type(error).__name__}: {error}"


def _candidates(op: str) -> tuple[Kernel, ...]:
    """Records of an op, narrowed to the forced ones if any forced id serves this op.

    A composition comes first where a forced kernel serves an op that it calls: a kernel for the whole would pass that by.
    """
    records = kernels_of(op)
    for wanted in (_forced.get(), _forced_by_environment(op)):
        narrowed = tuple(k for k in records if k.id in wanted)
        if narrowed:
            return narrowed
    if not (_forced.get() or os.environ.get("KITCHEN_USE")):
        return records
    compositions = tuple(k for k in records if k.calls and _is_forced_within(k))
    return (*compositions, *(k for k in records if k not in compositions)) if compositions else records


def _is_forced_within(composition: Kernel) -> bool:
    """Whether a forced kernel serves an op that the composition calls, or that such an op's composition calls."""
    for op in composition.calls:
        wanted = (*_forced.get(), *_forced_by_environment(op))
        if any(k.id in wanted or (k.calls and _is_forced_within(k)) for k in kernels_of(op)):
            return True
    return False


def _forced_by_environment(op: str) -> tuple[str, ...]:
    """KITCHEN_USE="op=provider/name,provider/name": the ids that apply to this op."""
    words = [word.strip() for word in os.environ.get("KITCHEN_USE", "").split(",") if word.strip()]
    pairs = [word.rpartition("=") for word in words]
    known = {k.id for records in _kernels.values() for k in records}
    for target, _, kernel_id in pairs:
        if kernel_id not in known or (target and target not in _kernels):
            raise UnsupportedError(
                f"KITCHEN_USE names {target + '=' if target else ''}{kernel_id}, which is not known; it takes "
                f"kernel or op=kernel, comma separated; kernels: {', '.join(sorted(known))}"
            )
        if target and kernel_id not in {k.id for k in _kernels[target]}:
            raise UnsupportedError(
                f"KITCHEN_USE asks {target} to run {kernel_id}, which does not serve it; kernels of {target}: "
                f"{', '.join(k.id for k in _kernels[target])}"
            )
    return tuple(kernel_id for target, _, kernel_id in pairs if target in ("", op))


def _tell_if_slow(kernel: Kernel, problem: Problem, facts: DeviceFacts) -> None:
    """Say once that a slow path runs, and why: of the reference once per op and GPU; of a provider's slow kernels once per
    GPU, since they stand for one lack that the first message names. KITCHEN_STRICT=1 makes it an error.
    """
    strict = is_on("KITCHEN_STRICT")  # whatever the path: a word that is refused is refused at the first use
    if not kernel.slow or facts.kind == "cpu":
        return
    if strict:
        raise UnsupportedError(
            f"KITCHEN_STRICT=1 and {problem.op} would take the slow path {kernel.id}:\n{explain_problem(problem)}"
        )
    one_op = kernel.provider == "core"
    key = (problem.op if one_op else kernel.provider, facts.name)
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    told = "an op" if one_op else f"ops of {kernel.provider} on this GPU"
    log.warning("kitchen: a slow path is taken, said once for %s:\n%s", told, explain_problem(problem))


def explain_problem(problem: Problem) -> Explanation:
    """Every candidate's answer to a problem, and the choice. Never raises for want of a kernel."""
    is_on("KITCHEN_STRICT")
    facts = device_facts(problem.device)
    candidates = tuple(Candidate(k, _objection(k, problem, facts)) for k in _candidates(problem.op))
    chosen = next((c.kernel for c in candidates if c.reason is None), None)
    failed = tuple(
        f"plug-in {p} is unusable: {p.why_not()}"
        for group in ("kitchen.kernels", "kitchen.formats")
        for p in plugin_registry.plugins(group).values()
        if p.error is not None
    )
    slow, missing = _slow_path(problem, facts, chosen)
    return Explanation(problem, facts, candidates, chosen, failed, None, slow, tuple(missing.items()))


def _slow_path(problem: Problem, facts: DeviceFacts, chosen: Kernel | None) -> tuple[str, dict[str, str]]:
    """What of a choice is slow, in words, and the packages with kernels for it that are not there, each with the reason."""
    if chosen is None or facts.kind == "cpu":
        return "", {}
    called = {op: explain_problem(_within(problem, op)) for op in chosen.calls}
    slow = [op for op, found in called.items() if found.slow_path]
    if not (chosen.slow or slow):
        return "", {}
    missing = _not_installed(problem.op, facts)
    for op in slow:
        missing |= dict(called[op].missing)
    return "slow path" if chosen.slow else f"slow path in {', '.join(slow)}", missing


def _within(problem: Problem, op: str) -> Problem:
    """A call of ``op`` as a composition for ``problem`` makes it, by sizes, dtype and options; the rest is as usual."""
    fields = typical(op, problem.M, problem.dtype if problem.dtype.is_floating_point else problem.out_dtype)
    sizes = ("N", "K", "group", "rotation", "rank", "bits")
    fields |= {size: getattr(problem, size) for size in sizes if fields.get(size)}
    usual = {word.partition("=")[0] for word in fields.get("options", ())}
    fields["options"] = tuple(word for word in problem.options if word.partition("=")[0] in usual)
    return Problem(op=op, device=problem.device, **fields)


def _not_installed(op: str, facts: DeviceFacts) -> dict[str, str]:
    """Packages that are known to have kernels for an op and are not there, each with what it would do on this GPU."""
    there = plugin_registry.plugins("kitchen.kernels")
    found = {}
    for package, archs, ops in KERNEL_PACKAGES:
        name = package.removeprefix("kitchen-")
        if name in there or op not in ops or facts.sm >= archs.stop:
            continue
        left_out = plugin_registry.is_excluded("kitchen.kernels", name)
        reason = "left out by KITCHEN_PLUGINS" if left_out else "not installed"
        if facts.sm < archs.start:
            found[package] = f"{reason}: its kernels for this need sm_{archs.start}"
        else:
            found[package] = f"{reason}: it has kernels for this{'' if left_out else '; ' + install_hint(package)}"
    return found


@contextlib.contextmanager
def use(*kernel_ids: str) -> Iterator[None]:
    """Within the block and this thread, ops that a named kernel serves are run by it and by nothing else.

    A forced kernel that cannot run raises UnsupportedError with its reason; it never falls through. An op that none of
    them serves is composed, where one of them serves an op that it calls, and chosen as usual elsewhere. An id that no
    op knows raises at once.
    """
    load_providers()
    known = {k.id for records in _kernels.values() for k in records}
    for kernel_id in kernel_ids:
        if kernel_id not in known:
            raise UnsupportedError(f"unknown kernel {kernel_id!r}; known: {', '.join(sorted(known))}")
    with override(_forced, kernel_ids):
        yield


@contextlib.contextmanager
def choose_anew(variable: ContextVar, value: object) -> Iterator[None]:
    """For providers: within the block and this thread, a variable that their ``supports`` reads has this value.

    Kernels are chosen anew at every call there, and no choice is remembered beyond the block.
    """
    with override(variable, value), override(_anew, True):
        yield


@contextlib.contextmanager
def trace() -> Iterator[list[tuple[str, str]]]:
    """Within the block and this thread, record (op, kernel id) of every call, in order."""
    calls: list[tuple[str, str]] = []
    with override(_traced, calls):
        yield calls
