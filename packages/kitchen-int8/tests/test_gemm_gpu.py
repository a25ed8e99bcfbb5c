"""The INT8 GEMMs against the reference, on a GPU, to the bit: each record forced, each plan, each alignment.

The reference runs on the CPU for small problems. For large ones it runs on the GPU in plain PyTorch: its fp32 products of
integer slices are exact there too (TF32 stays off), and the rest is elementwise IEEE arithmetic.
"""

from __future__ import annotations

import pytest
import torch

from kitchen_core import ops, trace, use
from kitchen_core.launch import DTYPE_CODES
from kitchen_core.reference.int8 import int8_scaled_mm as reference
from kitchen_core.testing import assert_equal, expect_kernel
from kitchen_core.testing.operands import random_codes, random_floats
from kitchen_core.testing.operands import scaled_mm_operands as problem
from kitchen_int8 import _gemm
from kitchen_int8._extension import EXTENSION

pytestmark = pytest.mark.gpu

PORTABLE = ("int8/sm80", "int8/sm75")
KERNELS = (*PORTABLE, "int8/sm90")
HOPPER_VARIANTS = 10  # tiles of int8_gemm/sm90/int8_gemm.cu
HOPPER_SPLITS = (7, 8, 9)  # K over a cluster
HOPPER_COPIES_RESIDUAL = (1, 3)  # take a residual only through the copy engine
PATHS = {"int8/sm80": _gemm.SM80, "int8/sm75": _gemm.SM75}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
M_VALUES = (1, 2, 7, 16, 17, 33, 64, 97, 300, 1000)
N_VALUES = (1, 7, 40, 130, 3072, 22473)
K_VALUES = (1, 7, 16, 32, 100, 384, 3072, 12288)
ON_CPU = 2e7  # multiplications: below, the reference runs on the CPU


def expected(arguments: list) -> torch.Tensor:
    codes, weight = arguments[0], arguments[2]
    if codes.numel() * weight.shape[0] <= ON_CPU:
        return reference(*[a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]).cuda()
    assert not torch.backends.cuda.matmul.allow_tf32
    return reference(*arguments)


@pytest.fixture(autouse=True)
def _only_on_its_own_chip(request):
    kernel = request.node.callspec.params.get("kernel") if hasattr(request.node, "callspec") else None
    if kernel == "int8/sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("int8/sm90 needs a GPU of compute capability 9.0")


def check(kernel: str, arguments: list) -> torch.Tensor:
    with use(kernel), expect_kernel("int8_scaled_mm", kernel):
        out = ops.int8_scaled_mm(*arguments)
    want = expected(arguments)
    if not torch.equal(out, want):
        assert_equal(out, want, f"{kernel} {tuple(arguments[0].shape)} x {tuple(arguments[2].shape)}")
    return out


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("N", N_VALUES)
@pytest.mark.parametrize("K", K_VALUES)
def test_ragged_shapes(kernel, N, K):
    if kernel == "int8/sm90" and K % 16:
        pytest.skip("int8/sm90 loads by TMA: K must be a multiple of 16")
    for i, M in enumerate(M_VALUES):
        bias, residual = (None, *DTYPES)[(i + K) % 4], (i + N) % 2 == 0
        scale = "columns" if residual else None
        check(kernel, problem(M, N, K, DTYPES[i % 3], bias=bias, residual=residual, scale=scale, seed=M))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("N", [136, 133])  # stores of 16 bytes, and of elements
def test_every_epilogue(kernel, out_dtype, N):
    for bias in (None, *DTYPES):
        for scalar in (False, True):
            for residual, scale in ((False, None), (True, None), (True, "one"), (True, "columns")):
                check(kernel, problem(37, N, 384, out_dtype, bias=bias, residual=residual, scale=scale, scalar=scalar))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("residual_dtype", DTYPES)
def test_residual_of_another_dtype_is_not_rounded(kernel, residual_dtype):
    arguments = problem(19, 72, 256, torch.bfloat16, bias=torch.float32)
    arguments[6:] = [random_floats(19, 72, dtype=residual_dtype), random_floats(72, dtype=torch.float16)]
    check(kernel, arguments)


@pytest.mark.parametrize("kernel", [*KERNELS, "int8/decode", "int8/decode_sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_scale_of_every_dtype_is_read_in_place(kernel, dtype):
    """No cast in front: a call launches what it launches without a scale."""
    most = {"int8/decode": 64, "int8/decode_sm90": 16}.get(kernel, 300)
    for M, N in ((37, 136), (9, 133), (300, 264)):
        if most < M:
            continue
        arguments = problem(M, N, 384, torch.bfloat16, residual=True)
        for count in (1, N):
            arguments[7] = random_floats(count, dtype=dtype)
            check(kernel, arguments)
            with use(kernel), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                ops.int8_scaled_mm(*arguments)
            launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
            assert launched
            assert all("kitchen" in name for name in launched), launched


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("aligned", [True, False])
def test_every_plan(kernel, aligned):
    path, ran = PATHS[kernel], 0
    M, N, K = (300, 264, 2080) if aligned else (300, 259, 2077)
    arguments = problem(M, N, K, bias=torch.float32, residual=True, scale="columns")
    want = expected(arguments)
    for tile in range(EXTENSION.module.int8_gemm_portable_tiles(path)):
        for splits in (1, 2, 3, 5):
            for stages in (2, 3, 4, 6, 8):
                plan = (tile, stages, splits, 1 + stages % 3)
                answer = _gemm.plan_of(path, M, N, K, aligned, 0, plan)
                if answer.reason:
                    with pytest.raises(ValueError, match=answer.reason[:20]):
                        _gemm.scaled_mm(path, *arguments, plan=plan)
                    continue
                ran += 1
                assert torch.equal(_gemm.scaled_mm(path, *arguments, plan=plan), want), answer.words
    assert ran >= {True: {_gemm.SM80: 90, _gemm.SM75: 9}, False: {_gemm.SM80: 30, _gemm.SM75: 9}}[aligned][path]


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("variant", range(HOPPER_VARIANTS))
def test_every_hopper_variant(variant):
    assert EXTENSION.module.int8_gemm_sm90_variants() == HOPPER_VARIANTS
    shapes = ((300, 264, 2080), (129, 1000, 64), (4097, 136, 128), (37, 133, 1040), (384, 200, 256), (5, 72, 16))
    for i, (M, N, K) in enumerate(shapes):
        for residual in (False, True):
            arguments = problem(
                M, N, K, DTYPES[(i + residual) % 3], bias=DTYPES[i % 3], residual=residual,
                scale="columns" if residual else None, scalar=i % 2 == 0,
            )  # fmt: skip
            if residual and N % 8 and variant in HOPPER_COPIES_RESIDUAL:
                with pytest.raises(RuntimeError, match="residual that the copy engine cannot read"):
                    _gemm.hopper_scaled_mm(*arguments, plan=(variant, 0, 0, 0))
                continue
            want = expected(arguments)
            for splits in range(1 + (min(4, -(-K // 128)) if variant in HOPPER_SPLITS else 1)):
                out = _gemm.hopper_scaled_mm(*arguments, plan=(variant, 0, 0, splits))
                assert_equal(out, want, f"variant {variant} at {M} x {N} x {K}, {splits} pieces, residual: {residual}")
            with pytest.raises(RuntimeError, match="pieces of K"):
                _gemm.hopper_scaled_mm(*arguments, plan=(variant, 0, 0, 5))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("variant", HOPPER_SPLITS)
def test_split_tiles_repeat_their_bits_from_every_row_count(variant, residual):
    """Tiles that are not full: in boxes of 16 or 64 rows, the last ones moved back over the others."""
    arguments = problem(290, 520, 1040, bias=torch.bfloat16, residual=residual, scale="columns" if residual else None)
    want = expected(arguments)
    codes, scale, added = arguments[0], arguments[1], arguments[6]
    for M in (1, 15, 16, 17, 33, 48, 63, 64, 65, 100, 112, 113, 120, 127, 128, 129, 144, 191, 192, 255, 256, 257, 290):
        arguments[0], arguments[1], arguments[6] = codes[:M], scale[:M], added[:M] if residual else None
        for splits in (1, 2, 3, 4):
            out = _gemm.hopper_scaled_mm(*arguments, plan=(variant, 0, 0, splits))
            assert torch.equal(out, want[:M]), (M, splits)
    for _ in range(20):
        assert torch.equal(_gemm.hopper_scaled_mm(*arguments, plan=(variant, 0, 0, 3)), want)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("variant", range(HOPPER_VARIANTS))
def test_a_residual_under_the_output_is_added_once(variant):
    """Tiles that overlap store some results twice, which must not happen where the residual is the output itself."""
    for M, N in ((97, 264), (300, 520)):
        arguments = problem(M, N, 384, residual=True, scale="columns")
        want = expected(arguments)
        out = arguments[6].clone()
        operands = _gemm.gather(*arguments[:5], out, arguments[7]).arguments
        del operands["a_pitch"], operands["b_pitch"]
        EXTENSION.module.int8_gemm_sm90(
            **operands, out=out.data_ptr(), out_type=DTYPE_CODES[out.dtype], plan=(variant, 0, 0, 0), device=0,
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        assert_equal(out, want, f"variant {variant} at M={M}")


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("M", "N", "K"), [(100, 3072, 3072), (256, 3072, 3072), (256, 520, 12288), (700, 1024, 1024)])
def test_linear_reads_what_the_kernel_before_wrote(M, N, K):
    """Weights, x and residual, each written right in front of a linear whose GEMM starts before its quantizer has ended."""
    scale = random_floats(N, 1).abs()
    sets = [
        (
            random_floats(M, K, dtype=torch.bfloat16, seed=s),
            random_codes(N, K, s),
            random_floats(M, N, dtype=torch.bfloat16, seed=s + 9),
        )
        for s in range(3)
    ]
    wants = []
    for x, weight, residual in sets:
        with use("core/composed", "int8/sm80"):
            wants.append(ops.int8_linear(x, weight, scale, None, None, 64, residual=residual))
    x, weight, residual = (torch.empty_like(t) for t in sets[0])
    torch.cuda.synchronize()
    outs = []
    with use("int8/sm90"), expect_kernel("int8_linear", "int8/sm90"):
        for i in range(12):
            for target, source in zip((x, residual, weight), (sets[i % 3][j] for j in (0, 2, 1)), strict=True):
                target.copy_(source)
            outs.append(ops.int8_linear(x, weight, scale, None, None, 64, residual=residual))
    for i, out in enumerate(outs):
        assert torch.equal(out, wants[i % 3]), i


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_linear_on_hopper_uses_its_kernels():
    codes, scale = ops.quantize_int8_convrot_weight(torch.randn(264, 512, device="cuda"), 256)
    x = random_floats(300, 512, dtype=torch.bfloat16)
    with trace() as calls:
        y = ops.int8_linear(x, codes, scale, convrot_groupsize=256)
    assert [kernel for _, kernel in calls] == ["int8/sm90"]
    with use("core/eager"):
        assert_equal(y.cpu(), ops.int8_linear(x.cpu(), codes.cpu(), scale.cpu(), convrot_groupsize=256))


@pytest.mark.parametrize("kernel", KERNELS)
def test_unaligned_pointers_and_odd_strides(kernel):
    M, N, K = 70, 90, 256
    base, weights = random_codes(2 * M, 1031, 1), random_codes(N, 999, 2)
    wide = random_codes(M, 2 * K, 3)
    views = {
        "odd pitch": base[:M, :K], "second row": base[::2, :K], "odd start": base[:M, 1 : K + 1],
        "start at 4": base[:M, 4 : K + 4], "every second column": wide[:, ::2],
        "transposed": random_codes(K, M, 4).t(), "one row": base[5:6, :K].expand(M, K),
        "one aligned row": random_codes(1, K, 7).expand(M, K),
    }  # fmt: skip
    for name, codes in views.items():
        for weight in (weights[:, :K], weights[:, 3 : K + 3], random_codes(N, K, 5), random_codes(K, N, 6).t()):
            arguments = problem(M, N, K, bias=torch.bfloat16, residual=True)
            arguments[0], arguments[2] = codes, weight
            assert check(kernel, arguments).shape == (M, N), name


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("K", [1, 7, 15, 17, 100, 383, 2077])
def test_aligned_rows_of_a_ragged_width(kernel, K):
    path = PATHS[kernel]
    for M, N in ((1, 40), (70, 133), (300, 264)):
        arguments = problem(M, N, K, bias=torch.float32)
        want = expected(arguments)
        for i, columns in ((0, K), (2, K)):  # what lies beyond K is not read as zeros by chance
            wide = random_codes(arguments[i].shape[0], (columns + 31) // 16 * 16, 9)
            wide[:, :K] = arguments[i]
            arguments[i] = wide[:, :K]
        for tile in range(EXTENSION.module.int8_gemm_portable_tiles(path)):
            plan = (tile, 2, 1, 4)
            assert torch.equal(_gemm.scaled_mm(path, *arguments, plan=plan), want), (tile, M, N)
        check(kernel, arguments)


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("M", [3, 90, 300])
def test_unaligned_operands_in_place_and_copied(kernel, M):
    path = PATHS[kernel]
    arguments = problem(M, 200, 777)
    want = expected(arguments)
    in_place = _gemm.gather(*arguments[:4])
    assert not in_place.aligned
    assert _gemm.gather(*arguments[:4], align=True).aligned
    plan = _gemm.plan_of(path, M, 200, 777, False, 0).plan
    assert torch.equal(_gemm.scaled_mm(path, *arguments, plan=plan), want)  # a given plan: no copy
    assert torch.equal(_gemm.scaled_mm(path, *arguments), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_leading_dims_and_empty(kernel):
    arguments = problem(24, 40, 64)
    flat = check(kernel, arguments)
    arguments[0], arguments[1] = arguments[0].reshape(2, 3, 4, 64), arguments[1].reshape(2, 3, 4, 1)
    assert torch.equal(check(kernel, arguments).reshape(24, 40), flat)
    arguments[0], arguments[1] = arguments[0][:0], arguments[1][:0]
    with use(kernel):
        assert ops.int8_scaled_mm(*arguments).shape == (0, 3, 4, 40)


@pytest.mark.parametrize("kernel", PORTABLE)
@pytest.mark.parametrize("N", [136, 133])
def test_nothing_is_written_outside_of_the_output(kernel, N):
    M, guard = 77, 4096
    for K in (64, 4160, 4157):
        for dtype in DTYPES:
            arguments = problem(M, N, K, dtype, bias=torch.float32)
            space = torch.full((2 * guard + M * N,), float("nan"), dtype=dtype, device="cuda")
            out = space[guard : guard + M * N].view(M, N)
            _gemm.scaled_mm(PATHS[kernel], *arguments, out=out)
            assert torch.equal(out, expected(arguments))
            assert torch.isnan(space[:guard]).all()
            assert torch.isnan(space[guard + M * N :]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_largest_sums_are_exact(kernel):
    K = 131_056 if kernel == "int8/sm90" else 131_071
    for value, other in ((-128, -128), (-128, 127)):
        codes = torch.full((3, K), value, dtype=torch.int8).cuda()
        weight = torch.full((5, K), other, dtype=torch.int8).cuda()
        one = torch.ones(1, device="cuda")
        with use(kernel), expect_kernel("int8_scaled_mm", kernel):
            out = ops.int8_scaled_mm(codes, one.expand(3).contiguous(), weight, one, None, torch.float32)
        assert (out == torch.tensor(float(K * value * other))).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeated_runs_are_bit_equal(kernel):
    for M, N, K in ((16, 3072, 12288), (300, 1000, 3072)):
        arguments = problem(M, N, K, bias=torch.float32, residual=True)
        with use(kernel):
            first = ops.int8_scaled_mm(*arguments)
            for _ in range(30):
                assert torch.equal(ops.int8_scaled_mm(*arguments), first)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("M", [1, 16, 300])
def test_graph_replay_with_changed_inputs_on_another_stream(kernel, M):
    arguments = problem(M, 3072, 3072, bias=torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with use(kernel), torch.cuda.stream(stream):
        out = ops.int8_scaled_mm(*arguments)
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = ops.int8_scaled_mm(*arguments)
    for seed in (10, 20):
        for tensor, fresh in zip(arguments, problem(M, 3072, 3072, bias=torch.float32, seed=seed), strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected(arguments))


@pytest.mark.parametrize("kernel", KERNELS)
def test_side_stream_waits_for_nobody_else(kernel):
    arguments = problem(64, 1024, 4096)
    want = expected(arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with use(kernel), torch.cuda.stream(stream):
        outs = [ops.int8_scaled_mm(*arguments) for _ in range(5)]
    stream.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_than_65535_blocks_and_2_to_31_elements(kernel):
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    M, N, K = 70_000, 30_720, 64
    arguments = problem(M, N, K)
    with use(kernel), expect_kernel("int8_scaled_mm", kernel):
        out = ops.int8_scaled_mm(*arguments)
    for rows in (slice(0, 130), slice(34_900, 35_100), slice(M - 130, M)):
        some = [arguments[0][rows], arguments[1][rows], *arguments[2:]]
        assert torch.equal(out[rows], expected(some))


@pytest.mark.parametrize("kernel", KERNELS)
def test_whole_linear_runs_on_it(kernel):
    x, weight = random_floats(33, 512, dtype=torch.bfloat16), random_codes(96, 512)
    scale, bias = random_floats(96, 1).abs(), random_floats(96)
    op = "int8_linear" if kernel == "int8/sm90" else "int8_scaled_mm"  # the former's record is of the whole linear, too
    with use("core/composed", kernel), expect_kernel(op, kernel):
        out = ops.int8_linear(x, weight, scale, bias, None, 256)
    want = ops.int8_linear(x.cpu(), weight.cpu(), scale.cpu(), bias.cpu(), None, 256)
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_row_with_nan_scale_spoils_no_other_row(kernel):
    arguments = problem(20, 64, 128)
    arguments[1][7] = float("nan")
    out = check(kernel, arguments)
    assert torch.isnan(out[7]).all()
    assert torch.isfinite(out[[0, 6, 8, 19]]).all()


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = problem(33, 100, 384)
    with use("int8/sm80"):
        out = ops.int8_scaled_mm(*[a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in arguments])
    assert torch.equal(out.to("cuda:0"), expected(arguments))
