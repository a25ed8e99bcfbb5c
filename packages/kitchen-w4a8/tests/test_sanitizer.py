"""compute-sanitizer over every kernel instance, by tests/sanitize_kernels.cu: pytest --run-slow -m sanitizer, on a GPU."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(__file__).resolve().parents[1]
PROGRAM = PACKAGE / "tests/sanitize_kernels.cu"


@pytest.fixture(scope="module")
def sanitize():
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools/sanitize.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_every_kernel_file_is_in_the_program(sanitize):
    assert set(sanitize.sources(PROGRAM)) == set(PACKAGE.glob("csrc/**/*.cu"))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_finds_nothing(sanitize, tool):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer")
    sanitize.build(PROGRAM)
    report = sanitize.run(PROGRAM, tool, sanitize.SECONDS_A_TOOL)
    assert report.status == 0, report.output[:4000]
