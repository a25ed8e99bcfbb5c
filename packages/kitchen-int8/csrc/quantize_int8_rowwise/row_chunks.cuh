// Any row: any K, alignment, stride, rotation group up to 4096 and stochastic rounding, at the price of reading x twice (the
// second time mostly from L2) where a chunk does not hold the row, and of butterflies in shared memory. One CTA a row, eight
// columns a thread at a time; the loads of a chunk are all under way while the chunk before is worked on.
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

constexpr int kChunkValues = 8;         // columns of a thread and chunk
constexpr int kMaxChunkThreads = 1024;  // a chunk is then 8192 columns

struct ChunkShared {
  uint32_t warp_max[kMaxChunkThreads / 32];
  float warp_sum[kMaxChunkThreads / 32];
};

// A thread's columns as they were loaded. Wide: eight neighbours, of a 2-byte type two to a word; else one to a word, blockDim.x
// columns apart. Converted only when they are needed: a conversion would wait for its load.
struct ChunkPart {
  uint32_t first[kChunkValues], second[kChunkValues];  // second: the other half of a pair
};

__device__ inline int chunk_columns() { return kChunkValues * static_cast<int>(blockDim.x); }

// Where the thread's column i lies in a chunk.
__device__ __forceinline__ int place_in_chunk(int i, bool wide) {
  return static_cast<int>(wide ? kChunkValues * threadIdx.x + i : threadIdx.x + i * blockDim.x);
}

__device__ inline bool loads_wide(const QuantizeParams& p) {
  const auto is_aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };  // also nullptr
  return p.K % kChunkValues == 0 && is_aligned(p.x) && p.x_row_stride % kChunkValues == 0 && is_aligned(p.act_weight);
}

// index: of the thread's first column in `data`; `left` the number of columns from there to the chunk's end. Plain loads, not
// __ldg (row_registers.cuh: load_tiles).
__device__ __forceinline__ void load_part(uint32_t (&bits)[kChunkValues], const void* data, int64_t index, int left, DType dtype,
                                          bool wide) {
  if (wide) {
    if (left <= 0) return;
    const bool fp32 = dtype == DType::kFloat32;
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(data) + index * (fp32 ? 4 : 2));
    const uint4 low = from[0];
    bits[0] = low.x, bits[1] = low.y, bits[2] = low.z, bits[3] = low.w;
    if (fp32) {
      const uint4 high = from[1];
      bits[4] = high.x, bits[5] = high.y, bits[6] = high.z, bits[7] = high.w;
    }
    return;
  }
  const int step = static_cast<int>(blockDim.x);
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      if (i * step < left) bits[i] = static_cast<const uint32_t*>(data)[index + i * step];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      if (i * step < left) bits[i] = static_cast<const uint16_t*>(data)[index + i * step];
    }
  }
}

__device__ __forceinline__ float part_value(const uint32_t (&bits)[kChunkValues], int i, DType dtype, bool wide) {
  if (dtype == DType::kFloat32) return __uint_as_float(bits[i]);
  const uint32_t half = wide ? bits[i / 2] >> (16 * (i % 2)) & 0xffffu : bits[i];
  if (dtype == DType::kFloat16) return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
  return __uint_as_float(half << 16);
}

// From the thread's first column to the end of the chunk that starts at column `first`.
__device__ __forceinline__ int columns_left(const QuantizeParams& p, int first, bool wide) {
  return min(chunk_columns(), p.K - first) - place_in_chunk(0, wide);
}

__device__ __forceinline__ void load_chunk(ChunkPart& part, const QuantizeParams& p, int64_t row, int first, bool wide) {
  const int64_t index = row * p.x_row_stride + first + place_in_chunk(0, wide);
  const int left = columns_left(p, first, wide);
  load_part(part.first, p.x, index, left, p.dtype, wide);
  if (quant::is_pair(p.act)) load_part(part.second, p.x, index + p.K, left, p.dtype, wide);
}

// Whether the thread's column i exists.
__device__ __forceinline__ bool holds(int i, int left, bool wide) {
  return wide ? left > 0 : i * static_cast<int>(blockDim.x) < left;
}

// rsqrt(mean(x^2) + eps) of the row.
__device__ inline float rms_factor(const QuantizeParams& p, int64_t row, bool wide, ChunkShared& shared) {
  float sum = 0.0f;
  for (int first = 0; first < p.K; first += chunk_columns()) {
    ChunkPart part;
    load_chunk(part, p, row, first, wide);
    const int left = columns_left(p, first, wide);
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      const float x = part_value(part.first, i, p.dtype, wide);
      if (holds(i, left, wide)) sum = __fmaf_rn(x, x, sum);
    }
  }
  for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if ((threadIdx.x & 31) == 0) shared.warp_sum[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += shared.warp_sum[warp];
  __syncthreads();
  return rsqrtf(sum / static_cast<float>(p.K) + p.act_eps);
}

// Columns from `first` on after activation and rotation, from `part` into `values`; then `part` is what starts at `next`, if
// that is less than K.
__device__ __forceinline__ void prepare_chunk(ChunkPart& part, const QuantizeParams& p, int64_t row, int first, int next, bool wide,
                                              float rms, float* values) {
  const int left = columns_left(p, first, wide);
  if (p.act == quant::InputAct::kRmsNorm)
    load_part(part.second, p.act_weight, first + place_in_chunk(0, wide), left, p.act_weight_dtype, wide);
#pragma unroll
  for (int i = 0; i < kChunkValues; ++i) {
    if (!holds(i, left, wide)) continue;
    const float x = part_value(part.first, i, p.dtype, wide);
    values[place_in_chunk(i, wide)] =
        p.act == quant::InputAct::kRmsNorm
            ? x * rms * part_value(part.second, i, p.act_weight_dtype, wide)
            : quant::apply(p.act, x, quant::is_pair(p.act) ? part_value(part.second, i, p.dtype, wide) : 0.0f);
  }
  if (next < p.K) load_chunk(part, p, row, next, wide);
  __syncthreads();
  const int count = min(chunk_columns(), p.K - first);
  for (int stride = 1; stride < p.group; stride *= 4) {
    for (int i = threadIdx.x; i < count / 4; i += blockDim.x) {
      float* v = values + (i / stride) * 4 * stride + i % stride;
      quant::butterfly(v[0], v[stride], v[2 * stride], v[3 * stride]);
    }
    __syncthreads();
  }
}

__device__ __forceinline__ float chunk_max(float absmax, const float* values, int count) {
#pragma unroll
  for (int i = 0; i < kChunkValues; ++i) {
    const int place = place_in_chunk(i, false);
    if (place < count) absmax = ptx::abs_max_nan(absmax, values[place]);
  }
  return absmax;
}

// Dynamic shared memory: chunk_columns() floats.
__global__ void __launch_bounds__(kMaxChunkThreads) quantize_row_chunks(const QuantizeParams p) {
  extern __shared__ float4 chunk_memory[];
  __shared__ ChunkShared shared;
  float* const values = reinterpret_cast<float*>(chunk_memory);
  ptx::wait_then_launch_dependents();
  const int64_t row = blockIdx.x;
  const bool wide = loads_wide(p);
  const int columns = chunk_columns();
  const float rms = p.act == quant::InputAct::kRmsNorm ? rms_factor(p, row, wide, shared) : 0.0f;

  ChunkPart part;
  load_chunk(part, p, row, 0, wide);
  float largest = 0.0f;
  for (int first = 0; first < p.K; first += columns) {
    const bool last = first + columns >= p.K;  // behind it, the second reading starts
    prepare_chunk(part, p, row, first, !last ? first + columns : first > 0 ? 0 : p.K, wide, rms, values);
    largest = chunk_max(largest, values, min(columns, p.K - first));
    __syncthreads();
  }
  uint32_t absmax = ptx::warp_max(__float_as_uint(largest));
  if ((threadIdx.x & 31) == 0) shared.warp_max[threadIdx.x / 32] = absmax;
  __syncthreads();
  for (int warp = 0; warp < blockDim.x / 32; ++warp) absmax = max(absmax, shared.warp_max[warp]);
  const quant::RowScale scale = quant::row_scale(absmax);
  if (threadIdx.x == 0) p.scales[row] = scale.scale;

  const int bytes = p.row_bytes;
  int8_t* const codes = p.codes + row * bytes;
  for (int first = 0; first < p.K; first += columns) {
    if (p.K > columns) prepare_chunk(part, p, row, first, first + columns, wide, rms, values);  // else the row is still there
    const int count = min(columns, p.K - first);
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      const int place = place_in_chunk(i, false);
      if (place >= count) break;
      const uint64_t element = static_cast<uint64_t>(row) * p.K + first + place;
      codes[ordered_code(first + place, p.order)] = quant::code(values[place], scale, element, p.seed);
    }
    __syncthreads();
  }
  for (int k = p.K + threadIdx.x; k < bytes; k += blockDim.x) codes[ordered_code(k, p.order)] = 0;
}

}  // namespace kitchen::int8
