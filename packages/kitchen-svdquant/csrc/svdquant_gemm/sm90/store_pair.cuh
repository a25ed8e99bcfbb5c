// What the kernels of mma.sync for Hopper share: the end of a sum, of two neighbouring columns, and the parts of low-rank factors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kitchen/common/to_float.h"
#include "svdquant_gemm/stream_operands.h"

namespace kitchen::svdquant {

// Two neighbouring columns of a token: bias, residual, one rounding.
__device__ __forceinline__ void store_pair(const StreamOperands& o, float2 sum, float2 bias, int64_t m, int64_t n) {
  if (n >= o.N) return;
  const bool both = n + 1 < o.N;
  const int64_t at = m * o.N + n;
  float y[2] = {__fadd_rn(sum.x, bias.x), __fadd_rn(sum.y, bias.y)};
  if (o.residual != nullptr) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (e == 1 && !both) continue;
      const float scale = o.residual_scale == nullptr ? 1.0f : o.residual_scale[(n + e) * o.residual_scale_stride];
      y[e] = __fmaf_rn(scale, y[e], load_as_float(o.residual, at + e, o.out_type));
    }
  }
  if (o.out_type == DType::kFloat32) {
    float* const to = static_cast<float*>(o.out) + at;
    to[0] = y[0];
    if (both) to[1] = y[1];
    return;
  }
  const auto bits = [&](float value) {
    return o.out_type == DType::kFloat16 ? __half_as_ushort(__float2half_rn(value))
                                         : __bfloat16_as_ushort(__float2bfloat16_rn(value));
  };
  uint16_t* const to = static_cast<uint16_t*>(o.out) + at;
  if (both && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = bits(y[0]) | static_cast<uint32_t>(bits(y[1])) << 16;
    return;
  }
  to[0] = bits(y[0]);
  if (both) to[1] = bits(y[1]);
}

// Of two neighbouring columns; -0 where there is none: adding it changes nothing.
__device__ __forceinline__ float2 bias_of(const StreamOperands& o, int n) {
  const auto at = [&](int column) {
    return o.bias == nullptr || column >= o.N ? -0.0f : load_as_float(o.bias, column, o.bias_type);
  };
  return make_float2(at(n), at(n + 1));
}

// Two neighbouring ranks as bfloat16 pairs: the value, and what its rounding leaves.
struct Ranks {
  uint32_t high, low;
};

__device__ __forceinline__ Ranks split(float first, float second) {
  const __nv_bfloat162 high = __floats2bfloat162_rn(first, second);
  const __nv_bfloat162 low =
      __floats2bfloat162_rn(first - __low2float(high), second - __high2float(high));
  return {reinterpret_cast<const uint32_t&>(high), reinterpret_cast<const uint32_t&>(low)};
}

}  // namespace kitchen::svdquant
