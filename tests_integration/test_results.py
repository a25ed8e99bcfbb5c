"""The recorded results: schema, complete grids, and which of them were measured from sources that have changed since."""

import importlib.util
import json
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OTHER = ("gpu_check",)  # written beside the results, and none
FILES = [p for p in sorted((ROOT / "benchmarks" / "results" / "h200").glob("*.json")) if p.stem not in OTHER]
REQUIRED = {"quantize", "int8"}
BENCH_OF = {"int8_sweep": "int8", "awq_sweep": "awq", "w6a8": "w4a8"}  # the others are named as their bench
HEADER = {"gpu", "driver", "torch", "commit", "date", "rows", "source_sha", "sources"}
ROW = {
    "case", "M", "N", "K", "part", "us", "us_p80", "bf16_us", "ck_us", "best_peer", "read_us", "copy_us", "err",
    "err_bf16", "kernel", "workspace_bytes",
}  # fmt: skip
# Of another schema, tested below.
SPECIAL = ("accuracy", "host_time", "int8_sweep", "awq_sweep", "end_to_end", "tensor_parallel")
# Neighbouring M that may differ by more than STEP in time, each (K, N, M of the second) with its reason.
STEP = 1.5
EXPLAINED_STEPS: dict[tuple[int, int, int], str] = {
    (3072, 18432, 129): "awq: from one tile of 128 rows of x to one of 256; see docs/kernels/awq.md",
    (4096, 4096, 129): "awq: likewise; 1.40 in the run before, and 1.41 at 132 rows in this one",
    (3072, 18432, 257): "awq: from one tile of 256 rows of x to two, or three of 128; see docs/kernels/awq.md",
}


def module(path):
    """A bench or tool as a module, without running it."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem + "_module", path)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    finally:
        sys.path.pop(0)
    return made


def bench_of(path):
    """The module of the bench that wrote a results file."""
    name = BENCH_OF.get(path.stem, path.stem)
    found = [*ROOT.glob(f"packages/*/bench/{name}.py"), *ROOT.glob(f"packages/*/bench/*_{name}.py")]
    if not found:
        pytest.fail(f"{path.relative_to(ROOT)} has no packages/*/bench/{name}.py that could make it again")
    return module(found[0])


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def results(request):
    return request.param, json.loads(request.param.read_text())


def of(family):
    """One results file, or a skip where it has not been recorded yet."""
    path = ROOT / "benchmarks" / "results" / "h200" / f"{family}.json"
    if not path.exists():
        pytest.skip(f"no {family}.json was recorded")
    return path, json.loads(path.read_text())


def test_there_are_results():
    assert {path.stem for path in FILES} >= REQUIRED


def test_schema(results):
    path, found = results
    assert set(found) >= HEADER
    assert found["rows"]
    if path.stem in SPECIAL:
        return
    for row in found["rows"]:
        assert set(row) >= ROW, path
        assert row["us"] > 0
        assert row["us_p80"] >= row["us"] * 0.9
        assert row["kernel"]


def test_the_grid_is_complete(results):
    """Every M at every shape of a case, and, where the bench says which cells there must be, exactly those."""
    path, found = results
    if path.stem in SPECIAL:
        return
    cells = [(r["case"], r["part"], r["M"], r["K"], r["N"]) for r in found["rows"]]
    places = [(*cell, r.get("group"), r.get("rank")) for cell, r in zip(cells, found["rows"], strict=True)]
    assert len(set(places)) == len(places), "a cell was measured twice"
    rows, shapes = defaultdict(set), defaultdict(set)
    for case, part, M, *shape in places:
        rows[case, part].add(M)
        shapes[case, part].add(tuple(shape))
    wanted = {(*key, M, *shape) for key in rows for M in rows[key] for shape in shapes[key]}
    assert set(places) == wanted, f"missing: {sorted(wanted - set(places), key=str)[:5]}"
    bench = bench_of(path)
    if hasattr(bench, "cells"):
        assert set(cells) == bench.cells()


def test_stale_results_are_named(results):
    """Not an error: kernels change more often than they can be measured. The warning names what to measure again."""
    path, found = results
    tool = module(ROOT / "tools/benchlib.py")
    for source in found["sources"]:
        assert (ROOT / source).exists(), f"{path.stem} was measured from {source}, which is gone"
    now = tool.source_sha(*found["sources"])
    assert len(now) == len(found["source_sha"])
    if now != found["source_sha"]:
        warnings.warn(
            f"stale: {path.relative_to(ROOT)} was measured from other sources ({', '.join(found['sources'])})",
            stacklevel=1,
        )


def test_the_hash_of_sources_sees_every_change(tmp_path, monkeypatch):
    tool = module(ROOT / "tools/benchlib.py")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    kernel, header = tmp_path / "csrc/a.cu", tmp_path / "csrc/a.h"
    kernel.write_text("1")
    first = tool.source_sha("csrc")
    (tmp_path / "csrc/notes.md").write_text("no source")
    assert tool.source_sha("csrc") == first
    header.write_text("")
    second = tool.source_sha("csrc")
    kernel.write_text("2")
    third = tool.source_sha("csrc")
    kernel.rename(tmp_path / "csrc/b.cu")
    assert len({first, second, third, tool.source_sha("csrc")}) == 4


def test_accuracy_is_within_its_limit():
    path, found = of("accuracy")
    bench = bench_of(path)
    assert {(r["case"], r["dtype"], r["M"], r["seed"]) for r in found["rows"]} == bench.cells()
    limited = [r for r in found["rows"] if (r["case"], r["dtype"], r["M"]) == ("convrot", "bfloat16", bench.LIMIT_ROWS)]
    assert limited
    for row in limited:
        assert row["err"] <= bench.LIMIT
        assert row["ck_err"] is None or row["err"] < row["ck_err"]


def test_whole_models_have_every_format_and_awq_its_quality():
    path, found = of("end_to_end")
    bench = bench_of(path)
    assert [(r["model"], r["case"]) for r in found["rows"]] == [
        (model, case) for model in ("image", "decode") for case in bench.FORMATS
    ]
    for row in found["rows"]:
        assert row["us"] > 0
        assert row["bf16_us"] > 0
        assert row["weight_bytes"] < row["weight_bytes_bf16"]
    [awq] = [r for r in found["rows"] if (r["model"], r["case"]) == ("image", "awq")]
    assert awq["psnr_dequantized"] >= bench.AWQ_LEAST_DB


def test_tensor_parallel_was_measured_in_every_format():
    path, found = of("tensor_parallel")
    bench = bench_of(path)
    assert [(r["case"], r["M"]) for r in found["rows"]] == [(case, m) for case in bench.FORMATS for m in bench.ROWS]
    for row in found["rows"]:
        assert row["ranks"] > 1
        assert row.get("err_rowwise", 0) <= row.get("err_one", 0) * 1.01


@pytest.mark.parametrize("family", ["int8_sweep", "awq_sweep"])
def test_time_over_M_has_no_steps(family):
    path, found = of(family)
    bench = bench_of(path)
    assert {(row["K"], row["N"]) for row in found["rows"]} == set(bench.SWEEP_SHAPES)
    for row in found["rows"]:
        assert row["M"] == list(bench.SWEEP_ROWS)
        times = row["us"]
        steps = {
            (row["K"], row["N"], m): round(max(a / b, b / a), 2)
            for m, a, b in zip(row["M"][1:], times, times[1:], strict=False)
        }
        assert not {at: step for at, step in steps.items() if step > STEP and at not in EXPLAINED_STEPS}


def test_the_tables_made_from_results_are_up_to_date():
    tool = module(ROOT / "tools/results_tables.py")
    pages = {page: page.read_text() for page in tool.PAGES.rglob("*.md")}
    assert any(tool.MARKED.search(text) for text in pages.values())
    old = [page.name for page, text in pages.items() if tool.written(text) != text]
    assert not old, "run: python tools/results_tables.py --write"
