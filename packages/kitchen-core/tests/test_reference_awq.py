"""The awq ops in eager PyTorch: the decoded weight bit for bit, the linear against float64."""

import pytest
import torch

from kitchen_core import UnsupportedError, ops
from kitchen_core.arithmetic import add_residual, apply_input_act
from kitchen_core.packing import pack_nibbles, unpack_nibbles
from kitchen_core.testing import (
    FLOAT_DTYPES,
    assert_close,
    assert_equal,
    leading_shapes,
    one_hot_decode,
    strided_copies,
    tolerance,
    unit_roundoff,
)

K = 512
GROUPS = (16, 32, 64, 128, 256, K)


def make_layer(n=9, k=128, group=64, dtype=torch.float32, bias=True):
    return {
        "qweight": pack_nibbles(torch.randint(0, 16, (n, k), dtype=torch.int8)),
        "wscales": (torch.rand(k // group, n) * 0.1 + 0.01).to(dtype),
        "wzeros": (torch.randn(k // group, n) * 0.2).to(dtype),
        "bias": torch.randn(n).to(dtype) if bias else None,
        "group_size": group,
    }


def exact_weight(layer):
    """(q - 8) * s + z in float64, where it is exact up to 2^-53."""
    group = layer["group_size"]
    scale, zero = (layer[key].double().t().repeat_interleave(group, 1) for key in ("wscales", "wzeros"))
    return (unpack_nibbles(layer["qweight"]).double() - 8) * scale + zero


def decoded(layer, dtype):
    """round_T of the fp32 fma: float64 to fp32, then to T."""
    return exact_weight(layer).float().to(dtype)


# ------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("scale_dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_dequantize_is_the_rounded_fma(group, scale_dtype):
    layer = make_layer(k=K, group=group, dtype=scale_dtype, bias=False)
    del layer["bias"]
    for dtype in FLOAT_DTYPES:
        assert_equal(ops.dequantize_awq(**layer, out_dtype=dtype), decoded(layer, dtype), str(dtype))
    assert ops.dequantize_awq(**layer).dtype == torch.float32


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_one_hot_activations_print_the_decoded_weight(group, dtype):
    layer = make_layer(n=5, k=K, group=group, dtype=dtype, bias=False)
    assert_equal(one_hot_decode(lambda x: ops.awq_linear(x, **layer), K, dtype), decoded(layer, dtype))


def test_decode_has_one_rounding_to_fp32():
    """fp32 scales: a product rounded before the sum would lose the last bits of (q - 8) * s + z."""
    scale, zero = torch.full((1, 1), 1 + 2.0**-23), torch.full((1, 1), -7.0)
    codes = pack_nibbles(torch.full((1, 2), 15, dtype=torch.int8))
    assert ops.dequantize_awq(codes, scale, zero, 2)[0, 0].item() == 7 * 2.0**-23


def test_weight_dtype_is_xs_own_and_can_be_said():
    layer, x = make_layer(bias=False), torch.randn(3, 128)
    half = x.half()
    assert_equal(
        ops.awq_linear(half, **layer, out_dtype=torch.float32), half.float() @ decoded(layer, torch.float16).float().t()
    )
    assert_equal(
        ops.awq_linear(x, **layer, weight_dtype=torch.bfloat16), x @ decoded(layer, torch.bfloat16).float().t()
    )


# ------------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 8, 130])
@pytest.mark.parametrize("m", [0, 1, 7, 17])
def test_linear_over_shapes_and_dtypes(m, n, dtype):
    layer, x = make_layer(n=n, dtype=dtype), torch.randn(m, 128).to(dtype)
    y = ops.awq_linear(x, **layer)
    weight = decoded(layer, dtype).double()
    exact = x.double() @ weight.t() + layer["bias"].double()
    size = x.double().abs() @ weight.abs().t() + layer["bias"].double().abs()
    t = tolerance(dtype, 128, "awq_w4a16")
    assert y.dtype == dtype
    assert_close(y, exact, relative=t.relative, absolute=t.accumulation * size)


@pytest.mark.parametrize("k", [2, 6, 34, 130])
def test_ragged_widths_with_one_group_a_row(k):
    layer, x = make_layer(k=k, group=k), torch.randn(3, k)
    exact = x.double() @ exact_weight(layer).t() + layer["bias"].double()
    size = x.double().abs() @ exact_weight(layer).abs().t() + layer["bias"].double().abs()
    # the fp32 weight is itself rounded once, by 2^-24 of each product
    absolute = (tolerance(torch.float32, k, "awq_w4a16").accumulation + unit_roundoff(torch.float32)) * size
    assert_close(ops.awq_linear(x, **layer), exact, relative=2 * unit_roundoff(torch.float32), absolute=absolute)


def test_leading_dims_and_strides():
    layer = make_layer()
    for m in (1, 6):
        x = torch.randn(m, 128)
        y = ops.awq_linear(x, **layer)
        for shape in leading_shapes(m):
            assert_equal(ops.awq_linear(x.reshape(*shape, 128), **layer), y.reshape(*shape, 9), str(shape))
        for name, copy in strided_copies(x).items():
            assert_equal(ops.awq_linear(copy, **layer), y, name)
    x = torch.randn(3, 128)
    strided = {
        k: t.t().contiguous().t() if isinstance(t, torch.Tensor) and t.dim() == 2 else t for k, t in layer.items()
    }
    assert_equal(ops.awq_linear(x, **strided), ops.awq_linear(x, **layer))


@pytest.mark.parametrize("act", ["none", "gelu_tanh", "swiglu", "rms_norm", "situ"])
def test_input_act_and_residual(act):
    layer = make_layer()
    x = torch.randn(2, 3, 256 if act in ("swiglu", "situ") else 128)
    act_weight = torch.rand(128) if act == "rms_norm" else None
    residual = torch.randn(2, 3, 9)
    h = apply_input_act(x, act, act_weight, 1e-6)
    for scale in (None, torch.randn(9), torch.randn(1)):
        got = ops.awq_linear(
            x, **layer, input_act=act, input_act_weight=act_weight, input_act_eps=1e-6, residual=residual,
            residual_scale=scale,
        )  # fmt: skip
        assert_equal(got, add_residual(ops.awq_linear(h, **layer), residual, scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_output_is_rounded_once(dtype):
    layer, x = make_layer(dtype=dtype), torch.randn(33, 128).to(dtype)
    residual, scale = torch.randn(33, 9).to(dtype), torch.randn(9).to(dtype)
    full = ops.awq_linear(x, **layer, out_dtype=torch.float32, residual=residual, residual_scale=scale)
    assert_equal(ops.awq_linear(x, **layer, residual=residual, residual_scale=scale), full.to(dtype))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_spoils_itself_alone(bad):
    layer, x = make_layer(), torch.randn(4, 128)
    clean = ops.awq_linear(x, **layer)
    x[2, 70] = bad
    y = ops.awq_linear(x, **layer)
    assert not y[2].isfinite().any()
    assert_equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("act", ["none", "gelu_tanh"])
def test_gradients_and_their_forward(act):
    layer = make_layer(dtype=torch.bfloat16)
    plain = ops.awq_linear(x := torch.randn(4, 128).bfloat16(), **layer, input_act=act)
    bias = layer.pop("bias").requires_grad_()
    x = x.requires_grad_()
    y = ops.awq_linear(x, **layer, bias=bias, input_act=act)
    assert_equal(y, plain, "the forward with gradients")
    grad = torch.randn(4, 9).bfloat16()
    y.backward(grad)
    dense = decoded(layer, torch.bfloat16).double()
    if act == "none":
        t = tolerance(torch.bfloat16, 9)
        size = grad.double().abs() @ dense.abs()
        assert_close(x.grad, grad.double() @ dense, relative=t.relative, absolute=t.accumulation * size)
    assert x.grad.dtype == torch.bfloat16
    assert bias.grad.shape == (9,)


def test_alias():
    assert ops.gemv_awq_w4a16 is ops.awq_linear


# ------------------------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"group_size": 32},
            r"wscales must have shape \[K/g, N\] = \[4, 9\] for group_size 32.*2 rows fit group_size 64",
        ),
        ({"group_size": 48}, "positive divisor of in_features K=128, got 48"),
        ({"group_size": 0}, "positive divisor"),
        ({"group_size": -1}, "one group for a whole row is group_size 128"),
        ({"wscales": torch.ones(9, 2)}, r"wscales must have shape \[K/g, N\] = \[2, 9\]"),
        ({"wzeros": torch.ones(2, 8)}, r"wzeros must have shape"),
        ({"wzeros": torch.ones(2, 9, dtype=torch.int8)}, "wzeros must be float32"),
        ({"qweight": torch.zeros(9, 64)}, "qweight must be int8"),
        ({"qweight": torch.zeros(9, 4, 16, dtype=torch.int8)}, r"qweight must be int8 \[N, K/2\]"),
        ({"bias": torch.ones(8)}, "bias must have shape"),
        ({"x": torch.ones(3, 64)}, "x has 64 columns"),
        ({"residual_scale": torch.ones(9)}, "without residual"),
        ({"input_act": "relu"}, "unsupported input_act"),
        ({"weight_dtype": torch.float64}, "weight_dtype must be one of"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(UnsupportedError, match=message):
        ops.awq_linear(**{"x": torch.randn(3, 128), **make_layer(), **change})


def test_opcheck():
    layer, x = make_layer(dtype=torch.bfloat16), torch.randn(2, 3, 128).bfloat16()
    kwargs = {"residual": torch.randn(2, 3, 9).bfloat16(), "residual_scale": torch.randn(1)}
    torch.library.opcheck(torch.ops.kitchen.awq_linear.default, (x,), {**layer, **kwargs})
    del layer["bias"]
    torch.library.opcheck(torch.ops.kitchen.dequantize_awq.default, (), {**layer, "out_dtype": torch.float16})
