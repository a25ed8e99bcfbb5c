// Rowwise INT8 quantizer with an activation and a ConvRot rotation in front, for chips without cp.async and clusters: a
// block a row.
//
// A thread holds 16 values. A rotation's strides 1 and 4 join neighbours in registers; for strides 16 and 64 the values
// change places through shared memory so that a thread holds 16 of them 16 apart, and for 256 and 1024 once more, 256
// apart. Up to 16384 columns the row stays in registers and x is read once (rms_norm: twice); beyond, it is read and
// rotated again for the codes. All maths is fp32 and is that of kitchen_core/arithmetic.py, to the bit where no activation
// is in front.
#pragma once

#include "kitchen/common/to_float.h"
#include "kitchen/ptx/math.h"
#include "kitchen/quant/apply_input_act.h"
#include "kitchen/quant/hadamard.h"
#include "kitchen/quant/int8_codes.h"
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

namespace kitchen::volta {

constexpr int kExchangeRow = kThreadColumns + 1;  // words: threads then store and load without meeting a bank twice

// A thread's 16 values: columns first, first + stride, ... of the chunk.
struct RowPart {
  float v[kThreadColumns];
  int first, stride;
};

struct RowReader {
  const QuantizeParams& p;
  int64_t row;
  float rms;  // rsqrt(mean(x^2) + eps), for rms_norm

  __device__ __forceinline__ void read(int column, int64_t offset, float (&v)[kThreadColumns]) const {
    const int64_t at = row * p.x_row_stride + offset + column;
    if (p.vectors && column < p.K) {
      const int words_of = p.dtype == DType::kFloat32 ? 4 : 2;  // 16-byte loads
      const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.x) + at * size_of(p.dtype));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= words_of) break;
        const uint4 in = from[i];
        const uint32_t words[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if (p.dtype == DType::kFloat32) {
            v[4 * i + w] = __uint_as_float(words[w]);
          } else if (i < 2) {
            p.dtype == DType::kFloat16 ? Word<__half>::unpack(words[w], v + 8 * i + 2 * w)
                                       : Word<__nv_bfloat16>::unpack(words[w], v + 8 * i + 2 * w);
          }
        }
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < kThreadColumns; ++e) v[e] = column + e < p.K ? load_as_float(p.x, at + e, p.dtype) : 0.0f;
  }

  // 16 neighbouring columns after the activation; zeros beyond K.
  __device__ __forceinline__ void activated(int column, float (&v)[kThreadColumns]) const {
    read(column, 0, v);
    if (p.act == quant::InputAct::kNone) return;
    float other[kThreadColumns] = {};
    if (quant::is_pair(p.act)) read(column, p.K, other);
#pragma unroll
    for (int e = 0; e < kThreadColumns; ++e) {
      if (p.act != quant::InputAct::kRmsNorm) {
        v[e] = quant::apply(p.act, v[e], other[e]);
      } else if (column + e < p.K) {
        v[e] = v[e] * rms * load_as_float(p.act_weight, column + e, p.act_weight_dtype);
      }
    }
  }
};

// Over all threads of the block, in every thread. `words` is shared memory for one word a warp.
template <class T, class Join>
__device__ __forceinline__ T join_block(T mine, T* words, Join join) {
  for (int lanes = 16; lanes > 0; lanes >>= 1) mine = join(mine, __shfl_xor_sync(0xffffffffu, mine, lanes));
  __syncthreads();  // an earlier use of `words` is over
  if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = mine;
  __syncthreads();
  T all = words[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) all = join(all, words[warp]);
  return all;
}

__device__ __forceinline__ float rms_of(const RowReader& reader, float* words) {
  float sum = 0.0f;
  for (int64_t column = threadIdx.x * kThreadColumns; column < reader.p.K; column += blockDim.x * kThreadColumns) {
    float v[kThreadColumns];
    reader.read(static_cast<int>(column), 0, v);
#pragma unroll
    for (int e = 0; e < kThreadColumns; ++e) sum = __fmaf_rn(v[e], v[e], sum);
  }
  sum = join_block(sum, words, [](float a, float b) { return a + b; });
  return rsqrtf(sum / static_cast<float>(reader.p.K) + reader.p.act_eps);
}

// Values to other threads: afterwards a thread holds every `stride`th column of a block of 16 * stride.
__device__ __forceinline__ void exchange(RowPart& part, float* shared, int stride) {
  __syncthreads();  // an earlier exchange is over
#pragma unroll
  for (int e = 0; e < kThreadColumns; ++e) {
    const int column = part.first + e * part.stride;
    shared[column / kThreadColumns * kExchangeRow + column % kThreadColumns] = part.v[e];
  }
  __syncthreads();
  part.first = static_cast<int>(threadIdx.x) / stride * 16 * stride + static_cast<int>(threadIdx.x) % stride;
  part.stride = stride;
#pragma unroll
  for (int e = 0; e < kThreadColumns; ++e) {
    const int column = part.first + e * part.stride;
    part.v[e] = shared[column / kThreadColumns * kExchangeRow + column % kThreadColumns];
  }
}

// One chunk of the row, activated and rotated.
__device__ __forceinline__ RowPart rotated(const RowReader& reader, int chunk_first, float* shared) {
  RowPart part;
  part.first = static_cast<int>(threadIdx.x) * kThreadColumns;
  part.stride = 1;
  reader.activated(chunk_first + part.first, part.v);
  const int group = reader.p.group;
  for (int stride = 1; stride < group; stride *= 16) {
    if (stride > 1) exchange(part, shared, stride);
    quant::butterflies<1>(part.v);
    if (4 * stride < group) quant::butterflies<4>(part.v);
  }
  return part;
}

// Codes of 16 values to bytes [first, first + 16 * stride) of the row; those beyond K are dropped.
__device__ __forceinline__ void store_codes(const QuantizeParams& p, int64_t row, int chunk_first, const RowPart& part,
                                            const quant::RowScale& scale, uint8_t* shared) {
  uint32_t words[4];
  if (p.seed == 0) {
    quant::pack_codes(part.v, scale, words);
  } else {
#pragma unroll
    for (int e = 0; e < kThreadColumns; ++e) {
      const uint64_t element = static_cast<uint64_t>(row) * p.K + chunk_first + part.first + e * part.stride;
      const uint32_t code = static_cast<uint8_t>(quant::code(part.v[e], scale, element, p.seed));
      words[e / 4] = e % 4 == 0 ? code : words[e / 4] | code << (8 * (e % 4));
    }
  }
  if (part.stride > 1) {  // back to neighbouring columns
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kThreadColumns; ++e) {
      shared[part.first + e * part.stride] = static_cast<uint8_t>(words[e / 4] >> (8 * (e % 4)));
    }
    __syncthreads();
    const uint4 mine = reinterpret_cast<const uint4*>(shared)[threadIdx.x];
    words[0] = mine.x, words[1] = mine.y, words[2] = mine.z, words[3] = mine.w;
  }
  const int column = chunk_first + static_cast<int>(threadIdx.x) * kThreadColumns;
  int8_t* const to = p.codes + row * p.K + column;
  if (p.vectors) {
    if (column < p.K) *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < kThreadColumns; ++e) {
    if (column + e < p.K) to[e] = static_cast<int8_t>(words[e / 4] >> (8 * (e % 4)));
  }
}

__device__ __forceinline__ void quantize_row(const QuantizeParams& p) {
  extern __shared__ __align__(16) uint8_t exchange_bytes[];
  __shared__ uint32_t words[kMaxQuantizeThreads / 32];
  float* const shared = reinterpret_cast<float*>(exchange_bytes);
  RowReader reader = {p, blockIdx.x, 0.0f};
  if (p.act == quant::InputAct::kRmsNorm) reader.rms = rms_of(reader, reinterpret_cast<float*>(words));

  const int chunk = static_cast<int>(blockDim.x) * kThreadColumns;  // a multiple of the group
  RowPart part;
  float absmax = 0.0f;
  for (int first = 0; first < p.K; first += chunk) {
    part = rotated(reader, first, shared);
#pragma unroll
    for (int e = 0; e < kThreadColumns; ++e) absmax = ptx::abs_max_nan(absmax, part.v[e]);
  }
  const uint32_t bits = join_block(__float_as_uint(absmax), words, [](uint32_t a, uint32_t b) { return max(a, b); });
  const quant::RowScale scale = quant::row_scale(bits);
  if (threadIdx.x == 0) p.scales[reader.row] = scale.scale;

  for (int first = 0; first < p.K; first += chunk) {
    if (p.K > chunk) part = rotated(reader, first, shared);  // else it is still there
    store_codes(p, reader.row, first, part, scale, exchange_bytes);
  }
}

}  // namespace kitchen::volta
