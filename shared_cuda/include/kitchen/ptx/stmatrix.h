// Four 8x8 matrices of 16-bit elements from MMA fragments to shared memory (PTX ISA, "stmatrix").
//
//   register i of lane l holds row l/4, columns 2*(l%4) and 2*(l%4)+1 of matrix i
//   lane l gives the address of row l%8 (16 bytes) of matrix l/8; transposed: of column l%8
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "kitchen/ptx/stmatrix.h: compile for sm_90 or later"
#endif

namespace kitchen::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

// Each matrix transposed on its way.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace kitchen::ptx
