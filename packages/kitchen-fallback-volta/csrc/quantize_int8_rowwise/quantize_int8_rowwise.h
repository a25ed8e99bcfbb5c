// codes = rne(h / scale), scale = max(absmax(h) / 127, 1e-30), h = rotate(act(x)), row by row: what the host passes.
#pragma once

#include <cstdint>

#include "kitchen/common/dtype.h"
#include "kitchen/quant/input_act.h"

namespace kitchen::volta {

struct QuantizeParams {
  const void* x;           // [M, K], or [M, 2K] for an activation of a pair; last dim contiguous
  const void* act_weight;  // [K] for rms_norm, else nullptr
  int8_t* codes;           // [M, K] contiguous
  float* scales;           // [M]
  int64_t x_row_stride;    // elements
  uint64_t seed;           // 0 rounds to nearest
  int K;
  int group;  // of the rotation: 0 (none), 4, 16, 64, 256, 1024 or 4096; divides K
  float act_eps;
  DType dtype, act_weight_dtype;
  quant::InputAct act;
  bool vectors;  // x's rows and codes aligned to 16 bytes, K a multiple of 16
};

constexpr int kThreadColumns = 16;      // that a thread holds
constexpr int kMaxQuantizeThreads = 1024;

// Of a block of so many threads, for a rotation group: the exchange of values, one word in 17 empty.
constexpr int quantize_shared_bytes(int threads) { return 4 * 17 * threads; }

}  // namespace kitchen::volta
