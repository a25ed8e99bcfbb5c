"""The search over the scale exponent: never worse than min/max on inputs that it did not see, better in the mean."""

from __future__ import annotations

import math

import pytest
import torch

from kitchen_awq import channel_scales
from kitchen_awq.channel_scales import divide_producer, scale_columns, search_channel_scales
from kitchen_awq.quantizer import quantize_awq
from kitchen_core import Calibration, UnsupportedError
from kitchen_core.reference.awq import awq_linear
from kitchen_core.testing import assert_equal, unit_roundoff

K, GROUP = 256, 32


def inputs(kind: str, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Activations as layers have them: after a norm with outlier channels, after gelu, of low rank, plain."""
    x = torch.randn(rows, K, generator=generator)
    if kind == "norm":
        gain = torch.randn(K, generator=torch.Generator().manual_seed(5)).exp()
        gain[::37] *= 20
        return torch.nn.functional.layer_norm(x, (K,)) * gain
    if kind == "gelu":
        offset = torch.randn(K, generator=torch.Generator().manual_seed(6))
        return torch.nn.functional.gelu(x * 2 + offset)
    if kind == "low rank":
        mix = torch.randn(32, K, generator=torch.Generator().manual_seed(7)) * torch.logspace(-1, 1, K)
        return x[:, :32] @ mix / 6 + 0.05 * x
    return x


def output_error(x, weight, scales):
    """Relative error of the layer's output, its input divided by the scales as its producer would."""
    packed = quantize_awq(scale_columns(weight, scales), GROUP)
    exact = x @ weight.float().t()
    return float((awq_linear(x / scales, *packed, None, GROUP) - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_held_out_inputs_are_never_worse_and_better_in_the_mean(dtype):
    ratios = {}
    for kind in ("norm", "gelu", "low rank", "plain"):
        for seed in range(4):
            generator = torch.Generator().manual_seed(100 + seed)
            weight = (torch.randn(96, K, generator=generator) / 16).to(dtype)
            calibration = Calibration(K).update(inputs(kind, 1024, generator))
            found = search_channel_scales([weight], calibration, GROUP)
            fresh = inputs(kind, 512, generator)
            ratios[kind, seed] = output_error(fresh, weight, found.scales) / output_error(
                fresh, weight, torch.ones_like(found.scales)
            )
    assert max(ratios.values()) <= 1, ratios
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    assert mean < 0.95, ratios


def test_weights_that_share_an_input_get_one_set_of_scales_and_progress_is_told():
    generator = torch.Generator().manual_seed(1)
    calibration = Calibration(K).update(inputs("norm", 512, generator))
    weights = [torch.randn(n, K, generator=generator) for n in (32, 8)]
    told = []
    found = search_channel_scales(weights, calibration, GROUP, steps=5, progress=lambda *at: told.append(at))
    assert told == [("searching channel scales", i, 5) for i in range(1, 6)]
    assert found.exponent > 0
    assert found.error <= channel_scales.MARGIN * found.plain_error
    assert found.scales.shape == (K,)


def test_chunks_of_rows_change_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    calibration = Calibration(K).update(inputs("norm", 512, generator))
    weight = torch.randn(64, K, generator=generator)
    found = search_channel_scales([weight], calibration, GROUP, steps=4)
    monkeypatch.setattr(channel_scales, "CHUNK_ELEMENTS", 3 * K)
    again = search_channel_scales([weight], calibration, GROUP, steps=4)
    assert again.exponent == found.exponent
    assert_equal(again.scales, found.scales)
    assert math.isclose(again.error, found.error, rel_tol=1e-5)


def test_channels_without_inputs_keep_scale_one():
    generator = torch.Generator().manual_seed(3)
    x = inputs("norm", 256, generator)
    x[:, 7] = 0
    found = search_channel_scales([torch.randn(32, K, generator=generator)], Calibration(K).update(x), GROUP)
    assert found.exponent > 0
    assert found.scales[7] == 1
    assert torch.isfinite(found.scales).all()
    assert (found.scales > 0).all()


@pytest.mark.parametrize("producer", ["norm", "linear"])
def test_the_producer_takes_the_division(producer):
    generator = torch.Generator().manual_seed(4)
    scales = torch.rand(K, generator=generator) + 0.5
    h = torch.randn(9, K, generator=generator)
    weight = torch.randn(K, generator=generator) if producer == "norm" else torch.randn(K, K, generator=generator)
    bias = torch.randn(K, generator=generator)

    def run(h, weight, bias):
        return h * weight + bias if producer == "norm" else h @ weight.t() + bias

    divided = [t.double() for t in divide_producer(scales, weight, bias)]
    exact = run(h.double(), weight.double(), bias.double()) / scales
    size = run(h.double().abs(), weight.double().abs(), bias.double().abs()) / scales
    assert ((run(h.double(), *divided) - exact).abs() <= 1.01 * unit_roundoff(torch.float32) * size).all()
    assert divide_producer(scales, weight)[1] is None


def test_what_does_not_fit_is_refused():
    calibration = Calibration(K).update(torch.ones(2, K))
    with pytest.raises(UnsupportedError, match="0 weights"):
        search_channel_scales([], calibration)
    with pytest.raises(UnsupportedError, match="share an input"):
        search_channel_scales([torch.ones(4, K), torch.ones(4, 64)], calibration)
    with pytest.raises(UnsupportedError, match="saw no input"):
        search_channel_scales([torch.ones(4, K)], Calibration(K))
