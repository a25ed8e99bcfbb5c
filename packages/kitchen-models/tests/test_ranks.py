"""Several processes that quantize one file, as torchrun starts them; and runs that are killed at any moment."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_models.ranks import Team

RULES = "*.q=awq"


def test_shares_are_consecutive_whole_and_balanced():
    items = list(range(100))
    costs = [1 + (i % 7) * 3 for i in items]
    for size in (1, 2, 3, 8):
        parts = [Team(rank, size).share(items, costs) for rank in range(size)]
        assert [i for part in parts for i in part] == items
        loads = [sum(costs[i] for i in part) for part in parts]
        assert max(loads) - min(loads) <= 2 * max(costs)
    assert [Team(rank, 4).share(["a"], [5]) for rank in range(4)].count(["a"]) == 1
    assert Team(0, 2).share([], []) == []
    assert sum(len(Team(rank, 2).share([1, 2], [0, 0])) for rank in range(2)) == 2


def torchrun(ranks, *words, **environment):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *map(str, words),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )


@pytest.fixture
def shards(source, tmp_path):
    """The source in two files and their index."""
    state = load_file(source)
    names = sorted(state)
    mapping = {name: f"m-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(mapping.values()):
        save_file({n: state[n] for n in names if mapping[n] == shard}, tmp_path / shard, {"format": "pt"})
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": mapping}))
    return index


def test_two_ranks_write_the_file_that_one_process_writes(shards, tmp_path):
    alone, together = tmp_path / "alone.safetensors", tmp_path / "together.safetensors"
    report = km.quantize_file(shards, alone, RULES, format="int8")
    ran = torchrun(
        2, "-m", "kitchen_core.cli", "quantize", shards, together, "--rules", RULES, "--format", "int8", "--report",
        tmp_path / "report",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert together.read_bytes() == alone.read_bytes()
    assert ran.stdout.count("layers quantized") == 1, "one rank speaks"
    assert report.summary() in ran.stdout
    assert (tmp_path / "report" / "report.html").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_an_error_of_one_rank_ends_all_and_leaves_nothing(source, tmp_path):
    state = load_file(source)
    state["blocks.0.mlp.fc2.weight"][3, 5] = float("nan")
    save_file(state, source)
    before = {p.name for p in tmp_path.iterdir()}
    ran = torchrun(2, "-m", "kitchen_core.cli", "quantize", source, tmp_path / "q.safetensors", "--format", "int8")
    assert ran.returncode != 0
    assert "blocks.0.mlp.fc2" in ran.stderr
    assert "[3, 5]" in ran.stderr
    assert {p.name for p in tmp_path.iterdir()} == before


KILLED_RANK = """
    import os, signal, sys
    import kitchen_models as km
    def watch(what, done, total):
        if os.environ["RANK"] == os.environ["VICTIM"] and not what.startswith("hashing"):
            os.kill(os.getpid(), signal.SIGKILL)
    km.quantize_file(sys.argv[1], sys.argv[2], format="int8", progress=watch)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_and_leaves_nothing(victim, source, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED_RANK))
    before = {p.name for p in tmp_path.iterdir()}
    ran = torchrun(2, script, source, tmp_path / "q.safetensors", VICTIM=str(victim))
    assert ran.returncode != 0
    left = {p.name for p in tmp_path.iterdir()} - before
    assert left == set() if hasattr(os, "O_TMPFILE") else "q.safetensors" not in left


# --------------------------------------------------------------------------------------------- killed at any moment

KILLED = """
    import os, signal, sys
    import kitchen_models as km
    from kitchen_models import quantize, writer
    where, which = sys.argv[3].split(":")
    calls = 0
    def kill_at(home, name, after):
        inner = getattr(home, name)
        def wrapped(*args, **kwargs):
            global calls
            calls += 1
            if calls == int(which) and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            made = inner(*args, **kwargs)
            if calls == int(which) and after:
                os.kill(os.getpid(), signal.SIGKILL)
            return made
        setattr(home, name, wrapped)
    places = {
        "open": (os, "open", True), "hash": (quantize, "sha256_of", False), "write": (os, "pwrite", True),
        "quantize": (quantize, "quantize_rows", True), "sync": (os, "fsync", False), "link": (os, "link", True),
        "rename": (os, "replace", False), "renamed": (os, "replace", True),
    }
    kill_at(*places[where])
    km.quantize_file(sys.argv[1], sys.argv[2], format="int8")
"""

POINTS = [
    "hash:1",
    "open:1",
    "open:2",
    "write:1",
    "write:2",
    "write:5",
    "write:9",
    "quantize:1",
    "quantize:3",
    "sync:1",
]
POINTS += ["link:1", "link:2", "rename:1", "renamed:1"]


CASES = [(point, None) for point in POINTS]
CASES += [(point, b"an older file") for point in ("write:5", "link:2", "rename:1", "renamed:1")]


@pytest.mark.parametrize(("point", "existing"), CASES)
def test_a_kill_leaves_the_input_and_no_broken_output(point, existing, source, tmp_path):
    """OUT is absent, or what it was, or complete: never in between; and the input keeps its bytes."""
    whole = tmp_path / "whole.safetensors"
    km.quantize_file(source, whole, format="int8")
    given = source.read_bytes()
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "q.safetensors"
    if existing:
        target.write_bytes(existing)
    script = [sys.executable, "-c", textwrap.dedent(KILLED), source, target, point]
    ran = subprocess.run(script, capture_output=True, timeout=120)
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()
    assert source.read_bytes() == given
    found = target.read_bytes() if target.exists() else None
    assert found == (whole.read_bytes() if point.startswith("renamed") else existing)
    left = [p for p in folder.iterdir() if p != target]
    assert all(p.name.startswith(".q.safetensors.") and p.name.endswith(".partial") for p in left)
    if hasattr(os, "O_TMPFILE") and not point.startswith(("link", "rename:")):
        assert left == []
    km.quantize_file(source, target, format="int8")
    assert target.read_bytes() == whole.read_bytes(), "the next run is not disturbed"


def test_a_team_of_one_needs_no_torch_distributed(monkeypatch, source, tmp_path):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: pytest.fail("not needed"))
    assert km.quantize_file(source, tmp_path / "q.safetensors", format="int8").rank == 0
