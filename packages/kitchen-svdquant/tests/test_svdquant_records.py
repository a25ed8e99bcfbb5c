"""When the SVDQuant kernels offer themselves, on simulated devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kitchen_core.devices import CPU, simulated_facts
from kitchen_core.registry import Problem
from kitchen_svdquant import _hopper
from kitchen_svdquant._extension import EXTENSION
from kitchen_svdquant.kernels import FEW_ROWS, provider

RELEASE = ["75-real", "80-real", "90a-real", "100-real", "120-real", "120-virtual"]
GEMM = "scaled_mm_svdquant_w4a4"


@pytest.fixture
def built(monkeypatch):
    def use(*archs):
        info = {"has_cuda": bool(archs), "archs": list(archs), "nvcc": "13.0.88", "reason": "" if archs else "no nvcc"}
        monkeypatch.setitem(EXTENSION.__dict__, "build_info", info)

    return use


def answers(facts, op=GEMM, **changes) -> dict[str, str | None]:
    """By priority, the first that says None is chosen."""
    asked = {"M": 4096, "N": 3072, "K": 3072, "out_dtype": torch.bfloat16, "group": 64, "bits": 4} | changes
    problem = Problem(op, torch.device("cuda"), torch.int8, **asked)
    kernels = sorted((k for k in provider.kernels if k.op == op), key=lambda k: -k.priority)
    return {k.id: k.supports(problem, facts) for k in kernels}


def chosen(found: dict[str, str | None]) -> str | None:
    return next((name for name, reason in found.items() if reason is None), None)


@pytest.mark.parametrize(
    ("arch", "many", "few"),
    [
        ("sm_80", "svdquant/int4", "svdquant/int4"),
        ("sm_86", "svdquant/int4", "svdquant/int4"),
        ("sm_89", "svdquant/int4", "svdquant/int4"),
        ("sm_90", "svdquant/sm90", "svdquant/few_rows"),
        ("sm_100", "svdquant/sm80", "svdquant/few_rows"),
        ("sm_120", "svdquant/sm80", "svdquant/few_rows"),
        ("sm_75", "svdquant/sm75", "svdquant/sm75"),
        ("sm_70", None, None),
    ],
)
def test_gemm_by_device(built, arch, many, few):
    built(*RELEASE)
    assert chosen(answers(simulated_facts(arch))) == many
    assert chosen(answers(simulated_facts(arch), M=FEW_ROWS)) == few


def test_older_paths_can_be_forced_on_hopper(built):
    built(*RELEASE)
    found = answers(simulated_facts("sm_90"))
    assert found["svdquant/int4"] is None
    assert found["svdquant/sm80"] is None
    assert found["svdquant/sm75"] is None
    assert "4-bit MMA exists on sm_80 to sm_90" in answers(simulated_facts("sm_120"))["svdquant/int4"]


def test_turing_without_tensor_cores_is_told_by_name(built):
    built(*RELEASE)
    facts = replace(simulated_facts("sm_75"), name="NVIDIA GeForce GTX 1660 Ti")
    assert "needs INT8 tensor cores" in answers(facts)["svdquant/sm75"]


def test_whole_linear_has_kernels_of_its_own_where_they_fuse(built):
    built(*RELEASE)
    assert chosen(answers(simulated_facts("sm_90"), "svdquant_linear")) == "svdquant/sm90"
    assert chosen(answers(simulated_facts("sm_90"), "svdquant_linear", M=1)) == "svdquant/few_rows"
    assert chosen(answers(simulated_facts("sm_80"), "svdquant_linear")) is None, "composed of the two halves"
    assert f"for M of at most {FEW_ROWS}" in answers(simulated_facts("sm_90"))["svdquant/few_rows"]


def test_quantizer_runs_wherever_the_package_was_built_for(built):
    built(*RELEASE)
    for arch in ("sm_75", "sm_80", "sm_90", "sm_120"):
        assert answers(simulated_facts(arch), "quantize_svdquant_w4a4") == {"svdquant/groups": None}


def test_cpu_and_no_extension(built):
    built(*RELEASE)
    assert all("CUDA device" in reason for reason in answers(CPU, M=1).values())
    built()
    assert all("no nvcc" in reason for reason in answers(simulated_facts("sm_90"), M=1).values())
    built("80-real")
    assert "was built for 80" in answers(simulated_facts("sm_90"))["svdquant/sm90"]


@pytest.mark.parametrize("changes", [{"M": 2**30 + 1}, {"N": 2**30 + 1}, {"K": 2**30 + 64}])
def test_what_a_problem_must_keep_to(built, changes):
    built(*RELEASE)
    for arch in ("sm_90", "sm_80"):
        assert chosen(answers(simulated_facts(arch), **changes)) is None


def test_weight_is_decoded_whole_where_rows_of_the_output_are_no_multiple_of_16_bytes(monkeypatch):
    monkeypatch.setattr(_hopper, "CHUNK_BYTES", 1)
    assert _hopper.chunk_columns(1000, 1088) == _hopper.CHUNK_COLUMNS
    assert _hopper.chunk_columns(1001, 1088) == 1001
    assert _hopper.chunk_columns(1004, 1088, out_bytes=4) == _hopper.CHUNK_COLUMNS
    assert _hopper.chunk_columns(1004, 1088, out_bytes=2) == 1004
