// D[16, 16] += A[16, 16] * B[16, 16]^T, f16 x f16 -> f32, by the warp-wide wmma instructions: any GPU from sm_70 on.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-for-mma
//
// Which lane holds what is the compiler's business and differs between chips; a fragment is loaded, multiplied and stored
// by these functions alone. Both operands lie in shared memory with K contiguous: 16 rows of A or of B, `pitch` elements
// apart. Rows must be aligned to 16 bytes.
//
// What sm_70 makes of it (read from its machine code; it decides which pitches are free of bank conflicts):
//   HMMA.884.F32.F32, 16 a multiplication; two LDS.128 a fragment, for k 0..7 and k 8..15
//   A: lane l reads row l%4 + 8*(l/4%2) + 4*(l/16)      B: lane l reads row l%4 + 8*(l/8%2) + 4*(l/16)
// so 8 neighbouring lanes read 8 rows of A, of which r and r+8 lie in the same banks at any legal pitch, and 4 rows of B.
#pragma once

#include <cstdint>

namespace kitchen::mma {

struct WmmaF16 {
  struct Operand {
    uint32_t x[8];
  };
  struct Accumulator {
    float x[8];
  };

  // `address` in shared memory.
  __device__ __forceinline__ static void load_a(Operand& a, uint32_t address, int pitch) {
    asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                 : "=r"(a.x[0]), "=r"(a.x[1]), "=r"(a.x[2]), "=r"(a.x[3]), "=r"(a.x[4]), "=r"(a.x[5]), "=r"(a.x[6]),
                   "=r"(a.x[7])
                 : "r"(address), "r"(pitch)
                 : "memory");
  }

  __device__ __forceinline__ static void load_b(Operand& b, uint32_t address, int pitch) {
    asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                 : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3]), "=r"(b.x[4]), "=r"(b.x[5]), "=r"(b.x[6]),
                   "=r"(b.x[7])
                 : "r"(address), "r"(pitch)
                 : "memory");
  }

  __device__ __forceinline__ static void multiply(Accumulator& d, const Operand& a, const Operand& b) {
    asm("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(d.x[0]), "+f"(d.x[1]), "+f"(d.x[2]), "+f"(d.x[3]), "+f"(d.x[4]), "+f"(d.x[5]), "+f"(d.x[6]), "+f"(d.x[7])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), "r"(a.x[6]), "r"(a.x[7]), "r"(b.x[0]),
          "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(b.x[4]), "r"(b.x[5]), "r"(b.x[6]), "r"(b.x[7]));
  }

  // The 16 x 16 words to shared memory, rows of D `pitch` words apart. Bits pass through: integers may travel as floats.
  __device__ __forceinline__ static void store(uint32_t address, const Accumulator& d, int pitch) {
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;"
                 :
                 : "r"(address), "f"(d.x[0]), "f"(d.x[1]), "f"(d.x[2]), "f"(d.x[3]), "f"(d.x[4]), "f"(d.x[5]), "f"(d.x[6]),
                   "f"(d.x[7]), "r"(pitch)
                 : "memory");
  }
};

}  // namespace kitchen::mma
