#!/usr/bin/env python3
"""Times int8_linear (rotated, quantizer included) and its GEMM against bf16 F.linear and, if installed, comfy-kitchen.

python packages/kitchen-int8/bench/int8.py --out benchmarks/results/h200/int8.json
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

import kitchen_core as kc
from kitchen_core.arithmetic import rotation_group
from kitchen_int8 import _gemm
from kitchen_int8._extension import EXTENSION

# K x N: layers of Flux, Qwen-Image and Llama-like models; then widths that no tile fits
SHAPES = ((3072, 3072), (3072, 9216), (3072, 12288), (12288, 3072), (3072, 24576))
ODD_SHAPES = ((5120, 5120), (3072, 22473), (384, 1536))
ROWS = (1, 16, 64, 97, 256, 1000, 1024, 4096, 8192)
SOURCES = [
    "packages/kitchen-int8/csrc", "shared_cuda/include/kitchen/gemm", "shared_cuda/include/kitchen/quant",
    "shared_cuda/include/kitchen/ptx", "shared_cuda/include/kitchen/mma", "shared_cuda/include/kitchen/copy",
]  # fmt: skip
BF16 = torch.bfloat16


def peer():
    """comfy-kitchen's int8_linear, or None where it is not installed."""
    try:
        import comfy_kitchen
    except ImportError:
        return None
    return comfy_kitchen.int8_linear


def error(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> float:
    """Relative error of sampled rows of y against float64 x @ weight.T."""
    rows = torch.linspace(0, x.shape[0] - 1, min(x.shape[0], 16), device=x.device).long()
    exact = x[rows].double() @ weight.double().T
    return float((y[rows].double() - exact).norm() / exact.norm())


def workspace_bytes(kernel: str, M: int, N: int, K: int, device: int) -> int:
    """Of the GEMM: only the portable kernel has one, where its plan splits K."""
    portable = {"int8/few_rows": _gemm.SM80, "int8/sm80": _gemm.SM80, "int8/sm75": _gemm.SM75}
    return _gemm.plan_of(portable[kernel], M, N, K, K % 16 == 0, device).workspace_bytes if kernel in portable else 0


def measure(M: int, K: int, N: int) -> list[dict]:
    """Rows for the whole linear and for the GEMM alone, all columns from one interleaved run."""
    group = rotation_group(K, 256)
    copies = benchlib.copies_for(N * K)
    dense = [torch.randn(N, K, device="cuda", dtype=BF16) * 0.02 for _ in range(copies)]
    packed = [kc.quantize_int8_convrot_weight(w, group) for w in dense]
    x = torch.randn(M, K, device="cuda", dtype=BF16)
    codes, scale = kc.quantize_and_rotate_rowwise(x, group)
    read_bytes = N * K + 4 * N + 2 * M * K + 2 * M * N
    buffers = [
        torch.empty(read_bytes, device="cuda", dtype=torch.uint8) for _ in range(benchlib.copies_for(read_bytes))
    ]
    sink = torch.zeros(4, device="cuda", dtype=torch.int32)
    ext, device = EXTENSION.module, x.device.index

    def read(i: int) -> None:
        buffer, stream = buffers[i % len(buffers)], torch.cuda.current_stream().cuda_stream
        ext.yardstick_read(buffer.data_ptr(), read_bytes, sink.data_ptr(), device, stream)

    variants = {
        "linear": lambda i: kc.int8_linear(x, *packed[i], convrot_groupsize=group),
        "gemm": lambda i: kc.int8_scaled_mm(codes, scale, *packed[i]),
        "bf16": lambda i: F.linear(x, dense[i]),
        "read": read,
    }
    theirs = peer()
    if theirs is not None and group == 256:
        variants["ck"] = lambda i: theirs(
            x, *packed[i], None, out_dtype=BF16, convrot=True, convrot_groupsize=group, input_act=None,
            residual=None, residual_scale=None,
        )  # fmt: skip
    times = benchlib.time_variants(variants, copies, reps=11)
    with kc.trace() as calls:
        y = variants["linear"](0)
    ck_us = round(times["ck"].us, 3) if "ck" in times else None
    err_bf16 = error(x, F.linear(x, dense[0]), dense[0])
    kernel = dict(calls)["int8_scaled_mm"]
    shared = {
        "M": M, "N": N, "K": K, "group": group, "bf16_us": round(times["bf16"].us, 3),
        "read_us": round(times["read"].us, 3), "copy_us": None, "err": error(x, y, dense[0]), "err_bf16": err_bf16,
        "kernel": kernel, "workspace_bytes": workspace_bytes(kernel, M, N, K, device),
    }  # fmt: skip
    return [
        {
            "case": "convrot", "part": part, **shared, "us": round(times[part].us, 3),
            "us_p80": round(times[part].us_p80, 3), "ck_us": ck_us if part == "linear" else None,
            "best_peer": {"name": "comfy-kitchen", "us": ck_us} if part == "linear" and ck_us else None,
        }
        for part in ("linear", "gemm")
    ]  # fmt: skip


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[dict]) -> None:
    """Ratios over the announced shapes, by part and M."""
    for part in ("linear", "gemm"):
        for M in ROWS:
            mine = [r for r in rows if r["part"] == part and r["M"] == M and (r["K"], r["N"]) in SHAPES]
            if not mine:
                continue
            line = f"{part:6} M={M:5}  x bf16 {geometric_mean([r['bf16_us'] / r['us'] for r in mine]):5.2f}"
            line += f"  of a plain read {geometric_mean([r['read_us'] / r['us'] for r in mine]):6.1%}"
            if all(r["ck_us"] for r in mine):
                line += f"  x ck {geometric_mean([r['ck_us'] / r['us'] for r in mine]):5.2f}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/int8.json")
    parser.add_argument("--quick", action="store_true", help="two shapes, three M")
    args = parser.parse_args()
    shapes, row_counts = (SHAPES[:2], (16, 256, 4096)) if args.quick else (SHAPES + ODD_SHAPES, ROWS)
    rows = []
    for K, N in shapes:
        for M in row_counts:
            for row in measure(M, K, N):
                rows.append(row)
                print(
                    f"{row['part']:6} K={K:5} N={N:5} M={M:5} {row['us']:8.2f} us, bf16 {row['bf16_us']:8.2f} = "
                    f"{row['bf16_us'] / row['us']:4.2f}x, ck {row['ck_us']}, read {row['read_us']:7.2f}, "
                    f"err {row['err']:.5f}  {row['kernel']}",
                    flush=True,
                )
            torch.cuda.empty_cache()
        benchlib.write_results(args.out, "int8", rows, SOURCES)
    summary(rows)


if __name__ == "__main__":
    main()
