"""Facts about devices: what a GPU is and which tensor cores it really has.

Facts are read per device (never from "the current device"), cached per index, and replaceable:

    with simulate("sm_70"):
        explain("int8_linear", ...)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

import torch

from ._overrides import override
from .errors import UnsupportedError

# Turing parts that report compute capability 7.5 and have no tensor cores: the number alone cannot tell them from a T4.
TURING_WITHOUT_TENSOR_CORES = (
    "1630", "1650", "1660", "MX450", "MX550", "T400", "T500", "T550", "T600", "T1000", "T1200", "T2000", "CMP 30HX",
)  # fmt: skip


@dataclass(frozen=True)
class DeviceFacts:
    """What one device is. Sizes are bytes; ``driver_cuda`` is the newest CUDA version of its driver, as 13000 for 13.0."""

    kind: str
    name: str
    capability: tuple[int, int] = (0, 0)
    sm_count: int = 0
    shared_memory_optin: int = 0
    l2_bytes: int = 0
    driver_cuda: int = 0
    simulated: bool = False

    @property
    def sm(self) -> int:
        """Compute capability as one number: 75, 90, 120; 0 where there is none."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def arch(self) -> str:
        """Compute capability as compilers spell it: sm_90; the kind of device where there is none."""
        return f"sm_{self.sm}" if self.kind == "cuda" else self.kind

    @property
    def has_tensor_cores(self) -> bool:
        """Whether there are tensor cores at all (Volta and later, but not every Turing part)."""
        if self.kind != "cuda" or self.sm < 70:
            return False
        return not (self.sm == 75 and _is_turing_without_tensor_cores(self.name))

    @property
    def int8_tensor_cores(self) -> bool:
        """INT8 matrix instructions: from 7.2 (Xavier) on; not on Volta's 7.0."""
        return self.has_tensor_cores and self.sm >= 72

    @property
    def fp16_tensor_cores(self) -> bool:
        """FP16 matrix instructions."""
        return self.has_tensor_cores

    @property
    def bf16_tensor_cores(self) -> bool:
        """BF16 matrix instructions: from 8.0 on."""
        return self.has_tensor_cores and self.sm >= 80

    @property
    def int4_tensor_cores(self) -> bool:
        """Real INT4 matrix instructions: 7.5 to 8.9; later chips emulate them."""
        return self.has_tensor_cores and 75 <= self.sm < 90

    @property
    def fp8_tensor_cores(self) -> bool:
        """FP8 matrix instructions: from 8.9 on."""
        return self.has_tensor_cores and self.sm >= 89

    def __str__(self) -> str:
        mark = ", simulated" if self.simulated else ""
        return f"{self.name} ({self.arch}{mark})" if self.kind == "cuda" else self.name


CPU = DeviceFacts("cpu", "CPU")

# What `simulate("sm_NN")` stands for: one real part of each compute capability.
SIMULATED_PARTS = {
    60: ("Tesla P100-PCIE-16GB", 56, 48, 4),
    61: ("NVIDIA GeForce GTX 1080 Ti", 28, 48, 3),
    70: ("Tesla V100-SXM2-32GB", 80, 96, 6),
    72: ("Xavier", 8, 96, 1),
    75: ("Tesla T4", 40, 64, 4),
    80: ("NVIDIA A100-SXM4-80GB", 108, 163, 40),
    86: ("NVIDIA GeForce RTX 3090", 82, 99, 6),
    87: ("Orin", 16, 163, 4),
    89: ("NVIDIA GeForce RTX 4090", 128, 99, 72),
    90: ("NVIDIA H200", 132, 227, 60),
    100: ("NVIDIA B200", 148, 227, 126),
    103: ("NVIDIA B300", 148, 227, 126),
    120: ("NVIDIA GeForce RTX 5090", 170, 99, 96),
    121: ("NVIDIA GB10", 48, 99, 24),
}
_SIMULATED_DRIVER_CUDA = 13000

# Names that people say, for the part above that stands for their architecture.
COMMON_NAMES = {
    "p100": 60, "1080": 61, "1080ti": 61, "v100": 70, "t4": 75, "2080": 75, "2080ti": 75, "a100": 80, "a800": 80,
    "a10": 86, "a40": 86, "a6000": 86, "3090": 86, "orin": 87, "l4": 89, "l40": 89, "l40s": 89, "4090": 89,
    "h100": 90, "h200": 90, "h20": 90, "h800": 90, "gh200": 90, "b200": 100, "gb200": 100, "b300": 103, "gb300": 103,
    "5090": 120, "gb10": 121,
}  # fmt: skip

_simulated: ContextVar[DeviceFacts | None] = ContextVar("kitchen_simulated_device", default=None)


def _is_turing_without_tensor_cores(name: str) -> bool:
    return any(re.search(rf"(?<![0-9A-Za-z]){re.escape(part)}(?![0-9])", name) for part in TURING_WITHOUT_TENSOR_CORES)


def simulated_facts(arch: str, name: str | None = None) -> DeviceFacts:
    """Facts of a representative GPU.

    ``arch`` is "sm_70", "7.0" or "70", or a common name of a GPU, such as "h100" or "RTX 4090"; ``name`` replaces the
    part's name ("NVIDIA GeForce GTX 1660").
    Raises UnsupportedError for an arch that is not in SIMULATED_PARTS.
    """
    digits = str(arch).lower().removeprefix("sm_").removeprefix("sm").rstrip("af").replace(".", "")
    common = re.sub(r"nvidia|geforce|tesla|rtx|gtx|[^a-z0-9]", "", str(arch).lower())
    digits = str(COMMON_NAMES.get(common, digits))
    if not digits.isdigit() or int(digits) not in SIMULATED_PARTS:
        known = ", ".join(f"sm_{sm}" for sm in SIMULATED_PARTS)
        raise UnsupportedError(
            f"unknown GPU architecture {arch!r}; known: {known}, and common names such as h100. Write it as sm_90 or 9.0"
        )
    sm = int(digits)
    part, sm_count, shared_kib, l2_mib = SIMULATED_PARTS[sm]
    return DeviceFacts(
        kind="cuda",
        name=name or part,
        capability=(sm // 10, sm % 10),
        sm_count=sm_count,
        shared_memory_optin=shared_kib << 10,
        l2_bytes=l2_mib << 20,
        driver_cuda=_SIMULATED_DRIVER_CUDA,
        simulated=True,
    )


@contextlib.contextmanager
def simulate(facts: DeviceFacts | str, name: str | None = None) -> Iterator[DeviceFacts]:
    """Within the block, this thread sees every CUDA device as ``facts`` (a DeviceFacts, or "sm_70")."""
    facts = replace(facts, simulated=True) if isinstance(facts, DeviceFacts) else simulated_facts(facts, name)
    with override(_simulated, facts):
        yield facts


def simulating() -> bool:
    """Whether device facts are being simulated in this thread."""
    return _simulated.get() is not None


def device_facts(device: torch.device | str) -> DeviceFacts:
    """Facts of one device, the given one, whichever device is current."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU if device.type == "cpu" else DeviceFacts(device.type, device.type)
    facts = _simulated.get()
    if facts is not None:
        return facts
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"facts of {device} were asked for, but torch sees no CUDA device here. "
            'Use a CPU device, or simulate one: kitchen_core.simulate("sm_90")'
        )
    return _read_cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _read_cuda_facts(index: int) -> DeviceFacts:
    if torch.version.hip is not None:
        return DeviceFacts("hip", torch.cuda.get_device_name(index))
    props = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        kind="cuda",
        name=props.name,
        capability=(props.major, props.minor),
        sm_count=props.multi_processor_count,
        shared_memory_optin=getattr(props, "shared_memory_per_block_optin", 48 << 10),
        l2_bytes=getattr(props, "L2_cache_size", 0),
        driver_cuda=_driver_cuda(),
    )


def _driver_cuda() -> int:
    """The newest CUDA version of the driver, as 13000 for 13.0. Asked of libcuda: torch has no call that tells it."""
    version = ctypes.c_int()
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
