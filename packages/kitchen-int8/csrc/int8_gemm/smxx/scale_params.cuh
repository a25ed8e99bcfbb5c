// What the epilogues of the mma.sync GEMMs and of the kernels for few rows read and write: of sm80/, sm75/ and decode/.
#pragma once

#include "int8_gemm/sm90/int8_gemm.h"
#include "kitchen/common/pack_pair.h"
#include "kitchen/common/to_float.h"

namespace kitchen::int8 {

struct ScaleParams {
  const float *a_scale, *b_scale;
  const void *bias, *residual, *residual_scale;
  void* out;
  int b_scale_stride, residual_scale_stride;
  DType bias_type, residual_scale_type, out_type;
  bool vectors;  // N is a multiple of the columns that a thread finishes, and out and residual are aligned to 16 bytes
};

inline bool aligned_16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline ScaleParams scale_params(const Int8GemmParams& g, int columns_of_a_thread) {
  const bool vectors = g.N % columns_of_a_thread == 0 && aligned_16(g.out) && aligned_16(g.residual);
  return {g.a_scale, g.b_scale, g.bias, g.residual, g.residual_scale, g.out, g.b_scale_stride, g.residual_scale_stride,
          g.bias_type, g.residual_scale_type, g.out_type, vectors};
}

__device__ __forceinline__ float b_scale_of(const ScaleParams& p, int n) {
  return p.b_scale[static_cast<int64_t>(n) * p.b_scale_stride];
}

// t * s + (-0) is t * s to the bit, signed zeros included.
__device__ __forceinline__ float bias_of(const ScaleParams& p, int n) {
  return p.bias == nullptr ? -0.0f : load_as_float(p.bias, n, p.bias_type);
}

__device__ __forceinline__ float residual_scale_of(const ScaleParams& p, int n) {
  if (p.residual_scale == nullptr) return 1.0f;
  return load_as_float(p.residual_scale, static_cast<int64_t>(n) * p.residual_scale_stride, p.residual_scale_type);
}

}  // namespace kitchen::int8
