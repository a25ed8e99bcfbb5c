"""The plug-in for vLLM against a STUB of its interface: vLLM itself is in ``test_vllm_library.py``, where it is installed.

The stub has what vLLM 0.33 documents: the registry of linear kernels, the base class and its config. So these tests say that
the plug-in keeps to that interface and computes the right thing, and nothing about vLLM's own loading or serving.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum, auto
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kitchen_core
from kitchen_core.errors import UnsupportedError
from kitchen_models.integrations import vllm as adapter


class PlatformEnum(Enum):
    CUDA = auto()
    CPU = auto()


@dataclass
class Config:
    is_static_input_scheme: bool = False
    is_channelwise: bool = True
    input_symmetric: bool = True


class Int8ScaledMMLinearKernel:
    def __init__(self, c, layer_param_names):
        assert self.can_implement(c)[0]
        self.config, self.layer_param_names = c, layer_param_names


class Cutlass(Int8ScaledMMLinearKernel):
    """Stands for vLLM's own."""


@pytest.fixture
def no_vllm(monkeypatch):
    """As if vLLM had not been imported by another test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    adapter.kernel_class.cache_clear()
    yield
    adapter.kernel_class.cache_clear()


@pytest.fixture
def stub(no_vllm, monkeypatch):
    """vLLM's modules, as far as the plug-in looks into them."""
    kernels = ModuleType(adapter.KERNELS)
    kernels._POSSIBLE_INT8_KERNELS = {PlatformEnum.CUDA: [Cutlass]}

    def register_linear_kernel(kernel_class, platform, kernel_type="mp"):
        assert kernel_type == "int8"
        kernels._POSSIBLE_INT8_KERNELS.setdefault(platform, []).append(kernel_class)

    kernels.register_linear_kernel = register_linear_kernel
    base = ModuleType(adapter._BASE[0])
    base.Int8ScaledMMLinearKernel = Int8ScaledMMLinearKernel
    platforms = ModuleType("vllm.platforms.interface")
    platforms.PlatformEnum = PlatformEnum
    for module in (kernels, base, platforms):
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return kernels


def layer_of(weight, scale, **attributes):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    for name in ("input_scale", "input_zero_point", "azp_adj"):
        setattr(layer, name, None)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


NAMES = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]


def test_registers_once_and_first(stub):
    assert adapter.register()
    assert adapter.register()  # vLLM calls it more than once in a process
    chosen = stub._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA]
    assert [kernel.__name__ for kernel in chosen] == ["KitchenInt8LinearKernel", "Cutlass"]
    assert issubclass(chosen[0], Int8ScaledMMLinearKernel)


@pytest.mark.parametrize("scales", ["channel", "tensor", "parts"])
def test_a_layer_gives_the_bits_of_our_op(stub, scales):
    weight = torch.randint(-127, 128, (48, 64), dtype=torch.int8)
    scale = {"channel": torch.rand(48, 1), "tensor": torch.rand(1), "parts": torch.rand(3)}[scales] + 0.01
    widths = [16, 8, 24]
    layer = layer_of(weight, scale, logical_widths=widths if scales == "parts" else [48])
    kernel = adapter.kernel_class()(Config(is_channelwise=scales == "channel"), NAMES)
    kernel.process_weights_after_loading(layer)
    assert layer.weight_scale.shape == (48, 1)
    rows = scale.reshape(-1)
    rows = torch.cat([rows[i].expand(w) for i, w in enumerate(widths)]) if scales == "parts" else rows.expand(48)
    x, bias = torch.randn(2, 5, 64).bfloat16(), torch.randn(48).bfloat16()
    y = kernel.apply_weights(layer, x, bias)
    assert torch.equal(y, kitchen_core.int8_linear(x, weight, rows.reshape(48, 1).contiguous(), bias, torch.bfloat16))
    assert y.shape == (2, 5, 48)


def test_what_it_cannot_do_is_said_with_a_reason(stub):
    kernel = adapter.kernel_class()
    assert kernel.can_implement(Config()) == (True, None)
    assert "static input scale" in kernel.can_implement(Config(is_static_input_scheme=True))[1]
    assert "zero point" in kernel.can_implement(Config(input_symmetric=False))[1]
    if not torch.cuda.is_available():
        assert kernel.is_supported() == (False, "kitchen serves this on CUDA devices only")
    with pytest.raises(UnsupportedError, match="5 weight scales fit neither 48 rows"):
        adapter.scale_by_row(torch.ones(5), 48, [24, 24])


def test_without_vllm_nothing_is_raised(no_vllm, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert not adapter.register()
    assert "vLLM keeps its own INT8 kernels" in caplog.text


def test_another_interface_is_named(stub, monkeypatch, caplog):
    monkeypatch.delattr(sys.modules[adapter._BASE[0]], "Int8ScaledMMLinearKernel")
    adapter.kernel_class.cache_clear()
    assert not adapter.register()
    assert "no Int8ScaledMMLinearKernel" in caplog.text


@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("vllm.general_plugins", "kitchen_models.integrations.vllm:register"),
        ("sglang.multimodal_gen.plugins", "kitchen_models.integrations.comfy:register"),
    ],
)
def test_entry_points_are_declared_and_resolve(group, target):
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][group] == {"kitchen": target}
    for entry in entry_points(group=group, name="kitchen"):  # as installed, which an older installation may lack
        assert callable(entry.load())
    module, _, name = target.partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))
