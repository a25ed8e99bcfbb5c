// Asynchronous copies of 4 bytes, in the groups of ptx/cp_async_group.h. sm_80 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// Both addresses aligned to 4.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

}  // namespace kitchen::ptx
