#!/usr/bin/env python3
"""The one command for a machine with a GPU: install the wheels, run the GPU tests, run the benches, leave JSON.

    python3 tools/build_wheels.py                       elsewhere: makes .carry/wheels
    python3 tools/gpu_check.py                          here: wheels of .carry/wheels, this Python and its torch, no network
    python3 tools/gpu_check.py --build                  no wheels at hand: build the packages here (nvcc, scikit-build-core)
    python3 tools/gpu_check.py --only int8 --no-bench -- -x -k quantize      arguments after -- go to pytest
    python3 tools/gpu_check.py --workers 4 --sanitize    tests in 4 processes (pytest-xdist), and compute-sanitizer as well

Nothing is installed into the running Python: wheels go to a scratch folder that is put on PYTHONPATH. Results go to
benchmarks/results/<gpu>/, or to --out. The exit status is that of the tests and benches together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str], env: dict[str, str], log: Path | None = None) -> int:
    """Runs it with its output shown and, if asked, kept."""
    print("$", " ".join(command), flush=True)
    if log is None:
        return subprocess.run(command, cwd=ROOT, env=env).returncode
    with (
        log.open("w") as kept,
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        for line in process.stdout:
            print(line, end="", flush=True)
            kept.write(line)
    return process.returncode


def install(args: argparse.Namespace, target: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        str(target),
    ]
    if args.build:
        what = [str(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
        volta = [path for path in what if path.endswith("kitchen-fallback-volta")]  # ON would ask for NVRTC of CUDA 12
        others = [path for path in what if path not in volta]
        for mode, paths in (("ON", others), ("AUTO", volta)):
            env = os.environ | {"KITCHEN_CUDA": mode}
            subprocess.run([*pip, "--no-build-isolation", *paths], check=True, env=env)
        return
    wheels = sorted(args.wheels.glob("*.whl"))
    if not wheels:
        sys.exit(f"no wheels in {args.wheels}: make them with tools/build_wheels.py, or give --build")
    subprocess.run([*pip, *map(str, wheels)], check=True)


def gpu_name(env: dict[str, str]) -> str:
    """ "NVIDIA H200" -> "h200"; stops if torch sees no GPU."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    name = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip()
    if not name:
        sys.exit("torch sees no GPU here")
    return name.lower().removeprefix("nvidia ").replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=ROOT / ".carry/wheels")
    parser.add_argument("--build", action="store_true", help="build the packages instead of taking wheels")
    parser.add_argument("--only", default="", help="packages and benches whose path holds this word")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument(
        "--sanitize", action="store_true", help="also tools/sanitize.py: needs nvcc, or its programs built"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes for the tests; more than 1 need pytest-xdist")
    parser.add_argument("--out", type=Path, help="folder of the results; default benchmarks/results/<gpu>")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    args = parser.parse_args()

    start = time.monotonic()
    target = Path(tempfile.mkdtemp(prefix="kitchen-site-"))
    install(args, target)
    # no plug-in of pytest's environment is needed; the tree's own sources must not shadow the installed wheels
    env = os.environ | {"PYTHONPATH": f"{target}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    gpu = gpu_name(env)
    out = args.out or ROOT / "benchmarks/results" / gpu
    out.mkdir(parents=True, exist_ok=True)
    print(f"{gpu}: installed in {time.monotonic() - start:.1f} s", flush=True)

    summary: dict[str, object] = {"gpu": gpu}
    if not args.no_tests:
        folders = [*sorted(ROOT.glob("packages/*/tests")), ROOT / "shared_cuda/tests", ROOT / "tests_integration"]
        tests = [str(path) for path in folders if path.exists() and args.only in str(path)]
        begun = time.monotonic()
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        # the references run on the CPU: without a limit each process would take all of it
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.workers))}
        workers = ["-n", str(args.workers)] if args.workers > 1 else []
        status = run([*pytest, *workers, *tests, *args.pytest], env | threads, out / "tests.log")
        summary["tests"] = {"status": status, "seconds": round(time.monotonic() - begun, 1)}
    if args.sanitize:
        begun = time.monotonic()
        build = [] if shutil.which("nvcc") else ["--no-build"]
        status = run([sys.executable, "tools/sanitize.py", "--only", args.only, *build], env, out / "sanitize.log")
        summary["sanitize"] = {"status": status, "seconds": round(time.monotonic() - begun, 1)}
    if not args.no_bench:
        for bench in sorted(ROOT.glob("packages/*/bench/*.py")):
            if args.only not in str(bench):
                continue
            begun = time.monotonic()
            status = run(
                [sys.executable, str(bench), "--out", str(out / f"{bench.stem}.json")], env, out / f"{bench.stem}.log"
            )
            summary[bench.stem] = {"status": status, "seconds": round(time.monotonic() - begun, 1)}
    (out / "gpu_check.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary), f"{time.monotonic() - start:.1f} s in all", flush=True)
    sys.exit(max((part["status"] for part in summary.values() if isinstance(part, dict)), default=0))


if __name__ == "__main__":
    main()
