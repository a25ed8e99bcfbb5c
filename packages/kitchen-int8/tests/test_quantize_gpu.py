"""The rowwise quantizer kernel against the reference arithmetic, on a GPU.

The reference runs on the CPU, where every operation is IEEE; without an activation codes and scales must be equal to the bit.
"""

from __future__ import annotations

import pytest
import torch

from kitchen_core.arithmetic import apply_input_act, hadamard_rotate, input_width
from kitchen_core.arithmetic import quantize_rowwise as reference_rowwise
from kitchen_int8 import _quantize

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEATURES = (1, 3, 16, 48, 255, 256, 384, 512, 768, 1000, 2047, 2056, 3072, 4095, 4096, 4104, 5120, 8192, 8200, 12288, 16384,
            20480, 20481)  # fmt: skip
ROTATED = ((4, 4), (20, 4), (16, 16), (144, 16), (64, 64), (384, 64), (256, 256), (768, 256), (3072, 256), (12288, 256),
           (16384, 256), (17408, 256), (1024, 1024), (5120, 1024), (4096, 4096), (12288, 4096))  # fmt: skip
# K above what one CTA holds, up to what a cluster holds (98304) and beyond; the groups that divide it
LONG = [
    (K, group)
    for K in (16400, 24576, 28672, 28688, 65536, 98304, 98320)
    for group in (0, 64, 256)
    if group == 0 or K % group == 0
]
# (tiles, warps, cluster, ctas_per_sm), each with the special and the general kernels
SHAPES_OF_PLANS = [
    (1, 3, 1, 0), (1, 24, 1, 1), (1, 3, 2, 0), (1, 6, 4, 0), (1, 3, 8, 0),
    (2, 1, 1, 0), (2, 3, 1, 2), (2, 12, 1, 0), (2, 12, 1, 1), (2, 16, 1, 0),
]  # fmt: skip
PLANS = [(*shape, special) for shape in SHAPES_OF_PLANS for special in (True, False) if shape[1] != 16 or not special]


def random_rows(M: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, some elements large: ties and outliers both occur."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(M, width, generator=generator) * torch.logspace(-3, 3, M).unsqueeze(1)
    x[:, :: max(1, width // 3)] *= 8
    return x.to(dtype)


def reference(x: torch.Tensor, group: int = 0, act: str = "none", weight=None, eps: float = 0.0, seed: int = 0):
    rows = apply_input_act(x.cpu().float(), act, None if weight is None else weight.cpu(), eps)
    return reference_rowwise(hadamard_rotate(rows, group), seed)


def check_equal(x: torch.Tensor, group: int = 0, seed: int = 0, plan=None) -> None:
    codes, scales = _quantize.quantize_rowwise(x, group, seed=seed, plan=plan)
    want_codes, want_scales = reference(x, group, seed=seed)
    assert torch.equal(scales.cpu().view(torch.int32), want_scales.view(torch.int32)), (
        (scales.cpu() - want_scales).abs().max()
    )
    wrong = (codes.cpu() != want_codes).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} codes differ, first at {wrong[:4].tolist()}"


def check_close(x: torch.Tensor, group: int, act: str, weight=None, eps: float = 0.0, plan=None) -> None:
    """Codes within one step in under 0.1%. Scales to 2^-18: about ten roundings of 2^-24 and two functions of 2^-21."""
    codes, scales = _quantize.quantize_rowwise(x, group, act, weight, eps, plan=plan)
    want_codes, want_scales = reference(x, group, act, weight, eps)
    assert ((scales.cpu() - want_scales).abs() <= want_scales * 2.0**-18).all()
    steps = (codes.cpu().int() - want_codes.int()).abs()
    assert steps.max() <= 1
    assert (steps != 0).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", FEATURES)
def test_plain_is_bit_equal(K, dtype):
    for M in (1, 2, 17, 200):
        check_equal(random_rows(M, K, dtype, seed=K + M).cuda())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "group"), ROTATED)
def test_rotated_is_bit_equal(K, group, dtype):
    for M in (1, 17, 150):
        check_equal(random_rows(M, K, dtype, seed=K + M).cuda(), group)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("group", [0, 256])
def test_every_plan_is_bit_equal(plan, group):
    tiles, warps, cluster, _, _ = plan
    K = min(512 * tiles * warps * cluster, 16384)
    for columns in (K, K - 256):
        for dtype in DTYPES[: 2 if plan[-1] or warps > 12 else 3]:  # fp32: general kernels of up to 12 warps
            check_equal(random_rows(150, columns, dtype, seed=columns).cuda(), group, plan=plan)


CHUNKS = (0, 32, 1, 0, False)


@pytest.mark.parametrize(
    ("asked", "plan"),
    [
        ({"M": 1, "K": 28672}, (1, 7, 8, 0, True)),
        ({"M": 16, "K": 28672}, (1, 7, 8, 0, True)),
        ({"M": 17, "K": 28672}, (1, 14, 4, 0, True)),
        ({"M": 2**23, "K": 24576}, (1, 12, 4, 0, True)),
        ({"M": 300, "K": 32784}, (1, 9, 8, 0, True)),
        ({"M": 1, "K": 98304, "group": 64}, (1, 24, 8, 0, False)),
        ({"M": 300, "K": 98320}, CHUNKS),
        ({"M": 300, "K": 12304, "dtype": 0}, (1, 13, 2, 0, False)),
        ({"M": 300, "K": 28672, "act": 3}, CHUNKS),  # rms_norm
        ({"M": 300, "K": 28672, "seed": 1}, CHUNKS),
        ({"M": 300, "K": 28672, "group": 1024}, CHUNKS),
        ({"M": 300, "K": 28680}, CHUNKS),
        ({"M": 300, "K": 28672, "has_clusters": False}, CHUNKS),
        ({"M": 300, "K": 4096, "group": 4096}, (0, 16, 1, 0, False)),
        ({"M": 300, "K": 1001}, (0, 8, 1, 0, False)),
    ],
)
def test_plans_of_long_rows_and_of_chunks(asked, plan):
    """On an H200."""
    h200 = {"sm_count": 132, "has_clusters": True, "smem_per_cta": 232_448, "smem_per_sm": 233_472}
    row = {"x": 1 << 20, "x_row_stride": asked["K"], "dtype": 2, "codes": 1 << 20, "group": 0, "act": 0, "seed": 0}
    assert _quantize.EXTENSION.module.quantize_plan(**(row | h200 | asked)) == plan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "group"), LONG)
def test_long_rows_are_bit_equal(K, group, dtype):
    most = 300 if K < 30000 else 40
    x = random_rows(most, K, dtype, seed=K)
    want_codes, want_scales = reference(x, group)
    for M in (1, 3, 33, most):
        codes, scales = _quantize.quantize_rowwise(x[:M].cuda(), group)
        assert torch.equal(scales.cpu().view(torch.int32), want_scales[:M].view(torch.int32)), M
        assert torch.equal(codes.cpu(), want_codes[:M]), M


def plans_of_long_rows(K: int):
    """Clusters of as many warps as K needs, of one more and of all (some CTAs then hold no column), and chunks of each size."""
    tiles = -(-K // 512)
    for cluster in (2, 4, 8):
        least = -(-tiles // cluster)
        for warps in sorted({least, least + 1, 24}):
            if least <= warps <= 24:
                yield from ((1, warps, cluster, 0, special) for special in (True, False))
    yield from ((0, warps, 1, 0, False) for warps in (8, 16, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("K", "group"), LONG)
def test_every_plan_of_a_long_row_is_bit_equal(K, group, dtype):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    x = random_rows(7, K, dtype, seed=K + 1)
    want_codes, want_scales = reference(x, group)
    for plan in plans_of_long_rows(K):
        codes, scales = _quantize.quantize_rowwise(x.cuda(), group, plan=plan)
        assert torch.equal(scales.cpu().view(torch.int32), want_scales.view(torch.int32)), plan
        assert torch.equal(codes.cpu(), want_codes), plan


@pytest.mark.parametrize("act", ["gelu_tanh", "swiglu", "rms_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("K", "group"), [(16400, 0), (24576, 64), (28672, 0), (28672, 256), (28688, 0), (65536, 256), (98320, 0)]
)
def test_activation_of_long_rows(act, dtype, K, group):
    most = 300 if K == 28672 else 33
    x = torch.randn(most, input_width(K, act), generator=torch.Generator().manual_seed(K)).to(dtype)
    weight = None
    if act == "rms_norm":
        weight = torch.rand(K, generator=torch.Generator().manual_seed(7)).add(0.5).to(dtype).cuda()
    for M in (1, 3, most):
        check_close(x[:M].cuda(), group, act, weight, 1e-6)


@pytest.mark.parametrize("act", ["gelu_tanh", "swiglu"])
def test_activation_in_every_plan_of_a_long_row(act):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    x = torch.randn(5, input_width(28672, act), generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    for plan in plans_of_long_rows(28672):
        check_close(x, 256, act, plan=plan)


@pytest.mark.parametrize("plan", [(1, 4, 1, 0, False), (1, 2, 8, 0, False), (2, 2, 2, 0, False), (0, 4, 1, 0, False)])
def test_a_plan_that_cannot_be_is_refused(plan):
    """Too few warps; rms_norm in a cluster; two tiles in a cluster; chunks of 1024 columns with groups of 4096."""
    K = 4096
    x = torch.ones(2, K, device="cuda")
    rms = torch.ones(K, device="cuda") if plan[:3] == (1, 2, 8) else None
    with pytest.raises((RuntimeError, ValueError), match=r"plan does not cover|whole groups"):
        _quantize.quantize_rowwise(
            x, 4096 if plan[0] == 0 else 0, "none" if rms is None else "rms_norm", rms, 1e-6, plan=plan
        )


def test_persistent_grid_walks_over_all_rows():
    for plan in ((2, 3, 1, 1, True), (2, 3, 1, 1, False), (1, 6, 1, 1, True), (1, 6, 1, 2, True)):
        check_equal(random_rows(1000, 3072, torch.bfloat16).cuda(), 256, plan=plan)


@pytest.mark.parametrize("act", ["gelu_tanh", "swiglu", "rms_norm", "situ"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("K", "group"),
    [(768, 256), (3072, 0), (3072, 256), (12288, 256), (384, 64), (100, 4), (20480, 256), (4096, 4096)],
)
def test_activation_is_within_a_step(act, dtype, K, group):
    width = input_width(K, act)
    for M in (1, 40):
        x = torch.randn(M, width, generator=torch.Generator().manual_seed(M)).to(dtype).cuda()
        weight = None
        if act == "rms_norm":
            weight = torch.rand(K, generator=torch.Generator().manual_seed(7)).add(0.5).to(dtype).cuda()
        check_close(x, group, act, weight, 1e-6)


@pytest.mark.parametrize("plan", [(1, 6, 4, 0, True), (1, 6, 4, 0, False), (2, 12, 1, 1, True), (2, 12, 1, 1, False)])
def test_activation_in_every_kind_of_plan(plan):
    x = torch.randn(300, 2 * 12288, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    check_close(x, 256, "swiglu", plan=plan)
    check_close(x[:, : 2 * 12032].contiguous(), 256, "swiglu", plan=plan)


@pytest.mark.parametrize("group", [0, 256])
@pytest.mark.parametrize("K", [3072, 3073 - 1 - 256, 20480, 131_072])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_row_with_inf_or_nan_spoils_no_other_row(group, K, bad):
    x = random_rows(9, K, torch.float32)
    x[4, K - 1] = bad
    codes, scales = _quantize.quantize_rowwise(x.cuda(), group)
    assert torch.isnan(scales[4]).all()
    assert (codes[4] == 0).all()
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    want_codes, want_scales = reference(x[keep], group)
    assert torch.equal(codes.cpu()[keep], want_codes)
    assert torch.equal(scales.cpu()[keep], want_scales)


def test_zero_and_tiny_and_huge_rows():
    x = torch.ones(6, 512)
    for row, factor in enumerate((0.0, 1e-45, 1e-38, 1e-30, 1e-28, 3e38)):
        x[row] *= factor
    x[:, 1::2] *= -0.4
    check_equal(x.cuda())
    _, scales = _quantize.quantize_rowwise(x.cuda())
    assert scales[0].item() == torch.tensor(1e-30).item()


def test_golden_vectors():
    rows = [[3, -1.703125, 1.09375, 0.69921875], [-1, 0.5, 0.330078125, 0.0078125]]
    x = torch.tensor(rows, dtype=torch.bfloat16).cuda()
    codes, scales = _quantize.quantize_rowwise(x)
    assert codes.tolist() == [[127, -72, 46, 30], [-127, 64, 42, 1]]
    assert torch.allclose(scales.cpu(), torch.tensor([[0.023622047], [0.007874016]]), rtol=1e-7)


@pytest.mark.parametrize("K", [5, 4096, 6000, 28672])
@pytest.mark.parametrize("seed", [1, 12345, 2**40 + 3])
def test_stochastic_rounding_is_bit_equal(K, seed):
    check_equal(random_rows(11, K, torch.bfloat16).cuda(), seed=seed)
    if K == 4096:
        check_equal(random_rows(11, K, torch.float32).cuda(), 256, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_stride_and_unaligned_rows(dtype):
    base = random_rows(20, 4000, dtype).cuda()
    for view in (base[:, :3072], base[:, 16:3088], base[:, 1:3073], base[::2, :512], base[3:4].expand(20, 4000)):
        check_equal(view)
        if view.shape[1] % 256 == 0:
            check_equal(view, 256)


def test_leading_dims_and_empty():
    x = random_rows(24, 512, torch.bfloat16).cuda().reshape(2, 3, 4, 512)
    codes, scales = _quantize.quantize_rowwise(x, 256)
    assert codes.shape == (2, 3, 4, 512)
    assert scales.shape == (2, 3, 4, 1)
    codes, scales = _quantize.quantize_rowwise(x[:0])
    assert codes.shape == (0, 3, 4, 512)


@pytest.mark.parametrize(("K", "group"), [(32_768, 256), (12_288, 256), (12_296, 0)])  # a cluster, a CTA, chunks
def test_more_than_65535_rows_and_2_to_31_elements(K, group):
    M = max(70_000, 2**31 // K + 100)
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free GPU memory")
    x = torch.empty(M, K, dtype=torch.bfloat16, device="cuda").normal_()
    codes, scales = _quantize.quantize_rowwise(x, group)
    for rows in (slice(0, 3), slice(65_534, 65_539), slice(M - 3, M)):
        want_codes, want_scales = reference(x[rows], group)
        assert torch.equal(codes[rows].cpu(), want_codes)
        assert torch.equal(scales[rows].cpu(), want_scales)


def test_graph_replay_on_another_stream():
    x = random_rows(64, 3072, torch.bfloat16).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _quantize.quantize_rowwise(x, 256)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        codes, scales = _quantize.quantize_rowwise(x, 256)
    x.copy_(random_rows(64, 3072, torch.bfloat16, seed=5))
    codes.zero_()
    graph.replay()
    torch.cuda.synchronize()
    want_codes, want_scales = reference(x, 256)
    assert torch.equal(codes.cpu(), want_codes)
    assert torch.equal(scales.cpu(), want_scales)


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_equal(random_rows(8, 3072, torch.bfloat16).to("cuda:1"), 256)
