"""compute-sanitizer over every kernel instance, by the programs packages/*/tests/sanitize_*.cu.

pytest --run-slow -m sanitizer, on a GPU. The results that were found are in docs/kernels/sanitizer.md.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(ROOT.glob("packages/*/tests/sanitize_*.cu"))
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/csrc"))


@pytest.fixture(scope="module")
def sanitize():
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools/sanitize.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_kernel_file_is_in_a_program(sanitize, package):
    """A new kernel is compiled into a program, or included in one, or this fails."""
    programs = [program for program in PROGRAMS if package in program.parents]
    assert programs
    covered = {source for program in programs for source in sanitize.sources(program)}
    included = {name for program in programs for name in re.findall(r'#include "(.+\.cu)"', program.read_text())}
    kernels = [path for path in package.glob("csrc/**/*.cu") if path not in covered]
    assert not {str(path.relative_to(package)) for path in kernels if path.name not in included}


def test_the_table_says_what_each_tool_found(sanitize):
    said = "36 cases, 0 failed\n========= ERROR SUMMARY: 0 errors\n"
    race = "36 cases, 0 failed\n========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
    reports = [
        sanitize.Report("int8-gemm", "memcheck", 0, 3.2, said),
        sanitize.Report("int8-gemm", "racecheck", 9, 8.0, race),
        sanitize.Report("awq-awq", "racecheck", 124, 120.0, "stopped after 120 s\n"),
    ]
    head, rule, *rows = sanitize.table(reports).splitlines()
    assert head == "| program | cases | memcheck | racecheck |"
    assert rule == "| --- | --- | --- | --- |"
    assert rows == [
        "| `int8-gemm` | 36 | 0 errors, 3 s | 2 hazards displayed (1 error, 1 warning), 8 s |",
        "| `awq-awq` |  | not run | not done after 120 s |",
    ]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_finds_nothing(sanitize, program, tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer on PATH")
    if shutil.which("nvcc") is not None:
        sanitize.build(program)
    elif not sanitize.binary(program).exists():
        pytest.skip(
            f"needs nvcc on PATH, or {sanitize.binary(program)} built elsewhere (tools/sanitize.py --build-only)"
        )
    report = sanitize.run(program, tool)
    assert report.status == 0, report.output
