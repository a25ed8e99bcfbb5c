// Any row: any K, alignment, stride, rotation group up to 4096 and stochastic rounding, at the price of reading x twice (the
// second time mostly from L2) and of butterflies in shared memory. One CTA a row, 4096 columns at a time.
#pragma once

#include "kitchen/common/to_float.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/math.h"
#include "kitchen/quant/apply_input_act.h"
#include "kitchen/quant/hadamard.h"
#include "kitchen/quant/int8_codes.h"
#include "quantize_int8_rowwise/code_order.cuh"
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

namespace kitchen::int8 {

constexpr int kChunkColumns = 4096;  // a multiple of every rotation group
constexpr int kChunkThreads = 256;

struct ChunkShared {
  float values[kChunkColumns];
  uint32_t warp_max[kChunkThreads / 32];
  float warp_sum[kChunkThreads / 32];
};

// rsqrt(mean(x^2) + eps) of the row.
__device__ inline float rms_factor(const QuantizeParams& p, int64_t row, ChunkShared& shared) {
  float sum = 0.0f;
  for (int k = threadIdx.x; k < p.K; k += kChunkThreads) {
    const float x = load_as_float(p.x, row * p.x_row_stride + k, p.dtype);
    sum = __fmaf_rn(x, x, sum);
  }
  for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if ((threadIdx.x & 31) == 0) shared.warp_sum[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int warp = 0; warp < kChunkThreads / 32; ++warp) sum += shared.warp_sum[warp];
  __syncthreads();
  return rsqrtf(sum / static_cast<float>(p.K) + p.act_eps);
}

// Columns first .. first + count - 1 after activation and rotation, into shared.values.
__device__ inline void prepare_chunk(const QuantizeParams& p, int64_t row, int first, int count, float rms, ChunkShared& shared) {
  for (int i = threadIdx.x; i < count; i += kChunkThreads) {
    const int64_t index = row * p.x_row_stride + first + i;
    const float x = load_as_float(p.x, index, p.dtype);
    const float other = quant::is_pair(p.act) ? load_as_float(p.x, index + p.K, p.dtype) : 0.0f;
    shared.values[i] = p.act == quant::InputAct::kRmsNorm
                           ? x * rms * load_as_float(p.act_weight, first + i, p.act_weight_dtype)
                           : quant::apply(p.act, x, other);
  }
  __syncthreads();
  for (int stride = 1; stride < p.group; stride *= 4) {
    for (int i = threadIdx.x; i < count / 4; i += kChunkThreads) {
      float* v = shared.values + (i / stride) * 4 * stride + i % stride;
      quant::butterfly(v[0], v[stride], v[2 * stride], v[3 * stride]);
    }
    __syncthreads();
  }
}

__device__ inline uint32_t chunk_max(const ChunkShared& shared, int count) {
  float absmax = 0.0f;
  for (int i = threadIdx.x; i < count; i += kChunkThreads) absmax = ptx::abs_max_nan(absmax, shared.values[i]);
  return __float_as_uint(absmax);
}

__global__ void __launch_bounds__(kChunkThreads) quantize_row_chunks(const QuantizeParams p) {
  __shared__ ChunkShared shared;
  ptx::wait_then_launch_dependents();
  const int64_t row = blockIdx.x;
  const float rms = p.act == quant::InputAct::kRmsNorm ? rms_factor(p, row, shared) : 0.0f;

  uint32_t absmax = 0;
  for (int first = 0; first < p.K; first += kChunkColumns) {
    const int count = min(kChunkColumns, p.K - first);
    prepare_chunk(p, row, first, count, rms, shared);
    absmax = max(absmax, chunk_max(shared, count));
    __syncthreads();
  }
  absmax = ptx::warp_max(absmax);
  if ((threadIdx.x & 31) == 0) shared.warp_max[threadIdx.x / 32] = absmax;
  __syncthreads();
  for (int warp = 0; warp < kChunkThreads / 32; ++warp) absmax = max(absmax, shared.warp_max[warp]);
  const quant::RowScale scale = quant::row_scale(absmax);
  if (threadIdx.x == 0) p.scales[row] = scale.scale;

  const int bytes = p.row_bytes;
  int8_t* const codes = p.codes + row * bytes;
  for (int first = 0; first < p.K; first += kChunkColumns) {
    const int count = min(kChunkColumns, p.K - first);
    if (p.K > kChunkColumns) prepare_chunk(p, row, first, count, rms, shared);  // else the row is still there
    for (int i = threadIdx.x; i < count; i += kChunkThreads) {
      const uint64_t element = static_cast<uint64_t>(row) * p.K + first + i;
      codes[ordered_code(first + i, p.order)] = quant::code(shared.values[i], scale, element, p.seed);
    }
    __syncthreads();
  }
  for (int k = p.K + threadIdx.x; k < bytes; k += kChunkThreads) codes[ordered_code(k, p.order)] = 0;
}

}  // namespace kitchen::int8
