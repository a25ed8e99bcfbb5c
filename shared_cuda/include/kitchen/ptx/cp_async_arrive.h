// Reports small asynchronous copies (ptx/cp_async_small.h, ptx/cp_async_group.h) to a barrier of ptx/mbarrier.h. sm_90 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive
#pragma once

#include <cstdint>

#include "kitchen/ptx/mbarrier.h"

namespace kitchen::ptx {

// Arrives when all copies that this thread has started before have landed. The barrier was made with one arrival for each such thread.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

}  // namespace kitchen::ptx
