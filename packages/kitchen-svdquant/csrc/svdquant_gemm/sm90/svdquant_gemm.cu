// W4A4 GEMM with a low-rank branch for Hopper (sm_90a), whose tensor cores have no int4: the codes are multiplied as e4m3.
//
//   acc[m, n] = sum over r of low[m, r] * up[n, r]                                    bfloat16 products, float32
//   s[m, n, g] = a_scale[m, g] * b_scale[n, g]                                        bfloat16 parts, float32
//   acc[m, n] = fma(dot[m, n, g], s[m, n, g], acc[m, n])                              for every group of 64 columns, ascending
//   y = acc + bias[n];  y = fma(residual_scale[n], y, residual[m, n])                 float32
//   out[m, n] = y rounded once to out's type
//
// 4-bit codes, signed or unsigned, are exact in e4m3, and so are the tensor cores' sums over 64 columns: 15 * 8 * 64 needs
// 13 of the 14 bits that they keep (tests/test_gemm_gpu.py). So dot is the integer of the int4 definition.
//
// The main loop is promoted_gemm.cuh. Measured: docs/kernels/svdquant.md.
#include "svdquant_gemm/sm90/svdquant_gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "kitchen/common/to_float.h"
#include "kitchen/gemm/staged_store_sm90.cuh"
#include "kitchen/host/check.h"
#include "kitchen/host/launch.h"
#include "kitchen/host/tensor_map.h"
#include "svdquant_gemm/sm90/promoted_gemm.cuh"
#include "svdquant_gemm/sm90/split_gemm.cuh"

namespace kitchen::svdquant {
namespace {

struct EpilogueParams {
  const void* bias;             // [N], may be nullptr
  const void* residual;         // [M, pitch] of out's type, may be nullptr
  const float* residual_scale;  // [N], or one value where its stride is 0; may be nullptr
  void* out;                    // [M, pitch]
  CUtensorMap out_map;          // valid where out_mapped
  bool out_mapped;
  int M, N;
  int64_t pitch;
  DType bias_type, out_type;
  int residual_scale_stride;
};

// Bytes of an output element: 2 (float16 or bfloat16, told at run time) or 4.
template <int kOutBytes, int kTileN>
struct StoreEpilogue {
  using Params = EpilogueParams;
  using Element = std::conditional_t<kOutBytes == 4, float, __nv_bfloat16>;
  using Store = gemm_sm90::StagedStore<Element, kTileN>;
  static constexpr int kStagingBytes = Store::kBytes;
  static constexpr int kPairs = Store::kColumns / 8;  // of a thread, in a row of a chunk

  struct Columns {
    float4 pairs[kTileN / 2];  // bias of two columns, residual_scale of the same two
  };

  const Params& params;
  uint8_t* staging;

  __device__ __forceinline__ StoreEpilogue(const Params& p, uint8_t* bytes) : params(p), staging(bytes) {}

  // By one producer warp, while the tile multiplies. Columns from N on repeat the last: they are never stored.
  __device__ __forceinline__ static void load_columns(const Params& params, Columns& columns, int, int column) {
    const int last = params.N - 1;
    const auto bias = [&](int n) {
      return params.bias == nullptr ? -0.0f : load_as_float(params.bias, n, params.bias_type);
    };
    const auto scale = [&](int n) {
      return params.residual_scale == nullptr
                 ? 1.0f
                 : params.residual_scale[static_cast<int64_t>(n) * params.residual_scale_stride];
    };
#pragma unroll 1
    for (int pair = threadIdx.x % 32; pair < kTileN / 2; pair += 32) {
      const int even = min(column + 2 * pair, last), odd = min(column + 2 * pair + 1, last);
      columns.pairs[pair] = make_float4(bias(even), bias(odd), scale(even), scale(odd));
    }
  }

  // Of one element; rows and columns beyond the matrix repeat the last.
  __device__ __forceinline__ float residual(int m, int n) const {
    const int64_t at = static_cast<int64_t>(min(m, params.M - 1)) * params.pitch + min(n, params.N - 1);
    return load_as_float(params.residual, at, params.out_type);
  }

  // 16 rows of a warp, kTileN columns: rows lane/4 and lane/4 + 8, columns 8*j + 2*(lane%4) and the next.
  __device__ __forceinline__ void store(const float (&acc)[2][kTileN / 4], const Columns& columns, int row, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int chunk = 0; chunk < kTileN / Store::kColumns; ++chunk) {
      const int first = column + chunk * Store::kColumns;
      float y[kPairs][4];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float4 c = columns.pairs[4 * (chunk * kPairs + j) + lane % 4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 4 * (chunk * kPairs + j) + (e ^ 1);
          y[j][e] = __fadd_rn(acc[i / (kTileN / 4)][i % (kTileN / 4)], e % 2 ? c.y : c.x);
        }
      }
      if (params.residual != nullptr) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const float4 c = columns.pairs[4 * (chunk * kPairs + j) + lane % 4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float other = residual(row + lane / 4 + 8 * (e / 2), first + 8 * j + 2 * (lane % 4) + e % 2);
            y[j][e] = __fmaf_rn(e % 2 ? c.w : c.z, y[j][e], other);
          }
        }
      }
      const int2 at[1] = {{row, first}};
      if constexpr (kOutBytes == 2) {
        if (params.out_type == DType::kFloat16) {
          send(store_as<gemm_sm90::StagedStore<__half, kTileN>>(), chunk, y, at);
          continue;
        }
      }
      send(store_as<Store>(), chunk, y, at);
    }
  }

  template <class S>
  __device__ __forceinline__ S store_as() const {
    using T = std::remove_pointer_t<decltype(S::out)>;
    return {static_cast<T*>(params.out), params.out_map, params.out_mapped, params.M, params.N, staging};
  }

  template <class S>
  __device__ __forceinline__ void send(S staged, int chunk, const float (&y)[kPairs][4], const int2 (&at)[1]) const {
    chunk == 0 ? staged.template acquire<0>() : staged.template acquire<1>();
    staged.put(chunk % 2, y);
    staged.send(chunk % 2, at);
  }

  __device__ __forceinline__ void finish() { store_as<Store>().finish(); }
};

// ---------------------------------------------------------------- launch

bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <int kOutBytes, int kTileN>
EpilogueParams epilogue_params(const HopperOperands& o) {
  using Store = typename StoreEpilogue<kOutBytes, kTileN>::Store;
  EpilogueParams e{};
  e.bias = o.bias;
  e.residual = o.residual;
  e.residual_scale = o.residual_scale;
  e.out = o.out;
  e.M = static_cast<int>(o.M);
  e.N = static_cast<int>(o.N);
  e.pitch = o.pitch;
  e.bias_type = o.bias_type;
  e.out_type = o.out_type;
  e.residual_scale_stride = o.residual_scale_stride;
  e.out_mapped = o.pitch * kOutBytes % 16 == 0 && aligned(o.out, 16);
  if (e.out_mapped) {
    e.out_map = host::encode_matrix_map({kOutBytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                         kOutBytes, o.out, o.M, o.N, o.pitch * kOutBytes, Store::kRows, Store::kColumns,
                                         Store::kSwizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE});
  }
  return e;
}

CUtensorMap code_map(const uint8_t* data, int64_t rows, int64_t K, int box_rows) {
  return host::encode_matrix_map(
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, data, rows, K, K, box_rows, sm90::kStageBytesK, CU_TENSOR_MAP_SWIZZLE_128B});
}

CUtensorMap rank_map(const void* data, int64_t rows, int R, int box_rows) {
  return host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, rows, R, 2 * int64_t{R}, box_rows,
                                  sm90::kStageBytesK / 2, CU_TENSOR_MAP_SWIZZLE_128B});
}

template <class Config, int kOutBytes>
sm90::KernelParams<EpilogueParams> kernel_params(const HopperOperands& o, const HopperPlan& plan) {
  sm90::KernelParams<EpilogueParams> params{};
  params.a = code_map(o.a, o.M, o.K, Config::kBoxM);
  params.b = code_map(o.b, o.N, o.K, Config::kBoxN);
  if (o.R > 0) {
    params.low = rank_map(o.low, o.M, o.R, Config::kBoxM);
    params.up = rank_map(o.up, o.N, o.R, Config::kBoxN);
    params.rank_stages = static_cast<int>(ceil_div(o.R, 64)), params.rank_steps = static_cast<int>(ceil_div(o.R, 16));
  } else {
    params.low = params.a, params.up = params.b;  // prefetched, not used
  }
  params.problem = {static_cast<int>(ceil_div(o.K, sm90::kStageBytesK)),
                    static_cast<int>(ceil_div(o.M, Config::kTileM * Config::kClusterM)),
                    static_cast<int>(ceil_div(o.N, Config::kTileN * Config::kClusterN)), plan.raster_group, 0};
  params.a_scale = static_cast<const uint4*>(o.a_scale);
  params.b_scale = static_cast<const uint4*>(o.b_scale);
  params.groups = even_groups(static_cast<int>(o.K / kGroup));
  params.minus_zero = -0.0f;
  params.a_blocks = static_cast<int>(ceil_div(o.M, kBlockRows));
  params.b_blocks = static_cast<int>(ceil_div(o.N, Config::kTileN));
  params.epilogue = epilogue_params<kOutBytes, Config::kTileN>(o);
  return params;
}

template <class Config, int kOutBytes>
void launch(const HopperOperands& o, const HopperPlan& plan, cudaStream_t stream) {
  using Epilogue = StoreEpilogue<kOutBytes, Config::kTileN>;
  using Shared = sm90::SharedStorage<Config, Epilogue>;
  static_assert(sizeof(Shared) <= sm90::kSharedLimit, "the stages do not fit shared memory");
  host::launch("svdquant_gemm_sm90", sm90::promoted_gemm<Config, Epilogue>,
               {plan.grid, Config::kThreads, Config::kClusterSize, sizeof(Shared), stream, o.programmatic_launch},
               kernel_params<Config, kOutBytes>(o, plan));
}

template <class Config, int kOutBytes>
void launch_split(const HopperOperands& o, const HopperPlan& plan, cudaStream_t stream) {
  using Epilogue = StoreEpilogue<kOutBytes, Config::kTileN>;
  using Shared = sm90::SplitStorage<Config, Epilogue>;
  static_assert(sizeof(Shared) <= sm90::kSharedLimit, "the stages do not fit shared memory");
  sm90::SplitParams<EpilogueParams> params{};
  static_cast<sm90::KernelParams<EpilogueParams>&>(params) = kernel_params<Config, kOutBytes>(o, plan);
  params.stages_each = static_cast<int>(ceil_div(params.problem.k_stages, plan.splits));
  host::require(plan.grid == int64_t{params.problem.tiles_m} * params.problem.tiles_n * plan.splits,
                "svdquant_gemm_sm90: a cluster that splits K has one tile");
  host::launch("svdquant_gemm_sm90", sm90::split_gemm<Config, Epilogue>,
               {plan.grid, Config::kThreads, plan.splits, sizeof(Shared), stream, o.programmatic_launch}, params);
}

// ---------------------------------------------------------------- plans

struct Variant {
  HopperVariant shape;
  void (*launch[2])(const HopperOperands&, const HopperPlan&, cudaStream_t);  // 2-byte outputs, float32
};

template <class Config>
constexpr Variant variant(const char* name) {
  return {{name, Config::kTileM, Config::kTileN, Config::kClusterM, Config::kClusterN, false},
          {launch<Config, 2>, launch<Config, 4>}};
}
template <class Config>
constexpr Variant splitting(const char* name) {
  return {{name, Config::kTileM, Config::kTileN, 1, 1, true}, {launch_split<Config, 2>, launch_split<Config, 4>}};
}

constexpr Variant kVariants[] = {
    variant<sm90::Config<128, 1, 1, 4>>("128x128"),
    variant<sm90::Config<96, 1, 1, 4>>("128x96"),
    splitting<sm90::Config<96, 1, 1, 4>>("128x96, K split over a cluster"),
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

int64_t tiles_of(int64_t M, int64_t N, const HopperVariant& v) { return ceil_div(M, v.tile_m) * ceil_div(N, v.tile_n); }

// Blocks that share K, where there are fewer tiles than SMs.
int splits_of(int64_t M, int64_t N, int64_t K, int sm_count, const HopperVariant& v) {
  int splits = 1;
  while (v.splits && splits < sm90::kMostSplits && K >= 2 * splits * 4 * sm90::kStageBytesK) {
    // Clusters of four do not find room on all SMs.
    if (tiles_of(M, N, v) * splits * 2 > (splits == 1 ? sm_count : sm_count * 3 / 4)) break;
    splits *= 2;
  }
  return splits;
}

bool fits(int64_t M, int64_t N, int sm_count, const HopperVariant& v) { return !v.splits || tiles_of(M, N, v) <= sm_count; }

// Microseconds. The constants are fitted to an H200 (docs/kernels/svdquant.md, 2026-11-30): of a tile by K, of what comes with a tile,
// of a launch, of sums that meet.
double estimated_us(int64_t M, int64_t N, int64_t K, int sm_count, const HopperVariant& v) {
  constexpr double kLaunch = 3.5, kMeet = 2.0;
  const int splits = splits_of(M, N, K, sm_count, v);
  const double fixed = v.tile_n == 128 ? 1.2 : 0.9, of_k = v.tile_n == 128 ? 4.86e-3 : 3.83e-3;
  const int64_t rounds = ceil_div(tiles_of(M, N, v), std::max(1, sm_count / splits));
  return kLaunch + double(rounds) * (fixed + of_k * double(ceil_div(K, splits))) + (v.splits ? kMeet : 0.0);
}

}  // namespace

int hopper_variant_count() { return kVariantCount; }
const HopperVariant& hopper_variant(int variant) { return kVariants[variant].shape; }

HopperPlan hopper_plan_for(int64_t M, int64_t N, int64_t K, int sm_count, int variant) {
  const HopperVariant& v = kVariants[variant].shape;
  const int splits = splits_of(M, N, K, sm_count, v), cluster = v.cluster_m * v.cluster_n * splits;
  const int64_t tiles = ceil_div(ceil_div(M, v.tile_m), v.cluster_m) * ceil_div(ceil_div(N, v.tile_n), v.cluster_n);
  const int64_t clusters = v.splits ? tiles : std::min<int64_t>(tiles, std::max(1, sm_count / cluster));
  // Rows of A that are walked together stay in L2 while all of B passes once: up to 16 MB of them.
  const int64_t row_bytes = int64_t{v.tile_m} * v.cluster_m * K;
  const int64_t group = std::clamp<int64_t>((int64_t{16} << 20) / row_bytes, 8, 16);
  return {variant, static_cast<int>(clusters) * cluster, static_cast<int>(group), splits};
}

HopperPlan choose_hopper_plan(int64_t M, int64_t N, int64_t K, int sm_count) {
  int best = 0;
  for (int i = 1; i < kVariantCount; ++i) {
    if (fits(M, N, sm_count, kVariants[i].shape) &&
        estimated_us(M, N, K, sm_count, kVariants[i].shape) <
        estimated_us(M, N, K, sm_count, kVariants[best].shape))
      best = i;
  }
  return hopper_plan_for(M, N, K, sm_count, best);
}

std::string describe(int64_t M, int64_t N, int64_t K, int sm_count, const HopperPlan& plan) {
  std::string text = "M=" + std::to_string(M) + " N=" + std::to_string(N) + " K=" + std::to_string(K) + ": " +
                     std::to_string(plan.grid) + " blocks, walking groups of " + std::to_string(plan.raster_group) +
                     " rows of tiles, " + std::to_string(plan.splits) + " pieces of K; estimated microseconds:";
  for (int i = 0; i < kVariantCount; ++i) {
    const int64_t us = static_cast<int64_t>(estimated_us(M, N, K, sm_count, kVariants[i].shape));
    text += std::string(i == plan.variant ? "\n* " : "\n  ") + kVariants[i].shape.name + ": " + std::to_string(us);
  }
  return text;
}

const char* svdquant_gemm_sm90_unsupported(const HopperOperands& o) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (o.M < 0 || o.N < 1 || o.M > kMost || o.N > kMost) return "M or N is out of range";
  if (o.K < kGroup || o.K % kGroup != 0 || o.K > kMost) return "K must be a multiple of 64";
  if (o.R < 0 || o.R % 8 != 0) return "the rank of the operands must be a multiple of 8";
  if (!aligned(o.a, 16) || !aligned(o.b, 16) || !aligned(o.low, 16) || !aligned(o.up, 16))
    return "operands must be aligned to 16 bytes";
  if (!aligned(o.a_scale, 16) || !aligned(o.b_scale, 16)) return "scales must be aligned to 16 bytes";
  if (host::find_tensor_map_encoder() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

void svdquant_gemm_sm90(const HopperOperands& o, const HopperPlan& plan, cudaStream_t stream) {
  if (const char* reason = svdquant_gemm_sm90_unsupported(o)) {
    throw std::runtime_error("svdquant_gemm_sm90: M=" + std::to_string(o.M) + " N=" + std::to_string(o.N) +
                             " K=" + std::to_string(o.K) + " R=" + std::to_string(o.R) + ": " + reason);
  }
  host::require(plan.variant >= 0 && plan.variant < kVariantCount && plan.grid > 0 && plan.raster_group > 0 && plan.splits > 0,
                "svdquant_gemm_sm90: there is no such plan");
  if (o.M == 0) return;
  kVariants[plan.variant].launch[o.out_type == DType::kFloat32](o, plan, stream);
}

}  // namespace kitchen::svdquant
