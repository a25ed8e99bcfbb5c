// Main loop of the Hopper GEMM: D = low * up^T + sum over groups of (A_g * B_g^T) * a_scale_g * b_scale_g, persistent and
// warp-specialised.
//
// One thread fills a ring of stages: first the low-rank operands, 64 ranks (bfloat16) a stage, then the codes, 128 columns
// (two groups) a stage, with their scales. Each of two consumer warpgroups has 64 rows x kTileN columns.
//
// What limits such a kernel is the promotion. The column scales of a group, 32 a thread, would cost as much shared-memory time as the
// operands, so the scales of a group are multiplied by the tensor cores as well (scale_layout.h): half the time of the group's codes,
// and what is left is one FMA an element. Half of a warpgroup's columns is promoted while the other half multiplies. Two halves would
// read A from shared memory twice, more than it gives, so A's rows of a group come to registers once.
// Thread layout: gemm_sm90.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kitchen/gemm/gemm_sm90_tiles.cuh"
#include "kitchen/ptx/bulk_copy.h"
#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/ldmatrix.h"
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
  static constexpr int kRound = kRound_;  // stages of the main loop's body
  static constexpr int kConsumers = 2;  // warpgroups that multiply
  static constexpr int kTileM = 64 * kConsumers, kTileN = kTileN_, kTileOutN = kTileN;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_, kClusterSize = kClusterM * kClusterN;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
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
  static constexpr int kZeroRows = Config::kTileN / 2 > 64 ? Config::kTileN / 2 : 64;  // as many as an operand has
  static constexpr int kOther = 4 * Config::kConsumers * Epilogue::kStagingBytes +
                                static_cast<int>(sizeof(typename Epilogue::Columns)) + kZeroRows * kScaleRowBytes + kReservedBytes;
  static constexpr int kStages = (kSharedLimit - kOther) / Config::kStageBytes;
  static_assert(kStages >= 3, "fewer than three stages cannot hide the copies");
  alignas(1024) uint8_t a[kStages][Config::kBytesA];
  alignas(1024) uint8_t b[kStages][Config::kBytesB];
  alignas(1024) uint8_t staging[4 * Config::kConsumers][Epilogue::kStagingBytes];
  alignas(128) uint4 a_scale[kStages][Config::kConsumers][kStageGroups][64];
  alignas(128) uint4 b_scale[kStages][kStageGroups][Config::kTileN];
  alignas(128)
      uint4 zeros[kZeroRows];  // ranks 8 to 15 of the scales' product; after the scales, which an offset leads to it
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
  int rank_stages, rank_steps;  // of 64 and of 16 ranks
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

// Blocks of scales beyond the last repeat it: such rows and columns are not stored.
template <class Config, class Params>
__device__ __forceinline__ const uint4* scales_of_b(const Params& params, int block, int stage) {
  return params.b_scale +
         (static_cast<int64_t>(min(block, params.b_blocks - 1)) * params.groups + kStageGroups * stage) * Config::kTileN;
}

template <class Config, class Shared, class Params>
__device__ __forceinline__ void load_scales(Shared& shared, int stage, const Params& params, int k, int row, const uint4* b_scale) {
#pragma unroll
  for (int c = 0; c < Config::kConsumers; ++c) {
    const int block = min(row / kBlockRows + c, params.a_blocks - 1);
    ptx::bulk_load(shared.a_scale[stage][c],
                   params.a_scale + (static_cast<int64_t>(block) * params.groups + kStageGroups * k) * kBlockRows,
                   Config::kScaleBytesA / Config::kConsumers, &shared.full[stage]);
  }
  ptx::bulk_load(shared.b_scale[stage], b_scale, Config::kScaleBytesB, &shared.full[stage]);
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
    const uint4* b_scale = scales_of_b<Config>(params, tile.y, 0);
    for (int k = 0; k < params.problem.k_stages; ++k, at.advance()) {
      ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
      ptx::mbarrier_arrive_expect(&shared.full[at.stage], Config::kStageBytes);
      load_operands<Config>(shared, at.stage, params.a, params.b, k * kStageBytesK, row, column, walk);
      load_scales<Config>(shared, at.stage, params, k, row, b_scale);
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

// This lane reads the stage no more. It reports for itself, to every block that may overwrite the stage: one arrival for a warp,
// behind a warp barrier, is as right, but compute-sanitizer's racecheck does not follow it.
template <class Config, class Shared>
__device__ __forceinline__ void release(Shared& shared, int stage) {
#pragma unroll
  for (int block = 0; block < Config::kClusterSize; ++block) {
    Config::kClusterSize == 1 ? ptx::mbarrier_arrive(&shared.empty[stage]) : ptx::mbarrier_arrive_cluster(&shared.empty[stage], block);
  }
}

// Sums of half of a warpgroup's columns, which multiply or are promoted together, and of its tile. Of the tile neighbours (of two
// columns) are swapped: an FMA whose three operands are all in even registers, or all in odd ones, takes a third cycle to read them.
template <class Config>
using HalfSums = float[Config::kTileN / 4];
template <class Config>
using Sums = HalfSums<Config>[2];

// Rows of A of one group, in registers: both halves of the columns read them, and shared memory is read enough for B.
struct Rows {
  uint32_t codes[2][4], scales[4];
};

// One consumer warpgroup's view of a stage.
template <class Config, class Shared>
struct Consumer {
  static constexpr int kHalf = Config::kTileN / 2;           // columns
  static constexpr int kRankSteps = kStageBytesK / 2 / 16;  // of a stage
  Shared& shared;
  int index;
  uint32_t codes_at;             // this lane's address for ldmatrix in the first stage, without the swizzled column
  uint32_t scales_at;            // the same of the scales
  uint32_t swizzle;              // of its row
  uint64_t b_first, scale_first;  // descriptors of B's operands in the first stage

  __device__ __forceinline__ Consumer(Shared& s, int warpgroup) : shared(s), index(warpgroup) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
    codes_at = ptx::smem_address(&shared.a[0][(index * 64 + row) * kStageBytesK]);
    scales_at = ptx::smem_address(&shared.a_scale[0][0][0][row]);
    swizzle = row % 8;
    b_first = ptx::descriptor_swizzle128(ptx::smem_address(shared.b[0]));
    // Rows of 16 bytes, eight of them a core matrix, the next one right behind it; the second half of k is zeros.
    const uint32_t address = ptx::smem_address(shared.b_scale), zeros = ptx::smem_address(shared.zeros);
    constexpr uint64_t kGroupStride = uint64_t{8 * kScaleRowBytes / 16} << 32;
    scale_first = kGroupStride | uint64_t{(zeros - address) >> 4} << 16 | ((address & 0x3FFFFu) >> 4);
  }

  __device__ __forceinline__ uint64_t a(int stage) const {
    return ptx::descriptor_swizzle128(ptx::smem_address(&shared.a[stage][index * 64 * kStageBytesK]));
  }
  __device__ __forceinline__ uint64_t b(int stage, int half) const {
    return b_first + static_cast<uint32_t>(stage * (Config::kBytesB / 16) + half * (kHalf * kStageBytesK / 16));
  }
  // The distance to the zeros shrinks as the address grows.
  __device__ __forceinline__ uint64_t b_scale(int stage, int group, int half) const {
    const uint32_t rows = (stage * kStageGroups + group) * Config::kTileN + half * kHalf;
    return scale_first - static_cast<uint64_t>(rows * 0xFFFFu);
  }

  __device__ __forceinline__ void load(Rows& rows, int stage, int group) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t chunk = (group * 4 + step * 2 + lane / 16) ^ swizzle;
      ptx::ldmatrix_x4(rows.codes[step], codes_at + stage * Config::kBytesA + chunk * 16);
    }
    uint32_t scales[2];
    ptx::ldmatrix_x2(scales, scales_at + ((stage * Config::kConsumers + index) * kStageGroups + group) * 64 * kScaleRowBytes);
    rows.scales[0] = scales[0], rows.scales[1] = scales[1];
    rows.scales[2] = rows.scales[3] = 0;
  }

  // Half of the columns: the products of one group, from zero, of its codes and of its scales.
  __device__ __forceinline__ void multiply(HalfSums<Config>& dot, HalfSums<Config>& scale, const Rows& rows, int stage, int group,
                                           int half) const {
    const uint64_t columns = b(stage, half) + group * (kGroup / 16);
    ptx::wgmma_results(dot), ptx::wgmma_results(scale);  // they were read before
    ptx::wgmma_fence();
    ptx::WgmmaE4m3<kHalf>::mma(dot, rows.codes[0], columns, 0);
    ptx::WgmmaE4m3<kHalf>::mma(dot, rows.codes[1], columns + 2, 1);
    ptx::WgmmaBf16<kHalf>::mma(scale, rows.scales, b_scale(stage, group, half), 0);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void promote(Sums<Config>& total, HalfSums<Config>& dot, HalfSums<Config>& scale, int half) const {
    ptx::wgmma_results(dot), ptx::wgmma_results(scale);
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) total[half][i ^ 1] = __fmaf_rn(dot[i], scale[i], total[half][i ^ 1]);
  }

  // 16 ranks a step; those beyond the last are zeros.
  template <int kSteps>
  __device__ __forceinline__ void multiply_ranks(HalfSums<Config> (&sums)[2], int stage) const {
    ptx::wgmma_results(sums[0]), ptx::wgmma_results(sums[1]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::WgmmaBf16<kHalf>::mma(sums[half], a(stage) + 2 * step, b(stage, half) + 2 * step, 1);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(sums[0]), ptx::wgmma_results(sums[1]);
  }

  // total = low * up^T, neighbours swapped. Not summed in place: accumulators of wgmma are neighbouring registers, and with three sets of
  // them ptxas runs out (C7512).
  template <class Params>
  __device__ __forceinline__ void low_rank(Sums<Config>& total, RingPosition<Shared::kStages>& at,
                                           const Params& params, int rank_stages) const {
    HalfSums<Config> sums[2];
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) sums[0][i] = sums[1][i] = 0.0f;
    for (int s = 0; s < rank_stages; ++s, at.advance()) {
      ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
      if (params.rank_steps - s * kRankSteps > kRankSteps / 2) {
        multiply_ranks<kRankSteps>(sums, at.stage);
      } else {
        multiply_ranks<kRankSteps / 2>(sums, at.stage);
      }
      release<Config>(shared, at.stage);
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      total[i / (kHalf / 2)][i % (kHalf / 2) ^ 1] = __fadd_rn(sums[i / (kHalf / 2)][i % (kHalf / 2)], params.minus_zero);
    }
  }

  // The groups of kRound stages: while half of the columns of a group is promoted, the other half multiplies. Nothing is under way
  // when this ends: with products under way from one round of a loop to the next, ptxas serialises all (C7514).
  template <int kRound>
  __device__ __forceinline__ void round(Sums<Config>& total, RingPosition<Shared::kStages>& at) const {
    HalfSums<Config> dot[2], scale[2];
    Rows rows[2];
    ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
    load(rows[0], at.stage, 0);
    multiply(dot[0], scale[0], rows[0], at.stage, 0, 0);
#pragma unroll
    for (int i = 0; i < kRound * kStageGroups; ++i) {
      const int stage = at.stage, group = i % kStageGroups, next_group = (i + 1) % kStageGroups;
      const bool stage_ends = next_group == 0, round_ends = i == kRound * kStageGroups - 1;
      multiply(dot[1], scale[1], rows[i % 2], stage, group, 1);
      if (stage_ends) at.advance();
      if (!round_ends) {
        if (stage_ends) ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
        load(rows[(i + 1) % 2], at.stage, next_group);
      }
      ptx::wgmma_wait<1>();
      promote(total, dot[0], scale[0], 0);
      if (round_ends) {
        ptx::wgmma_wait<0>();
      } else {
        multiply(dot[0], scale[0], rows[(i + 1) % 2], at.stage, next_group, 0);
        ptx::wgmma_wait<1>();
      }
      if (stage_ends) release<Config>(shared, stage);
      promote(total, dot[1], scale[1], 1);
    }
  }

  __device__ __forceinline__ void groups(Sums<Config>& total, RingPosition<Shared::kStages>& at, int k_stages) const {
    int k = 0;
#pragma unroll 1
    for (; k + Config::kRound <= k_stages; k += Config::kRound) round<Config::kRound>(total, at);
#pragma unroll 1
    for (; k < k_stages; ++k) round<1>(total, at);
  }
};

// A warpgroup's 64 rows of every tile.
template <class Config, class Epilogue, class Shared, class Params>
__device__ __forceinline__ void consume(Shared& shared, const Params& params, Epilogue& epilogue) {
  const int index = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4;
  const Consumer<Config, Shared> consumer(shared, index);
  RingPosition<Shared::kStages> at;
  uint32_t phase = 0;
  for (TileWalk<Config> walk(params.problem); !walk.done(); walk.next(), phase ^= 1) {
    const int2 tile = walk.tile();
    Sums<Config> total;
    consumer.low_rank(total, at, params, params.rank_stages);
    consumer.groups(total, at, params.problem.k_stages);
    ptx::mbarrier_wait(&shared.columns_full, phase);
    epilogue.store(total, shared.columns, tile.x * Config::kTileM + index * 64 + warp * 16, tile.y * Config::kTileN);
    ptx::mbarrier_arrive(&shared.columns_empty);
  }
}

// Barriers, and the zeros; the caller synchronises.
template <class Config, class Shared, class Params>
__device__ __forceinline__ void set_up(Shared& shared, const Params& params) {
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&params.a, &params.b, &params.low, &params.up}) ptx::tma_prefetch_map(map);
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], 128 * Config::kConsumers * Config::kClusterSize);
    }
    ptx::mbarrier_init(&shared.columns_full, 32);
    ptx::mbarrier_init(&shared.columns_empty, 128 * Config::kConsumers);
    ptx::mbarrier_init_fence();
  }
  for (int i = threadIdx.x; i < Shared::kZeroRows; i += Config::kThreads) shared.zeros[i] = make_uint4(0, 0, 0, 0);
  ptx::fence_async_proxy();
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    promoted_gemm(const __grid_constant__ KernelParams<typename Epilogue::Params> params) {
  using Shared = SharedStorage<Config, Epilogue>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);

  set_up<Config>(shared, params);
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
