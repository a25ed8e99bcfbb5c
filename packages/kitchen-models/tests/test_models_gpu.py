"""Small diffusers and transformers models on a GPU with our CUDA kernels: on load, saved, reloaded, LoRA, offload, compile."""

from __future__ import annotations

import copy

import pytest
import torch

import kitchen_core
from kitchen_core import QuantizedLinear
from kitchen_core.testing import same_state
from kitchen_models import lora

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
FORMATS = ["int8", "w4a8", "w6a8", "awq", "svdquant"]


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """(how to load it, its inputs) of a Flux-like transformer with seeded weights."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed here")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=64, num_attention_heads=4,
        joint_attention_dim=256, pooled_projection_dim=64, guidance_embeds=False, axes_dims_rope=(16, 24, 24),
    ).to(BF16)  # fmt: skip
    path = tmp_path_factory.mktemp("flux")
    model.save_pretrained(path)
    g = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, 64, 64, generator=g).to(BF16), "timestep": torch.tensor([0.5], dtype=BF16),
        "encoder_hidden_states": torch.randn(1, 32, 256, generator=g).to(BF16), "img_ids": torch.zeros(64, 3),
        "pooled_projections": torch.randn(1, 64, generator=g).to(BF16), "txt_ids": torch.zeros(32, 3),
    }  # fmt: skip

    def load(folder=path, format=None):
        from kitchen_models.integrations.diffusers import KitchenConfig

        options = {} if format is None else {"quantization_config": KitchenConfig(format)}
        return diffusers.FluxTransformer2DModel.from_pretrained(folder, torch_dtype=BF16, **options).eval()

    return load, {key: value.cuda() for key, value in inputs.items()}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(how to load it, its inputs) of a Qwen3-like language model with seeded weights."""
    transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed here")
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen")
    transformers.AutoModelForCausalLM.from_config(config).to(BF16).save_pretrained(path)

    def load(folder=path, format=None):
        from kitchen_models.integrations.transformers import KitchenConfig

        options = {} if format is None else {"quantization_config": KitchenConfig(format)}
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, **options).eval()

    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    return load, {"input_ids": ids.cuda()}


@pytest.fixture(params=["flux", "qwen"])
def which(request):
    return request.getfixturevalue(request.param)


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def run_kernels(model, inputs):
    """As ``run``; every quantized linear ran a CUDA kernel of ours."""
    with kitchen_core.trace() as ran:
        y = run(model, inputs)
    linears = [provider for op, provider in ran if op.endswith("_linear")]
    assert linears
    assert not [provider for provider in linears if provider.startswith("core/eager")], set(linears)
    return y


def layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_on_load_save_reload_and_lora(which, format, tmp_path):
    load, inputs = which
    model = load(format=format).cuda()
    dense = run(load().cuda(), inputs).double()
    y = run_kernels(model, inputs)
    assert torch.isfinite(y).all()
    assert torch.equal(run_kernels(model, inputs), y)
    assert (y.double() - dense).norm() < dense.norm()
    model.save_pretrained(tmp_path)
    again = load(tmp_path).cuda()
    assert same_state(again.state_dict(), model.state_dict())
    assert torch.equal(run_kernels(again, inputs), y)
    dtypes = {tensor.dtype for layer in layers(again).values() for tensor in layer.inner().values()}
    assert (torch.float32 in dtypes) == (format in ("int8", "w4a8", "w6a8"))  # fp32 scales stay fp32

    before = copy.deepcopy(model.state_dict())
    g = torch.Generator().manual_seed(2)
    state = {}
    for name, layer in layers(model).items():
        state[f"{name}.lora_A.weight"] = torch.randn(16, layer.in_features, generator=g) / layer.in_features**0.5
        state[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, 16, generator=g) / 64
    results = {}
    for _ in range(3):
        lora.attach(model, state, 0.7)
        for strength in (0.7, 1.0, 0.7):
            lora.set_strength(model, strength)
            found = run_kernels(model, inputs)
            assert torch.equal(results.setdefault(strength, found), found)
        lora.remove(model)
        assert same_state(model.state_dict(), before)
        assert torch.equal(run(model, inputs), y)
    assert not torch.equal(results[0.7], y)
    lora.attach(model, state, 0.7)
    losses = lora.merge_(model)
    merged = run_kernels(model, inputs)
    assert set(losses) == set(layers(model))
    assert torch.isfinite(merged).all()
    if format in ("int8", "w6a8", "svdquant"):
        assert (merged.double() - results[0.7].double()).norm() < (y.double() - results[0.7].double()).norm()


@pytest.mark.parametrize("format", FORMATS)
def test_compiles_and_replays_as_a_cuda_graph(which, format):
    load, _ = which
    model = load(format=format).cuda()
    name, layer = next(iter(layers(model).items()))
    x = torch.randn(64, layer.in_features, device="cuda", dtype=BF16)
    with torch.no_grad():
        y = layer(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y), name
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, y), name


def exact_twin(model):
    """A copy in fp32 whose linears multiply the dequantized weights."""
    twin = copy.deepcopy(model)
    for name, layer in layers(model).items():
        dense = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        dense.weight = torch.nn.Parameter(layer.dequantize(torch.float32), requires_grad=False)
        if layer.bias is not None:
            dense.bias = torch.nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        parent, _, child = name.rpartition(".")
        setattr(twin.get_submodule(parent), child, dense)
    return torch.nn.Module.float(twin)  # transformers refuses its own method of that name on a quantized model


def widened(inputs):
    return {key: value.float() if value.dtype == BF16 else value for key, value in inputs.items()}


@pytest.mark.parametrize(("format", "mode"), [*((f, "default") for f in FORMATS), ("int8", "reduce-overhead")])
def test_a_whole_model_compiles_to_one_graph(which, format, mode):
    """By inductor, without a break, and no farther from the model in fp32 than it is in eager mode.

    The compiler fuses what lies between the linears and leaves out roundings to bf16, so bits differ, and with them which way
    the quantizers of the activations round. Both errors are sums of as many roundings of the same size: their norms agree but
    for chance: over at least 2048 outputs one may be longer by a quarter.
    """
    load, inputs = which
    model = load(format=format).cuda()
    y = run_kernels(model, inputs).double()
    truth = run(exact_twin(model), widened(inputs)).double()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {} if mode == "default" else {"mode": mode}
    compiled = torch.compile(model, fullgraph=True, **options)
    for _ in range(3):  # the third replays the CUDA graphs that the second recorded
        with kitchen_core.trace() as ran:
            found = run(compiled, inputs).double()
        assert not [provider for op, provider in ran if op.endswith("_linear") and provider.startswith("core/eager")]
        assert torch.isfinite(found).all()
        eager, after = float((y - truth).norm() / truth.norm()), float((found - truth).norm() / truth.norm())
        assert after <= 1.25 * eager
    breaks, graphs = (dict(torch._dynamo.utils.counters[key]) for key in ("graph_break", "stats"))
    assert not breaks
    assert graphs["unique_graphs"] == 1
    if mode != "default":
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    print(
        f"{type(model).__name__} {format} {mode}: error to fp32 {eager:.5f} in eager mode, {after:.5f} compiled; "
        f"between them {float((y - found).norm() / y.norm()):.5f}; {graphs}"
    )


@pytest.mark.parametrize("format", FORMATS)
def test_group_offload_of_a_language_model(qwen, format):
    hooks = pytest.importorskip("diffusers.hooks", reason="diffusers is not installed here")
    load, inputs = qwen
    y = run(load(format=format).cuda(), inputs)
    model = load(format=format)
    hooks.apply_group_offloading(model, torch.device("cuda"), offload_type="leaf_level", use_stream=True)
    for round in range(5):
        assert torch.equal(run_kernels(model, inputs), y), round


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("format", FORMATS)
def test_group_offload_with_a_stream(flux, format, kind):
    load, inputs = flux
    y = run(load(format=format).cuda(), inputs)
    model = load(format=format)
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    model.enable_group_offload(
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type=kind,
        use_stream=True,
        **options,
    )
    for round in range(5):
        assert torch.equal(run_kernels(model, inputs), y), round


@pytest.mark.parametrize("format", FORMATS)
def test_peft_merges_and_unmerges(which, format):
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    load, inputs = which
    model = load(format=format).cuda()
    targets = sorted(
        {name.rpartition(".")[2] for name in layers(model) if name.endswith(("to_q", "to_k", "q_proj", "up_proj"))}
    )
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False)).eval()
    before, y = copy.deepcopy(wrapped.state_dict()), run_kernels(wrapped, inputs)
    for _ in range(2):
        wrapped.merge_adapter()
        assert not torch.equal(run_kernels(wrapped, inputs), y)
        wrapped.unmerge_adapter()
        assert same_state(wrapped.state_dict(), before)
        assert torch.equal(run(wrapped, inputs), y)
