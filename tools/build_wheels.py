#!/usr/bin/env python3
"""Builds a wheel of every package for one Python and one list of architectures; by default for a GPU machine with an H200.

    python tools/build_wheels.py                                      cp312 wheels with sm_90a code, in .carry/wheels
    python tools/build_wheels.py --python /usr/bin/python3.11 --archs release --out dist
    python tools/build_wheels.py --packages kitchen-int8              one package again (incremental: the build folder is kept)

Release wheels are tagged manylinux_2_34, the oldest glibc that this tool chain's output runs with (checked by wheel_check.py).
The build runs without isolation in a virtual environment under build/ that holds the build tools, because under isolation no
build is incremental. KITCHEN_CUDA=ON: a wheel without its kernels cannot slip out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE_ARCHS = "75;80;90a;100;120-real;120-virtual"
PLATFORM = "manylinux_2_34_x86_64"
BUILD_TOOLS = [
    "scikit-build-core>=0.11", "pybind11>=3.0", "cmake>=3.24", "ninja", "wheel",
    "nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-runtime-cu12==12.9.79",  # kitchen-fallback-volta: sm_70 code
]  # fmt: skip


def find_python(version: str) -> str:
    """An interpreter of that version: on PATH, or one of pyenv's (uv would download one instead of asking pyenv)."""
    pyenv = shutil.which("pyenv")
    if pyenv:
        root = Path(subprocess.run([pyenv, "root"], capture_output=True, text=True, check=True).stdout.strip())
        found = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
        if found:
            return str(found[-1])
    on_path = shutil.which(f"python{version}")
    if on_path is None:
        sys.exit(f"no python{version} found on PATH or under pyenv; give one with --python PATH")
    return on_path


def build_environment(python: str) -> Path:
    """build/wheels-<version>: made once, with the build tools in it."""
    query = "import sys; print(f'{sys.version_info[0]}{sys.version_info[1]}')"
    tag = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    venv = ROOT / "build" / f"wheels-cp{tag}"
    if not (venv / "bin/ninja").exists():
        subprocess.run(["uv", "venv", "--quiet", "--clear", str(venv), "--python", python], check=True)
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", str(venv), *BUILD_TOOLS], check=True)
    return venv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="a version, or the path of an interpreter")
    parser.add_argument("--archs", default="90a", help=f"CUDAARCHS, or 'release' for {RELEASE_ARCHS}")
    parser.add_argument("--out", type=Path, default=ROOT / ".carry/wheels")
    parser.add_argument("--packages", nargs="*", help="names of folders under packages/; default: all")
    args = parser.parse_args()

    python = args.python if "/" in args.python else find_python(args.python)
    venv = build_environment(python)
    archs = RELEASE_ARCHS if args.archs == "release" else args.archs
    env = os.environ | {
        "CUDAARCHS": archs,
        "KITCHEN_CUDA": "ON",
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(venv),
    }
    folder = ROOT / "build" / ("wheels-release" if args.archs == "release" else "wheels")  # each stays incremental
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.packages or sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml")):
        start = time.monotonic()
        for old in args.out.glob(f"{name.replace('-', '_')}-*.whl"):
            old.unlink()
        build = subprocess.run(
            ["uv", "build", "--wheel", "--no-build-isolation", "--package", name, "--python", str(venv / "bin/python"),
             "-C", f"build-dir={folder}/{name}-{{wheel_tag}}", "-o", str(args.out)],
            cwd=ROOT, env=env, capture_output=True, text=True,
        )  # fmt: skip
        if build.returncode:
            sys.exit(f"{build.stdout}{build.stderr}\n{name}: the build failed")
        [wheel] = args.out.glob(f"{name.replace('-', '_')}-*.whl")
        if args.archs == "release" and "linux_x86_64" in wheel.name:
            tags = [str(venv / "bin/wheel"), "tags", "--remove", "--platform-tag", PLATFORM, str(wheel)]
            subprocess.run(tags, check=True, capture_output=True)
            [wheel] = args.out.glob(f"{name.replace('-', '_')}-*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
