// out = round(residual + residual_scale * (float(a v8^T) * a_scale * b_scale + bias)), v8 decoded from 4-bit or 6-bit codes on
// the fly.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::w4a8 {

struct ScaledMmParams {
  int64_t M, N, K;
  const int8_t* a;  // [M, K], rows contiguous, aligned to 16 bytes
  const float* a_scale;  // [M]
  const uint8_t* codes;  // [N, K/2] or [N, 3K/4], rows contiguous, aligned to 16 bytes
  const uint8_t* s_rel;  // [N, K/g] e4m3 bytes, contiguous; nullptr: codes are in the resident layout (ring alone)
  const float* codebook;  // [16]; nullptr: level = code - 8 (6 bits: code - 32)
  const float* b_scale;  // [N]: s_channel
  const void* bias;  // [N] of bias_type; may be nullptr
  const void* residual;  // [M, N] of out_type; may be nullptr
  const float* residual_scale;  // [N], or one value where its stride is 0; may be nullptr (1)
  void* out;  // [M, N]
  DType bias_type, out_type;
  int residual_scale_stride;  // 0 or 1
  int bits, group;  // 4 or 6; a power of two, at least 16
  bool ordered;  // hopper alone: a is in the order of order_tokens.h (int8::CodeOrder), rows padded to 128 columns
  bool programmatic_launch;  // start while the kernel in front ends: everything but a, a_scale and residual is older than it
};

}  // namespace kitchen::w4a8
