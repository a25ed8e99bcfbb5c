// Clamping two 16-bit integers in a word.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace kitchen::ptx {

// min(max(a + b, 0), most) of either half: one instruction from sm_90 on. The halves of `a` are the bits of finite fp16 numbers of
// at least 0, whose order is that of their bits, and so are those of -b and of most - b: on sm_80, which compares integers one by
// one (10 more instructions), fp16's minimum and maximum clamp. sm_75 has neither.
__device__ __forceinline__ uint32_t add_clamp_pair(uint32_t a, uint32_t b, uint32_t most) {
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
  const uint32_t least = __vneg2(b), last = most + least;
  const __half2 clamped = __hmin2(__hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(least)),
                                  reinterpret_cast<const __half2&>(last));
  return reinterpret_cast<const uint32_t&>(clamped) - least;
#else
  return __viaddmin_s16x2_relu(a, b, most);
#endif
}

}  // namespace kitchen::ptx
