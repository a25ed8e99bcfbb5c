// Loads from the shared memory of a block of the cluster. sm_90 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mapa
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "kitchen/ptx/load_cluster.h uses clusters: compile for sm_90 or later"
#endif

namespace kitchen::ptx {

// 16 bytes from where `local` lies in this block, but in block `rank`; aligned to 16.
__device__ __forceinline__ int4 load_cluster_16(const void* local, uint32_t rank) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  int4 value;
  asm volatile(
      "{\n\t.reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %4, %5;\n\t"
      "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [remote];\n\t}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
}

}  // namespace kitchen::ptx
