#!/usr/bin/env python3
"""Times awq_linear against bf16 F.linear, torch's tinygemm, a plain read and, where installed, comfy-kitchen and humming.

python packages/kitchen-awq/bench/awq.py --out benchmarks/results/h200/awq.json

Then M = 1 .. 300, to awq_sweep.json beside the other file; ``--only linear`` or ``--only sweep`` does one of the two.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

import kitchen_core as kc
from kitchen_awq import _dequantized, _launch, resident
from kitchen_awq._extension import EXTENSION
from kitchen_awq.kernels import STREAM_ROWS
from kitchen_core.packing import unpack_nibbles
from kitchen_core.reference.awq import dequantize_awq

# K x N: layers of Flux, Qwen and Llama-like models; groups beside 64 and 128 on one of them, 0 meaning one a row
SHAPES = ((3072, 18432), (4096, 4096), (4096, 24576), (12288, 4096))
GROUPS = (64, 128)
OTHER_GROUPS, OTHER_SHAPE, OTHER_ROWS = (16, 32, 256, 0), (4096, 4096), (1, 16, 64, 256, 1024)
SWEEP_SHAPES, SWEEP_ROWS = ((3072, 18432), (4096, 4096)), sorted({*range(1, 34), *range(36, 301, 4), 65, 129, 193, 257})
ROWS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
SOURCES = benchlib.with_headers("packages/kitchen-awq/csrc")
BF16 = torch.bfloat16
SLOW_PEER_ROWS = 64  # peers that take milliseconds beyond are timed once, not eleven times


def cases() -> list[tuple[int, int, int, int]]:
    """(M, K, N, group): the whole grid."""
    main = [(m, k, n, g) for k, n in SHAPES for g in GROUPS for m in ROWS]
    k, n = OTHER_SHAPE
    return main + [(m, k, n, g or k) for g in OTHER_GROUPS for m in OTHER_ROWS]


def cells() -> set[tuple]:
    """(case, part, M, K, N) of every row."""
    return {(f"g{group}", "linear", M, K, N) for M, K, N, group in cases()}


def ck_linear():
    """comfy-kitchen's AWQ linear, or None where it is not installed."""
    try:
        import comfy_kitchen
    except ImportError:
        return None
    return comfy_kitchen.gemv_awq_w4a16


def tinygemm_weight(packed, group: int):
    """The weight as torch._weight_int4pack_mm takes it: (q - 8) * scale + zero in groups of 32 to 256."""
    codes, scale, zero = packed
    q = unpack_nibbles(codes).to(torch.uint8)
    tiles = torch._convert_weight_to_int4pack((q[:, 0::2] << 4 | q[:, 1::2]).contiguous(), 8)
    return tiles, torch.stack((scale, zero), -1).contiguous(), group


class Humming:
    """humming's layer over 4-bit weights with zero points, in ``copies``; it quantizes a dense weight of the same shape."""

    def __init__(self, dense: torch.Tensor, group: int, copies: int) -> None:
        from humming.forward import humming_forward
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors
        from humming.tune import get_heuristics_config

        n, k = dense.shape
        schema = HummingWeightSchema(b_dtype="uint4", weight_scale_group_size=group, has_zero_point=True)
        tensors = HummingWeightSchema.quant_tensor(dense, schema, BF16)
        self.config, made = prepare_and_transform_humming_tensors(
            tensors, shape_n=n, shape_k=k, weight_schema=schema, input_schema=None, torch_dtype=BF16
        )
        self.layers = [{name: t.clone() for name, t in made.items()} for _ in range(copies)]
        self.locks = [torch.zeros(2048, dtype=torch.int32, device="cuda") for _ in range(copies)]
        self.tunings = get_heuristics_config(self.config)
        self.forward = humming_forward

    def call(self, x: torch.Tensor, i: int) -> torch.Tensor:
        tuning = next(json.dumps(found) for least, most, found in self.tunings if least < x.shape[0] <= most)
        return self.forward(self.config, inputs=x, locks=self.locks[i], tuning_config=tuning, **self.layers[i])


def humming_or_none(dense: torch.Tensor, group: int, copies: int) -> Humming | None:
    """None where it is not installed, and for groups other than the announced ones: it compiles a kernel for each."""
    if group not in GROUPS or importlib.util.find_spec("humming") is None:
        return None
    return Humming(dense, group, copies)


def random_weight(n: int, k: int, group: int):
    codes = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8, device="cuda")
    scale = (torch.rand(k // group, n, device="cuda") * 0.01 + 0.002).to(BF16)
    return codes, scale, (torch.randn(k // group, n, device="cuda") * 0.03).to(BF16)


def in_resident_layout(packed):
    """Weights as `optimize_for_decode` leaves them."""
    return [(resident.pack(codes), scale, zero) for codes, scale, zero in packed]


def workspace_bytes(kernel: str, M: int, N: int, K: int, group: int) -> int:
    if kernel == "awq/dequantized":
        return _dequantized.choose_pieces(M, N, K, 2, True).workspace_bytes
    route = {"awq/stream": _launch.STREAM, "awq/decode": _launch.DECODE, "awq/sm90": _launch.HOPPER}[kernel]
    return _launch.plan_of(route, M, N, K, group, BF16, BF16, 0).workspace_bytes


def measure(M: int, K: int, N: int, group: int, packed, optimized, dense, tiny, humming) -> dict:
    """One row, all columns from one interleaved run."""
    copies = len(packed)
    x = torch.randn(M, K, device="cuda", dtype=BF16)
    read_bytes = sum(t.numel() * t.element_size() for t in packed[0]) + 2 * M * (K + N)
    buffers = [
        torch.empty(read_bytes, device="cuda", dtype=torch.uint8) for _ in range(benchlib.copies_for(read_bytes))
    ]
    sink = torch.zeros(4, device="cuda", dtype=torch.int32)

    def read(i: int) -> None:
        buffer, stream = buffers[i % len(buffers)], torch.cuda.current_stream().cuda_stream
        EXTENSION.module.yardstick_read(buffer.data_ptr(), read_bytes, sink.data_ptr(), 0, stream)

    linear = lambda i: kc.awq_linear(x, *packed[i], None, group)  # noqa: E731
    variants = {"linear": linear, "bf16": lambda i: F.linear(x, dense[i % len(dense)]), "read": read}
    if optimized and M <= STREAM_ROWS:
        variants["resident"] = lambda i: _launch.fused_linear(
            _launch.STREAM, x, *optimized[i], None, group, resident=True
        )
    times = benchlib.time_variants(variants, copies, 400.0, 5)
    peers = {}
    if tiny:
        peers["tinygemm"] = lambda i: torch._weight_int4pack_mm(
            x, tiny[i % len(tiny)][0], group, tiny[i % len(tiny)][1]
        )
    theirs = ck_linear() if group in GROUPS else None  # at group 16 and 16 rows it reads where it may not
    if theirs is not None:
        peers["comfy-kitchen"] = lambda i: theirs(x, *packed[i], None, group)
    if humming is not None:
        peers["humming"] = lambda i: humming.call(x, i)
    reps = 3 if M <= 16 else 1
    found = benchlib.time_variants(peers, 2 if M > SLOW_PEER_ROWS else copies, 100.0, reps) if peers else {}
    with kc.trace() as calls:
        y = linear(0)
    exact = x[:16].double() @ dequantize_awq(*packed[0], group, torch.float32).double().T
    wide = x[:16].double() @ dense[0].double().T
    best = min(((timing.us, name) for name, timing in found.items()), default=None)
    kernel = dict(calls)["awq_linear"]
    ck = found.get("comfy-kitchen")
    return {
        "case": f"g{group}", "part": "linear", "M": M, "N": N, "K": K, "group": group,
        "us": round(times["linear"].us, 3), "us_p80": round(times["linear"].us_p80, 3),
        "resident_us": round(times["resident"].us, 3) if "resident" in times else None,
        "bf16_us": round(times["bf16"].us, 3), "ck_us": round(ck.us, 3) if ck else None,
        "best_peer": {"name": best[1], "us": round(best[0], 3)} if best else None,
        "peers": {name: round(timing.us, 3) for name, timing in found.items()},
        "read_us": round(times["read"].us, 3), "copy_us": None,
        "err": float((y[:16].double() - exact).norm() / exact.norm()),
        "err_bf16": float((F.linear(x, dense[0])[:16].double() - wide).norm() / wide.norm()),
        "kernel": kernel, "workspace_bytes": workspace_bytes(kernel, M, N, K, group),
    }  # fmt: skip


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[dict]) -> None:
    """Ratios over the announced shapes, by group and M."""
    for group in GROUPS:
        for M in ROWS:
            mine = [r for r in rows if r["M"] == M and r["group"] == group and (r["K"], r["N"]) in SHAPES]
            if not mine:
                continue
            line = f"g{group:4} M={M:5}  x bf16 {geometric_mean([r['bf16_us'] / r['us'] for r in mine]):5.2f}"
            line += f"  of a plain read {geometric_mean([r['read_us'] / r['us'] for r in mine]):6.1%}"
            if all(r["best_peer"] for r in mine):
                line += f"  x best peer {geometric_mean([r['best_peer']['us'] / r['us'] for r in mine]):6.2f}"
            print(line)


def sweep(out: Path) -> None:
    """Times over M = 1 .. 300, in columns: where a neighbour differs by more than the rule allows."""
    swept = []
    for K, N in SWEEP_SHAPES:
        packed = [random_weight(N, K, 64) for _ in range(benchlib.copies_for(N * K / 2))]
        dense = [torch.randn(N, K, device="cuda", dtype=BF16) * 0.02 for _ in range(benchlib.copies_for(2 * N * K))]
        row = {"case": "sweep", "K": K, "N": N, "group": 64, "M": list(SWEEP_ROWS)}
        columns: dict[str, list] = {"us": [], "bf16_us": [], "ck_us": [], "kernel": []}
        for M in row["M"]:
            x = torch.randn(M, K, device="cuda", dtype=BF16)
            variants = {
                "us": lambda i, x=x, packed=packed: kc.awq_linear(x, *packed[i], None, 64),
                "bf16_us": lambda i, x=x, dense=dense: F.linear(x, dense[i % len(dense)]),
            }
            times = benchlib.time_variants(variants, len(packed), 100.0, 5)
            with kc.trace() as calls:
                variants["us"](0)
            for column in variants:
                columns[column].append(round(times[column].us, 2))
            columns["ck_us"].append(None)  # 18 to 400 times slower: another scale
            columns["kernel"].append(dict(calls)["awq_linear"])
        swept.append(row | columns)
        for before, after, m in zip(columns["us"], columns["us"][1:], row["M"][1:], strict=False):
            if after > 1.15 * before or before > 1.15 * after:
                print(f"sweep K={K} N={N}: {before} to {after} us at M={m}", flush=True)
        print(f"sweep K={K} N={N}: {min(columns['us'])} to {max(columns['us'])} us", flush=True)
    benchlib.write_results(out.with_name("awq_sweep.json"), "awq_sweep", swept, SOURCES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/awq.json")
    parser.add_argument("--quick", action="store_true", help="the first cases only")
    parser.add_argument("--only", choices=["linear", "sweep"], help="one of the two files")
    args = parser.parse_args()
    if args.only == "sweep":
        return sweep(args.out)
    rows, made = [], None
    for M, K, N, group in cases()[: 4 if args.quick else None]:
        if made != (K, N, group):
            if rows:
                benchlib.write_results(args.out, "awq", rows, SOURCES)
            made = (K, N, group)
            packed = [random_weight(N, K, group) for _ in range(benchlib.copies_for(N * K / 2))]
            dense = [torch.randn(N, K, device="cuda", dtype=BF16) * 0.02 for _ in range(benchlib.copies_for(2 * N * K))]
            optimized = in_resident_layout(packed) if group in GROUPS else []
            tiny = [tinygemm_weight(w, group) for w in packed] if group in (32, 64, 128, 256) else []
            humming = humming_or_none(dense[0], group, len(packed))
        row = measure(M, K, N, group, packed, optimized, dense, tiny, humming)
        rows.append(row)
        print(
            f"g{group} K={K:5} N={N:5} M={M:5} {row['us']:8.2f} us, bf16 {row['bf16_us']:8.2f} = "
            f"{row['bf16_us'] / row['us']:4.2f}x, "
            f"read {row['read_us']:6.2f} = {row['read_us'] / row['us']:4.0%}, peer {row['best_peer']}, ck {row['ck_us']}, "
            f"err {row['err']:.5f}  {row['kernel']}",
            flush=True,
        )
    benchlib.write_results(args.out, "awq", rows, SOURCES)
    summary(rows)
    if args.only is None and not args.quick:
        sweep(args.out)
    return None


if __name__ == "__main__":
    main()
