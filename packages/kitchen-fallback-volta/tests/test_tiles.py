"""Which tile the compiled GEMM takes, and how many rows it holds: plain arithmetic, on a CPU."""

import itertools
import re
from pathlib import Path

import pytest

from kitchen_fallback_volta import _gemm
from kitchen_fallback_volta.torch_path import WORKSPACE_BYTES

CSRC = Path(__file__).resolve().parents[1] / "csrc"
V100_SMS = 80


def test_tiles_are_those_of_the_kernels():
    """The same sizes, in the same order, as config.h and bindings.cpp have them; rows of stages in odd units of 16 bytes."""
    config = (CSRC / "int8_scaled_mm/config.h").read_text()
    bindings = (CSRC / "bindings.cpp").read_text()
    order = re.findall(r'tile_of<(\w+)>\("int8_scaled_mm_(\w+)"\)', bindings)
    assert [name for _, name in order] == [tile.name for tile in _gemm.TILES]
    for (struct, _), tile in zip(order, _gemm.TILES, strict=True):
        numbers = re.search(rf"using {struct} = TileConfig<([\d, ]+)>", config).group(1)
        warps_m, warps_n, warps_k, frags_m, frags_n, tile_k = map(int, numbers.split(","))
        assert (16 * warps_m * frags_m, 16 * warps_n * frags_n) == (tile.rows, tile.columns)
        shared = 2 * 2 * (tile_k + 8) * (tile.rows + tile.columns)
        assert shared * tile.resident <= 96 << 10, "what an SM of a V100 has"
        assert (tile_k + 8) // 8 % 2 == 1
        assert tile_k % (16 * warps_k) == 0


@pytest.mark.parametrize(("m", "n", "name"), [
    (1, 3072, "small"), (16, 12_288, "small"), (128, 3072, "medium"), (256, 3072, "large"), (4096, 3072, "large"),
    (8192, 24_576, "large"), (1, 8, "small"), (0, 3072, "large"),
])  # fmt: skip
def test_choice_on_a_v100(m, n, name):
    if m == 0:
        assert _gemm.choose_tile(m, n, V100_SMS) in range(len(_gemm.TILES)), "nothing is launched, any will do"
    else:
        assert _gemm.TILES[_gemm.choose_tile(m, n, V100_SMS)].name == name


@pytest.mark.parametrize("n", [768, 3072, 12_288, 24_576])
def test_more_rows_never_take_a_smaller_tile_on_a_v100(n):
    chosen = [_gemm.choose_tile(m, n, V100_SMS) for m in range(1, 301)]
    assert chosen == sorted(chosen)


@pytest.mark.parametrize("k", [1, 64, 3072, 12_288, 131_071])
@pytest.mark.parametrize("m", [1, 128, 1000, 4096, 8192, 1_000_003])
def test_rows_at_once(m, k):
    """Few blocks of nearly equal size: a last one of few rows would read the whole weight for them."""
    rows = _gemm.rows_at_once(m, k)
    assert rows * (k + 4) <= _gemm.OPERAND_BYTES < WORKSPACE_BYTES
    assert rows % 128 == 0
    blocks = -(-m // rows)
    most = _gemm.OPERAND_BYTES // (k + 4) // 128 * 128
    assert blocks == -(-m // most), "no more blocks than needed"
    assert blocks == 1 or m - (blocks - 1) * rows > rows - 128 * blocks


def test_every_choice_is_finite():
    for m, n, sms in itertools.product((1, 31, 33, 1000, 2**20), (1, 33, 4096, 2**20), (1, 80, 132)):
        assert _gemm.choose_tile(m, n, sms) in range(len(_gemm.TILES))
