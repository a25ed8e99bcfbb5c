// What an AWQ code decodes to, written once: W = round_T(fma(q - 8, scale, zero)), the fma in fp32, T the type of x.
//
// Two ways from levels q - 8, in pairs of T, to the same bits:
//
//   apply_exact   as the formula says
//   apply         one HFMA2, where scale and zero are stored in T
//
// Why they agree. q - 8 is exact in T. HFMA2 rounds (q - 8) * scale + zero once, to T; the formula rounds to fp32 first. The product
// p has at most 8 + 3 (float16: 11 + 3) significant bits. The two can differ only where the sum does not fit fp32's 24 bits and fp32
// rounds it onto the middle between two numbers of T. That happens in two kinds of groups, which `awq_needs_exact` finds:
//
//   p is such a middle, and zero is lost beside it: 0 < |zero| <= 2^-24 * 2^exponent(p), hence |zero| < 2^-20 * |scale|
//   float16: p has all 14 bits and lies one of its last bits beside a middle, and zero is the number just below that bit:
//            |zero| = (2 - 2^-10) * 2^(exponent(scale) - 11)
//
// Tried for every pair of mantissas: packages/kitchen-awq/tests/test_decode_proof.py.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace kitchen::quant {

// Column i (0..7) of a packed word: columns lie in nibbles, the lowest first.
__device__ __forceinline__ float awq_decode_fp32(uint32_t word, int i, float scale, float zero) {
  // 2^23 + q, whose last bit counts ones: one subtraction gives q - 8 exactly.
  const float level = __uint_as_float(((word >> (4 * i)) & 0xFu) | 0x4B000000u) - 8388616.0f;
  return __fmaf_rn(level, scale, zero);
}

// (a & mask) | bits in one instruction: nvcc makes two of it where both are constants.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

// For AwqPairs::levels_of_byte: byte i of a word, and of the word beside it, in the lower bytes of two halves.
__device__ __forceinline__ uint32_t select_byte(uint32_t i) { return i * 0x1111u + 0x4400u; }

// A 32-bit word as a pair of T, and back.
template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the bits of one as the other");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
struct AwqPairs;

template <>
struct AwqPairs<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr uint32_t kMagic = 0x43004300u;  // 128: the last bit of its mantissa counts ones
  static constexpr uint32_t kTiny = 0x35803580u;   // 2^-20
  static constexpr bool kLongProducts = false;

  static __device__ __forceinline__ Pair pair(uint32_t bits) { return bits_as<Pair>(bits); }
  static __device__ __forceinline__ float low(uint32_t bits) { return __uint_as_float(bits << 16); }
  static __device__ __forceinline__ float high(uint32_t bits) { return __uint_as_float(bits & 0xFFFF0000u); }
  static __device__ __forceinline__ uint32_t rounded(float low, float high) { return bits_as<uint32_t>(__floats2bfloat162_rn(low, high)); }
  // Columns kColumn and kColumn + 4 of a word: q - 8, exact.
  template <int kColumn>
  static __device__ __forceinline__ uint32_t levels(uint32_t word) {
    return bits_as<uint32_t>(__hsub2(pair(and_or(word >> (4 * kColumn), 0x000F000Fu, kMagic)), pair(0x43084308u)));
  }
  // The two columns of a byte of a word: q - 8, exact.
  static __device__ __forceinline__ uint32_t levels_of_byte(uint32_t word, uint32_t selected) {
    return bits_as<uint32_t>(__hsub2(pair(and_or(__byte_perm(word, word >> 4, selected), 0x000F000Fu, kMagic)), pair(0x43084308u)));
  }
};

template <>
struct AwqPairs<__half> {
  using Pair = __half2;
  static constexpr uint32_t kMagic = 0x64006400u;  // 1024: the last bit of its mantissa counts ones
  static constexpr uint32_t kTiny = 0x00100010u;   // 2^-20, subnormal; |zero| is at least 2^-24, so only |scale| >= 1/8 matters
  static constexpr bool kLongProducts = true;

  static __device__ __forceinline__ Pair pair(uint32_t bits) { return bits_as<Pair>(bits); }
  static __device__ __forceinline__ float low(uint32_t bits) { return __low2float(pair(bits)); }
  static __device__ __forceinline__ float high(uint32_t bits) { return __high2float(pair(bits)); }
  static __device__ __forceinline__ uint32_t rounded(float low, float high) { return bits_as<uint32_t>(__floats2half2_rn(low, high)); }
  template <int kColumn>
  static __device__ __forceinline__ uint32_t levels(uint32_t word) {
    const uint32_t shifted = kColumn < 2 ? word : word >> 8;
    if constexpr (kColumn % 2 == 0) {
      return bits_as<uint32_t>(__hsub2(pair(and_or(shifted, 0x000F000Fu, kMagic)), pair(0x64086408u)));
    } else {  // 1024 + 16 q, times 1/16, less 72: exact
      return bits_as<uint32_t>(__hfma2(pair(and_or(shifted, 0x00F000F0u, kMagic)), pair(0x2C002C00u), pair(0xD480D480u)));
    }
  }
  static __device__ __forceinline__ uint32_t levels_of_byte(uint32_t word, uint32_t selected) {  // the upper column times 16
    return bits_as<uint32_t>(__hfma2(pair(and_or(__byte_perm(word, word, selected), 0x00F0000Fu, kMagic)), pair(0x2C003C00u), pair(0xD480E408u)));
  }
};

// Ones in the half of a pair of groups that HFMA2 may round in another way; scale and zero in T.
template <class T>
__device__ __forceinline__ uint32_t awq_needs_exact(uint32_t scales, uint32_t zeros) {
  using P = AwqPairs<T>;
  const auto scale = __habs2(P::pair(scales)), zero = __habs2(P::pair(zeros));
  uint32_t found = __hlt2_mask(zero, __hmul2(scale, P::pair(P::kTiny))) & __hneu2_mask(zero, P::pair(0u));
  if constexpr (P::kLongProducts) {  // the largest mantissa at the scale's exponent, times 2^-11
    found |= __heq2_mask(zero, __hmul2(P::pair(and_or(scales, 0x7C007C00u, 0x03FF03FFu)), P::pair(0x10001000u)));
  }
  return found;
}

// Scale and zero of a group, as they are multiplied.
template <class T, bool kPacked>
struct AwqGroup;

template <class T>
struct AwqGroup<T, true> {  // stored in T
  using P = AwqPairs<T>;
  uint32_t scale, zero;     // each twice
  __device__ __forceinline__ void set(uint32_t scale_bits, uint32_t zero_bits) {
    scale = __byte_perm(scale_bits, scale_bits, 0x1010);
    zero = __byte_perm(zero_bits, zero_bits, 0x1010);
  }
  template <bool kExact>
  __device__ __forceinline__ uint32_t apply(uint32_t levels) const {
    if constexpr (kExact) {
      const float s = P::low(scale), z = P::low(zero);
      return P::rounded(__fmaf_rn(P::low(levels), s, z), __fmaf_rn(P::high(levels), s, z));
    } else {
      return bits_as<uint32_t>(__hfma2(P::pair(levels), P::pair(scale), P::pair(zero)));
    }
  }
};

template <class T>
struct AwqGroup<T, false> {  // any float type, widened
  using P = AwqPairs<T>;
  float scale, zero;
  __device__ __forceinline__ void set(float s, float z) { scale = s, zero = z; }
  template <bool kExact>
  __device__ __forceinline__ uint32_t apply(uint32_t levels) const {
    return P::rounded(__fmaf_rn(P::low(levels), scale, zero), __fmaf_rn(P::high(levels), scale, zero));
  }
};

}  // namespace kitchen::quant
