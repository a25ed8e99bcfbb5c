#!/usr/bin/env python3
"""The tables of docs/kernels/w4a8.md from benchmarks/results/h200/{w4a8,w6a8}.json: written between the page's markers.

python packages/kitchen-w4a8/bench/tables.py            print them
python packages/kitchen-w4a8/bench/tables.py --write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import benchlib

PAGE = benchlib.ROOT / "docs/kernels/w4a8.md"
MARKED = re.compile(r"<!-- (\w+) (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
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
    rows = [row for row in load(family) if row["part"] == "linear" and row["case"] != "sweep"]
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
    """Time over M, and the largest ratio between neighbours."""
    rows = sorted((row for row in load(family) if row["case"] == "sweep"), key=lambda row: row["M"])
    head = ["M", *(str(row["M"]) for row in rows)]
    return lines(
        head, [["us", *(f"{row['us']:.1f}" for row in rows)], ["bf16", *(f"{row['bf16_us']:.1f}" for row in rows)]]
    )


TABLES = {"means": means, "shapes": shapes, "sweep": sweep}


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
