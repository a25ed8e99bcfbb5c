// The product of w4a8_scaled_mm.h for many rows of a on Hopper: pieces of the weight are decoded to INT8, each small enough to
// stay in the L2, and multiplied by the INT8 GEMM. See chunked.cu.
#pragma once

#include "w4a8_scaled_mm/w4a8_scaled_mm.h"

namespace kitchen::w4a8::chunked {

constexpr int64_t kMostWorkspace = int64_t{64} << 20;  // bytes; more only where 256 rows of the weight need it

struct Problem {
  int64_t M, N, K;
};

int64_t chunk_rows(int64_t N, int64_t K);  // of the weight, decoded at once: a multiple of 256, or N
int64_t workspace_bytes(int64_t N, int64_t K);
double estimated_cycles(const Problem& problem, int sm_count);  // of the busiest SM, decoding included
const char* unsupported(const ScaledMmParams& params);  // nullptr, or why not
void run(const ScaledMmParams& params, int8_t* workspace, int device, cudaStream_t stream);

}  // namespace kitchen::w4a8::chunked
