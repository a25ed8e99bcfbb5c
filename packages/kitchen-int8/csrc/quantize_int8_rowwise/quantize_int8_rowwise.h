// Rowwise INT8 quantizer with an activation and a ConvRot rotation in front: the host side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kitchen/common/dtype.h"
#include "kitchen/quant/input_act.h"

namespace kitchen::int8 {

// Where codes lie in a row.
enum class CodeOrder {
  kColumns,  // column by column
  kLanes,    // as 32 neighbouring columns a lane of four make wgmma's operand; code_order.cuh says which, rows padded by zeros
};

struct QuantizeParams {
  const void* x;           // [M, K], or [M, 2K] for an activation of a pair; last dim contiguous
  int64_t x_row_stride;    // elements
  const void* act_weight;  // [K] for rms_norm, else nullptr
  int8_t* codes;           // [M, K] contiguous (another order: rows padded to a multiple of 128 columns)
  float* scales;           // [M]
  int64_t M;
  int K;
  int group;  // of the rotation: 0 (none), 4, 16, 64, 256, 1024 or 4096; divides K
  float act_eps;
  DType dtype, act_weight_dtype;
  quant::InputAct act;
  uint64_t seed;  // 0 rounds to nearest
  bool programmatic_launch;  // start while the kernel in front ends (waits for it before it reads)
  CodeOrder order;
  int row_bytes;  // of codes; the launcher fills it in (code_order.cuh)
};

// What a plan depends on.
struct QuantizeDevice {
  int sm_count;
  bool has_clusters;
  int smem_per_cta, smem_per_sm;  // bytes, the most that can be asked for
};

// How it is computed.
struct QuantizePlan {
  int tiles;        // tiles of 512 columns held by a warp, 1 or 2; 0: the kernel of chunks, which takes anything
  int warps;        // of a CTA
  int cluster;      // CTAs that share a row
  int ctas_per_sm;  // grid limit, each CTA walking over rows; 0: one CTA a row
  bool special;     // a kernel that knows activation and group at compile time
};

QuantizePlan choose_plan(const QuantizeParams& p, const QuantizeDevice& device);
// Launches on `stream` of `device`. `forced`, if not nullptr, replaces the chosen plan (for measurements).
void quantize_int8_rowwise(const QuantizeParams& p, const QuantizePlan* forced, int device, cudaStream_t stream);

}  // namespace kitchen::int8
