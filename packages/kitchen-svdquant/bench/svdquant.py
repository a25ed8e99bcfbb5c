#!/usr/bin/env python3
"""Times svdquant_linear (quantizer, low-rank branch and bias included) and its halves against bf16 and comfy-kitchen.

python packages/kitchen-svdquant/bench/svdquant.py --out benchmarks/results/h200/svdquant.json
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

import kitchen_core as kc
from kitchen_core.layouts import tile_packed
from kitchen_core.packing import pack_nibbles
from kitchen_svdquant import _hopper
from kitchen_svdquant._extension import EXTENSION
from kitchen_svdquant.kernels import FEW_ROWS

SHAPES = ((3072, 3072), (3072, 12288), (12288, 3072))  # K x N: layers of Flux and Qwen-Image
ROWS = (1, 16, 64, 256, 1024, 4096, 8192)
SOME_ROWS = (1, 1024, 4096)
ROWS_OF = {32: ROWS, 128: ROWS, 64: SOME_ROWS, 96: SOME_ROWS}  # by rank
RANKS = tuple(ROWS_OF)
SOURCES = benchlib.with_headers("packages/kitchen-svdquant/csrc")
BF16 = torch.bfloat16


def cells() -> set[tuple]:
    """(case, part, M, K, N) of every row that there must be."""
    return {
        (f"rank {rank}", part, M, K, N)
        for rank in RANKS
        for part in ("linear", "gemm", "quant")
        for K, N in SHAPES
        for M in ROWS_OF[rank]
    }


class Weight:
    """A weight in 4 bits, its low-rank branch, and the same matrix in bf16."""

    def __init__(self, K: int, N: int, rank: int) -> None:
        dense = torch.randn(N, K, device="cuda", dtype=BF16) * 0.02
        self.smooth = (torch.rand(K, device="cuda") * 1.5 + 0.5).to(BF16)
        smoothed = (dense.float() * self.smooth.float()).unflatten(-1, (-1, 64))
        scale = (smoothed.abs().amax(-1) / 7).to(BF16)
        codes = (smoothed / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int8).flatten(1)
        self.codes, self.scale = pack_nibbles(codes), scale.t().contiguous()
        self.down = (torch.randn(K, rank, device="cuda") / K**0.5).to(BF16)
        self.up = (torch.randn(N, rank, device="cuda") * 0.02).to(BF16)
        self.dense = (dense.float() + self.up.float() @ self.down.float().t()).to(BF16)
        self.bias = torch.randn(N, device="cuda", dtype=BF16)
        self.peers = peers(self)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scale, self.smooth, self.down, self.up, self.bias


def peers(weight: Weight) -> dict[str, Callable]:
    """comfy-kitchen's whole linear on natural and on tile-packed weights, of x; empty where it is not installed."""
    try:
        from comfy_kitchen.backends import cuda as backend
    except ImportError:
        return {}
    natural = (weight.codes, weight.scale, weight.up)
    tiled = (
        tile_packed.pack_weight(weight.codes), tile_packed.pack_scale(weight.scale), tile_packed.pack_proj_up(weight.up)
    )  # fmt: skip

    def run(x, codes, scale, up):
        q, ascales, low = backend.quantize_svdquant_w4a4(x, weight.smooth, weight.down)
        return backend.scaled_mm_svdquant_w4a4(q, codes, ascales, scale, low, up, weight.bias)

    return {
        "comfy-kitchen": lambda x: run(x, *natural), "comfy-kitchen, tile-packed": lambda x: run(x, *tiled)
    }  # fmt: skip


def timed(variants: dict[str, Callable[[int], object]], copies: int, slow: tuple[str, ...], reps: int) -> dict:
    """benchlib.time_variants, with few calls and repeats of the variants in ``slow``."""
    graphs = {}
    for name, call in variants.items():
        calls = min(copies, 2) if name in slow else copies
        graph = benchlib.capture(call, copies, calls)
        once = max(benchlib.replay_us(graph), 1.0)
        if name not in slow and once < 300:
            calls *= min(math.ceil(300 / once), max(1, 100 // calls))
            graph = benchlib.capture(call, copies, calls)
            benchlib.replay_us(graph)
        graphs[name] = (graph, calls)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for rep in range(reps):
        for name, (graph, calls) in graphs.items():
            if name not in slow or rep < 2:
                times[name].append(benchlib.replay_us(graph) / calls)
    ordered = {name: sorted(values) for name, values in times.items()}
    return {name: benchlib.Timing(v[(len(v) - 1) // 2], v[int(0.8 * (len(v) - 1))]) for name, v in ordered.items()}


def measure(weights: list[Weight], M: int, K: int, N: int, rank: int) -> list[dict]:
    """Rows for the whole linear and its halves, all columns from one interleaved run."""
    if M >= 1024:  # the activations alone displace the L2's content
        weights = weights[:2]
    copies, x = len(weights), torch.randn(M, K, device="cuda", dtype=BF16)
    ext, device = EXTENSION.module, x.device.index
    quantized = [kc.quantize_svdquant_w4a4(x, w.smooth, w.down) for w in weights[:1]] * copies
    read_bytes = N * K // 2 + 2 * (K // 64 * N + (K + N) * rank + K + N) + 2 * M * (K + N)
    buffers = [
        torch.empty(read_bytes + 16, device="cuda", dtype=torch.uint8) for _ in range(benchlib.copies_for(read_bytes))
    ]
    sink = torch.zeros(4, device="cuda", dtype=torch.int32)

    def read(i: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        ext.yardstick_read(buffers[i % len(buffers)].data_ptr(), read_bytes, sink.data_ptr(), device, stream)

    def gemm(i: int) -> torch.Tensor:
        codes, ascales, low = quantized[i]
        w = weights[i]
        return kc.scaled_mm_svdquant_w4a4(codes, w.codes, ascales, w.scale, low, w.up, w.bias)

    def linear(i: int) -> torch.Tensor:
        return kc.svdquant_linear(x, *weights[i].arguments())

    variants = {
        "linear": linear, "gemm": gemm,
        "quant": lambda i: kc.quantize_svdquant_w4a4(x, weights[i].smooth, weights[i].down),
        "bf16": lambda i: F.linear(x, weights[i].dense, weights[i].bias), "read": read,
    }  # fmt: skip
    theirs = weights[0].peers
    for name in theirs:
        variants[name] = lambda i, name=name: weights[i].peers[name](x)
    times = timed(variants, copies, tuple(theirs) if M >= 256 else (), 5)
    with kc.trace() as calls:
        y = linear(0)
        gemm(0)
        kc.quantize_svdquant_w4a4(x, weights[0].smooth, weights[0].down)
    kernels = dict(calls)
    rows = torch.linspace(0, M - 1, min(M, 16), device="cuda").long()
    exact = x[rows].double() @ weights[0].dense.double().t() + weights[0].bias.double()

    def error(out: torch.Tensor) -> float:
        return float((out[rows].double() - exact).norm() / exact.norm())

    best = min(theirs, key=lambda name: times[name].us) if theirs else None
    ck_us = round(times[best].us, 3) if best else None
    op = {"linear": "svdquant_linear", "gemm": "scaled_mm_svdquant_w4a4", "quant": "quantize_svdquant_w4a4"}
    workspace = _hopper.workspace_bytes(M, N, K, rank) if M > FEW_ROWS else M * (K // 2 + K // 16 + 4 * rank)
    return [
        {
            "case": f"rank {rank}", "M": M, "N": N, "K": K, "rank": rank, "part": part, "us": round(times[part].us, 3),
            "us_p80": round(times[part].us_p80, 3), "bf16_us": round(times["bf16"].us, 3),
            "ck_us": ck_us if part == "linear" else None,
            "best_peer": {"name": best, "us": ck_us} if best and part == "linear" else None,
            "read_us": round(times["read"].us, 3), "copy_us": None, "err": error(y),
            "err_bf16": error(F.linear(x, weights[0].dense, weights[0].bias)), "kernel": kernels[op[part]],
            "workspace_bytes": workspace,
        }
        for part in ("linear", "gemm", "quant")
    ]  # fmt: skip


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[dict]) -> None:
    """Ratios of the whole linear over the shapes, by rank and M."""
    for rank in RANKS:
        for M in ROWS_OF[rank]:
            mine = [r for r in rows if r["part"] == "linear" and r["M"] == M and r["rank"] == rank]
            if not mine:
                continue
            line = f"rank {rank:3} M={M:5}  x bf16 {geometric_mean([r['bf16_us'] / r['us'] for r in mine]):5.2f}"
            line += f"  of a plain read {geometric_mean([r['read_us'] / r['us'] for r in mine]):6.1%}"
            if all(r["ck_us"] for r in mine):
                line += f"  x ck {geometric_mean([r['ck_us'] / r['us'] for r in mine]):5.2f}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/svdquant.json")
    parser.add_argument("--quick", action="store_true", help="rank 32, five M")
    args = parser.parse_args()
    rows = []
    for rank in RANKS[:1] if args.quick else RANKS:
        for K, N in SHAPES:
            weights = [Weight(K, N, rank) for _ in range(benchlib.copies_for(N * K / 2))]
            for M in (1, 16, 64, 256, 4096) if args.quick else ROWS_OF[rank]:
                found = measure(weights, M, K, N, rank)
                rows += found
                line, gemm, quant = found
                print(
                    f"rank {rank:3} K={K:5} N={N:5} M={M:5} {line['us']:8.2f} us (quantizer {quant['us']:7.2f}, GEMM "
                    f"{gemm['us']:8.2f}), bf16 {line['bf16_us']:8.2f} = {line['bf16_us'] / line['us']:4.2f}x, ck "
                    f"{line['ck_us']}, read {line['read_us']:6.2f}, err {line['err']:.4f}  {line['kernel']}",
                    flush=True,
                )
            del weights
            torch.cuda.empty_cache()
        benchlib.write_results(args.out, "svdquant", rows, SOURCES)
    summary(rows)


if __name__ == "__main__":
    main()
