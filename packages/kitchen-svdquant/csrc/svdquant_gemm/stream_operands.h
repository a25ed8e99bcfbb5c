// Operands of the GEMMs that stream the weight: any M, made for few rows of x.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::svdquant {

// Of sm90/packed_gemm.
struct PackedPlan {
  int variant;  // of the tile
  int splits;   // pieces of K
};

// Where the sums of pieces of K meet; unused where there is one piece.
struct PackedWorkspace {
  float* sums;        // packed_sums(...) of them, aligned to 16 bytes
  uint32_t* arrived;  // packed_tiles(...) of them, zeros
  bool cleared;       // the kernel in front wrote these zeros; else the launcher does
};

struct StreamOperands {
  int64_t M, N, K;
  int R;
  const uint8_t* a;             // [M, K / 2] packed codes, aligned to 8 bytes
  const float* a_scale;         // [K / 64, M]
  const uint8_t* b;             // [N, K / 2] packed codes, aligned to 8 bytes
  const void* b_scale;          // [K / 64, N] of b_scale_type, aligned to 4 bytes
  const float* low;             // [M, R]
  const void* up;               // [N, R] of up_type, aligned to 4 bytes
  const void* bias;             // [N] of bias_type, may be nullptr
  const void* residual;         // [M, N] of out_type, may be nullptr
  const float* residual_scale;  // [N], or one value where its stride is 0; may be nullptr
  void* out;                    // [M, N]
  DType b_scale_type, up_type, bias_type, out_type;
  int residual_scale_stride;
  bool is_unsigned;          // codes of a
  bool int4;                 // 4-bit MMA (sm_80 to sm_90), else 8-bit
  bool programmatic_launch;  // the kernel in front triggers it, and writes a, a_scale, low and workspace.arrived alone
  // Of sm90/packed_gemm alone:
  PackedPlan plan;
  PackedWorkspace workspace;
  int64_t b_scale_pitch;  // elements from a group of b_scale to the next, a multiple of 8
};

}  // namespace kitchen::svdquant
