"""Weights in the resident layout on a GPU: the kernel that reads it, to the bit, and all that puts the codes back first."""

from __future__ import annotations

import pytest
import torch

from kitchen_awq import _launch, optimize_for_decode
from kitchen_awq.format import AWQConfig, AWQFormat
from kitchen_awq.kernels import STREAM_ROWS
from kitchen_core import QuantizedTensor
from kitchen_core.reference import awq as reference
from kitchen_core.testing import assert_close, assert_equal, tolerance, unit_roundoff

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
ROWS = (1, 8, 9, 16, 17, 24, 30, 33, 48, 61, 64)


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs a GPU of compute capability 9.0")


def pair(n: int, k: int, group: int, dtype: torch.dtype) -> tuple[QuantizedTensor, QuantizedTensor]:
    """A weight, and the same in the resident layout."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    tensors = {
        "qdata": torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8, device="cuda"),
        "scale": (torch.rand(k // group, n, generator=generator, device="cuda") * 0.01 + 0.002).to(dtype),
        "zeros": (torch.randn(k // group, n, generator=generator, device="cuda") * 0.03).to(dtype),
    }
    stored = QuantizedTensor(tensors, AWQFormat, AWQConfig(group), dtype)
    made, reason = optimize_for_decode(stored.clone())
    assert reason is None
    return stored, made


def check_sums(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *added: torch.Tensor) -> None:
    """y against x W^T and what is added to it, exact: fp32 sums of K products in any order, and one rounding."""
    wide, dense = x.double(), weight.double()
    want, magnitude = wide @ dense.t(), wide.abs() @ dense.abs().t()
    for term in added:
        want, magnitude = want + term.double(), magnitude + term.double().abs()
    accumulation = tolerance(y.dtype, x.shape[-1]).accumulation * magnitude
    assert_close(y, want, relative=unit_roundoff(y.dtype), absolute=(1 + unit_roundoff(y.dtype)) * accumulation)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("group", [64, 128, 256, 768])
def test_one_hot_rows_print_the_decoded_weight(group, dtype):
    stored, made = pair(136, 768, group, dtype)
    want = reference.dequantize_awq(stored.qdata, stored.scale, stored.zeros, group, dtype)
    eye = torch.eye(768, device="cuda", dtype=dtype)
    for m in ROWS:
        found = torch.cat([made.linear(eye[i : i + m]) for i in range(0, 768, m)]).t()
        assert_equal(found, want, f"group {group} rows {m}")
    assert_equal(made.dequantize(), stored.dequantize(), "dequantize")


def test_groups_that_the_packed_decoder_would_round_otherwise():
    stored, _ = pair(72, 512, 64, torch.bfloat16)
    zeros = (torch.randn(8, 72, device="cuda") * 2.0**-30).to(torch.bfloat16)
    stored = QuantizedTensor({**stored.inner(), "zeros": zeros}, AWQFormat, AWQConfig(64), torch.bfloat16)
    made = optimize_for_decode(stored.clone()).weight
    eye = torch.eye(512, device="cuda", dtype=torch.bfloat16)
    found = torch.cat([made.linear(eye[i : i + 64]) for i in range(0, 512, 64)]).t()
    assert_equal(found, reference.dequantize_awq(stored.qdata, stored.scale, zeros, 64, torch.bfloat16), "tiny zeros")


@pytest.mark.parametrize("group", [64, 128])
def test_every_plan_sums_within_the_bound_and_repeats_itself(group):
    k, n, ran = 1280, 200, 0
    stored, made = pair(n, k, group, torch.bfloat16)
    for m in ROWS:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        dense = stored.dequantize(torch.bfloat16)
        for variant in range(48):
            for splits in (1, 2, 4):
                shape = m, n, k, group, torch.bfloat16, torch.bfloat16, 0, (variant, splits), True
                if _launch.plan_of(_launch.STREAM, *shape).reason:
                    continue
                ran += 1
                weight = made.qdata, made.scale, made.zeros, None, group
                y = _launch.fused_linear(_launch.STREAM, x, *weight, plan=(variant, splits), resident=True)
                assert torch.equal(
                    y, _launch.fused_linear(_launch.STREAM, x, *weight, plan=(variant, splits), resident=True)
                )
                check_sums(y, x, dense)
    assert ran >= 100


@pytest.mark.parametrize("m", [3, STREAM_ROWS, STREAM_ROWS + 1, 300])
def test_linears_do_what_those_of_the_stored_layout_do(m):
    """Where the kernel takes the call within the bound of its sums, elsewhere bit for bit: it is the same call then."""
    stored, made = pair(264, 1024, 64, torch.bfloat16)
    x, bias = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16), torch.randn(264, device="cuda").bfloat16()
    residual = torch.randn(m, 264, device="cuda", dtype=torch.bfloat16)
    dense = stored.dequantize(torch.bfloat16)
    for args in ({}, {"residual": residual}, {"input_act": "gelu_tanh"}):
        found, want = made.linear_input_act(x, bias, **args), stored.linear_input_act(x, bias, **args)
        if m > STREAM_ROWS or "input_act" in args:
            assert_equal(found, want, str(args))
        else:
            check_sums(found, x, dense, bias, *args.values())
            check_sums(want, x, dense, bias, *args.values())
    compiled = torch.compile(lambda x: made.linear(x, bias) + 0, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), made.linear(x, bias))
