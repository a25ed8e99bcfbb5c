"""INT8 linears as FP16 GEMMs of integer codes, in plain PyTorch: no extension, bounded workspace.

    acc[m, n] = sum_k a[m, k] * b[n, k]      a: codes of x (or fp16 rows), b: codes of the weight, both held in fp16
    y = epilogue(acc)                        scales, bias, residual: the arithmetic of kitchen_core.arithmetic, in fp32

Why the code GEMM is exact. An integer of at most 2048 is exact in fp16, so codes are; a product of two codes is an
integer of at most 2^14, and fp32 holds every integer up to 2^24: no order of additions can round a sum whose parts stay
within that. There are three ways to know that they do.

- Over 1024 columns any sum of products is at most 1024 * 128 * 128 = 2^24.
- Above, the sum over any set of columns is at most |a[m]| * |b[n]|, the Euclidean norms. For large problems the GEMM runs
  over up to PROVEN_COLUMNS columns at a time, while the largest norms are taken; then they are read, once a call, and if
  their product is beyond 2^24 the next way is taken instead. Two such pieces are added with one rounding. The reading waits
  for the GPU, so this is not done while a CUDA graph is captured, nor where the user has torch report synchronizations.
- Codes of x are cut in two, code = 16 * high + low with both parts at most 8 in size, and each part has a GEMM of its own:
  its products are at most 2^10 and its sums exact over 16384 columns. low + 16 * high is rounded once to fp32, as an INT32
  accumulator is when it is converted. Pieces of 16384 columns are added in fp64, exact up to 2^53. (The second GEMM costs
  less than adding up slices of 1024 columns, which would take several fp64 passes over the output.)

The output is cut into chunks [m, n] so that everything alive beside inputs and output stays within WORKSPACE_BYTES.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import torch

from kitchen_core.arithmetic import apply_input_act, fp16_rows, hadamard_rotate, input_width

WORKSPACE_BYTES = 64 << 20
EXACT_COLUMNS = 1024  # 1024 * 128 * 128 = 2^24, the last integer up to which fp32 has no gaps
SPLIT_COLUMNS = 16_384  # the same for products of a part of a code, at most 8, and a code: 16384 * 8 * 128 = 2^24
PROVEN_COLUMNS = 8192  # of a GEMM whose sums are shown to be exact by the operands' norms; at most two such pieces
PROVEN_FLOPS = 2**36  # from so many on it is worth a wait for the GPU: as many are saved, 0.8 ms of a V100
FP16_COLUMNS = 4096  # sums of the fp16-activation mode, which has nothing to keep exact, are fp32 over so many columns
SLICE_COLUMNS = 4096  # of the weight that are held in fp16 at a time, where it has no more,
DEEP_SLICE_COLUMNS = (
    2048  # and where it has: a block has few rows then, and shorter slices leave room for a wider chunk
)

# Shares of the workspace, in bytes. Rows of x that wait as operands; the temporaries of making them, which are gone before
# the first GEMM; what is left serves a chunk.
_OPERAND_BYTES = 28 << 20
_PREPARE_BYTES = 36 << 20
_CHUNK_BYTES = WORKSPACE_BYTES - _OPERAND_BYTES
_PREPARE_ELEMENT = (
    26  # per element of x while it is activated, rotated, quantized and cut eagerly (at most 20 on the CPU)
)
# Per output in an epilogue of scales alone, with a bias, whose FMA goes through fp64, and with a residual, which is as large as
# the output: off CUDA, where operands of mixed dtypes are converted first.
_SCALE_ELEMENT, _BIAS_ELEMENT, _RESIDUAL_ELEMENT = 20, 28, 40
_TILE = 128  # chunk sides are multiples of this, where there is room: whole GEMM tiles


class Plan(NamedTuple):
    """How one GEMM is cut: ``rows`` of x by ``columns`` of output at a time, each in slices of ``depth`` columns of K."""

    rows: int
    columns: int
    depth: int


class Cost(NamedTuple):
    """Bytes alive in a chunk: per output in the GEMM and in the epilogue; per element of the slices of either operand."""

    gemm: int
    epilogue: int
    a: int
    b: int

    def columns(self, rows: int, depth: int) -> int:
        """How many columns of output fit the chunk's share of the workspace beside ``rows`` rows; 0 if none does."""
        left = _CHUNK_BYTES - rows * depth * self.a
        return max(0, min(left // (rows * self.gemm + depth * self.b), _CHUNK_BYTES // (rows * self.epilogue)))


def choose_plan(m: int, n: int, cost: Cost, depth: int) -> Plan:
    """Large chunks that fit the workspace: all rows of the block, unless the chunk would be tall and narrow.

    A slice of the weight is converted for every chunk, so the fewer chunks lie above each other the better.
    """
    rows = max(1, m)
    while rows > 1 and cost.columns(rows, depth) < min(n, -(-rows // 4)):
        rows = -(-rows // 2)
    return Plan(_even(m, rows), _even(n, max(1, cost.columns(rows, depth))), depth)


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
    """fp16 a [m, k] @ b.T [k, n] in fp32."""
    if a.is_cuda:
        return _mm_fp32(a, b)
    with torch.autocast(a.device.type, enabled=False):  # elsewhere torch.mm has no fp32 output: widen, which is exact
        return a.float() @ b.float().t()


class Proof:
    """The norms of either operand's rows over one or two pieces of K, and whether they show all sums to be exact."""

    def __init__(self, k: int) -> None:
        self.columns = k if k <= PROVEN_COLUMNS else -(-k // 2)
        self.pieces = -(-k // self.columns)
        self.weight_seen = False
        self._norms = [([], []) for _ in range(self.pieces)]  # of x's codes and of the weight's

    def see(self, operand: int, rows: torch.Tensor, first_column: int) -> None:
        """fp16 rows of x (operand 0) or of the weight (1), of the piece that begins at a column."""
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        self._norms[first_column // self.columns][operand].append(norms)

    def holds(self) -> bool:
        """Waits for the GPU. The norms are fp32 sums of at most 2^13 squares: off by less than 2^-10."""
        products = [torch.cat(x).amax() * torch.cat(weight).amax() for x, weight in self._norms]
        return bool((torch.stack(products) <= 2.0**24 * (1 - 2.0**-10)).all())


def can_wait(out: torch.Tensor, k: int) -> bool:
    """Whether a call may read a Proof: a large one, outside of CUDA graphs, whose user has nothing against waiting."""
    return (
        out.is_cuda
        and EXACT_COLUMNS < k <= 2 * PROVEN_COLUMNS
        and 2 * out.numel() * k >= PROVEN_FLOPS
        and not torch.cuda.is_current_stream_capturing()
        and torch.cuda.get_sync_debug_mode() == 0
    )


class Operand(NamedTuple):
    """Rows of x as they are multiplied: fp16 [M, K], and where codes are cut in two, their high parts."""

    rows: torch.Tensor
    high: torch.Tensor | None
    exact_columns: int  # over so many columns sums may stay in fp32
    proof: Proof | None = None

    def part(self, rows: slice) -> Operand:
        return self._replace(rows=self.rows[rows], high=_cut(self.high, rows))

    @classmethod
    def empty(cls, m: int, k: int, codes: bool, device: torch.device, proof: Proof | None = None) -> Operand:
        """For codes or for fp16 activations; what it will hold is written by ``fill``."""
        rows = torch.empty(m, k, dtype=torch.float16, device=device)
        if proof is not None:
            return cls(rows, None, proof.columns, proof)
        if codes and k > EXACT_COLUMNS:
            return cls(rows, torch.empty_like(rows), SPLIT_COLUMNS)
        return cls(rows, None, EXACT_COLUMNS if codes else FP16_COLUMNS)

    def fill(self, rows: slice, values: torch.Tensor) -> None:
        """int8 codes (or fp16 rows) for some of the rows; codes are cut in two where there is a place for the high parts."""
        low = self.rows[rows]
        low.copy_(values)
        if self.high is not None:
            high = self.high[rows]
            torch.mul(low, 1 / 16, out=high)
            high.round_()  # ties to even: what is left is -8 .. 8
            low.sub_(high, alpha=16)


def bytes_of_row(k: int, codes: bool, proof: Proof | None = None) -> int:
    """Of an Operand."""
    return k * (4 if codes and k > EXACT_COLUMNS and proof is None else 2)


def slice_columns(a: Operand, k: int) -> int:
    """Columns of K in a GEMM: all that a proof is about, else as many as leave room for a wide chunk."""
    if a.proof is not None:
        return a.proof.columns
    return max(1, k if k <= SLICE_COLUMNS else DEEP_SLICE_COLUMNS)


def bytes_of_output(a: Operand, k: int, depth: int) -> int:
    """Per output while it is summed: the sums of a piece, a partial one, and what pieces before it came to."""
    if a.proof is not None:
        return 4 * a.proof.pieces
    partial = min(k, a.exact_columns) > depth
    return 4 * ((1 if a.high is None else 2) + partial) + (8 if k > a.exact_columns else 0)


def _accumulate(a: Operand, b: torch.Tensor, depth: int) -> torch.Tensor:
    """a [m, K] @ int8 b.T [K, n]: fp32 where its sums fit, else fp64, in either case exact for codes."""
    k = b.shape[1]
    total = a.rows.new_zeros(len(a.rows), len(b), dtype=torch.float32) if k == 0 else None
    for first in range(0, k, a.exact_columns):
        piece = slice(first, min(first + a.exact_columns, k))
        low, high = _accumulate_piece(a, b, piece, depth)
        if k <= a.exact_columns:
            return low if high is None else low.add_(high, alpha=16)  # 16 * high is exact: one rounding
        if a.proof is not None:  # of two pieces: one rounding
            total = _added(total, low)
            continue
        total = low.double() if total is None else total.add_(low)
        if high is not None:
            total.add_(high, alpha=16)
        del low, high  # before those of the next piece are made
    return total


def _added(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    return part if total is None else total.add_(part)


def _accumulate_piece(
    a: Operand, b: torch.Tensor, piece: slice, depth: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of both parts over columns that fp32 can hold, ``depth`` columns a GEMM."""
    low = high = None
    for k in range(piece.start, piece.stop, depth):
        columns = slice(k, min(k + depth, piece.stop))
        narrow = b[:, columns].to(torch.float16)
        if a.proof is not None and not a.proof.weight_seen:
            a.proof.see(1, narrow, piece.start)
        low = _added(low, _product(a.rows[:, columns], narrow))
        if a.high is not None:
            high = _added(high, _product(a.high[:, columns], narrow))
        del narrow  # before the next slice is made
    return low, high


class _Epilogue(NamedTuple):
    """What follows the GEMM, over all rows and columns; every field but the scales may be None."""

    x_scale: torch.Tensor  # [M, 1]
    weight_scale: torch.Tensor  # [N] or [1]
    bias: torch.Tensor | None  # [N]
    residual: torch.Tensor | None  # [M, N]
    residual_scale: torch.Tensor | None  # [N] or [1]

    def element_bytes(self, fp64_sums: bool) -> int:
        """Per output; on CUDA in place, once the sums are fp32."""
        if self.x_scale.is_cuda:
            return 12 if fp64_sums else 4
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

    def finish(self, acc: torch.Tensor, out: torch.Tensor) -> None:
        """out = epilogue(acc) for one chunk: what scale_and_bias and add_residual compute, in place and in few passes.

        ``acc`` is overwritten. An FMA is addcmul with an fp64 operand: computed in fp64, where the product is exact.
        """
        y = acc.float().mul_(self.x_scale)
        if self.bias is None:
            if self.residual is None:
                torch.mul(y, self.weight_scale, out=out)
                return
            y.mul_(self.weight_scale)
        else:
            torch.addcmul(self.bias.double(), y, self.weight_scale.double(), out=y)
        if self.residual is not None and self.residual_scale is None:
            y.add_(self.residual)
        elif self.residual is not None:
            torch.addcmul(self.residual, y, self.residual_scale.double(), out=y)
        out.copy_(y)


def _cut(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[part]


def _cut_vector(vector: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """A part of a vector; one element serves all."""
    return vector if vector is None or vector.numel() == 1 else vector[part]


def _pieces(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _multiply(out: torch.Tensor, a: Operand, weight: torch.Tensor, epilogue: _Epilogue) -> None:
    """out [M, N] = epilogue(a [M, K] @ weight.T), chunk by chunk."""
    k = weight.shape[1]
    depth = slice_columns(a, k)
    fp64_sums = a.proof is None and k > a.exact_columns
    held = (0, 2) if weight.is_cuda else (4, 6)  # the weight in fp16; off CUDA both operands in fp32 too
    cost = Cost(bytes_of_output(a, k, depth), epilogue.element_bytes(fp64_sums), *held)
    plan = choose_plan(*out.shape, cost, depth)
    for columns in _pieces(out.shape[1], plan.columns):
        b, of_columns = weight[columns], epilogue.columns(columns)
        for rows in _pieces(out.shape[0], plan.rows):
            of_columns.rows(rows).finish(_accumulate(a.part(rows), b, plan.depth), out[rows, columns])


# ------------------------------------------------------------------------------------------------- the kernels


def _flat(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.reshape(-1)


def int8_scaled_mm(
    codes, x_scale, weight, weight_scale, bias=None, out_dtype=torch.bfloat16, residual=None, residual_scale=None
):
    """The op int8_scaled_mm; bit-equal to its reference at any K."""
    n, k = weight.shape
    out = codes.new_empty((*codes.shape[:-1], n), dtype=out_dtype)
    rows, scales = codes.reshape(prod(codes.shape[:-1]), k), x_scale.reshape(-1, 1)

    def prepare(part):
        return rows[part], scales[part]

    _blocks(out, prepare, True, 1, weight, weight_scale, bias, residual, residual_scale)
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
    return _linear(x, width, prepare, True, weight, weight_scale, bias, out_dtype, residual, residual_scale)


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
    return _linear(x, width, prepare, False, weight, weight_scale, bias, out_dtype, residual, residual_scale)


def _linear(
    x: torch.Tensor, width: int, prepare: Callable, codes: bool, weight, weight_scale, bias, out_dtype, residual,
    residual_scale,
) -> torch.Tensor:  # fmt: skip
    n, k = weight.shape
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    rows = x.reshape(prod(x.shape[:-1]), width)
    _blocks(
        out, lambda part: prepare(rows[part]), codes, max(k, width) * _PREPARE_ELEMENT, weight, weight_scale,
        bias, residual, residual_scale,
    )  # fmt: skip
    return out


def _blocks(
    out: torch.Tensor, prepare: Callable, codes: bool, prepare_bytes: int, weight, weight_scale, bias, residual,
    residual_scale,
) -> None:  # fmt: skip
    """out [..., N]: rows of x become operands, block by block, and each block is multiplied before the next is made.

    ``prepare(rows)`` gives codes (or fp16 rows) and scales of some rows; it holds ``prepare_bytes`` per row meanwhile.
    """
    if not out.numel():
        return
    n, k = weight.shape
    out = out.view(-1, n)
    residual = None if residual is None else residual.reshape(len(out), n)
    epilogue = (weight, _flat(weight_scale), bias, residual, _flat(residual_scale))
    if codes and can_wait(out, k):
        proof = Proof(k)
        _block_by_block(out, prepare, codes, prepare_bytes, *epilogue, proof)
        if proof.holds():
            return
    _block_by_block(out, prepare, codes, prepare_bytes, *epilogue)


def _block_by_block(
    out, prepare, codes, prepare_bytes, weight, weight_scale, bias, residual, residual_scale,
    proof: Proof | None = None,
) -> None:  # fmt: skip
    m, k = len(out), weight.shape[1]
    at_once = _even(m, max(1, _OPERAND_BYTES // max(1, bytes_of_row(k, codes, proof))))
    piece = max(1, _PREPARE_BYTES // max(1, prepare_bytes))
    for block in _pieces(m, at_once):
        size = block.stop - block.start
        a = Operand.empty(size, k, codes, out.device, proof)
        x_scale = torch.empty(size, 1, dtype=torch.float32, device=out.device)
        for part in _pieces(size, piece):
            values, x_scale[part] = prepare(slice(block.start + part.start, block.start + part.stop))
            a.fill(part, values)
            del values
        if proof is not None:
            for columns in _pieces(k, proof.columns):
                proof.see(0, a.rows[:, columns], columns.start)
        _multiply(out[block], a, weight, _Epilogue(x_scale, weight_scale, bias, _cut(residual, block), residual_scale))
        if proof is not None:
            proof.weight_seen = True  # every block multiplies all of it
        del a
