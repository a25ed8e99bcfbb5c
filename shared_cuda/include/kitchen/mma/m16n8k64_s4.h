// D[16, 8] += A[16, 64] * B[8, 64]^T, 4-bit integers -> s32, exact while the sums fit. A signed, B signed or not. One warp; sm_80
// and later, slow on sm_90 (emulated), absent from sm_100 on.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16864
//
//   g = lane / 4, t = lane % 4; a register of A or B holds 8 neighbouring k, the lowest in its lowest 4 bits
//
//            k 8t..8t+7   k 32+8t..                     column 2t, 2t+1
//   row g      a[0]          a[2]              row g       d[0] d[1]         B: row (output column) g,
//   row g+8    a[1]          a[3]              row g+8     d[2] d[3]            b[0] = k 8t.., b[1] = k 32+8t..
#pragma once

#include <cstdint>

namespace kitchen::mma {

template <bool kUnsignedB>
struct M16N8K64S4 {
  using Accumulator = int;

  __device__ __forceinline__ static void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1000)
    if constexpr (kUnsignedB) {
      asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.u4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#else
    __trap();  // 4-bit MMA exists on sm_80 to sm_90: elsewhere the codes are multiplied as 8-bit integers
#endif
  }
};

}  // namespace kitchen::mma
