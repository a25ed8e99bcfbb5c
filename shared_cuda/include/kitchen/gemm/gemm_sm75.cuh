// GEMM skeleton for Turing: as gemm_sm80.cuh, for chips without cp.async. A thread loads its chunks of the next stage into
// registers, multiplies this stage, and then stores them into the other of two stages. int8 operands only.
#pragma once

#include "kitchen/gemm/code_rows.h"
#include "kitchen/gemm/mma_tile.cuh"

namespace kitchen::gemm_sm75 {

using gemm::Accumulators;
using gemm::BlockTile;
using gemm::Warp;

constexpr int kStages = 2;

template <class Config, gemm::Side kSide>
struct CodeOperand {
  static constexpr int kRows = kSide == gemm::Side::kA ? Config::kTileM : Config::kTileN;
  using Rows = gemm::CodeRows<kRows, Config::kTileK, Config::kThreads>;
  using Params = gemm::CodeRowsParams;
  static constexpr int kStageBytes = kRows * Config::kTileK;

  Rows rows;
  gemm::CodeTile<Config, kSide> tile;
  uint4 staged[Rows::kPasses];

  __device__ __forceinline__ CodeOperand(const Params& p, int first_row, unsigned thread, int warp_row,
                                         const Warp<Config>& warp)
      : rows(p, first_row, thread), tile(warp_row, warp) {}

  __device__ __forceinline__ void fetch(int k_tile) {
    if (!rows.has_work()) return;
    if (rows.params.aligned && rows.all_rows && (k_tile + 1) * Config::kTileK <= rows.params.K) {
      const int k = k_tile * Config::kTileK + rows.chunk_k;
#pragma unroll
      for (int pass = 0; pass < Rows::kPasses; ++pass) {
        staged[pass] = *reinterpret_cast<const uint4*>(rows.row_of(pass) + k);
      }
      return;
    }
#pragma unroll
    for (int pass = 0; pass < Rows::kPasses; ++pass) staged[pass] = rows.load(pass, k_tile);
  }

  __device__ __forceinline__ void put(uint8_t* stage) const {
    if (!rows.has_work()) return;
#pragma unroll
    for (int pass = 0; pass < Rows::kPasses; ++pass) {
      *reinterpret_cast<uint4*>(stage + rows.shared + Rows::offset_of(pass)) = staged[pass];
    }
  }
};

template <class Config, class Mma, class A, class B>
__device__ __forceinline__ void multiply_tile(Accumulators<Config, int>& acc, A& a, B& b, uint8_t* shared,
                                              const BlockTile& tile) {
  constexpr int kStageBytes = A::kStageBytes + B::kStageBytes;
  auto fetch = [&](int k_tile) {
    a.fetch(tile.first_k_tile + k_tile);
    b.fetch(tile.first_k_tile + k_tile);
  };
  auto put = [&](int k_tile) {
    uint8_t* const stage = shared + k_tile % kStages * kStageBytes;
    a.put(stage);
    b.put(stage + A::kStageBytes);
    __syncthreads();
  };
  if (tile.k_tiles <= 0) return;
  fetch(0);
  put(0);
  for (int k_tile = 0; k_tile < tile.k_tiles; ++k_tile) {
    const bool more = k_tile + 1 < tile.k_tiles;
    if (more) fetch(k_tile + 1);
    const uint32_t stage = static_cast<uint32_t>(__cvta_generic_to_shared(shared + k_tile % kStages * kStageBytes));
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      gemm::Fragments<Config> fragments;
      a.tile.load(fragments.a, stage, step);
      b.tile.load(fragments.b, stage + A::kStageBytes, step);
      fragments.template multiply<Mma>(acc);
    }
    if (more) put(k_tile + 1);  // the stage it fills was read before the last barrier
  }
  __syncthreads();
}

template <class Config, class Mma, class A, class B, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    gemm_kernel(const __grid_constant__ gemm::KernelParams<A, B, Epilogue> params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const auto tile = BlockTile::of<Config>(params.problem, blockIdx.x);
  const auto warp = Warp<Config>::of(threadIdx.x);
  A a(params.a, tile.m, threadIdx.x, warp.m, warp);
  B b(params.b, tile.n, threadIdx.x, warp.n, warp);
  Accumulators<Config, int> acc = {};
  multiply_tile<Config, Mma>(acc, a, b, shared, tile);
  gemm::store_tile<Config, int>(acc, shared, warp, tile, Epilogue(params.epilogue, tile.split));
}

}  // namespace kitchen::gemm_sm75
