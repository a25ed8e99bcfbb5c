"""AWQ W4A16, eagerly: what each awq op means. Source: formats.md section 4.

The weight decodes to a float dtype T as ``round_T(fma(q - 8, scale, zero))``, the fma in fp32; products with x are
accumulated in fp32, bias and residual are added in fp32, and the output is rounded once.
"""

from __future__ import annotations

import torch

from ..arithmetic import add_residual, apply_input_act, fma, settled
from ..packing import unpack_nibbles

CHUNK_ELEMENTS = 1 << 22  # weights decoded at once by the linear: bounds its memory


def dequantize_awq(qweight, wscales, wzeros, group_size=64, out_dtype=None):
    levels = (unpack_nibbles(qweight).float() - 8.0).unflatten(-1, (-1, group_size))
    scale, zero = (t.t().unsqueeze(-1).float() for t in (wscales, wzeros))
    # A level has 4 bits, a half scale 8 or 11: their product is exact in fp32, and the sum is the fma, without fp64.
    dense = fma(levels, scale, zero) if wscales.dtype == torch.float32 else levels * scale + zero
    return dense.flatten(1).to(out_dtype or torch.float32)


def awq_linear(
    x, qweight, wscales, wzeros, bias=None, group_size=64, out_dtype=None,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None, weight_dtype=None,
    part_first=None, part_of=None,
):  # fmt: skip
    h = settled(apply_input_act(x.float(), input_act, input_act_weight, input_act_eps))
    n, k = qweight.shape[0], 2 * qweight.shape[1]
    step = max(1, CHUNK_ELEMENTS // k)
    parts = []
    for rows in (slice(start, start + step) for start in range(0, n, step)):  # no float copy of the whole weight
        dense = dequantize_awq(qweight[rows], wscales[:, rows], wzeros[:, rows], group_size, weight_dtype or x.dtype)
        parts.append(h @ dense.float().t())
    y = torch.cat(parts, dim=-1) if parts else h.new_empty((*h.shape[:-1], 0))
    if bias is not None:
        y = y + bias.float()
    if residual_scale is not None:
        residual_scale = residual_scale.reshape(-1)
    return add_residual(y, residual, residual_scale).to(out_dtype or x.dtype)
