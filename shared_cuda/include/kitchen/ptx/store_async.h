// Stores into the shared memory of a block of the cluster that report their bytes to a barrier there: no fence and no barrier
// of the cluster. sm_90 and later; earlier chips trap, and a launcher never asks for a cluster there.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// One arrival, no bytes yet; the other blocks see it after receive_fence and a barrier of the cluster.
__device__ __forceinline__ void receive_init(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(address) : "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

// The one arrival: the barrier's first phase ends when so many bytes have come.
__device__ __forceinline__ void receive_expect(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

// Until all bytes of the first phase have come; they are visible then.
__device__ __forceinline__ void receive_wait(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(address)
        : "memory");
  }
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

// 16 bytes to where `local` lies in this block, but in block `rank`; reported to `barrier` there. `local` is aligned to 16.
__device__ __forceinline__ void store_async_16(void* local, uint64_t* barrier, uint32_t rank, int4 value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{\n\t.reg .b32 remote, done;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %2;\n\t"
      "mapa.shared::cluster.u32 done, %1, %2;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote], {%3, %4, %5, %6}, [done];\n\t}" ::"r"(address),
      "r"(at), "r"(rank), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

// Where `local` lies, in block `rank` of the cluster: an address for the store below, and for offsets from there.
__device__ __forceinline__ uint32_t address_in_cluster(const void* local, uint32_t rank) {
  uint32_t remote = 0;
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#else
  __trap();  // clusters need compute capability 9.0
#endif
  return remote;
}

// store_async_16 to addresses that are known already.
__device__ __forceinline__ void store_async_16(uint32_t remote, uint32_t barrier, int4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(remote),
      "r"(barrier), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

// cluster_arrive of cluster.h that orders no memory: enough to say that this block has started. cluster_wait ends it.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

}  // namespace kitchen::ptx
