"""Launches the rowwise quantizer kernel on tensors. Arguments have been checked by the op; here only what the kernel needs."""

from __future__ import annotations

import torch

from kitchen_core.launch import DTYPE_CODES, current_stream

from ._extension import EXTENSION

ACT_CODES = {"none": 0, "gelu_tanh": 1, "swiglu": 2, "rms_norm": 3, "situ": 4}
PAIR_ACTS = ("swiglu", "situ")
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
    """x [..., K] (or [..., 2K]) on a CUDA device -> int8 codes [..., K] and fp32 scales [..., 1].

    Any row stride is read in place; a last dim that is not contiguous is copied first. ``plan`` forces a launch
    configuration (measurements only).
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    features = rows.shape[1] // 2 if input_act in PAIR_ACTS else rows.shape[1]
    codes = torch.empty((*x.shape[:-1], features), dtype=torch.int8, device=x.device)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    weight = weight_dtype = 0
    if input_act == "rms_norm":
        input_act_weight = input_act_weight.contiguous()
        weight, weight_dtype = input_act_weight.data_ptr(), DTYPE_CODES[input_act_weight.dtype]
    EXTENSION.module.quantize_int8_rowwise(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[x.dtype], codes.data_ptr(), scales.data_ptr(), rows.shape[0], features,
        convrot_groupsize, ACT_CODES[input_act], weight, weight_dtype, input_act_eps, seed, x.device.index,
        current_stream(x.device.index), plan,
    )  # fmt: skip
    return codes, scales
