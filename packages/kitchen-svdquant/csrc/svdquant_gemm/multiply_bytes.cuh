// Products of 4-bit codes by 8-bit mma.sync, straight from packed words.
#pragma once

#include <cstdint>

namespace kitchen::svdquant {

// One group of 16 rows and 8 tokens; `a` holds the weight's words, rows g and g + 8, `b` a token's. `Mma` has the fragments of mma/m16n8k32_s8.h.
template <class Mma>
struct ByBytes {
  uint32_t mask;
  int left, right;  // shifts of even and odd codes of a token's word
  float factor;     // what the products are too large by, inverted

  __device__ __forceinline__ explicit ByBytes(bool is_unsigned)
      : mask(is_unsigned ? 0x0f0f0f0fu : 0xf0f0f0f0u),
        left(is_unsigned ? 0 : 4),
        right(is_unsigned ? 4 : 0),
        factor(is_unsigned ? 0x1p-4f : 0x1p-8f) {}

  __device__ __forceinline__ void multiply(int (&d)[4], uint2 low, uint2 high, uint2 token) const {
    constexpr uint32_t kTop = 0xf0f0f0f0u;
    const uint32_t first[4] = {low.x << 4 & kTop, high.x << 4 & kTop, low.x & kTop, high.x & kTop};
    Mma::multiply(d, first, token.x << left & mask, token.x >> right & mask);
    const uint32_t second[4] = {low.y << 4 & kTop, high.y << 4 & kTop, low.y & kTop, high.y & kTop};
    Mma::multiply(d, second, token.y << left & mask, token.y >> right & mask);
  }
};

}  // namespace kitchen::svdquant
