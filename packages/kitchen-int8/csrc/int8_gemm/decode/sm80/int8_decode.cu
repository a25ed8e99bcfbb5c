// INT8 GEMM with a fused epilogue for 1 to 64 tokens, limited by reading the weight once. sm_80 and later; tuned on sm_90.
//
//   acc[m, n] = sum over k of a[m, k] * b[n, k]                      int32, exact for K <= 131071
//   y = fma(float(acc) * a_scale[m], b_scale[n], bias[n])            float32; without bias: the product
//   y = fma(residual_scale[n], y, residual[m, n])                    where there is a residual
//   out[m, n] = y rounded once to out's type
//
//   a [M, K] int8, b [N, K] int8, rows contiguous, aligned to 16 bytes, K a multiple of 16; the rest as in sm90/int8_gemm.h.
//
// Main loop and the way of the sums: kitchen/gemm/decode_smallm.cuh. Measured: docs/kernels/int8_decode.md.
#include "int8_gemm/decode/int8_decode.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "int8_gemm/decode/epilogue.cuh"
#include "kitchen/gemm/decode_smallm.cuh"
#include "kitchen/host/device.h"
#include "kitchen/mma/m16n8k32_s8.h"

namespace kitchen::int8 {
namespace {

namespace decode = gemm::decode;

struct Variant {
  int token_blocks, rows, warps_k, round, threads, blocks_per_sm, sum_pitch;
  bool whole_blocks;
  void (*launch)(const Int8GemmParams&, const decode::Problem&, int64_t smem, cudaStream_t);
};

template <class Config>
void launch(const Int8GemmParams& p, const decode::Problem& problem, int64_t smem, cudaStream_t stream) {
  using Weights = decode::CodeWeights<Config>;
  using Epilogue = DecodeEpilogue<Config::kRows>;
  decode::KernelParams<Weights, Epilogue> params = {};
  params.problem = problem;
  params.tokens = p.a;
  params.weights = {p.b};
  params.epilogue = scale_params(p, kQuadColumns);
  const auto kernel = decode::decode_kernel<Config, mma::M16N8K32S8, Weights, Epilogue>;
  if (smem > 44 * 1024) {  // with the epilogue's own, above 48 KB
    host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)), "int8_decode");
  }
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (problem.splits > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {static_cast<unsigned>(problem.splits), 1, 1};
    ++count;
  }
  if (p.programmatic_launch) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(problem.tiles) * problem.splits);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(smem);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  host::check(cudaLaunchKernelEx(&config, kernel, params), "int8_decode");
}

template <int kTokenBlocks, int kRowBlocks, int kWarpsN, int kWarpsK, int kSteps, int kBlocksPerSm>
constexpr Variant variant() {
  using Config = decode::Config<kTokenBlocks, kRowBlocks, kWarpsN, kWarpsK, kSteps, kBlocksPerSm>;
  return {kTokenBlocks, Config::kRows, kWarpsK, Config::kRound, Config::kThreads, kBlocksPerSm, Config::kSumPitch, Config::kWholeBlocks,
          launch<Config>};
}

// Token blocks, row blocks, warps along N and along K, steps under way, blocks an SM: the best of 23 that were measured.
constexpr Variant kVariants[] = {
    variant<1, 1, 1, 8, 4, 4>(), variant<1, 1, 2, 4, 4, 4>(), variant<1, 1, 4, 2, 4, 4>(),  // 16, 32, 64 rows, up to 8 tokens
    variant<2, 1, 2, 4, 4, 3>(), variant<2, 1, 4, 2, 4, 3>(),                               // 32, 64 rows, up to 16
    variant<4, 1, 4, 2, 4, 3>(),                                                            // 64 rows, up to 32
    variant<8, 2, 2, 4, 2, 2>(),                                                            // 64 rows, up to 64
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Layout {
  decode::Problem problem;
  int64_t smem;
};

// Shared memory: one or two buffers of tokens, which the sums of the warps replace, then what the cluster sends.
Layout lay_out(const DecodeProblem& q, const DecodePlan& plan) {
  constexpr int kMostBuffer = 80 * 1024;  // of all buffers: two blocks an SM
  const Variant& v = kVariants[plan.variant];
  const int64_t steps = ceil_div(q.K, decode::kStepBytes), per_split = ceil_div(steps, plan.splits);
  const int64_t rows = v.whole_blocks ? 8 * v.token_blocks : q.M;
  int64_t chunk = ceil_div(per_split, v.round) * v.round;
  const auto pitch = [](int64_t steps) { return steps * decode::kStepBytes + (steps % 2 == 0 ? decode::kStepBytes : 0); };
  int buffers = 1;
  if (rows * pitch(chunk) > kMostBuffer) {
    buffers = 2;
    const int64_t most = (kMostBuffer / 2 / rows - decode::kStepBytes) / decode::kStepBytes;
    chunk = std::max<int64_t>(1, most / v.round) * v.round;
  }
  const int64_t sums = 4 * v.warps_k * q.M * v.sum_pitch;
  const int64_t received_at = ceil_div(std::max(buffers * rows * pitch(chunk), sums), 128) * 128;
  constexpr int kTogether = decode::kColumnsTogether / decode::kColumns;
  const int64_t runs = ceil_div(q.M * v.rows / decode::kColumns, kTogether);
  const int64_t received = plan.splits == 1 ? 0 : ceil_div(runs, plan.splits) * plan.splits * kTogether * 16;
  decode::Problem problem = {};
  problem.M = static_cast<int>(q.M);
  problem.N = static_cast<int>(q.N);
  problem.K = static_cast<int>(q.K);
  problem.tiles = static_cast<int>(ceil_div(q.N, v.rows));
  problem.splits = plan.splits;
  while (1 << problem.splits_log2 < plan.splits) ++problem.splits_log2;
  problem.steps_per_split = static_cast<int>(per_split);
  problem.chunk_steps = static_cast<int>(chunk);
  problem.token_pitch = static_cast<int>(pitch(chunk));
  problem.buffer_bytes = static_cast<int>(rows * pitch(chunk));
  problem.received_at = static_cast<int>(received_at);
  return {problem, received_at + received};
}

// How far a plan is from the best number of blocks, in doublings, with penalties; fitted to an H200 (docs/kernels/int8_decode.md).
double distance(const DecodeProblem& q, const DecodePlan& plan, const DecodeDevice& device) {
  constexpr double kBlocksPerSm = 1.7, kSplit = 0.1, kTwoBuffers = 0.65;
  const decode::Problem problem = lay_out(q, plan).problem;
  const double blocks = double(problem.tiles) * plan.splits;
  const bool one_buffer = problem.chunk_steps >= problem.steps_per_split;
  return std::abs(std::log2(blocks / (kBlocksPerSm * device.sm_count))) + kSplit * problem.splits_log2 + (one_buffer ? 0 : kTwoBuffers);
}

}  // namespace

int decode_variant_count() { return kVariantCount; }

int decode_variant_tokens(int variant) { return decode::kMmaTokens * kVariants[variant].token_blocks; }

DecodeDevice decode_device(int device) {
  return {host::attribute(cudaDevAttrMultiProcessorCount, device), host::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          host::attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          host::attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9};
}

const char* decode_plan_rejected(const DecodeProblem& q, const DecodePlan& plan, const DecodeDevice& device) {
  if (plan.variant < 0 || plan.variant >= kVariantCount) return "there is no such variant";
  const Variant& v = kVariants[plan.variant];
  if (q.M > 8 * v.token_blocks) return "it takes fewer tokens";
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "K is split in 1, 2, 4 or 8";
  if (plan.splits > 1 && !device.has_clusters) return "a split K needs clusters";
  if (lay_out(q, plan).smem > device.smem_per_block - 2048) return "its shared memory does not fit";  // 2 KB: the epilogue's
  if (ceil_div(q.N, v.rows) * plan.splits > (int64_t{1} << 31) - 1) return "more than 2^31 - 1 blocks";
  return nullptr;
}

DecodePlan choose_decode_plan(const DecodeProblem& q, const DecodeDevice& device) {
  DecodePlan best = {-1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kVariantCount; ++i) {
    if (kVariants[i].token_blocks != 1 && q.M <= 4 * kVariants[i].token_blocks) continue;  // made for more tokens
    for (int splits = 1; splits <= 8; splits *= 2) {
      const DecodePlan plan = {i, splits};
      if (decode_plan_rejected(q, plan, device) != nullptr) continue;
      const double d = distance(q, plan, device);
      if (d < least) {
        least = d;
        best = plan;
      }
    }
  }
  return best;
}

std::string describe_decode(const DecodeProblem& q, const DecodePlan& plan) {
  std::string text = "M=" + std::to_string(q.M) + " N=" + std::to_string(q.N) + " K=" + std::to_string(q.K) + ": ";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return text + "no variant";
  const Variant& v = kVariants[plan.variant];
  return text + std::to_string(v.rows) + " rows, " + std::to_string(8 * v.token_blocks) + " tokens, " + std::to_string(v.warps_k) +
         " warps along K, K in " + std::to_string(plan.splits) + " pieces, " +
         std::to_string(ceil_div(q.N, v.rows) * plan.splits) + " blocks";
}

const char* int8_decode_unsupported(const Int8GemmParams& p) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (p.M < 0 || p.M > kMostTokens) return "takes 0 to 64 rows of a";
  if (p.N < 1 || p.K < 1 || p.N > (int64_t{1} << 30)) return "N or K is out of range";
  if (p.K > 131071) return "K > 131071 can overflow the int32 sums";
  if (p.K % 16 != 0) return "reads rows 16 bytes at a time: K % 16 != 0";
  if (!aligned(p.a) || !aligned(p.b)) return "needs 16-byte aligned a and b";
  return nullptr;
}

int64_t decode_shared_bytes(const DecodeProblem& q, const DecodePlan& plan) { return lay_out(q, plan).smem; }

size_t int8_decode_workspace(const DecodeProblem&, const DecodePlan&) { return 0; }

void int8_decode(const Int8GemmParams& p, void*, const DecodePlan* forced, int device, cudaStream_t stream) {
  const DecodeProblem problem = {p.M, p.N, p.K};
  if (const char* reason = int8_decode_unsupported(p)) {
    throw std::invalid_argument("int8_decode: " + describe_decode(problem, {-1, 1}) + ": " + reason);
  }
  if (p.M == 0) return;
  host::DeviceGuard guard(device);
  const DecodeDevice facts = decode_device(device);
  const DecodePlan plan = forced != nullptr ? *forced : choose_decode_plan(problem, facts);
  if (const char* reason = decode_plan_rejected(problem, plan, facts)) {
    throw std::invalid_argument("int8_decode: " + describe_decode(problem, plan) + ": " + reason);
  }
  const Layout layout = lay_out(problem, plan);
  kVariants[plan.variant].launch(p, layout.problem, layout.smem, stream);
}

}  // namespace kitchen::int8
