"""The 16-entry tables of the 4-bit INT8-grid format: the fixed one, when it fits, and how another is fitted.

A table holds levels for a group of weights divided by its largest magnitude. Choosing is offline work and happens on
the CPU in fp64, so that one weight gets one table whatever device it lies on and however it is chunked.
"""

from __future__ import annotations

import torch

from .arithmetic import hadamard_rotate, uniform_stream

# The Lloyd-Max levels of a Gaussian normalised by the maximum of its group. Not symmetric; part of the format.
FIXED_LEVELS = (
    -0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720,
    0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671,
)  # fmt: skip

GROUP_SCALE_FLOOR = 1e-8
KURTOSIS_OF_FIXED = -0.1  # flatter than this: normalised Gaussian groups, for which the fixed table was made
FIT_SAMPLES = 300_000
FIT_ITERATIONS = 25
CHOICE_SAMPLES = 1 << 19
CHOICE_ROW_ELEMENTS = 1 << 22


def fixed_codebook(device: torch.device | str = "cpu") -> torch.Tensor:
    """The fixed table, fp32 [16], ascending."""
    return torch.tensor(FIXED_LEVELS, dtype=torch.float32, device=device)


def is_fixed_codebook(codebook: torch.Tensor) -> bool:
    """Whether a table is the fixed one bit for bit. Waits for the device of ``codebook``."""
    return torch.equal(codebook.detach().cpu().float(), fixed_codebook())


def excess_kurtosis(samples: torch.Tensor) -> float:
    """mean(((x - mean) / std)^4) - 3: 0 for a Gaussian, negative for flatter, positive for long tails."""
    samples = samples.double()
    deviation = samples - samples.mean()
    spread = deviation.square().mean().sqrt() + 1e-9  # a constant sample has no shape: it counts as flat
    return ((deviation / spread) ** 4).mean().item() - 3.0


def fit_codebook(samples: torch.Tensor) -> torch.Tensor:
    """Lloyd-Max: 16 levels, fp32 ascending, of locally least squared error for ``samples`` (any shape).

    It starts from evenly spaced quantiles; where those coincide (sparse weights), from quantiles of the distinct
    values, since equal levels would stay equal.
    """
    values = samples.detach().reshape(-1).cpu().double().sort().values
    positions = torch.linspace(0, 1, 16, dtype=torch.float64, device="cpu")
    table = torch.quantile(values, positions)
    if (table.diff() <= 0).any():
        table = torch.quantile(values.unique(), positions)
    prefix = torch.cat((values.new_zeros(1), values.cumsum(0)))
    ends = torch.tensor([0, values.numel()], device="cpu")
    for _ in range(FIT_ITERATIONS):
        inner = torch.searchsorted(values, (table[1:] + table[:-1]) / 2, right=True)
        edges = torch.cat((ends[:1], inner, ends[1:]))
        counts = edges.diff()
        table = torch.where(counts > 0, prefix[edges].diff() / counts.clamp_min(1), table)
    return table.float()


def choose_codebook(weight: torch.Tensor, group_size: int, convrot_groupsize: int) -> torch.Tensor:
    """The table for a weight [N, K], fp32 [16] on its device: the fixed one unless its groups have longer tails.

    Decided on a sample of the rotated weight that depends on shape and content alone.
    """
    samples = _normalised_sample(weight, group_size, convrot_groupsize).cpu()
    flat = excess_kurtosis(samples) <= KURTOSIS_OF_FIXED
    table = fixed_codebook() if flat else fit_codebook(samples[:FIT_SAMPLES])
    return table.to(weight.device)


def _normalised_sample(weight: torch.Tensor, group_size: int, convrot_groupsize: int) -> torch.Tensor:
    """At most 2^19 rotated weights, each over its group's absmax, from evenly strided rows."""
    n, k = weight.shape
    count = min(n, max(1, CHOICE_ROW_ELEMENTS // k))
    picked = torch.arange(count, device=weight.device) * n // count
    rows = hadamard_rotate(weight[picked].float(), convrot_groupsize)
    groups = rows.reshape(-1, group_size)
    flat = (groups / groups.abs().amax(-1, keepdim=True).clamp_min(GROUP_SCALE_FLOOR)).reshape(-1)
    if flat.numel() <= CHOICE_SAMPLES:
        return flat
    uniform = uniform_stream(0, CHOICE_SAMPLES, 0, weight.device)
    return flat[(uniform.double() * flat.numel()).long()]
