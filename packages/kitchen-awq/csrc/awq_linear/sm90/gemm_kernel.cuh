// The Hopper kernel of awq_linear: see awq_gemm.cu.
//
//   block      kRows = 128 weight rows x kTokens rows of x ("tokens") x one piece of K
//   warp 8     feeds a ring of stages of 128 columns: packed codes, scales and zeros by bulk tensor copies, tokens as below
//   warps 0-7  two warpgroups of 64 rows: codes from shared memory, decoded in registers, multiply as wgmma's A; tokens are its N side
//   sums       fp32 in registers; over pieces of K through distributed shared memory, in the order of the cluster's blocks
//
// Lane l of a warp owns rows g = l/4 and g + 8 of its 16, and of a stage's 128 columns 32t .. 32t+31 (t = l % 4): 16 bytes a row, four
// words of eight codes, whose pairs (c, c + 4) are the operands of two wgmmas of 16 columns. Tokens must have the same order of
// columns: pair_tokens makes a copy of x that has it, and tells the kernel to start meanwhile (a programmatic launch).
//
// A group whose zero is tiny beside its scale decodes in fp32 (quant/awq_decode.h); a block that met one repeats its sums with the
// exact decoder, which hardly ever happens.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "awq_linear/epilogue.cuh"
#include "kitchen/gemm/decode_smallm.cuh"
#include "kitchen/gemm/gemm_sm90_tiles.cuh"
#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/named_barrier.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma_registers.h"
#include "kitchen/quant/awq_decode.h"

namespace kitchen::awq {

constexpr int kStageColumns = 128, kBlocksOf32 = kStageColumns / 32;
constexpr int kConsumerWarps = 8, kConsumerThreads = 32 * kConsumerWarps;
constexpr int kMostGroups = 4;  // that a stage may touch, with groups of at least 32 columns
constexpr int kSlabTokens = 64, kSumPad = 4;

template <int kTokens_, int kStages_, int kBlocksPerSm_>
struct GemmConfig {
  static constexpr int kTokens = kTokens_, kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  // One block an SM: a whole warpgroup with the producer, so that the others can have its registers.
  static constexpr bool kMovesRegisters = kBlocksPerSm == 1;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 32);
  static constexpr int kRows = 128;
  static constexpr int kSlab = kTokens < kSlabTokens ? kTokens : kSlabTokens;  // tokens that leave the registers together
  static constexpr int kSumPitch = kRows + kSumPad;
};

template <class Config>
struct GemmStage {
  uint8_t tokens[2][Config::kTokens * 128];  // 64 columns each, 128-byte swizzle
  uint8_t codes[Config::kRows * 64];
  uint16_t scale[kMostGroups][Config::kRows], zero[kMostGroups][Config::kRows];
};

// After the main loop the stages' place.
template <class Config>
struct GemmSums {
  float slab[Config::kSlab][Config::kSumPitch];
  int4 received[Config::kTokens * Config::kRows / 4];
};

template <class Config>
struct GemmShared {
  union {
    GemmStage<Config> stages[Config::kStages];
    GemmSums<Config> sums;
  };
  float bias[Config::kRows];
  uint64_t full[Config::kStages], empty[Config::kStages], received;
};

struct GemmParams {
  CUtensorMap codes, tokens, scale, zero;  // tokens: paired
  int M, N, K;
  int tiles_m;              // of tokens
  int splits, splits_log2;  // pieces of K, the blocks of a cluster
  int stages_per_split;
  int groups;               // rows of a box of scales
  uint32_t group_inverse;   // 2^32 / (g/32) + 1: exact division of k/32 while K < 2^19; 0 for groups of 32
  bool one_group;           // a stage lies in one group
  EpilogueParams epilogue;
};

struct GemmTile {
  int row, token, tokens, first_stage, stages;  // first weight row, first token, how many there are; of this piece
  unsigned split;
};

template <class Config>
__device__ __forceinline__ GemmTile tile_of(const GemmParams& p, unsigned block) {
  GemmTile tile;
  tile.split = block & (p.splits - 1);
  const unsigned in_split = block >> p.splits_log2;
  tile.token = static_cast<int>(in_split % p.tiles_m) * Config::kTokens;
  tile.row = static_cast<int>(in_split / p.tiles_m) * Config::kRows;
  tile.tokens = min(Config::kTokens, p.M - tile.token);
  tile.first_stage = static_cast<int>(tile.split) * p.stages_per_split;
  tile.stages = min(p.stages_per_split, (p.K + kStageColumns - 1) / kStageColumns - tile.first_stage);
  return tile;
}

__device__ __forceinline__ int group_of(const GemmParams& p, int blocks_of_32) {
  return p.group_inverse == 0 ? blocks_of_32 : static_cast<int>(__umulhi(static_cast<uint32_t>(blocks_of_32), p.group_inverse));
}

template <class Config>
using Ring = gemm_sm90::RingPosition<Config::kStages>;

// One thread. Weights of the first stages are on their way before it waits for the tokens.
template <class Config>
__device__ __forceinline__ void produce(GemmShared<Config>& shared, const GemmParams& p, const GemmTile& tile, Ring<Config>& at) {
  const uint32_t bytes = sizeof(GemmStage<Config>::tokens) + sizeof(GemmStage<Config>::codes) + 2u * p.groups * Config::kRows * 2;
  const auto load_weights = [&](int i, const Ring<Config>& at) {
    GemmStage<Config>& stage = shared.stages[at.stage];
    uint64_t* const full = &shared.full[at.stage];
    const int k = (tile.first_stage + i) * kStageColumns, group = group_of(p, k / 32);
    ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, bytes);
    ptx::tma_load(stage.codes, &p.codes, k / 2, tile.row, full);
    ptx::tma_load(stage.scale, &p.scale, tile.row, group, full);
    ptx::tma_load(stage.zero, &p.zero, tile.row, group, full);
  };
  const int ahead = min(Config::kStages, tile.stages);
  Ring<Config> weights = at;
  for (int i = 0; i < ahead; ++i, weights.advance()) load_weights(i, weights);
  ptx::griddep_wait();
#pragma unroll 1
  for (int i = 0; i < tile.stages; ++i, at.advance()) {
    if (i >= ahead) load_weights(i, at);
    GemmStage<Config>& stage = shared.stages[at.stage];
    const int k = (tile.first_stage + i) * kStageColumns;
    ptx::tma_load(stage.tokens[0], &p.tokens, k, tile.token, &shared.full[at.stage]);
    ptx::tma_load(stage.tokens[1], &p.tokens, k + 64, tile.token, &shared.full[at.stage]);
  }
}

// Scale and zero of a lane's two rows.
template <class T>
struct RowGroups {
  quant::AwqGroup<T, true> low, high;

  // Not zero where one needs the exact decoder.
  template <class Config>
  __device__ __forceinline__ uint32_t load(const GemmStage<Config>& stage, int group, int row) {
    const uint32_t s[2] = {stage.scale[group][row], stage.scale[group][row + 8]};
    const uint32_t z[2] = {stage.zero[group][row], stage.zero[group][row + 8]};
    low.set(s[0], z[0]), high.set(s[1], z[1]);
    return quant::awq_needs_exact<T>(__byte_perm(s[0], s[1], 0x5410), __byte_perm(z[0], z[1], 0x5410));
  }
};

// A warpgroup's sums over the block's piece of K. Answers whether a group needs the exact decoder.
template <class Config, class T, bool kExact>
__device__ __forceinline__ uint32_t accumulate(float (&sums)[Config::kTokens / 2], GemmShared<Config>& shared, const GemmParams& p,
                                               const GemmTile& tile, Ring<Config>& at) {
  using P = quant::AwqPairs<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4, t = lane % 4;
  uint32_t found = 0, a[2][2][4];
  RowGroups<T> groups;
  int previous = -1;
#pragma unroll 1
  for (int i = 0; i < tile.stages; ++i, at.advance()) {
    const GemmStage<Config>& stage = shared.stages[at.stage];
    const int first_32 = (tile.first_stage + i) * kBlocksOf32;
    const int group = p.one_group ? 0 : group_of(p, first_32 + t) - group_of(p, first_32);
    const uint8_t* const codes = stage.codes + row * 64 + 16 * t;
    // The same in all lanes, and known to be: descriptors are scalar operands.
    const uint64_t b = ptx::descriptor_swizzle128(__shfl_sync(0xffffffffu, ptx::smem_address(stage.tokens), 0));
    ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
    const uint4 low = *reinterpret_cast<const uint4*>(codes), high = *reinterpret_cast<const uint4*>(codes + 8 * 64);
    found |= groups.load(stage, group, row);
#pragma unroll
    for (int j = 0; j < kBlocksOf32; ++j) {
      const uint32_t low_word = j == 0 ? low.x : j == 1 ? low.y : j == 2 ? low.z : low.w;
      const uint32_t high_word = j == 0 ? high.x : j == 1 ? high.y : j == 2 ? high.z : high.w;
      uint32_t(&operand)[2][4] = a[j % 2];
      operand[0][0] = groups.low.template apply<kExact>(P::template levels<0>(low_word));
      operand[0][1] = groups.high.template apply<kExact>(P::template levels<0>(high_word));
      operand[0][2] = groups.low.template apply<kExact>(P::template levels<1>(low_word));
      operand[0][3] = groups.high.template apply<kExact>(P::template levels<1>(high_word));
      operand[1][0] = groups.low.template apply<kExact>(P::template levels<2>(low_word));
      operand[1][1] = groups.high.template apply<kExact>(P::template levels<2>(high_word));
      operand[1][2] = groups.low.template apply<kExact>(P::template levels<3>(low_word));
      operand[1][3] = groups.high.template apply<kExact>(P::template levels<3>(high_word));
      ptx::wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 16 columns are 32 of the 128 bytes of a token's row
        const int step = 2 * j + half;
        const uint64_t tokens = b + step / 4 * (Config::kTokens * 128 / 16) + step % 4 * 2;
        ptx::WgmmaRegisters<T, Config::kTokens>::mma(sums, operand[half], tokens);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // the operands of the next 32 columns may be overwritten
      if (j == 0 && previous >= 0 && lane == 0) ptx::mbarrier_arrive(&shared.empty[previous]);
    }
    previous = at.stage;
  }
  ptx::wgmma_wait<0>();
  if (previous >= 0 && lane == 0) ptx::mbarrier_arrive(&shared.empty[previous]);
  return found;
}

// Tokens slab * kSlab .. of the sums, as rows of weight columns.
template <class Config>
__device__ __forceinline__ void store_slab(GemmSums<Config>& to, const float (&sums)[Config::kTokens / 2], int slab) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
#pragma unroll
  for (int s = 0; s < Config::kTokens / Config::kSlab; ++s) {
    if (s != slab) continue;
#pragma unroll
    for (int i = 0; i < Config::kSlab / 2; ++i) {
      to.slab[8 * (i / 4) + 2 * (lane % 4) + i % 2][row + 8 * (i / 2 % 2)] = sums[s * (Config::kSlab / 2) + i];
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_quad(const GemmShared<Config>& shared, const GemmParams& p, const GemmTile& tile, int quad,
                                           const float4& sum) {
  const int token = tile.token + quad / (Config::kRows / 4), column = quad % (Config::kRows / 4) * 4, n = tile.row + column;
  if (n >= p.N) return;
  float y[4] = {sum.x, sum.y, sum.z, sum.w};
  if (p.epilogue.bias != nullptr) {
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] += shared.bias[column + e];
  }
  finish_four(p.epilogue, static_cast<int64_t>(token) * p.N + n, n, p.N - n, y);
}

// The consumers: sums to the output, or to the block of the cluster that finishes them.
template <class Config>
__device__ __forceinline__ void finish(GemmShared<Config>& shared, const float (&sums)[Config::kTokens / 2], const GemmParams& p,
                                       const GemmTile& tile) {
  constexpr int kQuads = Config::kRows / 4;
  gemm::decode::Problem problem = {};
  problem.M = tile.tokens, problem.splits = p.splits, problem.splits_log2 = p.splits_log2;
  const gemm::decode::Ownership<Config> ownership(problem);
  const int slots = (ownership.count_of(0) + 7) / 8 * 8;  // of each sender
#pragma unroll 1
  for (int slab = 0; slab * Config::kSlab < tile.tokens; ++slab) {
    if (slab > 0) ptx::named_barrier_sync<1, kConsumerThreads>();
    store_slab(shared.sums, sums, slab);
    ptx::named_barrier_sync<1, kConsumerThreads>();
    const int tokens = min(Config::kSlab, tile.tokens - slab * Config::kSlab);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < tokens * kQuads; i += kConsumerThreads) {
      const int quad = slab * Config::kSlab * kQuads + i;
      const float4 sum = *reinterpret_cast<const float4*>(&shared.sums.slab[i / kQuads][i % kQuads * 4]);
      if (p.splits == 1) {
        store_quad(shared, p, tile, quad, sum);
      } else {
        ptx::store_async_16(shared.sums.received + tile.split * slots + ownership.slot_of(quad), &shared.received,
                            ownership.owner_of(quad), reinterpret_cast<const int4&>(sum));
      }
    }
  }
  if (p.splits == 1) return;
  ptx::receive_wait(&shared.received);
  const int count = ownership.count_of(tile.split);
#pragma unroll 1
  for (int slot = static_cast<int>(threadIdx.x); slot < count; slot += kConsumerThreads) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int s = 0; s < p.splits; ++s) {
      const float4 part = reinterpret_cast<const float4&>(shared.sums.received[s * slots + slot]);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    store_quad(shared, p, tile, ownership.quad_of(slot, tile.split), sum);
  }
}

// Barriers of the block, by one thread.
template <class Config>
__device__ __forceinline__ void prepare(GemmShared<Config>& shared, const GemmParams& p, const GemmTile& tile) {
  ptx::tma_prefetch_map(&p.codes);
  ptx::tma_prefetch_map(&p.tokens);
  ptx::tma_prefetch_map(&p.scale);
  ptx::tma_prefetch_map(&p.zero);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    ptx::mbarrier_init(&shared.full[stage], 1);
    ptx::mbarrier_init(&shared.empty[stage], kConsumerWarps);
  }
  if (p.splits > 1) {
    gemm::decode::Problem problem = {};
    problem.M = tile.tokens, problem.splits = p.splits, problem.splits_log2 = p.splits_log2;
    ptx::receive_init(&shared.received);
    ptx::receive_expect(&shared.received, gemm::decode::Ownership<Config>(problem).count_of(tile.split) * p.splits * sizeof(int4));
  }
  ptx::mbarrier_init_fence();
}

template <class Config, class T>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) awq_gemm_kernel(const __grid_constant__ GemmParams p) {
  using Shared = GemmShared<Config>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const GemmTile tile = tile_of<Config>(p, blockIdx.x);
  if (threadIdx.x == kConsumerThreads) prepare(shared, p, tile);
  if (p.epilogue.bias != nullptr && threadIdx.x < Config::kRows) {
    const int n = min(tile.row + static_cast<int>(threadIdx.x), p.N - 1);
    shared.bias[threadIdx.x] = load_as_float(p.epilogue.bias, n, p.epilogue.bias_type);
  }
  __syncthreads();

  Ring<Config> at;
  if (threadIdx.x >= kConsumerThreads) {
    if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_shrink<24>();
    const auto produce_all = [&] {
      if (threadIdx.x == kConsumerThreads) produce(shared, p, tile, at);
      __syncwarp();
    };
    produce_all();
    if (__syncthreads_or(0)) produce_all();
    if (p.splits > 1) ptx::cluster_sync_diverged();
    return;
  }
  if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_grow<240>();
  float sums[Config::kTokens / 2] = {};
  const uint32_t found = accumulate<Config, T, false>(sums, shared, p, tile, at);
  if (__syncthreads_or(static_cast<int>(found))) {
#pragma unroll
    for (int i = 0; i < Config::kTokens / 2; ++i) sums[i] = 0.0f;
    accumulate<Config, T, true>(sums, shared, p, tile, at);
  }
  ptx::named_barrier_sync<1, kConsumerThreads>();  // no warp reads the stages any more
  if (p.splits > 1) ptx::cluster_sync_diverged();   // nor does another block: it may be written to
  finish(shared, sums, p, tile);
}

}  // namespace kitchen::awq
