// What becomes of a sum: y = fma(float(acc) * a_scale[m], b_scale[n], bias[n]); y = fma(residual_scale[n], y, residual[m, n]);
// out = y rounded once. The arithmetic of arithmetic.py: scale_and_bias, add_residual.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "kitchen/common/to_float.h"
#include "w4a8_scaled_mm/w4a8_scaled_mm.h"

namespace kitchen::w4a8 {

struct EpilogueParams {
  const float *a_scale, *b_scale;
  const void *bias, *residual;
  const float* residual_scale;
  void* out;
  int M, N, residual_scale_stride;
  DType bias_type, out_type;
  bool vectors;  // N is a multiple of 8, out and residual are aligned to 16 bytes
};

inline EpilogueParams epilogue_params(const ScaledMmParams& p) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  return {p.a_scale,
          p.b_scale,
          p.bias,
          p.residual,
          p.residual_scale,
          p.out,
          static_cast<int>(p.M),
          static_cast<int>(p.N),
          p.residual_scale_stride,
          p.bias_type,
          p.out_type,
          p.N % 8 == 0 && aligned(p.out) && aligned(p.residual)};
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, DType type) {
  uint32_t word;
  if (type == DType::kFloat16) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

// t * s + (-0) is t * s to the bit, signed zeros included: what stands for a bias that is absent.
__device__ __forceinline__ float bias_of(const EpilogueParams& p, int n) {
  return p.bias == nullptr ? -0.0f : load_as_float(p.bias, n, p.bias_type);
}

__device__ __forceinline__ float scale(int acc, float a_scale, float b_scale, float bias) {
  return __fmaf_rn(__fmul_rn(__int2float_rn(acc), a_scale), b_scale, bias);
}

__device__ __forceinline__ void unpack_pair(uint32_t word, DType type, float* values) {
  type == DType::kFloat16 ? Word<__half>::unpack(word, values) : Word<__nv_bfloat16>::unpack(word, values);
}

// Four neighbouring columns of a row, those beyond N dropped.
__device__ __forceinline__ void finish_four(const EpilogueParams& p, int m, int n, float (&y)[4]) {
  if (n >= p.N) return;
  const int64_t at = static_cast<int64_t>(m) * p.N + n;
  const int left = p.N - n;
  if (p.residual != nullptr) {
    float values[4] = {};
    if (p.vectors && p.out_type != DType::kFloat32) {
      const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.residual) + at);
      unpack_pair(words.x, p.out_type, values), unpack_pair(words.y, p.out_type, values + 2);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = e < left ? load_as_float(p.residual, at + e, p.out_type) : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t column = min(n + e, p.N - 1);
      const float gate = p.residual_scale == nullptr ? 1.0f : p.residual_scale[column * p.residual_scale_stride];
      y[e] = __fmaf_rn(gate, y[e], values[e]);
    }
  }
  if (p.out_type == DType::kFloat32) {
    float* const to = static_cast<float*>(p.out) + at;
    if (p.vectors) {
      *reinterpret_cast<float4*>(to) = make_float4(y[0], y[1], y[2], y[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < left) to[e] = y[e];
      }
    }
    return;
  }
  const uint2 words = make_uint2(pack_pair(y[0], y[1], p.out_type), pack_pair(y[2], y[3], p.out_type));
  uint16_t* const to = static_cast<uint16_t*>(p.out) + at;
  if (p.vectors) {
    *reinterpret_cast<uint2*>(to) = words;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < left) to[e] = static_cast<uint16_t>((e < 2 ? words.x : words.y) >> (16 * (e % 2)));
  }
}

}  // namespace kitchen::w4a8
