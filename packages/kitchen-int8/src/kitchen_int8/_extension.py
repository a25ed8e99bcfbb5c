"""The CUDA extension of this package: whether it was built, for what, and the module itself, loaded when first used.

Whether it can be used is decided by `_build_info.json`, which the build installs, and by device facts; never by a caught
ImportError, which would hide a broken binary. Nothing here imports torch or the extension at import time.
"""

from __future__ import annotations

import importlib
import json
from functools import cache
from importlib.resources import files
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kitchen_core.devices import DeviceFacts

DRIVER_CUDA = (
    13000  # the extension links the CUDA 13 runtime statically, so it needs a driver for CUDA 13.0 (R580) or newer
)
REBUILD = "reinstall kitchen-int8 with nvcc on PATH and CUDAARCHS set, for example CUDAARCHS=90a"


@cache
def build_info() -> dict[str, Any]:
    """What the build left behind: has_cuda, archs (as CMake spells them), nvcc, and the reason if nothing was built."""
    path = files(__package__).joinpath("_build_info.json")
    if not path.is_file():
        return {
            "has_cuda": False,
            "archs": [],
            "nvcc": "",
            "reason": "it was installed without running its CMake build",
        }
    return json.loads(path.read_text())


def archs() -> list[str]:
    """The compiled architectures: "90a" is machine code for that chip, "120-virtual" PTX for it and later chips."""
    return [arch.removesuffix("-real") for arch in build_info()["archs"]]


def why_not(facts: DeviceFacts) -> str | None:
    """Why the extension cannot run on a device, in words, or None if it can."""
    info = build_info()
    if facts.kind != "cuda":
        return f"needs a CUDA device, {facts} is none"
    if not info["has_cuda"]:
        return f"kitchen-int8 was installed without its CUDA extension: {info['reason']}; {REBUILD}"
    if not any(_serves(arch, facts.sm) for arch in archs()):
        return f"kitchen-int8 was built for {', '.join(archs())}, the device is {facts}; {REBUILD}"
    if facts.driver_cuda < DRIVER_CUDA:
        needed, found = _version(DRIVER_CUDA), _version(facts.driver_cuda)
        return f"needs a driver for CUDA {needed} (R580) or newer, this one is for CUDA {found}"
    return None


def why_not_path(facts: DeviceFacts, path: str) -> str | None:
    """Why the kernels of a folder of csrc ("sm75", "sm80") cannot run on a device, in words, or None if they can.

    Which architectures a folder is compiled for: KitchenCuda.cmake, _kitchen_archs_of_folder.
    """
    reason = why_not(facts)
    if reason is not None:
        return reason
    compiled = [arch for arch in archs() if _in_path(arch, path)]
    if not any(_serves(arch, facts.sm) for arch in compiled):
        found = ", ".join(compiled) or "no architecture"
        return f"the {path} kernels of kitchen-int8 were built for {found}, the device is {facts}"
    return None


def describe() -> list[str]:
    """The state of the extension, for `kitchen doctor`."""
    info = build_info()
    if info["has_cuda"]:
        return [f"CUDA extension for {', '.join(archs())}, built with nvcc {info['nvcc']}"]
    return [f"no CUDA extension: {info['reason']}"]


@cache
def extension() -> ModuleType:
    """The module `_C`. Raises BuildMismatchError if it speaks another ABI number than kitchen-core, or was not built."""
    from kitchen_core.abi import KITCHEN_ABI
    from kitchen_core.errors import BuildMismatchError

    info = build_info()
    if not info["has_cuda"]:
        raise BuildMismatchError(f"kitchen-int8 was installed without its CUDA extension: {info['reason']}; {REBUILD}")
    module = importlib.import_module(f"{__package__}._C")
    if module.abi() != KITCHEN_ABI:
        raise BuildMismatchError(
            f"the CUDA extension of kitchen-int8 speaks ABI {module.abi()}, kitchen-core speaks ABI {KITCHEN_ABI}; "
            "install versions of both that belong together"
        )
    return module


def _serves(arch: str, sm: int) -> bool:
    """Machine code runs on later minor versions of its chip, an `a` target on that chip alone, PTX on every later chip."""
    if arch.endswith("-virtual"):
        return sm >= int(arch.removesuffix("-virtual").rstrip("af"))
    if arch.endswith(("a", "f")):
        return sm == int(arch[:-1])
    return sm // 10 == int(arch) // 10 and sm >= int(arch)


def _in_path(arch: str, path: str) -> bool:
    base = int(arch.removesuffix("-virtual").rstrip("af"))
    return base >= 80 if path == "sm80" else arch.startswith(("75", "90a"))


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
