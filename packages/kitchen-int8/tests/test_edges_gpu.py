"""The edges of int8_linear on a GPU, for every INT8 GEMM record that can take them: which kernel ran is asserted each time.

Small results are compared with the reference on the CPU, to the bit; large ones in sampled rows and columns, with a float64
product of the codes, which is exact.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

from kitchen_core import explain, ops, trace, use
from kitchen_core.arithmetic import hadamard_rotate
from kitchen_core.errors import UnsupportedError
from kitchen_core.reference import int8 as reference
from kitchen_core.testing import FLOAT_DTYPES, assert_close, assert_equal, expect_kernel, quantization_bound, tolerance
from kitchen_int8 import _gemm
from kitchen_int8._extension import EXTENSION
from kitchen_int8.kernels import provider

pytestmark = pytest.mark.gpu

GEMMS = tuple(kernel.id for kernel in provider.kernels if kernel.op == "int8_scaled_mm")
PORTABLE = {"int8/sm80": _gemm.SM80, "int8/sm75": _gemm.SM75}
GIB = 1 << 30


def test_the_matrix_has_not_shrunk():
    assert {"int8/sm90", "int8/sm80", "int8/sm75", "int8/decode", "int8/decode_sm90"} <= set(GEMMS)


def skip_unless_it_runs(kernel: str, M: int, N: int, K: int, gib: float = 0) -> None:
    """Skips with the kernel's own reason, or for want of memory."""
    answers = {c.kernel.id: c.reason for c in explain("int8_scaled_mm", M=M, N=N, K=K, device="cuda:0").candidates}
    if answers[kernel] is not None:
        pytest.skip(f"{kernel} at M={M} N={N} K={K}: {answers[kernel]}")
    if torch.cuda.mem_get_info()[0] < gib * GIB:
        pytest.skip(f"needs {gib} GB of free GPU memory")


def layer(N: int, K: int, group: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a Gaussian weight, on the CPU; made on the GPU, where a large one takes no time."""
    weight = torch.randn(N, K, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    codes, scale = ops.quantize_int8_convrot_weight(weight, group)
    return codes.cpu(), scale.cpu()


@contextlib.contextmanager
def linear_on(kernel: str) -> Iterator[None]:
    """Within the block every int8_linear multiplies on this kernel, by itself or as the GEMM of the composed linear."""
    with use("core/composed", kernel), trace() as calls:
        yield
    multiplied = {call for call in calls if call[0] == "int8_scaled_mm" or call[1] == kernel}
    assert multiplied, calls
    assert {ran for _, ran in multiplied} == {kernel}
    quantized = {ran for op, ran in calls if op == "quantize_and_rotate_rowwise"}
    assert quantized <= {"int8/rowwise"}


def run(kernel: str, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *rest, **options) -> torch.Tensor:
    """int8_linear of CPU tensors on the GPU, the quantizer and the GEMM by our kernels; the result on the CPU."""
    rest = [a.cuda() if isinstance(a, torch.Tensor) else a for a in rest]
    options = {name: a.cuda() if isinstance(a, torch.Tensor) else a for name, a in options.items()}
    with linear_on(kernel):
        y = ops.int8_linear(x.cuda(), weight.cuda(), scale.cuda(), *rest, **options)
    return y.cpu()


@pytest.mark.parametrize("kernel", GEMMS)
def test_zero_rows(kernel):
    M, N, K = 12, 200, 512
    skip_unless_it_runs(kernel, M, N, K)
    weight, scale = layer(N, K, 256)
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(N).bfloat16()
    x[[0, 5, 11]] = 0
    x[7] = -0.0
    y = run(kernel, x, weight, scale, bias, None, 256)
    assert_equal(y, ops.int8_linear(x, weight, scale, bias, None, 256))
    assert_equal(y[5], bias)
    assert_equal(run(kernel, torch.zeros(M, K), weight, scale), torch.zeros(M, N))


@pytest.mark.parametrize("kernel", GEMMS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_rows_with_inf_or_nan_are_nan_and_spoil_no_other(kernel, bad):
    M, N, K = 16, 200, 512
    skip_unless_it_runs(kernel, M, N, K)
    weight, scale = layer(N, K, 256)
    x = torch.randn(M, K).half()
    clean = run(kernel, x, weight, scale, None, None, 256)
    x[3, 0] = x[9, K - 1] = bad
    y = run(kernel, x, weight, scale, None, None, 256)
    assert torch.isnan(y[[3, 9]]).all()
    keep = [m for m in range(M) if m not in (3, 9)]
    assert_equal(y[keep], clean[keep])


@pytest.mark.parametrize("kernel", GEMMS)
def test_fp16_rows_of_tiny_magnitude(kernel):
    """From 1e-3 down to fp16's subnormals: the quotient is fp32, so no row is off by more than half a step a column."""
    sizes = torch.tensor([1.0, 1e-3, 1e-4, 1e-5, 3e-6, 6e-7])
    M, N, K = len(sizes), 96, 512
    skip_unless_it_runs(kernel, M, N, K)
    weight, scale = layer(N, K)
    x = (torch.randn(M, K).clamp(-3, 3) / 3 * sizes[:, None]).half()
    y = run(kernel, x, weight, scale, out_dtype=torch.float32)
    assert_equal(y, ops.int8_linear(x, weight, scale, out_dtype=torch.float32))
    dense = weight.double() * scale.double()
    _, x_scale = ops.quantize_int8_rowwise(x)
    t = tolerance(torch.float32, K, "int8_tensorwise")
    bound = quantization_bound(x_scale, dense) * (1 + 2.0**-20) + t.accumulation * (x.double().abs() @ dense.abs().T)
    assert_close(y, x.double() @ dense.T, relative=t.relative, absolute=bound)


@pytest.mark.parametrize("kernel", GEMMS)
@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3), (1, 0, 4)])
def test_no_rows(kernel, lead):
    weight, scale = layer(40, 64)
    y = run(kernel, torch.zeros(*lead, 64), weight, scale, torch.ones(40))
    assert y.shape == (*lead, 40)


@pytest.mark.parametrize("kernel", GEMMS)
def test_one_to_four_dims_and_strides(kernel):
    N, K = 72, 256
    weight, scale = layer(N, K, 64)
    for shape in ((K,), (5, K), (2, 3, K), (2, 1, 4, K)):
        skip_unless_it_runs(kernel, max(1, torch.Size(shape[:-1]).numel()), N, K)
        x = torch.randn(shape).bfloat16()
        assert_equal(run(kernel, x, weight, scale, None, None, 64), ops.int8_linear(x, weight, scale, None, None, 64))
    wide = torch.randn(K, 12).bfloat16().cuda()
    views = {
        "transposed": wide.t(), "expanded": wide[:, :1].t().expand(12, K), "columns": torch.randn(12, 2 * K).cuda()[:, ::2],
        "rows of an image": torch.randn(3, K, 4).cuda().permute(0, 2, 1), "offset": torch.randn(12, K + 1).cuda()[:, 1:],
    }  # fmt: skip
    for name, x in views.items():
        with linear_on(kernel):
            y = ops.int8_linear(x, weight.cuda(), scale.cuda(), None, None, 64)
            flat = ops.int8_linear(x.contiguous(), weight.cuda(), scale.cuda(), None, None, 64)
        assert_equal(y, flat, name)
        assert_equal(y.cpu(), ops.int8_linear(x.cpu(), weight, scale, None, None, 64), name)


@pytest.mark.parametrize("kernel", GEMMS)
@pytest.mark.parametrize(
    ("K", "N", "group"), [(384, 1536, 64), (384, 22_473, 64), (3072, 22_473, 256), (5120, 640, 256), (5120, 7, 256)]
)
def test_odd_layers(kernel, K, N, group):
    weight, scale = layer(N, K, group)
    for M in (1, 16, 97):
        answers = {c.kernel.id: c.reason for c in explain("int8_scaled_mm", M=M, N=N, K=K, device="cuda:0").candidates}
        if answers[kernel] is not None:
            continue
        x, bias = torch.randn(M, K).bfloat16(), torch.randn(N)
        y = run(kernel, x, weight, scale, bias, None, group)
        codes, x_scale = ops.quantize_and_rotate_rowwise(x, group)
        want = reference.int8_scaled_mm(codes.cuda(), x_scale.cuda(), weight.cuda(), scale.cuda(), bias.cuda())
        assert_equal(y, want.cpu(), f"M={M}")


@pytest.mark.parametrize("kernel", GEMMS)
def test_rows_do_not_depend_on_each_other_and_runs_repeat(kernel):
    N, K = 264, 1024
    weight, scale = (t.cuda() for t in layer(N, K, 256))
    for M in (3, 16, 200):
        answers = {c.kernel.id: c.reason for c in explain("int8_scaled_mm", M=M, N=N, K=K, device="cuda:0").candidates}
        if answers[kernel] is not None:
            continue
        x = torch.randn(M, K, device="cuda").bfloat16()
        with linear_on(kernel):
            whole = ops.int8_linear(x, weight, scale, None, None, 256)
            for _ in range(5):
                assert_equal(ops.int8_linear(x, weight, scale, None, None, 256), whole)
            other = torch.randn_like(x) * 100
            for m in (0, M // 2, M - 1):
                assert_equal(ops.int8_linear(x[m : m + 1], weight, scale, None, None, 256)[0], whole[m])
                mixed = other.clone()
                mixed[m] = x[m]
                assert_equal(ops.int8_linear(mixed, weight, scale, None, None, 256)[m], whole[m])


# ------------------------------------------------------------------------------------------- the same bits by any plan


def arguments_of(M: int, N: int, K: int, seed: int = 0) -> list:
    generator = torch.Generator("cuda").manual_seed(seed)
    codes = [
        torch.randint(-128, 128, (rows, K), generator=generator, dtype=torch.int8, device="cuda") for rows in (M, N)
    ]
    scales = [torch.rand(rows, 1, generator=generator, device="cuda") / K**0.5 for rows in (M, N)]
    return [codes[0], scales[0], codes[1], scales[1], torch.randn(N, generator=generator, device="cuda")]


def every_plan(M: int, N: int, K: int):
    """(words, function) for every plan of every kernel that takes the problem."""
    for path in PORTABLE.values():
        for tile in range(EXTENSION.module.int8_gemm_portable_tiles(path)):
            for stages in (2, 3, 4):
                for splits in (1, 2, 3, 4, 8):
                    for raster in (1, 8):
                        plan = (tile, stages, splits, raster)
                        answer = _gemm.plan_of(path, M, N, K, True, 0, plan)
                        if not answer.reason:
                            yield f"sm{path} {plan}", lambda *a, p=path, q=plan: _gemm.scaled_mm(p, *a, plan=q)
    for variant in range(EXTENSION.module.int8_gemm_sm90_variants()):
        for grid, raster, splits in ((0, 0, 0), (0, 1, 1), (2, 4, 0), (8, 32, 1), (0, 0, 2), (0, 0, 3), (0, 0, 4)):
            plan = (variant, grid, raster, splits)
            yield f"sm90 {plan}", lambda *a, q=plan: _gemm.hopper_scaled_mm(*a, plan=q)
    counts = {False: EXTENSION.module.int8_decode_variants(), True: EXTENSION.module.int8_decode_sm90_variants()}
    for through_shared, count in counts.items():
        for variant in range(count if M <= 64 else 0):
            for splits in range(1, 9):
                plan = (through_shared, variant, splits)
                yield f"decode {plan}", lambda *a, q=plan: _gemm.decode_sm90_scaled_mm(*a, plan=q)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("M", "N", "K"), [(16, 520, 4096), (300, 392, 2080)])
def test_the_same_bits_whatever_the_plan(M, N, K):
    arguments = arguments_of(M, N, K)
    want = reference.int8_scaled_mm(*[a.cpu() for a in arguments])
    ran = {"sm75": 0, "sm80": 0, "sm90": 0, "decode": 0}
    for words, function in every_plan(M, N, K):
        try:
            out = function(*arguments)
        except (
            ValueError,
            RuntimeError,
        ) as refused:  # with its reason: a decode plan, or more pieces of K than a variant has
            if not (words.startswith("decode") or "pieces of K" in str(refused)):
                raise
            continue
        assert_equal(out.cpu(), want, words)
        ran[words.split()[0]] += 1
    assert ran["sm75"] >= 9
    assert ran["sm80"] >= 90
    assert ran["sm90"] >= 40
    assert ran["decode"] >= (20 if M <= 64 else 0)


# ----------------------------------------------------------------------------------------------------------- K at its limit


@pytest.mark.parametrize("kernel", GEMMS)
def test_widest_exact_sums(kernel):
    for K in (131_071, 131_056):
        answers = {c.kernel.id: c.reason for c in explain("int8_scaled_mm", M=3, N=5, K=K, device="cuda:0").candidates}
        if answers[kernel] is not None:
            assert K % 16, answers[kernel]
            continue
        one = torch.ones(1, device="cuda")
        for value, other in ((-128, -128), (-128, 127)):
            codes = torch.full((3, K), value, dtype=torch.int8, device="cuda")
            weight = torch.full((5, K), other, dtype=torch.int8, device="cuda")
            with use(kernel), expect_kernel("int8_scaled_mm", kernel):
                out = ops.int8_scaled_mm(codes, one.expand(3, 1), weight, one, None, torch.float32)
            assert_equal(out, torch.full_like(out, float(K * value * other)))


@pytest.mark.parametrize("kernel", GEMMS)
def test_wider_sums_are_refused_with_the_limit_and_run_exactly_elsewhere(kernel):
    K = 131_088
    x, weight, scale = torch.ones(2, K).cuda(), torch.full((3, K), -128, dtype=torch.int8).cuda(), torch.ones(1).cuda()
    x[1] = -1
    with use(kernel), pytest.raises(UnsupportedError, match="131071"):
        ops.int8_linear(x, weight, scale)
    with expect_kernel("int8_scaled_mm", "core/eager"):  # 64-bit sums
        y = ops.int8_linear(x, weight, scale)
    exact = -127.0 * 128 * K  # rounds to fp32 once, before the scales
    _, x_scale = ops.quantize_int8_rowwise(x)
    assert_equal(y[0], (torch.full((3,), exact, device="cuda") * x_scale[0]))
    assert_equal(y[1], -y[0])


# ----------------------------------------------------------------------------- more than 65,535 blocks, more than 2^31 elements


def check_samples(arguments: list, out: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """out[rows][:, columns] against a float64 product of the codes, which is exact, and the epilogue of the reference."""
    codes, x_scale, weight, weight_scale, bias = arguments
    acc = codes[rows].double() @ weight[columns].double().T
    scaled = acc.float() * x_scale.reshape(-1, 1)[rows]
    want = (scaled.double() * weight_scale.reshape(1, -1)[:, columns].double() + bias[columns].double()).float()
    assert_equal(out[rows][:, columns], want.to(out.dtype))


def ends_and_some(count: int, some: int = 64) -> torch.Tensor:
    """The first, the last and ``some`` indices between, those around 2^16 among them."""
    near = [i for i in (0, 1, 127, 128, 65_534, 65_535, 65_536, count - 129, count - 2, count - 1) if 0 <= i < count]
    between = torch.linspace(0, count - 1, some, dtype=torch.float64).long().tolist()
    return torch.tensor(sorted({*near, *between}), device="cuda")


def check_large(kernel: str, M: int, N: int, K: int, gib: float) -> None:
    skip_unless_it_runs(kernel, M, N, K, gib)
    arguments = arguments_of(M, N, K)
    with use(kernel), expect_kernel("int8_scaled_mm", kernel):
        out = ops.int8_scaled_mm(*arguments)
    check_samples(arguments, out, ends_and_some(M), ends_and_some(N))


@pytest.mark.parametrize("kernel", GEMMS)
def test_more_than_65535_blocks_of_rows(kernel):
    check_large(kernel, 65_536 * 128 + 77, 16, 32, 4)


@pytest.mark.parametrize("kernel", GEMMS)
def test_more_than_65535_blocks_of_columns(kernel):
    check_large(kernel, 5, 65_536 * 256 + 88, 32, 4)


@pytest.mark.parametrize("kernel", GEMMS)
def test_activations_of_more_than_2_to_31_codes(kernel):
    check_large(kernel, 140_000, 72, 16_384, 6)


@pytest.mark.parametrize("kernel", GEMMS)
def test_weights_of_more_than_2_to_31_codes(kernel):
    check_large(kernel, 16, 140_000, 16_384, 6)


@pytest.mark.parametrize("kernel", GEMMS)
@pytest.mark.parametrize("M", [16, 70_000])
def test_results_of_more_than_2_to_31_elements(kernel, M):
    check_large(kernel, M, 2**31 // M // 8 * 8 + 8 * 1000, 32, 14)


def check_linear_samples(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, group: int, y: torch.Tensor
) -> None:
    """Sampled rows of y: equal to the reference to the bit, and within the derived bound of float64."""
    some = ends_and_some(x.shape[0])
    columns = ends_and_some(weight.shape[0], 256)
    x, y, weight, scale = x[some].cpu(), y[some][:, columns].cpu(), weight[columns].cpu(), scale[columns].cpu()
    assert_equal(y, ops.int8_linear(x, weight, scale, None, None, group))
    dense, h = weight.double() * scale.double(), hadamard_rotate(x.double(), group)
    _, x_scale = ops.quantize_and_rotate_rowwise(x, group)
    # What a column may hold after the rotation, 1/sqrt(group) of its group's sum; each stage of four rounds three additions.
    spread = (
        x.double().abs().unflatten(1, (-1, group)).sum(-1, keepdim=True).expand(-1, -1, group).flatten(1) / group**0.5
    )
    rounded = 3 * math.log(group, 4) * 2.0**-24 * (1 + 2.0**-20)
    t = tolerance(y.dtype, x.shape[1], "int8_tensorwise")
    bound = quantization_bound(x_scale, dense) * (1 + 2.0**-20) + (t.accumulation + rounded) * (spread @ dense.abs().T)
    assert_close(y, h @ dense.T, relative=t.relative, absolute=bound)


@pytest.mark.parametrize(
    ("rows", "N", "K"), [(65_536 * 16 + 3, 24, 48), (2**31 // 3072 + 5, 24, 3072), (70_001, 30_720, 64)]
)
def test_whole_linear_of_very_many_rows(rows, N, K):
    """Quantizer and GEMM together: over 2^31 activations in the second case, over 2^31 results in the third."""
    if torch.cuda.mem_get_info()[0] < 14 * GIB:
        pytest.skip("needs 14 GB of free GPU memory")
    weight, scale = (t.cuda() for t in layer(N, K, 16))
    x = torch.empty(rows, K, dtype=torch.bfloat16, device="cuda").normal_()
    x[rows // 2] = 0
    whole = "int8/sm90" if torch.cuda.get_device_capability() == (9, 0) else "core/composed"
    with expect_kernel("int8_linear", whole):
        y = ops.int8_linear(x, weight, scale, None, None, 16)
    check_linear_samples(x, weight, scale, 16, y)
    assert (y[rows // 2] == 0).all()


# ----------------------------------------------------------------------------------------------------------- two devices


@pytest.mark.parametrize("kernel", GEMMS)
@pytest.mark.parametrize("M", [5, 300])
def test_second_device_while_the_first_is_current(kernel, M):
    """Work of both in turn, on the default and on a side stream of the second: it goes where the tensors are."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    N, K = 264, 1024
    skip_unless_it_runs(kernel, M, N, K)
    first = [torch.randn(M, K).bfloat16().cuda(), *(t.cuda() for t in layer(N, K, 256)), torch.randn(N).cuda()]
    second = [t.to("cuda:1") for t in first]
    want = ops.int8_linear(*[t.cpu() for t in first], None, 256)
    stream = torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream(1))
    with linear_on(kernel):
        for _ in range(3):
            here, there = (ops.int8_linear(*arguments, None, 256) for arguments in (first, second))
            assert there.device == torch.device("cuda:1")
            assert_equal(there.cpu(), want)
            assert_equal(here.cpu(), want)
            with torch.cuda.stream(stream):  # makes the second device current
                aside = ops.int8_linear(*second, None, 256)
                back = ops.int8_linear(*first, None, 256)  # and now the first is the other one
            assert torch.cuda.current_device() == 0
            stream.synchronize()
            assert_equal(aside.cpu(), want)
            assert_equal(back.cpu(), want)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_op_on_the_second_device(dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(5, 256).to(dtype)
    dense, down = torch.randn(32, 256).to(dtype), torch.randn(16, 16).to(dtype)

    def results(device: str) -> list[torch.Tensor]:
        codes, scale = ops.quantize_int8_convrot_weight(dense.to(device), 64)
        there = x.to(device)
        return [
            codes, scale, *ops.quantize_int8_tensorwise(there), *ops.quantize_int8_rowwise(there),
            *ops.quantize_and_rotate_rowwise(there, 64, "gelu_tanh"), ops.dequantize_int8(codes, scale, dtype, 64),
            ops.dequantize_int8_embedding(codes, scale, torch.tensor([1, 2], device=device), dtype, 64),
            ops.int8_linear(there, codes, scale, None, None, 64),
            ops.int8_swiglu_mlp(
                there, codes, scale, *ops.quantize_int8_convrot_weight(down.to(device), 16), convrot_groupsize=64,
                down_convrot_groupsize=16,
            ),
        ]  # fmt: skip

    for i, (there, here) in enumerate(zip(results("cuda:1"), results("cuda:0"), strict=True)):
        assert there.device == torch.device("cuda:1")
        assert_equal(there.cpu(), here.cpu(), f"result {i}")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_int8_op_has_a_kernel_here(dtype):
    """What a user of the format calls on a GPU never takes the eager path."""
    x = torch.randn(5, 256, device="cuda", dtype=dtype)
    with trace() as calls:
        codes, scale = ops.quantize_int8_convrot_weight(torch.randn(32, 256, device="cuda", dtype=dtype), 64)
        ops.quantize_int8_tensorwise(x)
        ops.quantize_int8_rowwise(x)
        ops.quantize_and_rotate_rowwise(x, 64, "gelu_tanh")
        ops.dequantize_int8(codes, scale, dtype, 64)
        ops.dequantize_int8_embedding(codes, scale, torch.tensor([1, 2], device="cuda"), dtype, 64)
        ops.int8_linear(x, codes, scale, None, None, 64)
        down = ops.quantize_int8_convrot_weight(torch.randn(16, 16, device="cuda", dtype=dtype), 16)
        ops.int8_swiglu_mlp(x, codes, scale, *down, convrot_groupsize=64, down_convrot_groupsize=16)
    assert not [call for call in calls if call[1] == "core/eager"]
