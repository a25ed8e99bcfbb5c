// The arguments of the rowwise quantizer as Python passes them: numbers and addresses. For the bindings of every package that
// holds the kernel.
#pragma once

#include "kitchen/host/check.h"
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

namespace kitchen::int8 {

inline QuantizeParams quantize_params(uintptr_t x, int64_t x_row_stride, int dtype, uintptr_t codes, uintptr_t scales, int64_t M,
                                      int64_t K, int group, int act, uintptr_t act_weight, int act_weight_dtype, float act_eps,
                                      uint64_t seed) {
  host::require(M >= 0 && K >= 1 && K < (int64_t{1} << 30), "quantize_int8_rowwise: K must be in 1 .. 2^30 - 1");
  const bool power_of_4 = group == 0 || group == 4 || group == 16 || group == 64 || group == 256 || group == 1024 || group == 4096;
  host::require(power_of_4 && (group == 0 || K % group == 0), "quantize_int8_rowwise: the group must be 0 or 4, 16, .. 4096 and divide K");
  host::require(dtype >= 0 && dtype <= 2 && act_weight_dtype >= 0 && act_weight_dtype <= 2, "quantize_int8_rowwise: unknown dtype");
  host::require(act >= 0 && act <= 4, "quantize_int8_rowwise: unknown activation");
  QuantizeParams p = {};
  p.x = reinterpret_cast<const void*>(x);
  p.x_row_stride = x_row_stride;
  p.act_weight = reinterpret_cast<const void*>(act_weight);
  p.codes = reinterpret_cast<int8_t*>(codes);
  p.scales = reinterpret_cast<float*>(scales);
  p.M = M;
  p.K = static_cast<int>(K);
  p.group = group;
  p.act_eps = act_eps;
  p.dtype = static_cast<DType>(dtype);
  p.act_weight_dtype = static_cast<DType>(act_weight_dtype);
  p.act = static_cast<quant::InputAct>(act);
  p.seed = seed;
  return p;
}

}  // namespace kitchen::int8
