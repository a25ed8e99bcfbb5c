"""kitchen as a quantization method of transformers, on tiny models with seeded weights."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import kitchen_core
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.testing import same_state
from kitchen_models import inspect_file, quantize_, quantize_file
from kitchen_models.integrations._layers import quantized_layers as layers_of
from kitchen_models.offload import BlockOffload

transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed here")
BF16 = torch.bfloat16
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
LAYERS = 14  # of each model: two blocks of q, k, v, o, gate, up, down


@pytest.fixture(scope="module")
def adapter():
    from kitchen_models.integrations import transformers as adapter

    return adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Qwen3 with tied embeddings, and Llama with biases and a head of its own, in bf16."""
    made = {}
    for name, config in {
        "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
        "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    }.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(BF16)
        for key, tensor in model.named_parameters():
            if key.endswith("bias"):
                torch.nn.init.normal_(tensor)  # transformers makes zeros, which would hide a lost bias
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


@pytest.fixture(params=["qwen3", "llama"])
def folder(request, folders):
    return folders[request.param]


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1))


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, **options)


def run(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("format", ["int8", "w4a8", "awq", "svdquant"])
def test_quantize_while_loading_save_and_load_again(adapter, folder, ids, tmp_path, format):
    model = load(folder, quantization_config=adapter.KitchenConfig(format))
    by_hand = load(folder)
    report = quantize_(by_hand, format)
    assert {d.layer for d in report.quantized} == set(layers_of(model))
    assert len(layers_of(model)) == LAYERS
    assert same_state(model.state_dict(), by_hand.state_dict())  # the same bits as quantizing the loaded model
    y = run(model, ids)
    assert torch.equal(y, run(by_hand, ids))
    assert not any(p.requires_grad for layer in layers_of(model).values() for p in layer.parameters())
    model.save_pretrained(tmp_path)
    again, info = load(tmp_path, output_loading_info=True)
    assert not any(info.values()), info  # nothing missing, left over or of another shape
    assert same_state(again.state_dict(), model.state_dict())
    assert torch.equal(run(again, ids), y)
    assert not any(p.requires_grad for layer in layers_of(again).values() for p in layer.parameters())
    dtypes = {tensor.dtype for layer in layers_of(again).values() for tensor in layer.inner().values()}
    assert (torch.float32 in dtypes) == (format in ("int8", "w4a8"))  # fp32 scales stay fp32


def test_generate(adapter, folder, ids):
    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] <= ids.shape[1] + 3


def test_sharded_folder_and_our_own_reader(adapter, folder, ids, tmp_path):
    rules = {"*self_attn*": "int8", "*mlp*": ("w4a8", {"group_size": 32})}
    model = load(folder, quantization_config=adapter.KitchenConfig(rules))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert same_state(load(tmp_path).state_dict(), model.state_dict())
    report = inspect_file(next(tmp_path.glob("*.index.json")))
    assert {layer["name"] for layer in report["layers"] if layer["quantized"]} == set(layers_of(model))


def test_header_has_what_our_save_writes(adapter, folders, tmp_path):
    from kitchen_models import save
    from kitchen_models.files import read_header

    model = load(folders["llama"], quantization_config=adapter.KitchenConfig("w4a8"))
    model.save_pretrained(tmp_path)
    save(model, tmp_path / "ours.safetensors")
    (tensors, theirs), (mine, ours) = (
        read_header(tmp_path / name) for name in ("model.safetensors", "ours.safetensors")
    )
    assert theirs["_quantization_metadata"] == ours["_quantization_metadata"]
    assert json.loads(theirs["kitchen_recipe"])["layers"] == json.loads(ours["kitchen_recipe"])["layers"]
    assert {n: (t.dtype, t.shape) for n, t in tensors.items()} == {n: (t.dtype, t.shape) for n, t in mine.items()}


def test_embeddings_head_and_tied_weights(adapter, folders, ids, tmp_path):
    tied = load(folders["qwen3"], quantization_config=adapter.KitchenConfig("int8"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    with pytest.raises(UnsupportedError, match=r"tied to 'model\.embed_tokens\.weight'"):
        load(folders["qwen3"], quantization_config=adapter.KitchenConfig({"lm_head": "int8"}))
    own = load(folders["llama"], quantization_config=adapter.KitchenConfig("int8"))
    assert type(own.lm_head) is torch.nn.Linear
    head = load(folders["llama"], quantization_config=adapter.KitchenConfig({"lm_head": "int8"}))
    assert set(layers_of(head)) == {"lm_head"}
    head.save_pretrained(tmp_path)
    assert torch.equal(run(load(tmp_path), ids), run(head, ids))


def test_new_head_stays_float(adapter, folder):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=80, dtype=BF16, quantization_config=adapter.KitchenConfig("int8")
    )
    assert type(model.score) is torch.nn.Linear
    assert model.score.weight.requires_grad
    assert len(layers_of(model)) == LAYERS


def test_base_model_from_the_folder_of_a_whole_one(adapter, folder, ids, tmp_path):
    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=BF16)
    assert same_state(base.state_dict(), model.model.state_dict())
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base", dtype=BF16)
    assert same_state(again.state_dict(), base.state_dict())


def test_file_of_kitchen_quantize(adapter, folders, ids, tmp_path):
    folder = folders["llama"]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    quantize_file(folder / "model.safetensors", tmp_path / "model.safetensors", "int8")
    model = load(tmp_path, quantization_config=adapter.KitchenConfig())
    by_hand = load(folder)
    quantize_(by_hand, "int8")
    assert same_state(model.state_dict(), by_hand.state_dict())
    model.save_pretrained(tmp_path / "again")
    assert same_state(load(tmp_path / "again").state_dict(), by_hand.state_dict())
    with pytest.raises(FormatError, match="holds quantized layers already"):
        load(tmp_path, quantization_config=adapter.KitchenConfig("int8"))


def test_another_float_dtype_at_reload_leaves_stored_tensors_alone(adapter, folder, ids, tmp_path):
    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    model.save_pretrained(tmp_path)
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, layer in layers_of(wide).items():
        theirs = model.get_submodule(name).inner()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in layer.inner().items())
        assert layer.compute_dtype == torch.float32
    assert run(wide, ids).dtype == torch.float32


def test_compile_of_a_layer_deepcopy_and_dequantize(adapter, folder, ids):
    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    y = run(model, ids)
    torch._dynamo.reset()
    layer = model.model.layers[0].mlp.up_proj
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.ones(2, layer.in_features, dtype=BF16)
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(run(copy.deepcopy(model), ids), y)
    dense = {name: layer.dequantize() for name, layer in layers_of(model).items()}
    plain = model.dequantize()
    assert not layers_of(plain)
    assert all(torch.equal(plain.get_submodule(name).weight, weight) for name, weight in dense.items())


@pytest.mark.parametrize("format", ["int8", "w4a8", "awq", "svdquant"])
def test_a_whole_model_is_one_graph(adapter, folder, ids, format):
    model = load(folder, quantization_config=adapter.KitchenConfig(format)).eval()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(compiled, ids), run(model, ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_offload_by_blocks_and_by_groups(adapter, folder, ids):
    """Ours, and that of diffusers, which takes any module."""
    model = load(folder, quantization_config=adapter.KitchenConfig({"*mlp*": "w4a8", "*": "int8"})).eval()
    y = run(model, ids)
    offload = BlockOffload(model.model.layers, "cpu")
    for _ in range(3):
        assert torch.equal(run(model, ids), y)
    offload.remove()
    hooks = pytest.importorskip("diffusers.hooks", reason="diffusers is not installed here")
    hooks.apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level")
    for _ in range(3):
        assert torch.equal(run(model, ids), y)


def test_lora_of_peft(adapter, folder, ids, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    y = run(load(folder, quantization_config=adapter.KitchenConfig("int8")), ids)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(load(folder, quantization_config=adapter.KitchenConfig("int8")), config).eval()
    adapted = run(model, ids)
    assert not torch.equal(adapted, y)
    with model.disable_adapter():
        assert torch.equal(run(model, ids), y)
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(gradients) == 8  # A and B of q and v in two blocks
    assert all(g.isfinite().all() and g.any() for g in gradients)
    model.save_pretrained(tmp_path)
    base = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    assert torch.equal(run(peft.PeftModel.from_pretrained(base, tmp_path), ids), adapted)


def test_lora_through_transformers(adapter, folder, ids, tmp_path):
    peft = pytest.importorskip("peft", minversion="0.22", reason="peft 0.22, which transformers wants, is not here")
    model = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    y = run(model, ids)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted = run(model, ids)
    assert not torch.equal(adapted, y)
    model.save_pretrained(tmp_path)
    model.disable_adapters()
    assert torch.equal(run(model, ids), y)
    again = load(folder, quantization_config=adapter.KitchenConfig("int8"))
    again.load_adapter(tmp_path)
    assert torch.equal(run(again, ids), adapted)


def test_modules_kept_in_float32_are_left(adapter, folders, monkeypatch):
    monkeypatch.setattr(transformers.Qwen3PreTrainedModel, "_keep_in_fp32_modules_strict", ["o_proj"])
    model = load(folders["qwen3"], quantization_config=adapter.KitchenConfig("int8"))
    assert len(layers_of(model)) == LAYERS - 2
    assert model.model.layers[1].self_attn.o_proj.weight.dtype == torch.float32


def test_float_weights_are_dropped_one_by_one(adapter, folders, monkeypatch):
    alive = []
    swap = adapter.KitchenQuantizer.swap

    def watched(self, model, decision, weight):
        swap(self, model, decision, weight)
        linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
        alive.append(sum(module.weight.nbytes for module in linears if not module.weight.is_meta))

    monkeypatch.setattr(adapter.KitchenQuantizer, "swap", watched)
    load(folders["qwen3"], quantization_config=adapter.KitchenConfig("int8"))
    assert alive == [0] * LAYERS


def test_bytes_that_transformers_plans_with(adapter, folders):
    config = transformers.AutoConfig.from_pretrained(folders["qwen3"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    quantizer = adapter.KitchenQuantizer(adapter.KitchenConfig("int8"), pre_quantized=False)
    quantizer.preprocess_model(model, dtype=BF16)
    weight = model.model.layers[0].mlp.up_proj.weight
    size = quantizer.param_element_size(model, "model.layers.0.mlp.up_proj.weight", weight)
    rows, columns = weight.shape
    assert size * rows * columns == rows * columns + 4 * rows  # codes, and a float32 scale for each row
    assert quantizer.param_element_size(model, "lm_head.weight", model.lm_head.weight) == BF16.itemsize


def test_rules_that_fit_nothing_and_unknown_formats(adapter, folder):
    with pytest.raises(UnsupportedError, match="no layer of the model"):
        load(folder, quantization_config=adapter.KitchenConfig({"nothing": "int8"}))
    with pytest.raises(kitchen_core.errors.KitchenError, match="int9"):
        adapter.KitchenConfig("int9")
    quantizer = adapter.KitchenQuantizer(adapter.KitchenConfig("int8"))
    for device_map, word in (({"model": "disk", "lm_head": "cpu"}, "disk"), ({"": "meta"}, "meta"), ("meta", "meta")):
        with pytest.raises(UnsupportedError, match=f"'{word}'"):
            quantizer.validate_environment(device_map=device_map)
    quantizer.validate_environment(device_map={"": torch.device("cpu")})


def rewrite(folder, target, change):
    """A copy of a folder with another state dict."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})


def test_weight_that_cannot_be_quantized_names_the_layer(adapter, folders, tmp_path):
    rewrite(folders["llama"], tmp_path, lambda state: state["model.layers.1.mlp.up_proj.weight"].fill_(float("nan")))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path, quantization_config=adapter.KitchenConfig("int8"))


def test_weight_of_another_shape_names_the_layer(adapter, folders, tmp_path):
    key = "model.layers.1.mlp.up_proj.weight"
    rewrite(folders["llama"], tmp_path, lambda state: state.update({key: state[key][:64].clone()}))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.mlp\.up_proj.*\[64, 128\]"):
        load(tmp_path, quantization_config=adapter.KitchenConfig("int8"))


def test_incomplete_folder_names_the_layer(adapter, folders, tmp_path):
    saved, target = tmp_path / "saved", tmp_path / "damaged"
    target.mkdir()
    load(folders["llama"], quantization_config=adapter.KitchenConfig("int8")).save_pretrained(saved)
    rewrite(saved, target, lambda state: state.pop("model.layers.0.self_attn.q_proj.weight_scale"))
    with pytest.raises(FormatError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        load(target)


def test_markers_in_the_header_alone(adapter, folders, tmp_path):
    from safetensors.torch import load_file, save_file

    from kitchen_models.files import read_header

    model = load(folders["llama"], quantization_config=adapter.KitchenConfig("int8"))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {key: tensor for key, tensor in load_file(file).items() if not key.endswith("comfy_quant")}
    save_file(state, file, metadata=read_header(file)[1])
    again, info = load(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert same_state(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("rules", ["int8", {"*.up_proj": "int8"}])
def test_weights_that_transformers_splits(adapter, folders, tmp_path, monkeypatch, rules):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    def fuse(state):
        for block in ("model.layers.0.mlp", "model.layers.1.mlp"):
            parts = [state.pop(f"{block}.{name}_proj.weight") for name in ("gate", "up")]
            state[f"{block}.gate_up_proj.weight"] = torch.cat(parts)

    others = conversion_mapping.get_checkpoint_conversion_mapping

    def mapping(name):
        targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        return (
            [WeightConverter("mlp.gate_up_proj.weight", targets, [Chunk(dim=0)])] if name == "qwen3" else others(name)
        )

    by_hand = load(folders["qwen3"])
    quantize_(by_hand, rules)
    rewrite(folders["qwen3"], tmp_path, fuse)
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", mapping)
    model = load(tmp_path, quantization_config=adapter.KitchenConfig(rules))
    assert same_state(model.state_dict(), by_hand.state_dict())
    model.save_pretrained(tmp_path / "again")
    assert same_state(load(tmp_path / "again").state_dict(), model.state_dict())
    quantize_file(tmp_path / "model.safetensors", tmp_path / "again" / "model.safetensors", "int8")
    with pytest.raises(FormatError, match=r"gate_up_proj.*splits or joins"):
        load(tmp_path / "again")


def test_fused_experts_stay_as_they_are(adapter, ids, tmp_path):
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(BF16).save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=adapter.KitchenConfig("int8"))
    assert set(layers_of(model)) == {f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkvo"}
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert same_state(again.state_dict(), model.state_dict())
    assert torch.equal(run(again, ids), run(model, ids))


def test_an_autoawq_folder_becomes_one_that_loads(adapter, folders, ids, tmp_path):
    """The whole way of a user: a checkpoint of another toolkit, converted, loaded by name, run."""
    from safetensors.torch import load_file, save_file

    from kitchen_core.layouts import autoawq
    from kitchen_core.packing import pack_nibbles
    from kitchen_models import convert_file

    state, dense = load_file(folders["llama"] / "model.safetensors"), load(folders["llama"])
    source, target = tmp_path / "awq", tmp_path / "kitchen"
    source.mkdir()
    target.mkdir()
    for name, module in list(dense.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        weight = state.pop(f"{name}.weight").float()
        groups = weight.unflatten(1, (-1, 64))
        scale = ((groups.amax(2) - groups.amin(2)) / 15).half()
        zero = (-groups.amin(2) / scale.float()).round().clamp(0, 15)
        codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15).flatten(1).to(torch.int8)
        zeros = ((8 - zero) * scale.float()).half()
        canonical = autoawq.Canonical(pack_nibbles(codes), scale.t().contiguous(), zeros.t().contiguous())
        state |= {f"{name}.{key}": tensor for key, tensor in autoawq.pack_gemm(canonical)._asdict().items()}
        decoded = (codes.unflatten(1, (-1, 64)).float() - zero[..., None]) * scale.float()[..., None]
        module.weight.data = decoded.flatten(1).to(BF16)
    save_file(state, source / "model.safetensors", {"format": "pt"})
    config = json.loads((folders["llama"] / "config.json").read_text())
    method = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    report = convert_file(source / "model.safetensors", target / "model.safetensors")
    assert report.by_format() == {"awq_w4a16": LAYERS}
    model = load(target)
    assert len(layers_of(model)) == LAYERS
    y, truth = run(model, ids).double(), run(dense, ids).double()
    plain = run(load(folders["llama"]), ids).double()
    assert (y - truth).norm() < 0.1 * (plain - truth).norm(), "what is left is the rounding of zeros and activations"
