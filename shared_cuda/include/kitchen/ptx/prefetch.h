// Hints that bring global memory closer (PTX ISA, "prefetch").
#pragma once

namespace kitchen::ptx {

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace kitchen::ptx
