"""Random operands on the GPU, the same for the same seed: what tests of the INT8 GEMMs multiply."""

from __future__ import annotations

import torch


def random_codes(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """int8 [rows, columns] of all 256 values."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8, device="cuda")


def random_floats(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def scaled_mm_operands(
    M: int,
    N: int,
    K: int,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: torch.dtype | None = None,
    residual: bool = False,
    scale: str | None = None,
    scalar: bool = False,
    seed: int = 0,
) -> list:
    """Arguments of int8_scaled_mm. ``bias`` is its dtype; ``scale``, of the residual, None, "one" or "columns"; ``scalar``:
    one scale for the whole weight."""
    return [
        random_codes(M, K, seed),
        random_floats(M, 1, seed=seed + 1).abs() / K**0.5,
        random_codes(N, K, seed + 2),
        random_floats(1 if scalar else N, 1, seed=seed + 3).abs() + 0.01,
        None if bias is None else random_floats(N, dtype=bias, seed=seed + 4),
        out_dtype,
        random_floats(M, N, dtype=out_dtype, seed=seed + 5) if residual else None,
        None if scale is None else random_floats(1 if scale == "one" else N, seed=seed + 6),
    ]
