"""Launches the Hopper GEMM whose operands stay packed, for some rows of x. Arguments have been checked by the ops."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from kitchen_core.arithmetic import apply_input_act

from . import _hopper, _quantize, _stream
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


def takes(wscales: torch.Tensor, proj_up: torch.Tensor) -> bool:
    """Whether the kernel reads these: scales of 16 bits, a bfloat16 proj_up of even rank."""
    rank = proj_up.shape[1]
    return wscales.dtype != torch.float32 and (rank == 0 or (proj_up.dtype == torch.bfloat16 and rank % 2 == 0))


def scaled_mm(
    codes, weight, ascales, wscales, lora_act, proj_up, bias=None, act_unsigned=False, out_dtype=torch.bfloat16,
    residual=None, residual_scale=None, part_first=None, part_of=None, forced=None,
):  # fmt: skip
    """scaled_mm_svdquant_w4a4. What ``takes`` refuses goes to the kernels for fewer and for more rows."""
    arguments = (
        codes, weight, ascales, wscales, lora_act, proj_up, bias, act_unsigned, out_dtype, residual, residual_scale,
        part_first, part_of,
    )  # fmt: skip
    (m, k), n = codes.shape, weight.shape[0]
    if not takes(wscales, proj_up):
        return (_stream.few_rows if m <= _stream.FEW_ROWS else _hopper.scaled_mm)(*arguments)
    plan = plan_of(m, n, 2 * k, codes.device.index, forced, part_of)
    return _stream.scaled_mm(_stream.PACKED, *arguments, packed=Workspace.empty(plan, codes.device, False))


def linear(
    x, weight, wscales, smooth, proj_down, proj_up, bias=None, act_unsigned=False, out_dtype=None,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    part_first=None, part_of=None,
):  # fmt: skip
    """svdquant_linear. What ``takes`` refuses goes to the kernels for fewer and for more rows."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    m = x.numel() // k
    if not takes(wscales, proj_up):
        return (_stream if m <= _stream.FEW_ROWS else _hopper).linear(
            x, weight, wscales, smooth, proj_down, proj_up, bias, act_unsigned, out_dtype, input_act, input_act_weight,
            input_act_eps, residual, residual_scale, part_first, part_of,
        )  # fmt: skip
    if n == 0 or m == 0:
        return x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    raw = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    workspace = Workspace.empty(plan_of(m, n, k, x.device.index, None, part_of), x.device, True)
    (codes, ascales, lora_act), together = _stream.quantize(
        raw.reshape(-1, k), smooth, proj_down, act_unsigned, workspace.counts()
    )
    flat = None if residual is None else residual.reshape(-1, n)
    y = _stream.scaled_mm(
        _stream.PACKED, codes, weight, ascales, wscales, lora_act, proj_up, bias, act_unsigned, out_dtype or x.dtype,
        flat, residual_scale, part_first, part_of, programmatic_launch=together, packed=workspace,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], n)
