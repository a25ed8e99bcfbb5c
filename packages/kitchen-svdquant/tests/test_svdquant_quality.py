"""What the low-rank branch is for: real weights, real activations, the error of the layer's output by rank."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "benchmarks/results/cpu/svdquant_quality.json"


@pytest.fixture(scope="module")
def bench():
    """bench/quality.py, which needs the demo's model."""
    demo = pytest.importorskip("kitchen_models.demo")
    try:
        demo.model_folder()
    except demo.PluginError as error:
        pytest.skip(str(error))
    path = ROOT / "packages/kitchen-svdquant/bench/quality.py"
    spec = importlib.util.spec_from_file_location("svdquant_quality", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the layers are small: more threads only wait for each other
    yield module
    torch.set_num_threads(threads)


def falls(means):
    """At least 15% at rank 32, and from each rank to the next."""
    return means[32] <= 0.85 * means[0] and means[0] > means[16] > means[32] > means[64]


@pytest.mark.parametrize(
    "layer",
    [
        "encoder.layer.0.attention.self.query",
        pytest.param("encoder.layer.3.attention.output.dense", marks=pytest.mark.slow),
        pytest.param("encoder.layer.5.output.dense", marks=pytest.mark.slow),
    ],
)
def test_output_error_falls_with_the_rank(bench, layer):
    rows = bench.measure([layer], ("activations",))
    assert falls(bench.mean_errors(rows, "activations"))


def test_recorded_errors_fall_over_all_layers(bench):
    found = json.loads(RECORDED.read_text())["rows"]
    layers = {row["layer"] for row in found}
    assert {(r["layer"], r["case"], r["rank"]) for r in found} == {
        (layer, method, rank) for layer in layers for method in bench.METHODS for rank in bench.RANKS
    }
    assert len(layers) == 37
    assert all(falls(bench.mean_errors(found, method)) for method in bench.METHODS)
