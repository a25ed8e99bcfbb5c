"""INT8 W8A8, eagerly: what each int8 op means. Source: formats.md section 1; arithmetic: ``arithmetic.py``."""

from __future__ import annotations

import logging

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

log = logging.getLogger("kitchen")
_said: set[str] = set()


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


def stacked_rows(first, second):
    """[2N, ...] over both where ``second`` follows ``first`` in one storage, without a copy; else why not, in words."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"they differ: {first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}"
    if first.dim() == 0:
        return "each is one number"
    if not (first.is_contiguous() and second.is_contiguous()):
        return "they are not contiguous"
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return "they lie in two storages"
    if second.storage_offset() != first.storage_offset() + first.numel():
        return "they do not follow each other in their storage"
    return first.as_strided((2 * first.shape[0], *first.shape[1:]), first.stride())


def stacked_gate_up(gate, up):
    """(weight, scale, bias) of gate and up together, as ``stacked_rows``; None where they are apart, which is said once.

    ``gate`` and ``up`` are triples of the same; a scale of one element for all rows cannot be stacked.
    """
    stacked = []
    for name, first, second in zip(("weights", "scales", "biases"), gate, up, strict=True):
        if first is second is None:
            stacked.append(None)
            continue
        missing = first is None or second is None
        found = "one of them is missing" if missing else stacked_rows(first, second)
        if name == "scales" and first.numel() != gate[0].shape[0]:
            found = "each is one number for all rows"
        if isinstance(found, str):
            if found not in _said:
                _said.add(found)
                log.warning(
                    "kitchen: gate and up projection run apart, since their %s are not stacked in one storage: %s "
                    "(said once; kitchen_int8.pack_gate_up(module) stacks them)",
                    name,
                    found,
                )
            return None
        stacked.append(found)
    return stacked


def int8_gate_up_mlp(
    x, gate_weight, gate_scale, up_weight, up_scale, down_weight, down_scale, gate_bias=None, up_bias=None,
    down_bias=None, out_dtype=None, convrot_groupsize=0, down_convrot_groupsize=0,
):  # fmt: skip
    """int8_swiglu_mlp where gate and up are stacked; else as three modules compute it, each step in x's dtype."""
    stacked = stacked_gate_up((gate_weight, gate_scale, gate_bias), (up_weight, up_scale, up_bias))
    if stacked is not None:
        weight, scale, bias = stacked
        return int8_swiglu_mlp(
            x, weight, scale, down_weight, down_scale, bias, down_bias, out_dtype, convrot_groupsize,
            down_convrot_groupsize,
        )  # fmt: skip
    codes, x_scale = quantize_and_rotate_rowwise(x, convrot_groupsize)
    gate = int8_scaled_mm(codes, x_scale, gate_weight, gate_scale, gate_bias, x.dtype)
    up = int8_scaled_mm(codes, x_scale, up_weight, up_scale, up_bias, x.dtype)
    hidden = torch.nn.functional.silu(gate) * up
    return int8_linear(hidden, down_weight, down_scale, down_bias, out_dtype or x.dtype, down_convrot_groupsize)
