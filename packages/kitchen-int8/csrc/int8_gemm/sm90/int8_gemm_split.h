// The launch of int8_gemm_split.cu; int8_gemm.cu checks the problem and chooses.
#pragma once

#include "int8_gemm/sm90/int8_gemm.h"

namespace kitchen::int8 {

constexpr int kSplitTileM = 128, kMostSplits = 4;

// tile_n: 64, 96 or 128. splits: 1 to kMostSplits, at most one a 128 bytes of K. early_stages: of rows of B, 128 bytes wide,
// that are read before the grid in front has ended.
void int8_gemm_split(const Int8GemmParams& p, int tile_n, int splits, int early_stages, cudaStream_t stream);

}  // namespace kitchen::int8
