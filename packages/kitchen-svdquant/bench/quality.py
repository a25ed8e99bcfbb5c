#!/usr/bin/env python3
"""How far the low-rank branch lowers the error of a layer's output, on real weights and real activations, by rank.

Every linear layer of the demo's sentence encoder is quantized at each rank, with the activations of the calibration
sentences (``activations``: they choose the smooth factor) and with their second moments (``calibrated``: branch and codes are
fitted to them). The error is that of the layer's output on other sentences: ||y - x W^T|| / ||x W^T||, everything in fp32 but
for the 4-bit numbers. On the CPU, in some minutes:

    python packages/kitchen-svdquant/bench/quality.py
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import pairwise
from pathlib import Path

import torch

from kitchen_core import Calibration
from kitchen_core.testing import linear_inputs
from kitchen_models import demo
from kitchen_models.sentences import CALIBRATION_SENTENCES, SENTENCES
from kitchen_svdquant.format import SVDQuantConfig, SVDQuantFormat

ROOT = Path(__file__).resolve().parents[3]
RANKS = (0, 16, 32, 64)
METHODS = ("activations", "calibrated")


def inputs_of(model: torch.nn.Module, folder: Path, sentences: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The rows that each linear layer sees, one sentence at a time: none is padding."""
    return linear_inputs(model, demo.tokenize(folder, sentences, batch=1))


def output_error(weight: torch.Tensor, rank: int, calibration, x: torch.Tensor) -> float:
    """Of one layer, quantized anew."""
    config = SVDQuantConfig(rank)
    tensors = SVDQuantFormat.quantize(weight, config, calibration=calibration)
    exact = x.double() @ weight.double().t()
    return float((SVDQuantFormat.linear(x, tensors, config).double() - exact).norm() / exact.norm())


def measure(layers: list[str] | None = None, methods: tuple[str, ...] = METHODS) -> list[dict]:
    """A row for each layer, method and rank; ``layers``: some of their names."""
    folder = demo.model_folder()
    model = demo.load_model(folder)
    before, fresh = inputs_of(model, folder, CALIBRATION_SENTENCES), inputs_of(model, folder, SENTENCES)
    rows = []
    for name in layers or list(fresh):
        weight = model.get_submodule(name).weight.detach()
        given = {"activations": before[name], "calibrated": Calibration(weight.shape[1]).update(before[name])}
        for method in methods:
            for rank in RANKS:
                started = time.perf_counter()
                error = output_error(weight, rank, given[method], fresh[name])
                rows.append(
                    {
                        "case": method, "layer": name, "N": weight.shape[0], "K": weight.shape[1], "rank": rank,
                        "M": fresh[name].shape[0], "err": error, "seconds": round(time.perf_counter() - started, 2),
                    }
                )  # fmt: skip
    return rows


def mean_errors(rows: list[dict], method: str) -> dict[int, float]:
    """By rank, the geometric mean over the layers."""
    return {
        rank: math.exp(sum(math.log(e) for e in found) / len(found))
        for rank in RANKS
        for found in [[r["err"] for r in rows if r["case"] == method and r["rank"] == rank]]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu/svdquant_quality.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    head = {"family": "svdquant_quality", "model": demo.MODEL_PACKAGE, "torch": torch.__version__}
    body = ",\n".join(json.dumps(row) for row in rows)
    args.out.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{body}\n]}}\n')
    for method in METHODS:
        means = mean_errors(rows, method)
        print(method, {rank: f"{error:.4f} ({error / means[0]:.3f})" for rank, error in means.items()})
        by_layer = {r["layer"]: {} for r in rows}
        for r in rows:
            if r["case"] == method:
                by_layer[r["layer"]][r["rank"]] = r["err"]
        falling = [all(e[a] >= e[b] for a, b in pairwise(RANKS)) for e in by_layer.values()]
        worst = max(e[32] / e[0] for e in by_layer.values())
        print(
            f"  layers that fall from rank to rank: {sum(falling)} of {len(falling)}; at rank 32 the worst keeps {worst:.3f}"
        )


if __name__ == "__main__":
    main()
