"""awq_linear and dequantize_awq on a GPU: every route, group, type and plan against the reference in plain PyTorch.

What a weight decodes to is compared to the bit, by one-hot rows of x; products within derived bounds.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch

from kitchen_awq import _dequantized, _launch
from kitchen_awq._extension import EXTENSION
from kitchen_awq.kernels import MOST_DECODE_ROWS
from kitchen_core import ops, use
from kitchen_core.devices import simulate, simulated_facts
from kitchen_core.launch import DTYPE_CODES
from kitchen_core.reference import awq as reference
from kitchen_core.testing import assert_close, assert_equal, expect_kernel, relative_error, tolerance, unit_roundoff

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES, DTYPES = (BF16, FP16), (BF16, FP16, FP32)
ROUTES = (_launch.STREAM, _launch.DECODE, _launch.HOPPER)
KERNELS = ("awq/stream", "awq/decode", "awq/sm90", "awq/dequantized")
FEW_ROWS = ("awq/stream", "awq/decode")  # that take few rows of x only
VECTORS = ("awq/stream", "awq/sm90")  # that take groups of multiples of 32 and N of 8
GROUPS = (8, 16, 24, 32, 64, 96, 128, 192, 256, 384, 768)  # 768: one group a row
SPLITS = (1, 2, 4, 8)


def hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def weight(n: int, k: int, group: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8, device="cuda")
    scale = torch.rand(k // group, n, generator=generator, device="cuda") * 0.01 + 0.002
    zero = torch.randn(k // group, n, generator=generator, device="cuda") * 0.03
    return codes, scale.to(dtype), zero.to(dtype)


def floats(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def check(x, packed, group, y, bias=None, residual=None, residual_scale=None, out_dtype=None):
    """y against fp64 with the decoded weight, within the bound of `tolerance`."""
    dense = reference.dequantize_awq(*packed, group, x.dtype).double()
    rows = x.reshape(-1, x.shape[-1]).double()
    want, size = rows @ dense.t(), rows.abs() @ dense.abs().t()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    if residual is not None:
        scale = 1.0 if residual_scale is None else residual_scale.double()
        added = residual.reshape(want.shape).double()
        want, size = want * scale + added, size * abs(scale) + added.abs()
    bound = tolerance(out_dtype or x.dtype, x.shape[-1])
    smallest = torch.finfo(out_dtype or x.dtype).tiny
    absolute = bound.accumulation * size + smallest
    assert_close(y.reshape(want.shape), want, relative=bound.relative, absolute=absolute, what=f"M={rows.shape[0]}")


@pytest.fixture(autouse=True)
def _only_on_its_own_chip(request):
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if {"awq/sm90", _launch.HOPPER} & set(map(str, parameters.values())) and not hopper():
        pytest.skip("needs a GPU of compute capability 9.0")


# ------------------------------------------------------------------------------------------------- the decoded weight


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_is_the_reference_to_the_bit(dtype, out_dtype):
    for n, k, group in [
        (1, 2, 2),
        (37, 320, 32),
        (8, 128, 128),
        (130, 384, 16),
        (24, 60, 6),
        (33, 1024, 256),
        (4, 34, 2),
    ]:
        packed = weight(n, k, group, dtype)
        with expect_kernel("dequantize_awq", "awq/dequantize"):
            dense = ops.dequantize_awq(*packed, group, out_dtype)
        assert_equal(dense, reference.dequantize_awq(*packed, group, out_dtype), f"{n}x{k} group {group}")


def test_dequantize_reads_any_strides():
    codes, scale, zero = weight(40, 256, 64, BF16)
    views = codes.t().contiguous().t(), scale.t().contiguous().t(), zero[:, :]
    assert_equal(ops.dequantize_awq(*views, 64), reference.dequantize_awq(codes, scale, zero, 64))
    mixed = codes, scale, zero.float()
    assert_equal(ops.dequantize_awq(*mixed, 64, BF16), reference.dequantize_awq(*mixed, 64, BF16))


def one_hot(linear, k: int, dtype: torch.dtype, rows: int) -> torch.Tensor:
    eye = torch.eye(k, device="cuda", dtype=dtype)
    return torch.cat([linear(eye[i : i + rows]) for i in range(0, k, rows)]).t()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_one_hot_rows_print_the_decoded_weight(kernel, group, dtype):
    k, n, rows = 768, 72, 16 if kernel in FEW_ROWS else 200
    if kernel in VECTORS and group % 32:
        pytest.skip(f"{kernel} takes groups of multiples of 32")
    packed = weight(n, k, group, dtype)
    with use(kernel), expect_kernel("awq_linear", kernel):
        dense = one_hot(lambda x: ops.awq_linear(x, *packed, None, group), k, dtype, rows)
    assert_equal(dense, reference.dequantize_awq(*packed, group, dtype), f"{kernel} group {group}")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_one_hot_rows_for_every_variant(route, dtype):
    k, n, ran = 384, 40, 0
    for group, scales in ((32, dtype), (128, dtype), (16, dtype), (64, FP32)):
        packed = weight(n, k, group, scales)
        want = reference.dequantize_awq(*packed, group, dtype)
        rows = (8, 16, 24, 32, 48, 64) if route == _launch.STREAM else (8,)
        for variant, m in product(range(getattr(EXTENSION.module, f"{route}_variants")()), rows):
            if _launch.plan_of(route, m, n, k, group, dtype, scales, 0, (variant, 1)).reason:
                continue
            ran += 1
            linear = partial(_launch.fused_linear, route, plan=(variant, 1))
            found = one_hot(lambda x, f=linear, p=packed, g=group: f(x, *p, None, g), k, dtype, m)
            assert_equal(found, want, f"{route} variant {variant} group {group} rows {m}")
    assert ran >= 4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("edge", [False, True])
def test_zeros_that_the_packed_decoder_would_round_otherwise(kernel, dtype, edge):
    """Tiny ones, and the one just below 2^-10 of the scale's binade: blocks that meet them repeat in fp32."""
    codes, scale, zero = weight(72, 256, 64, dtype)
    scale = (torch.rand_like(scale, dtype=FP32) + 1).to(dtype)
    zero = (torch.randn_like(zero, dtype=FP32) * 2.0**-22).to(dtype)
    if edge:
        zero = torch.where(zero > 0, 1.0, -1.0).to(dtype) * (2 - 2.0**-10) * 2.0**-11
    with use(kernel), expect_kernel("awq_linear", kernel):
        dense = one_hot(lambda x: ops.awq_linear(x, codes, scale, zero, None, 64), 256, dtype, 16)
    assert_equal(dense, reference.dequantize_awq(codes, scale, zero, 64, dtype))


@pytest.mark.parametrize("group", [32, 64, 96, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_group_that_the_packed_decoder_would_round_otherwise(kernel, group):
    """In one row: the warps beside it, with which it may share instructions, go on as they are."""
    codes, scale, zero = weight(264, 768, group, BF16)
    for row in (0, 37, 200, 263):
        few = zero.clone()
        few[768 // group // 2, row] = float(scale[768 // group // 2, row]) * 2.0**-22
        with use(kernel), expect_kernel("awq_linear", kernel):
            dense = one_hot(
                lambda x, z=few: ops.awq_linear(x, codes, scale, z, None, group),
                768,
                BF16,
                16 if kernel in FEW_ROWS else 192,
            )
        assert_equal(dense, reference.dequantize_awq(codes, scale, few, group, BF16), f"row {row}")


# ---------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(8, 64, 32), (130, 384, 128), (264, 1056, 96), (1000, 2048, 64), (72, 3072, 3072)]
)
def test_ragged_shapes(kernel, dtype, n, k, group):
    if kernel in VECTORS and n % 8:
        n += 8 - n % 8
    packed = weight(n, k, group, dtype)
    for i, m in enumerate((1, 2, 7, 16, 17, 29, 48, 64) if kernel in FEW_ROWS else (1, 17, 64, 65, 130, 300)):
        x = floats(m, k, dtype=dtype, seed=m)
        bias = None if i % 3 == 0 else floats(n, dtype=DTYPES[i % 3], seed=2)
        residual = None if i % 2 else floats(m, n, dtype=DTYPES[(i + 1) % 3], seed=3)
        scale = floats(n if i % 4 else 1, dtype=FP32, seed=4) if residual is not None and i % 3 else None
        out_dtype = DTYPES[i % 3]
        with use(kernel), expect_kernel("awq_linear", kernel):
            y = ops.awq_linear(x, *packed, bias, group, out_dtype, residual=residual, residual_scale=scale)
        assert y.dtype == out_dtype
        check(x, packed, group, y, bias, residual, scale, out_dtype)


@pytest.mark.parametrize(("k", "group"), [(34, 2), (50, 10), (1000, 8), (36, 12)])
def test_what_no_fused_kernel_takes_is_dequantized(k, group):
    packed = weight(21, k, group, BF16)
    x = floats(5, k, dtype=BF16)
    kernel = "awq/dequantized"
    with expect_kernel("awq_linear", kernel):
        check(x, packed, group, ops.awq_linear(x, *packed, None, group))


def test_bf16_x_multiplies_in_fp32_where_there_are_no_bf16_tensor_cores(monkeypatch):
    """A GPU of sm_75, simulated: the same weights, no cuBLAS call in bf16."""
    packed = weight(72, 512, 64, BF16)
    x, bias = floats(40, 512, dtype=BF16), floats(72, dtype=BF16)
    asked, mm = [], torch.mm

    def watched(a, b, **options):
        asked.extend((a.dtype, b.dtype))
        return mm(a, b, **options)

    monkeypatch.setattr(torch, "mm", watched)
    with simulate("sm_75"):
        y = _dequantized.linear(x, *packed, bias, 64)
    assert asked
    assert set(asked) == {FP32}
    check(x, packed, 64, y, bias)


@pytest.mark.parametrize("scales", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_of_x_and_scales(dtype, scales):
    packed = weight(72, 512, 64, scales)
    for m in (3, 40, 100):
        x = floats(m, 512, dtype=dtype)
        check(x, packed, 64, ops.awq_linear(x, *packed, None, 64))


@pytest.mark.parametrize("kernel", KERNELS)
def test_error_against_fp64(kernel):
    """At most 0.3% in bf16 against fp64 of the dequantized weight.

    One rounding is off by up to u = 2^-8 of a number at the bottom of its binade, uniformly; over numbers spread evenly
    in the logarithm its root mean square is u sqrt((1 - 1/4) / (6 ln 2)) = 0.166%. The weight's and the output's are
    independent: 0.235%.
    """
    bound = 1.25 * math.sqrt(2 * (1 - 1 / 4) / (6 * math.log(2))) * unit_roundoff(BF16)
    assert bound < 0.003
    for k, n in ((4096, 512), (12288, 256)):
        codes, scale, zero = packed = weight(n, k, 64, BF16)
        exact = reference.dequantize_awq(*packed, 64, FP32).double()
        for m in (1, 16) if kernel in FEW_ROWS else (16, 256, 4096):
            x = floats(m, k, dtype=BF16)
            want = x.double() @ exact.t()
            with use(kernel), expect_kernel("awq_linear", kernel):
                y = ops.awq_linear(x, codes, scale, zero, None, 64)
            assert relative_error(y, want) <= bound, (k, m)
            assert (y.double() - want).abs().max() <= 0.0065 * want.abs().max()


@pytest.mark.parametrize("route", ROUTES)
def test_every_plan(route):
    ran = 0
    for k, group in ((2080, 32), (1024, 128)):
        packed = weight(200, k, group, BF16)
        for m in (5, 13, 20, 28, 40, 64, 300):
            x, bias = floats(m, k, dtype=BF16), floats(200, dtype=BF16)
            for variant in range(getattr(EXTENSION.module, f"{route}_variants")()):
                for splits in SPLITS:
                    answer = _launch.plan_of(route, m, 200, k, group, BF16, BF16, 0, (variant, splits))
                    if answer.reason:
                        with pytest.raises(ValueError, match=answer.reason[:20]):
                            _launch.fused_linear(route, x, *packed, bias, group, plan=(variant, splits))
                        continue
                    ran += 1
                    y = _launch.fused_linear(route, x, *packed, bias, group, plan=(variant, splits))
                    check(x, packed, group, y, bias)
                    assert torch.equal(y, _launch.fused_linear(route, x, *packed, bias, group, plan=(variant, splits)))
    assert ran >= 40


def parts(packed, sizes):
    """(part_first, codes, scale, zero) of consecutive rows."""
    codes, scale, zero = packed
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        yield first, codes[rows].contiguous(), scale[:, rows].contiguous(), zero[:, rows].contiguous()
        first += size
    assert first == codes.shape[0]


PART_SIZES = ((768, 776), (8, 1000, 536), (512, 512, 256, 256, 8))


@pytest.mark.parametrize("route", ROUTES)
def test_parts_of_a_weight_have_its_bits_in_every_plan(route):
    """In the plan of the whole: tiles of 256 rows that parts cut anywhere, whole, in pieces of K, or where blocks need it."""
    n, k, group = 1544, 2080, 32
    packed, ran = weight(n, k, group, BF16), 0
    for m in (300, 700, 1500, 3000) if route == _launch.HOPPER else (5, 13, 40, 64):
        x, bias, residual = floats(m, k, dtype=BF16), floats(n, dtype=BF16), floats(m, n, dtype=BF16, seed=2)
        for variant in range(getattr(EXTENSION.module, f"{route}_variants")()):
            for splits in SPLITS:
                if _launch.plan_of(route, m, n, k, group, BF16, BF16, 0, (variant, splits)).reason:
                    continue
                forced = partial(_launch.fused_linear, route, plan=(variant, splits))
                whole = forced(x, *packed, bias, group), forced(x, *packed, bias, group, residual=residual)
                for sizes in PART_SIZES:
                    for first, *part in parts(packed, sizes):
                        rows = slice(first, first + part[0].shape[0])
                        of = {"part_first": first, "part_of": n}
                        what = f"M={m} plan {variant, splits} rows {rows}"
                        assert torch.equal(forced(x, *part, bias[rows], group, **of), whole[0][:, rows]), what
                        added = forced(x, *part, bias[rows], group, residual=residual[:, rows], **of)
                        assert torch.equal(added, whole[1][:, rows]), what
                ran += 1
    assert ran >= 10


@pytest.mark.parametrize("kernel", ["awq/sm90"])
def test_whole_tiles_of_any_number_of_tokens_give_the_same_bits(kernel):
    """Hence a part may have others than the whole."""
    packed = weight(1544, 2080, 32, BF16)
    for m in (40, 300, 1000):
        x = floats(m, 2080, dtype=BF16)
        plans = [(variant, 1) for variant in range(EXTENSION.module.awq_gemm_sm90_variants())]
        first, *others = (_launch.fused_linear(_launch.HOPPER, x, *packed, None, 32, plan=plan) for plan in plans)
        assert others
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("group", "scales"), [(64, BF16), (32, FP16), (24, BF16), (64, FP32)], ids=str)
def test_parts_of_a_weight_have_its_bits_in_the_plans_that_are_chosen(group, scales):
    n, k = 1544, 1536
    packed = weight(n, k, group, scales)
    for m in (1, 8, 16, 17, 33, 64, 65, 128, 256, 300, 1000, 1500, 4096, 9000):
        fused = m <= MOST_DECODE_ROWS or (hopper() and scales == BF16 and group % 32 == 0)
        x, bias = floats(m, k, dtype=BF16), floats(n, dtype=BF16)
        whole = ops.awq_linear(x, *packed, bias, group)
        for first, *part in parts(packed, PART_SIZES[m % 3]) if fused else ():
            y = ops.awq_linear(x, *part, bias[first : first + part[0].shape[0]], group, part_first=first, part_of=n)
            assert torch.equal(y, whole[:, first : first + y.shape[1]]), (m, first)
        if m <= 16:
            wide = x.float()
            whole = ops.awq_linear(wide, *packed, bias, group, weight_dtype=BF16)
            for first, *part in parts(packed, PART_SIZES[0]):
                rows = slice(first, first + part[0].shape[0])
                y = ops.awq_linear(
                    wide, *part, bias[rows], group, weight_dtype=BF16, part_first=first, part_of=n
                )  # fmt: skip
                assert torch.equal(y, whole[:, rows]), (m, first)


@pytest.mark.parametrize("sm", [80, 86, 90, 120])
def test_the_decode_kernel_has_a_plan_wherever_it_offers_itself(sm):
    facts = simulated_facts(f"sm_{sm}")
    device = facts.sm_count, facts.shared_memory_optin, facts.shared_memory_optin + 1024, sm
    for m in (1, 8, 9, 16, 17, 32, 33, MOST_DECODE_ROWS):
        for n, k, group in ((8, 32, 8), (17, 256, 64), (4096, 12288, 128), (22473, 3072, 16)):
            for scales in HALVES:
                plan = EXTENSION.module.awq_decode_plan(
                    M=m,
                    N=n,
                    K=k,
                    group=group,
                    x_type=DTYPE_CODES[BF16],
                    parameter_type=DTYPE_CODES[scales],
                    device=device,
                )
                assert plan[3] == "", (m, n, k, group, plan)


@pytest.mark.parametrize("n", [17, 24])
@pytest.mark.parametrize("m", [17, 33, 64])
def test_rows_that_the_decode_kernel_takes_last(m, n):
    """Past the record: on Hopper other routes take groups of 32."""
    for group, scales in ((32, BF16), (8, BF16), (32, FP32)):
        packed = weight(n, 544, group, scales)
        x = floats(m, 544, dtype=BF16)
        check(x, packed, group, _launch.fused_linear(_launch.DECODE, x, *packed, None, group))


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_are_independent_and_runs_equal(kernel):
    packed = weight(264, 1024, 64, BF16)
    for m in (13, 50) if kernel in FEW_ROWS else (77,):
        _rows_are_independent(kernel, packed, m)


def _rows_are_independent(kernel, packed, m):
    x = floats(m, 1024, dtype=BF16)
    with use(kernel):
        first = ops.awq_linear(x, *packed, None, 64)
        assert torch.equal(first, ops.awq_linear(x, *packed, None, 64))
        other = x.clone()
        other[1:] = float("nan")
        assert torch.equal(first[:1], ops.awq_linear(other, *packed, None, 64)[:1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_leading_dims_empty_and_strides(kernel):
    packed = weight(40, 256, 64, BF16)
    x = floats(12, 256, dtype=BF16)
    with use(kernel), expect_kernel("awq_linear", kernel):
        flat = ops.awq_linear(x, *packed, None, 64)
        assert torch.equal(ops.awq_linear(x.reshape(2, 3, 2, 256), *packed, None, 64).reshape(12, 40), flat)
        check(x[0], packed, 64, ops.awq_linear(x[0], *packed, None, 64))
        assert ops.awq_linear(x[0], *packed, None, 64).shape == (40,)
        assert ops.awq_linear(x[:0], *packed, None, 64).shape == (0, 40)
        offset = floats(12 * 256 + 1, dtype=BF16)[1:].view(12, 256)
        check(offset, packed, 64, ops.awq_linear(offset, *packed, None, 64))
        wide = floats(12, 512, dtype=BF16)[:, ::2]
        check(wide, packed, 64, ops.awq_linear(wide, *packed, None, 64))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_written_outside_of_the_output(kernel):
    if kernel == "awq/dequantized":
        pytest.skip("torch allocates its output")
    route = dict(zip(KERNELS, ROUTES, strict=False))[kernel]
    for n, m in ((72, 5), (136, 16)):
        packed = weight(n, 512, 64, BF16)
        x, guard = floats(m, 512, dtype=BF16), 4096
        space = torch.full((2 * guard + m * n,), float("nan"), dtype=BF16, device="cuda")
        out = space[guard : guard + m * n].view(m, n)
        _launch.fused_linear(route, x, *packed, None, 64, out=out)
        check(x, packed, 64, out)
        assert torch.isnan(space[:guard]).all()
        assert torch.isnan(space[guard + m * n :]).all()


@pytest.mark.parametrize("kernel", ["awq/dequantized", "awq/sm90"])
def test_more_than_2_31_outputs(kernel):
    m = 33000
    n = (2**31 // m + 4096) // 8 * 8
    packed = weight(n, 32, 32, BF16)
    x = floats(m, 32, dtype=BF16)
    with use(kernel), expect_kernel("awq_linear", kernel):
        y = ops.awq_linear(x, *packed, None, 32)
    for row in (0, m // 2, m - 1):
        check(x[row : row + 1], packed, 32, y[row : row + 1])


# --------------------------------------------------------------------------------------------------- Turing's kernel, forced

TURING = "awq/decode_sm75"


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_turing_one_hot_rows_print_the_decoded_weight(group, tiny):
    codes, scale, zero = weight(72, 768, group, FP16)
    if tiny:  # beside larger scales: blocks repeat in fp32
        scale, zero = (scale.float() * 100).to(FP16), (zero.float() * 2.0**-17).to(FP16)
    for scales in (FP16, FP32):
        packed = codes, scale.to(scales), zero.to(scales)
        with use(TURING), expect_kernel("awq_linear", TURING):
            dense = one_hot(lambda x, p=packed: ops.awq_linear(x, *p, None, group), 768, FP16, 16)
        assert_equal(dense, reference.dequantize_awq(*packed, group, FP16), f"group {group}, scales {scales}")


@pytest.mark.parametrize(
    ("n", "k", "group"), [(8, 64, 32), (130, 384, 128), (1000, 2048, 8), (72, 3072, 3072), (33, 12288, 64)]
)
def test_turing_products(n, k, group):
    packed = weight(n, k, group, FP16)
    for m in (1, 2, 7, 8, 9, 16):
        x, bias, residual = floats(m, k, dtype=FP16, seed=m), floats(n, dtype=FP16), floats(m, n, dtype=FP16)
        with use(TURING), expect_kernel("awq_linear", TURING):
            y = ops.awq_linear(x, *packed, bias, group, residual=residual)
            assert torch.equal(y, ops.awq_linear(x, *packed, bias, group, residual=residual))
            other = x.clone()
            other[1:] = float("nan")
            assert torch.equal(y[:1], ops.awq_linear(other, *packed, bias, group, residual=residual)[:1])
        check(x, packed, group, y, bias, residual)


def test_turing_writes_nothing_outside_of_the_output():
    packed, x, guard = weight(72, 512, 64, FP16), floats(5, 512, dtype=FP16), 4096
    space = torch.full((2 * guard + 5 * 72,), float("nan"), dtype=FP16, device="cuda")
    out = space[guard:-guard].view(5, 72)
    _launch.fused_linear(_launch.TURING, x, *packed, None, 64, out=out)
    check(x, packed, 64, out)
    assert torch.isnan(space[:guard]).all()
    assert torch.isnan(space[-guard:]).all()


def test_activations_in_front():
    packed = weight(48, 128, 64, BF16)
    for act, width in (("gelu_tanh", 128), ("swiglu", 256)):
        x = floats(6, width, dtype=BF16)
        for kernel in ("awq/float32", "awq/dequantized"):
            with use(kernel), expect_kernel("awq_linear", kernel):
                y = ops.awq_linear(x, *packed, None, 64, input_act=act)
            want = reference.awq_linear(x, *packed, None, 64, input_act=act)
            assert_close(y, want, relative=2 * unit_roundoff(BF16), absolute=tolerance(BF16, 128).accumulation * 128)


@pytest.mark.parametrize("scales", DTYPES, ids=str)
@pytest.mark.parametrize("decoded", DTYPES, ids=str)
def test_few_rows_of_float32(decoded, scales):
    """The weight decodes to any type, to the bit; products are those of fp32."""
    for n, k, group in ((37, 264, 8), (64, 768, 96), (21, 512, 512)):
        packed = weight(n, k, group, scales)
        linear = partial(ops.awq_linear, bias=None, group_size=group, weight_dtype=decoded)
        with expect_kernel("awq_linear", "awq/float32"):
            assert_equal(
                one_hot(lambda x, f=linear, p=packed: f(x, *p), k, FP32, 16),
                reference.dequantize_awq(*packed, group, decoded).float(),
            )
        dense = reference.dequantize_awq(*packed, group, decoded).double()
        for m in (1, 2, 3, 9, 16):
            x, bias, residual = floats(m, k, dtype=FP32), floats(n, dtype=BF16), floats(m, n, dtype=FP16)
            with expect_kernel("awq_linear", "awq/float32"):
                y = ops.awq_linear(x, *packed, bias, group, weight_dtype=decoded, residual=residual)
            want = x.double() @ dense.t() + bias.double() + residual.double()
            size = x.double().abs() @ dense.abs().t() + bias.double().abs() + residual.double().abs()
            bound = tolerance(FP32, k)
            assert_close(y, want, relative=bound.relative, absolute=bound.accumulation * size, what=f"M={m}")
            assert torch.equal(
                y[:1], ops.awq_linear(x[:1], *packed, bias, group, weight_dtype=decoded, residual=residual[:1])
            )


# --------------------------------------------------------------------------------------------- streams, graphs, compile


@pytest.mark.parametrize("few", [1, 9, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_replay_and_weights_written_just_before(kernel, few):
    """A captured call follows its inputs, also a weight that the kernel in front has just written."""
    m = few if kernel in FEW_ROWS else 61 + few
    sources = [weight(264, 1024, 64, BF16, seed) for seed in (1, 2)]
    packed = [t.clone() for t in sources[0]]
    x = floats(m, 1024, dtype=BF16)
    graph = torch.cuda.CUDAGraph()
    source = [t.clone() for t in sources[0]]
    with use(kernel):
        ops.awq_linear(x, *packed, None, 64)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for to, new in zip(packed, source, strict=True):
                to.copy_(new)
            y = ops.awq_linear(x, *packed, None, 64)
        for seed in (1, 0, 1):
            for to, new in zip(source, sources[seed], strict=True):
                to.copy_(new)
            graph.replay()
            assert torch.equal(y, ops.awq_linear(x, *sources[seed], None, 64))


@pytest.mark.parametrize("m", [3, 40, 2000])
def test_compile_fullgraph_and_another_stream(m):
    packed = weight(72, 256, 64, BF16)
    x = floats(m, 256, dtype=BF16)
    want = ops.awq_linear(x, *packed, None, 64)
    compiled = torch.compile(lambda x: ops.awq_linear(x, *packed, None, 64) + 0, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = ops.awq_linear(x, *packed, None, 64)
    stream.synchronize()
    assert torch.equal(y, want)


def test_workspace_stays_within_its_limit():
    packed = weight(4096, 12288, 64, BF16)
    for m, function in ((4096, None), (1500, _dequantized.linear), (5000, None)):
        x = floats(m, 12288, dtype=BF16)
        call = ops.awq_linear if function is None else function
        out_bytes = 2 * m * 4096
        call(x, *packed, None, 64)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = call(x, *packed, None, 64)
        assert torch.cuda.max_memory_allocated() - before - out_bytes <= _launch.WORKSPACE_BYTES
        del y
