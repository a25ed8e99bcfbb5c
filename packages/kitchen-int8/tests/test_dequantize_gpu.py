"""The dequantizer kernels on a GPU against the reference on the CPU, to the bit."""

from __future__ import annotations

import pytest
import torch

from kitchen_core import ops
from kitchen_core.reference import int8 as reference
from kitchen_core.testing import FLOAT_DTYPES, assert_equal, expect_kernel

pytestmark = pytest.mark.gpu

KERNEL = "int8/dequantize"
# (K, group): without rotation, aligned to 16 bytes, to 8, to 4 and not; then every group, rows of part of a warp and of several
CASES = (
    (1, 0), (3, 0), (4, 0), (8, 0), (100, 0), (255, 0), (384, 0), (1000, 0), (3072, 0), (22_473, 0),
    (4, 4), (20, 4), (32, 4), (16, 16), (144, 16), (64, 64), (384, 64), (256, 256), (768, 256), (5120, 256), (12_288, 256),
    (1024, 1024), (5120, 1024), (4096, 4096), (12_288, 4096),
)  # fmt: skip


def random_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def random_scale(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(3).exp_()


def check(codes: torch.Tensor, scale: torch.Tensor, out_dtype=None, group: int = 0) -> torch.Tensor:
    """The kernel's result for CPU tensors, which must be the reference's."""
    with expect_kernel("dequantize_int8", KERNEL):
        out = ops.dequantize_int8(codes.cuda(), scale.cuda(), out_dtype, group)
    assert_equal(out.cpu(), reference.dequantize_int8(codes, scale, out_dtype, group), f"{tuple(codes.shape)} {group}")
    assert out.is_contiguous()
    return out


def check_embedding(codes, scale, indices, out_dtype=None, group=0) -> torch.Tensor:
    with expect_kernel("dequantize_int8_embedding", KERNEL):
        out = ops.dequantize_int8_embedding(codes.cuda(), scale.cuda(), indices.cuda(), out_dtype, group)
    want = reference.dequantize_int8_embedding(codes, scale, indices, out_dtype, group)
    assert_equal(out.cpu(), want, f"{tuple(codes.shape)} {tuple(indices.shape)} {group}")
    return out


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("K", "group"), CASES)
def test_shapes_and_groups(K, group, dtype):
    for M in (1, 2, 17, 150):
        check(random_codes(M, K, seed=M), random_scale(M, 1), dtype, group)
    check(random_codes(9, K), random_scale(1), dtype, group)


def test_many_rows_of_little_width():
    for K, group in ((16, 16), (384, 0), (384, 64), (1, 0)):
        check(random_codes(70_000, K), random_scale(70_000), torch.bfloat16, group)


def test_large_weight_walks_over_all_tiles():
    for group in (0, 256):
        check(random_codes(3100, 3072), random_scale(3100, 1), torch.bfloat16, group)


@pytest.mark.parametrize("group", [0, 64, 256])
def test_strides(group):
    base, scale = random_codes(40, 2000), random_scale(20, 1)
    wide = random_scale(20, 3)
    views = {
        "row pitch": base[:20, :768], "offset 16": base[:20, 16:784], "offset 8": base[:20, 8:776],
        "offset 4": base[:20, 4:772], "offset 1": base[:20, 1:769], "every second row": base[::2, :768],
        "every second column": base[:20, :1536:2], "expanded": base[3:4, :768].expand(20, 768),
        "transposed": random_codes(768, 20).t(),
    }  # fmt: skip
    for name, codes in views.items():
        for dtype in (torch.float32, torch.bfloat16):
            with expect_kernel("dequantize_int8", KERNEL):
                device = torch.empty_strided(codes.shape, codes.stride(), dtype=torch.int8, device="cuda")
                if name != "expanded":
                    device.copy_(codes)
                else:
                    device = codes[:1].cuda().expand(20, 768)
                out = ops.dequantize_int8(device, scale.cuda(), dtype, group)
            assert_equal(out.cpu(), reference.dequantize_int8(codes, scale, dtype, group), name)
    space = random_codes(20 * 2000 + 64).cuda()  # a pointer and a pitch that no vector load takes
    for offset in (0, 1, 4, 8, 16):
        codes = space[offset : offset + 20 * 1001].view(20, 1001)[:, :768]
        out = ops.dequantize_int8(codes, wide.cuda()[:, 1:2], torch.float16, group)
        assert_equal(out.cpu(), reference.dequantize_int8(codes.cpu(), wide[:, 1:2], torch.float16, group))


def test_ranks_and_empty():
    for shape in ((64,), (5, 64), (2, 3, 64), (2, 3, 4, 64)):
        lead = shape[:-1]
        for group in (0, 16):
            check(random_codes(*shape), random_scale(*lead, 1), torch.bfloat16, group)
    assert check(random_codes(0, 64), random_scale(0, 1)).shape == (0, 64)
    assert check(random_codes(2, 0, 64), random_scale(2, 0, 1), None, 64).shape == (2, 0, 64)


def test_scales_of_every_kind():
    codes = random_codes(6, 512)
    scale = torch.tensor([0.0, 1e-30, float("inf"), float("nan"), -2.0, 3e36]).reshape(6, 1)
    for group in (0, 256):
        for dtype in FLOAT_DTYPES:
            check(codes, scale, dtype, group)


def test_one_hot_codes_read_the_rotation_out():
    for group in (0, 16, 256):
        check(torch.eye(768, dtype=torch.int8) * 100, torch.ones(1), torch.float32, group)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("K", "group"), [(64, 0), (100, 0), (101, 0), (384, 64), (3072, 256), (4096, 4096)])
def test_embedding_rows(K, group, dtype):
    codes, scale = random_codes(500, K), random_scale(500, 1)
    generator = torch.Generator().manual_seed(3)
    for shape in ((), (1,), (77,), (2, 40), (2, 3, 5)):
        indices = torch.randint(-500, 500, shape, generator=generator)
        for kind in (torch.int64, torch.int32):
            out = check_embedding(codes, scale, indices.to(kind), dtype, group)
            assert out.shape == (*shape, K)
    check_embedding(codes, random_scale(1), torch.arange(499, -1, -1), dtype, group)
    check_embedding(codes, scale, torch.zeros(0, 4, dtype=torch.int64), dtype, group)


def test_embedding_views():
    codes, scale = random_codes(100, 1024).cuda(), random_scale(100).cuda()
    indices = torch.arange(100).cuda()
    for view in (codes[:, :512], codes[:, 1:513], codes[::2, 16:528]):
        some = indices[: view.shape[0]].flip(0)
        for wanted in (some, some.reshape(-1, 2).t(), some[3].expand(7)):
            out = ops.dequantize_int8_embedding(view, scale[: view.shape[0]], wanted, torch.bfloat16, 256)
            want = reference.dequantize_int8_embedding(
                view.cpu(), scale[: view.shape[0]].cpu(), wanted.cpu(), torch.bfloat16, 256
            )
            assert_equal(out.cpu(), want)


@pytest.mark.parametrize(("K", "group"), [(512, 0), (512, 256), (101, 0)])
def test_an_index_out_of_range_gives_a_row_of_nan(K, group):
    codes, scale = random_codes(10, K).cuda(), random_scale(10).cuda()
    indices = torch.tensor([3, 10, -11, 9, 2**40, -(2**40), -10]).cuda()
    out = ops.dequantize_int8_embedding(codes, scale, indices, torch.bfloat16, group)
    bad = [1, 2, 4, 5]
    assert torch.isnan(out[bad]).all()
    good = [0, 3, 6]
    assert_equal(out[good], ops.dequantize_int8_embedding(codes, scale, indices[good], torch.bfloat16, group))
    none = ops.dequantize_int8_embedding(codes[:0], scale[:0], indices[:2], torch.bfloat16, group)
    assert torch.isnan(none).all()
    assert none.shape == (2, K)


@pytest.mark.parametrize("group", [0, 256])
def test_more_than_2_to_31_results(group):
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    M, K = 2**31 // 12_288 + 100, 12_288
    codes = torch.randint(-128, 128, (M, K), dtype=torch.int8, device="cuda")
    scale = torch.rand(M, 1, device="cuda")
    with expect_kernel("dequantize_int8", KERNEL):
        out = ops.dequantize_int8(codes, scale, torch.bfloat16, group)
    for rows in (slice(0, 3), slice(M // 2, M // 2 + 3), slice(M - 3, M)):
        want = reference.dequantize_int8(codes[rows].cpu(), scale[rows].cpu(), torch.bfloat16, group)
        assert_equal(out[rows].cpu(), want)
    indices = torch.tensor([0, M - 1, -1, -M, M // 2], device="cuda")  # rows beyond 2^31 bytes
    picked = ops.dequantize_int8_embedding(codes, scale, indices, torch.bfloat16, group)
    assert_equal(picked, out[indices])


def test_repeated_runs_are_bit_equal_and_a_graph_replays():
    codes, scale = random_codes(3000, 1024).cuda(), random_scale(3000, 1).cuda()
    first = ops.dequantize_int8(codes, scale, torch.bfloat16, 256)
    for _ in range(20):
        assert torch.equal(ops.dequantize_int8(codes, scale, torch.bfloat16, 256), first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        ops.dequantize_int8(codes, scale, torch.bfloat16, 256)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = ops.dequantize_int8(codes, scale, torch.bfloat16, 256)
    codes.copy_(random_codes(3000, 1024, seed=8))
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(out.cpu(), reference.dequantize_int8(codes.cpu(), scale.cpu(), torch.bfloat16, 256))


def test_round_trip_of_a_weight_stays_within_half_a_step():
    weight = torch.randn(300, 3072, dtype=torch.bfloat16, device="cuda")
    with expect_kernel("quantize_int8_convrot_weight", "int8/rowwise"):
        codes, scale = ops.quantize_int8_convrot_weight(weight, 256)
    back = ops.dequantize_int8(codes, scale, torch.float32, 256)
    # half a step a column in the rotated basis; the rotation keeps the norm of each block of 256
    steps = (back - weight.float()).norm(dim=1) / scale.squeeze(1)
    assert (steps <= 0.5 * 3072**0.5 * (1 + 2.0**-10)).all()
