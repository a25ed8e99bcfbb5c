"""The resident layout: its bytes; that a weight in it does what the stored one does, to the bit, and is saved as that."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import kitchen_core as kc
from kitchen_core import QuantizedLinear, QuantizedTensor
from kitchen_core.errors import UnsupportedError
from kitchen_w4a8 import optimize_for_decode, resident
from kitchen_w4a8.resident import Shape

FORMATS = ("asym_w4a8_int8", "w6a8_int8")
N, K = 80, 512
SHAPES = [
    Shape(64, 256, 4, 16), Shape(128, 512, 6, 16), Shape(80, 768, 4, 128), Shape(16, 256, 6, 256), Shape(208, 1024, 4, 64),
    Shape(144, 512, 6, 32),
]  # fmt: skip


def quantized(name: str, n: int = N, k: int = K, **options) -> QuantizedTensor:
    torch.manual_seed(n + k)
    return QuantizedTensor.quantize(torch.randn(n, k), name, convrot_groupsize=16, **options)


def in_storage(weight: QuantizedTensor) -> tuple[QuantizedTensor, torch.Tensor]:
    """The same weight, codes and scales as views of one buffer."""
    storage = torch.cat([weight.qdata.flatten().view(torch.uint8), weight.s_rel.flatten().view(torch.uint8)])
    codes = weight.qdata.nbytes
    qdata = storage[:codes].view(torch.int8).view(weight.qdata.shape)
    s_rel = storage[codes:].view(weight.s_rel.dtype).view(weight.s_rel.shape)
    tensors = {**weight.inner(), "qdata": qdata, "s_rel": s_rel}
    return QuantizedTensor(tensors, weight.format, weight.config, weight.dtype), storage


def layer_of(weight: QuantizedTensor) -> QuantizedLinear:
    return QuantizedLinear(weight.inner(), weight.format, weight.config, None, weight.dtype)


def with_raw_scales(weight: QuantizedTensor) -> QuantizedTensor:
    tensors = {**weight.inner(), "s_rel": weight.s_rel.view(torch.uint8)}
    return QuantizedTensor(tensors, weight.format, weight.config, weight.dtype)


def pair(name: str, **options) -> tuple[QuantizedTensor, QuantizedTensor]:
    """A weight, and the same in the resident layout."""
    stored = quantized(name, **options)
    made, reason = optimize_for_decode(stored.clone())
    assert reason is None
    return stored, made


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_stored_alike(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert a.config == b.config
    assert a.inner().keys() == b.inner().keys()
    assert all(same_bytes(tensor, b.inner()[name]) for name, tensor in a.inner().items())


# -------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strip_bytes", [1, 1 << 25])
def test_packing_in_place_and_unpacking_give_the_bytes_back(monkeypatch, shape, strip_bytes):
    monkeypatch.setattr(resident, "STRIP_BYTES", strip_bytes)
    given = torch.randint(0, 256, (shape.n * shape.row_bytes,), dtype=torch.uint8)
    buffer = given.clone()
    resident.pack(buffer, shape)
    assert not torch.equal(buffer, given)
    assert torch.equal(buffer.sort().values, given.sort().values)
    codes, scales = resident.unpack(buffer, shape)
    assert torch.equal(torch.cat((codes.flatten(), scales.flatten())), given)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_byte_lies_where_the_page_on_the_format_says(shape):
    codes = torch.randint(0, 256, (shape.n, shape.code_bytes), dtype=torch.uint8)
    scales = torch.randint(0, 256, (shape.n, shape.k // shape.group), dtype=torch.uint8)
    buffer = torch.cat((codes.flatten(), scales.flatten()))
    resident.pack(buffer, shape)
    records = buffer.tolist()
    tops, groups = (1024 if shape.bits == 6 else 0), 256 // shape.group
    record = 2048 + tops + 16 * groups
    assert shape.n * shape.row_bytes == shape.n // 16 * (shape.k // 256) * record
    for n in torch.randint(0, shape.n, (8,)).tolist():
        block, row = divmod(n, 16)
        i, g = divmod(row, 8)
        for step in range(shape.k // 256):
            at = (block * (shape.k // 256) + step) * record
            for h in range(2):
                for q in range(4):
                    first = 256 * step + 128 * h + 32 * q  # column
                    lane = 4 * g + q
                    for j in range(16):
                        assert records[at + 1024 * h + 512 * i + 16 * lane + j] == codes[n, first // 2 + j]
                    for j in range(8 if tops else 0):
                        found = records[at + 2048 + 512 * i + 16 * lane + 8 * h + j]
                        assert found == codes[n, shape.k // 2 + first // 4 + j]
                    for j in range(2 if shape.group == 16 else 0):
                        found = records[at + 2048 + tops + 8 * lane + 4 * i + 2 * h + j]
                        assert found == scales[n, first // 16 + j]
            for j in range(groups if shape.group > 16 else 0):
                assert records[at + 2048 + tops + groups * row + j] == scales[n, groups * step + j]


# ----------------------------------------------------------------------------------------------------- behaviour


@pytest.mark.parametrize("name", FORMATS)
def test_the_callers_buffer_is_re_laid_and_its_object_kept(name):
    weight, storage = in_storage(quantized(name))
    before, dense = storage.clone(), weight.dequantize()
    made, reason = optimize_for_decode(weight, storage)
    assert made is weight
    assert reason is None
    assert weight.inner().keys() == quantized(name).inner().keys() - {"s_rel"}
    assert not hasattr(weight, "s_rel")
    assert weight.qdata.data_ptr() == storage.data_ptr()
    assert weight.qdata.nbytes == storage.nbytes == before.nbytes
    assert not torch.equal(storage, before)
    assert torch.equal(weight.dequantize(), dense)
    assert weight.shape == (N, K)
    assert "Resident" in repr(weight)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("group_size", [16, 64])
@pytest.mark.parametrize("rows", [1, 5])
def test_linears_are_those_of_the_stored_weight(name, group_size, rows):
    stored, made = pair(name, group_size=group_size)
    x, bias, residual = torch.randn(rows, K), torch.randn(N), torch.randn(rows, N)
    assert torch.equal(F.linear(x, made, bias), F.linear(x, stored, bias))
    assert torch.equal(x @ made.t(), x @ stored.t())
    assert torch.equal(torch.addmm(residual, x, made.t(), beta=0.5), torch.addmm(residual, x, stored.t(), beta=0.5))
    act = {"input_act": "swiglu", "residual": residual, "residual_scale": torch.randn(N)}
    wide = torch.randn(rows, 2 * K)
    assert torch.equal(made.linear_input_act(wide, bias, **act), stored.linear_input_act(wide, bias, **act))
    shared = stored.quantize_activation(x)
    assert torch.equal(made.linear(shared, bias, residual), stored.linear(shared, bias, residual))
    assert torch.equal(made.linear(made.quantize_activation(x), bias), stored.linear(shared, bias))


def test_gradients_are_those_of_the_stored_weight():
    found = []
    for weight in pair("asym_w4a8_int8"):
        x = torch.randn(3, K, generator=torch.Generator().manual_seed(1)).requires_grad_()
        weight.linear(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", FORMATS)
def test_a_compiled_linear_has_no_graph_break(name):
    stored, made = pair(name)
    compiled = torch.compile(lambda x, w: F.linear(x, w), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, K)
    assert torch.equal(compiled(x, made), F.linear(x, stored))


# -------------------------------------------------------------------------------------------------- copies, files


@pytest.mark.parametrize("name", FORMATS)
def test_copies_keep_the_layout_and_share_no_memory(name):
    stored, made = pair(name)
    for other in (made.clone(), copy.deepcopy(made), made.to(torch.float16), made.to("cpu", copy=True)):
        assert other.config == made.config
        assert torch.equal(other.qdata, made.qdata)
        assert other.qdata.data_ptr() != made.qdata.data_ptr() or other.dtype == torch.float16
        assert torch.equal(other.dequantize(torch.float32), stored.dequantize())
    parameter = torch.nn.Parameter(made, requires_grad=False)
    assert torch.equal(parameter.dequantize(), stored.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_saved_is_what_was_stored(name):
    stored, made = pair(name)
    assert_stored_alike(pickle.loads(pickle.dumps(made)), stored)
    file = io.BytesIO()
    torch.save({"w": made}, file)
    file.seek(0)
    assert_stored_alike(torch.load(file, weights_only=True)["w"], stored)
    mine, theirs = made.state_dict("a.weight"), stored.state_dict("a.weight")
    assert mine.keys() == theirs.keys()
    assert all(same_bytes(mine[key], theirs[key]) for key in mine)
    assert made.format.marker(made.config) == stored.format.marker(stored.config)


def test_a_module_saves_its_weight_as_stored():
    stored, made = pair("asym_w4a8_int8")
    layer = torch.nn.Linear(K, N, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(made, requires_grad=False)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert_stored_alike(torch.load(file, weights_only=True)["weight"], stored)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", [0, 3])
def test_a_merge_keeps_the_layout_and_gives_the_same_codes(name, seed):
    stored, made = pair(name)
    dense = stored.dequantize() + 0.01 * torch.randn(N, K)
    merged = made.requantize(dense, seed=seed)
    assert merged.config == made.config
    assert_stored_alike(pickle.loads(pickle.dumps(merged)), stored.requantize(dense, seed=seed))


def test_a_copy_between_a_stored_and_a_resident_weight_leaves_a_stored_one():
    stored, made = pair("asym_w4a8_int8")
    other = stored.requantize(torch.randn(N, K))
    assert_stored_alike(made.clone().copy_(other), other)
    assert_stored_alike(other.copy_(made), stored)
    again = made.clone().copy_(made)
    assert again.config == made.config
    assert torch.equal(again.qdata, made.qdata)


# --------------------------------------------------------------------------------------------------------- layers


@pytest.fixture(params=FORMATS)
def layers(request) -> tuple[QuantizedLinear, QuantizedLinear]:
    """A layer, and the same in the resident layout."""
    stored = quantized(request.param)
    bias = torch.randn(N)
    made = [
        QuantizedLinear(stored.clone().inner(), stored.format, stored.config, bias, torch.float32) for _ in range(2)
    ]
    assert optimize_for_decode(made[1]) == (made[1], None)
    return made[0], made[1]


def test_a_layer_computes_the_same(layers):
    stored, made = layers
    x = torch.randn(3, K)
    assert "weight_s_rel" not in dict(made.named_parameters())
    assert made.weight.dim() == 1
    assert torch.equal(made(x), stored(x))
    assert torch.equal(made.dequantize(), stored.dequantize())
    assert torch.equal(made(made.quantize_activation(x)), stored(x))
    assert (made.out_features, made.in_features) == (N, K)
    made.half()
    assert made.weight.dtype == torch.int8
    assert torch.equal(made.dequantize(torch.float32), stored.dequantize())


def test_a_layer_is_saved_and_pickled_as_stored(layers):
    stored, made = layers
    mine, theirs = made.state_dict(), stored.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(same_bytes(mine[key], theirs[key]) for key in mine)
    again = pickle.loads(pickle.dumps(made))
    assert again.config == stored.config
    assert torch.equal(again.dequantize(), stored.dequantize())
    assert not dict(again.named_parameters()).keys() ^ dict(stored.named_parameters()).keys()
    assert made.format.is_resident(made.config), "saving leaves the layer as it is"


def test_a_layer_loads_a_state_dict_and_is_stored_then(layers):
    stored, made = layers
    other = quantized(stored.format.name, k=K)
    other = other.requantize(torch.randn(N, K))
    fresh = QuantizedLinear(other.inner(), stored.format, stored.config, torch.zeros(N), torch.float32)
    made.load_state_dict(fresh.state_dict())
    assert made.config == stored.config
    assert torch.equal(made.dequantize(), fresh.dequantize())


def test_a_layer_merges_in_its_layout(layers):
    stored, made = layers
    dense = torch.randn(N, K)
    made.requantize_(dense), stored.requantize_(dense)
    assert made.format.is_resident(made.config)
    assert torch.equal(made.dequantize(), stored.dequantize())


# --------------------------------------------------------------------------------------------- refused, unchanged


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: quantized("asym_w4a8_int8", n=72), "N a multiple of 16"),
        (lambda: quantized("w6a8_int8", k=320), "K of 256"),
        (lambda: quantized("asym_w4a8_int8", group_size=8), "takes groups of 16, 32"),
        (lambda: quantized("asym_w4a8_int8", group_size=512), "the weight has 512"),
        (lambda: quantized("asym_w4a8_int8", scale_dtype="float32"), "takes e4m3 scales"),
        (lambda: with_raw_scales(quantized("w6a8_int8")), "s_rel is uint8"),
        (lambda: quantized("asym_w4a8_int8", levels="asymmetric"), "takes a correction"),
        (lambda: quantized("asym_w4a8_int8").t(), "transposed view"),
        (lambda: quantized("asym_w4a8_int8").to("meta"), "meta device"),
        (lambda: pair("w6a8_int8")[1], "already"),
    ],
)
def test_a_weight_that_does_not_fit_comes_back_unchanged_with_the_reason(make, words):
    weight = make()
    config, tensors = weight.config, dict(weight.inner())
    made, reason = optimize_for_decode(weight)
    assert made is weight
    assert words in reason
    assert weight.config == config
    assert all(weight.inner()[name] is tensor for name, tensor in tensors.items())


def test_other_formats_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="QuantizedLinear of asym_w4a8_int8 or w6a8_int8, got Tensor"):
        optimize_for_decode(torch.zeros(16, 256))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s[:-1], r"contiguous uint8 \[23040\]"),
        (lambda s: s.view(torch.int8), "got torch.int8"),
        (lambda s: s.clone(), "must hold the weight"),
        (lambda s: s.to("meta"), "device cpu, got meta"),
    ],
)
def test_a_storage_that_does_not_hold_the_weight_is_refused(change, words):
    weight, storage = in_storage(quantized("asym_w4a8_int8"))
    dense = weight.dequantize()
    with pytest.raises(UnsupportedError, match=words):
        optimize_for_decode(weight, change(storage))
    assert torch.equal(weight.dequantize(), dense)


def test_uniform_levels_have_no_table():
    stored, made = pair("asym_w4a8_int8", levels="uniform")
    x = torch.randn(2, K)
    assert kc.QuantizedTensor.linear(made, x).equal(stored.linear(x))


@pytest.mark.parametrize("as_layer", [False, True])
def test_inference_tensors_are_re_laid_in_place_outside_that_mode(as_layer):
    with torch.inference_mode():
        weight, storage = in_storage(quantized("w6a8_int8"))
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
    weight, storage = in_storage(quantized("w6a8_int8"))
    before, config, inner, calls, move = storage.clone(), weight.config, dict(weight.inner()), [], resident._records

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return move(*args)

    monkeypatch.setattr(resident, "STRIP_BYTES", 1)
    monkeypatch.setattr(resident, "_records", failing)
    with pytest.raises(error):
        optimize_for_decode(weight, storage)
    assert torch.equal(storage, before)
    assert weight.config == config
    assert all(weight.inner()[name] is tensor for name, tensor in inner.items())


def test_a_divided_weight_says_so_and_stays():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        layer = layer_of(quantized("w6a8_int8"))
        whole = torch.distributed.tensor.distribute_tensor(layer.weight.data, mesh)
        layer.weight = torch.nn.Parameter(whole, requires_grad=False)
        config, held = layer.config, layer.weight
        assert "divided over devices" in optimize_for_decode(layer).reason
        assert layer.config == config
        assert layer.weight is held
    finally:
        torch.distributed.destroy_process_group()


def test_derivatives_of_torch_func_are_those_of_the_stored_weight():
    x, tangent = torch.randn(2, K), torch.randn(2, K)
    found = []
    for weight in pair("asym_w4a8_int8"):

        def f(x, w=weight):
            return w.linear(x).square().sum()

        def jvp(t, f=f):
            return torch.func.jvp(f, (x,), (t,))[1]

        found.append((torch.func.jacfwd(f)(x), torch.func.vmap(jvp)(tangent.expand(3, -1, -1)), torch.func.grad(f)(x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_compiled_gradient_is_that_of_the_stored_weight():
    found = []
    for weight in pair("asym_w4a8_int8"):
        x = torch.ones(3, K).requires_grad_()
        torch.compile(lambda x, w=weight: w.linear(x), fullgraph=True, backend="aot_eager")(x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_layer_with_a_lora_and_a_storage_that_is_no_tensor_are_refused_by_name():
    weight, _ = in_storage(quantized("w6a8_int8"))
    with pytest.raises(UnsupportedError, match=r"uint8 tensor, the bytes of qdata.*, got bytearray"):
        optimize_for_decode(weight, bytearray(8))
    layer = layer_of(quantized("w6a8_int8"))
    layer.__dict__["_kitchen_loras"] = object()  # as kitchen_models.lora does
    with pytest.raises(UnsupportedError, match="has a LoRA attached: optimize before attaching, or merge it"):
        optimize_for_decode(layer)
