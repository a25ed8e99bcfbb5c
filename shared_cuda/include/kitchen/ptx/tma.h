// Bulk tensor copies between global and shared memory (PTX ISA, "cp.async.bulk.tensor"), two dimensions.
//
// Coordinate x is the contiguous dimension. A box that hangs over the tensor's edge is zero-filled on load
// and clipped on store; loads report the bytes of the whole box to the barrier either way.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kitchen/ptx/mbarrier.h"

namespace kitchen::ptx {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(void* smem, const CUtensorMap* map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          smem_address(smem)),
      "l"(map), "r"(x), "r"(y), "r"(smem_address(barrier))
      : "memory");
}

// Writes the box to the same offset in every block of `mask`, and reports to the same barrier offset there.
__device__ __forceinline__ void tma_load_multicast(void* smem, const CUtensorMap* map, int x, int y,
                                                   uint64_t* barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(smem_address(smem)),
      "l"(map), "r"(x), "r"(y), "r"(smem_address(barrier)), "h"(mask)
      : "memory");
}

// The caller orders its shared-memory writes before this with fence_async_proxy and a barrier.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* smem, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
               "r"(y), "r"(smem_address(smem))
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most kPending of this thread's store groups have not yet read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace kitchen::ptx
