// The INT8 GEMM of sm90/int8_gemm.h for 1 to 64 rows of a, on sm_80 and later: see sm80/int8_decode.cu. Equal to it to the bit.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "int8_gemm/sm90/int8_gemm.h"

namespace kitchen::int8 {
struct DecodeProblem { int64_t M, N, K; };
struct DecodeDevice {
  int sm_count, smem_per_block, smem_per_sm;  // bytes, as a kernel may ask for
  bool has_clusters;                          // compute capability 9.0
};
struct DecodePlan {
  int variant;  // an index into the table of sm80/int8_decode.cu: the block's shape
  int splits;   // pieces of K, the blocks of a cluster: 1, 2, 4 or 8
};
int decode_variant_count();
int decode_variant_tokens(int variant);  // that it takes at most
DecodeDevice decode_device(int device);
DecodePlan choose_decode_plan(const DecodeProblem& problem, const DecodeDevice& device);
std::string describe_decode(const DecodeProblem& problem, const DecodePlan& plan);
const char* int8_decode_unsupported(const Int8GemmParams& params);  // nullptr, or why not
const char* decode_plan_rejected(const DecodeProblem& problem, const DecodePlan& plan, const DecodeDevice& device);  // nullptr, or why
int64_t decode_shared_bytes(const DecodeProblem& problem, const DecodePlan& plan);  // dynamic shared memory of a block
size_t int8_decode_workspace(const DecodeProblem& problem, const DecodePlan& plan);  // 0: sums meet in shared memory
void int8_decode(const Int8GemmParams& params, void* workspace, const DecodePlan* forced, int device, cudaStream_t stream);

// The same for 1 to 16 rows on sm_90a, by TMA and wgmma: sm90/int8_decode.cu. K in 1 to 8 pieces.
int decode_sm90_variant_count();
DecodePlan choose_decode_sm90_plan(const DecodeProblem& problem, int sm_count);
std::string describe_decode_sm90(const DecodeProblem& problem, const DecodePlan& plan);
const char* decode_sm90_plan_rejected(const DecodeProblem& problem, const DecodePlan& plan);  // nullptr, or why
void int8_decode_sm90(const Int8GemmParams& params, const DecodePlan* forced, int device, cudaStream_t stream);

// The faster of both on sm_90.
struct FewRowsPlan {
  bool through_shared;  // sm90/int8_decode.cu; else sm80/int8_decode.cu
  DecodePlan plan;
};
FewRowsPlan choose_few_rows_plan(const DecodeProblem& problem, int device);
std::string describe_few_rows(const DecodeProblem& problem, const FewRowsPlan& plan);
void int8_few_rows(const Int8GemmParams& params, const FewRowsPlan& plan, int device, cudaStream_t stream);
}  // namespace kitchen::int8
