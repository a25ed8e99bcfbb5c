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

}  // namespace kitchen::ptx
