"""Launches the whole int8_linear on Hopper: quantizer and GEMM in one call, the second starting while the first runs."""

from __future__ import annotations

from functools import lru_cache

import torch

from kitchen_core.launch import ACT_CODES, DTYPE_CODES, current_stream, pointer

from ._extension import EXTENSION
from ._gemm import DecodePlan, add_other_residual, packed_rows


def decode_linear(*arguments) -> torch.Tensor:
    """int8_linear for few rows of x: the GEMM of int8/decode_sm90."""
    return _linear(True, *arguments)


def hopper_linear(*arguments) -> torch.Tensor:
    """int8_linear by the GEMM of int8/sm90."""
    return _linear(False, *arguments)


def _linear(
    few_rows: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes and scales of x live in a workspace of this call."""
    out_dtype = out_dtype or x.dtype
    if residual is not None and residual.dtype != out_dtype:
        y = _linear(
            few_rows, x, weight, weight_scale, bias, torch.float32, convrot_groupsize, input_act, input_act_weight,
            input_act_eps,
        )  # fmt: skip
        return add_other_residual(y, residual, residual_scale, out_dtype)
    N, K = weight.shape
    out = x.new_empty((*x.shape[:-1], N), dtype=out_dtype)
    if out.numel() == 0:
        return out
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    M, index = rows.shape[0], x.device.index
    weight = packed_rows(weight)
    weight_scale = weight_scale.contiguous()
    workspace = x.new_empty((K + 4) * M, dtype=torch.uint8)  # codes, then scales: K is a multiple of 16
    act_weight = act_weight_type = bias_type = residual_scale_type = 0
    if input_act == "rms_norm":
        input_act_weight = input_act_weight.contiguous()
        act_weight, act_weight_type = input_act_weight.data_ptr(), DTYPE_CODES[input_act_weight.dtype]
    if bias is not None:
        bias = bias.contiguous()
        bias_type = DTYPE_CODES[bias.dtype]
    if residual is not None:
        residual = residual.contiguous()
        if residual_scale is not None:
            residual_scale = residual_scale.reshape(-1).contiguous()
            residual_scale_type = DTYPE_CODES[residual_scale.dtype]
    EXTENSION.module.int8_linear_sm90(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[x.dtype], convrot_groupsize, ACT_CODES[input_act], act_weight,
        act_weight_type, input_act_eps, M, N, K, weight.data_ptr(), weight_scale.data_ptr(),
        0 if weight_scale.numel() == 1 else 1, pointer(bias), bias_type, pointer(residual), pointer(residual_scale),
        residual_scale_type, 0 if residual_scale is None or residual_scale.numel() == 1 else 1, out.data_ptr(),
        DTYPE_CODES[out_dtype], workspace.data_ptr(), decode_plan(M, N, K, index) if few_rows else None, index,
        current_stream(index),
    )  # fmt: skip
    return out


@lru_cache(maxsize=8192)
def decode_plan(M: int, N: int, K: int, device: int) -> DecodePlan:
    """The plan for a problem on a device."""
    return EXTENSION.module.int8_decode_sm90_plan(M, N, K, device)[0]
