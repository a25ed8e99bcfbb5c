// Copies of contiguous bytes from global to shared memory by the copy engine, reported to a barrier (PTX ISA, "cp.async.bulk").
#pragma once

#include <cstdint>

#include "kitchen/ptx/mbarrier.h"

namespace kitchen::ptx {

// Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}

}  // namespace kitchen::ptx
