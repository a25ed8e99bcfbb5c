"""The awq_w4a16 format: quantizer, config, markers, keys, shared activations."""

import pytest
import torch

from kitchen_awq import quantizer
from kitchen_awq.format import AWQConfig, AWQFormat
from kitchen_core import FormatError, QuantizedTensor, UnsupportedError
from kitchen_core.packing import unpack_nibbles
from kitchen_core.testing import FLOAT_DTYPES, assert_equal, relative_error, unit_roundoff


def quantize(weight, group=64, seed=0):
    config = AWQFormat.config_for(*weight.shape, group_size=group)
    return AWQFormat.quantize(weight, config, seed), config


# ---------------------------------------------------------------------------------------------------- quantizer


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_element_is_within_half_a_step_of_its_range(dtype):
    """min/max: half a step inside the range. Narrowing never makes a group's squared error larger."""
    w = torch.randn(24, 256).to(dtype)
    tensors, config = quantize(w)
    assert tensors["scale"].dtype == tensors["zeros"].dtype == dtype
    groups = w.double().unflatten(-1, (-1, 64))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    u = unit_roundoff(dtype)
    # half a step, the rounding of s over at most 8 levels, of z, and of the decoded fp32 value
    size = groups.abs().amax(-1) + step
    half = step * (0.5 + 8 * u) + size * (u + 2 * unit_roundoff(torch.float32))
    error = (AWQFormat.dequantize(tensors, config).double().unflatten(-1, (-1, 64)) - groups).square().sum(-1)
    assert (error <= 64 * half**2).all()


def test_error_of_gaussian_weights():
    """4 bits on 64 Gaussian numbers: the mean range is 4.75 sigma, a fifteenth of it over sqrt(12) is 0.091 sigma."""
    w = torch.randn(256, 512)
    tensors, config = quantize(w)
    expected_range = torch.randn(20000, 64).sort(-1).values
    step = ((expected_range[:, -1] - expected_range[:, 0]) / 15).square().mean().sqrt().item()
    assert relative_error(AWQFormat.dequantize(tensors, config), w) < step / 12**0.5


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_constant_groups_are_exact(dtype):
    values = torch.tensor([0.0, 1.0, -3.14159, 1e-4, 300.0]).to(dtype)
    w = values.unsqueeze(1).expand(5, 64).contiguous()
    tensors, config = quantize(w)
    assert_equal(AWQFormat.dequantize(tensors, config, dtype), w)


def test_codes_of_a_grid_come_back():
    """A group that lies on the 16 levels of its own scale and zero is exact."""
    codes = torch.arange(16).repeat(8, 4).float()
    w = (codes - 8) * 0.5 + 3.0
    tensors, config = quantize(w)
    assert_equal(unpack_nibbles(tensors["qdata"]), codes.to(torch.int8))
    assert_equal(AWQFormat.dequantize(tensors, config), w)


def test_extreme_weights_stay_finite():
    for dtype, value in ((torch.float16, 65504.0), (torch.bfloat16, 3e38), (torch.float32, 3e38)):
        w = torch.full((1, 64), value, dtype=dtype)
        w[0, ::2] = -value
        tensors, config = quantize(w)
        assert tensors["scale"].isfinite().all()
        assert AWQFormat.dequantize(tensors, config).isfinite().all()
    tiny = torch.rand(1, 64).half() * 1e-7
    tensors, config = quantize(tiny)
    assert (AWQFormat.dequantize(tensors, config).double() - tiny.double()).abs().max() <= tiny.double().max()


@pytest.mark.parametrize("seed", [0, 7])
def test_chunks_change_nothing(monkeypatch, seed):
    w = torch.randn(37, 128)
    whole, _ = quantize(w, seed=seed)
    monkeypatch.setattr(quantizer, "CHUNK_ELEMENTS", 5 * 128)
    chunked, _ = quantize(w, seed=seed)
    for key, tensor in whole.items():
        assert_equal(chunked[key], tensor, key)


def test_stochastic_rounding_is_seeded_and_unbiased():
    w = torch.randn(64, 64)
    first, config = quantize(w, seed=1)
    assert_equal(quantize(w, seed=1)[0]["qdata"], first["qdata"])
    assert not torch.equal(quantize(w, seed=2)[0]["qdata"], first["qdata"])
    mean = sum(AWQFormat.dequantize(quantize(w, seed=s)[0], config) for s in range(1, 65)) / 64
    # errors of 64 independent roundings average to an eighth of one
    assert relative_error(mean, w) < relative_error(AWQFormat.dequantize(first, config), w) / 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stochastic_rounding_is_unbiased_up_to_the_ends_of_the_range(dtype):
    """A mean of 256 roundings, each of which is off by less than a step: by Hoeffding one in 1e14 is off by a quarter.

    Rounding to nearest clips the ends of these groups; what lies beyond an end, since scale and zero are rounded, has its code.
    """
    w = torch.randn(64, 128).to(dtype)
    clipped, config = quantize(w)
    found = [quantize(w, seed=s)[0] for s in range(1, 257)]
    scale, zeros = found[0]["scale"], found[0]["zeros"]
    assert (scale > clipped["scale"]).float().mean() > 0.5
    assert all(torch.equal(t["scale"], scale) and torch.equal(t["zeros"], zeros) for t in found)
    step, middle = (t.double().t().repeat_interleave(config.group_size, 1) for t in (scale, zeros))
    low, high = middle - 8 * step, middle + 7 * step
    mean = sum(AWQFormat.dequantize(t, config).double() for t in found) / len(found)
    assert ((mean - w.double().clamp(low, high)).abs() <= step / 4).all()
    beyond = (w.double() < low) | (w.double() > high)
    assert (w.double() - w.double().clamp(low, high)).abs().max() < step.min() / 4
    assert torch.equal(mean[beyond], w.double().clamp(low, high)[beyond].float().double())
    assert not beyond.float().mean() > 2 / config.group_size, "only the least and the greatest of a group can be"


# ------------------------------------------------------------------------------------------------------- config


def test_config_for():
    assert AWQFormat.config_for(8, 128) == AWQConfig(64)
    assert AWQFormat.config_for(8, 96, group_size=-1) == AWQConfig(96)
    with pytest.raises(UnsupportedError, match=r"\[8, 96\] in groups of 64.*K=96; use group_size 32, 16, 8 or -1, "):
        AWQFormat.config_for(8, 96)
    with pytest.raises(UnsupportedError, match="K=33 must be even"):
        AWQFormat.config_for(8, 33)
    with pytest.raises(UnsupportedError, match="groups of 0"):
        AWQFormat.config_for(8, 64, group_size=0)


@pytest.mark.parametrize("group", [2, 16, 32, 64, 128, 256, -1])
def test_marker_and_shapes_say_the_group(group):
    tensors, config = quantize(torch.randn(5, 512), group)
    shapes = {k: tuple(t.shape) for k, t in tensors.items()}
    AWQFormat.check(tensors, config)
    marker = AWQFormat.marker(config)
    assert marker == {"format": "awq_w4a16", "group_size": config.group_size}
    for said in (marker, {"format": "awq_w4a16"}, {**marker, "surprise": 1}):
        assert AWQFormat.config_from_marker(said, shapes) == config
    with pytest.raises(FormatError, match="does not fit its weight"):
        AWQFormat.config_from_marker({"group_size": 8}, shapes)
    with pytest.raises(FormatError, match="group_size True"):
        AWQFormat.config_from_marker({"group_size": True}, shapes)


def test_check_names_what_is_wrong():
    tensors, config = quantize(torch.randn(5, 128))
    for change, message in (
        ({"scale": tensors["scale"].t()}, r"weight_scale must be .* = \[2, 5\], got torch.float32 \[5, 2\]"),
        ({"zeros": tensors["zeros"].int()}, "weight_zeros must be"),
        ({"qdata": tensors["qdata"].flatten()}, "weight must be int8"),
    ):
        with pytest.raises(FormatError, match=message):
            AWQFormat.check({**tensors, **change}, config)
    with pytest.raises(FormatError, match="group_size 48 does not divide K=128"):
        AWQFormat.check(tensors, AWQConfig(48))


def test_both_spellings_of_the_zeros_key():
    tensors, _ = quantize(torch.randn(5, 128))
    state = AWQFormat.state_dict(tensors, "a.")
    assert set(state) == {"a.weight", "a.weight_scale", "a.weight_zeros"}
    state["a.weight_zero"] = state.pop("a.weight_zeros")
    assert AWQFormat.from_state_dict(state, "a.").keys() == tensors.keys()


# ---------------------------------------------------------------------------------------------- shared activation


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("act", ["none", "gelu_tanh", "swiglu"])
def test_shared_activation_equals_each_linear(act, dtype):
    """Groups may differ: the activation is a float one. The weight decodes to x's dtype also behind an activation."""
    weights = [QuantizedTensor.quantize(torch.randn(8, 128).to(dtype), "awq", group_size=g) for g in (32, 64, 128)]
    x = torch.randn(2, 3, 256 if act == "swiglu" else 128).to(dtype)
    residual = torch.randn(2, 3, 8).to(dtype)
    shared = weights[0].quantize_activation(x, input_act=act)
    assert shared.shape == (2, 3, 128)
    for w in weights:
        assert_equal(w.linear(shared, residual=residual), w.linear_input_act(x, None, act, residual=residual))
