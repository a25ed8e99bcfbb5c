// The product of w4a8_scaled_mm.h for 1 to 32 rows of a and a weight in the resident layout (codes are its records, s_rel is
// not looked at): see sm90/resident.cuh.
#pragma once

#include <string>

#include "w4a8_scaled_mm/w4a8_scaled_mm.h"

namespace kitchen::w4a8::resident {

struct Problem {
  int64_t M, N, K;
  int bits, group;
};
struct Device {
  int sm_count, smem_per_block;
  bool has_clusters;
};
struct Plan {
  int warps_n;  // of the 8 (from 9 rows on 16) warps of a block, side by side along N, of 16 outputs each; the others share K
  int splits;   // pieces of K, the blocks of a cluster: 1, 2, 4 or 8
};

Device query(int device);
Plan choose_plan(const Problem& problem, const Device& device);
const char* unsupported(const Problem& problem);                                    // nullptr, or why not
const char* rejected(const Problem& problem, const Plan& plan, const Device& device);  // nullptr, or why not
std::string describe(const Problem& problem, const Plan& plan);
void run(const ScaledMmParams& params, const Plan* forced, int device, cudaStream_t stream);

}  // namespace kitchen::w4a8::resident
