// Bit instructions as they are: CUDA C++'s __byte_perm masks its selector first, and an AND and an OR with two constants become
// two instructions.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prmt
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// Four bytes picked from {high:low} by the nibbles in bits 0..15 of `selector`, which must be 0..7 (from 8 on a nibble repeats
// the byte's sign). Higher bits are ignored.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
  return d;
}

// (a & mask) | bits
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

}  // namespace kitchen::ptx
