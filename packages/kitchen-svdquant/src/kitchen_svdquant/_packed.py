"""Plans of the Hopper GEMM whose operands stay packed, for some rows of x, and the memory where pieces of K meet."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from . import _quantize
from ._extension import EXTENSION


class Plan(NamedTuple):
    """A tile, pieces of K, and where the sums of pieces meet: how many sums, and counts of the pieces that have arrived."""

    variant: int
    pieces: int
    sums: int
    counts: int


@lru_cache(maxsize=8192)
def plan_of(
    M: int, N: int, K: int, device: int, forced: tuple[int, int] | None = None, part_of: int | None = None
) -> Plan:
    """The plan that is chosen, or of the given variant and pieces. A part's is the whole's: sums have the whole's order."""
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    variant, pieces = EXTENSION.module.svdquant_packed_sm90_plan(M, part_of or N, K, sm_count, forced)
    return Plan(variant, pieces, *EXTENSION.module.svdquant_packed_sm90_workspace(M, N, variant, pieces))


class Workspace(NamedTuple):
    """A plan and its memory: the sums, then the counts. ``cleared``: the kernel in front sets the counts to zero."""

    plan: Plan
    memory: torch.Tensor | None
    cleared: bool

    @classmethod
    def empty(cls, plan: Plan, device: torch.device, cleared: bool) -> Workspace:
        size = plan.sums + plan.counts
        return cls(plan, torch.empty(size, dtype=torch.float32, device=device) if size else None, cleared)

    def counts(self) -> tuple[int, int]:
        """ClearedArguments of csrc/bindings.cpp."""
        return _quantize.NONE_CLEARED if self.memory is None else (self._counts_at(), self.plan.counts)

    def arguments(self) -> tuple[int, int, int, int, bool]:
        """PackedArguments of csrc/bindings.cpp, but for the last."""
        sums, counts = (0, 0) if self.memory is None else (self.memory.data_ptr(), self._counts_at())
        return self.plan.variant, self.plan.pieces, sums, counts, self.cleared

    def _counts_at(self) -> int:
        return self.memory.data_ptr() + 4 * self.plan.sums
