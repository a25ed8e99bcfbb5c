"""Nibbles and 6-bit planes: golden bytes, round trips, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitchen_core import UnsupportedError
from kitchen_core.packing import pack_6bit, pack_nibbles, unpack_6bit, unpack_nibbles
from kitchen_core.testing import assert_equal

FEW = settings(max_examples=50, deadline=None)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def as_bytes(packed):
    assert packed.dtype == torch.int8
    return packed.view(torch.uint8).tolist()


@st.composite
def codes(draw, low, high, unit):
    """A tensor of codes in [low, high] with 1 to 3 dims, the last a multiple of ``unit``; empty ones too."""
    lead = draw(st.lists(st.integers(0, 3), max_size=2))
    k = unit * draw(st.integers(0, 5))
    count = k
    for size in lead:
        count *= size
    values = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.int8).reshape(*lead, k)


def test_nibbles_golden():
    packed = pack_nibbles(torch.arange(16, dtype=torch.uint8))
    assert as_bytes(packed) == [16, 50, 84, 118, 152, 186, 220, 254]


def test_6bit_golden():
    packed = pack_6bit(torch.arange(0, 64, 2, dtype=torch.uint8))
    assert as_bytes(packed) == [32, 100, 168, 236] * 4 + [0, 0, 85, 85, 170, 170, 255, 255]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_byte_unpacks_and_packs_to_itself(dtype):
    every = torch.arange(256).to(torch.uint8).view(torch.int8)
    for signed in (False, True):
        if signed and dtype == torch.uint8:
            continue
        assert_equal(pack_nibbles(unpack_nibbles(every, signed).to(dtype)), every)
    planes = torch.cat((every, every.flip(0), every))  # 3 * 256 bytes: 1024 codes
    assert_equal(pack_6bit(unpack_6bit(planes).to(dtype)), planes)


@FEW
@given(codes(0, 15, 2))
def test_unsigned_nibbles_round_trip(given_codes):
    packed = pack_nibbles(given_codes)
    assert packed.shape == (*given_codes.shape[:-1], given_codes.shape[-1] // 2)
    assert_equal(unpack_nibbles(packed), given_codes)
    assert_equal(unpack_nibbles(packed.view(torch.uint8)), given_codes)


@FEW
@given(codes(-8, 7, 2))
def test_signed_nibbles_round_trip(given_codes):
    packed = pack_nibbles(given_codes)
    assert_equal(unpack_nibbles(packed, signed=True), given_codes)
    assert_equal(packed, pack_nibbles(given_codes & 15))


@FEW
@given(codes(0, 63, 4))
def test_6bit_round_trip(given_codes):
    packed = pack_6bit(given_codes)
    assert packed.shape == (*given_codes.shape[:-1], given_codes.shape[-1] * 3 // 4)
    assert_equal(unpack_6bit(packed), given_codes)
    assert_equal(unpack_6bit(packed.view(torch.uint8)), given_codes)


def test_one_column_touches_its_own_bits_alone():
    for column in range(8):
        one = torch.zeros(8, dtype=torch.int8)
        one[column] = 63
        expected = [0] * 6
        expected[column // 2] = 0xF << 4 * (column % 2)
        expected[4 + column // 4] = 3 << 2 * (column % 4)
        assert as_bytes(pack_6bit(one)) == expected


def test_strides_do_not_matter():
    wide = torch.randint(0, 16, (6, 32), dtype=torch.int8)
    for view in (wide[:, ::2], wide.t()[::2], wide[::3]):
        assert_equal(pack_nibbles(view), pack_nibbles(view.contiguous()))
        assert_equal(unpack_nibbles(view), unpack_nibbles(view.contiguous()))
    assert_equal(pack_6bit(wide[:, ::2]), pack_6bit(wide[:, ::2].contiguous()))
    assert_equal(unpack_6bit(wide.t()[:, ::2]), unpack_6bit(wide.t()[:, ::2].contiguous()))
    for view in (wide.t(), wide.t()[::2], wide[:, ::2].t()[:12]):
        assert pack_nibbles(view[:, :6]).is_contiguous()
        assert pack_6bit(view[:, :4]).is_contiguous()
        assert unpack_nibbles(view).is_contiguous()


REFUSED = {
    "odd nibbles": (lambda: pack_nibbles(torch.zeros(3, 5, dtype=torch.int8)), r"multiple of 2.*\[3, 5\]"),
    "6 bits of 6": (lambda: pack_6bit(torch.zeros(6, dtype=torch.int8)), "multiple of 4"),
    "planes of 8": (lambda: unpack_6bit(torch.zeros(2, 8, dtype=torch.int8)), r"multiple of 3.*4-bit weight"),
    "float codes": (lambda: pack_nibbles(torch.zeros(4)), "integer tensor.*float32"),
    "bool codes": (lambda: pack_6bit(torch.zeros(4, dtype=torch.bool)), "integer tensor.*bool"),
    "0-dim": (lambda: unpack_nibbles(torch.tensor(1)), "at least one dim"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_a_sentence(what):
    call, message = REFUSED[what]
    with pytest.raises(UnsupportedError, match=message):
        call()
