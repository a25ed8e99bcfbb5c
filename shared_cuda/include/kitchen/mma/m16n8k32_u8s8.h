// D[16, 8] += A[16, 32] * B[8, 32]^T with unsigned A: u8 x s8 -> s32, exact while the sums fit. One warp; sm_80 and later.
// Fragments as in mma/m16n8k32_s8.h.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16832
#pragma once

#include <cstdint>

namespace kitchen::mma {

struct M16N8K32U8S8 {
  using Accumulator = int;

  __device__ __forceinline__ static void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // m16n8k32 does not exist before sm_80
    __trap();
#endif
  }
};

}  // namespace kitchen::mma
