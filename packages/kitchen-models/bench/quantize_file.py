#!/usr/bin/env python3
"""Speed and peak memory of quantizing a sharded file on the CPU, with one process and with several.

    python packages/kitchen-models/bench/quantize_file.py --folder /tmp/shards --gib 4 --ranks 1 2 --format int8

The file is synthetic: Gaussian bf16 weights in the shapes of Qwen-Image's blocks, in shards of 1 GiB. The peak is the largest
resident set of a process, Python and torch included, and the pages of the file that are mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

SHAPES = {"to_q": (3072, 3072), "to_out": (3072, 3072), "mlp_up": (12288, 3072), "mlp_down": (3072, 12288)}
SHARD = 1 << 30


def make(folder: Path, gib: float) -> Path:
    """Write the shards and their index, unless they are there."""
    from safetensors.torch import save_file

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return index
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    mapping, shard, held, block, left = {}, {}, 0, 0, int(gib * 2**30)
    while left > 0:
        for name, (rows, columns) in SHAPES.items():
            key = f"blocks.{block}.{name}.weight"
            shard[key] = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(torch.bfloat16)
            held += shard[key].nbytes
            left -= shard[key].nbytes
            if held >= SHARD or left <= 0:
                file = f"model-{len(set(mapping.values())):05d}.safetensors"
                save_file(shard, folder / file, {"format": "pt"})
                mapping |= dict.fromkeys(shard, file)
                shard, held = {}, 0
            if left <= 0:
                break
        block += 1
    index.write_text(json.dumps({"weight_map": mapping}))
    return index


def worker(source: str, target: str, format: str) -> None:
    """One rank: its line says what it took."""
    import kitchen_models as km

    torch.set_num_threads(1)
    start, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    report = km.quantize_file(source, target, format=format)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({
        "rank": report.rank, "seconds": round(report.seconds, 1), "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_mib": peak // 1024, "start_mib": start // 1024,
        "mb_per_second": round(report.bytes_before / report.seconds / 1e6), "bytes": report.bytes_before,
        "summary": report.summary(),
    }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the shards are made; they are kept")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--format", default="int8")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(*args.worker)
    index, target = make(args.folder, args.gib), args.folder / "quantized.safetensors"
    for ranks in args.ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        command += ["--worker", str(index), str(target), args.format]
        print(f"{args.format}, {ranks} ranks:", flush=True)
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        target.unlink()
    return None


if __name__ == "__main__":
    main()
