// Single instructions on fp32 and on warps that CUDA C++ does not spell, or spells with fast-math.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// 2^x, at most 2 ulp off; results below 2^-126 become 0. sm_75 and later.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1/x, at most 1 ulp off; 1/inf is 0 and results below 2^-126 become 0. sm_75 and later.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max(acc, |x|) for acc >= 0 or NaN; any NaN makes the result a NaN for good. As bits, the result of several of these
// is the integer maximum of the absolute bit patterns, up to which NaN it is.
__device__ __forceinline__ float abs_max_nan(float acc, float x) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(acc), "f"(fabsf(x)));
  return y;
#else  // no max.NaN before sm_80: the integer maximum itself
  const uint32_t a = __float_as_uint(acc), b = __float_as_uint(x) & 0x7fffffffu;
  return __uint_as_float(a > b ? a : b);
#endif
}

// Maximum over the 32 lanes of a full warp, in every lane. redux.sync from sm_80 on.
__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  for (int lanes = 16; lanes > 0; lanes >>= 1) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, lanes);
    x = other > x ? other : x;
  }
  return x;
#endif
}

// Bytes picked from {high:low} by four nibbles of `selector`. https://docs.nvidia.com/cuda/parallel-thread-execution/#prmt
__device__ __forceinline__ uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

}  // namespace kitchen::ptx
