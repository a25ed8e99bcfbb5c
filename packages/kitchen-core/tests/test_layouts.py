"""nunchaku's, AutoAWQ's and the tile-packed byte orders: golden positions, loops over the written formulas, round trips."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitchen_core import FormatError
from kitchen_core.layouts import autoawq, nunchaku, tile_packed
from kitchen_core.packing import pack_nibbles, unpack_nibbles
from kitchen_core.reference.awq import dequantize_awq
from kitchen_core.testing import assert_equal

small = settings(max_examples=15, deadline=None)
count = st.integers(1, 3)
float_dtype = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def random_bytes(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def one_code(n, k, row, column):
    """A canonical weight of zeros with one code 1."""
    codes = torch.zeros(n, k, dtype=torch.int8)
    codes[row, column] = 1
    return pack_nibbles(codes)


def only_nibble(words):
    """(word, nibble) of the only nonzero nibble in a flat tensor of words."""
    (index,) = words.flatten().nonzero().flatten().tolist()
    value = int(words.flatten()[index]) & (2 ** (8 * words.itemsize) - 1)
    return index, value.bit_length() // 4


# ------------------------------------------------------------------------------------------- nunchaku svdquant


@pytest.mark.parametrize(
    ("place", "word"),
    [
        ((0, 0), (0, 0)),
        ((0, 1), (0, 1)),
        ((0, 8), (4, 0)),
        ((0, 32), (1, 0)),
        ((1, 0), (16, 0)),
        ((8, 0), (2, 0)),
        ((16, 0), (128, 0)),
    ],
)
def test_nunchaku_qweight_golden(place, word):
    packed = nunchaku.pack_qweight(one_code(128, 64, *place))
    assert only_nibble(packed.view(torch.int32)) == word


def test_nunchaku_scale_order_golden():
    order = nunchaku.pack_vector(torch.arange(128))
    assert order[:8].tolist() == [0, 1, 8, 9, 2, 3, 10, 11]
    assert order[16] == 16
    assert_equal(nunchaku.pack_wscales(torch.arange(128).reshape(1, 128)).flatten(), order)


def test_nunchaku_formulas_by_index():
    """The six orders of formats.md 3.5, element by element."""
    n, k, rank = 256, 128, 32
    groups, ranks = k // 64, rank // 16
    rows, columns = torch.arange(n), torch.arange(k)
    tile, in_tile = rows // 128, rows % 128
    a, b, c = in_tile // 16, in_tile // 8 % 2, in_tile % 8
    kt, d, e, f = columns // 64, columns // 32 % 2, columns // 8 % 4, columns % 8
    word = ((((tile * groups)[:, None] + kt) * 8 + a[:, None]) * 8 + c[:, None]) * 4 + e
    flat = (word * 4 + 2 * b[:, None] + d) * 8 + f
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    stored = unpack_nibbles(nunchaku.pack_qweight(pack_nibbles(codes)), signed=True).flatten()
    assert_equal(stored[flat], codes)

    inside = 16 * a + 4 * (c // 2) + 2 * b + c % 2
    scales = torch.randn(groups, n)
    index = ((tile * groups) + torch.arange(groups)[:, None]) * 128 + inside
    assert_equal(nunchaku.pack_wscales(scales).flatten()[index], scales)
    vector = torch.randn(n)
    assert_equal(nunchaku.pack_vector(vector)[tile * 128 + inside], vector)

    def lora(first, second, blocks):
        """Flat position of (first, second); ``blocks`` is the number of the outer tile of each."""
        b, c = first // 8 % 2, first % 8
        d, e, f = second // 8 % 2, second // 2 % 4, second % 2
        return (blocks * 32 + 4 * c + e) * 8 + 4 * b + 2 * d + f

    r = torch.arange(rank)
    down = torch.randn(k, rank)
    index = lora(r, columns[:, None], columns[:, None] // 16 * ranks + r // 16)
    assert_equal(nunchaku.pack_lora_down(down).flatten()[index], down)
    up = torch.randn(n, rank)
    index = lora(rows[:, None], r, rows[:, None] // 16 * ranks + r // 16)
    assert_equal(nunchaku.pack_lora_up(up).flatten()[index], up)


@small
@given(count, count, count, float_dtype)
def test_nunchaku_round_trips(row_tiles, groups, ranks, dtype):
    n, k, rank = 128 * row_tiles, 64 * groups, 16 * ranks
    for pack, unpack, tensor in (
        (nunchaku.pack_qweight, nunchaku.unpack_qweight, random_bytes(n, k // 2)),
        (nunchaku.pack_wscales, nunchaku.unpack_wscales, torch.randn(groups, n).to(dtype)),
        (nunchaku.pack_vector, nunchaku.unpack_vector, torch.randn(n).to(dtype)),
        (nunchaku.pack_lora_down, nunchaku.unpack_lora_down, torch.randn(k, rank).to(dtype)),
        (nunchaku.pack_lora_up, nunchaku.unpack_lora_up, torch.randn(n, rank).to(dtype)),
        (nunchaku.pack_awq_qweight, nunchaku.unpack_awq_qweight, random_bytes(n, k // 2)),
    ):
        assert_equal(unpack(pack(tensor)), tensor)
        assert unpack(pack(tensor)).is_contiguous()


def test_nunchaku_refuses_sizes_and_fp4():
    with pytest.raises(FormatError, match="multiple of 128 rows"):
        nunchaku.unpack_qweight(random_bytes(64, 32))
    with pytest.raises(FormatError, match="nvfp4"):
        nunchaku.unpack_qweight(torch.zeros(128, 32))
    with pytest.raises(FormatError, match="multiple of 16"):
        nunchaku.unpack_lora_up(torch.zeros(128, 8))
    with pytest.raises(FormatError, match="multiple of 128 elements"):
        nunchaku.unpack_vector(torch.zeros(64))


def test_pad_adds_zeros_behind():
    t = torch.ones(3, 5)
    padded = nunchaku.pad(t, 4, 8)
    assert padded.shape == (4, 8)
    assert padded.sum() == t.sum()
    assert_equal(padded[:3, :5], t)
    assert nunchaku.pad(t, 3, 5) is t


# ------------------------------------------------------------------------------------------- nunchaku gemv_awq


@pytest.mark.parametrize(
    ("place", "word"), [((0, 8), (0, 1)), ((0, 32), (8, 0)), ((0, 64), (64, 0)), ((1, 0), (16, 0)), ((4, 0), (256, 0))]
)
def test_nunchaku_awq_golden(place, word):
    codes = one_code(8, 256, *place)
    assert only_nibble(nunchaku.pack_awq_qweight(codes, torch.int16)) == word
    assert nunchaku.pack_awq_qweight(codes).shape == (2, 128)


def test_nunchaku_awq_formula_by_index():
    n, k = 12, 192
    rows, columns = torch.arange(n)[:, None], torch.arange(k)
    word = rows // 4 * k + 64 * (columns // 64) + 16 * (rows % 4) + 8 * (columns % 64 // 32) + columns % 8
    codes = torch.randint(0, 16, (n, k), dtype=torch.int8)
    stored = unpack_nibbles(nunchaku.pack_awq_qweight(pack_nibbles(codes)).view(torch.int8)).flatten()
    assert_equal(stored[4 * word + columns % 32 // 8], codes)


def test_nunchaku_awq_zeros_decode_to_the_same_weight():
    """W = q s + zn equals (q - 8) s + z, for scales whose 8 s is exact and sums that fit fp16."""
    scale = torch.tensor([[0.5, 0.25, 0.125, 1.0]], dtype=torch.float16)
    zn = -7 * scale
    z = nunchaku.unpack_awq_zeros(zn, scale)
    assert_equal(z, scale)  # the default zero 7 of nunchaku
    assert_equal(nunchaku.pack_awq_zeros(z, scale), zn)
    codes = torch.arange(16, dtype=torch.int8).expand(4, 16)
    w = dequantize_awq(pack_nibbles(codes), scale, z, 16)
    assert_equal(w, codes * scale.float().t() + zn.float().t())


def test_zeros_are_rounded_once():
    """8 s + zn in bf16 steps would lose the sum's low bits: 8 s rounds to nothing, the sum in fp32 does not."""
    scale, zn = torch.tensor([1.0078125]).bfloat16(), torch.tensor([-8.0]).bfloat16()
    assert nunchaku.unpack_awq_zeros(zn, scale).item() == 0.0625


@pytest.mark.parametrize("splits", [3, 6])
def test_adaln_rows(splits):
    n = 4 * splits
    logical = torch.arange(n)
    stored = nunchaku.interleave_rows(logical, splits)
    for c in range(n // splits):
        for j in range(splits):
            assert stored[c * splits + j] == j * (n // splits) + c
    assert_equal(nunchaku.deinterleave_rows(stored, splits), logical)
    scales = torch.randn(3, n)
    assert_equal(nunchaku.deinterleave_rows(nunchaku.interleave_rows(scales, splits, 1), splits, 1), scales)
    assert_equal(nunchaku.interleave_rows(scales, splits, 1)[0], nunchaku.interleave_rows(scales[0], splits))
    with pytest.raises(FormatError, match="3 or 6 splits"):
        nunchaku.interleave_rows(logical, 4)


@pytest.mark.parametrize(("splits", "segments"), [(3, {1}), (6, {1, 4})])
def test_folded_one(splits, segments):
    bias = torch.zeros(2 * splits)
    folded = nunchaku.add_folded_one(bias, splits)
    assert {i // 2 for i in folded.nonzero().flatten().tolist()} == segments
    assert folded.max() == 1
    assert_equal(nunchaku.remove_folded_one(folded, splits), bias)


# ------------------------------------------------------------------------------------------------ tile-packed


def test_tile_packed_golden():
    """Natural row = 128 nt + 4 quad + r and byte = 32 kt + b sit at [nt, kt, quad, 32 r + b]."""
    weight = random_bytes(256, 96)
    tiles = tile_packed.pack_weight(weight)
    assert tiles.shape == (2, 3, 32, 128)
    for row, byte in ((0, 0), (1, 5), (4, 31), (127, 33), (200, 95)):
        assert tiles[row // 128, byte // 32, row % 128 // 4, 32 * (row % 4) + byte % 32] == weight[row, byte]


@small
@given(count, count, st.sampled_from([0, 1, 16, 32]), float_dtype)
def test_tile_packed_round_trips(row_tiles, groups, rank, dtype):
    n = 128 * row_tiles
    weight, scale, up = random_bytes(n, 32 * groups), torch.randn(groups, n).to(dtype), torch.randn(n, rank).to(dtype)
    assert_equal(tile_packed.unpack_weight(tile_packed.pack_weight(weight)), weight)
    assert_equal(tile_packed.unpack_scale(tile_packed.pack_scale(scale)), scale)
    assert_equal(tile_packed.unpack_proj_up(tile_packed.pack_proj_up(up)), up)
    assert tile_packed.pack_scale(scale).shape == (row_tiles, groups, 128)
    assert tile_packed.pack_proj_up(up).shape == (row_tiles, rank, 128)


def test_tile_packed_refuses_other_shapes():
    with pytest.raises(FormatError, match="N=64"):
        tile_packed.pack_weight(random_bytes(64, 32))
    with pytest.raises(FormatError, match=r"\[N/128, K/64, 32, 128\]"):
        tile_packed.unpack_weight(random_bytes(1, 1, 128, 32))
    with pytest.raises(FormatError, match=r"\[N/128, R, 128\]"):
        tile_packed.unpack_proj_up(torch.zeros(1, 8, 64))


# ----------------------------------------------------------------------------------------------------- AutoAWQ


def test_autoawq_column_order_golden():
    """Output columns 0..7 sit in nibbles 0 4 1 5 2 6 3 7 of a GEMM word."""
    for column, position in enumerate([0, 4, 1, 5, 2, 6, 3, 7]):
        canonical = autoawq.Canonical(one_code(8, 2, column, 0), torch.ones(1, 8), torch.zeros(1, 8))
        assert only_nibble(autoawq.pack_gemm(canonical).qweight) == (0, position)


def random_autoawq(n, k, group, dtype=torch.float16):
    """Codes, integer zeros 0..15 and scales of a layer. Zeros of every value, scales of very different sizes."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.int8)
    zeros = torch.randint(0, 16, (k // group, n), dtype=torch.int8)
    scales = (torch.rand(k // group, n) * 10.0 ** torch.randint(-5, 1, (k // group, n))).clamp_min(1e-6)
    return codes, zeros, scales.to(dtype)


@small
@given(count, st.sampled_from([32, 64, 128]), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_autoawq_bytes_come_back(rows, group, dtype):
    n, k = 8 * rows, 256
    codes, zeros, scales = random_autoawq(n, k, group, dtype)
    padded = nunchaku.awq_padded_groups(k, group)

    gemm = autoawq.Packed(autoawq._words_from_columns(codes.t()), autoawq._words_from_columns(zeros), scales)
    canonical = autoawq.unpack_gemm(*gemm)
    assert_equal(unpack_nibbles(canonical.qdata), codes)
    for again, first in zip(autoawq.pack_gemm(canonical), gemm, strict=True):
        assert_equal(again, first)

    qzeros = pack_nibbles(nunchaku.pad(zeros.t(), 1, padded)).view(torch.int32)
    gemv = autoawq.Packed(pack_nibbles(codes).view(torch.int32), qzeros, nunchaku.pad(scales.t(), 1, padded))
    from_gemv = autoawq.unpack_gemv(*gemv, group)
    for one, other in zip(from_gemv, canonical, strict=True):
        assert_equal(one, other)
    for again, first in zip(autoawq.pack_gemv(from_gemv), gemv, strict=True):
        assert_equal(again, first)

    scaled = -(zeros.float() * scales.float()).to(dtype)
    fast = autoawq.Packed(
        nunchaku.pack_awq_qweight(pack_nibbles(codes), torch.int16),
        nunchaku.pad(scaled, padded, 1),
        nunchaku.pad(scales, padded, 1),
    )
    from_fast = autoawq.unpack_gemv_fast(*fast, group)
    assert_equal(from_fast.qdata, canonical.qdata)
    for again, first in zip(autoawq.pack_gemv_fast(from_fast), fast, strict=True):
        assert_equal(again, first)


def test_autoawq_decodes_to_its_own_formula():
    """(q - zi) s: exact in fp32 where the canonical zeros are fp32."""
    codes, zeros, scales = random_autoawq(16, 128, 32, torch.float32)
    gemm = autoawq.Packed(autoawq._words_from_columns(codes.t()), autoawq._words_from_columns(zeros), scales)
    canonical = autoawq.unpack_gemm(*gemm)
    step = scales.t().repeat_interleave(32, 1).double()
    exact = (codes - zeros.t().repeat_interleave(32, 1)).double() * step
    got = dequantize_awq(*canonical, 32).double()
    # two roundings of fp32: z = (8 - zi) s, at most 8 s, and the fma, at most 15 s
    assert ((got - exact).abs() <= 2.0**-24 * (8 + 15) * step).all()


@pytest.mark.parametrize("pack", [autoawq.pack_gemm, autoawq.pack_gemv, autoawq.pack_gemv_fast])
def test_float_zeros_are_refused_by_layer_and_group(pack):
    codes, zeros, scales = random_autoawq(8, 256, 64, torch.float32)
    good = autoawq.Canonical(pack_nibbles(codes), scales, (8 - zeros.float()) * scales)
    pack(good, "blocks.3.fc")
    for change, found in ((0.5, "no integers"), (0.003, "no integers"), (40.0, "no integers")):
        bad = good.zeros.clone()
        bad[2, 5] += change * scales[2, 5]
        with pytest.raises(FormatError, match=r"'blocks.3.fc'.*" + found + r".*group 2, output 5"):
            pack(good._replace(zeros=bad), "blocks.3.fc")


def test_a_scale_of_zero_needs_a_zero_of_zero():
    scale, zeros = torch.zeros(1, 8), torch.zeros(1, 8)
    assert (autoawq.integer_zeros(scale, zeros) == 8).all()
    with pytest.raises(FormatError, match="group 0, output 0"):
        autoawq.integer_zeros(scale, zeros + 1)


def test_autoawq_refuses_shapes():
    with pytest.raises(FormatError, match="int32"):
        autoawq.unpack_gemm(torch.zeros(64, 1), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 8))
    words = torch.zeros(64, 1, dtype=torch.int32)
    with pytest.raises(FormatError, match="scales must have shape"):
        autoawq.unpack_gemm(words, words[:1], torch.zeros(1, 16))
    with pytest.raises(FormatError, match="multiple of 8"):
        autoawq.pack_gemm(autoawq.Canonical(random_bytes(9, 32), torch.ones(1, 9), torch.zeros(1, 9)), "x")
    with pytest.raises(FormatError, match="positive divisor of K=64"):
        autoawq.unpack_gemv(torch.zeros(2, 8, dtype=torch.int32), words[:2], torch.zeros(2, 8), 48)


def test_overflowing_zeros_are_refused():
    words = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(FormatError, match="convert scales to float32"):
        autoawq.unpack_gemm(words, words[:1], torch.full((1, 8), 60000.0, dtype=torch.float16))
