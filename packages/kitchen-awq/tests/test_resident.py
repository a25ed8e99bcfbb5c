"""The resident layout of codes: its nibbles, and which weights have it. What all formats share: tests_integration/."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kitchen_awq import optimize_for_decode, resident
from kitchen_awq.format import AWQFormat
from kitchen_core import QuantizedTensor, UnsupportedError
from kitchen_core.packing import unpack_nibbles

N, K = 72, 512


def quantized(n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16, **options) -> QuantizedTensor:
    torch.manual_seed(n + k)
    return QuantizedTensor.quantize(torch.randn(n, k, dtype=dtype), "awq_w4a16", **options)


@pytest.mark.parametrize("strip_bytes", [1, 1000, 1 << 24])
@pytest.mark.parametrize(("n", "k"), [(1, 256), (9, 512), (40, 1280)])
def test_packing_and_unpacking_give_the_codes_back(monkeypatch, strip_bytes, n, k):
    monkeypatch.setattr(resident, "STRIP_BYTES", strip_bytes)
    given = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
    codes = given.clone()
    laid = resident.pack(codes)
    assert torch.equal(codes, given)
    assert resident.is_resident(laid)
    assert not resident.is_resident(codes)
    assert laid.shape == (n, k // 256, 128)
    assert torch.equal(resident.unpack(laid), given)
    in_place = resident.pack(codes, codes.view(torch.uint8).flatten())
    assert in_place.data_ptr() == codes.data_ptr()
    assert torch.equal(in_place, laid)


def test_every_nibble_lies_where_the_module_says():
    given = torch.randint(-128, 128, (3, 384), dtype=torch.int8)
    laid = resident.pack(given).view(torch.int8).view(given.shape)
    columns, nibbles = unpack_nibbles(given), unpack_nibbles(laid)
    for step in range(3):
        for t in range(4):
            for j in range(8):
                at = 256 * step + 64 * t + 8 * j
                first = 256 * step + 32 * j + 2 * t
                wanted = [first, first + 8, first + 16, first + 24, first + 1, first + 9, first + 17, first + 25]
                assert torch.equal(nibbles[:, at : at + 8], columns[:, wanted])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [64, 128, 256, -1])
def test_linears_of_every_group_and_type_are_those_of_the_stored_weight(group_size, dtype):
    stored = quantized(group_size=group_size, dtype=dtype)
    made, reason = optimize_for_decode(stored.clone())
    assert reason is None
    x, bias = torch.randn(5, K).to(dtype), torch.randn(N).to(dtype)
    assert torch.equal(F.linear(x, made, bias), F.linear(x, stored, bias))
    assert torch.equal(made.dequantize(), stored.dequantize())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 12}, "N a multiple of 8"),
        ({"k": 320}, "of 256"),
        ({"group_size": 32}, "groups of 64, 128"),
        ({"dtype": torch.float32}, "of x's type"),
    ],
)
def test_a_weight_that_does_not_fit_says_why(options, words):
    assert words in optimize_for_decode(quantized(**options)).reason


def test_a_part_of_a_weight_is_not_taken_in_the_layout():
    stored, x, part = quantized(), torch.randn(2, K).bfloat16(), (0, 2 * N)
    made = optimize_for_decode(stored.clone()).weight
    own = AWQFormat.stored(made.inner(), made.config)
    for call, given in ((AWQFormat.linear, x), (AWQFormat.linear_quantized, made.quantize_activation(x))):
        with pytest.raises(UnsupportedError, match=r"is a whole one, got part=\(0, 144\); give what is stored"):
            call(given, made.inner(), made.config, part=part)
        assert torch.equal(call(given, own, made.config, part=part), stored.linear(x))
