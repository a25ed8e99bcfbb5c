// GEMM skeleton for mma.sync: D[M, N] = epilogue(A[M, K] * B[N, K]^T), a ring of shared-memory stages filled by cp.async.
// sm_80 and later, any size and alignment.
//
// A block computes one tile of D (or, with a split K, one piece of its sum). Every thread copies its chunks of a stage some
// stages ahead of the multiplication; while a warp multiplies one step of K it loads the fragments of the next.
//
// A format supplies
//   A, B       operands: Params; B(params, first_row, thread, warp_row, warp); kStageBytes; issue(stage, k_tile), which fills
//              a stage, by cp.async or plain stores; load(blocks, stage, step), which makes the fragments of 16 rows each of
//              it. What is stored may be packed, so long as load decodes it.
//   Mma        Accumulator, multiply(d, a, b0, b1)
//   Promotion  kTiles == 0: accumulate all of K. Otherwise every kTiles stages the accumulators are handed to
//              fold(total, partial, warp, tile, k_tile) and start again from zero
//   Epilogue   Params, Epilogue(params, split), and what store_tile calls
#pragma once

#include "kitchen/gemm/code_rows.h"
#include "kitchen/gemm/mma_tile.cuh"
#include "kitchen/ptx/cp_async_group.h"

namespace kitchen::gemm_sm80 {

using gemm::Accumulators;
using gemm::BlockTile;
using gemm::Warp;

// int8 codes, K contiguous. kAlways16: rows are aligned to 16 bytes; without it that is looked up, and other rows are read
// by words.
template <class Config, gemm::Side kSide, bool kAlways16>
struct CodeOperand {
  static constexpr int kRows = kSide == gemm::Side::kA ? Config::kTileM : Config::kTileN;
  using Rows = gemm::CodeRows<kRows, Config::kTileK, Config::kThreads>;
  using Params = gemm::CodeRowsParams;
  static constexpr int kStageBytes = kRows * Config::kTileK;

  Rows rows;
  gemm::CodeTile<Config, kSide> tile;

  __device__ __forceinline__ CodeOperand(const Params& p, int first_row, unsigned thread, int warp_row,
                                         const Warp<Config>& warp)
      : rows(p, first_row, thread), tile(warp_row, warp) {}

  __device__ __forceinline__ void issue(uint32_t stage, int k_tile) const {
    if (!rows.has_work()) return;
    const int k = k_tile * Config::kTileK + rows.chunk_k, valid = max(0, min(16, rows.params.K - k));
    const bool whole = rows.all_rows && (k_tile + 1) * Config::kTileK <= rows.params.K;
#pragma unroll
    for (int pass = 0; pass < Rows::kPasses; ++pass) {
      const uint32_t to = stage + rows.shared + Rows::offset_of(pass);
      if (!kAlways16 && !rows.params.aligned) {
        *static_cast<uint4*>(__cvta_shared_to_generic(to)) = rows.load(pass, k_tile);
      } else if (whole) {
        ptx::cp_async_16(to, rows.row_of(pass) + k);
      } else {
        ptx::cp_async_16_or_zeros(to, rows.row_of(pass) + k, rows.in_matrix(pass) ? valid : 0);
      }
    }
  }

  template <int kBlocks>
  __device__ __forceinline__ void load(uint32_t (&blocks)[kBlocks][4], uint32_t stage, int step) const {
    tile.load(blocks, stage, step);
  }
};

struct NoPromotion {
  static constexpr int kTiles = 0;
};

template <class Config, class A, class B>
struct Ring {
  static constexpr uint32_t kStageBytes = A::kStageBytes + B::kStageBytes;
  uint32_t first, end;

  __device__ __forceinline__ Ring(const uint8_t* shared, int stages)
      : first(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), end(first + stages * kStageBytes) {}
  __device__ __forceinline__ uint32_t after(uint32_t stage) const {
    return stage + kStageBytes == end ? first : stage + kStageBytes;
  }
};

template <class Config, class Mma, class Promotion, class A, class B, class Total>
__device__ __forceinline__ void multiply_tile(Accumulators<Config, Total>& total, const A& a, const B& b,
                                              const Ring<Config, A, B>& ring, int stages, const BlockTile& tile,
                                              const Warp<Config>& warp) {
  Accumulators<Config, typename Mma::Accumulator> partial = {};
  auto issue = [&](uint32_t stage, int k_tile) {
    if (k_tile < tile.k_tiles) {
      a.issue(stage, tile.first_k_tile + k_tile);
      b.issue(stage + A::kStageBytes, tile.first_k_tile + k_tile);
    }
    ptx::cp_async_commit();  // also where it is empty: groups are counted
  };
  uint32_t write = ring.first, read = ring.first;
  for (int s = 0; s < stages - 1; ++s, write = ring.after(write)) issue(write, s);
  ptx::cp_async_wait_group(stages - 2);
  __syncthreads();
  gemm::Fragments<Config> fragments[2];
  a.load(fragments[0].a, read, 0);
  b.load(fragments[0].b, read + A::kStageBytes, 0);
  for (int k_tile = 0; k_tile < tile.k_tiles; ++k_tile) {
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      if (step == Config::kSteps - 1) {  // the next stage has landed, and nobody reads this one any more
        ptx::cp_async_wait_group(stages - 2);
        __syncthreads();
        read = ring.after(read);
      }
      a.load(fragments[(step + 1) % 2].a, read, (step + 1) % Config::kSteps);  // beyond the last stage: loaded, not used
      b.load(fragments[(step + 1) % 2].b, read + A::kStageBytes, (step + 1) % Config::kSteps);
      if (step == 0) {
        issue(write, k_tile + stages - 1);
        write = ring.after(write);
      }
      if constexpr (Promotion::kTiles == 0) {
        fragments[step % 2].template multiply<Mma>(total);
      } else {
        fragments[step % 2].template multiply<Mma>(partial);
      }
    }
    if constexpr (Promotion::kTiles > 0) {
      if ((k_tile + 1) % Promotion::kTiles == 0 || k_tile + 1 == tile.k_tiles) {
        Promotion::fold(total, partial, warp, tile, k_tile);
      }
    }
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();
}

// Shared memory: params.stages stages, which the epilogue reuses.
template <class Config, class Mma, class A, class B, class Promotion, class Epilogue, class Total = typename Mma::Accumulator>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    gemm_kernel(const __grid_constant__ gemm::KernelParams<A, B, Epilogue> params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const auto tile = BlockTile::of<Config>(params.problem, blockIdx.x);
  const auto warp = Warp<Config>::of(threadIdx.x);
  const A a(params.a, tile.m, threadIdx.x, warp.m, warp);
  const B b(params.b, tile.n, threadIdx.x, warp.n, warp);
  Accumulators<Config, Total> total = {};
  const Ring<Config, A, B> ring(shared, params.stages);
  multiply_tile<Config, Mma, Promotion>(total, a, b, ring, params.stages, tile, warp);
  gemm::store_tile<Config, Total>(total, shared, warp, tile, Epilogue(params.epilogue, tile.split));
}

}  // namespace kitchen::gemm_sm80
