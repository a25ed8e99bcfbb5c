// Single instructions on two fp16 numbers in a word that CUDA C++ does not spell for every chip.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-fma
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace kitchen::ptx {

// max(a * b + c, 0), rounded once. One instruction from sm_80 on; before, an FMA and a maximum.
__device__ __forceinline__ uint32_t fma_relu_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
#if __CUDA_ARCH__ >= 800
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  d &= ~((d >> 15 & 0x00010001u) * 0xffffu);  // a half whose sign is set
#endif
  return d;
}

// The high half of a word in both halves, on the pipe of fp16 arithmetic instead of the one of logic. Neither half may be an fp16
// inf or NaN: x + (-0) is x to the bit for every other, subnormals included.
__device__ __forceinline__ uint32_t repeat_high_half(uint32_t word) {
  const __half2 zeros = __halves2half2(__ushort_as_half(0x8000), __ushort_as_half(0x8000));
  const __half2 high = __hadd2_rn(__high2half2(reinterpret_cast<const __half2&>(word)), zeros);
  return reinterpret_cast<const uint32_t&>(high);
}

}  // namespace kitchen::ptx
