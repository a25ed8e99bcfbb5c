"""Files of this package and of comfy-kitchen 0.2.40: each side's tensors in the other's layout class.

Needs its wheel on the path, and no GPU.
"""

from __future__ import annotations

import pytest
import torch

from kitchen_core import ops
from kitchen_core.arithmetic import hadamard_rotate
from kitchen_core.testing import assert_equal
from kitchen_w4a8.format import W4A8Format, W6A8Format

layouts = pytest.importorskip("comfy_kitchen.tensor.w4a8_int8", reason="needs comfy-kitchen, for its layout class")
Layout = layouts.AsymW4A8Int8Layout

FORMATS = {4: W4A8Format, 6: W6A8Format}
SUFFIXES = {"qdata": "", "s_rel": "_s_rel", "s_channel": "_s_channel", "codebook": "_codebook"}


def integers(dense: torch.Tensor, s_channel: torch.Tensor) -> torch.Tensor:
    """The INT8 values that a dequantized weight stands for: rotated again (the rotation is its own inverse) and unscaled.

    Both sides err by some 1e-6 of a row's largest element, and a step of the grid is a 127th of it at least.
    """
    return (hadamard_rotate(dense, 256) / s_channel[:, None]).round()


def their_parameters(tensors: dict, shape, group: int):
    return Layout.Params(
        scale=tensors["s_rel"], s_channel=tensors["s_channel"], codebook=tensors.get("codebook"), orig_dtype=torch.float32,
        orig_shape=shape, group_size=group, convrot_groupsize=256,
    )  # fmt: skip


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("group", [16, 32])
def test_our_file_loads_in_their_layout_with_equal_codes_and_scales(bits, group):
    format, weight = FORMATS[bits], torch.randn(48, 512)
    config = format.config_for(48, 512, group_size=group)
    tensors = format.quantize(weight, config)
    parameters = their_parameters(tensors, (48, 512), group)
    saved = Layout.state_dict_tensors(tensors["qdata"], parameters)
    ours = {key.removeprefix("weight"): t for key, t in format.state_dict(tensors).items()}
    assert set(saved) == set(ours)
    for suffix, tensor in saved.items():
        assert tensor.dtype == ours[suffix].dtype
        assert_equal(tensor.float(), ours[suffix].float(), suffix)
    decoded = ops.decode_w4a8_weight(tensors["qdata"], tensors["s_rel"], tensors.get("codebook"), group).float()
    assert_equal(integers(Layout.dequantize(tensors["qdata"], parameters), tensors["s_channel"]), decoded)


@pytest.mark.parametrize("bits", [4, 6])
def test_their_file_loads_in_ours_and_decodes_alike(bits):
    format, weight = FORMATS[bits], torch.randn(48, 512)
    qdata, parameters = Layout.quantize(weight, bits=bits)
    state = {f"weight{suffix}": t for suffix, t in Layout.state_dict_tensors(qdata, parameters).items()}
    tensors = format.from_state_dict(state)
    marker = {"format": format.name, "group_size": 16, "convrot_groupsize": 256}
    config = format.config_from_marker(marker, {name: tuple(t.shape) for name, t in tensors.items()})
    format.check_names(tensors)
    format.check(tensors, config)
    for name, suffix in SUFFIXES.items():
        if name in tensors:
            assert_equal(tensors[name].float(), state[f"weight{suffix}"].float(), name)
    decoded = ops.decode_w4a8_weight(qdata, parameters.scale, parameters.codebook, 16).float()
    assert_equal(integers(Layout.dequantize(qdata, parameters), parameters.s_channel), decoded)
    assert_equal(integers(format.dequantize(tensors, config), parameters.s_channel), decoded)
