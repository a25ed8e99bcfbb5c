"""Layers whose weight ``optimize_for_decode`` has laid out anew, in all that this package does with layers."""

import copy
import io
import types

import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import kitchen_awq
import kitchen_w4a8
from kitchen_core import QuantizedLinear, QuantizedTensor
from kitchen_core.errors import UnsupportedError
from kitchen_models import lora, parallel, save

OPTIMIZE = {
    "awq_w4a16": kitchen_awq.optimize_for_decode,
    "asym_w4a8_int8": kitchen_w4a8.optimize_for_decode,
    "w6a8_int8": kitchen_w4a8.optimize_for_decode,
}
K, N = 512, 64


def layer(format, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return QuantizedLinear.from_linear(torch.nn.Linear(K, N, dtype=dtype), format)


@pytest.fixture(params=OPTIMIZE)
def format(request):
    return request.param


@pytest.fixture
def laid_out(format):
    made = layer(format)
    _, reason = OPTIMIZE[format](made)
    assert reason is None
    assert made.format.is_resident(made.inner())
    return made


@pytest.fixture
def x():
    return torch.randn(3, K, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        torch.distributed.destroy_process_group()
    else:
        yield init_device_mesh("cpu", (1,))


def some_lora():
    generator = torch.Generator().manual_seed(2)
    return {
        "a.lora_A.weight": torch.randn(4, K, generator=generator) / 16,
        "a.lora_B.weight": torch.randn(N, 4, generator=generator) / 16,
    }


def unpickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled], ids=["deepcopy", "torch.save"])
def test_a_copy_with_a_lora_gives_the_layer_back(format, laid_out, x, copied):
    model = torch.nn.Sequential()
    model.a = laid_out
    expected = layer(format)(x)
    lora.attach(model, some_lora())
    assert not torch.equal(model.a(x), expected)
    other = copied(model)
    for one in (other, model):
        lora.remove(one)
        assert torch.equal(one.a(x), expected)


@torch.no_grad()
def test_a_layer_with_a_lora_loads_what_it_saved(format, laid_out, x):
    model = torch.nn.Sequential()
    model.a = laid_out
    expected = layer(format)(x)
    lora.attach(model, some_lora())
    branched = model.a(x)
    model.load_state_dict(model.state_dict())
    assert torch.equal(model.a(x), branched)
    lora.remove(model)
    assert torch.equal(model.a(x), expected)


def test_a_copy_holds_parameters(format, laid_out):
    other = copy.deepcopy(laid_out)
    assert all(isinstance(p, torch.nn.Parameter) for p in other._parameters.values() if p is not None)
    other.load_state_dict(layer(format).state_dict(), assign=True)
    assert other.to("meta").weight.is_meta


@torch.no_grad()
@pytest.mark.parametrize("what", [parallel.OUTPUTS, parallel.INPUTS])
def test_dividing_holds_what_is_stored(format, laid_out, x, mesh, what):
    style = ColwiseParallel() if what == parallel.OUTPUTS else RowwiseParallel()
    expected = layer(format)(x)
    divided = parallel.divide(laid_out, mesh, what, style)
    assert not divided.format.is_resident(divided.inner())
    torch.testing.assert_close(divided(x), expected, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("format", [*OPTIMIZE, "int8_tensorwise", "svdquant_w4a4"])
def test_a_divided_layer_loads_what_it_saved(format, x, mesh):
    divided = parallel.divide(layer(format), mesh, parallel.OUTPUTS, ColwiseParallel())
    expected = divided(x)
    divided.load_state_dict(divided.state_dict())
    assert torch.equal(divided(x), expected)


@pytest.mark.parametrize("what", [parallel.OUTPUTS, parallel.INPUTS])
def test_a_refused_split_leaves_the_layout(laid_out, what):
    before = dict(laid_out.named_parameters())
    with pytest.raises(UnsupportedError, match="over 3 ranks"):
        parallel.check_split(laid_out, what, 3)
    assert parallel.check_split(laid_out, what, 2)["qdata"] == (0 if what == parallel.OUTPUTS else 1)
    assert laid_out.format.is_resident(laid_out.inner())
    assert all(laid_out.get_parameter(key) is parameter for key, parameter in before.items())


def test_a_refused_plan_leaves_the_layouts_of_all_layers(format, laid_out):
    """The first layer of the plan could be divided, the second cannot."""
    fits = QuantizedLinear.from_linear(torch.nn.Linear(K, 96, dtype=torch.bfloat16), format)
    assert OPTIMIZE[format](fits).reason is None
    model = torch.nn.ModuleDict({"fits": fits, "wide": laid_out})
    before = dict(model.named_parameters())
    three_ranks = types.SimpleNamespace(ndim=1, size=lambda: 3)
    plan = {"fits": parallel.ColwiseParallel(), "wide": parallel.ColwiseParallel()}
    with pytest.raises(UnsupportedError, match=r"layer 'wide': .* its 64 outputs do not divide evenly"):
        parallel.parallelize(model, three_ranks, plan)
    for layer in model.values():
        assert type(layer) is QuantizedLinear
        assert layer.format.is_resident(layer.inner())
    assert all(model.get_parameter(key) is parameter for key, parameter in before.items())


def test_a_divided_layer_is_not_laid_out(format, mesh):
    divided = parallel.divide(layer(format), mesh, parallel.OUTPUTS, ColwiseParallel())
    with pytest.raises(UnsupportedError, match="before it is divided"):
        divided.relay_(divided.inner())


@torch.no_grad()
def test_copying_between_layouts(format, x):
    generator = torch.Generator().manual_seed(3)
    one, two = (QuantizedTensor.quantize(torch.randn(N, K, generator=generator).bfloat16(), format) for _ in range(2))
    expected = [torch.nn.functional.linear(x, w) for w in (one, two)]
    OPTIMIZE[format](one)
    held = QuantizedTensor.quantize(torch.randn(N, K, generator=generator).bfloat16(), format)
    held.copy_(one)  # from a laid out weight
    assert torch.equal(torch.nn.functional.linear(x, held), expected[0])
    one.copy_(two)  # into one
    assert torch.equal(torch.nn.functional.linear(x, one), expected[1])


def test_files_are_those_of_the_stored_layout(format, laid_out, tmp_path):
    def saved(name, made):
        save({"a": made}, tmp_path / name)
        with safe_open(tmp_path / name, "pt") as file:
            return file.metadata(), {key: file.get_tensor(key).view(torch.uint8) for key in file.keys()}  # noqa: SIM118

    mine, stored = saved("laid_out.safetensors", laid_out), saved("stored.safetensors", layer(format))
    assert "kitchen_recipe" in mine[0]
    assert mine[0] == stored[0]
    assert mine[1].keys() == stored[1].keys()
    assert all(torch.equal(mine[1][key], tensor) for key, tensor in stored[1].items())
