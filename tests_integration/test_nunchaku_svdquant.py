"""A file as nunchaku has them, with a fused qkv and an unsigned fc2, read, taken apart and run end to end."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kitchen_core import QuantizedTensor
from kitchen_core.layouts import nunchaku
from kitchen_core.packing import pack_nibbles, unpack_nibbles
from kitchen_core.reference.svdquant import GROUP, UNSIGNED_SHIFT
from kitchen_core.testing import assert_close, tolerance, unit_roundoff

km = pytest.importorskip("kitchen_models")
rework = pytest.importorskip("kitchen_svdquant.rework")

WIDTH, HIDDEN, RANK = 128, 256, 16
BF16 = torch.bfloat16


def layer(n, k):
    """Tensors of a layer in natural order, and its bias."""
    return {
        "qdata": pack_nibbles(torch.randint(-8, 8, (n, k), dtype=torch.int8)),
        "scale": (torch.rand(k // GROUP, n) * 0.02 + 0.01).to(BF16),
        "proj_down": (torch.randn(k, RANK) / k**0.5).to(BF16),
        "proj_up": (torch.randn(n, RANK) / 4).to(BF16),
        "smooth_factor": (torch.rand(k) + 0.5).to(BF16),
    }, torch.randn(n).to(BF16)


def stored(tensors, bias, old_names):
    """As nunchaku (Python), or its C++ code and deepcompressor, write it."""
    names = ("smooth", "smooth_orig", "lora_down", "lora_up") if old_names else (
        "smooth_factor", "smooth_factor_orig", "proj_down", "proj_up"
    )  # fmt: skip
    smooth = nunchaku.pack_vector(tensors["smooth_factor"])
    return {
        "qweight": nunchaku.pack_qweight(tensors["qdata"]), "wscales": nunchaku.pack_wscales(tensors["scale"]),
        names[0]: smooth, names[1]: smooth.clone(), names[2]: nunchaku.pack_lora_down(tensors["proj_down"]),
        names[3]: nunchaku.pack_lora_up(tensors["proj_up"]), "bias": nunchaku.pack_vector(bias),
    }  # fmt: skip


def exact(x, tensors, bias, act_unsigned):
    """The layer in float64 from its definition, and the magnitude of what is summed."""
    shifted = x.double() + (UNSIGNED_SHIFT if act_unsigned else 0.0)
    v = (shifted.float() / tensors["smooth_factor"].float()).unflatten(-1, (-1, GROUP))
    top = 15 if act_unsigned else 7
    scale = v.abs().amax(-1, keepdim=True).clamp_min(1e-10) / top
    codes = (v / scale).round().clamp(0 if act_unsigned else -7, top)
    a = (codes.double() * scale.double()).flatten(-2)
    w = unpack_nibbles(tensors["qdata"], signed=True).double() * tensors["scale"].double().t().repeat_interleave(
        GROUP, 1
    )
    down, up = tensors["proj_down"].double(), tensors["proj_up"].double()
    y = a @ w.t() + x.double() @ down @ up.t() + bias.double()
    return y, a.abs() @ w.abs().t() + x.double().abs() @ down.abs() @ up.abs().t() + bias.double().abs()


def check(y, x, tensors, bias, act_unsigned):
    want, size = exact(x, tensors, bias, act_unsigned)
    t = tolerance(y.dtype, 2 * x.shape[-1] + RANK, "svdquant_w4a4")
    assert_close(y, want, relative=t.relative, absolute=(t.accumulation + unit_roundoff(BF16) / 128) * size)


@pytest.mark.parametrize("old_names", [False, True], ids=["nunchaku", "deepcompressor"])
def test_fused_qkv_and_unsigned_fc2_run_end_to_end(old_names, tmp_path):
    made = {"blocks.0.attn.to_qkv": layer(3 * WIDTH, WIDTH), "blocks.0.ff.net.0.proj": layer(HIDDEN, WIDTH),
            "blocks.0.ff.net.2": layer(WIDTH, HIDDEN)}  # fmt: skip
    flat = {
        f"{name}.{key}": tensor.contiguous()
        for name, (tensors, bias) in made.items()
        for key, tensor in stored(tensors, bias, old_names).items()
    }
    save_file(flat, tmp_path / "n.safetensors", {"model_class": "X"})
    report = km.convert_file(tmp_path / "n.safetensors", tmp_path / "c.safetensors")
    assert report.unsigned == ("blocks.0.ff.net.2",)
    loaded = km.load(tmp_path / "c.safetensors")
    for name, (tensors, bias) in made.items():
        found = loaded[name]
        assert found.config.act_unsigned == (name == "blocks.0.ff.net.2")
        assert all(torch.equal(found.inner()[key], tensors[key]) for key in tensors)
        assert torch.equal(found.bias, bias)

    x = torch.randn(9, WIDTH).to(BF16)
    fused, bias = loaded["blocks.0.attn.to_qkv"], loaded["blocks.0.attn.to_qkv"].bias
    pieces = rework.split_rows(fused.inner(), fused.config, (WIDTH, WIDTH, WIDTH), bias)
    heads = [QuantizedTensor(part, fused.format, fused.config, BF16) for part, _ in pieces]
    shared = heads[0].quantize_activation(x)  # once, for q, k and v
    qkv = torch.cat([w.linear(shared, b) for w, (_, b) in zip(heads, pieces, strict=True)], 1)
    check(qkv, x, *made["blocks.0.attn.to_qkv"], False)

    hidden = F.gelu(loaded["blocks.0.ff.net.0.proj"](x).float()).to(BF16)
    check(loaded["blocks.0.ff.net.2"](hidden), hidden, *made["blocks.0.ff.net.2"], True)
