// Two fp32 values as two of a half type in one word, `low` at the lower address, each rounded to nearest; by the chip's own
// conversions (from_float.h has them by integers, for chips without).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "kitchen/common/dtype.h"

namespace kitchen {

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

}  // namespace kitchen
