// out = round(silu(g) * u), g and u the gate and up halves of an INT8 linear, on sm_90a: see int8_swiglu.cu.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kitchen/common/dtype.h"

namespace kitchen::int8 {
struct SwigluParams {
  int64_t M, I, K;
  const int8_t *a, *b;             // [M, K]; [2I, K], gate rows and then up rows
  int64_t a_pitch, b_pitch;        // bytes from row to row, multiples of 16
  const float *a_scale, *b_scale;  // [M]; [2I], or one value where b_scale_stride is 0
  const void* bias;                // [2I] of bias_type; may be nullptr
  void* out;                       // [M, I] of out_type: float32 or bfloat16
  DType bias_type, out_type;
  int b_scale_stride;              // 0 or 1
  bool programmatic_launch;        // start while the kernel in front ends (waits for it before it reads)
  bool weights_early;              // and read weights already: the kernel in front has waited for those before it
};
struct SwigluProblem { int64_t M, I, K; int sm_count; };
struct SwigluPlan { int variant, grid, raster_group; };  // forced plans: 0 blocks or rows means the usual number
SwigluPlan choose_plan(const SwigluProblem& problem);
int swiglu_variants();
std::string describe(const SwigluProblem& problem, const SwigluPlan& plan);  // a line for each variant
const char* int8_swiglu_sm90_unsupported(const SwigluParams& params);        // nullptr, or why not
void int8_swiglu_sm90(const SwigluParams& params, cudaStream_t stream, const SwigluPlan* forced = nullptr);
}  // namespace kitchen::int8
