"""Device facts: what a capability and a name mean, and simulation that does not leak."""

import threading

import pytest
import torch

from kitchen_core import UnsupportedError, device_facts, simulate
from kitchen_core.devices import COMMON_NAMES, SIMULATED_PARTS, simulated_facts, simulating

# arch, name, (int8, fp16, bf16, fp8, int4) tensor cores
KINDS = [
    ("sm_60", None, (0, 0, 0, 0, 0)),
    ("sm_61", None, (0, 0, 0, 0, 0)),
    ("sm_70", None, (0, 1, 0, 0, 0)),
    ("sm_72", None, (1, 1, 0, 0, 0)),
    ("sm_75", "Tesla T4", (1, 1, 0, 0, 1)),
    ("sm_75", "NVIDIA GeForce RTX 2080 Ti", (1, 1, 0, 0, 1)),
    ("sm_75", "NVIDIA GeForce GTX 1660 SUPER", (0, 0, 0, 0, 0)),
    ("sm_75", "NVIDIA GeForce GTX 1650", (0, 0, 0, 0, 0)),
    ("sm_75", "NVIDIA GeForce MX450", (0, 0, 0, 0, 0)),
    ("sm_75", "NVIDIA T1000 8GB", (0, 0, 0, 0, 0)),
    ("sm_75", "Quadro T2000", (0, 0, 0, 0, 0)),
    ("sm_80", None, (1, 1, 1, 0, 1)),
    ("sm_86", None, (1, 1, 1, 0, 1)),
    ("sm_89", None, (1, 1, 1, 1, 1)),
    ("sm_90", None, (1, 1, 1, 1, 0)),
    ("sm_100", None, (1, 1, 1, 1, 0)),
    ("sm_120", None, (1, 1, 1, 1, 0)),
]


@pytest.mark.parametrize(("arch", "name", "cores"), KINDS)
def test_tensor_cores(arch, name, cores):
    facts = simulated_facts(arch, name)
    kinds = ("int8", "fp16", "bf16", "fp8", "int4")
    assert tuple(int(getattr(facts, f"{kind}_tensor_cores")) for kind in kinds) == cores


@pytest.mark.parametrize("spelling", ["sm_90", "sm90", "9.0", "90", "90a", "SM_90a"])
def test_spellings(spelling):
    assert simulated_facts(spelling).capability == (9, 0)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("h100", "sm_90"), ("A100", "sm_80"), ("L40S", "sm_89"), ("b200", "sm_100"), ("v100", "sm_70"),
        ("RTX 4090", "sm_89"), ("NVIDIA GeForce RTX 5090", "sm_120"), ("Tesla T4", "sm_75"),
    ],
)  # fmt: skip
def test_common_names(name, arch):
    assert simulated_facts(name) == simulated_facts(arch)


def test_every_common_name_is_of_a_part():
    assert set(COMMON_NAMES.values()) <= set(SIMULATED_PARTS)


def test_unknown_arch_lists_the_known():
    with pytest.raises(UnsupportedError, match=r"unknown GPU architecture 'sm_99'.*sm_70.*sm_120.*names such as h100"):
        simulated_facts("sm_99")


def test_every_part_has_plausible_facts():
    for sm in SIMULATED_PARTS:
        facts = simulated_facts(f"sm_{sm}")
        assert facts.sm == sm
        assert facts.sm_count > 0
        assert 48 << 10 <= facts.shared_memory_optin <= 228 << 10


def test_simulation_ends_with_its_block_and_its_thread():
    other = {}
    with simulate("sm_70") as facts:
        assert device_facts("cuda:5") is facts
        thread = threading.Thread(target=lambda: other.setdefault("simulating", simulating()))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), simulate("sm_80"):
            _ = 1 / 0
        assert device_facts("cuda:0").sm == 70
    assert other == {"simulating": False}
    assert not simulating()


def test_cpu_is_the_cpu_even_when_simulating():
    with simulate("sm_90"):
        assert device_facts("cpu").kind == "cpu"
        assert device_facts(torch.device("meta")).kind == "meta"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu_says_what_to_do():
    with pytest.raises(UnsupportedError, match="simulate"):
        device_facts("cuda:0")


@pytest.mark.gpu
def test_real_facts():
    facts = device_facts("cuda:0")
    assert facts.capability == torch.cuda.get_device_capability(0)
    assert facts.sm_count > 0
    assert facts.driver_cuda >= 12000


@pytest.mark.gpu
def test_facts_of_a_real_gpu():
    facts = device_facts("cuda:0")
    assert facts.kind == "cuda"
    assert facts.sm == 10 * torch.cuda.get_device_capability(0)[0] + torch.cuda.get_device_capability(0)[1]
    assert facts.driver_cuda >= 11000
    assert facts.sm_count > 0
    assert facts.shared_memory_optin >= 48 << 10
    assert not facts.simulated
