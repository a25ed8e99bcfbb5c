// Warpgroup matrix multiply with A in registers (PTX ISA, "wgmma"): D[64 x N] += A[64 x 16] * B[N x 16]^T, A of bfloat16 or float16
// in the registers of 4 warps, B in shared memory with k contiguous ("K-major", descriptor_swizzle128 of wgmma.h), D in float32
// registers. sm_90a only.
//
//   d[4*j + e] of lane l in warp w:  row 16*w + l/4 + 8*(e/2),  column 8*j + 2*(l%4) + e%2
//   a[i] of lane l in warp w:        row 16*w + l/4 + 8*(i%2),  k 2*(l%4) and the next, 8 more for i >= 2
//
// Registers of a must stay as they are until wgmma_wait says that the group is done.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kitchen/ptx/wgmma.h"

namespace kitchen::ptx {

// WgmmaRegisters<T, N>::mma(d, a, b): one instruction.
template <class T, int kN>
struct WgmmaRegisters;

// Operand lists. PTX names operands by number: KITCHEN_TEN(12) is %120 to %129.
#define KITCHEN_TEN(t) \
  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define KITCHEN_NUMBERS_4 "%0,%1,%2,%3"
#define KITCHEN_NUMBERS_8 KITCHEN_NUMBERS_4 ",%4,%5,%6,%7"
#define KITCHEN_NUMBERS_12 KITCHEN_TEN() "%10,%11"
#define KITCHEN_NUMBERS_16 KITCHEN_TEN() "%10,%11,%12,%13,%14,%15"
#define KITCHEN_NUMBERS_24 KITCHEN_TEN() KITCHEN_TEN(1) "%20,%21,%22,%23"
#define KITCHEN_NUMBERS_32 KITCHEN_TEN() KITCHEN_TEN(1) KITCHEN_TEN(2) "%30,%31"
#define KITCHEN_60 KITCHEN_TEN() KITCHEN_TEN(1) KITCHEN_TEN(2) KITCHEN_TEN(3) KITCHEN_TEN(4) KITCHEN_TEN(5)
#define KITCHEN_NUMBERS_64 KITCHEN_60 "%60,%61,%62,%63"
#define KITCHEN_NUMBERS_128                                                                             \
  KITCHEN_60 KITCHEN_TEN(6) KITCHEN_TEN(7) KITCHEN_TEN(8) KITCHEN_TEN(9) KITCHEN_TEN(10) KITCHEN_TEN(11) \
      "%120,%121,%122,%123,%124,%125,%126,%127"
#define KITCHEN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KITCHEN_D8(i) KITCHEN_D4(i), KITCHEN_D4(i + 4)
#define KITCHEN_D16(i) KITCHEN_D8(i), KITCHEN_D8(i + 8)
#define KITCHEN_D32(i) KITCHEN_D16(i), KITCHEN_D16(i + 16)
#define KITCHEN_D64(i) KITCHEN_D32(i), KITCHEN_D32(i + 32)

// C++ and PTX name of the type, N, operand numbers of a and of b, operand numbers of d, operands of d.
#define KITCHEN_WGMMA_REGISTERS(type, name, n, a0, a1, a2, a3, b_at, numbers, ...)                                             \
  template <>                                                                                                                  \
  struct WgmmaRegisters<type, n> {                                                                                             \
    static __device__ __forceinline__ void mma(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b) {                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name " {" numbers "}, {%" #a0 ",%" #a1 ",%" #a2  \
                   ",%" #a3 "}, %" #b_at ", p, 1, 1, 0;\n}"                                                                    \
                   : __VA_ARGS__                                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                      \
    }                                                                                                                          \
  };
#define KITCHEN_WGMMA_BOTH(...)                               \
  KITCHEN_WGMMA_REGISTERS(__nv_bfloat16, "bf16", __VA_ARGS__) \
  KITCHEN_WGMMA_REGISTERS(__half, "f16", __VA_ARGS__)

KITCHEN_WGMMA_BOTH(8, 4, 5, 6, 7, 8, KITCHEN_NUMBERS_4, KITCHEN_D4(0))
KITCHEN_WGMMA_BOTH(16, 8, 9, 10, 11, 12, KITCHEN_NUMBERS_8, KITCHEN_D8(0))
KITCHEN_WGMMA_BOTH(24, 12, 13, 14, 15, 16, KITCHEN_NUMBERS_12, KITCHEN_D8(0), KITCHEN_D4(8))
KITCHEN_WGMMA_BOTH(32, 16, 17, 18, 19, 20, KITCHEN_NUMBERS_16, KITCHEN_D16(0))
KITCHEN_WGMMA_BOTH(48, 24, 25, 26, 27, 28, KITCHEN_NUMBERS_24, KITCHEN_D16(0), KITCHEN_D8(16))
KITCHEN_WGMMA_BOTH(64, 32, 33, 34, 35, 36, KITCHEN_NUMBERS_32, KITCHEN_D32(0))
KITCHEN_WGMMA_BOTH(128, 64, 65, 66, 67, 68, KITCHEN_NUMBERS_64, KITCHEN_D64(0))
KITCHEN_WGMMA_BOTH(256, 128, 129, 130, 131, 132, KITCHEN_NUMBERS_128, KITCHEN_D64(0), KITCHEN_D64(64))

#undef KITCHEN_WGMMA_BOTH
#undef KITCHEN_WGMMA_REGISTERS
#undef KITCHEN_D64
#undef KITCHEN_D32
#undef KITCHEN_D16
#undef KITCHEN_D8
#undef KITCHEN_D4
#undef KITCHEN_NUMBERS_128
#undef KITCHEN_NUMBERS_64
#undef KITCHEN_60
#undef KITCHEN_NUMBERS_32
#undef KITCHEN_NUMBERS_24
#undef KITCHEN_NUMBERS_16
#undef KITCHEN_NUMBERS_12
#undef KITCHEN_NUMBERS_8
#undef KITCHEN_NUMBERS_4
#undef KITCHEN_TEN

}  // namespace kitchen::ptx
