// A barrier among some warps of a block (PTX ISA, "bar.sync"). Number 0 is __syncthreads.
#pragma once

namespace kitchen::ptx {

// kThreads: of all warps that meet here, a multiple of 32.
template <int kNumber, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  static_assert(kNumber >= 1 && kNumber <= 15 && kThreads % 32 == 0, "there are 16 barriers, and whole warps meet");
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

}  // namespace kitchen::ptx
