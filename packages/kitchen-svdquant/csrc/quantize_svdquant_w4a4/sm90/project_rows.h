// x * proj_down for more rows than a few, on Hopper. The next kernel may be launched to run beside it (host::Launch::programmatic).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::svdquant {

struct ProjectParams {
  const void* x;                // [M, K] of `type`, 16 bits, aligned to 16 bytes
  int64_t x_row_stride;         // elements, a multiple of 8
  DType type;
  int64_t M, K;                 // K a multiple of 64
  const void* proj_down;        // [K, R] of `type`, aligned to 16 bytes
  int R;                        // a multiple of 8, at least 8
  float* low;                   // [M, R], or nullptr
  __nv_bfloat16* low_bfloat16;  // [M, R], or nullptr
};

// nullptr, or why these operands cannot run.
const char* project_rows_unsupported(const ProjectParams& params);
void project_rows(const ProjectParams& params, int device, cudaStream_t stream);

}  // namespace kitchen::svdquant
