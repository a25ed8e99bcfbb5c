// A warp turns an 8 x 8 matrix of 16-bit numbers (PTX ISA, "movmatrix"). sm_75 and later.
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// Lane l holds row l/4, columns 2(l%4) and the next, the first in the lower half; and afterwards column l/4, rows 2(l%4) and the next.
__device__ __forceinline__ uint32_t movmatrix_transposed(uint32_t pair) {
  uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

}  // namespace kitchen::ptx
