"""kitchen as a backend of comfy_kitchen's registry. Needs comfy-kitchen, no dependency of ours: a throw-away environment."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import kitchen_core
from kitchen_core.errors import UnsupportedError
from kitchen_core.layouts.tile_packed import pack_proj_up, pack_scale, pack_weight
from kitchen_core.testing import relative_error
from kitchen_models.integrations import comfy

COMFY_KITCHEN = "comfy_kitchen"


@pytest.fixture
def ck():
    """comfy_kitchen with kitchen registered; its registry is put back afterwards."""
    module = pytest.importorskip(COMFY_KITCHEN, reason="comfy-kitchen is not installed here")
    registry = module.registry
    before = registry._priority
    comfy.register()
    yield module
    registry.set_priority(before)
    registry.disable(comfy.BACKEND)
    registry.enable(comfy.BACKEND)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layouts():
    from comfy_kitchen import tensor

    return tensor


def compiled(function, *arguments):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")(*arguments)


def test_without_comfy_kitchen_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['comfy_kitchen'] = None\n"
        "from kitchen_models.integrations import comfy\n"
        "from kitchen_core.errors import UnsupportedError\n"
        "try: comfy.register()\n"
        "except UnsupportedError as error: print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "install comfy-kitchen" in answer


def test_importing_the_adapter_imports_no_other_library():
    code = "import sys, kitchen_models.integrations.comfy; print('comfy_kitchen' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.strip() == "False"


def test_every_function_offered_has_an_op_that_decides():
    assert {name for functions in comfy._FUNCTIONS.values() for name in functions} == set(comfy.DECIDING_OPS)
    assert set(comfy.DECIDING_OPS.values()) <= set(kitchen_core.__all__)


@pytest.fixture
def ask():
    """comfy.why_not with nothing remembered, before and after."""
    comfy._answers.clear()
    comfy._why_not_device.cache_clear()
    yield comfy.why_not
    comfy._answers.clear()
    comfy._why_not_device.cache_clear()


def int8_call(**changes) -> dict:
    weight = {"weight": torch.zeros(8, 256, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}
    return {"x": normal(2, 256), **weight, "out_dtype": torch.bfloat16, **changes}


def test_what_is_left_to_other_backends(ask):
    assert ask("int8_linear", int8_call()) is None
    assert "1-dimensional" in ask("w4a8_int8_linear", {"x": normal(2, 4), "qdata": torch.zeros(8, dtype=torch.int8)})
    assert "'best'" in ask("quantize_int8_tensorwise", {"x": normal(2, 4), "scale": "best"})
    row_scale = {"residual": normal(2, 8), "residual_scale": normal(2, 8)}
    assert "residual_scale" in ask("int8_linear", int8_call(**row_scale))
    assert "out_dtype" in ask("int8_linear", int8_call(out_dtype=torch.float64))


def test_a_gpu_that_would_take_a_slow_path_is_left_alone(ask):
    with kitchen_core.simulate("sm_61"):
        assert "no CUDA kernel" in comfy._why_not_device("int8_scaled_mm", torch.device("cuda:0"))


@pytest.mark.parametrize("code", [3, -1])
def test_unknown_dtype_code_is_refused(code):
    with pytest.raises(UnsupportedError, match="output_dtype_code"):
        comfy._dtype(code)


def test_the_registry_reports_us_first(ck):
    report = ck.registry.list_backends()[comfy.BACKEND]
    assert report["available"]
    assert "int8_linear" in report["capabilities"]
    assert ck.registry._priority[0] == comfy.BACKEND
    arguments = {"x": normal(2, 256), "weight": torch.zeros(8, 256, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}
    assert ck.registry.get_capable_backend("int8_linear", arguments) == comfy.BACKEND


def test_int8_layout_runs_through_us_and_agrees_with_eager(ck):
    weight, x, bias = normal(48, 512, seed=1), normal(2, 5, 512, seed=2), normal(48, seed=3)
    quantized = layouts().QuantizedTensor.from_float(
        weight, "TensorWiseINT8Layout", per_channel=True, convrot=True, convrot_groupsize=256
    )
    with kitchen_core.trace() as ran:
        y = torch.nn.functional.linear(x, quantized, bias)
    assert ("int8_linear", "core/eager") in ran
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    with ck.use_backend("eager"):
        theirs = torch.nn.functional.linear(x, quantized, bias)
    # both quantize the same activations to the same grid, ours in fp32: never further from the truth
    assert relative_error(y, expected) <= relative_error(theirs, expected)
    assert torch.equal(compiled(torch.nn.functional.linear, x, quantized, bias), y)


@pytest.mark.parametrize("act", ["swiglu", "gelu_tanh", "rms_norm"])
def test_int8_input_activation_and_residual(ck, act):
    weight, scale = kitchen_core.quantize_int8_convrot_weight(normal(32, 256, seed=1), 256)
    x = normal(3, 512 if act == "swiglu" else 256, seed=2)
    norm = normal(256, seed=5) if act == "rms_norm" else None
    residual, gate = normal(3, 32, seed=3), normal(32, seed=4)
    options = {
        "input_act": act,
        "input_act_weight": norm,
        "input_act_eps": 1e-6,
        "residual": residual,
        "residual_scale": gate,
    }
    y = ck.int8_linear(x, weight, scale, None, torch.bfloat16, convrot=True, convrot_groupsize=256, **options)
    assert torch.equal(y, kitchen_core.int8_linear(x, weight, scale, None, torch.bfloat16, 256, **options))


def test_w4a8_layout_runs_through_us_and_compiles(ck):
    weight, x = normal(64, 512, seed=1), normal(5, 512, seed=2)
    quantized = layouts().QuantizedTensor.from_float(weight, "AsymW4A8Int8Layout")
    with kitchen_core.trace() as ran:
        y = torch.nn.functional.linear(x, quantized)
    assert ("w4a8_linear", "core/eager") in ran
    with ck.use_backend("eager"):
        theirs = torch.nn.functional.linear(x, quantized)
        back = quantized.dequantize().double()
    truth = torch.nn.functional.linear(x.double(), back)
    assert relative_error(y, truth) <= relative_error(theirs, truth)
    assert torch.equal(compiled(torch.nn.functional.linear, x, quantized), y)


def test_awq_layout_runs_through_us(ck):
    codes = torch.randint(-128, 128, (32, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scales, zeros, x = normal(2, 32, seed=1).abs() / 16, normal(2, 32, seed=2) / 16, normal(4, 128, seed=3)
    with kitchen_core.trace() as ran:
        y = ck.gemv_awq_w4a16(x, codes, scales, zeros, None, 64)
    assert [op for op, _ in ran] == ["awq_linear"]
    dense = kitchen_core.dequantize_awq(codes, scales, zeros, 64, torch.bfloat16)
    truth = torch.nn.functional.linear(x.double(), dense.double())
    with ck.use_backend("eager"):
        theirs = ck.gemv_awq_w4a16(x, codes, scales, zeros, None, 64)
    assert relative_error(y, truth) <= relative_error(theirs, truth)


def test_svdquant_activations_of_another_backend_and_tile_packed_weights(ck):
    N, K, R = 128, 128, 16
    codes = torch.randint(-128, 128, (N, K // 2), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scales, smooth = normal(K // 64, N, seed=1).abs() / 16, normal(K, seed=2).abs() + 0.5
    down, up, x = normal(K, R, seed=3) / 8, normal(N, R, seed=4) / 8, normal(5, K, seed=5)
    with ck.use_backend("eager"):
        theirs = ck.quantize_svdquant_w4a4(x, smooth=smooth, lora_down=down)
    rest = {"act": theirs[0], "ascales": theirs[1], "lora_act_in": theirs[2]}
    natural = ck.scaled_mm_svdquant_w4a4(wgt=codes, wscales=scales, lora_up=up, **rest)
    tiles = {"wgt": pack_weight(codes), "wscales": pack_scale(scales), "lora_up": pack_proj_up(up)}
    assert torch.equal(ck.scaled_mm_svdquant_w4a4(**tiles, **rest), natural)


def test_int8_stochastic_rounding_and_embedding(ck):
    table = normal(16, 256, seed=1)
    quantized = layouts().QuantizedTensor.from_float(
        table, "TensorWiseINT8Layout", per_channel=True, stochastic_rounding=7
    )
    codes, scale = kitchen_core.quantize_int8_rowwise(table, 7)
    assert torch.equal(quantized._qdata, codes)
    rows = torch.tensor([[3, 0], [15, 3]])
    layout = layouts().TensorWiseINT8Layout
    found = layout.dequantize_embedding(quantized._qdata, quantized._params, rows)
    assert torch.equal(found, kitchen_core.dequantize_int8_embedding(codes, scale, rows, torch.bfloat16))


def test_custom_node_folder_registers_on_import(ck):
    node = Path(comfy.__file__).parent / "comfyui_node/__init__.py"
    ck.registry.set_priority([name for name in ck.registry._priority if name != comfy.BACKEND])
    spec = importlib.util.spec_from_file_location("custom_node", node)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS == {}
    assert ck.registry._priority[0] == comfy.BACKEND


def test_a_copied_node_folder_is_imported_as_comfyui_does(ck, tmp_path):
    """ComfyUI puts the folder's path in the module's name and executes it as a package, outside of ours."""
    folder = tmp_path / "custom_nodes" / "kitchen"
    shutil.copytree(Path(comfy.__file__).parent / "comfyui_node", folder, ignore=shutil.ignore_patterns("__pycache__"))
    ck.registry.set_priority([name for name in ck.registry._priority if name != comfy.BACKEND])
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    assert module.NODE_CLASS_MAPPINGS == module.NODE_DISPLAY_NAME_MAPPINGS == {}
    assert ck.registry._priority[0] == comfy.BACKEND


def test_the_entry_point_of_sglang_registers(ck):
    """What SGLang does with each entry of its group in a worker: load it, call it."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"]["sglang.multimodal_gen.plugins"].values()
    ck.registry.set_priority([name for name in ck.registry._priority if name != comfy.BACKEND])
    plugin = EntryPoint("kitchen", target, "sglang.multimodal_gen.plugins").load()
    plugin()
    plugin()
    assert ck.registry._priority[0] == comfy.BACKEND
    assert ck.registry._priority.count(comfy.BACKEND) == 1
    for name in ("int8_linear", "w4a8_int8_linear"):  # the two that SGLang's layers call
        assert name in ck.registry.list_backends()[comfy.BACKEND]["capabilities"]


def test_a_second_registration_replaces_the_first_and_last_place_can_be_asked_for(ck):
    comfy.register(first=False)
    assert ck.registry._priority[-1] == comfy.BACKEND
    assert ck.registry._priority.count(comfy.BACKEND) == 1


def test_svdquant_layout_runs_through_us(ck, monkeypatch):
    monkeypatch.setenv("COMFY_KITCHEN_SVDQUANT_DIRECT_CUDA", "")  # so that it is put back
    monkeypatch.delenv("COMFY_KITCHEN_SVDQUANT_DIRECT_CUDA")
    comfy.register()
    assert os.environ["COMFY_KITCHEN_SVDQUANT_DIRECT_CUDA"] == "0"
    N, K, R = 48, 128, 16
    codes = torch.randint(-128, 128, (N, K // 2), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scales, smooth = normal(K // 64, N, seed=1).abs() / 16, normal(K, seed=2).abs() + 0.5
    down, up, x, bias = normal(K, R, seed=3) / 8, normal(N, R, seed=4) / 8, normal(3, 5, K, seed=5), normal(N, seed=6)
    layout = layouts().TensorCoreSVDQuantW4A4Layout
    params = layout.Params(
        scale=scales, orig_dtype=torch.bfloat16, orig_shape=(N, K), proj_down=down, proj_up=up, smooth_factor=smooth
    )
    weight = layouts().QuantizedTensor(codes, layout.__name__, params)
    with kitchen_core.trace() as ran:
        y = torch.nn.functional.linear(x, weight, bias)
    assert [op for op, _ in ran][-2:] == ["quantize_svdquant_w4a4", "scaled_mm_svdquant_w4a4"]
    with ck.use_backend("eager"):
        theirs = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(y, kitchen_core.svdquant_linear(x, codes, scales, smooth, down, up, bias))
    dense = kitchen_core.dequantize_svdquant_w4a4(codes, scales, smooth, down, up, torch.float32)
    truth = torch.nn.functional.linear(x.double(), dense.double(), bias.double())
    assert relative_error(y, truth) <= relative_error(theirs, truth)
