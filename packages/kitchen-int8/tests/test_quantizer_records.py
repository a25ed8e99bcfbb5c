"""When the quantizers and dequantizers offer themselves, on simulated devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kitchen_core.devices import CPU, simulated_facts
from kitchen_core.registry import Problem
from kitchen_core.testing import RELEASE_ARCHS, pretend_built
from kitchen_int8._extension import EXTENSION
from kitchen_int8.kernels import provider

KERNELS = {
    "quantize_int8_rowwise": "int8/rowwise",
    "quantize_and_rotate_rowwise": "int8/rowwise",
    "quantize_int8_convrot_weight": "int8/rowwise",
    "quantize_int8_tensorwise": "int8/tensorwise",
    "dequantize_int8": "int8/dequantize",
    "dequantize_int8_embedding": "int8/dequantize",
}


@pytest.fixture
def built(monkeypatch):
    return partial(pretend_built, monkeypatch, EXTENSION)


def answer(op: str, facts, **changes) -> str | None:
    """The record's reason against a problem, or None."""
    asked = {"M": 64, "N": 0, "K": 3072, "out_dtype": torch.bfloat16} | changes
    [kernel] = [k for k in provider.kernels if k.op == op]
    assert kernel.id == KERNELS[op]
    return kernel.supports(Problem(op, torch.device("cuda"), torch.bfloat16, **asked), facts)


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"])
def test_release_build_serves_every_chip_from_turing_on(built, op, arch):
    built(*RELEASE_ARCHS)
    assert answer(op, simulated_facts(arch)) is None


@pytest.mark.parametrize("op", KERNELS)
def test_no_tensor_cores_are_needed(built, op):
    built("75-real")
    assert answer(op, simulated_facts("sm_75", "NVIDIA GeForce GTX 1660")) is None


@pytest.mark.parametrize("op", KERNELS)
def test_what_they_cannot_run_on_is_said(built, op):
    built(*RELEASE_ARCHS)
    assert "built for" in answer(op, simulated_facts("sm_70"))
    assert "CUDA device" in answer(op, CPU)
    built()
    assert "no nvcc" in answer(op, simulated_facts("sm_90"))


@pytest.mark.parametrize("op", [op for op in KERNELS if op != "quantize_int8_tensorwise"])
def test_limits_are_named(built, op):
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_90")
    assert "at most 4096 columns" in answer(op, facts, K=16_384, rotation=16_384)
    assert "K from 1" in answer(op, facts, K=0)
    assert answer(op, facts, K=2**30 - 1) is None
    if KERNELS[op] == "int8/dequantize":
        assert str(2**31 - 1) in answer(op, facts, M=2**31)


def test_a_tensor_of_any_shape_has_one_scale(built):
    built(*RELEASE_ARCHS)
    for changes in ({"M": 0}, {"K": 0}, {"M": 2**33, "K": 7}):
        assert answer("quantize_int8_tensorwise", simulated_facts("sm_90"), **changes) is None
