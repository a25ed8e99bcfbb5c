"""Launches the CUDA kernels on tensors. Arguments have been checked by the ops; here only what a kernel needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kitchen_core.arithmetic import apply_input_act
from kitchen_core.launch import DTYPE_CODES, current_stream, pointer

from ._extension import EXTENSION

STREAM, DECODE, HOPPER = "awq_stream", "awq_decode", "awq_gemm_sm90"  # functions of the extension
TURING = "awq_decode_sm75"  # another

Plan = tuple[int, int]  # variant, splits: awq::LinearPlan of csrc


WORKSPACE_BYTES = 32 << 20  # that a call may hold beside its operands and its output


class PlanAnswer(NamedTuple):
    """A plan, the workspace it needs, itself in words, and why it cannot run ('' where it can)."""

    plan: Plan
    workspace_bytes: int
    words: str
    reason: str


def dequantize(
    qweight: torch.Tensor,
    wscales: torch.Tensor,
    wzeros: torch.Tensor,
    group_size: int = 64,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """dequantize_awq: the whole weight."""
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    out = torch.empty((n, k), dtype=out_dtype or torch.float32, device=qweight.device)
    weight = packed(qweight, wscales, wzeros)
    dequantize_rows(*weight, group_size, 0, out, torch.float32)
    return out


def packed(qweight: torch.Tensor, wscales: torch.Tensor, wzeros: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of a weight without gaps, scale and zero of one type."""
    if wscales.dtype != wzeros.dtype:
        wscales, wzeros = wscales.float(), wzeros.float()
    return qweight.contiguous(), wscales.contiguous(), wzeros.contiguous()


def dequantize_rows(
    qweight: torch.Tensor,
    wscales: torch.Tensor,
    wzeros: torch.Tensor,
    group_size: int,
    first: int,
    out: torch.Tensor,
    round_dtype: torch.dtype,
) -> None:
    """Rows from ``first`` on of a packed weight into ``out`` [rows, K]; float32 holds numbers of ``round_dtype``."""
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    size = wscales.element_size()
    EXTENSION.module.dequantize_awq(
        N=out.shape[0], K=k, group=group_size, codes=qweight.data_ptr() + first * (k // 2),
        scale=wscales.data_ptr() + first * size, zero=wzeros.data_ptr() + first * size, parameter_pitch=n,
        parameter_type=DTYPE_CODES[wscales.dtype], out=out.data_ptr(), out_type=DTYPE_CODES[out.dtype],
        round_type=DTYPE_CODES[round_dtype], device=out.device.index, stream=current_stream(out.device.index),
    )  # fmt: skip


def finish_sums(
    sums: torch.Tensor,
    out: torch.Tensor,
    first_row: int,
    first: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
) -> None:
    """The epilogue over fp32 ``sums`` [rows, columns], into out[first_row : ..., first : ...]; out and residual are [M, N]."""
    rows, columns = sums.shape
    n = out.shape[1]
    EXTENSION.module.finish_sums(
        M=rows, N=n, first=first, count=columns, sums=sums.data_ptr(),
        **epilogue(bias, residual, residual_scale, first_row * n),
        out=out.data_ptr() + first_row * n * out.element_size(), out_type=DTYPE_CODES[out.dtype], device=out.device.index,
        stream=current_stream(out.device.index),
    )  # fmt: skip


def epilogue(bias, residual, residual_scale, skip: int = 0) -> dict[str, Any]:
    """Bias, residual (its first ``skip`` elements left out) and its scale, all contiguous, as the kernels take them."""
    return {
        "bias": pointer(bias),
        "bias_type": 0 if bias is None else DTYPE_CODES[bias.dtype],
        "residual": 0 if residual is None else residual.data_ptr() + skip * residual.element_size(),
        "residual_type": 0 if residual is None else DTYPE_CODES[residual.dtype],
        "residual_scale": pointer(residual_scale),
        "residual_scale_stride": 0 if residual_scale is None or residual_scale.numel() == 1 else 1,
    }


def contiguous_epilogue(bias, residual, residual_scale, n: int):
    """(bias, residual [M, N], residual_scale float32) without gaps, each None where it is."""
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.reshape(-1, n).contiguous()
    scale = None if residual_scale is None else residual_scale.reshape(-1).float().contiguous()
    return bias, residual, scale


def fused_linear(
    route: str,
    x: torch.Tensor,
    qweight: torch.Tensor,
    wscales: torch.Tensor,
    wzeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    group_size: int = 64,
    out_dtype: torch.dtype | None = None,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    weight_dtype: torch.dtype | None = None,
    part_first: int | None = None,
    part_of: int | None = None,
    *,
    plan: Plan | None = None,
    out: torch.Tensor | None = None,
    resident: bool = False,
) -> torch.Tensor:
    """awq_linear by a kernel that decodes as it multiplies: ``route`` is STREAM, DECODE or HOPPER.

    ``plan`` forces a plan, ``out`` gives the memory [M, N] (tests and measurements only). ``resident``: the codes lie in the
    resident layout, which only STREAM takes.
    """
    n, k = qweight.shape[0], x.shape[-1]
    if out is None:
        out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, k).contiguous()
    rows, qweight, wscales, wzeros = (
        t if t.data_ptr() % 16 == 0 else t.clone() for t in (rows, *packed(qweight, wscales, wzeros))
    )
    bias, residual, residual_scale = contiguous_epilogue(bias, residual, residual_scale, n)
    m, workspace = rows.shape[0], None
    if route in (HOPPER, STREAM):  # sums of cut tiles; a copy of x, for more than a few rows
        answer = plan_of(
            route, m, n, k, group_size, x.dtype, wscales.dtype, x.device.index, plan, resident, part_first, part_of
        )
        plan = answer.plan
        if answer.workspace_bytes:
            workspace = torch.empty(answer.workspace_bytes, dtype=torch.uint8, device=x.device)
    getattr(EXTENSION.module, route)(
        M=m, N=n, K=k, group=group_size, x=rows.data_ptr(), x_type=DTYPE_CODES[x.dtype], codes=qweight.data_ptr(),
        scale=wscales.data_ptr(), zero=wzeros.data_ptr(), parameter_type=DTYPE_CODES[wscales.dtype],
        **epilogue(bias, residual, residual_scale), out=out.data_ptr(), out_type=DTYPE_CODES[out.dtype],
        workspace=pointer(workspace), plan=plan, device=out.device.index, stream=current_stream(out.device.index),
        resident=resident, part_first=part_first or 0, part_of=part_of or 0,
    )  # fmt: skip
    return out


def float32_linear(
    x: torch.Tensor,
    qweight: torch.Tensor,
    wscales: torch.Tensor,
    wzeros: torch.Tensor,
    bias: torch.Tensor | None = None,
    group_size: int = 64,
    out_dtype: torch.dtype | None = None,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    weight_dtype: torch.dtype | None = None,
    part_first: int | None = None,
    part_of: int | None = None,
) -> torch.Tensor:
    """awq_linear of x that is float32, or becomes it in its activation: fp32 products with the decoded weight.

    Sums are those of a row of the weight alone, a part's like the whole's.
    """
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    if out.numel() == 0:
        return out
    h = apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    h, qweight, wscales, wzeros = (
        t if t.data_ptr() % 16 == 0 else t.clone() for t in (h.contiguous(), *packed(qweight, wscales, wzeros))
    )
    EXTENSION.module.awq_float32(
        M=h.numel() // k, N=n, K=k, group=group_size, x=h.data_ptr(), codes=qweight.data_ptr(), scale=wscales.data_ptr(),
        zero=wzeros.data_ptr(), parameter_type=DTYPE_CODES[wscales.dtype], weight_type=DTYPE_CODES[weight_dtype or x.dtype],
        **epilogue(*contiguous_epilogue(bias, residual, residual_scale, n)), out=out.data_ptr(),
        out_type=DTYPE_CODES[out.dtype], device=out.device.index, stream=current_stream(out.device.index),
    )  # fmt: skip
    return out


@lru_cache(maxsize=8192)
def plan_of(
    route: str, M: int, N: int, K: int, group: int, x_dtype: torch.dtype, scales: torch.dtype, device: int,
    plan: Plan | None = None, resident: bool = False, part_first: int | None = None, part_of: int | None = None,
) -> PlanAnswer:  # fmt: skip
    """The plan that a route chooses on a device, or what it says to the given one; a part's adds as the whole's does."""
    gpu = torch.cuda.get_device_properties(device)
    shared = gpu.shared_memory_per_block_optin, gpu.shared_memory_per_multiprocessor
    facts = (gpu.multi_processor_count, *shared, 10 * gpu.major + gpu.minor)
    answer = getattr(EXTENSION.module, f"{route}_plan")(
        M=M, N=N, K=K, group=group, x_type=DTYPE_CODES[x_dtype], parameter_type=DTYPE_CODES[scales], device=facts,
        plan=plan, resident=resident, part_first=part_first or 0, part_of=part_of or 0,
    )  # fmt: skip
    return PlanAnswer(*answer)
