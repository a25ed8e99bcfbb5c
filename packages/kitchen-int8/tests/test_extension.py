"""When the CUDA extension can be used, and what is said when it cannot."""

from __future__ import annotations

import types

import pytest

from kitchen_core import extension as core_extension
from kitchen_core.devices import CPU, simulated_facts
from kitchen_core.errors import BuildMismatchError
from kitchen_int8._extension import EXTENSION

BUILT = {"has_cuda": True, "archs": ["80-real", "90a-real", "120-real", "120-virtual"], "nvcc": "13.0.88", "reason": ""}
NOT_BUILT = {"has_cuda": False, "archs": [], "nvcc": "", "reason": "no nvcc"}


@pytest.fixture
def built(monkeypatch):
    def use(info):
        monkeypatch.setitem(EXTENSION.__dict__, "build_info", info)

    return use


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_device_served_by_the_build(built, arch):
    built(BUILT)
    assert EXTENSION.why_not(simulated_facts(arch)) is None


@pytest.mark.parametrize("arch", ["sm_75", "sm_100", "sm_70"])
def test_device_not_served_by_the_build_names_both(built, arch):
    built(BUILT)
    reason = EXTENSION.why_not(simulated_facts(arch))
    assert "built for 80, 90a, 120, 120-virtual" in reason
    assert arch in reason


def test_virtual_architecture_serves_later_chips(built):
    built(BUILT | {"archs": ["75-virtual"]})
    assert EXTENSION.why_not(simulated_facts("sm_100")) is None


def test_ptx_of_one_chip_serves_no_later_one(built):
    built(BUILT | {"archs": ["90a-virtual"]})
    assert EXTENSION.why_not(simulated_facts("sm_90")) is None
    assert "built for 90a-virtual" in EXTENSION.why_not(simulated_facts("sm_100"))


def test_no_extension_gives_the_reason_of_the_build(built):
    built(NOT_BUILT)
    assert "no nvcc" in EXTENSION.why_not(simulated_facts("sm_90"))
    EXTENSION.__dict__.pop("module", None)
    with pytest.raises(BuildMismatchError, match="no nvcc"):
        _ = EXTENSION.module


def test_old_driver(built, monkeypatch):
    built(BUILT)
    facts = simulated_facts("sm_90")
    monkeypatch.setattr(core_extension, "DRIVER_CUDA", facts.driver_cuda + 10)
    assert "driver" in EXTENSION.why_not(facts)


def test_no_cuda_device(built):
    built(BUILT)
    assert "CUDA device" in EXTENSION.why_not(CPU)


def test_other_abi_is_refused_with_both_numbers(built, monkeypatch):
    built(BUILT)
    monkeypatch.setattr(core_extension.importlib, "import_module", lambda name: types.SimpleNamespace(abi=lambda: 999))
    EXTENSION.__dict__.pop("module", None)
    with pytest.raises(BuildMismatchError, match=r"ABI 999.*ABI 1"):
        _ = EXTENSION.module
    EXTENSION.__dict__.pop("module", None)
