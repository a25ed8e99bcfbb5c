"""compute-sanitizer over every kernel instance, by the programs sanitize_*.cu: pytest --run-slow -m sanitizer, on a GPU.

The results that were found are in docs/kernels/sanitizer.md.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(PACKAGE.glob("tests/sanitize_*.cu"))


@pytest.fixture(scope="module")
def sanitize():
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools/sanitize.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_every_kernel_file_is_in_a_program(sanitize):
    """A new kernel is compiled into a program, or this fails."""
    covered = {source for program in PROGRAMS for source in sanitize.sources(program)}
    assert len(PROGRAMS) >= 3
    assert not {str(p.relative_to(PACKAGE)) for p in PACKAGE.glob("csrc/**/*.cu") if p not in covered}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_finds_nothing(sanitize, program, tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer on PATH")
    if shutil.which("nvcc") is not None:
        sanitize.build(program)
    elif not sanitize.binary(program).exists():
        pytest.skip(
            f"needs nvcc on PATH, or {sanitize.binary(program)} built elsewhere (tools/sanitize.py --build-only)"
        )
    report = sanitize.run(program, tool, sanitize.SECONDS_A_TOOL)
    assert report.status == 0, report.output
