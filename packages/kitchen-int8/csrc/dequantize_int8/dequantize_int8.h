// INT8 codes back to floats, with the inverse rotation; all rows, or the rows that indices name. The host side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::int8 {

struct DequantizeParams {
  const int8_t* codes;   // [V, K], rows `pitch` bytes apart
  const float* scale;    // [V], or one value where scale_stride is 0
  const void* indices;   // [M] int64, or int32: out's row m is row indices[m] of codes; nullptr: row m
  void* out;             // [M, K] of out_type, contiguous, aligned to 16 bytes
  int64_t pitch;
  int64_t M, V;
  int K;
  int group;             // of the rotation: 0 (none), 4, 16, 64, 256, 1024 or 4096; divides K
  int scale_stride;      // 0 or 1
  bool narrow_indices;   // int32
  DType out_type;
};

void dequantize_int8(const DequantizeParams& p, int device, cudaStream_t stream);

}  // namespace kitchen::int8
