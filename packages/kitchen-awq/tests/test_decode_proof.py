"""Why two weights an instruction decode to the bits of the formula: shared_cuda/include/kitchen/quant/awq_decode.h, tried out.

One HFMA2 rounds (q - 8) * scale + zero once, to bfloat16 or float16; the formula rounds to float32 first. Here both are
computed for all codes and many pairs of scale and zero: they may differ only in groups that `awq_needs_exact` finds.
"""

from __future__ import annotations

import numpy as np
import pytest

MANTISSA_BITS = {"bfloat16": 7, "float16": 10}
LEVELS = np.arange(-8, 8, dtype=np.float64)


def round_to(value: np.ndarray, bits: int, exact_rest: np.ndarray) -> np.ndarray:
    """float64 to ``bits`` explicit mantissa bits, ties to even. ``exact_rest``: what the float64 leaves out, of either sign."""
    mantissa, exponent = np.frexp(value)  # mantissa in [0.5, 1)
    scaled = mantissa * 2.0 ** (bits + 1)
    down = np.floor(scaled)
    rest = scaled - down
    above = (rest > 0.5) | ((rest == 0.5) & (exact_rest > 0))
    tie = (rest == 0.5) & (exact_rest == 0)
    rounded = down + np.where(above | (tie & (down % 2 == 1)), 1.0, 0.0)
    return np.ldexp(rounded, exponent - (bits + 1))


def both(scale: np.ndarray, zero: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(HFMA2's result, the formula's), for all levels: [.., 16]. Ranges are free of overflow and subnormal numbers."""
    product = LEVELS * scale[..., None]  # exact: 4 bits times 8 or 11
    zero = np.broadcast_to(zero[..., None], product.shape)
    total = product + zero
    virtual = total - product  # the error of the sum, exactly (two-sum)
    rest = (product - (total - virtual)) + (zero - virtual)
    once = round_to(total, bits, rest)
    fp32 = round_to(total, 23, rest)
    twice = round_to(fp32, bits, np.zeros_like(fp32))
    return once, twice


def mantissas(dtype: str, count: int) -> np.ndarray:
    """All of them, or ``count`` evenly spread with the ends and the middle."""
    bits = MANTISSA_BITS[dtype]
    steps = np.unique(np.linspace(0, 2**bits - 1, min(count, 2**bits)).round())
    return 1 + np.unique(np.concatenate((steps, [0, 1, 2 ** (bits - 1), 2**bits - 1]))) / 2**bits


@pytest.mark.parametrize("dtype", list(MANTISSA_BITS))
def test_packed_decoding_differs_only_where_the_exact_decoder_is_asked(dtype):
    bits, tiny, edge = MANTISSA_BITS[dtype], 0, 0
    scales, zeros = mantissas(dtype, 128), mantissas(dtype, 128)
    for exponent in (-40, *range(-28, -10), 0, *range(6, 20), 30):  # of zero, relative to the scale
        for sign in (1.0, -1.0):
            scale = np.broadcast_to(scales[:, None], (len(scales), len(zeros)))
            zero = np.broadcast_to(sign * np.ldexp(zeros, exponent)[None, :], scale.shape)
            once, twice = both(scale, zero, bits)
            wrong = (once != twice).any(-1)
            found_tiny = np.abs(zero) < 2.0**-20 * scale
            found_edge = (np.abs(zero) == (2 - 2.0**-10) * 2.0**-11) & (dtype == "float16")
            assert not (wrong & ~(found_tiny | found_edge)).any(), (dtype, exponent, sign)
            tiny, edge = tiny + (wrong & found_tiny).sum(), edge + (wrong & found_edge).sum()
    assert tiny > 0  # such groups exist, so the exact decoder is not for nothing
    assert (edge > 0) == (dtype == "float16")


@pytest.mark.parametrize("exponent", [-21, -20, -13, -12, -11, -10, 10, 11, 12, 13, 14])
def test_every_float16_scale_beside_the_last_zeros_of_a_binade(exponent):
    """All 1024 mantissas of the scale, and the zeros at both ends of a binade, where sums lose their last bits."""
    scale = mantissas("float16", 1024)[:, None]
    zero = np.ldexp(1 + np.array([0, 1, 2, 3, 511, 512, 513, 1020, 1021, 1022, 1023]) / 1024, exponent)[None, :]
    scale, zero = np.broadcast_arrays(scale, zero)
    for sign in (1.0, -1.0):
        once, twice = both(scale, sign * zero, 10)
        wrong = (once != twice).any(-1)
        found = (zero < 2.0**-20 * scale) | (zero == (2 - 2.0**-10) * 2.0**-11)
        assert not (wrong & ~found).any()


@pytest.mark.parametrize("dtype", list(MANTISSA_BITS))
def test_a_zero_of_nothing_never_differs(dtype):
    scale = mantissas(dtype, 2048)
    once, twice = both(scale, np.zeros_like(scale), MANTISSA_BITS[dtype])
    assert (once == twice).all()
