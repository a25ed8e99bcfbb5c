"""The CUDA quantizer of weights against the reference on the CPU, to the bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kitchen_core import ops, use
from kitchen_core.errors import UnsupportedError
from kitchen_core.testing import assert_equal, expect_kernel

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = ("qdata", "s_rel", "s_channel", "codebook", "correction")


def weights(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Gaussian, with outliers, rows of tiny and large values, a row of zeros and one of a constant."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=generator) * 0.02
    w[torch.rand(n, k, generator=generator) < 0.01] *= 8
    for row, factor in ((1, 1e-4), (2, 50.0), (3, 0.0)):
        if row < n:
            w[row] *= factor
    if n > 4:
        w[4] = 0.25
    return w.to(dtype)


def check(
    w: torch.Tensor, kernel: str | None = "w4a8/quantize", codebook: torch.Tensor | None = None, **options
) -> None:
    """``kernel`` None: whichever serves."""
    on_gpu = None if codebook is None else codebook.cuda()
    with nullcontext() if kernel is None else expect_kernel("quantize_w4a8_weight", kernel):
        got = ops.quantize_w4a8_weight(w.cuda(), codebook=on_gpu, **options)
    want = ops.quantize_w4a8_weight(w, codebook=codebook, **options)
    for name, mine, theirs in zip(NAMES, got, want, strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert (mine.dtype, mine.shape, mine.is_contiguous()) == (theirs.dtype, theirs.shape, True), name
        if theirs.dtype == torch.float8_e4m3fn:
            mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)
        assert_equal(mine.cpu(), theirs, f"{name}: {tuple(w.shape)} {w.dtype} {options}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "levels", "group"),
    [
        *((4, levels, g) for levels in ("codebook", "uniform", "asymmetric") for g in (4, 8, 16, 32, 128, 256)),
        *((6, "codebook", g) for g in (16, 32, 64, 128, 512)),
    ],
)
def test_every_kind_of_level_and_group(bits, levels, group, dtype):
    for i, (n, k) in enumerate(((6, 512), (5, 1536), (3, 5120))):
        check(weights(n, k, dtype, seed=i), bits=bits, levels=levels, group_size=group)


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_search_seeds_and_scale_dtypes(bits, scale_dtype, seed):
    for search in (False, True):
        for levels in ("codebook", "uniform") if bits == 4 else ("codebook",):
            check(
                weights(7, 768, torch.bfloat16, seed=3), bits=bits, levels=levels, scale_dtype=scale_dtype, seed=seed,
                scale_search=search,
            )  # fmt: skip


@pytest.mark.parametrize(("k", "rotation"), [(96, 0), (96, 16), (192, 64), (512, 4), (4096, 1024), (8192, 4096)])
def test_every_rotation(k, rotation):
    for bits in (4, 6):
        check(weights(6, k, torch.float16), bits=bits, convrot_groupsize=rotation)


@pytest.mark.parametrize("scale_dtype", [torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize(("k", "group"), [(128, 64), (192, 32), (384, 128), (640, 64), (1152, 128)])
def test_rows_that_end_within_a_warp(k, group, scale_dtype):
    """Lanes beyond the row's last unit have no word in the row's scale: many rows, since few would show it."""
    for bits, levels in ((4, "codebook"), (4, "uniform"), (4, "asymmetric"), (6, "codebook")):
        check(
            weights(200, k, torch.float32, seed=5), bits=bits, levels=levels, group_size=group, convrot_groupsize=0,
            scale_dtype=scale_dtype, scale_search=False,
        )  # fmt: skip


def test_codebooks_that_do_not_ascend():
    table = torch.randn(16, generator=torch.Generator().manual_seed(1))
    table[3] = table[9]
    for dtype in DTYPES:
        check(weights(6, 512, torch.float32), codebook=table.to(dtype))


def test_views_empty_weights_and_what_is_refused():
    w = weights(8, 1024, torch.bfloat16)
    check(w[::2])
    check(w[:, 1:513])
    check(w.t().contiguous().t())
    got = ops.quantize_w4a8_weight(w[:0].cuda(), codebook=torch.linspace(-1, 1, 16).cuda())
    assert got.qdata.shape == (0, 512)
    check(weights(3, 96, torch.bfloat16), kernel=None, group_size=48, convrot_groupsize=16)  # by the reference
    with use("w4a8/quantize"), pytest.raises(UnsupportedError, match="takes groups of 4, 8, 16"):
        ops.quantize_w4a8_weight(w[:, :96].cuda(), group_size=48, convrot_groupsize=16)


def test_a_graph_replays_with_a_changed_weight():
    w, other = weights(40, 512, torch.bfloat16).cuda(), weights(40, 512, torch.bfloat16, seed=5).cuda()
    table = torch.linspace(-1, 1, 16, device="cuda")
    ops.quantize_w4a8_weight(w, codebook=table, seed=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = ops.quantize_w4a8_weight(w, codebook=table, seed=3)
    w.copy_(other)
    graph.replay()
    for mine, theirs in zip(made[:3], ops.quantize_w4a8_weight(other, codebook=table, seed=3)[:3], strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
