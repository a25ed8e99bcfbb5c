"""Reports: what they count against a computation of its own, pictures, one page that needs nothing else."""

import base64
import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_core.errors import FormatError
from kitchen_models import report
from kitchen_models.distributions import BINS_PER_OCTAVE, SHOWN, Distribution
from kitchen_models.report import examine

RULES = ["*fc1=w4a8", "*fc2=int8"]


@pytest.fixture
def quantized(source, tmp_path):
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, RULES, format="awq")
    return target


def test_distribution_of_blocks_is_that_of_the_whole():
    weight = torch.randn(200, 96)
    weight[:, 5] *= 10
    whole, parts = Distribution(), Distribution()
    whole.add(weight)
    for rows in weight.split(37):
        parts.add(rows)
    assert parts.count == whole.count == weight.numel()
    assert torch.equal(parts.histogram, whole.histogram)
    assert parts.rms == pytest.approx(float(weight.double().square().mean().sqrt()), rel=1e-6)
    w = weight.double()
    assert parts.kurtosis == pytest.approx(float(w.pow(4).mean() / w.square().mean() ** 2), rel=1e-5)
    assert parts.largest == float(weight.abs().max())
    columns = weight.abs().amax(0)
    assert parts.channel_ratio == pytest.approx(float(columns.max() / columns.median()))
    assert parts.channel_ratio > 5


def test_histogram_counts_each_weight_in_its_octave():
    made = Distribution()
    made.add(torch.tensor([[1.0, -1.0, 1.0, 1.0]]))
    shares = made.around_rms()
    at_one = -SHOWN[0] * BINS_PER_OCTAVE
    assert float(shares[at_one]) == 1.0
    made.add(torch.tensor([[0.0, 1e-30, 3e38, 1.0]]))
    assert float(made.around_rms().sum()) == pytest.approx(1.0)


def test_an_empty_or_zero_weight_has_a_distribution():
    made = Distribution()
    made.add(torch.zeros(0, 8))
    assert (made.rms, made.kurtosis, made.channel_ratio, made.largest_over_rms) == (0, 0, 0, 0)
    made.add(torch.zeros(2, 8))
    assert float(made.around_rms().sum()) == 0


def test_layers_totals_and_reasons(source, quantized):
    report = examine(source, quantized)
    before = load_file(source)
    assert [layer.error.name for layer in report.layers] == ["blocks.0.attn.q", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"]
    formats = report.by_format()
    assert {name: entry["layers"] for name, entry in formats.items()} == {
        "awq_w4a16": 1, "asym_w4a8_int8": 1, "int8_tensorwise": 1,
    }  # fmt: skip
    fc1 = next(layer for layer in report.layers if layer.error.name.endswith("fc1"))
    assert fc1.rule == "*fc1=w4a8"
    assert fc1.config["group_size"] == 16
    weight = before["blocks.0.mlp.fc1.weight"]
    assert fc1.weights.count == weight.numel()
    assert formats["asym_w4a8_int8"]["bits"] == pytest.approx(8 * fc1.error.bytes_after / weight.numel())
    assert set(report.left) == {"embed", "blocks.0.tiny", "lm_head"}
    assert report.bytes_after == quantized.stat().st_size
    assert math.isclose(
        report.verification.relative_l2**2 * sum(layer.weights.squares for layer in report.layers),
        sum((layer.error.relative_l2**2) * layer.weights.squares for layer in report.layers), rel_tol=1e-5,
    )  # fmt: skip


def test_output_errors_come_from_the_calibration(source, model, tmp_path):
    ids = [torch.randint(0, 100, (4, 16)) for _ in range(4)]
    seen = km.calibrate(model, ids)
    km.save_calibration(seen, tmp_path / "seen.safetensors")
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format="awq", calibration=seen)
    result = km.verify_files(source, target, tmp_path / "seen.safetensors")
    inputs = []
    layer = model.blocks[0].mlp.fc1
    hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].reshape(-1, 128)))
    with torch.no_grad():
        for batch in ids:
            model(batch)
    hook.remove()
    x = torch.cat(inputs).double()
    exact = x @ layer.weight.detach().double().t()
    made = x @ km.load(target)["blocks.0.mlp.fc1"].dequantize(torch.float32).double().t()
    error = next(e for e in result.layers if e.name == "blocks.0.mlp.fc1")
    assert error.output_l2 == pytest.approx(float((made - exact).norm() / exact.norm()), rel=1e-3)
    assert all(layer.calibrated for layer in examine(source, target, seen).layers)


class Page(HTMLParser):
    """Collects what a browser would load and show."""

    def __init__(self):
        super().__init__()
        self.sources, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_command_writes_pictures_and_a_page_that_needs_nothing_else(source, tmp_path, kitchen, capsys):
    target, folder = tmp_path / "q.safetensors", tmp_path / "new" / "report"
    assert kitchen("quantize", source, target, "--format", "int8", "--report", folder) == 0
    names = {"error.png", "weights.png", "outliers.png", "bytes.png"}
    assert {p.name for p in folder.iterdir()} == names | {"report.html", "report.json"}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG\r\n") for name in names)
    text = (folder / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert len(page.sources) == 4
    for source_text, name in zip(page.sources, ("error", "weights", "outliers", "bytes"), strict=True):
        data = base64.b64decode(source_text.removeprefix("data:image/png;base64,"), validate=True)
        assert data == (folder / f"{name}.png").read_bytes()
    assert not re.search(r"https?://", text), "nothing is loaded from elsewhere"
    assert {"blocks.0.mlp.fc1", "blocks.0.attn.q", "int8_tensorwise", "the output head stays as it is"} <= set(
        page.text
    )
    found = json.loads((folder / "report.json").read_text())
    assert {layer["name"] for layer in found["layers"]} == {"blocks.0.attn.q", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}
    assert found["bytes_after"] == target.stat().st_size
    capsys.readouterr()
    assert kitchen("report", source, target, tmp_path / "again") == 0
    assert "3 layers quantized (3 int8_tensorwise)" in capsys.readouterr().out
    with pytest.raises(FormatError, match="cannot write the report"):
        kitchen("report", source, target, source / "no")


def test_a_report_that_cannot_be_written_is_refused_before_the_work(source, tmp_path, kitchen):
    for folder in (source, source / "deeper" / "down"):
        with pytest.raises(FormatError, match=r"a report cannot go to .*is a file; give another folder"):
            kitchen("quantize", source, tmp_path / "q.safetensors", "--format", "int8", "--report", folder)
        assert not (tmp_path / "q.safetensors").exists()


def test_dry_run_writes_no_report(source, tmp_path, kitchen):
    folder = tmp_path / "report"
    assert (
        kitchen("quantize", source, tmp_path / "q.safetensors", "--format", "int8", "--dry-run", "--report", folder)
        == 0
    )
    assert not folder.exists()


def test_hostile_names_are_shown_and_do_nothing(source, tmp_path):
    state = load_file(source)
    state["<script>alert(1)</script>\x1b[31m.weight"] = torch.randn(128, 128)
    save_file(state, source)
    target = tmp_path / "q.safetensors"
    km.quantize_file(source, target, format="int8")
    km.write_report(source, target, tmp_path / "report")
    text = (tmp_path / "report" / "report.html").read_text()
    assert text.count("<script>") == 1, "ours"
    assert "\x1b" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[31m" in text


def test_a_file_of_another_tool_has_no_recipe_and_a_report(source, quantized, tmp_path):
    loaded = load_file(quantized)
    save_file(loaded, tmp_path / "foreign.safetensors")
    report = examine(source, tmp_path / "foreign.safetensors")
    assert len(report.layers) == 3
    assert {layer.rule for layer in report.layers} == {""}
    km.write_report(source, tmp_path / "foreign.safetensors", tmp_path / "report")


def test_pictures_show_whole_layers_plain_numbers_and_all_their_words(source, quantized, monkeypatch):
    """Of few layers with nearly equal errors too: nothing is drawn over a legend or beyond the edge of the picture."""
    figures = {}
    found = examine(source, quantized)
    for name, draw in report.PICTURES.items():
        monkeypatch.setattr(report, "_png", lambda figure, name=name: figures.update({name: figure}))
        draw(found)
    for name, figure in figures.items():
        figure.canvas.draw()
        page = figure.bbox.padded(1)
        for axes in figure.axes:
            low, high = axes.get_xlim()
            shown = [t for t in axes.get_xticks() if low <= t <= high]
            if "layer" in axes.get_xlabel():
                assert shown
                assert all(float(t).is_integer() for t in shown), (name, shown)
            if axes.get_yscale() == "log":
                words = [label.get_text() for label in axes.get_yticklabels()]
                assert all(re.fullmatch(r"\d*\.?\d+(e[-+]\d+)?", word) for word in words), words
                low, high = axes.get_ylim()
                assert sum(low <= t <= high for t in axes.get_yticks()) >= 2, (name, words)
                box = axes.get_legend().get_window_extent()
                assert not box.overlaps(axes.bbox.padded(-1)), name
                assert page.x0 <= box.x0 < box.x1 <= page.x1, name
    marks = [text.get_text() for text in figures["error"].axes[0].texts]
    entries = [text.get_text() for text in figures["error"].axes[0].get_legend().get_texts()]
    assert marks == ["1", "2", "3"]
    worst = max(found.layers, key=lambda layer: layer.error.relative_l2)
    assert f"1  {worst.error.name}" in entries
    assert figures["bytes"].axes[0].get_xlabel() == "KiB"
