// out = round(residual + residual_scale * (x W^T + bias)), W decoded from 4 bits: decode/ for few rows of x, sm90/ on Hopper.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kitchen/common/dtype.h"

namespace kitchen::awq {
struct LinearParams {
  int64_t M, N, K, group;
  const void* x;               // [M, K] of x_type (bfloat16 or float16), rows contiguous, 16-byte aligned
  const uint8_t* codes;        // [N, K/2], rows contiguous, 16-byte aligned
  const void *scale, *zero;    // [K/g, N] of parameter_type, contiguous
  const void* bias;            // [N] of bias_type; may be nullptr
  const void* residual;        // [M, N] of residual_type; may be nullptr, may be out itself
  const float* residual_scale; // [N], or one value where its stride is 0; may be nullptr (1)
  void* out;                   // [M, N] of out_type
  DType x_type, parameter_type, bias_type, residual_type, out_type;
  int residual_scale_stride;
  bool resident;               // codes lie in the resident order (resident.py): awq_stream alone takes them
  int64_t part_first, part_of; // the N rows are those from part_first on of a weight of part_of rows; part_of 0: they are all
};

// What a plan is chosen for: a part's sums are added in the order of the whole's.
inline int64_t whole_rows(const LinearParams& problem) { return problem.part_of != 0 ? problem.part_of : problem.N; }
inline LinearParams whole_of(LinearParams problem) {
  problem.N = whole_rows(problem);
  problem.part_first = problem.part_of = 0;
  return problem;
}

struct LinearDevice { int sm_count, smem_per_block, smem_per_sm, sm; };  // bytes, as a kernel may ask for; compute capability 90
struct LinearPlan {
  int variant;  // an index into the route's table of tiles
  int splits;   // pieces of K, the blocks of a cluster: 1, 2, 4 or 8
};

// Few rows on Hopper (stream/sm90): 1 to 64 rows of x.
int stream_variant_count();
LinearPlan choose_stream_plan(const LinearParams& problem, const LinearDevice& device);
const char* stream_plan_rejected(const LinearParams& problem, const LinearPlan& plan, const LinearDevice& device);
std::string describe_stream(const LinearParams& problem, const LinearPlan& plan);
int64_t stream_workspace(const LinearParams& problem, const LinearPlan& plan, const LinearDevice& device);
// workspace: as many bytes as stream_workspace says, for a copy of x; aligned to 256.
void awq_stream(const LinearParams& params, void* workspace, const LinearPlan* forced, int device, cudaStream_t stream);

// Few rows (decode/sm80): 1 to 64 rows of x. Hopper (sm90): any number.
int decode_variant_count();
LinearPlan choose_decode_plan(const LinearParams& problem, const LinearDevice& device);
const char* decode_plan_rejected(const LinearParams& problem, const LinearPlan& plan, const LinearDevice& device);  // nullptr, or why
std::string describe_decode(const LinearParams& problem, const LinearPlan& plan);
void awq_decode(const LinearParams& params, void* workspace, const LinearPlan* forced, int device, cudaStream_t stream);

// The same for Turing (decode/sm75): float16, 1 to 16 rows of x.
int decode_sm75_variant_count();
LinearPlan choose_decode_sm75_plan(const LinearParams& problem, const LinearDevice& device);
const char* decode_sm75_plan_rejected(const LinearParams& problem, const LinearPlan& plan, const LinearDevice& device);
std::string describe_decode_sm75(const LinearParams& problem, const LinearPlan& plan);
void awq_decode_sm75(const LinearParams& params, void* workspace, const LinearPlan* forced, int device, cudaStream_t stream);

int gemm_sm90_variant_count();
LinearPlan choose_gemm_sm90_plan(const LinearParams& problem, const LinearDevice& device);
const char* gemm_sm90_plan_rejected(const LinearParams& problem, const LinearPlan& plan, const LinearDevice& device);
std::string describe_gemm_sm90(const LinearParams& problem, const LinearPlan& plan);
// workspace: as many bytes as gemm_sm90_workspace says, for a copy of x and the sums of cut tiles; aligned to 256.
void awq_gemm_sm90(const LinearParams& params, void* workspace, const LinearPlan* forced, int device, cudaStream_t stream);
int64_t gemm_sm90_workspace(const LinearParams& problem, const LinearPlan& plan, const LinearDevice& device);

// float32 x (smxx): any GPU, made for few rows; the weight decodes to weight_type.
void awq_float32(const LinearParams& params, DType weight_type, int device, cudaStream_t stream);

LinearDevice linear_device(int device);

// The epilogue alone, over sums that another GEMM made: out[m, n] for columns n of [first, first + count).
struct FinishParams {
  int64_t M, N, first, count;
  const float* sums;           // [M, count]
  const void *bias, *residual; // as above
  const float* residual_scale;
  void* out;                   // [M, N]
  DType bias_type, residual_type, out_type;
  int residual_scale_stride;
};
void finish_sums(const FinishParams& params, int device, cudaStream_t stream);
}  // namespace kitchen::awq
