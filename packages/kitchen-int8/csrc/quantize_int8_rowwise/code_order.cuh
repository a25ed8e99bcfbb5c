// Orders of codes other than by column, for products whose lanes decode 32 neighbouring columns of a weight each.
//
// Within each 128 columns, word w (four columns) lies at 4 * (w % 8) + w / 8: wgmma wants, of each 32 k, words q and 4 + q from
// lane q of four, and a lane that holds columns 32 q .. 32 q + 31 gives its words i = 0..7 to the places 4 * i + q. A sum does
// not mind the order of k as long as both sides have the same. In kLanePairs the words of each 16 columns are, before that, in
// the order of quant::kOrder6: columns (0, 8, 1, 9), (2, 10, 3, 11), (4, 12, 5, 13), (6, 14, 7, 15).
#pragma once

#include <cstdint>

#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

namespace kitchen::int8 {

constexpr int kOrderColumns = 128;

// Bytes of a row of codes.
__host__ __device__ constexpr int row_bytes(int K, CodeOrder order) {
  return order == CodeOrder::kColumns ? K : (K + kOrderColumns - 1) / kOrderColumns * kOrderColumns;
}

// Where a word of four columns lies; in kLanePairs: the word that the lane of these columns makes (pair_words).
__device__ __forceinline__ int ordered_word(int column, CodeOrder order) {
  const int w = column % kOrderColumns / 4;
  const int v = order == CodeOrder::kLanePairs ? (w & ~3) | (w & 1) << 1 | (w >> 1 & 1) : w;
  return column / kOrderColumns * kOrderColumns + 16 * (v % 8) + 4 * (v / 8);
}

// Where the code of a column lies.
__device__ __forceinline__ int ordered_code(int column, CodeOrder order) {
  if (order == CodeOrder::kColumns) return column;
  if (order == CodeOrder::kLanes) return ordered_word(column / 4 * 4, order) + column % 4;
  const int of = column % 8, place = 2 * of + column % 16 / 8;  // of 16
  const int w = column % kOrderColumns / 16 * 4 + place / 4;
  return column / kOrderColumns * kOrderColumns + 16 * (w % 8) + 4 * (w / 8) + place % 4;
}

}  // namespace kitchen::int8
