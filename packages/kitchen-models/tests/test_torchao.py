"""kitchen's formats in torchao's quantize_. Needs torchao, which is no dependency of ours: a throw-away environment."""

from __future__ import annotations

import pytest
import torch

import kitchen_models as km
from kitchen_core import QuantizedLinear, installed_formats
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.testing import same_state

torchao = pytest.importorskip("torchao", reason="torchao is not installed here")
FORMATS = sorted(installed_formats())
ids = torch.arange(7)[None]


@pytest.fixture(scope="module")
def adapter():
    from kitchen_models.integrations import torchao as adapter

    return adapter


def layers(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_gives_the_bits_of_our_own(adapter, model, format):
    from torchao.quantization import quantize_

    other = type(model)().eval()
    other.load_state_dict(model.state_dict())
    quantize_(model, adapter.KitchenConfig(format), filter_fn=lambda m, name: ".mlp.fc" in name)
    km.quantize_(other, f"blocks.0.mlp.*={format}")
    assert set(layers(model)) == {"blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}
    assert same_state(model.state_dict(), other.state_dict())
    with torch.no_grad():
        assert torch.equal(model(ids), other(ids))


def test_rules_by_name_and_options(adapter, model):
    from torchao.quantization import FqnToConfig, quantize_

    rules = {
        "blocks.0.mlp.fc1": adapter.KitchenConfig("w4a8", {"group_size": 32}),
        r"re:blocks\.0\.mlp\..*": adapter.KitchenConfig("int8"), "re:.*tiny": None,
    }  # fmt: skip
    quantize_(model, FqnToConfig(rules), filter_fn=None)
    found = layers(model)
    assert {name: layer.format.name for name, layer in found.items()} == {
        "blocks.0.mlp.fc1": "asym_w4a8_int8",
        "blocks.0.mlp.fc2": "int8_tensorwise",
    }
    assert found["blocks.0.mlp.fc1"].config.group_size == 32


def test_what_a_format_cannot_hold_stays_and_is_said(adapter, model, caplog):
    from torchao.quantization import quantize_

    model.odd = torch.nn.Linear(100, 16)
    quantize_(model, adapter.KitchenConfig("svdquant"), filter_fn=lambda m, name: name == "odd")
    assert type(model.odd) is torch.nn.Linear
    assert "[16, 100] stays as it is" in caplog.text
    assert "multiple of 64" in caplog.text


def test_mistakes_are_errors(adapter, model):
    from torchao.quantization import quantize_

    with pytest.raises(FormatError, match="unknown format 'int9'"):
        adapter.KitchenConfig("int9")
    with pytest.raises(UnsupportedError, match="has no option group; it has: convrot_groupsize"):
        quantize_(model, adapter.KitchenConfig("int8", {"group": 3}))
    quantize_(model, adapter.KitchenConfig("int8"), filter_fn=lambda m, name: name.endswith("fc1"))
    with pytest.raises(UnsupportedError, match="quantized already"):
        quantize_(model, adapter.KitchenConfig("int8"), filter_fn=lambda m, name: name.endswith("fc1"))
    with pytest.raises(UnsupportedError, match="got RMSNorm"):
        quantize_(model, adapter.KitchenConfig("int8"), filter_fn=lambda m, name: name.endswith("norm"))


def test_config_survives_torchao_json(adapter):
    from torchao.core.config import config_from_dict, config_to_dict

    config = adapter.KitchenConfig("w4a8", {"group_size": 32})
    assert config_from_dict(config_to_dict(config)) == config


def test_weights_that_hold_no_floats_are_named():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from kitchen_models.integrations.torchao import KitchenConfig

    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(UnsupportedError, match=r"a weight is a \w+, and a plain float tensor is needed"):
        quantize_(model, KitchenConfig("int8"))
    with pytest.raises(UnsupportedError, match="a weight is on the meta device"):
        quantize_(torch.nn.Sequential(torch.nn.Linear(128, 128, device="meta")), KitchenConfig("int8"))
