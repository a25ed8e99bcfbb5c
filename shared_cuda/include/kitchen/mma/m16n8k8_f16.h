// D[16, 8] += A[16, 8] * B[8, 8]^T, float16, sums in float32. One warp; sm_75 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-1688
//
//   g = lane / 4, t = lane % 4
//   A: a0 row g, a1 row g + 8, k 2t and 2t + 1     B: row (output column) g, k 2t and 2t + 1     D: as in m16n8k16_f16.h
#pragma once

#include <cstdint>

namespace kitchen::mma {

__device__ __forceinline__ void m16n8k8_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// The product of mma/m16n8k16_f16.h for float16, with its fragments, as two of these.
struct M16N8K16Turing {
  using Accumulator = float;

  __device__ __forceinline__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    m16n8k8_f16(d, a[0], a[1], b0);
    m16n8k8_f16(d, a[2], a[3], b1);
  }
};

}  // namespace kitchen::mma
