"""The tensorwise quantizer kernel on a GPU against the reference on the CPU, to the bit."""

from __future__ import annotations

import pytest
import torch

from kitchen_core import ops
from kitchen_core.reference.int8 import quantize_int8_tensorwise as reference
from kitchen_core.testing import FLOAT_DTYPES, assert_equal, expect_kernel, strided_copies

pytestmark = pytest.mark.gpu

# one value; less than a thread's 16; a thread, a block and one more or less; several steps of every block
SIZES = (1, 3, 15, 16, 17, 4095, 4096, 4097, 100_003, 132 * 6 * 4096 * 2 + 5)


def random_values(shape, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(3).to(dtype)


def check(x: torch.Tensor, scale: torch.Tensor | None = None, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale of the kernel for a CPU tensor, which must be the reference's."""
    with expect_kernel("quantize_int8_tensorwise", "int8/tensorwise"):
        codes, got_scale = ops.quantize_int8_tensorwise(x.cuda(), None if scale is None else scale.cuda(), seed)
    want_codes, want_scale = reference(x, scale, seed)
    assert_equal(got_scale.cpu(), want_scale, "scale")
    wrong = (codes.cpu() != want_codes).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} codes differ, first at {wrong[:4].tolist()}"
    assert codes.shape == x.shape
    assert codes.is_contiguous()
    return codes, got_scale


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(size, dtype):
    check(random_values(size, dtype, size))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_the_maximum_is_found_wherever_it_is(dtype):
    for size in (5, 4097, 70_001):
        for at in {0, 1, size // 2, size // 2 + 1, size - 2, size - 1}:
            for sign in (1, -1):
                x = random_values(size, dtype)
                x[at] = 1000 * sign
                codes, _ = check(x)
                assert codes[at].item() == 127 * sign


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("seed", [1, 12345, 2**40 + 3])
def test_stochastic_rounding(dtype, seed):
    for size in (7, 50_003):
        check(random_values(size, dtype), seed=seed)
    check(random_values(1000, dtype), torch.tensor(0.01), seed)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.03, 1e-3, 5.0, -0.1, 0.0, 1e-42, float("inf"), float("nan")])
def test_a_given_scale(dtype, scale):
    x = random_values(5000, dtype)
    x[7] = 0.0
    for shape in ((), (1,), (1, 1)):
        codes, got = check(x, torch.full(shape, scale))
        assert got.shape == ()
    if scale != scale or scale in (0.0, float("inf")):
        assert set(codes.unique().tolist()) <= ({-128, 0, 127} if scale == 0.0 else {0})


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan(bad):
    for dtype in FLOAT_DTYPES:
        for at in (0, 4096, 9999):
            x = random_values(10_000, dtype)
            x[at] = bad
            codes, scale = check(x)
            assert torch.isnan(scale)
            assert (codes == 0).all()
            check(x, torch.tensor(0.02))  # of a given scale only the value itself is saturated


def test_zeros_and_extreme_values():
    _, scale = check(torch.zeros(1000))
    assert scale.item() == torch.tensor(1e-30).item()
    for factor in (1e-45, 1e-38, 1e-30, 1e-28, 3e38):
        check(random_values(3000, torch.float32).clamp(-1, 1) * factor)
    check(random_values(3000, torch.float16) * 1e-6)  # subnormal halves


def test_shapes_and_strides():
    check(torch.tensor(3.0))
    check(torch.empty(0))
    check(torch.empty(3, 0, 5))
    for shape in ((7,), (3, 40), (2, 3, 40), (2, 3, 4, 10)):
        check(random_values(shape, torch.bfloat16))
    x = random_values((60, 100), torch.bfloat16)
    want = check(x)
    for layout, view in strided_copies(x.cuda()).items():
        with expect_kernel("quantize_int8_tensorwise", "int8/tensorwise"):
            got = ops.quantize_int8_tensorwise(view)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b, layout)
    check(x[3:4].expand(60, 100))
    check(x.t())


def test_repeated_runs_are_bit_equal_and_a_graph_replays():
    x = random_values((3000, 1111), torch.bfloat16).cuda()
    first = ops.quantize_int8_tensorwise(x)
    for _ in range(20):
        assert all(map(torch.equal, ops.quantize_int8_tensorwise(x), first))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        ops.quantize_int8_tensorwise(x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            codes, scale = ops.quantize_int8_tensorwise(x)
    x.copy_(random_values((3000, 1111), torch.bfloat16, 5) * 7)
    graph.replay()
    torch.cuda.synchronize()
    want_codes, want_scale = reference(x.cpu())
    assert_equal(codes.cpu(), want_codes)
    assert_equal(scale.cpu(), want_scale)


def test_more_than_2_to_31_elements():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free GPU memory")
    size = 2**31 + 4099
    x = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()
    x[size - 2] = 80.0
    for seed in (0, 9):
        codes, scale = ops.quantize_int8_tensorwise(x, seed=seed)
        assert_equal(scale.cpu(), torch.tensor(80.0) / torch.tensor(127.0))
        if seed == 0:
            for part in (slice(0, 5000), slice(2**31 - 100, size)):
                want, _ = reference(x[part].cpu(), scale.cpu())
                assert_equal(codes[part].cpu(), want)
    from kitchen_core.arithmetic import round_codes

    part = slice(2**31 - 100, size)  # the generator's counter goes on above 2^31
    want = round_codes(x[part].cpu().float() / scale.cpu(), -128, 127, 9, 2**31 - 100).to(torch.int8)
    assert_equal(codes[part].cpu(), want)


def test_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = random_values(1000, torch.bfloat16)
    codes, scale = ops.quantize_int8_tensorwise(x.to("cuda:1"))
    want = reference(x)
    assert_equal(codes.cpu(), want[0])
    assert_equal(scale.cpu(), want[1])
