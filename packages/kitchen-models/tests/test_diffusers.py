"""kitchen as a quantization method of diffusers. Needs diffusers, which is no dependency of ours: a throw-away environment."""

from __future__ import annotations

import copy

import pytest
import torch

import kitchen_core
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.testing import same_state
from kitchen_models import inspect_file, quantize_
from kitchen_models.integrations._layers import quantized_layers as layers_of

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed here")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def adapter():
    from kitchen_models.integrations import diffusers as adapter

    return adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Flux-like transformer with seeded weights, saved in bf16."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=64, num_attention_heads=4,
        joint_attention_dim=128, pooled_projection_dim=64, guidance_embeds=False, axes_dims_rope=(16, 24, 24),
    ).to(BF16)  # fmt: skip
    path = tmp_path_factory.mktemp("flux")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def inputs():
    g = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, 16, generator=g).to(BF16),
        "encoder_hidden_states": torch.randn(1, 8, 128, generator=g).to(BF16),
        "pooled_projections": torch.randn(1, 64, generator=g).to(BF16),
        "timestep": torch.tensor([0.5], dtype=BF16),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


def load(folder, **options):
    return diffusers.FluxTransformer2DModel.from_pretrained(folder, torch_dtype=BF16, **options).eval()


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


@pytest.mark.parametrize("format", ["int8", "w4a8", "awq", "svdquant"])
def test_quantize_while_loading_save_and_load_again(adapter, folder, inputs, tmp_path, format):
    model = load(folder, quantization_config=adapter.KitchenConfig(format))
    assert len(layers_of(model)) > 10
    by_hand = load(folder)
    report = quantize_(by_hand, format)
    assert {d.layer for d in report.quantized} == set(layers_of(model))
    assert same_state(model.state_dict(), by_hand.state_dict())  # the same bits as quantizing the loaded model
    y = run(model, inputs)
    assert torch.equal(y, run(by_hand, inputs))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert same_state(again.state_dict(), model.state_dict())
    assert torch.equal(run(again, inputs), y)
    dtypes = {tensor.dtype for layer in layers_of(again).values() for tensor in layer.inner().values()}
    assert (torch.float32 in dtypes) == (format in ("int8", "w4a8"))  # fp32 scales stay fp32


def test_sharded_folder_and_our_own_reader(adapter, folder, inputs, tmp_path):
    model = load(folder, quantization_config=adapter.KitchenConfig({"*attn*": "int8", "*ff*": "w4a8"}))
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = load(tmp_path)
    assert same_state(again.state_dict(), model.state_dict())
    report = inspect_file(next(tmp_path.glob("*.index.json")))
    assert {layer["name"] for layer in report["layers"] if layer["quantized"]} == set(layers_of(model))


def test_lora_compile_and_offload(adapter, folder, inputs, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    y = run(model, inputs)
    torch._dynamo.reset()
    layer = model.transformer_blocks[0].attn.to_q
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = inputs["hidden_states"].new_ones(2, layer.in_features)
    assert torch.equal(compiled(x), layer(x))
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
    assert torch.equal(run(model, inputs), y)
    fresh = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    fresh.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    assert not torch.equal(run(fresh, inputs), y)
    fresh.disable_adapters()
    assert torch.equal(run(fresh, inputs), y)


@pytest.mark.parametrize("format", ["int8", "w4a8", "awq", "svdquant"])
def test_a_whole_model_is_one_graph(adapter, folder, inputs, format):
    model = load(folder, quantization_config=adapter.KitchenConfig(format))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(compiled, inputs), run(model, inputs))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_deepcopy_and_dequantize(adapter, folder, inputs):
    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    y = run(model, inputs)
    assert torch.equal(run(copy.deepcopy(model), inputs), y)
    dense = {name: layer.dequantize() for name, layer in layers_of(model).items()}
    plain = model.dequantize()
    assert not layers_of(plain)
    assert all(torch.equal(plain.get_submodule(name).weight, weight) for name, weight in dense.items())


def test_rules_that_fit_nothing_and_unknown_formats(adapter, folder):
    with pytest.raises(UnsupportedError, match="no layer of the model"):
        load(folder, quantization_config=adapter.KitchenConfig({"nothing": "int8"}))
    with pytest.raises(kitchen_core.errors.KitchenError, match="int9"):
        adapter.KitchenConfig("int9")


def test_incomplete_folder_names_the_layer(adapter, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    model.save_pretrained(tmp_path)
    file = next(tmp_path.glob("*.safetensors"))
    state = load_file(file)
    del state["transformer_blocks.0.attn.to_q.weight_scale"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"transformer_blocks\.0\.attn\.to_q"):
        load(tmp_path)


@pytest.mark.parametrize("format", ["int8", "svdquant"])
def test_fuse_lora_and_unfuse_restore_every_bit(adapter, folder, inputs, format):
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    model = load(folder, quantization_config=adapter.KitchenConfig(format))
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    before, beside = copy.deepcopy(model.state_dict()), run(model, inputs)
    model.fuse_lora()
    fused = run(model, inputs)
    assert not torch.equal(fused, beside)
    truth = beside.double()
    model.unfuse_lora()
    assert torch.equal(run(model, inputs), beside)
    after = model.state_dict()
    assert all(torch.equal(after[key].view(torch.uint8), tensor.view(torch.uint8)) for key, tensor in before.items())
    model.disable_adapters()
    without = run(model, inputs).double()
    assert (fused.double() - truth).norm() < (without - truth).norm(), (
        "what was fused is the LoRA, up to the format's rounding"
    )


def test_a_pickle_is_refused(adapter, folder, tmp_path):
    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    with pytest.raises(UnsupportedError, match="safetensors alone"):
        model.save_pretrained(tmp_path, safe_serialization=False)
    assert not list(tmp_path.glob("*.bin"))


def test_a_dequantized_model_is_a_plain_one(adapter, folder, inputs, tmp_path):
    model = load(folder, quantization_config=adapter.KitchenConfig("int8")).dequantize()
    y = run(model, inputs)
    assert "quantization_config" not in model.config
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert not layers_of(again)
    assert "quantization_config" not in again.config
    assert torch.equal(run(again, inputs), y)
    assert inspect_file(next(tmp_path.glob("*.safetensors")))["totals"][0]["quantized"] is False
