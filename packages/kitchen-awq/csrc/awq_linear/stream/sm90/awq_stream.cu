// AWQ linear with a fused epilogue for 1 to 64 rows of x, limited by reading the weight once. Hopper.
//
//   W[n, k] = round_T(fma(q[n, k] - 8, scale[k / g, n], zero[k / g, n]))     quant/awq_decode.h, to the bit
//   y = sum over k of x[m, k] * W[n, k], fp32;  then epilogue.cuh
//
//   x [M, K] of T, bfloat16 or float16; codes [N, K/2]; scale, zero [K/g, N] of T; K and g multiples of 32, N of 8
//
// Kernel: stream_kernel.cuh. Measured: docs/kernels/awq.md.
#include <algorithm>
#include <cmath>
#include <limits>

#include "awq_linear/awq_linear.h"
#include "awq_linear/stream/stream_kernel.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/tensor_map.h"

namespace kitchen::awq {
namespace {

using namespace stream;

constexpr const char* kName = "awq_stream";
constexpr int kMostTokens = 64, kMostPieceTokens = 16;
constexpr int kPairThreads = 128;
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// A variant: warpgroups along N (1 to 4) and along K (1, 2, 4), how many blocks shall share an SM (1 to 4), and whether up to 16 tokens
// come as a piece or by stages, as more do.
constexpr int kShapes = 4 * 3 * 4, kVariantCount = 2 * kShapes;
int groups_n_of(const LinearPlan& plan) { return plan.variant % 4 + 1; }
int groups_k_of(const LinearPlan& plan) { return 1 << plan.variant / 4 % 3; }
int blocks_per_sm_of(const LinearPlan& plan) { return plan.variant / 12 % 4 + 1; }

int tokens_of(const LinearParams& q) {
  for (const int tokens : {8, 16, 24, 32, 48}) {
    if (q.M <= tokens) return tokens;
  }
  return kMostTokens;
}

Tokens tokens_from(const LinearParams& q, const LinearPlan& plan) {
  if (q.resident) return Tokens::kRows;
  return q.M <= kMostPieceTokens && plan.variant < kShapes ? Tokens::kPiece : Tokens::kImages;
}

struct Layout {
  StreamProblem problem;
  int64_t smem;
};

constexpr int kReserved = 3 * 1024;  // bytes of the kernel itself, and what an SM keeps for a block

Layout lay_out(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  StreamProblem p = {};
  p.M = static_cast<int>(q.M), p.N = static_cast<int>(q.N), p.K = static_cast<int>(q.K);
  p.groups_n = groups_n_of(plan), p.groups_k = groups_k_of(plan), p.splits = plan.splits;
  p.all_stages = static_cast<int>(ceil_div(q.K, kStageColumns));
  p.per_split = static_cast<int>(ceil_div(p.all_stages, p.splits));
  constexpr int64_t columns = kStageColumns;
  p.stage_groups = q.group >= columns ? (q.group % columns == 0 ? 1 : 2)
                   : columns % q.group == 0 ? static_cast<int>(columns / q.group) : static_cast<int>((columns - 1) / q.group + 2);
  p.even_groups = columns % q.group == 0 || q.group % columns == 0;
  const uint64_t in_32 = static_cast<uint64_t>(q.group / 32);
  p.group_inverse = in_32 <= 1 ? 0 : static_cast<uint32_t>((uint64_t{1} << 32) / in_32 + 1);
  const int64_t rows = p.groups_n * kGroupRows, tokens = tokens_of(q);
  const bool by_stage = tokens_from(q, plan) != Tokens::kPiece;
  p.scales_at = static_cast<int>(rows * kRowBytes);
  p.zeros_at = static_cast<int>(p.scales_at + 2 * p.stage_groups * rows);
  p.tokens_at = static_cast<int>(ceil_div(2 * p.zeros_at - p.scales_at, 1024) * 1024);
  p.stage_bytes = static_cast<int>(p.tokens_at + (by_stage ? tokens * kImageRowBytes : 0));
  const int64_t piece = by_stage ? 0 : p.per_split * tokens * kImageRowBytes;
  const int64_t room = std::min<int64_t>(device.smem_per_block, device.smem_per_sm / blocks_per_sm_of(plan)) - kReserved;
  p.ring = static_cast<int>(std::min<int64_t>({kMostStages, p.per_split, std::max<int64_t>(0, room - piece) / p.stage_bytes}));
  p.piece_at = p.ring * p.stage_bytes;
  p.sum_pitch = static_cast<int>(rows + 4);
  p.received_at = static_cast<int>(ceil_div(4 * p.groups_k * q.M * p.sum_pitch, 128) * 128);
  p.quads_each = static_cast<int>(ceil_div(q.M * rows / 4, p.splits));
  const int64_t sums = p.received_at + (p.splits > 1 ? 16 * p.splits * p.quads_each : 0);
  return {p, std::max(p.piece_at + piece, sums)};
}

template <int kTokens>
__global__ void __launch_bounds__(kPairThreads) pair_tokens(uint8_t* images, const uint16_t* x, int M, int K, int stages) {
  ptx::griddep_wait();  // before anything is written: the workspace may be that of the call before
  ptx::griddep_launch();
  const int i = static_cast<int>(blockIdx.x) * kPairThreads + static_cast<int>(threadIdx.x);
  const int unit = i % kStageUnits, stage = i / kStageUnits % stages, m = i / kStageUnits / stages;
  if (m < kTokens) pair_unit<kTokens>(images + static_cast<int64_t>(stage) * (kTokens * kImageRowBytes), x, m, unit, stage * kStageColumns, M, K);
}

using Kernel = void (*)(StreamParams);
using PairKernel = void (*)(uint8_t*, const uint16_t*, int, int, int);

template <class T, int kTokens>
Kernel kernel_of(const LinearParams& q, Tokens from) {
  if (from == Tokens::kRows) {
    if (q.group % 256 == 0) return awq_stream_kernel<T, kTokens, Tokens::kRows, 1>;
    return q.group == 128 ? awq_stream_kernel<T, kTokens, Tokens::kRows, 2> : awq_stream_kernel<T, kTokens, Tokens::kRows, 4>;
  }
  if constexpr (kTokens <= kMostPieceTokens) {
    if (from == Tokens::kPiece) {
      return q.group % 64 == 0 ? awq_stream_kernel<T, kTokens, Tokens::kPiece, 1> : awq_stream_kernel<T, kTokens, Tokens::kPiece, 2>;
    }
  }
  return q.group % 64 == 0 ? awq_stream_kernel<T, kTokens, Tokens::kImages, 1> : awq_stream_kernel<T, kTokens, Tokens::kImages, 2>;
}

template <class T>
Kernel kernel_of(const LinearParams& q, Tokens from) {
  switch (tokens_of(q)) {
    case 8: return kernel_of<T, 8>(q, from);
    case 16: return kernel_of<T, 16>(q, from);
    case 24: return kernel_of<T, 24>(q, from);
    case 32: return kernel_of<T, 32>(q, from);
    case 48: return kernel_of<T, 48>(q, from);
    default: return kernel_of<T, 64>(q, from);
  }
}

PairKernel pair_kernel_of(const LinearParams& q) {
  switch (tokens_of(q)) {
    case 8: return pair_tokens<8>;
    case 16: return pair_tokens<16>;
    case 24: return pair_tokens<24>;
    case 32: return pair_tokens<32>;
    case 48: return pair_tokens<48>;
    default: return pair_tokens<64>;
  }
}

// Of a thread, as nvcc 13.0 compiles it: decides how many blocks fit an SM.
int registers_of(const LinearParams& q) {
  const int tokens = tokens_of(q);
  return tokens > 32 ? 112 : q.resident ? 96 : tokens > 24 ? 88 : tokens > 8 ? 80 : 72;
}

// Microseconds on an H200, fitted to measured times (docs/kernels/awq.md); on other Hopper parts the order of plans is what counts.
// A stage takes a warpgroup a time of its own and a share of the SM's.
double estimated_time(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  constexpr double kAlone = 0.17, kAloneTokens = 0.124, kShared = 0.252, kSharedTokens = 0.106, kNorm = 0.796;
  constexpr double kLaunch = 0.37, kPiece = 0.0148, kByStage = 3.85, kStageTokens = 0.00187, kSums = 0.54 / 65536, kAlongK = 0.367;
  constexpr double kCluster = 1.56, kClusterBlock = 0.007, kLargeCluster = 0.22, kEight = 0.5, kExchange = 26.0 / 65536;
  constexpr double kRound = 3.92, kFull = 0.335, kShallow = 0.82, kDeep = 12;
  const Layout layout = lay_out(q, plan, device);
  const StreamProblem& p = layout.problem;
  const double tokens = tokens_of(q), sms = std::floor(device.sm_count * (plan.splits > 2 ? 0.91 : 1.0));  // large clusters leave some idle
  const int warps = 4 * p.groups_n * p.groups_k + 1;
  const double fit = static_cast<double>(
      std::max<int64_t>(1, std::min<int64_t>(device.smem_per_sm / (layout.smem + kReserved), 65536 / (registers_of(q) * 32 * warps))));
  const double of_sm = std::ceil(double(ceil_div(q.N, p.groups_n * kGroupRows)) * plan.splits / sms), at_once = std::min(of_sm, fit);
  const double alone = kAlone + kAloneTokens * tokens / 64, shared = at_once * p.groups_n * p.groups_k * (kShared + kSharedTokens * tokens / 64);
  const double stage = std::pow(std::pow(alone, kNorm) + std::pow(shared, kNorm), 1 / kNorm);
  double time = kLaunch + double(ceil_div(p.per_split, p.groups_k)) * of_sm / at_once * stage + kAlongK * (p.groups_k - 1) + kRound * (of_sm / at_once - 1);
  time += tokens_from(q, plan) == Tokens::kPiece ? kPiece * double(q.M) * p.per_split * of_sm : kByStage + kStageTokens * tokens * p.per_split * of_sm;
  time += kSums * double(q.M) * p.groups_n * kGroupRows * p.groups_k * at_once;
  if (plan.splits > 1) time += kCluster + kClusterBlock * plan.splits;
  if (plan.splits > 2) time += kLargeCluster + kExchange * double(q.M) * p.groups_n * kGroupRows * at_once * (plan.splits - 1) / plan.splits;
  if (plan.splits > 4) time += kEight;
  if (tokens_from(q, plan) != Tokens::kImages && fit <= at_once) time += kFull;  // no block of the next call comes early
  return time + kShallow * std::max(0.0, 1 - p.ring / std::min<double>(p.per_split, p.groups_k * kDeep));
}

cudaLaunchConfig_t early_launch(int64_t blocks, int threads, int64_t smem, cudaStream_t stream, cudaLaunchAttribute (&attributes)[2], int splits) {
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(smem);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = splits > 1 ? 2 : 1;
  return config;
}

}  // namespace

int stream_variant_count() { return kVariantCount; }

const char* stream_plan_rejected(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  if (device.sm != 90) return "needs compute capability 9.0";
  if (q.M < 0 || q.M > kMostTokens) return "takes 0 to 64 rows of x";
  if (q.N < 1 || q.N > (int64_t{1} << 30) || q.K < 1 || q.K >= (int64_t{1} << 19)) return "N or K is out of range";
  if (q.K % 32 != 0 || q.N % 8 != 0) return "copies 16 bytes at a time: K must be a multiple of 32 and N of 8";
  if (q.part_first % 8 != 0 || q.part_of % 8 != 0) return "parts of a weight must begin at multiples of 8 rows, and the whole be one";
  if (q.group < 32 || q.group % 32 != 0 || q.K % q.group != 0) return "the group must be a multiple of 32 that divides K";
  if (q.x_type == DType::kFloat32 || q.parameter_type != q.x_type) return "takes bfloat16 or float16 x, and scales of the same type";
  if (!is_aligned(q.x) || !is_aligned(q.codes) || !is_aligned(q.scale) || !is_aligned(q.zero)) return "needs 16-byte aligned operands";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return "there is no such variant";
  if (plan.variant >= kShapes && (q.M > kMostPieceTokens || q.resident)) return "that is for up to 16 rows of x and codes in their stored order";
  if (q.resident && (q.K % kStageColumns != 0 || (q.group != 64 && q.group != 128 && q.group % kStageColumns != 0))) {
    return "the resident order has whole steps of 256 columns, in groups of 64, 128 or multiples of 256";
  }
  if (groups_n_of(plan) * groups_k_of(plan) > most_groups(tokens_of(q))) return "a block has up to four warpgroups, three with more than 32 rows of x";
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "K is split in 1, 2, 4 or 8";
  const int64_t stages = ceil_div(q.K, kStageColumns);
  if (ceil_div(stages, ceil_div(stages, plan.splits)) != plan.splits) return "K does not fall into so many pieces";
  const Layout layout = lay_out(q, plan, device);
  const StreamProblem& p = layout.problem;
  if (p.ring < p.groups_k || p.ring < std::min(2 * p.groups_k, p.per_split)) return "a ring of so few stages starves";
  if (layout.smem > std::min(device.smem_per_block, device.smem_per_sm / blocks_per_sm_of(plan)) - kReserved) return "its shared memory does not fit";
  return nullptr;
}

// Of a part of a weight: the fastest of those that add as the whole's plan does, over the same warpgroups along K and pieces of K.
LinearPlan choose_stream_plan(const LinearParams& q, const LinearDevice& device) {
  const LinearPlan whole = q.part_of != 0 ? choose_stream_plan(whole_of(q), device) : LinearPlan{-1, 0};
  LinearPlan best = {-1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kVariantCount; ++i) {
    for (int splits = 1; splits <= kMostSplits; splits *= 2) {
      const LinearPlan plan = {i, splits};
      if (whole.splits != 0 && (splits != whole.splits || groups_k_of(plan) != groups_k_of(whole))) continue;
      if (stream_plan_rejected(q, plan, device) != nullptr) continue;
      const double time = estimated_time(q, plan, device);
      if (time < least) least = time, best = plan;
    }
  }
  return best;
}

std::string describe_stream(const LinearParams& q, const LinearPlan& plan) {
  std::string text = "M=" + std::to_string(q.M) + " N=" + std::to_string(q.N) + " K=" + std::to_string(q.K) + " g=" + std::to_string(q.group) + ": ";
  if (plan.variant < 0 || plan.variant >= kVariantCount || plan.splits < 1) return text + "no variant";
  return text + "tiles of " + std::to_string(groups_n_of(plan) * kGroupRows) + " rows, " + std::to_string(groups_k_of(plan)) +
         " warpgroups along K, " + std::to_string(blocks_per_sm_of(plan)) + " blocks an SM, K in " + std::to_string(plan.splits) + " pieces";
}

int64_t stream_workspace(const LinearParams& q, const LinearPlan& plan, const LinearDevice&) {
  if (plan.variant < 0 || tokens_from(q, plan) != Tokens::kImages) return 0;
  return ceil_div(q.K, kStageColumns) * tokens_of(q) * kImageRowBytes;
}

void awq_stream(const LinearParams& q, void* workspace, const LinearPlan* forced, int device, cudaStream_t cuda_stream) {
  if (q.M == 0) return;
  host::DeviceGuard guard(device);
  const LinearDevice facts = linear_device(device);
  const LinearPlan plan = forced != nullptr ? *forced : choose_stream_plan(q, facts);
  if (const char* reason = stream_plan_rejected(q, plan, facts)) {
    throw std::invalid_argument("awq_stream: " + describe_stream(q, plan) + ": " + reason);
  }
  const Layout layout = lay_out(q, plan, facts);
  StreamParams p = {};
  p.problem = layout.problem;
  p.x = static_cast<const uint16_t*>(q.x);
  p.images = static_cast<const uint8_t*>(workspace);
  const int rows = p.problem.groups_n * kGroupRows;
  const auto type = q.x_type == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto parameter_map = [&](const void* data) {
    return host::encode_matrix_map({type, 2, data, q.K / q.group, q.N, 2 * q.N, p.problem.stage_groups, rows, CU_TENSOR_MAP_SWIZZLE_NONE});
  };
  p.codes = host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, q.codes, q.N, q.K / 2, q.K / 2, rows, kRowBytes,
                                     CU_TENSOR_MAP_SWIZZLE_128B});
  p.scale = parameter_map(q.scale), p.zero = parameter_map(q.zero);
  p.epilogue = {q.bias, q.residual, q.residual_scale, q.out, q.residual_scale_stride, q.bias_type, q.residual_type, q.out_type,
                q.N % 4 == 0 && is_aligned(q.out) && is_aligned(q.residual)};
  cudaLaunchAttribute attributes[2] = {};
  const Tokens from = tokens_from(q, plan);
  if (from == Tokens::kRows) {
    p.rows = host::encode_matrix_map({type, 2, q.x, q.M, q.K, 2 * q.K, p.problem.M, 64, CU_TENSOR_MAP_SWIZZLE_128B});
  } else if (from == Tokens::kImages) {
    const int64_t units = int64_t{kStageUnits} * tokens_of(q) * p.problem.all_stages;
    const cudaLaunchConfig_t config = early_launch(ceil_div(units, kPairThreads), kPairThreads, 0, cuda_stream, attributes, 1);
    host::check(cudaLaunchKernelEx(&config, pair_kernel_of(q), static_cast<uint8_t*>(workspace), p.x, p.problem.M, p.problem.K,
                                   p.problem.all_stages), kName);
  }
  const Kernel kernel = q.x_type == DType::kFloat16 ? kernel_of<__half>(q, from) : kernel_of<__nv_bfloat16>(q, from);
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, facts.smem_per_block - 2048), kName);
  const cudaLaunchConfig_t config = early_launch(ceil_div(q.N, rows) * plan.splits, 128 * p.problem.groups_n * p.problem.groups_k + 32,
                                                 layout.smem, cuda_stream, attributes, plan.splits);
  host::check(cudaLaunchKernelEx(&config, kernel, p), kName);
}

}  // namespace kitchen::awq
