// out = residual + residual_scale * (float(a b^T) * a_scale * b_scale + bias), codes multiplied in fp16: what the host
// passes.
#pragma once

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::volta {

struct ScaledMmParams {
  const uint8_t* a;             // [M, K] int8 codes, rows a_pitch bytes apart
  const uint8_t* b;             // [N, K] int8 codes, rows b_pitch bytes apart
  const float* a_scale;         // [M]
  const float* b_scale;         // [N], or [1] with stride 0
  const void* bias;             // [N], may be nullptr
  const void* residual;         // [M, N], may be nullptr
  const float* residual_scale;  // [N], or [1] with stride 0; nullptr: 1
  void* out;                    // [M, N]
  int64_t M, N, K;              // K at most 131071: the sums are int32
  int64_t a_pitch, b_pitch;
  int b_scale_stride, residual_scale_stride;
  DType bias_type, residual_type, out_type;
  int raster_group;  // rows of tiles that are walked together, so that their operands are still in L2
  bool aligned;      // a, b and their pitches, to 16 bytes
  bool vectors;      // N is a multiple of 8, and out and residual are aligned to 16 bytes
};

// The tiles there are, and the kernels of kernels.cu that compute them. Numbers are shared with Python (_gemm.py).
struct Tile {
  const char* kernel;
  int m, n, threads, shared_bytes;
};

}  // namespace kitchen::volta
