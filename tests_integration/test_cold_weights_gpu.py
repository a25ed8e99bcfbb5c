"""Layer after layer with weights that come from memory, not from the L2: each call gives the bits of the first.

A model's weights are cold at every call, a test's one layer never is. A kernel that gives a stage of its ring back before its
loads of it have ended was right with hot weights, and wrong in one of 200 calls with cold ones; no sanitizer saw it. So here
every kernel runs over several layers in turn, together larger than three L2s: their first results must be those of the same
calls repeated with hot weights, and all later ones must be equal to them. Calls come from the host, with the gaps that it
leaves, and from a graph, where one kernel starts as the one in front ends.
"""

import math
import time
from collections import Counter
from typing import NamedTuple

import pytest
import torch

from kitchen_core import QuantizedLinear, UnsupportedError, get_format, ops, optimize_for_decode, use
from kitchen_core.devices import device_facts
from kitchen_core.known_formats import KNOWN_FORMATS
from kitchen_core.registry import EAGER, kernels_of
from kitchen_core.testing import LINEAR_OPS, expect_kernel
from kitchen_core.testing.samples import filled

BF16 = torch.bfloat16
ROWS = (1, 4, 16, 17, 33, 64, 100, 160, 256, 300, 1024)  # of x
ODD = (5512, 2880)  # no tile and no stage divides it; groups of 32 and 64 do
SHAPES = ((12288, 3072), (3072, 12288), (4096, 4096), ODD)  # N, K
CACHES = 3  # that the weights are larger than
HOT_CALLS = 2  # behind one that brings the weight
CALLS, SECONDS = 4000, 0.6  # of a case, whichever is reached first
LEAST_ROUNDS = 3  # over all numbers of rows and all layers, however long they take

MLP = "int8_swiglu_mlp"  # the op; what it multiplies are two int8 weights
WITHIN = {  # the product that a format's linear is composed of, where no kernel serves the whole
    "int8_tensorwise": "int8_scaled_mm",
    "asym_w4a8_int8": "w4a8_scaled_mm",
    "w6a8_int8": "w4a8_scaled_mm",
    "svdquant_w4a4": "scaled_mm_svdquant_w4a4",
}
PRODUCTS = {**{name: [op, *filter(None, [WITHIN.get(name)])] for name, op in LINEAR_OPS.items()}, MLP: [MLP]}
DTYPES = {"awq/decode_sm75": torch.float16, "awq/float32": torch.float32}  # of x, where a kernel does not take bfloat16
LAYOUTS = {"w4a8/resident": ("resident",), "awq/stream": ("stored", "resident")}  # of the weight; "stored" elsewhere
CHOSEN_ON_HOPPER = {
    "int8/decode_sm90", "int8/sm90", "int8/swiglu_sm90", "w4a8/resident", "w4a8/stream", "w4a8/hopper", "svdquant/packed",
    "svdquant/few_rows", "svdquant/sm90", "awq/stream", "awq/decode", "awq/sm90",
}  # fmt: skip


class Route(NamedTuple):
    """A way from a format's linear to a product."""

    format: str
    op: str  # that the kernel serves
    kernel: str
    layout: str

    def __str__(self) -> str:
        return f"{self.format}-{self.kernel}-{self.layout}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES.get(self.kernel, BF16)


def all_routes() -> list[Route]:
    """Every kernel of every provider once for each format and layout, under the first op that it serves."""
    routes = {}
    for name, served in PRODUCTS.items():
        for op in served:
            for kernel in kernels_of(op):
                for layout in LAYOUTS.get(kernel.id, ("stored",)) if kernel.provider != "core" else ():
                    routes.setdefault((name, kernel.id, layout), Route(name, op, kernel.id, layout))
    return list(routes.values())


# -------------------------------------------------------------------------------------------------------- layers


def weight_of(name, n, k, seed, device, dtype):
    """(tensors, config) of a weight of any size: random codes and plausible scales, without quantizing one."""
    format = get_format(name)
    options = {"svdquant_w4a4": {"rank": 32}, "awq_w4a16": {"group_size": 32 if k % 128 else 128}}.get(name, {})
    config = format.config_for(n, k, **options)
    wanted = format.quantize(torch.empty(n, k, device="meta", dtype=dtype), config)
    return {key: filled(key, t, k, device, seed) for key, t in wanted.items() if t is not None}, config


def layer_of(route, n, k, seed, device):
    """(call of x, bytes of its weight)."""
    if route.format == MLP:
        inner = n // 32 * 16
        gate_up, down = (weight_of("int8_tensorwise", *s, seed, device, BF16)[0] for s in ((2 * inner, k), (k, inner)))
        given = [tensor for w in (gate_up, down) for tensor in (w["qdata"], w["scale"])]
        return lambda x: ops.int8_swiglu_mlp(x, *given), sum(t.nbytes for t in given)
    tensors, config = weight_of(route.format, n, k, seed, device, route.dtype)
    bias = filled("bias", torch.empty(n, dtype=route.dtype, device="meta"), k, device, seed)
    layer = QuantizedLinear(tensors, route.format, config, bias, route.dtype)
    if route.layout == "resident":
        reason = optimize_for_decode(layer).reason
        if reason is not None:
            raise UnsupportedError(reason)
    return layer, sum(t.nbytes for t in layer.inner().values() if t is not None)


def layers_of(route, n, k, cache, device):
    """As many layers as it takes to have CACHES times so many bytes, when any of them is left out."""
    first, size = layer_of(route, n, k, 0, device)
    return [first, *(layer_of(route, n, k, i, device)[0] for i in range(1, math.ceil(CACHES * cache / size) + 1))]


def rows(m, k, dtype, device):
    return torch.randn(m, k, device=device, generator=torch.Generator(device).manual_seed(m)).to(dtype)


def taken(route, layer, k, device):
    """x for each number of rows that the kernel takes, and the reason against the last of the others."""
    inputs, reason = {}, None
    for m in ROWS:
        x = rows(m, k, route.dtype, device)
        try:
            with torch.no_grad(), use(route.kernel), expect_kernel(route.op, route.kernel):
                layer(x)
        except UnsupportedError as error:
            reason = str(error)
        else:
            inputs[m] = x
    return inputs, reason


# ---------------------------------------------------------------------------------------------------- comparison


def differs(y, want):
    """Whether any bits do, without waiting for the answer."""
    word = {2: torch.int16, 4: torch.int32}[y.element_size()]
    return (y.view(word) != want.view(word)).any()


class Cold:
    """Layers in turn, and what came out of them: counts of wrong calls stay on the device until they are asked for."""

    def __init__(self, layers, inputs):
        self.layers, self.inputs, self.device = layers, inputs, next(iter(inputs.values())).device
        self.first = {m: [layer(x) for layer in layers] for m, x in inputs.items()}
        self.wrong = {(how, m): self.zero() for how in ("hot", "cold", "graph") for m in inputs}
        self.calls = Counter()
        self.graph = None

    def zero(self):
        return torch.zeros((), dtype=torch.int64, device=self.device)

    def hot(self):
        """Each layer some times in a row."""
        for m, x in self.inputs.items():
            for layer, want in zip(self.layers, self.first[m], strict=True):
                for _ in range(1 + HOT_CALLS):
                    self.wrong["hot", m] += differs(layer(x), want)
                    self.calls["hot"] += 1

    def in_turn(self, how, m):
        """All layers, one behind the other; compared afterwards."""
        results = [layer(self.inputs[m]) for layer in self.layers]
        for y, want in zip(results, self.first[m], strict=True):
            self.wrong[how, m] += differs(y, want)

    def cold(self):
        for m in self.inputs:
            self.in_turn("cold", m)
            self.calls["cold"] += len(self.layers)

    def capture(self):
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for m in self.inputs:
                self.in_turn("graph", m)

    def replay(self):
        self.graph.replay()
        self.calls["graph"] += len(self.layers) * len(self.inputs)

    def until(self, calls, seconds, least_rounds):
        """Rounds from the host and, where a graph was captured, four times as many from that."""
        began, rounds = time.monotonic(), 0
        while rounds < least_rounds or (self.calls.total() < calls and time.monotonic() - began < seconds):
            self.cold()
            if self.graph is not None:
                for _ in range(4):
                    self.replay()
                torch.cuda.synchronize()
            rounds += 1

    def found(self):
        """{(how, rows): wrong calls}, of those that have any."""
        return {key: count.item() for key, count in self.wrong.items() if count.item()}


def report(what, cold):
    told = ", ".join(f"{count} {how} ones with M={m}" for (how, m), count in cold.found().items())
    return f"{what}: of {dict(cold.calls)} calls of {len(cold.layers)} layers other bits than the first have {told}"


# ---------------------------------------------------------------------------------------------------------- tests


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("route", all_routes(), ids=str)
def test_cold_weights_give_the_same_bits(route, shape):
    (n, k), device = shape, torch.device("cuda")
    try:
        layer = layer_of(route, n, k, 0, device)[0]
        inputs, reason = taken(route, layer, k, device)
    except UnsupportedError as error:  # there is no such layout
        inputs, reason = {}, str(error)
    if not inputs:
        hopper = device_facts(device).sm == 90 and route.kernel in CHOSEN_ON_HOPPER and shape != ODD
        assert not hopper, f"{route} N={n} K={k} is for this GPU, and refused every number of rows: {reason}"
        pytest.skip(f"{route.kernel}: {reason}")
    layers = layers_of(route, n, k, torch.cuda.get_device_properties(device).L2_cache_size, device)
    with torch.no_grad(), use(route.kernel), expect_kernel(route.op, route.kernel):
        cold = Cold(layers, inputs)
        cold.hot()
        cold.capture()
        cold.until(CALLS, SECONDS, LEAST_ROUNDS)
    assert not cold.found(), report(f"{route} N={n} K={k}", cold)


def test_every_format_and_every_kernel_is_here():
    assert PRODUCTS.keys() == {*KNOWN_FORMATS, MLP}
    routes = all_routes()
    assert {r.kernel for r in routes} >= CHOSEN_ON_HOPPER | DTYPES.keys() | LAYOUTS.keys()
    for name, op in LINEAR_OPS.items():
        assert {r.kernel for r in routes if r.format == name} >= {k.id for k in kernels_of(op) if k.provider != "core"}
    assert len(routes) >= 30, "kernels are missing"
    assert len({str(r) for r in routes}) == len(routes)


@pytest.mark.parametrize("name", PRODUCTS)
def test_layers_are_made_and_repeat_themselves(name):
    """What the test on a GPU does, by the reference on tiny shapes; no weight is another's."""
    n, k, device = 64, 256, torch.device("cpu")
    resident = name != MLP and get_format(name).resident_tensors
    for layout in ("stored", "resident") if resident else ("stored",):
        route = Route(name, PRODUCTS[name][0], EAGER, layout)
        size = layer_of(route, n, k, 0, device)[1]
        layers = layers_of(route, n, k, 2 * size, device)
        assert len(layers) == 1 + 2 * CACHES
        with torch.no_grad(), use(EAGER):
            cold = Cold(layers, {m: rows(m, k, BF16, device) for m in (1, 17)})
            cold.hot()
            cold.until(calls=0, seconds=0, least_rounds=2)
        assert cold.calls == {"hot": 2 * len(layers) * (1 + HOT_CALLS), "cold": 2 * 2 * len(layers)}
        assert not cold.found()
        for results in cold.first.values():
            assert all(torch.isfinite(y).all() for y in results)
            assert not any(torch.equal(results[0], y) for y in results[1:])


def test_one_wrong_bit_in_one_call_is_found_and_named():
    calls = Counter()

    def layer(x, at=None, where="cold"):
        calls[where] += 1
        y = x.clone()
        if calls[where] == at:
            y[-1, -1] = -y[-1, -1]  # of a zero: no comparison of numbers sees it
        return y

    x = {3: torch.zeros(3, 8, dtype=BF16)}
    cold = Cold([layer, lambda x: layer(x, 1 + (1 + HOT_CALLS) + 4, "other")], x)
    cold.hot()
    assert not cold.found()
    cold.until(calls=0, seconds=0, least_rounds=6)
    assert cold.found() == {("cold", 3): 1}
    assert cold.calls == {"hot": 6, "cold": 12}
    told = "of {'hot': 6, 'cold': 12} calls of 2 layers other bits than the first have 1 cold ones with M=3"
    assert report("int8/sm90 N=8", cold) == f"int8/sm90 N=8: {told}"
    calls.clear()
    hot = Cold([lambda x: layer(x, 1)], x)  # the first was wrong: all others differ
    hot.hot()
    assert hot.found() == {("hot", 3): 1 + HOT_CALLS}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_nans_of_the_same_bits_are_equal(dtype):
    y = torch.full((2, 2), float("nan"), dtype=dtype)
    assert not differs(y, y.clone())
    assert differs(y, torch.zeros_like(y))
