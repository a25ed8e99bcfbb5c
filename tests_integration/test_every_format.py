"""Every format as a tensor and as a module: copying, saving, moving, refusing, computing, compiling."""

import copy
import gc
import io
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from kitchen_core import (
    FormatError,
    InferenceOnlyError,
    QuantizedLinear,
    QuantizedTensor,
    UnsupportedError,
    get_format,
    installed_formats,
    trace,
)
from kitchen_core import tensor as tensor_module
from kitchen_core.arithmetic import add_residual, apply_input_act
from kitchen_core.formats import marker_tensor, options_of
from kitchen_core.known_formats import KNOWN_FORMATS
from kitchen_core.registry import EAGER
from kitchen_core.testing import FLOAT_DTYPES, LINEAR_OPS, assert_close, assert_equal, tolerance

N, K = 128, 384
FORMATS = sorted(KNOWN_FORMATS)

pytestmark = pytest.mark.parametrize("name", FORMATS)


def weight(name, dtype=torch.bfloat16):
    return QuantizedTensor.quantize(torch.randn(N, K, dtype=dtype), name)


def layer(name, dtype=torch.bfloat16, bias=True, k=K):
    return QuantizedLinear.from_linear(nn.Linear(k, N, bias=bias, dtype=dtype), name)


def assert_same(a, b):
    """Two quantized tensors hold the same bits, config and dtype."""
    assert (a.format, a.config, a.dtype, a.transposed, a.shape) == (b.format, b.config, b.dtype, b.transposed, b.shape)
    assert a.inner().keys() == b.inner().keys()
    for key, tensor in a.inner().items():
        assert_equal(tensor, b.inner()[key], key)


def assert_separate(a, b):
    for key, tensor in a.inner().items():
        assert tensor.data_ptr() != b.inner()[key].data_ptr(), key


def in_dispatch(call):
    """Run with __torch_function__ off, so that F.linear arrives as aten ops (t, mm, addmm)."""
    with torch._C.DisableTorchFunctionSubclass():
        return call()


def test_all_known_formats_are_installed(name):
    assert name in installed_formats()
    assert get_format(name).name == name
    assert get_format(KNOWN_FORMATS[name][2]) is get_format(name)


# ------------------------------------------------------------------------------------------------- computing


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_way_to_a_linear_agrees(name, dtype):
    w, x, bias = weight(name, dtype), torch.randn(2, 5, K).to(dtype), torch.randn(N).to(dtype)
    with trace() as calls:
        y = F.linear(x, w, bias)
        ways = {
            "module": QuantizedLinear(w.inner(), w.format, w.config, bias, dtype)(x),
            "dispatch": in_dispatch(lambda: F.linear(x, w, bias)),
            "addmm": torch.addmm(bias, x.reshape(-1, K), w.t()).reshape(2, 5, N),
            "method": w.linear(x, bias),
        }
        without = {"mm": x.reshape(-1, K) @ w.t(), "matmul": (x @ w.T).reshape(-1, N)}
    assert {(op, kernel) for op, kernel in calls} == {(LINEAR_OPS[name], EAGER)}
    assert y.dtype == dtype
    for way, result in ways.items():
        assert_equal(result, y, way)
    for way, result in without.items():
        assert_equal(result, F.linear(x, w).reshape(-1, N), way)


def test_linear_is_close_to_the_dequantized_weight(name):
    w, x = weight(name, torch.float32), torch.randn(64, K)
    dense = w.dequantize()
    exact = x.double() @ dense.double().T
    error = (F.linear(x, w).double() - exact).norm() / exact.norm()
    if name == "awq_w4a16":  # x is not rounded: only fp32 summation is left
        t = tolerance(torch.float32, K, name)
        magnitude = (x.double().abs() @ dense.double().abs().T).norm() / exact.norm()
        assert error <= t.relative + t.accumulation * magnitude
        return
    # rounding to steps of absmax / levels leaves an error of step / sqrt(12) rms, uniform in the step: relative to the
    # row's rms that is crest / (levels * sqrt(12)); the row of the largest crest factor bounds them all
    levels, width = (7, 64) if name == "svdquant_w4a4" else (127, K)
    rows = x.reshape(-1, width)
    crest = (rows.abs().amax(-1) / rows.square().mean(-1).sqrt()).max().item()
    assert error < crest / (levels * 12**0.5)


def test_addmm_honours_alpha_and_beta(name):
    w, x = weight(name, torch.float32), torch.randn(5, K)
    product = F.linear(x, w)
    magnitude = x.double().abs() @ w.dequantize().double().abs().T
    for addend in (torch.randn(N), torch.randn(5, N), torch.randn(1, N)):
        for beta, alpha in ((0, 2), (0.5, 1), (1, 1), (2, 0.25), (3, 0)):
            got = torch.addmm(addend, x, w.t(), beta=beta, alpha=alpha)
            exact = beta * addend.double() + alpha * product.double()
            t = tolerance(torch.float32, K, name)
            bound = t.accumulation * (alpha * magnitude + beta * addend.double().abs())
            assert_close(got, exact, relative=t.relative, absolute=bound, what=f"beta={beta}, alpha={alpha}")
    nan = torch.full((5, N), float("nan"))
    assert torch.addmm(nan, x, w.t(), beta=0).isfinite().all(), "beta=0 ignores the addend, as torch does"


@pytest.mark.parametrize("act", ["none", "gelu_tanh", "swiglu", "rms_norm", "situ"])
def test_linear_input_act_exists_for_every_format(name, act):
    w = weight(name, torch.float32)
    x = torch.randn(3, 7, 2 * K if act in ("swiglu", "situ") else K)
    act_weight = torch.rand(K) if act == "rms_norm" else None
    residual, scale, bias = torch.randn(3, 7, N), torch.randn(N), torch.randn(N)
    with trace() as calls:
        got = w.linear_input_act(x, bias, act, act_weight, 1e-6, residual, scale)
    assert {op for op, _ in calls} == {LINEAR_OPS[name]}
    h = apply_input_act(x, act, act_weight, 1e-6)
    exact = add_residual(w.linear(h, bias), residual, scale)
    magnitude = h.double().abs() @ w.dequantize().double().abs().T + bias.abs()
    t = tolerance(torch.float32, K, name)
    bound = t.accumulation * magnitude * scale.abs()
    assert_close(got, exact, relative=4 * t.relative, absolute=bound + 4 * t.relative * residual.abs())
    made = QuantizedLinear(w.inner(), w.format, w.config, bias, torch.float32)
    assert_equal(made.linear_input_act(x, act, act_weight, 1e-6, residual, scale), got)


def test_one_activation_serves_several_weights(name):
    a = weight(name, torch.float32)
    b = a.requantize(torch.randn(N, K)) if name != "svdquant_w4a4" else a.clone()
    x = torch.randn(2, 3, K)
    shared = a.quantize_activation(x)
    for w in (a, b):
        assert_equal(w.linear(shared), w.linear(x))
    normed = a.quantize_activation(x, input_act="gelu_tanh")
    assert_equal(a.linear(normed), a.linear_input_act(x, input_act="gelu_tanh"))
    module = QuantizedLinear(a.inner(), a.format, a.config, None, torch.float32)
    assert_equal(module(module.quantize_activation(x)), a.linear(x))


def test_sharing_is_refused_by_name(name):
    w = weight(name, torch.float32)
    shared = w.quantize_activation(torch.randn(2, K))
    with pytest.raises(UnsupportedError, match=r"dtype is torch\.float32 in the activation and torch\.bfloat16"):
        w.to(torch.bfloat16).linear(shared)
    with pytest.raises(UnsupportedError, match="device is cpu in the activation and meta in the weight"):
        w.to("meta").linear(shared)
    with pytest.raises(UnsupportedError, match="in_features is 384 in the activation and 768"):
        QuantizedTensor.quantize(torch.randn(8, 2 * K), name, **rotation(name, 64)).linear(shared)
    if rotation(name, 16):
        with pytest.raises(UnsupportedError, match="convrot_groupsize is 64 in the activation and 16 in the weight"):
            QuantizedTensor.quantize(torch.randn(8, K), name, convrot_groupsize=16).linear(shared)
    with pytest.raises(UnsupportedError, match="input_act belongs to quantize_activation"):
        w.linear_input_act(shared, input_act="gelu_tanh")


def rotation(name, group):
    """Options that set the ConvRot group, for the formats that rotate."""
    return {"convrot_groupsize": group} if "int8" in name else {}


def test_backward_reaches_x_bias_and_residual(name):
    w = weight(name, torch.float32)
    dense = w.dequantize().double()
    grad = torch.randn(5, N)
    for way in (
        lambda x, b: F.linear(x, w, b),
        lambda x, b: torch.addmm(b, x, w.t()),
        QuantizedLinear(w.inner(), w.format, w.config),
    ):
        x, bias = torch.randn(5, K, requires_grad=True), torch.randn(N, requires_grad=True)
        module = isinstance(way, QuantizedLinear)
        (way(x) if module else way(x, bias)).backward(grad)
        magnitude = grad.double().abs() @ dense.abs()
        bound = tolerance(torch.float32, N, name).accumulation + 2 * N * 2.0**-24
        assert_close(x.grad, grad.double() @ dense, absolute=bound * magnitude)
        if not module:
            assert_close(bias.grad, grad.double().sum(0), absolute=2 * 5 * 2.0**-24 * grad.double().abs().sum(0))


def test_backward_through_an_activation_in_front(name):
    w = weight(name, torch.float32)
    x = torch.randn(5, K, requires_grad=True)
    w.linear_input_act(x, None, "gelu_tanh").sum().backward()
    dense = torch.randn(5, K, requires_grad=True)
    dense.data = x.data
    F.linear(F.gelu(dense, approximate="tanh"), w.dequantize()).sum().backward()
    # both sum N products in fp32 and multiply by gelu' (at most 1.13, a few operations)
    bound = 1.13 * 2 * (N + 16) * 2.0**-24 * w.dequantize().double().abs().sum(0)
    assert_close(x.grad, dense.grad, absolute=bound.expand(5, K))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, which has no rule for an op
def test_functional_gradients(name):
    """torch.func's are autograd's; in forward mode a tangent goes through the dequantized weight, and none is lost silently."""
    w, x, bias = weight(name, torch.float32), torch.randn(3, K), torch.randn(N)
    moved, dense = torch.randn(3, K), w.dequantize()
    bound = 4 * K * 2.0**-24

    def call(x, bias):
        return F.linear(x, w, bias)

    def loss(x):
        return call(x, bias).square().sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert_equal(torch.func.grad(loss)(x), leaf.grad)
    assert_close(
        torch.func.vmap(torch.func.grad(loss))(x), leaf.grad, relative=2.0**-20, absolute=1e-3 * leaf.grad.abs()
    )
    y, tangent = torch.func.jvp(call, (x, bias), (moved, bias))
    assert_equal(y, call(x, bias))
    assert_close(tangent, moved @ dense.T + bias, absolute=bound * (moved.abs() @ dense.abs().T + bias.abs()))
    with torch.autograd.forward_ad.dual_level():
        pair = torch.autograd.forward_ad.unpack_dual(call(torch.autograd.forward_ad.make_dual(x, moved), bias))
        assert_close(pair.tangent, moved @ dense.T, absolute=bound * (moved.abs() @ dense.abs().T))
    residual, scale = torch.randn(3, N), torch.rand(N)
    made = {"residual": residual, "residual_scale": scale}
    _, tangent = torch.func.jvp(
        lambda x, r: w.format.linear(x, w.inner(), w.config, **made | {"residual": r}), (x, residual), (moved, residual)
    )
    size = moved.abs() @ dense.abs().T * scale + residual.abs()
    assert_close(tangent, moved @ dense.T * scale + residual, absolute=2 * bound * size)
    with pytest.raises(InferenceOnlyError, match="residual_scale has no gradient"):
        torch.func.jvp(
            lambda s: w.format.linear(x, w.inner(), w.config, **made | {"residual_scale": s}), (scale,), (scale,)
        )
    with pytest.raises(InferenceOnlyError, match=r"torch\.no_grad"):
        torch.func.jvp(_raw(w, name), (x,), (moved,))


def _raw(w, name):
    """The op itself, which has no gradient, as a function of x."""
    order = ("qdata", "scale", "smooth_factor", "proj_down", "proj_up")
    tensors = [w.inner()[key] for key in order] if name == "svdquant_w4a4" else list(w.inner().values())
    return lambda x: getattr(torch.ops.kitchen, LINEAR_OPS[name])(x, *tensors)


def test_a_weight_takes_no_gradient(name):
    w = weight(name)
    with pytest.raises(InferenceOnlyError, match="requires_grad=False"):
        nn.Parameter(w)
    with pytest.raises(InferenceOnlyError):
        layer(name).requires_grad_(True)
    assert not nn.Parameter(w, requires_grad=False).requires_grad


def test_zero_rows_give_the_bias_exactly(name):
    w, bias = weight(name), torch.randn(N, dtype=torch.bfloat16)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    clean = F.linear(x, w, bias)
    x[1] = 0
    y = F.linear(x, w, bias)
    assert_equal(y[1], bias)
    assert_equal(y[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_rows_with_inf_or_nan_touch_no_other_row(name, bad):
    w, x = weight(name), torch.randn(4, K, dtype=torch.bfloat16)
    clean = F.linear(x, w)
    x[2, 100] = bad
    y = F.linear(x, w)
    assert_equal(y[[0, 1, 3]], clean[[0, 1, 3]])
    assert not y[2].isfinite().any()


def test_autocast_casts_as_a_dense_linear_does(name):
    w, x = weight(name), torch.randn(5, K, dtype=torch.bfloat16)
    y = F.linear(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(F.linear(x, w), y, "the arithmetic inside an op is not autocast")
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(torch.randn(2, K), weight(name)).dtype == torch.bfloat16
        assert layer(name, torch.float32)(torch.randn(2, K)).dtype == torch.bfloat16


def test_anything_else_dequantizes_with_one_warning(name, caplog):
    w = weight(name)
    tensor_module._dequantized_ops.clear()
    with caplog.at_level(logging.WARNING, "kitchen"):
        assert_equal(w + 1, w.dequantize() + 1)
        assert_equal(w + 1, w.dequantize() + 1)
        assert_equal(w[3:5], w.dequantize()[3:5])
    assert [r.message.split()[1] for r in caplog.records] == ["aten::add", "aten::slice"]


# --------------------------------------------------------------------------------------------------- refusing


def test_in_place_changes_are_refused_and_lose_nothing(name):
    w = weight(name)
    before = copy.deepcopy(w)
    dense = torch.randn(N, K, dtype=torch.bfloat16)
    with torch.no_grad():
        for change in (
            lambda: w.add_(1),
            lambda: w.mul_(2),
            lambda: w.zero_(),
            lambda: w.copy_(dense),
            lambda: w.__setitem__(0, 1),
            lambda: w.t().fill_(0),
            lambda: torch.add(dense, 1, out=w),
            lambda: nn.init.normal_(w),
            lambda: setattr(w, "data", dense),
            lambda: w.copy_(weight(name).t()),
        ):
            with pytest.raises(UnsupportedError):
                change()
    assert_same(w, before)
    dense.copy_(w)
    assert_equal(dense, w.dequantize())


def test_weights_with_nan_or_inf_are_refused_by_position(name):
    bad = torch.randn(N, K)
    bad[3, 7] = float("nan")
    with pytest.raises(UnsupportedError, match=r"1 elements that are inf or NaN, the first at \[3, 7\]"):
        QuantizedTensor.quantize(bad, name)
    for shape in ((K,), (0, K), (2, N, K)):
        with pytest.raises((UnsupportedError, TypeError)):
            get_format(name).quantize(torch.randn(shape), get_format(name).config_for(N, K))


def test_tensors_that_do_not_fit_are_refused(name):
    w = weight(name)
    format, config = w.format, w.config
    for key, tensor in w.inner().items():
        others = {k: t for k, t in w.inner().items() if k != key}
        if next(s for s in format.tensors if s.name == key).required:
            with pytest.raises(FormatError, match=f"missing: {key}"):
                QuantizedLinear(others, format, config)
        with pytest.raises(FormatError, match=format.name):
            QuantizedLinear({**others, key: tensor.reshape(-1)[:-1].clone()}, format, config)
        with pytest.raises(FormatError, match=format.name):
            QuantizedLinear({**others, key: tensor.to(torch.int16)}, format, config)
    with pytest.raises(FormatError, match="unknown: surprise"):
        QuantizedLinear({**w.inner(), "surprise": torch.zeros(1)}, format, config)


# ------------------------------------------------------------------------------------------- copying and saving


def test_copies(name):
    w = weight(name)
    for made in (copy.deepcopy(w), w.clone(), pickle.loads(pickle.dumps(w)), copy.deepcopy(w.t()).t()):
        assert_same(made, w)
        assert_separate(made, w)
    for view in (w.detach(), copy.copy(w), w.t().t(), w.contiguous()):
        assert_same(view, w)
    assert copy.deepcopy([w, w])[0] is not w
    twice = copy.deepcopy([w, w])
    assert twice[0] is twice[1]
    parameter = nn.Parameter(w, requires_grad=False)
    for made in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert isinstance(made, nn.Parameter)
        assert_same(made, w)


def test_torch_save_with_weights_only(name):
    w = weight(name)
    buffer = io.BytesIO()
    torch.save({"w": w, "t": w.t()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert_same(loaded["w"], w)
    assert_same(loaded["t"], w.t())


def test_copy_between_equal_weights(name):
    a, b = weight(name), weight(name)
    if a.config != b.config or a.inner().keys() != b.inner().keys():
        pytest.skip("the two random weights chose different codebooks")
    kept = a.inner()
    a.copy_(b, non_blocking=True)
    assert_same(a, b)
    assert all(a.inner()[k] is t for k, t in kept.items())
    made = torch.empty_like(a)
    assert_separate(made, a)
    assert made.shape == a.shape


def test_moving_keeps_codes_and_scales(name):
    w = weight(name)
    assert w.to("cpu") is w or w.to("cpu").shape == w.shape
    for moved in (
        w.half(),
        w.to(torch.float16),
        w.to("cpu", torch.float16, non_blocking=True),
        w.to(torch.float16, copy=True),
    ):
        assert moved.dtype == torch.float16
        for key, tensor in moved.inner().items():
            assert_equal(tensor, w.inner()[key], key)
    assert w.float().dequantize().dtype == torch.float32
    meta = w.to("meta")
    assert meta.device.type == "meta"
    assert meta.shape == w.shape
    assert F.linear(torch.randn(3, K, device="meta"), meta).shape == (3, N)
    assert w.to(torch.int32).dtype == torch.int32, "an integer dtype is a dense conversion"


def test_data_swap_between_equal_formats(name):
    w, other = weight(name), weight(name)
    if w.config != other.config:
        pytest.skip("the two random weights chose different codebooks")
    w.data = other
    assert_same(w, other)


def test_repr_is_short(name):
    assert name in repr(weight(name))
    assert len(repr(weight(name))) < 400


def test_a_discarded_weight_is_freed(name):
    import weakref

    w = weight(name)
    F.linear(torch.randn(2, K, dtype=torch.bfloat16), w)
    watch = weakref.ref(w.inner()[w.format.tensors[0].name])
    del w
    gc.collect()
    assert watch() is None


# ------------------------------------------------------------------------------------------------- as a module


def test_module_is_a_linear_that_tells_the_truth(name):
    made = layer(name)
    assert isinstance(made, nn.Linear)
    assert (made.in_features, made.out_features, made.bias.shape) == (K, N, (N,))
    assert made.weight.device.type == "cpu"
    assert made.dequantize().shape == (N, K)
    assert made.dequantize().dtype == torch.bfloat16
    assert layer(name, bias=False).bias is None
    assert not any(p.requires_grad for p in made.parameters())


def test_module_keeps_scales_and_codes_under_dtype_changes(name):
    made = layer(name)
    before = {k: t.clone() for k, t in made.inner().items()}
    y = made(torch.ones(2, K, dtype=torch.bfloat16))
    for change, dtype in (("half", torch.float16), ("float", torch.float32), ("bfloat16", torch.bfloat16)):
        getattr(made, change)()
        assert made.compute_dtype == made.bias.dtype == dtype
        for key, tensor in made.inner().items():
            assert_equal(tensor, before[key], key)
        assert made(torch.ones(2, K, dtype=dtype)).dtype == dtype
    assert_equal(made(torch.ones(2, K, dtype=torch.bfloat16)), y)
    assert made.to("meta").weight.device.type == "meta"
    assert made.to_empty(device="cpu").weight.device.type == "cpu"


@pytest.mark.parametrize("assign", [False, True])
def test_module_state_dict_round_trips(name, assign, tmp_path):
    made, other = layer(name), layer(name)
    x = torch.randn(3, K, dtype=torch.bfloat16)
    if made.inner().keys() != other.inner().keys() or made.config != other.config:
        pytest.skip("the two random weights chose different codebooks")
    save_file(made.state_dict(), tmp_path / "layer.safetensors")
    torch.save(made.state_dict(), tmp_path / "layer.pt")
    for state in (
        load_file(tmp_path / "layer.safetensors"),
        torch.load(tmp_path / "layer.pt", weights_only=True),
    ):
        fresh = copy.deepcopy(other)
        assert fresh.load_state_dict(state, strict=True, assign=assign)
        assert_equal(fresh(x), made(x))
    onto_meta = copy.deepcopy(other).to("meta")
    onto_meta.load_state_dict(load_file(tmp_path / "layer.safetensors"), strict=True, assign=True)
    assert_equal(onto_meta(x), made(x))


def test_module_copies(name):
    made, x = layer(name), torch.randn(3, K, dtype=torch.bfloat16)
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert_equal(again(x), made(x))
        assert again.weight.data_ptr() != made.weight.data_ptr()


def test_module_accepts_other_spellings_and_no_marker(name):
    made = layer(name)
    state = made.state_dict()
    del state["comfy_quant"]
    for spec in made.format.tensors:
        for alias in spec.aliases:
            respelled = dict(state)
            respelled[alias] = respelled.pop(spec.key)
            copy.deepcopy(made).load_state_dict(respelled, strict=True)
    made.load_state_dict(state, strict=True)


def test_module_refuses_a_marker_that_says_something_else(name):
    made = layer(name)
    state = made.state_dict()
    other = {"format": "int8_tensorwise" if name != "int8_tensorwise" else "awq_w4a16", "group_size": 32}
    with pytest.raises((FormatError, RuntimeError), match="the file says"):
        made.load_state_dict({**state, "comfy_quant": marker_tensor(other)})
    with pytest.raises((FormatError, RuntimeError), match="unknown format 'int3_future'"):
        made.load_state_dict({**state, "comfy_quant": marker_tensor({"format": "int3_future"})})


def test_module_survives_data_swaps(name):
    made, x = layer(name), torch.randn(3, K, dtype=torch.bfloat16)
    y = made(x)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data = tensor.data.clone()
    assert_equal(made(x), y)


def test_module_requantizes_in_place(name):
    made = layer(name)
    delta = torch.randn(N, K) * 0.1
    target = made.dequantize(torch.float32) + delta
    storage = made.weight
    made.requantize_(target, seed=3 if name != "svdquant_w4a4" else 0)
    assert made.weight is storage
    error = (made.dequantize(torch.float32) - target).norm() / target.norm()
    assert error < 0.2


# ---------------------------------------------------------------------------------------------------- compile


class Block(nn.Module):
    """80 equal quantized linears in a row."""

    def __init__(self, name, form, depth=80):
        super().__init__()
        dense = nn.Linear(64, 64, dtype=torch.float32)
        nn.init.normal_(dense.weight, std=0.1)
        if form == "module":
            dense = QuantizedLinear.from_linear(dense, name)
        else:
            dense.weight = nn.Parameter(QuantizedTensor.quantize(dense.weight.detach(), name), requires_grad=False)
        self.layers = nn.ModuleList(copy.deepcopy(dense) for _ in range(depth))

    def forward(self, x):
        for one in self.layers:
            x = x + one(x)
        return x


@pytest.mark.parametrize("form", ["module", "tensor"])
def test_eighty_layers_compile_to_one_graph(name, form):
    """One graph at a fixed M, at most three over four values of M, and never one per layer."""
    block = Block(name, form)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=counting)
    with torch.no_grad():
        for _ in range(2):
            assert_equal(compiled(torch.ones(7, 64)), block(torch.ones(7, 64)))
        assert len(graphs) == 1
        for m in (1, 7, 17, 300):
            compiled(torch.ones(m, 64))
    assert len(graphs) <= 3


def test_compiled_with_gradients(name):
    made = layer(name, torch.float32)
    x = torch.randn(5, K, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(made, fullgraph=True, backend="aot_eager")(x).sum().backward()
    compiled, x.grad = x.grad, None
    made(x).sum().backward()
    assert_close(compiled, x.grad, relative=4 * 2.0**-24)  # the same operations, perhaps summed in another order


# ------------------------------------------------------------------------------------------ what a breaker found


def test_share_memory_and_raw_pointers(name):
    w = weight(name)
    assert w.share_memory_() is w
    assert all(t.is_shared() for t in w.inner().values())
    linear = nn.Linear(K, N)
    linear.weight = nn.Parameter(w, requires_grad=False)
    linear.share_memory()
    for refused in (lambda: w.apply_(lambda v: v), w.data_ptr, w.__dlpack__):
        with pytest.raises(UnsupportedError):
            refused()


def test_in_place_ops_over_lists_are_refused(name):
    w = weight(name)
    before = copy.deepcopy(w)
    for change in (
        torch._foreach_zero_,
        lambda ts: torch._foreach_mul_(ts, 0.0),
        lambda ts: torch._foreach_add_(ts, ts),
    ):
        with pytest.raises(UnsupportedError, match="in-place"):
            change([w])
    assert_same(w, before)


def test_ops_without_a_gradient_say_so(name):
    w = weight(name, torch.float32)
    x = torch.randn(3, K, requires_grad=True)
    with pytest.raises(InferenceOnlyError, match=r"torch\.no_grad"):
        _raw(w, name)(x)
    if w.format.activation_kind != "float":
        with pytest.raises(InferenceOnlyError):
            w.quantize_activation(x)
    gain = torch.rand(K, requires_grad=True)
    w.linear_input_act(x.detach(), None, "rms_norm", gain, 1e-6).sum().backward()
    dense = torch.rand(K)
    dense.data.copy_(gain.data)
    dense.requires_grad_()
    F.linear(F.rms_norm(x.detach(), (K,), dense, 1e-6), w.dequantize()).sum().backward()
    # each side sums 3 rows of N products, each times x / rms (at most sqrt(K))
    bound = 3 * K**0.5 * 2 * (N + 16) * 2.0**-24 * w.dequantize().double().abs().sum(0)
    assert_close(gain.grad, dense.grad, absolute=bound)


def test_out_dtype_is_a_float(name):
    w = weight(name)
    for bad in (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(UnsupportedError, match="out_dtype must be"):
            w.format.linear(torch.randn(2, K), w.inner(), w.config, None, bad)


def test_tensors_are_checked_when_a_weight_is_made(name):
    w = weight(name)
    first = w.format.tensors[0].name
    with pytest.raises(FormatError, match="missing"):
        QuantizedTensor({first: w.inner()[first]}, w.format, w.config, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="float dtype"):
        QuantizedTensor(w.inner(), w.format, w.config, torch.int8)


def test_state_dict_of_another_dtype_is_refused_not_cast(name):
    made = nn.Sequential(layer(name))
    state = made.state_dict()
    for spec in made[0].format.tensors:
        if f"0.{spec.key}" in state:
            wrong = {**state, f"0.{spec.key}": torch.zeros_like(state[f"0.{spec.key}"], dtype=torch.int32)}
            with pytest.raises((FormatError, RuntimeError), match=spec.key):
                made.load_state_dict(wrong)


def test_requantize_checks_the_shape(name):
    with pytest.raises(UnsupportedError, match=r"takes a weight of shape \[128, 384\], got \[128, 768\]"):
        layer(name).requantize_(torch.randn(N, 2 * K))


def test_a_replica_without_registered_parameters_runs(name):
    made, x = layer(name), torch.randn(2, K, dtype=torch.bfloat16)
    replica = made._replicate_for_data_parallel()
    for key, tensor in made._parameters.items():
        replica._parameters.pop(key, None)
        setattr(replica, key, None if tensor is None else tensor.detach())
    assert_equal(replica(x), made(x))


def test_keyword_names_are_torchs_own(name):
    w, x = weight(name), torch.randn(2, K, dtype=torch.bfloat16)
    assert_equal(F.linear(input=x, weight=w, bias=None), F.linear(x, w))


def test_wrong_arguments_are_named(name):
    for bad in (torch.randn(8), torch.randn(2, 8, 8), nn.Linear(8, 8), None):
        with pytest.raises(UnsupportedError, match=r"\[N, K\]"):
            QuantizedTensor.quantize(bad, name)
    with pytest.raises(UnsupportedError, match="has no option surprise; it has: "):
        QuantizedTensor.quantize(torch.randn(N, K), name, surprise=3)
    option, usual = next(iter(options_of(get_format(name)).items()))
    for value in (str(usual), float(usual), None):
        with pytest.raises(UnsupportedError, match=f"{option} must be a whole number, such as {usual}, got {value!r}"):
            QuantizedTensor.quantize(torch.randn(N, K), name, **{option: value})
    for bad in (None, 8, int):
        with pytest.raises(FormatError, match="a format is a name, such as 'int8', or the class of a format, got"):
            QuantizedLinear.from_linear(nn.Linear(K, N), bad)
    with pytest.raises(UnsupportedError, match=rf"x must be a tensor \[..., {K}\] or a QuantizedActivation, got list"):
        QuantizedLinear.from_linear(nn.Linear(K, N), name)([[1.0] * K])


class TransposedLinear(nn.Module):
    """As transformers' Conv1D: its weight is [K, N], which would be taken for a weight [N, K]."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(256, 128)), None


@pytest.mark.parametrize(
    "other", [TransposedLinear, lambda: nn.Conv2d(4, 4, 1), lambda: nn.Embedding(8, 64), lambda: None]
)
def test_only_a_linear_layer_is_made_from_a_layer(name, other):
    with pytest.raises(UnsupportedError, match=r"from_linear takes an nn\.Linear, got (\w+); another layer"):
        QuantizedLinear.from_linear(other(), name)


def test_a_sparse_weight_is_refused_by_its_layout(name):
    weight = torch.randn(128, 128).relu()
    for sparse in (weight.to_sparse(), weight.to_sparse_csr()):
        with pytest.raises(
            UnsupportedError, match=r"must be dense, got layout torch\.sparse_\w+; pass its to_dense\(\)"
        ):
            QuantizedTensor.quantize(sparse, name)


def test_a_part_of_a_weight_is_told_by_two_numbers(name):
    made, x = weight(name), torch.randn(3, K).bfloat16()
    format, call = made.format, (made.inner(), made.config)
    if not format.takes_part:
        pytest.skip(f"{name} sums integers, and takes no part")
    words = r"part must be \(part_first, part_of\)|whole number of 64 bits|is no part of one of|part_first is missing"
    activation = made.quantize_activation(x)
    for part in ((1, 2, 3), (8,), 8, "08", (0.5, 2 * N), ("0", "256"), (N, 2 * N - 1), (None, N)):
        with pytest.raises(UnsupportedError, match=words):
            format.linear(x, *call, part=part)
        with pytest.raises(UnsupportedError, match=words):
            format.linear_quantized(activation, *call, part=part)
    assert_equal(format.linear(x, *call, part=(N, 2 * N)), made.linear(x))
    assert_equal(format.linear_quantized(activation, *call, part=[N, 2 * N]), made.linear(activation))
