"""Launches the Hopper GEMM: codes as e4m3 numbers, wgmma. Arguments have been checked by the ops."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kitchen_core.arithmetic import add_residual, apply_input_act
from kitchen_core.launch import DTYPE_CODES, pointer
from kitchen_core.reference.svdquant import GROUP, UNSIGNED_SHIFT

from . import _quantize
from ._extension import EXTENSION

# The weight's codes are decoded to a byte each, so many bytes at a time: they stay in L2 until they are multiplied.
CHUNK_BYTES = 40 << 20
CHUNK_COLUMNS = 384  # whole tiles of every plan


class Branch(NamedTuple):
    """Operands of the low-rank product, bfloat16 [M, R] and [N, R], R a multiple of 8; None where there is no branch.

    ``lora_act`` float32 is still to be rounded into ``low``, which the decoder does on its way; None where it is done.
    """

    low: torch.Tensor | None
    up: torch.Tensor | None
    lora_act: torch.Tensor | None = None


def rounds_branch(proj_up: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether lora_act is rounded to bfloat16: at most 2^-8 of each term, no more than of the output by its own rounding."""
    return proj_up.dtype == torch.bfloat16 and out_dtype == torch.bfloat16


def branch_of(lora_act: torch.Tensor, proj_up: torch.Tensor, out_dtype: torch.dtype) -> Branch:
    """The operands whose bfloat16 product is lora_act @ proj_up.T.

    Where ``rounds_branch`` does not hold, what is not bfloat16 is cut in two parts, whose larger products are summed: at most
    2^-16 of each term of the branch is lost, and 3 * 2^-16 where both factors are cut.
    """
    rank = proj_up.shape[1]
    if rank == 0:
        return Branch(None, None)
    pad = -rank % 8
    if rounds_branch(proj_up, out_dtype):
        low = torch.empty((lora_act.shape[0], rank + pad), dtype=torch.bfloat16, device=lora_act.device)
        up = F.pad(proj_up, (0, pad)) if pad else proj_up.contiguous()
        return Branch(low, _aligned(up), lora_act.contiguous())
    low, up = lora_act.bfloat16(), proj_up.bfloat16()
    low_rest = (lora_act - low.float()).bfloat16()
    if proj_up.dtype == torch.bfloat16:
        low, up = torch.cat((low, low_rest), 1), torch.cat((up, up), 1)
    else:
        up_rest = (proj_up.float() - up.float()).bfloat16()
        low, up = torch.cat((low, low_rest, low), 1), torch.cat((up, up, up_rest), 1)
    pad = -low.shape[1] % 8
    return Branch(F.pad(low, (0, pad)), F.pad(up, (0, pad)))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


class Plan(NamedTuple):
    """A variant of the GEMM and its grid."""

    arguments: tuple[int, ...]  # HopperPlan of csrc/bindings.cpp
    tile_n: int  # columns of a tile, which share a block of the weight's scales
    text: str


class Chunk(NamedTuple):
    """Columns of the output whose weights are decoded at once, and the plan that multiplies them."""

    first: int
    columns: int
    plan: Plan


@lru_cache(maxsize=8192)
def plan_of(M: int, N: int, K: int, device: int, variant: int | None = None) -> Plan:
    """The plan that is chosen, or of the given variant."""
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    return Plan(*EXTENSION.module.svdquant_gemm_sm90_plan(M, N, K, sm_count, variant))


def plan_as(whole: Plan, M: int, N: int, K: int, device: int, variant: int | None = None) -> Plan:
    """The plan of fewer columns whose sums are added in the order of the whole's: any that leaves K whole, where that one does;
    else its variant, and its pieces of K.
    """
    pieces = whole.arguments[3]
    plan = plan_of(M, N, K, device, variant)
    if pieces == plan.arguments[3] == 1:
        return plan
    plan = plan_of(M, N, K, device, whole.arguments[0])
    variant, grid, raster_group, own = plan.arguments
    return plan._replace(arguments=(variant, grid // own * pieces, raster_group, pieces))


def chunks_of(
    M: int, N: int, K: int, out_bytes: int, device: int, variant: int | None = None, part_first: int | None = None,
    part_of: int | None = None,
) -> list[Chunk]:  # fmt: skip
    """The chunks of a call's columns. A part's end where the whole's do, and are multiplied by the whole's plans."""
    first, whole = part_first or 0, part_of or N
    step = chunk_columns(whole, K, out_bytes)
    if N * out_bytes % 16:
        step = whole
    chunks = []
    for start in range(first // step * step, first + N, step):
        begin, end = max(start, first), min(start + step, first + N)
        plan = plan_of(M, min(step, whole - start), K, device, variant)
        if part_of is not None:
            plan = plan_as(plan, M, end - begin, K, device, variant)
        chunks.append(Chunk(begin - first, end - begin, plan))
    return chunks


def chunk_columns(n: int, k: int, out_bytes: int = 2) -> int:
    """Columns of the output whose weights are decoded at once; ``out_bytes`` of an element.

    All where rows of the output are no multiple of 16 bytes: the kernel stores such rows at the pitch of its own columns.
    """
    if n * out_bytes % 16:
        return n
    most = max(1, CHUNK_BYTES // (CHUNK_COLUMNS * k)) * CHUNK_COLUMNS
    return n if n <= most else most


def multiply(
    activation: _quantize.Decoded, weight: torch.Tensor, wscales: torch.Tensor, branch: Branch, bias: torch.Tensor | None,
    out_dtype: torch.dtype, residual: torch.Tensor | None, residual_scale: torch.Tensor | None, variant: int | None = None,
    decoded: _quantize.Decoded | None = None, part_first: int | None = None, part_of: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The output [M, N]. ``residual``, of any dtype, [M, N]. ``decoded``: the first chunk of the weight."""
    if residual is not None and residual.dtype != out_dtype:  # rare: the kernel adds a residual of the output's dtype
        y = multiply(
            activation, weight, wscales, branch, bias, torch.float32, None, None, variant, decoded, part_first, part_of
        )
        scale = None if residual_scale is None else residual_scale.reshape(-1)
        return add_residual(y, residual, scale).to(out_dtype)
    (m, k), n = activation.codes.shape, weight.shape[0]
    device, stream = weight.device.index, _quantize.stream_of(weight)
    out = torch.empty((m, n), dtype=out_dtype, device=weight.device)
    if out.numel() == 0:
        return out
    weight, wscales = _quantize.aligned_codes(weight), wscales.contiguous()
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    scale_stride = 0
    if residual_scale is not None:
        residual_scale = residual_scale.reshape(-1).float().contiguous()
        scale_stride = 0 if residual_scale.numel() == 1 else 1
    for first, columns, plan in chunks_of(m, n, k, out.element_size(), device, variant, part_first, part_of):
        lora_act = branch.lora_act if first == 0 else None
        if first or decoded is None or decoded.codes.shape[0] != columns:
            decoded = _quantize.decode(
                weight[first : first + columns], wscales[:, first : first + columns], plan.tile_n, is_a=False,
                lora_act=lora_act, low=None if lora_act is None else branch.low,
            )  # fmt: skip
        EXTENSION.module.svdquant_gemm_sm90(
            m, columns, k, activation.codes.data_ptr(), activation.scales.data_ptr(), decoded.codes.data_ptr(),
            decoded.scales.data_ptr(), 0 if branch.low is None else branch.low.shape[1], pointer(branch.low),
            pointer(branch.up, first * (0 if branch.up is None else branch.up.shape[1])), pointer(bias, first),
            0 if bias is None else DTYPE_CODES[bias.dtype], pointer(residual, first),
            pointer(residual_scale, first * scale_stride), scale_stride, pointer(out, first), DTYPE_CODES[out_dtype], n,
            plan.arguments, True, device, stream,
        )  # fmt: skip
    return out


def scaled_mm(
    codes, weight, ascales, wscales, lora_act, proj_up, bias=None, act_unsigned=False, out_dtype=torch.bfloat16,
    residual=None, residual_scale=None, part_first=None, part_of=None, variant=None,
):  # fmt: skip
    """scaled_mm_svdquant_w4a4: the packed codes of x are decoded first."""
    codes, weight, wscales = _quantize.aligned_codes(codes), _quantize.aligned_codes(weight), wscales.contiguous()
    if codes.shape[0] == 0:
        return torch.empty((0, weight.shape[0]), dtype=out_dtype, device=codes.device)
    decoded = _quantize.decode(codes, ascales.contiguous(), _quantize.A_BLOCK, is_a=True, act_unsigned=act_unsigned)
    return multiply(
        decoded, weight, wscales, branch_of(lora_act, proj_up, out_dtype), bias, out_dtype, residual, residual_scale,
        variant, part_first=part_first, part_of=part_of,
    )  # fmt: skip


def linear(
    x, weight, wscales, smooth, proj_down, proj_up, bias=None, act_unsigned=False, out_dtype=None,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    part_first=None, part_of=None, variant=None,
):  # fmt: skip
    """svdquant_linear: the quantizer writes what the GEMM reads."""
    n, k = weight.shape[0], 2 * weight.shape[1]
    out_dtype = out_dtype or x.dtype
    raw = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    rows = raw.reshape(-1, k)
    if n == 0 or rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    weight, wscales = _quantize.aligned_codes(weight), wscales.contiguous()
    device = weight.device.index
    first = chunks_of(rows.shape[0], n, k, out_dtype.itemsize, device, variant, part_first, part_of)[0]
    activation, branch, decoded = _operands(
        rows, weight, wscales, smooth, proj_down, proj_up, act_unsigned, out_dtype, first
    )
    flat = None if residual is None else residual.reshape(-1, n)
    y = multiply(
        activation, weight, wscales, branch, bias, out_dtype, flat, residual_scale, variant, decoded, part_first, part_of,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], n)


def _operands(rows, weight, wscales, smooth, proj_down, proj_up, act_unsigned, out_dtype, chunk):
    """x as the GEMM reads it, the branch, and the weight's first chunk, which the quantizer's launch decodes."""
    shift = UNSIGNED_SHIFT if act_unsigned else 0.0
    columns, tile_n = chunk.columns, chunk.plan.tile_n
    decoded = _quantize.Decoded.empty(columns, rows.shape[1], tile_n, weight.device)
    beside = _quantize.DecodedBeside(weight[:columns], wscales, decoded, tile_n)
    if _quantize.project_supported(rows, proj_down):  # the product runs beside the quantizer
        rounded = rounds_branch(proj_up, out_dtype)
        low = _quantize.project(rows, proj_down, torch.bfloat16 if rounded else torch.float32)
        codes, scales = _quantize.quantize_rows(
            rows, smooth, act_unsigned, _quantize.E4M3, shift, beside, after_product=True
        )
        branch = Branch(low, _aligned(proj_up.contiguous())) if rounded else branch_of(low, proj_up, out_dtype)
        return _quantize.Decoded(codes, scales), branch, decoded
    branch = Branch(None, None)
    if proj_up.shape[1]:
        branch = branch_of(_quantize.low_rank_product(rows, proj_down), proj_up, out_dtype)
    low = None if branch.lora_act is None else (branch.lora_act, branch.low)
    codes, scales = _quantize.quantize_rows(rows, smooth, act_unsigned, _quantize.E4M3, shift, beside, low)
    return _quantize.Decoded(codes, scales), branch._replace(lora_act=None), decoded


def workspace_bytes(m: int, n: int, k: int, rank: int, out_bytes: int = 2) -> int:
    """Transient memory of one linear beside its output: both operands' codes and scales, the branch's activations."""
    columns = chunk_columns(n, k, out_bytes)
    return (m + columns) * k + 16 * (m + columns) * (k // GROUP) + 6 * m * rank
