"""The extension of this package: machine code for sm_70 (and, where asked for, for sm_90, on which it is tested)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kitchen_core.extension import DRIVER_CUDA, CudaExtension

if TYPE_CHECKING:
    from kitchen_core.devices import DeviceFacts

VOLTA_DRIVER_CUDA = 12000  # its sm_70 code comes from NVRTC 12.9 and is loaded by the driver itself: no CUDA runtime


class DriverExtension(CudaExtension):
    """A CudaExtension without the CUDA runtime: on a V100 any driver for CUDA 12 or newer will do."""

    def __init__(self, package: str) -> None:
        super().__init__(package)
        self.rebuild = (
            f"reinstall {self.distribution} with CUDAARCHS=70 set, which needs a C++ compiler and fetches NVRTC 12.9"
        )

    def why_not(self, facts: DeviceFacts) -> str | None:
        """Why the extension cannot run on a device, in words, or None if it can."""
        needed = VOLTA_DRIVER_CUDA if facts.sm == 70 else DRIVER_CUDA
        driver = facts.driver_cuda if facts.kind == "cuda" else needed
        reason = super().why_not(replace(facts, driver_cuda=max(driver, DRIVER_CUDA)))
        if reason is None and driver < needed:
            found = f"{driver // 1000}.{driver % 1000 // 10}"
            return f"needs a driver for CUDA {needed // 1000}.0 or newer, this one is for CUDA {found}"
        return reason

    def describe(self) -> list[str]:
        """The state of the extension, for `kitchen doctor`."""
        if self.build_info["has_cuda"]:
            return [f"compiled kernels for {', '.join(self.archs)}; sm_70 by NVRTC 12.9, loaded by the driver"]
        return [f"no compiled kernels, the torch path serves: {self.build_info['reason']}"]


EXTENSION = DriverExtension("kitchen_fallback_volta")
