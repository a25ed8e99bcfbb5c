"""LoRA in the low-rank branch, fused rows and padding: what changes without a second quantization."""

import pytest
import torch
import torch.nn.functional as F

from kitchen_core import QuantizedTensor, UnsupportedError
from kitchen_core.packing import pack_nibbles
from kitchen_core.testing import assert_close, assert_equal, tolerance
from kitchen_svdquant.format import SVDQuantConfig, SVDQuantFormat
from kitchen_svdquant.rework import append_lora, drop_padding, split_rows, truncate_rank

N, K, R = 48, 128, 8


def layer(dtype=torch.bfloat16, act_unsigned=False):
    tensors = {
        "qdata": pack_nibbles(torch.randint(-8, 8, (N, K), dtype=torch.int8)),
        "scale": (torch.rand(K // 64, N) * 0.1 + 0.01).to(dtype),
        "proj_down": (torch.randn(K, R) * 0.1).to(dtype),
        "proj_up": torch.randn(N, R).to(dtype),
        "smooth_factor": (torch.rand(K) + 0.5).to(dtype),
    }
    return tensors, SVDQuantConfig(R, act_unsigned)


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
        for name in a
    )


@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("ranks", [1, 4, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lora_adds_its_product_and_comes_off_bit_for_bit(dtype, ranks, act_unsigned):
    tensors, config = layer(dtype, act_unsigned)
    down, up, x = torch.randn(ranks, K) / 8, torch.randn(N, ranks), torch.randn(5, K).to(dtype)
    made, grown = append_lora(tensors, config, down, up, strength=0.5)
    SVDQuantFormat.check(made, grown)
    assert grown.rank % 16 == 0
    assert grown.rank - R - ranks in range(16)
    assert all(made[name] is tensors[name] for name in ("qdata", "scale", "smooth_factor"))
    before = SVDQuantFormat.linear(x, tensors, config, out_dtype=torch.float32)
    after = SVDQuantFormat.linear(x, made, grown, out_dtype=torch.float32)
    stored_down, stored_up = down.to(dtype).double(), (0.5 * up).to(dtype).double()
    added = x.double() @ stored_down.t() @ stored_up.t()
    t = tolerance(torch.float32, 2 * K + grown.rank, "svdquant_w4a4")
    largest = ((x.double().abs() + 1) / tensors["smooth_factor"].double()).amax(1, keepdim=True)
    terms = largest.expand(5, K) @ (8 * tensors["scale"].double().amax(0)).expand(K, N) + x.double().abs() @ (
        made["proj_down"].double().abs() @ made["proj_up"].double().abs().t()
    )
    assert_close(after, before.double() + added, relative=2 * t.relative, absolute=2 * t.accumulation * terms)
    off, shrunk = truncate_rank(made, grown, R)
    assert shrunk == config
    assert same_bits(off, tensors)


def test_loras_stack_and_the_last_comes_off_first():
    tensors, config = layer()
    first, first_config = append_lora(tensors, config, torch.randn(4, K), torch.randn(N, 4))
    both, both_config = append_lora(first, first_config, torch.randn(9, K), torch.randn(N, 9), strength=-2.0)
    assert same_bits(truncate_rank(both, both_config, first_config.rank)[0], first)
    assert same_bits(truncate_rank(both, both_config, R)[0], tensors)


@pytest.mark.parametrize(
    ("down", "up", "message"),
    [((4, 64), (N, 4), r"down \[r, K=128\]"), ((4, K), (N, 5), r"got \[4, 128\]"), ((0, K), (N, 0), "rank 0")],
)
def test_loras_that_do_not_fit_are_refused(down, up, message):
    with pytest.raises(UnsupportedError, match=message):
        append_lora(*layer(), torch.zeros(down), torch.zeros(up))
    with pytest.raises(UnsupportedError, match="0 to 8"):
        truncate_rank(*layer(), R + 1)


@pytest.mark.parametrize("act_unsigned", [False, True])
def test_fused_rows_are_split_and_share_one_activation(act_unsigned):
    tensors, config = layer(act_unsigned=act_unsigned)
    bias, x = torch.randn(N), torch.randn(7, K, dtype=torch.bfloat16)
    pieces = split_rows(tensors, config, (16, 24, 8), bias)
    whole = SVDQuantFormat.linear(x, tensors, config, bias)
    weights = [QuantizedTensor(part, SVDQuantFormat, config, torch.bfloat16) for part, _ in pieces]
    shared = weights[0].quantize_activation(x)
    found = [weight.linear(shared, part_bias) for weight, (_, part_bias) in zip(weights, pieces, strict=True)]
    assert_close(
        torch.cat(found, 1), whole.double(), relative=0.0, absolute=torch.finfo(torch.bfloat16).eps * whole.abs()
    )
    assert all(part["smooth_factor"] is tensors["smooth_factor"] for part, _ in pieces)
    with pytest.raises(UnsupportedError, match="N=48"):
        split_rows(tensors, config, (16, 16))


def test_padding_is_dropped_and_nothing_else():
    tensors, config = layer()
    padded = {
        "qdata": F.pad(tensors["qdata"], (0, 32, 0, 80)),
        "scale": F.pad(tensors["scale"], (0, 80, 0, 1)),
        "proj_down": F.pad(tensors["proj_down"], (0, 8, 0, 64)),
        "proj_up": F.pad(tensors["proj_up"], (0, 8, 0, 80)),
        "smooth_factor": F.pad(tensors["smooth_factor"], (0, 64), value=1.0),
    }
    made, cut = drop_padding(padded, SVDQuantConfig(16), N, K, R)
    assert cut == config
    assert same_bits(made, tensors)
    with pytest.raises(UnsupportedError, match="no padding"):
        drop_padding(padded, SVDQuantConfig(16), N, 64, R)
    with pytest.raises(UnsupportedError, match="no padding"):
        drop_padding(padded, SVDQuantConfig(16), N, K, 4)
    with pytest.raises(UnsupportedError, match="has no part"):
        drop_padding(padded, SVDQuantConfig(16), 129, K)
    assert_equal(made["qdata"], tensors["qdata"])
