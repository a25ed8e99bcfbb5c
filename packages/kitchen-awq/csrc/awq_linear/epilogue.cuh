// The epilogue of every route of awq_linear, on fp32 sums: bias, residual, one rounding.
//
//   y = sum + bias[n];  y = fma(residual_scale[n], y, residual[m, n]) where there is a residual;  out[m, n] = round(y)
#pragma once

#include <cstring>

#include "kitchen/common/to_float.h"

namespace kitchen::awq {

struct EpilogueParams {
  const void *bias, *residual;  // may be nullptr
  const float* residual_scale;  // may be nullptr
  void* out;                    // may be the residual
  int residual_scale_stride;
  DType bias_type, residual_type, out_type;
  bool vectors;                 // N is a multiple of 4, and out and residual are aligned to 16 bytes: four columns lie together
};

__device__ __forceinline__ float with_residual(const EpilogueParams& p, int64_t at, int64_t n, float y) {
  const float scale = p.residual_scale == nullptr ? 1.0f : p.residual_scale[n * p.residual_scale_stride];
  return __fmaf_rn(scale, y, load_as_float(p.residual, at, p.residual_type));
}

__device__ __forceinline__ void store_one(const EpilogueParams& p, int64_t at, float y) {
  if (p.out_type == DType::kFloat32) static_cast<float*>(p.out)[at] = y;
  else if (p.out_type == DType::kFloat16) static_cast<__half*>(p.out)[at] = __float2half_rn(y);
  else static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(y);
}

// at = m * N + n
__device__ __forceinline__ void finish_one(const EpilogueParams& p, int64_t at, int64_t n, float y) {
  if (p.bias != nullptr) y += load_as_float(p.bias, n, p.bias_type);
  if (p.residual != nullptr) y = with_residual(p, at, n, y);
  store_one(p, at, y);
}

__device__ __forceinline__ uint2 packed_four(const float (&y)[4], DType type) {
  uint2 words;
  if (type == DType::kFloat16) {
    const __half2 pairs[2] = {__floats2half2_rn(y[0], y[1]), __floats2half2_rn(y[2], y[3])};
    memcpy(&words, pairs, sizeof(words));
  } else {
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(y[0], y[1]), __floats2bfloat162_rn(y[2], y[3])};
    memcpy(&words, pairs, sizeof(words));
  }
  return words;
}

// Four columns one by one, those from `left` on dropped: for rare residuals, and for rows without alignment.
__device__ __forceinline__ void finish_four_slowly(const EpilogueParams& p, int64_t at, int64_t n, int left, float y0,
                                                   float y1, float y2, float y3) {
#pragma unroll 1
  for (int e = 0; e < left && e < 4; ++e) {
    const float y = e == 0 ? y0 : e == 1 ? y1 : e == 2 ? y2 : y3;
    store_one(p, at + e, p.residual == nullptr ? y : with_residual(p, at + e, n + e, y));
  }
}

// Four neighbouring columns, those from `left` on dropped; the bias has been added.
__device__ __forceinline__ void finish_four(const EpilogueParams& p, int64_t at, int64_t n, int left, float (&y)[4]) {
  if (p.vectors && p.residual != nullptr && p.residual_scale == nullptr && p.residual_type == p.out_type && p.out_type != DType::kFloat32) {
    const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.residual) + at);
    float values[4];
    if (p.out_type == DType::kFloat16) Word<__half>::unpack(words.x, values), Word<__half>::unpack(words.y, values + 2);
    else Word<__nv_bfloat16>::unpack(words.x, values), Word<__nv_bfloat16>::unpack(words.y, values + 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] += values[e];
  } else if (p.residual != nullptr || !p.vectors) {
    return finish_four_slowly(p, at, n, left, y[0], y[1], y[2], y[3]);
  }
  if (p.out_type == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(y[0], y[1], y[2], y[3]);
  } else {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = packed_four(y, p.out_type);
  }
}

}  // namespace kitchen::awq
