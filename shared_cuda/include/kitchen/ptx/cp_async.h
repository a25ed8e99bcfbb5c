// Copies of 16 bytes from global to shared memory that bypass registers and L1. sm_80 and later; before, a plain load and
// store with the same meaning and no overlap.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// Both pointers aligned to 16 bytes. Visible to this thread after cp_async_wait_all, to others after a barrier besides.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

// Until every cp_async_16 of this thread has landed.
__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace kitchen::ptx
