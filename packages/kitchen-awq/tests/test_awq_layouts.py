"""Stored forms of other toolkits load and give the dequantized product; files are made by packers written here, bit by bit."""

from __future__ import annotations

import pytest
import torch

from kitchen_awq.format import AWQConfig, AWQFormat
from kitchen_core import ops
from kitchen_core.errors import FormatError
from kitchen_core.layouts import autoawq, compressed_tensors, gptq
from kitchen_core.testing import assert_equal

N, K, G = 24, 96, 32


def layer(seed: int = 0, symmetric: bool = False):
    """Codes [N, K] and zeros [K/g, N] of 0..15, scales float16 [K/g, N]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=generator)
    zeros = torch.full((K // G, N), 8) if symmetric else torch.randint(1, 16, (K // G, N), generator=generator)
    scales = (torch.rand(K // G, N, generator=generator) * 0.01 + 0.001).half()
    return codes, zeros, scales


def words(numbers: list[list[int]], order=range(8)) -> torch.Tensor:
    """Rows of numbers 0..15, eight a word: number i of a word in nibble order[i]."""
    packed = []
    for row in numbers:
        line = []
        for first in range(0, len(row), 8):
            word = 0
            for i, number in enumerate(row[first : first + 8]):
                word |= int(number) << (4 * order[i])
            line.append(word - 2**32 if word >= 2**31 else word)
        packed.append(line)
    return torch.tensor(packed, dtype=torch.int32)


def dense(codes, zeros, scales) -> torch.Tensor:
    spread = lambda t: t.t().repeat_interleave(G, 1)  # noqa: E731
    return (codes.float() - spread(zeros.float())) * spread(scales.float())


def check(found: autoawq.Canonical, codes, zeros, scales) -> None:
    """The stored codes and scales exactly, zeros rounded once, and the product of the decoded weight."""
    assert_equal(found.scale, scales)
    assert_equal(found.zeros, ((8 - zeros.float()) * scales.float()).half())
    tensors = {"qdata": found.qdata, "scale": found.scale, "zeros": found.zeros}
    AWQFormat.check(tensors, AWQConfig(G))
    weight = AWQFormat.dequantize(tensors, AWQConfig(G))
    want = dense(codes, zeros, scales)
    assert (weight - want).abs().max() <= 2.0**-11 * (15 * scales.float().max())  # of a rounded zero, at most 15 scales
    x = torch.randn(3, K)
    assert_equal(ops.awq_linear(x, *found, None, G), x @ weight.t())


def test_autoawq_gemm_from_an_independent_packer():
    codes, zeros, scales = layer()
    places = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of each of a word's eight output columns
    qweight, qzeros = words(codes.t().tolist(), places), words(zeros.tolist(), places)
    found = autoawq.unpack_gemm(qweight, qzeros, scales)
    check(found, codes, zeros, scales)
    for again, first in zip(autoawq.pack_gemm(found), (qweight, qzeros, scales), strict=True):
        assert_equal(again, first)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(v2, symmetric):
    codes, zeros, scales = layer(1, symmetric)
    qweight = words(codes.tolist()).t().contiguous()
    qzeros = words((zeros - (0 if v2 else 1)).tolist())
    g_idx = torch.arange(K, dtype=torch.int32) // G
    found = gptq.unpack(qweight, qzeros, scales, g_idx, v2=v2)
    check(found, codes, zeros, scales)
    assert not symmetric or not found.zeros.any()
    for again, first in zip(gptq.pack(found, v2=v2), (qweight, qzeros, scales, g_idx), strict=True):
        assert_equal(again, first)


def test_gptq_refuses_what_does_not_map():
    codes, zeros, scales = layer(2)
    qweight, qzeros = words(codes.tolist()).t().contiguous(), words((zeros - 1).tolist())
    with pytest.raises(FormatError, match="desc_act"):
        gptq.unpack(qweight, qzeros, scales, torch.arange(K).flip(0) // G)
    with pytest.raises(FormatError, match="must divide K"):
        gptq.unpack(qweight, qzeros.repeat(2, 1)[:5], scales)
    found = gptq.unpack(qweight, words((zeros * 0).tolist()), scales, v2=True)
    with pytest.raises(FormatError, match=r"layer 'a\.b': group 0, output 0 has zero 0"):
        gptq.pack(found, "a.b")
    moved = found.zeros.clone()
    moved[1, 2] += found.scale[1, 2] / 3
    with pytest.raises(FormatError, match=r"layer 'a\.b'.*group 1, output 2"):
        gptq.pack(found._replace(zeros=moved), "a.b", v2=True)


@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors_pack_quantized(symmetric):
    codes, zeros, scales = layer(3, symmetric)
    packed, scale = words(codes.tolist()), scales.t().contiguous()
    by_group = [words([zeros[g].tolist()])[0] for g in range(K // G)]  # eight outputs a word
    points = None if symmetric else torch.stack(by_group, 1)
    found = compressed_tensors.unpack(packed, scale, torch.tensor([N, K]), points)
    check(found, codes, zeros, scales)
    again = compressed_tensors.pack(found)
    assert_equal(again.weight_packed, packed)
    assert_equal(again.weight_scale, scale)
    assert again.weight_shape.tolist() == [N, K]
    assert (again.weight_zero_point is None) == symmetric
    if points is not None:
        assert_equal(again.weight_zero_point, points)


def test_compressed_tensors_of_ragged_sizes_and_bad_shapes():
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (13, 36), generator=generator)
    zeros = torch.randint(0, 16, (1, 13), generator=generator)
    scales = torch.rand(1, 13, generator=generator).bfloat16()
    points = words([zeros[0].tolist()]).t().contiguous()
    found = compressed_tensors.unpack(words(codes.tolist()), scales.t().contiguous(), (13, 36), points)
    want = (codes.float() - 8) * scales.t().float() + ((8 - zeros.float()) * scales.float()).bfloat16().float().t()
    assert_equal(ops.dequantize_awq(*found, 36), want)
    again = compressed_tensors.pack(found)
    assert_equal(again.weight_packed, words(codes.tolist()))
    assert_equal(again.weight_zero_point, points)
    with pytest.raises(FormatError, match=r"weight_packed must be \[N, K/8\] = \[13, 5\]"):
        compressed_tensors.unpack(words(codes.tolist())[:, :4], scales.t(), (13, 36))
    with pytest.raises(FormatError, match="weight_scale must be"):
        compressed_tensors.unpack(words(codes.tolist()), scales, (13, 36))
    with pytest.raises(FormatError, match="weight_zero_point must be"):
        compressed_tensors.unpack(words(codes.tolist()), scales.t(), (13, 36), points[:1])
