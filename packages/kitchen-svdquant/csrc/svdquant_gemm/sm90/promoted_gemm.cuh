// Main loop of the Hopper GEMM: D = low * up^T + sum over groups of (A_g * B_g^T) * a_scale_g * b_scale_g, persistent and
// warp-specialised.
//
// One thread fills a ring of stages: first the low-rank operands, 64 ranks (bfloat16) a stage, then the codes, 128 columns
// (two groups) a stage, with their scales. Each of two consumer warpgroups has 64 rows x kTileN columns.
//
// What limits such a kernel is the promotion. FP32 instructions and wgmma compete for the register file, so their times add
// up more than they overlap, and the column scales of a group, 32 a thread, cost as much shared-memory time as the
// operands. So the scales of a group are multiplied by the tensor cores as well (scale_layout.h): half the time of the
// group's codes, and what is left is one FMA an element. The two warpgroups are fastest in step: docs/kernels/svdquant.md.
// Thread layout: gemm_sm90.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kitchen/gemm/gemm_sm90_tiles.cuh"
#include "kitchen/ptx/bulk_copy.h"
#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma.h"
#include "kitchen/ptx/wgmma_float.h"
#include "svdquant_gemm/scale_layout.h"

namespace kitchen::svdquant::sm90 {

using gemm_sm90::RingPosition;
using gemm_sm90::TileWalk;

constexpr int kStageBytesK = 128, kStageGroups = kStageBytesK / kGroup;
constexpr int kSharedLimit = 227 * 1024, kReservedBytes = 512;

template <int kTileN_, int kClusterM_, int kClusterN_, int kRound_>
struct Config {
  static constexpr int kRound = kRound_;  // stages in which a group is promoted while the next one multiplies; 0: none
  static constexpr int kConsumers = 2;  // warpgroups that multiply
  static constexpr int kTileM = 64 * kConsumers, kTileN = kTileN_, kTileOutN = kTileN;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_, kClusterSize = kClusterM * kClusterN;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  static constexpr int kBytesA = kTileM * kStageBytesK, kBytesB = kTileN * kStageBytesK;
  static constexpr int kScaleBytesA = kTileM * kStageGroups * kScaleRowBytes,
                       kScaleBytesB = kTileN * kStageGroups * kScaleRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB + kScaleBytesA + kScaleBytesB;
  static constexpr int kBoxM = kTileM / kClusterN, kBoxN = kTileN / kClusterM;
  static_assert(kClusterSize <= 2, "a cluster is one block or a pair");
  static_assert(kBoxM % 8 == 0 && kBoxN % 8 == 0, "a multicast slice is made of whole swizzle groups of 8 rows");
};

template <class Config, class Epilogue>
struct SharedStorage {
  static constexpr int kZeroBytes = Config::kTileN * kScaleRowBytes;
  static constexpr int kOther = 4 * Config::kConsumers * Epilogue::kStagingBytes +
                                static_cast<int>(sizeof(typename Epilogue::Columns)) + kZeroBytes + kReservedBytes;
  static constexpr int kStages = (kSharedLimit - kOther) / Config::kStageBytes;
  static_assert(kStages >= 3, "fewer than three stages cannot hide the copies");
  alignas(1024) uint8_t a[kStages][Config::kBytesA];
  alignas(1024) uint8_t b[kStages][Config::kBytesB];
  alignas(1024) uint8_t staging[4 * Config::kConsumers][Epilogue::kStagingBytes];
  alignas(128) uint4 a_scale[kStages][Config::kConsumers][kStageGroups][64];
  alignas(128) uint4 b_scale[kStages][kStageGroups][Config::kTileN];
  alignas(128)
      uint4 zeros[Config::kTileN];  // ranks 8 to 15 of the scales' product; after the scales, which an offset leads to it
  alignas(16) typename Epilogue::Columns columns;
  uint64_t full[kStages];   // the copies of a stage have landed
  uint64_t empty[kStages];  // every reader of the stage, in both blocks of a pair, is done
  uint64_t columns_full, columns_empty;
};

template <class EpilogueParams>
struct KernelParams {
  CUtensorMap a, b, low, up;
  gemm_sm90::Problem problem;
  const uint4 *a_scale, *b_scale;
  int rank_stages;         // of 64 ranks
  int groups;              // even
  float minus_zero;        // see low_rank
  int a_blocks, b_blocks;  // of scales
  EpilogueParams epilogue;
};

// One operand pair of a stage: A's rows and B's, each whole or as this block's slice for both blocks of a pair.
template <class Config, class Shared>
__device__ __forceinline__ void load_operands(Shared& shared, int stage, const CUtensorMap& a, const CUtensorMap& b, int k,
                                              int row, int column, const TileWalk<Config>& walk) {
  constexpr uint16_t kBothBlocks = 3;
  uint64_t* const full = &shared.full[stage];
  if constexpr (Config::kClusterN > 1) {
    const int slice = walk.rank_n * Config::kBoxM;
    ptx::tma_load_multicast(&shared.a[stage][slice * kStageBytesK], &a, k, row + slice, full, kBothBlocks);
  } else {
    ptx::tma_load(shared.a[stage], &a, k, row, full);
  }
  if constexpr (Config::kClusterM > 1) {
    const int slice = walk.rank_m * Config::kBoxN;
    ptx::tma_load_multicast(&shared.b[stage][slice * kStageBytesK], &b, k, column + slice, full, kBothBlocks);
  } else {
    ptx::tma_load(shared.b[stage], &b, k, column, full);
  }
}

// One thread: copies the stages of every tile, as consumers free them.
template <class Config, class Shared, class Params>
__device__ __forceinline__ void produce(Shared& shared, const Params& params) {
  constexpr int kBytes = Config::kBytesA + Config::kBytesB;
  RingPosition<Shared::kStages> at;
  for (TileWalk<Config> walk(params.problem); !walk.done(); walk.next()) {
    if (walk.last()) ptx::griddep_launch();
    const int2 tile = walk.tile();
    const int row = tile.x * Config::kTileM, column = tile.y * Config::kTileN;
    for (int s = 0; s < params.rank_stages; ++s, at.advance()) {
      ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
      ptx::mbarrier_arrive_expect(&shared.full[at.stage], kBytes);
      load_operands<Config>(shared, at.stage, params.low, params.up, 64 * s, row, column, walk);
    }
    // Blocks of scales beyond the last repeat it: such rows and columns are not stored.
    const uint4* b_scale =
        params.b_scale + static_cast<int64_t>(min(tile.y, params.b_blocks - 1)) * params.groups * Config::kTileN;
    for (int k = 0; k < params.problem.k_stages; ++k, at.advance()) {
      ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
      ptx::mbarrier_arrive_expect(&shared.full[at.stage], Config::kStageBytes);
      load_operands<Config>(shared, at.stage, params.a, params.b, k * kStageBytesK, row, column, walk);
#pragma unroll
      for (int c = 0; c < Config::kConsumers; ++c) {
        const int block = min(row / kBlockRows + c, params.a_blocks - 1);
        ptx::bulk_load(shared.a_scale[at.stage][c],
                       params.a_scale + (static_cast<int64_t>(block) * params.groups + kStageGroups * k) * kBlockRows,
                       Config::kScaleBytesA / Config::kConsumers, &shared.full[at.stage]);
      }
      ptx::bulk_load(shared.b_scale[at.stage], b_scale, Config::kScaleBytesB, &shared.full[at.stage]);
      b_scale += kStageGroups * Config::kTileN;
    }
  }
}

// One warp: what the epilogue wants to know about a tile's columns.
template <class Config, class Epilogue, class Shared>
__device__ __forceinline__ void produce_columns(Shared& shared, const typename Epilogue::Params& params,
                                                const gemm_sm90::Problem& problem) {
  uint32_t phase = 0;
  for (TileWalk<Config> walk(problem); !walk.done(); walk.next(), phase ^= 1) {
    ptx::mbarrier_wait(&shared.columns_empty, phase ^ 1);
    const int2 tile = walk.tile();
    Epilogue::load_columns(params, shared.columns, tile.x * Config::kTileM, tile.y * Config::kTileN);
    ptx::mbarrier_arrive(&shared.columns_full);
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

template <class Config>
using Sums = float[Config::kTileN / 2];

// One consumer warpgroup's view of a stage.
template <class Config, class Shared>
struct Consumer {
  Shared& shared;
  int index;

  __device__ __forceinline__ uint64_t a(int stage) const {
    return ptx::descriptor_swizzle128(ptx::smem_address(&shared.a[stage][index * 64 * kStageBytesK]));
  }
  __device__ __forceinline__ uint64_t b(int stage) const {
    return ptx::descriptor_swizzle128(ptx::smem_address(shared.b[stage]));
  }

  // Rows of 16 bytes, eight of them a core matrix, the next one right behind it; the second half of k is zeros.
  __device__ __forceinline__ uint64_t scales(const uint4* rows) const {
    const uint32_t address = ptx::smem_address(rows), zeros = ptx::smem_address(shared.zeros);
    constexpr uint64_t kGroupStride = uint64_t{8 * kScaleRowBytes / 16} << 32;
    return kGroupStride | uint64_t{(zeros - address) >> 4} << 16 | ((address & 0x3FFFFu) >> 4);
  }

  // The products of one group, from zero: of its scales, and of its codes.
  __device__ __forceinline__ void multiply_scales(Sums<Config>& scale, int stage, int group) const {
    ptx::wgmma_results(scale);  // they were read before
    ptx::wgmma_fence();
    ptx::WgmmaBf16<Config::kTileN>::mma(scale, scales(shared.a_scale[stage][index][group]),
                                        scales(shared.b_scale[stage][group]), 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_codes(Sums<Config>& dot, int stage, int group) const {
    const uint64_t first = group * (kGroup / 16);
    const uint64_t a_rows = a(stage) + first, b_rows = b(stage) + first;
    ptx::wgmma_results(dot);
    ptx::wgmma_fence();
    ptx::WgmmaE4m3<Config::kTileN>::mma(dot, a_rows, b_rows, 0);
    ptx::WgmmaE4m3<Config::kTileN>::mma(dot, a_rows + 2, b_rows + 2, 1);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void promote(Sums<Config>& total, Sums<Config>& dot, Sums<Config>& scale) const {
    ptx::wgmma_results(scale);
    ptx::wgmma_results(dot);
#pragma unroll
    for (int i = 0; i < Config::kTileN / 2; ++i) total[i ^ 1] = __fmaf_rn(dot[i], scale[i], total[i ^ 1]);
  }

  // total = low * up^T. Not summed in place: accumulators of wgmma are neighbouring registers, and the FMAs of the
  // promotion would read all their three operands from one register bank.
  template <class Params>
  __device__ __forceinline__ void low_rank(Sums<Config>& total, RingPosition<Shared::kStages>& at,
                                           const Params& params) const {
    Sums<Config> sums;
#pragma unroll
    for (int i = 0; i < Config::kTileN / 2; ++i) sums[i] = 0.0f;
    for (int s = 0; s < params.rank_stages; ++s, at.advance()) {
      ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
      ptx::wgmma_results(sums);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kStageBytesK / 32; ++step) {  // ranks beyond the last are zeros
        ptx::WgmmaBf16<Config::kTileN>::mma(sums, a(at.stage) + 2 * step, b(at.stage) + 2 * step, 1);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(sums);
      release<Config>(shared, at.stage);
    }
#pragma unroll
    for (int i = 0; i < Config::kTileN / 2; ++i) total[i ^ 1] = __fadd_rn(sums[i], params.minus_zero);
  }

  // One group after the other.
  __device__ __forceinline__ void groups_in_turn(Sums<Config>& total, RingPosition<Shared::kStages>& at, int k_stages) const {
    Sums<Config> scale, dot;
    for (int k = 0; k < k_stages; ++k, at.advance()) {
      ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
#pragma unroll
      for (int group = 0; group < kStageGroups; ++group) {
        multiply_scales(scale, at.stage, group);
        multiply_codes(dot, at.stage, group);
        ptx::wgmma_wait<0>();
        if (group == kStageGroups - 1) release<Config>(shared, at.stage);
        promote(total, dot, scale);
      }
    }
  }

  // Rounds of kRound stages: the codes of a group are under way while the one before is promoted; its scales follow, in the
  // same registers. Nothing is under way from round to round, or ptxas would serialise all of it (C7514).
  __device__ __forceinline__ void groups_ahead(Sums<Config>& total, RingPosition<Shared::kStages>& at, int k_stages) const {
    Sums<Config> scale, dot[2];
    int k = 0;
    for (; k + Config::kRound <= k_stages; k += Config::kRound) {
      int before = at.stage;
#pragma unroll
      for (int s = 0; s < Config::kRound; ++s) {
        ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
#pragma unroll
        for (int group = 0; group < kStageGroups; ++group) {
          multiply_codes(dot[group], at.stage, group);
          if (s > 0 || group > 0) {
            ptx::wgmma_wait<1>();
            if (group == 0) release<Config>(shared, before);
            promote(total, dot[group ^ 1], scale);
          }
          multiply_scales(scale, at.stage, group);
        }
        before = at.stage;
        at.advance();
      }
      ptx::wgmma_wait<0>();
      release<Config>(shared, before);
      promote(total, dot[kStageGroups - 1], scale);
    }
    groups_in_turn(total, at, k_stages - k);
  }

  __device__ __forceinline__ void groups(Sums<Config>& total, RingPosition<Shared::kStages>& at, int k_stages) const {
    Config::kRound > 0 ? groups_ahead(total, at, k_stages) : groups_in_turn(total, at, k_stages);
  }
};

// A warpgroup's 64 rows of every tile.
template <class Config, class Epilogue, class Shared, class Params>
__device__ __forceinline__ void consume(Shared& shared, const Params& params, Epilogue& epilogue) {
  const int index = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4;
  const Consumer<Config, Shared> consumer{shared, index};
  RingPosition<Shared::kStages> at;
  uint32_t phase = 0;
  for (TileWalk<Config> walk(params.problem); !walk.done(); walk.next(), phase ^= 1) {
    const int2 tile = walk.tile();
    Sums<Config> total;
    consumer.low_rank(total, at, params);
    consumer.groups(total, at, params.problem.k_stages);
    ptx::mbarrier_wait(&shared.columns_full, phase);
    epilogue.store(total, shared.columns, tile.x * Config::kTileM + index * 64 + warp * 16, tile.y * Config::kTileN);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.columns_empty);
  }
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    promoted_gemm(const __grid_constant__ KernelParams<typename Epilogue::Params> params) {
  using Shared = SharedStorage<Config, Epilogue>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);

  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&params.a, &params.b, &params.low, &params.up}) ptx::tma_prefetch_map(map);
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], 4 * Config::kConsumers * Config::kClusterSize);
    }
    ptx::mbarrier_init(&shared.columns_full, 32);
    ptx::mbarrier_init(&shared.columns_empty, 4 * Config::kConsumers);
    ptx::mbarrier_init_fence();
  }
  for (int i = threadIdx.x; i < Config::kTileN; i += Config::kThreads) shared.zeros[i] = make_uint4(0, 0, 0, 0);
  ptx::fence_async_proxy();
  Config::kClusterSize == 1 ? __syncthreads() : ptx::cluster_sync_diverged();
  ptx::griddep_wait();

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_shrink<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(shared, params);
    if (threadIdx.x / 32 == 1) produce_columns<Config, Epilogue>(shared, params.epilogue, params.problem);
  } else {
    ptx::setmaxnreg_grow<Config::kConsumerRegisters>();
    Epilogue epilogue(params.epilogue, shared.staging[threadIdx.x / 32 - 4]);
    consume<Config>(shared, params, epilogue);
    epilogue.finish();
  }
  // A block must outlive the copies and arrivals that its peer still sends here.
  if (Config::kClusterSize > 1) ptx::cluster_sync_diverged();
}

}  // namespace kitchen::svdquant::sm90
