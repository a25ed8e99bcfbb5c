"""Launches the rowwise quantizer kernel on tensors. Arguments have been checked by the op; here only what the kernel needs."""

from __future__ import annotations

import torch

from kitchen_core.launch import launch_quantize_rowwise

from ._extension import EXTENSION

MAX_GROUP = 4096  # larger rotation groups stay with the eager path
MAX_COLUMNS = 2**30 - 1

Plan = tuple[int, int, int, int, bool]  # tiles, warps, cluster, ctas_per_sm, special: QuantizePlan of csrc


def quantize_rowwise(
    x: torch.Tensor,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    seed: int = 0,
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``launch_quantize_rowwise`` by this package's kernel. ``plan`` forces a launch configuration (measurements only)."""
    return launch_quantize_rowwise(
        EXTENSION.module, x, convrot_groupsize, input_act, input_act_weight, input_act_eps, seed, plan
    )
