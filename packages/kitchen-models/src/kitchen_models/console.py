"""What the subcommands print: tables and a progress bar, coloured on a terminal, plain text elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

SECONDS_BEFORE_THE_FIRST_LINE = 3.0  # of progress, where no bar can be drawn
SECONDS_BETWEEN_LINES = 20.0


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table on stdout: by rich on a terminal, else aligned text of full width, for pipes and files."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right" if name in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(len(name), *(len(row[i]) for row in rows)) if rows else len(name) for i, name in enumerate(columns)]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ]
        print("  ".join(cells).rstrip())


def unit_of(count: float) -> tuple[str, int]:
    """The unit that a number of bytes is best told in, and its bytes."""
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    return next(((name, unit) for name, unit in units.items() if count < 1024 * unit), ("GiB", 2**30))


def size(count: float) -> str:
    """Bytes for people: 1.50 MiB."""
    name, unit = unit_of(count)
    return f"{count:.0f} B" if unit == 1 else f"{count / unit:.2f} {name}"


def counted(count: int, word: str) -> str:
    """1 layer, 2 layers, 1 matrix, 2 matrices."""
    plural = word.removesuffix("x") + "ces" if word.endswith("x") else word + "s"
    return f"{count} {word if count == 1 else plural}"


def grouped(found: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each reason of the pairs (name, reason): the first name that has it, and how many more."""
    names: dict[str, list[str]] = {}
    for name, reason in found:
        names.setdefault(reason, []).append(name)
    return [f"{own[0]}{f' and {len(own) - 1} more' if len(own) > 1 else ''}: {reason}" for reason, own in names.items()]


def parse_size(text: str) -> int:
    """Bytes of "500MB", "5GB", "4GiB" or a number. Raises UnsupportedError for anything else."""
    from kitchen_core.errors import UnsupportedError

    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    digits = text.rstrip("BbKkMmGgIi ")
    unit = text[len(digits) :].strip().upper()
    if unit not in units or not digits.replace(".", "", 1).isdecimal():
        raise UnsupportedError(
            f"a size is a number of bytes, or a number with KB, MB, GB, KiB, MiB or GiB, got {text!r}"
        )
    return int(float(digits) * units[unit])


def _nothing(what: str, done: int, total: int) -> None:
    """Progress that nobody is told of."""


def _lines() -> Callable[[str, int, int], None]:
    due = time.monotonic() + SECONDS_BEFORE_THE_FIRST_LINE

    def report(what: str, done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + SECONDS_BETWEEN_LINES
            print(f"kitchen: {done / max(total, 1):.0%}, {what}", file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A function (what, bytes done, bytes in all) that moves a bar on stderr; where that is no terminal it adds lines at times.

    Of several processes that torchrun started, the first one speaks.
    """
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        yield _lines() if os.environ.get("RANK", "0") == "0" else _nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(True), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what[-40:].rjust(40), completed=done, total=max(total, 1))

        yield report
