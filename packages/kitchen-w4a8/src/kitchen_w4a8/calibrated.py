"""Calibrated quantization to the INT8 grid: other codes and group scales for the same table, rows' scales and correction."""

from __future__ import annotations

import torch

from kitchen_core.arithmetic import hadamard_rotate
from kitchen_core.calibration import Calibration, Rounded, compensated, rotated
from kitchen_core.formats import Tensors
from kitchen_core.packing import pack_6bit, pack_nibbles, unpack_6bit, unpack_nibbles
from kitchen_core.reference.w4a8 import E4M3_MAX, GROUP_SCALE_FLOOR, LEVEL_LIMIT, Grid, decode_rows, scales_as_float

STARTS = (1.0, 0.85)  # of absmax / reach: where the least-squares search for a scale begins
LEAST_SQUARES_PASSES = 2


class Int8GridRule:
    """The parameter of a group is s_rel; codes are indices of ``grid.values``.

    Weights are in units of s_channel, so decoded values are integers -127..127 and exact in fp32.
    """

    def __init__(
        self, group_size: int, channel_weight: torch.Tensor, grid: Grid, s_rel: torch.Tensor, search: bool
    ) -> None:
        self.group_size = group_size
        self.channel_weight = channel_weight
        self.grid = grid
        self.given = s_rel
        self.search = search

    def choose(self, columns: torch.Tensor, first: int) -> torch.Tensor:
        """Of the scale given and those that a weighted least-squares search finds, the one of least weighted error."""
        importance = self.channel_weight[first : first + columns.shape[1]]
        index = first // self.group_size
        best = scales_as_float(self.given[:, index : index + 1])
        if not self.search:
            return best
        least = self._error(columns, best, importance)
        start = (columns.abs().amax(1, keepdim=True) / self.grid.reach).clamp_min(GROUP_SCALE_FLOOR)
        for fraction in STARTS:
            scale = start * fraction
            for _ in range(LEAST_SQUARES_PASSES):
                levels = self.grid.nearest(columns / scale)
                energy = (levels * levels * importance).sum(1, keepdim=True)
                fitted = ((columns * levels * importance).sum(1, keepdim=True) / energy).clamp_min(GROUP_SCALE_FLOOR)
                scale = torch.where(energy > 0, fitted, scale)
            tried = scale.clamp_max(E4M3_MAX).to(self.given.dtype).float()
            error = self._error(columns, tried, importance)
            best = torch.where((error < least).unsqueeze(1), tried, best)
            least = torch.minimum(error, least)
        return best

    def round(self, columns: torch.Tensor, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nearest decoded value, the lower one on a tie, and the first index where several decode alike."""
        decoded, chosen = self._nearest(columns, parameters)
        return torch.searchsorted(decoded, chosen), chosen

    def _nearest(self, columns: torch.Tensor, s_rel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the decoded values of each row's group [N, levels], the nearest of them to each weight)"""
        decoded = (self.grid.values * s_rel).round().clamp(-LEVEL_LIMIT, LEVEL_LIMIT)
        columns = columns.contiguous()
        upper = torch.searchsorted(decoded, columns).clamp_max(decoded.shape[1] - 1)
        below, above = decoded.gather(1, (upper - 1).clamp_min(0)), decoded.gather(1, upper)
        return decoded, torch.where(columns - below > above - columns, above, below)

    def _error(self, columns: torch.Tensor, parameters: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        return ((self._nearest(columns, parameters)[1] - columns).square() * importance).sum(1)


def calibrate_tensors(
    tensors: Tensors, weight: torch.Tensor, config: object, bits: int, calibration: Calibration
) -> Tensors:
    """The tensors of an uncalibrated weight with ``qdata`` and ``s_rel`` chosen anew; no row's objective is larger.

    The objective lives in the basis of the rotated x, so the second moment is rotated on both sides.
    """
    group, levels = config.group_size, config.levels
    w = hadamard_rotate(weight.float(), config.convrot_groupsize)
    if tensors.get("correction") is not None:
        w = w - tensors["correction"].t().float().repeat_interleave(group, 1)
    w = w / tensors["s_channel"].reshape(-1, 1)
    if bits == 6:
        grid = Grid.integers(-31, 31, 1, w.device)
    elif levels == "codebook":
        grid = Grid.table(tensors["codebook"])
    else:
        grid = Grid.integers(-8, 7, 0, w.device)
    moment = rotated(calibration.mean_moment(w.device), config.convrot_groupsize)
    # an asymmetric group's scale goes with its correction, which stays
    rule = Int8GridRule(group, moment.diagonal(), grid, tensors["s_rel"], levels != "asymmetric")
    made = compensated(w, moment, rule, passes=0, plain=_stored(tensors, rule, bits))
    codes = grid.stored[made.codes.long()]
    s_rel = made.parameters[..., 0].to(tensors["s_rel"].dtype).contiguous()
    return {**tensors, "qdata": pack_nibbles(codes) if bits == 4 else pack_6bit(codes), "s_rel": s_rel}


def _stored(tensors: Tensors, rule: Int8GridRule, bits: int) -> Rounded:
    """Stored tensors as compensated rounding has them."""
    codes = unpack_nibbles(tensors["qdata"]) if bits == 4 else unpack_6bit(tensors["qdata"])
    index = torch.zeros(2**bits, dtype=torch.int16, device=codes.device)
    index[rule.grid.stored.long()] = torch.arange(rule.grid.stored.numel(), dtype=torch.int16, device=codes.device)
    parameters = scales_as_float(tensors["s_rel"]).unsqueeze(-1)
    values = decode_rows(tensors["qdata"], tensors["s_rel"], tensors.get("codebook"), rule.group_size)
    return Rounded(index[codes.long()], values, parameters)
