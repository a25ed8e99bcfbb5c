// Shared-memory barriers that count arrivals and bytes (PTX ISA, "mbarrier").
//
// A barrier alternates between two phases. A waiter names the parity of the phase that it waits to see
// completed: a fresh barrier is in phase 0, so waiting for parity 1 returns at once.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "kitchen/ptx/mbarrier.h uses transaction barriers: compile for sm_90 or later"
#endif

namespace kitchen::ptx {

// 32-bit shared-space address of a generic pointer into shared memory.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives on the barrier at the same offset in block `rank` of the cluster (one's own rank is allowed).
// NOTE: orders nothing beyond this block: enough to hand back memory that only asynchronous units touched and that
// the caller has waited for. Spelling out .release.cluster costs a MEMBAR.GPU each time (nvcc 13.0).
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// One arrival that also announces `bytes` of copies; the phase ends when both counts are met.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    // try_wait sleeps for a hardware time slice: no backoff is needed in the loop.
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
  }
}

}  // namespace kitchen::ptx
