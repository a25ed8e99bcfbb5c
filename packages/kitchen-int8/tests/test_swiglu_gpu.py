"""The SwiGLU GEMM and the MLP around it on a GPU: every plan, shapes, bits, accuracy, graphs, and packed modules.

The product is compared with float64 on the fp32 numbers that are multiplied (exact, as int8_scaled_mm's tests prove),
within kitchen_core.testing.swiglu_bound; everything after it is compared to the bit.
"""

# ruff: noqa: E741  (I is the intermediate width, here as in the documentation)

from __future__ import annotations

import pytest
import torch
from torch import nn

import kitchen_core as kc
from kitchen_core import ops, use
from kitchen_core.arithmetic import INT8_LEVELS
from kitchen_core.reference.int8 import int8_scaled_mm as reference_mm
from kitchen_core.reference.int8 import int8_swiglu_mlp as reference_mlp
from kitchen_core.testing import (
    assert_close,
    assert_equal,
    expect_kernel,
    quantization_bound,
    relative_error,
    swiglu_bound,
    tolerance,
    unit_roundoff,
)
from kitchen_core.testing.operands import random_codes as codes_of
from kitchen_core.testing.operands import random_floats as randn
from kitchen_int8 import _swiglu, pack_gate_up
from kitchen_int8._extension import EXTENSION
from kitchen_int8.kernels import provider

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="int8/swiglu_sm90 needs compute capability 9.0")]

KERNEL = "int8/swiglu_sm90"
VARIANTS = 6  # tiles of int8_gemm/sm90/int8_swiglu.cu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BIASES = (None, FP32, FP16, BF16)


def problem(M: int, I: int, K: int, *, bias: torch.dtype | None = None, scalar: bool = False, seed: int = 0) -> list:
    """codes, x_scale, weight [2I, K], weight_scale, bias; gate and up of about N(0, 2)."""
    return [
        codes_of(M, K, seed),
        randn(M, 1, seed=seed + 1).abs() / K**0.5 / 60,
        codes_of(2 * I, K, seed + 2),
        (randn(1 if scalar else 2 * I, 1, seed=seed + 3).abs() + 0.1) / 60,
        None if bias is None else randn(2 * I, dtype=bias, seed=seed + 4),
    ]


def exact_product(arguments: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up (fp32, to the bit) and their product in float64."""
    gate, up = reference_mm(*arguments, FP32).chunk(2, -1)
    return gate, up, gate.double() * torch.sigmoid(gate.double()) * up.double()


def check_product(arguments: list, dtype: torch.dtype, plan=None) -> torch.Tensor:
    out = _swiglu.swiglu_scaled_mm(*arguments, dtype, plan)
    gate, up, want = exact_product(arguments)
    assert out.dtype == dtype
    assert_close(out, want, absolute=swiglu_bound(gate, up, dtype), what=f"plan {plan}, {list(want.shape)}")
    return out


def layers(K: int, I: int, N: int, group: int = 64, bias: bool = False, seed: int = 0) -> tuple:
    """int8_swiglu_mlp's arguments after x."""
    down_group = group if group and I % group == 0 else 0
    gate_up = ops.quantize_int8_convrot_weight(randn(2 * I, K, seed=seed) / K**0.5, group)
    down = ops.quantize_int8_convrot_weight(randn(N, I, seed=seed + 1) / I**0.5, down_group)
    biases = (randn(2 * I, dtype=BF16, seed=seed + 2), randn(N, dtype=BF16, seed=seed + 3)) if bias else (None, None)
    return *gate_up, *down, *biases, None, group, down_group


def run(x: torch.Tensor, weights: tuple) -> torch.Tensor:
    with expect_kernel("int8_swiglu_mlp", KERNEL):
        return ops.int8_swiglu_mlp(x, *weights)


# --------------------------------------------------------------------------------------------------- the product


@pytest.mark.parametrize("I", [1, 8, 40, 100, 133, 1024, 4099])
@pytest.mark.parametrize("K", [16, 400, 3072])
def test_ragged_shapes(I, K):
    for i, M in enumerate((1, 7, 33, 64, 65, 129, 300, 1000)):
        arguments = problem(M, I, K, bias=BIASES[(i + I) % 4], scalar=(i + K) % 2 == 0, seed=M)
        check_product(arguments, (BF16, FP32)[i % 2])


@pytest.mark.parametrize("variant", range(VARIANTS))
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_variant_gives_the_same_bits(variant, dtype):
    assert EXTENSION.module.int8_swiglu_sm90_variants() == VARIANTS
    for M, I, K in ((1, 96, 128), (197, 264, 2080), (129, 777, 64), (4097, 136, 128)):
        for bias in (None, FP32, FP16, BF16):
            arguments = problem(M, I, K, bias=bias, scalar=bias is FP16)
            out = check_product(arguments, dtype, (variant, 0, 0))
            assert torch.equal(out, _swiglu.swiglu_scaled_mm(*arguments, dtype, (0, 0, 0)))
            assert torch.equal(out, _swiglu.swiglu_scaled_mm(*arguments, dtype, (variant, 4, 3)))


def test_a_forced_plan_that_is_none():
    with pytest.raises(RuntimeError, match=r"names variant 6, not one of 0\.\.5"):
        _swiglu.swiglu_scaled_mm(*problem(4, 8, 16), BF16, (VARIANTS, 0, 0))
    with pytest.raises(RuntimeError, match="may exceed float16"):
        _swiglu.swiglu_scaled_mm(*problem(4, 8, 16), FP16)


def test_unaligned_and_strided_operands():
    M, I, K = 70, 90, 256
    arguments = problem(M, I, K, bias=BF16)
    want = check_product(arguments, BF16)
    for offset, pitch in ((0, 288), (16, 288), (3, 271), (0, 999)):
        wide_a, wide_b = codes_of(M, pitch, 8), codes_of(2 * I, pitch, 9)
        a, b = wide_a[:, offset : offset + K], wide_b[:, offset : offset + K]
        a.copy_(arguments[0])
        b.copy_(arguments[2])
        assert torch.equal(_swiglu.swiglu_scaled_mm(a, arguments[1], b, *arguments[3:], BF16), want)
    columns = arguments[2].t().contiguous().t()
    assert torch.equal(_swiglu.swiglu_scaled_mm(*arguments[:2], columns, *arguments[3:], BF16), want)
    for which in (0, 2):
        expanded = list(arguments)
        expanded[which] = arguments[which][:1].expand_as(arguments[which])
        check_product(expanded, BF16)


@pytest.mark.parametrize("K", [1, 7, 100])
def test_any_width_where_it_is_called_by_itself(K):
    check_product(problem(33, 24, K), FP32)


@pytest.mark.parametrize("I", [136, 133])
def test_nothing_is_written_outside_of_the_output(I, monkeypatch):
    M, guard = 77, 4096
    for dtype in (BF16, FP32):
        space = torch.full((2 * guard + M * I,), float("nan"), dtype=dtype, device="cuda")
        arguments = problem(M, I, 400)
        inside = space[guard : guard + M * I].view(M, I)
        for variant in range(VARIANTS):
            inside.fill_(float("nan"))
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "new_empty", lambda *args, inside=inside, **kwargs: inside)
                _swiglu.swiglu_scaled_mm(*arguments, dtype, (variant, 0, 0))
            assert not inside.isnan().any()
            assert space[:guard].isnan().all()
            assert space[guard + M * I :].isnan().all()


def test_largest_gates_and_signs():
    """Saturated sigmoids, both signs, zeros: the limits 0 and gate * up, and no NaN."""
    K, values = 16, [0.0, 1e-3, 1.0, 15.0, 20.0, 88.0, 90.0, 1000.0, 3e38]
    signed = torch.tensor([s * v for v in values for s in (1, -1)], device="cuda")
    I = len(signed)
    codes = torch.zeros(3, K, dtype=torch.int8, device="cuda")
    bias = torch.cat((signed, torch.full((I,), -0.5, device="cuda")))
    one = torch.ones(1, device="cuda")
    check_product([codes, one.expand(3).contiguous(), codes_of(2 * I, K, 1), one, bias], FP32)


# ------------------------------------------------------------------------------------------------------- the MLP


def test_record_and_what_it_says_of_others():
    record = next(k for k in provider.kernels if k.op == "int8_swiglu_mlp")
    assert record.id == KERNEL
    x = randn(4, 100)
    with kc.trace() as calls:
        ops.int8_swiglu_mlp(x, *layers(100, 32, 16, 4))
    assert ("int8_swiglu_mlp", "core/composed") in calls
    said = str(kc.explain("int8_swiglu_mlp", x, *layers(100, 32, 16, 4)))
    assert "K must be a multiple of 16; the call has 100" in said


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("K", "I", "N"), [(128, 192, 128), (512, 264, 100), (384, 133, 77), (1024, 4099, 256)])
def test_mlp_is_quantizer_product_and_down_projection(dtype, K, I, N):
    weights = layers(K, I, N, 64, bias=True)
    product_dtype = BF16 if dtype == BF16 else FP32
    for M in (1, 33, 300):
        x = randn(M, K, dtype=dtype, seed=M)
        y = run(x, weights)
        codes, scale = ops.quantize_and_rotate_rowwise(x, 64)
        product = check_product([codes, scale, *weights[:2], weights[4]], product_dtype)
        assert_equal(y, ops.int8_linear(product, *weights[2:4], weights[5], dtype, weights[8]))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_mlp_is_within_the_bound_of_the_reference(dtype):
    """Elementwise: each side quantizes the product (half a step each), and they round other numbers before that."""
    K, I, N, M = 256, 320, 96, 50
    weights = layers(K, I, N, 64, bias=True)
    x = randn(M, K, dtype=dtype)
    got, want = run(x, weights), reference_mlp(x.cpu(), *[w.cpu() if torch.is_tensor(w) else w for w in weights])
    codes, scale = ops.quantize_and_rotate_rowwise(x, 64)
    gate, up, product = exact_product([codes, scale, *weights[:2], weights[4]])
    u = unit_roundoff(dtype)
    # the reference rounds gate and up: silu's relative error is |1 + gate (1 - sigmoid)| times gate's, and (1 + u)^2 of it
    condition = (1 + gate.double() * (1 - torch.sigmoid(gate.double()))).abs()
    moved = swiglu_bound(gate, up, BF16 if dtype == BF16 else FP32) + (u * (condition + 1) + 4 * u * u) * product.abs()
    down = ops.dequantize_int8(weights[2], weights[3], FP32, weights[8]).double()
    rotated = ops.dequantize_int8(weights[2], weights[3], FP32)
    most = moved.amax(-1, keepdim=True) * weights[8] ** 0.5  # that a rotated column, and so a row's absmax, may move
    rows = ops.quantize_and_rotate_rowwise(product.float(), weights[8])[1].double() + most / INT8_LEVELS
    bound = moved @ down.abs().T + 2 * quantization_bound(rows, rotated)
    t = tolerance(dtype, I, "int8_tensorwise")
    magnitude = product.abs() @ down.abs().T
    assert_close(got, want, relative=t.relative, absolute=bound.cpu() + (t.accumulation * magnitude).cpu())


@pytest.mark.parametrize(("M", "I", "N"), [(2048, 3072, 1024), (4096, 12288, 4096)])
def test_error_of_the_down_half_is_no_worse_than_with_an_eager_pair(M, I, N):
    """From a bf16 pair [gate | up]: the pair in the quantizer against torch's silu and product, which round twice."""
    pair, down = randn(M, 2 * I, dtype=BF16), randn(N, I, dtype=BF16, seed=2) * 0.02
    codes, scale = ops.quantize_int8_convrot_weight(down, 256)
    gate, up = pair.chunk(2, -1)
    exact = (gate.double() * torch.sigmoid(gate.double()) * up.double()) @ down.double().T
    fused = relative_error(ops.int8_linear(pair, codes, scale, None, None, 256, "swiglu"), exact)
    eager = relative_error(ops.int8_linear(nn.functional.silu(gate) * up, codes, scale, None, None, 256), exact)
    print(f"down half, M={M} {I}->{N}: fused {fused:.5f} eager {eager:.5f}")
    assert fused <= eager


@pytest.mark.parametrize(("M", "K", "I", "N"), [(2048, 1024, 3072, 1024), (4096, 4096, 12288, 4096)])
def test_error_is_no_worse_than_that_of_the_unfused_forms(M, K, I, N):
    """bf16 Gaussian, ConvRot 256, against float64: the fused form rounds less often than the two-call and the eager form."""
    x = randn(M, K, dtype=BF16)
    gate_up, down = randn(2 * I, K, dtype=BF16, seed=1) * 0.02, randn(N, I, dtype=BF16, seed=2) * 0.02
    weights = (*ops.quantize_int8_convrot_weight(gate_up, 256), *ops.quantize_int8_convrot_weight(down, 256))
    arguments = (*weights, None, None, None, 256, 256)
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    exact = (gate * torch.sigmoid(gate) * up) @ down.double().T
    fused = relative_error(run(x, arguments), exact)
    with use("core/composed"):
        two_call = relative_error(ops.int8_swiglu_mlp(x, *arguments), exact)
    halves = [t.chunk(2) for t in weights[:2]]
    apart = [halves[0][0].clone(), halves[1][0], halves[0][1], halves[1][1], *weights[2:]]
    eager = relative_error(ops.int8_gate_up_mlp(x, *apart, None, None, None, None, 256, 256), exact)
    print(f"M={M} {K}->{I}->{N}: fused {fused:.5f} two-call {two_call:.5f} separate {eager:.5f}")
    assert fused <= two_call
    assert fused <= eager


def test_rows_do_not_depend_on_each_other_nor_on_the_plan():
    weights = layers(512, 1000, 128)
    x = randn(4097, 512, dtype=BF16)
    whole = run(x, weights)
    for rows in (
        slice(0, 1),
        slice(5, 21),
        slice(64, 128),
        slice(100, 197),
        slice(0, 300),
        slice(4096, 4097),
        slice(0, 1024),
    ):
        assert torch.equal(run(x[rows], weights), whole[rows])


def test_repeated_runs_are_bit_equal():
    for M, K, I in ((16, 3072, 4096), (300, 512, 1000), (2048, 3072, 3072)):
        weights, x = layers(K, I, 256), randn(M, K, dtype=BF16)
        first = run(x, weights)
        for _ in range(20):
            assert torch.equal(run(x, weights), first)


@pytest.mark.parametrize("M", [1, 97, 1024])
def test_graph_replay_with_changed_inputs_on_another_stream(M):
    weights, x = list(layers(512, 768, 512, bias=True)), randn(M, 512, dtype=BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = run(x, weights)
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = ops.int8_swiglu_mlp(x, *weights)
    for seed in (10, 20):
        x.copy_(randn(M, 512, dtype=BF16, seed=seed))
        for tensor, fresh in zip(weights, layers(512, 768, 512, bias=True, seed=seed), strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(fresh)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run(x, weights))


def test_weights_written_by_the_kernel_just_before():
    """The kernels start while the one in front ends, and must read nothing of it before it is done, not even weights."""
    first, second = ((randn(64, 3072, dtype=BF16, seed=s), *layers(3072, 8192, 256, seed=s)) for s in (1, 50))
    want = [run(p[0], p[1:]) for p in (first, second)]
    live = [t.clone() if torch.is_tensor(t) else t for t in first]
    tensors = [i for i, t in enumerate(live) if torch.is_tensor(t)]
    for i in range(60):
        source = (first, second)[i % 2]
        last = (1, 3, 0)[i % 3]  # 50 MB of gate and up, or the down weight, or x
        for position in [t for t in tensors if t != last] + [last]:
            live[position].copy_(source[position])
        assert torch.equal(run(live[0], tuple(live[1:])), want[i % 2])


def test_product_in_one_call_and_in_two():
    for M, K, I in ((1, 512, 768), (97, 3072, 4099), (1024, 3072, 8192)):
        x, weights = randn(M, K, dtype=BF16), layers(K, I, 16, 256, bias=True)
        codes, scale = ops.quantize_and_rotate_rowwise(x, 256)
        want = _swiglu.swiglu_scaled_mm(codes, scale, *weights[:2], weights[4], BF16)
        assert torch.equal(_swiglu.swiglu_linear(x, *weights[:2], weights[4], 256), want)


def test_leading_dims_and_empty():
    weights = layers(128, 192, 96)
    x = randn(24, 128, dtype=BF16)
    flat = run(x, weights)
    assert torch.equal(run(x.reshape(2, 3, 4, 128), weights).reshape(24, 96), flat)
    assert run(x.reshape(2, 3, 4, 128)[:0], weights).shape == (0, 3, 4, 96)
    assert torch.equal(run(x[3], weights), flat[3])
    assert torch.equal(run(x[::2], weights), flat[::2])


def test_rows_with_nan_or_inf_spoil_no_other_row():
    weights = layers(128, 192, 96)
    x = randn(20, 128, dtype=BF16)
    clean = run(x, weights)
    x[3, 7], x[11, 0] = float("nan"), float("inf")
    y = run(x, weights)
    assert y[[3, 11]].isnan().all()
    others = [i for i in range(20) if i not in (3, 11)]
    assert torch.equal(y[others], clean[others])


def test_zero_rows_and_tiny_fp16_rows():
    weights = layers(128, 192, 96)
    x = randn(8, 128, dtype=FP16)
    x[2], x[5] = 0, x[5] * 2.0**-20
    y = run(x, weights)
    assert (y[2] == 0).all()
    assert y.isfinite().all()
    tiny = reference_mlp(x[5:6].cpu().float(), *[w.cpu() if torch.is_tensor(w) else w for w in weights])
    assert_close(y[5:6], tiny, absolute=torch.finfo(FP16).smallest_normal)


def test_products_beyond_float16_stay_finite():
    """gate and up of 400 each: their product, 160,000, is no float16 number, and the output is."""
    codes = torch.full((192, 128), 100, dtype=torch.int8, device="cuda")
    gate_up, scale = codes.repeat(2, 1), torch.full((384, 1), 1 / 32, device="cuda")
    down, down_scale = codes_of(96, 192, 3), torch.full((96, 1), 1e-6, device="cuda")
    x = torch.ones(4, 128, dtype=FP16, device="cuda")
    weights = (gate_up, scale, down, down_scale)
    y = run(x, weights)
    want = reference_mlp(x.cpu(), *[w.cpu() for w in weights])
    assert y.isfinite().all()
    assert_close(y, want, relative=tolerance(FP16, 192, "int8_tensorwise").relative)


def test_more_than_65535_blocks_and_2_to_31_elements():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free GPU memory")
    M, I, K = 70_000, 30_728, 64
    arguments = problem(M, I, K)
    out = _swiglu.swiglu_scaled_mm(*arguments, BF16)
    for rows in (slice(0, 130), slice(34_900, 35_100), slice(M - 130, M)):
        some = [arguments[0][rows], arguments[1][rows], *arguments[2:]]
        gate, up, want = exact_product(some)
        assert_close(out[rows], want, absolute=swiglu_bound(gate, up, BF16))


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    weights, x = layers(128, 192, 96), randn(33, 128, dtype=BF16)
    moved = [w.to("cuda:1") if torch.is_tensor(w) else w for w in weights]
    assert torch.equal(run(x.to("cuda:1"), moved).to("cuda:0"), run(x, weights))


# ----------------------------------------------------------------------------------------------- packed modules


class MLP(nn.Module):
    def __init__(self, K: int, I: int) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        shapes = {"gate_proj": (K, I), "up_proj": (K, I), "down_proj": (I, K)}
        for name, (k, n) in shapes.items():
            dense = nn.Linear(k, n, bias=False, dtype=BF16, device="cuda").requires_grad_(False)
            self.add_module(name, kc.QuantizedLinear.from_linear(dense, "int8"))

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_packed_module_through_cpu_and_back_and_compiled():
    mlp, x = MLP(512, 768), randn(300, 512, dtype=BF16)
    apart = mlp(x)
    pack_gate_up(mlp)

    def packed() -> torch.Tensor:
        with kc.trace() as calls:
            y = mlp(x)
        assert [c for c in calls if "mlp" in c[0]] == [
            ("int8_gate_up_mlp", "core/composed"),
            ("int8_swiglu_mlp", KERNEL),
        ]
        return y

    want = packed()
    stacked = [torch.cat((getattr(mlp.gate_proj, n), getattr(mlp.up_proj, n))) for n in ("weight", "weight_scale")]
    down = mlp.down_proj
    assert_equal(want, run(x, (*stacked, down.weight, down.weight_scale, None, None, None, 256, 256)))
    mlp.cpu()
    assert mlp(x.cpu()).shape == want.shape
    mlp.cuda()
    assert_equal(packed(), want)
    mlp.load_state_dict({k: v.clone() for k, v in mlp.state_dict().items()}, assign=True)
    assert_equal(packed(), want)
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")  # inductor: on the CPU
    with expect_kernel("int8_swiglu_mlp", KERNEL):
        assert_equal(compiled(x), want)
    mlp.up_proj.weight.data = mlp.up_proj.weight.data.clone()
    assert_equal(compiled(x), apart)
    assert_equal(mlp(x), apart)


def test_packed_storage_is_freed_with_its_module():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    mlp = pack_gate_up(MLP(1024, 2048))
    held = torch.cuda.memory_allocated() - before
    assert held < 1.1 * 3 * 1024 * 2048, "one copy of each weight"
    del mlp
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("M", [1, 16, 300])
def test_one_quantized_activation_for_q_k_and_v(M):
    q, k, v = (
        kc.QuantizedLinear.from_linear(nn.Linear(512, n, dtype=BF16, device="cuda"), "int8") for n in (512, 128, 136)
    )
    x = randn(M, 512, dtype=BF16)
    with kc.trace() as calls:
        shared = q.quantize_activation(x)
        together = [layer(shared) for layer in (q, k, v)]
    assert [op for op, _ in calls] == ["quantize_and_rotate_rowwise"] + 3 * ["int8_scaled_mm"]
    for layer, y in zip((q, k, v), together, strict=True):
        assert_equal(y, layer(x))
