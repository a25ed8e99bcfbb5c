// Four 8x8 matrices of 16-bit elements (8 rows of 16 bytes) from shared memory to MMA fragments. sm_75 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
//
//   lane l gives the address of row l%8 of matrix l/8
//   register i of lane l holds bytes 4*(l%4) .. +3 of row l/4 of matrix i
#pragma once

#include <cstdint>

namespace kitchen::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// Each matrix transposed on its way: register i of lane l holds elements (2*(l%4), l/4) and (2*(l%4)+1, l/4), of 16 bits, of matrix i,
// row by column.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// Two matrices, whose rows are named by lanes 0 to 15.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t smem_row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(smem_row_address) : "memory");
}

}  // namespace kitchen::ptx
