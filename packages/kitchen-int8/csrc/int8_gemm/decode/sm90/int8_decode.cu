// INT8 GEMM with a fused epilogue for 1 to 16 tokens on Hopper, limited by reading the weight once.
//
//   acc[m, n] = sum over k of a[m, k] * b[n, k]                      int32, exact for K <= 131071
//   y = fma(float(acc) * a_scale[m], b_scale[n], bias[n])            float32; without bias: the product
//   y = fma(residual_scale[n], y, residual[m, n])                    where there is a residual
//   out[m, n] = y rounded once to out's type
//
//   a [M, K] int8, b [N, K] int8, rows contiguous, aligned to 16 bytes, K a multiple of 16; the rest as in sm90/int8_gemm.h.
//
// Main loop and the way of the sums: kitchen/gemm/decode_sm90.cuh. Measured: docs/kernels/int8_decode.md.
#include <algorithm>
#include <cmath>

#include "int8_gemm/decode/epilogue.cuh"
#include "int8_gemm/decode/int8_decode.h"
#include "kitchen/gemm/decode_sm90.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/tensor_map.h"

namespace kitchen::int8 {
namespace {

namespace decode = gemm::decode_sm90;
constexpr const char* kName = "int8_decode_sm90";

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

CUtensorMap encode_map(const int8_t* data, int64_t rows, int64_t columns, int box_rows) {
  return host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, data, rows, columns, columns, box_rows, decode::kStageBytesK,
                                  CU_TENSOR_MAP_SWIZZLE_128B});
}

template <class Config>
void launch(const Int8GemmParams& p, int splits, cudaStream_t stream) {
  using Epilogue = DecodeSm90Epilogue<Config::kRows>;
  decode::KernelParams<Epilogue> params = {};
  params.weights = encode_map(p.b, p.N, p.K, Config::kRows);
  params.tokens = encode_map(p.a, p.M, p.K, static_cast<int>(p.M));
  params.problem = {static_cast<int>(p.M), static_cast<int>(p.N), static_cast<int>(p.K), splits,
                    static_cast<int>(ceil_div(ceil_div(p.K, decode::kStageBytesK), splits)), static_cast<int>(ceil_div(p.M, splits))};
  params.epilogue = scale_params(p, kQuadColumns);
  const auto kernel = decode::decode_sm90_kernel<Config, Epilogue>;
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes), kName);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(p.N, Config::kRows)) * splits);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = p.programmatic_launch ? 2 : 1;
  host::check(cudaLaunchKernelEx(&config, kernel, params), kName);
}

struct Variant {
  int tokens, rows, blocks_per_sm;
  void (*launch)(const Int8GemmParams&, int splits, cudaStream_t);
};

template <int kTokens, int kWarpgroups, int kStages, int kBlocksPerSm>
constexpr Variant variant() {
  using Config = decode::Config<kTokens, kWarpgroups, kStages, kBlocksPerSm>;
  return {kTokens, Config::kRows, kBlocksPerSm, launch<Config>};
}

// Tokens, warpgroups of 64 rows, stages, blocks an SM.
constexpr Variant kVariants[] = {
    variant<8, 1, 5, 4>(),
    variant<16, 1, 5, 4>(),
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

int64_t tiles(const DecodeProblem& q, const Variant& v) { return ceil_div(q.N, v.rows); }

// The narrowest that takes the tokens.
int choose_variant(const DecodeProblem& q) { return q.M <= kVariants[0].tokens ? 0 : 1; }

// How far from the best number of blocks, in doublings, and what the sums of a split K cost. Fitted to an H200: a small weight is all
// under way at once, so there the tail counts and fewer blocks are best.
double distance(const DecodeProblem& q, const DecodePlan& plan, int sm_count) {
  constexpr double kSmallBytes = 16e6, kSplit = 0.1;
  const double blocks_per_sm = double(q.N) * q.K < kSmallBytes ? 1.4 : 2.2;
  const double blocks = double(tiles(q, kVariants[plan.variant])) * plan.splits;
  return std::abs(std::log2(blocks / (blocks_per_sm * sm_count))) + kSplit * std::log2(double(plan.splits));
}

}  // namespace

int decode_sm90_variant_count() { return kVariantCount; }

const char* decode_sm90_plan_rejected(const DecodeProblem& q, const DecodePlan& plan) {
  if (plan.variant < 0 || plan.variant >= kVariantCount) return "there is no such variant";
  const Variant& v = kVariants[plan.variant];
  if (q.M > v.tokens) return "it takes fewer tokens";
  if (plan.splits < 1 || plan.splits > decode::kMaxSplits) return "K is split in 1 to 8";
  if (tiles(q, v) * plan.splits > (int64_t{1} << 31) - 1) return "more than 2^31 - 1 blocks";
  return nullptr;
}

DecodePlan choose_decode_sm90_plan(const DecodeProblem& q, int sm_count) {
  DecodePlan best = {choose_variant(q), 1};
  for (int splits = 2; splits <= decode::kMaxSplits; ++splits) {
    const DecodePlan plan = {best.variant, splits};
    if (decode_sm90_plan_rejected(q, plan) != nullptr || ceil_div(q.K, decode::kStageBytesK) < 2 * splits) continue;
    if (distance(q, plan, sm_count) < distance(q, best, sm_count)) best = plan;
  }
  return best;
}

std::string describe_decode_sm90(const DecodeProblem& q, const DecodePlan& plan) {
  std::string text = "M=" + std::to_string(q.M) + " N=" + std::to_string(q.N) + " K=" + std::to_string(q.K) + ": ";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return text + "no variant";
  const Variant& v = kVariants[plan.variant];
  return text + std::to_string(v.rows) + " rows, " + std::to_string(v.tokens) + " tokens, K in " + std::to_string(plan.splits) +
         " pieces, " + std::to_string(tiles(q, v) * plan.splits) + " blocks";
}

void int8_decode_sm90(const Int8GemmParams& p, const DecodePlan* forced, int device, cudaStream_t stream) {
  const DecodeProblem problem = {p.M, p.N, p.K};
  if (const char* reason = int8_decode_unsupported(p)) {
    throw std::invalid_argument("int8_decode_sm90: " + describe_decode_sm90(problem, {-1, 1}) + ": " + reason);
  }
  if (p.M == 0) return;
  host::DeviceGuard guard(device);
  const DecodePlan plan =
      forced != nullptr ? *forced : choose_decode_sm90_plan(problem, host::attribute(cudaDevAttrMultiProcessorCount, device));
  if (const char* reason = decode_sm90_plan_rejected(problem, plan)) {
    throw std::invalid_argument("int8_decode_sm90: " + describe_decode_sm90(problem, plan) + ": " + reason);
  }
  kVariants[plan.variant].launch(p, plan.splits, stream);
}

// Up to eight tokens, registers are as fast or faster (3072x3072 at M=1: 5.4 and 6.0 us, at M=8: 5.9 and 6.2; 3072x24576: 20.3 and
// 20.7, 21.5 and 20.9), unless the tokens take so much shared memory that too little L1 is left for the weights on their way
// (12288x3072 at M=4: 18.2 and 13.1 us; at M=2, with 25 KB a block: 12.4 and 13.0). One H200, 2026-11-30.
FewRowsPlan choose_few_rows_plan(const DecodeProblem& problem, int device) {
  constexpr int64_t kMostTokens = 8, kMostSharedBytes = 28 * 1024;
  const DecodePlan registers = choose_decode_plan(problem, decode_device(device));
  if (problem.M <= kMostTokens && registers.variant >= 0 && decode_shared_bytes(problem, registers) <= kMostSharedBytes) {
    return {false, registers};
  }
  return {true, choose_decode_sm90_plan(problem, host::attribute(cudaDevAttrMultiProcessorCount, device))};
}

std::string describe_few_rows(const DecodeProblem& problem, const FewRowsPlan& plan) {
  return (plan.through_shared ? "through shared memory, " : "through registers, ") +
         (plan.through_shared ? describe_decode_sm90(problem, plan.plan) : describe_decode(problem, plan.plan));
}

void int8_few_rows(const Int8GemmParams& params, const FewRowsPlan& plan, int device, cudaStream_t stream) {
  if (plan.through_shared) return int8_decode_sm90(params, &plan.plan, device, stream);
  int8_decode(params, nullptr, &plan.plan, device, stream);
}

}  // namespace kitchen::int8
