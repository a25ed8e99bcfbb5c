// The first half of a SwiGLU MLP for Hopper (sm_90a): gate and up projection in one INT8 GEMM, their product out.
//
//   g[m, n] = fma(float(sum over k of a[m, k] * b[n, k]) * a_scale[m], b_scale[n], bias[n])       n < I, int32 sums
//   u[m, n] = the same of row I + n of b
//   out[m, n] = g * sigmoid(g) * u, all of it in float32, rounded once to out's type
//
//   a [M, K] int8, b [2I, K] int8 (gate rows, then up rows), both with K contiguous; a_scale [M], b_scale [2I] or one
//   value, float32; bias [2I] float32/float16/bfloat16; out [M, I] float32 or bfloat16.
//
// The main loop is kitchen/gemm/gemm_sm90.cuh with two boxes of B a stage, rows n and I + n, multiplied as one tile of
// twice the width: accumulator i of a thread is a gate column, accumulator i + half the matching up column. A float16
// output does not exist: the product of two float16 numbers can exceed it. Measured: docs/kernels/int8_swiglu.md.
#include "int8_swiglu.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "int8_gemm/sm90/scale_epilogue.cuh"
#include "kitchen/gemm/gemm_sm90.cuh"
#include "kitchen/host/device.h"
#include "kitchen/quant/apply_input_act.h"

namespace kitchen::int8 {
namespace {

using sm90::Schedule;
using sm90::TileConfig;

constexpr int kEarlyStages = 2;  // as in int8_gemm.cu

template <class T>
struct SwigluEpilogueParams {
  const float* a_scale;        // [M]
  ColumnVector b_scale, bias;  // [2N]
  T* out;                      // [M, N]
  CUtensorMap out_map;         // valid where out_mapped
  bool out_mapped;
  int M, N;                    // N: of the product

  __device__ __forceinline__ float4 pair_at(int even, int odd) const {
    return make_float4(column_value(b_scale, even), column_value(b_scale, odd), column_value(bias, even),
                       column_value(bias, odd));
  }
};

// kTileOutN columns of the product, from 2 * kTileOutN columns of the tile.
template <class T, int kTileOutN>
struct SwigluEpilogue {
  using Params = SwigluEpilogueParams<T>;
  using Store = sm90::StagedStore<T, kTileOutN>;
  static constexpr int kStagingBytes = Store::kBytes;
  static constexpr int kPairs = Store::kColumns / 8;   // of a thread, in a row of a chunk
  static constexpr int kUp = kTileOutN / 2;            // accumulators from a gate column to its up column

  struct Rows {
    float low, high;  // a_scale of the thread's two rows
  };
  struct Columns {
    float4 pairs[kTileOutN];  // b_scale of two columns, bias of the same two: of the gate, then of the up half
  };

  const Params& params;
  Store staged;

  __device__ __forceinline__ SwigluEpilogue(const Params& p, uint8_t* staging)
      : params(p), staged{p.out, p.out_map, p.out_mapped, p.M, p.N, staging} {}

  // By one producer warp, while the tile multiplies. Columns from N on repeat the last: they are never stored.
  __device__ __forceinline__ static void load_columns(const Params& params, Columns& columns, int, int column) {
    const int last = params.N - 1;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kTileOutN; i += 32) {  // the gate pairs, then the up pairs
      const int n = column + 2 * (i % (kTileOutN / 2)), half = i < kTileOutN / 2 ? 0 : params.N;
      columns.pairs[i] = params.pair_at(half + min(n, last), half + min(n + 1, last));
    }
  }

  __device__ __forceinline__ Rows load_rows(int row) const {
    const int low = row + threadIdx.x % 32 / 4, last = params.M - 1;
    return {params.a_scale[min(low, last)], params.a_scale[min(low + 8, last)]};
  }

  // Chunk by chunk, and within a chunk block by block: blocks share their columns' scales.
  template <int kBlocks>
  __device__ __forceinline__ void store(const int (&acc)[kBlocks][kTileOutN], const Rows (&rows)[kBlocks],
                                        const Columns& columns, int row, int column) {
    constexpr int kItems = kBlocks * (kTileOutN / Store::kColumns);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int block = item % kBlocks, first = item / kBlocks * kPairs;
      // Buffers alternate from the tile's first on, which may be the one that was used last.
      if (item > 0) staged.template acquire<1>(); else staged.template acquire<0>();
      multiply_pairs(item % 2, acc[block], first, rows[block], columns);
      const int2 where[1] = {{row + block * 64, column + item / kBlocks * Store::kColumns}};
      staged.send(item % 2, where);
    }
  }

  // Values go to shared memory as soon as they are known: registers are short.
  __device__ __forceinline__ void multiply_pairs(int buffer, const int* acc, int first, Rows rows,
                                                 const Columns& columns) {
    const uint32_t base = staged.buffer_address(buffer);
#pragma unroll
    for (int j = 0; j < kPairs; j += Store::kPutAtOnce) {
      float y[Store::kPutAtOnce][4];
#pragma unroll
      for (int i = 0; i < Store::kPutAtOnce; ++i) {
        asm volatile("" ::: "memory");  // keeps the loads of columns where they are used
        const int at = 4 * (first + j + i);
        const float4* const pair = &columns.pairs[at + threadIdx.x % 4];
        const float4 of_gate = pair[0], of_up = pair[kTileOutN / 2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float a_scale = e < 2 ? rows.low : rows.high;
          const float gate = scaled(acc[at + e], a_scale, of_gate, e);
          const float up = scaled(acc[kUp + at + e], a_scale, of_up, e);
          y[i][e] = quant::swiglu(gate, up);
        }
      }
      staged.put_some(base, j, y);
    }
  }

  __device__ __forceinline__ static float scaled(int acc, float a_scale, float4 column, int e) {
    const float t = __fmul_rn(__int2float_rn(acc), a_scale);
    return __fmaf_rn(t, e % 2 ? column.y : column.x, e % 2 ? column.w : column.z);
  }

  __device__ __forceinline__ void finish() { staged.finish(); }
};

// ---------------------------------------------------------------- launch

template <class T, int kTileOutN>
SwigluEpilogueParams<T> epilogue_params(const SwigluParams& p) {
  using Store = sm90::StagedStore<T, kTileOutN>;
  SwigluEpilogueParams<T> e{};
  e.a_scale = p.a_scale;
  e.b_scale = column_vector(p.b_scale, p.b_scale_stride, DType::kFloat32, 1.0f);
  // t * s + (-0) is t * s to the bit, signed zeros included.
  e.bias = column_vector(p.bias, 1, p.bias_type, -0.0f);
  e.out = static_cast<T*>(p.out);
  e.M = static_cast<int>(p.M);
  e.N = static_cast<int>(p.I);
  e.out_mapped = mappable(p.out, p.I, sizeof(T));
  if (e.out_mapped) {
    const auto swizzle = Store::kSwizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
    e.out_map = host::encode_matrix_map({kMapType<T>, sizeof(T), p.out, p.M, p.I, p.I * int64_t{sizeof(T)},
                                         Store::kRows, Store::kColumns, swizzle});
  }
  return e;
}

CUtensorMap pitched_map(const int8_t* data, int64_t rows, int64_t K, int64_t pitch, int box_rows) {
  return host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, data, rows, K, pitch, box_rows, sm90::kStageBytesK,
                                  CU_TENSOR_MAP_SWIZZLE_128B});
}

template <class Config, class T>
void launch(const SwigluParams& p, const SwigluPlan& plan, cudaStream_t stream) {
  using Epilogue = SwigluEpilogue<T, Config::kTileOutN>;
  using Shared = sm90::SharedStorage<Config, Epilogue>;
  static_assert(sizeof(Shared) <= sm90::kSharedLimit, "the stages do not fit shared memory");
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = sm90::gemm_kernel<Config, MmaS8, Epilogue>;
  allow_shared_memory(kernel, sizeof(Shared), devices_done);

  sm90::KernelParams<SwigluEpilogueParams<T>> params{};
  params.a = pitched_map(p.a, p.M, p.K, p.a_pitch, Config::kBoxM);
  params.b = pitched_map(p.b, 2 * p.I, p.K, p.b_pitch, Config::kBoxN);
  params.problem = {static_cast<int>(ceil_div(p.K, sm90::kStageBytesK)),
                    static_cast<int>(ceil_div(p.M, Config::kTileM * Config::kClusterM)),
                    static_cast<int>(ceil_div(p.I, Config::kTileOutN * Config::kClusterN)), plan.raster_group,
                    static_cast<int>(p.I), p.weights_early ? kEarlyStages : 0, static_cast<int>(p.M),
                    static_cast<int>(p.I), true};
  params.epilogue = epilogue_params<T, Config::kTileOutN>(p);

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(Config::kClusterSize), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.grid);
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = p.programmatic_launch ? 2 : 1;
  host::check(cudaLaunchKernelEx(&config, kernel, params), "int8_swiglu_sm90: launch");
}

// ---------------------------------------------------------------- plans

struct Variant {
  const char* name;
  int tile_m, tile_n, out_n, cluster_m, cluster_n;
  bool ping_pong;
  void (*launch_float)(const SwigluParams&, const SwigluPlan&, cudaStream_t);
  void (*launch_bfloat)(const SwigluParams&, const SwigluPlan&, cudaStream_t);
};

template <int kTileM, int kTileN, int kClusterM, int kClusterN, Schedule kSchedule>
constexpr Variant variant(const char* name) {
  using Config = TileConfig<kTileM, kTileN, kClusterM, kClusterN, kSchedule, true>;
  return {name, kTileM, kTileN, Config::kTileOutN, kClusterM, kClusterN, Config::kPingPong, launch<Config, float>,
          launch<Config, __nv_bfloat16>};
}

constexpr Variant kVariants[] = {
    variant<128, 192, 2, 1, Schedule::kPingPong>("128x(96+96) ping-pong, cluster 2x1"),
    variant<128, 128, 2, 1, Schedule::kPingPong>("128x(64+64) ping-pong, cluster 2x1"),
    variant<128, 192, 1, 1, Schedule::kTogether>("128x(96+96) together"),
    variant<128, 128, 1, 1, Schedule::kTogether>("128x(64+64) together"),
    variant<64, 192, 1, 1, Schedule::kPingPong>("64x(96+96) ping-pong"),
    variant<64, 128, 1, 2, Schedule::kPingPong>("64x(64+64) ping-pong, cluster 1x2"),
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

int64_t cluster_tiles(const SwigluProblem& problem, const Variant& v) {
  return ceil_div(problem.M, v.tile_m * v.cluster_m) * ceil_div(problem.I, v.out_n * v.cluster_n);
}

int cluster_slots(const SwigluProblem& problem, const Variant& v) {
  return std::max(1, problem.sm_count / (v.cluster_m * v.cluster_n));
}

// Cycles until the last block is done. The constants are fitted to an H200's times at M = 1..4096, six shapes: on them
// the choice costs 0.6% over the best variant in the mean and 8% at most (docs/kernels/int8_swiglu.md, 2026-11-30).
double estimated_cycles(const SwigluProblem& problem, const Variant& v) {
  constexpr double kMultipliesPerCycle = 4096 / 0.97;   // an SM's tensor cores
  constexpr double kBytesWeight = 1.0 / 400;            // what copies take from wgmma
  constexpr double kBytesFresh = 43, kBytesCached = 62; // copies a cycle, of weights read once and of weights in L2
  constexpr double kMemoryBytes = 17.6, kOverlap = 0.31;  // a cycle and SM; of the shorter of the two, what shows
  constexpr double kLaunch = 3400, kStorePerColumn = 12;  // of 64 rows
  const double tiles_m = double(ceil_div(problem.M, v.tile_m * v.cluster_m));
  const double multiply = double(v.tile_m) * v.tile_n * sm90::kStageBytesK / kMultipliesPerCycle;
  const double bytes = sm90::kStageBytesK * (double(v.tile_m) / v.cluster_n + double(v.tile_n) / v.cluster_m);
  const double rate = kBytesCached - (kBytesCached - kBytesFresh) / std::sqrt(tiles_m);
  const double stage = std::max(multiply + bytes * kBytesWeight, bytes / rate);
  const double tile = double(ceil_div(problem.K, sm90::kStageBytesK)) * stage;
  const double store = kStorePerColumn * v.tile_n * (v.ping_pong ? v.tile_m / 64 : 1);
  const double rounds = double(ceil_div(cluster_tiles(problem, v), cluster_slots(problem, v)));
  // Ping-pong hides every store but the last, unless a store takes longer than a tile.
  const double work = v.ping_pong ? (rounds - 1) * std::max(tile, store / 2) + tile + store : rounds * (tile + store);
  const double all_bytes = 2.0 * problem.I * problem.K + double(problem.M) * (problem.K + 2.0 * problem.I);
  const double memory = all_bytes / (problem.sm_count * kMemoryBytes);
  return kLaunch + std::max(work, memory) + kOverlap * std::min(work, memory);
}

SwigluPlan plan_for(const SwigluProblem& problem, int index) {
  const Variant& v = kVariants[index];
  const int64_t clusters = std::min<int64_t>(cluster_tiles(problem, v), cluster_slots(problem, v));
  // Rows of A that are walked together stay in L2 while all of B passes once: up to 16 MB of them.
  const int64_t row_bytes = int64_t{v.tile_m} * v.cluster_m * problem.K;
  const int64_t group = std::clamp<int64_t>((int64_t{16} << 20) / row_bytes, 8, 16);
  return {index, static_cast<int>(clusters) * v.cluster_m * v.cluster_n, static_cast<int>(group)};
}

}  // namespace

int swiglu_variants() { return kVariantCount; }

SwigluPlan choose_plan(const SwigluProblem& problem) {
  int best = 0;
  for (int i = 1; i < kVariantCount; ++i) {
    if (estimated_cycles(problem, kVariants[i]) < estimated_cycles(problem, kVariants[best])) best = i;
  }
  return plan_for(problem, best);
}

std::string describe(const SwigluProblem& problem, const SwigluPlan& plan) {
  std::string text = "M=" + std::to_string(problem.M) + " I=" + std::to_string(problem.I) +
                     " K=" + std::to_string(problem.K) + ": " + std::to_string(plan.grid) +
                     " blocks, walking groups of " + std::to_string(plan.raster_group) +
                     " rows of tiles; estimated cycles:";
  for (int i = 0; i < kVariantCount; ++i) {
    text += std::string(i == plan.variant ? "\n* " : "\n  ") + kVariants[i].name + ": " +
            std::to_string(static_cast<int64_t>(estimated_cycles(problem, kVariants[i])));
  }
  return text;
}

const char* int8_swiglu_sm90_unsupported(const SwigluParams& p) {
  constexpr int64_t kMost = int64_t{1} << 29;
  if (p.M < 0 || p.I < 1 || p.K < 1 || p.M > kMost || p.I > kMost) return "M, I or K is out of range";
  if (p.K > 131071) return "K > 131071 can overflow the int32 sums";
  if (p.a_pitch % 16 != 0 || p.b_pitch % 16 != 0) return "the copy engine needs rows a multiple of 16 bytes apart";
  if (!aligned(p.a, 16) || !aligned(p.b, 16)) return "the copy engine needs 16-byte aligned a and b";
  if (p.out_type == DType::kFloat16) return "the product of gate and up may exceed float16";
  if (host::find_tensor_map_encoder() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

void int8_swiglu_sm90(const SwigluParams& p, cudaStream_t stream, const SwigluPlan* forced) {
  if (const char* reason = int8_swiglu_sm90_unsupported(p)) {
    throw std::runtime_error("int8_swiglu_sm90: M=" + std::to_string(p.M) + " I=" + std::to_string(p.I) +
                             " K=" + std::to_string(p.K) + ": " + reason);
  }
  if (p.M == 0) return;
  if (forced != nullptr && (forced->variant < 0 || forced->variant >= kVariantCount)) {
    throw std::runtime_error("int8_swiglu_sm90: a forced plan names variant " + std::to_string(forced->variant) +
                             ", not one of 0.." + std::to_string(kVariantCount - 1));
  }
  int device = 0;
  host::check(cudaGetDevice(&device), "int8_swiglu_sm90: cudaGetDevice");
  const SwigluProblem problem{p.M, p.I, p.K, host::attribute(cudaDevAttrMultiProcessorCount, device)};
  SwigluPlan plan = forced == nullptr ? choose_plan(problem) : plan_for(problem, forced->variant);
  if (forced != nullptr && forced->grid > 0) plan.grid = forced->grid;
  if (forced != nullptr && forced->raster_group > 0) plan.raster_group = forced->raster_group;
  const Variant& v = kVariants[plan.variant];
  (p.out_type == DType::kFloat32 ? v.launch_float : v.launch_bfloat)(p, plan, stream);
}

}  // namespace kitchen::int8
