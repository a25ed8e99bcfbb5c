// INT8 quantizer with one scale for a whole tensor: the host side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen::int8 {

struct TensorwiseParams {
  const void* x;             // [elements], aligned to 16 bytes
  const float* given_scale;  // one value; nullptr: from the tensor's absolute maximum
  int8_t* codes;             // [elements], aligned to 16 bytes
  float* scale;              // one value
  uint32_t* partial_max;     // [tensorwise_blocks]; nullptr where a scale is given
  int64_t elements;
  DType dtype;
  uint64_t seed;  // 0 rounds to nearest
};

// Blocks of either kernel, so also the length of `partial_max`. At least 1, at most 6 an SM.
int tensorwise_blocks(int64_t elements, int sm_count);
void quantize_int8_tensorwise(const TensorwiseParams& p, int device, cudaStream_t stream);

}  // namespace kitchen::int8
