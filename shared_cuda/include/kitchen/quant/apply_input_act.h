// The arithmetic of input activations, in fp32 (arithmetic.py: apply_input_act).
#pragma once

#include "kitchen/ptx/math.h"
#include "kitchen/quant/input_act.h"

namespace kitchen::quant {

// 1 / (1 + e^-x) by ex2 and rcp: relative error under 2^-21 for |x| < 16 (ex2 inherits the rounding of x * log2(e)), and
// the exact limits 0 and 1 beyond.
__device__ __forceinline__ float sigmoid(float x) {
  return ptx::rcp_approx(__fadd_rn(1.0f, ptx::ex2_approx(__fmul_rn(x, -1.4426950408889634f))));
}

// 0.5 v (1 + tanh(u)) = v sigmoid(2u), u = sqrt(2/pi) (v + 0.044715 v^3): no cancellation in the negative tail.
__device__ __forceinline__ float gelu_tanh(float v) {
  const float u = 0.7978845608028654f * __fmaf_rn(0.044715f * v, v * v, v);
  return v * sigmoid(2.0f * u);
}

__device__ __forceinline__ float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

__device__ __forceinline__ float situ(float hidden, float gate) {
  return 4.0f * tanhf(0.25f * gate) * sigmoid(gate) * 25.0f * tanhf(hidden / 25.0f);
}

// Every activation that needs nothing but the element (and its pair). rms_norm is applied by the caller: it needs the row.
__device__ __forceinline__ float apply(InputAct act, float first, float second) {
  switch (act) {
    case InputAct::kGeluTanh:
      return gelu_tanh(first);
    case InputAct::kSwiglu:
      return swiglu(first, second);
    case InputAct::kSitu:
      return situ(first, second);
    default:
      return first;
  }
}

}  // namespace kitchen::quant
