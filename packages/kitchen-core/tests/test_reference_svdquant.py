"""The svdquant ops in eager PyTorch, against formulas written once more in float64 and against hand-made probes."""

import pytest
import torch

from kitchen_core import UnsupportedError, ops, registry
from kitchen_core.arithmetic import add_residual, apply_input_act
from kitchen_core.packing import pack_nibbles, unpack_nibbles
from kitchen_core.testing import (
    FLOAT_DTYPES,
    assert_close,
    assert_equal,
    leading_shapes,
    strided_copies,
    tolerance,
    unit_roundoff,
)

SHIFT = 0.171875
RANKS = (0, 1, 8, 16, 32, 96, 128)


def make_layer(n=9, k=128, rank=8, dtype=torch.float32, bias=True):
    """Random operands of svdquant_linear, with -8 among the weight codes."""
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    codes[0, 0] = -8
    return {
        "weight": pack_nibbles(codes),
        "wscales": (torch.rand(k // 64, n) * 0.1 + 0.01).to(dtype),
        "smooth": (torch.rand(k) + 0.5).to(dtype),
        "proj_down": (torch.randn(k, rank) * 0.1).to(dtype),
        "proj_up": torch.randn(n, rank).to(dtype),
        "bias": torch.randn(n).to(dtype) if bias else None,
    }


def exact_linear(x, layer, act_unsigned=False):
    """The layer from its codes on in float64, and the sum of magnitudes that bounds its fp32 error."""
    k = x.shape[-1]
    shifted = x.float() + SHIFT if act_unsigned else x
    codes, scales, _ = ops.quantize_svdquant_w4a4(shifted, layer["smooth"], layer["proj_down"][:, :0], act_unsigned)
    xq = unpack_nibbles(codes, signed=not act_unsigned).double() * scales.double().t().repeat_interleave(64, 1)
    wq = unpack_nibbles(layer["weight"], signed=True).double() * layer["wscales"].double().t().repeat_interleave(64, 1)
    raw, down, up = x.reshape(-1, k).double(), layer["proj_down"].double(), layer["proj_up"].double()
    y = xq @ wq.t() + raw @ down @ up.t()
    size = xq.abs() @ wq.abs().t() + raw.abs() @ down.abs() @ up.abs().t()
    if layer["bias"] is not None:
        y, size = y + layer["bias"].double(), size + layer["bias"].double().abs()
    shape = (*x.shape[:-1], y.shape[-1])
    return y.reshape(shape), size.reshape(shape)


def bound(out_dtype, k, rank):
    """fp32 accumulates over K, then over K and R again in the branch (see testing.tolerance for the derivation)."""
    return tolerance(out_dtype, 2 * k + rank, "svdquant_w4a4")


# ---------------------------------------------------------------------------------------------------- quantizer


@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_codes_and_scales_by_their_formula(dtype, act_unsigned):
    x, layer = torch.randn(5, 192).to(dtype), make_layer(k=192, dtype=dtype)
    codes, scales, lora = ops.quantize_svdquant_w4a4(x, layer["smooth"], layer["proj_down"], act_unsigned)
    assert (codes.shape, scales.shape, lora.shape) == ((5, 96), (3, 5), (5, 8))
    assert (codes.dtype, scales.dtype, lora.dtype) == (torch.int8, torch.float32, torch.float32)
    high = 15 if act_unsigned else 7
    low = 0 if act_unsigned else -7
    smoothed = (x.float() / layer["smooth"].float()).reshape(5, 3, 64)
    wanted = smoothed.abs().amax(-1) / high
    assert_equal(scales, wanted.t().contiguous())
    levels = unpack_nibbles(codes, signed=not act_unsigned).reshape(5, 3, 64)
    assert_equal(levels, (smoothed / wanted.unsqueeze(-1)).round().clamp(low, high).to(torch.int8))
    magnitude = x.double().abs() @ layer["proj_down"].double().abs()
    assert_close(
        lora, x.double() @ layer["proj_down"].double(), absolute=bound(torch.float32, 192, 0).accumulation * magnitude
    )


def test_minus_8_is_never_emitted_and_negatives_clip_when_unsigned():
    x = torch.linspace(-1, 1, 64).reshape(1, 64)
    none = torch.zeros(64, 0)
    signed = unpack_nibbles(ops.quantize_svdquant_w4a4(x, torch.ones(64), none)[0], signed=True)
    assert (signed.min(), signed.max()) == (-7, 7)
    unsigned = unpack_nibbles(ops.quantize_svdquant_w4a4(x, torch.ones(64), none, True)[0])
    assert (unsigned.min(), unsigned.max()) == (0, 15)
    assert (unsigned[x < 0] == 0).all()


def test_ties_go_to_even_and_division_is_ieee():
    x = torch.zeros(1, 64)
    x[0, :6] = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    codes, scales, _ = ops.quantize_svdquant_w4a4(x, torch.ones(64), torch.zeros(64, 0))
    assert scales.item() == 1.0
    assert unpack_nibbles(codes, signed=True)[0, :6].tolist() == [7, 0, 2, 2, 0, -2]
    smooth = torch.full((64,), 3.0)  # 1 / 3 has no exact reciprocal
    assert ops.quantize_svdquant_w4a4(x, smooth, torch.zeros(64, 0))[1].item() == (x.max() / smooth[0] / 7).item()


def test_zero_groups_have_the_floor_scale():
    x = torch.randn(2, 128)
    x[0, 64:] = 0
    for act_unsigned, high in ((False, 7), (True, 15)):
        codes, scales, _ = ops.quantize_svdquant_w4a4(x, torch.ones(128), torch.zeros(128, 0), act_unsigned)
        assert scales[1, 0] == torch.tensor(1e-10) / high
        assert (unpack_nibbles(codes)[0, 64:] == 0).all()


def test_lora_x_goes_to_the_branch_alone():
    x, raw, layer = torch.randn(3, 128), torch.randn(3, 128), make_layer()
    smooth, down = layer["smooth"], layer["proj_down"]
    codes, scales, lora = ops.quantize_svdquant_w4a4(x, smooth, down, False, raw)
    plain = ops.quantize_svdquant_w4a4(x, smooth, down)
    assert_equal(codes, plain[0])
    assert_equal(scales, plain[1])
    assert_equal(lora, ops.quantize_svdquant_w4a4(raw, smooth, down)[2])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("act_unsigned", [False, True])
def test_a_row_that_is_not_finite_becomes_nan_alone(bad, act_unsigned):
    x, layer = torch.randn(4, 128), make_layer()
    clean = ops.svdquant_linear(x, **layer, act_unsigned=act_unsigned)
    x[2, 70] = bad
    codes, scales, _ = ops.quantize_svdquant_w4a4(x, layer["smooth"], layer["proj_down"], act_unsigned)
    assert scales[1, 2].isnan()
    assert scales[0, 2].isfinite()
    assert (unpack_nibbles(codes)[2, 64:] == 0).all()
    y = ops.svdquant_linear(x, **layer, act_unsigned=act_unsigned)
    assert y[2].isnan().all()
    assert_equal(y[[0, 1, 3]], clean[[0, 1, 3]])


# ------------------------------------------------------------------------------------------------------- linear


def test_signed_and_unsigned_nibbles_are_told_apart():
    """The byte 0xFF is -1, -1 or 15, 15: 64 columns of weight 1 give -64 or 960."""
    ones = pack_nibbles(torch.ones(1, 64, dtype=torch.int8))
    full = torch.full((1, 32), -1, dtype=torch.int8)
    scale, none = torch.ones(1, 1), torch.zeros(1, 0)
    for act_unsigned, total in ((False, -64), (True, 960)):
        y = ops.scaled_mm_svdquant_w4a4(full, ones, scale, scale, none, none, None, act_unsigned, torch.float32)
        assert y.item() == total


def test_weight_codes_of_minus_8():
    weight = pack_nibbles(torch.full((1, 64), -8, dtype=torch.int8))
    codes = pack_nibbles(torch.full((1, 64), 7, dtype=torch.int8))
    scale, none = torch.ones(1, 1), torch.zeros(1, 0)
    assert ops.scaled_mm_svdquant_w4a4(codes, weight, scale, scale, none, none, out_dtype=torch.float32).item() == -3584


def test_accumulation_is_in_the_written_order():
    """acc = acc + (dot * ascale) * wscale, groups ascending, every operation rounded: bit for bit."""
    layer, x = make_layer(n=5, k=448, rank=0, bias=False), torch.randn(6, 448)
    codes, scales, lora = ops.quantize_svdquant_w4a4(x, layer["smooth"], layer["proj_down"])
    a, w = unpack_nibbles(codes, signed=True).long(), unpack_nibbles(layer["weight"], signed=True).long()
    acc = torch.zeros(6, 5)
    for g in range(7):
        dot = (a[:, None, 64 * g : 64 * g + 64] * w[None, :, 64 * g : 64 * g + 64]).sum(-1)
        acc = acc + (dot.float() * scales[g][:, None]) * layer["wscales"][g][None]
    y = ops.scaled_mm_svdquant_w4a4(
        codes, layer["weight"], scales, layer["wscales"], lora, layer["proj_up"], out_dtype=torch.float32
    )
    assert_equal(y, acc)


@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("rank", RANKS)
def test_linear_for_every_rank(rank, act_unsigned):
    layer, x = make_layer(rank=rank), torch.randn(7, 128)
    y, size = exact_linear(x, layer, act_unsigned)
    t = bound(torch.float32, 128, rank)
    assert_close(
        ops.svdquant_linear(x, **layer, act_unsigned=act_unsigned),
        y,
        relative=t.relative,
        absolute=t.accumulation * size,
    )


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 8, 130])
@pytest.mark.parametrize("m", [0, 1, 7, 17])
def test_linear_over_shapes_and_dtypes(m, n, dtype):
    layer, x = make_layer(n=n, dtype=dtype), torch.randn(m, 128).to(dtype)
    y = ops.svdquant_linear(x, **layer)
    exact, size = exact_linear(x, layer)
    t = bound(dtype, 128, 8)
    assert y.dtype == dtype
    assert_close(y, exact, relative=t.relative, absolute=t.accumulation * size)


def test_leading_dims_and_strides():
    layer = make_layer()
    for m in (1, 6):
        x = torch.randn(m, 128)
        y = ops.svdquant_linear(x, **layer)
        for shape in leading_shapes(m):
            assert_equal(ops.svdquant_linear(x.reshape(*shape, 128), **layer), y.reshape(*shape, 9), str(shape))
        for name, copy in strided_copies(x).items():
            assert_equal(ops.svdquant_linear(copy, **layer), y, name)
    x = torch.randn(3, 128)
    strided = {k: t if t is None or t.dim() < 2 else t.t().contiguous().t() for k, t in layer.items()}
    y, size = exact_linear(x, layer)
    t = bound(torch.float32, 128, 8)
    assert_close(ops.svdquant_linear(x, **strided), y, relative=t.relative, absolute=t.accumulation * size)


def test_the_two_halves_make_the_whole():
    """The layer's shift is the layer's: the ops take what they are given."""
    layer, x = make_layer(dtype=torch.bfloat16), torch.randn(5, 128).bfloat16()
    for act_unsigned in (False, True):
        shifted = x.float() + SHIFT if act_unsigned else x
        half = ops.quantize_svdquant_w4a4(shifted, layer["smooth"], layer["proj_down"], act_unsigned, x)
        codes, scales, lora = half
        y = ops.scaled_mm_svdquant_w4a4(
            codes, layer["weight"], scales, layer["wscales"], lora, layer["proj_up"], layer["bias"], act_unsigned
        )
        assert_equal(y, ops.svdquant_linear(x, **layer, act_unsigned=act_unsigned))


@pytest.mark.parametrize("act", ["none", "gelu_tanh", "swiglu", "rms_norm", "situ"])
def test_input_act_and_residual(act):
    layer = make_layer()
    x = torch.randn(2, 3, 256 if act in ("swiglu", "situ") else 128)
    act_weight = torch.rand(128) if act == "rms_norm" else None
    residual = torch.randn(2, 3, 9)
    h = apply_input_act(x, act, act_weight, 1e-6)
    for scale in (None, torch.randn(9), torch.randn(1)):
        got = ops.svdquant_linear(
            x, **layer, input_act=act, input_act_weight=act_weight, input_act_eps=1e-6, residual=residual,
            residual_scale=scale,
        )  # fmt: skip
        assert_equal(got, add_residual(ops.svdquant_linear(h, **layer), residual, scale))


def test_output_is_rounded_once():
    """With residual and bias in bf16: fp32 result, then one rounding."""
    layer, x = make_layer(dtype=torch.bfloat16), torch.randn(33, 128).bfloat16()
    residual, scale = torch.randn(33, 9).bfloat16(), torch.randn(9).bfloat16()
    full = ops.svdquant_linear(x, **layer, out_dtype=torch.float32, residual=residual, residual_scale=scale)
    assert_equal(ops.svdquant_linear(x, **layer, residual=residual, residual_scale=scale), full.bfloat16())


@pytest.mark.parametrize("act_unsigned", [False, True])
def test_gradients_are_those_of_the_dense_weight(act_unsigned):
    layer = make_layer()
    bias = layer.pop("bias").requires_grad_()
    x, residual = torch.randn(4, 128, requires_grad=True), torch.randn(4, 9, requires_grad=True)
    scale, grad = torch.randn(9), torch.randn(4, 9)
    y = ops.svdquant_linear(x, **layer, bias=bias, act_unsigned=act_unsigned, residual=residual, residual_scale=scale)
    y.backward(grad)
    dense = ops.dequantize_svdquant_w4a4(**layer)
    size = (grad * scale).double().abs() @ dense.double().abs()
    assert_close(
        x.grad, (grad * scale).double() @ dense.double(), absolute=bound(torch.float32, 9, 0).accumulation * size
    )
    assert_close(
        bias.grad, (grad * scale).sum(0), absolute=4 * 4 * unit_roundoff(torch.float32) * (grad * scale).abs().sum(0)
    )
    assert_equal(residual.grad, grad)


def test_dequantize_is_elementwise():
    layer = make_layer(n=6, k=192, rank=5)
    w = unpack_nibbles(layer["weight"], signed=True).double() * layer["wscales"].double().t().repeat_interleave(64, 1)
    exact = w / layer["smooth"].double() + layer["proj_up"].double() @ layer["proj_down"].double().t()
    size = (w / layer["smooth"].double()).abs() + layer["proj_up"].double().abs() @ layer[
        "proj_down"
    ].double().abs().t()
    del layer["bias"]
    # product, quotient and sum, and R products of the branch
    assert_close(ops.dequantize_svdquant_w4a4(**layer), exact, absolute=(3 + 5) * unit_roundoff(torch.float32) * size)


# ------------------------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wscales": torch.ones(9, 2)}, r"wscales must have shape \[K/64, N\] = \[2, 9\], got \[9, 2\]"),
        ({"wscales": torch.ones(2, 9, dtype=torch.int32)}, "wscales must be float32, float16, bfloat16"),
        ({"smooth": torch.ones(64)}, "smooth must hold K = 128 elements"),
        ({"proj_down": torch.ones(64, 8)}, r"proj_down must be \[K=128, R\]"),
        ({"proj_up": torch.ones(8, 8)}, r"proj_up must be \[N=9, R\]"),
        ({"proj_up": torch.ones(9, 4)}, "must have one rank"),
        ({"bias": torch.ones(8)}, "bias must have shape"),
        ({"weight": torch.zeros(9, 48, dtype=torch.int8)}, "got in_features K=96"),
        ({"weight": torch.zeros(1, 2, 32, 128, dtype=torch.int8)}, "tile-packed"),
        ({"weight": torch.zeros(9, 64)}, "weight must be int8"),
        ({"residual_scale": torch.ones(9)}, "without residual"),
        ({"residual": torch.ones(3, 8)}, "residual must have shape"),
        ({"input_act": "relu"}, "unsupported input_act"),
        ({"x": torch.ones(3, 64)}, "x has 64 columns"),
        ({"x": torch.tensor(1.0)}, "0-dim"),
        ({"x": torch.ones(3, 128, dtype=torch.float64)}, "x must be float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(UnsupportedError, match=message):
        ops.svdquant_linear(**{"x": torch.randn(3, 128), **make_layer(), **change})


def test_halves_refuse_what_does_not_fit():
    layer, x = make_layer(), torch.randn(3, 128)
    smooth, down = layer["smooth"], layer["proj_down"]
    with pytest.raises(UnsupportedError, match="K=96"):
        ops.quantize_svdquant_w4a4(x[:, :96], smooth, down)
    with pytest.raises(UnsupportedError, match="lora_x must have shape"):
        ops.quantize_svdquant_w4a4(x, smooth, down, True, x[:2])
    codes, scales, lora = ops.quantize_svdquant_w4a4(x, smooth, down)
    rest = (layer["wscales"], lora, layer["proj_up"])
    with pytest.raises(UnsupportedError, match=r"ascales must have shape \[K/64, M\] = \[2, 3\]"):
        ops.scaled_mm_svdquant_w4a4(codes, layer["weight"], scales.t().contiguous(), *rest)
    with pytest.raises(UnsupportedError, match="lora_act must be float32"):
        ops.scaled_mm_svdquant_w4a4(codes, layer["weight"], scales, rest[0], lora.half(), rest[2])
    with pytest.raises(UnsupportedError, match="codes must be"):
        ops.scaled_mm_svdquant_w4a4(codes[:, :32], layer["weight"], scales, *rest)


# --------------------------------------------------------------------------------------------------- as torch ops


@pytest.mark.parametrize("rank", [0, 8])
def test_opcheck(rank):
    layer, x = make_layer(rank=rank), torch.randn(2, 3, 128)
    kitchen = torch.ops.kitchen
    torch.library.opcheck(
        kitchen.quantize_svdquant_w4a4.default, (x, layer["smooth"], layer["proj_down"], True), {"lora_x": x + 1}
    )
    codes, scales, lora = ops.quantize_svdquant_w4a4(x, layer["smooth"], layer["proj_down"])
    args = (codes, layer["weight"], scales, layer["wscales"], lora, layer["proj_up"], layer["bias"])
    torch.library.opcheck(kitchen.scaled_mm_svdquant_w4a4.default, args, {"residual": torch.randn(6, 9)})
    kwargs = {"act_unsigned": True, "residual": torch.randn(2, 3, 9), "residual_scale": torch.randn(9)}
    torch.library.opcheck(kitchen.svdquant_linear.default, (x,), {**layer, **kwargs})


@pytest.mark.parametrize("act_unsigned", [False, True])
def test_the_composed_kernel_is_the_eager_one(act_unsigned):
    """It runs on GPUs only by itself; its function runs anywhere."""
    composed = next(k for k in registry.kernels_of("svdquant_linear") if k.id == "core/composed")
    layer, x, residual = make_layer(), torch.randn(2, 3, 256).half(), torch.randn(2, 3, 9).half()
    kwargs = {
        "act_unsigned": act_unsigned,
        "input_act": "swiglu",
        "residual": residual,
        "residual_scale": torch.randn(9),
    }
    with registry.trace() as calls:
        y = composed.function(x, **layer, **kwargs)
    assert [op for op, _ in calls] == ["quantize_svdquant_w4a4", "scaled_mm_svdquant_w4a4"]
    assert_equal(y, ops.svdquant_linear(x, **layer, **kwargs))
