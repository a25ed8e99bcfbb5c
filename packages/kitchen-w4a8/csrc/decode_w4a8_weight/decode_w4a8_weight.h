// Stored codes to INT8: v8[n, k] = clamp(rne(fp32(level * s_rel[n, k/g])), -127, 127); see decode_w4a8_weight.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kitchen::w4a8 {

// Whether the kernel starts while the one in front ends (sm_90), and when it waits for that: before it writes, or only before
// its own end, where nothing in front uses `out`. Codes and scales must be older than the kernel in front.
enum class EarlyLaunch : int { kNone = 0, kWaitsFirst = 1, kWaitsLast = 2 };

struct DecodeParams {
  const uint8_t* codes;   // [N, K/2] or [N, 3K/4], rows contiguous, aligned to 8 bytes
  const void* s_rel;      // [N, K/g] e4m3 or float32, contiguous
  const float* codebook;  // [16]; nullptr: level = code - 8 (6 bits: code - 32)
  int8_t* out;            // [N, K], aligned to 16 bytes
  int64_t N;
  int K;                  // a multiple of 16 (6 bits: of 32)
  int group;              // 4, 8 (4 bits), or a multiple of 16; divides K
  int bits;               // 4 or 6
  bool float_scales;      // s_rel is float32
  EarlyLaunch launch = EarlyLaunch::kNone;
};

void decode_w4a8_weight(const DecodeParams& params, int device, cudaStream_t stream);

}  // namespace kitchen::w4a8
