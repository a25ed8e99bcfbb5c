#include "quantize_int8_rowwise/row_registers.cuh"

namespace kitchen::int8 {
template <class T>
RowKernel find_row_kernel(const QuantizeParams&, const QuantizePlan& plan) {
  return pick_general<T>(plan);
}
template RowKernel find_row_kernel<float>(const QuantizeParams&, const QuantizePlan&);
}  // namespace kitchen::int8
