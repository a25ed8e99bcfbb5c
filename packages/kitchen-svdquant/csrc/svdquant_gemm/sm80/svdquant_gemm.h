// W4A4 GEMM with a low-rank branch by mma.sync of sm_80 and later: any M, made for few rows of x.
#pragma once

#include "svdquant_gemm/stream_operands.h"

namespace kitchen::svdquant {

void svdquant_gemm_sm80(const StreamOperands& operands, int device, cudaStream_t stream);

}  // namespace kitchen::svdquant
