// The instances compiled for a 2-byte type: three common cases, and one kernel that reads activation and group at run time.
#pragma once

#include "quantize_int8_rowwise/row_registers.cuh"

namespace kitchen::int8 {

template <class T>
RowKernel find_row_kernel(const QuantizeParams& p, const QuantizePlan& plan) {
  using quant::InputAct;
  if (plan.special && p.act == InputAct::kNone && p.group == 0) return pick_special<T, InputAct::kNone, 0>(p, plan);
  if (plan.special && p.act == InputAct::kNone && p.group == 256) return pick_special<T, InputAct::kNone, 256>(p, plan);
  if (plan.special && p.act == InputAct::kSwiglu && p.group == 256) return pick_special<T, InputAct::kSwiglu, 256>(p, plan);
  return pick_general<T>(plan);
}

}  // namespace kitchen::int8
