// The product of w4a8_scaled_mm.h for more than a few rows of a on Hopper, codes decoded in the main loop: see sm90/hopper.cuh.
#pragma once

#include <string>

#include "w4a8_scaled_mm/w4a8_scaled_mm.h"

namespace kitchen::w4a8::hopper {

struct Problem {
  int64_t M, N, K;
  int bits, group;
};
struct Plan {
  int tokens;  // of a tile: 32, 64 (of 64 outputs), 128 or 256 (of 128 outputs)
  int splits;  // pieces of K, the blocks of a cluster: 1, 2, 4 or 8; more than 1 for tiles of 32 and 64 tokens only
};

Plan choose_plan(const Problem& problem, int sm_count);
const char* unsupported(const Problem& problem);  // nullptr, or why not
const char* rejected(const Problem& problem, const Plan& plan);  // nullptr, or why not
std::string describe(const Problem& problem, const Plan& plan);
// params.a: the activations as order_tokens makes them, [M, K rounded up to 128].
void run(const ScaledMmParams& params, const Plan* forced, int device, cudaStream_t stream);

}  // namespace kitchen::w4a8::hopper
