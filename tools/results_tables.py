#!/usr/bin/env python3
"""Tables in docs made from the recorded results, between the markers that name them.

    python tools/results_tables.py            say which pages are out of date
    python tools/results_tables.py --write    write them

A page holds ``<!-- table NAME -->`` and, after the table, ``<!-- end -->``. Names: ``int8 CASE`` (means over the announced
shapes by M), ``int8 CASE PART shapes`` (each shape by M), ``int8 CASE PART few`` (M of at most 64), ``svdquant RANK`` and
``awq GROUP`` (means over the shapes by M), both with ``shapes`` behind (each shape by M), ``swiglu`` (means over the announced
shapes), ``swiglu HxI`` (one hidden and intermediate width), ``volta wmma`` and ``volta torch`` (each shape by M), ``quantize``
(shares of the floor), ``accuracy``, ``host_time``, ``end_to_end PART`` (image, quality, memory, decode, errors) and
``tensor_parallel`` (each format), ``tensor_parallel outputs`` (a part of a layer alone).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import benchlib

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/h200"
FAMILIES = {"swiglu": "int8_swiglu"}  # the first word of a table, and its results where they are not named alike
PAGES = ROOT / "docs"
MARKED = re.compile(r"<!-- table ([^>]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def load(family: str) -> list[dict]:
    return json.loads((RESULTS / f"{family}.json").read_text())["rows"]


def bench(name: str):
    """A bench of kitchen-int8 as a module: its shapes."""
    spec = importlib.util.spec_from_file_location(f"{name}_bench", ROOT / f"packages/kitchen-int8/bench/{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table, the header first."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def mean_ratio(rows: list[dict], over: str) -> str:
    """Geometric mean and least of rows' ``over`` / us; a dash where it was not measured."""
    ratios = [row[over] / row["us"] for row in rows if row[over]]
    return f"{benchlib.geometric_mean(ratios):.2f} ({min(ratios):.2f})" if len(ratios) == len(rows) and rows else "–"


def int8_means(case: str) -> str:
    """By M: the linear and the GEMM against bf16, the peer and a plain read; mean (and least) over the announced shapes."""
    shapes = bench("int8").SHAPES
    found = [r for r in load("int8") if r["case"] == case and (r["K"], r["N"]) in shapes]
    head = [
        "M",
        "linear: times bf16",
        "times comfy-kitchen",
        "share of a plain read",
        "GEMM: times bf16",
        "share of a plain read",
    ]
    lines = []
    for M in sorted({r["M"] for r in found}):
        linear, gemm = ([r for r in found if (r["M"], r["part"]) == (M, part)] for part in ("linear", "gemm"))
        columns = [(linear, "bf16_us"), (linear, "ck_us"), (linear, "read_us"), (gemm, "bf16_us"), (gemm, "read_us")]
        lines.append([str(M), *[mean_ratio(rows, over) for rows, over in columns]])
    return markdown(head, lines)


def int8_shapes(case: str, part: str) -> str:
    """By M and shape: microseconds, and times bf16."""
    found = {(r["K"], r["N"], r["M"]): r for r in load("int8") if (r["case"], r["part"]) == (case, part)}
    shapes = list(dict.fromkeys(key[:2] for key in found))
    lines = []
    for M in sorted({key[2] for key in found}):
        cells = [found.get((*shape, M)) for shape in shapes]
        lines.append([str(M), *["–" if r is None else f"{r['us']:.1f}, {r['bf16_us'] / r['us']:.2f}" for r in cells]])
    return markdown(["M", *[f"{K}x{N}" for K, N in shapes]], lines)


def int8_few(case: str, part: str) -> str:
    """At the announced shapes, for M of at most 64: microseconds and the share of a plain read; the mean share at the end."""
    shapes = bench("int8").SHAPES
    found = {(r["K"], r["N"], r["M"]): r for r in load("int8") if (r["case"], r["part"]) == (case, part)}
    lines = []
    for M in sorted({key[2] for key in found if key[2] <= 64}):
        rows = [found[(*shape, M)] for shape in shapes]
        shares = [r["read_us"] / r["us"] for r in rows]
        cells = [f"{r['us']:.1f}, {share:.0%}" for r, share in zip(rows, shares, strict=True)]
        lines.append([str(M), *cells, f"{benchlib.geometric_mean(shares):.0%}"])
    return markdown(["M", *[f"{K}x{N}" for K, N in shapes], "mean"], lines)


def svdquant_means(rank: int) -> str:
    """By M: the linear against bf16, the peer and a plain read, and the GEMM against bf16; mean (and least) over the shapes."""
    found = [r for r in load("svdquant") if r["rank"] == rank]
    lines = []
    for M in sorted({r["M"] for r in found}):
        linear, gemm = ([r for r in found if (r["M"], r["part"]) == (M, part)] for part in ("linear", "gemm"))
        columns = [(linear, "bf16_us"), (linear, "ck_us"), (linear, "read_us"), (gemm, "bf16_us")]
        lines.append([str(M), *[mean_ratio(rows, over) for rows, over in columns]])
    head = ["M", "linear: times bf16", "times comfy-kitchen", "share of a plain read", "scaled_mm alone: times bf16"]
    return markdown(head, lines)


def svdquant_shapes(rank: int) -> str:
    """By M and shape: microseconds of the linear (its quantizer, its GEMM), and times bf16."""
    found = {(r["K"], r["N"], r["M"], r["part"]): r for r in load("svdquant") if r["rank"] == rank}
    shapes = list(dict.fromkeys(key[:2] for key in found))
    lines = []
    for M in sorted({key[2] for key in found}):
        cells = []
        for shape in shapes:
            linear, gemm, quant = (found[(*shape, M, part)] for part in ("linear", "gemm", "quant"))
            ratio = linear["bf16_us"] / linear["us"]
            cells.append(f"{linear['us']:.1f} ({quant['us']:.1f}, {gemm['us']:.1f}), {ratio:.2f}")
        lines.append([str(M), *cells])
    return markdown(["M", *[f"{K}x{N}" for K, N in shapes]], lines)


def awq_means(group: int) -> str:
    """By M: against bf16, a plain read and the best peer; mean (and least) over the shapes."""
    found = [r for r in load("awq") if r["group"] == group]
    lines = []
    for M in sorted({r["M"] for r in found}):
        rows = [r | {"peer_us": (r["best_peer"] or {"us": None})["us"]} for r in found if r["M"] == M]
        ratios = [mean_ratio(rows, over) for over in ("read_us", "bf16_us", "peer_us")]
        lines.append([str(M), *ratios, ", ".join(sorted({r["kernel"].removeprefix("awq/") for r in rows}))])
    return markdown(["M", "share of a plain read", "times bf16", "times the best peer", "route"], lines)


def awq_shapes(group: int) -> str:
    """By M and shape: microseconds, share of a plain read, times bf16."""
    found = {(r["K"], r["N"], r["M"]): r for r in load("awq") if r["group"] == group}
    shapes = list(dict.fromkeys(key[:2] for key in found))
    lines = []
    for M in sorted({key[2] for key in found}):
        rows = [found[(*shape, M)] for shape in shapes]
        cells = [f"{r['us']:.1f}, {r['read_us'] / r['us']:.0%}, {r['bf16_us'] / r['us']:.2f}" for r in rows]
        lines.append([str(M), *cells])
    return markdown(["M", *[f"{K}x{N}" for K, N in shapes]], lines)


def volta_shapes(case: str) -> str:
    """Each shape by M: the compiled kernel against fp16 GEMMs (wmma), or the torch path with and without a graph (torch)."""
    found = {(r["K"], r["N"], r["M"], r["part"]): r for r in load("volta") if r["case"] == case}
    lines = []
    for K, N, M in dict.fromkeys(key[:3] for key in found):
        gemm, linear = found[K, N, M, "gemm"], found[K, N, M, "linear"]
        if case == "wmma":
            ratios = [gemm[over] / gemm["us"] for over in ("wmma_fp16_us", "wmma_fp16_one_block_us", "fp16_us")]
            cells = [f"{gemm['us']:.1f}", *[f"{ratio:.2f}" for ratio in ratios], f"{linear['us']:.1f}"]
        else:
            cells = [f"{gemm['eager_us']:.0f}", f"{gemm['fp16_us'] / gemm['eager_us']:.2f}", f"{gemm['us']:.0f}",
                     f"{linear['eager_us']:.0f}", f"{linear['peak_bytes'] / 2**20:.1f}"]  # fmt: skip
        lines.append([f"{K} x {N}", str(M), *cells])
    head = {
        "wmma": "kernel, us|of plain|of plain, one block|of fp16 `F.linear`|whole linear, us",
        "torch": "torch path, GEMM, us|of fp16 `F.linear`|in a graph, us|whole linear, us|its peak, MiB",
    }[case]
    return markdown(["K x N", "M", *head.split("|")], lines)


def host_time() -> str:
    """Microseconds of the host by what is called and M."""
    found = {(r["case"], r["M"]): r for r in load("host_time")}
    cases, rows = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    lines = [[case, *[f"{found[case, M]['us']:.1f}" for M in rows]] for case in cases]
    return markdown(["", *[f"M = {M}" for M in rows]], lines)


def quantize_shares() -> str:
    """By case: microseconds of one row, then the share of the floor at many rows, and times the peer."""
    found = {(r["case"], r["K"], r["M"]): r for r in load("quantize")}
    cases, widths = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    head = ["case", "K", "us at M = 1", "share at 4096", "at 8192", "times comfy-kitchen at 8192"]
    lines = []
    for case in cases:
        for K in sorted(K for K in widths if (case, K, 1) in found):
            one, many, most = (found[case, K, M] for M in (1, 4096, 8192))
            shares = [
                f"{(r['copy_us'] + (r['read_us'] if case == 'tensorwise' else 0)) / r['us']:.0%}" for r in (many, most)
            ]
            peer = f"{most['ck_us'] / most['us']:.1f}" if most["ck_us"] else "–"
            lines.append([case, str(K), f"{one['us']:.1f}", *shares, peer])
    return markdown(head, lines)


def accuracy() -> str:
    """Relative errors in percent, the worst of the seeds."""
    found = load("accuracy")
    names = {"err": "ours", "ck_err": "comfy-kitchen", "ck_err_same_weight": "comfy-kitchen on our weight codes",
             "err_weight": "ours, weight alone", "err_activation": "ours, activation alone"}  # fmt: skip
    lines = []
    for case, dtype, M in sorted({(r["case"], r["dtype"], r["M"]) for r in found}):
        mine = [r for r in found if (r["case"], r["dtype"], r["M"]) == (case, dtype, M)]
        worst = [max((r[name] for r in mine if r[name] is not None), default=None) for name in names]
        lines.append([case, dtype, str(M), *["–" if w is None else f"{100 * w:.3f}" for w in worst]])
    return markdown(["case", "dtype", "M", *names.values()], lines)


SWIGLU = {
    "bf16_us": "times bf16", "bf16_eager_us": "bf16, three GEMMs", "two_call_us": "our two calls",
    "three_gemm_us": "our three GEMMs", "ck_us": "comfy-kitchen", "read_us": "plain read",
}  # fmt: skip


def swiglu_means() -> str:
    """By M: the other forms' times over the fused MLP's, mean (and least) over the announced shapes."""
    shapes = bench("int8_swiglu").SHAPES
    found = [r for r in load("int8_swiglu") if r["part"] == "linear" and (r["K"], r["N"]) in shapes]
    lines = []
    for M in sorted({r["M"] for r in found}):
        mine = [r for r in found if r["M"] == M]
        lines.append([str(M), *[mean_ratio(mine, over) for over in SWIGLU]])
    return markdown(["M", *SWIGLU.values()], lines)


def swiglu_shape(shape: str) -> str:
    """By M, of one hidden x intermediate width: microseconds of all forms, and of the first GEMM."""
    found = {(r["M"], r["part"]): r for r in load("int8_swiglu") if f"{r['K']}x{r['N']}" == shape}
    forms = {"us": "fused", **SWIGLU, "bf16_us": "bf16"}
    lines = []
    for M in sorted({M for M, _ in found}):
        whole, gemm = found[M, "linear"], found[M, "gemm"]
        cells = ["–" if whole[form] is None else f"{whole[form]:.1f}" for form in forms]
        cells += [f"{gemm['us']:.1f}", f"{gemm['bf16_us']:.1f}", whole["kernel"].replace("int8/", "")]
        lines.append([str(M), *cells])
    return markdown(["M", *forms.values(), "first GEMM", "bf16 GEMM and product", "kernels"], lines)


def number(value: float | None, shown: str, unit: float = 1.0) -> str:
    """A number in units, or a dash where it was not measured."""
    return "–" if value is None else format(value / unit, shown)


def linears_alone(row: dict, column: str) -> str:
    """How many times bf16, with the time of what is no linear taken off both."""
    rest = row.get("rest_us")
    return "–" if rest is None else f"{(row['bf16_us'] - rest) / (row[column] - rest):.2f}"


WHOLE_MODELS = {
    "image": "format|step, ms|comfy-kitchen|bf16|all but the linears|times bf16|of the linears alone",
    "quality": "format|to dequantized, dB|comfy-kitchen|to the original, dB|comfy-kitchen",
    "memory": "format|weights, GiB|bf16|working memory, MiB|comfy-kitchen|bf16",
    "decode": "format|us|fused|comfy-kitchen|fused|bf16|all but the linears|times bf16|fused|of the linears alone",
    "errors": "format|kitchen|fused|comfy-kitchen|fused",
}


def end_to_end(part: str) -> str:
    """By format: time, quality and memory of the image model; time and errors of the decode step."""
    rows = [r for r in load("end_to_end") if r["model"] == ("decode" if part in ("decode", "errors") else "image")]
    lines = []
    for r in rows:
        if part == "image":
            cells = [number(r.get(k), ".2f", 1e3) for k in ("us", "ck_us", "bf16_us", "rest_us")]
            cells += [f"{r['bf16_us'] / r['us']:.2f}", linears_alone(r, "us")]
        elif part == "quality":
            names = ("psnr_dequantized", "psnr_dequantized_ck", "psnr_original", "psnr_original_ck")
            cells = [number(r.get(k), ".1f") for k in names]
        elif part == "memory":
            cells = [number(r[k], ".2f", 2**30) for k in ("weight_bytes", "weight_bytes_bf16")]
            cells += [number(r.get(f"working_bytes{of}"), ".0f", 2**20) for of in ("", "_ck", "_bf16")]
        elif part == "decode":
            cells = [number(r.get(k), ".0f") for k in ("us", "fused_us", "ck_us", "ck_fused_us", "bf16_us", "rest_us")]
            cells += [*[f"{r['bf16_us'] / r[k]:.2f}" for k in ("us", "fused_us")], linears_alone(r, "us")]
        else:
            cells = [number(r.get(f"rel_dequantized{of}"), ".4f") for of in ("", "_fused", "_ck", "_ck_fused")]
        lines.append([r["case"], *cells])
    return markdown(WHOLE_MODELS[part].split("|"), lines)


def tensor_parallel() -> str:
    """By format and rows: bits, errors and times on one device and on all."""
    head = "format|M|outputs bit-equal|error of one device|inputs divided|sum in bf16|one device, us|all|sum in bf16"
    lines = [
        [r["case"], str(r["M"]), "yes" if r["colwise_bit_equal"] else f"no, by {r['colwise_rel_difference']:.1e}",
         *[number(r.get(k), ".5f") for k in ("err_one", "err_rowwise", "err_bf16_sum")],
         *[number(r.get(k), ".1f") for k in ("us_one", "us", "us_bf16_sum")]]
        for r in load("tensor_parallel")
    ]  # fmt: skip
    return markdown(head.split("|"), lines)


def divided_outputs() -> str:
    """Of formats whose sums are floats: a layer whole, and a part of it with sums in either order."""
    head = "format|M|one device, us|a part|in an order of its own"
    lines = [
        [r["case"], str(r["M"]), *[number(r[k], ".1f") for k in ("us_up_one", "us_up", "us_up_own_order")]]
        for r in load("tensor_parallel")
        if "us_up" in r
    ]
    return markdown(head.split("|"), lines)


def table(name: str) -> str:
    """The table that a marker asks for."""
    words = name.split()
    if words[0] == "int8":
        if words[-1] == "few":
            return int8_few(*words[1:3])
        return int8_shapes(*words[1:3]) if words[-1] == "shapes" else int8_means(words[1])
    if words[0] == "svdquant":
        return svdquant_shapes(int(words[1])) if words[-1] == "shapes" else svdquant_means(int(words[1]))
    if words[0] == "volta":
        return volta_shapes(words[1])
    if words[0] == "awq":
        return awq_shapes(int(words[1])) if words[-1] == "shapes" else awq_means(int(words[1]))
    if words[0] == "swiglu":
        return swiglu_shape(words[1]) if words[1:] else swiglu_means()
    if words[0] == "end_to_end":
        return end_to_end(words[1])
    if words[0] == "tensor_parallel":
        return divided_outputs() if words[1:] else tensor_parallel()
    return {"quantize": quantize_shares, "accuracy": accuracy, "host_time": host_time}[name]()


def written(text: str) -> str:
    """A page with its tables made anew; a table whose results have not been recorded stays as it is."""

    def remade(match: re.Match) -> str:
        family = match[1].split()[0]
        if not (RESULTS / f"{FAMILIES.get(family, family)}.json").exists():
            return match[0]
        return f"<!-- table {match[1]} -->\n{table(match[1])}<!-- end -->"

    return MARKED.sub(remade, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    old = [page for page in sorted(PAGES.rglob("*.md")) if written(page.read_text()) != page.read_text()]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'written' if args.write else 'out of date'}")
        if args.write:
            page.write_text(written(page.read_text()))
    sys.exit(bool(old) and not args.write)


if __name__ == "__main__":
    main()
