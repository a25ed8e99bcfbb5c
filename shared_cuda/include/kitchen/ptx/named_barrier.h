// A barrier among some warps of a block (PTX ISA, "bar.sync"). Number 0 is __syncthreads.
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// kThreads: of all warps that meet here, a multiple of 32.
template <int kNumber, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  static_assert(kNumber >= 1 && kNumber <= 15 && kThreads % 32 == 0, "there are 16 barriers, and whole warps meet");
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// For warps that need not wait for the others.
template <int kNumber, int kThreads>
__device__ __forceinline__ void named_barrier_arrive() {
  static_assert(kNumber >= 1 && kNumber <= 15 && kThreads % 32 == 0, "there are 16 barriers, and whole warps meet");
  asm volatile("bar.arrive %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// A barrier that all wait at, and whether `found` was true in any of the threads.
__device__ __forceinline__ bool named_barrier_any(int barrier, int threads, bool found) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.cta.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any) : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(found)) : "memory");
  return any != 0;
}

}  // namespace kitchen::ptx
