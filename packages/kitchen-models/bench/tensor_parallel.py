#!/usr/bin/env python3
"""Tensor parallelism on several GPUs: are divided outputs bit-equal, are divided inputs no worse, and how fast is it.

    torchrun --nproc-per-node 2 packages/kitchen-models/bench/tensor_parallel.py --out tensor_parallel.json

For each format and number of rows: a layer divided by outputs against the same layer on one GPU, bit by bit; one divided by
inputs against fp64, beside the error of one GPU; and the time of an MLP (up divided by outputs, GELU, down by inputs), as a
CUDA graph, on one GPU and on all, the sum in fp32 and in bf16. For formats whose sums are floats, also the time of the layer
up alone: whole, divided, and divided with sums in an order of its own.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

from kitchen_core import QuantizedLinear, trace
from kitchen_models.parallel import ColwiseParallel, RowwiseParallel, parallelize

FORMATS = ("int8", "w4a8", "w6a8", "svdquant", "awq")
K, N = 4096, 12288
ROWS = (1, 16, 256, 4096)
ERROR_ROWS = 256
BF16 = torch.bfloat16
SOURCES = [
    "packages/kitchen-int8/csrc", "packages/kitchen-w4a8/csrc", "packages/kitchen-svdquant/csrc", "packages/kitchen-awq/csrc",
]  # fmt: skip


class Mlp(nn.Module):
    """Up, GELU, down, without biases."""

    def __init__(self, format: str, device: torch.device, k: int, n: int) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        for name, shape in (("up", (n, k)), ("down", (k, n))):
            linear = nn.Linear(shape[1], shape[0], False, device="meta", dtype=BF16)
            weight = torch.randn(shape, generator=generator, device=device) * shape[1] ** -0.5
            weight[:, ::256] *= 6
            linear.weight = nn.Parameter(weight.to(BF16), requires_grad=False)
            made = QuantizedLinear.from_linear(linear, format)
            for tensor in made.inner().values():  # quantizing need not be deterministic on a GPU: rank 0's counts
                dist.broadcast(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor, 0)
            setattr(self, name, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x), approximate="tanh"))


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2."""
    return float((y.double() - exact).norm() / exact.norm())


def graph_us(module: nn.Module, x: torch.Tensor, calls: int) -> float | None:
    """Median us of a call, many to a graph; None without a GPU."""
    if x.device.type == "cpu":
        return None
    graph = benchlib.capture(lambda i: module(x), 1, calls)
    times = []
    for _ in range(9):
        dist.barrier()
        times.append(benchlib.replay_us(graph) / calls)
    return round(sorted(times)[len(times) // 2], 2)


def measure(
    format: str, mesh: Any, device: torch.device, k: int, n: int, rows: tuple[int, ...]
) -> list[dict[str, Any]]:
    """All rows of a format."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = Mlp(format, device, k, n)
    divided, coarse = (
        parallelize(copy.deepcopy(whole), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(sum_dtype=dtype)})
        for dtype in (torch.float32, BF16)
    )
    free = None
    if whole.up.format.takes_part:
        free = parallelize(copy.deepcopy(whole), mesh, {"up": ColwiseParallel(bit_equal=False)}).up
    found = []
    for m in rows:
        generator = torch.Generator().manual_seed(m)
        x = torch.randn(m, k, generator=generator)
        x[:, 7] *= 20
        h = torch.randn(m, n, generator=generator)
        x, h = x.to(device, BF16), h.to(device, BF16)
        one, part = whole.up(x), divided.up(x)
        mine = one.chunk(size, -1)[rank]
        equal = torch.tensor(int(torch.equal(mine, part)), device=device)
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        difference = torch.tensor(error(part, mine.double()), device=device)
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        row = {
            "case": format, "M": m, "K": k, "N": n, "ranks": size, "colwise_bit_equal": bool(equal.item()),
            "colwise_rel_difference": float(difference),
        }  # fmt: skip
        if m <= ERROR_ROWS:
            exact = h.double() @ whole.down.dequantize(torch.float32).double().T
            row["err_one"] = error(whole.down(h), exact)
            part = h.chunk(size, -1)[rank].contiguous()
            row["err_rowwise"], row["err_bf16_sum"] = (error(m.down(part), exact) for m in (divided, coarse))
        with trace() as calls:
            divided(x)
        row["kernels"] = sorted({kernel for _, kernel in calls})
        count = 20 if m <= 256 else 4
        row["us_one"], row["us"], row["us_bf16_sum"] = (graph_us(m, x, count) for m in (whole, divided, coarse))
        if free is not None:
            layers = (whole.up, divided.up, free)
            row["us_up_one"], row["us_up"], row["us_up_own_order"] = (graph_us(layer, x, count) for layer in layers)
        found.append(row)
        if rank == 0:
            print(row, flush=True)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--formats", nargs="*", default=FORMATS, choices=FORMATS)
    parser.add_argument("--tiny", action="store_true", help="small layers, on the CPU where there is no GPU")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sizes = (512, 1024, (1, 16)) if args.tiny else (K, N, ROWS)
    rows = []
    for format in args.formats:
        rows += measure(format, mesh, device, *sizes)
        if args.out and dist.get_rank() == 0:
            benchlib.write_results(args.out, "tensor_parallel", rows, SOURCES)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
