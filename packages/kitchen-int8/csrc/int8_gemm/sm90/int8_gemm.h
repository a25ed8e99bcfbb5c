// out = round(residual + residual_scale * (float(a b^T) * a_scale * b_scale + bias)) on sm_90a: see int8_gemm.cu.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kitchen/common/dtype.h"

namespace kitchen::int8 {
struct Int8GemmParams {
  int64_t M, N, K;
  const int8_t *a, *b;                        // [M, K] and [N, K], rows contiguous
  const float *a_scale, *b_scale;             // [M]; [N], or one value where b_scale_stride is 0
  const void* bias;                           // [N] of bias_type; may be nullptr
  const void* residual;                       // [M, N] of out_type; may be nullptr
  const void* residual_scale;                 // [N], or one value where its stride is 0; may be nullptr (1)
  void* out;                                  // [M, N]; may be the residual itself
  DType bias_type, residual_scale_type, out_type;
  int b_scale_stride, residual_scale_stride;  // 0 or 1
  bool programmatic_launch;                   // start while the kernel in front ends (waits for it before it reads)
  bool weights_early;                         // and read b, b_scale, bias at once: the kernel in front has waited, too
};
struct LinearProblem { int64_t M, N, K; int sm_count; bool residual, loose_residual; };  // loose: rows not 16-byte aligned
struct LinearPlan { int variant, grid, raster_group, splits; };  // forced plans: 0 means the usual number
int hopper_variant_count();  // the last three split K
LinearPlan choose_plan(const LinearProblem& problem);
std::string describe(const LinearProblem& problem, const LinearPlan& plan);  // a line for each variant, with its reason
const char* int8_gemm_sm90_unsupported(const Int8GemmParams& params);  // nullptr, or why not
void int8_gemm_sm90(const Int8GemmParams& params, cudaStream_t stream, const LinearPlan* forced = nullptr);
}  // namespace kitchen::int8
