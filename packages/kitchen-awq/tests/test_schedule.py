"""csrc/awq_linear/sm90/schedule.cuh on the CPU: a part of a weight is cut as the whole is, and nobody waits in vain."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("clang++")
ROWS = 256  # of a tile
# Reads "stages tiles_m whole first N clusters" a line and prints each piece of the call: tile, stages, positions, block.
PROGRAM = r"""
#define __device__
#define __forceinline__ inline
#include <algorithm>
#include <cstdio>
using std::max;
using std::min;
#include "awq_linear/sm90/schedule.cuh"
using namespace kitchen::awq;

int main() {
  Division d;
  long whole, first, n, most;
  while (d = {}, std::scanf("%d %d %ld %ld %ld %ld", &d.stages, &d.tiles_m, &whole, &first, &n, &most) == 6) {
    const long missing = cut_tiles_of(d, first, n, ROWS, whole, most);
    const int blocks = std::min<int>(most, d.positions + d.tiles - d.cut_tiles);
    std::printf("%d %d %ld\n", d.tiles, d.positions, missing);
    for (int block = 0; block < blocks; ++block) {
      Pieces pieces(d, block, blocks);
      Piece p;
      while (pieces.next(p)) {
        const int last = p.begins_tile ? p.last_position : -1;
        std::printf("%d %d %d %d %d %d %d\n", p.row, p.token, p.first, p.count, p.position, last, block);
      }
    }
    std::printf("\n");
  }
}
"""


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """What the header says of many problems: (tiles, positions, missing rows) and the pieces by tile, of each."""
    if COMPILER is None:
        pytest.skip("no C++ compiler was found on PATH (g++ or clang++)")
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(PROGRAM.replace("ROWS", str(ROWS)))
    program = folder / "schedule"
    subprocess.run([COMPILER, "-std=c++17", "-O1", f"-I{CSRC}", "-o", program, folder / "schedule.cpp"], check=True)

    def run(problems):
        text = "".join(" ".join(map(str, problem)) + "\n" for problem in problems)
        printed = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout
        for answer in printed.strip().split("\n\n"):
            head, *lines = ([int(word) for word in line.split()] for line in answer.splitlines())
            tiles = {}
            for row, token, *piece in lines:
                tiles.setdefault((row, token), []).append(piece)
            yield head, tiles

    return run


def test_parts_are_cut_as_the_whole_is(divided):
    draw, problems = random.Random(0), []
    while len(problems) < 4000:
        stages, tiles_m, rows_of_tiles, most = (draw.randint(1, n) for n in (100, 5, 40, 70))
        whole, n = tiles_m * rows_of_tiles, (rows_of_tiles - 1) * ROWS + 8 * draw.randint(1, ROWS // 8)
        if whole % most == 0:
            continue  # whole rounds of tiles: none is cut
        first = 8 * draw.randrange(n // 8)
        part = 8 * draw.randint(1, (n - first) // 8)
        problems += [(stages, tiles_m, whole, 0, n, most), (stages, tiles_m, whole, first, part, most)]
    answers = list(divided(problems))
    assert len(answers) == len(problems)
    cut = 0
    for (stages, *_), (_, _, _, first, _, _), whole, part in zip(
        problems[::2], problems[1::2], *[iter(answers)] * 2, strict=True
    ):
        (all_tiles, _, missing), of_whole = whole
        (part_tiles, positions, missing_here), of_part = part
        assert (missing, missing_here) == (0, first % ROWS)
        assert (len(of_whole), len(of_part)) == (all_tiles, part_tiles)
        for (row, token), pieces in of_part.items():
            same = of_whole[row + first // ROWS, token]
            assert sorted(p[:2] for p in pieces) == sorted(p[:2] for p in same), "the same stages make a piece"
            assert sum(count for _, count, *_ in pieces) == stages
            begin = min(pieces)
            others = sorted(pieces)[1:]
            cut += bool(others)
            assert begin[3] - begin[2] == len(others) or not others
            assert [p[2] for p in others] == [begin[2] + 1 + i for i in range(len(others))], "added in their order"
            for other in others:
                assert other[4] < begin[4], "whoever is waited for has been started before"
                assert 0 <= other[2] < positions
                assert other[3] == -1
    assert cut > 10_000
