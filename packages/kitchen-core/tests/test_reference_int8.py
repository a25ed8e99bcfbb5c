"""The int8 ops: golden vectors, bounds against float64, special rows, refusals."""

import pytest
import torch

from kitchen_core import InferenceOnlyError, UnsupportedError, ops
from kitchen_core.arithmetic import apply_input_act, hadamard_rotate, rotation_group
from kitchen_core.testing import (
    FLOAT_DTYPES,
    LAYER_SHAPES,
    assert_close,
    assert_equal,
    expect_kernel,
    quantization_bound,
    relative_error,
    strided_copies,
    tolerance,
)

FORMAT = "int8_tensorwise"


def layer(n, k, group, dtype=torch.float32):
    weight = torch.randn(n, k, dtype=dtype)
    codes, scale = ops.quantize_int8_convrot_weight(weight, group)
    return weight, codes, scale


# ----------------------------------------------------------------------------------------------- quantizers


def test_rowwise_golden_vectors():
    codes, scale = ops.quantize_int8_rowwise(torch.tensor([-1, 0.5, 0.330078125, 0.0078125], dtype=torch.bfloat16))
    assert codes.tolist() == [-127, 64, 42, 1]  # 0.5 / scale = 63.5 ties to 64
    assert_equal(scale, torch.tensor([1.0]) / 127)
    codes, _ = ops.quantize_int8_rowwise(torch.tensor([3, -1.703125, 1.09375, 0.69921875], dtype=torch.bfloat16))
    assert codes.tolist() == [127, -72, 46, 30]  # the fp32 quotient; a quotient rounded to bf16 would give 126


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 64), (2, 1, 3, 33)])
def test_rowwise_is_within_half_a_step(dtype, shape):
    x = torch.randn(shape).to(dtype)
    codes, scale = ops.quantize_int8_rowwise(x)
    assert scale.shape == (*shape[:-1], 1)
    # half a step, plus the roundings of the quotient and of the product codes * scale (at most 127.5 steps each)
    step = scale.double() * (0.5 + 3 * 127.5 * 2.0**-24)
    assert_close(codes.double() * scale.double(), x, absolute=step.expand(shape))
    assert codes.abs().amax() == 127


@pytest.mark.parametrize("magnitude", [1e-3, 1e-5, 3e-6, 6e-8])
def test_tiny_fp16_rows_keep_their_accuracy(magnitude):
    x = (torch.rand(4, 256) * 2 - 1).mul(magnitude).half()
    codes, scale = ops.quantize_int8_rowwise(x)
    assert_close(codes.double() * scale, x, absolute=(scale * 0.5001).double().expand(4, 256))


def test_zero_rows_have_the_floor_scale_and_touch_nothing_else():
    x = torch.randn(4, 256)
    clean, clean_scale = ops.quantize_int8_rowwise(x)
    x[1] = x[3] = 0
    codes, scale = ops.quantize_int8_rowwise(x)
    assert_equal(scale[[1, 3]], torch.full((2, 1), 1e-30))
    assert not codes[[1, 3]].any()
    assert_equal(codes[[0, 2]], clean[[0, 2]])
    assert_equal(scale[[0, 2]], clean_scale[[0, 2]])


@pytest.mark.parametrize("group", [0, 16, 64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_row_with_inf_or_nan_becomes_nan_and_touches_no_other(bad, group):
    _, weight, weight_scale = layer(9, 64, group)
    x, bias = torch.randn(4, 64), torch.randn(9)
    clean = ops.int8_linear(x, weight, weight_scale, bias, convrot_groupsize=group)
    x[2, 5] = bad
    codes, scale = ops.quantize_and_rotate_rowwise(x, group)
    assert scale[2].isnan()
    assert not codes[2].any()
    y = ops.int8_linear(x, weight, weight_scale, bias, convrot_groupsize=group)
    assert y[2].isnan().all()
    assert_equal(y[[0, 1, 3]], clean[[0, 1, 3]])


def test_tensorwise_takes_and_returns_a_scale():
    x = torch.randn(3, 5)
    codes, scale = ops.quantize_int8_tensorwise(x)
    assert scale.shape == ()
    assert_equal(scale, x.abs().amax() / 127)
    again, same = ops.quantize_int8_tensorwise(x, scale)
    assert_equal(again, codes)
    assert_equal(same, scale)
    clamped, _ = ops.quantize_int8_tensorwise(x, scale / 4)
    assert clamped.min() == -128 or clamped.max() == 127


def test_stochastic_rounding_is_repeatable_and_unbiased():
    x = torch.full((1, 1 << 16), 0.5)
    x[0, 0] = 127.0  # the scale is 1, so every other quotient is 0.5
    codes, _ = ops.quantize_int8_rowwise(x, seed=3)
    assert_equal(codes, ops.quantize_int8_rowwise(x, seed=3)[0])
    assert not torch.equal(codes, ops.quantize_int8_rowwise(x, seed=4)[0])
    mean = codes[0, 1:].double().mean().item()
    assert abs(mean - 0.5) < 5 * 0.5 / 256  # five standard deviations of a fair coin over 2^16 throws


def test_rotation_improves_rows_with_outliers():
    x = torch.randn(64, 1024)
    x[:, ::257] *= 100
    plain, plain_scale = ops.quantize_int8_rowwise(x)
    rotated, scale = ops.quantize_and_rotate_rowwise(x, 256)
    error_plain = relative_error(plain * plain_scale, x)
    error_rotated = relative_error(hadamard_rotate(rotated * scale, 256), x)
    assert error_rotated < error_plain


# --------------------------------------------------------------------------------------------- dequantizers


@pytest.mark.parametrize("group", [0, 64, 256])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_dequantize_rounds_once(dtype, group):
    _, codes, scale = layer(7, 512, group)
    exact = codes.double() * scale.double()
    if group:
        h = hadamard_rotate(torch.eye(group), group).double()
        exact = (exact.reshape(7, -1, group) @ h).reshape(7, 512)
    got = ops.dequantize_int8(codes, scale, dtype, group)
    row_max = (codes.double() * scale).abs().amax(-1, keepdim=True)
    # up to 4 stages of 4 operations in fp32, on values of at most sqrt(group) times the row's maximum
    fp32 = (16 * max(group, 1) ** 0.5 * 2.0**-24 * row_max).expand(7, 512)
    assert_close(got, exact, relative=torch.finfo(dtype).eps / 2, absolute=fp32)


def test_dequantize_unrotated_is_exact():
    _, codes, scale = layer(7, 512, 0)
    assert_equal(ops.dequantize_int8(codes, scale), codes.float() * scale)


@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("group", [0, 64])
def test_embedding_rows(group, scalar):
    _, codes, scale = layer(50, 128, group)
    scale = scale[:1].reshape(()) if scalar else scale
    indices = torch.randint(0, 50, (3, 4))
    rows = ops.dequantize_int8_embedding(codes, scale, indices, torch.bfloat16, group)
    assert_equal(rows, ops.dequantize_int8(codes, scale, torch.bfloat16, group)[indices])


# --------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("n", "k"), LAYER_SHAPES)
def test_linear_is_within_the_quantization_bound_of_float64(n, k, dtype):
    _, codes, scale = layer(n, k, 64)
    x, bias = torch.randn(17, k).to(dtype), torch.randn(n).to(dtype)
    dense = ops.dequantize_int8(codes, scale, convrot_groupsize=64).double()
    exact = x.double() @ dense.T + bias.double()
    with expect_kernel("int8_linear", "core/eager"):
        y = ops.int8_linear(x, codes, scale, bias, convrot_groupsize=64)
    assert y.dtype == dtype
    _, x_scale = ops.quantize_and_rotate_rowwise(x, 64)
    t = tolerance(dtype, k)
    bound = quantization_bound(x_scale, codes.double() * scale.double())
    magnitude = x.double().abs() @ dense.abs().T + bias.double().abs()
    assert_close(y, exact, relative=t.relative, absolute=bound * (1 + 1e-5) + t.accumulation * magnitude)


def test_rotated_linear_beats_the_peer_on_gaussian_bf16():
    weight, x = torch.randn(1024, 4096, dtype=torch.bfloat16), torch.randn(64, 4096, dtype=torch.bfloat16)
    codes, scale = ops.quantize_int8_convrot_weight(weight, 256)
    y = ops.int8_linear(x, codes, scale, convrot_groupsize=256)
    assert relative_error(y, x.double() @ weight.double().T) <= 0.0125  # the peer: 0.0133


def test_scalar_and_per_row_scales_agree():
    _, codes, _ = layer(8, 64, 0)
    x = torch.randn(3, 64)
    one = torch.tensor(0.01)
    for shape in ((), (1,), (1, 1)):
        scalar = ops.int8_linear(x, codes, one.reshape(shape))
        assert_equal(scalar, ops.int8_linear(x, codes, one.expand(8).contiguous()))


@pytest.mark.parametrize("act", ["gelu_tanh", "swiglu", "rms_norm", "situ"])
def test_input_act_equals_the_activation_in_front(act):
    _, codes, scale = layer(8, 64, 16)
    x = torch.randn(5, 128 if act in ("swiglu", "situ") else 64, dtype=torch.bfloat16)
    weight = torch.rand(64, dtype=torch.bfloat16) if act == "rms_norm" else None
    fused = ops.int8_linear(x, codes, scale, None, torch.bfloat16, 16, act, weight, 1e-6)
    front = apply_input_act(x.float(), act, weight, 1e-6)
    assert_equal(fused, ops.int8_linear(front, codes, scale, None, torch.bfloat16, 16))


def test_residual_is_one_rounding():
    _, codes, scale = layer(8, 64, 0)
    x, residual = torch.randn(2, 3, 64, dtype=torch.bfloat16), torch.randn(2, 3, 8, dtype=torch.bfloat16)
    gate = torch.randn(8, dtype=torch.bfloat16)
    linear = ops.int8_linear(x, codes, scale, out_dtype=torch.float32)
    exact = residual.double() + gate.double() * linear.double()
    y = ops.int8_linear(x, codes, scale, residual=residual, residual_scale=gate)
    assert_close(y, exact, relative=2.0**-8 * (1 + 2**-10))
    unscaled = ops.int8_linear(x, codes, scale, residual=residual)
    assert_close(unscaled, residual.double() + linear.double(), relative=2.0**-8 * (1 + 2**-10))


def test_zero_rows_give_the_bias_exactly():
    _, codes, scale = layer(8, 64, 16)
    bias = torch.randn(8, dtype=torch.bfloat16)
    y = ops.int8_linear(torch.zeros(3, 64, dtype=torch.bfloat16), codes, scale, bias, convrot_groupsize=16)
    assert_equal(y, bias.expand(3, 8).contiguous())


@pytest.mark.parametrize("tiny", [0.0, 1e-23, 1.1754944e-38])
def test_dead_weight_rows_give_zero_not_nan(tiny):
    _, codes, scale = layer(8, 64, 0)
    scale[2], codes[3] = tiny, 0
    y = ops.int8_linear(torch.randn(5, 64), codes, scale)
    assert y.isfinite().all()
    assert y[:, 2].abs().max() < 1e-15
    assert not y[:, 3].any()


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_strides_of_x_do_not_matter(rows):
    _, codes, scale = layer(9, 64, 16)
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    expected = ops.int8_linear(x, codes, scale, convrot_groupsize=16)
    for name, copy in strided_copies(x).items():
        assert_equal(ops.int8_linear(copy, codes, scale, convrot_groupsize=16), expected, name)
    if rows:
        row = x[:1].expand(4, 64)
        assert_equal(ops.int8_linear(row, codes, scale, convrot_groupsize=16), expected[:1].expand(4, 9).contiguous())


def test_scaled_mm_is_the_second_half():
    _, codes, scale = layer(9, 64, 16)
    x, bias = torch.randn(2, 5, 64, dtype=torch.float16), torch.randn(9)
    x_codes, x_scale = ops.quantize_and_rotate_rowwise(x, 16)
    halves = ops.int8_scaled_mm(x_codes, x_scale, codes, scale, bias, torch.float16)
    assert_equal(halves, ops.int8_linear(x, codes, scale, bias, convrot_groupsize=16))


def test_fp16_form_is_bit_equal_and_its_second_mode_more_accurate():
    _, codes, scale = layer(64, 1024, 256)
    x = torch.randn(16, 1024)
    exact = x.double() @ ops.dequantize_int8(codes, scale, convrot_groupsize=256).double().T
    int8 = ops.int8_linear(x, codes, scale, convrot_groupsize=256)
    assert_equal(ops.int8_linear_fp16(x, codes, scale, convrot_groupsize=256), int8)
    half = ops.int8_linear_fp16(x, codes, scale, convrot_groupsize=256, fp16_activations=True)
    assert relative_error(half, exact) < relative_error(int8, exact) / 4


def test_swiglu_mlp_is_its_two_linears():
    _, gate_up, gate_up_scale = layer(2 * 32, 64, 16)
    _, down, down_scale = layer(64, 32, 16)
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16)
    y = ops.int8_swiglu_mlp(
        x, gate_up, gate_up_scale, down, down_scale, convrot_groupsize=16, down_convrot_groupsize=16
    )
    hidden = ops.int8_linear(x, gate_up, gate_up_scale, convrot_groupsize=16)
    assert_equal(y, ops.int8_linear(hidden, down, down_scale, convrot_groupsize=16, input_act="swiglu"))


def test_backward_is_that_of_the_dense_weight():
    _, codes, scale = layer(8, 64, 16)
    dense = ops.dequantize_int8(codes, scale, convrot_groupsize=16)
    x, residual, bias = (torch.randn(s, requires_grad=True) for s in ((5, 64), (5, 8), (8,)))
    gate, grad = torch.rand(8), torch.randn(5, 8)
    ops.int8_linear(x, codes, scale, bias, None, 16, residual=residual, residual_scale=gate).backward(grad)
    scaled = (grad * gate).double()
    # sums of 8 products (of 5 terms for the bias) in fp32, each side rounded once more
    assert_close(x.grad, scaled @ dense.double(), absolute=2 * 9 * 2.0**-24 * (scaled.abs() @ dense.double().abs()))
    assert_close(bias.grad, scaled.sum(0), absolute=2 * 6 * 2.0**-24 * scaled.abs().sum(0))
    assert_equal(residual.grad, grad)


# ---------------------------------------------------------------------------------------------------- refusals

_x, _w, _s = torch.zeros(2, 64), torch.zeros(8, 64, dtype=torch.int8), torch.ones(8)
REFUSED = {
    "K of x": (lambda: ops.int8_linear(_x[:, :60], _w, _s), "60 columns.*takes K=64"),
    "0-dim x": (lambda: ops.int8_linear(_x[0, 0], _w, _s), "at least one dim"),
    "integer x": (lambda: ops.int8_linear(_x.int(), _w, _s), "x must be float32, float16, bfloat16, got int32"),
    "double x": (lambda: ops.int8_linear(_x.double(), _w, _s), "got float64"),
    "float weight": (lambda: ops.int8_linear(_x, _w.float(), _s), "weight must be int8"),
    "3-D weight": (lambda: ops.int8_linear(_x, _w[None], _s), r"weight must be int8 \[N, K\]"),
    "scale length": (lambda: ops.int8_linear(_x, _w, _s[:7]), "weight_scale must hold 1 or N = 8"),
    "scale dtype": (lambda: ops.int8_linear(_x, _w, _s.half()), "weight_scale must be float32, got float16"),
    "bias length": (lambda: ops.int8_linear(_x, _w, _s, _s[:3]), r"bias must have shape \[N\] = \[8\]"),
    "bias dtype": (lambda: ops.int8_linear(_x, _w, _s, _s.int()), "bias must be float32, float16, bfloat16"),
    "rotation": (lambda: ops.int8_linear(_x, _w, _s, convrot_groupsize=32), "power of 4"),
    "rotation divides": (lambda: ops.int8_linear(_x, _w, _s, convrot_groupsize=256), "does not divide.*use 64"),
    "activation": (lambda: ops.int8_linear(_x, _w, _s, input_act="relu"), "unsupported input_act 'relu'.*swiglu"),
    "act width": (lambda: ops.int8_linear(_x, _w, _s, input_act="swiglu"), "two halves"),
    "no norm weight": (lambda: ops.int8_linear(_x, _w, _s, input_act="rms_norm"), "is missing"),
    "stray act weight": (lambda: ops.int8_linear(_x, _w, _s, input_act_weight=_s), "was given"),
    "residual shape": (lambda: ops.int8_linear(_x, _w, _s, residual=_x), r"residual must have shape \[..., N\]"),
    "scale alone": (lambda: ops.int8_linear(_x, _w, _s, residual_scale=_s), "without residual"),
    "device": (lambda: ops.int8_linear(_x, _w.to("meta"), _s), "weight is on meta, x is on cpu"),
    "codes": (lambda: ops.int8_scaled_mm(_w[:, :8], _s, _w, _s), r"codes must be \[..., K=64\]"),
    "x_scale": (lambda: ops.int8_scaled_mm(_w, _s[:3], _w, _s), "x_scale must hold M = 8"),
    "MLP": (lambda: ops.int8_swiglu_mlp(_x, _w, _s, _w, _s), "gate rows and then the up rows"),
    "odd swiglu": (lambda: ops.quantize_and_rotate_rowwise(_x[:, :7], 0, "swiglu"), "even width, got 7"),
    "indices": (lambda: ops.dequantize_int8_embedding(_w, _s, _s), "indices must be int64"),
    "dequantize scale": (lambda: ops.dequantize_int8(_w, _s[:5]), "1 or rows = 8"),
    "weight rank": (lambda: ops.quantize_int8_convrot_weight(_s), r"weight must be \[N, K\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_a_sentence(what):
    call, message = REFUSED[what]
    with pytest.raises(UnsupportedError, match=message):
        call()


def test_outputs_are_contiguous_whatever_the_strides():
    x = torch.randn(64, 4).t()
    codes, scale = ops.quantize_int8_rowwise(x)
    assert codes.is_contiguous()
    assert scale.is_contiguous()
    assert ops.quantize_int8_tensorwise(x)[0].is_contiguous()
    assert ops.dequantize_int8(codes.t(), torch.ones(())).is_contiguous()
    compiled = torch.compile(lambda x: ops.quantize_int8_rowwise(x)[0] + 1, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(x), codes + 1)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (4, 1), (4, 1, 1), (1, 4, 1), (2, 2)])
def test_row_scales_of_any_shape(shape):
    codes, scale = torch.randint(-128, 128, (4, 8), dtype=torch.int8), torch.rand(4)
    want = codes.float() * scale.reshape(4, 1)
    assert_equal(ops.dequantize_int8(codes, scale.reshape(shape)), want)
    assert_equal(ops.dequantize_int8(codes.reshape(2, 2, 8), scale.reshape(shape)).reshape(4, 8), want)


@pytest.mark.parametrize("wanted", [100, 8, -4, 128, 3])
def test_a_group_that_is_no_power_of_4_is_refused_not_dropped(wanted):
    with pytest.raises(UnsupportedError, match="power of 4"):
        rotation_group(256, wanted)


def test_forward_mode_derivatives_of_an_op_are_refused_not_zero():
    """(Of the public linears they are right: test_every_format.py.)"""
    _, codes, scale = layer(8, 64, 0)
    x = torch.randn(3, 64)
    op = torch.ops.kitchen.int8_linear.default
    with torch.autograd.forward_ad.dual_level(), pytest.raises(InferenceOnlyError):
        op(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), codes, scale)
    for call in (lambda x: op(x, codes, scale), lambda x: ops.quantize_int8_rowwise(x)[1]):
        with pytest.raises(InferenceOnlyError):
            torch.func.jvp(call, (x,), (x,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_weight_of_the_activation_and_residual_scale_must_be_float(dtype):
    weight, scale, x = torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 1), torch.randn(2, 64)
    with pytest.raises(UnsupportedError, match="input_act_weight must be"):
        ops.int8_linear(x, weight, scale, None, None, 0, "rms_norm", torch.ones(64).to(dtype), 1e-6)
    with pytest.raises(UnsupportedError, match="residual_scale must be"):
        ops.int8_linear(x, weight, scale, residual=torch.randn(2, 8), residual_scale=torch.ones(8).to(dtype))
