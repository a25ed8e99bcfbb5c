// W4A4 GEMM with a low-rank branch on Hopper for some rows of x: packed_gemm.cu.
#pragma once

#include "svdquant_gemm/stream_operands.h"

namespace kitchen::svdquant {

PackedPlan packed_plan(int64_t M, int64_t N, int64_t K, int sm_count);
int64_t packed_tiles(int64_t M, int64_t N, const PackedPlan& plan);
int64_t packed_sums(int64_t M, int64_t N, const PackedPlan& plan);
int packed_variant_count();

const char* svdquant_packed_sm90_unsupported(const StreamOperands& operands);
void svdquant_packed_sm90(const StreamOperands& operands, int device, cudaStream_t stream);

}  // namespace kitchen::svdquant
