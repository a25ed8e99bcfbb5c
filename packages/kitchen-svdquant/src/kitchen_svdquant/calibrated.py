"""Calibrated quantization to svdquant_w4a4: branch and residual fitted to the outputs on inputs like those seen.

The layer computes x L^T + v R^T, with x the input, L the low-rank branch, v = x / smooth + e what the 4-bit activation holds
(e: its rounding error) and R the 4-bit residual; it stands for x W^T. Below all is in the smoothed basis: W and L times
smooth, H the second moment of x / smooth. The rounding error is taken as noise of variance D per channel, measured on the
sample and independent of x. Then the expected error of a row is, up to a constant that depends on L alone,

    (t - r) (H + D) (t - r)^T     with the target  t = (w - l) H (H + D)^-1

which ``compensated`` lowers: directions that carry more noise than signal are shrunk. What the best R leaves is

    (w - l) (H - H (H + D)^-1 H) (w - l)^T

so the first L is the low-rank approximation of W in that metric; later ones are that of W - R in the metric H.
"""

from __future__ import annotations

import torch

from kitchen_core.calibration import Calibration, Factored, Rounded, compensated, damp, nearest
from kitchen_core.packing import pack_nibbles, unpack_nibbles
from kitchen_core.reference.svdquant import GROUP, UNSIGNED_SHIFT, quantize_svdquant_w4a4

from .quantizer import SCALE_SHRINKS, Parts, centred, floored, low_rank, output_error, storable

TURNS = 2
DAMPING = 0.003  # the noise of the activation adds far more to most of the diagonal
METRIC_FLOOR = 1e-4  # of the mean of a metric's diagonal, so that it has a Cholesky factor


class SVDQuantRule:
    """The parameter of a group is its scale, representable in ``dtype``; codes are levels -8..7."""

    group_size = GROUP

    def __init__(self, channel_weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.channel_weight = channel_weight
        self.dtype = dtype

    def choose(self, columns: torch.Tensor, first: int) -> torch.Tensor:
        """Of several fractions of absmax / 7 the one of least error weighted by the channels' mean squares."""
        importance = self.channel_weight[first : first + columns.shape[1]]
        absmax = columns.abs().amax(1, keepdim=True)
        best, least = None, None
        for shrink in SCALE_SHRINKS:
            tried = (absmax * (shrink / 7)).to(self.dtype).float()
            error = ((self.round(columns, tried)[1] - columns).square() * importance).sum(1, keepdim=True)
            if best is None:
                best, least = tried, error
            else:
                best = torch.where(error < least, tried, best)
                least = torch.minimum(error, least)
        return best

    def round(self, columns: torch.Tensor, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        levels = (columns / torch.where(parameters == 0, float("inf"), parameters)).round().clamp(-8, 7)
        return levels, levels * parameters


def quantize_svdquant_calibrated(
    weight: torch.Tensor,
    rank: int,
    act_unsigned: bool,
    calibration: Calibration,
    smooth: torch.Tensor | None = None,
) -> Parts:
    """weight [N, K] -> Parts, in the weight's dtype. Which factor and which turn is kept is decided by the error of the
    layer's output on the sample rows; plain rounding is among the candidates.
    """
    w = weight.float()
    moment = calibration.mean_moment(w.device)
    sample = calibration.sample.to(w.device)
    expected = sample @ w.t()
    factors = [smooth.float()] if smooth is not None else _smooth_factors(w, moment)
    best = None
    for factor in (storable(factor, weight.dtype) for factor in factors):
        fit = _Fit(w, factor, rank, act_unsigned, sample, expected)
        found = fit.plain_turn()
        if best is None or found[0] < best[0][0]:
            best = found, fit
    found, fit = best
    fit.measure(moment)
    branch = fit.first_branch()
    for turn in range(TURNS if rank else 1):
        made = fit.turn(branch)
        found = min(found, made, key=lambda entry: entry[0])
        if turn < TURNS - 1:
            branch = fit.next_branch(made[2])
    return found[1]


def _smooth_factors(w: torch.Tensor, moment: torch.Tensor) -> list[torch.Tensor]:
    """Candidates: ones; the root mean square of each channel of x, which evens them out; the same shared with W."""
    spread = floored(moment.diagonal().clamp_min(0).sqrt())
    columns = floored(w.square().mean(0).sqrt())
    return [torch.ones_like(spread), centred(spread), centred(spread**0.7 * columns**-0.3)]


class _Fit:
    """One smooth factor: plain rounding with it and, once the inputs are measured, turns of branch and residual."""

    def __init__(self, w, factor, rank, act_unsigned, sample, expected) -> None:
        self.w, self.factor, self.rank, self.act_unsigned = w, factor, rank, act_unsigned
        self.sample, self.expected = sample, expected
        self.smooth = factor.float()

    def measure(self, moment: torch.Tensor) -> None:
        """The metrics of the module's text: H, H + D, the factor H (H + D)^-1 of the target, and what the best R leaves."""
        h = damp(moment / (self.smooth.unsqueeze(1) * self.smooth), DAMPING)
        self.noisy = Factored.of(h + torch.diag(self._activation_error().square().mean(0)), damping=0.0)
        self.signal, self.remaining, self.gain = _root(h), None, None
        if self.noisy.inverse is not None:
            half = self.noisy.inverse @ h
            self.gain = half.t() @ self.noisy.inverse
            self.remaining = _root(h - half.t() @ half)

    def _activation_error(self) -> torch.Tensor:
        """What the 4-bit activation differs by from x / smooth on the sample rows, fp32 [M, K]."""
        shift = UNSIGNED_SHIFT if self.act_unsigned else 0.0
        no_branch = self.factor.new_empty(self.smooth.numel(), 0)
        codes, scale, _ = quantize_svdquant_w4a4(self.sample + shift, self.factor, no_branch, self.act_unsigned)
        held = unpack_nibbles(codes, signed=not self.act_unsigned).unflatten(-1, (-1, GROUP)) * scale.t().unsqueeze(-1)
        return held.flatten(1) - (self.sample + shift) / self.smooth

    def first_branch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._branch(self.w * self.smooth, self.remaining)

    def next_branch(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._branch(self.w * self.smooth - residual, self.signal)

    def _branch(self, target: torch.Tensor, root: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """up and down as they are stored: the best product for ``target`` in the metric root root^T."""
        if root is None:
            up, down = low_rank(target, self.rank)
        else:
            up, down = low_rank(target @ root, self.rank)
            down = torch.linalg.solve_triangular(root.t(), down, upper=True)
        dtype = self.factor.dtype
        return up.to(dtype).contiguous(), (down / self.smooth.unsqueeze(1)).to(dtype).contiguous()

    def plain_turn(self) -> tuple[float, Parts, torch.Tensor]:
        """Without calibration: the largest singular directions, and columns rounded one by one."""
        up, down = self._branch(self.w * self.smooth, None)
        rule = SVDQuantRule(torch.ones_like(self.smooth), self.factor.dtype)
        return self._made(nearest(self._left_by(up, down), rule), up, down)

    def turn(self, branch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, Parts, torch.Tensor]:
        """(output error, Parts, residual values [N, K]) for a branch, whose rounding the residual absorbs."""
        target = self._left_by(*branch)
        if self.gain is not None:
            target = target @ self.gain
        rule = SVDQuantRule(self.noisy.moment.diagonal(), self.factor.dtype)
        return self._made(compensated(target, self.noisy, rule, passes=0), *branch)

    def _left_by(self, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (self.w - up.float() @ down.float().t()) * self.smooth

    def _made(self, rounded: Rounded, up: torch.Tensor, down: torch.Tensor) -> tuple[float, Parts, torch.Tensor]:
        scale = rounded.parameters.squeeze(-1).t().to(self.factor.dtype).contiguous()
        parts = Parts(pack_nibbles(rounded.codes.to(torch.int8)), scale, down, up, self.factor)
        error = output_error(parts, rounded.values, self.act_unsigned, self.sample, self.expected)
        return error, parts, rounded.values


def _root(metric: torch.Tensor) -> torch.Tensor | None:
    """Lower triangular C with C C^T = metric, which is symmetric but for rounding; None where there is none."""
    lower, info = torch.linalg.cholesky_ex(damp((metric + metric.t()) / 2, METRIC_FLOOR))
    return lower if not info.item() and torch.isfinite(lower).all() else None
