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
//   sums      int32. Up to 64 tokens: all of a tile in shared memory in the place of the stages, added up over the cluster.
//             More: 32 tokens at a time, while the stages of the next tile fill; blocks then walk over tiles
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
constexpr int kChunkTokens = 32;  // whose sums a warpgroup has in shared memory at once
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
  static constexpr int kOther = kTableBytes + kReservedBytes + 8 * kRows + 4 * kTokens + 1024;
  static constexpr int kStages = (kSharedLimit - kOther - (kWhole ? 0 : kSumBytes)) / kStageBytes;
  static_assert(kStages >= 3, "fewer than three stages cannot hide the copies");
  static_assert(!kWhole || kSumBytes <= kStages * kStageBytes, "the sums take the place of the stages");
};

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t tokens[Config::kStages][Config::kTokenBytes];
  alignas(128) uint8_t codes[Config::kStages][Config::kCodeBytes];
  alignas(16) uint8_t scales[Config::kStages][Config::kStageScales];
  alignas(16) uint8_t sums[Config::kWhole ? 16 : Config::kSumBytes];
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
  int scale_width;  // bytes of s_rel that can be read at once: 8 or 1
};

struct KernelParams {
  CUtensorMap tokens, nibbles, tops;
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
      const int column = (first_stage + k) * kStage, group = column >> t.group_log2;
      uint64_t bytes[Config::kRows / 32];
#pragma unroll
      for (int i = 0; i < Config::kRows / 32; ++i) {
        const uint8_t* const row = p.s_rel + static_cast<int64_t>(min(first_row + lane + 32 * i, t.N - 1)) * t.groups_per_row;
        if (t.scale_width == 8 && t.group_log2 == 4) {
          bytes[i] = *reinterpret_cast<const uint64_t*>(row + group);
        } else {
          bytes[i] = 0;
#pragma unroll
          for (int b = 0; b < kScaleBytes; ++b) {
            const int index = min((column + 16 * b) >> t.group_log2, t.groups_per_row - 1);
            bytes[i] |= static_cast<uint64_t>(row[index]) << (8 * b);
          }
        }
      }
      ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
#pragma unroll
      for (int i = 0; i < Config::kRows / 32; ++i)
        reinterpret_cast<uint64_t*>(shared.scales[at.stage])[lane + 32 * i] = bytes[i];
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&shared.full[at.stage]);
    }
  }
}

// The operands of a stage: a[step] of 128 columns x 16 outputs of this warp.
template <class Config>
__device__ __forceinline__ void decode_stage(uint32_t (&a)[kSteps][4], const SharedStorage<Config>& shared, int stage) {
  const int lane = static_cast<int>(threadIdx.x) % 32, q = lane % 4,
            row = static_cast<int>(threadIdx.x) % Config::kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint8_t* const codes = shared.codes[stage];
    const uint4 n = *reinterpret_cast<const uint4*>(codes + (row + 8 * i) * 64 + 16 * q);
    const uint32_t scales = *reinterpret_cast<const uint16_t*>(shared.scales[stage] + (row + 8 * i) * kScaleBytes + 2 * q);
    uint32_t words[8];
    if constexpr (Config::kBits == 4) {
      const uint4* const table = reinterpret_cast<const uint4*>(shared.table);
      const uint4 first = table[scales & 255], second = table[scales >> 8];
      quant::look_up(first, n.x, words[0], words[1]);
      quant::look_up(first, n.y, words[2], words[3]);
      quant::look_up(second, n.z, words[4], words[5]);
      quant::look_up(second, n.w, words[6], words[7]);
    } else {
      const uint2 top = *reinterpret_cast<const uint2*>(codes + Config::kNibbleBytes + (row + 8 * i) * 32 + 8 * q);
      const uint2* const table = reinterpret_cast<const uint2*>(shared.table);
      uint32_t low[4], high[4];
      quant::decode_six(n.x, n.y, top.x, table[scales & 255], low);
      quant::decode_six(n.z, n.w, top.y, table[scales >> 8], high);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = low[w], words[4 + w] = high[w];
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) a[step][i] = words[2 * step], a[step][2 + i] = words[2 * step + 1];
  }
}

template <class Config>
__device__ __forceinline__ void multiply(int (&acc)[Config::kTokens / 2], const uint32_t (&a)[kSteps][4],
                                         const SharedStorage<Config>& shared, int stage) {
  const uint64_t b = ptx::descriptor_swizzle128(ptx::smem_address(shared.tokens[stage]));
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) ptx::WgmmaS8Registers<Config::kTokens>::mma(acc, a[step], b + 2 * step, 1);
  ptx::wgmma_commit();
}

// This group's stages of a tile, `count` of them. One group alone decodes a stage while the instructions of the one before run,
// from a second set of registers; several overlap each other.
template <class Config>
__device__ __forceinline__ void mainloop(int (&acc)[Config::kTokens / 2], SharedStorage<Config>& shared,
                                         RingPosition<Config::kStages>& at, int count) {
#pragma unroll
  for (int i = 0; i < Config::kTokens / 2; ++i) acc[i] = 0;
  constexpr bool kAhead = Config::kGroups == 1;
  uint32_t a[kAhead ? 2 : 1][kSteps][4];
  int previous = -1;
  const auto release_previous = [&] {
    if (previous >= 0 && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[previous]);
  };
  const auto one = [&](uint32_t(&operands)[kSteps][4]) {
    ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
    if constexpr (!kAhead) {
      ptx::wgmma_wait<0>();
      release_previous();
    }
    decode_stage<Config>(operands, shared, at.stage);
    multiply<Config>(acc, operands, shared, at.stage);
    if constexpr (kAhead) {
      ptx::wgmma_wait<1>();
      release_previous();
    }
    previous = at.stage;
#pragma unroll
    for (int i = 0; i < Config::kGroups; ++i) at.advance();
  };
  if constexpr (kAhead) {
#pragma unroll 1
    for (; count >= 2; count -= 2) {
      one(a[0]);
      one(a[1]);
    }
    if (count > 0) one(a[0]);
  } else {
#pragma unroll 1
    for (; count > 0; --count) one(a[0]);
  }
  ptx::wgmma_wait<0>();
  release_previous();
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

// Up to 64 tokens: all sums in the place of the stages; the blocks of a cluster take turns of tokens.
template <class Config>
__device__ __forceinline__ void finish_whole(const KernelParams& p, SharedStorage<Config>& shared,
                                             const int (&acc)[Config::kTokens / 2], int2 tile, int rank) {
  constexpr int kQuads = Config::kRows / 4;
  int* const sums = reinterpret_cast<int*>(&shared);
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
    } else {
      finish_chunks<Config>(p, shared, acc, tile);
    }
  }
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
      ptx::mbarrier_init(&shared.full[stage], 2);  // the copies, the scales
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
    if (Config::kWhole && p.tiles.splits > 1) ptx::cluster_sync_diverged();
  } else {
    ptx::setmaxnreg_grow<Config::kConsumerRegisters>();
    consume<Config>(shared, p, rank, stages);
  }
  // A block must outlive the loads of its sums by the others.
  if (Config::kWhole && p.tiles.splits > 1) ptx::cluster_sync_diverged();
}

}  // namespace kitchen::w4a8::hopper
