"""When the kernels offer themselves, on simulated devices, and which one is chosen."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kitchen_core.devices import CPU, simulated_facts
from kitchen_core.registry import Problem
from kitchen_core.testing import RELEASE_ARCHS, pretend_built
from kitchen_w4a8._extension import EXTENSION
from kitchen_w4a8.kernels import FEW_ROWS, RESIDENT_ROWS, provider

DECODE, STREAM, HOPPER, DECODED = "w4a8/decode", "w4a8/stream", "w4a8/hopper", "w4a8/decoded"
RESIDENT = "w4a8/resident"


@pytest.fixture
def built(monkeypatch):
    return partial(pretend_built, monkeypatch, EXTENSION)


def answers(facts, op="w4a8_scaled_mm", **changes) -> dict[str, str | None]:
    asked = {"M": 4, "N": 4096, "K": 4096, "out_dtype": torch.bfloat16, "group": 16, "bits": 4} | changes
    problem = Problem(op, torch.device("cuda"), torch.int8, **asked)
    return {k.id: k.supports(problem, facts) for k in provider.kernels if k.op == op}


def chosen(facts, **changes) -> str | None:
    """The kernel of highest priority without an objection."""
    found = answers(facts, **changes)
    op = changes.get("op", "w4a8_scaled_mm")
    records = sorted((k for k in provider.kernels if k.op == op), key=lambda k: -k.priority)
    return next((k.id for k in records if found[k.id] is None), None)


@pytest.mark.parametrize("op", ["w4a8_scaled_mm", "w4a8_linear"])
@pytest.mark.parametrize("bits", [4, 6])
def test_hopper_takes_few_rows_by_the_stream_and_more_by_wgmma(built, op, bits):
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_90")
    assert chosen(facts, op=op, bits=bits, M=1) == chosen(facts, op=op, bits=bits, M=FEW_ROWS) == STREAM
    assert chosen(facts, op=op, bits=bits, M=FEW_ROWS + 1) == HOPPER
    assert "the call has 17" in answers(facts, op, bits=bits, M=17)[STREAM]


@pytest.mark.parametrize("op", ["w4a8_scaled_mm", "w4a8_linear"])
def test_a_resident_weight_has_a_kernel_of_its_own_on_hopper(built, op):
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_90")
    few = {"op": op, "options": ("resident",), "M": RESIDENT_ROWS}
    assert chosen(facts, **few) == RESIDENT
    assert "the call has 33" in answers(facts, **few | {"M": RESIDENT_ROWS + 1})[RESIDENT]
    assert "optimize_for_decode" in answers(facts, op)[RESIDENT]
    assert "needs sm_90" in answers(simulated_facts("sm_80"), **few)[RESIDENT]
    assert "too many" in answers(facts, **few | {"K": 131_072 - 256})[RESIDENT]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
def test_other_chips_stream_few_rows_and_decode_for_more(built, arch):
    built(*RELEASE_ARCHS)
    facts = simulated_facts(arch)
    assert chosen(facts, M=1) == STREAM
    assert chosen(facts, M=64) == DECODED
    assert "needs sm_90 (wgmma)" in answers(facts)[HOPPER]


def test_turing_decodes(built):
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_75")
    assert chosen(facts, M=1) == DECODED
    assert "needs sm_80 or later" in answers(facts)[STREAM]
    assert answers(facts, "decode_w4a8_weight") == {DECODE: None}
    assert answers(facts, "dequantize_w4a8_weight") == {DECODED: None}
    assert "no correction" in answers(facts, "dequantize_w4a8_weight", options=("correction",))[DECODED]


def test_volta_cpu_and_no_extension(built):
    built(*RELEASE_ARCHS)
    assert all("built for" in reason or "needs sm" in reason for reason in answers(simulated_facts("sm_70")).values())
    assert all("CUDA device" in reason for reason in answers(CPU).values())
    built()
    assert all("no nvcc" in reason for reason in answers(simulated_facts("sm_90")).values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": ("correction",)}, "takes no correction"),
        ({"options": ("fp32_scales",)}, "s_rel is float32"),
        ({"group": 8}, "takes groups of 16, 32, 64, 128, 256, the weight has 8"),
        ({"group": 48, "K": 4128}, "the weight has 48"),
        ({"K": 4112}, "multiple of 32 at 4 bits"),
        ({"K": 4128, "bits": 6, "group": 32}, "multiple of 64 at 6 bits"),
        ({"N": 2**30 + 1}, "at most"),
    ],
)
def test_what_only_the_decoding_route_takes_is_refused_by_name(built, changes, words):
    built(*RELEASE_ARCHS)
    found = answers(simulated_facts("sm_90"), **changes)
    assert words in found[STREAM]
    assert words in found[HOPPER]
    assert found[DECODED] is None or "weights at once" in found[DECODED]


@pytest.mark.parametrize(("changes", "words"), [({"K": 131_072}, "131071"), ({"out_dtype": torch.float64}, "float64")])
def test_what_nothing_takes(built, changes, words):
    built(*RELEASE_ARCHS)
    assert all(words in reason for reason in answers(simulated_facts("sm_90"), **changes).values())


def test_rows_that_do_not_fit_shared_memory_are_not_streamed(built):
    built(*RELEASE_ARCHS)
    assert chosen(simulated_facts("sm_86"), M=16) == DECODED
    assert "too many for NVIDIA GeForce RTX 3090" in answers(simulated_facts("sm_86"), M=16)[STREAM]
    assert chosen(simulated_facts("sm_90"), M=16, K=65536) == STREAM
    assert chosen(simulated_facts("sm_90"), M=16, K=131008) == HOPPER


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_weights_are_quantized_on_every_chip(built, arch):
    built(*RELEASE_ARCHS)
    facts = simulated_facts(arch)
    asked = {"op": "quantize_w4a8_weight", "M": 4096, "N": 0, "rotation": 256}
    assert answers(facts, **asked) == {"w4a8/quantize": None}
    assert "512, the call asks for 48" in answers(facts, **asked | {"group": 48, "K": 4128})["w4a8/quantize"]
    assert "too many for" in answers(facts, **asked | {"K": 65536})["w4a8/quantize"]


def test_activations_are_quantized_without_kitchen_int8(built):
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_90")
    asked = {"op": "quantize_and_rotate_rowwise", "N": 0, "rotation": 4096}
    assert answers(facts, **asked) == {"w4a8/rowwise": None}
    assert "at most 4096 columns" in answers(facts, **asked | {"rotation": 16384, "K": 16384})["w4a8/rowwise"]
    found = answers(facts, "w4a8_linear", rotation=16384, K=16384)
    assert "at most 4096 columns" in found[STREAM]
    assert "at most 4096 columns" in found[HOPPER]
