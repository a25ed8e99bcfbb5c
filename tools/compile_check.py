#!/usr/bin/env python3
"""Compiles every CUDA file of every package for every release architecture; warnings and register spills are errors.

    python tools/compile_check.py                         all of it; what is as it was at the last run is not compiled again
    python tools/compile_check.py --archs 90a --only int8 -v

Needs nvcc and no GPU. Checks too that each header of shared_cuda compiles alone, and, in the machine code, that kernels
hold the instructions they were written for (EXPECTED) and no local memory, and that no load from shared memory may be under
way where its place is handed back (scoreboards.py). Files in a folder sm75, sm80 or sm90 are
compiled for the architectures of FOLDER_ARCHS alone. Spills beyond ALLOWED_SPILLS are errors.
A file is compiled for all its architectures at once, which saves a third of the time. Objects, compiler logs and a hash of all
that went into each are kept in build/compile_check: what has the same hash is not compiled again, whatever its date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import scoreboards

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/compile_check"
ARCHS = ("75", "80", "90a", "100", "120")
FLAGS = [
    "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden",
    "-Werror", "all-warnings", "-Xptxas", "-v",
]  # fmt: skip

INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)")  # a line of machine code

# (kernel name, architectures, instructions that must occur): regular expressions of kernels and of SASS mnemonics.
EXPECTED = [
    (r"quantize_rows\b", "75 80 90a 100 120", [r"LDG\.E\.128", "FFMA", "PRMT"]),
    (r"quantize_rows\b", "80 90a 100 120", ["C?REDUX"]),
    (r"quantize_rows_staged\b", "80 90a 100 120", [r"LDGSTS.*128", "C?REDUX"]),
    (r"quantize_rows_cluster\b", "90a 100 120", [r"LDG\.E\.128", "UCGABAR"]),
    (r"quantize_rows(_staged)?<.*(256|-1), 2,", "75 80 90a 100 120", [r"LDS(\.U)?\.64", r"STS\.128"]),
    (r"find_absmax<", "75 80 90a 100 120", [r"LDG\.E\.128"]),
    (r"round_to_codes<", "75 80 90a 100 120", [r"LDG\.E\.128", r"STG\.E\.EF\.128", "PRMT"]),
    (r"dequantize_plain<", "75 80 90a 100 120", [r"STG\.E\.128", "PRMT"]),
    (r"dequantize_rotated<", "75 80 90a 100 120", [r"LDG\.E\.128", r"STS\.128", r"LDS(\.U)?\.64", "FFMA"]),
    (r"gemm_sm90::", "90a", ["IGMMA", "UTMALDG"]),
    (r"gemm_sm90::split_kernel", "90a", ["STAS", "UCGABAR", "ACQBULK"]),
    (r"SwigluEpilogue", "90a", [r"MUFU\.EX2", r"MUFU\.RCP", "UTMASTG"]),
    (r"gemm_sm80::", "80 90a 100 120", [r"IMMA\.16832\.S8", r"LDGSTS.*128", r"LDSM\.16\.M88\.4"]),
    (r"decode_sm90::", "90a", ["IGMMA", "UTMALDG", "STAS"]),
    (r"decode::decode_kernel", "80 90a 100 120", [r"IMMA\.16832\.S8", r"LDGSTS.*128", r"LDG\.E.*\.128"]),
    (r"w4a8_stream<", "80 90a 100 120", [r"IMMA\.16832\.(S8|U8)", r"LDGSTS.*128", "PRMT"]),
    (r"w4a8_stream<.*Config<6,", "80 90a 100 120", ["HFMA2", r"IMMA\.16832\.U8"]),
    (r"w4a8_resident<", "90a", [r"IMMA\.16832\.(S8|U8)", r"LDG\.E.*\.128", "UBLKCP", "PRMT"]),
    (r"w4a8_hopper<", "90a", ["IGMMA", "UTMALDG", "PRMT"]),
    (r"w4a8::.*decode_weight<", "75 80 90a 100 120", ["PRMT", r"STG\.E\.128"]),
    (r"gemm_sm75::", "75", [r"IMMA\.8816\.S8", r"LDG\.E\.128", r"STS\.128", r"LDSM\.16\.M88\.4"]),
    (r"gemm_sm75::", "90a", ["IMMA", r"LDSM\.16\.M88\.4"]),
    (r"svdquant::sm90::(promoted|split)_gemm", "90a", ["QGMMA", "HGMMA", "UTMALDG", "UBLKCP", r"LDSM\.16\.M88\.4"]),
    (r"stream_gemm<.*ByBytes<kitchen::mma::M16N8K32S8>", "80 90a 100 120", [r"IMMA\.16832\.S8", r"LDG\.E\.64"]),
    (r"stream_gemm<.*ByBytes<kitchen::mma::M16N8K32S8Turing>", "75", [r"IMMA\.8816\.S8", r"LDG\.E\.64"]),
    (r"svdquant::.*packed_gemm<", "90a", [r"IMMA\.16832\.S8", r"HMMA\.16816\.F32", "UTMALDG"]),
    (r"svdquant::.*stream_gemm<.*Config<", "90a", [r"IMMA\.16832\.S8", r"LDGSTS.*128"]),
    (r"svdquant::.*project<", "90a", ["HGMMA", r"LDSM\.16\.MT88\.4", "UTMALDG"]),
    (r"stream_gemm<.*ByNibbles", "80", [r"IMMA\.16864\.S4"]),
    (r"svdquant::.*quantize_few<", "90a 100 120", ["UCGABAR"]),
    (r"^int8_scaled_mm_(small|medium|large)$|^plain_fp16_mm", "90a", [r"HMMA\.16816\.F32", "LDSM", r"LDG\.E.*\.128"]),
    (r"awq_decode_kernel<.*Turing", "75 90a", [r"HMMA\.1688\.F32", r"LDG\.E.*\.128", r"LDS(\.U)?\.128"]),
    (r"awq_decode_kernel<(?!.*Turing)", "80 90a 100 120", [r"HMMA\.16816\.F32", r"LDG\.E.*\.128", r"LDS\.128"]),
    (r"awq_stream_kernel", "90a", ["HGMMA", "UTMALDG", r"LDS\.128"]),
    (r"awq_gemm_kernel", "90a", ["HGMMA", r"UTMALDG\.2D\.MULTICAST", "MOVM", r"BAR\.RED", r"LDS\.128"]),
    (r"awq::.*dense_rows", "75 80 90a 100 120", [r"LDG\.E", r"STG\.E\.128", "FFMA"]),
]
NO_LOCAL_MEMORY = (
    r"w4a8_(stream|hopper)|w4a8::.*(decode_weight|order_tokens)|"
    r"quantize_rows|find_absmax|round_to_codes|dequantize_(plain|rotated|chunks)"
    r"|gemm_sm(75|80|90)|decode_sm90|reduce_splits"
)
# Kernels that may spill, and how many bytes (stores and loads together), each with its reason:
ALLOWED_SPILLS = {
    # registers of the schedule, read once a piece
    r"awq_gemm_kernel<": 108,
    # a few registers of two rows at a time, on sm_100 and sm_120
    r"awq_float32_kernel<.*, 2>": 44,
    r"w4a8::.*unpack_weight": 8,  # a copy, whose 64-bit divisions are calls
    # a few registers once a round (13 on sm_100); a block an SM less would keep them and be slower (docs/kernels/awq.md)
    r"awq_decode_kernel<kitchen::gemm::decode::Config<1, 1, [24], [42], 2, 3>": 32,
    r"awq_decode_kernel<kitchen::gemm::decode::Config<2, 2, 2, 4, 2, 2>": 108,
    # two registers on sm_80, one on sm_100, for what leaves room to a block of the quantizer; two of more tokens on sm_90a
    r"w4a8_stream<kitchen::w4a8::stream::Config<4, true, [12]>": 16,
    r"svdquant::.*\bquantize<.*CodeForm\)0, false>": 8,  # a register on sm_120, read once a row
    # a register of 6 bits and 25 to 32 tokens
    r"w4a8_resident<kitchen::w4a8::resident::Config<6, true, 4>": 8,
    # registers of the walk over tiles, read once a tile
    r"w4a8_hopper<kitchen::w4a8::hopper::Config<[46], 192, 1(60|92), ": 140,
    # a register of the walk over tiles, read once a tile
    r"stream_gemm<.*Config<[23], 4, ": 16,
    # registers of the walk over tiles, and two once a round of eight groups (docs/kernels/svdquant.md)
    r"svdquant::sm90::promoted_gemm<kitchen::svdquant::sm90::Config<128, ": 144,
    # a register outside of the loop over groups; three, once a stage; four, once a group of 300 instructions, and the start's
    r"svdquant::.*packed_gemm<.*Config<4, 1, ": 20,
    r"svdquant::.*packed_gemm<.*Config<8, 1, ": 36,
    r"svdquant::.*packed_gemm<.*Config<8, 2, ": 324,
    # 32 tokens on sm_80 alone; this kernel runs only where it is forced (docs/kernels/int8_decode.md)
    r"decode::decode_kernel<kitchen::gemm::decode::Config<4, 1, 4, 2, 4, 3>": 48,
}
# Folders of kernels that are not compiled for every architecture: as _kitchen_archs_of_folder in KitchenCuda.cmake.
FOLDER_ARCHS = {"sm75": ("75", "90a"), "sm80": ("80", "90a", "100", "120"), "sm90": ("90a",)}


class Unit(NamedTuple):
    """One file, and the architectures that its object holds code for."""

    source: Path
    archs: tuple[str, ...]

    @property
    def object(self) -> Path:
        return BUILD / "-".join(self.archs) / self.source.relative_to(ROOT).with_suffix(".o")


def units(archs: list[str], only: str) -> list[Unit]:
    sources = sorted([*ROOT.glob("packages/*/csrc/**/*.cu"), *ROOT.glob("shared_cuda/bench/*.cu")])
    found = [Unit(path, tuple(arch for arch in archs if arch in archs_of(path))) for path in sources]
    found += [Unit(path, ("90a",)) for path in header_units() if "90a" in archs]
    return [unit for unit in found if unit.archs and only in str(unit.source)]


def archs_of(source: Path) -> tuple[str, ...]:
    if "kitchen-fallback-volta" in source.parts:
        return ("90a",)  # where its kernels are tested; sm_70 needs another compiler: volta_check.py
    return next((FOLDER_ARCHS[part] for part in source.parts if part in FOLDER_ARCHS), ARCHS)


def header_units() -> list[Path]:
    """One file per shared header that includes nothing else."""
    made = []
    for header in sorted((ROOT / "shared_cuda/include").rglob("*.h")):
        name = header.relative_to(ROOT / "shared_cuda/include")
        unit = BUILD / "headers" / (str(name).replace("/", "_") + ".cu")
        unit.parent.mkdir(parents=True, exist_ok=True)
        if not unit.exists():
            unit.write_text(f'#include "{name}"\n')
        made.append(unit)
    return made


def include_flags(source: Path) -> list[str]:
    folders = [ROOT / "shared_cuda/include"]
    if "csrc" in source.parts:
        folders.append(Path(*source.parts[: source.parts.index("csrc") + 1]))
    if "kitchen-w4a8" in source.parts:  # shares the quantizer and an epilogue of kitchen-int8 (its CMakeLists.txt)
        folders.append(ROOT / "packages/kitchen-int8/csrc")
    site = Path(sysconfig.get_paths()["purelib"])
    folders += [site / f"cutlass_library/source/{part}" for part in ("include", "tools/util/include")]
    return [f"-I{folder}" for folder in folders if folder.exists()]


def command_of(unit: Unit) -> list[str]:
    targets = [word for arch in unit.archs for word in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    return [
        "nvcc", *FLAGS, *include_flags(unit.source), *targets, "-MD", "-MF", str(unit.object.with_suffix(".d")),
        "-c", str(unit.source), "-o", str(unit.object),
    ]  # fmt: skip


@cache
def compiler_version() -> str:
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout


@cache
def content(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def read_files(unit: Unit) -> list[str]:
    """The files that went into an object, by the compiler's own list."""
    return sorted(unit.object.with_suffix(".d").read_text().split(":", 1)[1].replace("\\\n", " ").split())


def fingerprint(unit: Unit) -> str:
    """A hash of what an object is made from: the compiler, its command and the content of every file that was read."""
    made = hashlib.sha256(repr((compiler_version(), command_of(unit))).encode())
    for name in read_files(unit):
        made.update(content(Path(name)))
    return made.hexdigest()


def is_current(unit: Unit) -> bool:
    stamp = unit.object.with_suffix(".hash")
    try:
        return unit.object.exists() and stamp.read_text() == fingerprint(unit)
    except FileNotFoundError:
        return False


def compile_unit(unit: Unit) -> tuple[Unit, str | None, float]:
    """None, or what the compiler said against it."""
    if is_current(unit):
        return unit, None, 0.0
    start, began = time.monotonic(), time.time()
    unit.object.parent.mkdir(parents=True, exist_ok=True)
    unit.object.unlink(missing_ok=True)
    result = subprocess.run(command_of(unit), capture_output=True, text=True)
    unit.object.with_suffix(".log").write_text(result.stderr)
    failed = (result.stdout + result.stderr) if result.returncode or not unit.object.exists() else None
    if failed:
        unit.object.unlink(missing_ok=True)
    elif all(Path(name).stat().st_mtime < began for name in read_files(unit)):  # no edit came meanwhile
        unit.object.with_suffix(".hash").write_text(fingerprint(unit))
    return unit, failed, time.monotonic() - start


def demangle(text: str) -> str:
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    return subprocess.run([tool], input=text, capture_output=True, text=True).stdout if tool else text


def relevant(output: str) -> str:
    """The compiler's output without what -v adds, save notes that carry a number, such as C7510."""
    lines = [
        line for line in output.splitlines() if not re.match(r"ptxas info +: (?!\(C\d)|    \d+ bytes stack frame", line)
    ]
    return demangle("\n".join(lines))


class Usage(NamedTuple):
    """What the compiler's log says of a kernel; spills in bytes of stores and loads together."""

    registers: int
    spills: int


def usage(unit: Unit, arch: str) -> dict[str, Usage]:
    """Kernel -> registers and spills for one architecture."""
    text = demangle(unit.object.with_suffix(".log").read_text())
    found = re.findall(
        rf"Compiling entry function '([^\n]*?)' for 'sm_{arch}'\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        text,
        re.DOTALL,
    )
    return {name: Usage(int(count), int(stores) + int(loads)) for name, stores, loads, count in found}


def allowed_spill(name: str) -> int:
    """How many bytes a kernel may spill: 0 for all that ALLOWED_SPILLS does not name."""
    return max((size for pattern, size in ALLOWED_SPILLS.items() if re.search(pattern, name)), default=0)


def disassembler() -> str | None:
    """cuobjdump on PATH, or the one in the locked triton: a CUDA toolkit may come without it."""
    bundled = Path(sysconfig.get_paths()["purelib"]) / "triton/backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or (str(bundled) if bundled.exists() else None)


class MachineCode(NamedTuple):
    """What the disassembler shows of a kernel."""

    counts: Counter[str]  # of each instruction
    under_way: list[str]  # loads from shared memory, where their place is handed back


def machine_code(unit: Unit, arch: str, tool: str) -> dict[str, MachineCode]:
    """Kernel -> its machine code for one architecture. Kept beside the object, until that or what looks at it changes."""
    kept = unit.object.with_suffix(f".{arch}.json")
    looks = content(Path(scoreboards.__file__)).hex() if arch in scoreboards.ARCHS else ""
    if kept.exists() and kept.stat().st_mtime > unit.object.stat().st_mtime:
        seen = json.loads(kept.read_text())
        if seen.get("looks") == looks:
            return {name: MachineCode(Counter(counts), found) for name, (counts, found) in seen["kernels"].items()}
    command = [tool, "-sass", "-arch", f"sm_{arch}", str(unit.object)]
    listings = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("Function :")[1:]
    names = demangle("\n".join(listing.partition("\n")[0].strip() for listing in listings)).splitlines()
    kernels = {}
    for name, listing in zip(names, listings, strict=True):
        counts = Counter(match.group(1) for match in map(INSTRUCTION.match, listing.splitlines()) if match)
        kernels[name] = MachineCode(counts, scoreboards.complaints(name, listing) if looks else [])
    kept.write_text(json.dumps({"looks": looks, "kernels": kernels}))
    return kernels


def complaints(arch: str, used: dict[str, Usage], kernels: dict[str, MachineCode]) -> list[str]:
    found = [
        f"{arch} {name}: spills {size} bytes, {allowed_spill(name)} are allowed"
        for name, (_, size) in used.items()
        if size > allowed_spill(name)
    ]
    for name, (counts, under_way) in kernels.items():
        for pattern, archs, wanted in EXPECTED:
            if arch in archs.split() and re.search(pattern, name):
                missing = [word for word in wanted if not any(re.match(word, op) for op in counts)]
                found += [f"{arch} {name}: no {word} in its machine code" for word in missing]
        if (
            re.search(NO_LOCAL_MEMORY, name)
            and not allowed_spill(name)
            and any(op.startswith(("LDL", "STL")) for op in counts)
        ):
            found.append(f"{arch} {name}: uses local memory")
        found += [f"{arch} {name}: {words}" for words in under_way]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default=";".join(ARCHS), help=f"default {';'.join(ARCHS)}")
    parser.add_argument("--only", default="", help="files whose path holds this word")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for every kernel")
    args = parser.parse_args()
    if shutil.which("nvcc") is None:
        sys.exit("no nvcc on PATH: nothing was checked")

    start = time.monotonic()
    todo = units(args.archs.split(";"), args.only)
    problems, compiled = [], 0
    with ThreadPoolExecutor(args.jobs) as pool:
        longest_first = sorted(todo, key=lambda unit: -len(unit.archs))
        for unit, failure, seconds in pool.map(compile_unit, longest_first):
            compiled += seconds > 0
            if failure:
                problems.append(f"{unit.source.relative_to(ROOT)}:\n{relevant(failure)}")
        tool = disassembler()
        if tool is None:
            print("no cuobjdump found: the machine code was not looked at")
        kernels = [unit for unit in todo if unit.object.exists() and "headers" not in unit.source.parts]
        looked_at = [(unit, arch) for unit in kernels for arch in unit.archs]
        for (unit, arch), (used, found) in zip(looked_at, pool.map(lambda at: look(*at, tool), looked_at), strict=True):
            problems += found
            most = max((kernel.registers for kernel in used.values()), default=0)
            print(f"{arch:>4} {unit.source.relative_to(ROOT)!s:80} {len(used):3} kernels, at most {most:3} registers")
            if args.verbose:
                for name, kernel in used.items():
                    print(f"       {kernel.registers:3} registers  {name}")
    objects = sum(len(unit.archs) for unit in todo)
    print(
        f"{len(todo)} files, {objects} objects, {compiled} files compiled, {len(problems)} problems, "
        f"{time.monotonic() - start:.1f} s"
    )
    if problems:
        sys.exit("\n".join(problems))


def look(unit: Unit, arch: str, tool: str | None) -> tuple[dict[str, Usage], list[str]]:
    """What the compiler's log and the machine code say of a file's kernels, and what is wrong with them."""
    used = usage(unit, arch)
    return used, complaints(arch, used, machine_code(unit, arch, tool) if tool else {})


if __name__ == "__main__":
    main()
