// AWQ linear on Hopper, for many rows of x: weights are decoded in registers and multiply as wgmma's register operand.
//
//   W[n, k] = round_T(fma(q[n, k] - 8, scale[k / g, n], zero[k / g, n]))     quant/awq_decode.h, to the bit
//   y = sum over k of x[m, k] * W[n, k], fp32;  then epilogue.cuh
//
//   x [M, K] of T, bfloat16 or float16; codes [N, K/2]; scale, zero [K/g, N] of T; K and g multiples of 32, N of 8
//
// Kernel: gemm_kernel.cuh. Measured: docs/kernels/awq.md.
#include "awq_linear/awq_linear.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "awq_linear/sm90/gemm_kernel.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/host/tensor_map.h"

namespace kitchen::awq {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

constexpr const char* kName = "awq_gemm_sm90";
constexpr int kClearThreads = 128;

// The kernel in front of one that cuts tiles: takes back the flags of pieces.
__global__ void __launch_bounds__(kClearThreads) clear_flags(uint32_t* flags, int count) {
  ptx::griddep_wait();  // the workspace may be that of the call before
  ptx::griddep_launch();
  const int i = static_cast<int>(blockIdx.x) * kClearThreads + static_cast<int>(threadIdx.x);
  if (i < count) flags[i] = 0;
}

struct Variant {
  int tokens, rows;
  void (*launch)(const GemmParams&, DType, int64_t group, int blocks, cudaStream_t);
};

template <class Config, class T, int kGroups>
void launch_typed(const GemmParams& p, int blocks, cudaStream_t stream) {
  host::launch(kName, awq_gemm_kernel<Config, T, kGroups>, {blocks, Config::kThreads, kPair, sizeof(GemmShared<Config>), stream, true}, p);
}

template <class Config, class T>
void launch_grouped(const GemmParams& p, int64_t group, int blocks, cudaStream_t stream) {
  if (group % kStageColumns == 0) return launch_typed<Config, T, 1>(p, blocks, stream);
  if (group == 64) return launch_typed<Config, T, 2>(p, blocks, stream);
  if (group == 32) return launch_typed<Config, T, 4>(p, blocks, stream);
  launch_typed<Config, T, 0>(p, blocks, stream);
}

template <class Config>
void launch(const GemmParams& p, DType x_type, int64_t group, int blocks, cudaStream_t stream) {
  if (x_type == DType::kFloat16) return launch_grouped<Config, __half>(p, group, blocks, stream);
  launch_grouped<Config, __nv_bfloat16>(p, group, blocks, stream);
}

template <int kTokens, int kStages>
constexpr Variant variant() {
  using Config = GemmConfig<kTokens, kStages>;
  static_assert(sizeof(GemmShared<Config>) <= 227 * 1024, "shared memory of a block");
  return {kTokens, Config::kRows, launch<Config>};
}

// Tokens, stages.
constexpr Variant kVariants[] = {variant<128, 5>(), variant<256, 3>()};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

// A plan's `splits`: 1 for whole tiles; where clusters are left over, into how many pieces of K each tile is cut; else 2: the last tiles
// are cut so that all clusters have as much.
constexpr int kWhole = 1;
constexpr int64_t kMostWorkspace = int64_t{32} << 20;

struct Layout {
  Division division;
  int missing_rows;  // GemmParams
  int clusters;
  int64_t flags, pieces;  // bytes of the workspace, in this order
};

Layout lay_out(const LinearParams& q, const LinearPlan& plan, int sm_count) {
  const Variant& v = kVariants[plan.variant];
  Layout layout = {};
  Division& d = layout.division;
  d.tiles_m = static_cast<int>(ceil_div(q.M, v.tokens));
  const int64_t rows = kPair * v.rows, most = sm_count / kPair, whole = d.tiles_m * ceil_div(whole_rows(q), rows);
  d.stages = static_cast<int>(ceil_div(q.K, kStageColumns));
  d.tiles = static_cast<int>(d.tiles_m * ceil_div(q.N, rows));
  if (plan.splits != kWhole && whole * plan.splits <= most) {
    d.shares = plan.splits, d.cut_tiles = d.whole_cut_tiles = d.tiles;
    layout.clusters = d.positions = d.whole_positions = d.tiles * plan.splits;
  } else if (plan.splits != kWhole && whole % most != 0) {
    layout.missing_rows = static_cast<int>(cut_tiles_of(d, q.part_first, q.N, rows, whole, most));
    layout.clusters = static_cast<int>(std::min<int64_t>(most, d.positions + d.tiles - d.cut_tiles));
  } else {
    layout.clusters = d.positions = d.whole_positions = static_cast<int>(std::min<int64_t>(most, d.tiles));
  }
  if (d.cut_tiles > 0) {
    layout.flags = ceil_div(int64_t{d.positions} * kPair * kFlags * 4, 256) * 256;
    layout.pieces = int64_t{d.positions} * kPair * v.rows * v.tokens * 4;
  }
  return layout;
}

// How many groups a stage may touch.
int groups_of_stage(int64_t group) {
  if (group % kStageColumns == 0) return 1;
  return static_cast<int>(kStageColumns % group == 0 ? kStageColumns / group : (kStageColumns - 1) / group + 2);
}

CUtensorMap map_of(CUtensorMapDataType type, int bytes, const void* data, int64_t rows, int64_t columns, int box_rows, int box_columns,
                   CUtensorMapSwizzle swizzle) {
  return host::encode_matrix_map({type, bytes, data, rows, columns, columns * bytes, box_rows, box_columns, swizzle});
}

// Microseconds on an H200, fitted to measured times of 64 to 2048 tokens, 4.6% off in the root mean square (docs/kernels/awq.md); on other
// Hopper parts the order of plans is what counts.
double estimated_time(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  constexpr double kStage[kVariantCount] = {0.925, 1.152};
  constexpr double kBusy[kVariantCount] = {0, 0.191};  // more where all SMs multiply: clocks fall
  constexpr double kLaunch = 1.1, kStore = 4.6, kShares = 1.7, kShare = 0.8, kExchange = 5.1, kCut = 7.3, kLeft = 2.4;
  const Variant& v = kVariants[plan.variant];
  const Layout layout = lay_out(q, plan, device.sm_count);
  const Division& d = layout.division;
  const double size = double(v.rows) * v.tokens / 32768, busy = double(kPair * layout.clusters) / device.sm_count;
  const double rounds = std::ceil(double(d.tiles - d.cut_tiles) / layout.clusters) + double(d.cut_tiles) / layout.clusters;
  const double multiplied = kLaunch + rounds * (d.stages * (kStage[plan.variant] + busy * kBusy[plan.variant]) + size * kStore);
  if (d.cut_tiles == 0) return multiplied;
  if (d.shares == 0) return multiplied + kCut + kLeft * size;
  return multiplied + kShares + kShare * d.shares + kExchange * size * (d.shares - 1) / d.shares;
}

}  // namespace

int gemm_sm90_variant_count() { return kVariantCount; }

const char* gemm_sm90_plan_rejected(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  if (device.sm != 90) return "needs compute capability 9.0";
  if (q.M < 0 || q.M > (int64_t{1} << 30)) return "M is out of range";
  if (q.N < 1 || q.N > (int64_t{1} << 30) || q.K < 1 || q.K >= (int64_t{1} << 19)) return "N or K is out of range";
  if (q.K % 32 != 0 || q.N % 8 != 0) return "loads by TMA: K must be a multiple of 32 and N of 8";
  if (q.part_first % 8 != 0 || q.part_of % 8 != 0) return "parts of a weight must begin at multiples of 8 rows, and the whole be one";
  if (q.group < 32 || q.group % 32 != 0 || q.K % q.group != 0) return "the group must be a multiple of 32 that divides K";
  if (q.x_type == DType::kFloat32 || q.parameter_type != q.x_type) return "takes bfloat16 or float16 x, and scales of the same type";
  if (!is_aligned(q.x) || !is_aligned(q.codes) || !is_aligned(q.scale) || !is_aligned(q.zero)) return "needs 16-byte aligned operands";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return "there is no such variant";
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "tiles are whole, or in 2, 4 or 8 pieces";
  const Variant& v = kVariants[plan.variant];
  if (ceil_div(q.N, kPair * v.rows) * ceil_div(q.M, v.tokens) > (int64_t{1} << 31) - 1) return "more than 2^31 - 1 tiles";
  const Division division = lay_out(q, plan, device.sm_count).division;
  if (division.shares == 0 && plan.splits > 2) return "there are more tiles than can be cut so: 2 cuts them as blocks need it";
  const bool small = 8 * division.shares > v.tokens || 2 * division.shares > division.stages;
  if (division.shares > 0 && small) return "the tile is too small for so many pieces";
  if (gemm_sm90_workspace(q, plan, device) > kMostWorkspace) return "its workspace would be more than 32 MiB";
  return nullptr;
}

// Of a part of a weight: the whole's, but tiles that are whole there may have any number of tokens, which no sum knows of.
LinearPlan choose_gemm_sm90_plan(const LinearParams& q, const LinearDevice& device) {
  const LinearPlan whole = q.part_of != 0 ? choose_gemm_sm90_plan(whole_of(q), device) : LinearPlan{-1, 0};
  if (whole.splits > kWhole) return whole;
  LinearPlan best = {-1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kVariantCount; ++i) {
    if (i > 0 && kVariants[i].tokens >= 2 * q.M) continue;  // made for more tokens
    for (int splits = 1; splits <= (whole.splits == kWhole ? kWhole : 8); splits *= 2) {
      const LinearPlan plan = {i, splits};
      if (gemm_sm90_plan_rejected(q, plan, device) != nullptr) continue;
      const double time = estimated_time(q, plan, device);
      if (time < least) least = time, best = plan;
    }
  }
  return best;
}

std::string describe_gemm_sm90(const LinearParams& q, const LinearPlan& plan) {
  std::string text = "M=" + std::to_string(q.M) + " N=" + std::to_string(q.N) + " K=" + std::to_string(q.K) + " g=" + std::to_string(q.group) + ": ";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return text + "no variant";
  const Variant& v = kVariants[plan.variant];
  return text + "tile " + std::to_string(v.rows) + " rows x " + std::to_string(v.tokens) + " tokens, " +
         std::to_string(ceil_div(q.N, kPair * v.rows) * ceil_div(q.M, v.tokens)) + " tiles, " + (plan.splits == kWhole ? "whole" : "cut, " + std::to_string(plan.splits));
}

int64_t gemm_sm90_workspace(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  if (plan.variant < 0 || plan.variant >= kVariantCount) return 0;
  const Layout layout = lay_out(q, plan, device.sm_count);
  return layout.flags + layout.pieces;
}

void awq_gemm_sm90(const LinearParams& q, void* workspace, const LinearPlan* forced, int device, cudaStream_t stream) {
  if (q.M == 0) return;
  host::DeviceGuard guard(device);
  const LinearDevice facts = linear_device(device);
  const LinearPlan plan = forced != nullptr ? *forced : choose_gemm_sm90_plan(q, facts);
  if (const char* reason = gemm_sm90_plan_rejected(q, plan, facts)) {
    throw std::invalid_argument("awq_gemm_sm90: " + describe_gemm_sm90(q, plan) + ": " + reason);
  }
  const Variant& v = kVariants[plan.variant];
  const Layout layout = lay_out(q, plan, facts.sm_count);
  const int64_t groups = q.K / q.group;
  uint8_t* const memory = static_cast<uint8_t*>(workspace);
  GemmParams p = {};
  p.M = static_cast<int>(q.M), p.N = static_cast<int>(q.N), p.K = static_cast<int>(q.K);
  p.division = layout.division, p.missing_rows = layout.missing_rows;
  p.flags = reinterpret_cast<uint32_t*>(memory);
  p.pieces = reinterpret_cast<float*>(memory + layout.flags);
  p.groups = groups_of_stage(q.group);
  const uint64_t in_32 = static_cast<uint64_t>(q.group / 32);
  p.group_inverse = in_32 == 1 ? 0 : static_cast<uint32_t>((uint64_t{1} << 32) / in_32 + 1);
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto type = q.x_type == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  p.codes = map_of(kBytes, 1, q.codes, q.N, q.K / 2, v.rows, 64, CU_TENSOR_MAP_SWIZZLE_64B);
  p.tokens = map_of(type, 2, q.x, q.M, q.K, v.tokens / kPair, 64, CU_TENSOR_MAP_SWIZZLE_128B);
  p.scale = map_of(type, 2, q.scale, groups, q.N, p.groups, v.rows, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.zero = map_of(type, 2, q.zero, groups, q.N, p.groups, v.rows, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.epilogue = {q.bias, q.residual, q.residual_scale, q.out, q.residual_scale_stride, q.bias_type, q.residual_type, q.out_type,
                q.N % 4 == 0 && is_aligned(q.out) && is_aligned(q.residual)};
  p.plain = p.epilogue.vectors && q.residual == nullptr && q.out_type == q.x_type;
  if (const int count = static_cast<int>(layout.flags / 4); count > 0) {
    host::launch(kName, clear_flags, {ceil_div(count, kClearThreads), kClearThreads, 1, 0, stream, true}, p.flags, count);
  }
  v.launch(p, q.x_type, q.group, layout.clusters * kPair, stream);
}

}  // namespace kitchen::awq
