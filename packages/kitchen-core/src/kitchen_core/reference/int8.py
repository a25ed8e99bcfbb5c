"""INT8 W8A8, eagerly: what each int8 op means. Source: formats.md section 1; arithmetic: ``arithmetic.py``."""

from __future__ import annotations

import torch

from ..arithmetic import (
    INT8_LEVELS,
    INT8_SCALE_FLOOR,
    add_residual,
    apply_input_act,
    divide,
    fp16_rows,
    hadamard_rotate,
    int8_matmul,
    quantize_rowwise,
    round_codes,
    scale_and_bias,
)


def quantize_int8_tensorwise(x, scale=None, seed=0):
    x = x.float()
    if scale is None:
        absmax = x.abs().amax() if x.numel() else x.new_zeros(())
        scale = divide(absmax, INT8_LEVELS).clamp_min(INT8_SCALE_FLOOR)
    scale = scale.reshape(())
    finite = torch.isfinite(scale)
    codes = round_codes(torch.where(finite, x / scale, 0.0), -128, 127, seed)
    return codes.to(torch.int8).contiguous(), torch.where(finite, scale, float("nan"))


def quantize_and_rotate_rowwise(
    x, convrot_groupsize=0, input_act="none", input_act_weight=None, input_act_eps=0.0, seed=0
):
    x = apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    return quantize_rowwise(hadamard_rotate(x, convrot_groupsize), seed)


def quantize_int8_rowwise(x, seed=0):
    return quantize_and_rotate_rowwise(x, seed=seed)


def quantize_int8_convrot_weight(weight, convrot_groupsize=256, seed=0):
    return quantize_and_rotate_rowwise(weight, convrot_groupsize, seed=seed)


def dequantize_int8(codes, scale, out_dtype=None, convrot_groupsize=0):
    row_scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(*codes.shape[:-1], 1)
    values = hadamard_rotate(codes.float() * row_scale, convrot_groupsize)
    return values.to(out_dtype or torch.float32).contiguous()


def dequantize_int8_embedding(codes, scale, indices, out_dtype=None, convrot_groupsize=0):
    row_scale = scale if scale.numel() == 1 else scale.reshape(-1, 1)[indices]
    return dequantize_int8(codes[indices], row_scale, out_dtype, convrot_groupsize)


def int8_scaled_mm(
    codes, x_scale, weight, weight_scale, bias=None, out_dtype=torch.bfloat16, residual=None, residual_scale=None
):
    shape = (*codes.shape[:-1], weight.shape[0])
    acc = int8_matmul(codes.reshape(x_scale.numel(), codes.shape[-1]), weight)
    y = scale_and_bias(acc, x_scale.reshape(-1, 1), weight_scale.reshape(-1), bias).reshape(shape)
    if residual_scale is not None:
        residual_scale = residual_scale.reshape(-1)
    return add_residual(y, residual, residual_scale).to(out_dtype)


def int8_linear(
    x, weight, weight_scale, bias=None, out_dtype=None, convrot_groupsize=0,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
):  # fmt: skip
    codes, x_scale = quantize_and_rotate_rowwise(x, convrot_groupsize, input_act, input_act_weight, input_act_eps)
    return int8_scaled_mm(codes, x_scale, weight, weight_scale, bias, out_dtype or x.dtype, residual, residual_scale)


def int8_linear_fp16(
    x, weight, weight_scale, bias=None, out_dtype=None, convrot_groupsize=0,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    fp16_activations=False,
):  # fmt: skip
    """Same codes and same result as int8_linear; with fp16_activations, x stays in fp16, its rows scaled by a power of two."""
    if not fp16_activations:
        return int8_linear(
            x, weight, weight_scale, bias, out_dtype, convrot_groupsize,
            input_act, input_act_weight, input_act_eps, residual, residual_scale,
        )  # fmt: skip
    rows = apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    rows = hadamard_rotate(rows, convrot_groupsize).reshape(-1, weight.shape[1])
    half, x_scale = fp16_rows(rows)
    y = scale_and_bias(half.float() @ weight.float().T, x_scale, weight_scale.reshape(-1), bias)
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    if residual_scale is not None:
        residual_scale = residual_scale.reshape(-1)
    return add_residual(y, residual, residual_scale).to(out_dtype or x.dtype)


def int8_swiglu_mlp(
    x, gate_up_weight, gate_up_scale, down_weight, down_scale, gate_up_bias=None, down_bias=None,
    out_dtype=None, convrot_groupsize=0, down_convrot_groupsize=0,
):  # fmt: skip
    hidden = int8_linear(x, gate_up_weight, gate_up_scale, gate_up_bias, None, convrot_groupsize)
    return int8_linear(
        hidden, down_weight, down_scale, down_bias, out_dtype or x.dtype, down_convrot_groupsize, "swiglu"
    )
