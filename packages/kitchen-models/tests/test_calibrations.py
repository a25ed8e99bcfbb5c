import pytest
import torch
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_core import get_format, installed_formats
from kitchen_core.errors import FormatError, UnsupportedError

USERS = [name for name in installed_formats() if get_format(name).uses_calibration]
LAYERS = {"blocks.0.attn.q", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}


@pytest.fixture
def batches():
    return [torch.randint(0, 100, (2, 20)) for _ in range(5)]


def test_calibrate_sees_every_input_of_every_layer(model, batches):
    seen = []
    before = {key: value.clone() for key, value in model.state_dict().items()}
    made = km.calibrate(model, batches, progress=lambda *what: seen.append(what))
    assert set(made) == {*LAYERS, "blocks.0.tiny", "lm_head"}
    assert {c.count for c in made.values()} == {200}
    assert seen[0] == ("calibrating", 0, 5)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert set(km.calibrate(model, [{"ids": batches[0]}, (batches[1],)], "re:.*fc.")) == {
        "blocks.0.mlp.fc1",
        "blocks.0.mlp.fc2",
    }
    with pytest.raises(UnsupportedError, match="no linear layer was reached"):
        km.calibrate(model, batches, "absent")


def test_bad_inputs_name_the_layer(model, batches):
    model.blocks[0].attn.q.weight.data[0, 0] = float("nan")
    with pytest.raises(UnsupportedError, match=r"layer 'blocks\.0\.mlp\.fc1'.*finite"):
        km.calibrate(model, batches)
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", USERS)
def test_file_and_model_agree_bit_for_bit_and_differ_from_uncalibrated(name, model, source, batches, tmp_path, kitchen):
    made = km.calibrate(model, batches)
    km.save_calibration(made, tmp_path / "c.safetensors")
    target, plain = tmp_path / "q.safetensors", tmp_path / "p.safetensors"
    km.quantize_file(source, plain, format=name)
    assert kitchen("quantize", source, target, "--format", name, "--calibration", tmp_path / "c.safetensors") == 0
    loaded = type(model)().eval()
    km.load_into(loaded, target)
    report = km.quantize_(model, name, calibration=made)
    assert report.calibrated == LAYERS
    assert "3 calibrated" in report.summary()
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert all(torch.equal(mine[k].view(torch.uint8), theirs[k].view(torch.uint8)) for k in mine if mine[k].dim())
    key = "blocks.0.mlp.fc1.weight"
    assert not torch.equal(load_file(plain)[key], load_file(target)[key])


def test_names_that_fit_nothing_and_files_that_are_none(model, source, batches, tmp_path):
    if not USERS:
        pytest.skip("no format that uses a calibration is installed")
    made = {f"model.{name}": c for name, c in km.calibrate(model, batches).items()}
    with pytest.raises(UnsupportedError, match="differ by a prefix"):
        km.quantize_file(source, tmp_path / "q.safetensors", format=USERS[0], calibration=made)
    with pytest.raises(FormatError, match="is no calibration"):
        km.quantize_file(source, tmp_path / "q.safetensors", format=USERS[0], calibration=source)
    km.save_calibration(km.calibrate(model, batches), tmp_path / "c.safetensors")
    state = load_file(tmp_path / "c.safetensors")
    del state["lm_head/absmax"]
    save_file(state, tmp_path / "c.safetensors", {"kitchen_calibration": "1"})
    with pytest.raises(FormatError, match="'lm_head'"):
        km.load_calibration(tmp_path / "c.safetensors")["lm_head"]
    assert not (tmp_path / "q.safetensors").exists()
