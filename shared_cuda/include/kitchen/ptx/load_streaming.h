// Loads of 16 bytes that are used once: read-only, past L1. sm_75 and later.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld-global-nc
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// 16 aligned bytes, or zeros where `valid` is false: nothing is read then, and the address may be anything. The order of these
// loads is the order of the source, so that several are under way before the first result is needed.
__device__ __forceinline__ uint4 load_streaming_16_or_zeros(const void* global, bool valid) {
  uint4 words;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "setp.ne.b32 p, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
      : "l"(global), "r"(static_cast<int>(valid)));
  return words;
}

// The same of 8 bytes and of one, kept in L1: neighbouring ones may follow.
__device__ __forceinline__ uint2 load_readonly_8_or_zeros(const void* global, bool valid) {
  uint2 words;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
      "@p ld.global.nc.v2.u32 {%0, %1}, [%2];\n\t}"
      : "=&r"(words.x), "=&r"(words.y)
      : "l"(global), "r"(static_cast<int>(valid)));
  return words;
}
__device__ __forceinline__ uint32_t load_readonly_1_or_zeros(const void* global, bool valid) {
  uint32_t word;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t@p ld.global.nc.u8 %0, [%1];\n\t}"
               : "=&r"(word)
               : "l"(global), "r"(static_cast<int>(valid)));
  return word;
}

}  // namespace kitchen::ptx
