"""Launches the SwiGLU GEMM on tensors, and the MLP around it. Arguments have been checked by the op."""

from __future__ import annotations

import torch

from kitchen_core.launch import DTYPE_CODES, current_stream

from . import _gemm
from ._extension import EXTENSION

Plan = tuple[int, int, int]  # variant, grid, raster_group: SwigluPlan of csrc
# Of the product of gate and up, by x's dtype. Two float16 numbers may have a product that float16 has not.
PRODUCT_DTYPES = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}


def swiglu_mlp(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
    down_convrot_groupsize: int = 0,
) -> torch.Tensor:
    """int8_swiglu_mlp with the activation pair in the first GEMM's epilogue: only its product is written."""
    product = swiglu_linear(x, gate_up_weight, gate_up_scale, gate_up_bias, convrot_groupsize)
    return torch.ops.kitchen.int8_linear.default(
        product, down_weight, down_scale, down_bias, out_dtype or x.dtype, down_convrot_groupsize
    )


def swiglu_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    convrot_groupsize: int,
) -> torch.Tensor:
    """x [..., K] -> silu(gate) * up [..., I], of PRODUCT_DTYPES: quantizer and GEMM, the second starting behind the first."""
    out_dtype = PRODUCT_DTYPES[x.dtype]
    out = x.new_empty((*x.shape[:-1], weight.shape[0] // 2), dtype=out_dtype)
    if out.numel() == 0:
        return out
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    (M, K), device = rows.shape, x.device.index
    weight, weight_scale = _addressable_rows(weight), weight_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    workspace = x.new_empty((K + 4) * M, dtype=torch.uint8)  # codes, then scales: K is a multiple of 16
    EXTENSION.module.int8_swiglu_linear_sm90(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[x.dtype], convrot_groupsize, M, weight.shape[0] // 2, K,
        weight.data_ptr(), weight.stride(0), weight_scale.data_ptr(), 0 if weight_scale.numel() == 1 else 1,
        0 if bias is None else bias.data_ptr(), 0 if bias is None else DTYPE_CODES[bias.dtype], out.data_ptr(),
        DTYPE_CODES[out_dtype], workspace.data_ptr(), device, current_stream(device),
    )  # fmt: skip
    return out


def swiglu_scaled_mm(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    plan: Plan | None = None,
) -> torch.Tensor:
    """codes [..., K], weight [2I, K] (gate rows first) -> silu(gate) * up [..., I], float32 or bfloat16, one rounding.

    Operands that the copy engine cannot address (rows not aligned to 16 bytes) are copied at each call. ``plan`` forces
    one (tests and measurements only).
    """
    out = codes.new_empty((*codes.shape[:-1], weight.shape[0] // 2), dtype=out_dtype)
    if out.numel() == 0:
        return out
    codes, weight = _addressable_rows(codes.reshape(-1, codes.shape[-1])), _addressable_rows(weight)
    operands = _gemm.gather(codes, x_scale, weight, weight_scale, bias)
    arguments, K = operands.arguments, operands.K
    EXTENSION.module.int8_swiglu_sm90(
        M=operands.M, I=operands.N // 2, K=K, a=arguments["a"], a_pitch=arguments["a_pitch"] or (K + 15) // 16 * 16,
        a_scale=arguments["a_scale"], b=arguments["b"], b_pitch=arguments["b_pitch"], b_scale=arguments["b_scale"],
        b_scale_stride=arguments["b_scale_stride"], bias=arguments["bias"], bias_type=arguments["bias_type"],
        out=out.data_ptr(), out_type=DTYPE_CODES[out_dtype], plan=plan, device=codes.device.index,
        stream=current_stream(codes.device.index),
    )  # fmt: skip
    return out


def _addressable_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The int8 matrix itself where the copy engine can step from row to row, else a copy, which is said once."""
    rows = matrix.contiguous() if matrix.stride(0) == 0 else _gemm.byte_rows(matrix)  # one row expanded: no distance
    rows = _gemm.aligned_rows(rows)
    if rows is not matrix:
        _gemm._tell_of_copies(*matrix.shape)
    return rows
