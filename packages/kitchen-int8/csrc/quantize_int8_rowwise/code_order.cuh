// CodeOrder::kLanes, for products whose lanes decode 32 neighbouring columns of a weight each.
//
// Within each 128 columns, word w (four columns) lies at 4 * (w % 8) + w / 8: wgmma wants, of each 32 k, words q and 4 + q from
// lane q of four, and a lane that holds columns 32 q .. 32 q + 31 gives its words i = 0..7 to the places 4 * i + q. A sum does
// not mind the order of k as long as both sides have the same.
#pragma once

#include <cstdint>

#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

namespace kitchen::int8 {

constexpr int kOrderColumns = 128;

// Bytes of a row of codes.
__host__ __device__ constexpr int row_bytes(int K, CodeOrder order) {
  return order == CodeOrder::kColumns ? K : (K + kOrderColumns - 1) / kOrderColumns * kOrderColumns;
}

// Where a word of four columns lies in kLanes.
__device__ __forceinline__ int ordered_word(int column) {
  const int w = column % kOrderColumns / 4;
  return column / kOrderColumns * kOrderColumns + 16 * (w % 8) + 4 * (w / 8);
}

// Where the code of a column lies.
__device__ __forceinline__ int ordered_code(int column, CodeOrder order) {
  return order == CodeOrder::kColumns ? column : ordered_word(column / 4 * 4) + column % 4;
}

}  // namespace kitchen::int8
