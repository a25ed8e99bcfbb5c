// The rows of an int8 matrix with K contiguous, as the thread of a block sees them: which 16-byte chunks of a stage it fills, from
// where, and to where. For every size, pitch and alignment.
#pragma once

#include <cstdint>

#include "kitchen/copy/load_bytes.h"
#include "kitchen/smem/swizzle.h"

namespace kitchen::gemm {

struct CodeRowsParams {
  const uint8_t* data;
  int rows, K;
  int pitch;     // bytes from row to row
  bool aligned;  // data and pitch to 16 bytes
};

// kThreads threads fill tiles of kRows rows x kTileK bytes. What lies beyond the matrix is zeros, and is not read: one row
// repeated by every block would be read from one place of the L2 (M = 1 took 1.4 times as long as M = 16: H200, 2026-11-30).
template <int kRows, int kTileK, int kThreads>
struct CodeRows {
  using Params = CodeRowsParams;
  static constexpr int kChunksPerRow = kTileK / 16, kRowsAtOnce = kThreads / kChunksPerRow;
  static constexpr int kPasses = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  static_assert(kThreads % kChunksPerRow == 0 && (kPasses == 1 || kRowsAtOnce % 8 == 0),
                "passes differ by whole swizzles");
  static_assert(kRows % kRowsAtOnce == 0 || kPasses == 1, "threads without work only where one pass is enough");

  const Params& params;
  const uint8_t* row;  // the first of this thread's rows, perhaps beyond the matrix
  int rows_left;       // of the matrix from it on
  bool all_rows;       // the tile's rows are all in the matrix
  int chunk_k;         // first byte of this thread's chunk in a stage
  uint32_t shared;     // its place in a stage

  __device__ __forceinline__ CodeRows(const Params& p, int first_row, unsigned thread) : params(p) {
    const int tile_row = static_cast<int>(thread) / kChunksPerRow, chunk = static_cast<int>(thread) % kChunksPerRow;
    row = p.data + static_cast<int64_t>(first_row + tile_row) * p.pitch;
    rows_left = p.rows - first_row - tile_row;
    all_rows = first_row + kRows <= p.rows;
    chunk_k = 16 * chunk;
    shared = smem::swizzled_offset<kTileK>(tile_row, chunk);
  }

  // Whether this thread has a chunk in every pass: only in tiles with fewer chunks than threads it has not.
  __device__ __forceinline__ bool has_work() const {
    return kRows * kChunksPerRow >= kThreads || threadIdx.x < kRows * kChunksPerRow;
  }
  __device__ __forceinline__ bool in_matrix(int pass) const { return pass * kRowsAtOnce < rows_left; }
  __device__ __forceinline__ const uint8_t* row_of(int pass) const {
    return row + static_cast<int64_t>(pass * kRowsAtOnce) * params.pitch;
  }
  __device__ __forceinline__ static constexpr int offset_of(int pass) { return pass * kRowsAtOnce * kTileK; }

  __device__ __forceinline__ uint4 load(int pass, int k_tile) const {
    if (!in_matrix(pass)) return make_uint4(0, 0, 0, 0);
    const int k = k_tile * kTileK + chunk_k;
    return params.aligned ? copy::load_16_aligned(row_of(pass), k, params.K)
                          : copy::load_16_unaligned(row_of(pass), k, params.K);
  }
};

}  // namespace kitchen::gemm
