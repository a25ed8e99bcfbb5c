"""Weights in the resident layout on a GPU: their kernel against the reference, to the bit, plan by plan; unpacking."""

from __future__ import annotations

import pickle

import pytest
import torch

from kitchen_core import QuantizedTensor, ops, trace, use
from kitchen_core.codebook import fixed_codebook
from kitchen_core.packing import pack_6bit, pack_nibbles
from kitchen_core.reference import w4a8 as reference
from kitchen_core.testing import assert_equal, expect_kernel
from kitchen_w4a8 import _launch, optimize_for_decode, resident, resident_ops
from kitchen_w4a8.resident import Shape

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLANS = [(warps, splits) for warps in (1, 2, 4, 8, 16) for splits in (1, 2, 4, 8)]
KERNEL = "w4a8/resident"


@pytest.fixture(autouse=True)
def _only_on_its_own_chip():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("w4a8/resident needs a GPU of compute capability 8.0")


def floats(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=torch.int32)


def codebook(kind: str) -> torch.Tensor | None:
    """ "fixed" ascends through zero; "foreign" neither ascends nor splits by sign."""
    tables = {"fixed": fixed_codebook(), "foreign": floats(16, seed=9)}
    return tables[kind].float().cuda() if kind in tables else None


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
    """Arguments of w4a8_scaled_mm: codes of every value, scales of any finite e4m3 byte (``signed``) or of at least 0."""
    codes = integers(0, 2**bits, N, K, seed=seed).to(torch.int8)
    scales = integers(0, 0x7F, N, K // group, seed=seed + 1)
    if signed:
        scales = scales | integers(0, 2, N, K // group, seed=seed + 2) << 7
    return [
        integers(-128, 128, M, K, seed=seed + 3).to(torch.int8), floats(M, 1, seed=seed + 4).abs() / K**0.5,
        pack_nibbles(codes) if bits == 4 else pack_6bit(codes), scales.to(torch.uint8).view(torch.float8_e4m3fn),
        floats(N, seed=seed + 5).abs() + 0.01, codebook(table) if bits == 4 else None, None,
        None if bias is None else floats(N, dtype=bias, seed=seed + 6), out_dtype, group,
        floats(M, N, dtype=out_dtype, seed=seed + 7) if residual else None, floats(N, seed=seed + 8) if residual else None,
    ]  # fmt: skip


def records_of(arguments: list) -> tuple[torch.Tensor, Shape]:
    """The weight of ``arguments`` in the resident layout."""
    packed, scales, group = arguments[2], arguments[3], arguments[9]
    n, k = packed.shape[0], scales.shape[1] * group
    shape = Shape(n, k, _launch.bits_of(packed, k), group)
    buffer = torch.cat([t.reshape(-1).view(torch.uint8) for t in (packed, scales)])
    return resident.pack(buffer, shape), shape


def product(arguments: list, plan=None) -> torch.Tensor:
    records, shape = records_of(arguments)
    views = resident_ops.views(records, shape)
    return _launch.scaled_mm(_launch.RESIDENT, *arguments[:2], *views, *arguments[4:], plan=plan)


def check(arguments: list, what: str = "") -> None:
    records, shape = records_of(arguments)
    codes, scale, _, _, s_channel, table, _, bias, out_dtype, _, residual, gate = arguments
    with expect_kernel("w4a8_scaled_mm", KERNEL):
        got = resident_ops.scaled_mm(codes, scale, records, s_channel, table, shape, bias, out_dtype, residual, gate)
    assert_equal(got, reference.w4a8_scaled_mm(*arguments), what)


# ---------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize(
    ("N", "K", "group"),
    [(16, 256, 16), (48, 512, 32), (112, 768, 16), (208, 1024, 64), (336, 1280, 16), (720, 2048, 128), (80, 4096, 256)],
)
def test_ragged_shapes(bits, N, K, group):
    for i, M in enumerate((1, 2, 7, 8, 9, 15, 16, 17, 31, 32)):
        arguments = problem(
            M, N, K, bits, group, DTYPES[i % 3], bias=(None, *DTYPES)[(i + K) % 4], residual=(i + N) % 2 == 0, seed=M
        )
        check(arguments, f"M={M}")


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_every_epilogue(out_dtype):
    N = 144
    for M in (5, 20):
        for bits in (4, 6):
            for bias in (None, *DTYPES):
                arguments = problem(M, N, 512, bits, 16, out_dtype, bias=bias, residual=True)
                for gate in (arguments[11], None, floats(1), floats(N, dtype=torch.float16)):
                    arguments[11] = gate
                    check(arguments)
                other = torch.float16 if out_dtype != torch.float16 else torch.float32
                arguments[10] = floats(M, N, dtype=other)
                check(arguments)


@pytest.mark.parametrize("table", ["none", "fixed", "foreign"])
@pytest.mark.parametrize("signed", [False, True])
def test_tables_and_signs(table, signed):
    for M in (5, 13, 29):
        check(problem(M, 80, 1024, table=table, signed=signed))
        check(problem(M, 80, 1024, bits=6, group=32, signed=signed))


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("table", ["none", "fixed", "foreign"])
def test_every_code_at_every_finite_scale(bits, table):
    """A one-hot row of x reads out one column."""
    if bits == 6 and table != "none":
        pytest.skip("6 bits have no codebook")
    scales = torch.tensor([b if b & 127 != 127 else 0 for b in range(256)], dtype=torch.uint8).cuda()
    codes = torch.arange(2**bits, dtype=torch.int8).cuda().repeat(len(scales), 256 // 2**bits)
    packed = pack_nibbles(codes) if bits == 4 else pack_6bit(codes)
    s_rel = scales.view(torch.float8_e4m3fn)[:, None].expand(-1, 16).contiguous()
    want = reference.decode_w4a8_weight(packed, s_rel, codebook(table), 16)
    ones = torch.ones(256, 1, device="cuda")
    arguments = [
        torch.eye(256, dtype=torch.int8, device="cuda"),
        ones,
        packed,
        s_rel,
        ones,
        codebook(table),
        None,
        None,
        torch.float32,
        16,
    ]
    records, shape = records_of(arguments)
    views = resident_ops.views(records, shape)
    for rows in (8, 16, 32):
        for first in range(0, 256, rows):
            part = slice(first, first + rows)
            column = _launch.scaled_mm(_launch.RESIDENT, arguments[0][part], ones[part], *views, *arguments[4:])
            assert_equal(column.t().to(torch.int8), want[:, part])


@pytest.mark.parametrize("bits", [4, 6])
def test_every_plan(bits):
    ran = 0
    for N, K in ((336, 2560), (2048, 2048)):
        for M in (1, 8, 16, 32):
            arguments = problem(M, N, K, bits, 16, bias=torch.float32, residual=True)
            want = reference.w4a8_scaled_mm(*arguments)
            for plan in PLANS:
                answer = _launch.resident_plan(M, N, K, bits, 16, 0, plan)
                if answer.reason:
                    with pytest.raises(ValueError, match=answer.reason[:20]):
                        product(arguments, plan)
                    continue
                ran += 1
                assert torch.equal(product(arguments, plan), want), answer.words
    assert ran >= 80


@pytest.mark.parametrize("bits", [4, 6])
def test_rows_do_not_depend_on_each_other_and_equal_the_decoded_product(bits):
    arguments = problem(64, 528, 2048, bits, 16, bias=torch.bfloat16)
    codes, scale, _, _, s_channel, table, _, bias, *_ = arguments
    records, shape = records_of(arguments)
    with use("w4a8/decoded"):
        decoded = ops.w4a8_scaled_mm(*arguments)
    for M in range(1, 65):
        out = resident_ops.scaled_mm(
            codes[:M], scale[:M], records, s_channel, table, shape, bias, torch.bfloat16, None, None
        )
        assert torch.equal(out, decoded[:M]), M


def test_largest_sums_are_exact():
    K = 130_816
    codes = torch.full((3, K), -128, dtype=torch.int8, device="cuda")
    packed = torch.zeros(16, K // 2, dtype=torch.int8, device="cuda")
    scales = torch.full((16, K // 16), 448.0, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones(16, device="cuda")
    out = product([codes, one[:3, None], packed, scales, one, None, None, None, torch.float32, 16, None, None])
    assert (out == torch.tensor(float(K * 128 * 127))).all()


def test_repeated_runs_are_bit_equal():
    for M in (1, 16, 32):
        arguments = problem(M, 4096, 4096, bias=torch.float32, residual=True)
        first = product(arguments)
        for _ in range(20):
            assert torch.equal(product(arguments), first)


def test_a_product_that_cannot_run_says_why():
    arguments = problem(33, 48, 512)
    with pytest.raises(ValueError, match="takes 1 to 32 rows"):
        product(arguments)
    with pytest.raises(ValueError, match="16 warps go side by side"):
        product([arguments[0][:3], arguments[1][:3], *arguments[2:]], plan=(3, 1))


# ------------------------------------------------------------------------------------------- weights in the layout


def pair(name: str, n: int = 1024, k: int = 2048, seed: int = 0) -> tuple[QuantizedTensor, QuantizedTensor]:
    stored = QuantizedTensor.quantize(floats(n, k, dtype=torch.bfloat16, seed=seed), name)
    made, reason = optimize_for_decode(stored.clone())
    assert reason is None
    return stored, made


FORMATS = ("asym_w4a8_int8", "w6a8_int8")


@pytest.mark.parametrize("name", FORMATS)
def test_linears_of_any_number_of_rows(name):
    stored, made = pair(name)
    for M in (1, 8, 16, 40, 64, 65, 300):
        x = floats(M, 2048, dtype=torch.bfloat16, seed=M)
        want = stored.linear(x)
        with trace() as calls:
            got = made.linear(x)
        assert torch.equal(got, want), M
        kernels = [kernel for op, kernel in calls if op == "w4a8_linear"]
        assert (kernels == [KERNEL]) == (M <= 32), (M, calls)
        wide = floats(M, 4096, dtype=torch.bfloat16, seed=M)
        act = {"input_act": "swiglu", "residual": want, "residual_scale": floats(1024)}
        assert torch.equal(made.linear_input_act(wide, **act), stored.linear_input_act(wide, **act)), M
        shared = stored.quantize_activation(x)
        assert torch.equal(made.linear(shared), want), M


@pytest.mark.parametrize("name", FORMATS)
def test_unpacking_on_the_gpu_is_that_on_the_cpu(name):
    for n, k, group in ((16, 256, 16), (208, 512, 64), (1024, 2048, 128), (64, 512, 256)):
        stored = QuantizedTensor.quantize(floats(n, k), name, group_size=group, convrot_groupsize=16)
        made, _ = optimize_for_decode(stored.clone())
        assert_equal(made.dequantize(), stored.dequantize())
        on_cpu = made.to("cpu")
        assert on_cpu.config == made.config
        for weight in (pickle.loads(pickle.dumps(made)), pickle.loads(pickle.dumps(on_cpu))):
            for key, tensor in weight.inner().items():
                want = stored.inner()[key]
                assert torch.equal(tensor.view(torch.uint8).to(want.device), want.view(torch.uint8)), key


def test_in_the_callers_buffer_on_the_gpu():
    stored, _ = pair("w6a8_int8")
    storage = torch.cat([stored.qdata.flatten().view(torch.uint8), stored.s_rel.flatten().view(torch.uint8)])
    codes = stored.qdata.nbytes
    tensors = {
        **stored.inner(),
        "qdata": storage[:codes].view(torch.int8).view(stored.qdata.shape),
        "s_rel": storage[codes:].view(torch.float8_e4m3fn).view(stored.s_rel.shape),
    }
    weight = QuantizedTensor(tensors, stored.format, stored.config, stored.dtype)
    assert optimize_for_decode(weight, storage) == (weight, None)
    assert weight.qdata.data_ptr() == storage.data_ptr()
    x = floats(3, 2048, dtype=torch.bfloat16)
    assert torch.equal(weight.linear(x), stored.linear(x))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", [1, 16, 40, 100])
def test_graph_replay_on_two_streams_and_compilation(name, M):
    stored, made = pair(name)
    graphs = []
    for _ in range(2):
        stream, x = torch.cuda.Stream(), floats(M, 2048, dtype=torch.bfloat16)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made.linear(x)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = made.linear(x)
        graphs.append((stream, graph, x, out))
    for seed in (10, 20):
        for i, (_, _, x, out) in enumerate(graphs):
            x.copy_(floats(M, 2048, dtype=torch.bfloat16, seed=seed + i))
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph, _, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, _, x, out in graphs:
            assert torch.equal(out, stored.linear(x))
    compiled = torch.compile(lambda x, w: torch.nn.functional.linear(x, w) * 1, fullgraph=True, backend="aot_eager")
    x = graphs[0][2]
    assert torch.equal(compiled(x, made), stored.linear(x))


@pytest.mark.parametrize("M", [1, 16, 32])
def test_a_weight_written_by_the_kernel_just_before(M):
    """The product starts before the quantizer has ended, but not before what came before that."""
    x = floats(M, 4096, dtype=torch.bfloat16)
    pairs = [pair("asym_w4a8_int8", 4096, 4096, seed=s) for s in (1, 2)]
    wanted = [stored.linear(x) for stored, _ in pairs]
    made = pairs[0][1].clone()
    for _ in range(20):
        for (_, other), want in zip(pairs, wanted, strict=True):
            made.copy_(other)
            assert torch.equal(made.linear(x), want)


@pytest.mark.parametrize("M", [1, 16, 32])
def test_linears_in_a_row(M):
    """Each starts while the one in front ends; torch gives a later call the memory of an earlier one's codes."""
    stored, made = pair("asym_w4a8_int8", 2048, 2048)
    chain = [floats(M, 2048, dtype=torch.bfloat16)]
    with use("w4a8/decoded"):
        for _ in range(4):
            chain.append(stored.linear(chain[-1] * 2**-6))
    for _ in range(20):
        y = chain[0]
        for want in chain[1:]:
            y = made.linear(y * 2**-6)
            assert_equal(y, want)
