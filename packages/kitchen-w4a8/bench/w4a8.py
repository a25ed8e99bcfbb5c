#!/usr/bin/env python3
"""Times w4a8_linear (rotated, quantizer included) and its product against bf16 F.linear and, if installed, comfy-kitchen and
humming; the same for weights in the resident layout; the kernels that decode and unpack a weight, and the quantizer of weights.

python packages/kitchen-w4a8/bench/w4a8.py --out benchmarks/results/h200

Writes w4a8.json and w6a8.json. humming has groups of 32 and 128 of these, and no rotation: its quantizer does less. Our weights
are N(0, 1) by the format's rule for a first scale (absmax, nearest level), which takes no time: the quantizer proper only
refines it. Codes and scales are spread as its are. comfy-kitchen gets the same tensors. Cases: g<group>, the stored layout;
resident, groups of 16 (stored_us: as stored, in the same run); sweep, time over M; decode, unpack and requantize, of weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

import kitchen_core as kc
from kitchen_core.codebook import fixed_codebook
from kitchen_core.packing import pack_6bit, pack_nibbles
from kitchen_int8._extension import EXTENSION as INT8
from kitchen_w4a8 import _launch, resident, resident_ops

SHAPES = ((4096, 4096), (4096, 24576), (12288, 4096))  # K x N
ROWS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 8192)
FEW_ROWS = (1, 16, 256, 4096)
ROWS_OF = {16: ROWS, 32: FEW_ROWS, 64: FEW_ROWS, 128: ROWS}  # by group
PARTS_OF = {16: ("linear", "gemm"), 32: ("linear",), 64: ("linear",), 128: ("linear",)}
HUMMING_GROUPS = {4: (32, 128), 6: (128,)}
PEER_GROUPS = (16, 128)  # at which comfy-kitchen is timed too: packed and canonical, canonical
RESIDENT_ROWS, RESIDENT_GROUP = (1, 2, 4, 8, 16, 32), 16
SWEEP_GROUP = 16
SWEEP_ROWS = (
    1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 80, 96, 112, 128, 129, 160, 192, 224, 256, 257, 300,
)  # fmt: skip
REQUANTIZE_SHAPES = (
    (3072, 12288),
    (12288, 3072),
)  # K x N, as a LoRA merge does it: by a given table, rounding stochastically
FAMILIES = {"w4a8": 4, "w6a8": 6}
ROTATION = 256
MOST_COPIES = 24
SOURCES = [
    "packages/kitchen-w4a8/csrc", "shared_cuda/include/kitchen/quant/w4a8_decode.h", "shared_cuda/include/kitchen/mma",
]  # fmt: skip
BF16 = torch.bfloat16


def cells() -> set[tuple]:
    """The rows that a results file has: (case, part, M, K, N)."""
    grid = {
        (f"g{group}", part, M, K, N)
        for group, rows in ROWS_OF.items()
        for part in PARTS_OF[group]
        for M in rows
        for K, N in SHAPES
    }
    grid |= {("sweep", "linear", M, *shape) for M in SWEEP_ROWS for shape in SHAPES}
    grid |= {("resident", "linear", M, *shape) for M in RESIDENT_ROWS for shape in SHAPES}
    grid |= {(case, "quant", 0, *shape) for case in ("decode", "unpack") for shape in SHAPES}
    return grid | {("requantize", "quant", 0, *shape) for shape in REQUANTIZE_SHAPES}


def make_weight(N: int, K: int, bits: int, group: int) -> tuple[torch.Tensor, ...]:
    """qdata, s_rel, s_channel, codebook of 512 rows of N(0, 1), repeated."""
    rows = min(N, 512)
    w = torch.randn(rows, K // group, group, device="cuda")
    table = fixed_codebook("cuda")
    if bits == 4:
        scale = w.abs().amax(-1, keepdim=True)
        codes = torch.searchsorted((table[1:] + table[:-1]) / 2, w / scale).to(torch.int8)
        levels = table[codes.int()]
    else:
        scale = w.abs().amax(-1, keepdim=True) / 31
        levels = (w / scale).round().clamp(-31, 31)
        codes = (levels + 32).to(torch.int8)
    channel = (levels * scale).abs().flatten(1).amax(1) / 127
    s_rel = (scale.squeeze(-1) / channel[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    packed = (pack_nibbles if bits == 4 else pack_6bit)(codes.flatten(1))
    times = -(-N // rows)
    made = [t.repeat(times, *[1] * (t.dim() - 1))[:N].contiguous() for t in (packed, s_rel, channel)]
    return made[0], made[1].view(torch.float8_e4m3fn), made[2], table if bits == 4 else None


def peers(weights: list[tuple], N: int, K: int, bits: int, group: int) -> dict:
    """comfy-kitchen's canonical and packed linears over the same tensors, {} where it is not installed."""
    try:
        import comfy_kitchen as ck
        from comfy_kitchen.tensor.base import QuantizedTensor
        from comfy_kitchen.tensor.w4a8_int8 import AsymW4A8Int8Layout as Layout
    except ImportError:
        return {}
    calls = {}
    options = {"out_dtype": BF16, "codebook": weights[0][3]}
    if group != 16:
        options["group_size"] = group

    def canonical(x):
        return lambda i: ck.w4a8_int8_linear(x, *weights[i][:3], **options)

    calls["ck canonical"] = canonical
    if group == 16:
        packed, empty = [], None
        for qdata, s_rel, channel, table in weights:
            storage = torch.cat((qdata.flatten().view(torch.uint8), s_rel.flatten().view(torch.uint8)))
            q = storage[: qdata.nbytes].view(torch.int8).view(qdata.shape)
            s = storage[qdata.nbytes :].view(torch.float8_e4m3fn).view(s_rel.shape)
            mine = Layout.Params(
                scale=s, s_channel=channel, codebook=table, orig_dtype=BF16, orig_shape=(N, K), group_size=group,
                convrot_groupsize=ROTATION,
            )  # fmt: skip
            optimized = Layout.optimize_for_gemv(QuantizedTensor(q, "AsymW4A8Int8Layout", mine), storage)
            if not optimized._params.mma_packed:
                return calls
            packed.append((optimized._qdata, channel))
            empty = optimized._params.scale
        calls["ck packed"] = lambda x: (
            lambda i: ck.w4a8_int8_linear(x, packed[i][0], empty, packed[i][1], mma_packed=True, **options)
        )
    return calls


def humming(N: int, K: int, bits: int, group: int, count: int):
    """humming's linear over a weight of the same width and group in its own layout; None where it has none."""
    if group not in HUMMING_GROUPS[bits]:
        return None
    try:
        from humming.forward import humming_forward
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors
        from humming.tune import get_heuristics_config
    except ImportError:
        return None
    schema = HummingWeightSchema(b_dtype=f"uint{bits}", weight_scale_group_size=group)
    made = HummingWeightSchema.quant_tensor(torch.randn(N, K, device="cuda", dtype=BF16), schema, BF16)
    config, tensors = prepare_and_transform_humming_tensors(
        made,
        shape_n=N,
        shape_k=K,
        weight_schema=schema,
        input_schema=HummingInputSchema(a_dtype="int8"),
        torch_dtype=BF16,
    )
    copies = [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(count)]
    locks = [torch.zeros(2048, dtype=torch.int32, device="cuda") for _ in range(count)]
    plans = get_heuristics_config(config)

    def of(x):
        plan = next(json.dumps(plan) for low, high, plan in plans if low < x.shape[0] <= high)
        return lambda i: humming_forward(config, inputs=x, locks=locks[i], tuning_config=plan, **copies[i])

    return of


def works(call) -> bool:
    """Whether the peer takes the problem."""
    try:
        call(0)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"  the peer refuses: {type(error).__name__}: {str(error)[:120]}", flush=True)
        return False
    return True


class Reader:
    """A kernel that only reads, over rotated buffers cut from one arena."""

    def __init__(self, most: int) -> None:
        self.arena = torch.empty(max(int(benchlib.ROTATE_BYTES), 2 * most), device="cuda", dtype=torch.uint8)
        self.sink = torch.zeros(4, device="cuda", dtype=torch.int32)

    def call(self, nbytes: int):
        step = -(-nbytes // 256) * 256
        places = min(64, max(2, self.arena.numel() // step))

        def read(i: int) -> None:
            at = self.arena.data_ptr() + step * (i % places)
            stream = torch.cuda.current_stream().cuda_stream
            INT8.module.yardstick_read(at, nbytes, self.sink.data_ptr(), 0, stream)

        return read


def error(x, y, weight) -> float:
    """Relative error of sampled rows and columns of y against float64 x @ weight.T (weight: its first rows)."""
    rows = torch.linspace(0, x.shape[0] - 1, min(x.shape[0], 8), device=x.device).long()
    exact = x[rows].double() @ weight.double().T
    return float((y[rows, : weight.shape[0]].double() - exact).norm() / exact.norm())


def dense_weight(weight: tuple, N: int, group: int) -> torch.Tensor:
    """The first rows of a weight, dequantized in the basis of x."""
    qdata, s_rel, channel, table = weight
    rows = min(N, 256)
    return kc.dequantize_w4a8_weight(
        qdata[:rows], s_rel[:rows], channel[:rows], table, None, torch.float32, group, ROTATION
    )


def lay_out(weight: tuple, shape: resident.Shape) -> torch.Tensor:
    """The records of a weight in the resident layout."""
    stored = torch.cat([tensor.flatten().view(torch.uint8) for tensor in weight[:2]])
    return resident.pack(stored, shape)


def measure(
    K, N, bits, group, M, weights, exact, dense, compare, reader, *, case: str, reps: int, records=None
) -> list[dict]:
    """Rows for the linear and the product, all columns from one interleaved run. ``records``: the weights laid out for
    decoding, which the linear takes instead."""
    x = torch.randn(M, K, device="cuda", dtype=BF16)
    codes, scale = kc.quantize_and_rotate_rowwise(x, ROTATION)
    read_bytes = N * K * bits // 8 + N * K // group + 4 * N + 2 * M * (K + N)

    def stored(i):
        return kc.w4a8_linear(x, *weights[i], group_size=group, convrot_groupsize=ROTATION)

    def laid_out(i):
        shape = resident.Shape(N, K, bits, group)
        rest = (shape, None, None, ROTATION, "none", None, 0.0, None, None)
        return resident_ops.linear(x, records[i], *weights[i][2:], *rest)

    ours = stored if records is None else laid_out
    variants = {"linear": ours, "bf16": lambda i: F.linear(x, dense[i % len(dense)]), "read": reader.call(read_bytes)}
    parts = ("linear",) if case != f"g{group}" else PARTS_OF[group]
    if "gemm" in parts:
        variants["gemm"] = lambda i: kc.w4a8_scaled_mm(codes, scale, *weights[i], group_size=group)
    if records is not None:
        variants["stored"] = stored
    theirs = {name: make(x) for name, make in compare.items()}
    variants |= {name: call for name, call in theirs.items() if works(call)}
    copies = benchlib.copies_for(read_bytes, len(weights))
    times = benchlib.time_variants(variants, copies, target_us=250.0, reps=reps)
    kernel = kernel_of(stored) if records is None else resident_ops.KERNEL
    y = ours(0)
    peer_us = {name: times[name].us for name in theirs if name in times}
    ck_us = min((us for name, us in peer_us.items() if name.startswith("ck")), default=None)
    best = min(peer_us, key=peer_us.get, default=None)
    shared = {
        "M": M, "N": N, "K": K, "group": group, "bf16_us": round(times["bf16"].us, 3), "read_us": round(times["read"].us, 3),
        "copy_us": None, "err": error(x, y, exact), "err_bf16": error(x, F.linear(x, dense[0]), dense[0][:256]),
        "kernel": kernel,
        "workspace_bytes": _launch.workspace_bytes(kernel.removeprefix("w4a8/"), M, N, K, 0, bits, group),
        "plan": plan_of(kernel, M, N, K, bits, group),
    }  # fmt: skip
    return [
        {
            "case": case, "part": part, **shared, "us": round(times[part].us, 3),
            "us_p80": round(times[part].us_p80, 3), "ck_us": round(ck_us, 3) if ck_us and part == "linear" else None,
            "humming_us": round(peer_us["humming"], 3) if "humming" in peer_us and part == "linear" else None,
            "best_peer": {"name": best, "us": round(peer_us[best], 3)} if best and part == "linear" else None,
            **({"stored_us": round(times["stored"].us, 3)} if "stored" in times else {}),
        }
        for part in parts
    ]  # fmt: skip


def kernel_of(call) -> str:
    """The kernel that a linear runs."""
    with kc.trace() as calls:
        call(0)
    chosen = dict(calls)["w4a8_linear"]
    return dict(calls)["w4a8_scaled_mm"] if chosen == "core/composed" else chosen


def plan_of(kernel: str, M: int, N: int, K: int, bits: int, group: int) -> str:
    """The plan in words, where the kernel has one."""
    if kernel == "w4a8/hopper":
        return _launch.hopper_plan(M, N, K, bits, group, True, 0).words.rpartition(": ")[2]
    plans = {"w4a8/stream": _launch.stream_plan, resident_ops.KERNEL: _launch.resident_plan}
    return plans[kernel](M, N, K, bits, group, 0).words.rpartition(": ")[2] if kernel in plans else ""


def weight_row(
    case: str, K: int, N: int, group: int, time: benchlib.Timing, copy_us: float | None, kernel: str
) -> dict:
    """A row of a kernel that has no rows of x."""
    return {
        "case": case, "part": "quant", "M": 0, "N": N, "K": K, "group": group, "us": round(time.us, 3),
        "us_p80": round(time.us_p80, 3), "bf16_us": None, "ck_us": None, "humming_us": None, "best_peer": None,
        "read_us": None, "copy_us": copy_us and round(copy_us, 3), "err": None, "err_bf16": None, "kernel": kernel,
        "workspace_bytes": 0, "plan": "",
    }  # fmt: skip


def measure_unpacked(
    K: int, N: int, bits: int, group: int, weights: list[tuple], records: list, reps: int
) -> list[dict]:
    """Decoding a weight to INT8 and unpacking it from the resident layout, each beside a copy of as many bytes."""
    shape = resident.Shape(N, K, bits, group)
    out = [torch.empty(N, K, dtype=torch.int8, device="cuda") for _ in range(2)]
    bytes_of = {"decode": (N * shape.row_bytes + N * K) // 2, "unpack": N * shape.row_bytes}  # each way, of the copy
    source = torch.randint(0, 256, (len(weights), max(bytes_of.values())), dtype=torch.uint8, device="cuda")

    def copy(case: str):
        def call(i):
            stream = torch.cuda.current_stream().cuda_stream
            INT8.module.yardstick_copy(
                source[i].data_ptr(), out[i % 2].data_ptr(), bytes_of[case] // 16 * 16, 1, 0, stream
            )

        return call

    variants = {
        "decode": lambda i: _launch.decode(*weights[i][:2], weights[i][3], group, out=out[i % 2]),
        "unpack": lambda i: resident_ops.unpack(records[i], shape),
        "copy decode": copy("decode"), "copy unpack": copy("unpack"),
    }  # fmt: skip
    times = benchlib.time_variants(variants, len(weights), target_us=500.0, reps=reps)
    rows = [
        weight_row(case, K, N, group, times[case], times[f"copy {case}"].us, kernel)
        for case, kernel in (("decode", "w4a8/decode"), ("unpack", "w4a8/unpack"))
    ]
    for row in rows:
        us, copy_us = row["us"], row["copy_us"]
        print(
            f"{row['case']} K={K:5} N={N:5} {bits} bits {us:8.2f} us, copy {copy_us:7.2f} = {copy_us / us:4.0%}",
            flush=True,
        )
    return rows


def measure_requantize(K: int, N: int, bits: int, reps: int) -> dict:
    """A weight quantized again with the table that it has, rounding stochastically: what a merge costs a layer."""
    weights = [torch.randn(N, K, device="cuda", dtype=BF16) * 0.02 for _ in range(benchlib.copies_for(2 * N * K, 4))]
    table = fixed_codebook("cuda") if bits == 4 else None

    def call(i):
        return kc.quantize_w4a8_weight(weights[i], 16, ROTATION, bits, codebook=table, scale_search=False, seed=1 + i)

    times = benchlib.time_variants({"quantize": call}, len(weights), target_us=2000.0, reps=reps)["quantize"]
    with kc.trace() as calls:
        call(0)
    print(
        f"requantize K={K:5} N={N:5} {bits} bits {times.us:8.2f} us  {dict(calls)['quantize_w4a8_weight']}", flush=True
    )
    return weight_row("requantize", K, N, 16, times, None, dict(calls)["quantize_w4a8_weight"])


def tell(rows: list[dict]) -> None:
    for row in rows:
        us, ck = row["us"], f"{row['ck_us']:8.2f}" if row["ck_us"] else "       -"
        hum = f"{row['humming_us']:8.2f}" if row["humming_us"] else "       -"
        print(
            f"{row['case']:6} K={row['K']:5} N={row['N']:5} M={row['M']:5} {us:8.2f} us, bf16 {row['bf16_us']:8.2f} = "
            f"{row['bf16_us'] / us:4.2f}x, ck {ck}, humming {hum}, read {row['read_us']:6.2f} = {row['read_us'] / us:4.0%}, "
            f"err {row['err']:.4f}  {row['kernel']}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=benchlib.ROOT / "benchmarks/results/h200", help="folder")
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    start = time.monotonic()
    gc.disable()
    torch.manual_seed(0)
    reader = Reader(max(2 * 8192 * (K + N) + N * K for K, N in SHAPES))
    rows: dict[str, list[dict]] = {name: [] for name in FAMILIES}
    for K, N in SHAPES:
        dense = [torch.randn(N, K, device="cuda", dtype=BF16) * 0.02 for _ in range(benchlib.copies_for(2 * N * K, 8))]
        for family, bits in FAMILIES.items():
            for group in ROWS_OF:
                made = make_weight(N, K, bits, group)
                copies = benchlib.copies_for(made[0].nbytes + made[1].nbytes, MOST_COPIES)
                weights = [tuple(None if t is None else t.clone() for t in made) for _ in range(copies)]
                compare = peers(weights, N, K, bits, group) if group in PEER_GROUPS else {}
                other = humming(N, K, bits, group, len(weights))
                if other is not None:
                    compare["humming"] = other
                exact = dense_weight(made, N, group)
                for M in ROWS_OF[group]:
                    found = measure(
                        K, N, bits, group, M, weights, exact, dense, compare, reader, case=f"g{group}", reps=args.reps
                    )
                    tell(found[:1])
                    rows[family] += found
                if group == RESIDENT_GROUP:
                    records = [lay_out(weight, resident.Shape(N, K, bits, group)) for weight in weights]
                    for M in RESIDENT_ROWS:
                        found = measure(
                            K, N, bits, group, M, weights, exact, dense, compare, reader, case="resident", reps=args.reps,
                            records=records,
                        )  # fmt: skip
                        tell(found)
                        rows[family] += found
                    rows[family] += measure_unpacked(K, N, bits, group, weights, records, args.reps)
                    del records
                if group == SWEEP_GROUP:
                    for M in SWEEP_ROWS:
                        found = measure(K, N, bits, group, M, weights, exact, dense, {}, reader, case="sweep", reps=3)
                        tell(found)
                        rows[family] += found
                del weights, compare, other
        del dense
        if SHAPES[-1] == (K, N):
            for family, bits in FAMILIES.items():
                rows[family] += [measure_requantize(*shape, bits, args.reps) for shape in REQUANTIZE_SHAPES]
        for family, found in rows.items():
            benchlib.write_results(args.out / f"{family}.json", family, found, SOURCES)
        print(f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
