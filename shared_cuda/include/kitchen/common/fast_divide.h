// Division of a 31-bit number by a divisor that is known at launch: one high multiplication and a shift.
//
// With 2^(s-1) < d <= 2^s and m = floor(2^(31+s) / d) + 1, m fits 32 bits and floor(n / d) = floor(n m / 2^(31+s)) for all
// n < 2^31: m d - 2^(31+s) is from 1 to d <= 2^s, so n m / 2^(31+s) exceeds n / d by less than 1 / d. (Granlund and
// Montgomery, "Division by invariant integers using multiplication", 1994.)
#pragma once

#include <cstdint>

namespace kitchen {

struct FastDivide {
  uint32_t divisor, multiplier, shift;

  // divisor: 1 to 2^31 - 1.
  __host__ static FastDivide by(uint32_t divisor) {
    uint32_t bits = 0;
    while ((uint64_t{1} << bits) < divisor) ++bits;
    if (bits == 0) return {divisor, 0, 0};
    return {divisor, static_cast<uint32_t>((uint64_t{1} << (31 + bits)) / divisor + 1), bits - 1};
  }
  // n: below 2^31.
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return divisor == 1 ? n : __umulhi(n, multiplier) >> shift; }
};

}  // namespace kitchen
