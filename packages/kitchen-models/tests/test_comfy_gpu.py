"""comfy-kitchen's layouts on a GPU after one ``register()``: our kernels run, no worse than its eager backend, compiled too.

Needs comfy-kitchen, no dependency of ours: a throw-away environment.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kitchen_core
from kitchen_core import get_format
from kitchen_core.testing import relative_error
from kitchen_models.integrations import comfy

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
DEVICE = "cuda"
N, K, R = 768, 1024, 32
ROWS = (1, 5, 16, 33, 64, 300)


@pytest.fixture
def ck(monkeypatch):
    """comfy_kitchen with kitchen registered; its registry is put back afterwards."""
    module = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed here")
    registry = module.registry
    before = registry._priority
    monkeypatch.setenv("COMFY_KITCHEN_SVDQUANT_DIRECT_CUDA", "")  # so that it is put back
    monkeypatch.delenv("COMFY_KITCHEN_SVDQUANT_DIRECT_CUDA")
    comfy.register()
    yield module
    registry.set_priority(before)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, BF16)


def stored(format, **options):
    """The tensors of one of our formats."""
    made = get_format(format)
    return made.quantize(normal(N, K, seed=1) / K**0.5, made.config_for(N, K, **options))


def int8(layouts):
    weight = normal(N, K, seed=1) / K**0.5
    return layouts.QuantizedTensor.from_float(
        weight, "TensorWiseINT8Layout", per_channel=True, convrot=True, convrot_groupsize=256
    )


def w4a8(layouts):
    return layouts.QuantizedTensor.from_float(normal(N, K, seed=1) / K**0.5, "AsymW4A8Int8Layout")


def awq(layouts):
    t = stored("awq", group_size=64)
    layout = layouts.get_layout_class("TensorCoreAWQW4A16Layout")
    params = layout.Params(scale=t["scale"], zeros=t["zeros"], group_size=64, orig_dtype=BF16, orig_shape=(N, K))
    return layouts.QuantizedTensor(t["qdata"], "TensorCoreAWQW4A16Layout", params)


def svdquant(layouts):
    t = stored("svdquant", rank=R)
    layout = layouts.get_layout_class("TensorCoreSVDQuantW4A4Layout")
    fields = {name: t[name] for name in ("scale", "proj_down", "proj_up", "smooth_factor")}
    params = layout.Params(orig_dtype=BF16, orig_shape=(N, K), **fields)
    return layouts.QuantizedTensor(t["qdata"], "TensorCoreSVDQuantW4A4Layout", params)


def exact(weight):
    """The dense weight in fp32; the layouts themselves give bf16."""
    codes, p = weight._qdata, weight._params
    if hasattr(p, "proj_up"):
        return kitchen_core.dequantize_svdquant_w4a4(
            codes, p.scale, p.smooth_factor, p.proj_down, p.proj_up, torch.float32
        )
    if hasattr(p, "zeros"):
        return kitchen_core.dequantize_awq(codes, p.scale, p.zeros, p.group_size, torch.float32)
    if hasattr(p, "s_channel"):
        return kitchen_core.dequantize_w4a8_weight(
            codes, p.scale, p.s_channel, p.codebook, None, torch.float32, p.group_size, p.convrot_groupsize
        )
    return kitchen_core.dequantize_int8(codes, p.scale, torch.float32, p.convrot_groupsize)


LAYOUTS = {"int8": int8, "w4a8": w4a8, "awq": awq, "svdquant": svdquant}


@pytest.fixture(params=LAYOUTS)
def weight(request, ck):
    from comfy_kitchen import tensor

    return LAYOUTS[request.param](tensor)


def test_layouts_run_our_kernels_and_are_no_worse_than_eager(ck, weight):
    report = ck.registry.list_backends()[comfy.BACKEND]
    assert report["available"]
    assert not report["disabled"]
    bias = normal(N, seed=3)
    dense = exact(weight).double()
    for rows in ROWS:
        x = normal(rows, K, seed=rows)
        x[:, 7] *= 20
        with kitchen_core.trace() as ran:
            y = F.linear(x, weight, bias)
        providers = {provider for op, provider in ran if op in comfy.DECIDING_OPS.values() or op.endswith("_linear")}
        assert providers, f"M={rows}: kitchen was not asked"
        assert not any(provider.startswith("core/eager") for provider in providers), (rows, providers)
        with ck.use_backend("eager"):
            theirs = F.linear(x, weight, bias)
        truth = F.linear(x.double(), dense, bias.double())
        # Both quantize to the same grid and round once at the end; eager rounds scales and sums to bf16 on the way too, so
        # some of the rows x K activations round otherwise. A norm of so many varies by 1 / sqrt(2 rows K) of itself.
        chance = 4 / (2 * rows * K) ** 0.5
        assert relative_error(y, truth) <= (1 + chance) * relative_error(theirs, truth), rows


def test_layouts_compile_to_one_graph_and_replay_as_a_cuda_graph(ck, weight):
    x, bias = normal(33, K, seed=2), normal(N, seed=3)
    y = F.linear(x, weight, bias)
    torch._dynamo.reset()
    made = torch.compile(F.linear, fullgraph=True, backend="aot_eager")
    with kitchen_core.trace() as ran:
        assert torch.equal(made(x, weight, bias), y)
    assert ran, "kitchen was not asked"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.linear(x, weight, bias)
    for seed in (2, 9):
        x.copy_(normal(33, K, seed=seed))
        graph.replay()
        assert torch.equal(out, F.linear(x, weight, bias))
