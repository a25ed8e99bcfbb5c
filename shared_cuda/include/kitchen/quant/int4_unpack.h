// 4-bit codes, two to a byte with the even column low, to one byte each: four neighbouring codes (16 bits) to a word, the first
// in its lowest byte. By byte selection from tables of eight: the low three bits of a code are the selector, the fourth
// decides between two tables. sm_75 and later.
#pragma once

#include <cstdint>

#include "kitchen/ptx/math.h"

namespace kitchen::quant {

// Sixteen bytes, by code: words of the codes 0-3, 4-7, 8-11, 12-15.
struct CodeTable {
  uint32_t low, high, low_8, high_8;
};

// The code as an e4m3 number: 0, 1 = 0x38, 2 = 0x40, then 8 steps an octave; -8 = 0xd0.
constexpr CodeTable kSignedE4m3 = {0x44403800u, 0x4e4c4a48u, 0xcaccced0u, 0xb8c0c4c8u};
constexpr CodeTable kUnsignedE4m3 = {0x44403800u, 0x4e4c4a48u, 0x53525150u, 0x57565554u};

// `mask_selector`: bit 3 of each code of `codes`, moved to bit 0 of its nibble.
__device__ __forceinline__ uint32_t decode_4(uint32_t codes, uint32_t mask_selector, const CodeTable& table) {
  const uint32_t selector = codes & 0x7777u;
  const uint32_t low = ptx::pick_bytes(table.low, table.high, selector),
                 high = ptx::pick_bytes(table.low_8, table.high_8, selector);
  const uint32_t mask = ptx::pick_bytes(0x0000ff00u, 0, mask_selector);
  return (low & ~mask) | (high & mask);
}

// Eight codes.
__device__ __forceinline__ uint2 decode_8(uint32_t word, const CodeTable& table) {
  const uint32_t high_bits = (word >> 3) & 0x11111111u;
  return make_uint2(decode_4(word, high_bits & 0xffffu, table), decode_4(word >> 16, high_bits >> 16, table));
}

}  // namespace kitchen::quant
