// Warpgroup matrix multiply with int8 A in registers (PTX ISA, "wgmma"): D[64 x N] (+)= A[64 x 32] * B[N x 32]^T, s8 x s8 ->
// s32, exact while the sums fit. B in shared memory with k contiguous (descriptor_swizzle128 of wgmma.h), D in registers.
// sm_90a only.
//
//   d[4*j + e] of lane l in warp w:  row 16*w + l/4 + 8*(e/2),  column 8*j + 2*(l%4) + e%2
//   a[i] of lane l in warp w:        row 16*w + l/4 + 8*(i%2),  k 4*(l%4) .. + 3, 16 more for i >= 2
//
// Registers of a must stay as they are until wgmma_wait says that the group is done.
#pragma once

#include <cstdint>

#include "kitchen/ptx/wgmma.h"

namespace kitchen::ptx {

// WgmmaS8Registers<N>::mma(d, a, b, accumulate): one instruction; accumulate == 0 overwrites d.
template <int kN>
struct WgmmaS8Registers;

// Operand lists. PTX names operands by number: KITCHEN_TEN(12) is %120 to %129.
#define KITCHEN_TEN(t) \
  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define KITCHEN_NUMBERS_16 KITCHEN_TEN() "%10,%11,%12,%13,%14,%15"
#define KITCHEN_NUMBERS_32 KITCHEN_TEN() KITCHEN_TEN(1) KITCHEN_TEN(2) "%30,%31"
#define KITCHEN_60 KITCHEN_TEN() KITCHEN_TEN(1) KITCHEN_TEN(2) KITCHEN_TEN(3) KITCHEN_TEN(4) KITCHEN_TEN(5)
#define KITCHEN_NUMBERS_64 KITCHEN_60 "%60,%61,%62,%63"
#define KITCHEN_NUMBERS_80 KITCHEN_60 KITCHEN_TEN(6) "%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define KITCHEN_NUMBERS_96 KITCHEN_60 KITCHEN_TEN(6) KITCHEN_TEN(7) KITCHEN_TEN(8) "%90,%91,%92,%93,%94,%95"
#define KITCHEN_NUMBERS_128                                                                             \
  KITCHEN_60 KITCHEN_TEN(6) KITCHEN_TEN(7) KITCHEN_TEN(8) KITCHEN_TEN(9) KITCHEN_TEN(10) KITCHEN_TEN(11) \
      "%120,%121,%122,%123,%124,%125,%126,%127"
#define KITCHEN_D4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define KITCHEN_D16(i) KITCHEN_D4(i), KITCHEN_D4(i + 4), KITCHEN_D4(i + 8), KITCHEN_D4(i + 12)
#define KITCHEN_D32(i) KITCHEN_D16(i), KITCHEN_D16(i + 16)
#define KITCHEN_D64(i) KITCHEN_D32(i), KITCHEN_D32(i + 32)

// N, operand numbers of a, of b and of the predicate, operand numbers of d, operands of d.
#define KITCHEN_WGMMA_S8_REGISTERS(n, a0, a1, a2, a3, b_at, p_at, numbers, ...)                                              \
  template <>                                                                                                               \
  struct WgmmaS8Registers<n> {                                                                                              \
    static __device__ __forceinline__ void mma(int (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at ", 0;\n"                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" numbers "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 \
                   "}, %" #b_at ", p;\n}"                                                                                   \
                   : __VA_ARGS__                                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                  \
    }                                                                                                                       \
  };

KITCHEN_WGMMA_S8_REGISTERS(32, 16, 17, 18, 19, 20, 21, KITCHEN_NUMBERS_16, KITCHEN_D16(0))
KITCHEN_WGMMA_S8_REGISTERS(64, 32, 33, 34, 35, 36, 37, KITCHEN_NUMBERS_32, KITCHEN_D32(0))
KITCHEN_WGMMA_S8_REGISTERS(128, 64, 65, 66, 67, 68, 69, KITCHEN_NUMBERS_64, KITCHEN_D64(0))
KITCHEN_WGMMA_S8_REGISTERS(160, 80, 81, 82, 83, 84, 85, KITCHEN_NUMBERS_80, KITCHEN_D64(0), KITCHEN_D16(64))
KITCHEN_WGMMA_S8_REGISTERS(192, 96, 97, 98, 99, 100, 101, KITCHEN_NUMBERS_96, KITCHEN_D64(0), KITCHEN_D32(64))
KITCHEN_WGMMA_S8_REGISTERS(256, 128, 129, 130, 131, 132, 133, KITCHEN_NUMBERS_128, KITCHEN_D64(0), KITCHEN_D64(64))

#undef KITCHEN_WGMMA_S8_REGISTERS
#undef KITCHEN_D64
#undef KITCHEN_D32
#undef KITCHEN_D16
#undef KITCHEN_D4
#undef KITCHEN_NUMBERS_128
#undef KITCHEN_NUMBERS_96
#undef KITCHEN_NUMBERS_80
#undef KITCHEN_NUMBERS_64
#undef KITCHEN_60
#undef KITCHEN_NUMBERS_32
#undef KITCHEN_NUMBERS_16
#undef KITCHEN_TEN

}  // namespace kitchen::ptx
