// The activation quantizer and x * proj_down for few rows, in one launch:
//
//   codes and scales as quantize_svdquant_w4a4.cu makes them;  low[m, r] = sum over k of x[m, k] * proj_down[k, r]   float32
//
// A cluster of eight blocks shares K; a block has an eighth of it and 16 ranks. Its part of x lies in shared memory as
// float32. A thread sums 4 columns of every 128 for two ranks and all rows; the sums meet in the warp, the block and the
// cluster, in a fixed order. Clusters along the ranks deal out the groups that are to be quantized. sm_90 and later
// (clusters).
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/dependent_launch.h"
#include "quantize_svdquant_w4a4/group_codes.cuh"
#include "quantize_svdquant_w4a4/quantize_svdquant_w4a4.h"

namespace kitchen::svdquant {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kCluster = 8;
constexpr int kRanks = 16;                  // of a block
constexpr int kPairs = kRanks / 2;          // lanes that share columns
constexpr int kSlices = kThreads / kPairs;  // of 4 columns
constexpr int kSharedLimit = 200 * 1024;

// Two neighbouring ranks of a row of proj_down as they lie in memory: a conversion right behind a load would wait for it.
struct RankPair {
  uint32_t bits[2];  // the second one where the pair was not loaded at once
};

// Whether two bfloat16 numbers can be loaded as one word.
__device__ __forceinline__ bool paired(const FewRowsParams& p) {
  return p.down_type == DType::kBFloat16 && p.R % 2 == 0 && reinterpret_cast<uintptr_t>(p.proj_down) % 4 == 0;
}

__device__ __forceinline__ RankPair load_ranks(const FewRowsParams& p, bool pair, int64_t k, int r) {
  RankPair found = {{0, 0}};
  const int64_t at = k * p.R + r;
  if (pair) {
    if (r < p.R) found.bits[0] = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.proj_down) + at));
    return found;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (r + e < p.R) found.bits[e] = __float_as_uint(load_as_float(p.proj_down, at + e, p.down_type));
  }
  return found;
}

__device__ __forceinline__ float2 ranks_of(const RankPair& found, bool pair) {
  const uint32_t low = pair ? found.bits[0] << 16 : found.bits[0],
                 high = pair ? found.bits[0] & 0xffff0000u : found.bits[1];
  return make_float2(__uint_as_float(low), __uint_as_float(high));
}

// x[0 .. M-1][first_k ..] as float32, several loads under way.
__device__ __forceinline__ void stage_x(const QuantizeParams& q, float* x, int64_t first_k, int columns) {
  const int M = static_cast<int>(q.M);
  const bool vectors = q.type != DType::kFloat32 && reinterpret_cast<uintptr_t>(q.x) % 16 == 0 && q.x_row_stride % 8 == 0;
  if (!vectors) {
#pragma unroll 4
    for (int i = threadIdx.x; i < M * columns; i += kThreads) {
      x[i] = load_as_float(q.x, i / columns * q.x_row_stride + first_k + i % columns, q.type);
    }
    return;
  }
  const int chunks = columns / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < M * chunks; i += kThreads) {
    const int m = i / chunks, k = i % chunks * 8;
    const uint4 words =
        *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(q.x) + m * q.x_row_stride + first_k + k);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      q.type == DType::kFloat16 ? Word<__half>::unpack(word[j], v + 2 * j)
                                : Word<__nv_bfloat16>::unpack(word[j], v + 2 * j);
    }
    float4* const to = reinterpret_cast<float4*>(x + m * columns + k);
    to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

template <bool kUnsigned>
__device__ __forceinline__ void quantize_part(const FewRowsParams& p, const float* x, int64_t first_k, int columns,
                                              int part, int parts) {
  const QuantizeParams& q = p.quantize;
  const int chunks = columns / kColumns, items = static_cast<int>(q.M) * chunks;
  // Four lanes, one group: items are dealt out by whole warps.
  for (int base = part * kThreads; base < items; base += parts * kThreads) {
    const int item = base + static_cast<int>(threadIdx.x);
    const bool inside = item < items;
    const int m = inside ? item / chunks : 0, column = inside ? item % chunks * kColumns : 0;
    float v[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v[i] = x[m * columns + column + i];
    if (q.shift != 0.0f) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) v[i] = __fadd_rn(v[i], q.shift);
    }
    const Smooth smooth(q.smooth, first_k + column, q.smooth_type);
    smooth.divide(v);
    const float scale = group_codes<kUnsigned>(v);
    if (!inside) continue;
    store_codes<CodeForm::kPacked>(q.codes, m * q.K + first_k + column, v);
    if (threadIdx.x % kLanesPerGroup == 0) static_cast<float*>(q.scales)[(first_k + column) / kGroup * q.M + m] = scale;
  }
}

template <int kRows>
__device__ __forceinline__ void multiply_part(const FewRowsParams& p, const float* x, float (&sum)[kRows][2],
                                              int64_t first_k, int columns, int first_rank) {
  const int r = first_rank + 2 * (threadIdx.x % kPairs), M = static_cast<int>(p.quantize.M);
  const bool pair = paired(p);
  constexpr int kStep = 4 * kSlices;
  const int start = 4 * (threadIdx.x / kPairs);
  RankPair next[4] = {};
  if (start < columns) {
#pragma unroll
    for (int i = 0; i < 4; ++i) next[i] = load_ranks(p, pair, first_k + start + i, r);
  }
#pragma unroll 1
  for (int k = start; k < columns; k += kStep) {
    float2 down[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) down[i] = ranks_of(next[i], pair);
    if (k + kStep < columns) {
#pragma unroll
      for (int i = 0; i < 4; ++i) next[i] = load_ranks(p, pair, first_k + k + kStep + i, r);
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const float4 v = *reinterpret_cast<const float4*>(x + min(m, M - 1) * columns + k);
      const float value[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[m][0] = __fmaf_rn(value[i], down[i].x, sum[m][0]);
        sum[m][1] = __fmaf_rn(value[i], down[i].y, sum[m][1]);
      }
    }
  }
}

// Columns of x that block `rank` of a cluster has: whole groups.
__device__ __host__ constexpr int64_t part_columns(int64_t K) { return (K / kGroup + kCluster - 1) / kCluster * kGroup; }

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1) quantize_few(const __grid_constant__ FewRowsParams p) {
  extern __shared__ __align__(16) float x[];  // [M][columns]
  __shared__ float in_block[kWarps][kRows][kRanks];
  __shared__ uint32_t in_cluster[kCluster][kRows * kRanks];
  ptx::wait_then_launch_dependents();
  const QuantizeParams& q = p.quantize;
  const unsigned rank = ptx::cluster_rank();
  const int part = blockIdx.x / kCluster, parts = gridDim.x / kCluster, M = static_cast<int>(q.M);
  const int64_t first_k = rank * part_columns(q.K);
  const int columns = static_cast<int>(max(int64_t{0}, min(part_columns(q.K), q.K - first_k)));
  if (p.R > 0) ptx::cluster_arrive();  // this block has started: others may write to its shared memory
  stage_x(q, x, first_k, columns);
  __syncthreads();
  float sum[kRows][2] = {};
  if (p.R > 0) multiply_part<kRows>(p, x, sum, first_k, columns, part * kRanks);
  q.is_unsigned ? quantize_part<true>(p, x, first_k, columns, part, parts)
                : quantize_part<false>(p, x, first_k, columns, part, parts);
  if (p.R == 0) return;  // one cluster, and no block of it waits for another
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float s = sum[m][e];
      s += __shfl_xor_sync(0xffffffffu, s, 8);
      s += __shfl_xor_sync(0xffffffffu, s, 16);
      if (lane < kPairs) in_block[warp][m][2 * lane + e] = s;
    }
  }
  __syncthreads();
  ptx::cluster_wait();
  for (int i = threadIdx.x; i < kRows * kRanks; i += kThreads) {
    float s = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) s += in_block[w][i / kRanks][i % kRanks];
    ptx::store_in_cluster(&in_cluster[rank][i], 0, __float_as_uint(s));
  }
  ptx::cluster_sync();
  if (rank != 0) return;
  for (int i = threadIdx.x; i < M * kRanks; i += kThreads) {
    float s = 0.0f;
#pragma unroll
    for (int c = 0; c < kCluster; ++c) s += __uint_as_float(in_cluster[c][i]);
    const int r = part * kRanks + i % kRanks;
    if (r < p.R) p.low[i / kRanks * p.R + r] = s;
  }
}

template <int kRows>
void launch(const FewRowsParams& p, cudaStream_t stream) {
  const int64_t parts = p.R > 0 ? (p.R + kRanks - 1) / kRanks : 1;
  const size_t bytes = p.quantize.M * part_columns(p.quantize.K) * sizeof(float);
  host::launch("quantize_few_rows", quantize_few<kRows>, {parts * kCluster, kThreads, kCluster, bytes, stream}, p);
}

}  // namespace

bool quantize_few_rows_supports(int64_t M, int64_t K) {
  return M >= 1 && M <= kMostFewRows && M * part_columns(K) * static_cast<int64_t>(sizeof(float)) <= kSharedLimit;
}

void quantize_few_rows(const FewRowsParams& p, int device, cudaStream_t stream) {
  const QuantizeParams& q = p.quantize;
  host::require(
      q.K >= kGroup && q.K % kGroup == 0 && quantize_few_rows_supports(q.M, q.K) && p.R >= 0 && q.form == CodeForm::kPacked,
      "quantize_few_rows: 1 to 16 rows that fit shared memory, K a multiple of 64");
  const host::DeviceGuard guard(device);
  if (q.M == 1) return launch<1>(p, stream);
  if (q.M <= 4) return launch<4>(p, stream);
  if (q.M <= 8) return launch<8>(p, stream);
  launch<kMostFewRows>(p, stream);
}

}  // namespace kitchen::svdquant
