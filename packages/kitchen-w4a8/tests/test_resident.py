"""The resident layout: its bytes, and which weights have it. What all formats share: tests_integration/."""

from __future__ import annotations

import pytest
import torch

from kitchen_core import FormatError, QuantizedLinear, QuantizedTensor
from kitchen_w4a8 import optimize_for_decode, resident
from kitchen_w4a8.resident import Shape

FORMATS = ("asym_w4a8_int8", "w6a8_int8")
N, K = 80, 512
SHAPES = [
    Shape(64, 256, 4, 16), Shape(128, 512, 6, 16), Shape(80, 768, 4, 128), Shape(16, 256, 6, 256), Shape(208, 1024, 4, 64),
    Shape(144, 512, 6, 32),
]  # fmt: skip


def quantized(name: str, n: int = N, k: int = K, **options) -> QuantizedTensor:
    torch.manual_seed(n + k)
    return QuantizedTensor.quantize(torch.randn(n, k), name, convrot_groupsize=16, **options)


def with_raw_scales(weight: QuantizedTensor) -> QuantizedTensor:
    tensors = {**weight.inner(), "s_rel": weight.s_rel.view(torch.uint8)}
    return QuantizedTensor(tensors, weight.format, weight.config, weight.dtype)


def pair(name: str, **options) -> tuple[QuantizedTensor, QuantizedTensor]:
    """A weight, and the same in the resident layout."""
    stored = quantized(name, **options)
    made, reason = optimize_for_decode(stored.clone())
    assert reason is None
    return stored, made


# -------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strip_bytes", [1, 1 << 25])
def test_packing_in_place_and_unpacking_give_the_bytes_back(monkeypatch, shape, strip_bytes):
    monkeypatch.setattr(resident, "STRIP_BYTES", strip_bytes)
    given = torch.randint(0, 256, (shape.n * shape.row_bytes,), dtype=torch.uint8)
    buffer = given.clone()
    records = resident.pack(buffer, shape)
    assert records.data_ptr() == buffer.data_ptr()
    assert not torch.equal(buffer, given)
    assert torch.equal(buffer.sort().values, given.sort().values)
    codes, scales = resident.unpack(records, shape)
    assert torch.equal(torch.cat((codes.flatten(), scales.flatten())), given)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_byte_lies_where_the_page_on_the_format_says(shape):
    codes = torch.randint(0, 256, (shape.n, shape.code_bytes), dtype=torch.uint8)
    scales = torch.randint(0, 256, (shape.n, shape.k // shape.group), dtype=torch.uint8)
    buffer = torch.cat((codes.flatten(), scales.flatten()))
    resident.pack(buffer, shape)
    records = buffer.tolist()
    tops, groups = (1024 if shape.bits == 6 else 0), 256 // shape.group
    record = 2048 + tops + 16 * groups
    assert shape.n * shape.row_bytes == shape.n // 16 * (shape.k // 256) * record
    for n in torch.randint(0, shape.n, (8,)).tolist():
        block, row = divmod(n, 16)
        i, g = divmod(row, 8)
        for step in range(shape.k // 256):
            at = (block * (shape.k // 256) + step) * record
            for h in range(2):
                for q in range(4):
                    first = 256 * step + 128 * h + 32 * q  # column
                    lane = 4 * g + q
                    for j in range(16):
                        assert records[at + 1024 * h + 512 * i + 16 * lane + j] == codes[n, first // 2 + j]
                    for j in range(8 if tops else 0):
                        found = records[at + 2048 + 512 * i + 16 * lane + 8 * h + j]
                        assert found == codes[n, shape.k // 2 + first // 4 + j]
                    for j in range(2 if shape.group == 16 else 0):
                        found = records[at + 2048 + tops + 8 * lane + 4 * i + 2 * h + j]
                        assert found == scales[n, first // 16 + j]
            for j in range(groups if shape.group > 16 else 0):
                assert records[at + 2048 + tops + groups * row + j] == scales[n, groups * step + j]


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("group", resident.GROUPS)
def test_records_say_what_they_are_of(bits, group):
    shape = Shape(32, 768, bits, group)
    records = resident.pack(torch.zeros(shape.n * shape.row_bytes, dtype=torch.uint8), shape)
    assert [resident.is_resident(records, b) for b in (4, 6)] == [bits == 4, bits == 6]
    assert resident.shape_of(records, bits, group) == shape
    other = resident.GROUPS[resident.GROUPS.index(group) - 1]
    with pytest.raises(FormatError, match=f"not of groups of {other}; they are those of another weight"):
        resident.shape_of(records, bits, other)


# ----------------------------------------------------------------------------------------------------- behaviour


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group_size", [16, 64])
@pytest.mark.parametrize("rows", [1, 5])
def test_linears_of_every_group_are_those_of_the_stored_weight(name, group_size, rows):
    stored, made = pair(name, group_size=group_size)
    x, bias = torch.randn(rows, K), torch.randn(N)
    assert torch.equal(made.linear(x, bias), stored.linear(x, bias))
    assert torch.equal(made.dequantize(), stored.dequantize())


def test_uniform_levels_have_no_table():
    stored, made = pair("asym_w4a8_int8", levels="uniform")
    x = torch.randn(2, K)
    assert made.linear(x).equal(stored.linear(x))


def test_records_of_other_groups_are_refused_by_name():
    weight, (_, other) = quantized("asym_w4a8_int8", group_size=64), pair("asym_w4a8_int8")
    layer = QuantizedLinear(weight.inner(), weight.format, weight.config, None, torch.float32)
    layer.weight.data = other.qdata
    for call in (layer, lambda x: layer.state_dict()):
        with pytest.raises(FormatError, match=r"records of 2304 bytes .* not of groups of 64"):
            call(torch.randn(1, K))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: quantized("asym_w4a8_int8", n=72), "N a multiple of 16"),
        (lambda: quantized("w6a8_int8", k=320), "K of 256"),
        (lambda: quantized("asym_w4a8_int8", group_size=8), "takes groups of 16, 32"),
        (lambda: quantized("asym_w4a8_int8", group_size=512), "the weight has 512"),
        (lambda: quantized("asym_w4a8_int8", scale_dtype="float32"), "takes e4m3 scales"),
        (lambda: with_raw_scales(quantized("w6a8_int8")), "s_rel is uint8"),
        (lambda: quantized("asym_w4a8_int8", levels="asymmetric"), "takes a correction"),
    ],
)
def test_a_weight_that_does_not_fit_says_why(make, words):
    assert words in optimize_for_decode(make()).reason
