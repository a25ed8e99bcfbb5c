"""Files in the compressed-tensors dialect, against that library itself: theirs read by us, ours by theirs, with our config.

Needs compressed-tensors, which is no dependency of ours: a throw-away environment.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_core import get_format
from kitchen_core.formats import marker_tensor
from kitchen_core.layouts import autoawq

ct = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed here")
N, K, G = 64, 256, 64


def compressors():
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    return {"pack-quantized": PackedQuantizationCompressor, "int-quantized": IntQuantizationCompressor}


def schemes(config):
    """The library's own schemes, by layer's name or class, from a quantization_config: its parser checks every field."""
    from compressed_tensors.quantization import QuantizationConfig

    parsed = QuantizationConfig.model_validate(config)
    return {target: scheme for scheme in parsed.config_groups.values() for target in scheme.targets}


def theirs(bits, symmetric):
    """(state, config, dense weight) of a layer that the library compressed."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(bits)
    args = {"num_bits": bits, "symmetric": symmetric, "strategy": "group" if bits == 4 else "channel"}
    args |= {"group_size": G} if bits == 4 else {}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    groups = K // G if bits == 4 else 1
    scale = (torch.rand(N, groups) / 8 + 0.01).to(torch.bfloat16 if bits == 8 else torch.float16)
    state = {"weight": torch.randn(N, K).to(scale.dtype), "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = torch.randint(-7, 8, (N, groups), dtype=torch.int8)
    form = "pack-quantized" if bits == 4 else "int-quantized"
    packed = compressors()[form].compress(state, scheme)
    dense = compressors()[form].decompress(dict(packed), scheme)["weight"]
    return packed, {"quant_method": "compressed-tensors", "format": form}, dense


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_what_the_library_compressed_is_read_and_written_again(bits, symmetric, tmp_path):
    packed, config, dense = theirs(bits, symmetric)
    state = {f"a.b.{key}": tensor.contiguous() for key, tensor in packed.items() if tensor is not None}
    save_file(state, tmp_path / "s.safetensors", {"quantization_config": json.dumps(config)})
    km.convert_file(tmp_path / "s.safetensors", tmp_path / "c.safetensors")
    layer = km.load(tmp_path / "c.safetensors")["a.b"]
    # their decompression multiplies in the scale's dtype: one rounding, and ours of a zero
    bound = 16 * packed["weight_scale"].double().abs().max() * torch.finfo(packed["weight_scale"].dtype).eps
    bound += dense.double().abs().max() * torch.finfo(dense.dtype).eps
    assert (layer.dequantize(torch.float32).double() - dense.double()).abs().max() <= bound
    report = km.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "compressed-tensors")
    again = load_file(tmp_path / "d.safetensors")
    assert set(again) == set(state)
    for key, tensor in state.items():  # our scales of INT8 are float32: the same numbers
        assert torch.equal(again[key].double(), tensor.double()), key
    scheme = schemes(report.config)["Linear"]
    found = {key.removeprefix("a.b."): tensor for key, tensor in again.items()}
    back = compressors()[config["format"]].decompress(found, scheme)["weight"]
    assert (back.double() - dense.double()).abs().max() <= bound


def test_two_schemes_in_one_file(tmp_path):
    format = get_format("int8")
    config = format.config_for(N, K, convrot_groupsize=0)
    int8 = format.state_dict(format.quantize(torch.randn(N, K).bfloat16(), config))
    codes, scale = torch.randint(-128, 128, (N, K // 2), dtype=torch.int8), torch.rand(K // G, N).half() + 0.1
    zeros = (scale * torch.randint(-4, 4, scale.shape)).half()
    canonical = autoawq.Canonical(codes, scale, zeros)
    awq = get_format("awq").state_dict(canonical._asdict())
    marker = {"format": "awq_w4a16", "group_size": G}
    layers = {
        "a": {**int8, "comfy_quant": marker_tensor(format.marker(config))},
        "b": {**awq, "comfy_quant": marker_tensor(marker)},
    }
    state = {f"{name}.{key}": tensor for name, layer in layers.items() for key, tensor in layer.items()}
    save_file({**state, "head.weight": torch.randn(8, 8)}, tmp_path / "c.safetensors")
    report = km.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors", "compressed-tensors")
    found = schemes(report.config)
    assert (found["a"].weights.num_bits, found["a"].input_activations.num_bits) == (8, 8)
    assert (found["b"].weights.num_bits, found["b"].input_activations) == (4, None)
    assert report.config["format"] == "mixed-precision"
    assert report.config["ignore"] == ["head"]
    written = load_file(tmp_path / "d.safetensors")
    for name, form in (("a", "int-quantized"), ("b", "pack-quantized")):
        mine = {k.removeprefix(f"{name}."): t for k, t in written.items() if k.startswith(f"{name}.")}
        dense = compressors()[form].decompress(mine, found[name])["weight"]
        ours = km.load(tmp_path / "c.safetensors")[name].dequantize(torch.float32)
        bound = 16 * mine["weight_scale"].double().abs().max() * torch.finfo(torch.float16).eps
        assert (dense.double() - ours.double()).abs().max() <= bound
