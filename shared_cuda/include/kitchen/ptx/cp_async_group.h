// Asynchronous copies in groups, for a ring of shared-memory stages: sm_80 and later. Earlier chips may include this, for skeletons that
// have other kernels too, and call nothing of it: ptxas refuses the instructions. They stage in registers (gemm/gemm_sm75.cuh).
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// 16 bytes, both addresses aligned to 16.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The first `bytes` (0..16) of 16 bytes from global memory, the rest zeros. Both addresses aligned to 16; with 0 bytes nothing
// is read, and the global address may be anything.
__device__ __forceinline__ void cp_async_16_or_zeros(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Closes this thread's group of copies; it may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Until at most `pending` of this thread's latest groups are under way; the count is an immediate of the instruction, so rare
// counts wait for fewer. A chain with the usual counts first: a jump table costs more in a main loop.
__device__ __forceinline__ void cp_async_wait_group(int pending) {
  if (pending == 2) return cp_async_wait_group<2>();
  if (pending == 1) return cp_async_wait_group<1>();
  if (pending >= 6) return cp_async_wait_group<6>();
  if (pending >= 4) return cp_async_wait_group<4>();
  if (pending == 3) return cp_async_wait_group<3>();
  return cp_async_wait_group<0>();
}

}  // namespace kitchen::ptx
