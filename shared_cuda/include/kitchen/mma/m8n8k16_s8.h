// D[8, 8] += A[8, 16] * B[8, 16]^T, s8 x s8 -> s32, exact while the sums fit. One warp; sm_75 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-8816
//
//   g = lane / 4, t = lane % 4
//   A: row g, k 4t..4t+3 in one register     B: row (output column) g, k 4t..4t+3     D: row g, columns 2t, 2t+1
#pragma once

#include <cstdint>

namespace kitchen::mma {

__device__ __forceinline__ void m8n8k16_s8(int& d0, int& d1, uint32_t a, uint32_t b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+r"(d0), "+r"(d1)
      : "r"(a), "r"(b));
}

// The 16 x 8 x 32 product with the fragments of mma/m16n8k32_s8.h, as four of these.
struct M16N8K32S8Turing {
  using Accumulator = int;

  __device__ __forceinline__ static void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    m8n8k16_s8(d[0], d[1], a[0], b0);
    m8n8k16_s8(d[2], d[3], a[1], b0);
    m8n8k16_s8(d[0], d[1], a[2], b1);
    m8n8k16_s8(d[2], d[3], a[3], b1);
  }
};

}  // namespace kitchen::mma
