// INT8 activations in the order of k in which a lane that decodes 32 neighbouring columns feeds wgmma: see order_tokens.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kitchen::w4a8 {

struct OrderTokensParams {
  const int8_t* a;  // [M, K], rows contiguous, aligned to 16 bytes
  int8_t* out;      // [M, K rounded up to 128], aligned to 16 bytes
  int64_t M;
  int K;            // a multiple of 16
  bool programmatic_launch;
};

void order_tokens(const OrderTokensParams& params, int device, cudaStream_t stream);

}  // namespace kitchen::w4a8
