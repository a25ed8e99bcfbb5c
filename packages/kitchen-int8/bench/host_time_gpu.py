#!/usr/bin/env python3
"""Host time of one warm eager call on a GPU: what a call costs the CPU before it returns, ours and comfy-kitchen's.

A layer so small (1024 x 1024) that the GPU is done before the next call: the time between calls is the host's. Loops of 100
calls, the variants in turn, the GPU idle before each loop; medians over the loops.

    python packages/kitchen-int8/bench/host_time_gpu.py --out benchmarks/results/h200/host_time.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

import kitchen_core as kc

SIZE, GROUP = 1024, 256
ROWS = (1, 64, 300)
CALLS, LOOPS = 100, 25
SOURCES = [
    "packages/kitchen-int8/csrc/bindings.cpp", "packages/kitchen-int8/csrc/int8_gemm",
    "packages/kitchen-int8/csrc/quantize_int8_rowwise", "shared_cuda/include/kitchen/host",
]  # fmt: skip
BF16 = torch.bfloat16


def loop_us(call: Callable[[], object]) -> float:
    """One loop's time for a call, in microseconds."""
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / CALLS / 1000


def variants(M: int) -> dict[str, Callable[[], object]]:
    dense = torch.randn(SIZE, SIZE, device="cuda")
    weight, scale = kc.quantize_int8_convrot_weight(dense, GROUP)
    bias, dense = torch.randn(SIZE, device="cuda", dtype=BF16), dense.to(BF16)
    x = torch.randn(M, SIZE, device="cuda", dtype=BF16)
    layer = torch.nn.Linear(SIZE, SIZE, device="cuda", dtype=BF16)
    layer = kc.QuantizedLinear.from_linear(layer, "int8")
    calls: dict[str, Callable[[], object]] = {
        "int8_linear": lambda: kc.int8_linear(x, weight, scale, bias, None, GROUP),
        "QuantizedLinear": lambda: layer(x),
        "bf16 F.linear": lambda: F.linear(x, dense, bias),
    }
    try:
        import comfy_kitchen
    except ImportError:
        return calls
    calls["comfy-kitchen int8_linear"] = lambda: comfy_kitchen.int8_linear(
        x, weight, scale, bias, out_dtype=BF16, convrot=True, convrot_groupsize=GROUP
    )
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/host_time.json")
    args = parser.parse_args()
    rows = []
    with torch.inference_mode():
        for M in ROWS:
            calls = variants(M)
            for call in calls.values():
                loop_us(call)
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(LOOPS):
                for name, call in calls.items():
                    times[name].append(loop_us(call))
            with kc.trace() as traced:
                calls["int8_linear"]()
            for name, found in times.items():
                found.sort()
                row = {"case": name, "M": M, "N": SIZE, "K": SIZE, "us": round(found[LOOPS // 2], 2)}
                row |= {"us_p80": round(found[int(0.8 * LOOPS)], 2)}
                row["kernel"] = ", ".join(kernel for _, kernel in traced) if name == "int8_linear" else None
                rows.append(row)
                print(f"M={M:4} {name:28} {row['us']:7.2f} us, 80th percentile {row['us_p80']:7.2f}", flush=True)
    benchlib.write_results(args.out, "host_time", rows, SOURCES)


if __name__ == "__main__":
    main()
