"""Calibration: what a layer's inputs look like, and rounding a weight so that its outputs on such inputs stay close.

``Calibration`` gathers statistics of the activations in front of one linear layer. ``compensated`` rounds a weight column
by column and lets the columns that are still to come make up for the error of those that are done. What it lowers is

    sum over rows n of  (w_n - q_n) H (w_n - q_n)^T,     H = second moment of the inputs = sum over inputs x of x x^T

which is the squared error of the layer's output, summed over the inputs seen. Sources: optimal brain quantization (Frantar
and Alistarh 2022) and its column-wise form, GPTQ (Frantar et al. 2023); the passes afterwards are cyclic coordinate descent
on the same sum.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from .arithmetic import hadamard_rotate
from .errors import UnsupportedError

logger = logging.getLogger("kitchen.calibration")

SAMPLE_ROWS = 512
UPDATE_ROWS = 8192  # inputs turned to fp32 at a time
DAMPING = 0.01  # of the mean of H's diagonal, added to the diagonal: stands for inputs that the calibration did not see
BLOCK = 128  # columns between two updates of all later ones
PASSES = 1  # of coordinate descent


# -------------------------------------------------------------------------------------------------------- statistics


class Calibration:
    """Running statistics of the inputs x [..., K] of a linear layer.

    ``second_moment`` fp32 [K, K]: sum of x x^T over the ``count`` rows seen; ``absmax`` fp32 [K] per channel; ``sample``
    fp32 [at most ``sample_rows``, K]: evenly strided rows. Memory is K * (K + sample_rows + 1) numbers, whatever is seen.
    """

    def __init__(self, in_features: int, sample_rows: int = SAMPLE_ROWS, device: torch.device | str = "cpu") -> None:
        if in_features < 1 or sample_rows < 1:
            raise UnsupportedError(f"in_features and sample_rows must be 1 or more, got {in_features}, {sample_rows}")
        self.in_features = in_features
        self.sample_rows = sample_rows
        self.count = 0
        self.second_moment = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)
        self.absmax = torch.zeros(in_features, dtype=torch.float32, device=device)
        self.sample = torch.zeros(0, in_features, dtype=torch.float32, device=device)
        self._stride = 1  # the sample holds the rows 0, stride, 2 * stride, ... of those seen

    def mean_moment(self, device: torch.device | str) -> torch.Tensor:
        """H over the number of rows seen, fp32 [K, K] on ``device``."""
        return self.second_moment.to(device) / max(self.count, 1)

    def update(self, x: torch.Tensor) -> Calibration:
        """Take x [..., K] into account; returns itself. Nothing changes where this raises.

        Raises UnsupportedError for another K, and for an inf or NaN, which would spoil every later use.
        """
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise UnsupportedError(f"calibration inputs must be [..., K={self.in_features}], got {list(x.shape)}")
        rows = x.detach().reshape(-1, self.in_features)
        if not torch.isfinite(rows).all():
            raise UnsupportedError("calibration inputs must be finite, got inf or NaN; leave such batches out")
        device = self.second_moment.device
        for part in rows.split(UPDATE_ROWS) if rows.shape[0] else ():
            part = part.to(device, torch.float32)
            self.second_moment.addmm_(part.t(), part)
            self.absmax = torch.maximum(self.absmax, part.abs().amax(0))
            self.sample = torch.cat((self.sample, part[-self.count % self._stride :: self._stride]))
            self.count += part.shape[0]
            self._thin()
        return self

    def merge(self, other: Calibration) -> Calibration:
        """Add what another one saw of the same layer (in another process, say); returns itself."""
        if other.in_features != self.in_features:
            raise UnsupportedError(f"cannot merge calibrations of K={self.in_features} and K={other.in_features}")
        device = self.second_moment.device
        self.second_moment += other.second_moment.to(device)
        self.absmax = torch.maximum(self.absmax, other.absmax.to(device))
        stride = max(self._stride, other._stride)
        theirs = other.sample[:: stride // other._stride].to(device)
        self.sample = torch.cat((self.sample[:: stride // self._stride], theirs))
        self._stride = stride
        self.count += other.count
        self._thin()
        return self

    def _thin(self) -> None:
        while self.sample.shape[0] > self.sample_rows:
            self._stride *= 2
            self.sample = self.sample[::2].clone()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything as tensors, for a file; ``from_tensors`` undoes it."""
        numbers = torch.tensor([self.count, self.sample_rows, self._stride], device="cpu")
        return {
            "second_moment": self.second_moment, "absmax": self.absmax, "sample": self.sample, "numbers": numbers,
        }  # fmt: skip

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Calibration:
        """Raises UnsupportedError unless the tensors are those of one calibration."""
        names = ("second_moment", "absmax", "sample", "numbers")
        if set(tensors) != set(names):
            raise UnsupportedError(
                f"a calibration has the tensors {', '.join(names)}, got {', '.join(sorted(tensors))}"
            )
        k = tensors["absmax"].numel()
        shapes = [tuple(tensors[name].shape) for name in names]
        if shapes != [(k, k), (k,), (shapes[2][0], k), (3,)]:
            raise UnsupportedError(
                f"the tensors of a calibration do not fit each other: {dict(zip(names, shapes, strict=True))}"
            )
        count, sample_rows, stride = tensors["numbers"].tolist()
        made = cls(k, sample_rows)
        made.count, made._stride = count, stride
        made.second_moment, made.absmax, made.sample = (tensors[name].float() for name in names[:3])
        return made

    def __repr__(self) -> str:
        return f"Calibration(K={self.in_features}, {self.count} rows seen, {self.sample.shape[0]} kept)"


def check_calibration(calibration: Calibration, in_features: int, seed: int = 0) -> None:
    """Raises UnsupportedError unless this is a Calibration of a layer of K = ``in_features`` that saw something.

    Compensated rounding is deterministic, so a ``seed`` above 0, which asks for stochastic rounding, is refused with it.
    """
    if not isinstance(calibration, Calibration):
        raise UnsupportedError(
            f"calibration must be a kitchen_core.Calibration, got {type(calibration).__name__}; "
            "kitchen_models.calibrate(model, batches) makes one per layer"
        )
    if calibration.in_features != in_features:
        raise UnsupportedError(
            f"the calibration is of a layer of K={calibration.in_features}, the weight has K={in_features}"
        )
    if calibration.count == 0:
        raise UnsupportedError(
            "the calibration saw no input; run batches that reach this layer, or quantize it without calibration"
        )
    if seed > 0:
        raise UnsupportedError(
            f"seed={seed} asks for stochastic rounding, a calibration for compensated; give one of them"
        )


def rotated(second_moment: torch.Tensor, group: int) -> torch.Tensor:
    """The second moment of inputs that ConvRot has rotated: R H R^T, with R the block-diagonal rotation of ``group``."""
    return hadamard_rotate(hadamard_rotate(second_moment, group).t().contiguous(), group)


# ---------------------------------------------------------------------------------------------------------- rounding


class Rule(Protocol):
    """How one format rounds the columns of a group, every row by itself.

    ``choose(columns [N, g], first)`` gives the group's parameters fp32 [N, P] for the columns from index ``first`` on;
    ``round(columns [N, c], parameters [N, P])`` gives codes (integers) and the fp32 values they stand for, both [N, c],
    each value the nearest that the parameters allow.
    """

    group_size: int

    def choose(self, columns: torch.Tensor, first: int) -> torch.Tensor: ...

    def round(self, columns: torch.Tensor, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class Rounded(NamedTuple):
    """codes int16 [N, K], values fp32 [N, K], parameters fp32 [N, K/g, P]."""

    codes: torch.Tensor
    values: torch.Tensor
    parameters: torch.Tensor


def objective(weight: torch.Tensor, values: torch.Tensor, second_moment: torch.Tensor) -> torch.Tensor:
    """The calibration objective of each row, fp32 [N]: (w - q) H (w - q)^T."""
    error = weight - values
    return ((error @ second_moment) * error).sum(-1)


def nearest(weight: torch.Tensor, rule: Rule) -> Rounded:
    """Every column rounded by itself: what a weight without calibration gets."""
    codes, values, parameters = [], [], []
    for first in range(0, weight.shape[1], rule.group_size):
        columns = weight[:, first : first + rule.group_size]
        chosen = rule.choose(columns, first)
        code, value = rule.round(columns, chosen)
        codes.append(code.to(torch.int16))
        values.append(value)
        parameters.append(chosen)
    return Rounded(torch.cat(codes, 1), torch.cat(values, 1), torch.stack(parameters, 1))


class Factored(NamedTuple):
    """A second moment made ready for ``compensated``, once for any number of weights.

    ``moment`` H; ``damped`` H with its damping; ``inverse`` the upper triangular U with damped^-1 = U^T U, or None and
    ``reason`` says why there is none.
    """

    moment: torch.Tensor
    damped: torch.Tensor
    inverse: torch.Tensor | None
    reason: str

    @classmethod
    def of(cls, moment: torch.Tensor, damping: float = DAMPING) -> Factored:
        """H = M M^T with M upper triangular comes from the Cholesky factor of H in reversed order; U = M^-1."""
        damped = damp(moment, damping)
        if not torch.isfinite(damped).all():
            return cls(moment, damped, None, "the second moment of the inputs has inf or NaN")
        if not damped.diagonal().mean() > 0:
            return cls(moment, damped, None, "all calibration inputs are zero")
        lower, info = torch.linalg.cholesky_ex(damped.double().flip(0, 1))
        if info.item():
            reason = (
                f"the second moment of the inputs is not positive definite, damped by {damping:g} of its mean diagonal"
            )
            return cls(moment, damped, None, reason)
        upper = lower.flip(0, 1)
        identity = torch.eye(upper.shape[0], dtype=torch.float64, device=upper.device)
        return cls(moment, damped, torch.linalg.solve_triangular(upper, identity, upper=True).float(), "")


def compensated(
    weight: torch.Tensor,
    moment: torch.Tensor | Factored,
    rule: Rule,
    passes: int = PASSES,
    plain: Rounded | None = None,
) -> Rounded:
    """A weight rounded so that its output errors cancel on the calibration's inputs; no row is worse than ``plain``.

    ``plain`` is what to beat, ``nearest`` where None. Deterministic. Where H is zero, not finite or, even damped, not
    positive definite, the reason is logged and ``plain`` is returned.

    Shapes: weight fp32 [N, K]; moment fp32 [K, K].
    """
    if plain is None:
        plain = nearest(weight, rule)
    metric = moment if isinstance(moment, Factored) else Factored.of(moment)
    if metric.inverse is None:
        logger.warning("columns are rounded one by one, without calibration: %s", metric.reason)
        return plain
    made = descend(weight, metric.damped, rule, _sequential(weight, metric.inverse, rule, plain), passes)
    return better_rows(weight, metric.moment, plain, made)


def better_rows(weight: torch.Tensor, second_moment: torch.Tensor, a: Rounded, b: Rounded) -> Rounded:
    """Row by row the one of lower objective; ``a`` where they are equal."""
    take = objective(weight, b.values, second_moment) < objective(weight, a.values, second_moment)
    rows = take.unsqueeze(1)
    return Rounded(
        torch.where(rows, b.codes, a.codes),
        torch.where(rows, b.values, a.values),
        torch.where(rows.unsqueeze(2), b.parameters, a.parameters),
    )


def damp(second_moment: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """H with ``damping`` times the mean of its diagonal added to the diagonal."""
    made = second_moment.clone()
    made.diagonal().add_(damping * second_moment.diagonal().mean())
    return made


def _blocks(columns: int, group: int) -> list[slice]:
    """Slices of at most BLOCK columns whose ends no group crosses, except groups that are larger than a block."""
    if group <= BLOCK:
        step = BLOCK // group * group
        return [slice(start, min(start + step, columns)) for start in range(0, columns, step)]
    return [
        slice(start, min(start + BLOCK, first + group))
        for first in range(0, columns, group)
        for start in range(first, first + group, BLOCK)
    ]


def _sequential(weight: torch.Tensor, factor: torch.Tensor, rule: Rule, like: Rounded) -> Rounded:
    """Columns from first to last; each one's error goes to the later ones in the proportion of U's row."""
    w = weight.clone()
    codes, values = torch.empty_like(like.codes), torch.empty_like(weight)
    parameters = torch.empty_like(like.parameters)
    group = rule.group_size
    for block in _blocks(w.shape[1], group):
        errors = w.new_empty(w.shape[0], block.stop - block.start)
        for j in range(block.start, block.stop):
            if j % group == 0:
                # up to date: later columns of the block after each column, those beyond it after each block
                parameters[:, j // group] = rule.choose(w[:, j : j + group], j)
            code, value = rule.round(w[:, j : j + 1], parameters[:, j // group])
            codes[:, j : j + 1], values[:, j : j + 1] = code, value
            error = (w[:, j : j + 1] - value) / factor[j, j]
            errors[:, j - block.start] = error.squeeze(1)
            w[:, j + 1 : block.stop].addmm_(error, factor[j : j + 1, j + 1 : block.stop], alpha=-1)
        w[:, block.stop :].addmm_(errors, factor[block, block.stop :], alpha=-1)
    return Rounded(codes, values, parameters)


def descend(weight: torch.Tensor, second_moment: torch.Tensor, rule: Rule, start: Rounded, passes: int) -> Rounded:
    """Coordinate descent: each column in turn takes its best value given all others, with the parameters as they are.

    A column's best value is the one nearest to q_j + g_j / H_jj, where g = (w - q) H, so no step raises the objective.
    """
    codes, values, parameters = start.codes.clone(), start.values.clone(), start.parameters
    group = rule.group_size
    diagonal = second_moment.diagonal()
    for _ in range(passes):
        gradient = (weight - values) @ second_moment
        for block in _blocks(weight.shape[1], group):
            steps = weight.new_empty(weight.shape[0], block.stop - block.start)
            for j in range(block.start, block.stop):
                old = values[:, j : j + 1]
                code, value = rule.round(old + gradient[:, j : j + 1] / diagonal[j], parameters[:, j // group])
                step = value - old
                codes[:, j : j + 1], values[:, j : j + 1] = code, value
                steps[:, j - block.start] = step.squeeze(1)
                gradient[:, j : block.stop].addmm_(step, second_moment[j : j + 1, j : block.stop], alpha=-1)
            gradient[:, block.stop :].addmm_(steps, second_moment[block, block.stop :], alpha=-1)
    return Rounded(codes, values, parameters)
