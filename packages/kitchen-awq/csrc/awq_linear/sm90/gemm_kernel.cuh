// The Hopper kernel of awq_linear: see awq_gemm.cu.
//
//   block      persistent: tiles of kRows weight rows x kTokens rows of x ("tokens"), or pieces of K of such tiles
//   last warp  feeds a ring of stages of 128 columns, from piece to piece: codes, scales and zeros by bulk tensor copies, tokens by one
//              copy of what lies together
//   others     warpgroups of 64 rows: codes from shared memory, decoded in registers, multiply as wgmma's A; tokens are its N side
//   sums       fp32 in registers, from there to the output
//
// Where tiles do not fill whole rounds of blocks, the last ones are cut into pieces of K of one length (schedule.cuh): a block leaves
// the sums of a piece that does not begin its tile in the workspace, and the block that has the beginning adds them, in their order.
//
// Lane l of a warp owns rows g = l/4 and g + 8 of its 16, and of a stage's 128 columns 32t .. 32t+31 (t = l % 4): 16 bytes a row, four
// words of eight codes, whose pairs (c, c + 4) are the operands of two wgmmas of 16 columns. Tokens must have the same order of
// columns: pair_tokens makes a copy of x that has it, the image of each stage as it will lie in shared memory, and tells the kernel to
// start meanwhile (a programmatic launch). An image is one copy: boxes of rows of 128 bytes took five cycles a row (H200, 2026-11-30).
//
// A group whose zero is tiny beside its scale decodes in fp32 (quant/awq_decode.h); a warp that met one repeats its sums so, from
// global memory, which hardly ever happens.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/atomic>

#include "awq_linear/epilogue.cuh"
#include "awq_linear/sm90/schedule.cuh"
#include "kitchen/gemm/gemm_sm90_tiles.cuh"
#include "kitchen/mma/m16n8k16_f16.h"
#include "kitchen/ptx/bulk_copy.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma_registers.h"
#include "kitchen/quant/awq_decode.h"

namespace kitchen::awq {

constexpr int kStageColumns = 128, kBlocksOf32 = kStageColumns / 32;
constexpr int kMostWarps = 16;  // that consume
constexpr int kMostGroups = 4;  // that a stage may touch, with groups of at least 32 columns

template <int kTokens_, int kWarpgroups_, int kStages_, int kBlocksPerSm_>
struct GemmConfig {
  static constexpr int kTokens = kTokens_, kWarpgroups = kWarpgroups_, kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kConsumerWarps = 4 * kWarpgroups, kConsumerThreads = 32 * kConsumerWarps;
  // Wide tiles: a whole warpgroup with the producer, so that the others can have its registers.
  static constexpr bool kMovesRegisters = kBlocksPerSm == 1 && kTokens >= 128;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 32);
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kSums = kTokens / 2;  // of a thread
  static constexpr int kTokenBytes = kTokens * 2 * kStageColumns;  // of a stage
};

template <class Config>
struct GemmStage {
  uint8_t tokens[2][Config::kTokens * 128];  // 64 columns each, 128-byte swizzle
  uint8_t codes[Config::kRows * 64];
  uint16_t scale[kMostGroups][Config::kRows], zero[kMostGroups][Config::kRows];
};

template <class Config>
struct GemmShared {
  GemmStage<Config> stages[Config::kStages];
  uint64_t full[Config::kStages], empty[Config::kStages];
};

struct GemmParams {
  CUtensorMap codes, scale, zero;
  int M, N, K;
  Division division;
  int groups;               // rows of a box of scales
  uint32_t group_inverse;   // 2^32 / (g/32) + 1: exact division of k/32 while K < 2^19; 0 for groups of 32
  bool one_group;           // a stage lies in one group
  const uint8_t* paired;    // [tiles of tokens][stages] images
  // The exact decoder's way to the operands, and the meeting of pieces: [blocks][kRows * kTokens] sums, [blocks][kMostWarps] flags.
  const uint8_t* codes_rows;
  const uint16_t *scale_rows, *zero_rows;
  float* pieces;
  uint32_t* flags;
  EpilogueParams epilogue;
};

template <class Config>
using Ring = gemm_sm90::RingPosition<Config::kStages>;
template <class Config>
using GemmSums = float[Config::kSums];

__device__ __forceinline__ int group_of(const GemmParams& p, int blocks_of_32) {
  return p.group_inverse == 0 ? blocks_of_32 : static_cast<int>(__umulhi(static_cast<uint32_t>(blocks_of_32), p.group_inverse));
}

// One thread. Weights of the first stages are on their way before it waits for the tokens.
template <class Config>
__device__ __forceinline__ void produce(GemmShared<Config>& shared, const GemmParams& p) {
  const uint32_t bytes = sizeof(GemmStage<Config>::tokens) + sizeof(GemmStage<Config>::codes) + 2u * p.groups * Config::kRows * 2;
  const auto load_weights = [&](const Piece& piece, int i, const Ring<Config>& at) {
    GemmStage<Config>& stage = shared.stages[at.stage];
    uint64_t* const full = &shared.full[at.stage];
    const int k = (piece.first + i) * kStageColumns, group = group_of(p, k / 32), row = piece.row * Config::kRows;
    ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, bytes);
    ptx::tma_load(stage.codes, &p.codes, k / 2, row, full);
    ptx::tma_load(stage.scale, &p.scale, row, group, full);
    ptx::tma_load(stage.zero, &p.zero, row, group, full);
  };
  Pieces pieces(p.division, blockIdx.x, gridDim.x);
  Piece piece;
  if (!pieces.next(piece)) return;
  Ring<Config> at, weights;
  int ahead = min(Config::kStages, piece.count);
  for (int i = 0; i < ahead; ++i, weights.advance()) load_weights(piece, i, weights);
  ptx::griddep_wait();
  do {
#pragma unroll 1
    for (int i = 0; i < piece.count; ++i, at.advance()) {
      if (i >= ahead) load_weights(piece, i, at);
      GemmStage<Config>& stage = shared.stages[at.stage];
      const int64_t image = static_cast<int64_t>(piece.token) * p.division.stages + piece.first + i;
      ptx::bulk_load(stage.tokens, p.paired + image * Config::kTokenBytes, Config::kTokenBytes, &shared.full[at.stage]);
    }
    ahead = 0;
  } while (pieces.next(piece));
}

// The operands of the two wgmmas of a word: `low` of row g, `high` of row g + 8.
template <class T, bool kExact>
__device__ __forceinline__ void decode_words(uint32_t (&a)[2][4], const quant::AwqGroup<T, true>& low_group,
                                             const quant::AwqGroup<T, true>& high_group, uint32_t low, uint32_t high) {
  using P = quant::AwqPairs<T>;
  a[0][0] = low_group.template apply<kExact>(P::template levels<0>(low)), a[0][1] = high_group.template apply<kExact>(P::template levels<0>(high));
  a[0][2] = low_group.template apply<kExact>(P::template levels<1>(low)), a[0][3] = high_group.template apply<kExact>(P::template levels<1>(high));
  a[1][0] = low_group.template apply<kExact>(P::template levels<2>(low)), a[1][1] = high_group.template apply<kExact>(P::template levels<2>(high));
  a[1][2] = low_group.template apply<kExact>(P::template levels<3>(low)), a[1][3] = high_group.template apply<kExact>(P::template levels<3>(high));
}

// Scale and zero of a lane's two rows of a row block.
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

__device__ __forceinline__ uint32_t word_of(const uint4& words, int w) {
  return w == 0 ? words.x : w == 1 ? words.y : w == 2 ? words.z : words.w;
}

// First row of this warp in the tile.
__device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) / 32 * 16; }

// A warpgroup's sums over a piece. Answers whether a group of this lane needs the exact decoder.
template <class Config, class T>
__device__ __forceinline__ uint32_t accumulate(GemmSums<Config>& sums, GemmShared<Config>& shared, const GemmParams& p, const Piece& piece,
                                               Ring<Config>& at) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = warp_row() + lane / 4, t = lane % 4;
  uint32_t found = 0, a[2][2][4];
  RowGroups<T> groups;
  int previous = -1;
#pragma unroll 1
  for (int i = 0; i < piece.count; ++i, at.advance()) {
    const GemmStage<Config>& stage = shared.stages[at.stage];
    const int first_32 = (piece.first + i) * kBlocksOf32;
    const int group = p.one_group ? 0 : group_of(p, first_32 + t) - group_of(p, first_32);
    const uint8_t* const codes = stage.codes + row * 64 + 16 * t;
    // The same in all lanes, and known to be: descriptors are scalar operands.
    const uint64_t b = ptx::descriptor_swizzle128(__shfl_sync(0xffffffffu, ptx::smem_address(stage.tokens), 0));
    ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
    const uint4 low = *reinterpret_cast<const uint4*>(codes), high = *reinterpret_cast<const uint4*>(codes + 8 * 64);
    found |= groups.load(stage, group, row);
#pragma unroll
    for (int j = 0; j < kBlocksOf32; ++j) {
      uint32_t(&operand)[2][4] = a[j % 2];
      decode_words<T, false>(operand, groups.low, groups.high, word_of(low, j), word_of(high, j));
      ptx::wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 16 columns are 32 of the 128 bytes of a token's row
        const int step = 2 * j + half;
        const uint64_t tokens = b + step / 4 * (Config::kTokens * 128 / 16) + step % 4 * 2;
        ptx::WgmmaRegisters<T, Config::kTokens>::mma(sums, operand[half], tokens);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // the operands of the next word may be overwritten
      if (j == 0 && previous >= 0) {
        __syncwarp();  // all lanes have read what the stage before held
        if (lane == 0) ptx::mbarrier_arrive(&shared.empty[previous]);
      }
    }
    previous = at.stage;
  }
  ptx::wgmma_wait<0>();
  __syncwarp();
  if (previous >= 0 && lane == 0) ptx::mbarrier_arrive(&shared.empty[previous]);
  return found;
}

// The same sums of one warp, each weight decoded in fp32: operands from global memory, mma.sync.
template <class Config, class T>
__device__ __forceinline__ void accumulate_exactly(GemmSums<Config>& sums, const GemmParams& p, const Piece& piece) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) sums[i] = 0.0f;
  int64_t rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) rows[h] = min(piece.row * Config::kRows + warp_row() + g + 8 * h, p.N - 1);
#pragma unroll 1
  for (int step = 0; step < piece.count * kBlocksOf32; ++step) {
    const int stage = piece.first + step / kBlocksOf32, word = step % kBlocksOf32, k = stage * kStageColumns + 32 * t;
    quant::AwqGroup<T, true> groups[2] = {};
    uint32_t codes[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (k >= p.K) continue;
      const int64_t at = static_cast<int64_t>(group_of(p, k / 32)) * p.N + rows[h];
      groups[h].set(p.scale_rows[at], p.zero_rows[at]);
      codes[h] = *reinterpret_cast<const uint32_t*>(p.codes_rows + rows[h] * (p.K / 2) + k / 2 + 4 * word);
    }
    uint32_t a[2][4];
    decode_words<T, true>(a, groups[0], groups[1], codes[0], codes[1]);
    const int64_t image = static_cast<int64_t>(piece.token) * p.division.stages + stage;
    const uint8_t* const tokens = p.paired + image * Config::kTokenBytes + word / 2 * (Config::kTokens * 128) + g * 128 + 4 * t;
#pragma unroll
    for (int j = 0; j < Config::kTokens / 8; ++j) {
      float(&d)[4] = *reinterpret_cast<float(*)[4]>(&sums[4 * j]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = word % 2 * 4 + 2 * half;  // rows 8j + g: swizzled by g
        mma::M16N8K16<T>::multiply(d, a[half], *reinterpret_cast<const uint32_t*>(tokens + j * 1024 + (chunk ^ g) * 16),
                                   *reinterpret_cast<const uint32_t*>(tokens + j * 1024 + ((chunk + 1) ^ g) * 16));
      }
    }
  }
}

// Where a thread's sums of the piece of block `position` lie, 16 bytes at a time.
template <class Config>
__device__ __forceinline__ float4* piece_sums(const GemmParams& p, int position) {
  return reinterpret_cast<float4*>(p.pieces + static_cast<int64_t>(position) * (Config::kRows * Config::kTokens)) + threadIdx.x;
}

using Flag = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

// Sums for the block that has the beginning of the tile.
template <class Config>
__device__ __forceinline__ void leave_sums(const GemmParams& p, const GemmSums<Config>& sums, int position) {
  float4* const to = piece_sums<Config>(p, position);
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    __stcg(to + i / 4 * Config::kConsumerThreads, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) Flag(p.flags[position * kMostWarps + threadIdx.x / 32]).store(1, cuda::memory_order_release);
}

// Adds what block `position` left, as soon as it is there. A thread finds the sums of its own rows and tokens.
template <class Config>
__device__ __forceinline__ void take_sums(const GemmParams& p, GemmSums<Config>& sums, int position) {
  const Flag flag(p.flags[position * kMostWarps + threadIdx.x / 32]);
  while (flag.load(cuda::memory_order_acquire) == 0) {
  }
  __syncwarp();
  const float4* const from = piece_sums<Config>(p, position);
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    const float4 other = __ldcg(from + i / 4 * Config::kConsumerThreads);
    sums[i] += other.x, sums[i + 1] += other.y, sums[i + 2] += other.z, sums[i + 3] += other.w;
  }
}

// Four lanes with neighbouring rows, which hold the same four tokens each, turn them: a lane gets four rows of one token.
__device__ __forceinline__ void turn(float (&y)[4], int lane) {
  const bool odd = lane & 4, upper = lane & 8;
  const float first = __shfl_xor_sync(0xffffffffu, upper ? y[0] : y[2], 8), second = __shfl_xor_sync(0xffffffffu, upper ? y[1] : y[3], 8);
  // Tokens 2 * upper and the next, of rows with bit 1 clear and set.
  const float low[2] = {upper ? first : y[0], upper ? second : y[1]}, high[2] = {upper ? y[2] : first, upper ? y[3] : second};
  const float third = __shfl_xor_sync(0xffffffffu, odd ? low[0] : low[1], 4), fourth = __shfl_xor_sync(0xffffffffu, odd ? high[0] : high[1], 4);
  y[0] = odd ? third : low[0], y[1] = odd ? low[1] : third;
  y[2] = odd ? fourth : high[0], y[3] = odd ? high[1] : fourth;
}

// A warp's sums to the output.
template <class Config>
__device__ __forceinline__ void finish(const GemmSums<Config>& sums, const GemmParams& p, const Piece& piece) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int n = piece.row * Config::kRows + warp_row() + 8 * half + lane / 16 * 4;
    float bias[4] = {};
    if (p.epilogue.bias != nullptr) {
#pragma unroll
      for (int e = 0; e < 4; ++e) bias[e] = load_as_float(p.epilogue.bias, min(n + e, p.N - 1), p.epilogue.bias_type);
    }
#pragma unroll
    for (int i = 0; i < Config::kTokens / 8; i += 2) {
      const int token = piece.token * Config::kTokens + 8 * i;
      if (token >= p.M) continue;
      float y[4] = {sums[4 * i + 2 * half], sums[4 * i + 2 * half + 1], sums[4 * i + 4 + 2 * half], sums[4 * i + 5 + 2 * half]};
      turn(y, lane);
      const int m = token + lane / 8 % 2 * 8 + 2 * (lane % 4) + lane / 4 % 2;
      if (m >= p.M || n >= p.N) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] += bias[e];
      finish_four(p.epilogue, static_cast<int64_t>(m) * p.N + n, n, p.N - n, y);
    }
  }
}

template <class Config, class T>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) awq_gemm_kernel(const __grid_constant__ GemmParams p) {
  using Shared = GemmShared<Config>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == Config::kConsumerThreads) {
    ptx::tma_prefetch_map(&p.codes);
    ptx::tma_prefetch_map(&p.scale);
    ptx::tma_prefetch_map(&p.zero);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], Config::kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= Config::kConsumerThreads) {
    if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_shrink<24>();
    if (threadIdx.x == Config::kConsumerThreads) produce(shared, p);
    return;
  }
  if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_grow<Config::kConsumerRegisters>();
  ptx::griddep_wait();  // before the workspace is touched
  ptx::griddep_launch();
  Ring<Config> at;
  Pieces pieces(p.division, blockIdx.x, gridDim.x);
  Piece piece;
#pragma unroll 1
  while (pieces.next(piece)) {
    GemmSums<Config> sums = {};
    const uint32_t found = accumulate<Config, T>(sums, shared, p, piece, at);
    if (__any_sync(0xffffffffu, found != 0)) accumulate_exactly<Config, T>(sums, p, piece);
    if (piece.first > 0) {
      leave_sums<Config>(p, sums, pieces.position);
      continue;
    }
#pragma unroll 1
    for (int other = pieces.position + 1; other <= piece.last_position; ++other) take_sums<Config>(p, sums, other);
    finish<Config>(sums, p, piece);
  }
}

}  // namespace kitchen::awq
