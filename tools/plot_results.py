#!/usr/bin/env python3
"""Plots from the recorded results: SVG files in docs/kernels, made from benchmarks/results/<gpu>/*.json and nothing else.

    python tools/plot_results.py                    every plot for which there are results
    python tools/plot_results.py int8 int8_sweep    only these

Needs matplotlib. The files are the same whenever the results are: no dates, no random ids. At most 100 KB each.

- ``<family>.svg`` of a family with bf16 times: speed over bf16 by M, geometric mean over the shapes, and its range; for each
  case and part, and for comfy-kitchen where it was measured. Shapes whose N or K is no multiple of 8 are left out: bf16 has no
  fast kernel for them.
- ``quantize.svg``: share of the floor (a copy of the same bytes) by case, for each K.
- ``int8_sweep.svg``, ``awq_sweep.svg``, ``w4a8_sweep.svg`` and ``w6a8_sweep.svg``: time over M up to 300.
- ``end_to_end.svg``: whole models by format: quality, time of a step, memory, and a decode step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path

import benchlib
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 100_000
STYLE = {
    "svg.hashsalt": "kitchen", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3,
    "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
}  # fmt: skip


def load(results: Path, family: str) -> dict:
    return json.loads((results / f"{family}.json").read_text())


def source_line(found: dict) -> str:
    """What was measured, for the title."""
    return f"{found['gpu']}, driver {found['driver']}, torch {found['torch']}, {found['date']}"


def draw_ratio(axis, label: str, ratios: dict[int, list[float]], style: str, band: bool = True) -> None:
    """A line of geometric means over M, and the range over the shapes as a band."""
    rows = sorted(ratios)
    means = [benchlib.geometric_mean(ratios[m]) for m in rows]
    line = axis.plot(rows, means, style, marker="o", markersize=3, linewidth=1.6 if band else 0.9, label=label)
    if band:
        low, high = [min(ratios[m]) for m in rows], [max(ratios[m]) for m in rows]
        axis.fill_between(rows, low, high, color=line[0].get_color(), alpha=0.12, linewidth=0)


def plot_ratios(found: dict, family: str) -> plt.Figure:
    """Speed over bf16 by M. The case that was measured at most cells has bands, and its peer is shown."""
    rows = [row for row in found["rows"] if row["bf16_us"] is not None and row["N"] % 8 == 0 and row["K"] % 8 == 0]
    main = Counter(row["case"] for row in rows).most_common(1)[0][0]
    ours: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    peers: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        ours[row["case"], row["part"]][row["M"]].append(row["bf16_us"] / row["us"])
        if row["ck_us"] and row["case"] == main and row["part"] == "linear":
            peers[row["M"]].append(row["bf16_us"] / row["ck_us"])
    figure, axis = plt.subplots(figsize=(8.5, 4))
    for (case, part), ratios in sorted(ours.items(), key=lambda item: (item[0][0] != main, item[0])):
        draw_ratio(axis, f"{case} ({part})", ratios, "-", case == main)
    if peers:
        draw_ratio(axis, f"comfy-kitchen, {main}", peers, "k--")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    counts = sorted({row["M"] for row in rows})
    axis.set_xticks(counts, [str(m) if i == 0 or m >= 1.25 * counts[i - 1] else "" for i, m in enumerate(counts)])
    axis.minorticks_off()
    axis.set_xlabel("M, rows of x")
    axis.set_ylabel("times bf16, mean and range over shapes")
    axis.set_title(f"{family}: {source_line(found)}", fontsize=9)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def plot_quantize(found: dict, family: str) -> plt.Figure:
    """Share of the floor by M, a panel for each K; the tensorwise quantizer's floor is a read and a copy."""
    widths = sorted({row["K"] for row in found["rows"]})
    figure, axes = plt.subplots(1, len(widths), figsize=(2.6 * len(widths), 3.4), sharey=True)
    for axis, K in zip(axes, widths, strict=True):
        for case in dict.fromkeys(row["case"] for row in found["rows"] if row["K"] == K):
            mine = sorted((r["M"], floor_us(r) / r["us"]) for r in found["rows"] if (r["case"], r["K"]) == (case, K))
            axis.plot(*zip(*mine, strict=True), marker="o", markersize=3, label=case)
        axis.axhline(0.85, color="black", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_title(f"K = {K}", fontsize=9)
        axis.set_xlabel("M")
    axes[0].set_ylabel("share of the floor")
    axes[0].legend(fontsize=7)  # the narrowest has every case
    figure.suptitle(f"{family}: {source_line(found)}", fontsize=9)
    return figure


def floor_us(row: dict) -> float:
    """The least time of a quantizer's row by its yardsticks."""
    return row["copy_us"] + (row["read_us"] if row["case"] == "tensorwise" else 0.0)


def plot_sweep(found: dict, family: str) -> plt.Figure:
    """Time over M, a panel for each shape."""
    figure, [axes] = plt.subplots(1, len(found["rows"]), figsize=(4.5 * len(found["rows"]), 3.4), squeeze=False)
    for axis, row in zip(axes, found["rows"], strict=True):
        for column, label in (
            ("us", f"{family.removesuffix('_sweep')}_linear"),
            ("bf16_us", "bf16 F.linear"),
            ("ck_us", "comfy-kitchen"),
        ):
            if row[column][0] is not None:
                axis.plot(row["M"], row[column], linewidth=1, label=label)
        changes = [m for m, a, b in zip(row["M"][1:], row["kernel"], row["kernel"][1:], strict=False) if a != b]
        for m in changes:
            axis.axvline(m, color="gray", linewidth=0.6, linestyle=":")
        axis.set_ylim(0)
        axis.set_xlabel("M (dotted: another kernel from here on)")
        axis.set_title(f"K = {row['K']}, N = {row['N']}", fontsize=9)
    axes[0].set_ylabel("us")
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{family}: {source_line(found)}", fontsize=9)
    return figure


def sweeps_of(found: dict) -> dict:
    """The rows of case "sweep" of a family as plot_sweep takes them: one for each shape, with lists over M."""
    shapes: dict[tuple[int, int], list[dict]] = defaultdict(list)
    for row in found["rows"]:
        if row["case"] == "sweep":
            shapes[row["K"], row["N"]].append(row)
    columns = ("M", "us", "bf16_us", "ck_us", "kernel")
    rows = [
        {"K": K, "N": N} | {column: [r[column] for r in sorted(rows, key=lambda r: r["M"])] for column in columns}
        for (K, N), rows in shapes.items()
    ]
    return {**found, "rows": rows}


def draw_bars(axis, rows: list[dict], columns: dict[str, str], scale: float, what: str) -> None:
    """A group of bars for each format, one for each column that was measured."""
    shown = {column: label for column, label in columns.items() if any(row.get(column) is not None for row in rows)}
    width = 0.8 / len(shown)
    for place, (column, label) in enumerate(shown.items()):
        heights = [math.nan if row.get(column) is None else row[column] / scale for row in rows]
        at = [i + (place - (len(shown) - 1) / 2) * width for i in range(len(rows))]
        colour = "0.6" if label.startswith("bf16") else "black" if label.startswith("comfy") else f"C{place}"
        bars = axis.bar(at, heights, width, label=label, color=colour, alpha=0.6 if "fused" in label else 1.0)
        axis.bar_label(bars, [f"{h:.3g}" for h in heights], fontsize=5, rotation=90, padding=2)
    axis.set_xticks(range(len(rows)), [row["case"] for row in rows])
    axis.margins(y=0.22)
    axis.set_ylabel(what)
    axis.grid(axis="x", visible=False)
    axis.legend(fontsize=6, ncols=2)


def draw_speeds(axis, rows: list[dict], columns: dict[str, str], what: str) -> None:
    """Bars of bf16's time over each column's."""
    speeds = [
        {"case": row["case"], **{column: row["bf16_us"] / row[column] for column in columns if row.get(column)}}
        for row in rows
    ]
    draw_bars(axis, speeds, columns, 1, what)
    axis.axhline(1, color="black", linewidth=0.8)


def plot_end_to_end(found: dict, family: str) -> plt.Figure:
    """Quality and time of the image model, its memory, and the decode step."""
    image, decode = ([r for r in found["rows"] if r["model"] == model] for model in ("image", "decode"))
    figure, axes = plt.subplots(2, 2, figsize=(10, 7))
    quality = {
        "psnr_dequantized": "to the dequantized weights", "psnr_dequantized_ck": "comfy-kitchen, to the same",
        "psnr_original": "to the original", "psnr_original_ck": "comfy-kitchen, to the original",
    }  # fmt: skip
    draw_bars(axes[0][0], image, quality, 1, "image: PSNR, dB")
    axes[0][0].axhline(image[0]["psnr_bf16_to_fp32"], color="gray", linewidth=0.8, linestyle=":")
    draw_speeds(axes[0][1], image, {"us": "kitchen", "ck_us": "comfy-kitchen"}, "image: times bf16")
    memory = [
        {"case": row["case"], **{f"total{of}": row[f"weight_bytes{b}"] + row[f"working_bytes{of}"]
                                 for of, b in (("", ""), ("_ck", ""), ("_bf16", "_bf16")) if f"working_bytes{of}" in row}}
        for row in image
    ]  # fmt: skip
    names = {"total": "kitchen", "total_ck": "comfy-kitchen", "total_bf16": "bf16"}
    draw_bars(axes[1][0], memory, names, 2**30, "image: weights and working memory, GiB")
    forms = {
        "us": "kitchen", "fused_us": "kitchen, fused", "ck_us": "comfy-kitchen", "ck_fused_us": "comfy-kitchen, fused",
    }  # fmt: skip
    draw_speeds(axes[1][1], decode, forms, "decode step: times bf16")
    figure.suptitle(f"{family}: {source_line(found)} (dotted: bf16 to fp32)", fontsize=9)
    return figure


SPECIAL = {"quantize": plot_quantize, "int8_sweep": plot_sweep, "awq_sweep": plot_sweep, "end_to_end": plot_end_to_end}
NOT_PLOTTED = ("accuracy", "gpu_check", "host_time", "tensor_parallel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all that have results")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/h200")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/kernels")
    args = parser.parse_args()
    families = args.families or [p.stem for p in sorted(args.results.glob("*.json")) if p.stem not in NOT_PLOTTED]
    for family in families:
        found = load(args.results, family)
        figures = {family: SPECIAL.get(family, plot_ratios)}
        if any(row.get("case") == "sweep" for row in found["rows"]) and family not in SPECIAL:
            figures[f"{family}_sweep"] = lambda found, name: plot_sweep(sweeps_of(found), name)
        for name, plot in figures.items():
            with plt.rc_context(STYLE):
                figure = plot(found, name)
                path = args.out / f"{name}.svg"
                figure.savefig(path, metadata={"Date": None, "Creator": None})
                plt.close(figure)
            size = path.stat().st_size
            print(f"{path}: {size / 1000:.0f} KB")
            if size > MOST_BYTES:
                sys.exit(f"{path} is larger than {MOST_BYTES} bytes")


if __name__ == "__main__":
    main()
