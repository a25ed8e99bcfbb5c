#!/usr/bin/env python3
"""The tables of docs/kernels/w4a8.md from benchmarks/results/h200/{w4a8,w6a8}.json: written between the page's markers.

python packages/kitchen-w4a8/bench/tables.py            print them
python packages/kitchen-w4a8/bench/tables.py --write
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

PAGE = benchlib.ROOT / "docs/kernels/w4a8.md"
MARKED = re.compile(r"<!-- (\w+) (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
FAMILIES = ("w4a8", "w6a8")
SHAPES = ((4096, 4096), (4096, 24576), (12288, 4096))


def load(family: str) -> list[dict]:
    return json.loads((benchlib.ROOT / f"benchmarks/results/h200/{family}.json").read_text())["rows"]


def lines(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *rows])


def ratio(rows: list[dict], over: str) -> str:
    """Geometric mean and least of ``over`` / us, a dash where it was not measured everywhere."""
    found = [row[over] / row["us"] for row in rows if row.get(over)]
    return f"{benchlib.geometric_mean(found):.2f} ({min(found):.2f})" if rows and len(found) == len(rows) else "–"


def means(family: str) -> str:
    """By group and M over the shapes: of a plain read, times bf16, times the peer."""
    made = []
    rows = [row for row in load(family) if row["part"] == "linear" and row["case"] == f"g{row['group']}"]
    for group in sorted({row["group"] for row in rows}):
        for M in sorted({row["M"] for row in rows if row["group"] == group}):
            here = [row for row in rows if row["group"] == group and row["M"] == M]
            ratios = [ratio(here, over) for over in ("read_us", "bf16_us", "ck_us", "humming_us")]
            made.append([str(group), str(M), *ratios])
    return lines(["group", "M", "of a plain read", "times bf16", "times comfy-kitchen", "times humming"], made)


def shapes(family: str) -> str:
    """Groups of 16, each shape by M: us, share of a plain read, times bf16, kernel."""
    rows = [row for row in load(family) if row["part"] == "linear" and row["case"] == "g16"]
    made = []
    for M in sorted({row["M"] for row in rows}):
        line = [str(M)]
        for K, N in SHAPES:
            [row] = [r for r in rows if (r["M"], r["K"], r["N"]) == (M, K, N)]
            read = f"{row['read_us'] / row['us']:.0%}"
            kernel = (
                "decoded first" if row.get("plan", "").startswith("decoded") else row["kernel"].removeprefix("w4a8/")
            )
            line.append(f"{row['us']:.1f}, {read}, {row['bf16_us'] / row['us']:.2f}, {kernel}")
        made.append(line)
    return lines(["M", *(f"{K}x{N}" for K, N in SHAPES)], made)


def sweep(family: str) -> str:
    """Time over M, each shape and bf16 beside it."""
    made, counts = [], []
    for K, N in SHAPES:
        rows = [row for row in load(family) if row["case"] == "sweep" and (row["K"], row["N"]) == (K, N)]
        rows.sort(key=lambda row: row["M"])
        counts = [str(row["M"]) for row in rows]
        made.append([f"{K}x{N}", *(f"{row['us']:.1f}" for row in rows)])
        made.append(["bf16", *(f"{row['bf16_us']:.1f}" for row in rows)])
    return lines(["M", *counts], made)


def resident(family: str) -> str:
    """The resident layout, groups of 16: each shape as stored and laid out, and means over the shapes."""
    rows = [row for row in load(family) if row["case"] == "resident"]
    made = []
    for M in sorted({row["M"] for row in rows}):
        here = [row for row in rows if row["M"] == M]
        line = [str(M)]
        for K, N in SHAPES:
            [row] = [r for r in here if (r["K"], r["N"]) == (K, N)]
            stored, us, read = row["stored_us"], row["us"], row["read_us"]
            line.append(f"{stored:.1f}, {read / stored:.0%} / {us:.1f}, {read / us:.0%}")
        stored = benchlib.geometric_mean([row["read_us"] / row["stored_us"] for row in here])
        laid_out = benchlib.geometric_mean([row["read_us"] / row["us"] for row in here])
        made.append([*line, f"{stored:.0%} / {laid_out:.0%}", ratio(here, "bf16_us"), ratio(here, "ck_us")])
    return lines(["M", *(f"{K}x{N}" for K, N in SHAPES), "of a plain read", "times bf16", "times comfy-kitchen"], made)


def weights(family: str) -> str:
    """Kernels that have no rows of x: us, and the share of a copy of as many bytes."""
    made = []
    for row in load(family):
        if row["part"] == "quant":
            share = "–" if row["copy_us"] is None else f"{row['copy_us'] / row['us']:.0%}"
            made.append([row["case"], f"{row['K']}x{row['N']}", f"{row['us']:.1f}", share])
    return lines(["kernel", "K x N", "us", "of a copy"], made)


def of_cells(rows: list[dict], over: str, counts: tuple[int, ...]) -> str:
    """Geometric mean and least of ``over`` / us at these M, a share of a read as per cent."""
    here = [row[over] / row["us"] for row in rows if row["M"] in counts]
    mean, least = benchlib.geometric_mean(here), min(here)
    return f"{mean:.0%} (least {least:.0%})" if over == "read_us" else f"{mean:.2f} (least {least:.2f})"


def against_one(rows: list[dict]) -> str:
    """The most that up to 8 tokens take over one token: of means over the shapes, and of one shape."""
    times = {(row["M"], row["K"], row["N"]): row["us"] for row in rows}
    means = {M: benchlib.geometric_mean([times[M, *shape] for shape in SHAPES]) for M in (1, 2, 4, 8)}
    most = max(times[M, *shape] / times[1, *shape] for M in (2, 4, 8) for shape in SHAPES)
    return f"at most {max(means[M] / means[1] for M in (2, 4, 8)):.2f} (one shape {most:.2f})"


def largest_step(family: str) -> str:
    """Between two neighbours of the sweep, of all shapes."""
    found = []
    for shape in SHAPES:
        rows = sorted(
            (r for r in load(family) if r["case"] == "sweep" and (r["K"], r["N"]) == shape), key=lambda r: r["M"]
        )
        for one, two in itertools.pairwise(rows):
            found.append((max(one["us"] / two["us"], two["us"] / one["us"]), one["M"], two["M"], shape))
    most, first, second, (K, N) = max(found)
    return f"{most:.2f} ({K}x{N}, M = {first} to {second})"


def targets(_: str) -> str:
    """Both widths, groups of 16, against the targets."""
    wanted = (
        ("M = 1 .. 8, of a plain read", "65%", "read_us", (1, 2, 4, 8)), ("M = 16", "65%", "read_us", (16,)),
        ("M = 1 .. 16", "65%", "read_us", (1, 2, 4, 8, 16)), ("M = 64", "55%", "read_us", (64,)),
        ("M = 256, times bf16", "1.4", "bf16_us", (256,)), ("M = 1024", "1.6", "bf16_us", (1024,)),
        ("M = 4096", "1.6", "bf16_us", (4096,)), ("M = 8192", "1.6", "bf16_us", (8192,)),
        ("M of at least 1024", "1.6", "bf16_us", (1024, 4096, 8192)),
    )  # fmt: skip
    rows = {family: [r for r in load(family) if (r["case"], r["part"]) == ("g16", "linear")] for family in FAMILIES}
    made = [
        [what, target, *(of_cells(rows[f], over, counts) for f in FAMILIES)] for what, target, over, counts in wanted
    ]
    made.insert(3, ["M = 2 .. 8 against M = 1", "1.1", *(against_one(rows[family]) for family in FAMILIES)])
    made.append(["largest step over M = 1 .. 300", "1.5", *(largest_step(family) for family in FAMILIES)])
    return lines(["", "target", "4 bits", "6 bits"], made)


TABLES = {
    "targets": targets,
    "means": means,
    "shapes": shapes,
    "sweep": sweep,
    "resident": resident,
    "weights": weights,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    text = PAGE.read_text()
    made = MARKED.sub(lambda m: f"<!-- {m[1]} {m[2]} -->\n{TABLES[m[1]](m[2])}<!-- end -->", text)
    if args.write:
        PAGE.write_text(made)
    else:
        print("\n".join(m.group(0) for m in MARKED.finditer(made)))


if __name__ == "__main__":
    main()
