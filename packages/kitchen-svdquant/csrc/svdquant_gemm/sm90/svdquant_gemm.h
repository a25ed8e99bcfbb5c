// W4A4 GEMM with a low-rank branch for Hopper: its operands, plans and launcher.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kitchen/common/dtype.h"

namespace kitchen::svdquant {

// Codes as e4m3 numbers. Scales as scale_layout.h says, in blocks of 64 rows of a, and of b as wide as the plan's tile.
struct HopperOperands {
  int64_t M, N, K;
  const uint8_t* a;             // [M, K]
  const void* a_scale;          // ceil(M / 64) blocks
  const uint8_t* b;             // [N, K]
  const void* b_scale;          // ceil(N / tile_n) blocks
  int R;                        // of the low-rank operands, a multiple of 8; 0: there is no branch
  const void* low;              // [M, R] bfloat16
  const void* up;               // [N, R] bfloat16
  const void* bias;             // [N], may be nullptr
  const void* residual;         // [M, N] of out's type, may be nullptr
  const float* residual_scale;  // [N], or one value where its stride is 0; may be nullptr
  void* out;                    // [M, N]
  int64_t pitch;                // elements between rows of out and residual
  DType bias_type, out_type;
  int residual_scale_stride;
  bool programmatic_launch;  // start while the kernel in front ends; all is read after it has
};

struct HopperPlan {
  int variant;
  int grid;
  int raster_group;
  int splits;  // blocks of a cluster that share K
};

struct HopperVariant {
  const char* name;
  int tile_m, tile_n, cluster_m, cluster_n;
  bool splits;  // K over a cluster, where there are fewer tiles than SMs: no more than one a cluster
};

int hopper_variant_count();
const HopperVariant& hopper_variant(int variant);
HopperPlan choose_hopper_plan(int64_t M, int64_t N, int64_t K, int sm_count);
HopperPlan hopper_plan_for(int64_t M, int64_t N, int64_t K, int sm_count, int variant);
std::string describe(int64_t M, int64_t N, int64_t K, int sm_count, const HopperPlan& plan);

// nullptr, or why these operands cannot run.
const char* svdquant_gemm_sm90_unsupported(const HopperOperands& operands);
void svdquant_gemm_sm90(const HopperOperands& operands, const HopperPlan& plan, cudaStream_t stream);

}  // namespace kitchen::svdquant
