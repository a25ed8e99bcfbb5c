"""The plug-in inside SGLang itself, without its server: its plug-in loader, its reader of markers, its linear layers.

Needs SGLang 0.5.23 and comfy-kitchen, which are no dependencies of ours: a throw-away environment.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import kitchen_core
import kitchen_models as km
from kitchen_core import QuantizedLinear, trace

pytest.importorskip("sglang", reason="sglang is not installed here")
pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed here")
RUNTIME = "sglang.multimodal_gen.runtime"
plugins = pytest.importorskip(
    f"{RUNTIME}.platforms.plugins", reason="this sglang cannot be imported whole", exc_type=ImportError
)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def loaded():
    """comfy-kitchen's registry after SGLang's own loader of plug-ins ran; it is put back afterwards."""
    from comfy_kitchen import registry

    from kitchen_models.integrations import comfy

    before = registry._priority
    plugins._reset_lifecycle_for_tests()
    plugins.load_plugins()
    yield registry
    registry.set_priority(before)
    registry.disable(comfy.BACKEND)
    registry.enable(comfy.BACKEND)


@pytest.fixture
def model_file(tmp_path):
    """Two layers in a file of `kitchen quantize`, by format: (path, layers)."""

    def make(format):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 128), torch.nn.Linear(128, 64)).to(BF16)
        km.quantize_(model, format)
        path = tmp_path / f"{format}.safetensors"
        km.save(model, path)
        return path, model

    return make


def test_sglang_finds_the_plug_in_and_it_comes_first(loaded):
    offered = loaded.list_backends()["kitchen"]
    assert offered["available"]
    assert not offered["disabled"]
    assert {"int8_linear", "w4a8_int8_linear"} <= set(offered["capabilities"])
    assert loaded._priority[0] == "kitchen"


def test_sglang_plugins_can_leave_it_out():
    code = (
        f"from {RUNTIME}.platforms.plugins import load_plugins; load_plugins()\n"
        "from comfy_kitchen import registry; print('kitchen' in registry.list_backends())"
    )
    for allowed, wanted in (("kitchen", "True"), ("another", "False")):
        environment = {**os.environ, "SGLANG_PLUGINS": allowed}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
        assert ran.stdout.split()[-1:] == [wanted], ran.stderr


@pytest.mark.parametrize("format", ["int8", "w4a8"])
def test_a_file_of_ours_runs_in_layers_of_sglang(loaded, model_file, format, monkeypatch):
    """SGLang reads our markers, chooses its method, loads our tensors, and its call runs our op: the bits of our own layer."""
    from sglang.multimodal_gen.runtime.layers.linear import ReplicatedLinear
    from sglang.multimodal_gen.runtime.utils import quantization_utils as utils

    monkeypatch.setenv("SGLANG_DIFFUSION_CONVROT_INT8_BACKEND", "comfy_kitchen")
    path, model = model_file(format)
    markers = utils.inspect_comfy_quant_markers([str(path)])
    config = utils.resolve_comfy_checkpoint_quantization(markers)
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        module = ReplicatedLinear(
            layer.in_features, layer.out_features, params_dtype=BF16, quant_config=config, prefix=name
        )
        prefix = f"{name}."
        expected = {
            key.removeprefix(prefix): tensor for key, tensor in load_file(path).items() if key.startswith(prefix)
        }
        del expected["comfy_quant"]
        assert set(dict(module.named_parameters())) == set(expected)
        for key, parameter in module.named_parameters():
            module.weight_loader(parameter, expected[key])
        module.quant_method.process_weights_after_loading(module)
        x = torch.randn(2, 5, layer.in_features).to(BF16)
        with torch.no_grad(), trace() as ran:
            y, _ = module(x)
        assert [op for op, _ in ran if op.endswith("_linear")], "kitchen was not asked"
        with torch.no_grad():
            assert torch.equal(y, layer(x))


def test_formats_that_sglang_does_not_know_are_refused_by_name(loaded, model_file):
    """So nobody takes a file of these for one that runs there."""
    from sglang.multimodal_gen.runtime.utils import quantization_utils as utils

    for format in ("awq", "svdquant"):
        path, model = model_file(format)
        with pytest.raises(NotImplementedError, match=model[0].format.name):
            utils.resolve_comfy_checkpoint_quantization(utils.inspect_comfy_quant_markers([str(path)]))
    assert kitchen_core.installed_formats()
