"""W4A8 and W6A8 on the INT8 grid, eagerly: what each op means. Source: docs/formats/asym_w4a8_int8.md.

A stored code names a level (a table entry, code - 8, or code - 32 at 6 bits), and

    v8[n, k] = clamp(RNE(fp32(level * s_rel[n, k/g])), -127, 127)      the product is rounded to fp32 before the RNE
    weight[n, k] = v8[n, k] * s_channel[n] + correction[k/g, n]        in the rotated basis; correction: asymmetric only

so the linear is int8_linear with the weight v8 and the scale s_channel. A correction enters as an addend per output:

    sums[m, j] = sum of the codes of x over group j                    exact integers
    c[m, n]    = fma(x_scale[m], float(sum_j sums[m, j] * correction[j, n]), bias[n])       (no bias: the product)
    y[m, n]    = fma(float(acc) * x_scale[m], s_channel[n], c[m, n])

with the sum over j taken in fp64 and rounded once, so that its order leaves no trace. The residual follows as in INT8.

Quantizing is offline, but promises the same bits on every device: sums over a group have one fixed order, and every
element draws its own number (index row * K + column) when rounding stochastically, so row chunks cannot show.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..arithmetic import add_residual, divide, fma, hadamard_rotate, int8_matmul, scale_and_bias, uniform_like
from ..codebook import GROUP_SCALE_FLOOR, choose_codebook
from ..packing import pack_6bit, pack_nibbles, unpack_6bit, unpack_nibbles
from .int8 import quantize_and_rotate_rowwise

CHUNK_ELEMENTS = 1 << 22  # weights handled at once: bounds peak memory, changes no result
LEVEL_LIMIT = 127
E4M3_MAX = 448.0
E4M3_MAX_BYTE = 0x7E
ALS_PASSES = 2
ENERGY_FLOOR = 1e-8

# ---------------------------------------------------------------------------------------------------- decoding


def scales_as_float(s_rel: torch.Tensor) -> torch.Tensor:
    """fp32 group scales from fp32, e4m3, or e4m3 that a file holds as uint8."""
    if s_rel.dtype == torch.uint8:
        s_rel = s_rel.view(torch.float8_e4m3fn)
    return s_rel.float()


def decode_rows(
    qdata: torch.Tensor, s_rel: torch.Tensor, codebook: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """v8 as integer-valued fp32 [rows, K]."""
    scales = scales_as_float(s_rel)
    if qdata.shape[1] * 2 == scales.shape[1] * group_size:
        codes = unpack_nibbles(qdata)
        levels = codes.float() - 8.0 if codebook is None else codebook.float()[codes.int()]
    else:
        levels = unpack_6bit(qdata).float() - 32.0
    products = levels.unflatten(1, (scales.shape[1], group_size)) * scales.unsqueeze(-1)
    return products.round().clamp(-LEVEL_LIMIT, LEVEL_LIMIT).flatten(1)


def decode_w4a8_weight(qdata, s_rel, codebook=None, group_size=16):
    out = torch.empty(qdata.shape[0], s_rel.shape[1] * group_size, dtype=torch.int8, device=qdata.device)
    for rows in _row_chunks(*out.shape):
        out[rows] = decode_rows(qdata[rows], s_rel[rows], codebook, group_size).to(torch.int8)
    return out


def dequantize_w4a8_weight(
    qdata, s_rel, s_channel, codebook=None, correction=None, out_dtype=None, group_size=16, convrot_groupsize=0
):
    out = torch.empty(
        qdata.shape[0], s_rel.shape[1] * group_size, dtype=out_dtype or torch.float32, device=qdata.device
    )
    s_channel = s_channel.reshape(-1, 1)
    for rows in _row_chunks(*out.shape):
        values = decode_rows(qdata[rows], s_rel[rows], codebook, group_size)
        if correction is None:
            values = values * s_channel[rows]
        else:
            addend = correction[:, rows].T.float().repeat_interleave(group_size, dim=1)
            values = fma(values, s_channel[rows], addend)
        out[rows] = hadamard_rotate(values, convrot_groupsize).to(out.dtype)
    return out


# ---------------------------------------------------------------------------------------------------- linears


def w4a8_scaled_mm(
    codes, x_scale, weight, s_rel, s_channel, codebook=None, correction=None, bias=None, out_dtype=torch.bfloat16,
    group_size=16, residual=None, residual_scale=None,
):  # fmt: skip
    shape = (*codes.shape[:-1], weight.shape[0])
    codes = codes.reshape(-1, codes.shape[-1])
    x_scale = x_scale.reshape(-1, 1)
    acc = int8_matmul(codes, decode_w4a8_weight(weight, s_rel, codebook, group_size))
    addend = bias if correction is None else correction_addend(codes, x_scale, correction, bias, group_size)
    y = scale_and_bias(acc, x_scale, s_channel.reshape(-1), addend).reshape(shape)
    if residual_scale is not None:
        residual_scale = residual_scale.reshape(-1)
    return add_residual(y, residual, residual_scale).to(out_dtype)


def correction_addend(
    codes: torch.Tensor, x_scale: torch.Tensor, correction: torch.Tensor, bias: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """c [M, N] of the module's text, fp32. codes [M, K], x_scale [M, 1], correction [K/g, N], bias [N]."""
    sums = codes.unflatten(1, (correction.shape[0], group_size)).sum(-1, dtype=torch.int32)
    product = (sums.double() @ correction.double()).float()
    return x_scale * product if bias is None else fma(x_scale, product, bias.float())


def w4a8_linear(
    x, weight, s_rel, s_channel, codebook=None, correction=None, bias=None, out_dtype=None, group_size=16,
    convrot_groupsize=0, input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None,
    residual_scale=None,
):  # fmt: skip
    codes, x_scale = quantize_and_rotate_rowwise(x, convrot_groupsize, input_act, input_act_weight, input_act_eps)
    return w4a8_scaled_mm(
        codes, x_scale, weight, s_rel, s_channel, codebook, correction, bias, out_dtype or x.dtype, group_size, residual,
        residual_scale,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------- quantizing


@dataclass(frozen=True)
class Grid:
    """The levels that codes can name: ``values`` fp32 ascending, ``stored`` the code of each, ``spaced`` if integers."""

    values: torch.Tensor
    stored: torch.Tensor
    spaced: bool

    @classmethod
    def integers(cls, low: int, high: int, first_code: int, device: torch.device) -> Grid:
        values = torch.arange(low, high + 1, dtype=torch.float32, device=device)
        stored = torch.arange(first_code, first_code + values.numel(), dtype=torch.int8, device=device)
        return cls(values, stored, True)

    @classmethod
    def table(cls, codebook: torch.Tensor) -> Grid:
        values, order = codebook.float().sort(stable=True)  # a foreign table need not ascend; ours do
        return cls(values, order.to(torch.int8), False)

    @property
    def reach(self) -> float:
        """What a group's absmax is divided by to get its first scale."""
        return float(self.values[-1]) if self.spaced else 1.0

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """The level nearest to each x: ties to even between integers, to the lower entry of a table."""
        if self.spaced:
            return x.round().clamp(self.values[0], self.values[-1])
        between = (self.values[1:] + self.values[:-1]) / 2
        return self.values[torch.searchsorted(between, x, out_int32=True)]


def quantize_w4a8_weight(
    weight, group_size=16, convrot_groupsize=256, bits=4, levels="codebook", codebook=None, scale_search=True, seed=0,
    scale_dtype=torch.float8_e4m3fn,
):  # fmt: skip
    n, k = weight.shape
    groups = k // group_size
    table = weight.new_empty(0, dtype=torch.float32)
    if bits == 6:
        grid = Grid.integers(-31, 31, 1, weight.device)
    elif levels == "codebook":
        table = choose_codebook(weight, group_size, convrot_groupsize) if codebook is None else codebook.float().clone()
        grid = Grid.table(table)
    else:
        grid = Grid.integers(-8, 7, 0, weight.device)

    qdata = weight.new_empty((n, k * bits // 8), dtype=torch.int8)
    s_rel = weight.new_empty((n, groups), dtype=scale_dtype)
    s_channel = weight.new_empty((n,), dtype=torch.float32)
    correction = weight.new_empty((groups, n) if levels == "asymmetric" else (0,))
    for rows in _row_chunks(n, k):
        w = hadamard_rotate(weight[rows].float(), convrot_groupsize).unflatten(1, (groups, group_size))
        if levels == "asymmetric":
            scale, used, offset = _asymmetric_scales(w)
            correction[:, rows] = offset.squeeze(-1).T.to(weight.dtype)
            # What the codes must reach is what the stored, rounded correction leaves over.
            w = w - correction[:, rows].T.float().unsqueeze(-1)
        else:
            scale, used = _symmetric_scales(w, grid)
        largest = (used * scale).abs().flatten(1).amax(1)
        channel = divide(largest, LEVEL_LIMIT).clamp_min(GROUP_SCALE_FLOOR)
        relative = _to_scale_dtype(scale.squeeze(-1) / channel.unsqueeze(-1), scale_dtype)
        target = (w / channel[:, None, None]).contiguous()
        index, relative = _through_grid(target, relative, grid, bits == 6 and scale_search, seed, rows.start * k)
        codes = grid.stored[index].flatten(1)
        qdata[rows] = pack_nibbles(codes) if bits == 4 else pack_6bit(codes)
        s_rel[rows] = relative
        s_channel[rows] = channel
    return qdata, s_rel, s_channel, table, correction


def _symmetric_scales(w: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [rows, K/g, 1] and levels [rows, K/g, g] by alternating least squares, from the absmax on."""
    scale = divide(w.abs().amax(-1, keepdim=True), grid.reach).clamp_min(GROUP_SCALE_FLOOR)
    used = grid.nearest(w / scale)
    for _ in range(ALS_PASSES):
        energy = _sum_of_group(used * used).clamp_min(ENERGY_FLOOR)
        scale = (_sum_of_group(w * used) / energy).clamp_min(GROUP_SCALE_FLOOR)
        used = grid.nearest(w / scale)
    return scale, used


def _asymmetric_scales(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales, levels -8..7 and corrections: the 16 levels span [min, max] of each group."""
    low, high = w.aminmax(dim=-1, keepdim=True)
    scale = divide(high - low, 15.0).clamp_min(GROUP_SCALE_FLOOR)
    used = ((w - low) / scale).round().clamp(0, 15) - 8
    return scale, used, 8 * scale + low


def _through_grid(
    target: torch.Tensor, s_rel: torch.Tensor, grid: Grid, search: bool, seed: int, first_element: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Level indices [rows, K/g, g] whose *decoded* values lie nearest to ``target``, and the scales they go with.

    ``search`` tries each scale's neighbours too, and takes one where it strictly lowers the group's squared error.
    """
    index, decoded = _assign(target, s_rel, grid)
    if search:
        error = _sum_of_group((decoded - target).square())
        for tried in _neighbours(s_rel):
            tried_index, decoded = _assign(target, tried, grid)
            tried_error = _sum_of_group((decoded - target).square())
            better = tried_error < error
            index = torch.where(better, tried_index, index)
            error = torch.where(better, tried_error, error)
            s_rel = _where(better.squeeze(-1), tried, s_rel)
    if seed > 0:
        index, _ = _assign(target, s_rel, grid, uniform_like(target, seed, first_element))
    return index, s_rel


def _assign(
    target: torch.Tensor, s_rel: torch.Tensor, grid: Grid, uniform: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each target: the index of a neighbouring decoded level, and that level. Of equal levels, the first's index.

    Nearest, ties to the lower; or the upper one with a probability that makes the mean the target, where the test
    ``target - lower > u * (upper - lower)`` keeps a target that is on the grid, whatever u in [0, 1) is.
    """
    decoded = (grid.values * s_rel.float().unsqueeze(-1)).round().clamp(-LEVEL_LIMIT, LEVEL_LIMIT)
    upper = torch.searchsorted(decoded, target).clamp_max(decoded.shape[-1] - 1)
    lower = (upper - 1).clamp_min(0)
    above = decoded.gather(-1, upper) - target
    below = target - decoded.gather(-1, lower)
    take_upper = below > above if uniform is None else below > uniform * (above + below)
    chosen = decoded.gather(-1, torch.where(take_upper, upper, lower))
    return torch.searchsorted(decoded, chosen), chosen


def _neighbours(s_rel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next smaller and larger e4m3 scale, or 3% less and more in fp32."""
    if s_rel.dtype == torch.float32:
        return s_rel * 0.97, s_rel * 1.03
    raw = s_rel.view(torch.uint8).short()
    return tuple((raw + step).clamp(1, E4M3_MAX_BYTE).to(torch.uint8).view(torch.float8_e4m3fn) for step in (-1, 1))


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.where for scales of either dtype."""
    if a.dtype == torch.float32:
        return torch.where(condition, a, b)
    return torch.where(condition, a.view(torch.uint8), b.view(torch.uint8)).view(a.dtype)


def _to_scale_dtype(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales rounded to nearest even. Above 448 an e4m3 would be NaN, so it saturates."""
    return scale if dtype == torch.float32 else scale.clamp_max(E4M3_MAX).to(dtype)


def _sum_of_group(x: torch.Tensor) -> torch.Tensor:
    """fp32 sum over the last dim, kept: halves are added until one is left, the same order on every device."""
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def _row_chunks(n: int, k: int) -> list[slice]:
    """Slices of rows that hold at most CHUNK_ELEMENTS weights each (one row at least)."""
    step = max(1, CHUNK_ELEMENTS // max(k, 1))
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]
