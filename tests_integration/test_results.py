"""The recorded results: schema, complete grids, and which of them were measured from sources that have changed since."""

import importlib.util
import json
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "benchmarks" / "results" / "h200").glob("*.json"))
BENCHES = {"quantize": "packages/kitchen-int8/bench/quantize.py", "int8": "packages/kitchen-int8/bench/int8.py"}
HEADER = {"gpu", "driver", "torch", "commit", "date", "rows", "source_sha", "sources"}
ROW = {
    "case", "M", "N", "K", "part", "us", "us_p80", "bf16_us", "ck_us", "best_peer", "read_us", "copy_us", "err",
    "err_bf16", "kernel", "workspace_bytes",
}  # fmt: skip


def module(path):
    """A bench or tool as a module, without running it."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem + "_module", ROOT / path)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    finally:
        sys.path.pop(0)
    return made


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def results(request):
    return request.param, json.loads(request.param.read_text())


def test_there_are_results():
    assert {path.stem for path in FILES} >= set(BENCHES)


def test_schema(results):
    path, found = results
    assert set(found) >= HEADER
    for row in found["rows"]:
        assert set(row) >= ROW, path
        assert row["us"] > 0
        assert row["us_p80"] >= row["us"] * 0.9
        assert row["kernel"]


def test_the_grid_is_complete(results):
    path, found = results
    bench = module(BENCHES[path.stem])
    cells = {(r["case"], r["part"], r["M"], r["K"], r["N"]) for r in found["rows"]}
    assert len(cells) == len(found["rows"]), "a cell was measured twice"
    if path.stem == "quantize":
        wanted = {(c, "quant", m, k, None) for c in bench.CASES for m in bench.ROWS for k in bench.FEATURES}
    else:
        shapes = bench.SHAPES + bench.ODD_SHAPES
        wanted = {("convrot", p, m, k, n) for p in ("linear", "gemm") for m in bench.ROWS for k, n in shapes}
    assert cells == wanted


def test_stale_results_are_named(results):
    """Not an error: kernels change more often than they can be measured. The warning names what to measure again."""
    path, found = results
    now = module("tools/benchlib.py").source_sha(*found["sources"])
    assert len(now) == len(found["source_sha"])
    if now != found["source_sha"]:
        warnings.warn(
            f"stale: {path.relative_to(ROOT)} was measured from other sources ({', '.join(found['sources'])})",
            stacklevel=1,
        )
