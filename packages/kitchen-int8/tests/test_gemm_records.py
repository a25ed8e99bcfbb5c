"""When the portable INT8 GEMMs offer themselves, on simulated devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kitchen_core import explain
from kitchen_core.devices import CPU, simulated_facts
from kitchen_core.registry import Problem
from kitchen_core.testing import RELEASE_ARCHS, pretend_built
from kitchen_int8._extension import EXTENSION
from kitchen_int8.kernels import provider

SM80, SM75 = "int8/sm80", "int8/sm75"


@pytest.fixture
def built(monkeypatch):
    return partial(pretend_built, monkeypatch, EXTENSION)


def answers(facts, **changes) -> dict[str, str | None]:
    asked = {"M": 64, "N": 3072, "K": 3072, "out_dtype": torch.bfloat16} | changes
    problem = Problem("int8_scaled_mm", torch.device("cuda"), torch.int8, **asked)
    return {k.id: k.supports(problem, facts) for k in provider.kernels if k.id in (SM80, SM75)}


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"])
def test_release_build_has_the_sm80_path_for_every_later_chip(built, arch):
    built(*RELEASE_ARCHS)
    assert answers(simulated_facts(arch))[SM80] is None


def test_release_build_on_turing(built):
    built(*RELEASE_ARCHS)
    found = answers(simulated_facts("sm_75"))
    assert found[SM75] is None
    assert "built for 80, 90a, 100, 120, 120-virtual" in found[SM80]


def test_turing_path_runs_on_hopper_below_the_other(built):
    built(*RELEASE_ARCHS)
    assert answers(simulated_facts("sm_90"))[SM75] is None
    assert "built for 75, 90a" in answers(simulated_facts("sm_80"))[SM75]
    priorities = {k.id: k.priority for k in provider.kernels}
    assert priorities[SM80] > priorities[SM75]


def test_turing_without_tensor_cores(built):
    built("75-real")
    found = answers(simulated_facts("sm_75", "NVIDIA GeForce GTX 1660"))
    assert "needs INT8 tensor cores" in found[SM75]
    assert "no architecture" in found[SM80]


def test_volta_and_cpu_and_no_extension(built):
    built(*RELEASE_ARCHS)
    assert all("built for" in reason for reason in answers(simulated_facts("sm_70")).values())
    assert all("CUDA device" in reason for reason in answers(CPU).values())
    built()
    assert all("no nvcc" in reason for reason in answers(simulated_facts("sm_90")).values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"K": 131_072}, "131071; the call has 131072"),
        ({"K": 0}, "from 1 to"),
        ({"M": 2**30 + 1}, "at most"),
        ({"N": 2**30 + 1}, "at most"),
        ({"out_dtype": torch.float64}, "float64"),
    ],
)
def test_what_a_problem_must_keep_to(built, changes, words):
    built(*RELEASE_ARCHS)
    for arch in ("sm_90", "sm_75"):
        assert any(words in (reason or "") for reason in answers(simulated_facts(arch), **changes).values())


@pytest.mark.parametrize("K", [1, 7, 131_071])
def test_any_width_is_taken(built, K):
    built(*RELEASE_ARCHS)
    assert answers(simulated_facts("sm_90"), K=K, N=1, M=1) == {SM80: None, SM75: None}


def hopper_answers(arch: str, op: str, **changes) -> dict[str, str | None]:
    asked = {"M": 16, "N": 3072, "K": 3072, "out_dtype": torch.bfloat16} | changes
    problem = Problem(op, torch.device("cuda"), torch.bfloat16, **asked)
    records = [k for k in provider.kernels if k.op == op and k.name in ("decode_sm90", "sm90")]
    assert [k.priority for k in records] == sorted((k.priority for k in records), reverse=True)
    return {k.id: k.supports(problem, simulated_facts(arch)) for k in records}


@pytest.mark.parametrize("op", ["int8_linear", "int8_scaled_mm"])
def test_few_rows_on_hopper(built, op):
    built(*RELEASE_ARCHS)
    both = {"int8/decode_sm90": None, "int8/sm90": None}
    assert hopper_answers("sm_90", op) == both
    found = hopper_answers("sm_90", op, M=17)
    assert found["int8/sm90"] is None
    assert "for M of at most 16, the call has 17" in found["int8/decode_sm90"]
    for changes, words in (
        ({"K": 3080}, "multiple of 16"),
        ({"K": 131_072}, "131071"),
        ({"out_dtype": torch.float64}, "float64"),
    ):
        assert all(words in (reason or "") for reason in hopper_answers("sm_90", op, **changes).values())
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        assert all("sm_90 (wgmma)" in (reason or "") for reason in hopper_answers(arch, op).values())


def test_the_whole_linear_asks_for_what_its_quantizer_asks(built):
    built(*RELEASE_ARCHS)
    assert set(hopper_answers("sm_90", "int8_linear", K=4096, rotation=4096).values()) == {None}
    found = hopper_answers("sm_90", "int8_linear", K=16384, rotation=16384)
    assert all("rotates groups of at most 4096" in (reason or "") for reason in found.values())


def test_explain_says_that_rows_are_loose_and_chooses_as_if_they_were_not():
    """Kernels that want rows packed copy loose ones at every call, and say so once; ``explain`` shows it beforehand."""
    x, scale = torch.zeros(3, 256), torch.ones(72)
    weight = torch.zeros(72, 256, dtype=torch.int8)
    wide = torch.zeros(72, 600, dtype=torch.int8)
    offset = torch.zeros(72 * 256 + 3, dtype=torch.int8)[3:].view(72, 256)
    packed = explain("int8_linear", x, weight, scale)
    assert "loose" not in str(packed)
    for loose in (wide[:, 5:261], offset, weight.t().contiguous().t()):
        found = explain("int8_linear", x, loose, scale)
        assert "loose_weight" in str(found)
        assert [c.reason for c in found.candidates] == [c.reason for c in packed.candidates]
    codes = torch.zeros(3, 512, dtype=torch.int8)[:, ::2]
    assert "loose_codes" in str(explain("int8_scaled_mm", codes, torch.ones(3, 1), weight, scale))
