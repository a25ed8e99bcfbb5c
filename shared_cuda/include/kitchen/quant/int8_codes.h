// Symmetric INT8: scale of a row, codes of its values, the generator of stochastic rounding (arithmetic.py says the same).
//
//   scale = max(absmax / 127, 1e-30)      IEEE division
//   code  = rne(x / scale)                IEEE division, ties to even; at most 127 in size, as absmax / scale rounds to 127
//   code  = clamp(floor(x / scale + u))   stochastic rounding
//   a row with an inf or a NaN: scale NaN, codes 0
//
// Neither division is done as such, because a row shares its divisor; both give the codes of IEEE division:
// - absmax / 127 is a multiplication by the reciprocal and one residual step (Markstein), checked on a CPU for every fp32
//   number by tools/prove_int8_division.cpp;
// - x / scale is bracketed: with reciprocals a little too small and a little too large, the rounded products lie on either
//   side of the IEEE quotient, so where both round to one integer it is the code. Where they differ (about once in 10^5
//   values) the row part is computed again with one residual step, which the same program checks for every mantissa of the
//   scale at every tie. The bracket costs 3 instructions a value, the residual step 4, a division about 10.
#pragma once

#include <cstdint>

#include "kitchen/ptx/math.h"

namespace kitchen::quant {

constexpr float kInt8ScaleFloor = 1e-30f;

struct RowScale {
  float scale;      // multiply codes by it; NaN for a row with an inf or a NaN
  float low, high;  // x * low and x * high enclose x / scale
  bool finite;
};

// absmax / 127, correctly rounded wherever the result is at least the floor.
__device__ __forceinline__ float divide_by_127(float absmax) {
  constexpr float kReciprocal = 1.0f / 127.0f;
  const float guess = __fmul_rn(absmax, kReciprocal);
  return __fmaf_rn(__fmaf_rn(-guess, 127.0f, absmax), kReciprocal, guess);
}

// From the integer maximum of the absolute bit patterns of a row.
// The reciprocal is off by less than 2^-23 (1 ulp), after one Newton step by less than 2^-23.9; each factor below is rounded
// once more (2^-24). So low <= (1 - 2^-23.4) / scale and high >= (1 + 2^-23.4) / scale, and the IEEE quotient, off by at most
// 2^-24, lies between. scale is in [1e-30, 2.7e36]: no reciprocal is subnormal.
__device__ __forceinline__ RowScale row_scale(uint32_t absmax_bits) {
  RowScale row;
  row.finite = absmax_bits < 0x7f800000u;
  const float scale = fmaxf(divide_by_127(__uint_as_float(absmax_bits)), kInt8ScaleFloor);
  const float guess = ptx::rcp_approx(scale);
  const float reciprocal = __fmaf_rn(guess, __fmaf_rn(-scale, guess, 1.0f), guess);
  row.low = __fmul_rn(reciprocal, 1.0f - 0x1p-22f);
  row.high = __fmul_rn(reciprocal, 1.0f + 0x1p-22f);
  row.scale = row.finite ? scale : __uint_as_float(0x7fc00000u);
  return row;
}

// Adding this rounds to an integer, ties to even, and leaves it in the lowest byte.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

// Four words, the first value in the lowest byte; the other bytes of a word mean nothing.
__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return ptx::pick_bytes(ptx::pick_bytes(a, b, 0x0040), ptx::pick_bytes(c, d, 0x0040), 0x5410);
}

// x / scale with one residual step: the code rounded from it equals the code rounded from the IEEE quotient.
__device__ __forceinline__ uint32_t code_with_residual(float x, float scale, float reciprocal) {
  const float guess = __fmul_rn(x, reciprocal);
  const float quotient = __fmaf_rn(__fmaf_rn(-guess, scale, x), reciprocal, guess);
  return __float_as_uint(__fadd_rn(quotient, kRounder));
}

// Codes of 16 values, four to a word. A row with an inf or a NaN takes the rare way out, where it gets zeros: a test of its
// own would be turned into a select per value.
__device__ __forceinline__ void pack_codes(const float* v, const RowScale& row, uint32_t (&words)[4]) {
  uint32_t differ = row.finite ? 0 : 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t low[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      low[k] = __float_as_uint(__fmaf_rn(v[4 * i + k], row.low, kRounder));
      differ |= low[k] ^ __float_as_uint(__fmaf_rn(v[4 * i + k], row.high, kRounder));
    }
    words[i] = pack_bytes(low[0], low[1], low[2], low[3]);
  }
  if (differ == 0) return;
  if (!row.finite) {
    words[0] = words[1] = words[2] = words[3] = 0;
    return;
  }
  const float reciprocal = __frcp_rn(row.scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t exact[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) exact[k] = code_with_residual(v[4 * i + k], row.scale, reciprocal);
    words[i] = pack_bytes(exact[0], exact[1], exact[2], exact[3]);
  }
}

// Uniform in [0, 1) for one element: the 64-bit counter is folded to 32 bits and hashed by PCG-RXS-M-XS; 24 bits are used.
__host__ __device__ inline float uniform(uint64_t element, uint64_t seed) {
  const uint64_t key = element + seed;
  const uint32_t folded = static_cast<uint32_t>(key >> 32) ^ static_cast<uint32_t>(key);
  const uint32_t state = folded * 747796405u + 2891336453u;
  uint32_t word = ((state >> ((state >> 28) + 4)) ^ state) * 277803737u;
  word = (word >> 22) ^ word;
  return static_cast<float>(word >> 8) * 0x1p-24f;
}

// One code, by IEEE division; seed 0 rounds to nearest. For paths where a division per element costs nothing.
__device__ __forceinline__ int8_t code(float x, const RowScale& row, uint64_t element, uint64_t seed) {
  if (!row.finite) return 0;
  const float q = __fdiv_rn(x, row.scale);
  const int rounded = seed ? __float2int_rd(__fadd_rn(q, uniform(element, seed))) : __float2int_rn(q);
  return static_cast<int8_t>(min(max(rounded, -128), 127));
}

}  // namespace kitchen::quant
