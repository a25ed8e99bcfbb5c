// A dense weight to 4-bit or 6-bit codes whose decoded values lie on the INT8 grid of each row: see quantize_w4a8_weight.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::w4a8 {

enum class Levels : int { kTable = 0, kUniform = 1, kAsymmetric = 2, kSixBits = 3 };

struct QuantizeWeightParams {
  const void* weight;  // [N, K] of weight_type, rows contiguous and aligned to 16 bytes
  int64_t row_stride;  // elements
  const float* codebook;  // [16] for kTable, else nullptr
  uint8_t* codes;  // [N, K/2] or [N, 3K/4]
  void* s_rel;  // [N, K/g] e4m3 bytes or float32
  float* s_channel;  // [N]
  void* correction;  // [K/g, N] of weight_type for kAsymmetric, else nullptr
  int64_t N;
  int K;  // a multiple of 16 (6 bits: of 32)
  int group;  // a power of two from 4 (6 bits: 16) to 512 that divides K
  int rotation;  // ConvRot: 0, or a power of four that divides K
  Levels levels;
  DType weight_type;
  bool float_scales;  // s_rel is float32
  bool scale_search;  // try each scale's neighbours
  uint64_t seed;  // 0 rounds to nearest
};

int64_t quantize_w4a8_weight_shared_bytes(int64_t K, int group);
void quantize_w4a8_weight(const QuantizeWeightParams& params, int device, cudaStream_t stream);

}  // namespace kitchen::w4a8
