// The int32 sums of the kernels for few tokens: of a tile of 16 * warps_n outputs, added up over the warps of a block in shared
// memory and over the blocks of a cluster, which have a piece of K each, through distributed shared memory; then scaled and
// stored. Sums are exact: any order gives the same bits.
#pragma once

#include <cstdint>

#include "kitchen/ptx/receive_phase.h"
#include "kitchen/ptx/store_async.h"
#include "w4a8_scaled_mm/smxx/scale_epilogue.cuh"

namespace kitchen::w4a8 {

constexpr int kTileRows = 16;   // outputs of a warp: the m side of an MMA
constexpr int kTokenBlock = 8;  // tokens of an MMA
constexpr int kSumPad = 4;      // words between the sums of two tokens: lanes of a fragment meet no bank twice

// Counts are powers of two, with their logarithms.
struct TileShape {
  int M;
  int splits, splits_log2;    // pieces of K
  int warps_n, warps_n_log2;  // side by side along N

  __host__ __device__ int outputs() const { return kTileRows * warps_n; }
  __host__ __device__ int pitch() const { return outputs() + kSumPad; }  // words between the sums of two tokens
};

// Who finishes which four neighbouring outputs ("quads") of which token: block `rank` of the cluster has every splits-th run of
// up to 8 quads.
struct Ownership {
  int per_token, per_token_log2, together_log2, quads, splits_log2;

  __device__ __forceinline__ explicit Ownership(const TileShape& t)
      : per_token(4 * t.warps_n),
        per_token_log2(2 + t.warps_n_log2),
        together_log2(min(2 + t.warps_n_log2, 3)),
        quads(t.M * per_token),
        splits_log2(t.splits_log2) {}
  __device__ __forceinline__ unsigned owner_of(int quad) const { return quad >> together_log2 & ((1 << splits_log2) - 1); }
  __device__ __forceinline__ int slot_of(int quad) const {
    return (quad >> together_log2 >> splits_log2 << together_log2) + (quad & ((1 << together_log2) - 1));
  }
  __device__ __forceinline__ int quad_of(int slot, unsigned rank) const {
    return (((slot >> together_log2 << splits_log2) + static_cast<int>(rank)) << together_log2) +
           (slot & ((1 << together_log2) - 1));
  }
  // Quads that block `rank` finishes; runs are whole, since per_token is a multiple of a run.
  __device__ __forceinline__ int count_of(unsigned rank) const {
    return (((quads >> together_log2) + (1 << splits_log2) - 1 - static_cast<int>(rank)) >> splits_log2) << together_log2;
  }
  // That come to block `rank` from the others of the cluster for a tile.
  __device__ __forceinline__ uint32_t bytes_for(unsigned rank) const {
    return static_cast<uint32_t>(count_of(rank) * ((1 << splits_log2) - 1)) * sizeof(int4);
  }
};

// A warp's fragments (m16n8) of `kTokenBlocks` blocks of tokens into the sums of the tile; value(block, element of the fragment).
template <int kTokenBlocks, class Value>
__device__ __forceinline__ void add_fragments(int* sums, const TileShape& t, int warp_n, const Value& value) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pitch = t.pitch();
  int* const mine = sums + warp_n * kTileRows + lane / 4;
#pragma unroll
  for (int j = 0; j < kTokenBlocks; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = kTokenBlock * j + 2 * (lane % 4) + e % 2;
      if (token < t.M) atomicAdd(mine + token * pitch + 8 * (e / 2), value(j, e));
    }
  }
}

__device__ __forceinline__ void finish_quad(const EpilogueParams& p, const TileShape& t, const float* token_scales,
                                            const float2* columns, int first_row, int quad, const int4& sum) {
  const int per_token_log2 = 2 + t.warps_n_log2, m = quad >> per_token_log2,
            column = (quad & ((1 << per_token_log2) - 1)) * 4;
  const float a_scale = token_scales[m];
  const int acc[4] = {sum.x, sum.y, sum.z, sum.w};
  float y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) y[e] = scale(acc[e], a_scale, columns[column + e].x, columns[column + e].y);
  finish_four(p, m, first_row + column, y);
}

// Where the sums of a tile lie in shared memory, and what they are finished with.
struct TileMemory {
  int* sums;                  // [M][pitch]; zero again afterwards
  const float* token_scales;  // [M]
  const float2* columns;      // b_scale and bias of the tile's outputs
  int4* received;             // what comes from the other blocks of the cluster, by quad and block
  uint64_t* barrier;          // of store_async.h: it has come
};

// Bytes of TileMemory::received, for `quads` of a tile.
constexpr int64_t received_bytes(int64_t quads, int splits) {
  return (quads + 8 * splits - 1) / (8 * splits) * 8 * (splits - 1) * 16;
}

// By all threads, behind a barrier: every quad of a tile, over a cluster sent to the block that adds them up; then finished.
// `more(m)` is added to this block's sums of token m.
template <int kThreads, class More>
__device__ __forceinline__ void finish_tile(const EpilogueParams& p, const TileShape& t, const TileMemory& memory,
                                            uint32_t parity, int tile, unsigned rank, const More& more) {
  const Ownership ownership(t);
  const int pitch = t.pitch();
  const auto take = [&](int quad) {
    const int m = quad >> ownership.per_token_log2, extra = more(m);
    int4* const at = reinterpret_cast<int4*>(memory.sums + m * pitch + (quad & (ownership.per_token - 1)) * 4);
    const int4 sum = *at;
    *at = make_int4(0, 0, 0, 0);
    return make_int4(sum.x + extra, sum.y + extra, sum.z + extra, sum.w + extra);
  };
  if (t.splits > 1) {
#pragma unroll 1
    for (int quad = threadIdx.x; quad < ownership.quads; quad += kThreads) {
      const unsigned owner = ownership.owner_of(quad), others_before = rank < owner ? rank : rank - 1;
      if (owner == rank) continue;
      ptx::store_async_16(memory.received + ownership.slot_of(quad) * (t.splits - 1) + others_before, memory.barrier, owner,
                          take(quad));
    }
    ptx::receive_wait_phase(memory.barrier, parity);
  }
  const int count = ownership.count_of(rank);
#pragma unroll 1
  for (int slot = threadIdx.x; slot < count; slot += kThreads) {
    const int quad = ownership.quad_of(slot, rank);
    int4 sum = take(quad);
#pragma unroll 1
    for (int s = 0; s < t.splits - 1; ++s) {
      const int4 other = memory.received[slot * (t.splits - 1) + s];
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    finish_quad(p, t, memory.token_scales, memory.columns, tile * t.outputs(), quad, sum);
  }
}

}  // namespace kitchen::w4a8
