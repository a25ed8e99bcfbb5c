"""LoRA on quantized layers: exact branch, strengths that replace, bit-equal removal, merges that say what they lose."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import kitchen_core
import kitchen_models as km
from kitchen_core import QuantizedLinear, installed_formats
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.testing import relative_error, same_state
from kitchen_models import lora

FORMATS = sorted(installed_formats())
N, K = 256, 128  # of blocks.0.mlp.fc1
NAMES = {"blocks.0.attn.q": (128, 128), "blocks.0.mlp.fc1": (256, 128), "blocks.0.mlp.fc2": (128, 256)}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(rank=8, seed=0, size=1.0, spelling="peft", names=NAMES):
    """A LoRA of all layers in one of the spellings."""
    state = {}
    for number, (name, (n, k)) in enumerate(names.items()):
        down, up = (
            normal(rank, k, seed=seed + 10 * number) / k**0.5,
            size * normal(n, rank, seed=seed + 10 * number + 1) / 8,
        )
        prefix = {"peft": "base_model.model.", "diffusers": "transformer.", "plain": ""}.get(spelling)
        if prefix is not None:
            state |= {f"{prefix}{name}.lora_A.weight": down, f"{prefix}{name}.lora_B.weight": up}
        else:
            key = f"lora_unet_{name.replace('.', '_')}" if spelling == "kohya" else f"diffusion_model.{name}"
            half = torch.tensor(rank / 2)
            state |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": 2 * up, f"{key}.alpha": half}
    return state


ids = torch.arange(7)[None]


def run(model):
    with torch.no_grad():
        return model(ids)


def snapshot(model):
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("spelling", ["peft", "diffusers", "kohya", "comfy"])
def test_every_spelling_is_the_same_branch(int8, spelling, tmp_path, assert_branch):
    save_file(made(spelling=spelling), tmp_path / "l.safetensors")
    assert set(lora.attach(int8, tmp_path / "l.safetensors")) == set(NAMES)
    layer, x = int8.blocks[0].mlp.fc1, normal(5, K, seed=3)
    peft = made()
    down, up = (peft[f"base_model.model.blocks.0.mlp.fc1.lora_{part}.weight"] for part in "AB")
    y = layer(x)
    lora.remove(int8)
    assert_branch(y, layer(x), x, down, up)
    # not one change is in the codes: the branch is as exact as fp32 products are
    assert (
        relative_error(y - layer(x), (x.double() @ down.double().t()) @ up.double().t())
        < 256 * torch.finfo(torch.float32).eps
    )


def test_strength_replaces_and_removal_restores_every_bit(quantized):
    before, y = snapshot(quantized), run(quantized)
    results = {}
    for _ in range(10):
        lora.attach(quantized, made(), 0.7)
        for strength in (0.7, 1.0, 0.0, 0.7):
            lora.set_strength(quantized, strength)
            found = run(quantized)
            assert torch.equal(results.setdefault(strength, found), found)
        assert lora.attached(quantized) == {"lora": 0.7}
        lora.remove(quantized)
        assert torch.equal(run(quantized), y)
        assert same_state(snapshot(quantized), before)
    assert not torch.equal(results[0.7], results[1.0])
    assert lora.attached(quantized) == {}


def test_two_are_their_sum_and_leave_in_any_order(quantized):
    before, y = snapshot(quantized), run(quantized)
    first, second = made(4, 1), made(12, 2)
    lora.attach(quantized, first, 0.5, "first")
    alone = run(quantized)
    lora.attach(quantized, second, 2.0, "second")
    both = run(quantized)
    assert lora.attached(quantized) == {"first": 0.5, "second": 2.0}
    assert not torch.equal(both, alone)
    lora.remove(quantized, "second")
    assert torch.equal(run(quantized), alone)
    lora.attach(quantized, second, 2.0, "second")
    lora.remove(quantized, "first")
    lora.remove(quantized, "second")
    assert torch.equal(run(quantized), y)
    assert same_state(snapshot(quantized), before)


def test_a_rank_over_64_and_a_stack_of_four(quantized):
    layer, x = quantized.blocks[0].mlp.fc1, normal(3, K, seed=5)
    y = layer(x).double()
    wanted = y.clone()
    for number in range(4):
        state = made(96, number, size=0.3)
        lora.attach(quantized, state, 1.0, f"l{number}")
        down, up = (state[f"base_model.model.blocks.0.mlp.fc1.lora_{part}.weight"].double() for part in "AB")
        wanted += x.double() @ down.t() @ up.t()
    assert relative_error(layer(x), wanted) < 1024 * torch.finfo(torch.float32).eps


def test_the_quantized_op_still_runs(int8):
    lora.attach(int8, made())
    with kitchen_core.trace() as ran, torch.no_grad():
        int8.blocks[0].mlp.fc1(normal(5, K))
    assert ran[0][0] == "int8_linear"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_model(dtype, model):
    model.to(dtype)
    km.quantize_(model, "int8")
    y = run(model)
    lora.attach(model, made())
    assert run(model).dtype == dtype
    assert model.blocks[0].mlp.fc1.branch_up.dtype == dtype
    assert not torch.equal(run(model), y)


def test_activation_in_front_and_residual_behind(quantized):
    layer = quantized.blocks[0].mlp.fc1
    x, residual, gate = normal(5, 2 * K), normal(5, N, seed=1), normal(N, seed=2)
    act = F.silu(x[:, :K]) * x[:, K:]
    plain = layer(x, "swiglu", residual=residual, residual_scale=gate).double()
    state = made()
    lora.attach(quantized, state)
    down, up = (state[f"base_model.model.blocks.0.mlp.fc1.lora_{part}.weight"].double() for part in "AB")
    wanted = plain + gate.double() * (act.double() @ down.t() @ up.t())
    found = layer(x, "swiglu", residual=residual, residual_scale=gate)
    assert relative_error(found, wanted) < 256 * torch.finfo(torch.float32).eps


def test_dense_layers_beside_quantized_ones(model, assert_branch):
    km.quantize_(model, "blocks.0.mlp.fc1=int8")
    before, y = snapshot(model), run(model)
    lora.attach(model, made())
    layer, x = model.blocks[0].attn.q, normal(3, 128)
    state = made()
    down, up = (state[f"base_model.model.blocks.0.attn.q.lora_{part}.weight"] for part in "AB")
    assert_branch(layer(x), F.linear(x, layer.weight, layer.bias), x, down, up)
    lora.remove(model)
    assert type(layer) is torch.nn.Linear
    assert torch.equal(run(model), y)
    assert same_state(snapshot(model), before)


def test_compiles_fullgraph(quantized):
    lora.attach(quantized, made())
    layer, x = quantized.blocks[0].mlp.fc1, normal(3, K)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


def test_offloaders_see_and_move_the_branch(quantized):
    """``.data`` swaps, a forward that an offloader bound before the LoRA came, deepcopy, pickle."""
    layer, x = quantized.blocks[0].mlp.fc1, normal(3, K)
    bound = layer.forward  # as accelerate keeps it
    y = bound(x)
    lora.attach(quantized, made())
    wanted = layer(x)
    assert torch.equal(bound(x), wanted), "no LoRA is lost because an offloader came first"
    assert not torch.equal(wanted, y)
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(layer(x), wanted)
    assert torch.equal(copy.deepcopy(layer)(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), wanted)
    again = copy.deepcopy(quantized)
    lora.remove(again)
    assert torch.equal(again.blocks[0].mlp.fc1(x), y)


def test_layers_whose_weights_an_offloader_holds_are_refused(int8):
    with pytest.raises(UnsupportedError, match=r"layer 'blocks\.0\.attn\.q' is on the meta device.*attach it before"):
        lora.attach(int8.to("meta"), made())


def test_a_model_with_a_lora_is_not_saved_as_if_it_had_none(int8, tmp_path):
    lora.attach(int8, made())
    with pytest.raises(FormatError, match=r"has a LoRA attached.*remove it or merge it"):
        km.save(int8, tmp_path / "x.safetensors")
    lora.merge_(int8)
    km.save(int8, tmp_path / "x.safetensors")


def test_what_does_not_fit_changes_nothing(int8):
    before = snapshot(int8)
    other = made(names={**NAMES, "blocks.7.none": (8, 8)})
    with pytest.raises(FormatError, match=r"1 of 4 LoRA layers fit no linear.*blocks\.7\.none.*strict=False"):
        lora.attach(int8, other)
    wrong = made(names={**NAMES, "blocks.0.mlp.fc1": (256, 64)})
    with pytest.raises(
        FormatError,
        match=r"layer 'blocks\.0\.mlp\.fc1' has \(256, 128\).*\(256, 64\); .*of another model, give one",
    ):
        lora.attach(int8, wrong)
    with pytest.raises(FormatError, match="hada_w1_a"):
        lora.attach(int8, {"blocks.0.attn.q.hada_w1_a": torch.zeros(2, 2)})
    with pytest.raises(FormatError, match=r"needs down \[r, K\] and up"):
        lora.attach(int8, {"blocks.0.attn.q.lora_A.weight": torch.zeros(2, 128)})
    assert same_state(snapshot(int8), before)
    assert len(lora.attach(int8, other, strict=False)) == 3
    with pytest.raises(UnsupportedError, match="attached already"):
        lora.attach(int8, made())
    with pytest.raises(UnsupportedError, match="no LoRA 'x' is attached; attached are lora"):
        lora.set_strength(int8, 1, "x")


def test_a_damaged_lora_is_refused_before_anything_changes(model):
    model.half()
    km.quantize_(model, "int8")
    before, key = snapshot(model), "base_model.model.blocks.0.mlp.fc1"
    nan = made()
    nan[f"{key}.lora_B.weight"][3, 1] = float("nan")
    for state, strength in ((nan, 1.0), (made(), float("nan")), (made(size=1e4), 100.0)):
        with pytest.raises(FormatError, match=r"at strength .* has inf or NaN in torch\.float16"):
            lora.attach(model, state, strength)
    empty = {f"{key}.lora_A.weight": torch.zeros(0, K), f"{key}.lora_B.weight": torch.zeros(N, 0)}
    integers = {name: tensor.to(torch.int8) for name, tensor in made().items()}
    for state in (empty, integers, made() | {f"{key}.alpha": torch.ones(2)}):
        with pytest.raises(FormatError, match="in floats, r at least 1, and of an alpha one number"):
            lora.attach(model, state)
    with pytest.raises(FormatError, match=r"lora_down\.weight' is there in two spellings"):
        lora.attach(model, made() | {f"{key}.lora_down.weight": torch.ones(8, K)})
    assert same_state(snapshot(model), before)
    lora.attach(model, made())
    attached = snapshot(model)
    with pytest.raises(FormatError, match="inf or NaN"):
        lora.set_strength(model, 1e6)
    assert lora.attached(model) == {"lora": 1.0}
    assert same_state(snapshot(model), attached)


def peft_config(**values):
    return {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "alpha_pattern": {"mlp.fc2": 4}, **values}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("where", ["folder", "header"])
def test_alphas_that_only_a_config_says(where, rslora, tmp_path):
    """PEFT's files and diffusers' have no alpha among their tensors: it is in adapter_config.json or in the header."""
    config = peft_config(use_rslora=rslora)
    if where == "folder":
        save_file(made(), tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        source, prefix = tmp_path, "base_model.model."
    else:
        source, prefix = tmp_path / "pytorch_lora_weights.safetensors", "transformer."
        packed = json.dumps({f"transformer.{key}": value for key, value in config.items()})
        save_file(made(spelling="diffusers"), source, {"lora_adapter_metadata": packed})
    found, divisor = lora.read_lora(source), 8**0.5 if rslora else 8
    for name in NAMES:
        alpha = 4 if name.endswith("mlp.fc2") else 16
        wanted = made()[f"base_model.model.{name}.lora_B.weight"] * (alpha / divisor)
        assert torch.allclose(found[prefix + name][1], wanted, rtol=2 * torch.finfo(torch.float32).eps, atol=0)
    assert (
        found[f"{prefix}blocks.0.mlp.fc1"][1].abs().max()
        > 1.9 * made()["base_model.model.blocks.0.mlp.fc1.lora_B.weight"].abs().max()
    )


def test_a_config_of_alphas_that_cannot_be_read(tmp_path):
    save_file(made(), tmp_path / "adapter_model.safetensors")
    for text, words in (
        ("{", "which says its alphas, cannot be read"),
        ("[1]", "which says its alphas, cannot be read"),
        (json.dumps(peft_config(lora_alpha="x")), "must be a number, got 'x'"),
        (json.dumps(peft_config(alpha_pattern={"(a+)+": 1})), "is a regular expression"),
    ):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(FormatError, match=words):
            lora.read_lora(tmp_path)


def test_a_weight_is_not_replaced_while_a_lora_is_attached(quantized):
    layer = quantized.blocks[0].mlp.fc1
    if layer.format.name == lora.SVDQUANT:
        pytest.skip("its branch is its own")
    lora.attach(quantized, made())
    before = snapshot(quantized)
    with pytest.raises(UnsupportedError, match="merge or remove it before its weight is replaced"):
        layer.requantize_(layer.dequantize(torch.float32))
    assert same_state(snapshot(quantized), before)


def test_a_merge_is_all_or_nothing(int8):
    int8.lm_head.weight = int8.embed.weight
    before = snapshot(int8)
    lora.attach(int8, made(names={**NAMES, "lm_head": (100, 128)}))
    with pytest.raises(UnsupportedError, match=r"'lm_head' and 'embed' share one weight.*would change both"):
        lora.merge_(int8)
    lora.remove(int8)
    assert same_state(snapshot(int8), before)
    lora.attach(int8, made())
    codes = int8.blocks[0].mlp.fc1.weight.clone()
    int8.blocks[0].mlp.fc2.to("meta")
    for change in (lora.merge_, lora.remove, lambda model: lora.set_strength(model, 2.0)):
        with pytest.raises(UnsupportedError, match=r"fc2' is on the meta device.*would not know of a LoRA that comes"):
            change(int8)
    assert torch.equal(int8.blocks[0].mlp.fc1.weight, codes)
    assert lora.attached(int8) == {"lora": 1.0}


def test_names_of_compiled_and_of_nested_modules(int8):
    wanted = (made(), torch.compile(int8, backend="eager"))
    assert len(lora.attach(wanted[1], wanted[0])) == 3
    lora.remove(int8)
    outer = torch.nn.Module()
    outer.proj, outer.transformer = torch.nn.Linear(8, 8), torch.nn.Module()
    outer.transformer.proj = torch.nn.Linear(8, 8)
    state = made(names={"transformer.proj": (8, 8)}, spelling="plain")
    assert lora.attach(outer, state) == ("transformer.proj",), "the whole name before a shortened one"
    outer.again = outer.proj
    assert lora.attach(outer, made(names={"again": (8, 8)}, spelling="plain"), name="b") == ("again",)
    with pytest.raises(FormatError, match="two LoRA layers fit"):
        lora.attach(outer, made(names={"again": (8, 8), "proj": (8, 8)}, spelling="plain"), name="c")


def test_autocast_keeps_its_dtype_beside_a_dense_layer(model):
    layer, x = model.lm_head, normal(2, 128)
    lora.attach(model, made(names={"lm_head": (100, 128)}))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_shared_activations_are_refused_with_the_reason(int8):
    layer = int8.blocks[0].mlp.fc1
    activation = layer.quantize_activation(normal(3, K))
    lora.attach(int8, made())
    with pytest.raises(UnsupportedError, match="no x for the branch"):
        layer(activation)


# --------------------------------------------------------------------------------------------------------------- merging


@pytest.mark.parametrize("seed", [0, 7])
def test_merge_keeps_every_layout_parameter(quantized, seed):
    before = {n: m for n, m in quantized.named_modules() if isinstance(m, QuantizedLinear)}
    kept = {n: (m.format, m.config, {k: (t.dtype, t.shape) for k, t in m.inner().items()}) for n, m in before.items()}
    tables = {n: m.inner()["codebook"].clone() for n, m in before.items() if "codebook" in m.inner()}
    plain = run(quantized)
    lora.attach(quantized, made(size=4.0))
    dense = {n: m.dequantize(torch.float32) for n, m in before.items()}
    losses = lora.merge_(quantized, seed)
    assert set(losses) == set(NAMES)
    assert lora.attached(quantized) == {}
    for name, layer in before.items():
        format, config, tensors = kept[name]
        assert layer.format is format
        found = {k: (t.dtype, t.shape) for k, t in layer.inner().items()}
        if format.name == lora.SVDQUANT:
            assert layer.config.rank == config.rank + 8
            assert layer.config.act_unsigned == config.act_unsigned
        else:
            assert (layer.config, found) == (config, tensors)
        if name in tables:
            assert torch.equal(layer.inner()["codebook"], tables[name])
        fresh = format.requantize(layer.inner(), layer.config, dense[name], 0) if format.name != lora.SVDQUANT else None
        step = 1e-6 if fresh is None else relative_error(format.dequantize(fresh, layer.config), dense[name].double())
        error = relative_error(layer.dequantize(torch.float32), dense[name].double())
        assert error <= (2.0 if seed else 1.0) * step + 1e-6, name
    assert not torch.equal(run(quantized), plain)


def test_a_change_below_a_step(int8):
    """B46: the branch is exact; nearest rounding loses the change; stochastic rounding keeps it on average."""
    name, x = "blocks.0.mlp.fc1", normal(64, K, seed=9)
    layer = int8.get_submodule(name)
    y = layer(x).double()
    step = float(layer.weight_scale.mean())
    down, up = torch.ones(8, K) / 8, torch.full((N, 8), 0.05 * step)
    state = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    wanted = (x.double() @ down.double().t()) @ up.double().t()
    lora.attach(int8, state)
    assert relative_error(layer(x).double() - y, wanted) < 1e-3  # a float32 sum of numbers a thousand times as large
    base = copy.deepcopy(int8)
    (nearest,) = lora.merge_(int8).values()
    mean = torch.zeros(N, K, dtype=torch.float64)
    losses = []
    for seed in range(1, 41):
        model = copy.deepcopy(base)
        losses += lora.merge_(model, seed).values()
        mean += model.get_submodule(name).dequantize(torch.float32).double() / 40
    lora.remove(base)
    change = mean - base.get_submodule(name).dequantize(torch.float32).double()
    assert nearest > 0.5, "it is said that most of it was lost"
    assert min(losses) > nearest, "one draw is noisier than nearest"
    assert abs(float(change.mean()) / (0.05 * step) - 1) < 0.25, "on average it arrives"


def test_merge_of_an_unsigned_svdquant_layer_needs_no_new_bias(model):
    from kitchen_svdquant.format import SVDQuantConfig, SVDQuantFormat

    linear = model.blocks[0].mlp.fc2
    config = SVDQuantConfig(16, act_unsigned=True)
    tensors = SVDQuantFormat.quantize(linear.weight.detach(), config)
    bias = SVDQuantFormat.compensated_bias(tensors, config, linear.bias.detach())
    layer = model.blocks[0].mlp.fc2 = QuantizedLinear(tensors, SVDQuantFormat, config, bias, torch.float32)
    state = made(names={"blocks.0.mlp.fc2": (128, 256)})
    x = normal(5, 256).abs()
    y = layer(x).double()
    lora.attach(model, state)
    down, up = (state[f"base_model.model.blocks.0.mlp.fc2.lora_{part}.weight"].double() for part in "AB")
    wanted = y + x.double() @ down.t() @ up.t()
    bound = 256 * torch.finfo(torch.float32).eps
    assert relative_error(layer(x), wanted) < bound
    (loss,) = lora.merge_(model).values()
    assert loss < bound
    assert relative_error(layer(x), wanted) < bound
