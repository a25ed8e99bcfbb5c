"""Launches the kernels of this package on tensors. Arguments have been checked by the ops; here only what a kernel needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kitchen_core.arithmetic import PAIR_ACTS, add_residual
from kitchen_core.codebook import choose_codebook
from kitchen_core.devices import DeviceFacts
from kitchen_core.launch import DTYPE_CODES, current_stream, pointer
from kitchen_core.reference.w4a8 import correction_addend
from kitchen_core.registry import Problem

from ._extension import EXTENSION

# Kernels that decode on the fly, by their names in the extension.
STREAM, RESIDENT, HOPPER = "w4a8_stream", "w4a8_resident", "w4a8_hopper"
ACT_CODES = {"none": 0, "gelu_tanh": 1, "swiglu": 2, "rms_norm": 3, "situ": 4}  # quant::InputAct
MAX_ROTATION = 4096  # of the quantizer of activations
LEVELS_CODES = {"codebook": 0, "uniform": 1, "asymmetric": 2, "six": 3}  # Levels of csrc
MAX_DECODED = 2**35 - 1  # weights of one decoding launch

# Of csrc: stream::Plan and resident::Plan (warps side by side, pieces of K), hopper::Plan (outputs and tokens of a tile, pieces
# of K).
Plan = tuple[int, int] | tuple[int, int, int]


class PlanAnswer(NamedTuple):
    """A plan, itself in words, why it cannot run ('' where it can), and the bytes that it works in besides."""

    plan: Plan
    words: str
    reason: str
    workspace: int


def decode(
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    codebook: torch.Tensor | None = None,
    group_size: int = 16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """decode_w4a8_weight by its kernel; ``out`` gives the memory, int8 [N, K] contiguous."""
    n, k = weight.shape[0], s_rel.shape[1] * group_size
    if out is None:
        out = weight.new_empty((n, k))
    if n:
        weight, s_rel, table = _aligned(weight, 8), s_rel.contiguous(), _table(codebook)
        EXTENSION.module.decode_w4a8_weight(
            weight.data_ptr(), s_rel.data_ptr(), pointer(table), out.data_ptr(), n, k, group_size, bits_of(weight, k),
            s_rel.dtype == torch.float32, weight.device.index, current_stream(weight.device.index),
        )  # fmt: skip
    return out


def quantize_shared_bytes(k: int, group: int) -> int:
    """Dynamic shared memory of a block of the weight quantizer, which holds a row in fp32."""
    return 4 * (k + k // group)


def quantize(
    weight: torch.Tensor,
    group_size: int = 16,
    convrot_groupsize: int = 256,
    bits: int = 4,
    levels: str = "codebook",
    codebook: torch.Tensor | None = None,
    scale_search: bool = True,
    seed: int = 0,
    scale_dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, ...]:
    """quantize_w4a8_weight by its kernel. A codebook that is not given is chosen on the CPU, as the reference does."""
    n, k = weight.shape
    table = weight.new_empty(0, dtype=torch.float32)
    if bits == 4 and levels == "codebook":
        table = choose_codebook(weight, group_size, convrot_groupsize) if codebook is None else codebook.float().clone()
    asymmetric = levels == "asymmetric"
    qdata = weight.new_empty((n, k * bits // 8), dtype=torch.int8)
    s_rel = weight.new_empty((n, k // group_size), dtype=scale_dtype)
    s_channel = weight.new_empty((n,), dtype=torch.float32)
    correction = weight.new_empty((k // group_size, n) if asymmetric else (0,))
    if n:
        if weight.stride(1) != 1 or (weight.data_ptr() | (weight.stride(0) * weight.element_size())) % 16:
            weight = weight.clone(memory_format=torch.contiguous_format)
        EXTENSION.module.quantize_w4a8_weight(
            weight.data_ptr(), weight.stride(0), DTYPE_CODES[weight.dtype], table.data_ptr() if table.numel() else 0,
            qdata.data_ptr(), s_rel.data_ptr(), s_channel.data_ptr(), correction.data_ptr() if asymmetric else 0, n, k,
            group_size, convrot_groupsize, LEVELS_CODES["six" if bits == 6 else levels], scale_dtype == torch.float32,
            scale_search, seed, weight.device.index, current_stream(weight.device.index),
        )  # fmt: skip
    return qdata, s_rel, s_channel, table, correction


def dequantize(
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    s_channel: torch.Tensor,
    codebook: torch.Tensor | None = None,
    correction: None = None,
    out_dtype: torch.dtype | None = None,
    group_size: int = 16,
    convrot_groupsize: int = 0,
) -> torch.Tensor:
    """dequantize_w4a8_weight by decoding to INT8 and the op dequantize_int8: the same arithmetic from there on."""
    decoded = decode(weight, s_rel, codebook, group_size)
    return torch.ops.kitchen.dequantize_int8.default(decoded, s_channel.reshape(-1, 1), out_dtype, convrot_groupsize)


def scaled_mm(
    launch: str,
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    s_channel: torch.Tensor,
    codebook: torch.Tensor | None = None,
    correction: None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    group_size: int = 16,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """w4a8_scaled_mm by the kernel ``launch``. ``plan`` forces one (tests and measurements).

    For RESIDENT, weight and s_rel are views of the records of ``resident.py``, one behind the other.
    """
    return _product(
        launch, codes, x_scale, weight, s_rel, s_channel, codebook, bias, out_dtype, group_size, residual, residual_scale,
        plan, False,
    )  # fmt: skip


def linear(
    launch: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    s_channel: torch.Tensor,
    codebook: torch.Tensor | None = None,
    correction: None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    group_size: int = 16,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """w4a8_linear in one call: the quantizer, and behind it the product by ``launch``, which reads the weight meanwhile.

    Codes and scales of x live in a workspace of this call. The weight of RESIDENT as in scaled_mm.
    """
    out_dtype = out_dtype or x.dtype
    if residual is not None and residual.dtype != out_dtype:  # rare: the kernels add a residual of the output's dtype
        y = linear(
            launch, x, weight, s_rel, s_channel, codebook, None, bias, torch.float32, group_size, convrot_groupsize,
            input_act, input_act_weight, input_act_eps,
        )  # fmt: skip
        gate = None if residual_scale is None else residual_scale.reshape(-1)
        return add_residual(y, residual, gate).to(out_dtype)
    n, k = weight.shape[0], s_rel.shape[1] * group_size
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    rows = _rows(x)
    prepared = (
        _aligned(weight, 16), _scales(launch, s_rel), s_channel.reshape(-1).contiguous(), _table(codebook), _contiguous(bias),
        _contiguous(residual), _gate(residual_scale), _contiguous(input_act_weight),
    )  # fmt: skip
    b, scales, b_scale, table, bias, residual, gate, act_weight = prepared
    m, index = rows.shape[0], x.device.index
    plan, own_bytes = _planned(launch, m, weight, k, group_size, out, residual)
    workspace = x.new_empty(_linear_workspace(launch, m, k, plan, own_bytes), dtype=torch.uint8)
    getattr(EXTENSION.module, launch + "_linear")(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[x.dtype], convrot_groupsize, ACT_CODES[input_act], pointer(act_weight),
        0 if act_weight is None else DTYPE_CODES[act_weight.dtype], input_act_eps, m, n, k, bits_of(weight, k), group_size,
        b.data_ptr(), scales.data_ptr(), pointer(table), b_scale.data_ptr(), pointer(bias),
        0 if bias is None else DTYPE_CODES[bias.dtype], pointer(residual), pointer(gate),
        0 if gate is None or gate.numel() == 1 else 1, out.data_ptr(), DTYPE_CODES[out_dtype], workspace.data_ptr(), plan,
        index, current_stream(index),
    )  # fmt: skip
    return out


def quantize_activation(
    x: torch.Tensor,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_and_rotate_rowwise by the kernel of kitchen-int8, which is compiled into this package too."""
    rows = _rows(x)
    k = rows.shape[1] // 2 if input_act in PAIR_ACTS else rows.shape[1]
    codes = x.new_empty((*x.shape[:-1], k), dtype=torch.int8)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    act_weight = _contiguous(input_act_weight)
    EXTENSION.module.quantize_int8_rowwise(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[x.dtype], codes.data_ptr(), scales.data_ptr(), rows.shape[0], k,
        convrot_groupsize, ACT_CODES[input_act], pointer(act_weight),
        0 if act_weight is None else DTYPE_CODES[act_weight.dtype], input_act_eps, max(seed, 0), x.device.index,
        current_stream(x.device.index),
    )  # fmt: skip
    return codes, scales


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix whose rows are contiguous."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _product(
    launch: str,
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    s_channel: torch.Tensor,
    codebook: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    group_size: int,
    residual: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    plan: Any,
    programmatic: bool,
) -> torch.Tensor:
    """``programmatic`` lets the kernel start while the one in front of it in the stream, which made ``codes`` and ``x_scale``,
    still runs: everything else must be older than that one."""
    if residual is not None and residual.dtype != out_dtype:  # rare: the kernels add a residual of the output's dtype
        y = _product(
            launch, codes, x_scale, weight, s_rel, s_channel, codebook, bias, torch.float32, group_size, None, None, plan,
            programmatic,
        )  # fmt: skip
        gate = None if residual_scale is None else residual_scale.reshape(-1)
        return add_residual(y, residual, gate).to(out_dtype)
    n, k = weight.shape[0], s_rel.shape[1] * group_size
    out = codes.new_empty((*codes.shape[:-1], n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    # What has to be copied first is copied by kernels in front of this one, which a programmatic launch would overtake.
    prepared = (
        _aligned(codes.reshape(-1, k), 16), x_scale.reshape(-1).contiguous(), _aligned(weight, 16), _scales(launch, s_rel),
        s_channel.reshape(-1).contiguous(), _table(codebook), _contiguous(bias), _contiguous(residual), _gate(residual_scale),
    )  # fmt: skip
    a, a_scale, b, scales, b_scale, table, bias, residual, gate = prepared
    if programmatic and not (b is weight and table is codebook and _same(scales, s_rel) and _same(b_scale, s_channel)):
        programmatic = False
    plan, workspace_bytes = _planned(launch, a.shape[0], weight, k, group_size, out, residual, plan)
    workspace = a.new_empty(workspace_bytes)
    getattr(EXTENSION.module, launch)(
        a.shape[0], n, k, bits_of(weight, k), group_size, a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), scales.data_ptr(),
        pointer(table), b_scale.data_ptr(), pointer(bias), 0 if bias is None else DTYPE_CODES[bias.dtype],
        pointer(residual), pointer(gate), 0 if gate is None or gate.numel() == 1 else 1, out.data_ptr(),
        DTYPE_CODES[out_dtype], pointer(workspace), programmatic, plan, codes.device.index,
        current_stream(codes.device.index),
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------- decode, then an INT8 product


def decoded_scaled_mm(
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    s_rel: torch.Tensor,
    s_channel: torch.Tensor,
    codebook: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    group_size: int = 16,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """w4a8_scaled_mm by decoding the weight to INT8, as much at once as stays in the L2 cache, and the op int8_scaled_mm."""
    if correction is not None:
        return _corrected_mm(
            codes, x_scale, weight, s_rel, s_channel, codebook, correction, bias, out_dtype, group_size, residual,
            residual_scale,
        )  # fmt: skip
    n, k = weight.shape[0], s_rel.shape[1] * group_size
    multiply = torch.ops.kitchen.int8_scaled_mm.default
    rows = chunk_rows(n, k, codes.device.index)
    if rows >= n:
        decoded = decode(weight, s_rel, codebook, group_size)
        return multiply(codes, x_scale, decoded, s_channel, bias, out_dtype, residual, residual_scale)
    out = codes.new_empty((*codes.shape[:-1], n), dtype=out_dtype)
    s_channel, gate = s_channel.reshape(-1), None if residual_scale is None else residual_scale.reshape(-1)
    workspace = weight.new_empty((rows, k))
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        decoded = decode(weight[part], s_rel[part], codebook, group_size, out=workspace[: part.stop - start])
        out[..., part] = multiply(
            codes, x_scale, decoded, s_channel[part], None if bias is None else bias[part], out_dtype,
            None if residual is None else residual[..., part], gate if gate is None or gate.numel() == 1 else gate[part],
        )  # fmt: skip
    return out


def _corrected_mm(
    codes,
    x_scale,
    weight,
    s_rel,
    s_channel,
    codebook,
    correction,
    bias,
    out_dtype,
    group_size,
    residual,
    residual_scale,
):
    """The same with a correction: y = fma(float(acc) * x_scale, s_channel, c), which an INT8 product with a scale of 1, the
    residual c and the residual's scale s_channel computes to the bit."""
    rows = codes.reshape(-1, codes.shape[-1])
    c = correction_addend(rows, x_scale.reshape(-1, 1), correction, bias, group_size)
    one = s_channel.new_ones(1)
    decoded = decode(weight, s_rel, codebook, group_size)
    y = torch.ops.kitchen.int8_scaled_mm.default(
        rows, x_scale.reshape(-1, 1), decoded, one, None, torch.float32, c, s_channel.reshape(-1)
    )
    gate = None if residual_scale is None else residual_scale.reshape(-1)
    y = y.reshape(*codes.shape[:-1], weight.shape[0])
    return add_residual(y, residual, gate).to(out_dtype)


@lru_cache(maxsize=4096)
def chunk_rows(n: int, k: int, device: int) -> int:
    """Rows of a weight that are decoded at once: all of them where half of the L2 cache holds them, else as many as it holds.

    A multiple of 256, so that the products of the pieces have whole tiles.
    """
    half = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) // 2
    return n if n * k <= half else max(256, half // k // 256 * 256)


@lru_cache(maxsize=8192)
def stream_plan(M: int, N: int, K: int, bits: int, group: int, device: int, plan: Plan | None = None) -> PlanAnswer:
    """The plan of the streaming kernel on a device (or the given one)."""
    gpu = torch.cuda.get_device_properties(device)
    return PlanAnswer(
        *EXTENSION.module.w4a8_stream_plan(
            M, N, K, bits, group, gpu.multi_processor_count, gpu.shared_memory_per_block_optin, gpu.major >= 9, plan
        )
    )


def stream_shared_bytes(problem: Problem, facts: DeviceFacts) -> int:
    """Shared memory of a block of the streaming kernel, by the plan that needs the least (lay_out of stream.cu)."""
    steps = -(-problem.K // 256)
    splits = [s for s in (1, 2, 4, 8) if s == 1 or (facts.sm >= 90 and (s - 1) * -(-steps // s) < steps)]
    own = -(-steps // splits[-1]) * 256
    scales = 2 * 16 * 16 * (-(-own // problem.group // 16) | 1)
    sums = 2 * 4 * 20 * problem.M
    received = 0 if splits[-1] == 1 else 16 * 8 * splits[-1] * -(-4 * problem.M // (8 * splits[-1]))
    ring = 2 * 16 * (2048 if problem.bits == 4 else 3072)
    return 6144 + 1152 + 640 + scales + sums + problem.M * (own + 16) + received + ring


@lru_cache(maxsize=8192)
def resident_plan(M: int, N: int, K: int, bits: int, group: int, device: int, plan: Plan | None = None) -> PlanAnswer:
    """The plan of the kernel for the resident layout on a device (or the given one)."""
    gpu = torch.cuda.get_device_properties(device)
    return PlanAnswer(
        *EXTENSION.module.w4a8_resident_plan(
            M, N, K, bits, group, gpu.multi_processor_count, gpu.shared_memory_per_block_optin, gpu.major >= 9, plan
        )
    )


def resident_shared_bytes(problem: Problem) -> int:
    """Shared memory of a block of the kernel for the resident layout, by the plan that needs the least (lay_out of csrc)."""
    units = -(-problem.K // 512)
    splits = next(s for s in (8, 4, 2, 1) if s == 1 or (s - 1) * -(-units // s) < units)
    rows = next((rows for rows in (8, 16, 32) if rows >= problem.M), problem.M)
    tokens = (problem.M if rows == 8 else rows) * (-(-units // splits) * 512 + 16)
    received = 0 if splits == 1 else 16 * 8 * splits * -(-4 * problem.M // (8 * splits))
    return 16384 + 2 * 4 * 20 * problem.M + 256 + tokens + received + 2048


@lru_cache(maxsize=8192)
def hopper_plan(
    M: int, N: int, K: int, bits: int, group: int, copies_result: bool, device: int, plan: Plan | None = None
) -> PlanAnswer:
    """The plan of the Hopper kernels on a device (or the given one). ``copies_result``: Problem of csrc/.../hopper.h."""
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    return PlanAnswer(*EXTENSION.module.w4a8_hopper_plan(M, N, K, bits, group, copies_result, sm_count, plan))


def _planned(
    launch: str, m: int, weight: torch.Tensor, k: int, group: int, out: torch.Tensor, residual: torch.Tensor | None,
    plan: Plan | None = None,
) -> tuple[Plan | None, int]:  # fmt: skip
    """The plan to launch with, and the bytes of its workspace."""
    if launch != HOPPER:
        return plan, 0
    n = weight.shape[0]
    aligned = n * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0
    copies_result = aligned and (residual is None or residual.data_ptr() % 16 == 0)
    answer = hopper_plan(m, n, k, bits_of(weight, k), group, copies_result, out.device.index, plan)
    return answer.plan, answer.workspace


def _linear_workspace(launch: str, m: int, k: int, plan: Plan | None, own_bytes: int) -> int:
    """Bytes that a linear works in: codes and scales of x, then what the product wants besides. For tiles of HOPPER the
    quantizer writes the codes in their order at once, rows padded to 128 columns, and there is nothing besides."""
    if launch == HOPPER and plan is not None and plan[0] > 0:
        k, own_bytes = -(-k // 128) * 128, 0
    return -(-(k + 4) * m // 256) * 256 + own_bytes


def workspace_bytes(kernel: str, M: int, N: int, K: int, device: int, bits: int = 4, group: int = 16) -> int:
    """What a kernel of w4a8_scaled_mm ("stream", "hopper", "decoded") asks of torch's allocator besides its output."""
    if kernel == "hopper":
        return hopper_plan(M, N, K, bits, group, True, device).workspace
    return min(N, chunk_rows(N, K, device)) * K if kernel == "decoded" else 0


def bits_of(weight: torch.Tensor, k: int) -> int:
    """Bits a code, from the bytes of a row."""
    return 4 if weight.shape[1] * 2 == k else 6


def _aligned(matrix: torch.Tensor, alignment: int) -> torch.Tensor:
    """The matrix itself where it is contiguous and aligned, else a copy that is."""
    if matrix.is_contiguous() and matrix.data_ptr() % alignment == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _scales(launch: str, s_rel: torch.Tensor) -> torch.Tensor:
    """Contiguous; for HOPPER aligned to pairs as well."""
    return _aligned(s_rel, 2 if launch == HOPPER else 1)


def _table(codebook: torch.Tensor | None) -> torch.Tensor | None:
    """float32, contiguous and aligned to 16 bytes."""
    if codebook is None:
        return None
    fits = codebook.dtype == torch.float32 and codebook.is_contiguous() and codebook.data_ptr() % 16 == 0
    return codebook if fits else codebook.float().clone(memory_format=torch.contiguous_format)


def _gate(residual_scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if residual_scale is None else residual_scale.reshape(-1).float().contiguous()


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _same(made: torch.Tensor, given: torch.Tensor) -> bool:
    return made.data_ptr() == given.data_ptr()
