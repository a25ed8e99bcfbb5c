"""The kernels against the reference, on a GPU, to the bit: decoding exhaustively, each product forced, plan by plan.

The reference runs on the GPU in plain PyTorch: its fp32 products of integer slices are exact there too (TF32 stays off), and
the rest is elementwise IEEE arithmetic.
"""

from __future__ import annotations

import pytest
import torch

from kitchen_core import UnsupportedError, ops, trace, use
from kitchen_core.codebook import fixed_codebook
from kitchen_core.packing import pack_6bit, pack_nibbles
from kitchen_core.reference import w4a8 as reference
from kitchen_core.testing import assert_equal, expect_kernel
from kitchen_w4a8 import _launch

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = (BF16, FP16, torch.float32)
KERNELS = ("w4a8/stream", "w4a8/hopper", "w4a8/decoded")
MOST_ROWS = {"w4a8/stream": 16, "w4a8/hopper": 300, "w4a8/decoded": 300}
STREAM_PLANS = [(warps, splits) for warps in (1, 2, 4, 8, 16) for splits in (1, 2, 4, 8)]
HOPPER_TILES = [
    *((64, tokens) for tokens in (32, 64, 128, 160, 256)), *((192, tokens) for tokens in (64, 128, 160, 192)), (128, 256),
]  # fmt: skip
NO_TILES = [(0, 0), (64, 192)]  # decoding first, and nothing
HOPPER_PLANS = [(*tile, splits) for tile in (*HOPPER_TILES, *NO_TILES) for splits in (1, 2, 3, 4, 8)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def floats(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), device="cuda").to(dtype)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator(seed), device="cuda", dtype=torch.int32)


def codebook(kind: str) -> torch.Tensor | None:
    """ "fixed" ascends through zero; "foreign" neither ascends nor splits by sign."""
    tables = {"fixed": fixed_codebook(), "foreign": floats(16, seed=9)}
    return tables[kind].float().cuda() if kind in tables else None


def weight(N: int, K: int, bits: int, group: int, *, signed: bool = False, fp32: bool = False, seed: int = 0):
    """Codes of every value, and scales of any finite e4m3 byte (``signed``) or of those that are at least 0."""
    codes = integers(0, 2**bits, N, K, seed=seed).to(torch.int8)
    packed = pack_nibbles(codes) if bits == 4 else pack_6bit(codes)
    if fp32:
        return packed, floats(N, K // group, seed=seed + 1).abs() * 60
    scales = integers(0, 0x7F, N, K // group, seed=seed + 1)
    if signed:
        scales = scales | integers(0, 2, N, K // group, seed=seed + 2) << 7
    return packed, scales.to(torch.uint8).view(torch.float8_e4m3fn)


def problem(
    M,
    N,
    K,
    bits=4,
    group=16,
    out_dtype=torch.bfloat16,
    *,
    table="fixed",
    bias=None,
    residual=False,
    signed=False,
    seed=0,
):
    """Arguments of w4a8_scaled_mm."""
    packed, scales = weight(N, K, bits, group, signed=signed, seed=seed)
    return [
        integers(-128, 128, M, K, seed=seed + 3).to(torch.int8), floats(M, 1, seed=seed + 4).abs() / K**0.5, packed, scales,
        floats(N, seed=seed + 5).abs() + 0.01, codebook(table) if bits == 4 else None, None,
        None if bias is None else floats(N, dtype=bias, seed=seed + 6), out_dtype, group,
        floats(M, N, dtype=out_dtype, seed=seed + 7) if residual else None, floats(N, seed=seed + 8) if residual else None,
    ]  # fmt: skip


def expected(arguments: list) -> torch.Tensor:
    assert not torch.backends.cuda.matmul.allow_tf32
    return reference.w4a8_scaled_mm(*arguments)


def check(kernel: str, arguments: list) -> torch.Tensor:
    with use(kernel), expect_kernel("w4a8_scaled_mm", kernel):
        out = ops.w4a8_scaled_mm(*arguments)
    want = expected(arguments)
    if not torch.equal(out, want):
        shape = f"{tuple(arguments[0].shape)} x {tuple(arguments[2].shape)}, groups of {arguments[9]}"
        assert_equal(out, want, f"{kernel} {shape}")
    return out


@pytest.fixture(autouse=True)
def _only_on_its_own_chip(request):
    if torch.cuda.get_device_capability() != (9, 0) and "w4a8/hopper" in str(getattr(request.node, "callspec", "")):
        pytest.skip("w4a8/hopper needs a GPU of compute capability 9.0")


# ---------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("table", ["none", "fixed", "foreign"])
def test_every_code_at_every_finite_scale(bits, table):
    if bits == 6 and table != "none":
        pytest.skip("6 bits have no codebook")
    scales = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8).cuda()
    codes = torch.arange(2**bits, dtype=torch.int8).cuda().expand(len(scales), -1).contiguous()
    packed = pack_nibbles(codes) if bits == 4 else pack_6bit(codes)
    s_rel = scales.view(torch.float8_e4m3fn)[:, None].expand(-1, codes.shape[1] // 16).contiguous()
    with expect_kernel("decode_w4a8_weight", "w4a8/decode"):
        got = ops.decode_w4a8_weight(packed, s_rel, codebook(table), 16)
    assert got.shape == (254, 2**bits)
    assert_equal(got, reference.decode_w4a8_weight(packed, s_rel, codebook(table), 16))
    # The products decode in other ways: a one-hot row of x reads out one column.
    if got.shape[1] % 64 == 0:
        wide, wide_scales = packed, s_rel
    else:
        wide, wide_scales = packed.repeat(1, 4), s_rel.repeat(1, 4)
    columns = wide_scales.shape[1] * 16
    one_hot = torch.eye(columns, dtype=torch.int8, device="cuda")[: got.shape[1]]
    ones = torch.ones(columns, 1, device="cuda")[: got.shape[1]]
    for kernel, rows in (("w4a8/stream", 16), ("w4a8/hopper", 64)):
        if kernel == "w4a8/hopper" and torch.cuda.get_device_capability() != (9, 0):
            continue
        for first in range(0, got.shape[1], rows):
            part = slice(first, first + rows)
            with use(kernel):
                column = ops.w4a8_scaled_mm(
                    one_hot[part], ones[part], wide, wide_scales, torch.ones(254, device="cuda"), codebook(table), None,
                    None, torch.float32, 16,
                )  # fmt: skip
            assert_equal(column.t().to(torch.int8), got[:, part], kernel)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize(
    ("bits", "group"), [*((4, g) for g in (4, 8, 16, 32, 48, 64, 128, 256)), *((6, g) for g in (16, 32, 48, 96, 128))]
)
def test_decode_of_every_group(bits, group, fp32):
    K = 96 * group if group < 16 else group * (2 if group % 32 == 0 else 6)
    for N in (1, 257):
        packed, scales = weight(N, K, bits, group, signed=True, fp32=fp32)
        for table in ("none", "fixed") if bits == 4 else ("none",):
            with expect_kernel("decode_w4a8_weight", "w4a8/decode"):
                got = ops.decode_w4a8_weight(packed, scales, codebook(table), group)
            assert_equal(got, reference.decode_w4a8_weight(packed, scales, codebook(table), group))


def test_decode_of_views_and_of_nothing():
    packed, scales = weight(20, 64, 4, 16)
    want = reference.decode_w4a8_weight(packed, scales, None, 16)
    assert_equal(ops.decode_w4a8_weight(packed[::2], scales[::2], None, 16), want[::2])
    shifted = torch.empty(packed.numel() + 3, dtype=torch.int8, device="cuda")[3:].view(packed.shape).copy_(packed)
    assert_equal(ops.decode_w4a8_weight(shifted, scales.view(torch.uint8), None, 16), want)
    assert ops.decode_w4a8_weight(packed[:0], scales[:0], None, 16).shape == (0, 64)


@pytest.mark.parametrize("bits", [4, 6])
def test_dequantize(bits):
    packed, scales = weight(130, 512, bits, 16)
    channel, table = floats(130, seed=5).abs(), codebook("fixed") if bits == 4 else None
    for dtype in (None, *DTYPES):
        for rotation in (0, 256):
            arguments = [packed, scales, channel, table, None, dtype, 16, rotation]
            with expect_kernel("dequantize_w4a8_weight", "w4a8/decoded"):
                got = ops.dequantize_w4a8_weight(*arguments)
            assert_equal(got, reference.dequantize_w4a8_weight(*arguments))


# ---------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("bits", "N", "K", "group"),
    [
        (4, 1, 32, 16), (4, 100, 320, 16), (4, 333, 4160, 64), (4, 48, 256, 256), (4, 4096, 1024, 128), (4, 130, 1088, 32),
        (6, 1, 64, 16), (6, 100, 320, 16), (6, 333, 4160, 32), (6, 1000, 2048, 128), (6, 136, 12288, 16),
    ],
)  # fmt: skip
def test_ragged_shapes(kernel, bits, N, K, group):
    for i, M in enumerate(m for m in (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 129, 300) if m <= MOST_ROWS[kernel]):
        bias, residual = (None, *DTYPES)[(i + K) % 4], (i + N) % 2 == 0
        arguments = problem(M, N, K, bits, group, DTYPES[i % 3], bias=bias, residual=residual, seed=M)
        check(kernel, arguments)


@pytest.mark.parametrize("kernel", KERNELS[:2])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("N", [136, 133])  # stores of vectors, and of elements
def test_every_epilogue(kernel, out_dtype, N):
    for bits in (4, 6):
        for bias in (None, *DTYPES):
            for residual in (False, True):
                arguments = problem(
                    MOST_ROWS[kernel] // 2 + 3, N, 384, bits, 16, out_dtype, bias=bias, residual=residual
                )
                check(kernel, arguments)
                if residual:
                    for gate in (None, floats(1), floats(N, dtype=torch.float16)):
                        arguments[11] = gate
                        check(kernel, arguments)
                    arguments[10] = floats(
                        *arguments[10].shape, dtype=torch.float16 if out_dtype != torch.float16 else torch.float32
                    )
                    check(kernel, arguments)


@pytest.mark.parametrize("kernel", KERNELS[:2])
@pytest.mark.parametrize("table", ["none", "fixed", "foreign"])
@pytest.mark.parametrize("signed", [False, True])
def test_tables_and_signs(kernel, table, signed):
    for M in (5, 13):
        check(kernel, problem(M, 72, 1024, table=table, signed=signed))
        check(kernel, problem(M, 72, 1024, bits=6, group=32, signed=signed))


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize(("launch", "plans", "rows"), [
    (_launch.STREAM, STREAM_PLANS, (1, 8, 16)), (_launch.HOPPER, HOPPER_PLANS, (17, 100, 300)),
])  # fmt: skip
def test_every_plan(launch, plans, rows, bits):
    if launch == _launch.HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("w4a8/hopper needs a GPU of compute capability 9.0")
    ran = 0
    for N, K in ((333, 4160), (4096, 2048)):
        for M in rows:
            for residual in (True, False):  # without one, a 16-bit result leaves by the copy engine
                arguments = problem(M, N, K, bits, 32, bias=torch.float32, residual=residual)
                want = expected(arguments)
                for plan in plans:
                    if launch == _launch.STREAM:
                        answer = _launch.stream_plan(M, N, K, bits, 32, 0, plan)
                    else:
                        answer = _launch.hopper_plan(M, N, K, bits, 32, N % 8 == 0, 0, plan)
                    if answer.reason:
                        with pytest.raises(ValueError, match=answer.reason[:20]):
                            _launch.scaled_mm(launch, *arguments, plan=plan)
                        continue
                    ran += 1
                    assert torch.equal(_launch.scaled_mm(launch, *arguments, plan=plan), want), answer.words
    assert ran >= (100 if launch == _launch.STREAM else 420)


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_scales_of_every_group_and_alignment(bits, group):
    """Rows of s_rel that begin at any byte, and a K that ends inside of a stage."""
    for K in (512, 768 if group == 256 else 640 + 128 * (group == 64), 320 if group <= 64 else 1024):
        if K % group:
            continue
        for M in (40, 200):
            arguments = problem(M, 136, K, bits, group)
            want = expected(arguments)
            scales = arguments[3].view(torch.uint8)
            shifted = torch.empty(scales.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(scales.shape)
            shifted.copy_(scales)
            for given in (scales, shifted):
                arguments[3] = given.view(torch.float8_e4m3fn)
                for plan in ((64, 64, 1), (64, 128, 1), (0, 0, 1)):
                    assert torch.equal(_launch.scaled_mm(_launch.HOPPER, *arguments, plan=plan), want), (K, M, plan)


def test_decoding_first_in_pieces():
    """A weight of more than the workspace: three pieces, the last one short."""
    M, N, K = 72, 40_008, 4096
    arguments = problem(M, N, K, bias=torch.float16, residual=True)
    assert _launch.hopper_plan(M, N, K, 4, 16, True, 0, (0, 0, 1)).workspace <= 64 << 20
    want = ops.w4a8_scaled_mm(*arguments)
    for _ in range(3):
        assert torch.equal(_launch.scaled_mm(_launch.HOPPER, *arguments, plan=(0, 0, 1)), want)


@pytest.mark.parametrize("bits", [4, 6])
def test_rows_do_not_depend_on_each_other_and_equal_the_decoded_product(bits):
    arguments = problem(64, 520, 2048, bits, 16, bias=torch.bfloat16)
    codes, scale, *rest = arguments
    with use("w4a8/decoded"):
        decoded = ops.w4a8_scaled_mm(codes, scale, *rest)
    for M in range(1, 65):
        with trace() as calls:
            out = ops.w4a8_scaled_mm(codes[:M], scale[:M], *rest)
        assert calls[0][1] in ("w4a8/stream", "w4a8/hopper", "w4a8/decoded")
        assert torch.equal(out, decoded[:M]), M


@pytest.mark.parametrize("kernel", KERNELS)
def test_largest_sums_are_exact(kernel):
    K = 131_008
    codes = torch.full((3, K), -128, dtype=torch.int8, device="cuda")
    packed = pack_nibbles(torch.zeros(5, K, dtype=torch.int8)).cuda()
    scales = torch.full((5, K // 64), 448.0, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones(5, device="cuda")
    with use(kernel), expect_kernel("w4a8_scaled_mm", kernel):
        out = ops.w4a8_scaled_mm(codes, one[:3, None], packed, scales, one, None, None, None, torch.float32, 64)
    assert (out == torch.tensor(float(K * 128 * 127))).all()


def test_corrections_and_fp32_scales_decode_first():
    for M in (3, 40):
        arguments = problem(M, 60, 256, bias=torch.float16, residual=True, table="none")
        for change in ("correction", "fp32"):
            changed = list(arguments)
            if change == "correction":
                changed[6] = floats(16, 60, dtype=torch.bfloat16)
            else:
                changed[3] = floats(60, 16).abs() * 60
            check("w4a8/decoded", changed)
            with expect_kernel("w4a8_scaled_mm", "w4a8/decoded"):
                ops.w4a8_scaled_mm(*changed)
            for kernel in KERNELS[:2]:
                with (
                    use(kernel),
                    pytest.raises(UnsupportedError, match=r"takes no correction|s_rel is float32|at most 16"),
                ):
                    ops.w4a8_scaled_mm(*changed)


def test_decoding_in_pieces_is_the_same(monkeypatch):
    arguments = problem(33, 700, 512, bias=torch.float32, residual=True)
    want = expected(arguments)
    monkeypatch.setattr(_launch, "chunk_rows", lambda n, k, device: 256)
    assert_equal(_launch.decoded_scaled_mm(*arguments), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_are_made_contiguous(kernel):
    arguments = problem(12, 72, 256, bias=torch.float32)
    want = expected(arguments)
    wide = torch.zeros(24, 300, dtype=torch.int8, device="cuda")
    wide[::2, 3:259] = arguments[0]
    arguments[0] = wide[::2, 3:259]
    packed = torch.zeros(72, 2 * 128, dtype=torch.int8, device="cuda")
    packed[:, 1:129] = arguments[2]
    arguments[2] = packed[:, 1:129]
    arguments[3] = arguments[3].t().contiguous().t()
    arguments[5] = arguments[5].double().to(torch.float32).repeat_interleave(2)[::2]
    with use(kernel):
        assert torch.equal(ops.w4a8_scaled_mm(*arguments), want)
        shaped = [arguments[0].reshape(2, 3, 2, 256), arguments[1].reshape(2, 3, 2, 1), *arguments[2:]]
        assert torch.equal(ops.w4a8_scaled_mm(*shaped).reshape(12, 72), want)
        empty = [arguments[0][:0], arguments[1][:0], *arguments[2:]]
        assert ops.w4a8_scaled_mm(*empty).shape == (0, 72)


@pytest.mark.parametrize("bits", [4, 6])
def test_linear_equals_its_two_steps_where_codes_are_ordered(bits, monkeypatch):
    """The quantizer of activations writes the order that the tiles want: each of its kernels, rows that end anywhere."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("w4a8/hopper needs a GPU of compute capability 9.0")
    cases = [
        # K, rotation, rows, dtype, activation: by clusters, one and two tiles a warp, few butterflies, staged, chunks
        (320, 64, 20, BF16, "none"), (320, 0, 300, FP16, "none"), (1088, 16, 70, torch.float32, "none"),
        (4160, 64, 300, BF16, "none"), (4352, 256, 300, BF16, "none"), (8448, 256, 20, FP16, "none"),
        (4352, 256, 600, BF16, "swiglu"), (4096, 256, 600, FP16, "swiglu"), (1536, 256, 40, torch.float32, "none"),
        (1536, 256, 800, BF16, "none"), (960, 4, 33, BF16, "gelu_tanh"), (4096, 1024, 40, BF16, "none"),
        (16960, 64, 40, BF16, "none"),
    ]  # fmt: skip
    planned = _launch.hopper_plan
    for K, rotation, M, dtype, act in cases:
        packed, scales = weight(136, K, bits, 32)
        rest = (packed, scales, floats(136).abs(), codebook("fixed") if bits == 4 else None)
        x = floats(M, K * (2 if act == "swiglu" else 1), dtype=dtype)
        codes, scale = _launch.quantize_activation(x, rotation, act)
        want = reference.w4a8_scaled_mm(codes, scale, *rest, None, None, dtype, 32)
        for plan in (*((*tile, 1) for tile in HOPPER_TILES), (64, 64, 2), (0, 0, 1)):
            monkeypatch.setattr(_launch, "hopper_plan", lambda *problem, plan=plan: planned(*problem[:7], plan))
            out = _launch.linear(_launch.HOPPER, x, *rest, group_size=32, convrot_groupsize=rotation, input_act=act)
            assert torch.equal(out, want), (K, rotation, M, dtype, act, plan)


# ------------------------------------------------------------------------------------- graphs, streams, compile, PDL


def linear_problem(M, N=1024, K=2048, bits=4, seed=0):
    packed, scales = weight(N, K, bits, 16, seed=seed)
    table = codebook("fixed") if bits == 4 else None
    return floats(M, K, dtype=torch.bfloat16, seed=seed + 9), (packed, scales, floats(N, seed=seed).abs(), table)


def linear(x, weight):
    return ops.w4a8_linear(x, *weight, convrot_groupsize=256)


@pytest.mark.parametrize(
    ("kernel", "M"),
    [("w4a8/stream", 16), ("w4a8/hopper", 40), ("w4a8/hopper", 300), ("w4a8/hopper", 5000), ("w4a8/decoded", 40)],
)
@pytest.mark.parametrize("bits", [4, 6])
def test_graph_replay_with_changed_inputs_on_two_streams_that_share_a_weight(kernel, M, bits):
    x, weights = linear_problem(M, bits=bits)
    graphs = []
    with use(kernel):
        for _ in range(2):
            stream, mine = torch.cuda.Stream(), x.clone()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                linear(mine, weights)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    out = linear(mine, weights)
            graphs.append((stream, graph, mine, out))
        for seed in (10, 20):
            fresh, others = linear_problem(M, bits=bits, seed=seed)
            for tensor, new in zip(weights, others, strict=True):
                if tensor is not None:
                    tensor.copy_(new)
            for i, (_, _, mine, out) in enumerate(graphs):
                mine.copy_(fresh + i)
                out.fill_(float("nan"))
            torch.cuda.synchronize()
            for stream, graph, _, _ in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for _, _, mine, out in graphs:
                with use("w4a8/decoded"):
                    assert torch.equal(out, linear(mine, weights))


@pytest.mark.parametrize("M", [1, 16, 40, 5000])
def test_compiles_as_one_graph(M):
    x, weights = linear_problem(M, N=2048 if M == 5000 else 1024)
    want = linear(x, weights)
    compiled = torch.compile(lambda x: linear(x, weights) * 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), want)


@pytest.mark.parametrize("M", [3, 40])
@pytest.mark.parametrize("what", ["float32 scales", "correction"])
def test_what_decodes_first_compiles_as_one_graph_and_replays(what, M):
    x, (packed, scales, channel, table) = linear_problem(M)
    correction = (
        floats(scales.shape[1], packed.shape[0], dtype=torch.bfloat16, seed=4) if what == "correction" else None
    )
    arguments = (packed, scales if correction is not None else scales.float(), channel, table, correction)

    def call(x):
        return ops.w4a8_linear(x, *arguments, convrot_groupsize=256)

    want = call(x)
    with trace() as calls:
        call(x)
    assert ("w4a8_scaled_mm", "w4a8/decoded") in calls
    assert torch.equal(torch.compile(lambda x: call(x) * 1, fullgraph=True, backend="aot_eager")(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize(("kernel", "M"), [("w4a8/stream", 16), ("w4a8/hopper", 40), ("w4a8/hopper", 4096)])
def test_a_weight_written_by_the_kernel_just_before(kernel, M):
    """The product starts before the quantizer has ended, but not before what came before that."""
    x, weights = linear_problem(M, N=4096, K=4096)
    wanted = []
    others = [linear_problem(M, N=4096, K=4096, seed=s)[1] for s in (30, 60)]
    with use(kernel):
        for other in others:
            wanted.append(linear(x, other))
        torch.cuda.synchronize()
        for _ in range(20):
            for other, want in zip(others, wanted, strict=True):
                for tensor, new in zip(weights, other, strict=True):
                    tensor.copy_(new)
                assert torch.equal(linear(x, weights), want)
                for tensor, new in zip(weights, other, strict=True):
                    tensor.copy_(new)
                codes, scale = ops.quantize_and_rotate_rowwise(x, 256)
                weights[0].copy_(other[0])
                assert torch.equal(ops.w4a8_scaled_mm(codes, scale, *weights), want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeated_runs_are_bit_equal(kernel):
    arguments = problem(min(MOST_ROWS[kernel], 64), 4096, 4096, bias=torch.float32, residual=True)
    with use(kernel):
        first = ops.w4a8_scaled_mm(*arguments)
        for _ in range(20):
            assert torch.equal(ops.w4a8_scaled_mm(*arguments), first)


@pytest.mark.parametrize("bits", [4, 6])
def test_one_quantized_activation_serves_both_widths(bits):
    x, weights = linear_problem(24, bits=bits)
    codes, scale = ops.quantize_and_rotate_rowwise(x, 256)
    shared = ops.w4a8_scaled_mm(codes, scale, *weights)
    assert torch.equal(shared, linear(x, weights))
    assert torch.equal(shared.cpu(), linear(x.cpu(), [None if t is None else t.cpu() for t in weights]))


@pytest.mark.parametrize("M", [1, 16, 40, 4096])
def test_linears_in_a_row_reuse_their_workspaces(M):
    """Each starts while the one in front ends; torch gives a later call the memory of an earlier one's codes."""
    x, weights = linear_problem(M, N=2048, K=2048)
    chain = [x]
    with use("w4a8/decoded"):
        for _ in range(4):
            chain.append(linear(chain[-1] * 2**-6, weights))
    for _ in range(20):
        y = x
        for want in chain[1:]:
            y = linear(y * 2**-6, weights)
            assert torch.equal(y, want)


def test_activations_rotations_and_residuals_in_one_call():
    for M in (3, 40, 4096):
        _, weights = linear_problem(M, N=520, K=2048)
        for dtype in DTYPES:
            for act, width in (("none", 2048), ("swiglu", 4096), ("rms_norm", 2048), ("gelu_tanh", 2048)):
                x = floats(M, width, dtype=dtype, seed=M)
                act_weight = floats(2048, seed=1) if act == "rms_norm" else None
                residual = floats(M, 520, dtype=dtype if act != "swiglu" else torch.float32, seed=2)
                for rotation in (0, 64, 256):
                    codes, scale = ops.quantize_and_rotate_rowwise(x, rotation, act, act_weight, 1e-6)
                    want = ops.w4a8_scaled_mm(
                        codes, scale, *weights, out_dtype=dtype, residual=residual, residual_scale=floats(520, seed=3)
                    )
                    got = ops.w4a8_linear(
                        x, *weights, convrot_groupsize=rotation, input_act=act, input_act_weight=act_weight,
                        input_act_eps=1e-6, residual=residual, residual_scale=floats(520, seed=3),
                    )  # fmt: skip
                    assert_equal(got, want, f"{M} {dtype} {act} {rotation}")


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("M", [5, 16, 40, 600, 4096])
def test_rows_of_zeros_and_rows_that_are_not_finite_touch_no_other(M, bits):
    packed, scales = weight(136, 1024, bits, 16)
    table = codebook("fixed") if bits == 4 else None
    weights, bias = (packed, scales, floats(136).abs() + 0.01, table, None), floats(136, dtype=torch.bfloat16, seed=4)
    x = floats(M, 1024, dtype=torch.bfloat16)
    want = ops.w4a8_linear(x, *weights, bias, convrot_groupsize=256)
    x[0], x[1], x[2, 5], x[3, 1000] = 0.0, -0.0, float("inf"), float("nan")
    got = ops.w4a8_linear(x, *weights, bias, convrot_groupsize=256)
    assert torch.equal(got[:2], bias.expand(2, -1))
    assert got[2:4].isnan().all()
    assert torch.equal(got[4:], want[4:])


@pytest.mark.parametrize("act", ["none", "swiglu", "rms_norm", "gelu_tanh", "situ"])
def test_activations_are_quantized_without_kitchen_int8(act):
    x = floats(5, 1024 if act in ("swiglu", "situ") else 512, dtype=torch.bfloat16)
    arguments = (x, 64, act, floats(512) if act == "rms_norm" else None, 1e-5)
    with use("w4a8/rowwise"), expect_kernel("quantize_and_rotate_rowwise", "w4a8/rowwise"):
        got = ops.quantize_and_rotate_rowwise(*arguments)
    with use("int8/rowwise"):
        want = ops.quantize_and_rotate_rowwise(*arguments)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = problem(9, 100, 384)
    out = ops.w4a8_scaled_mm(*[a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in arguments])
    assert torch.equal(out.to("cuda:0"), expected(arguments))
