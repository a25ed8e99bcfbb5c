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

constexpr int kPairThreads = 128;

// x [M, K] to paired [M, columns], columns = K rounded up to whole stages, with zeros: a thread takes word w of the four lanes of a
// token's stage. 16 columns of the copy are 2t, 2t + 1, 2t + 8, 2t + 9 of lane t; pair r of word w goes to 16 columns 2w + r/2.
__global__ void __launch_bounds__(kPairThreads) pair_tokens(const uint16_t* x, uint16_t* paired, int64_t units, int K, int columns) {
  ptx::griddep_launch();
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kPairThreads + threadIdx.x;
  if (unit >= units) return;
  const int w = static_cast<int>(unit % 4), stages = columns / kStageColumns;
  const int64_t m = unit / 4 / stages;
  const int first = static_cast<int>(unit / 4 - m * stages) * kStageColumns;
  uint4 from[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int k = first + 32 * t + 8 * w;
    from[t] = k < K ? *reinterpret_cast<const uint4*>(x + m * K + k) : make_uint4(0, 0, 0, 0);
  }
  uint4* const to = reinterpret_cast<uint4*>(paired + m * columns + first + 32 * w);
  to[0] = make_uint4(__byte_perm(from[0].x, from[0].z, 0x5410), __byte_perm(from[1].x, from[1].z, 0x5410),
                     __byte_perm(from[2].x, from[2].z, 0x5410), __byte_perm(from[3].x, from[3].z, 0x5410));
  to[1] = make_uint4(__byte_perm(from[0].x, from[0].z, 0x7632), __byte_perm(from[1].x, from[1].z, 0x7632),
                     __byte_perm(from[2].x, from[2].z, 0x7632), __byte_perm(from[3].x, from[3].z, 0x7632));
  to[2] = make_uint4(__byte_perm(from[0].y, from[0].w, 0x5410), __byte_perm(from[1].y, from[1].w, 0x5410),
                     __byte_perm(from[2].y, from[2].w, 0x5410), __byte_perm(from[3].y, from[3].w, 0x5410));
  to[3] = make_uint4(__byte_perm(from[0].y, from[0].w, 0x7632), __byte_perm(from[1].y, from[1].w, 0x7632),
                     __byte_perm(from[2].y, from[2].w, 0x7632), __byte_perm(from[3].y, from[3].w, 0x7632));
}

struct Variant {
  int tokens, blocks_per_sm;
  void (*launch)(GemmParams&, DType, int device, cudaStream_t);
};

template <class Config, class T>
void launch_typed(const GemmParams& p, int64_t blocks, cudaStream_t stream) {
  const auto kernel = awq_gemm_kernel<Config, T>;
  constexpr int kBytes = sizeof(GemmShared<Config>);
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "awq_gemm_sm90");
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(p.splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = p.splits > 1 ? 2 : 1;
  host::check(cudaLaunchKernelEx(&config, kernel, p), "awq_gemm_sm90");
}

template <class Config>
void launch(GemmParams& p, DType x_type, int, cudaStream_t stream) {
  p.tiles_m = static_cast<int>(ceil_div(p.M, Config::kTokens));
  const int64_t blocks = ceil_div(p.N, Config::kRows) * p.tiles_m * p.splits;
  if (x_type == DType::kFloat16) return launch_typed<Config, __half>(p, blocks, stream);
  launch_typed<Config, __nv_bfloat16>(p, blocks, stream);
}

template <int kTokens, int kStages, int kBlocksPerSm>
constexpr Variant variant() {
  using Config = GemmConfig<kTokens, kStages, kBlocksPerSm>;
  static_assert(kBlocksPerSm * (sizeof(GemmShared<Config>) + 1024) <= 228 * 1024, "shared memory of an SM");
  return {kTokens, kBlocksPerSm, launch<Config>};
}

// Tokens, stages, blocks an SM.
constexpr Variant kVariants[] = {variant<16, 5, 3>(), variant<32, 6, 2>(), variant<64, 4, 2>(), variant<128, 5, 1>(), variant<256, 3, 1>()};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

CUtensorMap map_of(CUtensorMapDataType type, int bytes, const void* data, int64_t rows, int64_t columns, int box_rows, int box_columns,
                   CUtensorMapSwizzle swizzle) {
  return host::encode_matrix_map({type, bytes, data, rows, columns, columns * bytes, box_rows, box_columns, swizzle});
}

// Microseconds on an H200, fitted to measured times (docs/kernels/awq.md); on other Hopper parts the order of plans is what counts.
double estimated_time(const LinearParams& q, const LinearPlan& plan, const LinearDevice& device) {
  struct Rates {
    double stage, crowd;  // of a stage where the block is alone; what a chip full of blocks adds
    double sums[4];       // of a K in 1, 2, 4, 8 pieces: through distributed shared memory
  };
  constexpr Rates kRates[kVariantCount] = {{0.19, 1.45, {0, 2, 4, 8}},   {0.45, 0.7, {0, 2, 4, 9}},     {0.5, 1.2, {0, 2, 4, 14}},
                                           {0.6, 0.35, {0, 6, 15, 25}}, {1.3, 0.3, {0, 13, 30, 50}}};
  const Variant& v = kVariants[plan.variant];
  const Rates& rates = kRates[plan.variant];
  const double blocks = double(ceil_div(q.N, 128)) * ceil_div(q.M, v.tokens) * plan.splits;
  const double full = double(device.sm_count) * v.blocks_per_sm;
  const double stages = double(ceil_div(ceil_div(q.K, kStageColumns), plan.splits));
  const double a_stage = rates.stage + rates.crowd * std::min(1.0, blocks / full);
  const int index = plan.splits == 1 ? 0 : plan.splits == 2 ? 1 : plan.splits == 4 ? 2 : 3;
  return std::ceil(blocks / full) * stages * a_stage + rates.sums[index];
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
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "K is split in 1, 2, 4 or 8";
  const int64_t stages = ceil_div(q.K, kStageColumns);
  if (ceil_div(stages, ceil_div(stages, plan.splits)) != plan.splits) return "K does not fall into so many pieces";
  if (ceil_div(q.N, 128) * ceil_div(q.M, kVariants[plan.variant].tokens) * plan.splits > (int64_t{1} << 31) - 1) return "more than 2^31 - 1 blocks";
  return nullptr;
}

LinearPlan choose_gemm_sm90_plan(const LinearParams& q, const LinearDevice& device) {
  LinearPlan best = {-1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kVariantCount; ++i) {
    if (i > 0 && q.M <= kVariants[i - 1].tokens) break;  // made for more tokens
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
  return text + "tile 128 rows x " + std::to_string(v.tokens) + " tokens, K in " + std::to_string(plan.splits) + " pieces, " +
         std::to_string(ceil_div(q.N, 128) * ceil_div(q.M, v.tokens) * plan.splits) + " blocks";
}

int64_t gemm_sm90_workspace(const LinearParams& q) { return 2 * q.M * ceil_div(q.K, kStageColumns) * kStageColumns; }

void awq_gemm_sm90(const LinearParams& q, void* workspace, const LinearPlan* forced, int device, cudaStream_t stream) {
  if (q.M == 0) return;
  host::DeviceGuard guard(device);
  const LinearDevice facts = linear_device(device);
  const LinearPlan plan = forced != nullptr ? *forced : choose_gemm_sm90_plan(q, facts);
  if (const char* reason = gemm_sm90_plan_rejected(q, plan, facts)) {
    throw std::invalid_argument("awq_gemm_sm90: " + describe_gemm_sm90(q, plan) + ": " + reason);
  }
  const Variant& v = kVariants[plan.variant];
  const int64_t groups = q.K / q.group, columns = ceil_div(q.K, kStageColumns) * kStageColumns;
  GemmParams p = {};
  p.M = static_cast<int>(q.M), p.N = static_cast<int>(q.N), p.K = static_cast<int>(q.K);
  p.splits = plan.splits;
  while (1 << p.splits_log2 < plan.splits) ++p.splits_log2;
  p.stages_per_split = static_cast<int>(ceil_div(ceil_div(q.K, kStageColumns), plan.splits));
  p.one_group = q.group % kStageColumns == 0;
  const bool aligned = kStageColumns % q.group == 0;
  p.groups = p.one_group ? 1 : aligned ? static_cast<int>(kStageColumns / q.group) : static_cast<int>((kStageColumns - 1) / q.group + 2);
  const uint64_t in_32 = static_cast<uint64_t>(q.group / 32);
  p.group_inverse = in_32 == 1 ? 0 : static_cast<uint32_t>((uint64_t{1} << 32) / in_32 + 1);
  constexpr auto kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto type = q.x_type == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  p.codes = map_of(kBytes, 1, q.codes, q.N, q.K / 2, 128, 64, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.tokens = map_of(type, 2, workspace, q.M, columns, v.tokens, 64, CU_TENSOR_MAP_SWIZZLE_128B);
  p.scale = map_of(type, 2, q.scale, groups, q.N, p.groups, 128, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.zero = map_of(type, 2, q.zero, groups, q.N, p.groups, 128, CU_TENSOR_MAP_SWIZZLE_NONE);
  p.epilogue = {q.bias, q.residual, q.residual_scale, q.out, q.residual_scale_stride, q.bias_type, q.residual_type, q.out_type,
                q.N % 4 == 0 && is_aligned(q.out) && is_aligned(q.residual)};
  const int64_t units = q.M * (columns / kStageColumns) * 4;
  pair_tokens<<<static_cast<unsigned>(ceil_div(units, kPairThreads)), kPairThreads, 0, stream>>>(
      static_cast<const uint16_t*>(q.x), static_cast<uint16_t*>(workspace), units, static_cast<int>(q.K), static_cast<int>(columns));
  host::check(cudaGetLastError(), "awq_gemm_sm90");
  v.launch(p, q.x_type, device, stream);
}

}  // namespace kitchen::awq
