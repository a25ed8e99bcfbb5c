// out[n, k] = round(fma(q[n, k] - 8, scale[k / g, n], zero[k / g, n])): see dequantize_awq.cu.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::awq {
struct DequantizeParams {
  const uint8_t* codes;        // [N, K/2], rows contiguous
  const void *scale, *zero;    // [K/g, N] of parameter_type, rows parameter_pitch elements apart
  void* out;                   // [N, K] of out_type, contiguous
  int64_t N, K, group, parameter_pitch;
  DType parameter_type, out_type;
  DType round_type;            // float32 out: each weight is rounded to this type first
};
void dequantize_awq(const DequantizeParams& params, int device, cudaStream_t stream);
}  // namespace kitchen::awq
