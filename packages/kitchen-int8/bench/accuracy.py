#!/usr/bin/env python3
"""Relative error of int8_linear against float64, ours and comfy-kitchen's on the same data.

python packages/kitchen-int8/bench/accuracy.py --out benchmarks/results/h200/accuracy.json

x [M, K] and weight [N, K] are N(0, 1) in the row's dtype; the exact result is x @ weight.T in float64 of those rounded
values. So an error holds everything: the rounding of weight and activations to codes, and of the result to the dtype. ``err``
is ours; ``ck_err`` the peer's own quantizer and kernel; ``ck_err_same_weight`` the peer's kernel on our codes of the weight;
``err_weight`` and ``err_activation`` ours with only the weight, or only the activation, quantized. The limit is that of
bfloat16, rotated, at M = 1024; with fewer rows the error varies with their few maxima.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

import kitchen_core as kc
from kitchen_core.arithmetic import hadamard_rotate
from kitchen_core.testing import relative_error

GROUP = 256
LIMIT, LIMIT_ROWS = 0.0125, 1024  # of case "convrot" in bfloat16
N, K = 1024, 4096
ROWS = (16, 64, 1024)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CASES = {"convrot": GROUP, "plain": 0}
SEEDS = (0, 1, 2)
SOURCES = benchlib.with_headers("packages/kitchen-int8/csrc")


def cells() -> set[tuple]:
    """(case, dtype, M, seed) of every row of a complete file."""
    return {(case, dtype, M, seed) for case in CASES for dtype in DTYPES for M in ROWS for seed in SEEDS}


def peer_errors(x, weight, group, codes, scale, exact) -> dict[str, float | None]:
    try:
        import comfy_kitchen
        from comfy_kitchen.backends import cuda as backend
    except ImportError:
        return {"ck_err": None, "ck_err_same_weight": None}

    def run(their_codes: torch.Tensor, their_scale: torch.Tensor) -> float:
        y = comfy_kitchen.int8_linear(
            x, their_codes, their_scale, None, out_dtype=x.dtype, convrot=group > 0, convrot_groupsize=group or GROUP
        )
        return relative_error(y, exact)

    own = backend.quantize_int8_convrot_weight(weight, group) if group else backend.quantize_int8_rowwise(weight)
    return {"ck_err": run(*own), "ck_err_same_weight": run(codes, scale)}


def measure(case: str, dtype: str, M: int, seed: int) -> dict:
    group, kind = CASES[case], DTYPES[dtype]
    generator = torch.Generator("cuda").manual_seed(seed)
    x, weight = (torch.randn(rows, K, generator=generator, device="cuda").to(kind) for rows in (M, N))
    exact = x.double() @ weight.double().T
    codes, scale = kc.quantize_int8_convrot_weight(weight, group)
    with kc.trace() as calls:
        y = kc.int8_linear(x, codes, scale, convrot_groupsize=group)
    ran = dict(calls)
    x_codes, x_scale = kc.quantize_and_rotate_rowwise(x, group)
    x_rotated, weight_rotated = (hadamard_rotate(t.double(), group) for t in (x, weight))
    x_back, weight_back = x_codes.double() * x_scale.double(), codes.double() * scale.double()
    return {
        "case": case, "dtype": dtype, "M": M, "N": N, "K": K, "group": group, "seed": seed, "err": relative_error(y, exact),
        **peer_errors(x, weight, group, codes, scale, exact),
        "err_dtype": relative_error(torch.nn.functional.linear(x, weight), exact),
        "err_weight": relative_error(x_rotated @ weight_back.T, exact),
        "err_activation": relative_error(x_back @ weight_rotated.T, exact),
        "kernel": ran.get("int8_scaled_mm", ran["int8_linear"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/accuracy.json")
    args = parser.parse_args()
    rows = [measure(*cell) for cell in sorted(cells())]
    benchlib.write_results(args.out, "accuracy", rows, SOURCES)
    for case, dtype, M in sorted({cell[:3] for cell in cells()}):
        mine = [row for row in rows if (row["case"], row["dtype"], row["M"]) == (case, dtype, M)]
        for name in ("err", "ck_err", "ck_err_same_weight", "err_weight", "err_activation", "err_dtype"):
            values = [row[name] for row in mine if row[name] is not None]
            print(f"{case:8} {dtype:9} M={M:5} {name:20} {100 * max(values, default=float('nan')):.4f}%")
    limited = ("convrot", "bfloat16", LIMIT_ROWS)
    worst = max(row["err"] for row in rows if (row["case"], row["dtype"], row["M"]) == limited)
    print(f"worst of convrot in bfloat16 at M={LIMIT_ROWS}: {100 * worst:.4f}%, the limit is {100 * LIMIT:.2f}%")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
