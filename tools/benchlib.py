"""What the benches share: timing by CUDA graphs, rotated buffers, and the results file.

All columns of a row are measured in one go: the variants' graphs are replayed in turn, so that clocks and neighbours hit
each the same. Buffers rotate over more bytes than the L2 holds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
ROTATE_BYTES = 220e6  # the H200's L2 is 60 MB
MAX_COPIES = 64


class Timing(NamedTuple):
    us: float
    us_p80: float


def copies_for(nbytes: float, most: int = MAX_COPIES) -> int:
    """How many buffers of that size to rotate."""
    return int(max(2, min(most, math.ceil(ROTATE_BYTES / max(1, nbytes)))))


def capture(call: Callable[[int], Any], copies: int, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of ``calls`` calls, call(0), call(1), ... rotating over ``copies``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(copies, 2)):
            call(i)  # warm-up: lazy module loading is not allowed inside a capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % copies)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def time_variants(
    variants: dict[str, Callable[[int], Any]], copies: int, target_us: float = 1200.0, reps: int = 15
) -> dict[str, Timing]:
    """Median and 80th percentile in us of one call of each variant, replayed in turn."""
    graphs = {}
    for name, call in variants.items():
        calls = copies
        graph = capture(call, copies, calls)
        replay_us(graph)
        once = max(replay_us(graph), 1.0)
        if once < target_us and calls < 400:
            calls *= min(math.ceil(target_us / once), max(1, 400 // calls))
            graph = capture(call, copies, calls)
        replay_us(graph)
        graphs[name] = (graph, calls)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(reps):
        for name, (graph, calls) in graphs.items():
            times[name].append(replay_us(graph) / calls)
    ordered = {name: sorted(values) for name, values in times.items()}
    return {
        name: Timing(values[len(values) // 2], values[int(0.8 * (len(values) - 1))]) for name, values in ordered.items()
    }


def with_headers(*sources: str) -> list[str]:
    """The given files and folders, and the headers of shared_cuda that they include, directly or not."""
    include = ROOT / "shared_cuda/include"
    todo, headers = [file for source in sources for file in _files(ROOT / source)], set()
    while todo:
        names = re.findall(r'^#include "(kitchen/[^"]+)"', todo.pop().read_text(), re.MULTILINE)
        found = {include / name for name in names if (include / name).exists()} - headers
        headers |= found
        todo += found
    return [*sources, *sorted(str(header.relative_to(ROOT)) for header in headers)]


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def source_sha(*sources: str) -> str:
    """Hash over CUDA sources, names and contents: files, or all of a folder, relative to the repository."""
    digest = hashlib.sha256()
    paths = [ROOT / source for source in sources]
    files = [path for path in paths if path.is_file()] + [
        file for path in paths for file in path.rglob("*") if file.is_file()
    ]
    for file in sorted(file for file in files if file.suffix in {".cu", ".cuh", ".h", ".cpp"}):
        digest.update(str(file.relative_to(ROOT)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def kept_rows(path: Path, sources: list[str], cases: set[str]) -> list[dict[str, Any]]:
    """Rows of an earlier run of the same sources on the same GPU and torch, save those of ``cases``: for runs of a part."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    now = (torch.cuda.get_device_name(), torch.__version__, source_sha(*sources))
    if (found["gpu"], found["torch"], found["source_sha"]) != now:
        return []
    return [row for row in found["rows"] if row["case"] not in cases]


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def write_results(path: Path, family: str, rows: list[dict[str, Any]], sources: list[str]) -> None:
    """benchmarks/results/<gpu>/<family>.json: the environment, which sources were measured, and the rows."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True)
    header = {
        "family": family,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.split("\n")[0].strip(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "sources": sources,
        "source_sha": source_sha(*sources),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps(header, indent=1)[:-2]
    path.write_text(f'{head},\n "rows": [\n{lines}\n]}}\n')
