// Barriers of the kernel for very few rows: among the warps that multiply, and in another block of the cluster (PTX ISA, "bar.sync",
// "mbarrier.arrive").
#pragma once

#include <cstdint>

namespace kitchen::awq {

// Among warps of so many threads in all.
__device__ __forceinline__ void meet_consumers(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// One arrival on the barrier that lies where `local` lies, but in block `rank` of the cluster. sm_90 and later.
__device__ __forceinline__ void arrive_in_cluster(uint64_t* local, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  asm volatile(
      "{\n\t.reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n\t}" ::"r"(address),
      "r"(rank)
      : "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

}  // namespace kitchen::awq
