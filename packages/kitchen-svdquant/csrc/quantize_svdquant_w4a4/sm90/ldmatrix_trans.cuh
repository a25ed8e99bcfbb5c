// ptx/ldmatrix.h's four 8x8 matrices, transposed: register i of lane l holds elements (2*(l%4), l/4) and (2*(l%4)+1, l/4) of
// matrix i, row by column.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
#pragma once

#include <cstdint>

namespace kitchen::svdquant {

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

}  // namespace kitchen::svdquant
