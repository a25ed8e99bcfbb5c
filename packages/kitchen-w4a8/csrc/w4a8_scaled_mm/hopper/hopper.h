// The product of w4a8_scaled_mm.h for more than a few rows of a on Hopper: codes decoded in the main loop (sm90/hopper.cuh), or,
// for many rows, into a workspace first (sm90/chunked.cu).
#pragma once

#include <string>

#include "quantize_int8_rowwise/quantize_int8_rowwise.h"
#include "w4a8_scaled_mm/w4a8_scaled_mm.h"

namespace kitchen::w4a8::hopper {

struct Problem {
  int64_t M, N, K;
  int bits, group;
  bool copies_result;  // the copy engine can write the result and read the residual: rows aligned to 16 bytes
};
struct Plan {
  int rows, tokens;  // outputs and tokens of a tile: one of kTiles in hopper.cu; 0 and 0: decoded first, then INT8
  int splits;  // pieces of K, the blocks of a cluster: 1, 2, 4 and 8 of 64 outputs (beyond 128 tokens: 1 and 2), 1 to 4 of others
};

Problem problem_of(const ScaledMmParams& params);
Plan choose_plan(const Problem& problem, int sm_count);  // the only place that decides
const char* unsupported(const Problem& problem);  // nullptr, or why not
const char* rejected(const Problem& problem, const Plan& plan);  // nullptr, or why not
std::string describe(const Problem& problem, const Plan& plan);
int64_t workspace_bytes(const Problem& problem, const Plan& plan);
int8::CodeOrder token_order(const Plan& plan);  // of a, where it need not be ordered first (ScaledMmParams::ordered)
// workspace: of workspace_bytes (nullptr where a is ordered), aligned to 256; nothing need be in it.
void run(const ScaledMmParams& params, int8_t* workspace, const Plan* forced, int device, cudaStream_t stream);

}  // namespace kitchen::w4a8::hopper
