"""How a float weight becomes awq_w4a16 tensors: the minimum and the maximum of each group, in fp32, in chunks of rows.

The range of a group may be narrowed about its middle, where clipping the ends costs less than finer steps gain. Stochastic
rounding keeps the whole range: what is clipped would be biased.
"""

from __future__ import annotations

import torch

from kitchen_core.arithmetic import round_codes
from kitchen_core.packing import pack_nibbles

CHUNK_ELEMENTS = 2**22  # of the weight at a time: 16 MiB a temporary
RANGE_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of max - min; the first is plain min/max


def quantize_awq(
    weight: torch.Tensor, group_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [N, K] -> codes int8 [N, K/2], scale and zeros [K/g, N] in the weight's dtype.

    Chunks change nothing: groups lie within a row, and the stochastic stream counts elements of the whole weight.
    """
    n, k = weight.shape
    rows = max(1, CHUNK_ELEMENTS // k)
    parts = [_quantize_rows(weight[r : r + rows], group_size, seed, r * k) for r in range(0, n, rows)]
    codes, scale, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return codes, scale.t().contiguous(), zeros.t().contiguous()


def _quantize_rows(weight: torch.Tensor, group_size: int, seed: int, first_element: int):
    w = weight.float().unflatten(-1, (-1, group_size))
    # Halves first: the range of a float32 or bfloat16 group may overflow.
    middle = 0.5 * w.amin(-1, keepdim=True) + 0.5 * w.amax(-1, keepdim=True)
    half = 0.5 * w.amax(-1, keepdim=True) - 0.5 * w.amin(-1, keepdim=True)
    best = None
    for shrink in RANGE_SHRINKS if seed == 0 else RANGE_SHRINKS[:1]:
        # min + 8 s, written about the middle so that a rounded s moves both ends alike.
        scale = (half * (shrink / 7.5)).to(weight.dtype)
        zeros = (middle + 0.5 * scale.float()).to(weight.dtype)
        levels = _quotient(w, scale, zeros).round().clamp(-8, 7)
        error = (levels * scale.float() + zeros.float() - w).square().sum(-1, keepdim=True)
        if best is None:
            best = error, scale, zeros
        else:
            best = tuple(
                torch.where(error < best[0], new, old) for new, old in zip((error, scale, zeros), best, strict=True)
            )
    _, scale, zeros = best
    codes = round_codes(_quotient(w, scale, zeros) + 8, 0, 15, seed, first_element).to(torch.int8)
    return pack_nibbles(codes.flatten(1)), scale.squeeze(-1), zeros.squeeze(-1)


def _quotient(w: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """(w - zero) / scale of the rounded numbers. A group without a range, or one that underflows the dtype, has scale 0
    and decodes to its zero: exact for a constant.
    """
    step = torch.where(scale == 0, float("inf"), scale.float())
    return (w - zeros.float()) / step
