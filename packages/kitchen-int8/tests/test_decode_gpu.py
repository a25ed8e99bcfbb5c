"""INT8 for few rows on a GPU: the decode GEMMs and the whole linear in one call, to the bit.

The GEMM alone is compared with the reference. The whole linear is compared with the same linear in two ops, whose quantizer and
GEMMs have tests of their own: the codes are the same, so the bits must be.
"""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from kitchen_core import ops, trace, use
from kitchen_core.launch import DTYPE_CODES
from kitchen_core.reference.int8 import int8_scaled_mm as reference
from kitchen_core.testing import FLOAT_DTYPES as DTYPES
from kitchen_core.testing import assert_equal, expect_kernel
from kitchen_core.testing.operands import random_codes, random_floats
from kitchen_core.testing.operands import scaled_mm_operands as problem
from kitchen_int8 import _gemm, _linear
from kitchen_int8._extension import EXTENSION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

DECODE, REGISTERS, LARGE = "int8/decode_sm90", "int8/decode", "int8/sm90"
KERNELS = (DECODE, REGISTERS)
UNFUSED = ("core/composed", "int8/rowwise", "int8/sm80")
M_VALUES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64)
ACTS = ("none", "gelu_tanh", "swiglu", "rms_norm", "situ")


def most_rows(kernel: str) -> int:
    """Of x, that a kernel takes."""
    return {DECODE: 16, REGISTERS: 64}[kernel]


def expected(arguments: list) -> torch.Tensor:
    """On the GPU in plain PyTorch: fp32 products of integer slices are exact, the rest is elementwise IEEE arithmetic."""
    assert not torch.backends.cuda.matmul.allow_tf32
    return reference(*arguments)


def check(kernel: str, arguments: list) -> torch.Tensor:
    with use(kernel), expect_kernel("int8_scaled_mm", kernel):
        out = ops.int8_scaled_mm(*arguments)
    assert_equal(out, expected(arguments), f"{kernel} {tuple(arguments[0].shape)} x {tuple(arguments[2].shape)}")
    return out


def layer(N: int, K: int, group: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.quantize_int8_convrot_weight(random_floats(N, K, seed=seed + 11), group)


def linear_arguments(
    M, N, K, dtype=torch.bfloat16, *, group=256, act="none", bias=None, residual=None, scale=False, seed=0
):
    """Arguments of int8_linear; ``bias`` and ``residual`` are dtypes or None."""
    weight, weight_scale = layer(N, K, group, seed)
    return {
        "x": random_floats(M, 2 * K if act in ("swiglu", "situ") else K, dtype=dtype, seed=seed),
        "weight": weight, "weight_scale": weight_scale, "convrot_groupsize": group, "input_act": act,
        "bias": None if bias is None else random_floats(N, dtype=bias, seed=seed + 1),
        "input_act_weight": random_floats(K, dtype=dtype, seed=seed + 2) if act == "rms_norm" else None,
        "input_act_eps": 1e-6 if act == "rms_norm" else 0.0,
        "residual": None if residual is None else random_floats(M, N, dtype=residual, seed=seed + 3),
        "residual_scale": random_floats(N, seed=seed + 4) if scale else None,
    }  # fmt: skip


def kernel_for(M: int) -> str:
    return DECODE if most_rows(DECODE) >= M else LARGE


def check_linear(arguments: dict, out_dtype: torch.dtype | None = None, kernel: str | None = None) -> torch.Tensor:
    """On the kernel that is chosen for so many rows, or on the one given; against the linear in two ops."""
    kernel = kernel or kernel_for(arguments["x"].shape[:-1].numel())
    with use(*UNFUSED), trace() as calls:
        want = ops.int8_linear(**arguments, out_dtype=out_dtype)
    assert [kernel for _, kernel in calls] == list(UNFUSED)
    with use(kernel), expect_kernel("int8_linear", kernel):
        got = ops.int8_linear(**arguments, out_dtype=out_dtype)
    assert_equal(got, want, f"{tuple(arguments['x'].shape)} x {tuple(arguments['weight'].shape)}")
    return got


# ------------------------------------------------------------------------------------------------------ the GEMM


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("N", [1, 7, 40, 130, 3072, 22473])
@pytest.mark.parametrize("K", [16, 32, 384, 400, 3072, 12288])
def test_ragged_shapes(kernel, N, K):
    for i, M in enumerate(m for m in M_VALUES if m <= most_rows(kernel)):
        bias, residual = (None, *DTYPES)[(i + K) % 4], (i + N) % 2 == 0
        scale = "columns" if residual else None
        check(kernel, problem(M, N, K, DTYPES[i % 3], bias=bias, residual=residual, scale=scale, seed=M))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("M", "N"), [(5, 136), (13, 133), (16, 200), (37, 133), (64, 200)])
def test_every_epilogue(kernel, out_dtype, M, N):
    if most_rows(kernel) < M:
        pytest.skip(f"{kernel} takes at most {most_rows(kernel)} rows")
    for bias in (None, *DTYPES):
        for scalar in (False, True):
            for residual, scale in ((False, None), (True, None), (True, "one"), (True, "columns")):
                check(kernel, problem(M, N, 384, out_dtype, bias=bias, residual=residual, scale=scale, scalar=scalar))


def refusal(call) -> torch.Tensor | str:
    try:
        return call()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("through_shared", [True, False])
def test_every_plan(through_shared):
    variants = (
        EXTENSION.module.int8_decode_sm90_variants() if through_shared else EXTENSION.module.int8_decode_variants()
    )
    ran = 0
    shapes = ((1, 200, 2080), (8, 130, 384), (13, 264, 1040), (16, 330, 1296), (29, 72, 3072), (64, 330, 1296))
    for M, N, K in shapes:
        for residual in (False, True):
            arguments = problem(M, N, K, bias=torch.float32, residual=residual, scale="columns" if residual else None)
            want = expected(arguments)
            for variant in range(variants):
                for splits in range(1, 9):
                    plan = (through_shared, variant, splits)
                    got = refusal(partial(_gemm.decode_sm90_scaled_mm, *arguments, plan=plan))
                    if isinstance(got, str):
                        assert "fewer tokens" in got or "K is split" in got
                        continue
                    ran += 1
                    assert torch.equal(got, want), (M, N, K, plan)
    assert ran >= (90 if through_shared else 160)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("M", [1, 5, 16, 64])
def test_nothing_is_written_outside_of_the_output(kernel, M):
    if most_rows(kernel) < M:
        pytest.skip(f"{kernel} takes at most {most_rows(kernel)} rows")
    launch = EXTENSION.module.int8_decode_sm90 if kernel == DECODE else EXTENSION.module.int8_decode
    for N in (136, 133):
        for dtype in DTYPES:
            arguments = problem(M, N, 1040, dtype, bias=torch.float32)
            space = torch.full((8192 + M * N,), float("nan"), dtype=dtype, device="cuda")
            operands = _gemm.gather(*arguments[:5]).arguments
            del operands["a_pitch"], operands["b_pitch"]
            out = space[4096 : 4096 + M * N].view(M, N)
            launch(
                **operands, out=out.data_ptr(), out_type=DTYPE_CODES[dtype], plan=None, device=0,
                stream=torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
            assert torch.equal(out, expected(arguments))
            assert torch.isnan(space[:4096]).all()
            assert torch.isnan(space[4096 + M * N :]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_largest_sums_are_exact(kernel):
    K = 131_056
    for M in (1, 9, most_rows(kernel)):
        for value, other in ((-128, -128), (-128, 127)):
            codes = torch.full((M, K), value, dtype=torch.int8, device="cuda")
            weight = torch.full((5, K), other, dtype=torch.int8, device="cuda")
            one = torch.ones(1, device="cuda")
            with use(kernel), expect_kernel("int8_scaled_mm", kernel):
                out = ops.int8_scaled_mm(codes, one.expand(M).contiguous(), weight, one, None, torch.float32)
            assert (out == float(K * value * other)).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_operands_with_gaps_are_copied_and_said_so(kernel, caplog):
    _gemm._tell_of_copies.cache_clear()
    arguments = problem(9, 90, 256, bias=torch.bfloat16, residual=True)
    arguments[0], arguments[2] = random_codes(9, 600, 1)[:, 3:259], random_codes(90, 512, 2)[:, ::2]
    with caplog.at_level(logging.WARNING, "kitchen"):
        check(kernel, arguments)
        check(kernel, arguments)
    assert sum("copied at every call" in record.message for record in caplog.records) == 2
    arguments[0] = random_codes(1, 256, 3).expand(9, 256)
    check(kernel, arguments)


@pytest.mark.parametrize("kernel", KERNELS)
def test_residual_of_another_dtype_is_not_rounded(kernel):
    arguments = problem(15, 72, 256, torch.bfloat16, bias=torch.float32)
    for dtype in DTYPES:
        arguments[6:] = [random_floats(15, 72, dtype=dtype), random_floats(72, dtype=torch.float16)]
        check(kernel, arguments)


def test_it_is_chosen_for_few_rows():
    for M, kernel in ((1, DECODE), (16, DECODE), (17, LARGE), (65, LARGE)):
        with trace() as calls:
            ops.int8_scaled_mm(*problem(M, 72, 256))
        assert calls == [("int8_scaled_mm", kernel)]


# ----------------------------------------------------------------------------------------------- the whole linear


@pytest.mark.parametrize("M", M_VALUES)
@pytest.mark.parametrize(("N", "K"), [(3072, 3072), (200, 12288), (133, 768)])
def test_same_bits_as_in_two_ops(M, N, K):
    check_linear(linear_arguments(M, N, K, seed=M))


@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 72, 256), (9, 72, 256), (65, 3072, 3072), (130, 133, 12288), (1000, 3072, 768)]
)
def test_same_bits_by_large_tiles(M, N, K):
    check_linear(linear_arguments(M, N, K, bias=torch.float32), None, LARGE)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_activation_epilogue_and_dtype(act, dtype):
    for i, (M, group) in enumerate(((1, 256), (5, 0), (16, 64), (17, 256), (64, 4096), (300, 256))):
        for out_dtype in (None, *DTYPES):
            residual = (None, dtype, torch.float32, torch.bfloat16)[i % 4]
            bias = (None, *DTYPES)[(i + 1) % 4]
            arguments = linear_arguments(
                M, 136, 4096, dtype, group=group, act=act, bias=bias, residual=residual, scale=residual is not None
            )
            check_linear(arguments, out_dtype)


def test_leading_dims_strides_and_alignments():
    arguments = linear_arguments(24, 72, 512, bias=torch.bfloat16)
    flat = check_linear(arguments)
    x = arguments["x"]
    wide = torch.zeros(24, 700, dtype=x.dtype, device="cuda")
    wide[:, 3:515] = x
    for view in (
        x.reshape(2, 3, 4, 512),
        x.reshape(24, 1, 512),
        wide[:, 3:515],
        x.t().contiguous().t(),
        x.reshape(24, 512),
    ):
        out = check_linear(arguments | {"x": view})
        assert out.shape == (*view.shape[:-1], 72)
        assert torch.equal(out.reshape(24, 72), flat)
    check_linear(arguments | {"x": x[:1].expand(24, 512)})
    weight = torch.zeros(72, 600, dtype=torch.int8, device="cuda")
    weight[:, 5:517] = arguments["weight"]
    assert torch.equal(check_linear(arguments | {"weight": weight[:, 5:517]}), flat)
    bias = torch.zeros(144, dtype=torch.bfloat16, device="cuda")
    bias[::2] = arguments["bias"]
    assert torch.equal(check_linear(arguments | {"bias": bias[::2]}), flat)
    with use(DECODE):
        assert ops.int8_linear(**arguments | {"x": x.reshape(2, 3, 4, 512)[:0]}).shape == (0, 3, 4, 72)


def test_leading_dims_of_few_rows():
    arguments = linear_arguments(12, 72, 512, bias=torch.bfloat16)
    flat = check_linear(arguments)
    out = check_linear(arguments | {"x": arguments["x"].reshape(2, 3, 2, 512)})
    assert torch.equal(out.reshape(12, 72), flat)


def test_rows_do_not_depend_on_each_other():
    arguments = linear_arguments(64, 264, 3072)
    x = arguments["x"]
    for M in (1, 3, 8, 16, 32, 64):  # bits of a row are the same in every plan, whatever the others hold
        others = arguments | {"x": torch.cat((x[7:8], random_floats(M - 1, 3072, dtype=x.dtype, seed=M) * 100))}
        if M > 2:
            others["x"][2] = float("nan")
        with use(kernel_for(M)):
            first = ops.int8_linear(**others)[0]
        with use(LARGE):
            want = ops.int8_linear(**arguments)[7]
        assert torch.equal(first, want)


@pytest.mark.parametrize("M", [1, 8, 16, 64, 300])
def test_operands_written_by_the_kernel_just_before(M):
    """Weights are read before the quantizer has ended, so nothing in front of the quantizer may still be writing them."""
    N, K = 3072, 3072
    weights = [layer(N, K, 256, seed) for seed in range(4)]
    xs = [random_floats(M, K, dtype=torch.bfloat16, seed=seed) for seed in range(4)]
    with use(*UNFUSED):
        want = [[ops.int8_linear(x, *w, convrot_groupsize=256) for x in xs] for w in weights]
    weight, scale, x = torch.empty_like(weights[0][0]), torch.empty_like(weights[0][1]), torch.empty_like(xs[0])
    outs = []
    with use(kernel_for(M)):
        for i in range(200):
            x.copy_(xs[i // 4 % 4])
            scale.copy_(weights[i % 4][1])
            weight.copy_(weights[i % 4][0])  # the kernel in front of the quantizer
            outs.append(ops.int8_linear(x, weight, scale, convrot_groupsize=256))
            weight.zero_()  # and what follows must not reach it
            weight.copy_(weights[i % 4][0])
            scale.copy_(weights[i % 4][1])
            x.copy_(xs[i // 4 % 4])
            outs.append(ops.int8_linear(x, weight, scale, convrot_groupsize=256))
            x.zero_()
    for i, out in enumerate(outs):
        assert torch.equal(out, want[i // 2 % 4][i // 8 % 4]), i


@pytest.mark.parametrize("M", [1, 7, 64, 300])
def test_chain_of_linears(M):
    """Each is the kernel in front of the next one's quantizer, which starts while it ends."""
    layers = [layer(1024, 1024, 256, seed) for seed in range(6)]
    x = random_floats(M, 1024, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        h = x
        for i in range(24):
            h = ops.int8_linear(h, *layers[i % 6], convrot_groupsize=256, residual=h)
        return h

    with use(*UNFUSED):
        want = run()
    with use(kernel_for(M)):
        for _ in range(20):
            assert torch.equal(run(), want)


@pytest.mark.parametrize("M", [1, 16, 64, 300])
def test_graph_replay_with_changed_inputs(M):
    arguments = linear_arguments(M, 3072, 3072, bias=torch.bfloat16, residual=torch.bfloat16)
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    doubled = torch.empty_like(arguments["x"])
    with use(kernel_for(M)), torch.cuda.stream(stream):
        ops.int8_linear(**arguments)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            first = ops.int8_linear(**arguments)
            side.wait_stream(stream)  # a fork and a join: the quantizer behind it has two kernels in front
            with torch.cuda.stream(side):
                torch.add(arguments["x"], arguments["x"], out=doubled)
            third = ops.int8_linear(**arguments | {"residual": first})
            stream.wait_stream(side)
            second = ops.int8_linear(**arguments | {"x": doubled})
            zeros = torch.zeros(64, device="cuda")  # and a node in front that may be no kernel
            fourth = ops.int8_linear(**arguments)
    for seed in (10, 20, 30):
        fresh = linear_arguments(M, 3072, 3072, bias=torch.bfloat16, residual=torch.bfloat16, seed=seed)
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        with use(*UNFUSED):
            want = ops.int8_linear(**fresh)
            assert torch.equal(first, want)
            assert torch.equal(fourth, want)
            assert torch.equal(second, ops.int8_linear(**fresh | {"x": fresh["x"] * 2}))
            assert torch.equal(third, ops.int8_linear(**fresh | {"residual": want}))
        assert not zeros.any()


@pytest.mark.parametrize("M", [1, 64])
def test_side_streams_at_once(M):
    problems = [linear_arguments(M, 1024, 3072, seed=seed) for seed in range(4)]
    with use(*UNFUSED):
        want = [ops.int8_linear(**arguments) for arguments in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    outs = []
    with use(kernel_for(M)):
        for _ in range(25):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    outs.append((i, ops.int8_linear(**problems[i])))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want[i]) for i, out in outs)


@pytest.mark.parametrize("M", [1, 16, 64])
def test_repeated_runs_are_bit_equal(M):
    arguments = linear_arguments(M, 3072, 12288)
    with use(kernel_for(M)):
        first = ops.int8_linear(**arguments)
        assert all(torch.equal(ops.int8_linear(**arguments), first) for _ in range(30))


def test_whole_linear_is_chosen_for_few_rows():
    for M, kernels in ((1, [DECODE]), (16, [DECODE]), (17, [LARGE]), (65, [LARGE])):
        arguments = linear_arguments(M, 72, 256)
        with trace() as calls:
            ops.int8_linear(**arguments)
        assert [kernel for _, kernel in calls] == kernels


def test_plans_use_the_chip_and_change_little_from_row_to_row():
    for N, K in ((3072, 3072), (9216, 3072), (12288, 3072), (3072, 12288), (24576, 3072), (1000, 5120)):
        for M in range(1, most_rows(DECODE) + 1):
            through_shared, variant, splits = _linear.decode_plan(M, N, K, 0)
            assert variant >= 0
            assert 1 <= splits <= 8
            assert through_shared or M <= 8


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = linear_arguments(9, 72, 512)
    moved = {k: v.to("cuda:1") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with use(DECODE):
        assert torch.equal(ops.int8_linear(**moved).to("cuda:0"), check_linear(arguments))
