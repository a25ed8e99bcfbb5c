"""Loading: every spelling, and files that do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_core import QuantizedLinear, QuantizedTensor, get_format, installed_formats
from kitchen_core.errors import FormatError, PluginError
from kitchen_core.formats import marker_tensor

FORMATS = list(installed_formats())


def layer_file(path, name="int8", layer="a.b", marker=None, header=None, rename=None, **changes):
    """One layer with bias, quantized, in a file of its own; parts of it replaced. ``marker`` bytes or a dict."""
    format = get_format(name)
    config = format.config_for(64, 128)
    tensors = format.quantize(torch.randn(64, 128, dtype=torch.bfloat16), config)
    state = format.state_dict({k: t for k, t in tensors.items() if t is not None}, f"{layer}.")
    marker = format.marker(config) if marker is None else marker
    if isinstance(marker, dict):
        state[f"{layer}.comfy_quant"] = marker_tensor(marker)
    elif isinstance(marker, bytes):
        state[f"{layer}.comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
    state[f"{layer}.bias"] = torch.zeros(64, dtype=torch.bfloat16)
    for key, value in changes.items():
        state[f"{layer}.{key}"] = value
    state = {(rename or {}).get(key, key): value for key, value in state.items() if value is not None}
    metadata = None if header is None else {"_quantization_metadata": json.dumps({"layers": header})}
    save_file({key: value.contiguous() for key, value in state.items()}, path, metadata)
    return config, tensors


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "spelling", ["tensor", "params", "unknown keys", "NUL padded", "header", "header params", "both"]
)
def test_every_spelling_of_the_marker(name, spelling, tmp_path):
    path = tmp_path / "x.safetensors"
    format = get_format(name)
    marker = format.marker(format.config_for(64, 128))
    nested = {"format": marker["format"], "params": {k: v for k, v in marker.items() if k != "format"}}
    given = {
        "tensor": {},
        "params": {"marker": nested},
        "unknown keys": {"marker": {**marker, "orig_dtype": "torch.bfloat16", "num_experts": 1, "new": [1]}},
        "NUL padded": {"marker": json.dumps(marker).encode() + b"\0\0\0"},
        "header": {"marker": False, "header": {"a.b": marker}},
        "header params": {"marker": False, "header": {"a.b": nested}},
        "both": {"header": {"a.b": marker}},
    }[spelling]
    torch.manual_seed(1)
    config, tensors = layer_file(path, name, **given)
    layer = km.load(path)["a.b"]
    assert layer.config == config
    assert layer.compute_dtype == torch.bfloat16
    assert all(
        torch.equal(layer.inner()[k].view(torch.uint8), t.view(torch.uint8))
        for k, t in tensors.items()
        if t is not None
    )


@pytest.mark.parametrize("name", FORMATS)
def test_every_spelling_of_the_keys(name, tmp_path):
    format = get_format(name)
    aliases = [(spec.key, alias) for spec in format.tensors for alias in spec.aliases]
    for number, (key, alias) in enumerate(aliases):
        path = tmp_path / f"{number}.safetensors"
        config, _ = layer_file(path, name, rename={f"a.b.{key}": f"a.b.{alias}"})
        if any(f"a.b.{alias}" in load_file(path) for _ in (0,)):
            loaded = km.load(path)
            assert loaded["a.b"].config == config
            assert set(loaded) == {"a.b"}


def test_int8_marker_without_format_is_taken_as_int8(tmp_path):
    layer_file(tmp_path / "x.safetensors", marker={"convrot": True, "convrot_groupsize": 64, "per_row": True})
    assert km.load(tmp_path / "x.safetensors")["a.b"].config.convrot_groupsize == 64


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"marker": b""}, "marker is empty"),
        ({"marker": b"\0\0\0\0"}, "marker is empty"),
        ({"marker": b"not json"}, "UTF-8 JSON"),
        ({"marker": b"[1]"}, "JSON object"),
        ({"marker": {"format": 5}}, "must be a name"),
        ({"marker": {"format": "int3_new"}}, "unknown format 'int3_new'; formats known to this version: .*--upgrade"),
        ({"marker": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 7}}, "power of 4"),
        ({"marker": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": "x"}}, "power of 4"),
        ({"header": {"a.b": {"format": "int8_tensorwise", "convrot_groupsize": 16}}}, "disagree about convrot_groupsize"),
        ({"weight_scale": torch.ones(7, 1)}, "weight_scale must be float32 with 1 or N=64"),
        ({"weight_scale": torch.ones(64, 1, dtype=torch.float16)}, "weight_scale must be float32"),
        ({"weight_scale": None}, "missing: scale"),
        ({"weight": torch.ones(64, 128)}, "weight must be int8"),
        ({"bias": torch.ones(3)}, r"bias must be float \[64\]"),
        ({"comfy_quant": torch.ones(2, 2)}, "1-D U8"),
        ({"marker": False}, "no comfy_quant marker"),
        ({"marker": False, "header": {"z": {"format": "int8_tensorwise"}}}, "no comfy_quant marker|no tensor of this layer"),
    ],
)  # fmt: skip
def test_layer_that_does_not_fit_is_named(given, words, tmp_path):
    layer_file(tmp_path / "x.safetensors", **given)
    with pytest.raises(FormatError, match=words) as caught:
        km.load(tmp_path / "x.safetensors")
    assert "a.b" in str(caught.value) or "'z'" in str(caught.value)


def test_missing_package_says_what_to_install(tmp_path, monkeypatch):
    from kitchen_core import plugins

    layer_file(tmp_path / "x.safetensors")
    installed = plugins.entry_points
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [e for e in installed(group=group) if e.dist.name != "kitchen-int8"]
    )
    plugins.forget_plugins()
    try:
        with pytest.raises(PluginError, match=r"layer 'a\.b'.*pip install kitchen-int8"):
            km.load(tmp_path / "x.safetensors")
        report = km.inspect_file(tmp_path / "x.safetensors")
        assert report["layers"][0]["format"] == "int8_tensorwise"
        assert "pip install kitchen-int8" in report["problems"][0]
    finally:
        monkeypatch.undo()
        plugins.forget_plugins()


def test_package_left_out_by_the_environment_is_not_called_missing(tmp_path, monkeypatch):
    from kitchen_core import plugins

    layer_file(tmp_path / "x.safetensors")
    monkeypatch.setenv("KITCHEN_PLUGINS", "kitchen-models")
    plugins.forget_plugins()
    try:
        with pytest.raises(PluginError, match=r"layer 'a\.b'.*left out by KITCHEN_PLUGINS='kitchen-models'"):
            km.load(tmp_path / "x.safetensors")
    finally:
        monkeypatch.undo()
        plugins.forget_plugins()


def test_bad_quantization_metadata(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors", {"_quantization_metadata": "{"})
    with pytest.raises(FormatError, match="_quantization_metadata is not JSON"):
        km.load(tmp_path / "x.safetensors")
    assert "_quantization_metadata" in km.inspect_file(tmp_path / "x.safetensors")["problems"][0]


@pytest.mark.parametrize("name", FORMATS)
def test_dict_of_layers_and_tensors_saves_and_loads(name, tmp_path):
    weight = torch.randn(64, 128, dtype=torch.bfloat16)
    linear = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
    state = {
        "l": QuantizedLinear.from_linear(linear, name),
        "t.weight": QuantizedTensor.quantize(weight, name),
        "plain": torch.ones(3),
    }
    km.save(state, tmp_path / "x.safetensors", {"note": "hi"})
    loaded = km.load(tmp_path / "x.safetensors")
    assert set(loaded) == {"l", "t", "plain"}
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    assert torch.equal(loaded["l"](x), state["l"](x))
    assert torch.equal(loaded["t"](x), torch.nn.functional.linear(x, state["t.weight"]))
    assert km.inspect_file(tmp_path / "x.safetensors")["metadata"]["note"] == "hi"


def test_save_refuses_an_ending_that_tells_readers_something_else(model, tmp_path):
    for name in ("x.pt", "x", ".safetensors"):
        with pytest.raises(FormatError, match=r"its name must end in \.safetensors"):
            km.save(model, tmp_path / name)
    with pytest.raises(FormatError, match="'a' is of type int; only tensors"):
        km.save({"a": 1}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_load_into_meta_takes_the_files_tensors(source, model, tmp_path):
    km.quantize_file(source, tmp_path / "q.safetensors", format="int8")
    with torch.device("meta"):
        empty = type(model)().eval()
    km.load_into(empty, tmp_path / "q.safetensors")
    km.load_into(model, tmp_path / "q.safetensors")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(empty(ids), model(ids))


def test_load_into_half_model_stands_for_half(source, model, tmp_path):
    km.quantize_file(source, tmp_path / "q.safetensors", format="int8")
    km.load_into(model.half(), tmp_path / "q.safetensors")
    layer = model.blocks[0].mlp.fc2
    assert (layer.compute_dtype, layer.bias.dtype, layer.weight_scale.dtype) == (
        torch.float16,
        torch.float16,
        torch.float32,
    )


def test_load_into_refuses_what_does_not_fit(source, model, tmp_path):
    path = tmp_path / "q.safetensors"
    km.quantize_file(source, path, format="int8")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loaded = km.load(path)
    with pytest.raises(FormatError, match="not in the model"):
        km.load_into(model, {"absent": loaded["blocks.0.mlp.fc1"]})
    with pytest.raises(FormatError, match=r"the model has \(128, 256\).*of another model: make"):
        km.load_into(model, {"blocks.0.mlp.fc2": loaded["blocks.0.mlp.fc1"]})
    with pytest.raises(FormatError, match="the model's is of type Embedding"):
        km.load_into(model, {"embed": loaded["blocks.0.mlp.fc1"]})
    with pytest.raises(FormatError, match=r"missing.*left over"):
        km.load_into(model, {**{k: v for k, v in loaded.items() if k != "embed.weight"}, "more": torch.ones(1)})
    with pytest.raises(FormatError, match=r"another shape.*of another model: make"):
        km.load_into(model, {**loaded, "embed.weight": torch.ones(2, 2)})
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items()), "nothing was changed"
    prefixed = {f"model.{name}": value for name, value in loaded.items()}
    assert km.load_into(model, prefixed, prefix="model.").missing == ()


def test_tied_parameters_count_as_present(source, model, tmp_path):
    model.lm_head.weight = model.embed.weight
    state = load_file(source)
    del state["lm_head.weight"]
    save_file(state, tmp_path / "tied.safetensors")
    km.quantize_file(tmp_path / "tied.safetensors", tmp_path / "q.safetensors", format="int8")
    assert km.load_into(model, tmp_path / "q.safetensors").missing == ()
    assert torch.equal(model.lm_head.weight, state["embed.weight"])
