"""Weights in a resident layout, of every format that has one: they do what stored ones do, to the bit, are saved as those, and
whatever tensors come into them are taken for what they are."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

import kitchen_awq.resident
import kitchen_w4a8.resident
from kitchen_core import (
    FormatError,
    QuantizedLinear,
    QuantizedTensor,
    UnsupportedError,
    get_format,
    installed_formats,
    optimize_for_decode,
)

N, K = 80, 512
DTYPES = {"awq_w4a16": torch.bfloat16, "asym_w4a8_int8": torch.float32, "w6a8_int8": torch.float32}
PACKING = {  # the module and the function that moves a strip
    "awq_w4a16": (kitchen_awq.resident, "_laid"),
    "asym_w4a8_int8": (kitchen_w4a8.resident, "_records"),
    "w6a8_int8": (kitchen_w4a8.resident, "_records"),
}


def quantized(name: str, seed: int = 0) -> QuantizedTensor:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).to(DTYPES[name])
    return QuantizedTensor.quantize(weight, name)


def in_storage(weight: QuantizedTensor) -> tuple[QuantizedTensor, torch.Tensor]:
    """The same weight, what a layout moves being views of one buffer."""
    parts = {name: weight.inner()[name] for name in weight.format.resident_tensors}
    storage = torch.cat([tensor.flatten().view(torch.uint8) for tensor in parts.values()])
    pieces = storage.split([tensor.nbytes for tensor in parts.values()])
    views = {name: piece.view(t.dtype).view(t.shape) for (name, t), piece in zip(parts.items(), pieces, strict=True)}
    return QuantizedTensor({**weight.inner(), **views}, weight.format, weight.config, weight.dtype), storage


def layer_of(weight: QuantizedTensor) -> QuantizedLinear:
    bias = torch.randn(N, generator=torch.Generator().manual_seed(9)).to(weight.dtype)
    return QuantizedLinear(weight.clone().inner(), weight.format, weight.config, bias, weight.dtype)


def laid(weight):
    assert optimize_for_decode(weight) == (weight, None)
    assert weight.format.is_resident(weight.inner())
    return weight


def is_stored(weight) -> bool:
    return not weight.format.is_resident(weight.inner())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """The same tensors under the same keys, in the same order."""
    assert list(a) == list(b)
    assert all(same_bytes(tensor, b[key]) for key, tensor in a.items())


def through_file(given):
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture(params=DTYPES)
def name(request) -> str:
    return request.param


@pytest.fixture
def pair(name) -> tuple[QuantizedTensor, QuantizedTensor]:
    """A weight, and the same in the resident layout."""
    return quantized(name), laid(quantized(name))


@pytest.fixture
def layers(name) -> tuple[QuantizedLinear, QuantizedLinear]:
    """A layer, and the same in the resident layout."""
    return layer_of(quantized(name)), laid(layer_of(quantized(name)))


@pytest.fixture
def x(name) -> torch.Tensor:
    return torch.randn(3, K).to(DTYPES[name])


def test_every_format_that_has_such_a_layout_is_here():
    having = {name for name in installed_formats() if get_format(name).resident_tensors}
    assert having == DTYPES.keys() == PACKING.keys()
    assert kitchen_awq.optimize_for_decode is kitchen_w4a8.optimize_for_decode is optimize_for_decode


# ------------------------------------------------------------------------------------------------------ laying out


def test_the_callers_buffer_is_laid_out_and_the_object_kept(name):
    weight, storage = in_storage(quantized(name))
    before, dense = storage.clone(), weight.dequantize()
    assert optimize_for_decode(weight, storage) == (weight, None)
    assert weight.inner().keys() == quantized(name).inner().keys() - set(weight.format.resident_tensors[1:])
    assert all(not hasattr(weight, moved) for moved in weight.format.resident_tensors[1:])
    assert weight.qdata.data_ptr() == storage.data_ptr()
    assert weight.qdata.nbytes == storage.nbytes
    assert not torch.equal(storage, before)
    assert torch.equal(weight.dequantize(), dense)
    assert weight.shape == (N, K)
    assert "resident layout" in repr(weight)
    assert "resident layout" in repr(laid(layer_of(quantized(name))))


@pytest.mark.parametrize("as_layer", [False, True])
def test_inference_tensors_are_laid_out_in_place_outside_that_mode(name, as_layer):
    with torch.inference_mode():
        weight, storage = in_storage(quantized(name))
        dense = weight.dequantize()
    if as_layer:
        weight = QuantizedLinear(weight.inner(), weight.format, weight.config, None, weight.dtype)
    before = storage.clone()
    assert optimize_for_decode(weight, storage).reason is None
    assert storage.is_inference()
    assert not torch.equal(storage, before)
    assert torch.equal(weight.dequantize(), dense)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_fails_midway_leaves_the_weight_as_it_was(monkeypatch, name, error):
    module, function = PACKING[name]
    weight, storage = in_storage(quantized(name))
    before, inner, calls, move = storage.clone(), dict(weight.inner()), [], getattr(module, function)

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return move(*args)

    monkeypatch.setattr(module, "STRIP_BYTES", 1)
    monkeypatch.setattr(module, function, failing)
    with pytest.raises(error):
        optimize_for_decode(weight, storage)
    assert torch.equal(storage, before)
    assert all(weight.inner()[key] is tensor for key, tensor in inner.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.t(), "transposed view"),
        (lambda w: w.to("meta"), "meta device"),
        (laid, "already"),
        (lambda w: QuantizedTensor.quantize(w.dequantize()[:12], w.format), "needs N a multiple of"),
    ],
)
def test_what_cannot_be_laid_out_says_why_and_stays(name, change, words):
    weight = change(quantized(name))
    before = dict(weight.inner())
    made, reason = optimize_for_decode(weight)
    assert made is weight
    assert words in reason
    assert all(weight.inner()[key] is tensor for key, tensor in before.items())


@pytest.mark.parametrize("other", ["int8_tensorwise", "svdquant_w4a4"])
def test_a_format_without_such_a_layout_says_so(other):
    weight = QuantizedTensor.quantize(torch.randn(128, 256), other)
    assert optimize_for_decode(weight) == (weight, f"{other} has no resident layout")


def test_a_divided_weight_says_so_and_stays(name):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        layer = layer_of(quantized(name))
        whole = torch.distributed.tensor.distribute_tensor(layer.weight.data, mesh)
        layer.weight = held = torch.nn.Parameter(whole, requires_grad=False)
        assert "divided over devices" in optimize_for_decode(layer).reason
        assert layer.weight is held
    finally:
        torch.distributed.destroy_process_group()


def test_what_is_no_weight_and_a_layer_with_a_lora_are_refused_by_name(name):
    with pytest.raises(UnsupportedError, match="takes a QuantizedTensor or a QuantizedLinear, got Tensor"):
        optimize_for_decode(torch.zeros(16, 256))
    layer = layer_of(quantized(name))
    layer.__dict__["_kitchen_loras"] = object()  # as kitchen_models.lora does
    with pytest.raises(UnsupportedError, match="has a LoRA attached: optimize before attaching, or merge it"):
        optimize_for_decode(layer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s[:-1], r"contiguous uint8 \[{bytes}\], the bytes of {names}"),
        (lambda s: s.view(torch.int8), "got torch.int8"),
        (lambda s: s.view(2, -1), r"got torch.uint8 \[2, "),
        (lambda s: s.clone(), "must be the memory of the weight: {names}"),
        (lambda s: s.to("meta"), "device cpu, got meta"),
        (lambda s: bytearray(8), "uint8 tensor, the bytes of {names}, got bytearray"),
    ],
)
def test_a_storage_that_does_not_hold_the_weight_is_refused(name, change, words):
    weight, storage = in_storage(quantized(name))
    dense = weight.dequantize()
    names = " and ".join(weight.format.resident_tensors)
    with pytest.raises(UnsupportedError, match=words.format(bytes=storage.nbytes, names=names)):
        optimize_for_decode(weight, change(storage))
    assert torch.equal(weight.dequantize(), dense)


# ----------------------------------------------------------------------------------------------------- computing


def test_linears_are_those_of_the_stored_weight(pair, x):
    stored, made = pair
    bias, residual = torch.randn(N).to(x.dtype), torch.randn(3, N).to(x.dtype)
    assert torch.equal(F.linear(x, made, bias), F.linear(x, stored, bias))
    assert torch.equal(x @ made.t(), x @ stored.t())
    assert torch.equal(torch.addmm(residual, x, made.t(), beta=0.5), torch.addmm(residual, x, stored.t(), beta=0.5))
    act = {"input_act": "swiglu", "residual": residual, "residual_scale": torch.randn(N)}
    wide = torch.randn(3, 2 * K).to(x.dtype)
    assert torch.equal(made.linear_input_act(wide, bias, **act), stored.linear_input_act(wide, bias, **act))
    shared = stored.quantize_activation(x)
    assert torch.equal(made.linear(shared, bias, residual), stored.linear(shared, bias, residual))
    assert torch.equal(made.linear(made.quantize_activation(x), bias), stored.linear(shared, bias))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_the_stored_weight(pair, x, compiled):
    found = []
    for weight in pair:
        own = x.clone().requires_grad_()

        def f(x, w=weight):
            return w.linear(x)

        f = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
        f(own).square().sum().backward()
        found.append(own.grad)
    assert torch.equal(*found)


def test_derivatives_of_torch_func_are_those_of_the_stored_weight(pair, x):
    tangent, found = torch.randn_like(x), []
    for weight in pair:

        def f(x, w=weight):
            return w.linear(x).square().sum()

        def jvp(t, f=f):
            return torch.func.jvp(f, (x,), (t,))[1]

        found.append((torch.func.jacfwd(f)(x), torch.func.vmap(jvp)(tangent.expand(3, -1, -1)), torch.func.grad(f)(x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_calls_see_a_weight_that_is_laid_out_after_them(name, x):
    """They look at the layout before each call: a graph of the one multiplies no bytes of the other."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: F.linear(x, w) * 1, fullgraph=True, backend="aot_eager")
    weight = quantized(name)
    want = F.linear(x, weight)
    assert torch.equal(compiled(x, weight), want)
    assert torch.equal(compiled(x, laid(weight)), want)
    assert torch.equal(compiled(x, quantized(name)), want)
    layer = layer_of(quantized(name))
    want, compiled = layer(x), torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), want)
    laid(layer)
    assert torch.equal(compiled(x), want)
    layer.load_state_dict(layer.state_dict())
    assert is_stored(layer)
    assert torch.equal(compiled(x), want)
    other = layer_of(quantized(name, seed=1))
    want = other(x)
    for given in (other, laid(layer_of(quantized(name, seed=1)))):  # as loaders do that set parameters one by one
        for key, parameter in given._parameters.items():
            layer._parameters[key] = parameter
        assert is_stored(layer) == is_stored(given)
        assert torch.equal(compiled(x), want)


def test_compiled_calls_take_weights_of_several_shapes(name):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: F.linear(x, w) * 1, fullgraph=True, backend="aot_eager")
    for n, k in ((16, 256), (48, 256), (48, 512), (80, 1280)):
        weight = QuantizedTensor.quantize(torch.randn(n, k).to(DTYPES[name]), name)
        x = torch.randn(2, k).to(DTYPES[name])
        want = F.linear(x, weight)
        assert torch.equal(compiled(x, laid(weight)), want)


def test_a_layer_computes_the_same(layers, x):
    stored, made = layers
    moved = {spec.key for spec in made.format.tensors if spec.name in made.format.resident_tensors[1:]}
    assert dict(stored.named_parameters()).keys() - dict(made.named_parameters()).keys() == moved
    assert torch.equal(made(x), stored(x))
    assert torch.equal(made.dequantize(), stored.dequantize())
    assert torch.equal(made(made.quantize_activation(x)), stored(x))
    assert (made.out_features, made.in_features) == (N, K)
    made.half()
    assert made.weight.dtype == torch.uint8
    assert torch.equal(made.dequantize(torch.float32), stored.dequantize(torch.float32))


# ------------------------------------------------------------------------------------------------ copies and files


def test_copies_keep_the_layout_and_share_no_memory(pair):
    stored, made = pair
    for other in (made.clone(), copy.deepcopy(made), made.to(torch.float16), made.to("cpu", copy=True)):
        assert torch.equal(other.qdata, made.qdata)
        assert other.qdata.data_ptr() != made.qdata.data_ptr() or other.dtype == torch.float16
        assert torch.equal(other.dequantize(torch.float32), stored.dequantize(torch.float32))
    parameter = torch.nn.Parameter(made, requires_grad=False)
    assert torch.equal(parameter.dequantize(), stored.dequantize())


def test_what_is_saved_is_what_was_stored(pair):
    stored, made = pair
    assert_same(pickle.loads(pickle.dumps(made)).inner(), stored.inner())
    assert_same(through_file({"w": made})["w"].inner(), stored.inner())
    assert_same(made.state_dict("a.weight"), stored.state_dict("a.weight"))
    module = torch.nn.Linear(K, N, bias=False, device="meta")
    module.weight = torch.nn.Parameter(made, requires_grad=False)
    assert_same(through_file(module.state_dict())["weight"].inner(), stored.inner())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_layer_is_saved_and_copied_as_stored(layers, copied):
    stored, made = layers
    assert_same(made.state_dict(), stored.state_dict())
    assert_same(torch.nn.Sequential(made, stored).state_dict(), torch.nn.Sequential(stored, stored).state_dict())
    again = copied(made)
    assert_same(again.state_dict(), stored.state_dict())
    assert list(dict(again.named_parameters())) == list(dict(stored.named_parameters()))
    assert is_stored(again)
    assert not is_stored(made), "saving leaves the layer as it is"


@pytest.mark.parametrize("seed", [0, 3])
def test_a_merge_keeps_the_layout_and_gives_the_same_codes(pair, seed):
    stored, made = pair
    dense = (stored.dequantize().float() + 0.01 * torch.randn(N, K)).to(stored.dtype)
    merged = made.requantize(dense, seed=seed)
    assert not is_stored(merged)
    assert_same(pickle.loads(pickle.dumps(merged)).inner(), stored.requantize(dense, seed=seed).inner())


def test_a_layer_merges_in_its_layout(layers):
    stored, made = layers
    dense = torch.randn(N, K)
    made.requantize_(dense), stored.requantize_(dense)
    assert not is_stored(made)
    assert torch.equal(made.dequantize(), stored.dequantize())


def test_stored_again_a_layer_keeps_the_order_of_its_keys(layers):
    stored, made = layers
    made.load_state_dict(stored.state_dict())
    assert is_stored(made)
    assert_same(made.state_dict(), stored.state_dict())
    assert list(dict(made.named_parameters())) == list(dict(stored.named_parameters()))


# --------------------------------------------------------------------------------- other tensors come into a weight


@pytest.mark.parametrize("options", [{}, {"assign": True}, {"swap": True}], ids=str)
def test_a_layer_that_loads_a_state_dict_holds_what_is_stored(name, layers, x, options):
    other = layer_of(quantized(name, seed=1))
    torch.__future__.set_swap_module_params_on_conversion(options.pop("swap", False))
    try:
        layers[1].load_state_dict(other.state_dict(), **options)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert is_stored(layers[1])
    assert torch.equal(layers[1](x), other(x))


def test_parameters_that_are_saved_by_other_ways_are_refused_not_misread(layers, x):
    """A state dict has what is stored; who saves ``named_parameters`` instead has the layout, and no loader takes it."""
    given = dict(layers[1].named_parameters())
    for layer in layers:
        want = layer(x)
        with pytest.raises(FormatError, match=r"weight is torch.uint8 in the state dict, .* here holds torch.int8"):
            layer.load_state_dict(given, strict=False)
        assert torch.equal(layer(x), want)


def test_a_laid_out_layer_without_values_loads_a_state_dict(name, layers, x):
    other, empty = layer_of(quantized(name, seed=1)), layers[1].to("meta")
    empty.load_state_dict(other.state_dict(), assign=True)
    assert is_stored(empty)
    assert torch.equal(empty(x), other(x))


def test_functional_call_takes_tensors_of_either_layout(name, layers, x):
    other, made = layer_of(quantized(name, seed=1)), laid(layer_of(quantized(name, seed=1)))
    want, own = other(x), layers[0](x)
    for layer in layers:
        assert torch.equal(functional_call(layer, dict(other.named_parameters()), (x,)), want)
        assert torch.equal(functional_call(layer, other.state_dict(), (x,)), want)
        assert torch.equal(functional_call(layer, dict(made.named_parameters()), (x,)), want)
        assert torch.equal(layer(x), own)


def test_functional_call_of_a_module_with_a_weight_as_parameter(name, pair, x):
    other = quantized(name, seed=1)
    for weight in pair:
        module = torch.nn.Linear(K, N, bias=False, device="meta")
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        for given in (other, laid(other.clone())):
            assert torch.equal(functional_call(module, {"weight": given}, (x,)), F.linear(x, other))
        assert torch.equal(module(x), F.linear(x, pair[0]))


@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)])
@pytest.mark.parametrize("into_laid", [False, True])
def test_data_of_a_weight_takes_either_layout(name, x, seeds, into_laid):
    weight, other = (quantized(name, seed=seed) for seed in seeds)
    want = F.linear(x, other)
    (laid(weight) if into_laid else laid(other)).requires_grad_(False)
    weight.data = other
    assert is_stored(weight) == is_stored(other)
    assert torch.equal(F.linear(x, weight), want)
    assert torch.equal(weight.linear(x), want)
    assert_same(weight.state_dict(), other.state_dict())
    assert all(getattr(weight, key) is tensor for key, tensor in weight.inner().items())
    assert {spec.name for spec in weight.format.tensors if hasattr(weight, spec.name)} == weight.inner().keys()


def put_data(parameter, tensor):
    parameter.data = tensor.detach().clone()


def put_by_swapping(parameter, tensor):
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(tensor.detach().clone(), requires_grad=False))


@pytest.mark.parametrize("put", [put_data, put_by_swapping])
def test_stored_parameters_put_into_a_laid_out_layer_one_by_one(name, layers, x, put):
    """Codes alone say what they are: they are multiplied as stored ones, or, without their scales, refused by name."""
    other = layer_of(quantized(name, seed=1))
    made = layers[1]
    for key, tensor in dict(made.named_parameters()).items():
        put(tensor, getattr(other, key))
    assert is_stored(made)
    missing = made.format.resident_tensors[1:]
    if missing:
        for call in (made, lambda x: made.dequantize(), lambda x: made(made.quantize_activation(x))):
            with pytest.raises(FormatError, match="no s_rel with them: give weight and weight_s_rel together"):
                call(x)
        made.weight_s_rel = other.weight_s_rel
    assert torch.equal(made(x), other(x))
    assert_same(made.state_dict(), other.state_dict())


@pytest.mark.parametrize("put", [put_data, put_by_swapping])
def test_a_laid_out_parameter_put_into_a_stored_layer(name, layers, x, put):
    other = layer_of(quantized(name, seed=1))
    want, made, layer = other(x), laid(layer_of(quantized(name, seed=1))), layers[0]
    for key, tensor in made.named_parameters():
        put(getattr(layer, key), tensor)
    assert not is_stored(layer)
    assert torch.equal(layer(x), want)
    assert_same(layer.state_dict(), other.state_dict())


def test_codes_are_not_copied_into_a_parameter_of_the_other_layout(name, layers):
    stored, made = layers
    for target, source in ((made.weight, stored.weight), (stored.weight, made.weight)):
        before = target.clone()
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"size|shape"):
            target.copy_(source)
        assert torch.equal(target, before)


def test_tensors_in_the_layout_are_not_laid_out_again(pair):
    stored, made = pair
    before = {key: tensor.clone() for key, tensor in made.inner().items()}
    for storage in (None, made.qdata.view(-1)):
        with pytest.raises(FormatError, match=r"are in the resident layout, .*; give what is stored: format.stored"):
            made.format.lay_resident(made.inner(), made.config, storage)
    assert_same(made.inner(), before)
    assert_same(made.format.stored(made.inner(), made.config), stored.inner())


@torch.no_grad()
def test_tensors_of_an_own_state_dict_are_not_copied_into_a_weight(pair):
    """They are codes alone, and no dense weight to requantize; what the message names takes them, in either layout."""
    for weight in pair:
        state, before = weight.state_dict(), weight.dequantize()
        with pytest.raises(
            UnsupportedError, match=r"got torch.int8 \[80, .*\]; of all stored tensors, as a state dict"
        ):
            weight.copy_(state["weight"])
        assert torch.equal(weight.dequantize(), before)
        given = QuantizedTensor(weight.format.from_state_dict(state, ""), weight.format, weight.config, weight.dtype)
        assert torch.equal(weight.copy_(given).dequantize(), before)
        with pytest.raises(UnsupportedError, match=r"got a dense \[80, 512\] tensor; use weight.requantize"):
            weight.copy_(before)


def test_a_copy_between_a_stored_and_a_laid_out_weight_leaves_a_stored_one(pair):
    stored, made = pair
    other = stored.requantize(torch.randn(N, K, dtype=stored.dtype))
    assert_same(made.clone().copy_(other).inner(), other.inner())
    assert_same(other.clone().copy_(made).inner(), stored.inner())
    again = laid(other).copy_(made)
    assert not is_stored(again)
    assert torch.equal(again.qdata, made.qdata)


def test_swapped_weights_take_their_layouts_with_them(name, x):
    one, two = laid(quantized(name)), quantized(name, seed=1)
    expected = F.linear(x, two), F.linear(x, one)
    torch.utils.swap_tensors(one, two)
    assert is_stored(one)
    assert not is_stored(two)
    assert torch.equal(F.linear(x, one), expected[0])
    assert torch.equal(F.linear(x, two), expected[1])


def test_shared_memory_keeps_the_layout(name, pair, layers, x):
    made, layer = pair[1], layers[1]
    assert made.share_memory_() is made
    assert all(tensor.is_shared() for tensor in made.inner().values())
    assert torch.equal(F.linear(x, made), F.linear(x, pair[0]))
    layer.share_memory()
    assert all(tensor.is_shared() for tensor in layer.parameters())
    assert not is_stored(layer)
    assert torch.equal(layer(x), layers[0](x))


def test_resident_tensors_are_no_stored_ones(pair):
    _, made = pair
    for make in (QuantizedTensor, QuantizedLinear):
        with pytest.raises(
            FormatError, match="in the resident layout, which lives in memory only; give what is stored"
        ):
            make(made.inner(), made.format, made.config, made.dtype)
