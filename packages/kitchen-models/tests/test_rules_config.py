"""The config of ``from_pretrained``, which the adapters to both libraries share. Each needs its library."""

from __future__ import annotations

import importlib
import json

import pytest

from kitchen_core.errors import UnsupportedError


@pytest.fixture(params=[("diffusers", "0.36"), ("transformers", "5")], ids=lambda library: library[0])
def config_class(request):
    library, version = request.param
    pytest.importorskip(library, minversion=version, reason=f"{library} {version} is not installed here")
    return importlib.import_module(f"kitchen_models.integrations.{library}").KitchenConfig


def test_config_survives_its_own_json(config_class):
    config = config_class({"*.attn.*": ("w4a8", {"group_size": 32})}, format="int8")
    for given in (config.to_dict(), json.loads(config.to_json_string())):
        assert config_class.from_dict(given).as_rules() == config.as_rules()


def test_an_option_outside_of_options_is_told_where_it_goes(config_class):
    with pytest.raises(
        UnsupportedError, match=r"got group_size; .*options: KitchenConfig\(format='int8', options=\{'group"
    ):
        config_class("int8", group_size=3)


def test_keys_that_a_newer_version_wrote_are_told_and_left_out(config_class, caplog):
    config = config_class("int8")
    again = config_class.from_dict({**config.to_dict(), "future": {"a": 1}, "others": 1, "version": 9})
    assert again.as_rules() == config.as_rules()
    assert "future, others, version" in caplog.text
    caplog.clear()
    config_class.from_dict(config.to_dict())
    assert not caplog.text
