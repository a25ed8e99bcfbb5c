"""pack_gate_up in every situation it has to live through, on the CPU: names, bits, moves, copies, obstacles, compile.

Over 500 lines: one table of moves and one of obstacles, which share the MLP and the checks.
"""

# ruff: noqa: E741  (I is the intermediate width, here as in the documentation)

from __future__ import annotations

import copy
import io
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import kitchen_core as kc
from kitchen_core import reference
from kitchen_core.errors import UnsupportedError
from kitchen_core.reference.int8 import stacked_gate_up, stacked_rows
from kitchen_core.testing import assert_equal, inference_mode_has_tangents
from kitchen_int8 import gate_up, pack_gate_up

H, I = 128, 192
BF16 = torch.bfloat16
FORMS = ("module", "tensor")
LAYERS = ("gate_proj", "up_proj", "down_proj")


class MLP(nn.Module):
    """The MLP of Llama and its like."""

    def __init__(self, form: str = "module", bias: bool = False, **options) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        for name, (n, k) in {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}.items():
            dense = nn.Linear(k, n, bias=bias, dtype=BF16).requires_grad_(False)
            if form == "module":
                dense = kc.QuantizedLinear.from_linear(dense, "int8", **options)
            else:
                weight = kc.QuantizedTensor.quantize(dense.weight.detach(), "int8", **options)
                dense.weight = nn.Parameter(weight, requires_grad=False)
            self.add_module(name, dense)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LoRA(nn.Module):
    """A wrapper as PEFT makes them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.weight = base.weight

    def forward(self, x):
        return self.base_layer(x) + 1


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch):
    monkeypatch.setattr(gate_up, "_said", set())
    monkeypatch.setattr(reference.int8, "_said", set())


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture
def x():
    return torch.randn(3, 5, H, dtype=BF16)


def inner(layer: nn.Module) -> dict[str, torch.Tensor]:
    return layer.inner() if isinstance(layer, kc.QuantizedLinear) else layer.weight.inner()


def is_packed(mlp: nn.Module) -> bool:
    pairs = zip(inner(mlp.gate_proj).values(), inner(mlp.up_proj).values(), strict=True)
    return not any(isinstance(stacked_rows(a, b), str) for a, b in pairs)


def stacked_result(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the packed module must give: int8_swiglu_mlp on concatenated copies."""
    gate, up, down = (inner(getattr(mlp, name)) for name in LAYERS)
    bias = mlp.gate_proj.bias
    return kc.int8_swiglu_mlp(
        x, torch.cat((gate["qdata"], up["qdata"])), torch.cat((gate["scale"], up["scale"])), *down.values(),
        None if bias is None else torch.cat((bias, mlp.up_proj.bias)), mlp.down_proj.bias, None, 64, 64,
    )  # fmt: skip


def separate_result(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return MLP.forward(mlp, x)


def check_packed(mlp: nn.Module, x: torch.Tensor) -> None:
    with kc.trace() as calls:
        y = mlp(x)
    assert [op for op, _ in calls] == ["int8_gate_up_mlp"]
    assert is_packed(mlp)
    assert_equal(y, stacked_result(mlp, x))


def check_separate(mlp: nn.Module, x: torch.Tensor) -> None:
    want = separate_result(mlp, x)
    assert_equal(mlp(x), want)
    assert not torch.equal(want, stacked_result(mlp, x)), "the two must differ for this to say anything"


@pytest.mark.parametrize("bias", [False, True])
def test_names_shapes_and_state_dict_stay(form, bias, x):
    mlp = MLP(form, bias, convrot_groupsize=64)
    before = {key: value.clone() for key, value in mlp.state_dict().items()}
    parameters = dict(mlp.named_parameters())
    assert pack_gate_up(mlp) is mlp
    assert isinstance(mlp, MLP)
    assert type(mlp).__name__ == "MLP"
    after = mlp.state_dict()
    assert list(after) == list(before)
    for key, value in before.items():
        if isinstance(value, kc.QuantizedTensor):
            for name, tensor in value.inner().items():
                assert_equal(after[key].inner()[name], tensor)
        else:
            assert_equal(after[key], value)
    assert all(value is parameters[name] for name, value in mlp.named_parameters())
    check_packed(mlp, x)
    check_packed(mlp, x[:0])


def test_nothing_else_holds_the_packed_storage(form):
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    held = [StorageWeakRef(t.untyped_storage()) for t in inner(mlp.gate_proj).values()]
    mlp(torch.randn(2, H, dtype=BF16))
    assert not any(reference.expired() for reference in held)
    for name in ("gate_proj", "up_proj"):
        delattr(mlp, name)
    assert all(reference.expired() for reference in held)


def test_one_half_moved_away_frees_nothing_and_computes_right(form, x):
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    for tensor in inner(mlp.up_proj).values():  # a framework swaps one layer's storage
        tensor.data = tensor.data.clone()
    check_separate(mlp, x)
    pack_gate_up(mlp)
    check_packed(mlp, x)


def test_packing_again_copies_nothing(form):
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    pointers = [t.data_ptr() for t in inner(mlp.gate_proj).values()]
    pack_gate_up(mlp)
    assert [t.data_ptr() for t in inner(mlp.gate_proj).values()] == pointers


@pytest.mark.parametrize("bias", [False, True])
def test_compiles_as_one_graph_that_looks_again_on_each_call(form, bias, x):
    mlp = pack_gate_up(MLP(form, bias, convrot_groupsize=64))
    torch._dynamo.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(mlp, fullgraph=True, backend=counting)
    assert_equal(compiled(x), stacked_result(mlp, x))
    for tensor in inner(mlp.up_proj).values():
        tensor.data = tensor.data.clone()
    assert_equal(compiled(x), separate_result(mlp, x))
    assert len(graphs) <= 2, "a swapped storage costs one more graph at most, and never a break"


def test_inductor_agrees(x):
    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    torch._dynamo.reset()
    assert_equal(torch.compile(mlp, fullgraph=True)(x), stacked_result(mlp, x))


# ------------------------------------------------------------------------------------------------ moves and copies


MOVES = {
    "to a dtype and back": lambda mlp: mlp.to(torch.float32).to(BF16),
    "half and back": lambda mlp: mlp.half().bfloat16(),
    "_apply": lambda mlp: mlp._apply(lambda t: t.clone()),
    "_apply of the parent": lambda mlp: nn.Sequential(mlp)._apply(lambda t: t.clone())[0],
    "to the same": lambda mlp: mlp.to("cpu"),
    "to_empty and loaded": lambda mlp: _to_empty_and_loaded(mlp),
    "loaded": lambda mlp: _loaded(mlp, assign=False),
    "assigned": lambda mlp: _loaded(mlp, assign=True),
    "deepcopy": copy.deepcopy,
    "deepcopy of the parent": lambda mlp: copy.deepcopy(nn.Sequential(mlp))[0],
    "pickle": lambda mlp: pickle.loads(pickle.dumps(mlp)),
    "torch.save": lambda mlp: _saved(mlp),
}


def _loaded(mlp: nn.Module, assign: bool) -> nn.Module:
    state = {key: value.clone() for key, value in mlp.state_dict().items()}
    mlp.load_state_dict(state, assign=assign)
    return mlp


def _to_empty_and_loaded(mlp: nn.Module) -> nn.Module:
    state = {key: value.clone() for key, value in mlp.state_dict().items()}
    mlp.to_empty(device="cpu").load_state_dict(state)
    return mlp


def _saved(mlp: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(mlp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("repacks", [False, True])
def test_survives(form, name, repacks, x, monkeypatch):
    if repacks:  # as on a GPU
        monkeypatch.setattr(gate_up, "REPACKS_ON", ("cpu",))
    mlp = pack_gate_up(MLP(form, True, convrot_groupsize=64))
    want = stacked_result(mlp, x), separate_result(mlp, x)
    moved = MOVES[name](mlp)
    assert isinstance(moved, gate_up.PackedGateUp)
    assert isinstance(moved, MLP)
    if repacks:
        check_packed(moved, x)
    assert_equal(moved(x), want[0 if is_packed(moved) and moved_biases_too(moved) else 1])


def moved_biases_too(mlp: nn.Module) -> bool:
    return not isinstance(stacked_rows(mlp.gate_proj.bias, mlp.up_proj.bias), str)


def storages(state: dict) -> list[int]:
    tensors = [t for v in state.values() for t in (v.inner().values() if isinstance(v, kc.QuantizedTensor) else [v])]
    return [t.untyped_storage().data_ptr() for t in tensors]


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_dict_has_storages_of_its_own(form, wrapped, x):
    mlp = pack_gate_up(MLP(form, True, convrot_groupsize=64))
    if wrapped:
        mlp.gate_proj = LoRA(mlp.gate_proj)
        delattr(mlp.gate_proj, "weight")
    state = nn.Sequential(mlp).state_dict()
    assert len(set(storages(state))) == len(storages(state))
    assert not any(gate_up._is_part(value) for value in state.values())
    parameters = dict(mlp.named_parameters())
    kept = mlp.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in parameters.items())
    if not wrapped:
        check_packed(mlp, x)
        assert not any(gate_up._is_part(value) for value in copy.deepcopy(mlp).state_dict().values())


def test_safetensors_saves_every_tensor(x, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed here")
    plain = MLP(bias=True, convrot_groupsize=64)
    want = {key: value.clone() for key, value in plain.state_dict().items()}
    mlp = pack_gate_up(plain)
    safetensors.save_model(nn.ModuleDict({"mlp": mlp}), tmp_path / "model.safetensors")
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert set(found) == {f"mlp.{key}" for key in want}
    for key, value in want.items():
        assert_equal(found[f"mlp.{key}"], value)
    safetensors.load_model(nn.ModuleDict({"mlp": mlp}), tmp_path / "model.safetensors")
    check_packed(mlp, x)


def test_huggingface_hub_saves_every_tensor(tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed here")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed here")
    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    hub.save_torch_model(mlp, tmp_path)
    assert set(safetensors.load_file(tmp_path / "model.safetensors")) == set(mlp.state_dict())


@pytest.mark.parametrize("bias", [False, True])
def test_made_in_inference_mode(form, bias, x):
    with torch.inference_mode():
        mlp = MLP(form, bias, convrot_groupsize=64)
        apart = mlp(x)
        pack_gate_up(mlp)
        check_packed(mlp, x)
        want = mlp(x)
        assert_equal(apart, separate_result(mlp, x))
        assert_equal(pack_gate_up(mlp)(x), want)
    assert_equal(mlp(x), want)
    check_packed(mlp, x)
    assert_equal(pack_gate_up(copy.deepcopy(mlp).to("cpu"))(x), want)
    with torch.inference_mode():
        check_packed(mlp, x)


@pytest.mark.parametrize("strict", [False, True])
def test_exports_as_one_op(form, strict, x):
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    exported = torch.export.export(mlp, (x,), strict=strict)
    ops = [str(node.target) for node in exported.graph.nodes if "kitchen" in str(node.target)]
    assert ops == ["kitchen.int8_gate_up_mlp.default"]
    assert_equal(exported.module()(x), stacked_result(mlp, x))


# ---------------------------------------------------------------------------------------------------- its class


def test_a_module_made_from_the_packed_class_is_not_packed(x):
    made = type(pack_gate_up(MLP()))(convrot_groupsize=64)
    assert_equal(made(x), separate_result(made, x))
    assert_equal(copy.deepcopy(made).to("cpu")(x), separate_result(made, x))
    made.load_state_dict(made.state_dict())
    check_packed(pack_gate_up(made), x)
    check_packed(pack_gate_up(made), x)


class Mixin:
    pass


@pytest.mark.parametrize("front", [(), (Mixin,)], ids=["subclass", "mixin"])
def test_a_class_made_from_the_packed_class_is_copied(front, x):
    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    mlp.__class__ = type("X", (*front, type(mlp)), {})  # as FSDP and parametrizations do
    made = copy.deepcopy(mlp)
    assert type(made) is type(mlp)
    assert_equal(made(x), separate_result(mlp, x))
    check_packed(pack_gate_up(made), x)
    check_packed(mlp, x)


def test_a_failed_pack_leaves_the_module_as_it_was(form, x, monkeypatch):
    class Final(MLP):
        def __init_subclass__(cls):
            raise TypeError("no subclasses")

    def out_of_memory(gate, up):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gate_up, "_halves", out_of_memory)
    for made, error in ((Final(form), "no subclasses"), (MLP(form), None)):
        before, cls, want = dict(vars(made)), type(made), made(x)
        hooks = len(made._state_dict_hooks), len(made._load_state_dict_post_hooks)
        with pytest.raises((TypeError, torch.OutOfMemoryError), match=error):
            pack_gate_up(made)
        assert type(made) is cls
        assert vars(made) == before
        assert (len(made._state_dict_hooks), len(made._load_state_dict_post_hooks)) == hooks
        assert_equal(made(x), want)


def test_meta_and_back(x):
    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    state = {key: value.clone() for key, value in mlp.state_dict().items()}
    want = separate_result(mlp, x)
    mlp.to("meta")
    assert mlp(x.to("meta")).device.type == "meta"
    mlp.load_state_dict(state, assign=True)
    assert_equal(mlp(x), want)


# ------------------------------------------------------------------------------------------------------ obstacles


def _lora(mlp):
    mlp.gate_proj = LoRA(mlp.gate_proj)


def _subclass(mlp):
    mlp.up_proj.__class__ = type("Patched", (type(mlp.up_proj),), {})


def _hook(mlp):
    mlp.down_proj.register_forward_pre_hook(lambda module, args: None)


def _instance_forward(mlp):
    layer = mlp.up_proj
    layer.forward = lambda x, forward=layer.forward: forward(x)


def _subclassed_tensor(mlp):
    class Shard(torch.Tensor):
        pass

    scale = inner(mlp.gate_proj)["scale"].data.as_subclass(Shard)
    if isinstance(mlp.gate_proj, kc.QuantizedLinear):
        mlp.gate_proj._parameters["weight_scale"] = scale
    else:
        mlp.gate_proj.weight._hold({**inner(mlp.gate_proj), "scale": scale})


def _activation_hook(mlp):
    mlp.act_fn.register_forward_hook(lambda module, args, output: output * 2)


def _activation_replaced(mlp):
    mlp.act_fn = nn.GELU()


def _activation_subclassed(mlp):
    mlp.act_fn = type("Twice", (nn.SiLU,), {"forward": lambda self, x: nn.functional.silu(x) * 2})()


def _activation_function(mlp):
    del mlp.act_fn
    mlp.act_fn = nn.functional.gelu


OBSTACLES = {
    _activation_hook: "act_fn has forward hooks",
    _activation_replaced: "act_fn is a GELU, not silu",
    _activation_subclassed: "act_fn is a Twice, not silu",
    _activation_function: "act_fn is a gelu, not silu",
    _lora: "gate_proj is a LoRA, not a plain quantized linear",
    _subclass: "up_proj is a Patched, not a plain quantized linear",
    _hook: "down_proj has forward hooks",
    _instance_forward: "up_proj has forward hooks",
    _subclassed_tensor: "gate_proj's scale is a Shard",
}


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda f: f.__name__.strip("_"))
def test_falls_back_to_the_separate_projections_and_says_once_why(form, obstacle, x, caplog):
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    obstacle(mlp)
    want = separate_result(mlp, x)
    with caplog.at_level(logging.WARNING, logger="kitchen"), kc.trace() as calls:
        for _ in range(3):
            assert_equal(mlp(x), want)
    assert "int8_gate_up_mlp" not in {op for op, _ in calls}
    said = [r.getMessage() for r in caplog.records if "run apart" in r.getMessage()]
    assert len(said) == 1
    assert OBSTACLES[obstacle] in said[0]


@pytest.mark.parametrize(
    "obstacle", [_lora, _subclass, _activation_hook, _activation_replaced], ids=lambda f: f.__name__.strip("_")
)
def test_an_obstacle_compiles_too(obstacle, x):
    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    obstacle(mlp)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(x), torch.compile(MLP.forward, fullgraph=True, backend="aot_eager")(mlp, x))


def test_a_wrapper_taken_off_again(form, x):
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    _lora(mlp)
    assert_equal(mlp(x), separate_result(mlp, x))
    mlp.gate_proj = mlp.gate_proj.base_layer
    check_packed(mlp, x)


def test_placeholders_that_a_hook_fills(x):
    """As accelerate offloads: parameters on meta, brought by a hook before the layer's own forward and dropped after it."""
    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    want = separate_result(mlp, x)
    for name in LAYERS:
        layer = getattr(mlp, name)
        held = {key: p.data for key, p in layer.named_parameters()}

        def fill(layer, args, held=held):
            for key, tensor in held.items():
                layer._parameters[key] = nn.Parameter(tensor, requires_grad=False)

        def drop(layer, args, output):
            for key, p in layer.named_parameters():
                layer._parameters[key] = nn.Parameter(p.to("meta"), requires_grad=False)

        drop(layer, None, None)
        layer.register_forward_pre_hook(fill)
        layer.register_forward_hook(drop)
    assert_equal(mlp(x), want)


def test_placeholders_without_a_hook_are_named(caplog):
    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    mlp.gate_proj.to("meta")
    with caplog.at_level(logging.WARNING, logger="kitchen"), pytest.raises(UnsupportedError):  # as the layers say it
        mlp(torch.randn(2, H, dtype=BF16))
    assert "gate_proj's qdata is a placeholder on the meta device" in caplog.text


def test_a_local_shard(x, caplog):
    """Row shards of gate and up and a column shard of down, in the parameters alone: as the layers compute it."""
    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    for name in ("gate_proj", "up_proj"):
        for tensor in inner(getattr(mlp, name)).values():
            tensor.data = tensor.data[: I // 2]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, : I // 2].contiguous()
    mlp.down_proj.config = type(mlp.down_proj.config)(0)
    with caplog.at_level(logging.WARNING, logger="kitchen"):
        assert_equal(mlp(x), separate_result(mlp, x))
    assert f"gate_proj holds [{I // 2}, {H}] of a weight of [{I}, {H}] (sharded?)" in caplog.text


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_a_distributed_tensor_is_named(caplog):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mlp = pack_gate_up(MLP(convrot_groupsize=64))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = DTensor.from_local(mlp.up_proj.weight.data, mesh, [Replicate()])
        mlp.up_proj._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        reason = gate_up._projections(mlp, mlp._kitchen_gate_up)
    finally:
        torch.distributed.destroy_process_group()
    assert "up_proj's qdata is a" in reason
    assert "sharded" in reason


def test_where_a_gradient_is_wanted(form):
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    x = torch.randn(4, H, dtype=BF16, requires_grad=True)
    y = mlp(x)
    y.sum().backward()
    assert x.grad.abs().sum() > 0
    assert_equal(y.detach(), separate_result(mlp, x.detach()))
    with torch.no_grad():
        assert_equal(mlp(x), stacked_result(mlp, x))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_where_a_tangent_is_wanted(form, mode, x):
    if mode is torch.inference_mode and not inference_mode_has_tangents():
        pytest.skip("this torch has no tangents in inference_mode")
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    apart = MLP.forward.__get__(mlp)
    with mode():
        want, found = (torch.func.jvp(call, (x,), (x,)) for call in (apart, mlp))
    assert want[1].abs().sum() > 0
    for have, wanted in zip(found, want, strict=True):
        assert_equal(have, wanted)


def test_more_arguments_and_quantized_activations_go_to_the_modules_own_forward(x):
    class Scaled(MLP):
        def forward(self, x, scale=1.0):
            return MLP.forward(self, x) * scale

    mlp = pack_gate_up(Scaled(convrot_groupsize=64))
    want = separate_result(mlp, x)
    assert_equal(mlp(x, scale=2.0), want * 2)
    assert_equal(mlp(x, 2.0), want * 2)
    check_packed(mlp, x)


def test_autocast(form):
    mlp = pack_gate_up(MLP(form, convrot_groupsize=64))
    x = torch.randn(4, H)
    with torch.autocast("cpu", BF16):
        y = mlp(x)
    assert_equal(y, stacked_result(mlp, x.to(BF16)))


# ---------------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_work_is_refused():
    with pytest.raises(UnsupportedError, match="has no layer 'w1'; give the names"):
        pack_gate_up(MLP(), gate="w1")
    mlp = MLP()
    mlp.act_fn = nn.GELU()
    with pytest.raises(UnsupportedError, match=r"act_fn of MLP is GELU.*only silu"):
        pack_gate_up(mlp)
    mlp = MLP()
    mlp.up_proj = nn.Linear(H, I)
    with pytest.raises(UnsupportedError, match=r"up_proj is a dense nn\.Linear"):
        pack_gate_up(mlp)
    mlp = MLP()
    mlp.forward = mlp.forward
    with pytest.raises(UnsupportedError, match="replaced on the instance"):
        pack_gate_up(mlp)
    with pytest.raises(UnsupportedError, match="packed already"):
        pack_gate_up(pack_gate_up(MLP()), gate="up_proj", up="gate_proj")


def test_three_different_layers_must_be_named():
    for names in (("", "up_proj", "down_proj"), ("gate_proj", "gate_proj", "down_proj")):
        mlp = MLP()
        with pytest.raises(UnsupportedError, match="must name three different layers of MLP"):
            pack_gate_up(mlp, *names)
        assert type(mlp) is MLP


class WithResidual(MLP):
    def forward(self, x):
        return x + super().forward(x)


class WithDropout(MLP):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class WithTuple(MLP):
    def forward(self, x):
        return super().forward(x), None


class Summed(MLP):
    def forward(self, x):
        return super().forward(x).sum(-1)


class InFloat(MLP):
    def forward(self, x):
        hidden = nn.functional.silu(self.gate_proj(x).float()) * self.up_proj(x).float()
        return self.down_proj(hidden.to(x.dtype))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WithResidual, "a residual, dropout"),
        (WithDropout, "a residual, dropout"),
        (WithTuple, "gives a tuple for x"),
        (Summed, r"gives \[1, 2\] for x \[1, 2, 128\]"),
    ],
)
def test_a_forward_that_computes_something_else_is_refused(form, kind, words, x):
    mlp = kind(form, convrot_groupsize=64)
    before = dict(vars(mlp))
    with pytest.raises(UnsupportedError, match=words):
        pack_gate_up(mlp)
    assert type(mlp) is kind
    assert vars(mlp) == before
    assert not is_packed(mlp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_a_forward_that_only_rounds_otherwise_is_taken(form, dtype):
    state = torch.get_rng_state()
    mlp = InFloat(form, convrot_groupsize=64).to(dtype)
    after = torch.get_rng_state()
    pack_gate_up(mlp)
    assert_equal(torch.get_rng_state(), after)
    assert not torch.equal(state, after)
    check_packed(mlp, torch.randn(3, H, dtype=dtype))
    pack_gate_up(WithDropout(form).eval())


def test_weights_that_are_not_loaded_yet_are_packed(form):
    mlp = MLP(form)
    for name in LAYERS:
        inner(getattr(mlp, name))["scale"].data.fill_(float("nan"))
    pack_gate_up(mlp)
    assert is_packed(mlp)


def test_scales_of_one_number_are_not_stacked():
    codes, scales = torch.zeros(2, 1, 4, dtype=torch.int8), torch.ones(2)
    assert stacked_rows(scales[0], scales[1]) == "each is one number"
    assert stacked_gate_up((codes[0], scales[0], None), (codes[1], scales[1], None)) is None
    assert stacked_gate_up((codes[0], scales[:1], None), (codes[1], scales[1:], None)) is not None


def test_another_format_is_refused():
    pytest.importorskip("kitchen_awq", reason="kitchen-awq is not installed here")
    mlp = MLP()
    mlp.up_proj = kc.QuantizedLinear.from_linear(nn.Linear(H, I), "awq")
    with pytest.raises(UnsupportedError, match="up_proj is of format awq_w4a16"):
        pack_gate_up(mlp)


def test_names_may_be_paths_and_silu_a_function(x):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            inner = MLP(convrot_groupsize=64)
            self.proj = nn.ModuleDict({"gate": inner.gate_proj, "up": inner.up_proj})
            self.w2 = inner.down_proj
            self.act = nn.functional.silu

        def forward(self, x):
            return self.w2(self.act(self.proj["gate"](x)) * self.proj["up"](x))

    mlp = pack_gate_up(Nested(), "proj.gate", "proj.up", "w2", "act")
    with kc.trace() as calls:
        mlp(x)
    assert [op for op, _ in calls] == ["int8_gate_up_mlp"]


def _one_scale(mlp):
    for name in ("gate_proj", "up_proj"):
        scale = inner(getattr(mlp, name))["scale"]
        scale.data = scale.data[:1].clone()


def _other_rotation(mlp):
    mlp.gate_proj.config = type(mlp.gate_proj.config)(16)


def _one_bias(mlp):
    mlp.gate_proj.bias = nn.Parameter(torch.ones(I, dtype=BF16), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [(_one_scale, "one scale for all rows"), (_other_rotation, "rotated differently"), (_one_bias, "only one of")],
    ids=["scale", "rotation", "bias"],
)
def test_what_cannot_be_stacked_runs_apart(change, words, x, caplog):
    mlp = MLP(convrot_groupsize=64)
    change(mlp)
    with caplog.at_level(logging.WARNING, logger="kitchen"):
        pack_gate_up(mlp)
    assert words in caplog.text
    assert_equal(mlp(x), separate_result(mlp, x))


def test_op_refuses_what_does_not_fit():
    codes, scale = kc.quantize_int8_convrot_weight(torch.randn(I, H), 64)
    with pytest.raises(UnsupportedError, match=r"they must be \[I, K\], \[I, K\] and \[N, I\]"):
        kc.int8_gate_up_mlp(torch.randn(2, H), codes, scale, codes, scale, codes, scale)


def test_importing_the_package_imports_no_torch():
    code = "import sys, kitchen_int8; assert 'torch' not in sys.modules; assert 'pack_gate_up' in kitchen_int8.__all__"
    subprocess.run([sys.executable, "-c", code], check=True)
