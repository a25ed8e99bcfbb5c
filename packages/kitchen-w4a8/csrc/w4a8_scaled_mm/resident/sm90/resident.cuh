// W4A8 and W6A8 product for 1 to 32 tokens of a weight in the resident layout (resident.py): out^T[N, M] = v8[N, K] a^T[K, M].
// Hopper.
//
// Codes go from global memory straight to registers, two steps of a warp under way while others are decoded, and meet the
// tokens in mma.sync m16n8k32: 16 outputs are its m side, 8 tokens its n side. The order of k within a sum is free as long as
// both sides agree: of a step, lane (g, q) = (lane / 4, lane % 4) takes columns 128 * half + 32 * q .. + 31 of rows g and g + 8,
// 16 bytes of nibbles each, which are the operands of two MMAs for either half of them, and the tokens' words at the same columns.
//
//   step     256 columns of 16 outputs, a record: nibbles in the order of (half, row g or g + 8, lane), top bits at 6 bits in
//            that of (row, lane, half), scales by lane (groups of 16) or by row
//   unit     two steps: what a warp has under way
//   warp     16 outputs, every warps_k-th unit of a tile
//   tile     16 * warps_n outputs x one of `splits` pieces of K (the blocks of a cluster), by the warps of a block
//   block    16 warps, or up to 8 tokens 8, of which an SM has two; walks over tiles, and its loads run on from tile to tile
//   tokens   [M][piece of K] in shared memory
//   sums     smxx/tile_sums.cuh
//
// Decoding: kitchen/quant/w4a8_decode.h. At 4 bits and up to 16 tokens positive and negative values are multiplied apart; at 6
// bits 127 - v8 is multiplied, and what is too much is made of the sum of the tokens.
//
// What belongs to the weight is read before the wait for the kernel in front (a programmatic launch), tokens after. Codebook
// and tokens come by the copy engine: a thread's loads wait for those of codes in front of them, 4300 cycles for the codebook.
// Measured: docs/kernels/w4a8.md.
#pragma once

#include <cstdint>

#include "kitchen/mma/m16n8k32_s8.h"
#include "kitchen/mma/m16n8k32_u8s8.h"
#include "kitchen/ptx/bulk_copy.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/load_streaming.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/warp_sum.h"
#include "kitchen/quant/w4a8_decode.h"
#include "w4a8_scaled_mm/smxx/tile_sums.cuh"

namespace kitchen::w4a8::resident {

constexpr int kStep = 256, kUnit = 2 * kStep;  // columns
// Of a table of rows split by sign: scales of at least 0; at 6 bits of quant::negated_scale: all. Each in copies next to each
// other, so that lanes of a different remainder meet no bank twice.
constexpr int kSplitRows = 128, kCopies = 8, kCopies6 = 16;
constexpr int kTableBytes = kSplitRows * kCopies * 16;
static_assert(kTableBytes == 256 * kCopies6 * sizeof(uint32_t), "a table of either kind");

constexpr int warps_of(int token_blocks) { return token_blocks == 1 ? 8 : 16; }  // of a block

template <int kBits_, bool kGroup16_, int kTokenBlocks_>
struct Config {
  static constexpr int kBits = kBits_;                // 4 or 6
  static constexpr bool kGroup16 = kGroup16_;         // g == 16; else 32, 64, 128 or 256
  static constexpr int kTokenBlocks = kTokenBlocks_;  // of 8 tokens
  static constexpr int kWarps = warps_of(kTokenBlocks), kThreads = 32 * kWarps, kBlocksPerSm = 16 / kWarps;
  static constexpr bool kSplit = kBits == 4 && kTokenBlocks <= 2;  // tensor cores have the time to multiply by sign
  static constexpr bool kEarlyColumns = kTokenBlocks <= 2;  // scales and bias wait in registers while codes are multiplied
  static constexpr int kNibbleBytes = kTileRows * kStep / 2, kTopBytes = kBits == 6 ? kTileRows * kStep / 4 : 0;  // of a record
};

struct Layout : TileShape {
  int N, steps, units;         // of 256 columns, of 512; of K
  int tiles, units_per_split;
  int group_log2, record_bytes;
  int token_pitch;             // bytes between tokens: 16 modulo 128
  int token_threads_log2;      // that load a token
  int sums_at, sum_words;      // of one of two buffers; at: in shared memory, after the table
  int columns_at;              // b_scale and bias of the tile's outputs
  int tokens_at, received_at, bytes;
};

struct KernelParams {
  Layout layout;
  const int8_t* a;
  const uint8_t* records;
  const float* codebook;
  EpilogueParams epilogue;
  uint32_t minus_first = quant::kMinusFirst;  // where the compiler does not know it
};

struct Barriers {
  uint64_t levels, tokens;  // have come
  uint64_t received;        // tile_sums.cuh
};

// What a lane needs of a step.
template <class Config>
struct Words {
  uint4 nibbles[2][2];  // by half and row
  uint2 tops[2][Config::kBits == 6 ? 2 : 1];  // by row and half
  uint32_t scales[2];  // by row: two bytes for each half where groups have 16 columns, else one

  // The scale of 16 columns: `part` of a half.
  __device__ __forceinline__ uint32_t scale(int i, int half, int part) const {
    return scales[i] >> (16 * half + (Config::kGroup16 ? 8 * part : 0)) & 255u;
  }
  __device__ __forceinline__ bool negative() const { return ((scales[0] | scales[1]) & 0x80808080u) != 0; }
};

// Loads the units of a warp in the order in which the block walks over tiles.
template <class Config>
struct Loader {
  const KernelParams& p;
  int first_unit, last_unit, end_unit;  // the block's piece of K; the end of its last round, of which some warps have nothing
  int tiles_apart, tile, unit;          // what is loaded next

  // One of the unit's two steps; zeros where there is none, which decode to zeros.
  __device__ __forceinline__ void load(Words<Config>& words, int which) const {
    const Layout& l = p.layout;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp_n = static_cast<int>(threadIdx.x) / 32 & (l.warps_n - 1);
    const int step = 2 * unit + which, block = tile * l.warps_n + warp_n;  // of 16 outputs
    const bool valid = block * kTileRows < l.N && unit < last_unit && step < l.steps;
    const uint8_t* const from = p.records + (static_cast<int64_t>(block) * l.steps + step) * l.record_bytes;
    const uint8_t* const at = from + Config::kNibbleBytes + Config::kTopBytes;
    if constexpr (Config::kGroup16) {
      const uint2 both = ptx::load_readonly_8_or_zeros(at + 8 * lane, valid);
      words.scales[0] = both.x, words.scales[1] = both.y;
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = (lane / 4 + 8 * i) * kStep + 32 * (lane % 4);  // rows lie one behind the other
        words.scales[i] = ptx::load_readonly_1_or_zeros(at + (column >> l.group_log2), valid) |
                          ptx::load_readonly_1_or_zeros(at + ((column + 128) >> l.group_log2), valid) << 16;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      words.nibbles[j / 2][j % 2] = ptx::load_streaming_16_or_zeros(from + 512 * j + 16 * lane, valid);
    if constexpr (Config::kBits == 6) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 top = ptx::load_streaming_16_or_zeros(from + Config::kNibbleBytes + 512 * i + 16 * lane, valid);
        words.tops[i][0] = make_uint2(top.x, top.y), words.tops[i][1] = make_uint2(top.z, top.w);
      }
    }
  }

  // To the next round of a tile, or the next tile's first. Beyond the last tile there are no rows left to load.
  __device__ __forceinline__ void advance() {
    unit += Config::kWarps >> p.layout.warps_n_log2;
    if (unit < end_unit) return;
    unit += first_unit - end_unit;
    tile += tiles_apart;
  }
};

__device__ __forceinline__ const uint4& chunk(const uint8_t* at) { return *reinterpret_cast<const uint4*>(at); }
__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The tokens on their way to shared memory, a row a lane of one warp: `columns` of each.
__device__ __forceinline__ void start_tokens(uint8_t* shared, uint64_t* barrier, const KernelParams& p, int first_k, int columns) {
  const Layout& l = p.layout;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) ptx::mbarrier_arrive_expect(barrier, l.M * columns);
  __syncwarp();
  if (lane < l.M) {
    ptx::bulk_load(shared + lane * l.token_pitch, p.a + lane * static_cast<int64_t>(l.steps * kStep) + first_k, columns, barrier);
  }
}

// The second step of a last unit, that K does not have: zeros.
template <class Config>
__device__ __forceinline__ void clear_rest(uint8_t* shared, const Layout& l, int columns) {
  for (int i = threadIdx.x; i < l.M * (kStep / 16); i += Config::kThreads)
    *reinterpret_cast<uint4*>(shared + i / (kStep / 16) * l.token_pitch + columns + i % (kStep / 16) * 16) = make_uint4(0, 0, 0, 0);
}

// 6 bits: what the tokens, once they have come, add up to.
template <class Config>
__device__ __forceinline__ void sum_tokens(const uint8_t* shared, int* token_sums, const Layout& l, int columns) {
  const int threads_log2 = l.token_threads_log2;  // that have a token: whole warps
  const int first = threadIdx.x & ((1 << threads_log2) - 1);
#pragma unroll 1
  for (int m = static_cast<int>(threadIdx.x) >> threads_log2; m < l.M; m += Config::kThreads >> threads_log2) {
    int sum = 0;
#pragma unroll 2
    for (int i = first; i < columns / 16; i += 1 << threads_log2) {
      const uint4& words = chunk(shared + m * l.token_pitch + 16 * i);
#pragma unroll
      for (int w = 0; w < 4; ++w) sum = __dp4a(static_cast<int>(word_of(words, w)), 0x01010101, sum);
    }
    sum = ptx::warp_sum(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(token_sums + m, sum);
  }
}

// Of each output and token: products with positive and with negative values, or all; 6 bits: with 127 - v8.
template <class Config>
struct Sums {
  int first[Config::kTokenBlocks][4], second[Config::kSplit ? Config::kTokenBlocks : 1][4];

  __device__ __forceinline__ int value(int j, int e) const {
    if constexpr (Config::kSplit) return first[j][e] - second[j][e];
    return Config::kBits == 6 ? -first[j][e] : first[j][e];
  }
};

// 16 columns of rows g and g + 8 as the operands of two MMAs: words 2 k and 2 k + 1 of a row are those of the k-th.
using Operands = uint32_t[2][4];

template <class T>
__device__ __forceinline__ void multiply_block(int (&sums)[4], const Operands& words, int k, const uint4& b) {
  const uint32_t a[4] = {words[0][2 * k], words[1][2 * k], words[0][2 * k + 1], words[1][2 * k + 1]};
  T::multiply(sums, a, word_of(b, 2 * k), word_of(b, 2 * k + 1));
}

// 4 bits, positive and negative values apart.
template <class Config>
__device__ __forceinline__ void multiply_split(Sums<Config>& sums, const Words<Config>& words, const uint4* rows, const uint8_t* tokens,
                                               int tokens_apart) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int half = j / 2, part = j % 2;
    Operands positive, negative;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 row = rows[kCopies * words.scale(i, half, part)];
#pragma unroll
      for (int w = 0; w < 2; ++w)
        quant::look_up_signs(row, word_of(words.nibbles[half][i], 2 * part + w), positive[i] + 2 * w, negative[i] + 2 * w);
    }
#pragma unroll
    for (int t = 0; t < Config::kTokenBlocks; ++t) {
      const uint4 b = chunk(tokens + t * tokens_apart + 128 * half + 16 * part);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        multiply_block<mma::M16N8K32S8>(sums.first[t], positive, k, b);
        multiply_block<mma::M16N8K32S8>(sums.second[t], negative, k, b);
      }
    }
  }
}

// The table's row of a scale byte, signed, from the rows split by sign of scales of at least 0.
__device__ __forceinline__ uint4 signed_row(const uint4* rows, uint32_t scale) {
  const uint4 row = rows[kCopies * (scale & 127) + threadIdx.x % kCopies];
  if (scale < 128) return make_uint4(__vneg4(row.x), __vneg4(row.y), row.z, row.w);
  return make_uint4(row.x, row.y, __vneg4(row.z), __vneg4(row.w));
}

// 16 columns: v8 at 4 bits, 127 - v8 at 6.
template <class Config>
__device__ __forceinline__ void decode(Operands& made, const Words<Config>& words, const uint8_t* table, uint32_t minus_first, int half,
                                       int part) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t scale = words.scale(i, half, part);
    const uint32_t first = word_of(words.nibbles[half][i], 2 * part), second = word_of(words.nibbles[half][i], 2 * part + 1);
    if constexpr (Config::kBits == 4) {
      const uint4* const rows = reinterpret_cast<const uint4*>(table);
      const uint4 row = Config::kSplit ? signed_row(rows, scale) : rows[scale];
      quant::look_up(row, first, made[i][0], made[i][1]);
      quant::look_up(row, second, made[i][2], made[i][3]);
    } else {
      const uint32_t* const scales = reinterpret_cast<const uint32_t*>(table) + threadIdx.x % kCopies6;
      const quant::SixCodes codes(first, second, part == 0 ? words.tops[i][half].x : words.tops[i][half].y);
      codes.decode(made[i], scales[kCopies6 * scale], minus_first);
    }
  }
}

// Any codebook, any sign of the scales, any number of tokens; 6 bits.
template <class Config>
__device__ __forceinline__ void multiply_any(Sums<Config>& sums, const Words<Config>& words, const uint8_t* table, uint32_t minus_first,
                                             const uint8_t* tokens, int tokens_apart) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int half = j / 2, part = j % 2;
    Operands made;
    decode<Config>(made, words, table, minus_first, half, part);
#pragma unroll
    for (int t = 0; t < Config::kTokenBlocks; ++t) {
      const uint4 b = chunk(tokens + t * tokens_apart + 128 * half + 16 * part);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if constexpr (Config::kBits == 4) {
          multiply_block<mma::M16N8K32S8>(sums.first[t], made, k, b);
        } else {
          multiply_block<mma::M16N8K32U8S8>(sums.first[t], made, k, b);
        }
      }
    }
  }
}

// A step of a warp. `splits`: whether the codebook does.
template <class Config>
__device__ __forceinline__ void multiply(Sums<Config>& sums, const Words<Config>& words, const uint8_t* table, bool splits,
                                         uint32_t minus_first, const uint8_t* tokens, int tokens_apart) {
  if constexpr (Config::kSplit) {
    if (splits && !__any_sync(0xffffffffu, words.negative())) {
      const uint4* const rows = reinterpret_cast<const uint4*>(table) + threadIdx.x % kCopies;
      return multiply_split<Config>(sums, words, rows, tokens, tokens_apart);
    }
  }
  multiply_any<Config>(sums, words, table, minus_first, tokens, tokens_apart);
}

// Tables of the decoder, by 256 threads; whether products split by sign. `shared_levels`: the codebook, nullptr where there is none.
template <class Config>
__device__ __forceinline__ bool fill_table(uint8_t* table, const float* shared_levels) {
  const int thread = static_cast<int>(threadIdx.x);
  static_assert(Config::kThreads >= 256, "a row a thread");
  if (Config::kBits == 6) {
    if (thread < 256) {
      const uint32_t scale = quant::negated_scale(thread);
#pragma unroll
      for (int i = 0; i < kCopies6 / 4; ++i)  // each thread in an order of its own
        reinterpret_cast<uint4*>(table)[kCopies6 / 4 * thread + (thread + i) % (kCopies6 / 4)] = make_uint4(scale, scale, scale, scale);
    }
    return false;
  }
  float levels[16];
  quant::load_levels(levels, shared_levels);
  if (thread < (Config::kSplit ? kSplitRows : 256)) {
    const uint4 row = quant::decode_table_row(levels, quant::e4m3_to_float(thread)), split = quant::split_row(row);
    uint4* const rows = reinterpret_cast<uint4*>(table);
    if (!Config::kSplit) rows[thread] = row;
#pragma unroll
    for (int i = 0; i < (Config::kSplit ? kCopies : 0); ++i) rows[kCopies * thread + (thread + i) % kCopies] = split;
  }
  return quant::splits_by_sign(levels);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) w4a8_resident(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Barriers barriers;
  __shared__ __align__(16) float levels[16];
  __shared__ float token_scales[Config::kTokenBlocks * kTokenBlock];
  __shared__ int token_sums[Config::kTokenBlocks * kTokenBlock];
  const Layout& l = p.layout;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_n = warp & (l.warps_n - 1), warp_k = warp >> l.warps_n_log2, warps_k = Config::kWarps >> l.warps_n_log2;
  const unsigned rank = blockIdx.x & (l.splits - 1);
  const int first_tile = static_cast<int>(blockIdx.x >> l.splits_log2),
            tiles_apart = static_cast<int>(gridDim.x >> l.splits_log2);
  const int first_unit = static_cast<int>(rank) * l.units_per_split, units = min(l.units_per_split, l.units - first_unit);
  const int rounds = (units + warps_k - 1) / warps_k;  // of a tile: units of each warp, some of them empty in the last

  const bool has_levels = Config::kBits == 4 && p.codebook != nullptr;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barriers.levels, 1);
    ptx::mbarrier_init(&barriers.tokens, 1);
    ptx::mbarrier_init_fence();
    if (has_levels) {
      ptx::mbarrier_arrive_expect(&barriers.levels, sizeof(levels));
      ptx::bulk_load(levels, p.codebook, sizeof(levels), &barriers.levels);
    }
  }
  Loader<Config> loader = {p, first_unit, first_unit + units, first_unit + rounds * warps_k, tiles_apart, first_tile, first_unit + warp_k};
  Words<Config> even, odd;
  loader.load(even, 0);
  loader.load(odd, 1);
  loader.advance();
  int* const sums_of_tile = reinterpret_cast<int*>(shared + l.sums_at);
  for (int i = threadIdx.x; i < 2 * l.sum_words; i += Config::kThreads) sums_of_tile[i] = 0;
  if (threadIdx.x < Config::kTokenBlocks * kTokenBlock) token_sums[threadIdx.x] = 0;
  if (l.splits > 1) {
    if (threadIdx.x == 0) {
      ptx::receive_init(&barriers.received);
      ptx::receive_expect(&barriers.received, Ownership(l).bytes_for(rank));
    }
    __syncwarp();
    ptx::cluster_arrive();  // this block has started: others may write to its shared memory
  }
  uint8_t* const all_tokens = shared + l.tokens_at;
  const int token_columns = min(units * kUnit, l.steps * kStep - first_unit * kUnit);
  if (token_columns < units * kUnit) clear_rest<Config>(all_tokens, l, token_columns);
  __syncthreads();  // barriers are there, and sums of tokens are zero

  if (has_levels) ptx::mbarrier_wait(&barriers.levels, 0);
  const bool splits = fill_table<Config>(shared, has_levels ? levels : nullptr);
  ptx::wait_then_launch_dependents();
  if (warp == Config::kWarps - 1) start_tokens(all_tokens, &barriers.tokens, p, first_unit * kUnit, token_columns);
  float token_scale = 0.0f;  // nobody waits for it until the first tile ends
  if (Config::kEarlyColumns && threadIdx.x < l.M) token_scale = p.epilogue.a_scale[threadIdx.x];
  ptx::mbarrier_wait(&barriers.tokens, 0);
  if (Config::kBits == 6) sum_tokens<Config>(all_tokens, token_sums, l, token_columns);
  __syncthreads();  // table and tokens are there

  // Tokens beyond the last repeat one (up to 8), or are whatever lies there: their sums are not stored.
  const uint8_t* const tokens = all_tokens + min(lane / 4, l.M - 1) * l.token_pitch + 32 * (lane % 4);
  const int tokens_apart = kTokenBlock * l.token_pitch;
  float2* const columns_of_tile = reinterpret_cast<float2*>(shared + l.columns_at);
  uint32_t parity = 0;  // of the tile
#pragma unroll 1
  for (int tile = first_tile; tile < l.tiles; tile += tiles_apart, parity ^= 1) {
    const int columns = l.outputs();
    const auto load_column = [&] {
      const int n = min(tile * columns + static_cast<int>(threadIdx.x), l.N - 1);
      return make_float2(p.epilogue.b_scale[n], bias_of(p.epilogue, n));
    };
    float2 column = make_float2(0.0f, 0.0f);
    if (Config::kEarlyColumns && threadIdx.x < columns) column = load_column();
    Sums<Config> sums = {};
#pragma unroll 1
    for (int unit = warp_k; unit < rounds * warps_k; unit += warps_k) {
      const uint8_t* const at = tokens + unit * kUnit;
      const bool some = unit < units;  // tokens end with the piece
      if (some) multiply<Config>(sums, even, shared, splits, p.minus_first, at, tokens_apart);
      __syncwarp();  // else the compiler loads ahead, into registers that it has not got
      loader.load(even, 0);
      if (some) multiply<Config>(sums, odd, shared, splits, p.minus_first, at + kStep, tokens_apart);
      loader.load(odd, 1);
      loader.advance();
    }
    if (tile == first_tile && threadIdx.x < l.M)
      token_scales[threadIdx.x] = Config::kEarlyColumns ? token_scale : p.epilogue.a_scale[threadIdx.x];
    if (threadIdx.x < columns) columns_of_tile[parity * columns + threadIdx.x] = Config::kEarlyColumns ? column : load_column();
    add_fragments<Config::kTokenBlocks>(sums_of_tile + parity * l.sum_words, l, warp_n, [&](int j, int e) { return sums.value(j, e); });
    if (l.splits > 1) ptx::cluster_wait();  // every block has taken what was sent to it before
    __syncthreads();
    const TileMemory memory = {sums_of_tile + parity * l.sum_words, token_scales, columns_of_tile + parity * columns,
                               reinterpret_cast<int4*>(shared + l.received_at), &barriers.received};
    finish_tile<Config::kThreads>(p.epilogue, l, memory, parity, tile, rank,
                                  [&](int m) { return Config::kBits == 6 ? 127 * token_sums[m] : 0; });
    if (l.splits > 1) {
      __syncthreads();  // all have waited for the phase and taken their sums
      if (threadIdx.x == 0) ptx::receive_expect(&barriers.received, Ownership(l).bytes_for(rank));
      __syncwarp();
      ptx::cluster_arrive();
    }
  }
  if (l.splits > 1) ptx::cluster_wait();
}

}  // namespace kitchen::w4a8::resident
