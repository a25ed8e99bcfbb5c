"""awq_linear by decoding pieces of the weight and multiplying by cuBLAS: any shape, group and type, bounded workspace.

    W = dequantize_awq(..)     in pieces of rows, each in a type T that cuBLAS multiplies with fp32 accumulation
    y = x W^T                  and bias and residual in the same rounding

With a bias of the output's type, or none, cuBLAS writes the output itself; otherwise it writes fp32 sums, and `finish_sums`
adds the rest and rounds once. So it does with a residual of whatever type: cuBLAS may round the product before it adds one
(seen on an H200 for 2 rows of fp16: off by 0.9 of a last place).

GPUs below sm_80 have no bf16 arithmetic: there bf16 x and the weight, rounded to bf16 as everywhere, multiply as fp32 numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kitchen_core.arithmetic import apply_input_act
from kitchen_core.devices import DeviceFacts, device_facts

from . import _launch

WORKSPACE_BYTES = 32 << 20
TILE = 256  # pieces of rows are multiples of this, where there is room: whole GEMM tiles

SWITCHES = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_switch = threading.Lock()


class Pieces(NamedTuple):
    """``columns`` of the output at a time, whose weight is decoded; ``rows`` of fp32 sums, 0 where cuBLAS writes the output."""

    columns: int
    rows: int
    workspace_bytes: int


def choose_pieces(m: int, n: int, k: int, weight_bytes: int, direct: bool) -> Pieces:
    """The largest pieces within the workspace: of the weight alone, or in equal parts of the weight and of the sums."""
    room = WORKSPACE_BYTES if direct else WORKSPACE_BYTES // 2
    columns = _even(n, max(1, room // (k * weight_bytes)))
    rows = 0 if direct else min(m, max(1, room // (4 * columns)))
    return Pieces(columns, rows, columns * k * weight_bytes + 4 * rows * columns)


def _even(total: int, most: int) -> int:
    """At most ``most``, a multiple of whole tiles where there is room, and in as few pieces as can be of like size."""
    if total <= most:
        return max(1, total)
    if most >= TILE:
        most -= most % TILE
    pieces = -(-total // most)
    size = -(-total // pieces)
    return min(most, -(-size // TILE) * TILE)


@contextlib.contextmanager
def full_accumulation() -> Iterator[None]:
    """Sums of fp16 and bf16 products in fp32, also where K is split, which torch's defaults do not promise.

    NOTE: the switches are process-wide, hence the lock; another thread's GEMM may become more exact meanwhile.
    """
    settings = torch.backends.cuda.matmul
    with _switch:
        before = {name: getattr(settings, name) for name in SWITCHES}
        changed = [name for name, value in before.items() if value]
        try:
            for name in changed:
                setattr(settings, name, False)
            yield
        finally:
            for name in changed:
                setattr(settings, name, before[name])


def is_direct(dtype, out_dtype, bias, residual) -> bool:
    """Whether cuBLAS does it all in one rounding: a bias of the output's type in its epilogue, or nothing but the product."""
    if dtype == torch.float32 or out_dtype != dtype or residual is not None:
        return False
    return bias is None or bias.dtype == dtype


def multiply_dtype(x_dtype: torch.dtype, decoded: torch.dtype, facts: DeviceFacts) -> torch.dtype:
    """What cuBLAS is given: x's type where the weight decodes to it and the GPU multiplies it, else fp32, which holds both."""
    if x_dtype != decoded or (x_dtype == torch.bfloat16 and not facts.bf16_tensor_cores):
        return torch.float32
    return x_dtype


def linear(
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
    """awq_linear. float32 x, and activations in front, multiply in fp32: slow, and as torch's own fp32 GEMM is set."""
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    decoded = weight_dtype or x.dtype
    out_dtype = out_dtype or x.dtype
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    h = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    dtype = multiply_dtype(h.dtype, decoded, device_facts(x.device))
    rows, y = h.reshape(-1, k).to(dtype), out.view(-1, n)
    weight = _launch.packed(qweight, wscales, wzeros)
    bias, residual, residual_scale = _launch.contiguous_epilogue(bias, residual, residual_scale, n)
    direct = is_direct(dtype, out_dtype, bias, residual)
    pieces = choose_pieces(rows.shape[0], n, k, dtype.itemsize, direct)
    dense = torch.empty((pieces.columns, k), dtype=dtype, device=x.device)
    with full_accumulation():
        for first in range(0, n, pieces.columns):
            part = dense[: min(pieces.columns, n - first)]
            _launch.dequantize_rows(*weight, group_size, first, part, decoded)
            if direct:
                _multiply(rows, part, y, first, bias)
            else:
                _multiply_and_finish(rows, part, y, first, pieces.rows, bias, residual, residual_scale)
    return out


def _multiply(rows, part, y, first, bias) -> None:
    columns = slice(first, first + part.shape[0])
    target = y[:, columns]
    if bias is not None:
        torch.addmm(bias[columns], rows, part.t(), out=target)
    else:
        torch.mm(rows, part.t(), out=target)


def _multiply_and_finish(rows, part, y, first, most, bias, residual, residual_scale) -> None:
    for row in range(0, rows.shape[0], most):
        piece = rows[row : row + most]
        wide = {} if piece.dtype == torch.float32 else {"out_dtype": torch.float32}
        sums = torch.mm(piece, part.t(), **wide)
        _launch.finish_sums(sums, y, row, first, bias, residual, residual_scale)
