// The Hopper kernel of awq_linear: see awq_gemm.cu.
//
//   cluster    two blocks with one tile of kTokens rows of x ("tokens") and kRows weight rows each, persistent: tiles, or pieces of K of
//              tiles. Each loads half of the tokens for both: what one SM reads through L2 is what bounds wide tiles (docs/kernels/awq.md)
//   last warp  feeds a ring of stages of 128 columns by bulk tensor copies, from piece to piece
//   others     warpgroups of 64 rows: codes from shared memory, decoded in registers, multiply as wgmma's A; tokens are its N side
//   sums       fp32 in registers, from there to the output
//
// Where tiles do not fill whole rounds of clusters, the last ones are cut into pieces of K of one length (schedule.cuh): a block leaves
// the sums of a piece that does not begin its tile in the workspace, and the block that has the beginning adds them, in their order.
// Where all pieces of a tile end at the same time, each block finishes a part of its tokens instead.
//
// Lane l of a warp owns rows g = l/4 and g + 8 of its 16, and of 8 columns in a row, a word of codes, 2t and 2t + 1 (t = l % 4): byte t.
// So four lanes read the same words, and x keeps its order of columns.
//
// A group whose zero is tiny beside its scale decodes in fp32 (quant/awq_decode.h): so does a warpgroup that meets one, for that stage.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/atomic>
#include <type_traits>

#include "awq_linear/epilogue.cuh"
#include "awq_linear/sm90/schedule.cuh"
#include "kitchen/gemm/gemm_sm90_tiles.cuh"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/movmatrix.h"
#include "kitchen/ptx/named_barrier.h"
#include "kitchen/ptx/store_async.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma_registers.h"
#include "kitchen/quant/awq_decode.h"

namespace kitchen::awq {

constexpr int kStageColumns = 128, kBlocksOf32 = kStageColumns / 32;
constexpr int kMostGroups = 4;  // that a stage may touch, with groups of at least 32 columns
constexpr int kPair = 2;        // blocks of a cluster
constexpr int kFlags = 8;       // of a block, one a warp that consumes

template <int kTokens_, int kStages_>
struct GemmConfig {
  static constexpr int kTokens = kTokens_, kStages = kStages_;
  static constexpr int kConsumerWarps = 8, kConsumerThreads = 32 * kConsumerWarps, kRows = 16 * kConsumerWarps;
  // A whole warpgroup with the producer, so that the others can have its registers.
  static constexpr int kThreads = kConsumerThreads + 128, kConsumerRegisters = 232, kProducerRegisters = 40;
  static constexpr int kSums = kTokens / 2;  // of a thread
  static constexpr int kHalfBytes = kTokens * 128;  // of 64 columns of the tokens of a stage
};

template <class Config>
struct GemmStage {
  uint8_t tokens[2][Config::kHalfBytes];  // 64 columns each, 128-byte swizzle
  uint8_t codes[Config::kRows * 64];      // 64-byte swizzle
  uint16_t scale[kMostGroups][Config::kRows], zero[kMostGroups][Config::kRows];
};

template <class Config>
struct GemmShared {
  GemmStage<Config> stages[Config::kStages];
  uint64_t full[Config::kStages];
  uint64_t empty[Config::kStages];  // consumers of both blocks are done
};

struct GemmParams {
  CUtensorMap tokens, codes, scale, zero;
  int M, N, K;
  Division division;
  int missing_rows;         // of the first tile, that lie in front of the weight: where a part begins within a tile of the whole
  int groups;               // rows of a box of scales
  uint32_t group_inverse;   // 2^32 / (g/32) + 1: exact division of k/32 while K < 2^19; 0 for groups of 32
  // The meeting of pieces: [blocks][kRows * kTokens] sums, [blocks][kFlags] flags.
  float* pieces;
  uint32_t* flags;
  EpilogueParams epilogue;
  bool plain;  // no residual, and four results of x's type are one aligned store
};

template <class Config>
using Ring = gemm_sm90::RingPosition<Config::kStages>;
template <class Config>
using GemmSums = float[Config::kSums];

__device__ __forceinline__ int group_of(const GemmParams& p, int blocks_of_32) {
  return p.group_inverse == 0 ? blocks_of_32 : static_cast<int>(__umulhi(static_cast<uint32_t>(blocks_of_32), p.group_inverse));
}

// First weight row of this block in a piece's tile; below 0 where a part begins within it: copies fill with zeros, nothing is stored.
template <class Config>
__device__ __forceinline__ int block_row(const GemmParams& p, const Piece& piece, uint32_t rank) {
  return (piece.row * kPair + static_cast<int>(rank)) * Config::kRows - p.missing_rows;
}
__device__ __forceinline__ bool is_row(const GemmParams& p, int n) { return static_cast<unsigned>(n) < static_cast<unsigned>(p.N); }

// One thread.
template <class Config>
__device__ __forceinline__ void produce(GemmShared<Config>& shared, const GemmParams& p, Pieces& pieces, uint32_t rank) {
  const uint32_t bytes = sizeof(GemmStage<Config>::tokens) + sizeof(GemmStage<Config>::codes) + 2u * p.groups * Config::kRows * 2;
  constexpr int kShare = Config::kTokens / kPair;  // of the tokens, which this block loads for both
  Piece piece;
  Ring<Config> at;
  while (pieces.next(piece)) {
    const int row = block_row<Config>(p, piece, rank), token = piece.token * Config::kTokens + static_cast<int>(rank) * kShare;
#pragma unroll 1
    for (int i = 0; i < piece.count; ++i, at.advance()) {
      GemmStage<Config>& stage = shared.stages[at.stage];
      uint64_t* const full = &shared.full[at.stage];
      const int k = (piece.first + i) * kStageColumns, group = group_of(p, k / 32);
      ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
      ptx::mbarrier_arrive_expect(full, bytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::tma_load_multicast(stage.tokens[half] + rank * (kShare * 128), &p.tokens, k + 64 * half, token, full, (1u << kPair) - 1);
      }
      ptx::tma_load(stage.codes, &p.codes, k / 2, row, full);
      ptx::tma_load(stage.scale, &p.scale, row, group, full);
      ptx::tma_load(stage.zero, &p.zero, row, group, full);
    }
  }
}

// A lane's words of 32 columns: of row g, and of row g + 8.
struct LaneWords {
  uint4 low, high;
};

// The operands of the two wgmmas of 32 columns, from four words of row g and of row g + 8.
template <class T, bool kExact>
__device__ __forceinline__ void decode_words(uint32_t (&a)[2][4], const quant::AwqGroup<T, true>& low_group,
                                             const quant::AwqGroup<T, true>& high_group, const LaneWords& words, uint32_t byte) {
  using P = quant::AwqPairs<T>;
  const uint4 &low = words.low, &high = words.high;
  const auto of_low = [&](uint32_t word) { return low_group.template apply<kExact>(P::levels_of_byte(word, byte)); };
  const auto of_high = [&](uint32_t word) { return high_group.template apply<kExact>(P::levels_of_byte(word, byte)); };
  a[0][0] = of_low(low.x), a[0][1] = of_high(high.x), a[0][2] = of_low(low.y), a[0][3] = of_high(high.y);
  a[1][0] = of_low(low.z), a[1][1] = of_high(high.z), a[1][2] = of_low(low.w), a[1][3] = of_high(high.w);
}

// First row of this warp in the block's rows.
__device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) / 32 * 16; }

// Where a lane finds its rows in a stage, and whom it tells that a stage is free.
template <class Config>
struct LanePlace {
  int row, codes;   // row g; byte of its first 16 in GemmStage::codes
  uint32_t byte, rank, lane;

  __device__ __forceinline__ explicit LanePlace(uint32_t block_rank) : rank(block_rank), lane(threadIdx.x % 32) {
    row = warp_row() + static_cast<int>(lane) / 4;
    codes = row * 64 + row / 2 % 4 * 16;
    byte = quant::select_byte(lane % 4);
  }
  // Columns 32j .. 32j + 31: the swizzle of rows g and g + 8 is the same.
  __device__ __forceinline__ LaneWords words(const GemmStage<Config>& stage, int j) const {
    const uint8_t* const at = stage.codes + (codes ^ (16 * j));
    return {*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + 8 * 64)};
  }
  // A warp hands a stage back, to the producers of both blocks.
  __device__ __forceinline__ void release(GemmShared<Config>& shared, int stage) const {
    __syncwarp();  // all lanes have read what it held
    if (lane < kPair) ptx::mbarrier_arrive_cluster(&shared.empty[stage], rank ^ lane);
  }
};

// Scales and zeros of a lane's two rows in a stage. kGroups: how many of one length it holds, 1, 2 or 4; 0: groups begin anywhere, and
// every 32 columns get theirs.
template <class T, int kGroups>
struct StageGroups {
  static constexpr int kCount = kGroups == 0 ? kBlocksOf32 : kGroups;
  uint32_t scale[kCount][2], zero[kCount][2];  // as stored

  template <class Config>
  __device__ __forceinline__ void load(const GemmStage<Config>& stage, const GemmParams& p, int first_32, int row) {
    const int first = kGroups == 0 ? group_of(p, first_32) : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int group = kGroups == 0 ? group_of(p, first_32 + i) - first : i;
      scale[i][0] = stage.scale[group][row], scale[i][1] = stage.scale[group][row + 8];
      zero[i][0] = stage.zero[group][row], zero[i][1] = stage.zero[group][row + 8];
    }
  }
  // Whether a lane of the warpgroup needs the exact decoder: all four warps have to issue the same wgmma.
  __device__ __forceinline__ bool exact() const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      found |= quant::awq_needs_exact<T>(__byte_perm(scale[i][0], scale[i][1], 0x5410), __byte_perm(zero[i][0], zero[i][1], 0x5410));
    }
    return ptx::named_barrier_any(1 + static_cast<int>(threadIdx.x) / 128, 128, found != 0);
  }
};

template <class T, int kGroups>
struct DecodeGroups {
  static constexpr int kCount = StageGroups<T, kGroups>::kCount, kBlocks = kBlocksOf32 / kCount;  // of 32 columns, that share one
  quant::AwqGroup<T, true> low[kCount], high[kCount];
  __device__ __forceinline__ explicit DecodeGroups(const StageGroups<T, kGroups>& stored) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) low[i].set(stored.scale[i][0], stored.zero[i][0]), high[i].set(stored.scale[i][1], stored.zero[i][1]);
  }
};

// A warpgroup's sums over a piece. What the next 32 columns need is read before these are decoded.
template <class Config, class T, int kGroups>
__device__ __forceinline__ void accumulate(GemmSums<Config>& sums, GemmShared<Config>& shared, const GemmParams& p, const Piece& piece,
                                           Ring<Config>& at, const LanePlace<Config>& place) {
  uint32_t a[2][2][4];
  StageGroups<T, kGroups> stored;
  LaneWords words;
  int previous = -1, current = at.stage, first_32 = piece.first * kBlocksOf32;
  ptx::mbarrier_wait(&shared.full[current], at.phase);
  words = place.words(shared.stages[current], 0);
  stored.load(shared.stages[current], p, first_32, place.row);
#pragma unroll 1
  for (int left = piece.count; left > 0; --left) {
    const GemmStage<Config>& stage = shared.stages[current];
    // The same in all lanes, and known to be: descriptors are scalar operands.
    const uint64_t b = ptx::descriptor_swizzle128(__shfl_sync(0xffffffffu, ptx::smem_address(stage.tokens), 0));
    const bool exact = stored.exact();
    const DecodeGroups<T, kGroups> groups(stored);
    first_32 += kBlocksOf32;
    at.advance();
    const auto multiply = [&](auto exactly) {
#pragma unroll
      for (int j = 0; j < kBlocksOf32; ++j) {
        const LaneWords now = words;
        if (j + 1 < kBlocksOf32) {
          words = place.words(stage, j + 1);
        } else if (left > 1) {
          ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
          words = place.words(shared.stages[at.stage], 0);
          stored.load(shared.stages[at.stage], p, first_32, place.row);
        }
        constexpr int kBlocks = DecodeGroups<T, kGroups>::kBlocks;
        const int group = j / kBlocks;
        decode_words<T, decltype(exactly)::value>(a[j % 2], groups.low[group], groups.high[group], now, place.byte);
        ptx::wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 16 columns are 32 of the 128 bytes of a token's row
          const int step = 2 * j + half;
          ptx::WgmmaRegisters<T, Config::kTokens>::mma(sums, a[j % 2][half], b + step / 4 * (Config::kHalfBytes / 16) + step % 4 * 2);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();  // the operands of the next 32 columns may be overwritten
        if (j == 0 && previous >= 0) place.release(shared, previous);
      }
    };
    if (exact) multiply(std::true_type());
    else multiply(std::false_type());
    previous = current, current = at.stage;
  }
  ptx::wgmma_wait<0>();
  place.release(shared, previous);
}

// Where a thread's sums of a block's piece lie, 16 bytes at a time.
template <class Config>
__device__ __forceinline__ float4* piece_sums(const GemmParams& p, int block) {
  return reinterpret_cast<float4*>(p.pieces + static_cast<int64_t>(block) * (Config::kRows * Config::kTokens)) + threadIdx.x;
}

using Flag = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

__device__ __forceinline__ uint32_t& warp_flag(const GemmParams& p, int block) { return p.flags[block * kFlags + threadIdx.x / 32]; }

// Says that this warp's sums of a block's piece lie there.
__device__ __forceinline__ void raise_flag(const GemmParams& p, int block) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Flag(warp_flag(p, block)).store(1, cuda::memory_order_release);
}

__device__ __forceinline__ void await_flag(const GemmParams& p, int block) {
  const Flag flag(warp_flag(p, block));
  while (flag.load(cuda::memory_order_acquire) == 0) {
  }
  __syncwarp();
}

// Sums kFirst .. kFirst + kCount - 1 of a thread.
template <class Config, int kFirst, int kCount>
__device__ __forceinline__ void leave_sums(const GemmParams& p, const GemmSums<Config>& sums, int block) {
  float4* const to = piece_sums<Config>(p, block);
#pragma unroll
  for (int i = kFirst; i < kFirst + kCount; i += 4) {
    __stcg(to + i / 4 * Config::kConsumerThreads, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  }
}

// Adds what a block left to the same sums. A thread finds those of its own rows and tokens.
template <class Config, int kFirst, int kCount>
__device__ __forceinline__ void add_sums(const GemmParams& p, GemmSums<Config>& sums, int block) {
  const float4* const from = piece_sums<Config>(p, block);
#pragma unroll
  for (int i = kFirst; i < kFirst + kCount; i += 4) {
    const float4 other = __ldcg(from + i / 4 * Config::kConsumerThreads);
    sums[i] += other.x, sums[i + 1] += other.y, sums[i + 2] += other.z, sums[i + 3] += other.w;
  }
}

// Four lanes with neighbouring rows, which hold the same four columns each, turn them: a lane gets four rows of one column.
__device__ __forceinline__ void turn(float (&y)[4], int lane) {
  const bool odd = lane & 4, upper = lane & 8;
  const float first = __shfl_xor_sync(0xffffffffu, upper ? y[0] : y[2], 8), second = __shfl_xor_sync(0xffffffffu, upper ? y[1] : y[3], 8);
  // Columns 2 * upper and the next, of rows with bit 1 clear and set.
  const float low[2] = {upper ? first : y[0], upper ? second : y[1]}, high[2] = {upper ? y[2] : first, upper ? y[3] : second};
  const float third = __shfl_xor_sync(0xffffffffu, odd ? low[0] : low[1], 4), fourth = __shfl_xor_sync(0xffffffffu, odd ? high[0] : high[1], 4);
  y[0] = odd ? third : low[0], y[1] = odd ? low[1] : third;
  y[2] = odd ? fourth : high[0], y[3] = odd ? high[1] : fourth;
}

// A warp's sums of the tokens from `first_token` on to the output, rounded to x's type. Pairs of tokens of a row become pairs of rows of
// a token; neighbouring lanes exchange one so that a lane has four rows, and four lanes all 16: 32 bytes together. (Halves of that
// took 2 us more for a tile of 256 tokens; H200, 2026-11-30.)
template <class T, int kCount>
__device__ __forceinline__ void finish_plain(const float (&sums)[kCount], const GemmParams& p, int first_token, int first_row, int lane) {
  using P = quant::AwqPairs<T>;
  const bool odd = lane % 2 != 0;
  const int n = first_row + 8 * (lane % 2) + 2 * (lane % 4 - lane % 2), m = first_token + lane / 4;
  float bias[2] = {};
  if (p.epilogue.bias != nullptr) {
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = load_as_float(p.epilogue.bias, max(0, min(first_row + lane / 4 + 8 * h, p.N - 1)), p.epilogue.bias_type);
  }
  const int left = is_row(p, n) ? p.M - m : 0;  // tokens, from m on
  uint16_t* out = static_cast<uint16_t*>(p.epilogue.out) + static_cast<int64_t>(m) * p.N + n;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i, out += int64_t{8} * p.N) {
    uint32_t pair[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) pair[h] = ptx::movmatrix_transposed(P::rounded(sums[4 * i + 2 * h] + bias[h], sums[4 * i + 2 * h + 1] + bias[h]));
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? pair[0] : pair[1], 1);
    if (8 * i < left) *reinterpret_cast<uint2*>(out) = make_uint2(odd ? other : pair[0], odd ? pair[1] : other);
  }
}

// The same with everything that an epilogue may have; a lane writes four rows of a token at a time.
template <int kCount>
__device__ __forceinline__ void finish_any(float (&sums)[kCount], const GemmParams& p, int first_token, int first_row, int lane) {
  const int n = first_row + lane / 8 % 2 * 8 + lane / 16 * 4, m = first_token + 2 * (lane % 4) + lane / 4 % 2;
  float bias[4] = {};
  if (p.epilogue.bias != nullptr) {
#pragma unroll
    for (int e = 0; e < 4; ++e) bias[e] = load_as_float(p.epilogue.bias, max(0, min(n + e, p.N - 1)), p.epilogue.bias_type);
  }
  constexpr int kAtOnce = kCount > 64 ? 16 : 4;  // sums move up, so that the code is there once
#pragma unroll 1
  for (int first = 0; first < kCount; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i += 4) {
      float y[4] = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
      turn(y, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] += bias[e];
      const int64_t token = m + 2 * (first + i);
      if (is_row(p, n) && token < p.M) finish_four(p.epilogue, token * p.N + n, n, p.N - n, y);
    }
#pragma unroll
    for (int i = 0; i + kAtOnce < kCount; ++i) sums[i] = sums[i + kAtOnce];
  }
}

// Where a warp's results of a tile lie in the output, and their lane.
struct WarpOutput {
  int token, row, lane;
};

template <class T, int kCount>
__device__ __forceinline__ void finish(float (&sums)[kCount], const GemmParams& p, const WarpOutput& out) {
  if (p.plain) finish_plain<T>(sums, p, out.token, out.row, out.lane);
  else finish_any(sums, p, out.token, out.row, out.lane);
}

// All parts of the tokens but part `share`, for the blocks that finish them.
template <class Config, int kShares, int kPart = 0>
__device__ __forceinline__ void leave_others(const GemmParams& p, const GemmSums<Config>& sums, int share, int block) {
  constexpr int kCount = Config::kSums / kShares;
  if (kPart != share) leave_sums<Config, kPart * kCount, kCount>(p, sums, block);
  if constexpr (kPart + 1 < kShares) leave_others<Config, kShares, kPart + 1>(p, sums, share, block);
}

// Part `share` of the tokens, of which the other blocks of the tile have left their sums.
template <class Config, class T, int kShares, int kPart = 0>
__device__ __forceinline__ void finish_share(GemmSums<Config>& sums, const GemmParams& p, const WarpOutput& out, int share, int first_block) {
  constexpr int kCount = Config::kSums / kShares, kFirst = kPart * kCount;
  if (share == kPart) {
#pragma unroll
    for (int other = 0; other < kShares; ++other) {
      if (other != kPart) add_sums<Config, kFirst, kCount>(p, sums, first_block + other * kPair);
    }
    float mine[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) mine[i] = sums[kFirst + i];
    finish<T>(mine, p, {out.token + 2 * kFirst, out.row, out.lane});
  } else if constexpr (kPart + 1 < kShares) {
    finish_share<Config, T, kShares, kPart + 1>(sums, p, out, share, first_block);
  }
}

// All kShares pieces of a tile end at the same time: each block gets the sums of a part of the tokens from the others, and finishes it.
template <class Config, class T, int kShares>
__device__ __forceinline__ void exchange_and_finish(GemmSums<Config>& sums, const GemmParams& p, const WarpOutput& out, int share,
                                                    int first_block) {
  if constexpr (Config::kSums / kShares >= 4) {
    leave_others<Config, kShares>(p, sums, share, first_block + share * kPair);
    raise_flag(p, first_block + share * kPair);
#pragma unroll 1
    for (int other = 0; other < kShares; ++other) await_flag(p, first_block + other * kPair);
    finish_share<Config, T, kShares>(sums, p, out, share, first_block);
  }
}

template <class Config>
__device__ __forceinline__ void prepare(GemmShared<Config>& shared, const GemmParams& p) {
  ptx::tma_prefetch_map(&p.tokens);
  ptx::tma_prefetch_map(&p.codes);
  ptx::tma_prefetch_map(&p.scale);
  ptx::tma_prefetch_map(&p.zero);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    ptx::mbarrier_init(&shared.full[stage], 1);
    ptx::mbarrier_init(&shared.empty[stage], kPair * Config::kConsumerWarps);
  }
  ptx::mbarrier_init_fence();
}

template <class Config, class T, int kGroups>
__device__ __forceinline__ void consume(GemmShared<Config>& shared, const GemmParams& p, Pieces& pieces, uint32_t rank) {
  const LanePlace<Config> place(rank);
  Ring<Config> at;
  Piece piece;
#pragma unroll 1
  while (pieces.next(piece)) {
    GemmSums<Config> sums = {};
    accumulate<Config, T, kGroups>(sums, shared, p, piece, at, place);
    const int shares = p.division.shares, position = piece.position, block = position * kPair + static_cast<int>(rank);
    const WarpOutput out = {piece.token * Config::kTokens, block_row<Config>(p, piece, rank) + warp_row(), static_cast<int>(place.lane)};
    if (shares == 2) {
      exchange_and_finish<Config, T, 2>(sums, p, out, position % 2, block - position % 2 * kPair);
    } else if (shares == 4) {
      exchange_and_finish<Config, T, 4>(sums, p, out, position % 4, block - position % 4 * kPair);
    } else if (shares == 8) {
      exchange_and_finish<Config, T, 8>(sums, p, out, position % 8, block - position % 8 * kPair);
    } else if (!piece.begins_tile) {
      leave_sums<Config, 0, Config::kSums>(p, sums, block);
      raise_flag(p, block);
    } else {
#pragma unroll 1
      for (int other = position + 1; other <= piece.last_position; ++other) {
        await_flag(p, other * kPair + rank);
        add_sums<Config, 0, Config::kSums>(p, sums, other * kPair + rank);
      }
      finish<T>(sums, p, out);
    }
  }
}

template <class Config, class T, int kGroups>
__global__ void __launch_bounds__(Config::kThreads, 1) awq_gemm_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  GemmShared<Config>& shared = *reinterpret_cast<GemmShared<Config>*>(shared_bytes);
  const uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == Config::kConsumerThreads) prepare(shared, p);
  __syncwarp();
  ptx::cluster_arrive_relaxed();  // barriers have a fence of their own
  ptx::cluster_wait();
  ptx::griddep_wait();
  ptx::griddep_launch();
  Pieces pieces(p.division, static_cast<int>(blockIdx.x / kPair), static_cast<int>(gridDim.x / kPair));
  if (threadIdx.x >= Config::kConsumerThreads) {
    ptx::setmaxnreg_shrink<Config::kProducerRegisters>();
    if (threadIdx.x == Config::kConsumerThreads) produce(shared, p, pieces, rank);
  } else {
    ptx::setmaxnreg_grow<Config::kConsumerRegisters>();
    consume<Config, T, kGroups>(shared, p, pieces, rank);
  }
  __syncwarp();
  ptx::cluster_sync();  // the other block may still hand back stages here
}

}  // namespace kitchen::awq
