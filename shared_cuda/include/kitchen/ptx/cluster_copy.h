// Bulk copies from a block's shared memory to that of another block of its cluster, reported to a barrier there.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
#pragma once

#include <cstdint>

#include "kitchen/ptx/mbarrier.h"

namespace kitchen::ptx {

// `bytes` (a multiple of 16) from `source` of this block to where `target` lies in this block, but in block `rank`; both aligned to
// 16. What threads wrote to the source is ordered before by fence_async_proxy and a barrier; this block must not end before the
// bytes have arrived.
__device__ __forceinline__ void copy_to_cluster(const void* target, const void* source, uint32_t bytes, const uint64_t* barrier,
                                                uint32_t rank) {
  asm volatile(
      "{\n\t.reg .b32 remote, done;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %4;\n\t"
      "mapa.shared::cluster.u32 done, %3, %4;\n\t"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote], [%1], %2, [done];\n\t}" ::"r"(
          smem_address(target)),
      "r"(smem_address(source)), "r"(bytes), "r"(smem_address(barrier)), "r"(rank)
      : "memory");
}

}  // namespace kitchen::ptx
