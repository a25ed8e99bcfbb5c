import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_core import get_format, installed_formats, plugins


@pytest.mark.parametrize("name", list(installed_formats()))
def test_every_format_shows_its_logical_shape_and_all_bytes(name, source, tmp_path, kitchen, capsys):
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format=name)
    report = km.inspect_file(target)
    layers = {entry["name"]: entry for entry in report["layers"]}
    assert layers["blocks.0.mlp.fc1"]["shape"] == [256, 128]
    assert layers["blocks.0.mlp.fc1"]["config"] is not None
    assert layers["embed.weight"] == {
        **layers["embed.weight"],
        "format": "F32",
        "quantized": False,
        "bytes": 100 * 128 * 4,
    }
    assert report["problems"] == []
    assert sum(entry["bytes"] for entry in report["layers"]) == report["tensor_bytes"]
    assert report["file_bytes"] == target.stat().st_size
    assert report["totals"][0] == {**report["totals"][0], "format": name, "count": 3}
    assert kitchen("inspect", target) == 0
    text = capsys.readouterr().out
    assert "256x128" in text
    assert f"{name}: 3 quantized layers" in text
    assert kitchen("inspect", target, "--json") == 0
    assert json.loads(capsys.readouterr().out)["totals"] == report["totals"]


def test_no_tensor_is_loaded(source, tmp_path, monkeypatch):
    km.quantize_file(source, tmp_path / "q.safetensors", format="int8")

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("kitchen_models.files.safe_open", refuse)
    km.inspect_file(tmp_path / "q.safetensors")


def test_problems_are_listed_and_the_rest_is_shown(source, tmp_path, kitchen, capsys):
    state = load_file(source)
    state |= {
        "u.weight": torch.zeros(64, 64, dtype=torch.int8),
        "e.weight": torch.zeros(64, 64, dtype=torch.int8),
        "e.comfy_quant": torch.zeros(4, dtype=torch.uint8),
        "n.weight": torch.zeros(64, 64, dtype=torch.int8),
        "n.comfy_quant": torch.tensor(list(b'{"format": "int3_new"}'), dtype=torch.uint8),
        "evil\x1b[31m": torch.zeros(1),
    }
    save_file(
        state,
        tmp_path / "x.safetensors",
        {"_quantization_metadata": '{"layers": {"gone": {"format": "int8_tensorwise"}}}'},
    )
    assert kitchen("inspect", tmp_path / "x.safetensors") == 1
    text = capsys.readouterr().out
    assert "\x1b" not in text
    problems = [line for line in text.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 4
    for words in (
        "u.weight: codes without",
        "e: its marker is empty",
        "n: unknown format 'int3_new'",
        "gone: the header describes",
    ):
        assert any(words in problem for problem in problems), words
    assert "blocks.0.mlp.fc1.weight" in text


def test_a_problem_of_many_layers_is_said_once(source, tmp_path, kitchen, capsys, monkeypatch):
    km.quantize_file(source, tmp_path / "q.safetensors", format="int8")
    monkeypatch.setenv("KITCHEN_PLUGINS", "kitchen-models")
    plugins.forget_plugins()
    try:
        assert kitchen("inspect", tmp_path / "q.safetensors") == 1
        (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
        assert told.startswith("problem: blocks.0.attn.q and 2 more: format 'int8_tensorwise'")
        assert len(km.inspect_file(tmp_path / "q.safetensors")["problems"]) == 3
    finally:
        monkeypatch.undo()
        plugins.forget_plugins()


def test_scale_of_wrong_shape_is_a_problem_seen_from_the_header(tmp_path):
    format = get_format("int8")
    marker = json.dumps(format.marker(format.config_for(64, 64))).encode()
    save_file(
        {
            "a.weight": torch.zeros(64, 64, dtype=torch.int8),
            "a.weight_scale": torch.ones(3),
            "a.comfy_quant": torch.tensor(list(marker), dtype=torch.uint8),
        },
        tmp_path / "x.safetensors",
    )
    (entry,) = km.inspect_file(tmp_path / "x.safetensors")["layers"]
    assert "weight_scale must be float32 with 1 or N=64" in entry["problem"]
