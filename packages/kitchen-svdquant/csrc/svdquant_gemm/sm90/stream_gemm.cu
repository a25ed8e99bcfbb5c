// W4A4 GEMM with a low-rank branch for few rows of x on Hopper, where reading the weight once is all the time there is. What it
// computes: smxx/stream_gemm.cuh, with the low-rank product by bfloat16 parts of both sides, which leaves 2^-16 of it.
//
// A block has 16 * kRowBlocks weight rows, up to 8 * kTokenBlocks tokens and one piece of K; pieces are the blocks of a cluster.
// Its first thread fills a ring of stages of 256 columns (four groups) of both sides by the copy engine; most pieces fit the ring
// whole, and a warp of its own would only take registers (nine warps a block: two blocks an SM instead of three). A warp has 16
// rows and every kGroupWarps-th group. Weight rows are the m=16 side of mma.sync, tokens the n=8 side; a lane's operand is 8 bytes of a group,
// the order of k inside of a group being free. Sums meet in the block, then in the cluster, in a fixed order.
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
#include "kitchen/host/tensor_map.h"
#include "kitchen/mma/m16n8k16_f16.h"
#include "kitchen/mma/m16n8k32_s8.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/prefetch.h"
#include "kitchen/ptx/store_async.h"
#include "kitchen/ptx/tma.h"
#include "svdquant_gemm/multiply_bytes.cuh"
#include "svdquant_gemm/scale_layout.h"

namespace kitchen::svdquant {
namespace {

constexpr int kStageBytesK = 128, kStageGroups = 2 * kStageBytesK / kGroup;  // bytes of packed codes of a row
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMostTokens = 64, kMostCluster = 8, kMostStages = 24, kSharedOfSm = 227 * 1024, kReservedOfBlock = 1024;

template <int kTokenBlocks_, int kRowBlocks_, int kBlocksPerSm_>
struct Config {
  static constexpr int kTokenBlocks = kTokenBlocks_, kTokens = 8 * kTokenBlocks;
  static constexpr int kRowBlocks = kRowBlocks_, kRows = 16 * kRowBlocks;
  static constexpr int kGroupWarps = kWarps / kRowBlocks, kGroupsOfWarp = kStageGroups / kGroupWarps;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWeightBytes = kRows * kStageBytesK;
  static constexpr int kSumPitch = kRows + 4, kSumBytes = kGroupWarps * kTokens * kSumPitch * 4;
  static constexpr int kQuadsOfRow = kRows / 4;
  static constexpr int kReceivedBytes = (kTokens * kQuadsOfRow + kMostCluster) * 16;
  static_assert(kThreads % kQuadsOfRow == 0, "a thread finishes the same columns of every token");
};

// Bytes of a block's shared memory.
struct Layout {
  int stages;       // of the ring
  int token_bytes;  // of a stage
  int b_scale, a_scale, received, all;
};

struct Params {
  CUtensorMap weights, tokens;  // [N, K/2] and [M, K/2] bytes, swizzled by 128
  StreamOperands o;
  Layout layout;
  int tiles_n, splits, stages_each;  // of K: pieces, stages of a piece
  bool quads;                        // outputs can be stored four at a time
};

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages], received;
};

// Rows of eight in an order in which lanes that read at once never meet in a bank: 128-byte rows, swizzled.
__device__ __forceinline__ int spread(int g) { return g % 4 * 2 + g / 4; }

__device__ __forceinline__ uint2 load_codes(const uint8_t* rows, int row, int group) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  return *reinterpret_cast<const uint2*>(rows + row * kStageBytesK + (((2 * group + t / 2) ^ (row % 8)) * 16 + t % 2 * 8));
}

// Two neighbouring ranks as bfloat16 pairs: the value, and what its rounding leaves.
struct Ranks {
  uint32_t high, low;
};

__device__ __forceinline__ Ranks split(float first, float second) {
  const __nv_bfloat162 high = __floats2bfloat162_rn(first, second);
  const __nv_bfloat162 low =
      __floats2bfloat162_rn(first - __low2float(high), second - __high2float(high));
  return {reinterpret_cast<const uint32_t&>(high), reinterpret_cast<const uint32_t&>(low)};
}

// One warp's part of the low-rank product: steps of 16 ranks, dealt out over the group warps of all pieces.
template <class Config>
struct LowRank {
  const StreamOperands& o;
  int64_t row[2];  // of the weight
  int first_step, step_by, steps;
  bool exact;    // proj_up is bfloat16: there is no second part
  Ranks up[4];   // of the first step: rows g, g+8; ranks 2t.., 8+2t..

  __device__ __forceinline__ LowRank(const Params& params, int64_t first_row, int group_warp, int rank)
      : o(params.o), exact(params.o.up_type == DType::kBFloat16) {
    const int g = spread(static_cast<int>(threadIdx.x) % 32 / 4);
    row[0] = min(first_row + g, o.N - 1), row[1] = min(first_row + g + 8, o.N - 1);
    first_step = rank * Config::kGroupWarps + group_warp, step_by = params.splits * Config::kGroupWarps, steps = (o.R + 15) / 16;
    if (first_step < steps) load_up(first_step);
  }

  __device__ __forceinline__ void load_up(int step) {
    const int first = 16 * step + 2 * (static_cast<int>(threadIdx.x) % 4);
    if (exact && o.R % 2 == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = first + 8 * (i / 2);
        up[i] = {r < o.R ? __ldg(static_cast<const uint32_t*>(o.up) + (row[i % 2] * o.R + r) / 2) : 0u, 0u};
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = first + 8 * (i / 2);
      const int64_t at = row[i % 2] * o.R + r;
      up[i] = split(r < o.R ? load_as_float(o.up, at, o.up_type) : 0.0f,
                    r + 1 < o.R ? load_as_float(o.up, at + 1, o.up_type) : 0.0f);
    }
  }

  using Low = float[Config::kTokenBlocks][4];  // of a step: a token's ranks 2t, 2t+1, 8+2t, 9+2t

  // Not by way of the read-only cache: the kernel in front may have been running when this one started.
  __device__ __forceinline__ void load_low(Low& low, int step, int64_t first_token) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, first = 16 * step + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < Config::kTokenBlocks; ++j) {
      const float* const from = o.low + min(first_token + 8 * j + spread(lane / 4), o.M - 1) * o.R;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = first + 8 * (i / 2) + i % 2;
        low[j][i] = r < o.R ? from[r] : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&total)[Config::kTokenBlocks][4], const Low& low) const {
    using Mma = mma::M16N8K16<__nv_bfloat16>;
    const uint32_t highs[4] = {up[0].high, up[1].high, up[2].high, up[3].high};
    const uint32_t lows[4] = {up[0].low, up[1].low, up[2].low, up[3].low};
#pragma unroll
    for (int j = 0; j < Config::kTokenBlocks; ++j) {
      const Ranks b0 = split(low[j][0], low[j][1]), b1 = split(low[j][2], low[j][3]);
      Mma::multiply(total[j], highs, b0.high, b1.high);
      Mma::multiply(total[j], highs, b0.low, b1.low);
      if (!exact) Mma::multiply(total[j], lows, b0.high, b1.high);
    }
  }

  // The steps behind the first.
  __device__ __forceinline__ void multiply_others(float (&total)[Config::kTokenBlocks][4], int64_t first_token) {
#pragma unroll 1
    for (int step = first_step + step_by; step < steps; step += step_by) {
      Low low;
      load_up(step);
      load_low(low, step, first_token);
      multiply(total, low);
    }
  }
};

__device__ __forceinline__ float scale_of(uint32_t bits, DType) { return __uint_as_float(bits); }
__device__ __forceinline__ float scale_of(uint16_t bits, DType type) {
  return type == DType::kFloat16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Scales of the piece as float32, [groups][kRows], many loads under way: none is converted before all of them are asked for.
template <class Config, class Bits>
__device__ __forceinline__ void stage_weight_scales(const StreamOperands& o, float* to, int first_row, int first_group, int groups) {
  constexpr int kTogether = 8;
  const auto* const scales = static_cast<const Bits*>(o.b_scale) + static_cast<int64_t>(first_group) * o.N;
  const int n = min(first_row + static_cast<int>(threadIdx.x) % Config::kRows, static_cast<int>(o.N) - 1);
  constexpr int kStep = kThreads / Config::kRows;  // groups that the block reads at once
  for (int first = static_cast<int>(threadIdx.x) / Config::kRows; first < groups; first += kTogether * kStep) {
    Bits bits[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      bits[i] = __ldg(scales + static_cast<int64_t>(min(first + i * kStep, groups - 1)) * o.N + n);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int group = first + i * kStep;
      if (group < groups) {
        to[group * Config::kRows + static_cast<int>(threadIdx.x) % Config::kRows] = scale_of(bits[i], o.b_scale_type);
      }
    }
  }
}

// [groups][kTokens], the tokens of each eight in the order of the accumulators' columns.
template <class Config>
__device__ __forceinline__ void stage_token_scales(const StreamOperands& o, float* to, int64_t first_token, int first_group,
                                                   int groups) {
  constexpr int kTogether = 4, kStep = kThreads / Config::kTokens;
  const int column = static_cast<int>(threadIdx.x) % Config::kTokens;
  const int64_t m = min(first_token + column / 8 * 8 + spread(column % 8), o.M - 1);
  const float* const scales = o.a_scale + static_cast<int64_t>(first_group) * o.M + m;
  for (int first = static_cast<int>(threadIdx.x) / Config::kTokens; first < groups; first += kTogether * kStep) {
    float scale[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) scale[i] = scales[static_cast<int64_t>(min(first + i * kStep, groups - 1)) * o.M];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int group = first + i * kStep;
      if (group < groups) to[group * Config::kTokens + column] = scale[i];
    }
  }
}

// The thread that feeds the ring.
template <class Config>
struct Producer {
  const Params& params;
  uint8_t* ring;
  Barriers& barriers;
  int first_stage, stages, row, token;

  __device__ __forceinline__ void load_weights(int i, int slot) const {
    const int box_tokens = static_cast<int>(min(params.o.M, int64_t{kMostTokens}));
    ptx::mbarrier_arrive_expect(&barriers.full[slot], Config::kWeightBytes + box_tokens * kStageBytesK);
    ptx::tma_load(ring + slot * Config::kWeightBytes, &params.weights, (first_stage + i) * kStageBytesK, row,
                  &barriers.full[slot]);
  }
  __device__ __forceinline__ void load_tokens(int i, int slot) const {
    uint8_t* const to = ring + params.layout.stages * Config::kWeightBytes + slot * params.layout.token_bytes;
    ptx::tma_load(to, &params.tokens, (first_stage + i) * kStageBytesK, token, &barriers.full[slot]);
  }

  // The first round: weights before the kernel in front has ended, tokens after.
  __device__ __forceinline__ void start() const {
#pragma unroll 1
    for (int i = 0; i < min(stages, params.layout.stages); ++i) load_weights(i, i);
  }
  __device__ __forceinline__ void go_on() const {
#pragma unroll 1
    for (int i = 0; i < min(stages, params.layout.stages); ++i) load_tokens(i, i);
  }
  // What takes the place of stage `done`, once all warps have read it; `phase` is that in which its copies landed.
  __device__ __forceinline__ void refill(int done, int slot, uint32_t phase) const {
    const int next = done + params.layout.stages;
    if (next >= stages) return;
    ptx::mbarrier_wait(&barriers.empty[slot], phase);
    load_weights(next, slot);
    load_tokens(next, slot);
  }
};

// A warp: its rows and groups of every stage.
template <class Config>
__device__ __forceinline__ void consume(float (&total)[Config::kTokenBlocks][4], const Params& params, const uint8_t* shared,
                                        Barriers& barriers, const Producer<Config>& feed, int stages, int groups) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int g = spread(lane / 4), row = 16 * (warp % Config::kRowBlocks) + g, group_warp = warp / Config::kRowBlocks;
  const Layout& layout = params.layout;
  const float* const b_scale = reinterpret_cast<const float*>(shared + layout.b_scale) + row;
  const float* const a_scale = reinterpret_cast<const float*>(shared + layout.a_scale) + 2 * (lane % 4);
  const ByBytes<mma::M16N8K32S8> by(params.o.is_unsigned);
  int slot = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    ptx::mbarrier_wait(&barriers.full[slot], phase);
    const uint8_t* const weights = shared + slot * Config::kWeightBytes;
    const uint8_t* const tokens = shared + layout.stages * Config::kWeightBytes + slot * layout.token_bytes;
#pragma unroll
    for (int i = 0; i < Config::kGroupsOfWarp; ++i) {
      const int inside = group_warp * Config::kGroupsOfWarp + i, group = stage * kStageGroups + inside;
      if (group >= groups) break;
      const uint2 low = load_codes(weights, row, inside), high = load_codes(weights, row + 8, inside);
      const float scale[2] = {b_scale[group * Config::kRows] * by.factor, b_scale[group * Config::kRows + 8] * by.factor};
#pragma unroll
      for (int j = 0; j < Config::kTokenBlocks; ++j) {
        const uint2 token = load_codes(tokens, 8 * j + g, inside);
        const float2 of_tokens = *reinterpret_cast<const float2*>(a_scale + group * Config::kTokens + 8 * j);
        int dot[4] = {};
        by.multiply(dot, low, high, token);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float scaled = __fmul_rn(__int2float_rn(dot[e]), e % 2 ? of_tokens.y : of_tokens.x);
          total[j][e] = __fmaf_rn(scaled, scale[e / 2], total[j][e]);
        }
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&barriers.empty[slot]);
    if (threadIdx.x == 0 && stage > 0) {  // a stage late: by now the other warps have read it
      slot > 0 ? feed.refill(stage - 1, slot - 1, phase) : feed.refill(stage - 1, layout.stages - 1, phase ^ 1);
    }
    __syncwarp();
    if (++slot == layout.stages) slot = 0, phase ^= 1;
  }
}

template <class Config>
__device__ __forceinline__ void store_sums(float* sums, const float (&total)[Config::kTokenBlocks][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int row = 16 * (warp % Config::kRowBlocks) + spread(lane / 4), group_warp = warp / Config::kRowBlocks;
#pragma unroll
  for (int j = 0; j < Config::kTokenBlocks; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = 8 * j + spread(2 * (lane % 4) + e % 2);
      sums[(group_warp * Config::kTokens + token) * Config::kSumPitch + row + 8 * (e / 2)] = total[j][e];
    }
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& other) {
  sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// Four neighbouring columns of every token that this thread finishes: bias, residual, one rounding.
struct Epilogue {
  const StreamOperands& o;
  bool quads;
  int64_t n;
  float4 bias;

  __device__ __forceinline__ Epilogue(const Params& params, int64_t column) : o(params.o), quads(params.quads), n(column) {
    const auto at = [&](int e) {
      return o.bias == nullptr ? -0.0f : load_as_float(o.bias, min(n + e, o.N - 1), o.bias_type);
    };
    bias = make_float4(at(0), at(1), at(2), at(3));
  }

  __device__ __forceinline__ float finish(float y, int64_t m, int e) const {
    if (o.residual == nullptr) return y;
    const float scale = o.residual_scale == nullptr ? 1.0f : o.residual_scale[(n + e) * o.residual_scale_stride];
    return __fmaf_rn(scale, y, load_as_float(o.residual, m * o.N + n + e, o.out_type));
  }

  __device__ __forceinline__ void store(const float4& sum, int64_t m) const {
    float y[4] = {__fadd_rn(sum.x, bias.x), __fadd_rn(sum.y, bias.y), __fadd_rn(sum.z, bias.z), __fadd_rn(sum.w, bias.w)};
    const int64_t left = o.N - n, at = m * o.N + n;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < left) y[e] = finish(y[e], m, e);
    }
    if (o.out_type == DType::kFloat32) {
      float* const to = static_cast<float*>(o.out) + at;
      if (quads) {
        *reinterpret_cast<float4*>(to) = make_float4(y[0], y[1], y[2], y[3]);
        return;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < left) to[e] = y[e];
      }
      return;
    }
    uint16_t bits[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      bits[e] = o.out_type == DType::kFloat16 ? __half_as_ushort(__float2half_rn(y[e]))
                                              : __bfloat16_as_ushort(__float2bfloat16_rn(y[e]));
    }
    uint16_t* const to = static_cast<uint16_t*>(o.out) + at;
    if (quads) {
      *reinterpret_cast<ushort4*>(to) = make_ushort4(bits[0], bits[1], bits[2], bits[3]);
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < left) to[e] = bits[e];
    }
  }
};

// Over the block's group warps, then over the cluster: quad i is finished by block i % splits, by the thread that has it in
// every block.
template <class Config>
__device__ __forceinline__ void reduce(const Params& params, uint8_t* shared, uint64_t* barrier, int tokens, int64_t first_token,
                                       int rank, const Epilogue& epilogue) {
  constexpr int kOfRow = Config::kQuadsOfRow;
  const int splits = params.splits, count = tokens * kOfRow, each = (count + splits - 1) / splits;
  const auto* const sums = reinterpret_cast<const float*>(shared);
  auto* const received = reinterpret_cast<float4*>(shared + params.layout.received);
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < count; quad += kThreads) {
    const float* const mine = sums + quad / kOfRow * Config::kSumPitch + quad % kOfRow * 4;
    float4 sum = *reinterpret_cast<const float4*>(mine);
#pragma unroll
    for (int w = 1; w < Config::kGroupWarps; ++w) {
      add(sum, *reinterpret_cast<const float4*>(mine + w * Config::kTokens * Config::kSumPitch));
    }
    if (splits == 1) {
      if (epilogue.n < params.o.N) epilogue.store(sum, first_token + quad / kOfRow);
      continue;
    }
    float4* const to = received + rank * each + quad / splits;
    if (quad % splits == rank) {
      *to = sum;
    } else {
      ptx::store_async_16(to, barrier, quad % splits, *reinterpret_cast<const int4*>(&sum));
    }
  }
  if (splits == 1) return;
  ptx::receive_wait(barrier);
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < count; quad += kThreads) {
    if (quad % splits != rank) continue;
    float4 sum = received[quad / splits];
#pragma unroll 1
    for (int from = 1; from < splits; ++from) add(sum, received[from * each + quad / splits]);
    if (epilogue.n < params.o.N) epilogue.store(sum, first_token + quad / kOfRow);
  }
}

template <class Config>
__global__ void __launch_bounds__(kThreads, Config::kBlocksPerSm) stream_gemm(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  const StreamOperands& o = params.o;
  const int rank = static_cast<int>(blockIdx.x) % params.splits, tile = static_cast<int>(blockIdx.x) / params.splits;
  const int64_t first_row = static_cast<int64_t>(tile % params.tiles_n) * Config::kRows;
  const int64_t first_token = static_cast<int64_t>(tile / params.tiles_n) * kMostTokens;
  const int tokens = static_cast<int>(min(o.M - first_token, int64_t{kMostTokens}));
  const int all_groups = static_cast<int>(o.K / kGroup), all_stages = (all_groups + kStageGroups - 1) / kStageGroups;
  const int first_stage = rank * params.stages_each, stages = max(0, min(params.stages_each, all_stages - first_stage));
  const int first_group = first_stage * kStageGroups, groups = max(0, min(stages * kStageGroups, all_groups - first_group));
  const Producer<Config> feed = {params, shared, barriers, first_stage, stages, static_cast<int>(first_row),
                                 static_cast<int>(first_token)};
  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&params.weights);
    ptx::tma_prefetch_map(&params.tokens);
    for (int i = 0; i < params.layout.stages; ++i) {
      ptx::mbarrier_init(&barriers.full[i], 1);
      ptx::mbarrier_init(&barriers.empty[i], kWarps);
    }
    ptx::mbarrier_init_fence();
    if (params.splits > 1) {
      const int count = tokens * Config::kQuadsOfRow, own = (count - rank + params.splits - 1) / params.splits;
      ptx::receive_init(&barriers.received);
      ptx::receive_expect(&barriers.received, (params.splits - 1) * own * 16);
    }
  }
  __syncthreads();
  if (params.splits > 1) ptx::cluster_arrive();  // this block has started
  if (threadIdx.x == 0) feed.start();            // the other warps go on meanwhile
  __syncwarp();

  const int warp = static_cast<int>(threadIdx.x) / 32;
  float total[Config::kTokenBlocks][4] = {};
  if (o.bias != nullptr && threadIdx.x < Config::kRows && first_row + threadIdx.x < o.N) {
    ptx::prefetch_l2(static_cast<const uint8_t*>(o.bias) + (first_row + threadIdx.x) * size_of(o.bias_type));
  }
  LowRank<Config> low_rank(params, first_row + 16 * (warp % Config::kRowBlocks), warp / Config::kRowBlocks, rank);
  float* const b_scale = reinterpret_cast<float*>(shared + params.layout.b_scale);
  if (o.b_scale_type == DType::kFloat32) {
    stage_weight_scales<Config, uint32_t>(o, b_scale, static_cast<int>(first_row), first_group, groups);
  } else {
    stage_weight_scales<Config, uint16_t>(o, b_scale, static_cast<int>(first_row), first_group, groups);
  }
  ptx::griddep_wait();
  if (threadIdx.x == 0) feed.go_on();
  __syncwarp();
  typename LowRank<Config>::Low low;
  const bool has_ranks = low_rank.first_step < low_rank.steps;
  if (has_ranks) low_rank.load_low(low, low_rank.first_step, first_token);
  stage_token_scales<Config>(o, reinterpret_cast<float*>(shared + params.layout.a_scale), first_token, first_group, groups);
  if (has_ranks) {
    low_rank.multiply(total, low);
    low_rank.multiply_others(total, first_token);
  }
  __syncthreads();  // scales are there
  consume<Config>(total, params, shared, barriers, feed, stages, groups);
  __syncthreads();  // all stages were read: the sums take their place
  const Epilogue epilogue(params, first_row + static_cast<int>(threadIdx.x) % Config::kQuadsOfRow * 4);
  store_sums<Config>(reinterpret_cast<float*>(shared), total);
  if (params.splits > 1) ptx::cluster_wait();
  __syncthreads();
  reduce<Config>(params, shared, &barriers.received, tokens, first_token, rank, epilogue);
}

// ---------------------------------------------------------------- launch

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Plan {
  Layout layout;
  int splits, stages_each;
};

// Pieces of K: as many as keep all blocks on the GPU at once. A ring that holds all of a piece, or what there is room for;
// 0 stages where even three do not fit.
template <class Config>
Plan choose_plan(const StreamOperands& o, int device) {
  const int64_t tiles = ceil_div(o.N, Config::kRows) * ceil_div(o.M, kMostTokens);
  const int64_t room = int64_t{Config::kBlocksPerSm} * host::attribute(cudaDevAttrMultiProcessorCount, device);
  const int all_stages = static_cast<int>(ceil_div(o.K, kStageGroups * kGroup));
  Plan plan{};
  for (int splits = 1; splits <= kMostCluster; splits *= 2) {
    const int each = static_cast<int>(ceil_div(all_stages, splits)), groups = each * kStageGroups;
    Layout layout{};
    layout.token_bytes = Config::kTokens * kStageBytesK;
    const int stage = Config::kWeightBytes + layout.token_bytes;
    const int fixed = groups * (Config::kRows + Config::kTokens) * 4 + Config::kReceivedBytes + 1024;
    const int budget = kSharedOfSm / Config::kBlocksPerSm - kReservedOfBlock;
    layout.stages = std::min({each, (budget - fixed) / stage, kMostStages});
    if (layout.stages < std::min(each, 3)) continue;
    const int ring = std::max(layout.stages * stage, Config::kSumBytes);
    layout.b_scale = static_cast<int>(ceil_div(ring, 128) * 128);
    layout.a_scale = layout.b_scale + groups * Config::kRows * 4;
    layout.received = layout.a_scale + groups * Config::kTokens * 4;
    layout.all = layout.received + Config::kReceivedBytes;
    if (plan.splits != 0 && (4 * tiles * splits > 3 * room || splits > all_stages)) break;  // clusters leave gaps
    plan = {layout, splits, each};
  }
  return plan;
}

template <class Config>
void launch(const StreamOperands& o, int device, cudaStream_t stream) {
  const Plan plan = choose_plan<Config>(o, device);
  host::require(plan.splits > 0, "svdquant_stream_sm90: K is too long");
  Params params{};
  params.o = o;
  params.layout = plan.layout;
  params.splits = plan.splits, params.stages_each = plan.stages_each;
  params.tiles_n = static_cast<int>(ceil_div(o.N, Config::kRows));
  params.quads = o.N % 4 == 0 && reinterpret_cast<uintptr_t>(o.out) % 16 == 0;
  const int64_t bytes = o.K / 2;
  params.weights = host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, o.b, o.N, bytes, bytes, Config::kRows,
                                            kStageBytesK, CU_TENSOR_MAP_SWIZZLE_128B});
  params.tokens = host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, o.a, o.M, bytes, bytes,
                                           static_cast<int>(std::min<int64_t>(o.M, kMostTokens)), kStageBytesK,
                                           CU_TENSOR_MAP_SWIZZLE_128B});
  const int64_t blocks = int64_t{params.tiles_n} * ceil_div(o.M, kMostTokens) * plan.splits;
  host::require(blocks < (int64_t{1} << 31), "svdquant_stream_sm90: more than 2^31 - 1 blocks");
  host::launch("svdquant_stream_sm90", stream_gemm<Config>,
               {blocks, kThreads, plan.splits, static_cast<size_t>(plan.layout.all), stream, o.programmatic_launch}, params);
}

using Few = Config<1, 2, 3>;
using Sixteen = Config<2, 2, 3>;
using ThirtyTwo = Config<4, 4, 2>;
using Many = Config<8, 4, 2>;

int splits_of(const StreamOperands& o, int device) {
  if (o.M <= 8) return choose_plan<Few>(o, device).splits;
  if (o.M <= 16) return choose_plan<Sixteen>(o, device).splits;
  if (o.M <= 32) return choose_plan<ThirtyTwo>(o, device).splits;
  return choose_plan<Many>(o, device).splits;
}

}  // namespace

const char* svdquant_stream_sm90_unsupported(const StreamOperands& o, int device) {
  const auto aligned = [](const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; };
  if (o.M < 0 || o.N < 1 || o.K < kGroup || o.K % kGroup != 0 || o.R < 0) return "M, N, K or R is out of range";
  if (o.N > (int64_t{1} << 30) || o.K > (int64_t{1} << 30)) return "N or K is out of range";
  if (!aligned(o.a, 16) || !aligned(o.b, 16)) return "codes must be aligned to 16 bytes";
  if (!aligned(o.up, 4)) return "up must be aligned to 4 bytes";
  if (o.M > 0 && splits_of(o, device) == 0) return "K is too long for the scales of a piece";
  if (host::find_tensor_map_encoder() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

void svdquant_stream_sm90(const StreamOperands& o, int device, cudaStream_t stream) {
  if (const char* const reason = svdquant_stream_sm90_unsupported(o, device)) {
    throw std::runtime_error(std::string("svdquant_stream_sm90: ") + reason);
  }
  if (o.M == 0) return;
  const host::DeviceGuard guard(device);
  if (o.M <= 8) return launch<Few>(o, device, stream);
  if (o.M <= 16) return launch<Sixteen>(o, device, stream);
  if (o.M <= 32) return launch<ThirtyTwo>(o, device, stream);
  launch<Many>(o, device, stream);
}

}  // namespace kitchen::svdquant
