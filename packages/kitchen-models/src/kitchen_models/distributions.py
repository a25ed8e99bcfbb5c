"""How the numbers of a weight are distributed: what a report shows of each layer beside its error."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

BINS_PER_OCTAVE = 4
LOW, HIGH = -60, 40  # octaves of |w| that the histogram tells apart
FP32_FOURTH_ROOT = 1e9  # larger magnitudes overflow fp32 in their fourth power
SHOWN = range(-8, 7)  # octaves around the root mean square that are shown


@dataclass
class Distribution:
    """Of one weight [N, K], taken in by blocks of rows; all of it in one pass, and small whatever the weight."""

    count: int = 0
    squares: float = 0.0
    fourths: float = 0.0
    largest: float = 0.0
    histogram: torch.Tensor = field(
        default_factory=lambda: torch.zeros((HIGH - LOW) * BINS_PER_OCTAVE, dtype=torch.int64, device="cpu")
    )
    channels: torch.Tensor | None = None  # largest magnitude of each input channel, fp32 [K]

    def add(self, rows: torch.Tensor) -> None:
        """Take in some rows of the weight."""
        size = rows.to(torch.float32).abs()
        if not size.numel():
            return
        columns = size.amax(0)
        squared = (size if float(columns.max()) < FP32_FOURTH_ROOT else size.double()).square()
        self.count += size.numel()
        self.squares += float(squared.sum(dtype=torch.float64))
        self.fourths += float((squared * squared).sum(dtype=torch.float64))
        self.channels = columns if self.channels is None else torch.maximum(self.channels, columns)
        self.largest = max(self.largest, float(columns.max()))
        octaves = size.clamp_min_(2.0**LOW).log2_().sub_(LOW).mul_(BINS_PER_OCTAVE)
        bins = octaves.to(torch.int32).clamp_(0, self.histogram.numel() - 1).flatten()
        self.histogram += torch.bincount(bins, minlength=self.histogram.numel())

    @property
    def rms(self) -> float:
        """The root mean square."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def kurtosis(self) -> float:
        """Mean fourth power over the squared mean square: 3 for a Gaussian, more where there are outliers."""
        return self.fourths * self.count / self.squares**2 if self.squares else 0.0

    @property
    def largest_over_rms(self) -> float:
        """The largest magnitude in root mean squares: 5 to 6 for a Gaussian weight of a real layer's size."""
        return self.largest / self.rms if self.rms else 0.0

    @property
    def channel_ratio(self) -> float:
        """The largest magnitude of the largest input channel over that of the median channel: near 1 without outliers."""
        if self.channels is None:
            return 0.0
        middle = float(self.channels.median())
        return float(self.channels.max()) / middle if middle else 0.0

    def around_rms(self) -> torch.Tensor:
        """Share of the weights in each bin of SHOWN, octaves around the root mean square; the ends take what lies beyond."""
        shown = (len(SHOWN) - 1) * BINS_PER_OCTAVE
        if not self.squares:
            return torch.zeros(shown, device="cpu", dtype=torch.float32)
        first = round((math.log2(self.rms) + SHOWN[0] - LOW) * BINS_PER_OCTAVE)
        places = (torch.arange(self.histogram.numel(), device="cpu") - first).clamp(0, shown - 1)
        made = torch.zeros(shown, dtype=torch.float64, device="cpu").index_add_(0, places, self.histogram.double())
        return (made / self.count).float()
