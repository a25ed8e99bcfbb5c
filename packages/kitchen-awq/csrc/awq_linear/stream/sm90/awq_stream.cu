// AWQ linear with a fused epilogue for 1 to 16 rows of x, limited by reading the weight once. Hopper.
//
//   W[n, k] = round_T(fma(q[n, k] - 8, scale[k / g, n], zero[k / g, n]))     quant/awq_decode.h, to the bit
//   y = sum over k of x[m, k] * W[n, k], fp32;  then epilogue.cuh
//
//   x [M, K] of T, bfloat16 or float16; codes [N, K/2]; scale, zero [K/g, N] of T; K and g multiples of 32, N of 8
//
// Kernel: stream_kernel.cuh. Measured: docs/kernels/awq.md.
#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <tuple>

#include "awq_linear/awq_linear.h"
#include "awq_linear/stream/stream_kernel.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/tensor_map.h"

namespace kitchen::awq {
namespace {

using namespace stream;

constexpr const char* kName = "awq_stream";
constexpr int kMostTokens = 16;
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// A variant: how many warps lie along N, how many blocks share an SM, and whether a stage is one slice or, for up to 8 rows, two.
constexpr int kVariantCount = 4 * kMostWarps;
int warps_n_of(const LinearPlan& plan) { return plan.variant % kMostWarps + 1; }
int blocks_per_sm_of(const LinearPlan& plan) { return plan.variant / kMostWarps % 2 + 1; }
int slices_of(const LinearPlan& plan) { return plan.variant / (2 * kMostWarps) + 1; }
int most_warps(const LinearPlan& plan) { return (kMostWarps + 1) / blocks_per_sm_of(plan) - 1; }  // of a block, its producer apart
int stage_columns(const LinearPlan& plan) { return slices_of(plan) * kSliceColumns; }

struct Layout {
  StreamProblem problem;
  int64_t smem;
};

// Shared memory: the rings of stages, tokens, two buffers of sums, what the cluster sends. The rings have two
// stages.
Layout lay_out(const LinearParams& q, const LinearPlan& plan) {
  const int columns = stage_columns(plan);
  StreamProblem p = {};
  p.M = static_cast<int>(q.M), p.N = static_cast<int>(q.N), p.K = static_cast<int>(q.K);
  p.warps_n = warps_n_of(plan);
  p.splits = plan.splits;
  p.all_stages = static_cast<int>(ceil_div(q.K, columns));
  p.per_split = static_cast<int>(ceil_div(p.all_stages, p.splits));
  const int64_t most = std::max(1, most_warps(plan) / p.warps_n);
  p.warps_k = static_cast<int>(ceil_div(p.per_split, ceil_div(p.per_split, most)));
  p.tiles = static_cast<int>(ceil_div(q.N, p.warps_n * kRows));
  p.stage_groups = q.group >= columns ? (q.group % columns == 0 ? 1 : 2)
                   : columns % q.group == 0 ? static_cast<int>(columns / q.group)
                                                  : static_cast<int>((columns - 1) / q.group + 2);
  p.even_groups = kSliceColumns % q.group == 0 || q.group % columns == 0;
  const uint64_t in_32 = static_cast<uint64_t>(q.group / 32);
  p.group_inverse = in_32 <= 1 ? 0 : static_cast<uint32_t>((uint64_t{1} << 32) / in_32 + 1);
  const int64_t warps = p.warps_n * p.warps_k, pitch = int64_t{2} * columns * p.per_split + 64, rows = p.warps_n * kRows;
  p.token_pitch = static_cast<int>(pitch);
  p.scales_at = static_cast<int>(columns / kSliceColumns * rows * kSliceBytes);
  p.zeros_at = static_cast<int>(p.scales_at + ceil_div(2 * p.stage_groups * rows, 128) * 128);
  p.stage_bytes = static_cast<int>(ceil_div(2 * p.zeros_at - p.scales_at, 1024) * 1024);
  const int64_t sums = 2 * warps * q.M * kSumPitch * 4, received = plan.splits == 1 ? 0 : p.warps_n * plan.splits * q.M * kRows * 4;
  const int64_t rest = q.M * pitch + sums + received, a_stage = int64_t{p.warps_k} * p.stage_bytes;
  p.ring_log2 = 1;  // more stages are slower: what is wanted first comes later (H200, 2026-11-30)
  p.tokens_at = static_cast<int>(a_stage << p.ring_log2);
  p.sums_at = static_cast<int>(p.tokens_at + q.M * pitch);
  p.received_at = static_cast<int>(p.sums_at + sums);
  return {p, (a_stage << p.ring_log2) + rest};
}

constexpr int kReserved = 4096;  // bytes of the kernel itself, and what an SM keeps for a block

// What a block may have.
int64_t room_of(const LinearPlan& plan, const LinearDevice& device) {
  return std::min(device.smem_per_block, device.smem_per_sm / blocks_per_sm_of(plan)) - kReserved;
}

using Kernel = void (*)(StreamParams);

template <class T, int kParts>
Kernel kernel_of(const LinearParams& q, int slices) {
  if (q.M > 8) return awq_stream_kernel<T, 2, 1, kParts>;
  return slices == 1 ? awq_stream_kernel<T, 1, 1, kParts> : awq_stream_kernel<T, 1, 2, kParts>;
}

template <class T>
Kernel kernel_of(const LinearParams& q, int slices) {
  return q.group % 64 == 0 ? kernel_of<T, 1>(q, slices) : kernel_of<T, 2>(q, slices);
}

// How many blocks the chip holds at once, whole clusters; asked for once, since the answer takes microseconds.
int resident_blocks(Kernel kernel, const cudaLaunchConfig_t& config, int splits, int blocks_per_sm, int device) {
  using Key = std::tuple<const void*, int, int, unsigned, size_t>;
  static std::map<Key, int> known;
  static std::mutex mutex;
  const Key key = {reinterpret_cast<const void*>(kernel), device, splits, config.blockDim.x, config.dynamicSmemBytes};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const int most = host::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - static_cast<int>(sizeof(Barriers)) - 64;
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), kName);
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), kName);
  int blocks = 0;
  if (splits > 1) {
    int clusters = 0;
    host::check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), kName);
    blocks = clusters * splits;
  } else {
    int per_sm = 0;
    host::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, static_cast<int>(config.blockDim.x), config.dynamicSmemBytes), kName);
    blocks = std::min(per_sm, blocks_per_sm) * host::attribute(cudaDevAttrMultiProcessorCount, device);
  }
  return known[key] = std::max(blocks, splits);
}

// Microseconds on an H200, fitted to measured times (docs/kernels/awq.md); on other Hopper parts the order of plans is what counts.
// A slice takes a warp a time of its own, or where warps are many, a share of the SM's.
double estimated_time(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  constexpr double kLaunch = 2.73, kSlice[2] = {0.532, 1.355}, kSliceOfSm[2] = {0.0927, 0.1017}, kStage = 0.008;  // up to 8 rows, more
  constexpr double kTile = 0.255, kTileSums = 0.00195, kTokens = 18.7e-6, kCluster = 0.46, kClusterBlock = 0.192;
  const StreamProblem p = lay_out(q, plan).problem;
  const bool many = q.M > 8;
  const double resident = std::max(1.0, std::floor(device.sm_count * (plan.splits >= 4 ? 0.91 : 1.0) / plan.splits)) * blocks_per_sm_of(plan);
  const double rounds = std::ceil(p.tiles / resident), stages = static_cast<double>(ceil_div(p.per_split, p.warps_k));
  const double blocks = std::min<double>(blocks_per_sm_of(plan), std::ceil(double(p.tiles) * plan.splits / device.sm_count));  // an SM
  const double slice = std::max(kSlice[many], p.warps_n * p.warps_k * blocks * kSliceOfSm[many]);
  const double token_bytes = double(p.per_split) * stage_columns(plan) * 2 * double(q.M) * blocks;
  return kLaunch + rounds * (stages * (slices_of(plan) * slice + kStage) + kTile + kTileSums * p.warps_k * double(q.M)) +
         kTokens * token_bytes + (plan.splits > 1 ? kCluster + kClusterBlock * plan.splits : 0);
}

}  // namespace

int stream_variant_count() { return kVariantCount; }

const char* stream_plan_rejected(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  if (device.sm != 90) return "needs compute capability 9.0";
  if (q.M < 0 || q.M > kMostTokens) return "takes 0 to 16 rows of x";
  if (q.N < 1 || q.N > (int64_t{1} << 30) || q.K < 1 || q.K >= (int64_t{1} << 19)) return "N or K is out of range";
  if (q.K % 32 != 0 || q.N % 8 != 0) return "copies 16 bytes at a time: K must be a multiple of 32 and N of 8";
  if (q.group < 32 || q.group % 32 != 0 || q.K % q.group != 0) return "the group must be a multiple of 32 that divides K";
  if (q.x_type == DType::kFloat32 || q.parameter_type != q.x_type) return "takes bfloat16 or float16 x, and scales of the same type";
  if (!is_aligned(q.x) || !is_aligned(q.codes) || !is_aligned(q.scale) || !is_aligned(q.zero)) return "needs 16-byte aligned operands";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return "there is no such variant";
  if (q.M > 8 && slices_of(plan) > 1) return "more than 8 rows take stages of one slice";
  if (warps_n_of(plan) > most_warps(plan)) return "blocks of an SM have 16 warps together";
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "K is split in 1, 2, 4 or 8";
    const int64_t stages = ceil_div(q.K, stage_columns(plan));
  if (ceil_div(stages, ceil_div(stages, plan.splits)) != plan.splits) return "K does not fall into so many pieces";
  if (lay_out(q, plan).smem > room_of(plan, device)) return "its shared memory does not fit";
  return nullptr;
}

LinearPlan choose_stream_plan(const LinearParams& q, const LinearDevice& device) {
  LinearPlan best = {-1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kVariantCount; ++i) {
    for (int splits = 1; splits <= kMostSplits; splits *= 2) {
      const LinearPlan plan = {i, splits};
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
  const StreamProblem p = lay_out(q, plan).problem;
  return text + "tiles of " + std::to_string(p.warps_n * kRows) + " rows, stages of " + std::to_string(stage_columns(plan)) + " columns, " + std::to_string(p.warps_k) + " warps along K, " +
         std::to_string(blocks_per_sm_of(plan)) + " blocks an SM, K in " + std::to_string(plan.splits) + " pieces, " +
         std::to_string(p.tiles) + " tiles";
}

void awq_stream(const LinearParams& q, void*, const LinearPlan* forced, int device, cudaStream_t cuda_stream) {
  if (q.M == 0) return;
  host::DeviceGuard guard(device);
  const LinearDevice facts = linear_device(device);
  const LinearPlan plan = forced != nullptr ? *forced : choose_stream_plan(q, facts);
  if (const char* reason = stream_plan_rejected(q, plan, facts)) {
    throw std::invalid_argument("awq_stream: " + describe_stream(q, plan) + ": " + reason);
  }
  const Layout layout = lay_out(q, plan);
  StreamParams p = {};
  p.problem = layout.problem;
  p.tokens = q.x;
  const int rows = p.problem.warps_n * kRows;
  const auto type = q.x_type == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto parameter_map = [&](const void* data) {
    return host::encode_matrix_map({type, 2, data, q.K / q.group, q.N, 2 * q.N, p.problem.stage_groups, rows, CU_TENSOR_MAP_SWIZZLE_NONE});
  };
  p.codes = host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, q.codes, q.N, q.K / 2, q.K / 2, rows, kSliceBytes,
                                     CU_TENSOR_MAP_SWIZZLE_128B});
  p.scale = parameter_map(q.scale), p.zero = parameter_map(q.zero);
  p.epilogue = {q.bias, q.residual, q.residual_scale, q.out, q.residual_scale_stride, q.bias_type, q.residual_type, q.out_type,
                q.N % 4 == 0 && is_aligned(q.out) && is_aligned(q.residual)};
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(plan.splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.splits));
  config.blockDim = dim3(static_cast<unsigned>(32 * (p.problem.warps_n * p.problem.warps_k + 1)));
  // So much that no more blocks fit an SM than were planned: those of the next call come early and would share an SM in pairs.
  config.dynamicSmemBytes = static_cast<size_t>(std::max<int64_t>(layout.smem, facts.smem_per_sm / (blocks_per_sm_of(plan) + 1)));
  config.stream = cuda_stream;
  config.attrs = attributes;
  config.numAttrs = plan.splits > 1 ? 2 : 1;
  const Kernel kernel = q.x_type == DType::kFloat16 ? kernel_of<__half>(q, slices_of(plan)) : kernel_of<__nv_bfloat16>(q, slices_of(plan));
  const int64_t clusters = resident_blocks(kernel, config, plan.splits, blocks_per_sm_of(plan), device) / plan.splits;
  const int64_t rounds = ceil_div(p.problem.tiles, clusters);
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(p.problem.tiles, rounds) * plan.splits));
  host::check(cudaLaunchKernelEx(&config, kernel, p), kName);
}

}  // namespace kitchen::awq
