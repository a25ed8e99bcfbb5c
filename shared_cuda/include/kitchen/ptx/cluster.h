// Thread-block clusters: rank, barrier, and stores into a neighbour's shared memory. sm_90 and later; earlier chips trap,
// and a launcher never asks for a cluster there.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
#pragma once

#include <cstdint>

namespace kitchen::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
}

// Writes `value` to the word of CTA `rank` that lies where `local` lies in this CTA. Visible there after the next
// cluster_sync of both.
__device__ __forceinline__ void store_in_cluster(uint32_t* local, uint32_t rank, uint32_t value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  asm volatile(
      "{\n\t.reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "st.shared::cluster.u32 [remote], %2;\n\t}" ::"r"(address),
      "r"(rank), "r"(value)
      : "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

// Two halves of a barrier over all threads of the cluster: release what was written before, acquire what others wrote.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace kitchen::ptx
