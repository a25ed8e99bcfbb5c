"""The bench of whole models, at small sizes on the CPU: its quality claims hold there too, and the run itself works."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from kitchen_core import QuantizedLinear, installed_formats

BENCH = Path(__file__).resolve().parent.parent / "bench" / "end_to_end.py"


def load_bench():
    spec = importlib.util.spec_from_file_location("end_to_end_bench", BENCH)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def bench():
    if len(installed_formats()) < 5:
        pytest.skip("the bench runs all formats, and some are not installed")
    return load_bench()


@pytest.fixture(scope="module")
def rows(bench):
    return {(row["model"], row["case"]): row for row in bench.run(bench.TINY, device="cpu")}


def test_awq_is_close_to_its_dequantized_weights(bench, rows):
    assert rows["image", "awq"]["psnr_dequantized"] >= bench.AWQ_LEAST_DB


def test_every_format_runs_both_models(bench, rows):
    assert set(rows) == {(model, case) for model in ("image", "decode") for case in bench.FORMATS}
    for row in rows.values():
        assert row["weight_bytes"] < 0.6 * row["weight_bytes_bf16"]
        assert row["psnr_dequantized"] >= row["psnr_original"] - 1, (
            "the dequantized weights hold the format's own error"
        )


def test_folding_norms_and_residuals_into_the_linears_changes_no_quality(bench, rows):
    for case in bench.FORMATS:
        row = rows["decode", case]
        assert row["rel_dequantized_fused"] <= 1.5 * row["rel_dequantized"] + 0.01


def test_a_model_in_a_format_keeps_the_layers_that_are_none_of_it(bench):
    generator = torch.Generator().manual_seed(0)
    model = bench.ImageModel(bench.TINY, generator)
    noise, text = torch.randn(1, 8, 64).bfloat16(), torch.randn(1, 4, 256).bfloat16()
    sigma = torch.ones(1)
    samples = bench.input_samples(model, lambda m: m(noise, text, sigma))
    made = bench.quantized(model, "svdquant", samples)
    formats = {name: m.format.name for name, m in made.named_modules() if isinstance(m, QuantizedLinear)}
    assert formats["blocks.0.image.stream_mod"] == "awq_w4a16"
    assert formats["blocks.1.text.mlp_down"] == "svdquant_w4a4"
    assert not any(name in formats for name in ("latent_embedder", "time_embedder", "final_norm_out"))
    assert len(formats) == bench.TINY.blocks * 14
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules()), "the float model is as it was"
    assert made.latent_embedder.weight.data_ptr() == model.latent_embedder.weight.data_ptr(), "and shares what it can"
    dense = bench.dequantized(made)
    assert all(type(m) is nn.Linear for m in dense.modules() if isinstance(m, nn.Linear))


def test_psnr_is_of_the_largest_magnitude(bench):
    reference = torch.tensor([0.0, -4.0, 2.0, 1.0])
    assert bench.psnr(reference + 0.4, reference) == pytest.approx(20.0, abs=1e-4)
