#!/usr/bin/env python3
"""Times int8_linear (rotated, quantizer included) and its GEMM against bf16 F.linear and, if installed, comfy-kitchen.

python packages/kitchen-int8/bench/int8.py --out benchmarks/results/h200/int8.json
python packages/kitchen-int8/bench/int8.py --parts grid --rows 4096 8192     only some of it

Parts: ``grid`` (no bias, every shape and M), ``epilogue`` (bias; bias and residual), ``portable`` (the kernels of older GPUs,
forced), ``sweep`` (every M up to 300, to int8_sweep.json beside the other file). Rows of parts that are not run are kept if the
sources are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cached_property
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
EPILOGUE_ROWS = (16, 1024, 4096)
PORTABLE_ROWS = (16, 1024, 4096)
PORTABLE = {"convrot_sm80": "int8/sm80", "convrot_sm75": "int8/sm75"}  # case -> the kernel that is forced
SWEEP_SHAPES = ((3072, 3072), (3072, 12288))
SWEEP_ROWS = tuple(range(1, 301))
CASES_OF_PART = {"grid": ("convrot",), "epilogue": ("bias", "residual"), "portable": tuple(PORTABLE)}
SOURCES = benchlib.with_headers("packages/kitchen-int8/csrc", "shared_cuda/bench/yardstick.cu")
BF16 = torch.bfloat16
MOST_COPIES = 384


def cells() -> set[tuple]:
    """(case, part, M, K, N) of every row of a complete int8.json."""
    wanted = {("convrot", M, *shape) for M in ROWS for shape in SHAPES + ODD_SHAPES}
    wanted |= {(case, M, *shape) for case in CASES_OF_PART["epilogue"] for M in EPILOGUE_ROWS for shape in SHAPES}
    wanted |= {(case, M, *shape) for case in PORTABLE for M in PORTABLE_ROWS for shape in SHAPES}
    return {(case, part, M, K, N) for case, M, K, N in wanted for part in ("linear", "gemm")}


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


def workspace_bytes(kernel: str, M: int, N: int, K: int) -> int:
    """Of the GEMM: only the portable kernel has one, where its plan splits K."""
    portable = {"int8/few_rows": _gemm.SM80, "int8/sm80": _gemm.SM80, "int8/sm75": _gemm.SM75}
    return _gemm.plan_of(portable[kernel], M, N, K, K % 16 == 0, 0).workspace_bytes if kernel in portable else 0


class Layer:
    """The rotated copies of one layer, bf16 and packed, for all M."""

    def __init__(self, K: int, N: int) -> None:
        self.K, self.N, self.group = K, N, rotation_group(K, 256)
        self.copies = benchlib.copies_for(N * K, MOST_COPIES)
        self.dense = [torch.randn(N, K, device="cuda", dtype=BF16) * 0.02 for _ in range(self.copies)]
        self.packed = [kc.quantize_int8_convrot_weight(w, self.group) for w in self.dense]
        self.bias = torch.randn(N, device="cuda", dtype=BF16)
        self.gate = torch.randn(N, device="cuda", dtype=BF16)

    @cached_property
    def space(self) -> torch.Tensor:
        """Bytes to read, for the yardstick."""
        return torch.empty(int(benchlib.ROTATE_BYTES) + (1 << 30), device="cuda", dtype=torch.uint8)

    def reader(self, nbytes: int) -> Callable[[int], None]:
        sink = torch.zeros(4, device="cuda", dtype=torch.int32)
        ext, pitch = EXTENSION.module, (nbytes + 255) // 256 * 256
        places = max(1, self.space.numel() // pitch)

        def read(i: int) -> None:
            address = self.space.data_ptr() + i % places * pitch
            ext.yardstick_read(address, nbytes, sink.data_ptr(), 0, torch.cuda.current_stream().cuda_stream)

        return read


def variants_of(layer: Layer, case: str, x: torch.Tensor) -> dict[str, Callable[[int], torch.Tensor]]:
    """The calls of one cell: the whole linear, the GEMM alone, bf16, and the peer where it has the same meaning."""
    M, N, group = x.shape[0], layer.N, layer.group
    codes, scale = kc.quantize_and_rotate_rowwise(x, group)
    bias = layer.bias if case in ("bias", "residual") else None
    residual = torch.randn(M, N, device="cuda", dtype=BF16) if case == "residual" else None
    gate = layer.gate if case == "residual" else None
    rest = {} if residual is None else {"residual": residual, "residual_scale": gate}

    def forced(function: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
        if case not in PORTABLE:
            return function

        def call(i: int) -> torch.Tensor:
            with kc.use("core/composed", PORTABLE[case]):
                return function(i)

        return call

    variants = {
        "linear": forced(lambda i: kc.int8_linear(x, *layer.packed[i], bias, convrot_groupsize=group, **rest)),
        "gemm": forced(lambda i: kc.int8_scaled_mm(codes, scale, *layer.packed[i], bias, BF16, **rest)),
    }
    if residual is None:
        variants["bf16"] = lambda i: F.linear(x, layer.dense[i], bias)
    else:
        variants["bf16"] = lambda i: torch.addcmul(residual, gate, F.linear(x, layer.dense[i], bias))
    theirs = peer()
    if theirs is not None and group == 256:
        variants["ck"] = lambda i: theirs(
            x, *layer.packed[i], bias, out_dtype=BF16, convrot=True, convrot_groupsize=group, input_act=None,
            residual=residual, residual_scale=gate,
        )  # fmt: skip
    return variants


def kernel_of(call: Callable[[int], torch.Tensor]) -> tuple[str, torch.Tensor]:
    """What multiplied in a call of the linear, and its result."""
    with kc.trace() as calls:
        y = call(0)
    ran = dict(calls)
    return ran.get("int8_scaled_mm", ran["int8_linear"]), y


def measure(layer: Layer, case: str, M: int) -> list[dict]:
    """Rows for the whole linear and for the GEMM alone, all columns from one interleaved run."""
    K, N = layer.K, layer.N
    x = torch.randn(M, K, device="cuda", dtype=BF16)
    variants = variants_of(layer, case, x)
    read_bytes = N * K + 4 * N + 2 * M * K + 2 * M * N * (2 if case == "residual" else 1)
    times = benchlib.time_variants(
        {**variants, "read": layer.reader(read_bytes)},
        layer.copies,
        target_us=800 if case == "convrot" else 500,
        reps=9,
    )
    kernel, y = kernel_of(variants["linear"])
    err, err_bf16 = error(x, y, layer.dense[0]), error(x, F.linear(x, layer.dense[0]), layer.dense[0])
    if case in ("bias", "residual"):
        err = err_bf16 = None  # the plain case of the same cell has it
    ck_us = round(times["ck"].us, 3) if "ck" in times else None
    shared = {
        "M": M, "N": N, "K": K, "group": layer.group, "bf16_us": round(times["bf16"].us, 3),
        "read_us": round(times["read"].us, 3), "copy_us": None, "err": err, "err_bf16": err_bf16, "kernel": kernel,
        "workspace_bytes": workspace_bytes(kernel, M, N, K),
    }  # fmt: skip
    return [
        {
            "case": case, "part": part, **shared, "us": round(times[part].us, 3), "us_p80": round(times[part].us_p80, 3),
            "ck_us": ck_us if part == "linear" else None,
            "best_peer": {"name": "comfy-kitchen", "us": ck_us} if part == "linear" and ck_us else None,
        }
        for part in ("linear", "gemm")
    ]  # fmt: skip


def sweep(layer: Layer) -> dict:
    """Times of the whole linear over every M of SWEEP_ROWS, in columns."""
    row = {"case": "sweep", "K": layer.K, "N": layer.N, "group": layer.group, "M": list(SWEEP_ROWS)}
    columns: dict[str, list] = {"us": [], "bf16_us": [], "ck_us": [], "kernel": []}
    for M in SWEEP_ROWS:
        variants = variants_of(layer, "convrot", torch.randn(M, layer.K, device="cuda", dtype=BF16))
        del variants["gemm"]
        times = benchlib.time_variants(variants, layer.copies, target_us=100, reps=5)
        for name, column in (("linear", "us"), ("bf16", "bf16_us"), ("ck", "ck_us")):
            columns[column].append(round(times[name].us, 2) if name in times else None)
        columns["kernel"].append(kernel_of(variants["linear"])[0])
    return row | columns


def summary(rows: list[dict]) -> None:
    """Ratios over the announced shapes, by case, part and M."""
    for case, part, M in sorted({(r["case"], r["part"], r["M"]) for r in rows}, key=str):
        mine = [r for r in rows if (r["case"], r["part"], r["M"]) == (case, part, M) and (r["K"], r["N"]) in SHAPES]
        if not mine:
            continue
        line = (
            f"{case:12} {part:6} M={M:5}  x bf16 {benchlib.geometric_mean([r['bf16_us'] / r['us'] for r in mine]):5.2f}"
        )
        line += f"  of a plain read {benchlib.geometric_mean([r['read_us'] / r['us'] for r in mine]):6.1%}"
        if all(r["ck_us"] for r in mine):
            line += f"  x ck {benchlib.geometric_mean([r['ck_us'] / r['us'] for r in mine]):5.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/int8.json")
    parser.add_argument("--parts", nargs="*", default=[*CASES_OF_PART, "sweep"], choices=[*CASES_OF_PART, "sweep"])
    parser.add_argument(
        "--rows", nargs="*", type=int, help="only these M (not of the sweep); the file is then incomplete"
    )
    parser.add_argument("--shapes", type=int, default=len(SHAPES + ODD_SHAPES), help="only so many of the shapes")
    args = parser.parse_args()
    cases = {case for part in args.parts for case in CASES_OF_PART.get(part, ())}
    rows, swept = benchlib.kept_rows(args.out, SOURCES, cases), []
    for K, N in (SHAPES + ODD_SHAPES)[: args.shapes]:
        if not cases and (K, N) not in SWEEP_SHAPES:
            continue
        layer = Layer(K, N)
        wanted = sorted({(case, M) for case, _, M, k, n in cells() if (k, n) == (K, N) and case in cases})
        for case, M in wanted:
            if args.rows and M not in args.rows:
                continue
            for row in measure(layer, case, M):
                rows.append(row)
                print(
                    f"{case:12} {row['part']:6} K={K:5} N={N:5} M={M:5} {row['us']:8.2f} us, bf16 {row['bf16_us']:8.2f} = "
                    f"{row['bf16_us'] / row['us']:4.2f}x, ck {row['ck_us']}, read {row['read_us']:7.2f}, "
                    f"err {row['err'] or 0:.5f}  {row['kernel']}",
                    flush=True,
                )
        if "sweep" in args.parts and (K, N) in SWEEP_SHAPES:
            swept.append(sweep(layer))
            print(f"sweep K={K} N={N}: {min(swept[-1]['us'])} to {max(swept[-1]['us'])} us", flush=True)
        del layer
        torch.cuda.empty_cache()
        if cases:
            benchlib.write_results(args.out, "int8", rows, SOURCES)
    if swept:
        benchlib.write_results(args.out.with_name("int8_sweep.json"), "int8_sweep", swept, SOURCES)
    summary(rows)


if __name__ == "__main__":
    main()
