// W4A8 and W6A8 product on Hopper (sm_90a) for more than a few tokens: out^T[N, M] = v8[N, K] * a^T[K, M].
//
// Weights are the m=64 side of wgmma and come from registers: a warp decodes the codes of its 16 outputs while the instructions
// of the stage before still run. Tokens are the n side, from shared memory. So codes are read once for each tile of tokens, and
// decoded weights never leave registers.
//
//   tile      kRows outputs (64 up to 64 tokens, else 128) x kTokens tokens x one of `splits` pieces of K (the blocks of a
//             cluster)
//   stage     128 columns: tokens [kTokens][128 bytes], codes [kRows][64 bytes] (and [kRows][32 bytes] of top bits at 6 bits),
//             scales [kRows][8], one e4m3 byte for every 16 columns whatever the group is
//   producers one thread: tensor copies of tokens and codes; three warps: scales
//   consumers two warpgroups, or up to 64 tokens four, since decoding is then the limit: kRows / 64 of them, a group, take a
//             stage, and groups take turns. A lane takes 32 neighbouring columns of rows lane/4 and lane/4 + 8 of its warp, and
//             the tokens have their words in that order (order_tokens.cu)
//   sums      int32, in shared memory, while the stages of the next tile fill: blocks walk over tiles. Up to 64 tokens all of a
//             tile, of all groups. More: a 16-bit result without a residual leaves transposed by stmatrix and the copy engine,
//             anything else 32 tokens at a time. Where K is split, all sums of a tile are added up over the cluster, whose
//             blocks have one tile each
//
// A programmatic launch reads codes and scales before it waits for the kernel in front, tokens after.
// Measured: docs/kernels/w4a8.md.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/load_cluster.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/named_barrier.h"
#include "kitchen/ptx/stmatrix_transposed.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma_s8_registers.h"
#include "kitchen/quant/w4a8_decode.h"
#include "w4a8_scaled_mm/smxx/scale_epilogue.cuh"

namespace kitchen::w4a8::hopper {

constexpr int kStage = 128;  // columns
constexpr int kScaleWarps = 3;
constexpr int kScaleBytes = 8;  // of an output in a stage
constexpr int kSteps = kStage / 32;  // instructions of a stage
constexpr int kSumPad = 4;
constexpr int kChunkTokens = 32;  // that leave at once
constexpr int kStoreColumns = 64;  // outputs of a warpgroup: 128 bytes of a 16-bit result
constexpr int kStoreBytes = kChunkTokens * kStoreColumns * 2;  // one of the two staging buffers of a warpgroup
constexpr int kSharedLimit = 227 * 1024, kTableBytes = 4096, kReservedBytes = 512;

// Outputs of a tile of so many tokens.
constexpr int rows_of(int tokens) { return tokens <= 64 ? 64 : 128; }

template <int kBits_, int kTokens_>
struct Config {
  static constexpr int kBits = kBits_, kTokens = kTokens_;
  static constexpr bool kWhole = kTokens <= 64;  // all sums at once, a split K
  static constexpr int kRows = rows_of(kTokens), kGroupThreads = 2 * kRows;
  static constexpr int kConsumerThreads = kWhole ? 512 : 256, kThreads = kConsumerThreads + 128;
  static constexpr int kGroups = kConsumerThreads / kGroupThreads;  // that take turns of stages
  // Of a thread. What consumers gain, producers must give: the block starts with 96 or 168 of each, multiples of 8 that fill 64
  // K.
  static constexpr int kConsumerRegisters = kWhole ? 104 : 232, kProducerRegisters = kWhole ? 64 : 40;
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kConsumerThreads * kConsumerRegisters + 128 * kProducerRegisters <= kThreads * kFirstRegisters,
                "consumers would wait for registers for ever");
  static constexpr int kTokenBytes = kTokens * kStage, kNibbleBytes = kRows * kStage / 2,
                       kTopBytes = kBits == 6 ? kRows * kStage / 4 : 0;
  static constexpr int kCodeBytes = kNibbleBytes + kTopBytes, kStageScales = kRows * kScaleBytes;
  static constexpr int kStageBytes = kTokenBytes + kCodeBytes + kStageScales;
  static constexpr int kSumPitch = kRows + kSumPad;
  static constexpr int kSumBytes = 4 * kSumPitch * (kWhole ? kTokens : kChunkTokens);
  static constexpr int kOther = kTableBytes + kReservedBytes + 8 * kRows + 4 * kTokens + 2048;
  static constexpr int kStages = (kSharedLimit - kOther - kSumBytes) / kStageBytes;
  static_assert(kWhole || kSumBytes >= 4 * kStoreBytes, "either way out takes the same place");
  static_assert(kWhole || 4 * kSumPitch * kTokens <= kStages * (kTokenBytes + kCodeBytes),
                "sums of a split K take the place of the stages");
  static_assert(kStages >= 3, "fewer than three stages cannot hide the copies");
};

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t tokens[Config::kStages][Config::kTokenBytes];
  alignas(128) uint8_t codes[Config::kStages][Config::kCodeBytes];
  alignas(16) uint8_t scales[Config::kStages][Config::kStageScales];
  alignas(1024) uint8_t sums[Config::kSumBytes];
  alignas(16) uint8_t table[kTableBytes];
  float2 columns[Config::kRows];  // b_scale and bias of the tile's outputs
  float token_scales[Config::kTokens];
  uint64_t full[Config::kStages];  // tokens, codes and scales of a stage have landed
  uint64_t empty[Config::kStages];  // every consumer warp has read it
};

struct Tiles {
  int M, N, K;
  int splits, stages_per_split;
  int tiles_m, tiles_n;
  int raster_group;  // rows of tiles (of tokens) walked together
  int group_log2, groups_per_row;
  int scale_width;  // bytes of s_rel for a stage, where they can be read at once: 8, 4, 2 or 1; else 0
  bool result_mapped;  // a 16-bit result without a residual, in rows that the copy engine can write
};

struct KernelParams {
  CUtensorMap tokens, nibbles, tops, result;
  Tiles tiles;
  const uint8_t* s_rel;
  const float* codebook;
  EpilogueParams epilogue;
};

template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// The tiles of a block (of a cluster): x the first output, y the first token.
template <class Config>
struct Walk {
  const Tiles& t;
  int index, step;
  __device__ __forceinline__ explicit Walk(const Tiles& tiles)
      : t(tiles), index(static_cast<int>(blockIdx.x) / tiles.splits), step(static_cast<int>(gridDim.x) / tiles.splits) {}
  __device__ __forceinline__ bool done() const { return index >= t.tiles_m * t.tiles_n; }
  __device__ __forceinline__ void next() { index += step; }
  __device__ __forceinline__ int2 tile() const {
    const int group = index / (t.raster_group * t.tiles_n), first = group * t.raster_group;
    const int rows = min(t.raster_group, t.tiles_m - first), inside = index - first * t.tiles_n;
    return {inside / rows * Config::kRows, (first + inside % rows) * Config::kTokens};
  }
};

// One thread. Codes of the first stages do not wait for the kernel in front.
template <class Config>
__device__ __forceinline__ void produce(SharedStorage<Config>& shared, const KernelParams& p, int first_stage, int stages) {
  const auto load_codes = [&](int slot, int column, int row) {
    ptx::mbarrier_arrive_expect(&shared.full[slot], Config::kTokenBytes + Config::kCodeBytes);
    ptx::tma_load(shared.codes[slot], &p.nibbles, column / 2, row, &shared.full[slot]);
    if (Config::kBits == 6)
      ptx::tma_load(shared.codes[slot] + Config::kNibbleBytes, &p.tops, column / 4, row, &shared.full[slot]);
  };
  RingPosition<Config::kStages> at;
  int ahead = 0;  // stages of the first tile whose codes are on their way
  Walk<Config> walk(p.tiles);
  if (walk.done()) return;
  for (; ahead < min(Config::kStages, stages); ++ahead) load_codes(ahead, (first_stage + ahead) * kStage, walk.tile().x);
  ptx::griddep_wait();
  ptx::griddep_launch();
  for (; !walk.done(); walk.next()) {
    const int2 tile = walk.tile();
    for (int k = 0; k < stages; ++k, at.advance()) {
      const int column = (first_stage + k) * kStage;
      if (ahead > 0) {
        --ahead;
      } else {
        ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
        load_codes(at.stage, column, tile.x);
      }
      ptx::tma_load(shared.tokens[at.stage], &p.tokens, column, tile.y, &shared.full[at.stage]);
    }
  }
}

// The eight scales of an output in a stage. Beyond K they mean nothing: the tokens there are zeros.
__device__ __forceinline__ uint2 load_scales(const KernelParams& p, int row, int column) {
  const Tiles& t = p.tiles;
  const uint8_t* const scales = p.s_rel + static_cast<int64_t>(min(row, t.N - 1)) * t.groups_per_row;
  const int group = column >> t.group_log2;
  if (t.scale_width == 8) return __ldg(reinterpret_cast<const uint2*>(scales + group));
  if (t.scale_width == 4) return make_uint2(__ldg(reinterpret_cast<const uint32_t*>(scales + group)), 0);
  if (t.scale_width == 2) return make_uint2(__ldg(reinterpret_cast<const uint16_t*>(scales + group)), 0);
  if (t.scale_width == 1) return make_uint2(__ldg(scales + group), 0);
  uint64_t bytes = 0;
#pragma unroll 1
  for (int b = 0; b < kScaleBytes; ++b) {
    const int index = min((column + 16 * b) >> t.group_log2, t.groups_per_row - 1);
    bytes |= static_cast<uint64_t>(__ldg(scales + index)) << (8 * b);
  }
  return make_uint2(static_cast<uint32_t>(bytes), static_cast<uint32_t>(bytes >> 32));
}

// What load_scales read, to one byte for every 16 columns.
__device__ __forceinline__ uint2 spread_scales(uint2 scales, int width) {
  if (width == 4) return make_uint2(ptx::permute_bytes(scales.x, 0, 0x1100), ptx::permute_bytes(scales.x, 0, 0x3322));
  if (width == 2) return make_uint2(ptx::permute_bytes(scales.x, 0, 0x0000), ptx::permute_bytes(scales.x, 0, 0x1111));
  if (width == 1) return make_uint2(scales.x * 0x01010101u, scales.x * 0x01010101u);
  return scales;
}

// Three warps, every third stage each: e4m3 bytes, one for each 16 columns.
template <class Config>
__device__ __forceinline__ void produce_scales(SharedStorage<Config>& shared, const KernelParams& p, int warp, int first_stage,
                                               int stages) {
  const Tiles& t = p.tiles;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<Config::kStages> at;
  int turn = 0;
  for (Walk<Config> walk(t); !walk.done(); walk.next()) {
    const int first_row = walk.tile().x;
    for (int k = 0; k < stages; ++k, at.advance()) {
      const bool mine = turn == warp;
      turn = turn + 1 == kScaleWarps ? 0 : turn + 1;
      if (!mine) continue;
      const int column = (first_stage + k) * kStage;
      uint2 scales[Config::kRows / 32];
#pragma unroll
      for (int i = 0; i < Config::kRows / 32; ++i) scales[i] = load_scales(p, first_row + lane + 32 * i, column);
      ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
#pragma unroll
      for (int i = 0; i < Config::kRows / 32; ++i)
        reinterpret_cast<uint2*>(shared.scales[at.stage])[lane + 32 * i] = spread_scales(scales[i], t.scale_width);
      ptx::mbarrier_arrive(&shared.full[at.stage]);  // every lane for its own stores
    }
  }
}

// What a lane decodes of a stage: 32 neighbouring columns of outputs lane/4 and lane/4 + 8 of this warp's 16.
template <class Config>
struct Codes {
  uint4 nibbles[2];
  uint2 tops[2];  // 6 bits
  uint32_t scales[2];  // of two groups of 16 columns each

  __device__ __forceinline__ void load(const SharedStorage<Config>& shared, int stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32, q = lane % 4,
              row = static_cast<int>(threadIdx.x) % Config::kGroupThreads / 32 * 16 + lane / 4;
    const uint8_t* const codes = shared.codes[stage];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      nibbles[i] = *reinterpret_cast<const uint4*>(codes + (row + 8 * i) * 64 + 16 * q);
      if (Config::kBits == 6)
        tops[i] = *reinterpret_cast<const uint2*>(codes + Config::kNibbleBytes + (row + 8 * i) * 32 + 8 * q);
      scales[i] = *reinterpret_cast<const uint16_t*>(shared.scales[stage] + (row + 8 * i) * kScaleBytes + 2 * q);
    }
  }

  __device__ __forceinline__ static uint32_t word(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
  }

  // A quarter of the work: operands a[step] at 4 bits; at 6 bits, of output step % 2, those of two steps.
  template <int kStep>
  __device__ __forceinline__ void decode(uint32_t (&a)[kSteps][4], const uint8_t* table) const {
    constexpr int kHalf = kStep / 2;
    if constexpr (Config::kBits == 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 row = reinterpret_cast<const uint4*>(table)[kHalf == 0 ? scales[i] & 255 : scales[i] >> 8];
        quant::look_up(row, word(nibbles[i], kStep), a[kStep][i], a[kStep][2 + i]);
      }
    } else {
      constexpr int i = kStep % 2;
      const uint2 scale = reinterpret_cast<const uint2*>(table)[kHalf == 0 ? scales[i] & 255 : scales[i] >> 8];
      uint32_t words[4];
      quant::decode_six(word(nibbles[i], 2 * kHalf), word(nibbles[i], 2 * kHalf + 1), kHalf == 0 ? tops[i].x : tops[i].y, scale,
                        words);
      a[2 * kHalf][i] = words[0], a[2 * kHalf][2 + i] = words[1];
      a[2 * kHalf + 1][i] = words[2], a[2 * kHalf + 1][2 + i] = words[3];
    }
  }

  __device__ __forceinline__ void decode_all(uint32_t (&a)[kSteps][4], const uint8_t* table) const {
    decode<0>(a, table), decode<1>(a, table), decode<2>(a, table), decode<3>(a, table);
  }
};

template <class Config>
__device__ __forceinline__ uint64_t token_descriptor(const SharedStorage<Config>& shared, int stage) {
  return ptx::descriptor_swizzle128(ptx::smem_address(shared.tokens[stage]));
}

// This warp reads the stage no more.
template <class Config>
__device__ __forceinline__ void release(SharedStorage<Config>& shared, int stage) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
}

// One step: an instruction is started, and while it runs a quarter of the next stage decoded. An instruction whose operand lies
// in registers holds up the warp until the one before it has ended, so four in a row would leave no time to decode.
template <class Config, int kStep>
__device__ __forceinline__ void multiply_and_decode(int (&acc)[Config::kTokens / 2], const uint32_t (&a)[kSteps][4], uint64_t b,
                                                    bool decodes, const Codes<Config>& codes, uint32_t (&next)[kSteps][4],
                                                    const uint8_t* table) {
  ptx::WgmmaS8Registers<Config::kTokens>::mma(acc, a[kStep], b + 2 * kStep, 1);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  if (decodes) codes.template decode<kStep>(next, table);
}

// One group of warps: it decodes a stage while it multiplies the one before, from a second set of registers.
template <class Config>
__device__ __forceinline__ void mainloop_ahead(int (&acc)[Config::kTokens / 2], SharedStorage<Config>& shared,
                                               RingPosition<Config::kStages>& at, int count) {
  uint32_t a[2][kSteps][4];
  Codes<Config> codes;
  ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
  codes.load(shared, at.stage);
  codes.decode_all(a[0], shared.table);
  int previous = -1;
  const auto one = [&](const uint32_t(&operands)[kSteps][4], uint32_t(&next)[kSteps][4]) {
    const int stage = at.stage;
    const uint64_t b = token_descriptor(shared, stage);
    at.advance();
    const bool decodes = --count > 0;
    if (decodes) {
      ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
      codes.load(shared, at.stage);
    }
    ptx::wgmma_fence();
    multiply_and_decode<Config, 0>(acc, operands, b, decodes, codes, next, shared.table);
    if (previous >= 0) release(shared, previous);
    multiply_and_decode<Config, 1>(acc, operands, b, decodes, codes, next, shared.table);
    multiply_and_decode<Config, 2>(acc, operands, b, decodes, codes, next, shared.table);
    multiply_and_decode<Config, 3>(acc, operands, b, decodes, codes, next, shared.table);
    previous = stage;
  };
#pragma unroll 1
  while (count >= 2) {
    one(a[0], a[1]);
    one(a[1], a[0]);
  }
  if (count > 0) one(a[0], a[1]);
  ptx::wgmma_wait<0>();
  release(shared, previous);
}

// Several groups take turns of stages and overlap each other.
template <class Config>
__device__ __forceinline__ void mainloop_turns(int (&acc)[Config::kTokens / 2], SharedStorage<Config>& shared,
                                               RingPosition<Config::kStages>& at, int count) {
  uint32_t a[kSteps][4];
  int previous = -1;
#pragma unroll 1
  for (; count > 0; --count) {
    ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
    ptx::wgmma_wait<0>();
    if (previous >= 0) release(shared, previous);
    Codes<Config> codes;
    codes.load(shared, at.stage);
    codes.decode_all(a, shared.table);
    const uint64_t b = token_descriptor(shared, at.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::WgmmaS8Registers<Config::kTokens>::mma(acc, a[step], b + 2 * step, 1);
    ptx::wgmma_commit();
    previous = at.stage;
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) at.advance();
  }
  ptx::wgmma_wait<0>();
  if (previous >= 0) release(shared, previous);
}

// This group's stages of a tile, `count` of them.
template <class Config>
__device__ __forceinline__ void mainloop(int (&acc)[Config::kTokens / 2], SharedStorage<Config>& shared,
                                         RingPosition<Config::kStages>& at, int count) {
#pragma unroll
  for (int i = 0; i < Config::kTokens / 2; ++i) acc[i] = 0;
  if constexpr (Config::kGroups == 1) {
    mainloop_ahead<Config>(acc, shared, at, count);
  } else {
    mainloop_turns<Config>(acc, shared, at, count);
  }
}

__device__ __forceinline__ void finish_quad(const KernelParams& p, const float2* columns, float a_scale, int m, int n,
                                            const int4& sum) {
  const int acc[4] = {sum.x, sum.y, sum.z, sum.w};
  float y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) y[e] = scale(acc[e], a_scale, columns[e].x, columns[e].y);
  finish_four(p.epilogue, m, n, y);
}

// Fragments of 8 * kBlocks tokens to shared memory as [token][kSumPitch], or onto what is there.
template <class Config, int kBlocks>
__device__ __forceinline__ void put_sums(int* sums, const int* acc, bool add) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int* const mine = sums + static_cast<int>(threadIdx.x) % Config::kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int* const at = mine + (8 * j + 2 * (lane % 4) + e % 2) * Config::kSumPitch + 8 * (e / 2);
      *at = acc[4 * j + e] + (add ? *at : 0);
    }
  }
}

// All consumers: the sums of all groups.
template <class Config, int kBlocks>
__device__ __forceinline__ void gather_sums(int* sums, const int* acc) {
  ptx::named_barrier_sync<1, Config::kConsumerThreads>();  // what lies there has been read
#pragma unroll
  for (int group = 0; group < Config::kGroups; ++group) {
    if (static_cast<int>(threadIdx.x) / Config::kGroupThreads == group) put_sums<Config, kBlocks>(sums, acc, group > 0);
    ptx::named_barrier_sync<1, Config::kConsumerThreads>();
  }
}

// More than 64 tokens: 32 at a time.
template <class Config>
__device__ __forceinline__ void finish_chunks(const KernelParams& p, SharedStorage<Config>& shared,
                                              const int (&acc)[Config::kTokens / 2], int2 tile) {
  constexpr int kQuads = Config::kRows / 4;
  int* const sums = reinterpret_cast<int*>(shared.sums);
#pragma unroll
  for (int chunk = 0; chunk < Config::kTokens / kChunkTokens; ++chunk) {
    gather_sums<Config, kChunkTokens / 8>(sums, acc + chunk * kChunkTokens / 2);
#pragma unroll 1
    for (int quad = threadIdx.x; quad < kChunkTokens * kQuads; quad += Config::kConsumerThreads) {
      const int token = quad / kQuads, column = quad % kQuads * 4, local = chunk * kChunkTokens + token, m = tile.y + local;
      if (m >= p.tiles.M) continue;
      const int4 sum = *reinterpret_cast<const int4*>(sums + token * Config::kSumPitch + column);
      finish_quad(p, shared.columns + column, shared.token_scales[local], m, tile.x + column, sum);
    }
  }
}

__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  warpgroup == 0 ? ptx::named_barrier_sync<3, 128>() : ptx::named_barrier_sync<4, 128>();
}

// A 16-bit result without a residual, in rows that the copy engine can write: 32 tokens x 64 outputs of a warpgroup at a time.
template <class Config, bool kHalf>
__device__ __forceinline__ void finish_mapped(const KernelParams& p, SharedStorage<Config>& shared,
                                              const int (&acc)[Config::kTokens / 2], int2 tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / 4;
  const float2 low = shared.columns[warp * 16 + lane / 4], high = shared.columns[warp * 16 + lane / 4 + 8];
  uint8_t* const staging = shared.sums + warpgroup * 2 * kStoreBytes;
  const uint32_t place = ptx::smem_address(staging) + (8 * (lane / 16) + lane % 8) * 128 +
                         ((32 * (warp % 4) + 16 * (lane / 8 % 2)) ^ (lane % 8 << 4));
  constexpr DType kType = kHalf ? DType::kFloat16 : DType::kBFloat16;
#pragma unroll
  for (int chunk = 0; chunk < Config::kTokens / kChunkTokens; ++chunk) {
    const int buffer = chunk % 2;
    if (threadIdx.x % 128 == 0) ptx::tma_store_wait_read<1>();
    warpgroup_barrier(warpgroup);  // the buffer's last content has gone
#pragma unroll
    for (int j = 0; j < kChunkTokens / 8; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int block = chunk * (kChunkTokens / 8) + j + i;
        const float2 a_scale = *reinterpret_cast<const float2*>(shared.token_scales + 8 * block + 2 * (lane % 4));
        const int* const sum = acc + 4 * block;
        words[2 * i] = pack_pair(scale(sum[0], a_scale.x, low.x, low.y), scale(sum[1], a_scale.y, low.x, low.y), kType);
        words[2 * i + 1] = pack_pair(scale(sum[2], a_scale.x, high.x, high.y), scale(sum[3], a_scale.y, high.x, high.y), kType);
      }
      ptx::stmatrix_x4_transposed(place + buffer * kStoreBytes + 8 * j * 128, words[0], words[1], words[2], words[3]);
    }
    ptx::fence_async_proxy();
    warpgroup_barrier(warpgroup);
    if (threadIdx.x % 128 == 0) {
      ptx::tma_store(&p.result, staging + buffer * kStoreBytes, tile.x + warpgroup * kStoreColumns,
                     tile.y + chunk * kChunkTokens);
      ptx::tma_store_commit();
    }
  }
}

// Up to 64 tokens: all sums at once; the blocks of a cluster take turns of tokens.
template <class Config>
__device__ __forceinline__ void finish_whole(const KernelParams& p, SharedStorage<Config>& shared,
                                             const int (&acc)[Config::kTokens / 2], int2 tile, int rank) {
  constexpr int kQuads = Config::kRows / 4;
  int* const sums = reinterpret_cast<int*>(shared.sums);
  const int splits = p.tiles.splits;
  gather_sums<Config, Config::kTokens / 8>(sums, acc);
  if (splits > 1) ptx::cluster_sync_diverged();
#pragma unroll 1
  for (int quad = threadIdx.x; quad < Config::kTokens / splits * kQuads; quad += Config::kConsumerThreads) {
    const int token = quad / kQuads * splits + rank, column = quad % kQuads * 4, m = tile.y + token;
    if (m >= p.tiles.M) continue;
    const int* const own = sums + token * Config::kSumPitch + column;
    int4 sum = *reinterpret_cast<const int4*>(own);
#pragma unroll 1
    for (int other = 1; other < splits; ++other) {
      const int4 more = ptx::load_cluster_16(own, (rank + other) & (splits - 1));
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    finish_quad(p, shared.columns + column, shared.token_scales[token], m, tile.x + column, sum);
  }
}

// More than 64 tokens and a split K: all sums in the place of the stages, which nothing fills again; the blocks of a cluster
// take turns of tokens. Loads from the others are all on their way before the first is used.
template <class Config, int kSplits>
__device__ __forceinline__ void finish_split(const KernelParams& p, SharedStorage<Config>& shared, int2 tile, int rank) {
  constexpr int kQuads = Config::kRows / 4, kTokensAtOnce = Config::kConsumerThreads / kQuads;  // of a block
  constexpr int kRounds = (Config::kTokens + kSplits * kTokensAtOnce - 1) / (kSplits * kTokensAtOnce);
  constexpr int kTogether = kRounds % 2 == 0 ? 2 : 1;
  const int* const sums = reinterpret_cast<const int*>(&shared);
  const int column = static_cast<int>(threadIdx.x) % kQuads * 4;
#pragma unroll 1
  for (int round = 0; round < kRounds; round += kTogether) {
    int4 sum[kTogether][kSplits];
    int token[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      token[i] = ((round + i) * kTokensAtOnce + static_cast<int>(threadIdx.x) / kQuads) * kSplits + rank;
      const int* const own = sums + min(token[i], Config::kTokens - 1) * Config::kSumPitch + column;
#pragma unroll
      for (int other = 0; other < kSplits; ++other) {
        const int block = rank + other;
        sum[i][other] = ptx::load_cluster_16(own, block < kSplits ? block : block - kSplits);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int other = 1; other < kSplits; ++other) {
        sum[i][0].x += sum[i][other].x, sum[i][0].y += sum[i][other].y;
        sum[i][0].z += sum[i][other].z, sum[i][0].w += sum[i][other].w;
      }
      const int m = tile.y + token[i];
      if (token[i] < Config::kTokens && m < p.tiles.M)
        finish_quad(p, shared.columns + column, shared.token_scales[token[i]], m, tile.x + column, sum[i][0]);
    }
  }
}

template <class Config>
__device__ __forceinline__ void consume(SharedStorage<Config>& shared, const KernelParams& p, int rank, int stages) {
  const int thread = static_cast<int>(threadIdx.x), group = thread / Config::kGroupThreads;
  RingPosition<Config::kStages> at;
  for (int i = 0; i < group; ++i) at.advance();
  int begun = 0;  // stages of the tiles before
  bool waited = false;
  for (Walk<Config> walk(p.tiles); !walk.done(); walk.next()) {
    const int2 tile = walk.tile();
    const int n = min(tile.x + thread, p.tiles.N - 1);
    float2 column = make_float2(0, 0);
    if (thread < Config::kRows) column = make_float2(p.epilogue.b_scale[n], bias_of(p.epilogue, n));
    if (!waited) ptx::griddep_wait();
    waited = true;
    const float token_scale = thread < Config::kTokens ? p.epilogue.a_scale[min(tile.y + thread, p.tiles.M - 1)] : 0.0f;
    // Of a run of stages a group takes every kGroups-th, counted over all tiles.
    const auto taken = [&](int count) { return (count + Config::kGroups - 1 - group) / Config::kGroups; };
    int acc[Config::kTokens / 2];
    mainloop<Config>(acc, shared, at, taken(begun + stages) - taken(begun));
    begun += stages;
    ptx::named_barrier_sync<2, Config::kConsumerThreads>();  // the tile before has been finished
    if (thread < Config::kRows) shared.columns[thread] = column;
    if (thread < Config::kTokens) shared.token_scales[thread] = token_scale;  // seen after gather_sums' barriers
    if constexpr (Config::kWhole) {
      finish_whole<Config>(p, shared, acc, tile, rank);
    } else if (p.tiles.splits > 1) {
      ptx::named_barrier_sync<1, Config::kConsumerThreads>();  // every instruction that reads the stages has ended
      put_sums<Config, Config::kTokens / 8>(reinterpret_cast<int*>(&shared), acc, false);
      ptx::cluster_sync_diverged();
      switch (p.tiles.splits) {
        case 2: finish_split<Config, 2>(p, shared, tile, rank); break;
        case 3: finish_split<Config, 3>(p, shared, tile, rank); break;
        default: finish_split<Config, 4>(p, shared, tile, rank);
      }
    } else if (!p.tiles.result_mapped) {
      finish_chunks<Config>(p, shared, acc, tile);
    } else {
      ptx::named_barrier_sync<1, Config::kConsumerThreads>();  // scales of columns and tokens are there
      p.epilogue.out_type == DType::kFloat16 ? finish_mapped<Config, true>(p, shared, acc, tile)
                                             : finish_mapped<Config, false>(p, shared, acc, tile);
    }
  }
  if (!Config::kWhole && thread % 128 == 0) ptx::tma_store_wait_read<0>();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) w4a8_hopper(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedStorage<Config>& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  const int warp = static_cast<int>(threadIdx.x) / 32, rank = static_cast<int>(blockIdx.x) % p.tiles.splits;
  const int first_stage = rank * p.tiles.stages_per_split;
  const int stages = min(p.tiles.stages_per_split, (p.tiles.K + kStage - 1) / kStage - first_stage);
  constexpr int kProducerWarp = Config::kConsumerThreads / 32;
  if (threadIdx.x == Config::kConsumerThreads) {
    ptx::tma_prefetch_map(&p.nibbles);
    ptx::tma_prefetch_map(&p.tokens);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1 + 32);  // the copies, a warp's scales
      ptx::mbarrier_init(&shared.empty[stage], Config::kGroupThreads / 32);
    }
    ptx::mbarrier_init_fence();
  }
  if (Config::kBits == 4) {
    if (threadIdx.x < 256) quant::fill_decode_table(reinterpret_cast<uint4*>(shared.table), p.codebook, threadIdx.x, 256);
  } else if (threadIdx.x < 256) {
    reinterpret_cast<uint2*>(shared.table)[threadIdx.x] = quant::negated_scales(threadIdx.x);
  }
  __syncthreads();

  if (warp >= kProducerWarp) {
    ptx::setmaxnreg_shrink<Config::kProducerRegisters>();
    if (warp == kProducerWarp) {
      if (threadIdx.x % 32 == 0) produce<Config>(shared, p, first_stage, stages);
      __syncwarp();
    } else {
      produce_scales<Config>(shared, p, warp - kProducerWarp - 1, first_stage, stages);
    }
    if (p.tiles.splits > 1) ptx::cluster_sync_diverged();
  } else {
    ptx::setmaxnreg_grow<Config::kConsumerRegisters>();
    consume<Config>(shared, p, rank, stages);
  }
  // A block must outlive the loads of its sums by the others.
  if (p.tiles.splits > 1) ptx::cluster_sync_diverged();
}

}  // namespace kitchen::w4a8::hopper
