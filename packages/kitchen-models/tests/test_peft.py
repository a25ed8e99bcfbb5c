"""PEFT on quantized layers. Needs peft, which is no dependency of ours: a throw-away environment."""

from __future__ import annotations

import copy

import pytest
import torch

import kitchen_models as km
from kitchen_core import QuantizedLinear, installed_formats
from kitchen_core.errors import UnsupportedError
from kitchen_core.testing import relative_error

peft = pytest.importorskip("peft", reason="peft is not installed here")
FORMATS = sorted(installed_formats())
ids = torch.arange(7)[None]


@pytest.fixture(scope="module", autouse=True)
def adapter():
    from kitchen_models.integrations import peft as adapter

    adapter.register()
    adapter.register()
    return adapter


def with_lora(model, name="default", rank=8, **options):
    """The model under PEFT, its adapter not zero."""
    config = peft.LoraConfig(r=rank, target_modules=["q", "fc1", "fc2"], init_lora_weights=False, **options)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config)
        return model
    return peft.get_peft_model(model, config, name).eval()


def run(model):
    with torch.no_grad():
        return model(ids)


def layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def bits(model):
    return {f"{n}.{k}": p.data.clone() for n, m in layers(model).items() for k, p in m.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and torch.equal(a[k].contiguous().view(torch.uint8), b[k].contiguous().view(torch.uint8))
        for k in a
    )


def test_forward_is_the_layer_and_the_branch(quantized, adapter, assert_branch):
    plain = copy.deepcopy(quantized).blocks[0].mlp.fc1
    model = with_lora(quantized)
    layer = model.base_model.model.blocks[0].mlp.fc1
    assert type(layer) is adapter.LoraQuantizedLinear
    x = torch.randn(3, 128)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert_branch(layer(x), plain(x), x, down, up, layer.scaling["default"])
    y = run(model)
    with model.disable_adapter():
        assert not torch.equal(run(model), y)


def test_merge_then_unmerge_restores_every_bit(quantized):
    model = with_lora(quantized)
    before, y = bits(model), run(model)
    dense = {n: m.dequantize(torch.float32) for n, m in layers(model).items()}
    for _ in range(3):
        model.merge_adapter()
        assert not torch.equal(run(model), y)
        for name, layer in layers(model).items():
            outer = model.get_submodule(name.removesuffix(".base_layer"))
            wanted = dense[name].double() + outer.get_delta_weight("default").double()
            arrived = relative_error(layer.dequantize(torch.float32), wanted.detach())
            if layer.format.name == "svdquant_w4a4":
                assert arrived < 64 * torch.finfo(torch.float32).eps
            else:  # as far as the format takes any such weight
                fresh = layer.format.requantize(layer.inner(), layer.config, wanted.float().detach())
                assert arrived <= 1.05 * relative_error(layer.format.dequantize(fresh, layer.config), wanted.detach())
        model.unmerge_adapter()
        assert same(bits(model), before)
        assert torch.equal(run(model), y)


def test_two_adapters_merge_with_one_rounding(int8):
    model = with_lora(with_lora(int8, "one"), "two", rank=4)
    before = bits(model)
    dense = {n: m.dequantize(torch.float32) for n, m in layers(model).items()}
    model.merge_adapter(["one"])
    model.merge_adapter(["two"])
    for name, layer in layers(model).items():
        outer = model.get_submodule(name.removesuffix(".base_layer"))
        wanted = dense[name] + (outer.get_delta_weight("one") + outer.get_delta_weight("two"))
        fresh = layer.format.requantize(layer.inner(), layer.config, wanted.detach())
        assert torch.equal(layer.inner()["qdata"], fresh["qdata"])
    model.unmerge_adapter()
    assert same(bits(model), before)


def test_bias_of_an_adapter(int8):
    config = peft.LoraConfig(r=4, target_modules=["q", "fc2"], init_lora_weights=False, lora_bias=True)
    model = peft.get_peft_model(int8, config).eval()
    before, y = bits(model), run(model)
    model.merge_adapter()
    model.unmerge_adapter()
    assert same(bits(model), before)
    assert torch.equal(run(model), y)


def test_save_and_load_of_an_adapter(int8, tmp_path):
    fresh = copy.deepcopy(int8)
    model = with_lora(int8)
    y = run(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(run(peft.PeftModel.from_pretrained(fresh, tmp_path).eval()), y)


@pytest.mark.parametrize(
    "options",
    [{"lora_alpha": 32}, {"lora_alpha": 32, "use_rslora": True}, {"lora_alpha": 8, "alpha_pattern": {"fc1": 64}}],
)
def test_a_saved_adapter_attached_by_kitchen_has_the_same_strength(options, int8, tmp_path):
    """Its alphas are in adapter_config.json alone."""
    from kitchen_models import lora

    fresh = copy.deepcopy(int8)
    model = with_lora(int8, **options)
    model.save_pretrained(tmp_path)
    pairs = lora.read_lora(tmp_path)
    assert len(pairs) == 3
    for name, (down, up) in pairs.items():
        wanted = model.get_submodule(name).get_delta_weight("default")
        assert relative_error(up @ down, wanted.double()) < 16 * torch.finfo(torch.float32).eps
    assert len(lora.attach(fresh, tmp_path)) == 3


def test_a_lora_of_kitchen_below_is_not_merged_twice(quantized):
    from kitchen_models import lora

    lora.attach(
        quantized,
        {"blocks.0.mlp.fc1.lora_A.weight": torch.ones(4, 128), "blocks.0.mlp.fc1.lora_B.weight": torch.ones(256, 4)},
    )
    model = with_lora(quantized)
    before = bits(model)
    with pytest.raises(UnsupportedError, match=r"LoRA of kitchen_models\.lora is attached"):
        model.base_model.model.blocks[0].mlp.fc1.merge()
    assert same(bits(model), before)


def test_merge_and_unload_leaves_plain_quantized_layers(quantized, tmp_path):
    model = with_lora(quantized)
    merged = model.merge_and_unload()
    assert len(layers(merged)) == 3
    y = run(merged)
    km.save(merged, tmp_path / "m.safetensors")
    again = type(merged)().eval()
    km.load_into(again, tmp_path / "m.safetensors")
    assert torch.equal(run(again), y)


def test_training_the_adapter(int8):
    model = with_lora(int8).train()
    before = bits(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        loss = model(ids).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert same(bits(model), before)


def test_what_a_quantized_layer_cannot_do_is_said(int8):
    with pytest.raises(UnsupportedError, match="DoRA needs the norm of the float weight"):
        with_lora(int8, use_dora=True)
    model = with_lora(copy.deepcopy(int8))
    torch.nn.init.constant_(model.base_model.model.blocks[0].mlp.fc1.lora_B["default"].weight, float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter()
