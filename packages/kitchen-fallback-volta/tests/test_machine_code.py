"""The sm_70 machine code, where the compiler for it is installed, and the check itself."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def check():
    return module_of(ROOT / "tools/volta_check.py")


def test_the_code_is_what_it_should_be(check):
    nvrtc = check.compiler()
    try:
        nvrtc.load()
    except nvrtc.Missing as error:
        pytest.skip(f"{error}; .ci/run runs tools/volta_check.py with it")
    source = check.PACKAGE / "csrc/kernels.cu"
    cubin, log = nvrtc.compile_cubin(source, "sm_70", [str(ROOT / "shared_cuda/include"), str(check.PACKAGE / "csrc")])
    assert check.complaints(check.instructions(cubin), check.usage(log)) == []


def test_complaints(check):
    """The check can fail: for a missing instruction, local memory, spills, and kernels that it does not know."""
    good = {name: Counter(dict.fromkeys(words, 1)) for name, words in check.EXPECTED.items()}
    used = dict.fromkeys(good, check.Usage(100, 0, 0))
    assert check.complaints(good, used) == []
    name = "int8_scaled_mm_large"
    spoiled = {
        "no HMMA.884": ({**good, name: good[name] - Counter(["HMMA.884"])}, used),
        "uses local memory, 1 LDL": ({**good, name: good[name] + Counter(["LDL"])}, used),
        "spills 8 bytes": (good, {**used, name: check.Usage(255, 8, 8)}),
        "is not in the machine code": ({k: v for k, v in good.items() if k != name}, used),
        "is not in EXPECTED": ({**good, "another": Counter()}, {**used, "another": check.Usage(1, 0, 0)}),
    }
    for words, (kernels, usage) in spoiled.items():
        found = check.complaints(kernels, usage)
        assert len(found) == 1
        assert words in found[0]


def test_the_log_is_understood(check):
    log = """
ptxas info    : Compiling entry function 'one' for 'sm_70'
ptxas info    : Function properties for one
ptxas         .     320 bytes stack frame, 124 bytes spill stores, 92 bytes spill loads
ptxas info    : Used 32 registers, 364 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_70'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 233 registers, used 1 barriers, 488 bytes cmem[0]
"""
    assert check.usage(log) == {"one": check.Usage(32, 320, 216), "two": check.Usage(233, 0, 0)}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"CUDAARCHS": "70"}, True),
        ({"CUDAARCHS": "75;70-real;90a"}, True),
        ({"CUDAARCHS": "75;80;90a;100-real;120-virtual"}, False),
        ({"CUDAARCHS": "70", "KITCHEN_CUDA": "off"}, False),
        ({"CUDAARCHS": "80", "KITCHEN_CUDA": "ON"}, True),
        ({"TORCH_CUDA_ARCH_LIST": "6.1 7.0+PTX"}, True),
        ({"TORCH_CUDA_ARCH_LIST": "7.5;8.0"}, False),
        ({}, False),
    ],
)
def test_who_fetches_the_compiler(environment, wanted, monkeypatch):
    """NVRTC is 90 MB: only where sm_70 code is going to be built."""
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed here")
    backend = module_of(ROOT / "packages/kitchen-fallback-volta/tools/build_backend.py")
    for name in ("CUDAARCHS", "TORCH_CUDA_ARCH_LIST", "KITCHEN_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert backend.wants_volta() is wanted
    asked = backend.get_requires_for_build_wheel() if wanted else []
    assert set(backend.NVRTC) <= set(asked) if wanted else not asked
