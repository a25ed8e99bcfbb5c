"""The CUDA extension of a format package: whether it was built, for what, and the module itself, loaded when first used.

Whether it can be used is decided by `_build_info.json`, which the package's build installs, by device facts, and by loading it
once: what a broken binary says is a kernel's reason, shown by `explain`, `doctor` and the warning of the slow path.
Nothing here imports torch or an extension at import time.
"""

from __future__ import annotations

import importlib
import json
from functools import cached_property
from importlib.resources import files
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .abi import KITCHEN_ABI
from .errors import BuildMismatchError

if TYPE_CHECKING:
    from .devices import DeviceFacts

DRIVER_CUDA = (
    13000  # extensions link the CUDA 13 runtime statically, so they need a driver for CUDA 13.0 (R580) or newer
)


class CudaExtension:
    """The extension module ``_C`` of one package, with what its build recorded.

    Args:
        package: the import name, "kitchen_int8".
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.distribution = package.replace("_", "-")
        self.rebuild = f"reinstall {self.distribution} with nvcc on PATH and CUDAARCHS set to your GPU's (90a: H100)"

    @cached_property
    def build_info(self) -> dict[str, Any]:
        """What the build left behind: has_cuda, archs (as CMake spells them), nvcc, and the reason if nothing was built."""
        path = files(self.package).joinpath("_build_info.json")
        if not path.is_file():
            reason = "it was installed without running its CMake build"
            return {"has_cuda": False, "archs": [], "nvcc": "", "reason": reason}
        return json.loads(path.read_text())

    @property
    def archs(self) -> list[str]:
        """The compiled architectures: "90a" is machine code for that chip, "120-virtual" PTX for it and later chips."""
        return [arch.removesuffix("-real") for arch in self.build_info["archs"]]

    def why_not(self, facts: DeviceFacts) -> str | None:
        """Why the extension cannot run on a device, in words, or None if it can."""
        if facts.kind != "cuda":
            return f"needs a CUDA device, {facts} is none"
        if not self.build_info["has_cuda"]:
            return self._not_built()
        if not any(_serves(arch, facts.sm) for arch in self.archs):
            return f"{self.distribution} was built for {', '.join(self.archs)}, the device is {facts}; {self.rebuild}"
        if facts.driver_cuda < DRIVER_CUDA:
            needed, found = _version(DRIVER_CUDA), _version(facts.driver_cuda)
            return f"needs a driver for CUDA {needed} (R580) or newer, this one is for CUDA {found}"
        if not facts.simulated and self.load_error:  # a machine without that GPU need not have the binary either
            return f"{self.distribution}'s CUDA extension cannot be loaded: {self.load_error}; {self.rebuild}"
        return None

    def why_not_path(self, facts: DeviceFacts, path: str) -> str | None:
        """Why the kernels of a folder of csrc ("sm75", "sm80", "sm90") cannot run on a device, in words, or None if they can.

        Which architectures a folder is compiled for: KitchenCuda.cmake, _kitchen_archs_of_folder.
        """
        reason = self.why_not(facts)
        if reason is not None:
            return reason
        compiled = [arch for arch in self.archs if _in_path(arch, path)]
        if not any(_serves(arch, facts.sm) for arch in compiled):
            found = ", ".join(compiled) or "no architecture"
            return f"the {path} kernels of {self.distribution} were built for {found}, the device is {facts}"
        return None

    def describe(self) -> list[str]:
        """The state of the extension, for `kitchen doctor`."""
        info = self.build_info
        if info["has_cuda"]:
            lines = [f"CUDA extension for {', '.join(self.archs)}, built with nvcc {info['nvcc']}"]
            return [*lines, f"it cannot be loaded: {self.load_error}"] if self.load_error else lines
        return [f"no CUDA extension: {info['reason']}"]

    @cached_property
    def module(self) -> ModuleType:
        """The module `_C`. Raises BuildMismatchError if it speaks another ABI number than kitchen-core, or was not built."""
        if not self.build_info["has_cuda"]:
            raise BuildMismatchError(self._not_built())
        module = importlib.import_module(f"{self.package}._C")
        if module.abi() != KITCHEN_ABI:
            raise BuildMismatchError(
                f"the CUDA extension of {self.distribution} speaks ABI {module.abi()}, kitchen-core speaks ABI "
                f"{KITCHEN_ABI}; install versions of both that belong together"
            )
        return module

    @cached_property
    def load_error(self) -> str:
        """The first error of loading the module, in one line; empty if it loads: what a broken file says is kept."""
        try:
            _ = self.module
        except (ImportError, OSError, BuildMismatchError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _not_built(self) -> str:
        reason = self.build_info["reason"]
        return f"{self.distribution} was installed without its CUDA extension: {reason}; {self.rebuild}"


def _serves(arch: str, sm: int) -> bool:
    """Machine code runs on later minor versions of its chip, `a` targets and their PTX on it alone, other PTX later too."""
    name = arch.removesuffix("-virtual")
    if name.endswith(("a", "f")):
        return sm == int(name[:-1])
    if arch.endswith("-virtual"):
        return sm >= int(name)
    return sm // 10 == int(arch) // 10 and sm >= int(arch)


def _in_path(arch: str, path: str) -> bool:
    if path == "sm80":
        return int(arch.removesuffix("-virtual").rstrip("af")) >= 80
    return arch == "90a" if path == "sm90" else arch.startswith(("75", "90a"))


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
