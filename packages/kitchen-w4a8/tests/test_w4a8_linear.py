"""The W4A8 and W6A8 linears: int8_linear on the decoded weight, float64, strides, gradients, refusals, opcheck."""

import pytest
import torch

from kitchen_core import UnsupportedError, ops
from kitchen_core.arithmetic import hadamard_rotate
from kitchen_core.ops import w4a8 as w4a8_ops
from kitchen_core.testing import (
    FLOAT_DTYPES,
    LAYER_SHAPES,
    assert_close,
    assert_equal,
    expect_kernel,
    leading_shapes,
    quantization_bound,
    strided_copies,
    tolerance,
)

MODES = {
    "codebook": {"bits": 4},
    "uniform": {"bits": 4, "levels": "uniform"},
    "asymmetric": {"bits": 4, "levels": "asymmetric"},
    "6 bits": {"bits": 6},
    "fp32 scales": {"bits": 4, "scale_dtype": torch.float32},
}
PLAIN = [mode for mode in MODES if mode != "asymmetric"]
ACTS = {"none": 1, "gelu_tanh": 1, "swiglu": 2, "rms_norm": 1, "situ": 2}


def quantized(n=9, k=128, group_size=16, rotation=16, mode="codebook"):
    return ops.quantize_w4a8_weight(torch.randn(n, k), group_size, rotation, **MODES[mode])


def rotated_weight(made, group_size):
    """The weight that the rotated x meets, in float64, and the sum of the magnitudes of its two parts."""
    v8 = ops.decode_w4a8_weight(made.qdata, made.s_rel, made.codebook, group_size).double()
    dense = v8 * made.s_channel.double().reshape(-1, 1)
    if made.correction is None:
        return dense, dense.abs()
    addend = made.correction.double().T.repeat_interleave(group_size, 1)
    return dense + addend, dense.abs() + addend.abs()


# ------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 7, 17])
def test_linear_is_int8_linear_on_the_decoded_weight(mode, dtype, rows):
    made = quantized(mode=mode)
    v8 = ops.decode_w4a8_weight(made.qdata, made.s_rel, made.codebook)
    bias = torch.randn(9, dtype=dtype)
    for lead in leading_shapes(rows):
        x, residual = torch.randn(*lead, 128).to(dtype), torch.randn(*lead, 9).to(dtype)
        for tail in ({}, {"residual": residual}, {"residual": residual, "residual_scale": torch.rand(9)}):
            with expect_kernel("w4a8_linear", "core/eager"):
                y = ops.w4a8_linear(x, *made, bias, convrot_groupsize=16, **tail)
            assert y.shape == (*lead, 9)
            assert_equal(y, ops.int8_linear(x, v8, made.s_channel, bias, convrot_groupsize=16, **tail))


@pytest.mark.parametrize("mode", ["codebook", "6 bits", "asymmetric"])
@pytest.mark.parametrize("act", ACTS)
def test_input_act_runs_in_front(mode, act):
    made = quantized(mode=mode)
    x = torch.randn(5, 128 * ACTS[act], dtype=torch.bfloat16)
    norm = torch.rand(128) if act == "rms_norm" else None
    front = {"input_act": act, "input_act_weight": norm, "input_act_eps": 1e-6}
    y = ops.w4a8_linear(x, *made, None, torch.float32, 16, 16, **front)
    codes, x_scale = ops.quantize_and_rotate_rowwise(x, 16, **front)
    assert_equal(y, ops.w4a8_scaled_mm(codes, x_scale, *made, None, torch.float32))
    if made.correction is None:
        v8 = ops.decode_w4a8_weight(made.qdata, made.s_rel, made.codebook)
        assert_equal(y, ops.int8_linear(x, v8, made.s_channel, None, torch.float32, 16, **front))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("group_size", "n", "k"), [(64, 7, 128), *((16, *shape) for shape in LAYER_SHAPES)])
def test_linear_is_within_the_quantization_bound_of_float64(mode, group_size, n, k):
    made = quantized(n, k, group_size, 64, mode)
    weight, magnitude = rotated_weight(made, group_size)
    for dtype in FLOAT_DTYPES:
        x, bias = torch.randn(17, k).to(dtype), torch.randn(n).to(dtype)
        y = ops.w4a8_linear(x, *made, bias, None, group_size, 64)
        assert y.dtype == dtype
        codes, x_scale = ops.quantize_and_rotate_rowwise(x, 64)
        exact_codes = codes.double() * x_scale.double() @ weight.T + bias.double()
        rotated = hadamard_rotate(x.float(), 64).double()
        t = tolerance(dtype, k, "asym_w4a8_int8")
        # x_scale * (half a step more than |codes|) bounds |x|; its products bound the sums that are rounded
        size = (codes.double().abs() + 1) * x_scale.double() @ magnitude.T + bias.double().abs()
        assert_close(y, exact_codes, relative=t.relative, absolute=t.accumulation * size, what="given the codes")
        # the quotient behind a code is itself rounded: a code may be off by half a step and 127.5 * 2^-23 of one
        bound = quantization_bound(x_scale, weight) * (1 + 2 * 127.5 * 2.0**-23)
        exact = rotated @ weight.T + bias.double()
        assert_close(y, exact, relative=t.relative, absolute=bound + t.accumulation * size, what="from x")


def test_dequantized_weight_gives_the_linear_up_to_the_quantization_of_x():
    for mode in MODES:
        made = quantized(96, 320, 16, 64, mode)
        x = torch.randn(17, 320)
        dense = ops.dequantize_w4a8_weight(*made, None, 16, 64).double()
        _, x_scale = ops.quantize_and_rotate_rowwise(x, 64)
        weight, magnitude = rotated_weight(made, 16)
        # beside the quantization of x: both sides rotate in fp32, in 3 stages of 4 operations, on values that a stage
        # raises by at most 2 (so 8 = sqrt(64) in all); the epilogue's three operations are small beside that
        rotation = 2 * 16 * 8 * 2.0**-24 * (x.double().norm(dim=1)[:, None] * magnitude.norm(dim=1)[None])
        y = ops.w4a8_linear(x, *made, convrot_groupsize=64)
        assert_close(y, x.double() @ dense.T, absolute=quantization_bound(x_scale, weight) + rotation, what=mode)


def test_one_hot_codes_read_out_every_weight_exactly():
    for mode in MODES:
        made = quantized(5, 64, 16, 0, mode)
        one = torch.eye(64, dtype=torch.int8)
        y = ops.w4a8_scaled_mm(one, torch.ones(64, 1), *made, None, torch.float32)
        assert_equal(y, ops.dequantize_w4a8_weight(*made).T.contiguous(), mode)


def test_correction_adds_the_group_sums():
    made = quantized(7, 64, 16, 0, "asymmetric")
    codes = torch.randint(-128, 128, (3, 64), dtype=torch.int8)
    x_scale, bias = torch.rand(3, 1), torch.randn(7)
    for given_bias in (None, bias):
        with_correction = ops.w4a8_scaled_mm(codes, x_scale, *made, given_bias, torch.float32)
        sums = codes.reshape(3, 4, 16).long().sum(-1)
        product = (sums.double() @ made.correction.double()).float().double()
        addend = (x_scale.double() * product + (0 if given_bias is None else bias.double())).float().double()
        v8 = ops.decode_w4a8_weight(made.qdata, made.s_rel).long()
        scaled = ((codes.long() @ v8.T).float() * x_scale).double()
        assert_equal(with_correction, (scaled * made.s_channel.double() + addend).float())


def test_missing_codebook_means_code_minus_8():
    made = quantized(mode="uniform")
    assert made.codebook is None
    x, table = torch.randn(3, 128), torch.arange(-8.0, 8)
    assert_equal(ops.w4a8_linear(x, *made), ops.w4a8_linear(x, *made._replace(codebook=table)))


@pytest.mark.parametrize("mode", MODES)
def test_a_row_with_inf_or_nan_becomes_nan_and_touches_no_other(mode):
    made = quantized(mode=mode)
    x = torch.randn(4, 128)
    clean = ops.w4a8_linear(x, *made, convrot_groupsize=16)
    for bad in (float("nan"), float("inf")):
        x[2, 5] = bad
        y = ops.w4a8_linear(x, *made, convrot_groupsize=16)
        assert y[2].isnan().all()
        assert_equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("mode", ["codebook", "6 bits", "asymmetric"])
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_strides_do_not_matter(mode, rows):
    made = quantized(mode=mode)
    x = torch.randn(rows, 128, dtype=torch.bfloat16)
    expected = ops.w4a8_linear(x, *made, convrot_groupsize=16)
    for name, copy in strided_copies(x).items():
        assert_equal(ops.w4a8_linear(copy, *made, convrot_groupsize=16), expected, name)
    slack = [None if t is None else t.t().contiguous().t() if t.dim() == 2 else t for t in made]
    assert_equal(ops.w4a8_linear(x, *slack, convrot_groupsize=16), expected)
    column = made._replace(s_channel=made.s_channel[:, None])
    assert_equal(ops.w4a8_linear(x, *column, convrot_groupsize=16), expected)


@pytest.mark.parametrize("mode", MODES)
def test_e4m3_scales_may_come_as_bytes(mode):
    made = quantized(mode=mode)
    if made.s_rel.dtype == torch.float32:
        same = made._replace(s_rel=made.s_rel.clone())
    else:
        same = made._replace(s_rel=made.s_rel.view(torch.uint8))
    x = torch.randn(3, 128)
    assert_equal(ops.w4a8_linear(x, *same), ops.w4a8_linear(x, *made))
    assert_equal(ops.dequantize_w4a8_weight(*same), ops.dequantize_w4a8_weight(*made))


@pytest.mark.parametrize("mode", MODES)
def test_the_composed_form_for_gpus_is_bit_equal(mode):
    made = quantized(mode=mode)
    x, bias, residual = torch.randn(5, 128), torch.randn(9), torch.randn(5, 9)
    arguments = (x, *made, bias, torch.bfloat16, 16, 16, "gelu_tanh", None, 0.0, residual, torch.rand(9))
    assert_equal(w4a8_ops._composed_linear(*arguments), ops.w4a8_linear(*arguments))
    codes, x_scale = ops.quantize_and_rotate_rowwise(x, 16)
    arguments = (codes, x_scale, *made, bias, torch.float16, 16, residual)
    assert_equal(w4a8_ops._composed_scaled_mm(*arguments), ops.w4a8_scaled_mm(*arguments))


@pytest.mark.parametrize("mode", MODES)
def test_backward_is_that_of_the_dense_weight(mode):
    made = quantized(mode=mode)
    dense = ops.dequantize_w4a8_weight(*made, None, 16, 16).double()
    x, residual, bias = (torch.randn(s, requires_grad=True) for s in ((5, 128), (5, 9), (9,)))
    gate, grad = torch.rand(9), torch.randn(5, 9)
    y = ops.w4a8_linear(x, *made, bias, convrot_groupsize=16, residual=residual, residual_scale=gate)
    y.backward(grad)
    gated = (grad * gate).double()
    # fp32 sums of n terms, one product each: n * 2^-24 of the sum of magnitudes (and the rounding of grad * gate)
    assert_close(x.grad, gated @ dense, absolute=(9 + 2) * 2.0**-24 * (gated.abs() @ dense.abs()))
    assert_close(bias.grad, gated.sum(0), absolute=(5 + 2) * 2.0**-24 * gated.abs().sum(0))
    assert_equal(residual.grad, grad)


# ------------------------------------------------------------------------------------------------- declarations

OPS = torch.ops.kitchen


def opcheck_arguments(op, mode):
    made = quantized(6, 64, 16, 16, mode)
    if made.s_rel.dtype != torch.float32:  # opcheck compares values, which e4m3 cannot
        made = made._replace(s_rel=made.s_rel.view(torch.uint8))
    x, bias, residual = torch.randn(3, 64), torch.randn(6), torch.randn(3, 6)
    codes, x_scale = ops.quantize_and_rotate_rowwise(x, 16)
    bits, levels = MODES[mode]["bits"], MODES[mode].get("levels", "codebook")
    return {
        "decode_w4a8_weight": (made.qdata, made.s_rel, made.codebook),
        "dequantize_w4a8_weight": (*made, torch.bfloat16, 16, 16),
        "w4a8_scaled_mm": (codes, x_scale, *made, bias, torch.float16, 16, residual),
        "w4a8_linear": (x, *made, bias, None, 16, 16),
        "quantize_w4a8_weight": (torch.randn(6, 64), 16, 16, bits, levels, None, True, 0, torch.float32),
    }[op]


@pytest.mark.parametrize("mode", ["codebook", "asymmetric", "6 bits"])
@pytest.mark.parametrize(
    "op", ["decode_w4a8_weight", "dequantize_w4a8_weight", "w4a8_scaled_mm", "w4a8_linear", "quantize_w4a8_weight"]
)
def test_opcheck(op, mode):
    torch.library.opcheck(getattr(OPS, op).default, opcheck_arguments(op, mode))


def test_every_output_of_the_quantizer_has_its_fake_shape_and_type():
    for mode, options in MODES.items():
        real = OPS.quantize_w4a8_weight(torch.randn(6, 64), 16, 16, **options)
        fake = OPS.quantize_w4a8_weight(torch.randn(6, 64, device="meta"), 16, 16, **options)
        assert [(t.shape, t.dtype, t.stride()) for t in real] == [(t.shape, t.dtype, t.stride()) for t in fake], mode


@pytest.mark.parametrize("mode", ["codebook", "6 bits"])
def test_compiles_without_a_graph_break(mode):
    made = quantized(mode=mode)

    def layer(x, *weight):
        return ops.w4a8_linear(x * 2, *weight, convrot_groupsize=16, input_act="gelu_tanh") + 1

    x = torch.randn(3, 128)
    assert_equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, *made), layer(x, *made))


# ---------------------------------------------------------------------------------------------------- refusals

_x, _w = torch.zeros(2, 64), torch.zeros(8, 32, dtype=torch.int8)
_w6 = torch.zeros(8, 48, dtype=torch.int8)
_r, _c = torch.ones(8, 4).to(torch.float8_e4m3fn), torch.ones(8)
_t, _k = torch.ones(16), torch.ones(4, 8)
_q = ops.quantize_w4a8_weight
_l = ops.w4a8_linear
REFUSED = {
    "K of x": (lambda: _l(_x[:, :60], _w, _r, _c), "60 columns.*takes K=64"),
    "0-dim x": (lambda: _l(_x[0, 0], _w, _r, _c), "at least one dim"),
    "double x": (lambda: _l(_x.double(), _w, _r, _c), "got float64"),
    "float weight": (lambda: _l(_x, _w.float(), _r, _c), "weight must be int8"),
    "3-D weight": (lambda: _l(_x, _w[None], _r, _c), r"weight must be int8 \[N, K"),
    "s_rel dtype": (lambda: _l(_x, _w, _r.half(), _c), "s_rel must be float8_e4m3fn, uint8, float32.*float16"),
    "s_rel rows": (lambda: _l(_x, _w, _r[:7], _c), "s_rel must have shape.*N=8"),
    "s_rel flat": (lambda: _l(_x, _w, _c, _c), "s_rel must have shape"),
    "group against shapes": (lambda: _l(_x, _w, _r, _c, group_size=64), "is group_size right"),
    "group 6 bits": (lambda: _l(_x, _w6[:, :12], _r[:, :2], _c, group_size=8), r"multiple of 32 at 6 bits"),
    "s_channel length": (lambda: _l(_x, _w, _r, _c[:7]), "s_channel must hold N = 8"),
    "s_channel dtype": (lambda: _l(_x, _w, _r, _c.half()), "s_channel must be float32"),
    "codebook length": (lambda: _l(_x, _w, _r, _c, _t[:15]), r"codebook must have shape \[16\]"),
    "codebook dtype": (lambda: _l(_x, _w, _r, _c, _t.int()), "codebook must be float32"),
    "codebook 6 bits": (lambda: _l(_x, _w6, _r, _c, _t), "codebook was given for 6-bit codes"),
    "correction shape": (lambda: _l(_x, _w, _r, _c, None, _k.T), r"correction must have shape \[K/g, N\] = \[4, 8\]"),
    "correction dtype": (lambda: _l(_x, _w, _r, _c, None, _k.int()), "correction must be float32"),
    "correction 6 bits": (lambda: _l(_x, _w6, _r, _c, None, _k), "correction was given for 6-bit codes"),
    "bias length": (lambda: _l(_x, _w, _r, _c, bias=_c[:3]), r"bias must have shape \[N\] = \[8\]"),
    "rotation": (lambda: _l(_x, _w, _r, _c, convrot_groupsize=32), "power of 4"),
    "rotation divides": (lambda: _l(_x, _w, _r, _c, convrot_groupsize=256), "does not divide.*use 64"),
    "activation": (lambda: _l(_x, _w, _r, _c, input_act="relu"), "unsupported input_act 'relu'"),
    "residual shape": (lambda: _l(_x, _w, _r, _c, residual=_x), r"residual must have shape \[..., N\]"),
    "scale alone": (lambda: _l(_x, _w, _r, _c, residual_scale=_c), "without residual"),
    "device": (lambda: _l(_x, _w, _r.to("meta"), _c), "s_rel is on meta, x is on cpu"),
    "codes": (lambda: ops.w4a8_scaled_mm(_w, _c, _w, _r, _c), r"codes must be \[..., K=64\]"),
    "codes dtype": (lambda: ops.w4a8_scaled_mm(_x, _c, _w, _r, _c), "codes must be int8, got float32"),
    "x_scale": (lambda: ops.w4a8_scaled_mm(_x.char(), _c[:3], _w, _r, _c), "x_scale must hold M = 2"),
    "dequantize s_channel": (lambda: ops.dequantize_w4a8_weight(_w, _r, _c[:1]), "s_channel must hold N = 8"),
    "dequantize rotation": (lambda: ops.dequantize_w4a8_weight(_w, _r, _c, convrot_groupsize=8), "power of 4"),
    "quantize rank": (lambda: _q(_c), r"weight must be \[N, K\]"),
    "quantize expert bank": (lambda: _q(torch.zeros(2, 8, 64), 16, 16), r"\[N, K\], got shape \[2, 8, 64\]; flatten"),
    "dequantize expert bank": (
        lambda: ops.dequantize_w4a8_weight(_w[None], _r[None], _c),
        r"weight must be int8 \[N, K",
    ),
    "decode expert bank": (lambda: ops.decode_w4a8_weight(_w[None], _r[None]), r"weight must be int8 \[N, K"),
    "quantize dtype": (lambda: _q(_w), "weight must be float32, float16, bfloat16, got int8"),
    "quantize K": (lambda: _q(torch.zeros(2, 40)), r"multiple of 16 at 4 bits, got K=40 \(weight \[2, 40\]\)"),
    "quantize K=0": (lambda: _q(torch.zeros(2, 0)), "positive multiple of 16"),
    "quantize K 6 bits": (lambda: _q(torch.zeros(2, 48), 16, 16, 6), "multiple of 32 at 6 bits, got K=48"),
    "quantize group 2": (lambda: _q(_x, 2, 0), "group_size 2 does not fit K=64.*allowed here.*: 4, 8, 16, 32, 64$"),
    "quantize group 24": (lambda: _q(torch.zeros(2, 96), 24, 0), "group_size 24 .*: 4, 8, 16, 32, 48, 96$"),
    "quantize group 6 bits": (lambda: _q(_x, 8, 0, 6), "group_size 8 does not fit K=64 at 6 bits.*: 16, 32, 64$"),
    "quantize group > K": (lambda: _q(_x, 128, 0), "group_size 128 does not fit"),
    "quantize rotation": (lambda: _q(_x, 16, 256), "does not divide"),
    "quantize bits": (lambda: _q(_x, 16, 0, 5), "bits must be 4 or 6, got 5"),
    "quantize levels": (lambda: _q(_x, 16, 0, levels="nf4"), "levels must be one of codebook, uniform, asymmetric"),
    "6 bits asymmetric": (lambda: _q(_x, 16, 0, 6, "asymmetric"), "6-bit weights are symmetric"),
    "6 bits codebook": (lambda: _q(_x, 16, 0, 6, codebook=_t), "a codebook belongs to bits=4"),
    "uniform codebook": (lambda: _q(_x, 16, 0, 4, "uniform", _t), "a codebook belongs to bits=4"),
    "quantize codebook": (lambda: _q(_x, 16, 0, codebook=_t[:4]), r"codebook must have shape \[16\]"),
    "scale dtype": (lambda: _q(_x, 16, 0, scale_dtype=torch.float16), "scale_dtype must be float8_e4m3fn or float32"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_with_a_sentence(what):
    call, message = REFUSED[what]
    with pytest.raises(UnsupportedError, match=message):
        call()
