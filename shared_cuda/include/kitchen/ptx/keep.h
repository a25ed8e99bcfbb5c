// Hides from the compiler where a value came from: it keeps the value in a register instead of making it again where it is used.
#pragma once

#include <cstdint>

namespace kitchen::ptx {

__device__ __forceinline__ void keep(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }

}  // namespace kitchen::ptx
