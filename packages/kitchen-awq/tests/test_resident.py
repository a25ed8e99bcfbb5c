"""The resident order: its nibbles; that a weight in it does what the stored one does, to the bit, and is saved as that."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

from kitchen_awq import optimize_for_decode, resident
from kitchen_core import QuantizedLinear, QuantizedTensor
from kitchen_core.errors import UnsupportedError
from kitchen_core.packing import unpack_nibbles

N, K = 72, 512


def quantized(n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16, **options) -> QuantizedTensor:
    torch.manual_seed(n + k)
    return QuantizedTensor.quantize(torch.randn(n, k, dtype=dtype), "awq_w4a16", **options)


def in_storage(weight: QuantizedTensor) -> tuple[QuantizedTensor, torch.Tensor]:
    """The weight, and the memory of its codes."""
    return weight, weight.qdata.view(torch.uint8).flatten()


def layer_of(weight: QuantizedTensor) -> QuantizedLinear:
    return QuantizedLinear(weight.inner(), weight.format, weight.config, None, weight.dtype)


def pair(**options) -> tuple[QuantizedTensor, QuantizedTensor]:
    """A weight, and the same in the resident order."""
    stored = quantized(**options)
    made, reason = optimize_for_decode(stored.clone())
    assert reason is None
    return stored, made


def assert_stored_alike(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert a.config == b.config
    assert a.inner().keys() == b.inner().keys()
    assert all(torch.equal(tensor, b.inner()[name]) for name, tensor in a.inner().items())


@pytest.mark.parametrize("strip_bytes", [1, 1000, 1 << 24])
@pytest.mark.parametrize(("n", "k"), [(1, 256), (9, 512), (40, 1280)])
def test_packing_in_place_and_unpacking_give_the_codes_back(monkeypatch, strip_bytes, n, k):
    monkeypatch.setattr(resident, "STRIP_BYTES", strip_bytes)
    given = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
    codes = given.clone()
    resident.pack_(codes)
    assert not torch.equal(codes, given)
    assert torch.equal(resident.unpack(codes), given)


def test_every_nibble_lies_where_the_module_says():
    given = torch.randint(-128, 128, (3, 384), dtype=torch.int8)
    codes = given.clone()
    resident.pack_(codes)
    columns, nibbles = unpack_nibbles(given), unpack_nibbles(codes)
    for step in range(3):
        for t in range(4):
            for j in range(8):
                at = 256 * step + 64 * t + 8 * j
                first = 256 * step + 32 * j + 2 * t
                wanted = [first, first + 8, first + 16, first + 24, first + 1, first + 9, first + 17, first + 25]
                assert torch.equal(nibbles[:, at : at + 8], columns[:, wanted])


def test_the_callers_buffer_is_ordered_and_its_object_kept():
    weight, storage = in_storage(quantized())
    dense = weight.dequantize()
    before = storage.clone()
    made, reason = optimize_for_decode(weight, storage)
    assert made is weight
    assert reason is None
    assert weight.qdata.data_ptr() == storage.data_ptr()
    assert not torch.equal(storage, before)
    assert torch.equal(weight.dequantize(), dense)
    assert "Resident" in repr(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [64, 128, 256, -1])
def test_linears_are_those_of_the_stored_weight(group_size, dtype):
    stored, made = pair(group_size=group_size, dtype=dtype)
    x, bias, residual = torch.randn(5, K).to(dtype), torch.randn(N).to(dtype), torch.randn(5, N).to(dtype)
    assert torch.equal(F.linear(x, made, bias), F.linear(x, stored, bias))
    assert torch.equal(x @ made.t(), x @ stored.t())
    act = {"input_act": "swiglu", "residual": residual, "residual_scale": torch.randn(N)}
    wide = torch.randn(5, 2 * K).to(dtype)
    assert torch.equal(made.linear_input_act(wide, bias, **act), stored.linear_input_act(wide, bias, **act))
    shared = stored.quantize_activation(x)
    assert torch.equal(made.linear(shared, bias, residual), stored.linear(shared, bias, residual))


def test_gradients_and_compiled_calls_are_those_of_the_stored_weight():
    found, compiled = [], []
    for weight in pair():
        x = torch.randn(3, K, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        compiled.append(torch.compile(lambda x, w=weight: w.linear(x) + 1, fullgraph=True, backend="aot_eager")(x))
        x.requires_grad_()
        weight.linear(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    assert torch.equal(*compiled)


def test_nothing_of_it_is_saved():
    stored, made = pair()
    assert_stored_alike(pickle.loads(pickle.dumps(made)), stored)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert_stored_alike(torch.load(file, weights_only=True), stored)
    saved = made.state_dict("layer.weight")
    assert all(torch.equal(tensor, saved[key]) for key, tensor in stored.state_dict("layer.weight").items())
    for copied in (made.clone(), made.detach(), copy.deepcopy(made), made.to(torch.float32)):
        assert copied.config == made.config
        assert torch.equal(copied.dequantize(torch.float32), stored.dequantize(torch.float32))


def test_a_layer_is_saved_and_loaded_as_stored():
    layer = QuantizedLinear.from_linear(torch.nn.Linear(K, N, dtype=torch.bfloat16), "awq_w4a16")
    stored, x = layer.inner()["qdata"].clone(), torch.randn(3, K, dtype=torch.bfloat16)
    want = layer(x)
    assert optimize_for_decode(layer).reason is None
    assert not torch.equal(layer.inner()["qdata"], stored)
    assert torch.equal(layer(x), want)
    assert torch.equal(layer.state_dict()["weight"], stored)
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer.inner()["qdata"], stored)
    assert torch.equal(layer(x), want)


def test_requantizing_keeps_the_order():
    stored, made = pair()
    other = torch.randn(N, K)
    again = made.requantize(other)
    assert again.config == made.config
    assert torch.equal(again.dequantize(), stored.requantize(other).dequantize())


def test_what_cannot_be_ordered_says_why_and_stays():
    cases = (
        (quantized(n=12), "N a multiple of 8"),
        (quantized(k=320), "of 256"),
        (quantized(group_size=32), "groups of 64, 128"),
        (quantized(dtype=torch.float32), "of x's type"),
        (quantized().t(), "transposed"),
        (quantized().to("meta"), "meta device"),
        (pair()[1], "already"),
    )
    for weight, reason in cases:
        before = dict(weight.inner())
        made, said = optimize_for_decode(weight)
        assert made is weight
        assert reason in said
        assert all(weight.inner()[name] is tensor for name, tensor in before.items())


def test_wrong_arguments_are_named():
    weight = quantized()
    with pytest.raises(UnsupportedError, match="takes a QuantizedTensor"):
        optimize_for_decode(torch.zeros(8, 256))
    codes = weight.qdata.view(torch.uint8).flatten()
    with pytest.raises(UnsupportedError, match="the bytes of qdata"):
        optimize_for_decode(weight, codes[1:])
    with pytest.raises(UnsupportedError, match="must be the memory of qdata"):
        optimize_for_decode(weight, codes.clone())


@pytest.mark.parametrize("as_layer", [False, True])
def test_inference_tensors_are_re_laid_in_place_outside_that_mode(as_layer):
    with torch.inference_mode():
        weight, storage = in_storage(quantized())
        dense = weight.dequantize()
    if as_layer:
        weight = layer_of(weight)
    before = storage.clone()
    assert optimize_for_decode(weight, storage).reason is None
    assert storage.is_inference()
    assert not torch.equal(storage, before)
    assert torch.equal(weight.dequantize(), dense)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_fails_midway_leaves_the_weight_as_it_was(monkeypatch, error):
    weight, storage = in_storage(quantized())
    before, config, inner, calls, move = storage.clone(), weight.config, dict(weight.inner()), [], resident._ordered

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return move(*args)

    monkeypatch.setattr(resident, "STRIP_BYTES", 1)
    monkeypatch.setattr(resident, "_ordered", failing)
    with pytest.raises(error):
        optimize_for_decode(weight, storage)
    assert torch.equal(storage, before)
    assert weight.config == config
    assert all(weight.inner()[name] is tensor for name, tensor in inner.items())


def test_a_divided_weight_says_so_and_stays():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        layer = layer_of(quantized())
        whole = torch.distributed.tensor.distribute_tensor(layer.weight.data, mesh)
        layer.weight = torch.nn.Parameter(whole, requires_grad=False)
        config, held = layer.config, layer.weight
        assert "divided over devices" in optimize_for_decode(layer).reason
        assert layer.config == config
        assert layer.weight is held
    finally:
        torch.distributed.destroy_process_group()


def test_derivatives_of_torch_func_are_those_of_the_stored_weight():
    x, tangent = torch.randn(2, K).to(torch.bfloat16), torch.randn(2, K).to(torch.bfloat16)
    found = []
    for weight in pair():

        def f(x, w=weight):
            return w.linear(x).square().sum()

        def jvp(t, f=f):
            return torch.func.jvp(f, (x,), (t,))[1]

        found.append((torch.func.jacfwd(f)(x), torch.func.vmap(jvp)(tangent.expand(3, -1, -1)), torch.func.grad(f)(x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_compiled_gradient_is_that_of_the_stored_weight():
    found = []
    for weight in pair():
        x = torch.ones(3, K, dtype=torch.bfloat16).requires_grad_()
        torch.compile(lambda x, w=weight: w.linear(x), fullgraph=True, backend="aot_eager")(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_layer_with_a_lora_and_a_storage_that_is_no_tensor_are_refused_by_name():
    weight, _ = in_storage(quantized())
    with pytest.raises(UnsupportedError, match=r"uint8 tensor, the bytes of qdata.*, got bytearray"):
        optimize_for_decode(weight, bytearray(8))
    layer = layer_of(quantized())
    layer.__dict__["_kitchen_loras"] = object()  # as kitchen_models.lora does
    with pytest.raises(UnsupportedError, match="has a LoRA attached: optimize before attaching, or merge it"):
        optimize_for_decode(layer)
