"""The plug-in inside vLLM itself, without its server: its plug-in loader, its choice of kernels, its layers and their loaders.

Needs vLLM 0.33, which is no dependency of ours: a throw-away environment. Without a GPU vLLM has no platform and so
no kernels; there the layers are given ours by the call that vLLM has for it, with the check of the device taken out.
"""

from __future__ import annotations

import json

import pytest
import torch

import kitchen_core
import kitchen_models as km
from kitchen_core import QuantizedLinear
from kitchen_models.integrations import vllm as adapter

pytest.importorskip("vllm", reason="vllm is not installed here")
linear = pytest.importorskip(adapter.KERNELS, reason="this vllm cannot be imported whole", exc_type=ImportError)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernel():
    """Our class, as vLLM's own loader of plug-ins brought it in."""
    from vllm import plugins

    plugins.load_general_plugins()
    (mine,) = [k for k in linear._POSSIBLE_INT8_KERNELS[_cuda()] if k.__name__ == "KitchenInt8LinearKernel"]
    return mine


def _cuda():
    from vllm.platforms.interface import PlatformEnum

    return PlatformEnum.CUDA


@pytest.fixture(scope="module")
def vllm_layers(kernel, tmp_path_factory):
    """vLLM's linear modules, set up for one process, and our class offered for this machine's platform."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.layers import linear as layers
    from vllm.platforms import current_platform

    patch, kind = pytest.MonkeyPatch(), "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        patch.setitem(linear._POSSIBLE_INT8_KERNELS, current_platform._enum, [])
        linear.register_linear_kernel(kernel, current_platform._enum, "int8")
        patch.setattr(kernel, "is_supported", classmethod(lambda cls, compute_capability=None: (True, None)))
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device=kind))):
        place = f"file://{tmp_path_factory.mktemp('group')}/x"
        init_distributed_environment(1, 0, place, 0, "nccl" if kind == "cuda" else "gloo")
        initialize_model_parallel(1, 1)
        yield layers
    destroy_model_parallel()
    destroy_distributed_environment()
    patch.undo()


def test_vllm_finds_the_plug_in_and_puts_it_first(kernel):
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassInt8ScaledMMLinearKernel

    candidates = linear._POSSIBLE_INT8_KERNELS[_cuda()]
    assert candidates[:2] == [kernel, CutlassInt8ScaledMMLinearKernel]
    before = list(candidates)
    assert adapter.register()
    assert linear._POSSIBLE_INT8_KERNELS[_cuda()] == before
    assert not kernel.__abstractmethods__


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why there is no GPU")
def test_vllm_hears_why_it_is_not_taken(kernel, monkeypatch):
    config = linear.Int8ScaledMMLinearLayerConfig(False, True, True)
    taken, reason = linear.is_supported_and_can_implement_kernel(kernel, config, 90)
    assert (taken, reason) == (False, "KitchenInt8LinearKernel kitchen serves this on CUDA devices only.")
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", kernel.__name__)
    assert "disabled" in linear.is_supported_and_can_implement_kernel(kernel, config, 90)[1]


@pytest.fixture
def written(tmp_path):
    """What `kitchen convert --to compressed-tensors` makes of three INT8 layers: (tensors, config, layers)."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    made = {}
    for name, width in (("q", 64), ("k", 32), ("v", 32)):
        plain = torch.nn.Linear(128, width, dtype=BF16)
        made[name] = QuantizedLinear.from_linear(plain, "int8", convrot_groupsize=0)
    km.save(made, tmp_path / "comfy.safetensors")
    report = km.convert_file(tmp_path / "comfy.safetensors", tmp_path / "ct.safetensors", "compressed-tensors")
    return load_file(tmp_path / "ct.safetensors"), json.loads(json.dumps(report.config)), made


def config_of(found):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    return CompressedTensorsConfig.from_config({**found, "ignore": list(found.get("ignore", ()))})


def load(module, state, parts):
    """As vLLM's models do: each parameter's own loader, once for each checkpoint layer that the module joins."""
    for name, parameter in module.named_parameters():
        for layer, *shard in parts:
            getattr(parameter, "weight_loader", module.weight_loader)(parameter, state[f"{layer}.{name}"], *shard)
    module.quant_method.process_weights_after_loading(module)


def test_a_file_of_ours_runs_in_a_layer_of_vllm(vllm_layers, kernel, written):
    state, config, made = written
    module = vllm_layers.ReplicatedLinear(
        128, 64, quant_config=config_of(config), params_dtype=BF16, prefix="q", disable_tp=True
    )
    assert type(module.scheme.kernel) is kernel
    load(module, state, [("q",)])
    x = torch.randn(3, 5, 128).to(BF16)
    y, _ = module(x)
    assert torch.equal(y, made["q"](x)), "the bits of our own layer"
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)  # as vLLM compiles its models
    with torch.no_grad():
        for rows in (1, 5, 33):
            assert torch.equal(
                compiled(x[0, :1].expand(rows, -1).contiguous())[0], made["q"](x[0, :1]).expand(rows, -1)
            )


def test_fused_layers_come_from_parts(vllm_layers, kernel, written):
    """q, k and v in one module; scales by channel, and then by tensor, which come one a part."""
    state, config, made = written
    parts = [("q", "q"), ("k", "k"), ("v", "v")]
    x = torch.randn(7, 128).to(BF16)
    for strategy in ("channel", "tensor"):
        (group,) = config["config_groups"].values()
        group["weights"]["strategy"] = strategy
        if strategy == "tensor":
            for number, name in enumerate(made):
                state[f"{name}.weight_scale"] = torch.tensor([0.001 * (number + 1)])
        module = vllm_layers.QKVParallelLinear(
            128, 32, 2, 1, bias=True, quant_config=config_of(config), params_dtype=BF16, prefix="qkv"
        )  # fmt: skip
        assert type(module.scheme.kernel) is kernel
        load(module, state, parts)
        y, _ = module(x)
        wanted = [
            kitchen_core.int8_linear(
                x, state[f"{name}.weight"], state[f"{name}.weight_scale"].float().reshape(-1, 1).expand(
                    layer.out_features, 1).contiguous(), state[f"{name}.bias"], BF16,
            )
            for name, layer in made.items()
        ]  # fmt: skip
        assert torch.equal(y, torch.cat(wanted, -1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dynamic": False, "strategy": "tensor"}, "kitchen quantizes activations at run time"),
        ({"symmetric": False}, "kitchen quantizes activations symmetrically"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there vLLM takes a kernel of its own")
def test_what_is_not_ours_is_left_to_vllm(vllm_layers, written, change, reason):
    _, config, _ = written
    (group,) = config["config_groups"].values()
    group["input_activations"] |= change
    with pytest.raises(ValueError, match=reason):
        vllm_layers.ReplicatedLinear(128, 64, quant_config=config_of(config), params_dtype=BF16, prefix="q")


def test_the_mlp_of_vllms_own_llama(vllm_layers, kernel, tmp_path):
    """gate and up in one divided module, SwiGLU, down: the file's layers under vLLM's names for them."""
    from safetensors.torch import load_file
    from vllm.model_executor.models.llama import LlamaMLP

    torch.manual_seed(0)
    widths = {"gate_proj": (128, 192), "up_proj": (128, 192), "down_proj": (192, 128)}
    made = {
        name: QuantizedLinear.from_linear(torch.nn.Linear(*shape, bias=False, dtype=BF16), "int8", convrot_groupsize=0)
        for name, shape in widths.items()
    }
    km.save(made, tmp_path / "comfy.safetensors")
    report = km.convert_file(tmp_path / "comfy.safetensors", tmp_path / "ct.safetensors", "compressed-tensors")
    state = load_file(tmp_path / "ct.safetensors")
    mlp = LlamaMLP(128, 192, "silu", quant_config=config_of(report.config), prefix="mlp")
    assert {type(mlp.gate_up_proj.scheme.kernel), type(mlp.down_proj.scheme.kernel)} == {kernel}
    load(mlp.gate_up_proj, state, [("gate_proj", 0), ("up_proj", 1)])
    load(mlp.down_proj, state, [("down_proj",)])
    x = torch.randn(9, 128).to(BF16)
    with torch.no_grad():
        both = torch.cat([made["gate_proj"](x), made["up_proj"](x)], -1)
        assert torch.equal(mlp.gate_up_proj(x)[0], both)
        assert torch.equal(mlp(x), made["down_proj"](mlp.act_fn(both)))  # vLLM's SwiGLU has roundings of its own
