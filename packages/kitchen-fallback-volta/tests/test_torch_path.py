"""The torch path against the reference: bit-equality, the FP16-activation mode, chunking and the workspace bound."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from kitchen_core import ops, registry, simulate, use
from kitchen_core.arithmetic import INPUT_ACTS, hadamard_rotate, input_width
from kitchen_core.reference import int8 as reference
from kitchen_core.testing import (
    FLOAT_DTYPES,
    LAYER_SHAPES,
    M_VALUES,
    assert_close,
    assert_equal,
    expect_kernel,
    leading_shapes,
    relative_error,
    strided_copies,
    tolerance,
)
from kitchen_fallback_volta import torch_path
from kitchen_fallback_volta.torch_path import WORKSPACE_BYTES, Operand, choose_plan

OURS = "fallback-volta/torch"
MIB = 1 << 20


def weight_of(n, k, low=-127):
    return torch.randint(low, 128, (n, k), dtype=torch.int8), torch.rand(n, 1) * 1e-2


def operand_of(codes):
    a = Operand.empty(*codes.shape, True, codes.device)
    a.fill(slice(None), codes)
    return a


def small_chunks(monkeypatch, workspace=96 << 10):
    """Shares shrunk by one factor, so that small layers are cut as large ones are."""
    factor = WORKSPACE_BYTES // workspace
    for name in ("_OPERAND_BYTES", "_PREPARE_BYTES", "_CHUNK_BYTES"):
        monkeypatch.setattr(torch_path, name, getattr(torch_path, name) // factor)


# -------------------------------------------------------------------------------------------- the INT8 grid


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), LAYER_SHAPES)
def test_int8_linear_bit_equal(n, k, dtype):
    weight, scale = weight_of(n, k)
    for m in M_VALUES:
        for lead in leading_shapes(m):
            x, bias = torch.randn(*lead, k).to(dtype), torch.randn(n).to(dtype)
            for arguments in ((x, weight, scale), (x, weight, scale, bias, None, 64 if k % 64 == 0 else 0)):
                expected = reference.int8_linear(*arguments)
                assert_equal(torch_path.int8_linear(*arguments), expected, f"{lead}")
                assert_equal(torch_path.int8_linear_fp16(*arguments), expected, f"{lead}, by name")


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("input_act", INPUT_ACTS)
def test_every_argument_bit_equal(input_act, cut, monkeypatch):
    if cut:
        small_chunks(monkeypatch)
    n, k = 200, 320
    weight, scale = weight_of(n, k)
    act_weight = torch.rand(k) if input_act == "rms_norm" else None
    x = torch.randn(7, 11, input_width(k, input_act)).to(torch.bfloat16)
    residual = torch.randn(7, 11, n).to(torch.bfloat16)
    bias, row = torch.randn(n), torch.rand(n)
    cases = [  # every value of every argument, beside others each time
        (scale, None, None, None, None),
        (scale[:1], bias, torch.float32, None, None),
        (scale[0, 0], bias.half(), torch.float16, residual, None),
        (scale.reshape(-1), bias.bfloat16(), torch.bfloat16, residual.float(), row),
        (scale, None, torch.float32, residual, row[:1]),
        (scale, bias, torch.float32, residual.half(), row[:1].half()),
    ]
    for weight_scale, case_bias, out, res, res_scale in cases:
        arguments = (x, weight, weight_scale, case_bias, out, 16, input_act, act_weight, 1e-6, res, res_scale)
        got = torch_path.int8_linear(*arguments)
        assert_equal(got, reference.int8_linear(*arguments))
        assert got.dtype == (out or x.dtype)
        assert got.shape == (7, 11, n)


def extreme_operands(k, code):
    """Codes at the end of the grid, all of them and with a few odd ones, so that a lost unit shows."""
    codes = torch.full((3, k), code, dtype=torch.int8)
    codes[1, ::5] = 5
    codes[2, 1] = 3
    weight = torch.full((5, k), code, dtype=torch.int8)
    weight[1:4] = -weight[1:4].clamp_min(-127)
    weight[2, ::3] = 1
    weight[3, -1] = 2
    weight[4, ::2] -= 1 if code > 0 else -1
    weight[4, 0] = 1
    return codes, weight, codes.long() @ weight.long().T


@pytest.mark.parametrize("k", [1024, 1025, 4096, 12288])
@pytest.mark.parametrize("code", [127, -127, -128])
def test_extreme_codes_at_large_k(k, code):
    codes, weight, exact = extreme_operands(k, code)
    assert exact.abs().max() == code * code * k
    assert_equal(torch_path._accumulate(operand_of(codes), weight, 4096), exact.float())
    arguments = (codes, torch.ones(3, 1), weight, torch.ones(5), None, torch.float32)
    assert_equal(torch_path.int8_scaled_mm(*arguments), reference.int8_scaled_mm(*arguments))
    assert_equal(torch_path.int8_scaled_mm(*arguments), exact.float())


@pytest.mark.parametrize("code", [127, -127, -128])
def test_longer_slices_would_not_be_exact(code):
    """The check above can fail: the same operands, not cut in two and summed in fp32 over twice the columns."""
    codes, weight, exact = extreme_operands(12_288, code)
    whole = Operand(codes.half(), None, 2 * torch_path.EXACT_COLUMNS)
    assert not torch.equal(torch_path._accumulate(whole, weight, 4096).long(), exact)


def test_every_code_is_cut_into_small_parts():
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(2, 5)
    a = operand_of(codes)
    assert a.high.abs().max() == 8
    assert a.rows.abs().max() == 8
    assert torch.equal((16 * a.high.int() + a.rows.int()), codes.int())


@pytest.mark.parametrize("k", [16_384, 16_385, 33_000])
def test_the_largest_sums_of_both_parts(k):
    """Codes whose low part, or high part, is 8 in every column, at the length at which fp32 is full, and beyond."""
    codes = torch.tensor([[120], [8], [-120], [-128]], dtype=torch.int8).repeat(1, k)
    codes[:, 1] = 1
    weight = torch.full((3, k), -128, dtype=torch.int8)
    weight[1, ::7] = 5
    exact = codes.long() @ weight.long().T
    got = torch_path._accumulate(operand_of(codes), weight, 4096)
    expected = exact.float() if got.dtype == torch.float32 else exact.double()
    assert torch.equal(got, expected)


def test_exact_beyond_int32():
    codes = torch.full((1, 140_000), -128, dtype=torch.int8)
    arguments = (codes, torch.ones(1, 1), codes, torch.ones(1), None, torch.float32)
    assert codes.numel() * 2**14 > 2**31
    assert_equal(torch_path.int8_scaled_mm(*arguments), reference.int8_scaled_mm(*arguments))


@pytest.fixture
def waiting(monkeypatch):
    """Calls may read a Proof, as large ones on a GPU do; gives the operands that they made."""
    made, empty = [], Operand.empty
    monkeypatch.setattr(
        torch_path, "can_wait", lambda out, k: torch_path.EXACT_COLUMNS < k <= 2 * torch_path.PROVEN_COLUMNS
    )
    monkeypatch.setattr(Operand, "empty", lambda *arguments: made.append(empty(*arguments)) or made[-1])
    return made


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("k", [1025, 3072, 8192, 8193, 12_288, 16_384])
def test_one_gemm_where_norms_show_that_it_is_exact(k, cut, waiting, monkeypatch):
    if cut:
        small_chunks(monkeypatch, 400 << 10)
    m, n = 9, 150
    codes = torch.randn(m, k).mul_(30).round_().clamp_(-127, 127).to(torch.int8)
    weight, scale = torch.randn(n, k).mul_(30).round_().clamp_(-127, 127).to(torch.int8), torch.rand(n)
    for out, residual in ((torch.float32, None), (torch.float16, torch.randn(m, n))):
        arguments = (codes, torch.rand(m, 1), weight, scale, torch.randn(n), out, residual)
        assert_equal(torch_path.int8_scaled_mm(*arguments), reference.int8_scaled_mm(*arguments))
    assert waiting
    assert all(a.high is None for a in waiting), "codes were cut in two"


@pytest.mark.parametrize("code", [127, -127, -128])
@pytest.mark.parametrize("k", [1100, 8193, 12_288])
def test_two_gemms_where_norms_do_not_show_it(k, code, waiting):
    """One large row of x, or of the weight, among small ones is enough; without the second try its sum would be wrong."""
    codes, weight, _ = extreme_operands(k, code)
    codes = torch.cat([torch.ones(7, k, dtype=torch.int8), codes])
    arguments = (codes, torch.ones(10, 1), weight, torch.ones(5), None, torch.float32)
    exact = (codes.long() @ weight.long().T).float()
    assert_equal(torch_path.int8_scaled_mm(*arguments), exact)
    assert [a.high is None for a in waiting] == [True, False], "the proof failed and codes were cut in two"


def test_a_proof_that_always_holds_would_be_wrong(waiting, monkeypatch):
    monkeypatch.setattr(torch_path.Proof, "holds", lambda self: True)
    codes, weight, exact = extreme_operands(12_288, 127)
    got = torch_path.int8_scaled_mm(codes, torch.ones(3, 1), weight, torch.ones(5), None, torch.float32)
    assert not torch.equal(got, exact.float())


def test_a_proof_is_about_the_largest_norms_of_each_piece():
    k = 12_288
    proof = torch_path.Proof(k)
    assert proof.columns == 6144
    rows = torch.full((2, k), 50.0).half()
    rows[1, 6144:] = 55.0
    for operand in (0, 1):
        for first in (0, 6144):
            proof.see(operand, rows[:, first : first + 6144], first)
    assert 50 * 50 * 6144 < 2**24 < 55 * 55 * 6144
    assert not proof.holds()
    first_alone = torch_path.Proof(6144)
    for operand in (0, 1):
        first_alone.see(operand, rows[:, :6144], 0)
    assert first_alone.holds()


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ({}, True), ({"is_cuda": False}, False), ({"k": 1024}, False), ({"k": 16_385}, False), ({"m": 100}, False),
        ({"capturing": True}, False), ({"sync_debug": 1}, False),
    ],
)  # fmt: skip
def test_who_waits_for_the_gpu(changed, answer, monkeypatch):
    """Large calls alone; never while a graph is captured, nor where synchronizations are reported."""
    case = {"is_cuda": True, "m": 4096, "k": 3072, "capturing": False, "sync_debug": 0, **changed}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: case["capturing"])
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: case["sync_debug"])
    out = SimpleNamespace(is_cuda=case["is_cuda"], numel=lambda: case["m"] * 3072)
    assert torch_path.can_wait(out, case["k"]) is answer


def test_slices_are_as_long_as_exactness_allows():
    assert torch_path.EXACT_COLUMNS * 128 * 128 == torch_path.SPLIT_COLUMNS * 8 * 128 == 2**24
    limit = torch.tensor(2.0**24)
    assert limit - 1 + 1 == limit
    assert limit + 1 == limit


@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 33, 64, 127, 128, 129, 255, 256, 257, 300])
def test_scaled_mm_bit_equal_over_m(m, monkeypatch):
    small_chunks(monkeypatch)
    n, k = 130, 1100
    codes, (weight, scale) = torch.randint(-128, 128, (m, k), dtype=torch.int8), weight_of(n, k, low=-128)
    residual = torch.randn(m, n)
    for bias, res in itertools.product((None, torch.randn(n)), (None, residual)):
        arguments = (codes, torch.rand(m, 1), weight, scale, bias, torch.float16, res)
        assert_equal(torch_path.int8_scaled_mm(*arguments), reference.int8_scaled_mm(*arguments))


def test_layouts_do_not_matter():
    x, (weight, scale) = torch.randn(17, 128), weight_of(40, 128)
    expected = reference.int8_linear(x, weight, scale, None, None, 64)
    for layout, strided in strided_copies(x).items():
        assert_equal(torch_path.int8_linear(strided, weight, scale, None, None, 64), expected, f"x {layout}")
    for layout, strided in strided_copies(weight).items():
        assert_equal(torch_path.int8_linear(x, strided, scale, None, None, 64), expected, f"weight {layout}")
    residual = torch.randn(40, 17).t()
    arguments = (weight, scale, None, None, 0, "none", None, 0.0, residual)
    assert_equal(torch_path.int8_linear(x, *arguments), reference.int8_linear(x, *arguments))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("fp16_activations", [False, True])
def test_a_row_that_is_not_finite_spoils_itself_only(bad, fp16_activations):
    x, (weight, scale) = torch.randn(5, 128), weight_of(24, 128)
    clean = torch_path.int8_linear_fp16(x, weight, scale, fp16_activations=fp16_activations)
    x[2, 7] = bad
    y = torch_path.int8_linear_fp16(x, weight, scale, fp16_activations=fp16_activations)
    assert y[2].isnan().all()
    others = [0, 1, 3, 4]
    assert_equal(y[others], clean[others])


def test_empty_dimensions():
    for m, n in ((0, 8), (3, 0), (0, 0)):
        arguments = (torch.randn(m, 16), *weight_of(n, 16), torch.randn(n))
        assert_equal(torch_path.int8_linear(*arguments), reference.int8_linear(*arguments), f"{m} {n}")
        y = torch_path.int8_linear_fp16(*arguments, fp16_activations=True)
        assert_equal(y, reference.int8_linear_fp16(*arguments, fp16_activations=True), f"{m} {n}")
    bias = torch.randn(8)
    for call in (torch_path.int8_linear, torch_path.int8_linear_fp16):
        assert_equal(
            call(torch.randn(3, 0), *weight_of(8, 0), bias), bias.expand(3, 8), "K = 0: the bias is all there is"
        )


def test_autocast_does_not_touch_the_codes():
    x, (weight, scale) = torch.randn(5, 256), weight_of(24, 256)
    codes, x_scale = reference.quantize_and_rotate_rowwise(x)
    expected = reference.int8_scaled_mm(codes, x_scale, weight, scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(torch_path.int8_scaled_mm(codes, x_scale, weight, scale), expected)


@pytest.mark.parametrize("fast", [False, True])
def test_fp16_accumulation_is_off_during_the_launch_and_restored(fast, monkeypatch):
    """A framework's fast mode leaves torch's process-wide switch on; the fp32-output GEMM must not see it."""
    settings, seen = torch.backends.cuda.matmul, []

    def mm(a, b, out_dtype):
        seen.append((settings.allow_fp16_accumulation, a.dtype, b.dtype, out_dtype))
        return a.float() @ b.float()

    before = settings.allow_fp16_accumulation
    monkeypatch.setattr(torch, "mm", mm)
    try:
        settings.allow_fp16_accumulation = fast
        torch_path._mm_fp32(torch.ones(2, 3).half(), torch.ones(4, 3).half())
        assert settings.allow_fp16_accumulation is fast
    finally:
        settings.allow_fp16_accumulation = before
    assert seen == [(False, torch.float16, torch.float16, torch.float32)]


# --------------------------------------------------------------------------------------- FP16 activations


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), LAYER_SHAPES)
def test_fp16_activations_agree_with_the_reference(n, k, dtype, cut, monkeypatch):
    if cut:
        small_chunks(monkeypatch)
    weight, scale = weight_of(n, k)
    allowed = tolerance(dtype, k)
    for m in M_VALUES:
        x, bias = torch.randn(m, k).to(dtype), torch.randn(n)
        residual, res_scale = torch.randn(m, n).to(dtype), torch.rand(n)
        arguments = (x, weight, scale, bias, None, 64, "none", None, 0.0, residual, res_scale, True)
        magnitude = hadamard_rotate(x.float(), 64).abs() @ (weight.float() * scale).abs().T
        magnitude = magnitude + bias.abs() + residual.float().abs()
        assert_close(
            torch_path.int8_linear_fp16(*arguments), reference.int8_linear_fp16(*arguments),
            relative=allowed.relative, absolute=allowed.accumulation * magnitude,
        )  # fmt: skip


@pytest.mark.parametrize("group", [0, 256])
def test_fp16_activations_err_at_most_a_quarter(group):
    """Against fp64 with the same INT8 weight: what is left is the rounding of activations."""
    k, n = 3072, 256
    x, (weight, scale) = torch.randn(64, k), ops.quantize_int8_convrot_weight(torch.randn(n, k), group)
    exact = hadamard_rotate(x, group).double() @ (weight.double() * scale.double()).T
    errors = [
        relative_error(
            torch_path.int8_linear_fp16(x, weight, scale, None, None, group, fp16_activations=fp16_activations), exact
        )
        for fp16_activations in (False, True)
    ]
    assert errors[1] <= errors[0] / 4


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-6, 1.0, 1e6, 1e30, 1e35])
def test_fp16_activations_keep_their_error_at_any_magnitude(magnitude):
    """A power of two per row: neither fp16 overflow nor fp16 underflow, whatever the scale of x."""
    x, (weight, scale) = (torch.rand(4, 512) - 0.5) * magnitude, weight_of(16, 512)
    exact = x.double() @ (weight.double() * scale.double()).T
    y = torch_path.int8_linear_fp16(x, weight, scale, fp16_activations=True)
    assert relative_error(y, exact) < relative_error(torch_path.int8_linear_fp16(x, weight, scale), exact)


# ------------------------------------------------------------------------------------------------ workspace


def peak_bytes(call):
    """Most bytes alive at once while ``call`` runs, over those alive before it, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    assert events, "the profiler must have seen allocations"
    return max(itertools.accumulate(e.nbytes() for e in events)), result


@pytest.mark.parametrize("fp16_activations", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 40_000, 1024), (20_000, 64, 1024), (2048, 3072, 1024), (700, 1500, 5008), (3, 64, 400_000), (1500, 8, 16_384)],
)
def test_workspace_is_bounded(m, n, k, fp16_activations):
    weight, scale = weight_of(n, k)
    x, residual = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(m, n, dtype=torch.bfloat16)
    for bias, res in ((None, None), (torch.randn(n), residual)):
        top, y = peak_bytes(
            lambda b=bias, r=res: torch_path.int8_linear_fp16(
                x, weight, scale, b, None, 16, residual=r, fp16_activations=fp16_activations
            )
        )
        workspace = top - y.numel() * y.itemsize
        assert workspace <= WORKSPACE_BYTES, f"{workspace / MIB:.1f} MiB"


def test_workspace_of_scaled_mm_is_bounded():
    m, n, k = 2500, 2500, 1500
    codes, (weight, scale) = torch.randint(-127, 128, (m, k), dtype=torch.int8), weight_of(n, k)
    x_scale, residual = torch.rand(m, 1), torch.randn(m, n)
    top, y = peak_bytes(
        lambda: torch_path.int8_scaled_mm(codes, x_scale, weight, scale, torch.rand(n), torch.float16, residual)
    )
    assert top - y.numel() * y.itemsize <= WORKSPACE_BYTES


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made within the block, and the most that were alive at once; ``given`` ones are older."""

    def __init__(self, *given):
        super().__init__()
        self.now = self.most = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in given if tensor is not None}

    def _gone(self, key, size):
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result


@pytest.mark.parametrize("k", [1024, 3072, 5008, 12_288, 40_000])
@pytest.mark.parametrize("kind", ["codes", "proven", "fp16"])
def test_a_chunk_holds_on_cuda_what_its_plan_reckons(k, kind, monkeypatch):
    """Without a GPU: tensors of no device, and a product that has fp32 results as cuBLAS's has. No stale slice stays alive."""
    monkeypatch.setattr(torch_path, "_product", lambda a, b: torch.empty(len(a), len(b), device="meta"))
    if kind == "proven" and not torch_path.EXACT_COLUMNS < k <= 2 * torch_path.PROVEN_COLUMNS:
        pytest.skip("nothing to prove")
    codes, proof = kind != "fp16", torch_path.Proof(k) if kind == "proven" else None
    rows = max(1, torch_path._OPERAND_BYTES // torch_path.bytes_of_row(k, codes, proof))
    a, n = Operand.empty(rows, k, codes, "meta", proof), 9000
    weight, depth = torch.empty(n, k, dtype=torch.int8, device="meta"), torch_path.slice_columns(a, k)
    sums = torch_path.bytes_of_output(a, k, depth)
    epilogue = 12 if proof is None and k > a.exact_columns else 4
    plan = choose_plan(rows, n, torch_path.Cost(sums, epilogue, 0, 2), depth)
    with LiveBytes(a.rows, a.high, weight) as live:
        torch_path._accumulate(a.part(slice(plan.rows)), weight[: plan.columns], depth)
    norms = 4 * plan.columns * proof.pieces if proof else 0
    reckoned = sums * plan.rows * plan.columns + 2 * plan.columns * depth
    assert 0 < live.most <= reckoned + norms
    assert max(reckoned, epilogue * plan.rows * plan.columns) <= torch_path._CHUNK_BYTES


@pytest.mark.parametrize("held", [(0, 2), (4, 6)], ids=["cuda", "cpu"])
@pytest.mark.parametrize(("gemm", "epilogue"), [(4, 4), (8, 4), (20, 12), (12, 28), (20, 40)])
def test_plans_fit_and_cover(gemm, epilogue, held):
    sizes, cost = (1, 7, 128, 300, 3072, 4097, 65_536, 1_000_000), torch_path.Cost(gemm, epilogue, *held)
    for m, n, k in itertools.product(sizes, sizes, (1, 64, 3072, 1_000_000)):
        depth = k if k <= torch_path.SLICE_COLUMNS else torch_path.DEEP_SLICE_COLUMNS
        plan = choose_plan(m, n, cost, depth)
        outputs = plan.rows * plan.columns
        in_gemm = gemm * outputs + (plan.rows * held[0] + plan.columns * held[1]) * plan.depth
        assert max(in_gemm, epilogue * outputs) <= torch_path._CHUNK_BYTES
        assert 1 <= plan.rows <= m
        assert 1 <= plan.columns <= n
        assert plan.depth == depth


def test_chunks_are_whole_tiles_of_nearly_equal_size():
    on_cuda = torch_path.Cost(8, 4, 0, 2)
    plan = choose_plan(2048, 12_288, on_cuda, 3072)
    assert plan.rows == 2048
    assert plan.columns % 128 == 0
    assert plan.columns >= 1024
    assert choose_plan(300, 500, on_cuda, 3072) == (300, 500, 3072)
    assert choose_plan(1024, 3072, torch_path.Cost(12, 4, 0, 2), 2048).columns == 1536, "shorter slices, a wider chunk"


def test_how_many_columns_of_k_a_gemm_has():
    for k, codes, proof, columns in (
        (3072, True, None, 3072), (12_288, True, None, 2048), (12_288, False, None, 2048), (4096, False, None, 4096),
        (3072, True, torch_path.Proof(3072), 3072), (12_288, True, torch_path.Proof(12_288), 6144),
    ):  # fmt: skip
        assert torch_path.slice_columns(Operand.empty(1, k, codes, "cpu", proof), k) == columns


# --------------------------------------------------------------------------------------------- on a real GPU


@pytest.mark.gpu
@pytest.mark.parametrize("m", [0, 1, 7, 17, 300, 2048])
@pytest.mark.parametrize(("n", "k"), [(7, 128), (130, 384), (3072, 3072), (512, 12_288)])
def test_gpu_int8_linear_fp16_bit_equal(m, n, k):
    weight, scale = (t.cuda() for t in weight_of(n, k))
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    arguments = (x, weight, scale, bias, None, 64, "none", None, 0.0, residual)
    with use("core/eager"):
        expected = ops.int8_linear(*arguments)
    with expect_kernel("int8_linear_fp16", OURS):
        assert_equal(ops.int8_linear_fp16(*arguments), expected)
    with simulate("sm_70"), use(OURS), expect_kernel("int8_linear", OURS):
        assert_equal(ops.int8_linear(*arguments), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("code", [127, -127, -128])
def test_gpu_extreme_codes(code):
    codes, weight, exact = extreme_operands(12_288, code)
    for copies in (1, 100):  # the shapes that cuBLAS serves by different kernels
        a = operand_of(codes.repeat(copies, 1).cuda())
        acc = torch_path._accumulate(a, weight.repeat(copies, 1).cuda(), 4096)
        assert_equal(acc.cpu(), exact.float().repeat(copies, copies))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [3072, 12_288])
@pytest.mark.parametrize("extreme", [False, True])
def test_gpu_large_calls_are_exact_whichever_way_they_go(k, extreme, monkeypatch):
    """Gaussian codes in one GEMM; with one row of the largest ones the proof fails, and the call is computed again."""
    m, n = torch_path.PROVEN_FLOPS // (2 * 1024 * k) + 1, 1024
    answers, holds = [], torch_path.Proof.holds
    monkeypatch.setattr(torch_path.Proof, "holds", lambda self: answers.append(holds(self)) or answers[-1])
    codes, weight = (torch.randn(r, k, device="cuda").mul_(30).round_().clamp_(-127, 127) for r in (m, n))
    if extreme:
        codes[m // 2], weight[n // 3] = 127, 127
        codes[m // 2, 5], weight[n // 3, 7] = 2, 1
    codes, weight = codes.to(torch.int8), weight.to(torch.int8)
    arguments = (codes, torch.rand(m, 1, device="cuda"), weight, torch.rand(n, device="cuda"), None, torch.float32)
    expected = reference.int8_scaled_mm(*arguments)
    assert_equal(torch_path.int8_scaled_mm(*arguments).cpu(), expected.cpu())
    assert answers == [not extreme]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch_path.int8_scaled_mm(*arguments)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(captured.cpu(), expected.cpu())
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = torch_path.int8_scaled_mm(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal(got.cpu(), expected.cpu())
    assert answers == [not extreme], "nothing waits in a graph, nor where waits are errors"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("k", "group"), [(3072, 256), (12_288, 256), (3072, 0)])
def test_gpu_errors_of_both_modes(k, group, dtype):
    """Against fp64 the INT8 mode errs as the INT8 path; with the same INT8 weight FP16 rows err a quarter of that."""
    m, n = 1024, 1024
    x, dense = torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda") * 0.02
    weight, scale = ops.quantize_int8_convrot_weight(dense, group)
    rotated = hadamard_rotate(x.float(), group).double()
    same_weight, exact = rotated @ (weight.double() * scale.double()).T, x.double() @ dense.double().T
    with use("core/eager"):
        int8 = ops.int8_linear(x, weight, scale, None, torch.float32, group)
    codes, halves = (
        ops.int8_linear_fp16(x, weight, scale, None, torch.float32, group, fp16_activations=mode)
        for mode in (False, True)
    )
    assert relative_error(codes, exact) <= 1.01 * relative_error(int8, exact)
    assert relative_error(halves, same_weight) <= relative_error(codes, same_weight) / 4


@pytest.mark.gpu
def test_gpu_fp16_accumulation_switch():
    settings = torch.backends.cuda.matmul
    x, (weight, scale) = torch.randn(64, 3072, device="cuda"), (t.cuda() for t in weight_of(256, 3072))
    expected = ops.int8_linear_fp16(x, weight, scale)
    try:
        settings.allow_fp16_accumulation = True
        assert_equal(ops.int8_linear_fp16(x, weight, scale), expected)
        assert settings.allow_fp16_accumulation
    finally:
        settings.allow_fp16_accumulation = False


@pytest.mark.gpu
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("fp16_activations", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(8192, 6144, 3072), (2048, 3072, 12_288), (1024, 1024, 20_480)])
def test_gpu_workspace_graph_and_stream(m, n, k, fp16_activations, extras):
    weight, scale = (t.cuda() for t in weight_of(n, k))
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(n, device="cuda") if extras else None
    residual = torch.randn(m, n, dtype=torch.bfloat16, device="cuda") if extras else None

    def call():
        return ops.int8_linear_fp16(
            x, weight, scale, bias, None, 256, residual=residual, residual_scale=bias, fp16_activations=fp16_activations
        )

    expected = call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = call()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - y.numel() * y.itemsize <= WORKSPACE_BYTES
    assert torch.equal(y, expected)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        assert torch.equal(call(), expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


@pytest.mark.gpu
def test_gpu_with_int8_tensor_cores_keeps_its_own_kernel():
    problem = registry.Problem(
        "int8_linear", torch.device("cuda:0"), torch.bfloat16, torch.bfloat16, 1, 3072, 3072, rotation=256
    )
    if torch.cuda.get_device_capability(0) < (7, 2):
        pytest.skip("this GPU has no INT8 tensor cores")
    assert registry.select(problem).id != OURS
