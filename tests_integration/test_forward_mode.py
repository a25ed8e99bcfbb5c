"""Derivatives of forward mode, in every grad mode: what a dense linear of the dequantized weight has, or a refusal."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import kitchen_core as kc
from kitchen_core import InferenceOnlyError, ops
from kitchen_core.known_formats import KNOWN_FORMATS
from kitchen_core.testing import LINEAR_OPS, assert_close, assert_equal, inference_mode_has_tangents

N, K = 128, 384
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
EXACT = 4 * K * 2.0**-24  # of sums of K products in fp32, taken twice

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap, which has no rule for an op
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # in torch's own decompositions
]


@pytest.fixture(autouse=True)
def tangents(request):
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("mode") == "inference_mode" and not inference_mode_has_tangents():
        pytest.skip("this torch has no tangents in inference_mode")


@pytest.fixture(params=sorted(KNOWN_FORMATS))
def name(request):
    return request.param


@pytest.fixture
def weight(name):
    return kc.QuantizedTensor.quantize(torch.randn(N, K), name)


def operands():
    return torch.randn(3, K), torch.randn(3, K)


def assert_tangent(tangent, moved, weight):
    dense = weight.dequantize()
    assert_close(tangent, moved @ dense.T, absolute=EXACT * (moved.abs() @ dense.abs().T))


def dual_tangent(call, x, moved):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, moved))).tangent


FUNCTIONAL = {
    "jvp": lambda f, x, moved: jvp(f, (x,), (moved,))[1],
    "jvp of vmap": lambda f, x, moved: jvp(vmap(f), (x,), (moved,))[1],
    "vmap of jvp": lambda f, x, moved: vmap(lambda t: jvp(f, (x,), (t,))[1])(moved.expand(2, 3, K))[1],
    "jacfwd": lambda f, x, moved: torch.einsum("manb,nb->ma", jacfwd(f)(x), moved),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", FUNCTIONAL)
def test_tangents_of_torch_func(weight, way, mode):
    x, moved = operands()
    with MODES[mode]():
        assert_tangent(FUNCTIONAL[way](lambda x: F.linear(x, weight), x, moved), moved, weight)


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_tangents_of_dual_tensors_and_of_linearize(weight, mode):
    x, moved = operands()
    layer = kc.QuantizedLinear(weight.inner(), weight.format, weight.config, None, torch.float32)
    with MODES[mode]():
        assert_tangent(dual_tangent(layer, x, moved), moved, weight)
        assert_tangent(linearize(layer, x)[1](moved), moved, weight)


def test_no_grad_inside_of_what_is_differentiated(weight):
    x, moved = operands()

    @torch.no_grad()
    def decorated(x):
        return F.linear(x, weight)

    assert_tangent(jvp(decorated, (x,), (moved,))[1], moved, weight)
    assert_tangent(dual_tangent(decorated, x, moved), moved, weight)


def test_inference_mode_inside_switches_forward_mode_off_as_for_a_dense_linear(weight):
    x, moved = operands()
    with torch.inference_mode():
        assert dual_tangent(lambda x: F.linear(x, weight), x, moved) is None
    inside = torch.inference_mode()(lambda x: F.linear(x, weight))
    dense = torch.inference_mode()(lambda x: F.linear(x, weight.dequantize()))
    assert_equal(jvp(inside, (x,), (moved,))[1], jvp(dense, (x,), (moved,))[1])


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_an_activation_in_front_and_a_residual(weight, mode):
    x, moved = operands()
    residual, scale = torch.randn(3, N), torch.rand(N)

    def call(x, residual):
        return weight.linear_input_act(x, None, "gelu_tanh", residual=residual, residual_scale=scale)

    want = jvp(call, (x, residual), (moved, residual))[1]  # grad mode: as test_every_format.py says
    with MODES[mode]():
        assert_equal(jvp(call, (x, residual), (moved, residual))[1], want)
    assert (want - residual).abs().max() > 0


REVERSE = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones_like(f(x)))[0],
    "jacrev": lambda f, x: jacrev(f)(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(x[None]),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(x[None]).sum())(x),
}


@pytest.mark.parametrize("way", REVERSE)
def test_reverse_mode_of_torch_func_has_no_gradient_of_zero(weight, way):
    """As autograd alone says: an op is given tensors that show nothing of it."""
    x = torch.randn(3, K)
    layer = kc.QuantizedLinear(weight.inner(), weight.format, weight.config, None, torch.float32)
    scale = next(key for key, parameter in layer.named_parameters() if parameter.dtype == torch.float32)
    with pytest.raises(InferenceOnlyError, match="quantize_int8_rowwise was asked for a gradient"):
        REVERSE[way](lambda x: ops.quantize_int8_rowwise(x)[1], x)
    for inputs in (lambda s: x, lambda s: x * s.sum()):
        with pytest.raises(InferenceOnlyError, match="weight has no derivative"):
            REVERSE[way](
                lambda s, inputs=inputs: functional_call(layer, {scale: s}, (inputs(s),)),
                layer.get_parameter(scale).detach(),
            )
    with pytest.raises(InferenceOnlyError, match="residual_scale has no gradient"):
        REVERSE[way](lambda s: weight.linear(x, None, torch.zeros(3, N), s), torch.ones(N))
    constant = ops.quantize_int8_rowwise(torch.ones(K))[1]
    made = REVERSE[way](lambda x: F.linear(x, weight) + ops.quantize_int8_rowwise(torch.ones(K))[1] - constant, x)
    dense = weight.dequantize()
    want = REVERSE[way](lambda x: F.linear(x, dense), x)
    size = REVERSE[way](lambda x: F.linear(x, dense.abs()), x)
    assert_close(made, want, absolute=EXACT * size)


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("rows", [(), (1,), (2, 3)])
def test_a_bias_alone_moves_every_row(weight, rows, mode):
    x, bias, moved = torch.randn(*rows, K), torch.randn(N), torch.randn(N)

    def call(bias):
        return F.linear(x, weight, bias)

    want = moved.expand(*rows, N)
    with MODES[mode]():
        assert_equal(jvp(call, (bias,), (moved,))[1], want)
        assert_equal(jvp(vmap(call), (bias[None],), (moved[None],))[1], want[None])
        assert_equal(dual_tangent(call, bias, moved), want)


PRODUCTS = {
    "x @ w.t()": lambda x, w, transposed: x @ w.t(),
    "x @ w.T": lambda x, w, transposed: torch.matmul(x, w.T),
    "mm of a transpose made before": lambda x, w, transposed: torch.mm(x, transposed),
    "addmm": lambda x, w, transposed: torch.addmm(torch.zeros(N), x, w.mT),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", PRODUCTS)
def test_products_with_the_transpose_are_the_linear(weight, way, mode):
    """A tangent is not rounded to the grid of the op, and the primal is the op's."""
    x, moved = operands()
    transposed, want = weight.t(), F.linear(x, weight)
    with MODES[mode]():
        y, tangent = jvp(lambda x: PRODUCTS[way](x, weight, transposed), (x,), (moved,))
        assert_equal(y, want)
        assert_tangent(tangent, moved, weight)
        if mode != "inference_mode":
            assert_tangent(dual_tangent(lambda x: PRODUCTS[way](x, weight, transposed), x, moved), moved, weight)


def test_products_that_torch_makes_of_others_have_the_exact_tangent(weight):
    x, moved = operands()
    transposed = weight.t()
    for call in (
        lambda x: torch.addmm(torch.zeros(N), x, transposed, beta=2, alpha=3) / 3,
        lambda x: torch.linalg.multi_dot([x, transposed]),
        lambda x: torch.einsum("bk,nk->bn", x, weight),
    ):
        assert_tangent(jvp(call, (x,), (moved,))[1], moved, weight)
        assert_tangent(dual_tangent(call, x, moved), moved, weight)


@pytest.mark.parametrize("mode", MODES)
def test_an_activation_that_was_quantized_before_is_a_constant(weight, mode):
    x, moved = torch.randn(3, K), torch.randn(3, N)
    given = weight.quantize_activation(x)
    want = weight.linear(given)
    with MODES[mode]():
        y, tangent = jvp(lambda z: weight.linear(given) * z, (torch.ones(3, N),), (moved,))
        assert_equal(y, want)
        assert_equal(tangent, want * moved)


def test_derivatives_of_second_order(weight):
    """Of the square of a linear they are its weight's, whichever modes make them; a tangent of a tangent is none of zero."""
    x = torch.randn(K)
    dense = weight.dequantize()
    want, size = 2 * dense.T @ dense, dense.abs().T @ dense.abs()

    def loss(x):
        return F.linear(x[None], weight).square().sum()

    for made in (hessian(loss)(x), jacfwd(jacfwd(loss))(x), jacfwd(grad(loss))(x)):
        assert_close(made, want, absolute=4 * EXACT * size)
    bent = jacfwd(jacfwd(lambda s: F.linear((s * s * x)[None], weight)[0]))(torch.ones(()))
    assert_close(bent, 2 * dense @ x, absolute=2 * EXACT * (dense.abs() @ x.abs()))


@pytest.mark.parametrize("mode", MODES)
def test_an_op_refuses_in_every_grad_mode(weight, name, mode):
    x, moved = operands()
    order = ("qdata", "scale", "smooth_factor", "proj_down", "proj_up")
    given = [weight.inner()[key] for key in order] if name == "svdquant_w4a4" else list(weight.inner().values())

    def op(x):
        return getattr(torch.ops.kitchen, LINEAR_OPS[name])(x, *given)

    with MODES[mode](), pytest.raises(InferenceOnlyError, match="does not switch forward mode off"):
        jvp(op, (x,), (moved,))
    if mode != "inference_mode":
        with MODES[mode](), pytest.raises(InferenceOnlyError, match="does not switch forward mode off"):
            dual_tangent(op, x, moved)


@pytest.mark.parametrize("mode", MODES)
def test_constants_are_taken_inside_of_what_is_differentiated(weight, mode):
    """A weight that is dequantized there, or quantized, has no tangent to be lost."""
    x, moved = operands()
    rows = torch.randn(4, K)
    want = ops.quantize_int8_rowwise(rows)
    dense = weight.dequantize()

    def call(x):
        assert_equal(ops.quantize_int8_rowwise(rows)[0], want[0])
        return F.linear(x, weight.dequantize())

    with MODES[mode]():
        assert_equal(jvp(call, (x,), (moved,))[1], moved @ dense.T)


@pytest.mark.parametrize("mode", MODES)
def test_what_moves_is_not_taken_for_a_constant(mode):
    x, moved = operands()
    with MODES[mode](), pytest.raises(InferenceOnlyError, match="quantize_int8_rowwise was asked"):
        jvp(lambda x: ops.quantize_int8_rowwise(x)[1], (x,), (moved,))


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_a_tangent_of_the_weight_is_refused_not_lost(mode):
    weight = kc.QuantizedTensor.quantize(torch.randn(N, K), "int8")
    x, _ = operands()

    def call(scale):
        return ops.int8_linear(x, weight.qdata, scale, convrot_groupsize=weight.config.convrot_groupsize)

    with MODES[mode]():
        with pytest.raises(InferenceOnlyError, match="weight has no derivative"):
            jvp(call, (weight.scale,), (weight.scale,))
        with pytest.raises(InferenceOnlyError, match="weight has no derivative"):
            dual_tangent(call, weight.scale, weight.scale)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["awq_w4a16", "asym_w4a8_int8", "w6a8_int8"])
def test_a_weight_in_the_resident_layout(name, mode):
    dtype = torch.bfloat16 if name == "awq_w4a16" else torch.float32
    stored = kc.QuantizedTensor.quantize(torch.randn(80, 512, dtype=dtype), name)
    laid = stored.clone()
    assert kc.optimize_for_decode(laid) == (laid, None)
    x, moved = torch.randn(3, 512, dtype=dtype), torch.randn(3, 512, dtype=dtype)
    want = jvp(stored.linear, (x,), (moved,))[1]
    with MODES[mode]():
        assert_equal(jvp(laid.linear, (x,), (moved,))[1], want)
    assert want.abs().max() > 0


@pytest.mark.parametrize("mode", MODES)
def test_an_op_around_others_refuses_too(mode):
    weight = kc.QuantizedTensor.quantize(torch.randn(80, 512, dtype=torch.bfloat16), "awq_w4a16")
    kc.optimize_for_decode(weight)
    codes, scale, zeros = weight.inner().values()
    x = torch.randn(3, 512, dtype=torch.bfloat16)
    with MODES[mode](), pytest.raises(InferenceOnlyError, match="awq_resident_linear was asked"):
        jvp(lambda x: torch.ops.kitchen.awq_resident_linear(x, codes, scale, zeros), (x,), (x,))


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_compiled(weight, mode):
    """The linear itself runs between the graphs; where a graph made before is not made anew, it refuses."""
    torch._dynamo.reset()
    x, moved = operands()
    layer = kc.QuantizedLinear(weight.inner(), weight.format, weight.config, None, torch.float32)

    def tangent(x, moved):
        return jvp(layer, (x,), (moved,))[1]

    with MODES[mode]():
        assert_tangent(torch.compile(tangent, backend="aot_eager")(x, moved), moved, weight)
        torch._dynamo.reset()
        assert_tangent(dual_tangent(torch.compile(layer, backend="aot_eager"), x, moved), moved, weight)
        torch._dynamo.reset()
        made_before = torch.compile(layer, backend="aot_eager")
        made_before(x)
        assert_tangent(dual_tangent(made_before, x, moved), moved, weight)
        made_before = torch.compile(lambda x: F.linear(x, weight), backend="aot_eager")
        made_before(x)
        with pytest.raises(InferenceOnlyError, match="does not switch forward mode off"):
            dual_tangent(made_before, x, moved)
