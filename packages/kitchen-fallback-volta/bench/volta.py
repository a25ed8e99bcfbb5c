#!/usr/bin/env python3
"""Times the fused WMMA kernel and the torch path, forced on a GPU that is no V100, against fp16 F.linear.

    python packages/kitchen-fallback-volta/bench/volta.py --out benchmarks/results/h200/volta.json
    python packages/kitchen-fallback-volta/bench/volta.py --tables benchmarks/results/h200/volta.json     markdown, no GPU

The package must have been built with CUDAARCHS="70;90a": within `simulate("sm_70")` its policy and records are a V100's, and
the code that runs is this GPU's, made from the same source. What that says of a V100: docs/kernels/fallback_volta.md.

Columns beside the common ones: fp16_us is F.linear; wmma_fp16_us a plain GEMM of fp16 operands on the kernel's large tile;
wmma_fp16_one_block_us the same with one block an SM, which is what a V100's registers allow; peak_bytes and int8_peak_bytes
what a call holds beside inputs and output, here and on this GPU's INT8 path; int8_err the INT8 path's error. Of the torch
path `us` is its time in a graph, with two GEMMs, and eager_us that of calls one after the other without a graph, each of
which waits for the GPU to tell that one GEMM was enough; eager_int8_peak_bytes is what the path holds that a V100 would take
without it, the eager reference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

import kitchen_core as kc
from kitchen_fallback_volta import _gemm
from kitchen_fallback_volta._extension import EXTENSION
from kitchen_int8._extension import EXTENSION as YARDSTICKS

SHAPES = ((3072, 3072), (3072, 9216), (3072, 12288), (12288, 3072), (3072, 24576))  # K x N
ROWS = (1, 16, 64, 256, 1024, 4096, 8192)
TORCH_ROWS = (1024, 4096, 8192)
INT8_ON_VOLTA = ("core/composed", "core/eager")  # what a V100 takes without this package
CASES = {  # case -> the kernels that are forced
    "wmma": ("fallback-volta/wmma", "fallback-volta/rowwise"),
    "torch": ("fallback-volta/torch", "core/eager"),
}
GROUP = 256
ONE_BLOCK = 120_000  # bytes of shared memory of which an H200's SM fits one
SOURCES = [
    "packages/kitchen-fallback-volta/csrc", "shared_cuda/include/kitchen/mma/wmma_f16.h", "shared_cuda/include/kitchen/quant",
    "shared_cuda/include/kitchen/common", "shared_cuda/include/kitchen/copy",
]  # fmt: skip
FP16 = torch.float16


def cells() -> set[tuple]:
    """(case, part, M, K, N) of every row of a complete volta.json."""
    rows = {"wmma": ROWS, "torch": TORCH_ROWS}
    return {(c, part, M, K, N) for c in CASES for M in rows[c] for K, N in SHAPES for part in ("linear", "gemm")}


def forced(kernels: tuple[str, ...], function: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """The call on a V100 that is not there."""

    def call(i: int) -> torch.Tensor:
        with kc.simulate("sm_70"), kc.use(*kernels):
            return function(i)

    return call


def peak_bytes(call: Callable[[int], torch.Tensor]) -> int:
    """Most bytes alive beside inputs and output; as asked for, not as the allocator rounds them."""
    call(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y = call(0)
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - y.numel() * y.itemsize


def eager_us(call: Callable[[int], torch.Tensor], copies: int, reps: int = 3) -> float:
    """Median time of a call without a graph, over runs of calls one after the other; what the host needs counts."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(reps + 1):
        start.record()
        for i in range(copies):
            call(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
    return sorted(times[1:])[reps // 2]


def error(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> float:
    """Relative error of sampled rows of y against float64 x @ weight.T."""
    rows = torch.linspace(0, x.shape[0] - 1, min(x.shape[0], 16), device=x.device).long()
    exact = x[rows].double() @ weight.double().T
    return float((y[rows].double() - exact).norm() / exact.norm())


class Layer:
    """Copies of one layer to rotate: dense, packed, and memory for the yardstick."""

    def __init__(self, K: int, N: int) -> None:
        self.K, self.N, self.copies = K, N, benchlib.copies_for(N * K)
        self.dense = [torch.randn(N, K, device="cuda", dtype=FP16) * 0.02 for _ in range(self.copies)]
        self.dense_bf16 = [w.bfloat16() for w in self.dense]
        self.packed = [kc.quantize_int8_convrot_weight(w, GROUP) for w in self.dense]
        self.space = torch.empty(int(benchlib.ROTATE_BYTES) + (1 << 30), device="cuda", dtype=torch.uint8)
        self.sink = torch.zeros(4, device="cuda", dtype=torch.int32)


def measure(layer: Layer, M: int) -> list[dict]:
    """All rows of one shape and M, from one interleaved run."""
    K, N = layer.K, layer.N
    x = torch.randn(M, K, device="cuda", dtype=FP16)
    x_bf16, out = x.bfloat16(), torch.empty(M, N, device="cuda", dtype=FP16)
    codes, scale = kc.quantize_and_rotate_rowwise(x, GROUP)
    read_bytes = N * K + 4 * N + 2 * M * K + 2 * M * N
    pitch = (read_bytes + 255) // 256 * 256
    places = max(1, layer.space.numel() // pitch)

    def read(i: int) -> None:
        address, stream = layer.space.data_ptr() + i % places * pitch, torch.cuda.current_stream().cuda_stream
        YARDSTICKS.module.yardstick_read(address, read_bytes, layer.sink.data_ptr(), 0, stream)

    def plain(shared_bytes: int) -> Callable[[int], None]:
        def call(i: int) -> None:
            EXTENSION.module.plain_fp16_mm(
                M, N, K, x.data_ptr(), layer.dense[i].data_ptr(), out.data_ptr(), _gemm.TILES[-1].raster_group,
                shared_bytes, 0, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

        return call

    def linear(i: int) -> torch.Tensor:
        return kc.int8_linear(x, *layer.packed[i], convrot_groupsize=GROUP)

    variants = {
        "fp16": lambda i: F.linear(x, layer.dense[i]), "bf16": lambda i: F.linear(x_bf16, layer.dense_bf16[i]),
        "read": read, "wmma_fp16": plain(0), "wmma_fp16_one_block": plain(ONE_BLOCK),
    }  # fmt: skip
    cases = [case for case in CASES if M in {"wmma": ROWS, "torch": TORCH_ROWS}[case]]
    for case in cases:
        variants[f"{case} linear"] = forced(CASES[case], linear)
        variants[f"{case} gemm"] = forced(
            CASES[case], lambda i: kc.int8_scaled_mm(codes, scale, *layer.packed[i], None, FP16)
        )
    times = benchlib.time_variants(variants, layer.copies, target_us=300, reps=5)
    assert error(x, out, layer.dense[layer.copies - 1]) < 1e-3, "the plain GEMM is wrong"

    int8_err, int8_peak = error(x, linear(0), layer.dense[0]), peak_bytes(linear)
    eager_peak = peak_bytes(forced(INT8_ON_VOLTA, linear)) if "torch" in cases else 0
    rows = []
    for case in cases:
        call = variants[f"{case} linear"]
        err, peak = error(x, call(0), layer.dense[0]), peak_bytes(call)
        for part in ("linear", "gemm"):
            time = times[f"{case} {part}"]
            rows.append({
                "case": case, "part": part, "M": M, "N": N, "K": K, "group": GROUP, "us": round(time.us, 3),
                "us_p80": round(time.us_p80, 3), "fp16_us": round(times["fp16"].us, 3),
                "bf16_us": round(times["bf16"].us, 3), "wmma_fp16_us": round(times["wmma_fp16"].us, 3),
                "wmma_fp16_one_block_us": round(times["wmma_fp16_one_block"].us, 3), "ck_us": None, "best_peer": None,
                "read_us": round(times["read"].us, 3), "copy_us": None, "err": err, "int8_err": int8_err,
                "err_bf16": error(x, F.linear(x_bf16, layer.dense_bf16[0]), layer.dense[0]),
                "kernel": CASES[case][0], "workspace_bytes": peak if part == "linear" else peak_bytes(variants[f"{case} gemm"]),
                "peak_bytes": peak, "int8_peak_bytes": int8_peak,
            })  # fmt: skip
    for row in rows:
        if row["case"] == "torch":
            row["eager_us"] = round(eager_us(variants[f"torch {row['part']}"], min(layer.copies, 2)), 3)
            row["eager_int8_peak_bytes"] = eager_peak
    return rows


def summary(rows: list[dict]) -> None:
    """Geometric mean and least ratio over the shapes, by case, part and M."""
    for case, part, time in (
        ("wmma", "gemm", "us"), ("wmma", "linear", "us"), ("torch", "gemm", "us"), ("torch", "gemm", "eager_us"),
        ("torch", "linear", "us"), ("torch", "linear", "eager_us"),
    ):  # fmt: skip
        for M in (*ROWS, "1024.."):
            large = TORCH_ROWS if M == "1024.." else (M,)
            mine = [r for r in rows if (r["case"], r["part"]) == (case, part) and r["M"] in large]
            if not mine:
                continue
            line = f"{case:5} {part:6} {time:8} M={M:6}"
            for column in ("wmma_fp16_us", "wmma_fp16_one_block_us", "fp16_us", "read_us"):
                ratios = [r[column] / r[time] for r in mine]
                line += f"  {column} {benchlib.geometric_mean(ratios):5.2f} ({min(ratios):.2f})"
            print(line)


def tables(path: Path) -> None:
    """The tables of docs/kernels/fallback_volta.md, from a results file."""
    found = {(r["case"], r["part"], r["M"], r["K"], r["N"]): r for r in json.loads(path.read_text())["rows"]}
    print("| K x N | M | kernel, us | of plain | of plain, one block | of fp16 `F.linear` | whole linear, us |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for K, N in SHAPES:
        for M in ROWS:
            gemm, linear = found["wmma", "gemm", M, K, N], found["wmma", "linear", M, K, N]
            ratios = [gemm[c] / gemm["us"] for c in ("wmma_fp16_us", "wmma_fp16_one_block_us", "fp16_us")]
            print(
                f"| {K} x {N} | {M} | {gemm['us']:.1f} | "
                + " | ".join(f"{r:.2f}" for r in ratios)
                + f" | {linear['us']:.1f} |"
            )
    print(
        "\n| K x N | M | torch path, GEMM, us | of fp16 `F.linear` | in a graph, us | whole linear, us | its peak, MiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for K, N in SHAPES:
        for M in TORCH_ROWS:
            gemm, linear = found["torch", "gemm", M, K, N], found["torch", "linear", M, K, N]
            print(
                f"| {K} x {N} | {M} | {gemm['eager_us']:.0f} | {gemm['fp16_us'] / gemm['eager_us']:.2f} | {gemm['us']:.0f} | "
                f"{linear['eager_us']:.0f} | {linear['peak_bytes'] / 2**20:.1f} |"
            )
    rows = list(found.values())
    wmma = [r for r in rows if r["case"] == "wmma" and r["part"] == "linear"]
    print("\nerr / int8_err:", sorted({round(r["err"] / r["int8_err"], 6) for r in rows}))
    print("peak, MiB:", max(r["peak_bytes"] for r in wmma) / 2**20, "above the INT8 path:", [
        (r["M"], r["K"], r["N"]) for r in wmma if r["peak_bytes"] > r["int8_peak_bytes"]
    ])  # fmt: skip
    torch_rows = [r for r in rows if r["case"] == "torch" and r["part"] == "linear"]
    print("torch path, MiB:", max(r["peak_bytes"] for r in torch_rows) / 2**20, "over the eager INT8 path's:", max(
        r["peak_bytes"] / r["eager_int8_peak_bytes"] for r in torch_rows
    ))  # fmt: skip
    summary(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/volta.json")
    parser.add_argument("--quick", action="store_true", help="two shapes, three M")
    parser.add_argument("--tables", type=Path, help="no measurement: print the tables of this results file")
    args = parser.parse_args()
    if args.tables:
        tables(args.tables)
        return
    shapes, row_counts = (SHAPES[::3], (16, 1024, 4096)) if args.quick else (SHAPES, ROWS)
    rows = []
    for K, N in shapes:
        layer = Layer(K, N)
        for M in row_counts:
            for row in measure(layer, M):
                rows.append(row)
                at = f"{row['case']:5} {row['part']:6} K={K:5} N={N:5} M={M:5} {row['us']:9.2f} us"
                others = f"plain {row['wmma_fp16_us']:9.2f}, one block {row['wmma_fp16_one_block_us']:9.2f}"
                peak = f"err {row['err']:.5f}, {row['peak_bytes'] / 2**20:.1f} MiB"
                print(f"{at}, {others}, fp16 {row['fp16_us']:9.2f}, {peak}", flush=True)
        del layer
        torch.cuda.empty_cache()
        benchlib.write_results(args.out, "volta", rows, SOURCES)
    summary(rows)


if __name__ == "__main__":
    main()
