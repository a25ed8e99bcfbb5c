// D[16, 8] += A[16, 32] * B[8, 32]^T, s8 x s8 -> s32, exact while the sums fit. One warp; sm_80 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16832
//
//   g = lane / 4, t = lane % 4; a register of A or B holds 4 neighbouring k, the lowest in its low byte
//
//            k 4t..4t+3   k 16+4t..                     column 2t, 2t+1
//   row g      a[0]          a[2]              row g       d[0] d[1]         B: row (output column) g,
//   row g+8    a[1]          a[3]              row g+8     d[2] d[3]            b[0] = k 4t.., b[1] = k 16+4t..
#pragma once

#include <cstdint>

namespace kitchen::mma {

struct M16N8K32S8 {
  using Accumulator = int;

  __device__ __forceinline__ static void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // m16n8k32 does not exist before sm_80: mma/m8n8k16_s8.h does
    __trap();
#endif
  }

  // D = A * B^T + C: registers that hold C for many products need no copies.
  __device__ __forceinline__ static void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#else
    __trap();
#endif
  }
};

}  // namespace kitchen::mma
