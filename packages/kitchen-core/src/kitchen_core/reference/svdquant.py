"""SVDQuant W4A4 with a low-rank branch, eagerly: what each svdquant op means. Source: formats.md section 3.

Written-down order, all in fp32: x / smooth by IEEE division; scale = max(absmax, 1e-10) / levels; codes ties to even;
per group of 64, ascending, ``acc = acc + (float(dot) * x_scale) * weight_scale`` with every operation rounded; then the
low-rank product, the bias and the residual are added; one rounding to the output dtype.
"""

from __future__ import annotations

import torch

from ..arithmetic import add_residual, apply_input_act, divide, round_codes, settled
from ..packing import pack_nibbles, unpack_nibbles

GROUP = 64
SCALE_FLOOR = 1e-10
UNSIGNED_SHIFT = 0.171875  # added to x in front of an unsigned quantizer: just above -min(gelu), exact in every dtype


def levels(act_unsigned: bool) -> tuple[int, int]:
    """Lowest and highest activation code."""
    return (0, 15) if act_unsigned else (-7, 7)


def quantize_svdquant_w4a4(x, smooth, proj_down, act_unsigned=False, lora_x=None):
    k = x.shape[-1]
    m = x.numel() // k
    lora_act = low_rank_input(x if lora_x is None else lora_x, proj_down)
    groups = (x.float() / smooth.float().reshape(-1)).reshape(m, k // GROUP, GROUP)
    low, high = levels(act_unsigned)
    absmax = groups.abs().amax(-1, keepdim=True)
    finite = torch.isfinite(absmax)
    scale = divide(absmax.clamp_min(SCALE_FLOOR), high)
    codes = round_codes(torch.where(finite, groups / scale, 0.0), low, high)
    scale = torch.where(finite, scale, float("nan"))
    # cloned: .contiguous() would keep a transposed [1, G] with its strides
    ascales = scale.reshape(m, k // GROUP).t().clone(memory_format=torch.contiguous_format)
    return pack_nibbles(codes.to(torch.int8).reshape(m, k)), ascales, lora_act


def low_rank_input(x: torch.Tensor, proj_down: torch.Tensor) -> torch.Tensor:
    """x @ proj_down in fp32, [M, R]."""
    k = x.shape[-1]
    return settled(x.float().reshape(x.numel() // k, k)) @ settled(proj_down.float())


def scaled_mm_svdquant_w4a4(
    codes, weight, ascales, wscales, lora_act, proj_up, bias=None, act_unsigned=False, out_dtype=torch.bfloat16,
    residual=None, residual_scale=None, part_first=None, part_of=None,
):  # fmt: skip
    acc = torch.zeros(codes.shape[0], weight.shape[0], dtype=torch.float32, device=codes.device)
    for group in range(ascales.shape[0]):
        columns = slice(group * GROUP // 2, (group + 1) * GROUP // 2)  # of packed bytes
        a = unpack_nibbles(codes[:, columns], signed=not act_unsigned).float()
        w = unpack_nibbles(weight[:, columns], signed=True).float()
        dot = a @ w.t()  # exact: an integer of at most 64 * 15 * 8
        acc = acc + (dot * ascales[group].unsqueeze(1)) * wscales[group].float()
    y = acc + settled(lora_act) @ settled(proj_up.float()).t()
    if bias is not None:
        y = y + bias.float()
    if residual_scale is not None:
        residual_scale = residual_scale.reshape(-1)
    return add_residual(y, residual, residual_scale).to(out_dtype)


def svdquant_linear(
    x, weight, wscales, smooth, proj_down, proj_up, bias=None, act_unsigned=False, out_dtype=None,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    part_first=None, part_of=None,
):  # fmt: skip
    return layer(
        quantize_svdquant_w4a4, scaled_mm_svdquant_w4a4,
        x, weight, wscales, smooth, proj_down, proj_up, bias, act_unsigned, out_dtype,
        input_act, input_act_weight, input_act_eps, residual, residual_scale, part_first, part_of,
    )  # fmt: skip


def layer(
    quantize, scaled_mm, x, weight, wscales, smooth, proj_down, proj_up, bias, act_unsigned, out_dtype,
    input_act, input_act_weight, input_act_eps, residual, residual_scale, part_first=None, part_of=None,
):  # fmt: skip
    """The layer as two halves: the low-rank branch takes the activation as it is, the quantizer takes it shifted."""
    shape = (*x.shape[:-1], weight.shape[0])
    raw = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    shifted = raw.float() + UNSIGNED_SHIFT if act_unsigned else raw
    codes, ascales, lora_act = quantize(shifted, smooth, proj_down, act_unsigned, raw if act_unsigned else None)
    flat_residual = None if residual is None else residual.reshape(-1, weight.shape[0])
    y = scaled_mm(
        codes, weight, ascales, wscales, lora_act, proj_up, bias, act_unsigned, out_dtype or x.dtype, flat_residual,
        residual_scale, part_first, part_of,
    )  # fmt: skip
    return y.reshape(shape)


# ------------------------------------------------------------------------------------------------ dense weights


def residual_weight(weight: torch.Tensor, wscales: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    """The 4-bit part alone, in the basis of x: (Wq * ws) / smooth, fp32 [N, K]."""
    codes = unpack_nibbles(weight, signed=True)
    scaled = codes.unflatten(-1, (-1, GROUP)) * wscales.float().t().unsqueeze(-1)
    return scaled.flatten(1) / smooth.float().reshape(-1)


def dequantize_svdquant_w4a4(weight, wscales, smooth, proj_down, proj_up, out_dtype=None):
    dense = residual_weight(weight, wscales, smooth) + proj_up.float() @ proj_down.float().t()
    return dense.to(out_dtype or torch.float32)


def shift_contribution(weight: torch.Tensor, wscales: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    """What the shift of an unsigned layer adds to every row of the output: 0.171875 * sum_k Wres[n, k], fp32 [N]."""
    return UNSIGNED_SHIFT * residual_weight(weight, wscales, smooth).sum(-1)
