"""The compiled kernels on a GPU: bit-equal to the reference over shapes, layouts, dtypes and options, whatever the chip.

A GPU that is no V100 runs its own machine code of the same source, and believes itself one within `volta`.
"""

import contextlib
import itertools

import pytest
import torch

from kitchen_core import device_facts, ops, simulate, testing, trace, use
from kitchen_core.arithmetic import INPUT_ACTS, input_width
from kitchen_core.reference import int8 as reference
from kitchen_core.testing import FLOAT_DTYPES, LAYER_SHAPES, expect_kernel, leading_shapes, strided_copies
from kitchen_fallback_volta import _gemm, _quantize, torch_path
from kitchen_fallback_volta._extension import EXTENSION

GEMM, ROWS = "fallback-volta/wmma", "fallback-volta/rowwise"
TILES = range(len(_gemm.TILES))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _machine_code():
    here = device_facts("cuda:0")
    if not EXTENSION.build_info["has_cuda"] or "70" not in EXTENSION.archs:
        pytest.skip(f"kitchen-fallback-volta was built without sm_70 code: {EXTENSION.build_info['reason']}")
    if EXTENSION.why_not(here) is not None:
        pytest.skip(EXTENSION.why_not(here))


pytestmark = pytest.mark.gpu


def assert_equal(got, expected, what="result"):
    """As of kitchen_core.testing, which compares on the CPU; large results that are equal are told so on the GPU."""
    if got.dtype != expected.dtype or got.shape != expected.shape or not torch.equal(got, expected):
        testing.assert_equal(got, expected, what)


@contextlib.contextmanager
def volta():
    """This GPU is a V100, and our kernels are the ones that run."""
    with simulate("sm_70"), use(GEMM, ROWS):
        yield


@contextlib.contextmanager
def expect_both(op):
    """``op`` runs on the GEMM, its codes come from the quantizer (of two nested traces the outer one sees nothing)."""
    with trace() as calls:
        yield
    assert set(calls) >= {(op, GEMM), ("quantize_and_rotate_rowwise", ROWS)}, calls


def weight_of(n, k, low=-127):
    return torch.randint(low, 128, (n, k), dtype=torch.int8, device="cuda"), torch.rand(n, 1, device="cuda") * 1e-2


def codes_of(m, k):
    return torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda"), torch.rand(m, 1, device="cuda")


# ------------------------------------------------------------------------------------------------------ the GEMM

SHAPES = [*LAYER_SHAPES, (3072, 1024), (512, 3072), (33, 12_288)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("m", [0, 1, 7, 17, 33, 64, 65, 128, 129, 300, 1000])
def test_gemm_bit_equal_over_shapes(m, tile):
    for n, k in SHAPES:
        codes, x_scale = codes_of(m, k)
        arguments = (codes, x_scale, *weight_of(n, k, low=-128), torch.randn(n, device="cuda"))
        got = _gemm.int8_scaled_mm(*arguments, tile=tile)
        assert_equal(got, reference.int8_scaled_mm(*arguments), f"M={m} N={n} K={k}")


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [1, 3, 15, 16, 17, 63, 65, 100, 127, 129, 1000, 1023, 1025, 2049, 3000])
def test_gemm_any_k(k, tile):
    for m, n in ((1, 1), (5, 130), (130, 5), (40, 40)):
        codes, x_scale = codes_of(m, k)
        arguments = (codes, x_scale, *weight_of(n, k), None, FP32)
        assert_equal(_gemm.int8_scaled_mm(*arguments, tile=tile), reference.int8_scaled_mm(*arguments), f"{m} {n}")


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("code", [127, -127, -128])
def test_extreme_codes_at_large_k(code, tile):
    """Fp32 sums are at the end of what fp32 holds; at 130560 and 131008 a flush comes last. A lost unit anywhere shows."""
    for k in (1025, 12_288, 130_560, 131_008, 131_071):
        codes = torch.full((3, k), code, dtype=torch.int8)
        codes[1, ::5] = 5
        codes[2, 1] = 3
        weight = torch.full((5, k), code, dtype=torch.int8)
        weight[1:4] = -weight[1:4].clamp_min(-127)
        weight[2, ::3] = 1
        weight[3, -1] = 2
        exact = codes.long() @ weight.long().T
        copies = 43  # 129 rows: more than one tile of any kind
        ones = (torch.ones(3 * copies, 1, device="cuda"), torch.ones(5 * copies, device="cuda"))
        got = _gemm.int8_scaled_mm(
            codes.repeat(copies, 1).cuda(), ones[0], weight.repeat(copies, 1).cuda(), ones[1], None, FP32, tile=tile
        )
        assert_equal(got.cpu(), exact.float().repeat(copies, copies), f"K={k}")


@pytest.mark.parametrize("out", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_epilogue(out, tile):
    """Every dtype of every argument, with rows that are vectors and rows that are not."""
    for n in (96, 99):
        m, k = 70, 320
        codes, x_scale = codes_of(m, k)
        weight, scale = weight_of(n, k)
        row = torch.rand(n, device="cuda")
        for dtype in (*FLOAT_DTYPES, None):
            bias = None if dtype is None else torch.randn(n, device="cuda").to(dtype)
            for residual_dtype in (*FLOAT_DTYPES, None):
                residual = None if residual_dtype is None else torch.randn(m, n, device="cuda").to(residual_dtype)
                scales = [None] if residual is None else [None, row, row[:1], row.half()]
                for residual_scale, weight_scale in itertools.product(scales, (scale, scale[0, 0])):
                    arguments = (codes, x_scale, weight, weight_scale, bias, out, residual, residual_scale)
                    got = _gemm.int8_scaled_mm(*arguments, tile=tile)
                    assert_equal(
                        got, reference.int8_scaled_mm(*arguments), f"N={n} bias {dtype} residual {residual_dtype}"
                    )


def test_bfloat16_rounding_of_every_kind():
    """Ties, overflow to infinity, subnormals and NaN at the output, through a product of 1 by a scale."""
    values = torch.tensor(
        [1.00390625, 1.01171875, 3.4e38, 1e-40, 9.2e-41, -1.00390625, 0.0, float("nan"), float("inf")]
    )
    n = len(values)
    codes = torch.ones(2, 1, dtype=torch.int8, device="cuda")
    weight = torch.ones(n, 1, dtype=torch.int8, device="cuda")
    for out in (BF16, FP16):
        got = _gemm.int8_scaled_mm(codes, torch.ones(2, 1, device="cuda"), weight, values.cuda(), None, out)
        assert_equal(got, values.to(out).expand(2, n).cuda())


@pytest.mark.parametrize("tile", TILES)
def test_layouts_do_not_matter(tile):
    codes, x_scale = codes_of(17, 128)
    weight, scale = weight_of(40, 128)
    expected = reference.int8_scaled_mm(codes, x_scale, weight, scale)
    for layout, strided in strided_copies(weight).items():
        assert_equal(_gemm.int8_scaled_mm(codes, x_scale, strided, scale, tile=tile), expected, f"weight {layout}")
    for layout, strided in strided_copies(codes).items():
        assert_equal(_gemm.int8_scaled_mm(strided, x_scale, weight, scale, tile=tile), expected, f"codes {layout}")
    residual = torch.randn(40, 17, device="cuda").t()
    arguments = (codes, x_scale, weight, scale, None, BF16, residual)
    assert_equal(_gemm.int8_scaled_mm(*arguments, tile=tile), reference.int8_scaled_mm(*arguments))


@pytest.mark.parametrize("tile", TILES)
def test_nothing_is_written_around_the_output(tile):
    for n, m in itertools.product((8, 40, 41, 128), (1, 33, 129)):
        codes, x_scale = codes_of(m, 64)
        weight, scale = weight_of(n, 64)
        memory = torch.full((m * n + 64,), 7.0, dtype=BF16, device="cuda")
        out = memory[32:-32].view(m, n)
        _gemm._multiply(out, codes, x_scale, weight, scale, None, None, None, tile)
        assert_equal(out.clone(), reference.int8_scaled_mm(codes, x_scale, weight, scale))
        assert (memory[:32] == 7).all()
        assert (memory[-32:] == 7).all()


def test_more_results_than_32_bits_count():
    m, n, k = 70_000, 31_000, 64
    codes, x_scale = codes_of(m, k)
    weight, scale = weight_of(n, k)
    got = _gemm.int8_scaled_mm(codes, x_scale, weight, scale)
    rows = torch.tensor([0, 1, m // 2, m - 2, m - 1], device="cuda")
    assert_equal(got[rows], reference.int8_scaled_mm(codes[rows], x_scale[rows], weight, scale))


def test_a_row_does_not_depend_on_others_nor_runs_on_each_other():
    codes, x_scale = codes_of(300, 3072)
    weight, scale = weight_of(512, 3072)
    whole = _gemm.int8_scaled_mm(codes, x_scale, weight, scale)
    for m in (1, 16, 33, 129, 300):
        assert_equal(_gemm.int8_scaled_mm(codes[:m], x_scale[:m], weight, scale), whole[:m])


# ------------------------------------------------------------------------------------------------- the quantizer


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("group", [0, 4, 16, 64, 256, 1024, 4096])
def test_codes_bit_equal(group, dtype):
    unit = max(1, group)
    widths = {unit * -(-k // unit) for k in (1, 20, 100, 320, 3072, 4100, 12_288, 16_384, 20_480, 40_000)}
    for k in sorted(widths):
        for m in (1, 5):
            x = (torch.randn(m, k, device="cuda") * torch.logspace(-3, 3, m, device="cuda").reshape(-1, 1)).to(dtype)
            for seed in (0, 17):
                expected = reference.quantize_and_rotate_rowwise(x, group, seed=seed)
                got = _quantize.quantize_rowwise(x, group, seed=seed)
                assert_equal(got[0], expected[0], f"codes, M={m} K={k} seed={seed}")
                assert_equal(got[1], expected[1], f"scales, M={m} K={k} seed={seed}")


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("input_act", [act for act in INPUT_ACTS if act != "none"])
def test_codes_behind_an_activation(input_act, dtype):
    """At most one step apart, in less than 0.1% of the codes: the contract where exp and tanh are in front."""
    for k, group in ((320, 64), (3072, 256), (20_480, 0)):
        x = torch.randn(64, input_width(k, input_act), device="cuda").to(dtype)
        weight = torch.rand(k, device="cuda").to(dtype) if input_act == "rms_norm" else None
        got, scale = _quantize.quantize_rowwise(x, group, input_act, weight, 1e-6)
        expected, expected_scale = reference.quantize_and_rotate_rowwise(x, group, input_act, weight, 1e-6)
        apart = (got.int() - expected.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 1e-3
        # eight fp32 roundings of the activation and its sums lie between the two scales
        torch.testing.assert_close(scale, expected_scale, rtol=64 * 2.0**-24, atol=0)


def test_layouts_of_x():
    x = torch.randn(17, 512, device="cuda").half()
    expected = reference.quantize_and_rotate_rowwise(x, 256)
    for layout, strided in strided_copies(x).items():
        for got, wanted in zip(_quantize.quantize_rowwise(strided, 256), expected, strict=True):
            assert_equal(got, wanted, layout)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("group", [0, 16, 256])
def test_a_row_that_is_not_finite(bad, group):
    x = torch.randn(5, 512, device="cuda")
    x[2, 7] = bad
    codes, scale = _quantize.quantize_rowwise(x, group)
    expected = reference.quantize_and_rotate_rowwise(x, group)
    assert_equal(codes, expected[0])
    assert_equal(scale, expected[1])


def test_zeros_and_the_largest_values():
    rows = [torch.zeros(256), torch.full((256,), 3e38), torch.full((256,), 1e-40), torch.full((256,), -1e-30)]
    x = torch.stack(rows).cuda()
    for got, wanted in zip(_quantize.quantize_rowwise(x), reference.quantize_and_rotate_rowwise(x), strict=True):
        assert_equal(got, wanted)


# ------------------------------------------------------------------------------------------------ the whole path


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("m", [0, 1, 7, 300, 8192])
def test_int8_linear_bit_equal(m, dtype):
    for n, k in ((96, 320), (384, 1536), (3072, 3072)):
        weight, scale = weight_of(n, k)
        bias = torch.randn(n, device="cuda").to(dtype)
        for lead in leading_shapes(m):
            x = torch.randn(*lead, k, device="cuda").to(dtype)
            residual = torch.randn(*lead, n, device="cuda").to(dtype)
            arguments = (x, weight, scale, bias, None, 64, "none", None, 0.0, residual)
            expected = reference.int8_linear(*arguments)
            with volta():
                with expect_both("int8_linear_fp16"):
                    assert_equal(ops.int8_linear_fp16(*arguments), expected)
                if dtype != FP32:
                    with expect_kernel("int8_linear", GEMM):
                        assert_equal(ops.int8_linear(*arguments), expected)


def test_rows_in_blocks(monkeypatch):
    monkeypatch.setattr(_gemm, "OPERAND_BYTES", 128 * 1540)
    weight, scale = weight_of(384, 1536)
    x = torch.randn(3, 150, 1536, device="cuda").to(BF16)
    residual = torch.randn(3, 150, 384, device="cuda").to(BF16)
    arguments = (x, weight, scale, None, FP16, 256, "none", None, 0.0, residual)
    with volta(), expect_kernel("int8_linear", GEMM):
        assert_equal(ops.int8_linear(*arguments), reference.int8_linear(*arguments))


@pytest.mark.parametrize("bits", [4, 6])
def test_w4a8_profits(bits):
    x = torch.randn(70, 1024, device="cuda").to(BF16)
    weight = ops.quantize_w4a8_weight(torch.randn(256, 1024, device="cuda"), 16, 256, bits)
    arguments = (x, *weight, torch.randn(256, device="cuda"), None, 16, 256)
    with use("core/eager"):
        expected = ops.w4a8_linear(*arguments)
    with volta(), expect_both("int8_scaled_mm"):
        assert_equal(ops.w4a8_linear(*arguments), expected)


def test_error_against_float64_is_the_int8_paths():
    """Equal bits, so equal error; said here as the figure that users compare."""
    dense = torch.randn(512, 3072, device="cuda") * 0.02
    weight, scale = ops.quantize_int8_convrot_weight(dense, 256)
    x = torch.randn(256, 3072, device="cuda").to(BF16)
    exact = x.double() @ dense.double().T
    errors = []
    for kernels in ((GEMM, ROWS), ("core/eager",)):
        with simulate("sm_70"), use(*kernels):
            y = ops.int8_linear(x, weight, scale, convrot_groupsize=256)
        errors.append(((y.double() - exact).norm() / exact.norm()).item())
    assert errors[0] == errors[1]


@pytest.mark.parametrize("shape", [(8192, 3072, 12_288), (8192, 12_288, 3072), (1, 16_384, 16_384)], ids=str)
def test_memory(shape):
    """Beside inputs and output at most 64 MiB, and never more than the INT8 path, which holds all codes of x."""
    m, n, k = shape
    weight, scale = weight_of(n, k)
    x = torch.randn(m, k, device="cuda").to(BF16)

    def peak(call):
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - y.numel() * y.itemsize

    def ours():
        with volta():
            return ops.int8_linear(x, weight, scale, None, None, 256)

    workspace = peak(ours)
    codes_and_scales = m * k + 4 * m
    assert workspace <= torch_path.WORKSPACE_BYTES
    assert workspace <= codes_and_scales + 1024  # the allocator rounds two tensors up to 512 bytes


def test_graph_and_stream():
    weight, scale = weight_of(3072, 3072)
    x, fresh = (torch.randn(257, 3072, device="cuda").to(BF16) for _ in range(2))

    def call(rows):
        with volta():
            return ops.int8_linear(rows, weight, scale, None, None, 256)

    expected, expected_fresh = call(x), call(fresh)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_side = call(x)
    torch.cuda.synchronize()
    assert_equal(on_side, expected)
    buffer = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(buffer)
    for rows, wanted in ((x, expected), (fresh, expected_fresh), (x, expected)):
        buffer.copy_(rows)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(captured, wanted)


def test_another_current_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    codes, x_scale = codes_of(5, 64)
    weight, scale = weight_of(9, 64)
    expected = reference.int8_scaled_mm(codes, x_scale, weight, scale)
    with torch.cuda.device(1):
        assert_equal(_gemm.int8_scaled_mm(codes, x_scale, weight, scale), expected)
        moved = [t.to("cuda:1") for t in (codes, x_scale, weight, scale)]
    assert_equal(_gemm.int8_scaled_mm(*moved).cpu(), expected.cpu())
