// W4A8 and W6A8 product for 1 to 16 tokens: out^T[N, M] = v8[N, K] * a^T[K, M]. sm_80 and later; tuned on sm_90.
//
// Codes go from global to shared memory in a ring of each warp's own (cp.async, no barrier among warps), are decoded in
// registers and meet the tokens in mma.sync m16n8k32: 16 outputs are its m side, 8 tokens its n side. The order of k within a
// sum is free as long as both sides agree: a lane takes the 16 bytes of codes of columns 32 * (lane % 4) .. + 31 of its rows,
// which are the operands of four MMAs, and the tokens' words at the same columns.
//
//   step     256 columns of 16 outputs: 2 KB of nibbles (a line of 128 bytes an output), 1 KB of top bits at 6 bits
//   warp     16 outputs, every warps_k-th step of a tile
//   tile     16 * warps_n outputs x one of `splits` pieces of K (the blocks of a cluster), by the 16 warps of a block
//   block    one an SM; walks over tiles, and its rings run on from tile to tile
//   tokens   [M][piece of K] in shared memory
//   scales   e4m3, [16 * warps_n][piece of K / g] in shared memory, those of the next tile in a second buffer
//   sums     int32, added up over warps in shared memory and over the cluster through distributed shared memory; any order
//            gives the same bits
//
// Integer arithmetic on codes is the limit, not the tensor core, so MMAs are spent to save it (kitchen/quant/w4a8_decode.h): at
// 4 bits positive and negative values are multiplied apart. At 6 bits 127 - v8 is multiplied, and what is too much is made of
// the sum of the tokens.
//
// What belongs to the weight is read before the wait for the kernel in front (a programmatic launch), tokens after. Before they
// are asked for, only the first step of codes is: what is under way comes first, and delays the quantizer in front, too. So
// nobody waits for the tokens' scales, either, until the first tile ends.
// Measured: docs/kernels/w4a8.md.
#pragma once

#include <cstdint>

#include "kitchen/mma/m16n8k32_s8.h"
#include "kitchen/mma/m16n8k32_u8s8.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/cp_async_group.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/named_barrier.h"
#include "kitchen/ptx/warp_sum.h"
#include "kitchen/quant/w4a8_decode.h"
#include "w4a8_scaled_mm/smxx/tile_sums.cuh"

namespace kitchen::w4a8::stream {

constexpr int kWarps = 16, kWarpsLog2 = 4, kThreads = 32 * kWarps, kTableThreads = kThreads / 2;
constexpr int kRows = kTileRows;  // outputs of a warp
constexpr int kStep = 256;  // columns
constexpr int kTokens = kTokenBlock;  // of an MMA
constexpr int kMostStages = 4;
// The table: at 4 bits decode_table_row of all bytes and copies of split_row of scales of at least 0, at 6 negated_scale of all
// bytes. Copies of a row lie next to each other: lanes of a different remainder meet no bank twice.
constexpr int kMostCopies = 8, kSplitRows = 128;
constexpr int table_bytes(int bits, int copies) { return bits == 4 ? (256 + kSplitRows * copies) * 16 : 256 * 4; }

template <int kBits_, bool kGroup16_, int kTokenBlocks_>
struct Config {
  static constexpr int kBits = kBits_;  // 4 or 6
  static constexpr bool kGroup16 = kGroup16_;  // g == 16; else 32, 64, 128 or 256
  static constexpr int kTokenBlocks = kTokenBlocks_;  // of 8 tokens
  static constexpr int kNibbleBytes = kRows * kStep / 2, kTopBytes = kBits == 6 ? kRows * kStep / 4 : 0;
  static constexpr int kStageBytes = kNibbleBytes + kTopBytes;
  // Up to 8 tokens 512 threads leave registers to a block of the quantizer in front (20480 = 8 warps x 80), which would else
  // keep this one waiting; beyond, they need all there are.
  static constexpr int kRegisters = kTokenBlocks == 1 ? (kBits == 4 ? 88 : 96) : 128;
};

struct Layout : TileShape {
  int N, K;
  int buffers;  // 2 where a block has more tiles than one, whose last sums are added up while the next are multiplied
  int tiles, steps, steps_per_split;  // steps of K
  int stages;  // of a ring, 2 .. kMostStages
  int row_bytes;  // of codes
  int copies;  // 4 bits: of a row of the table: kMostCopies, or 1 where there is no room
  int group_log2, groups_per_row;
  int token_pitch;  // bytes between tokens: 16 modulo 128
  int token_threads_log2;  // that load a token
  int scale_pitch;  // bytes between the scales of two outputs: an odd multiple of 16
  int scale_width;  // bytes that the rows of s_rel and the pieces of K are aligned to: 16, 4 or 1
  int scales_at, scale_bytes;  // of a buffer; at: in shared memory, after the table
  int sums_at, sum_words;  // of a buffer
  int columns_at;  // b_scale and bias of the tile's outputs
  int tokens_at, ring_at, received_at, bytes;
};

struct KernelParams {
  Layout layout;
  const int8_t* a;
  const uint8_t *codes, *s_rel;
  const float* codebook;
  EpilogueParams epilogue;
  uint32_t minus_first = quant::kMinusFirst;  // where the compiler does not know it
};

// A warp's ring of steps, filled in the order in which the block walks over tiles.
template <class Config>
struct Ring {
  const KernelParams& p;
  const uint8_t* codes[4];  // of this lane's chunk in rows lane/8 + 4 * i, at column 0
  const uint8_t* tops[2];  // 6 bits: of its chunk in rows lane/4 + 8 * i
  uint32_t shared;  // the ring
  uint32_t nibble_at, top_at;  // of this lane's chunk in a stage
  int first_step, last_step;  // of the block's piece of K, as this warp walks it
  int tile, tiles_apart, step, stage;  // that are loaded next

  __device__ __forceinline__ Ring(const KernelParams& params, uint8_t* ring, int first_tile, int apart, int first, int last)
      : p(params),
        shared(static_cast<uint32_t>(__cvta_generic_to_shared(ring))),
        first_step(first),
        last_step(last),
        tile(first_tile),
        tiles_apart(apart),
        step(first),
        stage(0) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    // A warp reads eight outputs x 64 bytes at once: odd outputs have the halves of their line exchanged.
    nibble_at = lane / 8 * 128 + 16 * (lane % 8 ^ (lane / 8 % 2 << 2));
    top_at = Config::kNibbleBytes + lane / 4 * 64 + 16 * (lane % 4 ^ (lane / 8 % 2 << 1));
    find_rows();
  }

  __device__ __forceinline__ void find_rows() {
    const Layout& l = p.layout;
    const int lane = static_cast<int>(threadIdx.x % 32), warp_n = static_cast<int>(threadIdx.x / 32) & (l.warps_n - 1);
    const int first_row = (tile * l.warps_n + warp_n) * kRows, last = l.N - 1;
    const auto row_at = [&](int row) { return p.codes + static_cast<int64_t>(row) * l.row_bytes; };
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = row_at(min(first_row + lane / 8 + 4 * i, last)) + 16 * (lane % 8);
    if (Config::kBits == 6) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        tops[i] = row_at(min(first_row + lane / 4 + 8 * i, last)) + l.K / 2 + 16 * (lane % 4);
    }
  }

  // One step, or an empty group where there is none. Chunks beyond K are not read: zeros, which meet tokens that are zeros.
  __device__ __forceinline__ void load() {
    const int lane = static_cast<int>(threadIdx.x % 32), at = step * kStep;
    if (tile < p.layout.tiles && step < last_step) {
      const uint32_t to = shared + stage * Config::kStageBytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::cp_async_16_or_zeros(to + nibble_at + 512 * i, codes[i] + at / 2, at + 32 * (lane % 8) < p.layout.K ? 16 : 0);
      }
      if (Config::kBits == 6) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::cp_async_16_or_zeros(to + top_at + 512 * i, tops[i] + at / 4, at + 64 * (lane % 4) < p.layout.K ? 16 : 0);
        }
      }
    }
    ptx::cp_async_commit();
    stage = stage + 1 == p.layout.stages ? 0 : stage + 1;
  }

  // To the next of `rounds` steps of a tile, or the next tile's first.
  __device__ __forceinline__ void advance(int& round, int rounds) {
    step += kWarps >> p.layout.warps_n_log2;
    if (++round < rounds) return;
    round = 0;
    step = first_step;
    tile += tiles_apart;
    find_rows();
  }
};

// All scales of a tile, by all threads; asynchronous where rows are aligned to 16 bytes.
__device__ __forceinline__ void load_scales(uint8_t* shared, const KernelParams& p, int tile, int first_step) {
  const Layout& l = p.layout;
  const int rows = kRows * l.warps_n, first_row = tile * rows, first = first_step * kStep >> l.group_log2;
  const int count = min(l.groups_per_row - first, l.steps_per_split * kStep >> l.group_log2);
  const int width = l.scale_width;
  // Eight threads a row.
#pragma unroll 1
  for (int row = threadIdx.x / 8; row < rows; row += kThreads / 8) {
    const uint8_t* const from = p.s_rel + static_cast<int64_t>(min(first_row + row, l.N - 1)) * l.groups_per_row + first;
    uint8_t* const to = shared + row * l.scale_pitch;
#pragma unroll 1
    for (int at = threadIdx.x % 8 * width; at < count; at += 8 * width) {
      if (width == 16) {
        ptx::cp_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(to + at)), from + at);
      } else if (width == 4) {
        *reinterpret_cast<uint32_t*>(to + at) = *reinterpret_cast<const uint32_t*>(from + at);
      } else {
        to[at] = from[at];
      }
    }
  }
}

__device__ __forceinline__ const uint4& chunk(const uint8_t* at) { return *reinterpret_cast<const uint4*>(at); }

// The tokens, columns beyond K as zeros. Through registers: asynchronous copies come later, 32 KB by 0.5 us. At 6 bits also what
// they add up to, a part a warp.
template <class Config>
__device__ __forceinline__ void load_tokens(uint8_t* shared, int (&sum_parts)[kWarps], const KernelParams& p, int first_k) {
  const Layout& l = p.layout;
  const int chunks = l.steps_per_split * (kStep / 16), log2 = l.token_threads_log2;
  const int thread = static_cast<int>(threadIdx.x) ^ kTableThreads;  // few tokens: those that make no table
#pragma unroll 1
  for (int m = thread >> log2; m < l.M; m += kThreads >> log2) {
    const int8_t* const from = p.a + static_cast<int64_t>(m) * l.K + first_k;
    uint8_t* const to = shared + m * l.token_pitch;
    int sum = 0;
#pragma unroll 2
    for (int i = thread & ((1 << log2) - 1); i < chunks; i += 1 << log2) {
      const bool inside = first_k + 16 * i < l.K;
      const int4 words = inside ? *reinterpret_cast<const int4*>(from + 16 * i) : make_int4(0, 0, 0, 0);
      *reinterpret_cast<int4*>(to + 16 * i) = words;
      if (Config::kBits == 6) {
        constexpr int kOnes = 0x01010101;
        sum = __dp4a(words.x, kOnes, __dp4a(words.y, kOnes, __dp4a(words.z, kOnes, __dp4a(words.w, kOnes, sum))));
      }
    }
    if (Config::kBits == 6) {
      sum = ptx::warp_sum(sum);
      if (thread % 32 == 0) sum_parts[thread / 32] = sum;
    }
  }
}

// What the token of this thread's number adds up to, behind a barrier.
__device__ __forceinline__ int sum_of_parts(const int (&sum_parts)[kWarps], const Layout& l) {
  const int log2 = l.token_threads_log2 - 5;
  int sum = 0;
#pragma unroll 1
  for (int i = 0; i < 1 << log2; ++i) sum += sum_parts[(threadIdx.x << log2) + i];
  return sum;
}

// Of each output and token: products with positive and with negative values at 4 bits; with 127 - v8 at 6, two sums by turns, so
// that an MMA does not wait for the one before.
template <class Config>
struct Sums {
  int first[Config::kTokenBlocks][4], second[Config::kTokenBlocks][4];

  __device__ __forceinline__ int value(int j, int e) const {
    return Config::kBits == 4 ? first[j][e] - second[j][e] : -(first[j][e] + second[j][e]);
  }
};

// Where a lane finds what it multiplies in a half step of 128 columns: outputs g and g + 8, columns 32 * q ..
struct HalfStep {
  const uint8_t *nibbles, *tops, *scales;
  int scale_pitch;
};

// 4 bits: two outputs x 32 columns of codes with the table's rows of their scales (two groups of 16 columns each).
template <bool kSplit, class Config>
__device__ __forceinline__ void multiply_four(Sums<Config>& sums, const uint4 (&codes)[2], const uint4* rows,
                                              const uint32_t (&scales)[2], int copies, const uint8_t* tokens,
                                              int tokens_apart) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // 16 columns of each output, two MMAs
    uint32_t positive[2][4], negative[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t scale = !Config::kGroup16 ? scales[i] : half == 0 ? scales[i] & 255 : scales[i] >> 8;
      const uint4 row = rows[kSplit ? copies * scale : scale];
      const uint32_t word[2] = {half == 0 ? codes[i].x : codes[i].z, half == 0 ? codes[i].y : codes[i].w};
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        if constexpr (kSplit) {
          quant::look_up_signs(row, word[w], positive[i] + 2 * w, negative[i] + 2 * w);
        } else {
          quant::look_up(row, word[w], positive[i][2 * w], positive[i][2 * w + 1]);
        }
      }
    }
    uint4 b[Config::kTokenBlocks];
#pragma unroll
    for (int j = 0; j < Config::kTokenBlocks; ++j) b[j] = chunk(tokens + j * tokens_apart + 16 * half);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int j = 0; j < Config::kTokenBlocks; ++j) {
        const uint32_t b0 = k == 0 ? b[j].x : b[j].z, b1 = k == 0 ? b[j].y : b[j].w;
        const uint32_t more[4] = {positive[0][2 * k], positive[1][2 * k], positive[0][2 * k + 1], positive[1][2 * k + 1]};
        mma::M16N8K32S8::multiply(sums.first[j], more, b0, b1);
        if constexpr (kSplit) {
          const uint32_t less[4] = {negative[0][2 * k], negative[1][2 * k], negative[0][2 * k + 1], negative[1][2 * k + 1]};
          mma::M16N8K32S8::multiply(sums.second[j], less, b0, b1);
        }
      }
    }
  }
}

// Split by sign unless the codebook or a scale of the warp's forbids it.
template <class Config>
__device__ __forceinline__ void multiply_four(Sums<Config>& sums, const HalfStep& at, const uint8_t* table, int copies,
                                              bool splits, const uint8_t* tokens, int tokens_apart) {
  const uint4 codes[2] = {chunk(at.nibbles), chunk(at.nibbles + 1024)};
  uint32_t scales[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint8_t* const from = at.scales + 8 * i * at.scale_pitch;
    scales[i] = Config::kGroup16 ? *reinterpret_cast<const uint16_t*>(from) : *from;
  }
  constexpr uint32_t kSigns = Config::kGroup16 ? 0x8080u : 0x80u;
  const uint4* const rows = reinterpret_cast<const uint4*>(table);
  if (splits && !__any_sync(0xffffffffu, ((scales[0] | scales[1]) & kSigns) != 0)) {
    multiply_four<true>(sums, codes, rows + 256 + (threadIdx.x & (copies - 1)), scales, copies, tokens, tokens_apart);
  } else {
    multiply_four<false>(sums, codes, rows, scales, copies, tokens, tokens_apart);
  }
}

// 6 bits.
template <class Config>
__device__ __forceinline__ void multiply_six(Sums<Config>& sums, const HalfStep& at, const uint8_t* table, uint32_t minus_first,
                                             const uint8_t* tokens, int tokens_apart) {
  const uint4 nibbles[2] = {chunk(at.nibbles), chunk(at.nibbles + 1024)};
  const uint2 tops[2] = {*reinterpret_cast<const uint2*>(at.tops), *reinterpret_cast<const uint2*>(at.tops + 512)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint8_t* const scale = at.scales + 8 * i * at.scale_pitch + (Config::kGroup16 ? half : 0);
      const uint32_t negated = reinterpret_cast<const uint32_t*>(table)[*scale];
      const quant::SixCodes codes(half == 0 ? nibbles[i].x : nibbles[i].z, half == 0 ? nibbles[i].y : nibbles[i].w,
                                  half == 0 ? tops[i].x : tops[i].y);
      codes.decode(words[i], negated, minus_first);
    }
    uint4 b[Config::kTokenBlocks];
#pragma unroll
    for (int j = 0; j < Config::kTokenBlocks; ++j) b[j] = chunk(tokens + j * tokens_apart + 16 * half);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t a[4] = {words[0][2 * k], words[1][2 * k], words[0][2 * k + 1], words[1][2 * k + 1]};
#pragma unroll
      for (int j = 0; j < Config::kTokenBlocks; ++j) {
        const uint32_t b0 = k == 0 ? b[j].x : b[j].z, b1 = k == 0 ? b[j].y : b[j].w;
        mma::M16N8K32U8S8::multiply(k == 0 ? sums.first[j] : sums.second[j], a, b0, b1);
      }
    }
  }
}

// One step of a warp: 2 x 128 columns.
template <class Config>
__device__ __forceinline__ void multiply(Sums<Config>& sums, const uint8_t* stage, const uint8_t* table, bool splits,
                                         uint32_t minus_first, const uint8_t* scales, const Layout& l, const uint8_t* tokens,
                                         int tokens_apart) {
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const HalfStep at = {stage + g * 128 + 16 * ((4 * half + q) ^ (g % 2 << 2)),
                         stage + Config::kNibbleBytes + g * 64 + (32 * half ^ (g / 2 % 2 << 5)) + 8 * q,
                         scales + (Config::kGroup16 ? 8 * half + 2 * q : (128 * half + 32 * q) >> l.group_log2), l.scale_pitch};
    if constexpr (Config::kBits == 4) {
      multiply_four<Config>(sums, at, table, l.copies, splits, tokens + 128 * half, tokens_apart);
    } else {
      multiply_six<Config>(sums, at, table, minus_first, tokens + 128 * half, tokens_apart);
    }
  }
}

// Tables of the decoder, by kTableThreads threads; whether products split by sign. `codebook`: nullptr where there is none.
template <class Config>
__device__ __forceinline__ bool fill_table(uint8_t* table, int copies, const float* codebook) {
  const int thread = static_cast<int>(threadIdx.x);
  static_assert(kTableThreads == 256, "a row a thread");
  if (Config::kBits == 6) {
    reinterpret_cast<uint32_t*>(table)[thread] = quant::negated_scale(thread);
    return false;
  }
  float levels[16];
  quant::load_levels(levels, codebook);
  const uint4 row = quant::decode_table_row(levels, quant::e4m3_to_float(thread));
  uint4* const rows = reinterpret_cast<uint4*>(table);
  rows[thread] = row;
  if (thread < kSplitRows) {
    const uint4 split = quant::split_row(row);
#pragma unroll 1
    for (int i = 0; i < copies; ++i)  // each thread in an order of its own
      rows[256 + copies * thread + ((thread + i) & (copies - 1))] = split;
  }
  return quant::splits_by_sign(levels);
}

// Until at most `pending` of this thread's latest groups are under way.
__device__ __forceinline__ void wait_group(int pending) {
  if (pending >= 3) return ptx::cp_async_wait_group<3>();
  if (pending == 2) return ptx::cp_async_wait_group<2>();
  if (pending == 1) return ptx::cp_async_wait_group<1>();
  ptx::cp_async_wait_group<0>();
}

template <class Config>
__global__ void __maxnreg__(Config::kRegisters) w4a8_stream(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t barrier;
  __shared__ __align__(16) float codebook[16];
  __shared__ float token_scales[2 * kTokens];
  __shared__ int token_sums[2 * kTokens], token_sum_parts[kWarps];  // 6 bits: a warp has part of one token
  const Layout& l = p.layout;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int warp_n = warp & (l.warps_n - 1), warp_k = warp >> l.warps_n_log2, warps_k = kWarps >> l.warps_n_log2;
  const unsigned rank = blockIdx.x & (l.splits - 1);
  const int first_tile = static_cast<int>(blockIdx.x >> l.splits_log2),
            tiles_apart = static_cast<int>(gridDim.x >> l.splits_log2);
  const int first_step = static_cast<int>(rank) * l.steps_per_split;
  const int steps = min(l.steps_per_split, l.steps - first_step);
  // Of a tile: steps of each warp, some of them empty in the last round.
  const int rounds = (steps + warps_k - 1) >> (kWarpsLog2 - l.warps_n_log2);

  // The first step and the scales of the first tile; the codebook before them.
  uint8_t* const own_ring = shared + l.ring_at + warp * l.stages * Config::kStageBytes;
  uint8_t* const all_tokens = shared + l.tokens_at;
  Ring<Config> ring(p, own_ring, first_tile, tiles_apart, first_step + warp_k, first_step + steps);
  const bool has_levels = Config::kBits == 4 && p.codebook != nullptr;
  if (has_levels && threadIdx.x < 4) {
    ptx::cp_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(codebook + 4 * threadIdx.x)), p.codebook + 4 * threadIdx.x);
  }
  ptx::cp_async_commit();
  int loading = 0;  // the round that the ring loads next
  ring.load();
  ring.advance(loading, rounds);
  load_scales(shared + l.scales_at, p, first_tile, first_step);
  ptx::cp_async_commit();
  int* const sums_of_tile = reinterpret_cast<int*>(shared + l.sums_at);
  for (int i = threadIdx.x; i < l.buffers * l.sum_words; i += kThreads) sums_of_tile[i] = 0;
  if (l.splits > 1) {
    if (threadIdx.x == 0) {
      ptx::receive_init(&barrier);
      ptx::receive_expect(&barrier, Ownership(l).bytes_for(rank));
    }
    __syncwarp();
    ptx::cluster_arrive();  // this block has started: others may write to its shared memory
  }
  bool splits = true;
  if (threadIdx.x < kTableThreads) {  // the others ask for their tokens meanwhile
    if (has_levels) {
      wait_group(2);
      ptx::named_barrier_sync<1, kTableThreads>();
    }
    splits = fill_table<Config>(shared, l.copies, has_levels ? codebook : nullptr);
  }

  ptx::wait_then_launch_dependents();
  float token_scale = 0.0f;
  if (threadIdx.x < l.M) token_scale = p.epilogue.a_scale[threadIdx.x];
  load_tokens<Config>(all_tokens, token_sum_parts, p, first_step * kStep);
#pragma unroll 1
  for (int i = 1; i < l.stages - 1; ++i) {
    ring.load();
    ring.advance(loading, rounds);
  }
  wait_group(l.stages - 2);  // of the first step, and of the scales
  splits = __syncthreads_and(splits);  // table, scales and tokens are there

  // Tokens beyond the last repeat one: their sums are not stored.
  const int g = lane / 4, token = min(g, l.M - 1);
  const int tokens_apart = Config::kTokenBlocks > 1 && l.M > kTokens + token ? kTokens * l.token_pitch : 0;
  const uint8_t* const tokens = shared + l.tokens_at + token * l.token_pitch + 32 * (lane % 4) + warp_k * kStep;
  float2* const columns_of_tile = reinterpret_cast<float2*>(shared + l.columns_at);
  int stage = 0;
  uint32_t odd = 0;  // tile
#pragma unroll 1
  for (int tile = first_tile; tile < l.tiles; tile += tiles_apart, odd ^= 1) {
    const int own_column = static_cast<int>(threadIdx.x), columns = kRows * l.warps_n;
    float2 column = make_float2(0, 0);
    if (own_column < columns) {
      const int n = min(tile * columns + own_column, l.N - 1);
      column = make_float2(p.epilogue.b_scale[n], bias_of(p.epilogue, n));
    }
    if (tile + tiles_apart < l.tiles)
      load_scales(shared + l.scales_at + (odd ^ 1) * l.scale_bytes, p, tile + tiles_apart, first_step);
    Sums<Config> sums = {};
    const uint8_t* scales = shared + l.scales_at + odd * l.scale_bytes + (warp_n * kRows + g) * l.scale_pitch;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      wait_group(l.stages - 2);
      __syncwarp();  // the step has landed, and all lanes are done with the one before, whose place the next load takes
      ring.load();
      ring.advance(loading, rounds);
      const int step = round * warps_k;
      if (step + warp_k < steps) {
        multiply<Config>(sums, own_ring + stage * Config::kStageBytes, shared, splits, p.minus_first,
                         scales + ((step + warp_k) * kStep >> l.group_log2), l, tokens + step * kStep, tokens_apart);
      }
      stage = stage + 1 == l.stages ? 0 : stage + 1;
    }
    if (tile == first_tile && threadIdx.x < l.M) {
      token_scales[threadIdx.x] = token_scale;
      if (Config::kBits == 6) token_sums[threadIdx.x] = sum_of_parts(token_sum_parts, l);
    }
    if (own_column < columns) columns_of_tile[odd * columns + own_column] = column;
    add_fragments<Config::kTokenBlocks>(sums_of_tile + odd * l.sum_words, l, warp_n,
                                        [&](int j, int e) { return sums.value(j, e); });
    if (rounds < l.stages) wait_group(rounds - 1);  // the next scales came with the first round's load
    if (l.splits > 1) ptx::cluster_wait();  // every block has taken what was sent to it before
    __syncthreads();
    const TileMemory memory = {sums_of_tile + odd * l.sum_words, token_scales, columns_of_tile + odd * columns,
                               reinterpret_cast<int4*>(shared + l.received_at), &barrier};
    finish_tile<kThreads>(p.epilogue, l, memory, odd, tile, rank,
                          [&](int m) { return Config::kBits == 6 ? 127 * token_sums[m] : 0; });
    if (l.splits > 1) {
      __syncthreads();  // all have waited for the phase and taken their sums
      if (threadIdx.x == 0) ptx::receive_expect(&barrier, Ownership(l).bytes_for(rank));
      __syncwarp();
      ptx::cluster_arrive();
    }
  }
  if (l.splits > 1) ptx::cluster_wait();
}

}  // namespace kitchen::w4a8::stream
