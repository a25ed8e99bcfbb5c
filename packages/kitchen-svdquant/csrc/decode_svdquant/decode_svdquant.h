// 4-bit codes and their scales, from the stored form to what the Hopper GEMM multiplies: e4m3 numbers and parts of scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::svdquant {

struct DecodeParams {
  const uint8_t* codes;  // [rows, K / 2], aligned to 16 bytes
  const void* scales;    // [K / 64, rows], of scale_type
  uint8_t* out;          // [rows, K]
  uint4* out_scales;     // [ceil(rows / block)][even_groups(K / 64)][block]: svdquant_gemm/scale_layout.h
  int64_t rows, K;
  int64_t scales_pitch;  // elements from group to group of `scales`
  int block;             // rows that share a block of scales
  bool is_a;             // the parts of a's scales, else of b's
  bool is_unsigned;
  DType scale_type;
  const float* low;        // [low_rows, R]: rounded to bfloat16 on the way; may be nullptr
  __nv_bfloat16* out_low;  // [low_rows, out_R], ranks from R on zeros
  int64_t low_rows;
  int R, out_R;
};

void check_decode(const DecodeParams& params);  // throws where decode_svdquant would
void decode_svdquant(const DecodeParams& params, int device, cudaStream_t stream);

}  // namespace kitchen::svdquant
