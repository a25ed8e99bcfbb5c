// Packed AWQ rows as the m=16 operand of mma.sync m16n8k16, from global memory to registers, 16 bytes at a time.
//
// A step is 128 columns of k. Lane l (g = l/4, t = l%4) holds 16 bytes of rows g and g + 8 of each block of 16 rows: columns
// 32t .. 32t+31 of the step, four words of eight codes. Word w makes the operands of two MMAs: pairs (c, c+4) of its columns,
// c = 0, 1 in the first, 2, 3 in the second. The order of k inside of a sum is free as long as tokens follow it: stage_tokens
// stores column 32t + 8w + c as pair c % 4 of the lane's 16 bytes of word w.
#pragma once

#include <cstdint>

#include "kitchen/mma/m16n8k16_f16.h"
#include "kitchen/ptx/load_streaming.h"
#include "kitchen/quant/awq_decode.h"

namespace kitchen::awq {

constexpr int kStepColumns = 128, kLaneColumns = 32, kWords = 4;

struct WeightParams {
  const uint8_t* codes;       // [N, K/2]
  const void *scale, *zero;   // [K/g, N]
  int N, K;
  uint32_t group_inverse;     // 2^32 / (g/8) + 1: exact division of k/8 while K < 2^19; 0 for groups of 8
  DType parameter_type;
};

// The bits of one number, or zero where `valid` is false: nothing is read then.
template <int kBytes>
__device__ __forceinline__ uint32_t load_bits_or_zero(const void* global, bool valid) {
  uint32_t bits;
  if constexpr (kBytes == 2) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t@p ld.global.nc.u16 %0, [%1];\n\t}"
                 : "=&r"(bits) : "l"(global), "r"(static_cast<int>(valid)));
  } else {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t@p ld.global.nc.u32 %0, [%1];\n\t}"
                 : "=&r"(bits) : "l"(global), "r"(static_cast<int>(valid)));
  }
  return bits;
}

// kPacked: scale and zero have type T. kParts: how many groups a lane's 32 columns may touch.
template <class T, bool kPacked_, int kParts_, int kRowBlocks, class Mma_ = mma::M16N8K16<T>>
struct AwqWeights {
  using Mma = Mma_;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kParts = kParts_, kWordsPerPart = kWords / kParts;
  using Group = quant::AwqGroup<T, kPacked>;
  struct Raw {
    uint4 words[kRowBlocks][2];                 // rows g and g + 8
    uint32_t scale[kRowBlocks][2][kParts], zero[kRowBlocks][2][kParts];
  };

  const WeightParams& p;
  const uint8_t* next;  // this lane's 16 bytes of its first row, in the step that is loaded next
  int row, k, k_end;    // its first row and column, and where the piece ends

  __device__ __forceinline__ AwqWeights(const WeightParams& params, int first_row, int first_k, int end) : p(params) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row = first_row + lane / 4, k = first_k + kLaneColumns * (lane % 4), k_end = end;
    next = p.codes + static_cast<int64_t>(row) * (p.K / 2) + k / 2;
  }

  __device__ __forceinline__ void load(Raw& raw, int columns) const {
    const int at = k + columns;
#pragma unroll
    for (int i = 0; i < 2 * kRowBlocks; ++i) {
      const bool valid = at < k_end && row + 8 * i < p.N;
      raw.words[i / 2][i % 2] = ptx::load_streaming_16_or_zeros(next + columns / 2 + static_cast<int64_t>(4 * i) * p.K, valid);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint32_t eights = static_cast<uint32_t>(at) / 8 + part * (kLaneColumns / 8 / kParts);
      const uint32_t group = p.group_inverse == 0 ? eights : __umulhi(eights, p.group_inverse);
      const int64_t first = static_cast<int64_t>(group) * p.N + row;
#pragma unroll
      for (int i = 0; i < 2 * kRowBlocks; ++i) {
        const bool valid = at < k_end && row + 8 * i < p.N;
        raw.scale[i / 2][i % 2][part] = load_parameter(p.scale, first + 8 * i, valid);
        raw.zero[i / 2][i % 2][part] = load_parameter(p.zero, first + 8 * i, valid);
      }
    }
  }

  __device__ __forceinline__ void advance(int columns) {
    next += columns / 2;
    k += columns;
  }

  // Parameters of word `word` of row block `i`, rows g (half 0) and g + 8.
  __device__ __forceinline__ Group group(const Raw& raw, int i, int half, int word) const {
    Group made;
    const uint32_t scale = raw.scale[i][half][word / kWordsPerPart], zero = raw.zero[i][half][word / kWordsPerPart];
    if constexpr (kPacked) made.set(scale, zero);
    else made.set(number(scale), number(zero));
    return made;
  }

  // The operands of the two MMAs of a word of row block `i`.
  template <bool kExact>
  __device__ __forceinline__ void decode(uint32_t (&a)[2][4], const Raw& raw, int i, int word) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Group made = group(raw, i, half, word);
      const uint4& words = raw.words[i][half];
      const uint32_t codes = word == 0 ? words.x : word == 1 ? words.y : word == 2 ? words.z : words.w;
      using P = quant::AwqPairs<T>;
      a[0][half] = made.template apply<kExact>(P::template levels<0>(codes));
      a[0][2 + half] = made.template apply<kExact>(P::template levels<1>(codes));
      a[1][half] = made.template apply<kExact>(P::template levels<2>(codes));
      a[1][2 + half] = made.template apply<kExact>(P::template levels<3>(codes));
    }
  }

  // Not zero where a group of the step is one for decode<true>.
  __device__ __forceinline__ static uint32_t needs_exact(const Raw& raw) {
    uint32_t found = 0;
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          found |= quant::awq_needs_exact<T>(__byte_perm(raw.scale[i][0][part], raw.scale[i][1][part], 0x5410),
                                             __byte_perm(raw.zero[i][0][part], raw.zero[i][1][part], 0x5410));
        }
      }
    }
    return found;
  }

 private:
  __device__ __forceinline__ uint32_t load_parameter(const void* data, int64_t at, bool valid) const {
    if constexpr (kPacked) {
      return load_bits_or_zero<2>(static_cast<const uint16_t*>(data) + at, valid);
    } else {
      if (p.parameter_type == DType::kFloat32) return load_bits_or_zero<4>(static_cast<const uint32_t*>(data) + at, valid);
      return load_bits_or_zero<2>(static_cast<const uint16_t*>(data) + at, valid);
    }
  }
  __device__ __forceinline__ float number(uint32_t bits) const {
    if (p.parameter_type == DType::kFloat32) return __uint_as_float(bits);
    if (p.parameter_type == DType::kBFloat16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
};

// 8 neighbouring columns of a token as four pairs (c, c + 4).
__device__ __forceinline__ uint4 paired(const uint4& x) {
  return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                    __byte_perm(x.y, x.w, 0x7632));
}

}  // namespace kitchen::awq
