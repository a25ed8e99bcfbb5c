// Stores to shared memory, and loads, by its 32-bit address (PTX ISA, "st" and "ld").
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// Two floats; the address is a multiple of 8.
__device__ __forceinline__ void store_shared(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ float2 load_shared(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
  return pair;
}

}  // namespace kitchen::ptx
