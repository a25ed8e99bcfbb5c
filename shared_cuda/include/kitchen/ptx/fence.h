// Ordering between threads, blocks of a cluster, and the asynchronous units (PTX ISA, "fence.proxy",
// "barrier.cluster").
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "kitchen/ptx/fence.h uses clusters and the async proxy: compile for sm_90 or later"
#endif

namespace kitchen::ptx {

// Makes this thread's shared-memory writes visible to the copy engine and the tensor cores; a barrier among
// the writing threads has to follow.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// cluster.h's cluster_sync for warps that may have diverged.
__device__ __forceinline__ void cluster_sync_diverged() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A meeting of the cluster that orders no memory: to outlive what others still read here. Releasing costs a MEMBAR.GPU, which
// waits for every store of the thread.
__device__ __forceinline__ void cluster_meet_diverged() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

}  // namespace kitchen::ptx
