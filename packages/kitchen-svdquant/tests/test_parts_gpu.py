"""Rows of a weight as a weight of its own, told what they are a part of: the bits of the whole, on every kernel."""

import pytest
import torch

from kitchen_core import explain, ops, use
from kitchen_core.registry import EAGER
from kitchen_core.testing import assert_equal
from kitchen_svdquant import _hopper

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
ROWS = (1, 8, 16, 17, 33, 64, 65, 128, 200, 256, 300, 384, 512, 700, 1024, 1500, 4096)


def layer(n, k, rank, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(n + k)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    codes = torch.randint(-128, 128, (n, k // 2), generator=generator, dtype=torch.int8, device="cuda")
    scales = (randn(k // 64, n).abs() * 0.05).to(dtype)
    smooth, down, up, bias = randn(k).abs() + 0.5, randn(k, rank) * 0.1, randn(n, rank), randn(n)
    return codes, scales, *(t.to(dtype) for t in (smooth, down, up, bias))


def part_of(weight, rows):
    codes, scales, smooth, down, up, bias = weight
    return codes[rows].contiguous(), scales[:, rows].contiguous(), smooth, down, up[rows].contiguous(), bias[rows]


def cuts(n):
    """Parts of equal and of other sizes, multiples of 8."""
    yield [n // 2] * 2
    yield [n // 4] * 4
    yield [8, n // 3 // 8 * 8, n - 8 - n // 3 // 8 * 8]


@pytest.mark.parametrize(("n", "k"), [(3072, 3072), (12288, 3072), (3072, 12288), (1032, 1088)], ids=str)
@torch.no_grad()
def test_parts_have_the_bits_of_the_whole(n, k):
    weight = layer(n, k, 32)
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").to(BF16)
        whole = ops.svdquant_linear(x, *weight)
        for sizes in cuts(n):
            first = 0
            for size in sizes:
                rows = slice(first, first + size)
                y = ops.svdquant_linear(x, *part_of(weight, rows), part_first=first, part_of=n)
                assert_equal(y, whole[:, rows], f"M={m}, rows {first} to {first + size} of {n}")
                first += size


@pytest.mark.parametrize("chunk_bytes", [1, _hopper.CHUNK_BYTES])
@torch.no_grad()
def test_parts_on_every_kernel(monkeypatch, chunk_bytes):
    """Chunks of 384 columns end within parts, and are multiplied by plans of their own."""
    monkeypatch.setattr(_hopper, "CHUNK_BYTES", chunk_bytes)
    n, k = 1400, 2112
    codes, scales, smooth, down, up, bias = weight = layer(n, k, 40)
    ran = set()
    for m in (3, 64, 100, 300):
        x = torch.randn(m, k, device="cuda").to(BF16)
        quantized = ops.quantize_svdquant_w4a4(x, smooth, down)
        residual = torch.randn(m, n, device="cuda").to(BF16)

        def multiplied(rows, m=m, quantized=quantized, residual=residual, **part):
            (a, ascales, low), out = quantized, []
            w, ws, _, _, u, b = part_of(weight, rows)
            added = residual[:, rows]
            for dtype in (BF16, torch.float32):
                out.append(ops.scaled_mm_svdquant_w4a4(a, w, ascales, ws, low, u, b, False, dtype, added, **part))
            return out

        arguments = quantized[0], codes, quantized[1], scales, quantized[2], up, bias
        for candidate in explain("scaled_mm_svdquant_w4a4", *arguments).candidates:
            if candidate.reason is not None or candidate.kernel.id == EAGER:
                continue
            ran.add(candidate.kernel.id)
            with use(candidate.kernel.id):
                whole = multiplied(slice(0, n))
                for first, end in ((0, 8), (8, 704), (704, n)):
                    made = multiplied(slice(first, end), part_first=first, part_of=n)
                    for y, all_of_it in zip(made, whole, strict=True):
                        assert_equal(y, all_of_it[:, first:end], f"{candidate.kernel.id} M={m}, rows {first} to {end}")
    assert len(ran) >= 2
