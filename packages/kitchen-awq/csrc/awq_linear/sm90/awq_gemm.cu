// AWQ linear on Hopper, for any number of rows of x: weights are decoded in registers and multiply as wgmma's register operand.
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
#include "kitchen/host/tensor_map.h"

namespace kitchen::awq {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

constexpr const char* kName = "awq_gemm_sm90";
constexpr int kPairThreads = 128;

// x [M, K] to images of stages (gemm_kernel.cuh): [tiles of `tokens` rows][stages][2 halves of 64 columns][tokens] rows of 128 bytes,
// swizzled, columns beyond K and rows beyond M as zeros. A thread takes word w of the four lanes of a token's stage. 16 columns of an
// image are 2t, 2t + 1, 2t + 8, 2t + 9 of lane t; pair r of word w goes to 16 columns 2w + r/2. Clears the flags of pieces, too.
__global__ void __launch_bounds__(kPairThreads) pair_tokens(const uint16_t* x, uint8_t* images, int64_t units, int M, int K, int stages,
                                                            int tokens, uint32_t* flags, int flag_count) {
  ptx::griddep_wait();  // before anything is written: the workspace may be that of the call before
  ptx::griddep_launch();
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kPairThreads + threadIdx.x;
  for (int64_t i = unit; i < flag_count; i += static_cast<int64_t>(gridDim.x) * kPairThreads) flags[i] = 0;
  if (unit >= units) return;
  const int w = static_cast<int>(unit % 4), m = static_cast<int>(unit / 4 / stages), stage = static_cast<int>(unit / 4 - int64_t{m} * stages);
  uint4 from[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int k = stage * kStageColumns + 32 * t + 8 * w;
    from[t] = k < K && m < M ? *reinterpret_cast<const uint4*>(x + int64_t{m} * K + k) : make_uint4(0, 0, 0, 0);
  }
  const int tile = m / tokens, row = m - tile * tokens;
  uint8_t* const to = images + ((int64_t{tile} * stages + stage) * 2 + w / 2) * tokens * 128 + row * 128;
  const auto store = [&](int i, const uint4& value) { *reinterpret_cast<uint4*>(to + (((w % 2) * 4 + i) ^ (row % 8)) * 16) = value; };
  store(0, make_uint4(__byte_perm(from[0].x, from[0].z, 0x5410), __byte_perm(from[1].x, from[1].z, 0x5410),
                      __byte_perm(from[2].x, from[2].z, 0x5410), __byte_perm(from[3].x, from[3].z, 0x5410)));
  store(1, make_uint4(__byte_perm(from[0].x, from[0].z, 0x7632), __byte_perm(from[1].x, from[1].z, 0x7632),
                      __byte_perm(from[2].x, from[2].z, 0x7632), __byte_perm(from[3].x, from[3].z, 0x7632)));
  store(2, make_uint4(__byte_perm(from[0].y, from[0].w, 0x5410), __byte_perm(from[1].y, from[1].w, 0x5410),
                      __byte_perm(from[2].y, from[2].w, 0x5410), __byte_perm(from[3].y, from[3].w, 0x5410)));
  store(3, make_uint4(__byte_perm(from[0].y, from[0].w, 0x7632), __byte_perm(from[1].y, from[1].w, 0x7632),
                      __byte_perm(from[2].y, from[2].w, 0x7632), __byte_perm(from[3].y, from[3].w, 0x7632)));
}

struct Variant {
  int tokens, rows, blocks_per_sm;
  void (*launch)(const GemmParams&, DType, int blocks, cudaStream_t);
};

// A launch whose blocks may start while the kernel in front still runs; they wait for it before they touch what it may have written.
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), unsigned blocks, int threads, int shared_bytes, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  host::check(cudaLaunchKernelEx(&config, kernel, arguments...), kName);
}

template <class Config, class T>
void launch_typed(const GemmParams& p, int blocks, cudaStream_t stream) {
  const auto kernel = awq_gemm_kernel<Config, T>;
  constexpr int kBytes = sizeof(GemmShared<Config>);
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), kName);
  launch_early(kernel, static_cast<unsigned>(blocks), Config::kThreads, kBytes, stream, p);
}

template <class Config>
void launch(const GemmParams& p, DType x_type, int blocks, cudaStream_t stream) {
  if (x_type == DType::kFloat16) return launch_typed<Config, __half>(p, blocks, stream);
  launch_typed<Config, __nv_bfloat16>(p, blocks, stream);
}

template <int kTokens, int kWarpgroups, int kStages, int kBlocksPerSm>
constexpr Variant variant() {
  using Config = GemmConfig<kTokens, kWarpgroups, kStages, kBlocksPerSm>;
  static_assert(kBlocksPerSm * (sizeof(GemmShared<Config>) + 1024) <= 228 * 1024, "shared memory of an SM");
  return {kTokens, Config::kRows, kBlocksPerSm, launch<Config>};
}

// Tokens, warpgroups of 64 rows, stages, blocks an SM.
constexpr Variant kVariants[] = {variant<32, 2, 6, 2>(), variant<32, 4, 7, 1>(), variant<64, 2, 4, 2>(), variant<64, 4, 6, 1>(),
                                 variant<128, 2, 5, 1>(), variant<128, 3, 4, 1>(), variant<256, 2, 3, 1>()};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

// A plan's `splits`: 1 for whole tiles; else the last tiles are cut so that all blocks have as much, and where tiles are few, each into
// so many pieces at most.
constexpr int kWhole = 1;
constexpr int64_t kMostWorkspace = int64_t{32} << 20;

struct Layout {
  Division division;
  int blocks;
  int64_t paired, flags, pieces;  // bytes of the workspace, in this order
};

Layout lay_out(const LinearParams& q, const LinearPlan& plan, int sm_count) {
  const Variant& v = kVariants[plan.variant];
  Layout layout = {};
  Division& d = layout.division;
  d.tiles_m = static_cast<int>(ceil_div(q.M, v.tokens));
  const int64_t tiles = d.tiles_m * ceil_div(q.N, v.rows);
  d.tiles = static_cast<int>(tiles), d.stages = static_cast<int>(ceil_div(q.K, kStageColumns));
  int64_t blocks = int64_t{sm_count} * v.blocks_per_sm;
  if (plan.splits != kWhole) {
    blocks = std::min({blocks, tiles * plan.splits, std::max<int64_t>(1, tiles * d.stages / 2)});
    // At least a tile's length each, so that two or three blocks share a tile, unless tiles are fewer than blocks.
    d.cut_tiles = static_cast<int>(tiles < 2 * blocks ? tiles : tiles % blocks == 0 ? 0 : tiles % blocks + blocks);
    layout.flags = blocks * kMostWarps * 4;
    layout.pieces = blocks * v.rows * v.tokens * 4;
  }
  layout.blocks = static_cast<int>(std::min(blocks, plan.splits != kWhole ? blocks : tiles));
  layout.paired = int64_t{2} * d.tiles_m * v.tokens * d.stages * kStageColumns;
  layout.flags = ceil_div(layout.flags, 256) * 256;
  return layout;
}

CUtensorMap map_of(CUtensorMapDataType type, int bytes, const void* data, int64_t rows, int64_t columns, int box_rows, int box_columns,
                   CUtensorMapSwizzle swizzle) {
  return host::encode_matrix_map({type, bytes, data, rows, columns, columns * bytes, box_rows, box_columns, swizzle});
}

// Microseconds on an H200, fitted to measured times (docs/kernels/awq.md); on other Hopper parts the order of plans is what counts.
double estimated_time(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  constexpr double kStage[kVariantCount] = {0.661, 0.87, 0.767, 1.036, 0.846, 1.148, 1.528};  // of a block that has the SM for itself
  constexpr double kCrowd[kVariantCount] = {0.184, 0, 0.327, 0, 0, 0, 0};                      // more, beside another
  constexpr double kLaunch = 2.2, kStore = 6.3, kMeeting = 6.3, kSums = 1.22, kPiece = 0.37, kTokens = 1.08e-6;
  const Variant& v = kVariants[plan.variant];
  const Layout layout = lay_out(q, plan, device.sm_count);
  const Division& d = layout.division;
  const double whole = std::ceil(double(d.tiles - d.cut_tiles) / layout.blocks), cut = double(d.cut_tiles) / layout.blocks;
  const double size = double(v.rows) * v.tokens / 32768, pieces = d.cut_tiles == 0 ? 0 : 1 / cut;
  const double stage = kStage[plan.variant] + (layout.blocks > device.sm_count ? kCrowd[plan.variant] : 0);
  const double meeting = d.cut_tiles == 0 ? 0 : kMeeting + kSums * size * (1 + pieces) + kPiece * pieces;
  return kLaunch + (whole + cut) * (d.stages * stage + size * kStore) + meeting + kTokens * double(q.M) * double(q.K);
}

}  // namespace

int gemm_sm90_variant_count() { return kVariantCount; }

const char* gemm_sm90_plan_rejected(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  if (device.sm != 90) return "needs compute capability 9.0";
  if (q.M < 0 || q.M > (int64_t{1} << 30)) return "M is out of range";
  if (q.N < 1 || q.N > (int64_t{1} << 30) || q.K < 1 || q.K >= (int64_t{1} << 19)) return "N or K is out of range";
  if (q.K % 32 != 0 || q.N % 8 != 0) return "loads by TMA: K must be a multiple of 32 and N of 8";
  if (q.group < 32 || q.group % 32 != 0 || q.K % q.group != 0) return "the group must be a multiple of 32 that divides K";
  if (q.x_type == DType::kFloat32 || q.parameter_type != q.x_type) return "takes bfloat16 or float16 x, and scales of the same type";
  if (!is_aligned(q.x) || !is_aligned(q.codes) || !is_aligned(q.scale) || !is_aligned(q.zero)) return "needs 16-byte aligned operands";
  if (plan.variant < 0 || plan.variant >= kVariantCount) return "there is no such variant";
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "tiles are whole, or in 2, 4 or 8 pieces";
  const Variant& v = kVariants[plan.variant];
  if (ceil_div(q.N, v.rows) * ceil_div(q.M, v.tokens) > (int64_t{1} << 31) - 1) return "more than 2^31 - 1 tiles";
  if ((plan.splits != kWhole || plan.variant > 1) && gemm_sm90_workspace(q, plan, device) > kMostWorkspace) return "its workspace would be more than 32 MiB";
  return nullptr;
}

LinearPlan choose_gemm_sm90_plan(const LinearParams& q, const LinearDevice& device) {
  LinearPlan best = {-1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kVariantCount; ++i) {
    if (i > 0 && kVariants[i].tokens >= 2 * q.M && kVariants[i].tokens > kVariants[0].tokens) continue;  // made for more tokens
    for (int splits = 1; splits <= 8; splits *= 2) {
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
         std::to_string(ceil_div(q.N, v.rows) * ceil_div(q.M, v.tokens)) + " tiles, " + (plan.splits != kWhole ? "the last cut" : "whole");
}

int64_t gemm_sm90_workspace(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  if (plan.variant < 0 || plan.variant >= kVariantCount) return 0;
  const Layout layout = lay_out(q, plan, device.sm_count);
  return layout.paired + layout.flags + layout.pieces;
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
  p.division = layout.division;
  p.codes_rows = q.codes, p.paired = memory;
  p.scale_rows = static_cast<const uint16_t*>(q.scale), p.zero_rows = static_cast<const uint16_t*>(q.zero);
  p.flags = reinterpret_cast<uint32_t*>(memory + layout.paired);
  p.pieces = reinterpret_cast<float*>(memory + layout.paired + layout.flags);
  p.one_group = q.group % kStageColumns == 0;
  const bool aligned = kStageColumns % q.group == 0;
  p.groups = p.one_group ? 1 : aligned ? static_cast<int>(kStageColumns / q.group) : static_cast<int>((kStageColumns - 1) / q.group + 2);
  const uint64_t in_32 = static_cast<uint64_t>(q.group / 32);
  p.group_inverse = in_32 == 1 ? 0 : static_cast<uint32_t>((uint64_t{1} << 32) / in_32 + 1);
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto type = q.x_type == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  p.codes = map_of(kBytes, 1, q.codes, q.N, q.K / 2, v.rows, 64, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.scale = map_of(type, 2, q.scale, groups, q.N, p.groups, v.rows, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.zero = map_of(type, 2, q.zero, groups, q.N, p.groups, v.rows, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.epilogue = {q.bias, q.residual, q.residual_scale, q.out, q.residual_scale_stride, q.bias_type, q.residual_type, q.out_type,
                q.N % 4 == 0 && is_aligned(q.out) && is_aligned(q.residual)};
  const int64_t units = int64_t{4} * layout.division.tiles_m * v.tokens * layout.division.stages;
  launch_early(pair_tokens, static_cast<unsigned>(ceil_div(units, kPairThreads)), kPairThreads, 0, stream, static_cast<const uint16_t*>(q.x),
               memory, units, p.M, p.K, layout.division.stages, v.tokens, p.flags, static_cast<int>(layout.flags / 4));
  v.launch(p, q.x_type, layout.blocks, stream);
}

}  // namespace kitchen::awq
