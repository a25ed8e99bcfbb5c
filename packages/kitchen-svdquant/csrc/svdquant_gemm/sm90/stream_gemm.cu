// W4A4 GEMM with a low-rank branch for up to 64 rows of x on Hopper, where reading the weight once is all the time there is. What
// it computes: smxx/stream_gemm.cuh, with the low-rank product by bfloat16 parts of both sides, which leaves 2^-16 of it.
//
//   block     an SM; tiles of 8 * kRowTiles weight rows, one after the other, with all of K: nothing meets between blocks
//   warp      one of 16: a sixteenth of K and all rows of the tile, from its own rings in shared memory of pieces of kPieceGroups
//             groups, which it fills by small copies itself: warps wait for nobody until a tile is done. Weights of the first rounds
//             are on their way before the kernel in front has ended
//   lane      tokens are the m=16 side of mma.sync, weight rows the n=8 side; an operand is 8 bytes of a group, the order of k inside
//             of a group being free
//   sums      of the warps meet in shared memory, in order: they depend on K alone, not on N or on the tile
//
// Integer sums start at 1.5 * 2^23, so that they are floats of their value and that number: no conversion.
//
// A programmatic launch reads weights and what belongs to them before it waits for the kernel in front.
// Measured: docs/kernels/svdquant.md.
#include "svdquant_gemm/sm90/stream_gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kitchen/common/to_float.h"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/mma/m16n8k16_f16.h"
#include "kitchen/mma/m16n8k32_s8.h"
#include "kitchen/ptx/cp_async_group.h"
#include "kitchen/ptx/cp_async_small.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/keep.h"
#include "kitchen/ptx/prefetch.h"
#include "svdquant_gemm/scale_layout.h"
#include "svdquant_gemm/sm90/store_pair.cuh"

namespace kitchen::svdquant {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kGroupBytes = kGroup / 2, kChunk = 16;
constexpr int kMostTokens = 64, kMostSlots = 16;
constexpr int kMagic = 0x4B400000;
constexpr float kMagicValue = 0x1.8p23f;

// kRowTiles: of 8 weight rows. kTokenTiles: of 16 tokens; of 8 where kHalf. kPlain: scales of the weight have 16 bits, proj_up is
// bfloat16, and their rows are aligned.
template <int kRowTiles_, int kTokenTiles_, bool kHalf_, bool kPlain_>
struct Config {
  static constexpr int kRowTiles = kRowTiles_, kRows = 8 * kRowTiles;
  static constexpr int kTokenTiles = kTokenTiles_;
  static constexpr int kEights = kHalf_ ? 1 : 2;  // rows g, and g + 8, of a tile of tokens
  static constexpr int kTokens = 8 * kEights * kTokenTiles;
  static constexpr bool kPlain = kPlain_;
  // 128 bytes of a row where there is room: a line of the L2.
  static constexpr int kPieceGroups = kTokenTiles == 1 ? 4 : kTokenTiles == 2 ? 2 : 1;
  static constexpr int kPitch = kPieceGroups * kGroupBytes, kChunksOfRow = kPitch / kChunk;
  // A piece of weights: rows, then scales [group][kRows] of 16 bits. Of tokens: rows, then scales [group][M].
  static constexpr int kScaleRowBytes = 2 * kRows, kScalesAt = kRows * kPitch, kTokenScalesAt = kTokens * kPitch;
  static constexpr int kWeightPiece = kScalesAt + (kPlain ? kPieceGroups * kScaleRowBytes : 0);
  static constexpr int kTokenPiece = kTokenScalesAt + kPieceGroups * kTokens * 4;
  static constexpr int kSumTokens = kHalf_ ? 8 : 16;  // that the warps add up at a time
  static constexpr int kSumPitch = kRows % 16 == 0 ? kRows + 8 : kRows;
  static constexpr int kSumBytes = kWarps * kSumTokens * kSumPitch * 4;
  static constexpr int kBoundThreads = kTokenTiles == 1 ? 640 : kThreads;  // registers for a block of the quantizer beside this one
  static constexpr int kMostShared = (kTokenTiles == 1 ? 213 : 222) * 1024;  // and its shared memory
  static_assert(4 % kPieceGroups == 0 && kWeightPiece % 16 == 0 && kTokenPiece % 16 == 0);
};

// Where group `inside` of a row of a piece lies, so that lanes that read four rows at once meet no bank twice.
template <class Config>
__device__ __forceinline__ int swapped(int row, int inside) {
  return inside ^ (Config::kPieceGroups == 4 ? row % 4 : Config::kPieceGroups == 2 ? row / 2 % 2 : 0);
}

struct Params {
  StreamOperands o;
  int tiles, groups_each, pieces;   // tiles of weight rows; groups of a warp, and pieces that they make
  int weight_slots, token_slots;    // of a warp's rings
  bool tokens_stay;                 // all of a warp's tokens fit: they are loaded once
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// What a warp loads. Rows beyond the matrix repeat the last.
template <class Config>
struct Feed {
  const Params& params;
  uint8_t *weights, *tokens;  // this warp's rings
  int begin, end;             // of the warp's groups
  int lane;

  // The lane, of which the compiler knows nothing: it would keep the offsets of all copies in registers.
  __device__ __forceinline__ int some_lane() const {
    int some = lane;
    ptx::keep(some);
    return some;
  }

  __device__ __forceinline__ static uint32_t chunk_at(int row, int chunk) {
    return row * Config::kPitch + swapped<Config>(row, chunk / 2) * kGroupBytes + chunk % 2 * kChunk;
  }
  __device__ __forceinline__ int count(int piece) const {
    return min(Config::kPieceGroups, end - begin - piece * Config::kPieceGroups);
  }

  __device__ __forceinline__ void load_weights(int tile, int piece, int slot) const {
    const StreamOperands& o = params.o;
    const int lane = some_lane();
    const int first = begin + piece * Config::kPieceGroups, groups = count(piece), first_row = tile * Config::kRows;
    const int last = min(Config::kRows, static_cast<int>(o.N) - first_row) - 1;
    const uint32_t row_bytes = static_cast<uint32_t>(o.K / 2), to = shared_address(weights + slot * Config::kWeightPiece);
    const uint8_t* const from = o.b + first_row * static_cast<int64_t>(row_bytes) + first * kGroupBytes;
    constexpr int kAll = Config::kRows * Config::kChunksOfRow;
#pragma unroll
    for (int j = 0; j < (kAll + 31) / 32; ++j) {
      const int i = lane + 32 * j, row = i / Config::kChunksOfRow, chunk = i % Config::kChunksOfRow;
      if (i < kAll && chunk < 2 * groups) {
        ptx::cp_async_16(to + chunk_at(row, chunk), from + (min(row, last) * row_bytes + chunk * kChunk));
      }
    }
    if constexpr (Config::kPlain) {
      const int group = lane / Config::kRowTiles, column = lane % Config::kRowTiles * 8;
      if (group < min(groups, Config::kPieceGroups) && column <= last) {
        ptx::cp_async_16(to + Config::kScalesAt + lane * kChunk,
                         static_cast<const uint16_t*>(o.b_scale) + ((first + group) * static_cast<int>(o.N) + first_row + column));
      }
    }
  }

  __device__ __forceinline__ void load_tokens(int piece, int slot) const {
    const StreamOperands& o = params.o;
    const int lane = some_lane();
    const int first = begin + piece * Config::kPieceGroups, groups = count(piece), M = static_cast<int>(o.M);
    const uint32_t row_bytes = static_cast<uint32_t>(o.K / 2), to = shared_address(tokens + slot * Config::kTokenPiece);
#pragma unroll
    for (int j = 0; j < (Config::kTokens * Config::kChunksOfRow + 31) / 32; ++j) {
      const int i = lane + 32 * j, row = i / Config::kChunksOfRow, chunk = i % Config::kChunksOfRow;
      if (row < M && chunk < 2 * groups) {
        ptx::cp_async_16(to + chunk_at(row, chunk), o.a + (row * row_bytes + first * kGroupBytes + chunk * kChunk));
      }
    }
#pragma unroll
    for (int j = 0; j < (Config::kTokens * Config::kPieceGroups + 31) / 32; ++j) {
      const int i = lane + 32 * j;
      if (i < groups * M) ptx::cp_async_4(to + Config::kTokenScalesAt + i * 4, o.a_scale + (first * M + i));
    }
  }
};

template <class Config>
using Sums = float[Config::kRowTiles][Config::kTokenTiles][4];

// What a lane has: rows 8j + g of the tile as operands, 8j + 2t and 8j + 2t + 1 as sums; tokens g, and g + 8, of its tiles. Codes of
// tokens beyond the last are whatever lies there, and scales repeat the last; they are not stored.
template <class Config>
struct Lane {
  const StreamOperands& o;
  int g, t, warp;
  uint32_t mask, left, right;  // of the codes of tokens: as in multiply_bytes.cuh
  float factor;
  int start[4];  // of integer sums
  int token[Config::kTokenTiles][Config::kEights];

  __device__ __forceinline__ explicit Lane(const StreamOperands& operands)
      : o(operands),
        g(static_cast<int>(threadIdx.x) % 32 / 4),
        t(static_cast<int>(threadIdx.x) % 4),
        warp(static_cast<int>(threadIdx.x) / 32),
        mask(o.is_unsigned ? 0x0f0f0f0fu : 0xf0f0f0f0u),
        left(o.is_unsigned ? 0 : 4),
        right(o.is_unsigned ? 4 : 0),
        factor(o.is_unsigned ? 0x1p-4f : 0x1p-8f),
        start{kMagic, kMagic, kMagic, kMagic} {
    ptx::keep(mask), ptx::keep(left), ptx::keep(right);  // else they are made again for every group
    if constexpr (Config::kTokenTiles < 4) {
      ptx::keep(factor);
      ptx::keep(start[0]), ptx::keep(start[1]), ptx::keep(start[2]), ptx::keep(start[3]);
    }
#pragma unroll
    for (int i = 0; i < Config::kTokenTiles; ++i) {
#pragma unroll
      for (int h = 0; h < Config::kEights; ++h) token[i][h] = min(16 * i + 8 * h + g, static_cast<int>(o.M) - 1);
    }
  }

  // Of the weight's rows that this lane's sums have.
  __device__ __forceinline__ void load_scales(float (&scale)[Config::kRowTiles][2], const uint8_t* weights, int inside, int group,
                                              int first_row) const {
    const bool is_half = o.b_scale_type == DType::kFloat16;
#pragma unroll
    for (int j = 0; j < Config::kRowTiles; ++j) {
      if constexpr (Config::kPlain) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(weights + Config::kScalesAt + inside * Config::kScaleRowBytes +
                                                                 16 * j + 4 * t);
        is_half ? Word<__half>::unpack(word, scale[j]) : Word<__nv_bfloat16>::unpack(word, scale[j]);
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int n = min(first_row + 8 * j + 2 * t + e, static_cast<int>(o.N) - 1);
          scale[j][e] = load_as_float(o.b_scale, group * static_cast<int>(o.N) + n, o.b_scale_type);
        }
      }
    }
  }

  // Group `inside` of a piece.
  __device__ __forceinline__ void multiply(Sums<Config>& sums, const uint8_t* weights, const uint8_t* of_tokens, int inside, int group,
                                           int first_row) const {
    using Mma = mma::M16N8K32S8;
    constexpr uint32_t kTop = 0xf0f0f0f0u;
    const float* const token_scales =
        reinterpret_cast<const float*>(of_tokens + Config::kTokenScalesAt) + inside * static_cast<int>(o.M);
    float b_scale[Config::kRowTiles][2];
    load_scales(b_scale, weights, inside, group, first_row);
    const int place = swapped<Config>(g, inside) * kGroupBytes + 8 * t;  // rows eight further are swapped alike
    uint32_t even[Config::kRowTiles][2], odd[Config::kRowTiles][2];
#pragma unroll
    for (int j = 0; j < Config::kRowTiles; ++j) {
      const uint2 word = *reinterpret_cast<const uint2*>(weights + (8 * j + g) * Config::kPitch + place);
      even[j][0] = word.x << 4 & kTop, even[j][1] = word.y << 4 & kTop, odd[j][0] = word.x & kTop, odd[j][1] = word.y & kTop;
    }
#pragma unroll
    for (int i = 0; i < Config::kTokenTiles; ++i) {
      uint32_t tokens[2][4] = {};
      float a_scale[Config::kEights];
#pragma unroll
      for (int h = 0; h < Config::kEights; ++h) {
        const uint2 word = *reinterpret_cast<const uint2*>(of_tokens + (16 * i + 8 * h + g) * Config::kPitch + place);
        tokens[0][h] = word.x << left & mask, tokens[0][2 + h] = word.x >> right & mask;
        tokens[1][h] = word.y << left & mask, tokens[1][2 + h] = word.y >> right & mask;
        a_scale[h] = token_scales[token[i][h]] * factor;
      }
#pragma unroll
      for (int j = 0; j < Config::kRowTiles; ++j) {
        int dot[4];
        Mma::multiply(dot, tokens[0], even[j][0], odd[j][0], start);
        Mma::multiply(dot, tokens[1], even[j][1], odd[j][1]);
#pragma unroll
        for (int e = 0; e < 2 * Config::kEights; ++e) {
          const float scaled = __fmul_rn(__fsub_rn(__int_as_float(dot[e]), kMagicValue), a_scale[e / 2]);
          sums[j][i][e] = __fmaf_rn(scaled, b_scale[j][e % 2], sums[j][i][e]);
        }
      }
    }
  }

  // Sums of tile `i` of tokens.
  __device__ __forceinline__ void store(float* to, const Sums<Config>& sums, int i) const {
    float* const mine = to + (warp * Config::kSumTokens + g) * Config::kSumPitch + 2 * t;
#pragma unroll
    for (int h = 0; h < Config::kEights; ++h) {
#pragma unroll
      for (int j = 0; j < Config::kRowTiles; ++j) {
        *reinterpret_cast<float2*>(mine + 8 * h * Config::kSumPitch + 8 * j) = make_float2(sums[j][i][2 * h], sums[j][i][2 * h + 1]);
      }
    }
  }
};

// One warp's part of the low-rank product: steps of 16 ranks, dealt out over the warps. Operands of the first step are loaded early.
template <class Config>
struct LowRank {
  static constexpr bool kKeepsLow = Config::kTokenTiles <= 2;  // else there are no registers for it
  using Low = float[Config::kTokenTiles][2][Config::kEights][2];  // of a token: ranks 2t, 2t+1; 8+2t, 9+2t

  const Lane<Config>& lane;
  int steps;
  uint32_t up[Config::kRowTiles][2];  // where plain
  Low low;

  __device__ __forceinline__ explicit LowRank(const Lane<Config>& of) : lane(of), steps((of.o.R + 15) / 16) {}

  __device__ __forceinline__ int row(int first_row, int j) const {
    return min(first_row + 8 * j + lane.g, static_cast<int>(lane.o.N) - 1) * lane.o.R;
  }
  __device__ __forceinline__ int rank(int step, int half) const { return 16 * step + 8 * half + 2 * lane.t; }

  __device__ __forceinline__ void load_up(int step, int first_row) {
    if (step >= steps || !Config::kPlain) return;
#pragma unroll
    for (int j = 0; j < Config::kRowTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = rank(step, half);
        up[j][half] = r < lane.o.R ? __ldg(static_cast<const uint32_t*>(lane.o.up) + (row(first_row, j) + r) / 2) : 0u;
      }
    }
  }

  // Not by way of the read-only cache: the kernel in front may have been running when this one started.
  __device__ __forceinline__ void load_low(int step, int i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int h = 0; h < Config::kEights; ++h) {
        const float* const from = lane.o.low + lane.token[i][h] * lane.o.R;
        const int r = rank(step, half);
#pragma unroll
        for (int e = 0; e < 2; ++e) low[i][half][h][e] = r + e < lane.o.R ? from[r + e] : 0.0f;
      }
    }
  }
  __device__ __forceinline__ void load_low(int step) {
    if (step >= steps || !kKeepsLow) return;
#pragma unroll
    for (int i = 0; i < Config::kTokenTiles; ++i) load_low(step, i);
  }

  __device__ __forceinline__ float up_at(int row, int r) const {
    return r < lane.o.R ? load_as_float(lane.o.up, row + r, lane.o.up_type) : 0.0f;
  }

  __device__ __forceinline__ void multiply_step(Sums<Config>& sums, int step, int first_row, bool loaded) {
    using Mma = mma::M16N8K16<__nv_bfloat16>;
#pragma unroll
    for (int i = 0; i < Config::kTokenTiles; ++i) {
      if (!kKeepsLow || !loaded) load_low(step, i);
      uint32_t high[4] = {}, rest[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int h = 0; h < Config::kEights; ++h) {
          const Ranks ranks = split(low[i][half][h][0], low[i][half][h][1]);
          high[2 * half + h] = ranks.high, rest[2 * half + h] = ranks.low;
        }
      }
#pragma unroll
      for (int j = 0; j < Config::kRowTiles; ++j) {
        if constexpr (Config::kPlain) {
          Mma::multiply(sums[j][i], high, up[j][0], up[j][1]);
          Mma::multiply(sums[j][i], rest, up[j][0], up[j][1]);
          continue;
        }
        const int at = row(first_row, j), r = rank(step, 0);
        const Ranks first = split(up_at(at, r), up_at(at, r + 1)), second = split(up_at(at, r + 8), up_at(at, r + 9));
        Mma::multiply(sums[j][i], high, first.high, second.high);
        Mma::multiply(sums[j][i], rest, first.high, second.high);
        Mma::multiply(sums[j][i], high, first.low, second.low);
      }
    }
  }

  __device__ __forceinline__ void multiply(Sums<Config>& sums, int first_row) {
    if (lane.warp < steps) multiply_step(sums, lane.warp, first_row, true);
#pragma unroll 1
    for (int step = lane.warp + kWarps; step < steps; step += kWarps) {  // ranks beyond 256
      load_up(step, first_row);
      multiply_step(sums, step, first_row, false);
      load_low(lane.warp);
    }
  }
};

// What a thread finishes of every tile of rows and of 16 tokens: two neighbouring columns of a token.
template <class Config>
struct Finish {
  static constexpr int kPairsOfRow = Config::kRows / 2;
  static_assert(Config::kSumTokens * kPairsOfRow <= kThreads, "a pair for each thread");

  const StreamOperands& o;
  int token = static_cast<int>(threadIdx.x) / kPairsOfRow, column = static_cast<int>(threadIdx.x) % kPairsOfRow * 2;
  float2 bias;

  __device__ __forceinline__ explicit Finish(const StreamOperands& operands) : o(operands) {}

  __device__ __forceinline__ void load_bias(int first_row) { bias = bias_of(o, first_row + column); }

  // Sums meet in the order of the warps.
  __device__ __forceinline__ void operator()(const float* sums, int first_token, int first_row) const {
    if (token >= min(Config::kSumTokens, static_cast<int>(o.M) - first_token)) return;
    const float* const mine = sums + token * Config::kSumPitch + column;
    float2 sum = *reinterpret_cast<const float2*>(mine);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(mine + w * Config::kSumTokens * Config::kSumPitch);
      sum.x += part.x, sum.y += part.y;
    }
    store_pair(o, sum, bias, first_token + token, first_row + column);
  }
};

// To L2: the scales of a tile, where they are loaded as they are used.
template <class Config>
__device__ __forceinline__ void prefetch_scales(const StreamOperands& o, int first_row) {
  if (Config::kPlain) return;
  const int N = static_cast<int>(o.N), groups = static_cast<int>(o.K / kGroup), rows = min(Config::kRows, N - first_row);
  const int bytes = size_of(o.b_scale_type);
  for (int group = static_cast<int>(threadIdx.x); group < groups; group += kThreads) {
    const auto* const from = static_cast<const uint8_t*>(o.b_scale) + static_cast<int64_t>(group * N + first_row) * bytes;
    ptx::prefetch_l2(from);
    ptx::prefetch_l2(from + rows * bytes - 1);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kBoundThreads) stream_gemm(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const StreamOperands& o = params.o;
  const int warp = static_cast<int>(threadIdx.x) / 32, grid = static_cast<int>(gridDim.x);
  const int groups = static_cast<int>(o.K / kGroup), begin = min(groups, warp * params.groups_each);
  const int weight_bytes = params.weight_slots * Config::kWeightPiece, token_bytes = params.token_slots * Config::kTokenPiece;
  uint8_t* const rings = shared + Config::kSumBytes + warp * (weight_bytes + token_bytes);
  float* const sums_at = reinterpret_cast<float*>(shared);
  const Feed<Config> feed = {params,
                             rings,
                             rings + weight_bytes,
                             begin,
                             min(groups, begin + params.groups_each),
                             static_cast<int>(threadIdx.x) % 32};

  // The first round.
  int tile = static_cast<int>(blockIdx.x), next_tile = tile, next_piece = 0;  // of weights: what is loaded next
  const auto load_next = [&](int slot) {
    if (next_tile >= params.tiles) return;
    feed.load_weights(next_tile, next_piece, slot);
    if (++next_piece == params.pieces) next_piece = 0, next_tile += grid;
  };
#pragma unroll 1
  for (int slot = 0; slot < params.weight_slots; ++slot) load_next(slot), ptx::cp_async_commit();
  const Lane<Config> lane(o);
  LowRank<Config> low_rank(lane);
  low_rank.load_up(warp, tile * Config::kRows);
  Finish<Config> finish(o);
  finish.load_bias(tile * Config::kRows);
  prefetch_scales<Config>(o, tile * Config::kRows);
  ptx::griddep_wait();
#pragma unroll 1
  for (int slot = 0; slot < params.token_slots; ++slot) feed.load_tokens(slot, slot), ptx::cp_async_commit();

  low_rank.load_low(warp);

  // Groups of copies end in order: the first weights, the first tokens, then one for every piece that was read.
  const int least = min(params.weight_slots, params.token_slots) - 1;
  int weight_slot = 0, token_slot = 0, waits = params.token_slots;  // pieces that wait for tokens
#pragma unroll 1
  while (true) {
    const int first_row = tile * Config::kRows;
    const bool last = tile + grid >= params.tiles;
    Sums<Config> sums = {};
#pragma unroll 1
    for (int piece = 0; piece < params.pieces; ++piece) {
      ptx::cp_async_wait_group(params.tokens_stay && waits <= 0 ? params.weight_slots - 1 : least);
      __syncwarp();  // other lanes' copies as well
      --waits;
      const uint8_t* const weights = feed.weights + weight_slot * Config::kWeightPiece;
      const uint8_t* const tokens = feed.tokens + token_slot * Config::kTokenPiece;
      const int first = begin + piece * Config::kPieceGroups, count = feed.count(piece);
#pragma unroll(Config::kPieceGroups < 2 ? 1 : 2)
      for (int i = 0; i < Config::kPieceGroups; ++i) {
        if (i < count) lane.multiply(sums, weights, tokens, i, first + i, first_row);
      }
      __syncwarp();
      load_next(weight_slot);
      if (!params.tokens_stay && !(last && piece + params.token_slots >= params.pieces)) {
        const int next = piece + params.token_slots;
        feed.load_tokens(next < params.pieces ? next : next - params.pieces, token_slot);
      }
      ptx::cp_async_commit();
      if (++weight_slot == params.weight_slots) weight_slot = 0;
      if (++token_slot == params.token_slots) token_slot = 0;
    }
    low_rank.multiply(sums, first_row);
    tile += grid;
    if (last) {
      ptx::griddep_launch();  // all loads of this block are done: the next kernel's blocks may take its place
    } else {
      low_rank.load_up(warp, tile * Config::kRows);
      prefetch_scales<Config>(o, tile * Config::kRows);
    }
#pragma unroll
    for (int i = 0; i < Config::kTokenTiles; ++i) {
      if (16 * i >= o.M) break;
      if (i > 0) __syncthreads();  // the sums before were read
      lane.store(sums_at, sums, i);
      __syncthreads();
      finish(sums_at, 16 * i, first_row);
    }
    if (last) return;
    finish.load_bias(tile * Config::kRows);
    __syncthreads();
  }
}

// ---------------------------------------------------------------- launch

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Config>
void launch(const StreamOperands& o, int device, cudaStream_t stream) {
  Params params{};
  params.o = o;
  const int64_t tiles = ceil_div(o.N, Config::kRows), sms = host::attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t rounds = ceil_div(tiles, sms), blocks = ceil_div(tiles, rounds);
  params.tiles = static_cast<int>(tiles);
  params.groups_each = static_cast<int>(ceil_div(ceil_div(o.K / kGroup, kWarps), Config::kPieceGroups) * Config::kPieceGroups);
  params.pieces = static_cast<int>(ceil_div(params.groups_each, Config::kPieceGroups));
  // As much as fits; tokens are kept where two pieces of weights fit beside them.
  const int room = (Config::kMostShared - Config::kSumBytes) / kWarps;
  const auto weight_slots = [&](int token_slots) {
    return static_cast<int>(std::min<int64_t>(
        {rounds * params.pieces, kMostSlots, (room - token_slots * Config::kTokenPiece) / Config::kWeightPiece}));
  };
  params.token_slots = std::min(params.pieces, kMostSlots);
  while (params.token_slots > 1 && weight_slots(params.token_slots) < std::min<int64_t>(params.token_slots, rounds * params.pieces)) {
    --params.token_slots;
  }
  params.weight_slots = weight_slots(params.token_slots);
  params.tokens_stay = params.token_slots == params.pieces;
  const size_t shared =
      Config::kSumBytes +
      static_cast<size_t>(kWarps) * (params.weight_slots * Config::kWeightPiece + params.token_slots * Config::kTokenPiece);
  host::launch("svdquant_stream_sm90", stream_gemm<Config>, {blocks, kThreads, 1, shared, stream, o.programmatic_launch}, params);
}

// Rows of a tile, in eights, so that the SM with most to do is done first. Measured on an H200: eight rows of K = 3072 take 0.47 us, the
// end of a tile 0.8.
int choose_row_tiles(const StreamOperands& o, int device, int most) {
  const int64_t sms = host::attribute(cudaDevAttrMultiProcessorCount, device);
  int best = 2;
  int64_t least = 0;
  for (int tiles = 2; tiles <= most; ++tiles) {
    const int64_t cost = ceil_div(ceil_div(o.N, 8 * tiles), sms) * (10 * tiles + 17);
    if (least == 0 || cost < least) best = tiles, least = cost;
  }
  return best;
}

template <int kTokenTiles, bool kHalf>
void launch_rows(const StreamOperands& o, int device, cudaStream_t stream) {
  const bool scales = o.b_scale_type != DType::kFloat32 && o.N % 8 == 0 && reinterpret_cast<uintptr_t>(o.b_scale) % 16 == 0;
  if (!scales || (o.R > 0 && (o.up_type != DType::kBFloat16 || o.R % 2 != 0))) {
    return launch<Config<2, kTokenTiles, kHalf, false>>(o, device, stream);
  }
  constexpr int kMost = kTokenTiles == 1 ? 4 : 3;  // more would fill the registers
  const int tiles = choose_row_tiles(o, device, kMost);
  if constexpr (kMost >= 4) {
    if (tiles == 4) return launch<Config<4, kTokenTiles, kHalf, true>>(o, device, stream);
  }
  if constexpr (kMost >= 3) {
    if (tiles == 3) return launch<Config<3, kTokenTiles, kHalf, true>>(o, device, stream);
  }
  launch<Config<2, kTokenTiles, kHalf, true>>(o, device, stream);
}

}  // namespace

const char* svdquant_stream_sm90_unsupported(const StreamOperands& o) {
  const auto aligned = [](const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; };
  if (o.M < 0 || o.N < 1 || o.K < kGroup || o.K % kGroup != 0 || o.R < 0) return "M, N, K or R is out of range";
  if (o.M > kMostTokens) return "for up to 64 rows";
  if (o.K > (int64_t{1} << 25) || o.N * std::max<int64_t>(o.K / kGroup, o.R) > (int64_t{1} << 30)) return "N or K is out of range";  // 32-bit offsets
  if (!aligned(o.a, 16) || !aligned(o.b, 16)) return "codes must be aligned to 16 bytes";
  if (!aligned(o.b_scale, 4) || !aligned(o.up, 4)) return "b_scale and up must be aligned to 4 bytes";
  return nullptr;
}

void svdquant_stream_sm90(const StreamOperands& o, int device, cudaStream_t stream) {
  if (const char* const reason = svdquant_stream_sm90_unsupported(o)) {
    throw std::runtime_error(std::string("svdquant_stream_sm90: ") + reason);
  }
  if (o.M == 0) return;
  const host::DeviceGuard guard(device);
  if (o.M <= 8) return launch_rows<1, true>(o, device, stream);
  if (o.M <= 16) return launch_rows<1, false>(o, device, stream);
  if (o.M <= 32) return launch_rows<2, false>(o, device, stream);
  launch_rows<4, false>(o, device, stream);
}

}  // namespace kitchen::svdquant
