"""Files that convert writes, read by comfy-kitchen's layout classes. Needs comfy-kitchen: a throw-away environment."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kitchen_models as km
from kitchen_core import get_format
from kitchen_core.formats import marker_tensor
from kitchen_core.layouts import autoawq, nunchaku
from kitchen_core.testing import relative_error

N, K = 128, 256


@pytest.fixture
def eager():
    module = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed here")
    with module.use_backend("eager"):
        yield module


def read_with_layouts(path):
    """The layers of a file as comfy_kitchen's QuantizedTensor, from its markers, as ComfyUI makes them; biases beside them."""
    from comfy_kitchen import tensor as layouts

    made = {}
    with safe_open(path, "pt") as file:
        keys = set(file.keys())
        for key in sorted(keys):
            if not key.endswith(".comfy_quant"):
                continue
            layer = key.removesuffix("comfy_quant")
            marker = json.loads(bytes(file.get_tensor(key).tolist()))
            parts = {k.removeprefix(layer): file.get_tensor(k) for k in keys if k.startswith(layer)}
            weight, shared = parts["weight"], {"orig_dtype": torch.bfloat16}
            if marker["format"] == "int8_tensorwise":
                name, params = "TensorWiseINT8Layout", {"scale": parts["weight_scale"]}
                params |= {k: marker[k] for k in ("convrot", "convrot_groupsize") if k in marker}
                k = weight.shape[1]
            elif marker["format"] in ("asym_w4a8_int8", "w6a8_int8"):
                name = "AsymW4A8Int8Layout"
                params = {"scale": parts["weight_s_rel"], "s_channel": parts["weight_s_channel"]}
                params |= {"codebook": parts.get("weight_codebook")}
                params |= {k: marker[k] for k in ("group_size", "convrot_groupsize")}
                k = params["scale"].shape[1] * marker["group_size"]
            elif marker["format"] == "awq_w4a16":
                name = "TensorCoreAWQW4A16Layout"
                params = {
                    "scale": parts["weight_scale"],
                    "zeros": parts["weight_zeros"],
                    "group_size": marker["group_size"],
                }
                k = 2 * weight.shape[1]
            else:
                name = "TensorCoreSVDQuantW4A4Layout"
                params = {k: parts[k] for k in ("proj_down", "proj_up", "smooth_factor")}
                params |= {"scale": parts["weight_scale"], "act_unsigned": marker["act_unsigned"]}
                k = 2 * weight.shape[1]
            layout = getattr(layouts, name)
            params = layout.Params(orig_shape=(weight.shape[0], k), **shared, **params)
            made[layer.removesuffix(".")] = layouts.QuantizedTensor(weight, name, params), parts.get("bias")
    return made


def canonical(name):
    format = get_format(name)
    config = format.config_for(N, K)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    return format, config, {k: t for k, t in format.quantize(weight, config).items() if t is not None}


def stored(dialect):
    """Layers of a dialect by name, each with a bias where the dialect reorders it."""
    if dialect == "comfy":
        made = {}
        for name in ("int8", "w4a8", "w6a8", "awq", "svdquant"):
            format, config, tensors = canonical(name)
            made[name] = {**format.state_dict(tensors), "comfy_quant": marker_tensor(format.marker(config))}
        return made
    codes = torch.randint(-128, 128, (N, K // 2), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    scale = torch.rand(K // 64, N, generator=torch.Generator().manual_seed(3)).half() / 8 + 0.01
    if dialect == "autoawq":
        packed = autoawq.pack_gemm(autoawq.Canonical(codes, scale, torch.zeros_like(scale)))
        return {"a": packed._asdict()}
    _, _, tensors = canonical("svdquant")
    layer = {
        "qweight": nunchaku.pack_qweight(tensors["qdata"]), "wscales": nunchaku.pack_wscales(tensors["scale"]),
        "smooth_factor": nunchaku.pack_vector(tensors["smooth_factor"]),
        "proj_down": nunchaku.pack_lora_down(tensors["proj_down"]), "proj_up": nunchaku.pack_lora_up(tensors["proj_up"]),
        "bias": nunchaku.pack_vector(torch.randn(N).bfloat16()),
    }  # fmt: skip
    return {"q": layer, "net.2": {key: t.clone() for key, t in layer.items()}}


@pytest.mark.parametrize("dialect", ["comfy", "nunchaku", "autoawq"])
def test_converted_files_are_read_by_the_layout_classes(eager, dialect, tmp_path):
    state = {f"{n}.{k}": t.contiguous().clone() for n, layer in stored(dialect).items() for k, t in layer.items()}
    save_file(state, tmp_path / "s.safetensors", {"quantization_config": '{"quant_method": "awq", "bits": 4}'})
    report = km.convert_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    theirs, ours = read_with_layouts(tmp_path / "c.safetensors"), km.load(tmp_path / "c.safetensors")
    assert set(theirs) == set(report.layers) == set(ours)
    x = (
        torch.randn(3, K, generator=torch.Generator().manual_seed(4)).bfloat16().abs()
    )  # an unsigned layer takes no less
    for name, (weight, bias) in theirs.items():
        layer, dtype = ours[name], torch.float16 if dialect == "autoawq" else torch.bfloat16
        dense = layer.dequantize(torch.float32).double()
        # theirs rounds to bfloat16 twice where it turns a rotated weight back
        assert relative_error(weight.dequantize(), dense) < 2 * torch.finfo(torch.bfloat16).eps, name
        full = layer.bias
        if name == "net.2":
            full = layer.format.dense_fallback_bias(layer.inner(), layer.config, full)
        truth = torch.nn.functional.linear(x.double(), dense, None if full is None else full.double())
        y = torch.nn.functional.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))
        assert relative_error(layer(x.to(dtype)), truth) <= relative_error(y, truth), name
