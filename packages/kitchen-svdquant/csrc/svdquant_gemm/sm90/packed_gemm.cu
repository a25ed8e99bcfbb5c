// W4A4 GEMM with a low-rank branch on Hopper for some rows of x: both operands stay packed, four bits a code, until they are in
// registers, so that no pass in front decodes the weight. What it computes: smxx/stream_gemm.cuh, with the low-rank product by
// bfloat16 parts of lora_act, which leaves 2^-16 of it.
//
//   block     kRows weight rows x kTokens tokens x one piece of K; one warp fills a ring of stages of kStageGroups groups (TMA, a line of
//             the L2 of every row), the others multiply
//   warp      32 weight rows x 8 * kTokenTiles tokens of every group that is its own: kParts warps take the groups of a stage in turn
//   lane      weight rows are the m=16 side of mma.sync, tokens the n=8 side; an operand is 8 bytes of a group, the order of k inside
//             of a group being free. Row (token) g of an operand is row placed(g) of its eight: lanes that read at once meet no bank twice
//   sums      of the kParts warps meet in shared memory, in order; those of pieces of K in global memory, where the block that comes
//             last adds them, in order
//
// Integer sums start at 1.5 * 2^23, so that they are floats of their value and that number: no conversion.
//
// A programmatic launch reads weights and what belongs to them before it waits for the kernel in front.
// Measured: docs/kernels/svdquant.md.
#include "svdquant_gemm/sm90/packed_gemm.h"

#include <cuda.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/host/tensor_map.h"
#include "kitchen/mma/m16n8k16_f16.h"
#include "kitchen/mma/m16n8k32_s8.h"
#include "kitchen/ptx/cp_async_arrive.h"
#include "kitchen/ptx/cp_async_small.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/keep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/named_barrier.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma.h"
#include "svdquant_gemm/scale_layout.h"
#include "svdquant_gemm/sm90/store_pair.cuh"

namespace kitchen::svdquant {
namespace {

constexpr int kRowBlocks = 3, kRows = 32 * kRowBlocks;  // of a block
constexpr int kWarps = 12, kConsumers = 32 * kWarps, kThreads = kConsumers + 128;  // that multiply; with the warpgroup that copies
constexpr int kConsumerRegisters = 152, kProducerRegisters = 56;
constexpr int kStageGroups = 4, kGroupBytes = kGroup / 2, kPitch = kStageGroups * kGroupBytes;
constexpr int kQuadsOfRow = kRows / 4;
constexpr int kMagic = 0x4B400000;
constexpr float kMagicValue = 0x1.8p23f;
constexpr int kMostShared = 212 * 1024;  // leaves shared memory for a block of the quantizer

// kTokenTiles: of 8 tokens, of a warp; kTokenBlocks: of so many tokens, of a block.
template <int kTokenTiles_, int kTokenBlocks_, bool kUnsigned_>
struct Config {
  static constexpr bool kUnsigned = kUnsigned_;  // codes of tokens
  static constexpr int kTokenTiles = kTokenTiles_, kTokenBlocks = kTokenBlocks_;
  static constexpr int kTokens = 8 * kTokenTiles * kTokenBlocks;
  static constexpr int kParts = kWarps / kRowBlocks / kTokenBlocks;
  static constexpr int kWeightBytes = kRows * kPitch, kTokenBytes = kTokens * kPitch;
  static constexpr int kWeightScaleBytes = kStageGroups * kRows * 2, kTokenScaleBytes = kStageGroups * kTokens * 4;
  static constexpr int kCopied = kWeightBytes + kTokenBytes + kWeightScaleBytes;  // by TMA
  static constexpr int kStages = std::min(12, (kMostShared - 1024) / (kCopied + kTokenScaleBytes + 16));
  static constexpr int kSumPitch = kRows + 4;
  // With few tokens, a block of the quantizer has room beside this one.
  static constexpr int kBoundThreads = kTokenTiles <= 4 ? kThreads + 128 : kThreads;
  static constexpr bool kMovesRegisters = kTokenTiles > 4;
  static_assert(kParts * kTokens * kSumPitch * 4 <= kStages * (kWeightBytes + kTokenBytes), "sums take the place of the ring");
  static_assert(kStageGroups % kParts == 0);
};

template <class Config>
struct SharedStorage {
  union {
    struct {
      alignas(1024) uint8_t weights[Config::kStages][Config::kWeightBytes];
      alignas(1024) uint8_t tokens[Config::kStages][Config::kTokenBytes];
    };
    float sums[Config::kParts][Config::kTokens][Config::kSumPitch];  // of token placed(i) of eight
  };
  alignas(128) uint16_t weight_scales[Config::kStages][kStageGroups][kRows];
  alignas(16) float token_scales[Config::kStages][kStageGroups][Config::kTokens];  // of token placed(i) of eight
  uint64_t full[Config::kStages], empty[Config::kStages];
  bool last;
};

struct Params {
  StreamOperands o;
  CUtensorMap tokens, weights, weight_scales;
  float4* sums;       // [tile][piece][kTokens * kQuadsOfRow]
  uint32_t* arrived;  // [tile]
  int token_blocks, splits, stages, stages_each;
};

__device__ __forceinline__ int placed(int g) { return 2 * g % 8 + g / 4; }
__device__ __forceinline__ int place_of(int row) { return row % 8 / 2 + row % 2 * 4; }

// The work of a block: blocks that read the same weights follow each other.
template <class Config>
struct Share {
  int tile, piece, first_token, first_row, first_stage, stages;

  __device__ __forceinline__ explicit Share(const Params& params) {
    const int block = static_cast<int>(blockIdx.x), token_block = block % params.token_blocks, rest = block / params.token_blocks;
    piece = rest % params.splits;
    tile = rest / params.splits * params.token_blocks + token_block;
    first_token = token_block * Config::kTokens, first_row = rest / params.splits * kRows;
    first_stage = piece * params.stages_each;
    stages = min(params.stages_each, params.stages - first_stage);
  }
};

// One warp: weights come with the first lane's copies, scales of tokens with small ones of all lanes.
template <class Config>
struct Feed {
  SharedStorage<Config>& shared;
  const Params& params;
  const Share<Config>& share;

  __device__ __forceinline__ void load_weights(int i, int slot) const {
    if (threadIdx.x % 32 != 0) return;
    const int stage = share.first_stage + i;
    ptx::mbarrier_arrive_expect(&shared.full[slot], Config::kCopied);
    ptx::tma_load(shared.weights[slot], &params.weights, stage * kPitch, share.first_row, &shared.full[slot]);
    ptx::tma_load(shared.weight_scales[slot], &params.weight_scales, share.first_row, stage * kStageGroups, &shared.full[slot]);
  }

  // Tokens beyond the last have codes of zero, and its scales; they are not stored.
  __device__ __forceinline__ void load_tokens(int i, int slot) const {
    const StreamOperands& o = params.o;
    const int lane = static_cast<int>(threadIdx.x) % 32, stage = share.first_stage + i;
    const int M = static_cast<int>(o.M), groups = static_cast<int>(o.K / kGroup);
    if (lane == 0) ptx::tma_load(shared.tokens[slot], &params.tokens, stage * kPitch, share.first_token, &shared.full[slot]);
    constexpr int kAll = kStageGroups * Config::kTokens;
#pragma unroll
    for (int j = 0; j < kAll / 32; ++j) {
      const int at = lane + 32 * j, inside = at / Config::kTokens, token = at % Config::kTokens;
      const int group = min(stage * kStageGroups + inside, groups - 1);
      ptx::cp_async_4(ptx::smem_address(&shared.token_scales[slot][inside][token / 8 * 8 + place_of(token)]),
                      o.a_scale + (static_cast<int64_t>(group) * M + min(share.first_token + token, M - 1)));
    }
    ptx::cp_async_arrive(&shared.full[slot]);
  }

  __device__ __forceinline__ void operator()() const {
    const int ahead = min(share.stages, Config::kStages);
    for (int i = 0; i < ahead; ++i) load_weights(i, i);
    ptx::griddep_wait();
    for (int i = 0; i < ahead; ++i) load_tokens(i, i);
    int slot = 0;
    uint32_t phase = 0;
    for (int i = ahead; i < share.stages; ++i) {
      ptx::mbarrier_wait(&shared.empty[slot], phase);
      load_weights(i, slot);
      load_tokens(i, slot);
      if (++slot == Config::kStages) slot = 0, phase ^= 1;
    }
  }
};

template <class Config>
using Sums = float[2][Config::kTokenTiles][4];

// What a lane has: rows placed(g) and that + 8 of two tiles of 16, tokens placed(2t) and placed(2t + 1) of its tiles of 8.
template <class Config>
struct Lane {
  const StreamOperands& o;
  int g, t, part, first_row, first_token;  // of the block
  float factor;                            // what the products are too large by, inverted
  int start[4];  // of integer sums
  bool is_half;

  __device__ __forceinline__ explicit Lane(const StreamOperands& operands)
      : o(operands),
        g(static_cast<int>(threadIdx.x) % 32 / 4),
        t(static_cast<int>(threadIdx.x) % 4),
        factor(Config::kUnsigned ? 0x1p-4f : 0x1p-8f),
        start{kMagic, kMagic, kMagic, kMagic},
        is_half(o.b_scale_type == DType::kFloat16) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    part = warp % Config::kParts;
    first_row = warp / Config::kParts % kRowBlocks * 32;
    first_token = warp / Config::kParts / kRowBlocks * 8 * Config::kTokenTiles;
    ptx::keep(factor);  // else they are made again for every group
    ptx::keep(start[0]), ptx::keep(start[1]), ptx::keep(start[2]), ptx::keep(start[3]);
  }

  __device__ __forceinline__ float scale(const uint16_t* scales, int row) const {
    const uint16_t bits = scales[row];
    return (is_half ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<uint32_t>(bits) << 16)) * factor;
  }

  // A byte for each: signed codes times 16, unsigned ones as they are.
  __device__ __forceinline__ static uint32_t even_codes(uint32_t word) {
    return Config::kUnsigned ? word & 0x0f0f0f0fu : word << 4 & 0xf0f0f0f0u;
  }
  __device__ __forceinline__ static uint32_t odd_codes(uint32_t word) {
    return Config::kUnsigned ? word >> 4 & 0x0f0f0f0fu : word & 0xf0f0f0f0u;
  }

  // Group `inside` of a stage.
  __device__ __forceinline__ void multiply(Sums<Config>& sums, const SharedStorage<Config>& shared, int slot, int inside) const {
    using Mma = mma::M16N8K32S8;
    constexpr uint32_t kTop = 0xf0f0f0f0u;
    const int row = placed(g), place = row * kPitch + ((2 * inside + t / 2) ^ row) * 16 + t % 2 * 8;
    const uint8_t* const weights = shared.weights[slot] + first_row * kPitch + place;
    const uint8_t* const tokens = shared.tokens[slot] + first_token * kPitch + place;
    const uint16_t* const weight_scales = &shared.weight_scales[slot][inside][first_row + row];
    const float* const token_scales = &shared.token_scales[slot][inside][first_token + 2 * t];
    uint32_t first[2][4], second[2][4];
    float b_scale[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint2 word = *reinterpret_cast<const uint2*>(weights + (16 * i + 8 * h) * kPitch);
        first[i][h] = word.x << 4 & kTop, first[i][2 + h] = word.x & kTop;
        second[i][h] = word.y << 4 & kTop, second[i][2 + h] = word.y & kTop;
        b_scale[i][h] = scale(weight_scales, 16 * i + 8 * h);
      }
    }
#pragma unroll
    for (int j = 0; j < Config::kTokenTiles; ++j) {
      const uint2 word = *reinterpret_cast<const uint2*>(tokens + 8 * j * kPitch);
      const float2 a_scale = *reinterpret_cast<const float2*>(token_scales + 8 * j);
      const uint32_t even[2] = {even_codes(word.x), even_codes(word.y)}, odd[2] = {odd_codes(word.x), odd_codes(word.y)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int dot[4];
        Mma::multiply(dot, first[i], even[0], odd[0], start);
        Mma::multiply(dot, second[i], even[1], odd[1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float scaled = __fmul_rn(__fsub_rn(__int_as_float(dot[e]), kMagicValue), e % 2 ? a_scale.y : a_scale.x);
          sums[i][j][e] = __fmaf_rn(scaled, b_scale[i][e / 2], sums[i][j][e]);
        }
      }
    }
  }

  // Steps of 16 ranks, dealt out over the parts. `row` and `token`: of the matrix, where this warp's begin.
  __device__ __forceinline__ void multiply_ranks(Sums<Config>& sums, int row, int token) const {
    using Mma = mma::M16N8K16<__nv_bfloat16>;
    const int last_row = static_cast<int>(o.N) - 1, last_token = static_cast<int>(o.M) - 1;
#pragma unroll 1
    for (int step = part; 16 * step < o.R; step += Config::kParts) {
      const int ranks[2] = {16 * step + 2 * t, 16 * step + 8 + 2 * t};
      uint32_t up[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int n = min(row + 16 * i + e % 2 * 8 + placed(g), last_row), r = ranks[e / 2];
          up[i][e] = r < o.R ? __ldg(static_cast<const uint32_t*>(o.up) + (static_cast<int64_t>(n) * o.R + r) / 2) : 0u;
        }
      }
#pragma unroll
      for (int j = 0; j < Config::kTokenTiles; ++j) {
        const float* const low = o.low + static_cast<int64_t>(min(token + 8 * j + placed(g), last_token)) * o.R;
        Ranks parts[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // not by way of the read-only cache: the kernel in front may have been running
          const int r = ranks[half];
          const float2 pair = r < o.R ? *reinterpret_cast<const float2*>(low + r) : make_float2(0.0f, 0.0f);
          parts[half] = split(pair.x, pair.y);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Mma::multiply(sums[i][j], up[i], parts[0].high, parts[1].high);
          Mma::multiply(sums[i][j], up[i], parts[0].low, parts[1].low);
        }
      }
    }
  }

  __device__ __forceinline__ void store(SharedStorage<Config>& shared, const Sums<Config>& sums) const {
#pragma unroll
    for (int j = 0; j < Config::kTokenTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float* const to = &shared.sums[part][first_token + 8 * j + 2 * t + e % 2][first_row + 8 * (e / 2) + placed(g)];
#pragma unroll
        for (int i = 0; i < 2; ++i) to[16 * i] = sums[i][j][e];
      }
    }
  }
};

__device__ __forceinline__ void add(float4& sum, const float4& other) {
  sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// Four neighbouring columns of a token.
template <class Config>
__device__ __forceinline__ void finish(const StreamOperands& o, const Share<Config>& share, int quad, const float4& sum) {
  const int slot = quad / kQuadsOfRow, m = share.first_token + slot / 8 * 8 + placed(slot % 8), n = share.first_row + quad % kQuadsOfRow * 4;
  if (m >= o.M) return;
  store_pair(o, make_float2(sum.x, sum.y), bias_of(o, n), m, n);
  store_pair(o, make_float2(sum.z, sum.w), bias_of(o, n + 2), m, n + 2);
}

__device__ __forceinline__ void sync_consumers() { ptx::named_barrier_sync<1, kConsumers>(); }

// All consumers, behind a barrier.
template <class Config>
__device__ __forceinline__ void meet(SharedStorage<Config>& shared, const Params& params, const Share<Config>& share) {
  constexpr int kQuads = Config::kTokens * kQuadsOfRow;
  float4* const mine = params.sums + (static_cast<int64_t>(share.tile) * params.splits + share.piece) * kQuads;
  for (int quad = static_cast<int>(threadIdx.x); quad < kQuads; quad += kConsumers) {
    const int slot = quad / kQuadsOfRow, row = quad % kQuadsOfRow * 4;
    float4 sum = *reinterpret_cast<const float4*>(&shared.sums[0][slot][row]);
#pragma unroll
    for (int part = 1; part < Config::kParts; ++part) add(sum, *reinterpret_cast<const float4*>(&shared.sums[part][slot][row]));
    if (params.splits == 1) {
      finish(params.o, share, quad, sum);
    } else {
      mine[quad] = sum;
    }
  }
  if (params.splits == 1) return;
  __threadfence();  // before the count, for whoever sees it
  sync_consumers();
  if (threadIdx.x == 0) {
    shared.last = atomicAdd(&params.arrived[share.tile], 1u) == static_cast<uint32_t>(params.splits - 1);
    __threadfence();
  }
  sync_consumers();
  if (!shared.last) return;
  const float4* const all = params.sums + static_cast<int64_t>(share.tile) * params.splits * kQuads;
  for (int quad = static_cast<int>(threadIdx.x); quad < kQuads; quad += kConsumers) {
    float4 sum = __ldcg(all + quad);
    for (int piece = 1; piece < params.splits; ++piece) add(sum, __ldcg(all + piece * kQuads + quad));
    finish(params.o, share, quad, sum);
  }
}

// The groups of this warp, of every stage.
template <class Config>
__device__ __forceinline__ void consume(SharedStorage<Config>& shared, const Params& params, const Share<Config>& share) {
  const Lane<Config> lane(params.o);
  Sums<Config> sums = {};
  ptx::griddep_wait();
  if (share.piece == 0) lane.multiply_ranks(sums, share.first_row + lane.first_row, share.first_token + lane.first_token);
  const int groups = static_cast<int>(params.o.K / kGroup) - share.first_stage * kStageGroups;
  int slot = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int i = 0; i < share.stages; ++i) {
    ptx::mbarrier_wait(&shared.full[slot], phase);
#pragma unroll 1
    for (int inside = lane.part; inside < kStageGroups; inside += Config::kParts) {
      if (i * kStageGroups + inside < groups) lane.multiply(sums, shared, slot, inside);
    }
    ptx::mbarrier_arrive(&shared.empty[slot]);  // every lane: racecheck does not follow one for a warp
    if (++slot == Config::kStages) slot = 0, phase ^= 1;
  }
  sync_consumers();  // nobody reads the ring any more
  ptx::griddep_launch();
  lane.store(shared, sums);
  sync_consumers();
  meet(shared, params, share);
}

template <class Config>
__global__ void __launch_bounds__(Config::kBoundThreads, 1) packed_gemm(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedStorage<Config>& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  const Share<Config> share(params);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1 + 32);
      ptx::mbarrier_init(&shared.empty[stage], kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_shrink<kProducerRegisters>();
    if (threadIdx.x / 32 == kWarps) Feed<Config>{shared, params, share}();
  } else {
    if constexpr (Config::kMovesRegisters) ptx::setmaxnreg_grow<kConsumerRegisters>();
    consume(shared, params, share);
  }
}

// ---------------------------------------------------------------- plans and launch

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Variant {
  int tokens;
  void (*kernels[2])(Params);  // of signed and of unsigned codes
  size_t shared;
  double stage_us;  // of a stage of a block that shares its weights with others
};

template <int kTokenTiles, int kTokenBlocks>
Variant variant(double stage_us) {
  using Signed = Config<kTokenTiles, kTokenBlocks, false>;
  return {Signed::kTokens, {packed_gemm<Signed>, packed_gemm<Config<kTokenTiles, kTokenBlocks, true>>}, sizeof(SharedStorage<Signed>), stage_us};
}

const Variant kVariants[] = {
    variant<1, 1>(0.41), variant<2, 1>(0.50), variant<4, 1>(0.73), variant<8, 1>(1.25), variant<8, 2>(2.4),
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);
constexpr int kMostSplits = 8;

int64_t blocks_of(int64_t M, int64_t N, const Variant& v) { return ceil_div(M, v.tokens) * ceil_div(N, kRows); }
int64_t stages_of(int64_t K) { return ceil_div(K, kGroup * kStageGroups); }

// Microseconds, fitted to 60 plans of three layers on an H200 (2026-11-30), most of them within 10%.
double estimated_us(int64_t M, int64_t N, int64_t K, int sm_count, const Variant& v, int splits) {
  const int64_t blocks = blocks_of(M, N, v) * splits;
  const double alone = M <= v.tokens ? 0.3 * std::min(1.0, double(blocks) / sm_count) : 0.0;  // every block reads weights of its own
  const double meeting = splits > 1 ? 1.3 * splits + 0.06 * v.tokens : 0.0;
  return double(ceil_div(blocks, sm_count)) * (4.0 + double(ceil_div(stages_of(K), splits)) * (v.stage_us + alone)) + meeting;
}

CUtensorMap code_map(const uint8_t* data, int64_t rows, int64_t K, int box_rows) {
  return host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, data, rows, K / 2, K / 2, box_rows, kPitch, CU_TENSOR_MAP_SWIZZLE_128B});
}

}  // namespace

PackedPlan packed_plan(int64_t M, int64_t N, int64_t K, int sm_count) {
  PackedPlan best = {0, 1};
  double least = 0;
  for (int i = 0; i < kVariantCount; ++i) {
    for (int splits = 1; splits <= kMostSplits; ++splits) {
      if (ceil_div(stages_of(K), splits) * (splits - 1) >= stages_of(K)) continue;  // a piece would have nothing
      if (splits > 1 && blocks_of(M, N, kVariants[i]) > 4096) continue;
      const double us = estimated_us(M, N, K, sm_count, kVariants[i], splits);
      if (least == 0 || us < least) best = {i, splits}, least = us;
    }
  }
  return best;
}

int packed_variant_count() { return kVariantCount; }

int64_t packed_tiles(int64_t M, int64_t N, const PackedPlan& plan) { return plan.splits == 1 ? 0 : blocks_of(M, N, kVariants[plan.variant]); }
int64_t packed_sums(int64_t M, int64_t N, const PackedPlan& plan) {
  return packed_tiles(M, N, plan) * plan.splits * kVariants[plan.variant].tokens * kRows;
}

const char* svdquant_packed_sm90_unsupported(const StreamOperands& o) {
  const auto aligned = [](const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; };
  if (o.M < 0 || o.N < 1 || o.K < kGroup || o.K % kGroup != 0 || o.R < 0) return "M, N, K or R is out of range";
  if (std::max({o.M, o.N, o.K}) > (int64_t{1} << 30)) return "M, N or K is out of range";
  if (o.b_scale_type == DType::kFloat32) return "b_scale must have 16 bits";
  if (o.b_scale_pitch < o.N || o.b_scale_pitch % 8 != 0) return "the pitch of b_scale must be a multiple of 8 and at least N";
  if (o.R > 0 && (o.up_type != DType::kBFloat16 || o.R % 2 != 0)) return "up must be bfloat16 of an even rank";
  if (!aligned(o.a, 16) || !aligned(o.b, 16) || !aligned(o.b_scale, 16)) return "codes and b_scale must be aligned to 16 bytes";
  if (!aligned(o.up, 4) || !aligned(o.low, 8)) return "up must be aligned to 4 bytes, and low to 8";
  if (host::find_tensor_map_encoder() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

void svdquant_packed_sm90(const StreamOperands& o, int device, cudaStream_t stream) {
  if (const char* const reason = svdquant_packed_sm90_unsupported(o)) {
    throw std::runtime_error(std::string("svdquant_packed_sm90: ") + reason);
  }
  const PackedPlan& plan = o.plan;
  host::require(plan.variant >= 0 && plan.variant < kVariantCount && plan.splits > 0, "svdquant_packed_sm90: there is no such plan");
  if (o.M == 0) return;
  const host::DeviceGuard guard(device);
  const Variant& v = kVariants[plan.variant];
  Params params{};
  params.o = o;
  params.tokens = code_map(o.a, o.M, o.K, v.tokens);
  params.weights = code_map(o.b, o.N, o.K, kRows);
  params.weight_scales = host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, o.b_scale, o.K / kGroup, o.N, 2 * o.b_scale_pitch, kStageGroups,
                                                  kRows, CU_TENSOR_MAP_SWIZZLE_NONE});
  params.sums = reinterpret_cast<float4*>(o.workspace.sums), params.arrived = o.workspace.arrived;
  params.token_blocks = static_cast<int>(ceil_div(o.M, v.tokens));
  params.splits = plan.splits;
  params.stages = static_cast<int>(stages_of(o.K));
  params.stages_each = static_cast<int>(ceil_div(params.stages, plan.splits));
  const int64_t tiles = packed_tiles(o.M, o.N, plan);
  if (tiles > 0 && !o.workspace.cleared) {
    host::check(cudaMemsetAsync(o.workspace.arrived, 0, tiles * sizeof(uint32_t), stream), "svdquant_packed_sm90");
  }
  const int64_t grid = blocks_of(o.M, o.N, v) * plan.splits;
  host::launch("svdquant_packed_sm90", v.kernels[o.is_unsigned], {grid, kThreads, 1, v.shared, stream, o.programmatic_launch}, params);
}

}  // namespace kitchen::svdquant
