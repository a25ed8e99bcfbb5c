// AWQ linear with a fused epilogue for 1 to 64 rows of x, limited by reading the weight once. sm_80 and later; tuned on sm_90.
//
//   W[n, k] = round_T(fma(q[n, k] - 8, scale[k / g, n], zero[k / g, n]))     quant/awq_decode.h, to the bit
//   y = sum over k of x[m, k] * W[n, k], fp32;  then epilogue.cuh
//
//   x [M, K] of T, bfloat16 or float16; codes [N, K/2]; scale, zero [K/g, N]; K a multiple of 32, g of 8
//
// Main loop: decode_kernel.cuh. Two decoders: two weights an instruction where scale and zero are of T and groups are multiples of
// 32 columns; fp32 arithmetic for groups of other multiples of 8 and for scales of other types. Measured: docs/kernels/awq.md.
#include "awq_linear/awq_linear.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "awq_linear/decode/decode_kernel.cuh"
#include "kitchen/host/device.h"

namespace kitchen::awq {
namespace {

constexpr int kMostTokens = 64;

bool is_packed(const LinearParams& q) { return q.parameter_type == q.x_type && q.group % kLaneColumns == 0; }

struct Variant {
  int token_blocks, rows, warps_k, round, threads, blocks_per_sm, sum_pitch;
  bool whole_blocks, packed;
  void (*launch)(const DecodeParams&, DType, int64_t smem, cudaStream_t);
};

template <class Config, class T, bool kPacked>
void launch_typed(const DecodeParams& p, int64_t smem, cudaStream_t stream) {
  const auto kernel = awq_decode_kernel<Config, T, AwqWeights<T, kPacked, kPacked ? 1 : kWords, Config::kRowBlocks>>;
  if (smem > 44 * 1024) {  // with the kernel's own, above 48 KB
    host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)), "awq_decode");
    constexpr auto kCarveout = cudaFuncAttributePreferredSharedMemoryCarveout;
    host::check(cudaFuncSetAttribute(kernel, kCarveout, cudaSharedmemCarveoutMaxShared), "awq_decode");
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(p.problem.splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.problem.tiles) * p.problem.splits);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(smem);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = p.problem.splits > 1 ? 1 : 0;
  host::check(cudaLaunchKernelEx(&config, kernel, p), "awq_decode");
}

template <class Config, bool kPacked>
void launch(const DecodeParams& p, DType x_type, int64_t smem, cudaStream_t stream) {
  if (x_type == DType::kFloat16) return launch_typed<Config, __half, kPacked>(p, smem, stream);
  launch_typed<Config, __nv_bfloat16, kPacked>(p, smem, stream);
}

template <bool kPacked, int kTokenBlocks, int kRowBlocks, int kWarpsN, int kWarpsK, int kSteps, int kBlocksPerSm>
constexpr Variant variant() {
  using Config = decode::Config<kTokenBlocks, kRowBlocks, kWarpsN, kWarpsK, kSteps, kBlocksPerSm>;
  return {kTokenBlocks, Config::kRows, kWarpsK, Config::kRound, Config::kThreads, kBlocksPerSm, Config::kSumPitch, Config::kWholeBlocks,
          kPacked, launch<Config, kPacked>};
}

// Token blocks, row blocks, warps along N and along K, steps under way, blocks an SM: the best of 15 that were measured.
constexpr Variant kVariants[] = {
    variant<true, 1, 1, 2, 4, 2, 3>(), variant<true, 1, 1, 4, 2, 2, 3>(),    // 32, 64 rows, up to 8 tokens
    variant<true, 2, 2, 2, 4, 2, 2>(),                                       // 64 rows, up to 16
    variant<true, 8, 2, 4, 2, 1, 1>(),                                       // 128 rows, up to 64
    variant<false, 1, 1, 2, 4, 2, 2>(), variant<false, 8, 1, 4, 2, 1, 1>(),  // 32 and 64 rows, up to 8 and 64: any groups and scales
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Layout {
  Problem problem;
  int64_t smem;
};

// Shared memory: one or two buffers of tokens, which the sums of the warps replace, then what the cluster sends.
Layout lay_out(const LinearParams& q, const LinearPlan& plan) {
  constexpr int kMostBuffer = 80 * 1024;  // of all buffers: two blocks an SM
  const Variant& v = kVariants[plan.variant];
  const int64_t steps = ceil_div(q.K, kStepColumns), per_split = ceil_div(steps, plan.splits);
  const int64_t rows = v.whole_blocks ? 8 * v.token_blocks : q.M;
  int64_t chunk = ceil_div(per_split, v.round) * v.round;
  const auto pitch = [](int64_t steps) { return steps * kStepTokenBytes + 64; };  // 64 modulo 128: no bank twice
  int buffers = 1;
  if (rows * pitch(chunk) > kMostBuffer) {
    buffers = 2;
    const int64_t most = (kMostBuffer / 2 / rows - 64) / kStepTokenBytes;
    chunk = std::max<int64_t>(1, most / v.round) * v.round;
  }
  const int64_t sums = 4 * v.warps_k * q.M * v.sum_pitch;
  const int64_t received_at = ceil_div(std::max(buffers * rows * pitch(chunk), sums), 128) * 128;
  constexpr int kTogether = decode::kColumnsTogether / decode::kColumns;
  const int64_t runs = ceil_div(q.M * v.rows / decode::kColumns, kTogether);
  const int64_t received = plan.splits == 1 ? 0 : ceil_div(runs, plan.splits) * plan.splits * kTogether * 16;
  Problem problem = {};
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

// Microseconds on an H200, fitted to measured times of 1 to 16 tokens (docs/kernels/awq.md): an SM's share of the weight at a rate
// that grows with the warps there, and the meeting of sums. On other chips the order of plans is what counts.
double estimated_time(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  constexpr double kPerWeightRow = 2e-5, kHalfRateWarps = 6, kTwoBuffers = 2;
  const Variant& v = kVariants[plan.variant];
  const Problem problem = lay_out(q, plan).problem;
  const double blocks = double(problem.tiles) * plan.splits / device.sm_count;  // an SM
  const double warps = std::min(blocks, double(v.blocks_per_sm)) * v.threads / 32;
  const double rows = std::ceil(blocks) * v.rows / plan.splits;
  const double sums = plan.splits == 1 ? 0 : plan.splits == 2 ? 0.5 : plan.splits == 4 ? 2.5 : 5;
  const double two_buffers = problem.chunk_steps >= problem.steps_per_split ? 0 : kTwoBuffers;
  return kPerWeightRow * rows * double(q.K) * (warps + kHalfRateWarps) / warps + sums + two_buffers;
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

int decode_variant_count() { return kVariantCount; }

const char* decode_plan_rejected(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  if (q.M < 0 || q.M > kMostTokens) return "takes 0 to 64 rows of x";
  if (q.N < 1 || q.N > (int64_t{1} << 30) || q.K < 1 || q.K >= (int64_t{1} << 19)) return "N or K is out of range";
  if (q.K % kLaneColumns != 0) return "reads rows 16 bytes at a time: K % 32 != 0";
  if (q.group < 8 || q.group % 8 != 0 || q.K % q.group != 0) return "the group must be a multiple of 8 that divides K";
  if (q.x_type == DType::kFloat32) return "takes bfloat16 and float16";
  if (!is_aligned(q.x) || !is_aligned(q.codes)) return "needs 16-byte aligned x and codes";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return "there is no such variant";
  const Variant& v = kVariants[plan.variant];
  if (v.packed && !is_packed(q)) return "decodes scales of x's type in groups of multiples of 32";
  if (q.M > 8 * v.token_blocks) return "it takes fewer tokens";
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "K is split in 1, 2, 4 or 8";
  if (plan.splits > 1 && device.sm < 90) return "a split K needs clusters";
  if (lay_out(q, plan).smem > device.smem_per_block - 1024) return "its shared memory does not fit";  // 1 KB: the kernel's own
  if (ceil_div(q.N, v.rows) * plan.splits > (int64_t{1} << 31) - 1) return "more than 2^31 - 1 blocks";
  return nullptr;
}

LinearPlan choose_decode_plan(const LinearParams& q, const LinearDevice& device) {
  if (q.part_of != 0) return choose_decode_plan(whole_of(q), device);
  LinearPlan best = {-1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kVariantCount; ++i) {
    const Variant& v = kVariants[i];
    if (is_packed(q) != v.packed) continue;
    if (v.token_blocks > 1 && q.M <= (v.token_blocks > 2 && v.packed ? 16 : 8)) continue;  // made for more tokens
    for (int splits = 1; splits <= 8; splits *= 2) {
      const LinearPlan plan = {i, splits};
      if (decode_plan_rejected(q, plan, device) != nullptr) continue;
      const double time = estimated_time(q, plan, device);
      if (time < least) least = time, best = plan;
    }
  }
  return best;
}

std::string describe_decode(const LinearParams& q, const LinearPlan& plan) {
  std::string text = "M=" + std::to_string(q.M) + " N=" + std::to_string(q.N) + " K=" + std::to_string(q.K) + " g=" + std::to_string(q.group) + ": ";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return text + "no variant";
  const Variant& v = kVariants[plan.variant];
  return text + std::to_string(v.rows) + " rows, " + std::to_string(8 * v.token_blocks) + " tokens, " + std::to_string(v.warps_k) +
         " warps along K, K in " + std::to_string(plan.splits) + " pieces, " +
         std::to_string(ceil_div(q.N, v.rows) * plan.splits) + " blocks, " + (v.packed ? "packed" : "fp32") + " decoder";
}

void awq_decode(const LinearParams& q, void*, const LinearPlan* forced, int device, cudaStream_t stream) {
  if (q.M == 0) return;
  host::DeviceGuard guard(device);
  const LinearDevice facts = linear_device(device);
  const LinearPlan plan = forced != nullptr ? *forced : choose_decode_plan(q, facts);
  if (const char* reason = decode_plan_rejected(q, plan, facts)) {
    throw std::invalid_argument("awq_decode: " + describe_decode(q, plan) + ": " + reason);
  }
  const Layout layout = lay_out(q, plan);
  DecodeParams p = {};
  p.problem = layout.problem;
  p.tokens = q.x;
  const uint32_t eights = static_cast<uint32_t>(q.group / 8);
  p.weights = {q.codes, q.scale, q.zero, static_cast<int>(q.N), static_cast<int>(q.K),
               eights == 1 ? 0 : static_cast<uint32_t>((uint64_t{1} << 32) / eights + 1), q.parameter_type};
  p.epilogue = {q.bias, q.residual, q.residual_scale, q.out, q.residual_scale_stride, q.bias_type, q.residual_type, q.out_type,
                q.N % 4 == 0 && is_aligned(q.out) && is_aligned(q.residual)};
  kVariants[plan.variant].launch(p, q.x_type, layout.smem, stream);
}

}  // namespace kitchen::awq
