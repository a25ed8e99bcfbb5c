"""Compiles CUDA C++ to machine code with NVRTC of CUDA 12, the last compiler that knows sm_70. Needs no GPU and no driver.

    python nvrtc_cubin.py kernels.cu kernels_70.cubin sm_70 -I include ...      the compiler's log goes to kernels_70.log
    python nvrtc_cubin.py --check                                              says why it cannot, and exits with 1

NVRTC and the CUDA headers come from the wheels nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12 in the environment of the
interpreter (build_backend.py asks for them), or from CUDA_HOME. Nothing of them is installed with the package.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import sys
from pathlib import Path

# NVRTC has no headers of the host; what kernels use of these is here, or built in.
STANDARD_HEADERS = {
    "cstdint": """
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
""",
    "cstring": "",
}
FLAGS = ["-std=c++17", "-default-device", "-DNDEBUG", "--ptxas-options=-v"]


class Missing(Exception):
    """NVRTC is not there, or is not one that knows sm_70."""


def _folders() -> tuple[Path, Path]:
    """Where libnvrtc and where cuda_fp16.h are."""
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, spec.submodule_search_locations if spec else ()):
        library, headers = root / "cuda_nvrtc/lib", root / "cuda_runtime/include"
        if (library / "libnvrtc.so.12").exists() and (headers / "cuda_fp16.h").exists():
            return library, headers
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if (home / "lib64/libnvrtc.so.12").exists():
        return home / "lib64", home / "include"
    raise Missing(
        "NVRTC of CUDA 12 was not found (the wheels nvidia-cuda-nvrtc-cu12 and "
        "nvidia-cuda-runtime-cu12, or a toolkit in CUDA_HOME)"
    )


def load() -> tuple[ctypes.CDLL, Path]:
    """The library and the folder of CUDA's headers. Raises Missing."""
    libraries, headers = _folders()
    for builtins in sorted(libraries.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(libraries / "libnvrtc.so.12"))
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(archs)
    if 70 not in archs:
        raise Missing(f"the NVRTC in {libraries} does not know sm_70; one of CUDA 12.9 or earlier does")
    return nvrtc, headers


def compile_cubin(source: Path, arch: str, include: list[str]) -> tuple[bytes, str]:
    """Machine code for one chip, and the log, which has the registers and spills of every kernel. Exits on errors."""
    nvrtc, headers = load()
    program = ctypes.c_void_p()
    names = [name.encode() for name in STANDARD_HEADERS]
    texts = [text.encode() for text in STANDARD_HEADERS.values()]
    strings = ctypes.c_char_p * len(names)
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), str(source).encode(), len(names), strings(*texts), strings(*names)
    )
    options = [*FLAGS, f"-arch={arch}", f"-I{headers}", *(f"-I{folder}" for folder in include)]
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
    )
    log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
    if failed:
        sys.exit(f"{log}\nNVRTC could not compile {source}: status {failed}")
    return _read(nvrtc, program, "CUBIN"), log


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("cubin", type=Path, nargs="?")
    parser.add_argument("arch", nargs="?", default="sm_70")
    parser.add_argument("-I", dest="include", action="append", default=[])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        if args.check:
            load()
            return
        code, log = compile_cubin(args.source, args.arch, args.include)
    except Missing as error:
        print(error)
        sys.exit(1)
    args.cubin.write_bytes(code)
    args.cubin.with_suffix(".log").write_text(log)


if __name__ == "__main__":
    main()
