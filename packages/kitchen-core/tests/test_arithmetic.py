"""The written-down arithmetic against independent computations: explicit matrices, exact fractions, golden vectors."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitchen_core import UnsupportedError
from kitchen_core import arithmetic as A
from kitchen_core.testing import assert_close, assert_equal, unit_roundoff

H4 = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)


def hadamard(group):
    """The regular Hadamard matrix over sqrt(group), by Kronecker products."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < group:
        h = torch.kron(h, H4)
    return h / math.sqrt(group)


@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
def test_rotation_is_the_kronecker_matrix(group):
    x = torch.randn(3, 2 * group)
    blocks = x.double().reshape(3, 2, group) @ hadamard(group).T
    # log4(group) stages; each of the four operations of a stage rounds values of at most the block's 2-norm
    stages = round(math.log(group, 4))
    bound = 4 * stages * unit_roundoff(torch.float32) * x.double().reshape(3, 2, group).norm(dim=-1, keepdim=True)
    assert_close(A.hadamard_rotate(x, group).reshape(3, 2, group), blocks, absolute=bound)


@pytest.mark.parametrize("group", [4, 16, 64, 256])
def test_rotation_matrix_is_symmetric_and_orthogonal(group):
    h = A.hadamard_rotate(torch.eye(group), group)
    assert_equal(h, h.T.contiguous())
    assert_equal(h @ h, torch.eye(group))  # entries are +-2^-n: the products are exact


def test_rotation_golden_vectors():
    assert A.hadamard_rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), 4).tolist() == [1, 2, 3, 4]
    quarter = torch.eye(16)
    zero = [1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, -1, -1, -1, -1, 1]
    six = [1, -1, 1, 1, 1, -1, 1, 1, -1, 1, -1, -1, 1, -1, 1, 1]
    assert (A.hadamard_rotate(quarter[0], 16) * 4).tolist() == zero
    assert (A.hadamard_rotate(quarter[6], 16) * 4).tolist() == six


def test_rotation_twice_is_the_identity_to_rounding():
    x = torch.randn(5, 512)
    bound = 2 * 16 * unit_roundoff(torch.float32) * x.reshape(5, 2, 256).norm(dim=-1).amax()
    assert_close(A.hadamard_rotate(A.hadamard_rotate(x, 256), 256), x, absolute=bound.item())


@pytest.mark.parametrize("group", [2, 8, 32, 128, 512, -4, 3, 1])
def test_rotation_group_must_be_a_power_of_4(group):
    with pytest.raises(UnsupportedError, match="power of 4"):
        A.check_rotation_group(group, 1024)


@pytest.mark.parametrize(
    ("in_features", "wanted", "got"),
    [
        (384, 256, 64),
        (1536, 256, 256),
        (3072, 256, 256),
        (96, 256, 16),
        (8, 256, 0),
        (7392, 256, 16),
        (3072, 64, 64),
        (15, 256, 0),
    ],
)
def test_rule_for_groups_that_do_not_divide(in_features, wanted, got):
    assert A.rotation_group(in_features, wanted) == got


def test_generator_golden_stream():
    expected = [0.65916312, 0.47849727, 0.49632204, 0.15808153]
    assert_close(A.uniform_stream(0, 4, seed=1), torch.tensor(expected), absolute=5e-9)


def generator_in_python(index, seed):
    key = (index + seed) % 2**64
    folded = (key >> 32) ^ (key & 0xFFFFFFFF)
    state = (folded * 747796405 + 2891336453) % 2**32
    word = ((((state >> ((state >> 28) + 4)) ^ state) % 2**32) * 277803737) % 2**32
    return (((word >> 22) ^ word) >> 8) * 2.0**-24


@given(st.integers(0, 2**62), st.integers(1, 2**40))
def test_generator_equals_plain_integers(start, seed):
    stream = A.uniform_stream(start, 3, seed)
    assert stream.tolist() == [generator_in_python(start + i, seed) for i in range(3)]


def test_generator_is_uniform():
    u = A.uniform_stream(0, 1 << 20, seed=7)
    assert u.min() >= 0
    assert u.max() < 1
    five_sigma = 5 / math.sqrt(12 * u.numel())
    assert abs(u.double().mean().item() - 0.5) < five_sigma


@given(st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32), st.floats(-1e3, 1e3, width=32))
def test_fma_rounds_once(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = A.fma(torch.tensor(a), torch.tensor(b), torch.tensor(c)).item()
    # one rounding to fp32, plus the rounding to fp64 before it; below the normal range the step is 2^-149
    bound = abs(exact) * Fraction(unit_roundoff(torch.float32) * (1 + 2**-20)) + Fraction(2) ** -149
    assert abs(Fraction(got) - exact) <= bound


def test_integer_product_is_exact_at_the_extremes():
    for value in (-128, 127):
        for k in (1, 1023, 1024, 1025, 12288):
            a = torch.full((2, k), value, dtype=torch.int8)
            assert A.int8_matmul(a, a).unique().tolist() == [value * value * k]


def test_integer_product_beyond_int32():
    a = torch.full((1, A.MAX_EXACT_INT32_K + 1025), -128, dtype=torch.int8)
    assert A.int8_matmul(a, a).item() == 128 * 128 * a.shape[1] > 2**31


def test_integer_product_equals_int64():
    a, b = (torch.randint(-128, 128, (n, 3001), dtype=torch.int8) for n in (5, 7))
    assert_equal(A.int8_matmul(a, b).long(), a.long() @ b.long().T)


@pytest.mark.parametrize("act", ["gelu_tanh", "swiglu", "rms_norm", "situ"])
def test_input_acts_against_float64(act):
    x = torch.randn(4, 64)
    weight = torch.randn(64 if act == "rms_norm" else 1)
    d, w = x.double(), weight.double()
    first, second = d.chunk(2, dim=-1)
    exact = {
        "gelu_tanh": torch.nn.functional.gelu(d, approximate="tanh"),
        "swiglu": torch.nn.functional.silu(first) * second,
        "rms_norm": d / (d.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w if act == "rms_norm" else None,
        "situ": 4 * (second / 4).tanh() * second.sigmoid() * 25 * (first / 25).tanh(),
    }[act]
    got = A.apply_input_act(x, act, weight, 1e-6)
    # a handful of fp32 operations, each within 4 ulp (tanh, sigmoid), on values of at most 16 in magnitude
    assert_close(got, exact, relative=64 * unit_roundoff(torch.float32), absolute=64 * unit_roundoff(torch.float32))
