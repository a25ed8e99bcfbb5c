"""Device memory is torch's to allocate: the sources of our kernels, headers and bindings ask the driver for none."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOCATES = re.compile(r"\b(?:cudaMalloc\w*|cudaHostAlloc|cuMem(?:Host)?Alloc\w*|cuMemCreate|cuArray\w*Create)\b")
OF_TESTS = ROOT / "shared_cuda/include/kitchen/testing"  # buffers of the C++ tests, in no extension
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/csrc"))


def allocations(*folders):
    """(the files that were read, the places in them that ask for memory)"""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    lines = [
        (path, number, line)
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    ]
    return files, [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for path, number, line in lines if ALLOCATES.search(line)
    ]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_extension_asks_the_driver_for_memory(package):
    files, found = allocations(package / "csrc")
    assert any(path.name == "bindings.cpp" for path in files)
    assert found == []


def test_no_shared_header_asks_the_driver_for_memory():
    files, found = allocations(*(path for path in (ROOT / "shared_cuda/include/kitchen").iterdir() if path != OF_TESTS))
    assert len({path.parent for path in files}) > 5
    assert found == []


def test_what_asks_for_memory_is_found():
    assert any("device_array.h" in place for place in allocations(OF_TESTS)[1])
