// From the resident layout (resident.py) to codes and scales as they are stored.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kitchen::w4a8 {

struct UnpackParams {
  const uint8_t* records;  // N * (K/8 * bits + K/g) bytes, aligned to 16
  uint8_t* codes;         // [N, K/8 * bits], aligned to 16
  uint8_t* s_rel;         // [N, K/g], aligned to 16
  int64_t N, K;           // multiples of 16 and 256
  int group, bits;        // a power of two, 16 .. 256; 4 or 6
};

void unpack_w4a8_weight(const UnpackParams& params, int device, cudaStream_t stream);

}  // namespace kitchen::w4a8
