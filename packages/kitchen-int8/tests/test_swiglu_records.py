"""When the fused SwiGLU MLP offers itself, on simulated devices."""

from __future__ import annotations

import pytest
import torch

from kitchen_core import explain, simulate
from kitchen_core.devices import CPU, simulated_facts
from kitchen_core.registry import Problem
from kitchen_core.testing import RELEASE_ARCHS, pretend_built
from kitchen_int8._extension import EXTENSION
from kitchen_int8.kernels import provider

FUSED = "int8/swiglu_sm90"
ASKED = {"M": 1024, "N": 3072, "K": 3072, "rotation": 256, "group": 256}


@pytest.fixture(autouse=True)
def _built(monkeypatch):
    pretend_built(monkeypatch, EXTENSION, *RELEASE_ARCHS)


def answer(facts, **changes) -> str | None:
    (record,) = (k for k in provider.kernels if k.id == FUSED)
    asked = {"dtype": torch.bfloat16, "out_dtype": torch.bfloat16} | ASKED | changes
    return record.supports(Problem("int8_swiglu_mlp", torch.device("cuda"), **asked), facts)


def test_hopper_and_no_other_chip():
    assert answer(simulated_facts("sm_90")) is None
    for arch in ("sm_75", "sm_80", "sm_89", "sm_100", "sm_120"):
        assert "needs sm_90 (wgmma)" in answer(simulated_facts(arch))
    assert answer(CPU) is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"K": 100}, "K must be a multiple of 16; the call has 100"),
        ({"K": 131_072}, "131071; the call has 131072"),
        ({"M": 2**29 + 1}, "at most 536870912 rows of x"),
        ({"out_dtype": torch.float64}, "float64"),
    ],
)
def test_what_a_problem_must_keep_to(changes, words):
    assert words in answer(simulated_facts("sm_90"), **changes)


@pytest.mark.parametrize("M", [0, 1, 16, 1024, 100_000])
def test_chosen_for_every_number_of_rows_so_that_bits_do_not_depend_on_it(M):
    with simulate("sm_90"):
        assert explain("int8_swiglu_mlp", **ASKED | {"M": M}, device="cuda:0").chosen.id == FUSED


def test_elsewhere_two_calls():
    with simulate("sm_80"):
        assert explain("int8_swiglu_mlp", **ASKED, device="cuda:0").chosen.id == "core/composed"
    with simulate("sm_90"):
        assert explain("int8_gate_up_mlp", **ASKED, device="cuda:0").chosen.id == "core/composed"
