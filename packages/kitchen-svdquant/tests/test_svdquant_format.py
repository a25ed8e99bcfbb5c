"""The svdquant_w4a4 format: quantizer, dense form and shift, config, markers, keys, tiles, shared activations."""

import pytest
import torch

from kitchen_core import FormatError, QuantizedTensor, UnsupportedError
from kitchen_core.layouts import tile_packed
from kitchen_core.packing import pack_nibbles, unpack_nibbles
from kitchen_core.testing import FLOAT_DTYPES, assert_close, assert_equal, relative_error, tolerance
from kitchen_svdquant import quantizer
from kitchen_svdquant.format import SVDQuantConfig, SVDQuantFormat

SHIFT = 0.171875


def quantize(weight, rank=32, **options):
    config = SVDQuantFormat.config_for(*weight.shape, rank=rank)
    return SVDQuantFormat.quantize(weight, config, **options), config


def random_tensors(n=24, k=128, rank=8, dtype=torch.float32):
    """Tensors of a layer that no quantizer made, so that smooth and branch are anything."""
    return {
        "qdata": pack_nibbles(torch.randint(-8, 8, (n, k), dtype=torch.int8)),
        "scale": (torch.rand(k // 64, n) * 0.1 + 0.01).to(dtype),
        "proj_down": (torch.randn(k, rank) * 0.1).to(dtype),
        "proj_up": torch.randn(n, rank).to(dtype),
        "smooth_factor": (torch.rand(k) + 0.5).to(dtype),
    }


# ------------------------------------------------------------------------------------------------ the dense form


def grid_activations(m, k, smooth, act_unsigned):
    """x whose quantization is exact: codes times powers of two, each group holding the largest code."""
    low, high = (0, 15) if act_unsigned else (-7, 7)
    codes = torch.randint(low, high + 1, (m, k // 64, 64)).float()
    codes[..., 0] = high
    x = (codes * 2.0 ** torch.randint(-3, 1, (m, k // 64, 1))).flatten(1) * smooth
    return x - SHIFT if act_unsigned else x


@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_dense_fallback_equals_the_quantized_path_on_a_grid(act_unsigned, with_bias):
    """Where rounding x costs nothing, x @ Wdeq.T + fallback bias is the layer: 0.171875 * sum Wres is in the bias."""
    tensors = random_tensors()
    tensors["smooth_factor"] = 2.0 ** torch.randint(-2, 3, (128,)).float()
    config = SVDQuantConfig(8, act_unsigned)
    bias = torch.randn(24) if with_bias else None
    x = grid_activations(6, 128, tensors["smooth_factor"], act_unsigned)
    y = SVDQuantFormat.linear(x, tensors, config, bias)
    dense = SVDQuantFormat.dequantize(tensors, config).double()
    fallback = SVDQuantFormat.dense_fallback_bias(tensors, config, bias)
    exact = x.double() @ dense.t() + (0 if fallback is None else fallback.double())
    # the shift cancels against x, so the magnitude is that of both terms
    size = (x.double().abs() + SHIFT) @ dense.abs().t() + x.double().abs() @ (
        tensors["proj_down"].abs().double() @ tensors["proj_up"].abs().double().t()
    ) + 1 + (0 if bias is None else bias.double().abs())  # fmt: skip
    t = tolerance(torch.float32, 2 * 128 + 8, "svdquant_w4a4")
    assert_close(y, exact, relative=t.relative, absolute=2 * t.accumulation * size)
    if act_unsigned:
        wrong = x.double() @ dense.t() + (0 if bias is None else bias.double())
        assert relative_error(wrong, y) > 100 * relative_error(exact, y)


def test_bias_of_an_unsigned_layer_there_and_back():
    tensors, bias = random_tensors(), torch.randn(24)
    unsigned = SVDQuantConfig(8, True)
    wq = unpack_nibbles(tensors["qdata"], signed=True).double() * tensors["scale"].double().t().repeat_interleave(64, 1)
    residual = wq / tensors["smooth_factor"].double()
    shift = SVDQuantFormat.dense_fallback_bias(tensors, unsigned, None)
    # a product, a quotient, K additions and the shift, each 2^-24 of the magnitudes
    slack = (128 + 3) * 2.0**-24 * SHIFT * residual.abs().sum(-1)
    assert_close(shift, SHIFT * residual.sum(-1), absolute=slack)
    assert_equal(SVDQuantFormat.compensated_bias(tensors, unsigned, None), -shift)
    stored = SVDQuantFormat.compensated_bias(tensors, unsigned, bias)
    again = SVDQuantFormat.dense_fallback_bias(tensors, unsigned, stored)
    assert_close(again, bias, absolute=2 * 2.0**-24 * (bias.abs() + shift.abs()))
    signed = SVDQuantConfig(8)
    assert SVDQuantFormat.dense_fallback_bias(tensors, signed, bias) is bias
    assert SVDQuantFormat.compensated_bias(tensors, signed, None) is None


def test_an_unsigned_layer_quantized_here_is_right_with_its_compensated_bias():
    """Positive x use all 16 levels: better than signed. Without the compensation the output is off by the shift."""
    w, bias, x = torch.randn(48, 128), torch.randn(48), torch.rand(64, 128) * 2
    exact = x.double() @ w.double().t() + bias.double()
    errors = {}
    for config in (SVDQuantConfig(16), SVDQuantConfig(16, True)):
        tensors = SVDQuantFormat.quantize(w, config, calibration=x)
        stored = SVDQuantFormat.compensated_bias(tensors, config, bias)
        errors[config.act_unsigned] = relative_error(SVDQuantFormat.linear(x, tensors, config, stored), exact)
        uncompensated = relative_error(SVDQuantFormat.linear(x, tensors, config, bias), exact)
    assert errors[True] < errors[False]
    assert errors[True] < uncompensated


# ---------------------------------------------------------------------------------------------------- quantizer


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("rank", [0, 1, 16, 32])
def test_quantized_weight_is_close(rank, dtype):
    w = torch.randn(96, 256).to(dtype)
    tensors, config = quantize(w, rank)
    SVDQuantFormat.check(tensors, config)
    assert all(t.dtype == dtype for name, t in tensors.items() if name != "qdata")
    # 64 Gaussian numbers reach 2.4 sigma on average: a step of 2.4 / 7 over sqrt(12) is 0.099 sigma
    peaks = torch.randn(20000, 64).abs().amax(-1)
    limit = (peaks / 7).square().mean().sqrt().item() / 12**0.5
    assert relative_error(SVDQuantFormat.dequantize(tensors, config), w) < limit


def test_more_rank_is_better_and_a_low_rank_weight_is_nearly_exact():
    w = torch.randn(96, 8) @ torch.randn(8, 128) + 0.01 * torch.randn(96, 128)
    errors = []
    for rank in (0, 4, 8):
        tensors, config = quantize(w, rank)
        errors.append(relative_error(SVDQuantFormat.dequantize(tensors, config), w))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < errors[0] / 10


def test_calibration_moves_outlier_channels_into_the_weight():
    w, x = torch.randn(64, 128), torch.randn(256, 128)
    x[:, ::16] *= 50
    exact = x.double() @ w.double().t()
    errors = {}
    for name, calibration in (("none", None), ("absmax", x.abs().amax(0)), ("activations", x.reshape(4, 64, 128))):
        tensors, config = quantize(w, 8, calibration=calibration)
        errors[name] = relative_error(SVDQuantFormat.linear(x, tensors, config), exact)
    assert errors["absmax"] < errors["none"]
    assert errors["activations"] < errors["none"]
    with pytest.raises(UnsupportedError, match=r"calibration must be activations \[..., K=128\]"):
        quantize(w, 8, calibration=torch.ones(64))


def test_quantizing_twice_gives_equal_bits_also_above_the_exact_svd(monkeypatch):
    monkeypatch.setattr(quantizer, "EXACT_SVD_SIZE", 32)
    w = torch.randn(192, 256)
    state = torch.get_rng_state()
    a, b = quantize(w, 4)[0], quantize(w, 4)[0]
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    for key, tensor in a.items():
        assert_equal(b[key], tensor, key)


def test_randomized_branch_is_nearly_the_exact_one(monkeypatch):
    # singular values that fall by a tenth each, as trained weights' leading ones do
    u, v = torch.linalg.qr(torch.randn(200, 128)).Q, torch.linalg.qr(torch.randn(160, 128)).Q
    a = u * 0.9 ** torch.arange(128) @ v.t()
    exact = quantizer.low_rank(a, 8)
    monkeypatch.setattr(quantizer, "EXACT_SVD_SIZE", 32)
    found = quantizer.low_rank(a, 8)
    left = [(a - up @ down.t()).norm().item() for up, down in (exact, found)]
    # of the part outside 16 directions, 0.9^8 of the eighth, five products with A leave (0.9^8)^5 = 1.5 %
    assert left[1] < left[0] * (1 + 0.9 ** (8 * 5))


@pytest.mark.parametrize("seed", [0, 3])
def test_chunks_change_nothing(monkeypatch, seed):
    w = torch.randn(70, 128)
    whole = quantize(w, 0, seed=seed)[0]
    monkeypatch.setattr(quantizer, "CHUNK_ELEMENTS", 9 * 128)
    for key, tensor in quantize(w, 0, seed=seed)[0].items():
        assert_equal(tensor, whole[key], key)


def test_smooth_can_be_kept_so_that_layers_share_an_activation():
    q = QuantizedTensor.quantize(torch.randn(64, 128), "svdquant")
    kept, config = quantize(torch.randn(64, 128), smooth=q.smooth_factor)
    assert_equal(kept["smooth_factor"], q.smooth_factor)
    k = QuantizedTensor(kept, SVDQuantFormat, config, torch.float32)
    x = torch.randn(5, 128)
    assert_equal(k.linear(q.quantize_activation(x)), k.linear(x))
    with pytest.raises(UnsupportedError, match=r"smooth must have shape \[K\]"):
        quantize(torch.randn(64, 128), smooth=torch.ones(64))


def test_zero_weights_and_zero_columns():
    tensors, config = quantize(torch.zeros(8, 64), 4)
    assert (SVDQuantFormat.dequantize(tensors, config) == 0).all()
    w = torch.randn(8, 128)
    w[:, 5] = 0
    tensors, config = quantize(w, 4, calibration=torch.ones(128).index_fill(0, torch.tensor([5]), 0))
    assert all(t.isfinite().all() for t in tensors.values())


# ------------------------------------------------------------------------------------------- config and checkpoint


def test_config_for():
    assert SVDQuantFormat.config_for(128, 128) == SVDQuantConfig(32)
    assert SVDQuantFormat.config_for(8, 64) == SVDQuantConfig(8)
    with pytest.raises(UnsupportedError, match=r"\[8, 96\].*K=96 is no multiple of 64"):
        SVDQuantFormat.config_for(8, 96)
    with pytest.raises(UnsupportedError, match="compensated_bias"):
        SVDQuantFormat.config_for(8, 64, act_unsigned=True)
    with pytest.raises(UnsupportedError, match="rank"):
        SVDQuantFormat.config_for(8, 64, rank=-1)
    with pytest.raises(UnsupportedError, match="rank 32 is more"):
        SVDQuantFormat.quantize(torch.randn(8, 64), SVDQuantConfig(32))


@pytest.mark.parametrize("act_unsigned", [False, True])
def test_marker_round_trips(act_unsigned):
    config = SVDQuantConfig(8, act_unsigned)
    shapes = {k: tuple(t.shape) for k, t in random_tensors().items()}
    marker = SVDQuantFormat.marker(config)
    assert marker["lowrank_branch_input_basis"] == "raw"
    assert marker["proj_down_smooth_folded"] is True
    assert SVDQuantFormat.config_from_marker(marker, shapes) == config
    assert SVDQuantFormat.config_from_marker({"layout": "kitchen_tile_packed_w4a4"}, shapes) == SVDQuantConfig(8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_unsigned": "yes"}, "true or false"),
        ({"lowrank_branch_input_basis": "smoothed"}, "basis 'smoothed'"),
        ({"proj_down_smooth_folded": False}, "folded False"),
    ],
)
def test_markers_that_cannot_be_honoured_are_refused(change, message):
    with pytest.raises(FormatError, match=message):
        SVDQuantFormat.config_from_marker(change, {"proj_down": (128, 8)})


def test_check_names_what_is_wrong():
    tensors, config = random_tensors(), SVDQuantConfig(8)
    SVDQuantFormat.check(tensors, config)
    for change, message in (
        ({"scale": tensors["scale"].t()}, r"weight_scale must be .* \[K/64, N\] = \[2, 24\]"),
        ({"proj_up": tensors["proj_up"][:, :4]}, r"proj_up must be .* \[N, R\] = \[24, 8\]"),
        ({"smooth_factor": torch.ones(64)}, r"smooth_factor must be .* \[K\] = \[128\]"),
        ({"qdata": tensors["qdata"][:, :48]}, "K=96"),
    ):
        with pytest.raises(FormatError, match=message):
            SVDQuantFormat.check({**tensors, **change}, config)


@pytest.mark.parametrize("prefix", ["", "weight_"])
def test_both_key_families(prefix):
    tensors = random_tensors()
    state = {"a.weight": tensors["qdata"], "a.weight_scale": tensors["scale"]}
    state |= {f"a.{prefix}{name}": tensors[name] for name in ("proj_down", "proj_up", "smooth_factor")}
    found = SVDQuantFormat.from_state_dict(state, "a.")
    assert {k: t.data_ptr() for k, t in found.items()} == {k: t.data_ptr() for k, t in tensors.items()}
    assert set(SVDQuantFormat.state_dict(tensors, "a.")) == {
        "a.weight", "a.weight_scale", "a.proj_down", "a.proj_up", "a.smooth_factor"
    }  # fmt: skip


@pytest.mark.parametrize("mixed", [False, True])
def test_tile_packed_tensors_are_unpacked_each_by_its_rank(mixed):
    tensors = random_tensors(n=256)
    state = SVDQuantFormat.state_dict(tensors, "a.")
    state["a.weight"] = tile_packed.pack_weight(tensors["qdata"])
    if not mixed:
        state["a.weight_scale"] = tile_packed.pack_scale(tensors["scale"])
        state["a.proj_up"] = tile_packed.pack_proj_up(tensors["proj_up"])
    found = SVDQuantFormat.from_state_dict(state, "a.")
    SVDQuantFormat.check(found, SVDQuantConfig(8))
    x = torch.randn(3, 128)
    for name, tensor in tensors.items():
        assert_equal(found[name], tensor, name)
    config = SVDQuantConfig(8)
    assert_equal(SVDQuantFormat.linear(x, found, config), SVDQuantFormat.linear(x, tensors, config))


# ---------------------------------------------------------------------------------------------- shared activation


@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("act", ["none", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_shared_activation_equals_each_linear(act, act_unsigned, dtype):
    """q, k and v with one smooth factor, branches of their own and of different rank."""
    smooth = random_tensors(dtype=dtype)["smooth_factor"]
    layers = []
    for rank in (0, 8, 32):
        tensors = {**random_tensors(rank=rank, dtype=dtype), "smooth_factor": smooth.clone()}
        layers.append(QuantizedTensor(tensors, SVDQuantFormat, SVDQuantConfig(rank, act_unsigned), dtype))
    x = torch.randn(2, 3, 256 if act == "swiglu" else 128).to(dtype)
    residual, scale = torch.randn(2, 3, 24).to(dtype), torch.randn(24)
    shared = layers[0].quantize_activation(x, input_act=act)
    for w in layers:
        together = w.linear(shared, residual=residual, residual_scale=scale)
        assert_equal(together, w.linear_input_act(x, None, act, residual=residual, residual_scale=scale))


def test_sharing_is_refused_for_another_smooth_factor_or_sign():
    def layer(act_unsigned=False):
        return QuantizedTensor(random_tensors(), SVDQuantFormat, SVDQuantConfig(8, act_unsigned), torch.float32)

    a = layer()
    shared = a.quantize_activation(torch.randn(2, 128))
    with pytest.raises(UnsupportedError, match=r"smooth_factor is \[.*of 128 elements in the activation"):
        layer().linear(shared)
    with pytest.raises(UnsupportedError, match="act_unsigned is False in the activation and True in the weight"):
        layer(True).linear(shared)
