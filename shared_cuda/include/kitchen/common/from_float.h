// fp32 to the 16 bits of a half type, rounded to nearest, ties to even; a NaN stays one. By integer operations where a chip
// has no conversion (bfloat16 before sm_80).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen {

__device__ __forceinline__ uint32_t half_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }

__device__ __forceinline__ uint32_t bfloat16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// Two values as they lie in memory, `low` at the lower address.
__device__ __forceinline__ uint32_t pack_rounded(float low, float high, DType type) {
  return type == DType::kFloat16 ? half_bits(low) | half_bits(high) << 16 : bfloat16_bits(low) | bfloat16_bits(high) << 16;
}

}  // namespace kitchen
