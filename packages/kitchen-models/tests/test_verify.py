import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_core import installed_formats
from kitchen_core.errors import FormatError


@pytest.mark.parametrize("name", list(installed_formats()))
def test_errors_are_those_of_the_dequantized_weights(name, source, tmp_path):
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format=name)
    result = km.verify_files(source, target)
    loaded, before = km.load(target), load_file(source)
    assert {e.name for e in result.layers} == {n for n, v in loaded.items() if isinstance(v, torch.nn.Module)}
    for error in result.layers:
        weight = before[f"{error.name}.weight"]
        difference = loaded[error.name].dequantize(torch.float32) - weight
        assert math.isclose(error.relative_l2, float(difference.norm() / weight.norm()), rel_tol=1e-5)
        assert error.max_abs == float(difference.abs().max())
        assert error.bytes_before == weight.nbytes
    assert [e.relative_l2 for e in result.layers] == sorted((e.relative_l2 for e in result.layers), reverse=True)
    assert (result.missing, result.added) == ((), ())
    assert result.identical == len(before) - len(result.layers)


def test_command_table_json_plot_and_exit_code(source, tmp_path, kitchen, capsys):
    target, picture = tmp_path / "q.safetensors", tmp_path / "error.png"
    km.quantize_file(source, target, format="int8")
    assert kitchen("verify", source, target, "--plot", picture, "--max-error", "0.5") == 0
    told = capsys.readouterr().out
    assert "3 layers changed" in told
    assert told.endswith(f"plot: {picture}\n")
    assert kitchen("verify", source, target, "--plot", picture, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["identical"]
    assert f"plot: {picture}" in captured.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert kitchen("verify", source, target, "--max-error", "1e-6", "--json") == 1
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["layers"]) == 3
    assert "3 layers exceed --max-error" in captured.err
    for name in ("", tmp_path / "noending", tmp_path / "no" / "x.doc"):
        with pytest.raises(FormatError, match=r"its ending says what to write; give a path ending in \.png"):
            kitchen("verify", source, target, "--plot", name)
        assert capsys.readouterr().out == "", "before the work"
    assert {p.name for p in tmp_path.iterdir()} == {"source.safetensors", "q.safetensors", "error.png"}
    for number in ("nan", "-1", "many"):
        with pytest.raises(SystemExit):
            kitchen("verify", source, target, "--max-error", number)
        assert f"must be a number of 0 or more, such as 0.02, got '{number}'" in capsys.readouterr().err


def test_files_in_the_wrong_order_are_refused(source, tmp_path, kitchen, capsys):
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format="int8")
    with pytest.raises(FormatError, match=r"blocks.*the first file is the quantized one; swap them"):
        kitchen("verify", target, source)
    assert capsys.readouterr().out == ""


def test_a_plot_that_cannot_be_written_costs_the_picture_alone(source, tmp_path, kitchen, capsys):
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format="int8")
    (tmp_path / "p.png").mkdir()
    with pytest.raises(FormatError, match="cannot write the plot"):
        kitchen("verify", source, target, "--plot", tmp_path / "p.png")
    assert "3 layers changed" in capsys.readouterr().out


def test_the_folder_of_a_plot_is_made(source, tmp_path, kitchen):
    target, picture = tmp_path / "q.safetensors", tmp_path / "new" / "deep" / "p.png"
    km.quantize_file(source, target, format="int8")
    with pytest.raises(FormatError, match="swap them"):
        kitchen("verify", target, source, "--plot", picture)
    assert not (tmp_path / "new").exists(), "it goes again where nothing was drawn"
    assert kitchen("verify", source, target, "--plot", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_changed_missing_and_added_plain_tensors_are_told(source, tmp_path, kitchen):
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format="int8")
    loaded = km.load(target)
    loaded["embed.weight"] = loaded["embed.weight"] * 2
    loaded["blocks.0.norm.weight"] = torch.full((128,), float("nan"))
    loaded["new"] = torch.ones(1)
    del loaded["lm_head.weight"]
    km.save(loaded, target)
    result = km.verify_files(source, target)
    assert math.isnan(result.layers[0].relative_l2), "NaN is the worst"
    assert next(e for e in result.layers if e.name == "embed.weight").relative_l2 == pytest.approx(1.0)
    assert (result.missing, result.added) == (("lm_head.weight",), ("new",))
    assert kitchen("verify", source, target) == 1
    assert json.dumps(result.as_json(), allow_nan=False)


def test_files_of_two_models_are_refused(source, tmp_path):
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format="int8")
    state = load_file(source)
    state["blocks.0.mlp.fc1.weight"] = torch.zeros(64, 64)
    save_file(state, source)
    with pytest.raises(FormatError, match="not of one model"):
        km.verify_files(source, target)


def test_a_file_against_itself_has_no_error(source, tmp_path):
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format="int8")
    result = km.verify_files(target, target)
    assert result.layers == ()
    assert result.identical == len(load_file(target))


def test_a_largest_error_with_nothing_to_judge_is_not_kept(source, kitchen, capsys):
    assert kitchen("verify", source, source) == 0
    captured = capsys.readouterr()
    assert "no float layer of IN is quantized in OUT" in captured.out
    assert captured.err == ""
    assert kitchen("verify", source, source, "--max-error", "0.001") == 1
    assert "--max-error has nothing to judge" in capsys.readouterr().err
