#!/usr/bin/env python3
"""What a calibration is worth on real weights and activations: the error of each layer's output on inputs of other sentences.

Every linear layer of the demo's sentence encoder is quantized by minimum and maximum (``plain``), with AWQ's search over the
scale exponent (``scales``: the division is put on the layer's input) and with codes, scales and zeros fitted to the inputs
(``calibrated``). The error is that of the layer's output on other sentences: ||y - x W^T|| / ||x W^T||, everything in fp32 but
for the 4-bit numbers. All of it twice, with the two sets of sentences exchanged. On the CPU, in some minutes:

    python packages/kitchen-awq/bench/quality.py
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch

from kitchen_awq.calibrated import quantize_awq_calibrated
from kitchen_awq.channel_scales import scale_columns, search_channel_scales
from kitchen_awq.quantizer import quantize_awq
from kitchen_core import Calibration
from kitchen_core.reference.awq import dequantize_awq
from kitchen_core.testing import linear_inputs
from kitchen_models import demo
from kitchen_models.sentences import CALIBRATION_SENTENCES, SENTENCES

ROOT = Path(__file__).resolve().parents[3]
METHODS = ("plain", "scales", "calibrated")
GROUPS = (32, 64, 128)


def inputs_of(model: torch.nn.Module, folder: Path, sentences: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The rows that each linear layer sees, one sentence at a time: none is padding."""
    return linear_inputs(model, demo.tokenize(folder, sentences, batch=1))


def quantized(weight: torch.Tensor, group: int, method: str, calibration: Calibration) -> tuple[torch.Tensor, float]:
    """The dense weight that a method's stored numbers stand for, and the exponent of its channel scales."""
    if method == "calibrated":
        return dequantize_awq(*quantize_awq_calibrated(weight, group, calibration), group, torch.float32), 0.0
    if method == "plain":
        return dequantize_awq(*quantize_awq(weight, group), group, torch.float32), 0.0
    found = search_channel_scales([weight], calibration, group)
    packed = quantize_awq(scale_columns(weight, found.scales), group)
    return dequantize_awq(*packed, group, torch.float32) / found.scales, found.exponent


def measure(
    layers: list[str] | None = None, groups: tuple[int, ...] = GROUPS, swaps: tuple[bool, ...] = (False, True)
) -> list[dict]:
    """A row for each layer, group and method; ``layers``: some of their names.

    ``swapped``: calibrated on the demo's own sentences, measured on the calibration sentences.
    """
    folder = demo.model_folder()
    model = demo.load_model(folder)
    seen = [inputs_of(model, folder, sentences) for sentences in (CALIBRATION_SENTENCES, SENTENCES)]
    rows = []
    for swapped in swaps:
        before, fresh = reversed(seen) if swapped else seen
        for name in layers or list(fresh):
            weight, x = model.get_submodule(name).weight.detach(), fresh[name].double()
            calibration = Calibration(weight.shape[1]).update(before[name])
            exact = x @ weight.double().t()
            for group in groups:
                for method in METHODS:
                    started = time.perf_counter()
                    dense, exponent = quantized(weight, group, method, calibration)
                    error = float((x @ dense.double().t() - exact).norm() / exact.norm())
                    rows.append(
                        {
                            "case": method, "layer": name, "N": weight.shape[0], "K": weight.shape[1], "group": group,
                            "M": x.shape[0], "swapped": swapped, "err": error, "exponent": exponent,
                            "seconds": round(time.perf_counter() - started, 2),
                        }
                    )  # fmt: skip
    return rows


def ratios(rows: list[dict], method: str, group: int) -> dict[tuple[str, bool], float]:
    """By layer and ``swapped``, a method's error over that of minimum and maximum."""
    errors = {(r["layer"], r["swapped"], r["case"]): r["err"] for r in rows if r["group"] == group}
    return {key[:2]: error / errors[*key[:2], "plain"] for key, error in errors.items() if key[2] == method}


def mean(values: dict[tuple[str, bool], float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values.values())) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu/awq_quality.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    head = {"family": "awq_quality", "model": demo.MODEL_PACKAGE, "torch": torch.__version__}
    body = ",\n".join(json.dumps(row) for row in rows)
    args.out.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{body}\n]}}\n')
    for group in GROUPS:
        for method in METHODS[1:]:
            found = ratios(rows, method, group)
            worst = max(found, key=found.__getitem__)
            print(f"g{group} {method}: {mean(found):.3f} of plain in the mean, {found[worst]:.3f} at most ({worst[0]})")


if __name__ == "__main__":
    main()
