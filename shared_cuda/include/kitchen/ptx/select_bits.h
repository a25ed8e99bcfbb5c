// One lop3 that takes bits from either of two words.
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// Bits of `a` where `mask` is set, else of `b`. https://docs.nvidia.com/cuda/parallel-thread-execution/#lop3
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}

}  // namespace kitchen::ptx
