"""Launches the GEMMs by mma.sync, which read packed weights. Arguments have been checked by the ops, and by ``supports``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kitchen_core.arithmetic import add_residual, apply_input_act
from kitchen_core.launch import DTYPE_CODES, pointer
from kitchen_core.reference.svdquant import UNSIGNED_SHIFT

from . import _packed, _quantize
from ._extension import EXTENSION

BYTES, INT4, TURING, FEW_ROWS, PACKED = (
    "8-bit MMA",
    "4-bit MMA",
    "8-bit MMA of sm_75",
    "8-bit MMA, behind the copy engine where that is Hopper's",
    "8-bit MMA of tiles whose operands stay packed",
)


def scaled_mm(
    by: str, codes, weight, ascales, wscales, lora_act, proj_up, bias=None, act_unsigned=False,
    out_dtype=torch.bfloat16, residual=None, residual_scale=None, part_first=None, part_of=None, *,
    programmatic_launch=False, packed=None,
):  # fmt: skip
    """scaled_mm_svdquant_w4a4.

    ``programmatic_launch``: the kernel in front is a quantizer of ``_quantize`` that lets this one start early. Sums are
    those of a row of the weight alone, a part's like the whole's. ``packed``: the workspace of PACKED, where there is one.
    """
    if residual is not None and residual.dtype != out_dtype:  # rare: the kernel adds a residual of the output's dtype
        y = scaled_mm(
            by, codes, weight, ascales, wscales, lora_act, proj_up, bias, act_unsigned, torch.float32, None, None,
            part_first, part_of, programmatic_launch=programmatic_launch, packed=packed,
        )  # fmt: skip
        scale = None if residual_scale is None else residual_scale.reshape(-1)
        return add_residual(y, residual, scale).to(out_dtype)
    m, n, k = codes.shape[0], weight.shape[0], 2 * weight.shape[1]
    out = torch.empty((m, n), dtype=out_dtype, device=codes.device)
    if out.numel() == 0:
        return out
    given = weight, wscales, proj_up, bias
    codes, weight = _quantize.aligned_codes(codes), _quantize.aligned_codes(weight)
    ascales, lora_act = ascales.contiguous(), _aligned(lora_act.contiguous(), 8)
    wscales = _aligned(wscales.contiguous(), 16 if by == PACKED else 4)
    proj_up = _aligned(proj_up.contiguous(), 4)
    if by == PACKED and n % 8:
        wscales = F.pad(wscales, (0, -n % 8))
    bias = None if bias is None else bias.contiguous()
    if any(tensor is not before for tensor, before in zip((weight, wscales, proj_up, bias), given, strict=True)):
        programmatic_launch = False  # copies made just now: the kernel reads them before it waits for what is in front
    residual = None if residual is None else residual.contiguous()
    scale_stride = 0
    if residual_scale is not None:
        residual_scale = residual_scale.reshape(-1).float().contiguous()
        scale_stride = 0 if residual_scale.numel() == 1 else 1
    arguments = (
        m, n, k, codes.data_ptr(), ascales.data_ptr(), weight.data_ptr(), wscales.data_ptr(), DTYPE_CODES[wscales.dtype],
        proj_up.shape[1], lora_act.data_ptr(), proj_up.data_ptr(), DTYPE_CODES[proj_up.dtype], pointer(bias),
        0 if bias is None else DTYPE_CODES[bias.dtype], pointer(residual), pointer(residual_scale), scale_stride,
        out.data_ptr(), DTYPE_CODES[out_dtype], act_unsigned, by == INT4, programmatic_launch, codes.device.index,
        _quantize.stream_of(codes),
    )  # fmt: skip
    if by == TURING:
        EXTENSION.module.svdquant_gemm_sm75(*arguments)
    elif by == PACKED:
        packed = _workspace(m, n, k, codes.device, part_of, False) if packed is None else packed
        EXTENSION.module.svdquant_packed_sm90(*arguments, (*packed.arguments(), wscales.shape[1]))
    elif by == FEW_ROWS and _quantize.is_hopper(codes.device.index):
        EXTENSION.module.svdquant_stream_sm90(*arguments)
    else:
        EXTENSION.module.svdquant_gemm_sm80(*arguments)
    return out


def linear(
    by: str, x, weight, wscales, smooth, proj_down, proj_up, bias=None, act_unsigned=False, out_dtype=None,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    part_first=None, part_of=None,
):  # fmt: skip
    """svdquant_linear: the quantizer and the branch's first half in one launch where rows are few, the GEMM in the next."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    out_dtype = out_dtype or x.dtype
    raw = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    rows = raw.reshape(-1, k)
    m = rows.shape[0]
    if n == 0 or m == 0:
        return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    packed = _workspace(m, n, k, x.device, part_of, True) if by == PACKED else None
    cleared = _quantize.NONE_CLEARED if packed is None else packed.counts()
    (codes, ascales, lora_act), together = quantize(rows, smooth, proj_down, act_unsigned, cleared)
    flat = None if residual is None else residual.reshape(-1, n)
    y = scaled_mm(
        by, codes, weight, ascales, wscales, lora_act, proj_up, bias, act_unsigned, out_dtype, flat, residual_scale,
        part_first, part_of, programmatic_launch=together, packed=packed,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], n)


def _workspace(m: int, n: int, k: int, device: torch.device, part_of: int | None, cleared: bool) -> _packed.Workspace:
    return _packed.Workspace.empty(_packed.plan_of(m, n, k, device.index, None, part_of), device, cleared)


def quantize(rows, smooth, proj_down, act_unsigned, cleared):
    """What ``scaled_mm`` reads of x: (codes, ascales, lora_act); and whether the kernel behind may start early."""
    shift = UNSIGNED_SHIFT if act_unsigned else 0.0
    if _quantize.few_rows_supported(rows, proj_down):
        return _quantize.quantize_few_rows(rows, smooth, proj_down, act_unsigned, shift, cleared), True
    if _quantize.project_supported(rows, proj_down):  # the product runs beside the quantizer
        lora_act = _quantize.project(rows, proj_down, torch.float32)
        codes, ascales = _quantize.quantize_rows(
            rows, smooth, act_unsigned, shift=shift, after_product=True, cleared=cleared
        )
        return (codes, ascales, lora_act), True
    codes, ascales = _quantize.quantize_rows(rows, smooth, act_unsigned, shift=shift, cleared=cleared)
    return (codes, ascales, _quantize.low_rank_product(rows, proj_down)), False


def _aligned(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """To ``size`` bytes: kernels read two 16-bit numbers at once, or by the copy engine."""
    return tensor if tensor.data_ptr() % size == 0 else tensor.clone()
