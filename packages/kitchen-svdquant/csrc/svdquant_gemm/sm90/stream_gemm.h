// The W4A4 GEMM that streams the weight, for Hopper: the copy engine streams the weight. Made for few rows of x.
#pragma once

#include "svdquant_gemm/stream_operands.h"

namespace kitchen::svdquant {

// nullptr, or why these operands cannot run.
const char* svdquant_stream_sm90_unsupported(const StreamOperands& operands);
void svdquant_stream_sm90(const StreamOperands& operands, int device, cudaStream_t stream);

}  // namespace kitchen::svdquant
