// 16 columns of a row to codes, four lanes a group of 64: the arithmetic of every quantizer here.
//
// Divisions are done by reciprocal and one residual step:
// - x / smooth. With r = RN(1/s), |x r - x/s| is below 3/2 ulp, the residual x - q s is exact, and what is left is 2^-24
//   ulp: the sum rounds as the quotient does unless the quotient is that close to a midpoint of two floats. With s of at
//   most 11 significant bits (bfloat16, float16), a quotient that is no midpoint is at least 2^-12 ulp away from one, and
//   it cannot be one. Float32 factors, factors outside of [2^-20, 2^40] and large x are divided as such. Tiny x may lose
//   bits: below 2^-80 their codes are 0 and the scale's floor is larger.
// - absmax / 7 and / 15: likewise (tools/prove_int8_division.cpp).
// - v / scale: quant/int8_codes.h, code_with_residual.
#pragma once

#include <cuda_fp8.h>

#include "kitchen/common/to_float.h"
#include "kitchen/ptx/math.h"
#include "kitchen/quant/int8_codes.h"
#include "quantize_svdquant_w4a4/quantize_svdquant_w4a4.h"
#include "svdquant_gemm/scale_layout.h"

namespace kitchen::svdquant {

constexpr int kColumns = 16, kLanesPerGroup = kGroup / kColumns;
constexpr float kScaleFloor = 1e-10f;
constexpr float kLargest = 0x1p80f, kSmoothLow = 0x1p-20f, kSmoothHigh = 0x1p40f;
constexpr float kLargestQuotient = kLargest / kSmoothHigh / 2;

// v / factor, where the text above allows it.
__device__ __forceinline__ float divide_by_reciprocal(float v, float factor, float reciprocal) {
  const float guess = __fmul_rn(v, reciprocal);
  return __fmaf_rn(__fmaf_rn(-guess, factor, v), reciprocal, guess);
}

// 16 neighbouring columns of x as they lie in memory.
template <class T>
struct Loaded {
  static constexpr int kVectors = kColumns * sizeof(T) / 16;
  uint4 words[kVectors];

  __device__ __forceinline__ void load(const T* from, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) words[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
      return;
    }
    T* const values = reinterpret_cast<T*>(words);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] = from[i];
  }

  __device__ __forceinline__ void unpack(float (&v)[kColumns]) const {
    const uint32_t* const word = reinterpret_cast<const uint32_t*>(words);
#pragma unroll
    for (int i = 0; i < kColumns / Word<T>::kValues; ++i) Word<T>::unpack(word[i], v + i * Word<T>::kValues);
  }
};

__device__ __forceinline__ void add_shift(float (&v)[kColumns], float shift) {
  if (shift == 0.0f) return;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) v[i] = __fadd_rn(v[i], shift);
}

// 1 / factor as __frcp_rn gives it for factors of kSmoothLow to kSmoothHigh, without its test for others.
__device__ __forceinline__ float reciprocal_of(float factor) {
  const float guess = ptx::rcp_approx(factor);
  return __fmaf_rn(guess, __fmaf_rn(-factor, guess, 1.0f), guess);
}

struct Smooth {
  float factor[kColumns], reciprocal[kColumns];
  bool reciprocals;  // can be used

  Smooth() = default;
  // Of 16 neighbouring columns. Loaded together first: a conversion behind each load would wait for it.
  __device__ __forceinline__ Smooth(const void* data, int64_t column, DType type) : reciprocals(type != DType::kFloat32) {
    if (type != DType::kFloat32 && reinterpret_cast<uintptr_t>(data) % 16 == 0) {
      const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + column);
      const uint4 low = __ldg(from), high = __ldg(from + 1);
      const uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        type == DType::kFloat16 ? Word<__half>::unpack(word[i], factor + 2 * i)
                                : Word<__nv_bfloat16>::unpack(word[i], factor + 2 * i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) factor[i] = load_as_float(data, column + i, type);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      reciprocal[i] = reciprocal_of(factor[i]);
      reciprocals = reciprocals && fabsf(factor[i]) >= kSmoothLow && fabsf(factor[i]) <= kSmoothHigh;
    }
  }

  // v becomes v / factor, right where `reciprocals` and no quotient is kLargestQuotient or more, or NaN.
  __device__ __forceinline__ void divide_by_reciprocals(float (&v)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v[i] = divide_by_reciprocal(v[i], factor[i], reciprocal[i]);
  }
  // v becomes v / factor.
  __device__ __forceinline__ void divide(float (&v)[kColumns]) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) largest = ptx::abs_max_nan(largest, v[i]);
    if (reciprocals && largest < kLargest) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) v[i] = divide_by_reciprocal(v[i], factor[i], reciprocal[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) v[i] = __fdiv_rn(v[i], factor[i]);
    }
  }
};

template <bool kUnsigned>
constexpr float kLevels = kUnsigned ? 15.0f : 7.0f;

// absmax / kLevels, correctly rounded wherever the result is at least the floor's.
template <bool kUnsigned>
__device__ __forceinline__ float divide_by_levels(float absmax) {
  constexpr float kReciprocal = 1.0f / kLevels<kUnsigned>;
  return divide_by_reciprocal(absmax, kLevels<kUnsigned>, kReciprocal);
}

// v / scale rounded to integers, as floats with kRounder added: the code is in the lowest bits. Reciprocals a little too small and a
// little too large enclose the IEEE quotient (quant/int8_codes.h); where both round to one integer, as nearly always, it is the code.
// Zero, or where they do not.
template <bool kUnsigned>
__device__ __forceinline__ uint32_t round_between(float (&codes)[kColumns], float (&v)[kColumns], float scale) {
  const float reciprocal = reciprocal_of(scale);
  const float low = __fmul_rn(reciprocal, 1.0f - 0x1p-22f), high = __fmul_rn(reciprocal, 1.0f + 0x1p-22f);
  uint32_t differ = 0;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (kUnsigned) v[i] = fmaxf(v[i], 0.0f);
    codes[i] = __fmaf_rn(v[i], low, quant::kRounder);
    differ |= __float_as_uint(codes[i]) ^ __float_as_uint(__fmaf_rn(v[i], high, quant::kRounder));
  }
  return differ;
}

// The same for every v.
template <bool kUnsigned>
__device__ __forceinline__ void round_to_codes(float (&v)[kColumns], float scale, bool finite) {
  float codes[kColumns];
  if (round_between<kUnsigned>(codes, v, scale) != 0 || !finite) {  // rare
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      codes[i] = finite ? __uint_as_float(quant::code_with_residual(v[i], scale, reciprocal)) : quant::kRounder;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) v[i] = codes[i];
}

__device__ __forceinline__ uint32_t pack_nibbles(uint32_t bytes) {  // of four codes to 16 bits
  const uint32_t codes = bytes & 0x0f0f0f0fu, pairs = codes | codes >> 4;
  return ptx::pick_bytes(pairs, 0, 0x4420);
}

__device__ __forceinline__ uint16_t pack_e4m3(float even, float odd) {
  return __nv_cvt_float2_to_fp8x2(make_float2(__fsub_rn(even, quant::kRounder), __fsub_rn(odd, quant::kRounder)),
                                  __NV_SATFINITE, __NV_E4M3);
}

template <CodeForm kForm>
__device__ __forceinline__ void store_codes(uint8_t* codes, int64_t first, const float (&v)[kColumns]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kForm == CodeForm::kE4m3) {
      words[i] = pack_e4m3(v[4 * i], v[4 * i + 1]) | static_cast<uint32_t>(pack_e4m3(v[4 * i + 2], v[4 * i + 3])) << 16;
    } else {
      words[i] = quant::pack_bytes(__float_as_uint(v[4 * i]), __float_as_uint(v[4 * i + 1]), __float_as_uint(v[4 * i + 2]),
                                   __float_as_uint(v[4 * i + 3]));
    }
  }
  if constexpr (kForm == CodeForm::kPacked) {
    *reinterpret_cast<uint2*>(codes + first / 2) = make_uint2(pack_nibbles(words[0]) | pack_nibbles(words[1]) << 16,
                                                              pack_nibbles(words[2]) | pack_nibbles(words[3]) << 16);
  } else {
    *reinterpret_cast<uint4*>(codes + first) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <CodeForm kForm>
__device__ __forceinline__ void store_scale(const QuantizeParams& p, int64_t row, int64_t group, int groups, float scale) {
  if constexpr (kForm == CodeForm::kE4m3) {
    uint4* const block =
        static_cast<uint4*>(p.scales) + row / kBlockRows * even_groups(groups) * kBlockRows + row % kBlockRows;
    block[group * kBlockRows] = ScaleParts(scale).row_of_a();
    if (groups % 2 == 1 && group == 0) block[groups * kBlockRows] = make_uint4(0, 0, 0, 0);
  } else {
    static_cast<float*>(p.scales)[group * p.M + row] = scale;
  }
}

__device__ __forceinline__ float absmax_of(const float (&v)[kColumns]) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) even = ptx::abs_max_nan(even, v[i]), odd = ptx::abs_max_nan(odd, v[i + 1]);
  return ptx::abs_max_nan(even, odd);
}

// Over the four lanes that share a group.
__device__ __forceinline__ float absmax_of_group(float absmax) {
#pragma unroll
  for (int lanes = 1; lanes < kLanesPerGroup; lanes *= 2) {
    absmax = ptx::abs_max_nan(absmax, __shfl_xor_sync(0xffffffffu, absmax, lanes));
  }
  return absmax;
}

// The scale of the group that four lanes share, whose 16 values each are divided by smooth already; they become codes (as
// floats with kRounder added). `absmax`: of this lane's values. NaN where a value is not finite.
template <bool kUnsigned>
__device__ __forceinline__ float group_codes(float (&v)[kColumns], float absmax) {
  absmax = absmax_of_group(absmax);
  const bool finite = __float_as_uint(absmax) < 0x7f800000u;
  const float scale = divide_by_levels<kUnsigned>(finite ? fmaxf(absmax, kScaleFloor) : 1.0f);
  round_to_codes<kUnsigned>(v, scale, finite);
  return finite ? scale : __uint_as_float(0x7fc00000u);
}

template <bool kUnsigned>
__device__ __forceinline__ float group_codes(float (&v)[kColumns]) {
  return group_codes<kUnsigned>(v, absmax_of(v));
}

// By one block.
__device__ __forceinline__ void clear(const QuantizeParams& p) {
  for (int i = static_cast<int>(threadIdx.x); i < p.cleared_count; i += static_cast<int>(blockDim.x)) p.cleared[i] = 0;
}

// From x to codes and the group's scale without a branch: two rows can be under way together. False, nearly never, where that
// does not do: then divide and group_codes do, from x again.
template <bool kUnsigned>
__device__ __forceinline__ bool group_codes_if_plain(float (&codes)[kColumns], float& scale, float (&v)[kColumns],
                                                     const Smooth& smooth) {
  smooth.divide_by_reciprocals(v);
  const float absmax = absmax_of_group(absmax_of(v));
  scale = divide_by_levels<kUnsigned>(fmaxf(absmax, kScaleFloor));
  const uint32_t differ = round_between<kUnsigned>(codes, v, scale);
  return smooth.reciprocals && absmax < kLargestQuotient && differ == 0;
}

}  // namespace kitchen::svdquant
