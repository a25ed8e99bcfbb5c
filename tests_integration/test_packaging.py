"""The packages as they are built and published: metadata, sources, public names, and the check of wheels itself."""

import importlib.util
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = sorted(ROOT.glob("packages/*/pyproject.toml"))
METADATA = "Metadata-Version: 2.1\nName: kitchen-made\nVersion: 1\nRequires-Python: >=3.11\n"


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # its dataclasses look themselves up there
    spec.loader.exec_module(made)
    return made


def forged(folder, requires=(), extension=None, name="kitchen_made-1-py3-none-any.whl"):
    path = folder / name
    with zipfile.ZipFile(path, "w") as wheel:
        text = METADATA + "".join(f"Requires-Dist: {r}\n" for r in requires)
        wheel.writestr("kitchen_made-1.dist-info/METADATA", text)
        if extension is not None:
            wheel.write(extension, f"kitchen_made/{Path(extension).name}")
    return path


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        (["torch>=2.10", "numpy"], None),
        (["torch==2.11.0"], "may move what the user has"),
        (["torch>=2.10,<3"], "may move what the user has"),
        (["torch>=2.15"], "the claim is >=2.10"),
        (["nvidia-cuda-runtime"], "at run time"),
        (["torch==2.11.0 ; extra == 'test'"], None),
    ],
)
def test_the_wheel_check_finds_what_is_wrong(requires, words, tmp_path):
    problems = tool("wheel_check").check_wheel(forged(tmp_path, requires)).problems
    assert (not problems) if words is None else any(words in p for p in problems), problems


def test_the_wheel_check_finds_foreign_libraries_and_symbols(tmp_path):
    check = tool("wheel_check")
    links_torch = next(Path(torch.__file__).parent.glob("_C.*.so"))
    problems = check.check_wheel(forged(tmp_path, extension=links_torch)).problems
    assert any("needs libtorch_python.so" in p for p in problems), problems
    core = next((Path(numpy.__file__).parent / "_core").glob("_multiarray_umath.*.so"))
    problems = check.check_wheel(forged(tmp_path, extension=core)).problems
    assert any("needs libscipy_openblas" in p or "exports" in p for p in problems), problems
    broken = tmp_path / f"_C.cpython-{sys.version_info[0]}{sys.version_info[1]}-x86_64-linux-gnu.so"
    broken.write_bytes(core.read_bytes())  # a module of another name
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    name = f"kitchen_made-1-{tag}-{tag}-linux_x86_64.whl"
    problems = check.check_wheel(forged(tmp_path, extension=broken, name=name)).problems
    assert any("does not import" in p for p in problems), problems


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_every_package_has_a_source_archive_list(project):
    """An sdist is complete (it vendors the shared headers) and pins nothing; torch is never a build requirement."""
    table = tomllib.loads(project.read_text())
    build = table["tool"]["scikit-build"]
    if (project.parent / "csrc").exists():
        assert build["sdist"]["cmake"]
        assert "_shared_cuda" in build["sdist"]["include"]
    else:
        assert build["wheel"]["cmake"] is False
    assert not any(r.startswith("torch") for r in table["build-system"]["requires"])
    assert "torch>=2.10" in table["project"]["dependencies"]
    assert table["project"]["requires-python"] == ">=3.11"
    for requirement in table["project"]["dependencies"]:
        assert not re.search("==|<|~=", requirement), requirement
    assert (project.parent / table["project"]["readme"]).exists()
    assert table["project"]["license"] == "Apache-2.0"


def test_every_launch_is_checked():
    """A launch that fails must not be passed over: its status goes through host::check."""
    sources = [p for pattern in ("*.cu", "*.cuh", "*.h") for p in ROOT.glob(f"packages/*/csrc/**/{pattern}")]
    launches = 0
    for path in [*sources, *ROOT.glob("shared_cuda/include/**/*.h")]:
        text = path.read_text()
        for call in re.findall(r"^.*cudaLaunch(?:Kernel|Cooperative)\w*\(.*$", text, re.MULTILINE):
            launches += 1
            assert "check(" in call, f"{path.name}: {call.strip()}"
        for call in re.finditer("<<<", text):
            launches += 1
            assert "check(cudaGetLastError()" in text[call.start() : call.start() + 500], path.name
    assert launches >= 10


def test_public_names_are_as_recorded():
    assert tool("public_names").difference() == "", "if it is meant: python tools/public_names.py --write"
