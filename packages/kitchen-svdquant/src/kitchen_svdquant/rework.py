"""Changes to svdquant_w4a4 tensors that need no second quantization: LoRA in the low-rank branch, fused rows, padding.

The codes and scales of what stays are those of before, bit for bit. ``config`` is that of the tensors before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from kitchen_core.errors import UnsupportedError
from kitchen_core.formats import Tensors
from kitchen_core.reference.svdquant import GROUP

from .format import SVDQuantConfig, SVDQuantFormat

RANK_STEP = 16  # the kernels take ranks of 16 at a time; zeros fill up


def append_lora(
    tensors: Tensors, config: SVDQuantConfig, down: torch.Tensor, up: torch.Tensor, strength: float = 1.0
) -> tuple[Tensors, SVDQuantConfig]:
    """The layer with W + strength * up @ down: the LoRA's ranks are appended to the low-rank branch.

    Shapes: down [r, K], up [N, r], as LoRA files have them; r >= 1. The new rank is ``config.rank`` + r, rounded up to 16s.
    Dtypes and units: any float; rounded to the dtype of proj_down and proj_up. ``strength`` is multiplied into up in fp32.
    Layout: ranks before ``config.rank`` keep their bits and their order, so LoRAs stack, and the last one goes first.
    Returns: tensors and config of the new layer. Codes, scales and smooth factor are the very tensors of the old one. The
        bias stays as it is, of an unsigned layer too: the branch takes the raw x.
    Raises: UnsupportedError for shapes that do not fit.
    Devices: any.
    Source: docs/formats/svdquant_w4a4.md.
    """
    n, k = SVDQuantFormat.shape(tensors, config)
    if down.dim() != 2 or up.dim() != 2 or down.shape[1] != k or up.shape[0] != n or down.shape[0] != up.shape[1]:
        raise UnsupportedError(
            f"a LoRA of this layer has down [r, K={k}] and up [N={n}, r], got {list(down.shape)} and {list(up.shape)}"
        )
    if down.shape[0] == 0:
        raise UnsupportedError("the LoRA has rank 0: there is nothing to append")
    pad = -(config.rank + down.shape[0]) % RANK_STEP
    like_down, like_up = tensors["proj_down"], tensors["proj_up"]
    extra_down = F.pad(down.t().to(like_down), (0, pad))
    extra_up = F.pad((strength * up.float()).to(like_up), (0, pad))
    made = dict(tensors)
    made["proj_down"] = torch.cat((like_down, extra_down), 1).contiguous()
    made["proj_up"] = torch.cat((like_up, extra_up), 1).contiguous()
    return made, replace(config, rank=config.rank + down.shape[0] + pad)


def truncate_rank(tensors: Tensors, config: SVDQuantConfig, rank: int) -> tuple[Tensors, SVDQuantConfig]:
    """The layer with the first ``rank`` ranks of its branch: takes LoRAs off again, bit for bit.

    Shapes: proj_down [K, config.rank] becomes [K, rank], proj_up likewise.
    Dtypes and units: those of the tensors.
    Layout: copies, so that the memory of what is dropped is freed.
    Returns: tensors and config; equal to those before ``append_lora`` for the rank that they had then.
    Raises: UnsupportedError for a rank that the layer does not have.
    Devices: any.
    Source: docs/formats/svdquant_w4a4.md.
    """
    if not 0 <= rank <= config.rank:
        raise UnsupportedError(f"rank must be 0 to {config.rank}, the layer's, got {rank}")
    made = dict(tensors)
    for name in ("proj_down", "proj_up"):
        made[name] = tensors[name][:, :rank].clone(memory_format=torch.contiguous_format)
    return made, replace(config, rank=rank)


def split_rows(
    tensors: Tensors, config: SVDQuantConfig, sizes: Sequence[int], bias: torch.Tensor | None = None
) -> list[tuple[Tensors, torch.Tensor | None]]:
    """A fused layer (q, k and v, say) as layers of ``sizes`` output features each, in order.

    Shapes: ``sizes`` sums to N; each piece has N_i rows.
    Dtypes and units: those of the tensors.
    Layout: pieces share smooth_factor and proj_down, the very tensors, so that one quantized activation serves all; the
        rest are copies.
    Returns: (tensors, bias or None) of each piece; the config is that of the whole.
    Raises: UnsupportedError for sizes that do not sum to N.
    Devices: any.
    Source: docs/formats/svdquant_w4a4.md.
    """
    n, _ = SVDQuantFormat.shape(tensors, config)
    if sum(sizes) != n or min(sizes, default=0) < 1:
        raise UnsupportedError(f"sizes must be at least 1 and sum to the layer's N={n}, got {list(sizes)}")
    pieces, first = [], 0
    for size in sizes:
        rows = slice(first, first + size)
        made = dict(tensors)
        made["qdata"] = tensors["qdata"][rows].clone()
        made["scale"] = tensors["scale"][:, rows].clone(memory_format=torch.contiguous_format)
        made["proj_up"] = tensors["proj_up"][rows].clone()
        pieces.append((made, None if bias is None else bias[rows].clone()))
        first += size
    return pieces


def drop_padding(
    tensors: Tensors, config: SVDQuantConfig, out_features: int, in_features: int, rank: int | None = None
) -> tuple[Tensors, SVDQuantConfig]:
    """The layer without rows, columns and ranks that a file added to reach whole tiles.

    Shapes: from [N, K] and config.rank to [out_features, in_features] and ``rank`` (None: as it is).
    Dtypes and units: those of the tensors.
    Layout: copies.
    Returns: tensors and config. A padded bias is cut by its owner.
    Raises: UnsupportedError for sizes that are larger than the layer's, for K that 64 does not divide, and for ranks or
        columns that are not padding: they hold something else than zeros.
    Devices: any.
    Source: docs/formats/svdquant_w4a4.md.
    """
    n, k = SVDQuantFormat.shape(tensors, config)
    rank = config.rank if rank is None else rank
    if (
        not 1 <= out_features <= n
        or not GROUP <= in_features <= k
        or in_features % GROUP
        or not 0 <= rank <= config.rank
    ):
        raise UnsupportedError(
            f"a layer [{n}, {k}] of rank {config.rank} has no part [{out_features}, {in_features}] of rank {rank} "
            f"(in_features a multiple of {GROUP})"
        )
    codes, down, up = tensors["qdata"], tensors["proj_down"], tensors["proj_up"]
    ranks = (down[:, rank:] != 0).any(0) & (up[:, rank:] != 0).any(0)
    if (codes[:, in_features // 2 :] != 0).any() or (down[in_features:] != 0).any() or ranks.any():
        raise UnsupportedError(
            f"what lies beyond in_features={in_features} or rank={rank} of this layer [{n}, {k}] is no padding: not all zeros"
        )
    made = {
        "qdata": codes[:out_features, : in_features // 2].clone(memory_format=torch.contiguous_format),
        "scale": tensors["scale"][: in_features // GROUP, :out_features].clone(memory_format=torch.contiguous_format),
        "proj_down": down[:in_features, :rank].clone(memory_format=torch.contiguous_format),
        "proj_up": up[:out_features, :rank].clone(memory_format=torch.contiguous_format),
        "smooth_factor": tensors["smooth_factor"][:in_features].clone(),
    }
    return made, replace(config, rank=rank)
