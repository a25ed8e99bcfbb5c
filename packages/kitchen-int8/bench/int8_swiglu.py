#!/usr/bin/env python3
"""Times the SwiGLU MLP (both quantizers with ConvRot, gate_up, down) against bf16 and, if installed, comfy-kitchen.

    python packages/kitchen-int8/bench/int8_swiglu.py --out benchmarks/results/h200/int8_swiglu.json

Rows of part "linear" are the whole MLP, of part "gemm" its first GEMM with the activation pair. K is the hidden width (also
the output's), N the intermediate width I. ``bf16_us`` is bf16 done well: one stacked GEMM, one fused silu * up kernel, the
down GEMM; ``bf16_eager_us`` three GEMMs, silu, product. ``two_call_us`` is our stacked GEMM and then a down projection with
the pair in its quantizer, ``three_gemm_us`` our three GEMMs (x quantized once) with torch's silu and product between.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

import kitchen_core as kc
from kitchen_core.arithmetic import rotation_group
from kitchen_int8 import _swiglu
from kitchen_int8._extension import EXTENSION

# hidden x intermediate: blocks like those of Qwen-Image (3072x12288), Qwen3-8B (4096x12288); then widths that no tile fits
SHAPES = ((3072, 12288), (3072, 9216), (4096, 12288))
ODD_SHAPES = ((5120, 13824), (3072, 4099))
ROWS = (1, 16, 64, 97, 256, 1000, 1024, 4096, 8192)
SOURCES = [
    "packages/kitchen-int8/csrc", "shared_cuda/include/kitchen/gemm", "shared_cuda/include/kitchen/quant",
    "shared_cuda/include/kitchen/ptx", "shared_cuda/include/kitchen/mma", "shared_cuda/include/kitchen/copy",
]  # fmt: skip
BF16 = torch.bfloat16


@triton.jit
def _silu_product(pair, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(pair + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(pair + row * 2 * width + width + column, mask=inside).to(tl.float32)
    tl.store(out + row * width + column, (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16), mask=inside)


def silu_product(pair: torch.Tensor) -> torch.Tensor:
    """[M, 2I] bf16 -> silu(first half) * second half, [M, I], in one kernel."""
    M, width = pair.shape[0], pair.shape[1] // 2
    out = torch.empty(M, width, dtype=pair.dtype, device=pair.device)
    _silu_product[(M, triton.cdiv(width, 2048))](pair, out, width, BLOCK=2048, num_warps=8)
    return out


def cells() -> set[tuple]:
    """(case, part, M, K, N) of every row of a complete int8_swiglu.json."""
    shapes = SHAPES + ODD_SHAPES
    return {("convrot", part, M, *shape) for part in ("linear", "gemm") for M in ROWS for shape in shapes}


def peer():
    """comfy-kitchen's int8_linear, or None where it is not installed."""
    try:
        import comfy_kitchen
    except ImportError:
        return None
    return comfy_kitchen.int8_linear


class Weights:
    """One copy of the MLP's weights: dense in bf16, and quantized with ConvRot."""

    def __init__(self, hidden: int, width: int, groups: tuple[int, int]) -> None:
        self.gate_up = torch.randn(2 * width, hidden, device="cuda", dtype=BF16) * hidden**-0.5
        self.down = torch.randn(hidden, width, device="cuda", dtype=BF16) * width**-0.5
        self.gate, self.up = (half.clone() for half in self.gate_up.chunk(2))
        self.packed = kc.quantize_int8_convrot_weight(self.gate_up, groups[0])
        self.packed_down = kc.quantize_int8_convrot_weight(self.down, groups[1])
        codes, scales = (tensor.chunk(2) for tensor in self.packed)
        self.apart = (codes[0].clone(), scales[0].clone(), codes[1].clone(), scales[1].clone())


def variants_of(x: torch.Tensor, weights: list[Weights], groups: tuple[int, int]) -> dict:
    """The MLP in all its forms, each a function of the number of the copy of the weights."""
    codes, scale = kc.quantize_and_rotate_rowwise(x, groups[0])

    def mlp(i: int) -> torch.Tensor:
        w = weights[i]
        return kc.int8_swiglu_mlp(x, *w.packed, *w.packed_down, None, None, None, *groups)

    def two_call(i: int) -> torch.Tensor:
        pair = kc.int8_linear(x, *weights[i].packed, convrot_groupsize=groups[0])
        return kc.int8_linear(pair, *weights[i].packed_down, convrot_groupsize=groups[1], input_act="swiglu")

    def three_gemms(i: int) -> torch.Tensor:
        w = weights[i]
        return kc.int8_gate_up_mlp(x, *w.apart, *w.packed_down, None, None, None, None, *groups)

    def bf16(i: int) -> torch.Tensor:
        return F.linear(silu_product(F.linear(x, weights[i].gate_up)), weights[i].down)

    def bf16_eager(i: int) -> torch.Tensor:
        w = weights[i]
        return F.linear(F.silu(F.linear(x, w.gate)) * F.linear(x, w.up), w.down)

    found = {
        "linear": mlp,
        "two_call": two_call,
        "three_gemm": three_gemms,
        "gemm": lambda i: _swiglu.swiglu_scaled_mm(codes, scale, *weights[i].packed, None, BF16),
        "bf16": bf16,
        "bf16_eager": bf16_eager,
        "bf16_gemm": lambda i: silu_product(F.linear(x, weights[i].gate_up)),
    }
    theirs = peer()
    if theirs is not None and groups == (256, 256):

        def ck(i: int) -> torch.Tensor:
            options = {
                "out_dtype": BF16,
                "convrot": True,
                "convrot_groupsize": 256,
                "residual": None,
                "residual_scale": None,
            }
            pair = theirs(x, *weights[i].packed, None, input_act=None, **options)
            return theirs(pair, *weights[i].packed_down, None, input_act="swiglu", **options)

        found["ck"] = ck
    return found


def reader(nbytes: int, device: int):
    """A kernel that only reads so many bytes, other ones each time."""
    buffers = [torch.empty(nbytes, device="cuda", dtype=torch.uint8) for _ in range(benchlib.copies_for(nbytes))]
    sink = torch.zeros(4, device="cuda", dtype=torch.int32)

    def read(i: int) -> None:
        buffer, stream = buffers[i % len(buffers)], torch.cuda.current_stream().cuda_stream
        EXTENSION.module.yardstick_read(buffer.data_ptr(), nbytes, sink.data_ptr(), device, stream)

    return read


def errors(x: torch.Tensor, w: Weights, outputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of sampled rows against float64: whole MLPs, and products of gate and up (names that end in gemm)."""
    rows = torch.linspace(0, x.shape[0] - 1, min(x.shape[0], 64), device=x.device).long()
    gate, up = (x[rows].double() @ w.gate_up.double().T).chunk(2, -1)
    product = gate * torch.sigmoid(gate) * up
    exact = product @ w.down.double().T
    wanted = {name: product if name.endswith("gemm") and name != "three_gemm" else exact for name in outputs}
    return {name: float((y[rows].double() - wanted[name]).norm() / wanted[name].norm()) for name, y in outputs.items()}


def measure(M: int, hidden: int, width: int, weights: list[Weights], groups: tuple[int, int]) -> list[dict]:
    """Rows for the whole MLP and for its first GEMM, all columns from one interleaved run."""
    x = torch.randn(M, hidden, device="cuda", dtype=BF16)
    variants = variants_of(x, weights, groups)
    bytes_of = {
        "linear": 3 * hidden * width + 4 * (2 * width + hidden) + 4 * M * hidden,
        "gemm": 2 * hidden * width + 8 * width + M * hidden + 2 * M * width,
    }
    timed = variants | {f"read_{part}": reader(bytes_of[part], x.device.index) for part in bytes_of}
    times = benchlib.time_variants(timed, len(weights), target_us=700, reps=7)
    us = {name: round(t.us, 3) for name, t in times.items()}
    with kc.trace() as calls:
        variants["linear"](0)
    found = errors(x, weights[0], {name: call(0) for name, call in variants.items()})
    multiply = ("int8_swiglu_mlp", "int8_linear", "int8_scaled_mm")
    kernels = [kernel for op, kernel in calls if op in multiply and kernel != "core/composed"]
    # what the MLP allocates beside its output: two pairs of codes and scales, and the product
    between = M * (hidden + 4) + 2 * M * width + M * (width + 4)
    shared = {"case": "convrot", "M": M, "N": width, "K": hidden, "group": groups[0], "copy_us": None}
    whole = shared | {
        "part": "linear", "us": us["linear"], "us_p80": round(times["linear"].us_p80, 3), "bf16_us": us["bf16"],
        "bf16_eager_us": us["bf16_eager"], "ck_us": us.get("ck"), "two_call_us": us["two_call"],
        "three_gemm_us": us["three_gemm"], "read_us": us["read_linear"], "err": found["linear"],
        "err_bf16": found["bf16"], "err_two_call": found["two_call"], "err_three_gemm": found["three_gemm"],
        "err_ck": found.get("ck"), "kernel": " + ".join(kernels), "workspace_bytes": between,
        "best_peer": {"name": "comfy-kitchen", "us": us["ck"]} if "ck" in us else None,
    }  # fmt: skip
    gemm = shared | {
        "part": "gemm", "us": us["gemm"], "us_p80": round(times["gemm"].us_p80, 3), "bf16_us": us["bf16_gemm"],
        "bf16_eager_us": None, "ck_us": None, "best_peer": None, "read_us": us["read_gemm"], "err": found["gemm"],
        "err_bf16": found["bf16_gemm"], "kernel": kernels[0], "workspace_bytes": 0,
    }  # fmt: skip
    return [whole, gemm]


def host_times(calls: int = 200) -> str:
    """Host time of one warm eager call of a small MLP, whose kernels are shorter: ours, and the peer's two calls."""
    weights, x = [Weights(256, 512, (256, 256))], torch.randn(16, 256, device="cuda", dtype=BF16)
    words = []
    for name, call in variants_of(x, weights, (256, 256)).items():
        if name not in ("linear", "two_call", "ck"):
            continue
        medians = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call(0)
            medians.append((time.perf_counter() - start) / calls * 1e6)
        words.append(f"{name} {sorted(medians)[2]:.1f} us")
    return "host time of a warm call: " + ", ".join(words)


def line_of(whole: dict, gemm: dict) -> str:
    """One cell in a line: times of bf16 and the others over ours, and errors."""
    columns = {name: whole[f"{name}_us"] for name in ("bf16", "bf16_eager", "two_call", "three_gemm", "ck", "read")}
    ratios = " ".join(f"{name} {us / whole['us']:4.2f}" for name, us in columns.items() if us)
    errors = " ".join(f"{name} {whole[name]:.5f}" for name in whole if name.startswith("err") and whole[name])
    return (
        f"{whole['K']}x{whole['N']} M={whole['M']:5} {whole['us']:8.2f} us: {ratios}; gemm {gemm['us']:7.2f} us: bf16 "
        f"{gemm['bf16_us'] / gemm['us']:4.2f}; {errors}; {whole['kernel']}"
    )


def summary(rows: list[dict]) -> None:
    """Ratios over the announced shapes by M, and over M >= 1024."""
    mine = [r for r in rows if r["part"] == "linear" and (r["K"], r["N"]) in SHAPES]
    for label, some in [(f"M={M}", [r for r in mine if r["M"] == M]) for M in ROWS] + [
        ("M>=1024", [r for r in mine if r["M"] >= 1024])
    ]:
        if not some:
            continue
        ratios = [r["bf16_us"] / r["us"] for r in some]
        line = f"{label:8} x bf16 {benchlib.geometric_mean(ratios):5.2f} (least {min(ratios):4.2f})"
        for name in ("bf16_eager_us", "two_call_us", "three_gemm_us", "ck_us", "read_us"):
            if all(r[name] for r in some):
                line += (
                    f"  {name.removesuffix('_us')} {benchlib.geometric_mean([r[name] / r['us'] for r in some]):5.2f}"
                )
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/int8_swiglu.json")
    parser.add_argument("--quick", action="store_true", help="one shape, three M")
    args = parser.parse_args()
    shapes, row_counts = (SHAPES[:1], (16, 1024, 4096)) if args.quick else (SHAPES + ODD_SHAPES, ROWS)
    rows, start = [], time.monotonic()
    for hidden, width in shapes:
        groups = rotation_group(hidden, 256), rotation_group(width, 256)
        weights = [Weights(hidden, width, groups) for _ in range(benchlib.copies_for(3 * hidden * width))]
        for M in row_counts:
            rows += measure(M, hidden, width, weights, groups)
            print(line_of(*rows[-2:]), flush=True)
        del weights
        torch.cuda.empty_cache()
        benchlib.write_results(args.out, "int8_swiglu", rows, SOURCES)
    summary(rows)
    print(host_times())
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
