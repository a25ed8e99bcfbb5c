"""The README's table of what runs where, made from the registry with simulated devices.

    python tools/support_table.py            print it
    python tools/support_table.py --write    put it between the markers of README.md

It shows release wheels: extensions are taken as built for the release architectures, whatever is built here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from kitchen_core import explain, simulate
from kitchen_core.testing import RELEASE_ARCHS
from kitchen_core.typical import typical

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- support table: made by tools/support_table.py -->", "<!-- end of support table -->"

EXTENSIONS = (
    "kitchen_int8",
    "kitchen_w4a8",
    "kitchen_svdquant",
    "kitchen_awq",
)  # import names of the packages that have one
VOLTA = "kitchen_fallback_volta"  # the one that is built for sm_70 alone
DEVICES = {
    "V100 (7.0)": ("sm_70", None),
    "GTX 16xx (7.5)": ("sm_75", "NVIDIA GeForce GTX 1660"),
    "T4, RTX 20 (7.5)": ("sm_75", None),
    "A100, RTX 30, 40 (8.x)": ("sm_80", None),
    "H100, H200 (9.0)": ("sm_90", None),
    "B200 (10.0)": ("sm_100", None),
    "RTX 50 (12.0)": ("sm_120", None),
}
OPS = {
    "quantize_and_rotate_rowwise": "INT8 activation quantizer",
    "int8_scaled_mm": "INT8 GEMM",
    "w4a8_scaled_mm": "W4A8, W6A8 GEMM",
    "scaled_mm_svdquant_w4a4": "SVDQuant GEMM",
    "awq_linear": "AWQ linear",
}
ROWS = (
    *range(1, 65),
    96,
    128,
    129,
    192,
    256,
    257,
    384,
    512,
    768,
    1024,
    2048,
    4096,
    8192,
)  # between equal ones: the same


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Within the block every extension says that it was built for the release architectures."""
    info = {"has_cuda": True, "archs": list(RELEASE_ARCHS), "nvcc": "13.0", "reason": ""}
    with contextlib.ExitStack() as stack:
        for name in (*EXTENSIONS, VOLTA):
            extension = importlib.import_module(f"{name}._extension").EXTENSION
            built = info | {"archs": ["70-real"]} if name == VOLTA else info
            stack.enter_context(mock.patch.dict(extension.__dict__, build_info=built))
        yield


def table() -> str:
    """The table in markdown: a row per op, a column per kind of GPU, in each cell the kernels and up to which M each runs."""
    lines = ["| op | " + " | ".join(DEVICES) + " |", "| --- |" + " --- |" * len(DEVICES)]
    with released():
        for op, title in OPS.items():
            cells = []
            for arch, name in DEVICES.values():
                with simulate(arch, name):
                    cells.append(by_rows(op))
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_rows(op: str) -> str:
    """The kernels that serve a typical layer on the simulated device, each but the last with the M up to which it does."""
    found = [(ROWS[0], chosen(op, ROWS[0]))]
    for rows in ROWS[1:]:
        name = chosen(op, rows)
        if name != found[-1][1]:
            low, high = ROWS[ROWS.index(rows) - 1], rows  # the last M of the old kernel is in [low, high)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if chosen(op, middle) == found[-1][1] else (low, middle)
            found[-1] = (low, found[-1][1])
            found.append((rows, name))
    return "; ".join([*(f"M to {last}: {name}" for last, name in found[:-1]), found[-1][1]])


def chosen(op: str, rows: int) -> str:
    """What runs one call with so many rows, as the table says it."""
    found = explain(op, device="cuda:0", **typical(op, rows)).chosen
    return "eager" if found.slow else found.id.removeprefix("core/")


def written(text: str) -> str:
    """README text with the table between its markers."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        README.write_text(written(README.read_text()))
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
