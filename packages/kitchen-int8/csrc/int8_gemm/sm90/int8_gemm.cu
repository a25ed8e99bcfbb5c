// INT8 GEMM with a fused epilogue for Hopper (sm_90a).
//
//   acc[m, n] = sum over k of a[m, k] * b[n, k]                      int32, exact for K <= 131071
//   y = fma(float(acc) * a_scale[m], b_scale[n], bias[n])            float32; without bias: the product
//   y = fma(residual_scale[n], y, residual[m, n])                    where there is a residual
//   out[m, n] = y rounded once to out's type
//
//   a [M, K] int8, b [N, K] int8, both with K contiguous; a_scale [M], b_scale [N] or one value, float32;
//   bias [N] float32/float16/bfloat16; residual and out [M, N] of out's type; residual_scale [N] or one value.
//
// The main loop is kitchen/gemm/gemm_sm90.cuh. A thread owns, in each block of 64 rows, the rows lane/4 and
// lane/4 + 8 of its warp's 16, and column pairs 8*j + 2*(lane%4). Measured: docs/kernels/int8_gemm_sm90.md.
#include "int8_gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <type_traits>

#include "kitchen/gemm/gemm_sm90.cuh"
#include "kitchen/gemm/staged_store_sm90.cuh"
#include "kitchen/host/check.h"
#include "kitchen/host/device.h"
#include "kitchen/host/tensor_map.h"
#include "kitchen/ptx/prefetch.h"

namespace kitchen::int8 {
namespace {

namespace sm90 = kitchen::gemm_sm90;
using sm90::Schedule;
using sm90::TileConfig;

struct MmaS8 {
  using Element = int8_t;
  using Accumulator = int;
  static constexpr int kStepK = 32;
  template <int kN>
  using Instruction = ptx::WgmmaS8<kN>;
};

// One value per output column, or one for all of them.
enum class ColumnKind : int { kAbsent, kOneFloat, kFloat32, kFloat16, kBfloat16 };

struct ColumnVector {
  const void* data;
  float otherwise;  // the value where absent
  ColumnKind kind;
};

__device__ __forceinline__ float2 widen(float2 v) { return v; }
__device__ __forceinline__ float2 widen(__half2 v) { return __half22float2(v); }
__device__ __forceinline__ float2 widen(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
struct PairOf;
template <>
struct PairOf<float> { using type = float2; };
template <>
struct PairOf<__half> { using type = __half2; };
template <>
struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };

template <class T>
__device__ __forceinline__ float element(const void* data, int n) {
  return widen(static_cast<const T*>(data)[n]);
}

__device__ __forceinline__ float column_value(const ColumnVector& v, int n) {
  switch (v.kind) {
    case ColumnKind::kFloat32: return element<float>(v.data, n);
    case ColumnKind::kFloat16: return element<__half>(v.data, n);
    case ColumnKind::kBfloat16: return element<__nv_bfloat16>(v.data, n);
    case ColumnKind::kOneFloat: return element<float>(v.data, 0);
    default: return v.otherwise;
  }
}

template <class T>
struct EpilogueParams {
  const float* a_scale;          // [M]
  ColumnVector b_scale, bias;
  const float* residual_scale;   // [N], or one value where its stride is 0; may be nullptr
  int residual_scale_stride;
  const T* residual;             // [M, N], may be nullptr
  T* out;                        // [M, N]
  CUtensorMap out_map;           // valid where out_mapped
  bool out_mapped, residual_paired;
  int M, N;
};

template <class T, int kTileM, int kTileN, bool kResidual>
struct ScaleEpilogue {
  using Params = EpilogueParams<T>;
  using Store = sm90::StagedStore<T, kTileN>;
  static constexpr int kStagingBytes = Store::kBytes;
  static constexpr int kPairs = Store::kColumns / 8;  // of a thread, in a row of a chunk
  using Pair = typename PairOf<T>::type;

  struct Rows {
    float low, high;  // a_scale of the thread's two rows
  };
  struct Columns {
    float4 pairs[kTileN / 2];  // b_scale of two columns, bias of the same two
  };

  const Params& params;
  Store staged;

  __device__ __forceinline__ ScaleEpilogue(const Params& p, uint8_t* staging)
      : params(p), staged{p.out, p.out_map, p.out_mapped, p.M, p.N, staging} {}

  // By one producer warp, while the tile multiplies. Columns from N on repeat the last: they are never stored.
  __device__ __forceinline__ static void load_columns(const Params& params, Columns& columns, int row, int column) {
    const int last = params.N - 1, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int pair = lane; pair < kTileN / 2; pair += 32) {
      const int even = min(column + 2 * pair, last), odd = min(column + 2 * pair + 1, last);
      columns.pairs[pair] = make_float4(column_value(params.b_scale, even), column_value(params.b_scale, odd),
                                        column_value(params.bias, even), column_value(params.bias, odd));
    }
    if constexpr (kResidual) {
      constexpr int kLine = 128 / sizeof(T);
#pragma unroll 1
      for (int i = lane; i < kTileM * (kTileN / kLine); i += 32) {
        const int m = min(row + i / (kTileN / kLine), params.M - 1);
        const int n = min(column + i % (kTileN / kLine) * kLine, last);
        ptx::prefetch_l2(params.residual + static_cast<int64_t>(m) * params.N + n);
      }
    }
  }

  __device__ __forceinline__ Rows load_rows(int row) const {
    const int low = row + threadIdx.x % 32 / 4, last = params.M - 1;
    return {params.a_scale[min(low, last)], params.a_scale[min(low + 8, last)]};
  }

  // Chunk by chunk, and within a chunk block by block: blocks share their columns' scales. Two at a time, so that one
  // fence and one wait serve both; with a residual one at a time, for want of registers.
  template <int kBlocks>
  __device__ __forceinline__ void store(const int (&acc)[kBlocks][kTileN / 2], const Rows (&rows)[kBlocks],
                                        const Columns& columns, int row, int column) {
    constexpr bool kFrugal = kResidual || kBlocks * kTileN > 256;  // with registers
    constexpr int kItems = kBlocks * (kTileN / Store::kColumns), kAtOnce = kFrugal || kItems % 2 ? 1 : 2;
    const auto where = [&](int item) -> int2 {
      return {row + item % kBlocks * 64, column + item / kBlocks * Store::kColumns};
    };
    Pair residual[2][kPairs];
    load_residual(residual, where(0));
#pragma unroll
    for (int item = 0; item < kItems; item += kAtOnce) {
      float y[kAtOnce][kPairs][4];
      int2 at[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int block = (item + i) % kBlocks, pair = (item + i) / kBlocks * kPairs;
        at[i] = where(item + i);
        scale<kFrugal>(y[i], acc[block], pair, rows[block], &columns.pairs[4 * pair]);
        add_residual(y[i], residual, at[i]);
        if (item + 1 < kItems) load_residual(residual, where(item + 1));  // overlaps this one's store
      }
      // Single buffers alternate from the tile's first on, which may be the one that was used last.
      if (kAtOnce == 1 && item > 0) staged.template acquire<1>(); else staged.template acquire<0>();
      const int buffer = kAtOnce == 1 ? item % 2 : 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) staged.put(buffer + i, y[i]);
      staged.send(buffer, at);
    }
  }

  template <bool kFrugal>
  __device__ __forceinline__ static void scale(float (&y)[kPairs][4], const int* acc, int first, Rows rows,
                                               const float4* columns) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      if (kFrugal && j % 2 == 0) asm volatile("" ::: "memory");  // keeps the loads of columns where they are used
      const float4 c = columns[4 * j + threadIdx.x % 4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float t = __fmul_rn(__int2float_rn(acc[4 * (first + j) + e]), e < 2 ? rows.low : rows.high);
        y[j][e] = __fmaf_rn(t, e % 2 ? c.y : c.x, e % 2 ? c.w : c.z);
      }
    }
  }

  // Whether a chunk's residual is loaded in pairs, ahead of its use.
  __device__ __forceinline__ bool paired(int column) const {
    return params.residual_paired && column + Store::kColumns <= params.N;
  }

  // Of row lane/4 or, half == 1, lane/4 + 8. Rows from M on repeat the last.
  __device__ __forceinline__ const T* residual_row(int row, int half) const {
    const int m = row + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
    return params.residual + static_cast<int64_t>(min(m, params.M - 1)) * params.N;
  }

  __device__ __forceinline__ void load_residual(Pair (&values)[2][kPairs], int2 at) const {
    if constexpr (kResidual) {
      if (!paired(at.y)) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* const data = residual_row(at.x, half) + at.y + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) values[half][j] = *reinterpret_cast<const Pair*>(data + 8 * j);
      }
    }
  }

  __device__ __forceinline__ void add_residual(float (&y)[kPairs][4], const Pair (&residual)[2][kPairs],
                                               int2 at) const {
    if constexpr (kResidual) {
      const int first = at.y + 2 * (threadIdx.x % 4), last = params.N - 1;
      if (paired(at.y)) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) add_pairs(y[j], widen(residual[0][j]), widen(residual[1][j]), first + 8 * j);
      } else {
        const T* const low = residual_row(at.x, 0);
        const T* const high = residual_row(at.x, 1);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const int even = min(first + 8 * j, last), odd = min(first + 8 * j + 1, last);
          add_pairs(y[j], make_float2(widen(low[even]), widen(low[odd])),
                    make_float2(widen(high[even]), widen(high[odd])), even);
        }
      }
    }
  }

  __device__ __forceinline__ void add_pairs(float (&y)[4], float2 low, float2 high, int n) const {
    const float* const scale = params.residual_scale;
    const float even = scale == nullptr ? 1.0f : scale[n * params.residual_scale_stride];
    const float odd = scale == nullptr ? 1.0f : scale[min(n + 1, params.N - 1) * params.residual_scale_stride];
    y[0] = __fmaf_rn(even, y[0], low.x);
    y[1] = __fmaf_rn(odd, y[1], low.y);
    y[2] = __fmaf_rn(even, y[2], high.x);
    y[3] = __fmaf_rn(odd, y[3], high.y);
  }

  __device__ __forceinline__ void finish() { staged.finish(); }
};

// ---------------------------------------------------------------- launch

bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

ColumnVector column_vector(const void* data, int stride, DType type, float otherwise) {
  const ColumnKind typed = type == DType::kFloat32   ? ColumnKind::kFloat32
                           : type == DType::kFloat16 ? ColumnKind::kFloat16
                                                        : ColumnKind::kBfloat16;
  const ColumnKind kind = data == nullptr ? ColumnKind::kAbsent : stride == 0 ? ColumnKind::kOneFloat : typed;
  return {data, otherwise, kind};
}

template <class T>
constexpr CUtensorMapDataType kMapType = sizeof(T) == 4                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                         : std::is_same<T, __half>::value     ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

template <class T, int kTileN>
EpilogueParams<T> epilogue_params(const Int8GemmParams& p) {
  using Store = sm90::StagedStore<T, kTileN>;
  EpilogueParams<T> e{};
  e.a_scale = p.a_scale;
  e.b_scale = column_vector(p.b_scale, p.b_scale_stride, DType::kFloat32, 1.0f);
  // t * s + (-0) is t * s to the bit, signed zeros included.
  e.bias = column_vector(p.bias, 1, p.bias_type, -0.0f);
  e.residual_scale = p.residual_scale;
  e.residual_scale_stride = p.residual_scale_stride;
  e.residual = static_cast<const T*>(p.residual);
  e.out = static_cast<T*>(p.out);
  e.M = static_cast<int>(p.M);
  e.N = static_cast<int>(p.N);
  e.residual_paired = p.N % 2 == 0 && aligned(p.residual, 2 * sizeof(T));
  e.out_mapped = p.N * sizeof(T) % 16 == 0 && aligned(p.out, 16);
  if (e.out_mapped) {
    e.out_map = host::encode_matrix_map({kMapType<T>, sizeof(T), p.out, p.M, p.N, p.N * int64_t{sizeof(T)},
                                         Store::kRows, Store::kColumns,
                                         Store::kSwizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE});
  }
  return e;
}

CUtensorMap operand_map(const int8_t* data, int64_t rows, int64_t K, int box_rows) {
  return host::encode_matrix_map(
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, data, rows, K, K, box_rows, sm90::kStageBytesK, CU_TENSOR_MAP_SWIZZLE_128B});
}

// More shared memory than 48 KB has to be asked for, once a kernel and device.
template <class Kernel>
void allow_shared_memory(Kernel kernel, int bytes, std::atomic<uint64_t>& devices_done) {
  int device = 0;
  host::check(cudaGetDevice(&device), "int8_gemm_sm90: cudaGetDevice");
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (devices_done.load() & bit) return;
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
              "int8_gemm_sm90: cudaFuncSetAttribute");
  devices_done.fetch_or(bit);
}

template <class Config, class T, bool kResidual, class Promotion = sm90::NoPromotion>
void launch_with(const Int8GemmParams& p, const LinearPlan& plan, cudaStream_t stream) {
  using Epilogue = ScaleEpilogue<T, Config::kTileM, Config::kTileN, kResidual>;
  using Shared = sm90::SharedStorage<Config, Epilogue>;
  static_assert(sizeof(Shared) <= sm90::kSharedLimit, "the stages do not fit shared memory");
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = sm90::gemm_kernel<Config, MmaS8, Epilogue, Promotion>;
  allow_shared_memory(kernel, sizeof(Shared), devices_done);

  sm90::KernelParams<EpilogueParams<T>> params{};
  params.a = operand_map(p.a, p.M, p.K, Config::kBoxM);
  params.b = operand_map(p.b, p.N, p.K, Config::kBoxN);
  params.problem = {static_cast<int>(ceil_div(p.K, sm90::kStageBytesK)),
                    static_cast<int>(ceil_div(p.M, Config::kTileM * Config::kClusterM)),
                    static_cast<int>(ceil_div(p.N, Config::kTileN * Config::kClusterN)), plan.raster_group, 0};
  params.epilogue = epilogue_params<T, Config::kTileN>(p);

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
  host::check(cudaLaunchKernelEx(&config, kernel, params), "int8_gemm_sm90: launch");
}

// Two accumulator blocks of 192 columns leave no registers for a residual, so that pair is not built. (Without one,
// nine registers a tile are spilled around the 16-bit stores, none in the main loop.)
template <class Config>
constexpr bool kTakesResidual = Config::kBlocksM * Config::kTileN <= 256;

template <class Config, class T>
void launch(const Int8GemmParams& p, const LinearPlan& plan, cudaStream_t stream) {
  if (p.residual == nullptr) return launch_with<Config, T, false>(p, plan, stream);
  if constexpr (kTakesResidual<Config>) return launch_with<Config, T, true>(p, plan, stream);
}

// ---------------------------------------------------------------- plans

struct Variant {
  const char* name;
  int tile_m, tile_n, cluster_m, cluster_n;
  bool ping_pong, takes_residual;
  void (*launch[3])(const Int8GemmParams&, const LinearPlan&, cudaStream_t);  // by DType
};

template <class Config>
constexpr Variant variant(const char* name) {
  return {name, Config::kTileM, Config::kTileN, Config::kClusterM, Config::kClusterN, Config::kPingPong,
          kTakesResidual<Config>,
          {launch<Config, float>, launch<Config, __half>, launch<Config, __nv_bfloat16>}};
}

constexpr Variant kVariants[] = {
    variant<TileConfig<128, 256, 2, 1, Schedule::kTogether>>("128x256 together, cluster 2x1"),
    variant<TileConfig<128, 192, 2, 1, Schedule::kPingPong>>("128x192 ping-pong, cluster 2x1"),
    variant<TileConfig<128, 192, 2, 1, Schedule::kTogether>>("128x192 together, cluster 2x1"),
    variant<TileConfig<128, 128, 2, 1, Schedule::kPingPong>>("128x128 ping-pong, cluster 2x1"),
    variant<TileConfig<128, 128, 1, 2, Schedule::kPingPong>>("128x128 ping-pong, cluster 1x2"),
    variant<TileConfig<128, 96, 2, 1, Schedule::kTogether>>("128x96 together, cluster 2x1"),
    variant<TileConfig<64, 128, 1, 2, Schedule::kPingPong>>("64x128 ping-pong, cluster 1x2"),
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

int64_t cluster_tiles(const LinearProblem& problem, const Variant& v) {
  return ceil_div(problem.M, v.tile_m * v.cluster_m) * ceil_div(problem.N, v.tile_n * v.cluster_n);
}

int cluster_slots(const LinearProblem& problem, const Variant& v) {
  return std::max(1, problem.sm_count / (v.cluster_m * v.cluster_n));
}

// Cycles of the busiest block. The constants are fitted to an H200 (docs/kernels/int8_gemm_sm90.md, 2026-11-30).
double estimated_cycles(const LinearProblem& problem, const Variant& v) {
  constexpr double kMultipliesPerCycle = 4096 / 0.97;              // an SM's tensor cores
  constexpr double kBytesPerCycle = 52, kBytesWeight = 1.0 / 400;  // copies: their ceiling; what they take from wgmma
  constexpr double kLaunch = 4000, kStorePerColumn = 12;           // of 64 rows
  const double multiply = double(v.tile_m) * v.tile_n * sm90::kStageBytesK / kMultipliesPerCycle;
  const double bytes = sm90::kStageBytesK * (double(v.tile_m) / v.cluster_n + double(v.tile_n) / v.cluster_m);
  const double stage = std::max(multiply + bytes * kBytesWeight, bytes / kBytesPerCycle);
  const double tile = double(ceil_div(problem.K, sm90::kStageBytesK)) * stage;
  const double store = kStorePerColumn * v.tile_n * (v.ping_pong ? v.tile_m / 64 : 1);
  const double rounds = double(ceil_div(cluster_tiles(problem, v), cluster_slots(problem, v)));
  // Ping-pong hides every store but the last, unless a store takes longer than a tile.
  const double work = v.ping_pong ? (rounds - 1) * std::max(tile, store / 2) + tile + store : rounds * (tile + store);
  return kLaunch + work;
}

// nullptr, or why this variant cannot run the problem.
const char* rejected(const LinearProblem& problem, const Variant& v) {
  return problem.residual && !v.takes_residual ? "its accumulators leave no registers for a residual" : nullptr;
}

LinearPlan plan_for(const LinearProblem& problem, int index) {
  const Variant& v = kVariants[index];
  const int64_t clusters = std::min<int64_t>(cluster_tiles(problem, v), cluster_slots(problem, v));
  // Rows of A that are walked together stay in L2 while all of B passes once: up to 16 MB of them.
  const int64_t row_bytes = int64_t{v.tile_m} * v.cluster_m * problem.K;
  const int64_t group = std::clamp<int64_t>((int64_t{16} << 20) / row_bytes, 8, 16);
  return {index, static_cast<int>(clusters) * v.cluster_m * v.cluster_n, static_cast<int>(group)};
}

}  // namespace

LinearPlan choose_plan(const LinearProblem& problem) {
  int best = 0;  // takes everything
  for (int i = 1; i < kVariantCount; ++i) {
    if (rejected(problem, kVariants[i]) != nullptr) continue;
    if (estimated_cycles(problem, kVariants[i]) < estimated_cycles(problem, kVariants[best])) best = i;
  }
  return plan_for(problem, best);
}

std::string describe(const LinearProblem& problem, const LinearPlan& plan) {
  std::string text = "M=" + std::to_string(problem.M) + " N=" + std::to_string(problem.N) +
                     " K=" + std::to_string(problem.K) + (problem.residual ? " with a residual" : "") + ": " +
                     std::to_string(plan.grid) + " blocks, walking groups of " + std::to_string(plan.raster_group) +
                     " rows of tiles; estimated cycles:";
  for (int i = 0; i < kVariantCount; ++i) {
    const char* reason = rejected(problem, kVariants[i]);
    const int64_t cycles = static_cast<int64_t>(estimated_cycles(problem, kVariants[i]));
    text += std::string(i == plan.variant ? "\n* " : "\n  ") + kVariants[i].name + ": " +
            (reason != nullptr ? std::string(reason) : std::to_string(cycles));
  }
  return text;
}

const char* int8_gemm_sm90_unsupported(const Int8GemmParams& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (p.M < 0 || p.N < 1 || p.K < 1 || p.M > kMost || p.N > kMost) return "M, N or K is out of range";
  if (p.K > 131071) return "K > 131071 can overflow the int32 sums";
  if (p.K % 16 != 0) return "the copy engine needs rows of a multiple of 16 bytes: K % 16 != 0";
  if (!aligned(p.a, 16) || !aligned(p.b, 16)) return "the copy engine needs 16-byte aligned a and b";
  if (host::find_tensor_map_encoder() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

void int8_gemm_sm90(const Int8GemmParams& p, cudaStream_t stream, const LinearPlan* forced) {
  if (const char* reason = int8_gemm_sm90_unsupported(p)) {
    throw std::runtime_error("int8_gemm_sm90: M=" + std::to_string(p.M) + " N=" + std::to_string(p.N) +
                             " K=" + std::to_string(p.K) + ": " + reason);
  }
  if (p.M == 0) return;
  int device = 0;
  host::check(cudaGetDevice(&device), "int8_gemm_sm90: cudaGetDevice");
  const LinearProblem problem{p.M, p.N, p.K, host::attribute(cudaDevAttrMultiProcessorCount, device),
                              p.residual != nullptr};
  if (forced != nullptr && (forced->variant < 0 || forced->variant >= kVariantCount)) {
    throw std::runtime_error("int8_gemm_sm90: a forced plan names variant " + std::to_string(forced->variant) +
                             ", not one of 0.." + std::to_string(kVariantCount - 1));
  }
  if (forced != nullptr && rejected(problem, kVariants[forced->variant]) != nullptr) {
    throw std::runtime_error(std::string("int8_gemm_sm90: the forced plan cannot run: ") +
                             kVariants[forced->variant].name + ": " + rejected(problem, kVariants[forced->variant]));
  }
  LinearPlan plan = forced == nullptr ? choose_plan(problem) : plan_for(problem, forced->variant);
  if (forced != nullptr && forced->grid > 0) plan.grid = forced->grid;
  if (forced != nullptr && forced->raster_group > 0) plan.raster_group = forced->raster_group;
  kVariants[plan.variant].launch[static_cast<int>(p.out_type)](p, plan, stream);
}

}  // namespace kitchen::int8
