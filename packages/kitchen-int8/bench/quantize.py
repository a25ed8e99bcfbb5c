#!/usr/bin/env python3
"""Times the INT8 quantizers and dequantizers against a copy of the same bytes and, if installed, against comfy-kitchen's.

python packages/kitchen-int8/bench/quantize.py --out benchmarks/results/h200/quantize.json

The tensorwise quantizer knows its scale only after it has read everything, so beyond the L2 it reads twice: its row's
``read_us`` is a plain read of x, and its floor is the sum of ``read_us`` and ``copy_us``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

from kitchen_core.arithmetic import apply_input_act, hadamard_rotate
from kitchen_int8 import _dequantize, _tensorwise
from kitchen_int8._extension import EXTENSION
from kitchen_int8._quantize import quantize_rowwise

ROWS = (1, 16, 256, 1000, 1024, 4096, 8192)
FEATURES = (384, 3072, 5120, 12288)
LONG_K = 28672  # more than one CTA holds; the rowwise quantizers alone
ROWWISE = {"plain": ("none", False), "convrot": ("none", True), "swiglu_convrot": ("swiglu", True)}
OTHER_ROWS = (1, 256, 4096, 8192)
OTHERS = ("tensorwise", "dequantize", "dequantize_convrot", "embedding_convrot")
EMBEDDINGS = 32_000  # rows of the table from which M are taken
PLAN = "registers tiles={} warps={} cluster={} ctas_per_sm={} special={}"
SOURCES = benchlib.with_headers(
    "packages/kitchen-int8/csrc/quantize_int8_rowwise", "packages/kitchen-int8/csrc/quantize_int8_tensorwise",
    "packages/kitchen-int8/csrc/dequantize_int8", "shared_cuda/bench/yardstick.cu",
)  # fmt: skip
BF16, BF16_OF_PEER = torch.bfloat16, 2
Call = Callable[[int], object]


def cells() -> set[tuple]:
    """(case, part, M, K, N) of every row of a complete file."""
    rowwise = {(case, "quant", M, K, None) for case in ROWWISE for M in ROWS for K in (*FEATURES, LONG_K)}
    return rowwise | {(case, "quant", M, K, None) for case in OTHERS for M in OTHER_ROWS for K in FEATURES}


def peer_backend():
    """comfy-kitchen and its CUDA backend, or None where it is not installed."""
    try:
        import comfy_kitchen
        from comfy_kitchen.backends import cuda as backend
    except ImportError:
        return None
    return comfy_kitchen, backend


def rotation(K: int) -> int:
    return 256 if K % 256 == 0 else 64


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def rowwise_case(case: str, M: int, K: int) -> tuple[dict[str, Call], int, dict]:
    """The variants of a row, how many buffers rotate, and its own columns."""
    act, rotated = ROWWISE[case]
    group = rotation(K) if rotated else 0
    width, ratio = (2 * K, 4) if act == "swiglu" else (K, 2)
    copies = benchlib.copies_for(M * (2 * width + K))
    xs = [torch.randn(M, width, device="cuda", dtype=BF16) for _ in range(copies)]
    outs = [torch.empty(M, K, device="cuda", dtype=torch.int8) for _ in range(copies)]
    ext, device = EXTENSION.module, xs[0].device.index
    variants: dict[str, Call] = {
        "ours": lambda i: quantize_rowwise(xs[i], group, act),
        "copy": lambda i: ext.yardstick_copy(xs[i].data_ptr(), outs[i].data_ptr(), M * K, ratio, device, stream()),
        "read": reader([x.data_ptr() for x in xs], 2 * M * width),
    }
    peer = peer_backend()
    if peer is not None and case == "plain":
        variants["ck"] = lambda i: peer[0].quantize_int8_rowwise(xs[i])
    elif peer is not None and group == 256:
        their_act = "swiglu" if act == "swiglu" else None
        variants["ck"] = lambda i: peer[1].quantize_int8_rowwise_convrot64(xs[i], 256, input_act=their_act)
    codes, scales = quantize_rowwise(xs[0], group, act)
    gpu = torch.cuda.get_device_properties(device)
    plan = ext.quantize_plan(
        x=xs[0].data_ptr(), x_row_stride=width, dtype=2, codes=codes.data_ptr(), M=M, K=K, group=group,
        act=2 if act == "swiglu" else 0, seed=0, sm_count=gpu.multi_processor_count, has_clusters=gpu.major >= 9,
        smem_per_cta=gpu.shared_memory_per_block_optin, smem_per_sm=gpu.shared_memory_per_multiprocessor,
    )  # fmt: skip
    exact = hadamard_rotate(apply_input_act(xs[0][:64].double(), act), group)
    return variants, copies, {
        "group": group, "err": relative_error(codes[:64].double() * scales[:64].double(), exact),
        "kernel": "int8/rowwise: " + ("chunks" if plan[0] == 0 else PLAN.format(*plan)), "workspace_bytes": 0,
    }  # fmt: skip


def tensorwise_case(M: int, K: int) -> tuple[dict[str, Call], int, dict]:
    copies = benchlib.copies_for(3 * M * K)
    xs = [torch.randn(M, K, device="cuda", dtype=BF16) for _ in range(copies)]
    outs = [torch.empty(M, K, device="cuda", dtype=torch.int8) for _ in range(copies)]
    ext, device = EXTENSION.module, xs[0].device.index
    variants: dict[str, Call] = {
        "ours": lambda i: _tensorwise.quantize_tensorwise(xs[i]),
        "copy": lambda i: ext.yardstick_copy(xs[i].data_ptr(), outs[i].data_ptr(), M * K, 2, device, stream()),
        "read": reader([x.data_ptr() for x in xs], 2 * M * K),
    }
    peer = peer_backend()
    if peer is not None:
        variants["ck"] = lambda i: peer[1].quantize_int8_tensorwise(xs[i])
    codes, scale = _tensorwise.quantize_tensorwise(xs[0])
    return variants, copies, {
        "group": 0, "err": relative_error(codes.double() * scale.double(), xs[0].double()), "kernel": "int8/tensorwise",
        "workspace_bytes": 4 * ext.tensorwise_blocks(M * K, torch.cuda.get_device_properties(device).multi_processor_count),
    }  # fmt: skip


def dequantize_case(case: str, M: int, K: int) -> tuple[dict[str, Call], int, dict]:
    """Of [M, K] codes, or of M rows of a table of EMBEDDINGS; bf16 out."""
    group = rotation(K) if "convrot" in case else 0
    table = case.startswith("embedding")
    rows = EMBEDDINGS if table else M
    copies = benchlib.copies_for(3 * M * K)
    tables = benchlib.copies_for(rows * K) if table else copies
    codes = [torch.randint(-127, 128, (rows, K), device="cuda", dtype=torch.int8) for _ in range(tables)]
    scale = torch.rand(rows, 1, device="cuda")
    picked = [torch.randint(0, rows, (M,), device="cuda") for _ in range(copies)] if table else None
    sources = [torch.randint(-127, 128, (M, K), device="cuda", dtype=torch.int8) for _ in range(copies if table else 0)]
    sources = sources or codes
    outs = [torch.empty(M, K, device="cuda", dtype=BF16) for _ in range(copies)]
    ext, device = EXTENSION.module, scale.device.index

    def ours(i: int) -> torch.Tensor:
        if picked is None:
            return _dequantize.dequantize(codes[i], scale, BF16, group)
        return _dequantize.dequantize_embedding(codes[i % tables], scale, picked[i], BF16, group)

    variants: dict[str, Call] = {
        "ours": ours,
        "copy": lambda i: ext.yardstick_expand(sources[i].data_ptr(), outs[i].data_ptr(), M * K, 2, device, stream()),
        "read": reader([source.data_ptr() for source in sources], M * K),
    }
    peer = peer_backend()
    if peer is not None and case == "dequantize":
        variants["ck"] = lambda i: peer[1].dequantize_int8_simple_dtype(codes[i], scale, BF16_OF_PEER)
    elif peer is not None and case == "dequantize_convrot" and group == 256:
        variants["ck"] = lambda i: peer[1].dequantize_int8_convrot_weight_dtype(codes[i], scale, group, BF16_OF_PEER)
    index = torch.arange(M, device="cuda") if picked is None else picked[0]
    exact = hadamard_rotate(codes[0][index[:64]].double() * scale[index[:64]].double(), group)
    return variants, copies, {
        "group": group, "err": relative_error(ours(0)[:64], exact), "kernel": "int8/dequantize", "workspace_bytes": 0,
    }  # fmt: skip


def reader(pointers: list[int], nbytes: int) -> Call:
    """Plain reads of ``nbytes`` at each of the pointers."""
    sink = torch.zeros(4, device="cuda", dtype=torch.int32)
    ext, device = EXTENSION.module, sink.device.index
    return lambda i: ext.yardstick_read(pointers[i], nbytes, sink.data_ptr(), device, stream())


def measure(case: str, M: int, K: int) -> dict:
    if case in ROWWISE:
        variants, copies, own = rowwise_case(case, M, K)
    else:
        variants, copies, own = tensorwise_case(M, K) if case == "tensorwise" else dequantize_case(case, M, K)
    times = benchlib.time_variants(variants, copies, target_us=500, reps=7)
    ck_us = round(times["ck"].us, 3) if "ck" in times else None
    return {
        "case": case, "M": M, "N": None, "K": K, "part": "quant", "us": round(times["ours"].us, 3),
        "us_p80": round(times["ours"].us_p80, 3), "bf16_us": None, "ck_us": ck_us,
        "best_peer": None if ck_us is None else {"name": "comfy-kitchen", "us": ck_us},
        "read_us": round(times["read"].us, 3), "copy_us": round(times["copy"].us, 3), "err_bf16": None, **own,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200/quantize.json")
    parser.add_argument("--quick", action="store_true", help="K=3072 and 12288, M=1 and 4096 only")
    parser.add_argument("--cases", nargs="*", default=[*ROWWISE, *OTHERS], help="only these")
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        wanted = sorted((K, M) for c, _, M, K, _ in cells() if c == case)
        for K, M in wanted:
            if args.quick and (K not in (3072, 12288) or M not in (1, 4096)):
                continue
            row = measure(case, M, K)
            rows.append(row)
            floor = row["copy_us"] + (row["read_us"] if case == "tensorwise" else 0)
            print(
                f"{case:18} M={M:5} K={K:6} {row['us']:8.2f} us, floor {floor:8.2f} = {floor / row['us']:6.1%}, "
                f"read {row['read_us']:8.2f}, ck {row['ck_us']}, err {row['err']:.5f}  {row['kernel']}",
                flush=True,
            )
            torch.cuda.empty_cache()
        benchlib.write_results(args.out, "quantize", rows, SOURCES)


if __name__ == "__main__":
    main()
