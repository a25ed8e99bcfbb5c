// How a thread brings rows of an operand to shared memory, as fp16: 16 elements at a time through registers, because there
// is no cp.async before sm_80. What lies beyond the matrix is zeros, and is not read.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "kitchen/copy/load_bytes.h"

namespace kitchen::volta {

// Four int8 codes to fp16, exactly: flipping the sign bit makes them 0..255, below the byte 0x64 they are 1024 + code +
// 128, and one subtraction takes 1152 off again.
__device__ __forceinline__ uint2 codes_to_half(uint32_t codes) {
  const uint32_t shifted = codes ^ 0x80808080u, high = 0x64646464u, offset_bits = 0x64806480u;
  uint32_t words[2] = {__byte_perm(shifted, high, 0x4140), __byte_perm(shifted, high, 0x4342)};
  __half2 offset;
  memcpy(&offset, &offset_bits, 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    __half2 pair;
    memcpy(&pair, &words[i], 4);
    pair = __hsub2(pair, offset);
    memcpy(&words[i], &pair, 4);
  }
  return make_uint2(words[0], words[1]);
}

// int8 codes in memory.
struct Codes {
  static constexpr int kBytes = 1;
  struct Staged {
    uint4 codes;
  };

  __device__ __forceinline__ static Staged zeros() { return {make_uint4(0, 0, 0, 0)}; }
  __device__ __forceinline__ static Staged load(const uint8_t* row, int64_t k) {
    return {*reinterpret_cast<const uint4*>(row + k)};
  }
  __device__ __forceinline__ static Staged load_checked(const uint8_t* row, int k, int K, bool aligned) {
    return {aligned ? copy::load_16_aligned(row, k, K) : copy::load_16_unaligned(row, k, K)};
  }
  // Half a chunk: 8 elements.
  __device__ __forceinline__ static uint4 half_of(const Staged& staged, bool upper) {
    const uint2 low = codes_to_half(upper ? staged.codes.z : staged.codes.x);
    const uint2 high = codes_to_half(upper ? staged.codes.w : staged.codes.y);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
};

// fp16 in memory, for the plain GEMM that the fused one is measured against. K a multiple of 64, rows aligned to 16 bytes.
struct Halves {
  static constexpr int kBytes = 2;
  struct Staged {
    uint4 low, high;
  };

  __device__ __forceinline__ static Staged zeros() { return {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}; }
  __device__ __forceinline__ static Staged load(const uint8_t* row, int64_t k) {
    const uint4* const from = reinterpret_cast<const uint4*>(row + 2 * k);
    return {from[0], from[1]};
  }
  __device__ __forceinline__ static Staged load_checked(const uint8_t* row, int k, int K, bool aligned) {
    return k < K ? load(row, k) : zeros();
  }
  __device__ __forceinline__ static uint4 half_of(const Staged& staged, bool upper) { return upper ? staged.high : staged.low; }
};

template <class Config, class Element, int kRows>
struct OperandRows {
  static constexpr int kChunks = Config::kTileK / 16;  // of a row in a stage
  static constexpr int kRowsAtOnce = Config::kThreads / kChunks;
  static constexpr int kPasses = kRows / kRowsAtOnce;
  static_assert(kRows % kRowsAtOnce == 0, "every thread has a chunk in every pass");

  const uint8_t* row;  // the first of this thread's rows, perhaps beyond the matrix
  int64_t pitch;       // bytes
  int rows_left;       // of the matrix from that row on
  int K, chunk_k;      // columns of the matrix; first column of this thread's chunk in a stage
  uint32_t place;      // of the chunk in a stage, bytes
  bool aligned, whole;  // rows to 16 bytes; the tile's rows are all in the matrix, and aligned
  bool swapped;        // stores the upper half of a chunk first: 8 lanes of one row then write to 8 groups of banks
  typename Element::Staged staged[kPasses];

  __device__ __forceinline__ OperandRows(const uint8_t* data, int64_t pitch, int64_t rows, int K, int64_t first_row,
                                         bool aligned)
      : pitch(pitch), K(K), aligned(aligned) {
    const int tile_row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    row = data + (first_row + tile_row) * pitch;
    const int64_t left = rows - first_row - tile_row;
    rows_left = left < kRows ? static_cast<int>(left) : kRows;
    whole = aligned && first_row + kRows <= rows;
    chunk_k = 16 * chunk;
    place = 2 * (tile_row * Config::kPitch + chunk_k);
    swapped = kChunks > 4 && (chunk & 4);
  }

  // Stages beyond K are zeros. kWhole: the tile is, and all of the stage lies within K.
  template <bool kWhole>
  __device__ __forceinline__ void fetch(int k_tile) {
    const int k = k_tile * Config::kTileK + chunk_k;
    if constexpr (kWhole) {
      load(k);
    } else if (whole && (k_tile + 1) * Config::kTileK <= K) {
      load(k);
    } else {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        staged[pass] = pass * kRowsAtOnce < rows_left
                           ? Element::load_checked(row + pass * kRowsAtOnce * pitch, k, K, aligned)
                           : Element::zeros();
      }
    }
  }

  __device__ __forceinline__ void put(uint8_t* stage) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      uint8_t* const to = stage + place + pass * kRowsAtOnce * 2 * Config::kPitch;
      *reinterpret_cast<uint4*>(to + 16 * swapped) = Element::half_of(staged[pass], swapped);
      *reinterpret_cast<uint4*>(to + 16 * !swapped) = Element::half_of(staged[pass], !swapped);
    }
  }

 private:
  __device__ __forceinline__ void load(int k) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) staged[pass] = Element::load(row + pass * kRowsAtOnce * pitch, k);
  }
};

}  // namespace kitchen::volta
