#!/usr/bin/env python3
"""Compiles kitchen-fallback-volta's kernels for sm_70 and looks at the machine code; spills and local memory are errors.

    uv run --with nvidia-cuda-nvrtc-cu12==12.9.86 --with nvidia-cuda-runtime-cu12==12.9.79 python tools/volta_check.py

compile_check.py cannot do it: nvcc 13 has no sm_70, and the disassemblers that come with it refuse such code. The compiler is
NVRTC 12.9, as in the package's build; registers and spills are in its log, and instructions are told by their opcodes, the
low 12 bits of every 16 bytes. Needs no GPU.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages/kitchen-fallback-volta"
# Volta's opcodes, read off nvdisasm 12.8 beside the bytes (2026-11-30). Of HMMA sm_70 has the shape 884 alone.
OPCODES = {0x236: "HMMA.884", 0x381: "LDG", 0x984: "LDS", 0x388: "STS", 0x386: "STG", 0x983: "LDL", 0x387: "STL"}
LOCAL_MEMORY = ("LDL", "STL")
# Kernels, and the instructions that each must hold.
EXPECTED = {
    "int8_scaled_mm_large": ("HMMA.884", "LDS", "STS", "LDG"),
    "int8_scaled_mm_medium": ("HMMA.884", "LDS", "STS", "LDG"),
    "int8_scaled_mm_small": ("HMMA.884", "LDS", "STS", "LDG"),
    "plain_fp16_mm_large": ("HMMA.884", "LDS", "STS", "LDG"),
    "quantize_int8_rowwise": ("LDG", "LDS", "STS", "STG"),
}


class Usage(NamedTuple):
    """What the compiler's log says of a kernel."""

    registers: int
    stack: int
    spills: int  # bytes of stores and loads together


def compiler():
    """The package's nvrtc_cubin.py as a module."""
    spec = importlib.util.spec_from_file_location("nvrtc_cubin", PACKAGE / "tools/nvrtc_cubin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def usage(log: str) -> dict[str, Usage]:
    """Kernel -> registers, stack and spills, from the compiler's log."""
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return {
        name: Usage(int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in found
    }


def instructions(cubin: bytes) -> dict[str, Counter[str]]:
    """Kernel -> how often each instruction of OPCODES occurs, read from the ELF file's sections .text.<kernel>."""
    start = struct.unpack_from("<Q", cubin, 0x28)[0]
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    names = sections[names_index][4]
    kernels = {}
    for name_at, _, _, _, offset, length in sections:
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
        if name.startswith(".text."):
            words = (struct.unpack_from("<H", cubin, at)[0] & 0xFFF for at in range(offset, offset + length, 16))
            kernels[name.removeprefix(".text.")] = Counter(OPCODES[word] for word in words if word in OPCODES)
    return kernels


def complaints(kernels: dict[str, Counter[str]], used: dict[str, Usage]) -> list[str]:
    """What is wrong, a line each."""
    found = [f"{name} is not in the machine code" for name in EXPECTED if name not in kernels]
    found += [f"{name} is not in EXPECTED of tools/volta_check.py" for name in kernels if name not in EXPECTED]
    for name, counts in kernels.items():
        found += [f"{name}: no {word} in its machine code" for word in EXPECTED.get(name, ()) if not counts[word]]
        found += [f"{name}: uses local memory, {counts[word]} {word}" for word in LOCAL_MEMORY if counts[word]]
        if name not in used:
            found.append(f"{name} is not in the compiler's log")
        elif used[name].spills or used[name].stack:
            found.append(f"{name}: spills {used[name].spills} bytes, its stack has {used[name].stack}")
    return found


def main() -> None:
    nvrtc = compiler()
    include = [str(ROOT / "shared_cuda/include"), str(PACKAGE / "csrc")]
    try:
        cubin, log = nvrtc.compile_cubin(PACKAGE / "csrc/kernels.cu", "sm_70", include)
    except nvrtc.Missing as error:
        sys.exit(f"nothing was checked: {error}")
    kernels, used = instructions(cubin), usage(log)
    for name, counts in kernels.items():
        told = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        print(f"{name:22} {used[name].registers:4} registers, {told}" if name in used else name)
    problems = complaints(kernels, used)
    print(f"sm_70: {len(kernels)} kernels, {len(cubin)} bytes, {len(problems)} problems")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
