// Hopper GEMM skeleton: D[M, N] = epilogue(A[M, K] * B[N, K]^T), persistent and warp-specialised.
//
// A block has three warpgroups. One thread of the first feeds a ring of shared-memory stages with bulk tensor
// copies (128 bytes of K a stage); the other two multiply with wgmma and run the epilogue. Blocks stay
// resident and walk over output tiles, so the copies for the next tile run during the epilogue of this one.
//
// A format supplies
//   Mma        Element, Accumulator, kStepK (elements of K an instruction takes), Instruction<N>::mma(d, a, b, ..)
//   Epilogue   one object a consumer warp: Params, kStagingBytes of shared memory, Rows load_rows(row) before the main
//              loop, store(accumulators, rows, columns, row, column) after it. It is handed 16 rows x kTileN columns
//              of each block of 64 rows, in wgmma's register layout. Columns, one a tile, is filled by a producer
//              warp while the tile multiplies: load_columns(params, columns, row, column)
//   Promotion  kSteps == 0: accumulate all of K in the instruction's accumulators. Otherwise every kSteps
//              instructions are summed from zero, and add(total, partial, origin, interval) folds them in
// and picks a TileConfig. Clusters of two blocks share the operand that they have in common by multicast.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "kitchen/gemm/gemm_sm90_tiles.cuh"
#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma.h"

namespace kitchen::gemm_sm90 {

constexpr uint16_t kBothBlocks = 3;  // of a pair, as the mask of a multicast

// An epilogue may take, after its staging memory, two barriers of its warp.
template <class Epilogue>
constexpr bool kWantsBarriers =
    std::is_constructible<Epilogue, const typename Epilogue::Params&, uint8_t*, uint64_t*>::value;

// A stage is filled in two halves, because the rows of B may be asked for earlier than those of A. `boxes` of A have rows.
template <class Config, class Shared>
__device__ __forceinline__ void load_a(Shared& shared, int stage, const CUtensorMap& a, int k, int row, int rank_n,
                                       int boxes) {
  if (rank_n >= boxes) return;
  uint64_t* full = &shared.full[stage];
  if constexpr (Config::kClusterN > 1) {
    const int slice = rank_n * Config::kBoxM;
    ptx::tma_load_multicast(&shared.a[stage][slice * kStageBytesK], &a, k, row + slice, full, kBothBlocks);
  } else {
    ptx::tma_load(shared.a[stage], &a, k, row, full);
  }
}

template <class Config, class Shared>
__device__ __forceinline__ void load_b(Shared& shared, int stage, const CUtensorMap& b, int k, int column, int second,
                                       int rank_m) {
  uint64_t* full = &shared.full[stage];
  // In a dual tile the second half of the rows comes from elsewhere in B.
  const int jump = Config::kDualB ? second - Config::kTileOutN : 0;
  if constexpr (Config::kClusterM > 1) {
    const int slice = rank_m * Config::kBoxN;
    const int b_row = column + slice + (rank_m > 0 ? jump : 0);
    ptx::tma_load_multicast(&shared.b[stage][slice * kStageBytesK], &b, k, b_row, full, kBothBlocks);
  } else {
    ptx::tma_load(shared.b[stage], &b, k, column, full);
    if constexpr (Config::kDualB) {
      ptx::tma_load(&shared.b[stage][Config::kBytesB / 2], &b, k, column + Config::kBoxN + jump, full);
    }
  }
}

// The first row and column of this block's tile.
template <class Config>
__device__ __forceinline__ int2 tile_origin(const TileWalk<Config>& walk) {
  const int2 tile = walk.tile();
  const Problem& p = walk.problem;
  return {tile_begin(tile.x, Config::kTileM, p.M, p.overlap), tile_begin(tile.y, Config::kTileOutN, p.N, p.overlap)};
}

// How many of a tile's boxes of A have rows.
template <class Config>
__device__ __forceinline__ int boxes_of_a(const Problem& problem, int row) {
  if (problem.M == 0) return Config::kClusterN;
  return (row < problem.M) + (Config::kClusterN > 1 && row + Config::kBoxM < problem.M);
}

// One thread: copies the stages of every tile, as consumers free them. Of B, `early_stages` are asked for before the grid in
// front has ended.
template <class Config, class Mma, class Shared>
__device__ __forceinline__ void produce(Shared& shared, const CUtensorMap& a, const CUtensorMap& b,
                                        const Problem& problem) {
  constexpr int kStageK = kStageBytesK / sizeof(typename Mma::Element);
  RingPosition<Shared::kStages> at;
  TileWalk<Config> walk(problem);
  const auto start_stage = [&](int stage, int2 origin, int boxes, int k) {
    ptx::mbarrier_arrive_expect(&shared.full[stage], boxes * Config::kBoxM * kStageBytesK + Config::kBytesB);
    load_b<Config>(shared, stage, b, k * kStageK, origin.y, problem.b_second_row, walk.rank_m);
  };
  int early = walk.done() ? 0 : min(Shared::kStages, min(problem.early_stages, problem.k_stages));
  for (int stage = 0; stage < early; ++stage) {
    const int2 origin = tile_origin(walk);
    start_stage(stage, origin, boxes_of_a<Config>(problem, origin.x), stage);
  }
  ptx::griddep_wait();
  for (; !walk.done(); walk.next()) {
    if (walk.last()) ptx::griddep_launch();
    const int2 origin = tile_origin(walk);
    const int boxes = boxes_of_a<Config>(problem, origin.x);
    for (int k = 0; k < problem.k_stages; ++k, at.advance()) {
      if (early > 0) {
        --early;
      } else {
        ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
        start_stage(at.stage, origin, boxes, k);
      }
      load_a<Config>(shared, at.stage, a, k * kStageK, origin.x, walk.rank_n, boxes);
    }
  }
}

// One warp: what the epilogue wants to know about a tile's columns.
template <class Config, class Epilogue, class Shared>
__device__ __forceinline__ void produce_columns(Shared& shared, const typename Epilogue::Params& params,
                                                const Problem& problem) {
  RingPosition<Shared::kTilesAtOnce> at;
  for (TileWalk<Config> walk(problem); !walk.done(); walk.next(), at.advance()) {
    ptx::mbarrier_wait(&shared.columns_empty[at.stage], at.phase ^ 1);
    const int2 origin = tile_origin(walk);
    Epilogue::load_columns(params, shared.columns[at.stage], origin.x, origin.y);
    ptx::mbarrier_arrive(&shared.columns_full[at.stage]);
  }
}

// This warp reads the stage no more. Each warp reports for itself, to every block that may overwrite the stage.
template <class Config, class Shared>
__device__ __forceinline__ void release(Shared& shared, int stage) {
  const int lane = threadIdx.x % 32;
  if constexpr (Config::kClusterSize == 1) {
    if (lane == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
  } else {
    if (lane < Config::kClusterSize) ptx::mbarrier_arrive_cluster(&shared.empty[stage], lane);
  }
}

// Issues kSteps instructions of one stage for each block of 64 rows; the first overwrites where `fresh`.
template <class Config, class Mma, int kSteps, class Shared, class Accumulators>
__device__ __forceinline__ void multiply(Accumulators& acc, Shared& shared, int stage, int first_step, bool fresh) {
  constexpr int kStepBytes = Mma::kStepK * sizeof(typename Mma::Element);
  const int first_row = Config::kPingPong ? 0 : (threadIdx.x / 128 - 1) * 64;
  const uint64_t a = ptx::descriptor_swizzle128(ptx::smem_address(&shared.a[stage][first_row * kStageBytesK]));
  const uint64_t b = ptx::descriptor_swizzle128(ptx::smem_address(shared.b[stage]));
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int k = (first_step + step) * kStepBytes / 16;
#pragma unroll
    for (int block = 0; block < Config::kBlocksM; ++block) {
      Mma::template Instruction<Config::kTileN>::mma(acc[block], a + k + block * (64 * kStageBytesK / 16), b + k,
                                                     fresh && step == 0 ? 0 : 1);
    }
  }
  ptx::wgmma_commit();
}

// Where a warp works: the tile's first row for this warp and its first column.
template <class Config>
__device__ __forceinline__ int2 warp_origin(const TileWalk<Config>& walk) {
  const int2 tile = tile_origin(walk);
  const int warp = threadIdx.x / 32 % 4, consumer = threadIdx.x / 128 - 1;
  return {tile.x + (Config::kPingPong ? 0 : consumer * Config::kBlocksM * 64) + warp * 16, tile.y};
}

// In ping-pong, once all of a tile's instructions are queued.
__device__ __forceinline__ void pass_turn(uint64_t* next_turn, int k, int k_stages) {
  if (next_turn != nullptr && k == k_stages - 1 && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(next_turn);
}

// All of K for one tile. One group of instructions stays in flight while the next stage is awaited.
template <class Config, class Mma, class Shared, class Accumulators>
__device__ __forceinline__ void mainloop(Accumulators& acc, Shared& shared, RingPosition<Shared::kStages>& at,
                                         int k_stages, uint64_t* next_turn) {
  constexpr int kSteps = kStageBytesK / (Mma::kStepK * sizeof(typename Mma::Element));
  int previous = -1;
  for (int k = 0; k < k_stages; ++k, at.advance()) {
    ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
    multiply<Config, Mma, kSteps>(acc, shared, at.stage, 0, k == 0);
    pass_turn(next_turn, k, k_stages);
    ptx::wgmma_wait<1>();
    if (previous >= 0) release<Config>(shared, previous);
    previous = at.stage;
  }
  ptx::wgmma_wait<0>();
  release<Config>(shared, previous);
}

// The same with a promotion rule. Straightforward: nothing overlaps within a warpgroup, only between the two.
template <class Config, class Mma, class Promotion, class Shared, class Total, class Accumulators>
__device__ __forceinline__ void mainloop_promoted(Total& total, Accumulators& partial, int2 origin, Shared& shared,
                                                  RingPosition<Shared::kStages>& at, int k_stages,
                                                  uint64_t* next_turn) {
  constexpr int kSteps = kStageBytesK / (Mma::kStepK * sizeof(typename Mma::Element));
  constexpr int kIntervals = kSteps / Promotion::kSteps;
  Promotion promotion;
  for (int k = 0; k < k_stages; ++k, at.advance()) {
    ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
#pragma unroll
    for (int i = 0; i < kIntervals; ++i) {
      multiply<Config, Mma, Promotion::kSteps>(partial, shared, at.stage, i * Promotion::kSteps, true);
      if (i == kIntervals - 1) pass_turn(next_turn, k, k_stages);
      ptx::wgmma_wait<0>();
      if (i == kIntervals - 1) release<Config>(shared, at.stage);
      promotion.add(total, partial, origin, k * kIntervals + i);
    }
  }
}

// A warpgroup's part of every tile (together) or all of every other tile (ping-pong): multiply, then store.
template <class Config, class Mma, class Epilogue, class Promotion, class Shared>
__device__ __forceinline__ void consume(Shared& shared, const Problem& problem, Epilogue& epilogue) {
  const int consumer = threadIdx.x / 128 - 1, buffer = Config::kPingPong ? consumer : 0;
  uint64_t* const next_turn = Config::kPingPong ? &shared.turn[consumer ^ 1] : nullptr;
  RingPosition<Shared::kStages> at;
  uint32_t phase = 0;
  TileWalk<Config> walk(problem);
  const auto skip_tile = [&] {
    walk.next();
    at.advance(problem.k_stages);
  };
  if (Config::kPingPong && consumer == 1) skip_tile();
  for (; !walk.done(); phase ^= 1) {
    const int2 origin = warp_origin(walk);
    typename Epilogue::Rows rows[Config::kBlocksM];
#pragma unroll
    for (int block = 0; block < Config::kBlocksM; ++block) rows[block] = epilogue.load_rows(origin.x + block * 64);
    // Warpgroup 0 begins, so it waits for one turn fewer: a fresh barrier lets parity 1 pass.
    if (Config::kPingPong) ptx::mbarrier_wait(&shared.turn[consumer], consumer == 0 ? phase ^ 1 : phase);
    const auto store = [&](auto& result) {
      ptx::mbarrier_wait(&shared.columns_full[buffer], phase);
      epilogue.store(result, rows, shared.columns[buffer], origin.x, origin.y);
      ptx::mbarrier_arrive(&shared.columns_empty[buffer]);  // every lane: each has read columns of its own
    };
    typename Mma::Accumulator acc[Config::kBlocksM][Config::kTileN / 2];
    if constexpr (Promotion::kSteps == 0) {
      mainloop<Config, Mma>(acc, shared, at, problem.k_stages, next_turn);
      store(acc);
    } else {
      typename Promotion::Total total[Config::kBlocksM][Config::kTileN / 2] = {};
      mainloop_promoted<Config, Mma, Promotion>(total, acc, origin, shared, at, problem.k_stages, next_turn);
      store(total);
    }
    walk.next();
    if (Config::kPingPong) skip_tile();
  }
}

template <class Config, class Mma, class Epilogue, class Promotion = NoPromotion>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ KernelParams<typename Epilogue::Params> params) {
  using Shared = SharedStorage<Config, Epilogue>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);

  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&params.a);
    ptx::tma_prefetch_map(&params.b);
    constexpr int kReaders = 4 * kConsumers / Shared::kTilesAtOnce;  // warps that work on a tile
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], kReaders * Config::kClusterSize);
    }
    for (int i = 0; i < Shared::kTilesAtOnce; ++i) {
      ptx::mbarrier_init(&shared.columns_full[i], 32);
      ptx::mbarrier_init(&shared.columns_empty[i], 32 * kReaders);
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) ptx::mbarrier_init(&shared.turn[consumer], 4);
    if constexpr (kWantsBarriers<Epilogue>) {
      for (int i = 0; i < 8 * kConsumers; ++i) ptx::mbarrier_init(&shared.of_warp[i / 2][i % 2], 1);
    }
    ptx::mbarrier_init_fence();
  }
  Config::kClusterSize == 1 ? __syncthreads() : ptx::cluster_sync_diverged();
  if (threadIdx.x >= 32) ptx::griddep_wait();  // the first warp's turn comes in produce

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_shrink<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config, Mma>(shared, params.a, params.b, params.problem);
    if (threadIdx.x / 32 == 1) produce_columns<Config, Epilogue>(shared, params.epilogue, params.problem);
  } else {
    ptx::setmaxnreg_grow<Config::kConsumerRegisters>();
    const int warp = threadIdx.x / 32 - 4;
    const auto work = [&](Epilogue epilogue) {
      consume<Config, Mma, Epilogue, Promotion>(shared, params.problem, epilogue);
      epilogue.finish();
    };
    if constexpr (kWantsBarriers<Epilogue>) {
      work(Epilogue(params.epilogue, shared.staging[warp], shared.of_warp[warp]));
    } else {
      work(Epilogue(params.epilogue, shared.staging[warp]));
    }
  }
  // A block must outlive the copies and arrivals that its peer still sends here.
  if (Config::kClusterSize > 1) ptx::cluster_sync_diverged();
}

}  // namespace kitchen::gemm_sm90
