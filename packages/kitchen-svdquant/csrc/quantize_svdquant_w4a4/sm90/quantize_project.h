// The activation quantizer and x * proj_down in one pass over x, with the weight's codes decoded beside it. Hopper.
#pragma once

#include <cuda_bf16.h>

#include "decode_svdquant/decode_svdquant.h"
#include "quantize_svdquant_w4a4/quantize_svdquant_w4a4.h"

namespace kitchen::svdquant {

struct ProjectParams {
  QuantizeParams quantize;      // x of 16 bits, rows aligned to 16 bytes
  const void* proj_down;        // [K, R] of x's type, aligned to 16 bytes
  int R;                        // a multiple of 8, at least 8
  float* low;                   // [M, R], or nullptr
  __nv_bfloat16* low_bfloat16;  // [M, R], or nullptr
};

// nullptr, or why these operands cannot run.
const char* quantize_project_unsupported(const ProjectParams& params);
// `weight`: decoded by blocks of the same launch; may be nullptr.
void quantize_project(const ProjectParams& params, const DecodeParams* weight, int device, cudaStream_t stream);

}  // namespace kitchen::svdquant
