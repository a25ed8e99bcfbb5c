"""Real wheels in fresh environments: core alone, core with each format, all, and all with one broken plug-in.

Wheels are built once from the working tree. Each case is a new virtual environment, outside the repository, that sees
the locked third-party packages through a .pth file and has only its own kitchen wheels installed.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORMAT_PACKAGES = {
    "kitchen-int8": ("int8_tensorwise",),
    "kitchen-w4a8": ("asym_w4a8_int8", "w6a8_int8"),
    "kitchen-svdquant": ("svdquant_w4a4",),
    "kitchen-awq": ("awq_w4a16",),
}
ALL_PACKAGES = ("kitchen-core", *FORMAT_PACKAGES, "kitchen-fallback-volta", "kitchen-models")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv to build wheels and environments"),
]

# Runs in the case's own interpreter: what is installed must work, what is not must say what to install.
PROBE = """
import json, sys
import kitchen_core.plugins as plugins
listed = sorted(plugins.plugins("kitchen.formats"))
assert "torch" not in sys.modules, "listing plug-ins must not import torch"
import torch, kitchen_core as kc
from kitchen_core.known_formats import KNOWN_FORMATS
weight, x = torch.randn(64, 128), torch.randn(3, 128)
codes = torch.randint(-128, 128, (8, 64), dtype=torch.int8)
y = kc.awq_linear(x, codes, torch.rand(2, 8), torch.rand(2, 8))
assert y.shape == (3, 8), "an op runs eagerly without the package of its format"
said = {}
for name in KNOWN_FORMATS:
    try:
        made = kc.QuantizedTensor.quantize(weight, name)
        with kc.trace() as calls:
            result = torch.nn.functional.linear(x, made)
        error = ((result - x @ weight.T).norm() / (x @ weight.T).norm()).item()
        said[name] = {"error": error, "kernels": [kernel for _, kernel in calls]}
    except kc.PluginError as error:
        said[name] = {"missing": str(error)}
print(json.dumps({"listed": listed, "said": said, "explain": str(kc.explain("int8_linear", M=1, N=64, K=128))}))
"""


def run(command, expect=0, **kwargs):
    """Run a command, returning the finished process; its output is shown when the exit code is another one."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == expect, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """An environment of the locked third-party packages alone, with no kitchen package in it."""
    path = tmp_path_factory.mktemp("base") / "venv"
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(path)}
    run(["uv", "sync", "--locked", "--no-install-workspace", "--python", sys.executable], cwd=ROOT, env=environment)
    return path


@pytest.fixture(scope="module")
def wheels(base, tmp_path_factory):
    """Every package as a wheel, built without touching the development builds."""
    folder = tmp_path_factory.mktemp("wheels")
    environment = {**os.environ, "VIRTUAL_ENV": str(base), "PATH": f"{base / 'bin'}:{os.environ['PATH']}"}
    for package in ALL_PACKAGES:
        build_dir = tmp_path_factory.mktemp(package)
        run(
            ["uv", "build", "--wheel", "--package", package, "--python", base / "bin" / "python", "-o", folder,
             "-C", f"build-dir={build_dir}"], cwd=ROOT, env=environment,
        )  # fmt: skip
    return folder


@pytest.fixture
def install(base, wheels, tmp_path):
    """A function that makes an environment with the given kitchen packages and returns its folder of programs."""

    def make(*packages):
        path = tmp_path / "venv"
        run(["uv", "venv", "--python", base / "bin" / "python", path])
        purelib = sysconfig.get_path("purelib", vars={"base": str(base), "platbase": str(base)})
        mine = sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)})
        Path(mine, "locked_packages.pth").write_text(purelib + "\n")
        files = [f for p in packages for f in wheels.glob(f"{p.replace('-', '_')}-*.whl")]
        assert len(files) == len(packages)
        run(["uv", "pip", "install", "--offline", "--no-deps", "--python", path / "bin" / "python", *files])
        return path / "bin"

    return make


def probe(programs, cwd, expect=0, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KITCHEN_", "PYTHON", "VIRTUAL_ENV"))}
    return run([programs / "python", "-c", PROBE], expect, cwd=cwd, env={**clean, **environment})


def kitchen(programs, cwd, *arguments, expect=0, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KITCHEN_", "PYTHON", "VIRTUAL_ENV"))}
    return run([programs / "kitchen", *arguments], expect, cwd=cwd, env={**clean, **environment})


def check(report, packages):
    """Installed formats computed something right; the others named their package."""
    expected = {f for p in packages for f in FORMAT_PACKAGES.get(p, ())}
    assert set(report["listed"]) == expected
    for name, said in report["said"].items():
        package = next(p for p, formats in FORMAT_PACKAGES.items() if name in formats)
        if name in expected:
            assert said["error"] < 0.25
            assert said["kernels"] == ["core/eager"]
        else:
            assert f"pip install {package}" in said["missing"]


CASES = [("kitchen-core",), *(("kitchen-core", p) for p in FORMAT_PACKAGES), ALL_PACKAGES]


@pytest.mark.parametrize("packages", CASES, ids=lambda p: "all" if len(p) > 2 else p[-1])
def test_install(packages, install, tmp_path):
    programs = install(*packages)
    check(json.loads(probe(programs, tmp_path).stdout), packages)
    listing = kitchen(programs, tmp_path, "formats").stdout
    for package, formats in FORMAT_PACKAGES.items():
        for name in formats:
            line = next(line for line in listing.splitlines() if line.startswith(name))
            assert ("installed: " + package if package in packages else "pip install " + package) in line
    doctor = kitchen(programs, tmp_path, "doctor").stdout
    assert "No problems found" in doctor
    assert "core/eager" in kitchen(programs, tmp_path, "explain", "awq_linear", "--group", "64").stdout
    commands = kitchen(programs, tmp_path, "--help").stdout
    assert ("quantize" in commands) == ("kitchen-models" in packages)


def test_a_missing_format_says_what_to_install_when_its_file_is_loaded(install, tmp_path):
    source = tmp_path / "model.safetensors"
    programs = install(*ALL_PACKAGES)
    make = (
        "import sys, torch; from safetensors.torch import save_file; "
        "save_file({'blocks.0.proj.weight': torch.randn(256, 256)}, sys.argv[1])"
    )
    run([programs / "python", "-c", make, source])
    quantized = tmp_path / "awq.safetensors"
    kitchen(programs, tmp_path, "quantize", source, quantized, "--format", "awq")
    assert "awq_w4a16" in kitchen(programs, tmp_path, "inspect", quantized).stdout
    shutil.rmtree(programs.parent)
    fewer = install("kitchen-core", "kitchen-int8", "kitchen-models")
    load = "import sys, kitchen_models; kitchen_models.load(sys.argv[1])"
    done = run([fewer / "python", "-c", load, quantized], expect=1)
    assert "pip install kitchen-awq" in done.stderr
    assert "blocks.0.proj" in done.stderr


def test_one_broken_plugin_leaves_the_others_working(install, tmp_path):
    programs = install(*ALL_PACKAGES)
    broken = tmp_path / "site" / "broken_plugin-1.2.dist-info"
    broken.mkdir(parents=True)
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.2\n")
    (broken / "entry_points.txt").write_text(
        "[kitchen.formats]\nbroken = no_such_module:Format\n[kitchen.kernels]\nbroken = no_such_module:provider\n"
    )
    path = {"PYTHONPATH": str(tmp_path / "site")}
    done = probe(programs, tmp_path, **path)
    report = json.loads(done.stdout)
    assert report["listed"] == sorted([*(f for fs in FORMAT_PACKAGES.values() for f in fs), "broken"])
    report["listed"].remove("broken")
    check(report, ALL_PACKAGES)
    named = "plug-in broken (broken-plugin 1.2) is unusable: ModuleNotFoundError: No module named 'no_such_module'"
    assert done.stderr.count(named) == 1, "warned about once"
    assert named in report["explain"]
    doctor = kitchen(programs, tmp_path, "doctor", expect=1, **path).stdout
    assert "No module named 'no_such_module'" in doctor
    assert "No problems found" in kitchen(programs, tmp_path, "doctor", KITCHEN_PLUGINS="int8", **path).stdout
