"""``explain``: which kernel would run a call, and why the others would not; ``accepts``: whether an op takes an argument."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from . import ops
from .arithmetic import INPUT_ACTS
from .devices import device_facts
from .errors import UnsupportedError
from .ops._check import FLOAT_DTYPES, check_part, names, part_numbers
from .ops._define import check_sizes, problem_builders
from .ops.w4a8 import W4A8_LEVELS
from .registry import Explanation, Problem, explain_problem
from .typical import typical, usual_rotation

MAX_SIZE = 2**63 - 1  # of a tensor's dim, and of its bytes


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Every candidate kernel for a call of ``op`` with its reason in words, and the choice; nothing is run.

    ``explain("int8_linear", x, weight, weight_scale)`` takes the op's own arguments;
    ``explain("int8_linear", M=1, N=3072, K=3072, dtype=torch.bfloat16, device="cuda")`` takes a problem's fields,
    for a device that need not be there when one is simulated; a ``rotation`` that is not given is the one that a layer of
    such a K gets, and a note says so. Print the result, or read ``candidates`` and ``chosen``;
    where the op itself refuses such sizes or knows no such option, ``refused`` says why and nothing is chosen.
    Raises UnsupportedError for an unknown op or field, or arguments that the op itself would refuse.
    """
    builders = problem_builders()
    if not isinstance(op, str) or op not in builders:
        raise UnsupportedError(f"unknown op {op!r}; known: {', '.join(sorted(builders))}")
    if args:
        return explain_problem(_problem_of_call(op, args, kwargs))
    fields = {"M": 1, "N": 1, "K": 1, "dtype": torch.bfloat16, "device": "cpu", **kwargs}
    fields.setdefault("out_dtype", fields["dtype"])
    assumed = 0 if "rotation" in kwargs else usual_rotation(op, fields["K"])
    fields.setdefault("rotation", assumed)
    unknown = set(fields) - set(Problem._fields)
    if unknown:
        raise UnsupportedError(f"unknown fields {sorted(unknown)}; a problem has {', '.join(Problem._fields[1:])}")
    part, words = fields.pop("part", None), fields.pop("options", ())
    if isinstance(words, str) or not all(isinstance(word, str) for word in _listed(words)):
        raise UnsupportedError(f"options must be a tuple of words, such as ('bias', 'residual'), got {words!r}")
    notes = (f"rotation={assumed} is assumed, as it was not given; rotation=0 asks for no rotation",) if assumed else ()
    problem = Problem(op=op, **{**fields, "device": _device(fields["device"]), "options": tuple(words)})
    try:
        check_sizes(problem)
        _check_dtypes(problem)
        _check_bytes(problem)
        _check_options(problem)
        problem = problem._replace(part=_checked_part(problem, part))
    except UnsupportedError as error:
        return Explanation(problem, device_facts(problem.device), (), None, notes, refused=str(error))
    found = explain_problem(problem)
    return replace(found, notes=(*notes, *found.notes))


def _problem_of_call(op: str, args: tuple, kwargs: dict[str, Any]) -> Problem:
    taken = ", ".join(argument.name for argument in getattr(torch.ops.kitchen, op).default._schema.arguments)
    unknown = [name for name in kwargs if not accepts(op, name)]
    if unknown:
        raise UnsupportedError(f"{op} takes no {', '.join(unknown)}; it takes {taken}")
    try:
        return problem_builders()[op](*args, **kwargs)
    except (TypeError, AttributeError) as error:
        raise UnsupportedError(f"{op} takes {taken}; {error}") from error


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (tuple, list, set, frozenset)) else (None,)


def _device(given: Any) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device must be one of torch, such as cpu or cuda:0, got {given!r}") from error


def _checked_part(problem: Problem, part: Any) -> tuple[int, int] | None:
    """As the op itself checks part_first and part_of."""
    if part is None:
        return None
    taking = [op for op in sorted(problem_builders()) if accepts(op, "part_first", "part_of")]
    if problem.op not in taking:
        raise UnsupportedError(f"{problem.op} takes no part of a weight, got part={part!r}; {', '.join(taking)} do")
    return check_part(problem.N, *part_numbers(part))


def option_words(op: str) -> list[str]:
    """The words that ``options`` of a Problem of this op may hold, by the arguments that the op takes."""
    taken = {a.name: str(a.type) for a in getattr(torch.ops.kitchen, op).default._schema.arguments}
    given = {"Optional[Tensor]", "bool"}  # a word of their name, where they are given; these two have none
    words = [
        name for name, kind in taken.items() if kind in given and name not in ("input_act_weight", "residual_scale")
    ]
    dtypes = [names((dtype,)) for dtype in FLOAT_DTYPES]
    by_argument = {
        "input_act": [f"input_act={act}" for act in INPUT_ACTS if act != "none"],
        "levels": [f"levels={levels}" for levels in W4A8_LEVELS],
        "seed": ["stochastic"],
        "wscales": [f"scales={dtype}" for dtype in dtypes],
        "proj_up": [f"proj_up={dtype}" for dtype in dtypes],
        "weight_dtype": [f"weight_dtype={dtype}" for dtype in dtypes],
        "s_rel": ["fp32_scales"],
        "scale_dtype": ["fp32_scales"],
        "weight_scale": ["loose_weight"],
        "x_scale": ["loose_codes"],
    }
    return words + [word for name in taken for word in by_argument.get(name, ())]


def _check_dtypes(problem: Problem) -> None:
    """Of the float operands, where the op has such, and of the output."""
    usual = typical(problem.op, problem.M)
    for name in ("dtype", "out_dtype"):
        found = getattr(problem, name)
        if not isinstance(found, torch.dtype):
            raise UnsupportedError(f"{name} must be a dtype of torch, such as torch.bfloat16, got {found!r}")
        if usual[name].is_floating_point and found not in FLOAT_DTYPES:
            raise UnsupportedError(f"{name} of {problem.op} must be {names(FLOAT_DTYPES)}, got {names((found,))}")


def _check_bytes(problem: Problem) -> None:
    """Raises UnsupportedError for sizes that no tensor can have."""
    m, n, k = problem.M, problem.N, problem.K
    for name in ("M", "N", "K", "group", "rotation", "rank", "bits"):
        if getattr(problem, name) > MAX_SIZE:
            raise UnsupportedError(f"{name} is more than 2^63 - 1, the largest size that a tensor can have")
    for tensor, nbytes in (
        ("x [M, K]", m * k * problem.dtype.itemsize),
        ("a weight [N, K]", n * k * problem.bits // 8),
        ("an output [M, N]", m * n * problem.out_dtype.itemsize),
        ("a low-rank branch [max(N, K), rank]", max(n, k) * problem.rank),
    ):
        if nbytes > MAX_SIZE:
            raise UnsupportedError(
                f"{tensor} with M={m}, N={n}, K={k} would take {nbytes} bytes, and a tensor can have at most 2^63 - 1"
            )


def _check_options(problem: Problem) -> None:
    known = option_words(problem.op)
    unknown = [word for word in problem.options if word not in known]
    if unknown:
        raise UnsupportedError(
            f"{problem.op} knows no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
        )
    for one, other in itertools.combinations(sorted({*problem.options}), 2):
        if one.partition("=")[0] == other.partition("=")[0]:
            raise UnsupportedError(f"the options say {one} and {other}, and a call has one of them; leave one out")


def accepts(op: str, *arguments: str) -> bool:
    """Whether this version has an op of this name that takes all these arguments, by name.

    The op is ``kitchen_core.<op>`` (or ``torch.ops.kitchen.<op>``, which takes the same arguments but for a caller's word
    such as ``fp16_fallback``). For callers that are updated apart from kitchen: ask before passing a newer argument. Which
    values and devices are taken is what ``explain`` answers.
    """
    if op not in problem_builders():
        return False
    schema = getattr(torch.ops.kitchen, op).default._schema
    taken = {argument.name for argument in schema.arguments}
    public = getattr(ops, op, None)
    if public is not None:
        taken |= set(inspect.signature(public).parameters)
    return set(arguments) <= taken
