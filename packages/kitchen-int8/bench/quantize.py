#!/usr/bin/env python3
"""Times the rowwise quantizer against a copy of the same bytes and, if installed, against comfy-kitchen's.

python packages/kitchen-int8/bench/quantize.py --out benchmarks/results/h200/quantize.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

from kitchen_core.arithmetic import apply_input_act, hadamard_rotate
from kitchen_int8._extension import EXTENSION
from kitchen_int8._quantize import quantize_rowwise

ROWS = (1, 16, 256, 1000, 1024, 4096, 8192)
FEATURES = (384, 3072, 5120, 12288)
CASES = {"plain": ("none", False), "convrot": ("none", True), "swiglu_convrot": ("swiglu", True)}
PLAN = "registers tiles={} warps={} cluster={} ctas_per_sm={} special={}"
PTX = "shared_cuda/include/kitchen/ptx"
SOURCES = [
    "packages/kitchen-int8/csrc/quantize_int8_rowwise", "shared_cuda/include/kitchen/quant",
    "shared_cuda/include/kitchen/common", "shared_cuda/bench",
    f"{PTX}/math.h", f"{PTX}/cluster.h", f"{PTX}/cp_async.h", f"{PTX}/dependent_launch.h",
]  # fmt: skip


def peer(case: str, group: int):
    """comfy-kitchen's function of the same meaning, or None: not installed, or no CUDA kernel for this group."""
    try:
        import comfy_kitchen
        from comfy_kitchen.backends import cuda as backend
    except ImportError:
        return None
    if case == "plain":
        return comfy_kitchen.quantize_int8_rowwise
    if group != 256:
        return None
    act = "swiglu" if case == "swiglu_convrot" else None
    return lambda x: backend.quantize_int8_rowwise_convrot64(x, 256, input_act=act)


def relative_error(x: torch.Tensor, act: str, group: int, codes: torch.Tensor, scales: torch.Tensor) -> float:
    """Of the dequantized rows against the exact activation and rotation; the first 64 rows."""
    exact = hadamard_rotate(apply_input_act(x[:64].double(), act), group)
    return float((codes[:64].double() * scales[:64].double() - exact).norm() / exact.norm())


def measure(case: str, M: int, K: int) -> dict:
    act, rotated = CASES[case]
    group = 0 if not rotated else 256 if K % 256 == 0 else 64
    width, ratio = (2 * K, 4) if act == "swiglu" else (K, 2)
    copies = benchlib.copies_for(M * (2 * width + K))
    xs = [torch.randn(M, width, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    outs = [torch.empty(M, K, device="cuda", dtype=torch.int8) for _ in range(copies)]
    sink = torch.zeros(4, device="cuda", dtype=torch.int32)
    ext, device = EXTENSION.module, xs[0].device.index

    def stream() -> int:
        return torch.cuda.current_stream().cuda_stream

    variants = {
        "ours": lambda i: quantize_rowwise(xs[i], group, act),
        "copy": lambda i: ext.yardstick_copy(xs[i].data_ptr(), outs[i].data_ptr(), M * K, ratio, device, stream()),
        "read": lambda i: ext.yardstick_read(xs[i].data_ptr(), 2 * M * width, sink.data_ptr(), device, stream()),
    }
    theirs = peer(case, group)
    if theirs is not None:
        variants["ck"] = lambda i: theirs(xs[i])
    times = benchlib.time_variants(variants, copies)
    codes, scales = quantize_rowwise(xs[0], group, act)
    gpu = torch.cuda.get_device_properties(device)
    plan = ext.quantize_plan(
        x=xs[0].data_ptr(), x_row_stride=width, dtype=2, codes=codes.data_ptr(), M=M, K=K, group=group,
        act=2 if act == "swiglu" else 0, seed=0, sm_count=gpu.multi_processor_count, has_clusters=gpu.major >= 9,
        smem_per_cta=gpu.shared_memory_per_block_optin, smem_per_sm=gpu.shared_memory_per_multiprocessor,
    )  # fmt: skip
    ck_us = round(times["ck"].us, 3) if "ck" in times else None
    return {
        "case": case, "M": M, "N": None, "K": K, "group": group, "part": "quant",
        "us": round(times["ours"].us, 3), "us_p80": round(times["ours"].us_p80, 3), "bf16_us": None, "ck_us": ck_us,
        "best_peer": None if ck_us is None else {"name": "comfy-kitchen", "us": ck_us},
        "read_us": round(times["read"].us, 3), "copy_us": round(times["copy"].us, 3),
        "err": relative_error(xs[0], act, group, codes, scales), "err_bf16": None, "workspace_bytes": 0,
        "kernel": "chunks" if plan[0] == 0 else PLAN.format(*plan),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/quantize.json")
    parser.add_argument("--quick", action="store_true", help="K=3072 and 12288 only, three M")
    args = parser.parse_args()
    features, row_counts = ((3072, 12288), (1, 16, 4096)) if args.quick else (FEATURES, ROWS)
    rows = []
    for case in CASES:
        for K in features:
            for M in row_counts:
                row = measure(case, M, K)
                rows.append(row)
                share = row["copy_us"] / row["us"]
                print(
                    f"{case:15} M={M:5} K={K:6} {row['us']:8.2f} us, copy {row['copy_us']:8.2f} = {share:6.1%}, "
                    f"read {row['read_us']:8.2f}, ck {row['ck_us']}, err {row['err']:.5f}  {row['kernel']}",
                    flush=True,
                )
        benchlib.write_results(args.out, "quantize", rows, SOURCES)


if __name__ == "__main__":
    main()
