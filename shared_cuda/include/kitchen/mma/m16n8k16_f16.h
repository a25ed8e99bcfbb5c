// D[16, 8] += A[16, 16] * B[8, 16]^T, bfloat16 or float16, sums in float32. One warp; sm_80 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-fragment-mma-16816-float
//
//   g = lane / 4, t = lane % 4; a register of A or B holds 2 neighbouring k, the lowest in its low half
//
//            k 2t, 2t+1   k 8+2t..                      column 2t, 2t+1
//   row g      a[0]          a[2]              row g       d[0] d[1]         B: row (output column) g,
//   row g+8    a[1]          a[3]              row g+8     d[2] d[3]            b0 = k 2t.., b1 = k 8+2t..
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kitchen::mma {

template <class T>
struct M16N8K16;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define KITCHEN_M16N8K16(name)                                                                                            \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "        \
      "{%0, %1, %2, %3};"                                                                                                 \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#else  // m16n8k16 does not exist before sm_80
#define KITCHEN_M16N8K16(name) __trap()
#endif

template <>
struct M16N8K16<__nv_bfloat16> {
  using Accumulator = float;
  __device__ __forceinline__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    KITCHEN_M16N8K16("bf16");
  }
};

template <>
struct M16N8K16<__half> {
  using Accumulator = float;
  __device__ __forceinline__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    KITCHEN_M16N8K16("f16");
  }
};

#undef KITCHEN_M16N8K16

}  // namespace kitchen::mma
