"""Launches the rowwise quantizer kernel on tensors. Arguments have been checked by the op; here only what the kernel needs."""

from __future__ import annotations

import torch

from kitchen_core.launch import launch_quantize_rowwise

from ._extension import EXTENSION

MAX_GROUP = 4096  # larger rotation groups stay with the eager path
MAX_COLUMNS = 2**30 - 1
MAX_ROWS = 2**31 - 1


def quantize_rowwise(
    x: torch.Tensor,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``launch_quantize_rowwise`` by this package's kernel."""
    return launch_quantize_rowwise(
        EXTENSION.module, x, convrot_groupsize, input_act, input_act_weight, input_act_eps, seed
    )


def quantize_int8_rowwise(x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The op of this name."""
    return quantize_rowwise(x, seed=seed)


def quantize_int8_convrot_weight(
    weight: torch.Tensor, convrot_groupsize: int = 256, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op of this name."""
    return quantize_rowwise(weight, convrot_groupsize, seed=seed)
