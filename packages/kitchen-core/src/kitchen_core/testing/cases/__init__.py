"""Random calls of every op with an answer in float64 that shares no code with the references, and how far a result may be off.

``make_case(op, draw)`` draws one: ``draw(options)`` picks one of a sequence, as hypothesis' ``sampled_from`` or
``random.Random.choice`` do. Answers come from the op's stated meaning with dense float64 matrices (rotation by its Kronecker
matrix, codes unpacked by integer arithmetic); each bound stands beside the operation that it belongs to.
"""

from __future__ import annotations

import torch

from . import awq, int8, svdquant, w4a8
from .maker import Case, Draw, Maker

BUILDERS = {**int8.BUILDERS, **w4a8.BUILDERS, **svdquant.BUILDERS, **awq.BUILDERS}

__all__ = ["BUILDERS", "Case", "Draw", "make_case", "optional_arguments", "options_given"]


def make_case(op: str, draw: Draw, must_have: str | None = None) -> Case:
    """A case of one op; ``must_have`` names an optional argument that has to be given."""
    maker = Maker(draw, must_have)
    case = BUILDERS[op](op, maker)
    case.about = maker.about
    return case


def optional_arguments(op: str) -> list[str]:
    """The arguments of an op that have a default, by its schema."""
    schema = getattr(torch.ops.kitchen, op).default._schema
    return [argument.name for argument in schema.arguments if argument.has_default_value()]


def options_given(case: Case) -> set[str]:
    """The optional arguments that differ from their defaults in this call."""
    schema = getattr(torch.ops.kitchen, case.op).default._schema
    given = set()
    for argument, value in zip(schema.arguments, case.arguments, strict=False):
        if not argument.has_default_value():
            continue
        default = argument.default_value
        if isinstance(value, torch.dtype):  # a schema holds dtypes as numbers
            default = torch.bfloat16 if default == 15 else None
        if isinstance(value, torch.Tensor) or value != default:
            given.add(argument.name)
    return given
