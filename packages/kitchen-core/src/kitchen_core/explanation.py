"""``explain``: which kernel would run a call, and why the others would not; ``accepts``: whether an op takes an argument."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import ops
from .errors import UnsupportedError
from .ops._define import problem_builders
from .registry import Explanation, Problem, explain_problem


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Every candidate kernel for a call of ``op`` with its reason in words, and the choice; nothing is run.

    ``explain("int8_linear", x, weight, weight_scale)`` takes the op's own arguments;
    ``explain("int8_linear", M=1, N=3072, K=3072, dtype=torch.bfloat16, device="cuda")`` takes a problem's fields,
    for a device that need not be there when one is simulated. Print the result, or read ``candidates`` and ``chosen``.
    Raises UnsupportedError for an unknown op, or arguments that the op itself would refuse.
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
    return explain_problem(Problem(op=op, **{**fields, "device": torch.device(fields["device"])}))


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
