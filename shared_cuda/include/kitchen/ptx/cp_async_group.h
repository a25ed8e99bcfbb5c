// Asynchronous copies in groups, for a ring of shared-memory stages: sm_80 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "kitchen/ptx/cp_async_group.h: cp.async needs sm_80; earlier chips stage in registers (gemm/gemm_sm75.cuh)"
#endif

namespace kitchen::ptx {

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

// Until at most `pending` of this thread's latest groups are under way; the count is an immediate of the instruction. Counts
// above 6 wait for 6.
__device__ __forceinline__ void cp_async_wait_group(int pending) {
  switch (pending) {
    case 0: return cp_async_wait_group<0>();
    case 1: return cp_async_wait_group<1>();
    case 2: return cp_async_wait_group<2>();
    case 3: return cp_async_wait_group<3>();
    case 4: return cp_async_wait_group<4>();
    case 5: return cp_async_wait_group<5>();
    default: return cp_async_wait_group<6>();
  }
}

}  // namespace kitchen::ptx
