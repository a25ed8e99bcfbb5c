"""The CUDA kernels against the int4 definition, on a GPU.

The quantizer is compared with the reference to the bit, the products of groups with integers, and everything else with float64
within the derived bound. The reference runs on the CPU: on a GPU, PyTorch divides by a constant with a reciprocal.
"""

from __future__ import annotations

import pytest
import torch

from kitchen_core import ops, trace, use
from kitchen_core.packing import pack_nibbles, unpack_nibbles
from kitchen_core.reference import svdquant as reference
from kitchen_core.testing import FLOAT_DTYPES, assert_close, assert_equal, expect_kernel, tolerance, unit_roundoff
from kitchen_svdquant import _hopper, _packed, _quantize, _stream
from kitchen_svdquant._extension import EXTENSION
from kitchen_svdquant.kernels import FEW_ROWS, PACKED_ROWS

pytestmark = pytest.mark.gpu

HOPPER = "svdquant/sm90"
PACKED = "svdquant/packed"
KERNELS = ("svdquant/few_rows", PACKED, HOPPER, "svdquant/int4", "svdquant/sm80", "svdquant/sm75")
LINEARS = ("svdquant/few_rows", PACKED, HOPPER)
BF16 = torch.bfloat16
# M, N, K, R: ragged tiles, N odd, K with an odd number of groups, ranks that fill no tile
SHAPES = (
    (1, 77, 64, 0), (5, 130, 320, 17), (16, 513, 1088, 32), (31, 264, 640, 256), (64, 96, 3072, 96), (129, 1000, 192, 32),
    (300, 385, 1088, 17), (1000, 136, 128, 128),
)  # fmt: skip


def skip_unless(kernel: str, M: int = 1) -> None:
    capability = torch.cuda.get_device_capability()
    if kernel == HOPPER and capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    if kernel == "svdquant/int4" and capability >= (10, 0):
        pytest.skip("4-bit MMA exists on sm_80 to sm_90")
    if kernel == "svdquant/few_rows" and (M > FEW_ROWS or capability < (9, 0)):
        pytest.skip(f"few_rows takes M up to {FEW_ROWS}, on sm_90 and later")
    if kernel == PACKED and (M not in PACKED_ROWS or capability != (9, 0)):
        pytest.skip(f"packed takes M of {PACKED_ROWS[0]} to {PACKED_ROWS[-1]} where N is small, on sm_90")


def layer(N: int, K: int, R: int, dtype: torch.dtype = BF16, seed: int = 0) -> dict[str, torch.Tensor]:
    """A layer whose codes are anything, -8 among them."""
    g = torch.Generator("cuda").manual_seed(seed)

    def rand(*shape):
        return torch.rand(*shape, generator=g, device="cuda")

    return {
        "weight": pack_nibbles(torch.randint(-8, 8, (N, K), generator=g, device="cuda", dtype=torch.int8)),
        "wscales": (rand(K // 64, N) * 0.02 + 0.01).to(dtype),
        "smooth": (rand(K) * 1.5 + 0.5).to(dtype),
        "proj_down": ((rand(K, R) - 0.5) / K**0.5).to(dtype),
        "proj_up": (rand(N, R) - 0.5).to(dtype),
    }


def gemm_arguments(M, N, K, R, act_unsigned=False, dtype=BF16, seed=0) -> dict[str, torch.Tensor]:
    w = layer(N, K, R, dtype, seed)
    g = torch.Generator("cuda").manual_seed(seed + 1)
    low, high = (0, 16) if act_unsigned else (-7, 8)
    codes = torch.randint(low, high, (M, K), generator=g, device="cuda", dtype=torch.int8)
    return {
        "codes": pack_nibbles(codes),
        "weight": w["weight"],
        "ascales": torch.rand(K // 64, M, generator=g, device="cuda") + 0.1,
        "wscales": w["wscales"],
        "lora_act": torch.randn(M, R, generator=g, device="cuda"),
        "proj_up": w["proj_up"],
    }


def readable(kernel: str, arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arguments, with scales and a proj_up that the kernel reads: packed takes 16 bits, and bfloat16."""
    if kernel != PACKED:
        return arguments
    scales = arguments["wscales"]
    return arguments | {
        "wscales": scales.half() if scales.dtype == torch.float32 else scales,
        "proj_up": arguments["proj_up"].to(BF16),
    }


def exact(codes, weight, ascales, wscales, lora_act, proj_up, bias=None, act_unsigned=False, residual=None, scale=None):
    """The definition in float64, and the magnitude of what is summed: of all of it, and of the branch."""
    a = unpack_nibbles(codes, signed=not act_unsigned).double() * ascales.double().t().repeat_interleave(64, 1)
    w = unpack_nibbles(weight, signed=True).double() * wscales.double().t().repeat_interleave(64, 1)
    low, up = lora_act.double(), proj_up.double()
    y, branch = a @ w.t() + low @ up.t(), low.abs() @ up.abs().t()
    size = a.abs() @ w.abs().t() + branch
    for tensor in (bias,) if bias is not None else ():
        y, size = y + tensor.double(), size + tensor.double().abs()
    if residual is not None:
        factor = 1.0 if scale is None else scale.double().reshape(-1)
        y, size = y * factor + residual.double(), size * abs(factor) + residual.double().abs()
        branch = branch * abs(factor)
    return y, size, branch


def branch_roundoff(kernel: str, out_dtype: torch.dtype) -> float:
    """What a kernel may lose of the branch: activations in bfloat16, or both sides in two bfloat16 parts each."""
    u = unit_roundoff(BF16)
    if kernel == HOPPER:
        return u if out_dtype == BF16 else 3 * u * u
    return 3 * u * u if kernel in ("svdquant/few_rows", PACKED) else 0.0


def check_close(out, want, size, branch, terms: int, kernel: str) -> None:
    """The bound of one linear, and of the branch."""
    t = tolerance(out.dtype, terms, "svdquant_w4a4")
    slack = t.accumulation * size + branch_roundoff(kernel, out.dtype) * branch
    assert_close(out, want, relative=t.relative, absolute=slack)


# The two that take longest come first: they run beside all others.


def test_compiles_without_graph_breaks():
    w = layer(96, 128, 8)
    compiled = torch.compile(ops.svdquant_linear, fullgraph=True, backend="aot_eager")
    for M in (2, 100):
        x = torch.randn(M, 128, device="cuda", dtype=BF16)
        assert_equal(compiled(x, *w.values()), ops.svdquant_linear(x, *w.values()))


def test_more_than_2_to_31_outputs():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    skip_unless(HOPPER)
    M, N, K = 70_000, 30_720, 64
    arguments = gemm_arguments(M, N, K, 8)
    with use(HOPPER):
        out = ops.scaled_mm_svdquant_w4a4(*arguments.values())
    for rows in (slice(0, 60), slice(M - 60, M)):
        some = arguments | {name: arguments[name][rows] for name in ("codes", "lora_act")}
        some["ascales"] = arguments["ascales"][:, rows]
        want, size, branch = exact(**some)
        check_close(out[rows], want, size, branch, K + 8, HOPPER)


# ---------------------------------------------------------------------------------------------------- the quantizer


@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("smooth_dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_quantizer_is_the_reference_to_the_bit(dtype, smooth_dtype, act_unsigned):
    for M, K in ((1, 64), (7, 320), (16, 1088), (17, 64), (96, 1088), (200, 1088)):
        x = (torch.randn(M, K) * torch.randn(M, 1).exp() * 3).to(dtype)
        smooth = (torch.rand(K) * 2 + 0.1).to(smooth_dtype)
        if M > 6:
            x[1, 3], x[2, K - 1], x[3], x[5, :64] = float("nan"), float("inf"), 0, 1e-20
            x[4] *= 1e-18
            smooth[5], smooth[40] = 1e-8, -2.0
        down = torch.randn(K, 8).to(dtype)
        with expect_kernel("quantize_svdquant_w4a4", "svdquant/groups"):
            found = ops.quantize_svdquant_w4a4(x.cuda(), smooth.cuda(), down.cuda(), act_unsigned)
        want = reference.quantize_svdquant_w4a4(x, smooth, down, act_unsigned)
        assert_equal(found[0].cpu(), want[0], f"codes, {M} x {K}")
        assert_equal(found[1].cpu(), want[1], f"scales, {M} x {K}")
        finite = x.isfinite().all(-1)
        size = x[finite].double().abs() @ down.double().abs()
        slack = tolerance(torch.float32, K).accumulation * size
        assert_close(found[2].cpu()[finite], x[finite].double() @ down.double(), absolute=slack)


@pytest.mark.parametrize("M", [1, 16, 40])
def test_lora_x_goes_to_the_branch_alone(M):
    x, raw = torch.rand(M, 128, device="cuda"), torch.randn(M, 128, device="cuda")
    smooth, down = torch.ones(128, device="cuda"), torch.randn(128, 8, device="cuda")
    codes, scales, low = ops.quantize_svdquant_w4a4(x, smooth, down, True, raw)
    alone = ops.quantize_svdquant_w4a4(x, smooth, down, True)
    assert_equal(codes, alone[0])
    assert_equal(scales, alone[1])
    slack = tolerance(torch.float32, 128).accumulation * (raw.double().abs() @ down.double().abs())
    assert_close(low, raw.double() @ down.double(), absolute=slack)


def test_quantizer_takes_any_strides():
    smooth, down = torch.rand(128, device="cuda") + 0.5, torch.randn(128, 8, device="cuda")
    for M in (3, 50):
        base = torch.randn(2 * M, 2 * 128 + 1, device="cuda", dtype=BF16)
        for x in (base[:M, :128], base[::2, 1:129], base[:M, ::2][:, :128], base[:M, :256].t()[:128, :M].t()):
            found = ops.quantize_svdquant_w4a4(x, smooth, down)
            want = reference.quantize_svdquant_w4a4(x.cpu(), smooth.cpu(), down.cpu())
            assert_equal(found[0].cpu(), want[0])
            assert_equal(found[1].cpu(), want[1])


# ---------------------------------------------------------------------------------------------------------- the GEMMs


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("act_unsigned", [False, True])
def test_products_of_groups_are_exact(kernel, act_unsigned):
    """With scales of one the output is an integer: random codes, and the extremes, all equal over 64 columns."""
    M, N = 32, 300
    skip_unless(kernel, M)
    low, high = (0, 15) if act_unsigned else (-8, 7)  # -8 is not emitted, but a caller may give it
    for K in (64, 192):
        a = torch.randint(low, high + 1, (M, K), device="cuda", dtype=torch.int8)
        w = torch.randint(-8, 8, (N, K), device="cuda", dtype=torch.int8)
        a[:8], a[8:16], a[16:24], w[:8], w[8:16] = high, low, -7 if low else 15, -8, 7
        a[24, ::2], w[16, 1::2] = high, -8
        one = [torch.ones(K // 64, n, device="cuda") for n in (M, N)]
        none = [torch.zeros(n, 0, device="cuda") for n in (M, N)]
        with use(kernel), expect_kernel("scaled_mm_svdquant_w4a4", kernel):
            out = ops.scaled_mm_svdquant_w4a4(
                pack_nibbles(a), pack_nibbles(w), one[0], one[1], none[0], none[1], None, act_unsigned, torch.float32
            )
        assert_equal(out, (a.double() @ w.double().t()).float())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gemm_over_shapes_and_dtypes(kernel, act_unsigned, shape):
    M, N, K, R = shape
    skip_unless(kernel, M)
    for i, out_dtype in enumerate(FLOAT_DTYPES):
        dtype = FLOAT_DTYPES[(i + K // 64) % 3]
        arguments = readable(kernel, gemm_arguments(M, N, K, R, act_unsigned, dtype, seed=i))
        bias = torch.randn(N, device="cuda").to(dtype) if i else None
        residual = (
            torch.randn(M, N, device="cuda").to(FLOAT_DTYPES[(i + 1) % 3] if i == 2 else out_dtype) if i else None
        )
        scale = torch.randn(N if i == 1 else 1, device="cuda") if i else None
        with use(kernel), expect_kernel("scaled_mm_svdquant_w4a4", kernel):
            out = ops.scaled_mm_svdquant_w4a4(*arguments.values(), bias, act_unsigned, out_dtype, residual, scale)
        assert out.dtype == out_dtype
        want, size, branch = exact(**arguments, bias=bias, act_unsigned=act_unsigned, residual=residual, scale=scale)
        check_close(out, want, size, branch, K + R, kernel)


def test_every_hopper_variant_and_chunk(monkeypatch):
    skip_unless(HOPPER)
    arguments = gemm_arguments(300, 1000, 1088, 40)
    want, size, branch = exact(**arguments)
    for variant in range(EXTENSION.module.svdquant_gemm_sm90_variants()):
        whole = _hopper.scaled_mm(*arguments.values(), variant=variant)
        check_close(whole, want, size, branch, 1088 + 40, HOPPER)
        with monkeypatch.context() as patch:
            patch.setattr(_hopper, "CHUNK_BYTES", 1)
            assert _hopper.chunk_columns(1000, 1088) == 384
            assert_equal(_hopper.scaled_mm(*arguments.values(), variant=variant), whole)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_hopper_rows_that_are_no_multiple_of_16_bytes_are_right_whatever_the_chunk(monkeypatch, out_dtype):
    skip_unless(HOPPER)
    arguments = gemm_arguments(300, 1001, 1088, 40)
    want, size, branch = exact(**arguments)
    monkeypatch.setattr(_hopper, "CHUNK_BYTES", 1)
    check_close(_hopper.scaled_mm(*arguments.values(), out_dtype=out_dtype), want, size, branch, 1088 + 40, HOPPER)


@pytest.mark.parametrize("M", [65, 128, 300, 700])
def test_hopper_pieces_of_k(M):
    """Tiles of any width give the same bits, unless K is split: then the sums have another order."""
    skip_unless(HOPPER)
    for N, K, R, dtype in ((200, 4160, 40, BF16), (1000, 1088, 0, torch.float16), (3072, 3072, 32, torch.float32)):
        arguments = gemm_arguments(M, N, K, R, dtype=dtype)
        want, size, branch = exact(**arguments)
        splits, whole = set(), []
        for variant in range(EXTENSION.module.svdquant_gemm_sm90_variants()):
            plan = _hopper.plan_of(M, N, K, 0, variant)
            out = _hopper.scaled_mm(*arguments.values(), out_dtype=torch.float32, variant=variant)
            check_close(out, want, size, branch, K + R, HOPPER)
            for _ in range(3):
                assert torch.equal(
                    _hopper.scaled_mm(*arguments.values(), out_dtype=torch.float32, variant=variant), out
                )
            others = gemm_arguments(M, N, K, R, dtype=dtype, seed=5)
            for name, rows in (("codes", 0), ("ascales", 1), ("lora_act", 0)):
                others[name].select(rows, 17).copy_(arguments[name].select(rows, 17))
            others |= {name: arguments[name] for name in ("weight", "wscales", "proj_up")}
            others["ascales"][0, 18] = float("nan")
            other = _hopper.scaled_mm(*others.values(), out_dtype=torch.float32, variant=variant)
            assert torch.equal(other[17], out[17])
            splits.add(plan.arguments[3])
            if plan.arguments[3] == 1:
                whole.append(out)
        assert all(torch.equal(out, whole[0]) for out in whole)
        assert splits == {1, 4} or N > 200


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeated_runs_are_bit_equal_and_rows_independent(kernel):
    M = FEW_ROWS
    skip_unless(kernel, M)
    arguments = gemm_arguments(M, 1000, 3072, 32)
    with use(kernel):
        first = ops.scaled_mm_svdquant_w4a4(*arguments.values())
        for _ in range(20):
            assert torch.equal(ops.scaled_mm_svdquant_w4a4(*arguments.values()), first)
        others = gemm_arguments(M, 1000, 3072, 32, seed=5)
        for name, rows in (("codes", 0), ("ascales", 1), ("lora_act", 0)):
            others[name].select(rows, 17).copy_(arguments[name].select(rows, 17))
        others |= {name: arguments[name] for name in ("weight", "wscales", "proj_up")}
        assert torch.equal(ops.scaled_mm_svdquant_w4a4(*others.values())[17], first[17])


@pytest.mark.parametrize("act_unsigned", [False, True])
def test_every_packed_plan(act_unsigned):
    """Tiles and pieces of K of every kind: right, the same each time, and a row whatever the other rows are."""
    skip_unless(PACKED, PACKED_ROWS[0])
    shapes = (
        (1, 77, 64, 0),
        (17, 513, 1088, 32),
        (31, 264, 640, 256),
        (64, 96, 3072, 96),
        (100, 200, 4160, 2),
        (300, 385, 1088, 18),
    )
    for M, N, K, R in shapes:
        arguments = gemm_arguments(M, N, K, R, act_unsigned)
        want, size, branch = exact(**arguments, act_unsigned=act_unsigned)
        row = M // 2
        others = gemm_arguments(M, N, K, R, act_unsigned, seed=5)
        for name, rows in (("codes", 0), ("ascales", 1), ("lora_act", 0)):
            others[name].select(rows, row).copy_(arguments[name].select(rows, row))
        others |= {name: arguments[name] for name in ("weight", "wscales", "proj_up")}
        for variant in range(EXTENSION.module.svdquant_packed_sm90_variants()):
            for pieces in (1, 2, 3, 4):
                stages = -(-K // 256)
                if -(-stages // pieces) * (pieces - 1) >= stages:
                    continue  # a piece would have nothing
                plan = _packed.plan_of(M, N, K, 0, (variant, pieces))
                for out_dtype in (BF16, torch.float32):

                    def run(given, plan=plan, out_dtype=out_dtype):
                        packed = _packed.Workspace.empty(plan, given["codes"].device, False)
                        values = *given.values(), None, act_unsigned, out_dtype
                        return _stream.scaled_mm(_stream.PACKED, *values, packed=packed)

                    out = run(arguments)
                    check_close(out, want, size, branch, K + R, PACKED)
                    assert torch.equal(run(arguments), out)
                    assert torch.equal(run(others)[row], out[row])


@pytest.mark.parametrize("N", [3072, 1016, 130])
def test_columns_of_few_rows_depend_on_no_other_columns(N):
    """Sums are made in an order that K alone decides: a weight in parts gives the bits of the whole."""
    skip_unless("svdquant/few_rows")
    for M in (1, 5, 16, 30, 64):
        whole = gemm_arguments(M, N, 3072, 32)
        with use("svdquant/few_rows"):
            want = ops.scaled_mm_svdquant_w4a4(*whole.values())
            for part in (slice(0, N // 2), slice(N // 2, N), slice(N // 2 + 1, N)):
                some = whole | {"weight": whole["weight"][part], "proj_up": whole["proj_up"][part]}
                some["wscales"] = whole["wscales"][:, part]
                assert torch.equal(ops.scaled_mm_svdquant_w4a4(*some.values()), want[:, part])


@pytest.mark.parametrize("kernel", KERNELS)
def test_row_with_nan_scale_spoils_no_other_row(kernel):
    skip_unless(kernel, 40)
    arguments = gemm_arguments(40, 130, 192, 8)
    arguments["ascales"][1, 7] = float("nan")
    with use(kernel):
        out = ops.scaled_mm_svdquant_w4a4(*arguments.values())
    assert torch.isnan(out[7]).all()
    assert torch.isfinite(out[[0, 6, 8, 19]]).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_alignment_and_empty(kernel):
    M, N, K, R = 40, 90, 256, 24
    skip_unless(kernel, M)
    arguments = gemm_arguments(M, N, K, R)
    with use(kernel):
        want = ops.scaled_mm_svdquant_w4a4(*arguments.values())
        moved = {
            name: torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")[1:].view(t.shape).copy_(t)
            for name, t in arguments.items()
        }
        assert_equal(ops.scaled_mm_svdquant_w4a4(*moved.values()), want)
        turned = {name: t.t().contiguous().t() for name, t in arguments.items()}
        assert_equal(ops.scaled_mm_svdquant_w4a4(*turned.values()), want)
        arguments |= {"codes": arguments["codes"][:0], "lora_act": arguments["lora_act"][:0]}
        arguments["ascales"] = arguments["ascales"][:, :0]
        assert ops.scaled_mm_svdquant_w4a4(*arguments.values()).shape == (0, N)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES[1:], ids=str)
@pytest.mark.parametrize("R", [8, 40, 64, 72, 128, 136, 256])
def test_product_beside_the_quantizer(R, dtype):
    skip_unless(HOPPER)
    for M, K in ((1, 64), (65, 3072), (100, 192), (1000, 640), (4200, 1088)):
        x, down = torch.randn(M, K, device="cuda").to(dtype), layer(8, K, R, dtype)["proj_down"]
        low = _quantize.project(x, down, torch.float32)
        want, size = x.double() @ down.double(), x.double().abs() @ down.double().abs()
        assert_close(low, want, absolute=tolerance(torch.float32, K).accumulation * size)
        assert torch.equal(_quantize.project(x, down, torch.float32), low)
        assert torch.equal(_quantize.project(x, down, BF16), low.bfloat16())
    rows = torch.randn(200, 2 * K + 3, device="cuda").to(dtype)[:, 1 : K + 1]  # neither aligned nor contiguous
    assert torch.equal(_quantize.project(rows, down, BF16), _quantize.project(rows.contiguous(), down, BF16))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_quantizer_decodes_the_weight_beside(dtype):
    skip_unless(HOPPER)
    for M, N, K in ((1, 5, 64), (300, 1001, 192), (40, 3072, 3072)):
        w, x = layer(N, K, 32, dtype), torch.randn(M, K, device="cuda").to(dtype)
        want = _quantize.decode(w["weight"], w["wscales"], 96, is_a=False)
        numbers = unpack_nibbles(w["weight"], signed=True).float()
        assert torch.equal(want.codes.view(torch.float8_e4m3fn).float(), numbers)
        lora_act, rounded = torch.randn(M, 24, device="cuda"), torch.empty(M, 32, dtype=BF16, device="cuda")
        to = _quantize.Decoded.empty(N, K, 96, x.device)
        beside = _quantize.DecodedBeside(w["weight"], w["wscales"], to, 96)
        codes, _ = _quantize.quantize_rows(x, w["smooth"], False, _quantize.E4M3, 0.0, beside, (lora_act, rounded))
        assert torch.equal(codes, _quantize.quantize_rows(x, w["smooth"], False, _quantize.E4M3)[0])
        assert torch.equal(rounded[:, :24], lora_act.bfloat16())
        assert not rounded[:, 24:].any()
        assert torch.equal(to.codes, want.codes)
        assert torch.equal(to.scales.view(torch.int16), want.scales.view(torch.int16))


# ---------------------------------------------------------------------------------------------------- the whole linear


@pytest.mark.parametrize("kernel", LINEARS)
@pytest.mark.parametrize("act_unsigned", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 3, 16, 17, 32, 64, 100, 300])
def test_linear(kernel, act_unsigned, dtype, M):
    skip_unless(kernel, M)
    N, K, R = 200, 1088, 40
    w, x = readable(kernel, layer(N, K, R, dtype)), torch.randn(M, K, device="cuda").to(dtype)
    bias, residual = torch.randn(N, device="cuda"), torch.randn(M, N, device="cuda").to(dtype)
    with use(kernel), expect_kernel("svdquant_linear", kernel):
        out = ops.svdquant_linear(x, *w.values(), bias, act_unsigned, None, "none", None, 0.0, residual)
    shifted = x.float() + reference.UNSIGNED_SHIFT if act_unsigned else x
    codes, ascales, _ = reference.quantize_svdquant_w4a4(
        *(t.cpu() for t in (shifted, w["smooth"], w["proj_down"])), act_unsigned, x.cpu()
    )
    low_exact = x.double() @ w["proj_down"].double()
    want, size, _ = exact(
        codes.cuda(), w["weight"], ascales.cuda(), w["wscales"], low_exact, w["proj_up"], bias, act_unsigned, residual
    )
    branch = x.double().abs() @ w["proj_down"].double().abs() @ w["proj_up"].double().abs().t()
    check_close(out, want, size + branch, branch, 2 * K + R, kernel)


def test_choice_of_kernels_and_leading_dims():
    skip_unless(HOPPER)
    w = layer(96, 128, 8)
    for M, kernel in ((2, "svdquant/few_rows"), (300, HOPPER)):
        x = torch.randn(2, M // 2, 128, device="cuda", dtype=BF16)
        with trace() as calls:
            y = ops.svdquant_linear(x, *w.values())
        assert calls == [("svdquant_linear", kernel)]
        assert_equal(y, ops.svdquant_linear(x.reshape(M, 128), *w.values()).reshape(2, M // 2, 96))
    assert ops.svdquant_linear(x[:0], *w.values()).shape == (0, 150, 96)


def test_activation_in_front_is_that_of_the_composed_form():
    skip_unless(HOPPER)
    w = layer(96, 128, 8)
    for M in (4, 100):
        x = torch.randn(M, 256, device="cuda", dtype=BF16)
        fused = ops.svdquant_linear(x, *w.values(), None, True, None, "swiglu")
        with use("core/composed"):
            composed = ops.svdquant_linear(x, *w.values(), None, True, None, "swiglu")
        size = composed.double().abs().amax() * torch.ones_like(composed, dtype=torch.float64)
        check_close(fused, composed.double(), size, size, 128, HOPPER)


@pytest.mark.parametrize("M", [1, 16, 300])
def test_graph_replay_with_changed_inputs_on_another_stream(M):
    w, x = layer(256, 640, 32), torch.randn(M, 640, device="cuda", dtype=BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.svdquant_linear(x, *w.values())
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = ops.svdquant_linear(x, *w.values())
    for seed in (10, 20):
        x.copy_(torch.randn(M, 640, device="cuda"))
        for name, fresh in layer(256, 640, 32, seed=seed).items():
            w[name].copy_(fresh)
        want = ops.svdquant_linear(x, *w.values())
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


@pytest.mark.parametrize("M", [1, 8, 100, 1000])
def test_weights_written_by_the_kernel_just_before(M):
    """The GEMM starts while the quantizer runs, and reads weights then: those of kernels before the quantizer must be there."""
    layers = [layer(3072, 3072, 32, seed=seed) for seed in range(4)]
    x = torch.randn(M, 3072, device="cuda", dtype=BF16)
    want = [ops.svdquant_linear(x, *w.values()).clone() for w in layers]
    torch.cuda.synchronize()
    current = {name: t.clone() for name, t in layers[0].items()}
    outs = []
    for turn in range(24):
        for name, t in layers[turn % 4].items():
            current[name].copy_(t)
        outs.append(ops.svdquant_linear(x, *current.values()))
    assert all(torch.equal(out, want[turn % 4]) for turn, out in enumerate(outs))


def test_grouped_call_is_each_linear():
    """One quantized x for several layers of one smooth factor, through the format."""
    from kitchen_core import QuantizedTensor
    from kitchen_svdquant.format import SVDQuantConfig, SVDQuantFormat

    for M, act_unsigned in ((4, False), (200, True)):
        x = torch.randn(M, 128, device="cuda", dtype=BF16)
        tensors = [layer(96, 128, rank, seed=rank) for rank in (8, 16)]
        weights = [
            QuantizedTensor(
                {"qdata": t["weight"], "scale": t["wscales"], "proj_down": t["proj_down"], "proj_up": t["proj_up"],
                 "smooth_factor": tensors[0]["smooth"]}, SVDQuantFormat, SVDQuantConfig(rank, act_unsigned), BF16,
            )
            for t, rank in zip(tensors, (8, 16), strict=True)
        ]  # fmt: skip
        shared = weights[0].quantize_activation(x)
        for w in weights:
            alone = w.linear(x)
            size = alone.double().abs().amax() * torch.ones_like(alone, dtype=torch.float64)
            check_close(w.linear(shared), alone.double(), size, size, 2 * 128, HOPPER)


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    w, x = layer(96, 128, 8), torch.randn(5, 128, device="cuda", dtype=BF16)
    out = ops.svdquant_linear(x.to("cuda:1"), *(t.to("cuda:1") for t in w.values()))
    assert torch.equal(out.to("cuda:0"), ops.svdquant_linear(x, *w.values()))
