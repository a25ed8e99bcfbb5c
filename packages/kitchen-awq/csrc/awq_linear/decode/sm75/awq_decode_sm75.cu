// awq_decode for Turing: float16 x of 1 to 16 rows, m16n8k8 MMAs, no clusters. Compiled for sm_90a too, where tests force it.
//
//   W[n, k] = round_half(fma(q[n, k] - 8, scale[k / g, n], zero[k / g, n]))     quant/awq_decode.h, to the bit
//   y = sum over k of x[m, k] * W[n, k], fp32;  then epilogue.cuh
//
// Main loop: decode/decode_kernel.cuh. Not measured on a T4, which nobody here has: docs/kernels/awq.md.
#include "awq_linear/awq_linear.h"

#include <algorithm>

#include "awq_linear/decode/decode_kernel.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/mma/m16n8k8_f16.h"

namespace kitchen::awq {
namespace {

constexpr const char* kName = "awq_decode_sm75";
constexpr int kMostTokens = 16;
// Token blocks, row blocks, warps along N and along K, steps under way, blocks an SM: 32 weight rows a block.
using PackedConfig = decode::Config<2, 1, 2, 4, 2, 2>;
using WideConfig = decode::Config<2, 1, 2, 4, 1, 2>;

struct Variant {
  int rows, warps_k, round, threads, sum_pitch;
  bool packed;
  void (*launch)(const DecodeParams&, int64_t smem, cudaStream_t);
};

template <class Config, bool kPacked>
void launch(const DecodeParams& p, int64_t smem, cudaStream_t stream) {
  using Weights = AwqWeights<__half, kPacked, kPacked ? 1 : kWords, Config::kRowBlocks, mma::M16N8K16Turing>;
  host::launch(kName, awq_decode_kernel<Config, __half, Weights>, {p.problem.tiles, Config::kThreads, 1, static_cast<size_t>(smem), stream}, p);
}

template <class Config, bool kPacked>
constexpr Variant variant() {
  return {Config::kRows, Config::kWarpsK, Config::kRound, Config::kThreads, Config::kSumPitch, kPacked, launch<Config, kPacked>};
}

constexpr Variant kVariants[] = {variant<PackedConfig, true>(), variant<WideConfig, false>()};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
bool is_packed(const LinearParams& q) { return q.parameter_type == DType::kFloat16 && q.group % kLaneColumns == 0; }

struct Layout {
  Problem problem;
  int64_t smem;
};

// Shared memory: one buffer of tokens, or two where x does not fit; the sums of the warps take their place.
Layout lay_out(const LinearParams& q, const Variant& v) {
  constexpr int64_t kMostBuffers = 44 * 1024;  // below the 48 KB that need no asking, with the kernel's own
  const int64_t steps = ceil_div(q.K, kStepColumns);
  const auto pitch = [](int64_t steps) { return steps * kStepTokenBytes + 64; };  // 64 modulo 128: no bank twice
  int64_t chunk = ceil_div(steps, v.round) * v.round;
  int buffers = 1;
  if (q.M * pitch(chunk) > kMostBuffers) {
    buffers = 2;
    chunk = std::max<int64_t>(1, (kMostBuffers / 2 / q.M - 64) / kStepTokenBytes / v.round) * v.round;
  }
  Problem problem = {};
  problem.M = static_cast<int>(q.M), problem.N = static_cast<int>(q.N), problem.K = static_cast<int>(q.K);
  problem.tiles = static_cast<int>(ceil_div(q.N, v.rows));
  problem.splits = 1;
  problem.steps_per_split = static_cast<int>(steps);
  problem.chunk_steps = static_cast<int>(chunk);
  problem.token_pitch = static_cast<int>(pitch(chunk));
  problem.buffer_bytes = static_cast<int>(q.M * pitch(chunk));
  return {problem, std::max<int64_t>(buffers * problem.buffer_bytes, 4 * v.warps_k * q.M * v.sum_pitch)};
}

}  // namespace

int decode_sm75_variant_count() { return sizeof(kVariants) / sizeof(kVariants[0]); }

const char* decode_sm75_plan_rejected(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  if (q.M < 0 || q.M > kMostTokens) return "takes 0 to 16 rows of x";
  if (q.N < 1 || q.N > (int64_t{1} << 30) || q.K < 1 || q.K >= (int64_t{1} << 19)) return "N or K is out of range";
  if (q.K % kLaneColumns != 0) return "reads rows 16 bytes at a time: K % 32 != 0";
  if (q.group < 8 || q.group % 8 != 0 || q.K % q.group != 0) return "the group must be a multiple of 8 that divides K";
  if (q.x_type != DType::kFloat16) return "takes float16: sm_75 has no bfloat16";
  if (!is_aligned(q.x) || !is_aligned(q.codes)) return "needs 16-byte aligned x and codes";
  if (plan.variant < 0 || plan.variant >= decode_sm75_variant_count()) return "there is no such variant";
  if (kVariants[plan.variant].packed && !is_packed(q)) return "decodes scales of x's type in groups of multiples of 32";
  if (plan.splits != 1) return "K is not split";
  if (lay_out(q, kVariants[plan.variant]).smem > device.smem_per_block - 1024) return "its shared memory does not fit";
  return nullptr;
}

LinearPlan choose_decode_sm75_plan(const LinearParams& q, const LinearDevice&) { return {is_packed(q) ? 0 : 1, 1}; }

std::string describe_decode_sm75(const LinearParams& q, const LinearPlan& plan) {
  return "M=" + std::to_string(q.M) + " N=" + std::to_string(q.N) + " K=" + std::to_string(q.K) + " g=" + std::to_string(q.group) + ": " +
         (plan.variant == 0 ? "packed" : "fp32") + " decoder, K in " + std::to_string(plan.splits) + " pieces";
}

void awq_decode_sm75(const LinearParams& q, void*, const LinearPlan* forced, int device, cudaStream_t stream) {
  if (q.M == 0) return;
  host::DeviceGuard guard(device);
  const LinearDevice facts = linear_device(device);
  const LinearPlan plan = forced != nullptr ? *forced : choose_decode_sm75_plan(q, facts);
  if (const char* reason = decode_sm75_plan_rejected(q, plan, facts)) {
    throw std::invalid_argument(std::string(kName) + ": " + describe_decode_sm75(q, plan) + ": " + reason);
  }
  const Layout layout = lay_out(q, kVariants[plan.variant]);
  DecodeParams p = {};
  p.problem = layout.problem;
  p.tokens = q.x;
  const uint32_t eights = static_cast<uint32_t>(q.group / 8);
  p.weights = {q.codes, q.scale, q.zero, static_cast<int>(q.N), static_cast<int>(q.K),
               eights == 1 ? 0 : static_cast<uint32_t>((uint64_t{1} << 32) / eights + 1), q.parameter_type};
  p.epilogue = {q.bias, q.residual, q.residual_scale, q.out, q.residual_scale_stride, q.bias_type, q.residual_type, q.out_type,
                q.N % 4 == 0 && is_aligned(q.out) && is_aligned(q.residual)};
  kVariants[plan.variant].launch(p, layout.smem, stream);
}

}  // namespace kitchen::awq
