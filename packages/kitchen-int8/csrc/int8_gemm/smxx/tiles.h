// The tiles that are compiled, for the kernels and for choose_plan.
#pragma once

#include "int8_gemm/portable.h"

namespace kitchen::int8::portable {

struct TileShape {
  int m, n, k;          // of a block; k in bytes, a stage
  int warp_m, warp_n, warps_k;
  int blocks_per_sm;    // that registers are kept for
  bool any_alignment;   // has an instance for rows that are not aligned to 16 bytes

  constexpr int threads() const { return 32 * (m / warp_m) * (n / warp_n) * warps_k; }
  constexpr int stage_bytes() const { return (m + n) * k; }
};

constexpr TileShape kTilesSm80[] = {
    {256, 128, 64, 64, 64, 1, 1, false},
    {128, 128, 64, 64, 64, 1, 2, true},
    {64, 128, 64, 32, 64, 1, 3, false},
    {64, 64, 128, 32, 32, 1, 4, true},
    {32, 64, 128, 32, 32, 2, 4, false},
    {16, 128, 128, 16, 32, 2, 2, false},
    {16, 64, 256, 16, 32, 4, 2, true},
    {16, 32, 256, 16, 16, 4, 2, false},
    {128, 128, 128, 64, 64, 1, 2, false},
};
constexpr TileShape kTilesSm75[] = {
    {128, 128, 64, 64, 64, 1, 2, true},
    {64, 64, 64, 32, 32, 1, 3, true},
    {16, 64, 128, 16, 32, 2, 4, true},
};

struct TileTable {
  const TileShape* tiles;
  int count, least_stages, most_stages;
  int reserved_smem;  // bytes that a resident block takes besides its own
};
inline TileTable table_of(Path path) {
  if (path == Path::kSm75) return {kTilesSm75, sizeof(kTilesSm75) / sizeof(TileShape), 2, 2, 0};
  return {kTilesSm80, sizeof(kTilesSm80) / sizeof(TileShape), 2, 8, 1024};
}

}  // namespace kitchen::int8::portable
