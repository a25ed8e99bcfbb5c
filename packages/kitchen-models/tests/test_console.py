"""What the subcommands print."""

import io

import pytest

from kitchen_models import console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_sizes_and_counts_are_told_in_fitting_words():
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 1536 * 2**20: "1.50 GiB", 5 * 2**40: "5120.00 GiB"}
    assert {count: console.size(count) for count in sizes} == sizes
    assert [console.counted(n, "layer") for n in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
    assert [console.counted(n, "matrix") for n in (0, 1, 2)] == ["0 matrices", "1 matrix", "2 matrices"]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_progress_where_no_bar_can_be_drawn(terminal, rank, monkeypatch):
    stream, now = (Terminal if terminal else io.StringIO)(), [100.0]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("RANK", rank)
    with console.progress_bar() as progress:
        for done in range(0, 101, 10):
            progress(f"layer {done}", done, 100)
            now[0] += 5
    if rank == "1":
        assert stream.getvalue() == "", "one of several speaks"
    elif not terminal:
        assert stream.getvalue() == "kitchen: 10%, layer 10\nkitchen: 50%, layer 50\nkitchen: 90%, layer 90\n"
    else:
        assert "layer" in stream.getvalue(), "a bar"


def test_a_short_run_says_nothing_but_its_result(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with console.progress_bar() as progress:
        progress("x", 1, 2)
    assert stream.getvalue() == ""
