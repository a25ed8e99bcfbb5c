"""When the AWQ kernels offer themselves, on simulated devices, and how the dequantized route cuts its work."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from kitchen_awq import _dequantized
from kitchen_awq._extension import EXTENSION
from kitchen_awq.kernels import FLOAT32_ROWS, MAX_HOPPER_ROWS, MOST_DECODE_ROWS, STREAM_ROWS, TURING_ROWS, provider
from kitchen_core import explain
from kitchen_core.devices import CPU, simulated_facts
from kitchen_core.registry import Problem
from kitchen_core.testing import RELEASE_ARCHS, pretend_built

PACKAGE = Path(__file__).resolve().parents[1]
TURING = "awq/decode_sm75"
STREAM, DECODE, HOPPER, DEQUANTIZED = "awq/stream", "awq/decode", "awq/sm90", "awq/dequantized"


@pytest.fixture
def built(monkeypatch):
    return partial(pretend_built, monkeypatch, EXTENSION)


def answers(facts, *, options=("scales=bfloat16",), **changes) -> dict[str, str | None]:
    asked = {"M": 1, "N": 4096, "K": 4096, "group": 64, "out_dtype": torch.bfloat16, "dtype": torch.bfloat16} | changes
    problem = Problem("awq_linear", torch.device("cuda"), options=options, **asked)
    return {k.id: k.supports(problem, facts) for k in provider.kernels if k.op == "awq_linear"}


def chosen(facts, **changes) -> str:
    found = answers(facts, **changes)
    return next(k.id for k in sorted(provider.kernels, key=lambda k: -k.priority) if found.get(k.id, "") is None)


def test_hopper_hands_over_from_route_to_route(built):
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_90")
    assert chosen(facts, M=STREAM_ROWS) == STREAM
    assert chosen(facts, M=STREAM_ROWS + 1) == HOPPER
    assert chosen(facts, M=1, group=16) == DECODE
    assert chosen(facts, M=STREAM_ROWS, K=2**18) == STREAM
    assert chosen(facts, M=1, K=2**18 + 64) == HOPPER, "a copy of x would be larger than the workspace may be"
    assert chosen(facts, M=MAX_HOPPER_ROWS) == HOPPER
    assert chosen(facts, M=MAX_HOPPER_ROWS + 1) == DEQUANTIZED


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_a_part_goes_where_the_whole_weight_goes(built, arch):
    built(*RELEASE_ARCHS)
    facts = simulated_facts(arch)
    for m in (1, 16, 17, 64, 65, 512, 4096, 100_000):
        for whole, first, n in (
            (4096, 1024, 1024),
            (4096, 8, 4088),
            (11008, 5504, 5504),
            (4092, 0, 2048),
            (4092, 2048, 2040),
        ):
            assert chosen(facts, M=m, N=n, part=(first, whole)) == chosen(facts, M=m, N=whole), (m, first, n, whole)
    odd = answers(simulated_facts("sm_90"), N=1024, part=(4, 4096))
    assert "at multiples of 8 rows" in odd[STREAM]
    assert "rows 4.. of 4096" in odd[STREAM]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "sm_121"])
def test_other_chips_with_bf16_tensor_cores(built, arch):
    built(*RELEASE_ARCHS)
    facts = simulated_facts(arch)
    for changes in ({}, {"group": 16}, {"N": 17}):
        assert chosen(facts, M=1, **changes) == DECODE
        assert chosen(facts, M=MOST_DECODE_ROWS, **changes) == DECODE
        assert chosen(facts, M=MOST_DECODE_ROWS + 1, **changes) == DEQUANTIZED
    assert "needs sm_90" in answers(facts)[HOPPER]


def test_turing_volta_and_cpu(built):
    built(*RELEASE_ARCHS)
    found = answers(simulated_facts("sm_75"), dtype=torch.float16, options=("scales=float16",))
    assert found[DEQUANTIZED] is None
    assert "built for 80, 90a, 100, 120, 120-virtual" in found[DECODE]
    assert all(
        "was built for" in reason or "needs sm_90" in reason for reason in answers(simulated_facts("sm_70")).values()
    )
    assert "needs a CUDA device" in answers(CPU)[DEQUANTIZED]
    built()
    assert "installed without its CUDA extension: no nvcc" in answers(simulated_facts("sm_90"))[DEQUANTIZED]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "takes bfloat16 and float16 x"),
        ({"options": ("input_act=swiglu", "scales=bfloat16")}, "multiplies x as it is"),
        ({"options": ("scales=bfloat16", "weight_dtype=float32")}, "multiplies x as it is"),
        ({"K": 4080, "group": 8}, "takes K in multiples of 32"),
        ({"K": 2**19, "group": 64}, "takes K in multiples of 32 up to"),
        ({"K": 480, "group": 12}, "groups of multiples of 8"),
    ],
)
def test_what_the_fused_kernels_leave(built, changes, reason):
    built(*RELEASE_ARCHS)
    found = answers(simulated_facts("sm_90"), **changes)
    assert reason in found[DECODE]
    assert reason in found[HOPPER]
    assert found[DEQUANTIZED] is None


def test_what_hopper_leaves_to_the_decode_kernel(built):
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_90")
    for changes, reason in (
        ({"group": 16}, "multiples of 32"),
        ({"N": 4092}, "and N of 8"),
        ({"options": ("scales=float16",)}, "of x's type"),
    ):
        found = answers(facts, M=MOST_DECODE_ROWS, **changes)
        assert found[DECODE] is None
        assert reason in found[HOPPER]


@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_80", "sm_90", "sm_120"])
def test_few_rows_of_float32_have_a_kernel_of_their_own(built, arch):
    built("70-real", *RELEASE_ARCHS)
    facts = simulated_facts(arch)
    wide = {"dtype": torch.float32, "options": ("scales=bfloat16",)}
    for changes in (
        wide,
        {"options": ("input_act=rms_norm", "scales=bfloat16")},
        {"options": ("scales=float32", "weight_dtype=float16")},
    ):
        assert chosen(facts, **changes, M=FLOAT32_ROWS) == "awq/float32"
        assert chosen(facts, **changes, M=FLOAT32_ROWS + 1) == DEQUANTIZED
        assert chosen(facts, **changes, K=60, group=12) == DEQUANTIZED
    assert "x as it is" in answers(facts)["awq/float32"]


def test_turing_has_a_kernel_for_few_rows_of_float16(built):
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_75")
    half = {"dtype": torch.float16, "out_dtype": torch.float16, "options": ("scales=float16",)}
    assert chosen(facts, **half) == TURING
    assert chosen(facts, **half, M=TURING_ROWS) == TURING
    assert chosen(facts, **half, M=TURING_ROWS + 1) == DEQUANTIZED
    assert chosen(facts, **half, group=8) == TURING
    assert chosen(facts, **half, group=4) == DEQUANTIZED
    assert chosen(facts) == DEQUANTIZED, "bfloat16"
    without = simulated_facts("sm_75", name="NVIDIA GeForce GTX 1660")
    assert "fp16 tensor cores" in answers(without, **half)[TURING]
    assert chosen(without, **half) == DEQUANTIZED
    built("75-real")
    assert chosen(facts, **half) == TURING
    built("80-real")
    assert "sm75" in answers(simulated_facts("sm_80"), **half)[TURING]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 64), (4096, 24576, 4096), (70000, 300, 131072), (3, 5, 2**26)])
def test_pieces_stay_within_the_workspace(m, n, k, direct):
    for size in (2, 4):
        pieces = _dequantized.choose_pieces(m, n, k, size, direct)
        assert pieces.columns >= 1
        assert pieces.workspace_bytes <= max(_dequantized.WORKSPACE_BYTES, 2 * k * size)
        assert (pieces.rows == 0) == direct
        if n > pieces.columns >= _dequantized.TILE:
            assert pieces.columns % _dequantized.TILE == 0


def test_what_cublas_finishes_itself():
    half, other = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.float32)
    direct = _dequantized.is_direct
    assert direct(torch.bfloat16, torch.bfloat16, None, None)
    assert direct(torch.bfloat16, torch.bfloat16, half, None)
    for bias, residual in ((other, None), (half, half), (None, half), (None, other)):
        assert not direct(torch.bfloat16, torch.bfloat16, bias, residual)
    assert not direct(torch.bfloat16, torch.float32, None, None)


@pytest.mark.parametrize("arch", ["sm_60", "sm_70", "sm_75", "sm_80", "sm_90"])
def test_no_bf16_arithmetic_is_asked_of_gpus_without_it(arch):
    facts, fp32 = simulated_facts(arch), torch.float32
    bf16 = torch.bfloat16 if facts.sm >= 80 else fp32
    multiply = _dequantized.multiply_dtype
    assert multiply(torch.bfloat16, torch.bfloat16, facts) == bf16
    assert multiply(torch.float16, torch.float16, facts) == torch.float16
    assert multiply(fp32, fp32, facts) == multiply(fp32, torch.bfloat16, facts) == fp32


def test_every_kernel_file_is_in_the_sanitizer_program():
    patterns = re.findall(r"^// sources: (.*)$", (PACKAGE / "tests/sanitize_awq.cu").read_text(), re.MULTILINE)
    named = {file for line in patterns for pattern in line.split() for file in PACKAGE.parents[1].glob(pattern)}
    assert named == set(PACKAGE.glob("csrc/**/*.cu"))


def test_scales_and_zeros_of_two_types_count_as_the_type_that_holds_both():
    codes = torch.zeros(64, 128, dtype=torch.int8)
    scales = torch.ones(4, 64, dtype=torch.bfloat16)
    x = torch.zeros(64, 256, dtype=torch.bfloat16)
    same, mixed = (explain("awq_linear", x, codes, scales, zeros, None, 64) for zeros in (scales, scales.float()))
    assert "scales=bfloat16" in same.problem.options
    assert "scales=float32" in mixed.problem.options
