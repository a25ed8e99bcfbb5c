#!/usr/bin/env python3
"""Checks wheels and sdists before anybody installs them.

    python tools/build_wheels.py --archs release --out dist && python tools/wheel_check.py dist
    python tools/wheel_check.py dist --write             the table of docs/wheels.md too
    python tools/wheel_check.py dist --into PYTHON       what installing all of them would change where PYTHON has its torch
    python tools/wheel_check.py --sdists                 an sdist of every package, built into a wheel alone: no git, no nvcc

Of each wheel: size; what it requires (torch from a lower bound on, never a version that would move it); which architectures it
holds. Of each extension: needed libraries (no torch, no CUDA, no Python), undefined symbols (none of CUDA's or torch's),
exported ones (its module function alone), the oldest glibc that has what it asks for, and that it imports without torch and
without a driver, in the interpreter that it was built for if that is the running one. Exit status 1 lists what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/wheels.md"
MARKS = ("<!-- wheels: made by tools/wheel_check.py -->", "<!-- end of wheels -->")
AIM_MB = 15.0
GLIBC = (2, 34)  # of the tool chain here: manylinux_2_34
ALLOWED_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"}
FOREIGN = re.compile(r"^(cuda[A-Z]|cu[A-Z]|nvrtc|at_|aoti_)|c10|5torch|_ZN2at")  # symbols of CUDA and of torch
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


@dataclass
class Wheel:
    """What one wheel is, and what is wrong with it."""

    path: Path
    name: str = ""
    requires: list[str] = field(default_factory=list)
    archs: list[str] = field(default_factory=list)
    glibc: tuple[int, int] = (0, 0)
    problems: list[str] = field(default_factory=list)

    @property
    def megabytes(self) -> float:
        return self.path.stat().st_size / 1e6


def output(*command: str | Path, **kwargs) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True, **kwargs).stdout


def check_wheel(path: Path) -> Wheel:
    wheel = Wheel(path)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
        site = Path(folder)
        check_metadata(wheel, next(site.glob("*.dist-info/METADATA")).read_text())
        for info in site.glob("*/_build_info.json"):
            wheel.archs = json.loads(info.read_text())["archs"]
        extensions = sorted(site.rglob("*.so"))
        for extension in extensions:
            check_extension(wheel, extension)
        for stray in [*site.rglob("*.cu"), *site.rglob("*.o"), *site.rglob("__pycache__")]:
            wheel.problems.append(f"holds {stray.relative_to(site)}, which nobody needs")
        if extensions and f"cp{sys.version_info[0]}{sys.version_info[1]}-" in path.name:
            check_import(wheel, site, extensions)
    if wheel.megabytes > AIM_MB:
        wheel.problems.append(f"takes {wheel.megabytes:.1f} MB, the aim is {AIM_MB:.0f}")
    return wheel


def check_metadata(wheel: Wheel, text: str) -> None:
    """Requirements are open above, so that an installation never moves the user's torch."""
    metadata = Parser().parsestr(text)
    wheel.name, wheel.requires = metadata["Name"], metadata.get_all("Requires-Dist") or []
    for requirement in wheel.requires:
        name, specifier = re.match(r"([\w.-]+)\s*(.*)", requirement.split(";")[0]).groups()
        if "extra ==" in requirement:
            continue
        if re.search(r"==|~=|<|!=", specifier):
            wheel.problems.append(f"requires {requirement}, which may move what the user has")
        if name.startswith(("nvidia", "triton", "cuda")):
            wheel.problems.append(f"requires {requirement} at run time")
        if name == "torch" and specifier.replace(" ", "") != ">=2.10":
            wheel.problems.append(f"requires torch {specifier}, the claim is >=2.10")
    if metadata["Requires-Python"] != ">=3.11":
        wheel.problems.append(f"requires Python {metadata['Requires-Python']}, the claim is >=3.11")


def check_extension(wheel: Wheel, extension: Path) -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", extension)))
    for library in sorted(needed - ALLOWED_LIBRARIES):
        wheel.problems.append(f"{extension.name} needs {library}")
    versions = {
        tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(2\.\d+)", output("readelf", "-V", extension))
    }
    wheel.glibc = max([wheel.glibc, *versions])
    if wheel.glibc > GLIBC:
        wheel.problems.append(f"{extension.name} asks for glibc {wheel.glibc}, the claim is {GLIBC}")
    symbols = [line.split() for line in output("nm", "-D", extension).splitlines()]
    exported = {s[-1] for s in symbols if s[-2] in "TDBR"}
    undefined = {s[-1].split("@")[0] for s in symbols if s[-2] in ("U", "w")}
    wanted = {f"PyInit_{extension.name.split('.')[0]}"}
    if exported != wanted:
        wheel.problems.append(f"{extension.name} exports {sorted(exported)[:8]}, only {sorted(wanted)} is meant")
    for name in sorted(filter(FOREIGN.search, undefined)):
        wheel.problems.append(f"{extension.name} wants {name} from outside")


def check_import(wheel: Wheel, site: Path, extensions: list[Path]) -> None:
    """Without torch, site-packages or a driver: the module is made and tells its ABI number."""
    source = (ROOT / "packages/kitchen-core/src/kitchen_core/abi.py").read_text()
    abi = int(re.search(r"KITCHEN_ABI = (\d+)", source).group(1))
    for extension in extensions:
        package, module = extension.parent.name, extension.name.split(".")[0]
        script = (
            "import importlib.util, sys\n"
            f"spec = importlib.util.spec_from_file_location('{package}.{module}', {str(extension)!r})\n"
            "made = importlib.util.module_from_spec(spec); spec.loader.exec_module(made)\n"
            "assert 'torch' not in sys.modules; print(made.abi())"
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, env=env, cwd=site)
        if done.returncode or int(done.stdout) != abi:
            wheel.problems.append(
                f"{package}.{module} does not import: {done.stdout}{done.stderr.strip().splitlines()[-1:]}"
            )


def check_sdists(out: Path) -> list[str]:
    """Each sdist, unpacked where there is no repository, git or nvcc in sight, makes a wheel with every module in it."""
    problems = []
    for package in PACKAGES:
        output("uv", "build", "--sdist", "--no-build-isolation", "--package", package.name, "-o", out, cwd=ROOT)
        [archive] = out.glob(f"{package.name.replace('-', '_')}-*.tar.gz")
        with tempfile.TemporaryDirectory() as folder:
            shutil.unpack_archive(archive, folder, filter="data")
            [source] = Path(folder).iterdir()
            cuda = (package / "csrc").exists()
            for wanted in (
                ["_shared_cuda/cmake/KitchenCuda.cmake", "_shared_cuda/include/kitchen", "csrc"] if cuda else []
            ):
                if not (source / wanted).exists():
                    problems.append(f"{archive.name} lacks {wanted}")
            env = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "TORCH_CUDA"))}
            env |= {"KITCHEN_CUDA": "OFF", "GIT_CEILING_DIRECTORIES": folder}
            done = subprocess.run(
                ["uv", "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", folder, str(source)],
                capture_output=True, text=True, env=env, cwd=folder,
            )  # fmt: skip
            if done.returncode:
                problems.append(f"{archive.name} does not build alone: {done.stderr.strip().splitlines()[-3:]}")
                continue
            [wheel] = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as made:
                held = {name for name in made.namelist() if name.endswith(".py")}
            for module in sorted((package / "src").rglob("*.py")):
                if str(module.relative_to(package / "src")) not in held:
                    problems.append(f"the wheel of {archive.name} lacks {module.relative_to(package / 'src')}")
        print(f"{archive.name}: {archive.stat().st_size / 1e6:.2f} MB, builds alone", flush=True)
    return problems


def check_installation(wheels: list[Wheel], python: Path) -> list[str]:
    """A dry run of installing every wheel, with its requirements: torch stays what it is."""
    query = "import importlib.metadata as m; print(m.version('torch'))"
    before = output(python, "-c", query).strip()
    names = {re.sub(r"[-_.]+", "-", wheel.name).lower() for wheel in wheels}
    done = subprocess.run(
        ["uv", "pip", "install", "--dry-run", "--python", str(python), *(str(w.path) for w in wheels)],
        capture_output=True, text=True,
    )  # fmt: skip
    changes = re.findall(r"^ ([+-~]) ([\w.-]+)==(\S+)", done.stderr, re.MULTILINE)
    others = sorted(f"{sign}{name} {version}" for sign, name, version in changes if name.lower() not in names)
    print(f"beside torch {before}: {', '.join(others) or 'nothing else changes'}")
    if done.returncode:
        return [f"cannot be installed beside torch {before}: {done.stderr.strip().splitlines()[-2:]}"]
    moved = [change for change in others if re.match(r"[+-~](torch|triton|nvidia|cuda)", change)]
    return [f"installing beside torch {before} changes {change}" for change in moved]


def table(wheels: list[Wheel]) -> str:
    lines = ["| wheel | MB | architectures | glibc | requires |", "| --- | --- | --- | --- | --- |"]
    for wheel in wheels:
        archs = " ".join(arch.removesuffix("-real") for arch in wheel.archs) or "-"
        glibc = ".".join(map(str, wheel.glibc)) if wheel.glibc > (0, 0) else "-"
        requires = ", ".join(r for r in wheel.requires if "extra" not in r)
        lines.append(f"| `{wheel.path.name}` | {wheel.megabytes:.2f} | {archs} | {glibc} | {requires} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a folder of wheels")
    parser.add_argument("--sdists", action="store_true", help="make and build an sdist of every package")
    parser.add_argument("--into", type=Path, metavar="PYTHON", help="an interpreter whose environment has torch")
    parser.add_argument("--write", action="store_true", help="put the table into docs/wheels.md")
    args = parser.parse_args()
    problems: list[str] = []
    if args.folder:
        wheels = [check_wheel(path) for path in sorted(args.folder.glob("*.whl"))]
        if not wheels:
            sys.exit(f"no wheels in {args.folder}")
        print(table(wheels))
        problems += [f"{wheel.path.name}: {problem}" for wheel in wheels for problem in wheel.problems]
        if args.into:
            problems += check_installation(wheels, args.into)
        if args.write:
            before, _, rest = PAGE.read_text().partition(MARKS[0])
            PAGE.write_text(f"{before}{MARKS[0]}\n\n{table(wheels)}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")
    if args.sdists:
        with tempfile.TemporaryDirectory() as folder:
            problems += check_sdists(Path(folder))
    print(f"{len(problems)} problems")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
