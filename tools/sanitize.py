#!/usr/bin/env python3
"""Runs compute-sanitizer over every kernel instance: the programs packages/*/tests/sanitize_*.cu, each of which needs no torch.

    python tools/sanitize.py --build-only              elsewhere: makes build/sanitize/bin/<program>, for an H200
    python tools/sanitize.py                           on a machine with a GPU: builds what is missing, runs all four tools
    python tools/sanitize.py --only quantize --tools memcheck
    python tools/sanitize.py --jobs 8                  eight runs at a time: the tools keep the host busier than the GPU
    python tools/sanitize.py --jobs 8 --table          and a table of what was found, for docs/kernels/sanitizer.md

A program names the kernels that it needs in lines "// sources: files", relative to the repository. Objects are those of
tools/compile_check.py. A run may take two minutes; a line says how long it took and what it found.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compile_check

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / "build/sanitize/bin"
ARCH = "90a"
SECONDS_A_RUN = 120
TOOLS = {
    "memcheck": ["--leak-check", "no"],
    "racecheck": ["--racecheck-report", "all"],
    "initcheck": [],
    "synccheck": [],
}


class Report(NamedTuple):
    program: str
    tool: str
    status: int  # 0: the program found its results right and the tool found nothing
    seconds: float
    output: str

    @property
    def words(self) -> str:
        """The program's own count of cases, and the tool's summary."""
        found = re.findall(r"^\d+ cases, .*$|SUMMARY: .*$", self.output, re.MULTILINE)
        return "; ".join(found) or self.output.strip().rpartition("\n")[2]


def programs(only: str = "") -> list[Path]:
    """The sources of all programs whose path holds ``only``."""
    return [path for path in sorted(ROOT.glob("packages/*/tests/sanitize_*.cu")) if only in str(path)]


def binary(program: Path) -> Path:
    """Where a program is built: <package>-<program>."""
    return BIN / f"{program.parents[1].name.removeprefix('kitchen-')}-{program.stem.removeprefix('sanitize_')}"


def sources(program: Path) -> list[Path]:
    """The kernel files that a program names."""
    patterns = re.findall(r"^// sources: (.*)$", program.read_text(), re.MULTILINE)
    files = [sorted(ROOT.glob(pattern)) for line in patterns for pattern in line.split()]
    missing = [line for line, found in zip(" ".join(patterns).split(), files, strict=True) if not found]
    if missing:
        sys.exit(f"{program.relative_to(ROOT)}: no file matches {', '.join(missing)}")
    return [file for found in files for file in found]


def build(program: Path) -> Path:
    """The program's binary, made again if it or a kernel is newer. Exits with the compiler's words where it fails."""
    objects = []
    for source in sources(program):
        unit, failure, _ = compile_check.compile_unit(compile_check.Unit(source, (ARCH,)))
        if failure:
            sys.exit(f"{source.relative_to(ROOT)}:\n{failure}")
        objects.append(unit.object)
    target = binary(program)
    inputs = [program, *program.parent.glob("*.h"), *objects]
    if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    includes = compile_check.include_flags(program)
    folders = [f"-I{program.parents[1] / 'csrc'}", f"-I{program.parent}"]
    command = [
        "nvcc", "-std=c++17", "-O2", "--expt-relaxed-constexpr", f"-arch=sm_{ARCH}", "-cudart", "static", *includes, *folders,
        "-o", str(target), str(program), *map(str, objects),
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"{program.relative_to(ROOT)}:\n{made.stderr}")
    return target


def run(program: Path, tool: str) -> Report:
    """One program under one tool."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *TOOLS[tool], str(binary(program))]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_A_RUN)
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        status, output = 124, f"stopped after {SECONDS_A_RUN} s\n{(late.stdout or b'').decode()}"
    return Report(binary(program).name, tool, status, time.monotonic() - start, output)


def table(reports: list[Report]) -> str:
    """A row per program, a column per tool: what it found, and in how many seconds."""
    tools = [tool for tool in TOOLS if any(r.tool == tool for r in reports)]
    lines = ["| program | cases | " + " | ".join(tools) + " |", "| --- " * (len(tools) + 2) + "|"]
    for name in dict.fromkeys(r.program for r in reports):
        mine = {r.tool: r for r in reports if r.program == name}
        counted = {found for r in mine.values() for found in re.findall(r"^(\d+) cases,", r.output, re.MULTILINE)}
        cells = [cell(mine[tool]) if tool in mine else "not run" for tool in tools]
        lines.append(f"| `{name}` | {', '.join(sorted(counted))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(report: Report) -> str:
    """What a tool found in one program, in words, and the seconds."""
    if report.status == 124:
        return f"not done after {SECONDS_A_RUN} s"
    found = re.findall(r"SUMMARY: (.*)$", report.output, re.MULTILINE)
    words = found[-1] if found else f"status {report.status}"
    words = {"0 hazards displayed (0 errors, 0 warnings)": "0 hazards"}.get(words.strip(" ."), words.strip(" ."))
    return f"{words}, {report.seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose path holds this word")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--table", action="store_true", help="print a table of the results at the end")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--no-build", action="store_true", help="take the binaries that are there")
    args = parser.parse_args()
    found = programs(args.only)
    if not args.no_build:
        if shutil.which("nvcc") is None:
            sys.exit("no nvcc on PATH; build elsewhere with --build-only, and give --no-build here")
        for program in found:
            print(f"{build(program).relative_to(ROOT)}", flush=True)
    if args.build_only:
        return
    if shutil.which("compute-sanitizer") is None:
        sys.exit("no compute-sanitizer on PATH")
    reports = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for running in [pool.submit(run, program, tool) for tool in args.tools for program in found]:
            report = running.result()
            reports.append(report)
            verdict = "ok" if report.status == 0 else f"status {report.status}"
            print(
                f"{report.tool:10} {report.program:28} {report.seconds:6.1f} s  {verdict}: {report.words}", flush=True
            )
            if report.status:
                print(report.output[:6000], flush=True)
    if args.table:
        print(table(reports))
    sys.exit(max(report.status for report in reports))


if __name__ == "__main__":
    main()
