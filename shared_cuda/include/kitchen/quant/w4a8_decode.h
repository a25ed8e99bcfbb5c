// 4-bit and 6-bit codes to the INT8 grid: v8 = clamp(rne(fp32(level * scale)), -127, 127) (reference/w4a8.py: decode_rows).
//
// Three ways to the same bits:
// - decode_value: fp32 arithmetic as written, for any level and scale;
// - 4 bits with e4m3 scales: all 256 x 16 results are a table of 4 KB, a row of 16 bytes for each scale byte, and four codes
//   are looked up at once by byte permutes: 1.4 instructions a weight; 0.9 where a product can be split by sign
//   (look_up_signs);
// - 6 bits with e4m3 scales: two weights at once in fp16. level has 6 significant bits and the scale 4, so the product is exact
//   in the 11 bits of fp16 and one FMA onto 1536 = 1.5 * 2^10 rounds it to an integer, ties to even, in the low bits.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kitchen/ptx/bits.h"
#include "kitchen/ptx/half_pairs.h"
#include "kitchen/ptx/math.h"

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

// -scale, twice, and -scale / 16, twice, as fp16: what decode_six multiplies by. Exact: the least is 2^-13.
__device__ __forceinline__ uint2 negated_scales(uint32_t byte) {
  const uint32_t twice = (byte & 0x7fu) * 0x00800080u | ((byte & 0x80u) << 8) * 0x00010001u;  // off by 2^(15 - 7)
  const __half2 scale = __hmul2(reinterpret_cast<const __half2&>(twice), __float2half2_rn(-256.0f));
  const __half2 sixteenth = __hmul2(scale, __float2half2_rn(0.0625f));
  return make_uint2(reinterpret_cast<const uint32_t&>(scale), reinterpret_cast<const uint32_t&>(sixteenth));
}

// Two codes, in bits 0..5 and 16..21 of a word that is 0x6400 plus them (the fp16 number 1024 + code), to 127 - v8 in the low
// byte of each half. The fp16 result lies in [0, 15872] and its bits grow with it, so that the clamp to 1536 -+ 127 can be an
// integer one.
__device__ __forceinline__ uint32_t round_pair(__half2 level, uint32_t negated_scale) {
  const uint32_t rounded = ptx::fma_relu_pair(reinterpret_cast<const uint32_t&>(level), negated_scale, 0x66006600u);
  constexpr uint32_t kFirst = 0x10000u - (0x6600u - 127u);  // minus the bits of 1536 - 127
  return __viaddmin_s16x2_relu(rounded, kFirst << 16 | kFirst, 254u << 16 | 254u);
}
__device__ __forceinline__ uint32_t decode_pair(uint32_t pair, uint32_t negated_scale) {
  return round_pair(__hsub2(reinterpret_cast<const __half2&>(pair), __float2half2_rn(1024.0f + 32.0f)), negated_scale);
}
// The codes in bits 4..9 and 20..25, with a sixteenth of the scale.
__device__ __forceinline__ uint32_t decode_pair_high(uint32_t pair, uint32_t negated_sixteenth) {
  return round_pair(__hsub2(reinterpret_cast<const __half2&>(pair), __float2half2_rn(1024.0f + 16.0f * 32.0f)),
                    negated_sixteenth);
}

// 16 codes of one group: their low nibbles (first column in bits 0..3 of n0) and their top bits (first column in bits 0..1), to
// 127 - v8, four columns a word in the order of kOrder6: columns i and i + 8 have their top bits at the same place of either
// half word, so that a pair needs no more shifts than one.
// Of four codes the last two stay four bits higher, which saves half of the shifts: they are 16 times as large, exactly, and
// meet a sixteenth of the scale.
constexpr int kOrder6[16] = {0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
// Words 2 * kHalf and the next.
template <int kHalf>
__device__ __forceinline__ void decode_six_half(uint32_t n0, uint32_t n1, uint32_t top, uint2 negated_scales, uint32_t& first,
                                                uint32_t& second) {
  const uint32_t n = ptx::pick_bytes(n0, n1, kHalf == 0 ? 0x5410 : 0x7632), n4 = n >> 4, n8 = n >> 8;
  const uint32_t even = kHalf == 0 ? top << 4 : top >> 4, odd = kHalf == 0 ? top << 2 : top >> 6;
  const uint32_t u0 = decode_pair(ptx::and_or(even, 0x00300030u, ptx::and_or(n, 0x000f000fu, 0x64006400u)), negated_scales.x);
  const uint32_t u1 = decode_pair(ptx::and_or(odd, 0x00300030u, ptx::and_or(n4, 0x000f000fu, 0x64006400u)), negated_scales.x);
  const uint32_t u2 =
      decode_pair_high(ptx::and_or(even, 0x03000300u, ptx::and_or(n4, 0x00f000f0u, 0x64006400u)), negated_scales.y);
  const uint32_t u3 =
      decode_pair_high(ptx::and_or(odd, 0x03000300u, ptx::and_or(n8, 0x00f000f0u, 0x64006400u)), negated_scales.y);
  first = ptx::pick_bytes(u0, u1, 0x6420), second = ptx::pick_bytes(u2, u3, 0x6420);
}
__device__ __forceinline__ void decode_six_unsigned(uint32_t n0, uint32_t n1, uint32_t top, uint2 negated_scales,
                                                    uint32_t (&words)[4]) {
  decode_six_half<0>(n0, n1, top, negated_scales, words[0], words[1]);
  decode_six_half<1>(n0, n1, top, negated_scales, words[2], words[3]);
}

// The same to v8.
__device__ __forceinline__ void decode_six(uint32_t n0, uint32_t n1, uint32_t top, uint2 negated_scales, uint32_t (&words)[4]) {
  decode_six_unsigned(n0, n1, top, negated_scales, words);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] ^= 0x7f7f7f7fu;  // 127 - u for every u in 0..254
}

// The 16 bytes of activations (or of anything) that go with decode_six: from column order to kOrder6.
__device__ __forceinline__ uint4 order_six(const uint4& columns) {
  return make_uint4(ptx::pick_bytes(columns.x, columns.z, 0x5140), ptx::pick_bytes(columns.x, columns.z, 0x7362),
                    ptx::pick_bytes(columns.y, columns.w, 0x5140), ptx::pick_bytes(columns.y, columns.w, 0x7362));
}

// Back again.
__device__ __forceinline__ uint4 column_order(const uint32_t (&words)[4]) {
  return make_uint4(ptx::pick_bytes(words[0], words[1], 0x6420), ptx::pick_bytes(words[2], words[3], 0x6420),
                    ptx::pick_bytes(words[0], words[1], 0x7531), ptx::pick_bytes(words[2], words[3], 0x7531));
}

}  // namespace kitchen::quant
