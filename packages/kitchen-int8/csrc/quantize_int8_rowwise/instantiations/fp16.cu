#include "quantize_int8_rowwise/find_half_type.cuh"

namespace kitchen::int8 {
template RowKernel find_row_kernel<__half>(const QuantizeParams&, const QuantizePlan&);
}
