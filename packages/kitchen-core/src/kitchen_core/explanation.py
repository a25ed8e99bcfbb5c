"""``explain``: which kernel would run a call, and why the others would not; ``accepts``: whether an op takes an argument."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import ops
from .arithmetic import INPUT_ACTS
from .devices import device_facts
from .errors import UnsupportedError
from .ops._check import FLOAT_DTYPES, names
from .ops._define import check_sizes, problem_builders
from .ops.w4a8 import W4A8_LEVELS
from .registry import Explanation, Problem, explain_problem


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Every candidate kernel for a call of ``op`` with its reason in words, and the choice; nothing is run.

    ``explain("int8_linear", x, weight, weight_scale)`` takes the op's own arguments;
    ``explain("int8_linear", M=1, N=3072, K=3072, dtype=torch.bfloat16, device="cuda")`` takes a problem's fields,
    for a device that need not be there when one is simulated. Print the result, or read ``candidates`` and ``chosen``;
    where the op itself refuses such sizes or knows no such option, ``refused`` says why and nothing is chosen.
    Raises UnsupportedError for an unknown op or field, or arguments that the op itself would refuse.
    """
    builders = problem_builders()
    if op not in builders:
        raise UnsupportedError(f"unknown op {op!r}; known: {', '.join(sorted(builders))}")
    if args:
        return explain_problem(builders[op](*args, **kwargs))
    fields = {"M": 1, "N": 1, "K": 1, "dtype": torch.bfloat16, "device": "cpu", **kwargs}
    fields.setdefault("out_dtype", fields["dtype"])
    unknown = set(fields) - set(Problem._fields)
    if unknown:
        raise UnsupportedError(f"unknown fields {sorted(unknown)}; a problem has {', '.join(Problem._fields[1:])}")
    problem = Problem(op=op, **{**fields, "device": torch.device(fields["device"])})
    try:
        check_sizes(problem)
        _check_options(problem)
    except UnsupportedError as error:
        return Explanation(problem, device_facts(problem.device), (), None, refused=str(error))
    return explain_problem(problem)


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
        "weight_dtype": [f"weight_dtype={dtype}" for dtype in dtypes],
        "s_rel": ["fp32_scales"],
        "scale_dtype": ["fp32_scales"],
        "weight_scale": ["loose_weight"],
        "x_scale": ["loose_codes"],
    }
    return words + [word for name in taken for word in by_argument.get(name, ())]


def _check_options(problem: Problem) -> None:
    known = option_words(problem.op)
    unknown = [word for word in problem.options if word not in known]
    if unknown:
        raise UnsupportedError(
            f"{problem.op} knows no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
        )


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
