// 4-bit and 6-bit codes to the INT8 grid: v8 = clamp(rne(fp32(level * scale)), -127, 127) (reference/w4a8.py: decode_rows).
//
// Three ways to the same bits:
// - decode_value: fp32 arithmetic as written, for any level and scale;
// - 4 bits with e4m3 scales: all 256 x 16 results are a table of 4 KB, a row of 16 bytes for each scale byte, and four codes
//   are looked up at once by byte permutes: 1.4 instructions a weight; 0.9 where a product can be split by sign
//   (look_up_signs);
// - 6 bits with e4m3 scales: two weights at once in fp16. A code in a byte, with a zero byte in front, is the fp16 number
//   c * 2^-24, of which one FMA makes (c - 32) * 2^-9. Times the scale (4 significant bits) it is exact until an FMA onto 3 rounds
//   it to a multiple of 2^-9, ties to even: the sum's low bits count such multiples, and more bits mean a larger number, so that
//   the clamp is an integer one.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kitchen/ptx/add_clamp.h"
#include "kitchen/ptx/bits.h"
#include "kitchen/ptx/half_pairs.h"
#include "kitchen/ptx/math.h"
#include "kitchen/ptx/select_bits.h"

namespace kitchen::quant {

// An e4m3 byte as fp32, exactly; its NaN (0x7f, 0xff) reads as 480, and is never stored.
__device__ __forceinline__ float e4m3_to_float(uint32_t byte) {
  // Exponent and mantissa moved to fp32's places are off by 2^(127 - 7), subnormals included.
  return __fmul_rn(__uint_as_float((byte & 0x80u) << 24 | (byte & 0x7fu) << 20), 0x1p120f);
}

// v8 in the low byte, for any finite level and scale. Clamping first changes nothing: 127 is an integer.
__device__ __forceinline__ uint32_t decode_value(float level, float scale) {
  const float clamped = fminf(fmaxf(__fmul_rn(level, scale), -127.0f), 127.0f);
  return __float_as_uint(__fadd_rn(clamped, 12582912.0f));  // 1.5 * 2^23
}

__device__ __forceinline__ uint32_t join_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return ptx::pick_bytes(ptx::pick_bytes(a, b, 0x0040), ptx::pick_bytes(c, d, 0x0040), 0x5410);
}

// ------------------------------------------------------------------------------------------------ 4 bits, by table

// The row of one scale: byte c is what code c decodes to.
__device__ __forceinline__ uint4 decode_table_row(const float (&levels)[16], float scale) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = join_bytes(decode_value(levels[4 * i], scale), decode_value(levels[4 * i + 1], scale),
                          decode_value(levels[4 * i + 2], scale), decode_value(levels[4 * i + 3], scale));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// codebook [16]; nullptr: code - 8.
__device__ __forceinline__ void load_levels(float (&levels)[16], const float* codebook) {
#pragma unroll
  for (int c = 0; c < 16; ++c) levels[c] = codebook == nullptr ? static_cast<float>(c - 8) : codebook[c];
}

// `count` threads write the table of all e4m3 bytes, [256] rows of 16 bytes; a barrier has to follow.
__device__ __forceinline__ void fill_decode_table(uint4* table, const float* codebook, int thread, int count) {
  float levels[16];
  load_levels(levels, codebook);
#pragma unroll 1
  for (int byte = thread; byte < 256; byte += count) table[byte] = decode_table_row(levels, e4m3_to_float(byte));
}

// Eight codes of one group, the first in bits 0..3: columns 0..3 to `low`, 4..7 to `high`, the first column in the lowest byte.
// A permute picks from eight bytes by three bits; each half of the row gives a candidate and the fourth bit picks between them.
// Permutes and logic share a pipe, which is the limit, so two shifts go by that of fp16: 0x7777 and 0x7654 are finite numbers.
__device__ __forceinline__ void look_up(const uint4& row, uint32_t codes, uint32_t& low, uint32_t& high) {
  const uint32_t index = codes & 0x77777777u, half = ptx::and_or(codes >> 1, 0x44444444u, 0x32103210u);
  const uint32_t index_high = ptx::repeat_high_half(index), half_high = ptx::repeat_high_half(half);
  low = ptx::permute_bytes(ptx::permute_bytes(row.x, row.y, index), ptx::permute_bytes(row.z, row.w, index), half);
  high = ptx::permute_bytes(ptx::permute_bytes(row.x, row.y, index_high), ptx::permute_bytes(row.z, row.w, index_high), half_high);
}

// A row of decode_table_row as look_up_signs wants it: minus the first eight values, which must not be positive, then the other
// eight, which must not be negative.
__device__ __forceinline__ uint4 split_row(const uint4& row) {
  return make_uint4(__vneg4(row.x), __vneg4(row.y), row.z, row.w);
}

// Whether every row of a scale of at least 0 can be split: codes 0..7 decode to at most 0, codes 8..15 to at least 0.
__device__ __forceinline__ bool splits_by_sign(const float (&levels)[16]) {
  bool splits = true;
#pragma unroll
  for (int c = 0; c < 16; ++c) splits = splits && (c < 8 ? levels[c] <= 0.0f : levels[c] >= 0.0f);
  return splits;
}

// look_up in two parts (two words each), v8 = positive - negative, both at least 0. A permute's index of 8 or more repeats the
// sign of a byte, which is 0 here: so each half of the row is looked up by the codes themselves, their fourth bit flipped for
// the second, and zeros stand where a code belongs to the other half. The sum of products is then taken twice, by a tensor core
// that has the time.
__device__ __forceinline__ void look_up_signs(const uint4& row, uint32_t codes, uint32_t* positive, uint32_t* negative) {
  const uint32_t flipped = codes ^ 0x88888888u;
  negative[0] = ptx::permute_bytes(row.x, row.y, codes);
  positive[0] = ptx::permute_bytes(row.z, row.w, flipped);
  negative[1] = ptx::permute_bytes(row.x, row.y, codes >> 16);
  positive[1] = ptx::permute_bytes(row.z, row.w, flipped >> 16);
}

// Four codes in bits 0..15; higher bits are ignored.
__device__ __forceinline__ uint32_t look_up_four(const uint4& row, uint32_t codes) {
  const uint32_t index = codes & 0x7777u, half = ptx::and_or(codes >> 1, 0x4444u, 0x3210u);
  return ptx::permute_bytes(ptx::permute_bytes(row.x, row.y, index), ptx::permute_bytes(row.z, row.w, index), half);
}

// ------------------------------------------------------------------------------------------------- 6 bits, in fp16

// -scale of an e4m3 byte, twice, as fp16: what decode_six_pair multiplies by. Exact.
__device__ __forceinline__ uint32_t negated_scale(uint32_t byte) {
  const uint32_t twice = (byte & 0x7fu) * 0x00800080u | ((byte & 0x80u) << 8) * 0x00010001u;  // off by 2^(15 - 7)
  const __half2 scale = __hmul2(reinterpret_cast<const __half2&>(twice), __float2half2_rn(-256.0f));
  return reinterpret_cast<const uint32_t&>(scale);
}

// Minus the bits of 3 - 127 * 2^-9, twice: what is added in front of the clamp. NOTE: give it to decode_six_pair out of memory:
// ptxas loads a value that it knows anew for each clamp.
constexpr uint32_t kMinusFirst = (0x10000u - (0x4200u - 127u)) * 0x00010001u;

// Two codes, in the low bytes of halves that are 0 besides, to 127 - v8 there.
__device__ __forceinline__ uint32_t decode_six_pair(uint32_t codes, uint32_t negated_scale, uint32_t minus_first) {
  const __half2 level = __hfma2(reinterpret_cast<const __half2&>(codes), __float2half2_rn(0x1p15f), __float2half2_rn(-0x1p-4f));
  const uint32_t rounded = ptx::fma_relu_pair(reinterpret_cast<const uint32_t&>(level), negated_scale, 0x42004200u);
  return ptx::add_clamp_pair(rounded, minus_first, 254u << 16 | 254u);
}

// 16 codes of one group: byte b of word i is the code of column 4 * b + i.
struct SixCodes {
  uint32_t words[4];

  SixCodes() = default;  // not set
  // Low nibbles (first column in bits 0..3 of n0) and top bits (first column in bits 0..1).
  __device__ __forceinline__ SixCodes(uint32_t n0, uint32_t n1, uint32_t top) {
    const uint32_t first = ptx::permute_bytes(n0, n1, 0x6420), second = ptx::permute_bytes(n0, n1, 0x7531);
    // Two bits of every four: what a shift carries into a byte lies where its nibble goes. NOTE: written as an AND, the compiler
    // masks behind each shift.
    const uint32_t even = ptx::select_bits(0x33333333u, top, 0), odd = ptx::select_bits(0xccccccccu, top, 0);
    words[0] = ptx::select_bits(0x0f0f0f0fu, first, even * 16);
    words[1] = ptx::select_bits(0x0f0f0f0fu, first >> 4, odd * 4);
    words[2] = ptx::select_bits(0x0f0f0f0fu, second, even);
    words[3] = ptx::select_bits(0x0f0f0f0fu, second >> 4, odd >> 2);
  }

  // 127 - v8 of columns 4 * i .. 4 * i + 3. No byte has its sign set, so that to repeat a sign is to fill in zeros.
  __device__ __forceinline__ uint32_t decode_four(int i, uint32_t negated_scale, uint32_t minus_first) const {
    const uint32_t pick = 0x8480u + 0x1111u * i;
    const uint32_t even = decode_six_pair(ptx::permute_bytes(words[0], words[2], pick), negated_scale, minus_first);
    const uint32_t odd = decode_six_pair(ptx::permute_bytes(words[1], words[3], pick), negated_scale, minus_first);
    return even + odd * 256;
  }

  __device__ __forceinline__ void decode(uint32_t (&to)[4], uint32_t negated_scale, uint32_t minus_first) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = decode_four(i, negated_scale, minus_first);
  }
};

}  // namespace kitchen::quant
