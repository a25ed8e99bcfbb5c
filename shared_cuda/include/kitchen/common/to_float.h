// Activations to fp32, exactly, for every bit pattern.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kitchen/common/dtype.h"

namespace kitchen {

// One 32-bit word of memory to the fp32 values in it, lowest address first. Exact for every bit pattern.
template <class T>
struct Word;

template <>
struct Word<float> {
  static constexpr int kValues = 1;
  __device__ static void unpack(uint32_t word, float* out) { out[0] = __uint_as_float(word); }
};

template <>
struct Word<__half> {
  static constexpr int kValues = 2;
  __device__ static void unpack(uint32_t word, float* out) {
    out[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
    out[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
};

template <>
struct Word<__nv_bfloat16> {
  static constexpr int kValues = 2;
  __device__ static void unpack(uint32_t word, float* out) {
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
  }
};

// One element of an array whose type is known at run time only. For slow paths: the branch is taken per element.
__device__ inline float load_as_float(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(data)[index]);
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[index]) << 16);
}

}  // namespace kitchen
