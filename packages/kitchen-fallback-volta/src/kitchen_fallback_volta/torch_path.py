"""INT8 linears as FP16 GEMMs of integer codes, in plain PyTorch: no extension, bounded workspace.

    acc[m, n] = sum_k a[m, k] * b[n, k]      a: codes of x (or fp16 rows), b: codes of the weight, both held in fp16
    y = epilogue(acc)                        scales, bias, residual: kitchen_core.arithmetic, in fp32

Why the code GEMM is exact. An integer of at most 2048 is exact in fp16, so codes are; a product of two codes is an
integer of at most 2^14; any partial sum over 1024 columns is an integer of at most 1024 * 128 * 128 = 2^24, and fp32
holds every such integer. So within a slice of 1024 columns no order of additions can round. Slices are added in fp64,
which is exact to 2^53: at any K below 2^39. The one rounding to fp32 comes at the end, as from INT32. (fp64 instead of
int32 because torch adds an fp32 tensor into an fp64 one in a single pass, and not into an int32 one.)

The output is cut into chunks [m, n] so that everything alive beside inputs and output stays within WORKSPACE_BYTES.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from math import isqrt, prod
from typing import NamedTuple

import torch

from kitchen_core.arithmetic import (
    add_residual,
    apply_input_act,
    fp16_rows,
    hadamard_rotate,
    input_width,
    scale_and_bias,
)

WORKSPACE_BYTES = 64 << 20
EXACT_COLUMNS = 1024  # 1024 * 128 * 128 = 2^24, the last integer up to which fp32 has no gaps
FP16_COLUMNS = 4096  # slices of the fp16-activation mode, which has nothing to keep exact

# Shares of the workspace, in bytes. Rows of x that wait as operands; the temporaries of making them, which are gone before
# the first GEMM; what is left serves a chunk.
_OPERAND_BYTES = 12 << 20
_PREPARE_BYTES = 48 << 20
_CHUNK_BYTES = WORKSPACE_BYTES - _OPERAND_BYTES
_PREPARE_ELEMENT = 24  # per element of x while it is activated, rotated and quantized eagerly (at most 20 on the CPU)
_GEMM_ELEMENT = 12  # per output: the fp64 sum and one fp32 partial
_SCALE_ELEMENT = 20  # per output in an epilogue of scales alone,
_BIAS_ELEMENT = 28  # with a bias, whose FMA goes through fp64,
_RESIDUAL_ELEMENT = 40  # and with a residual, which is as large as the output
_TILE = 128  # chunk sides are multiples of this, where there is room: whole GEMM tiles


class Plan(NamedTuple):
    """How one GEMM is cut: ``rows`` of x by ``columns`` of output at a time, each in slices of ``depth`` columns of K."""

    rows: int
    columns: int
    depth: int


def choose_plan(m: int, n: int, k: int, depth: int, element_bytes: int, operand_bytes: int = 2) -> Plan:
    """The largest chunks, as square as M and N let them be, whose temporaries fit the chunk's share of the workspace.

    A chunk holds ``element_bytes`` per output in its epilogue, 12 in its GEMM; beside the latter lie the slices of both
    operands with ``operand_bytes`` per element.
    """
    depth = max(1, min(depth, k))
    elements = _CHUNK_BYTES // element_bytes
    most = (_CHUNK_BYTES - _GEMM_ELEMENT * elements) // (2 * depth * operand_bytes)  # rows of either operand's slice
    side = min(isqrt(elements), most)
    rows = min(m, side)
    columns = min(n, elements // max(1, rows), most)
    rows = min(m, elements // max(1, columns), most)
    return Plan(_even(m, rows), _even(n, columns), depth)


def _even(total: int, most: int) -> int:
    """A size of at most ``most`` that cuts ``total`` into equal pieces of whole tiles, as few as can be."""
    if total <= most:
        return max(1, total)
    if most >= _TILE:
        most -= most % _TILE
    pieces = -(-total // most)
    size = -(-total // pieces)
    return min(most, -(-size // _TILE) * _TILE)


# -------------------------------------------------------------------------------------------------------- GEMM

_switch = threading.Lock()


def _mm_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp16 a [m, k] @ b.T [k, n] with fp32 accumulation and fp32 output on CUDA.

    NOTE: torch refuses this call while ``torch.backends.cuda.matmul.allow_fp16_accumulation`` is set (as fast modes of
    frameworks do), so the switch is put off for the launch; it is process-wide, hence the lock. The other switch,
    allow_fp16_reduced_precision_reduction, lets split-K partials meet in the output's type, and that is fp32 here.
    """
    settings = torch.backends.cuda.matmul
    with _switch:
        fast = settings.allow_fp16_accumulation
        if not fast:
            return torch.mm(a, b.t(), out_dtype=torch.float32)
        settings.allow_fp16_accumulation = False
        try:
            return torch.mm(a, b.t(), out_dtype=torch.float32)
        finally:
            settings.allow_fp16_accumulation = True


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [m, k] @ b.T [k, n] in fp32, both operands held in fp16 first."""
    a, b = a.to(torch.float16), b.to(torch.float16)
    if a.is_cuda:
        return _mm_fp32(a, b)
    with torch.autocast(a.device.type, enabled=False):  # elsewhere torch.mm has no fp32 output: widen, which is exact
        return a.float() @ b.float().t()


def _accumulate(a: torch.Tensor, b: torch.Tensor, depth: int) -> torch.Tensor:
    """a [m, K] @ b.T [K, n] by slices of ``depth`` columns: fp32 for one slice, fp64 for the sum of several."""
    acc = _product(a[:, :depth], b[:, :depth])
    if a.shape[1] > depth:
        acc = acc.double()
        for k in range(depth, a.shape[1], depth):
            acc.add_(_product(a[:, k : k + depth], b[:, k : k + depth]))
    return acc


class _Epilogue(NamedTuple):
    """What follows the GEMM, over all rows and columns; every field but the scales may be None."""

    x_scale: torch.Tensor  # [M, 1]
    weight_scale: torch.Tensor  # [N] or [1]
    bias: torch.Tensor | None  # [N]
    residual: torch.Tensor | None  # [M, N]
    residual_scale: torch.Tensor | None  # [N] or [1]

    @property
    def element_bytes(self) -> int:
        if self.residual is not None:
            return _RESIDUAL_ELEMENT
        return _SCALE_ELEMENT if self.bias is None else _BIAS_ELEMENT

    def rows(self, rows: slice) -> _Epilogue:
        """The same for some of the rows."""
        return self._replace(x_scale=self.x_scale[rows], residual=_cut(self.residual, rows))

    def columns(self, columns: slice) -> _Epilogue:
        """The same for some of the columns."""
        return self._replace(
            weight_scale=_cut_vector(self.weight_scale, columns),
            bias=_cut(self.bias, columns),
            residual=None if self.residual is None else self.residual[:, columns],
            residual_scale=_cut_vector(self.residual_scale, columns),
        )

    def __call__(self, acc: torch.Tensor) -> torch.Tensor:
        return add_residual(
            scale_and_bias(acc, self.x_scale, self.weight_scale, self.bias), self.residual, self.residual_scale
        )


def _cut(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[part]


def _cut_vector(vector: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """A part of a vector; one element serves all."""
    return vector if vector is None or vector.numel() == 1 else vector[part]


def _pieces(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _multiply(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, epilogue: _Epilogue, depth: int) -> None:
    """out [M, N] = epilogue(a [M, K] @ weight.T), chunk by chunk."""
    held = 2 if a.is_cuda else 6  # fp16, and off CUDA its fp32 copy
    plan = choose_plan(*out.shape, weight.shape[1], depth, epilogue.element_bytes, held)
    for columns in _pieces(out.shape[1], plan.columns):
        b, of_columns = weight[columns], epilogue.columns(columns)
        for rows in _pieces(out.shape[0], plan.rows):
            out[rows, columns] = of_columns.rows(rows)(_accumulate(a[rows], b, plan.depth))


# ------------------------------------------------------------------------------------------------- the kernels


def _flat(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.reshape(-1)


def int8_scaled_mm(
    codes, x_scale, weight, weight_scale, bias=None, out_dtype=torch.bfloat16, residual=None, residual_scale=None
):
    """The op int8_scaled_mm; bit-equal to its reference at any K."""
    n, k = weight.shape
    out = codes.new_empty((*codes.shape[:-1], n), dtype=out_dtype)
    if out.numel():
        rows = None if residual is None else residual.reshape(-1, n)
        epilogue = _Epilogue(x_scale.reshape(-1, 1), _flat(weight_scale), bias, rows, _flat(residual_scale))
        _multiply(out.view(-1, n), codes.reshape(prod(codes.shape[:-1]), k), weight, epilogue, EXACT_COLUMNS)
    return out


def int8_linear(
    x, weight, weight_scale, bias=None, out_dtype=None, convrot_groupsize=0,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
):  # fmt: skip
    """The op int8_linear; its codes are made from x in fp32 by the op quantize_and_rotate_rowwise."""
    quantize = torch.ops.kitchen.quantize_and_rotate_rowwise.default

    def prepare(rows):
        return quantize(rows, convrot_groupsize, input_act, input_act_weight, input_act_eps)

    width = input_width(weight.shape[1], input_act)
    return _linear(
        x, width, prepare, torch.int8, EXACT_COLUMNS, weight, weight_scale, bias, out_dtype, residual, residual_scale
    )


def int8_linear_fp16(
    x, weight, weight_scale, bias=None, out_dtype=None, convrot_groupsize=0,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    fp16_activations=False,
):  # fmt: skip
    """The op int8_linear_fp16: int8_linear, or with ``fp16_activations`` rows of fp16 scaled by powers of two."""
    if not fp16_activations:
        return int8_linear(
            x, weight, weight_scale, bias, out_dtype, convrot_groupsize, input_act, input_act_weight, input_act_eps,
            residual, residual_scale,
        )  # fmt: skip

    def prepare(rows):
        rows = apply_input_act(rows.float(), input_act, input_act_weight, input_act_eps)
        return fp16_rows(hadamard_rotate(rows, convrot_groupsize))

    width = input_width(weight.shape[1], input_act)
    return _linear(
        x, width, prepare, torch.float16, FP16_COLUMNS, weight, weight_scale, bias, out_dtype, residual, residual_scale
    )


def _linear(
    x: torch.Tensor, width: int, prepare: Callable, operand: torch.dtype, depth: int, weight, weight_scale, bias,
    out_dtype, residual, residual_scale,
) -> torch.Tensor:  # fmt: skip
    """Rows of x become operands, block by block, and each block is multiplied before the next is made."""
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    if not out.numel():
        return out
    x_rows, y_rows = x.reshape(prod(x.shape[:-1]), width), out.view(-1, n)
    residual_rows = None if residual is None else residual.reshape(-1, n)
    weight_scale, residual_scale = _flat(weight_scale), _flat(residual_scale)
    for block in _pieces(len(x_rows), _even(len(x_rows), max(1, _OPERAND_BYTES // max(1, k * operand.itemsize)))):
        a, x_scale = _prepared(x_rows[block], prepare, operand, k)
        epilogue = _Epilogue(x_scale, weight_scale, bias, _cut(residual_rows, block), residual_scale)
        _multiply(y_rows[block], a, weight, epilogue, depth)
        del a
    return out


def _prepared(x: torch.Tensor, prepare: Callable, operand: torch.dtype, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Operand rows [M, K] and their scales [M, 1], made piece by piece, so that fp32 temporaries stay bounded."""
    width = max(k, x.shape[1])
    size = max(1, _PREPARE_BYTES // max(1, width * _PREPARE_ELEMENT))
    if len(x) <= size:
        return prepare(x)
    a = x.new_empty((len(x), k), dtype=operand)
    x_scale = x.new_empty((len(x), 1), dtype=torch.float32)
    for piece in _pieces(len(x), size):
        a[piece], x_scale[piece] = prepare(x[piece])
    return a, x_scale
