// Where a 16-byte chunk of a row lies in a tile whose rows are 64 bytes or a multiple of 128: eight neighbouring rows have the
// same chunk in eight different groups of banks, so that ldmatrix and row-wise stores meet no bank twice.
#pragma once

namespace kitchen::smem {

template <int kRowBytes>
__host__ __device__ constexpr int swizzle_of(int row) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "written for rows of 64 bytes or whole bank lines");
  return kRowBytes == 64 ? row / 2 % 4 : row % 8;
}

// Bytes from the start of the tile. Its dependence on the chunk is one XOR: offset(row, a ^ b) = offset(row, a) ^ (16 * b).
template <int kRowBytes>
__host__ __device__ constexpr int swizzled_offset(int row, int chunk) {
  return row * kRowBytes + 16 * (chunk ^ swizzle_of<kRowBytes>(row));
}

}  // namespace kitchen::smem
