// What becomes of the sums: y = fma(float(acc) * a_scale[m], b_scale[n], bias[n]); y = fma(residual_scale[n], y,
// residual[m, n]); out = y rounded once (arithmetic.py: scale_and_bias, add_residual). A thread finishes 8 neighbouring
// columns, whose scales and biases it keeps in registers, of one row after another.
#pragma once

#include <cstdint>

#include "int8_scaled_mm/int8_scaled_mm.h"
#include "kitchen/common/from_float.h"
#include "kitchen/common/to_float.h"

namespace kitchen::volta {

constexpr int kColumns = 8;  // of a thread

struct ScaleEpilogue {
  const ScaledMmParams& p;
  int64_t column;  // the first of the thread's
  int left;        // columns of the matrix from it on
  float b_scale[kColumns], bias[kColumns], residual_scale[kColumns];

  __device__ __forceinline__ ScaleEpilogue(const ScaledMmParams& params, int64_t first_column)
      : p(params), column(first_column) {
    left = static_cast<int>(min(p.N - column, int64_t{kColumns}));
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      const int64_t n = min(column + e, p.N - 1);  // columns beyond N repeat the last one; they are not stored
      b_scale[e] = p.b_scale[n * p.b_scale_stride];
      // t * s + (-0) is t * s to the bit, signed zeros included.
      bias[e] = p.bias == nullptr ? -0.0f : load_as_float(p.bias, n, p.bias_type);
      residual_scale[e] = p.residual_scale == nullptr ? 1.0f : p.residual_scale[n * p.residual_scale_stride];
    }
  }

  __device__ __forceinline__ void store(int64_t row, float a_scale, const int (&acc)[kColumns]) const {
    if (row >= p.M || left <= 0) return;
    const int64_t at = row * p.N + column;
    float y[kColumns];
#pragma unroll
    for (int e = 0; e < kColumns; ++e) y[e] = __fmaf_rn(__fmul_rn(__int2float_rn(acc[e]), a_scale), b_scale[e], bias[e]);
    if (p.residual != nullptr) add_residual(at, y);
    p.out_type == DType::kFloat32 ? store_words(at, y) : store_halves(at, y);
  }

 private:
  __device__ __forceinline__ void add_residual(int64_t at, float (&y)[kColumns]) const {
    if (p.vectors && p.residual_type != DType::kFloat32) {
      const uint4 in = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.residual) + at);
      const uint32_t words[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float r[2];
        p.residual_type == DType::kFloat16 ? Word<__half>::unpack(words[i], r) : Word<__nv_bfloat16>::unpack(words[i], r);
        y[2 * i] = __fmaf_rn(residual_scale[2 * i], y[2 * i], r[0]);
        y[2 * i + 1] = __fmaf_rn(residual_scale[2 * i + 1], y[2 * i + 1], r[1]);
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      if (e < left) y[e] = __fmaf_rn(residual_scale[e], y[e], load_as_float(p.residual, at + e, p.residual_type));
    }
  }

  __device__ __forceinline__ void store_words(int64_t at, const float (&y)[kColumns]) const {
    float* const to = static_cast<float*>(p.out) + at;
    if (p.vectors) {
      reinterpret_cast<float4*>(to)[0] = make_float4(y[0], y[1], y[2], y[3]);
      reinterpret_cast<float4*>(to)[1] = make_float4(y[4], y[5], y[6], y[7]);
      return;
    }
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      if (e < left) to[e] = y[e];
    }
  }

  __device__ __forceinline__ void store_halves(int64_t at, const float (&y)[kColumns]) const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_rounded(y[2 * i], y[2 * i + 1], p.out_type);
    uint16_t* const to = static_cast<uint16_t*>(p.out) + at;
    if (p.vectors) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      return;
    }
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      if (e < left) to[e] = static_cast<uint16_t>(words[e / 2] >> (16 * (e % 2)));
    }
  }
};

}  // namespace kitchen::volta
