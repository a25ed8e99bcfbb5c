// Launches stream.cuh: checks, the plan, shared memory. The kernels are compiled in this file.
#include "w4a8_scaled_mm/stream/stream.h"

#include <algorithm>
#include <limits>

#include "kitchen/host/device.h"
#include "w4a8_scaled_mm/stream/sm80/stream.cuh"

namespace kitchen::w4a8::stream {
namespace {

constexpr int64_t kMostTokens = 16, kMostK = 131071, kMostN = int64_t{1} << 30;
constexpr int kReservedSmem = 1024 + 256;  // of a block, besides its dynamic shared memory
constexpr int kLeftSmem = 20 * 1024;       // up to 8 tokens, to a block of the quantizer in front, as Config::kRegisters does

// In rounds of steps at 4 bits, about a microsecond of an H200 (docs/kernels/w4a8.md).
constexpr double kSixBitsCost = 1.4, kFewStagesCost = 0.1;  // times a round
constexpr double kTileCost = 1.2, kTokenByteCost = 0.012 / 1024;
constexpr double kClusterCost[] = {0.0, 1.3, 2.5, 3.5};  // by the splits' logarithm

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int log2_of(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}

int token_blocks(int64_t M) { return M <= kTokens ? 1 : 2; }

int stage_bytes(int bits) { return bits == 6 ? Config<6, true, 1>::kStageBytes : Config<4, true, 1>::kStageBytes; }

// That run at once: of clusters of four and eight, fewer than would fill the chip stay resident.
int64_t clusters(const Layout& l, const Device& device) {
  const int most = l.splits <= 2 ? device.sm_count / l.splits : device.sm_count * 4 / 5 / l.splits;
  return std::min<int64_t>(l.tiles, std::max(1, most));
}

Layout lay_out(const Problem& q, const Plan& plan, const Device& device, uintptr_t s_rel, int copies) {
  const auto whole = [](int64_t bytes, int unit) { return static_cast<int>(ceil_div(bytes, unit) * unit); };
  Layout l = {};
  l.M = static_cast<int>(q.M), l.N = static_cast<int>(q.N), l.K = static_cast<int>(q.K);
  l.splits = plan.splits, l.splits_log2 = log2_of(plan.splits);
  l.warps_n = plan.warps_n, l.warps_n_log2 = log2_of(plan.warps_n);
  l.tiles = static_cast<int>(ceil_div(q.N, kRows * plan.warps_n));
  l.steps_per_split = static_cast<int>(ceil_div(ceil_div(q.K, kStep), plan.splits));
  l.steps = static_cast<int>(ceil_div(q.K, kStep));
  l.row_bytes = static_cast<int>(q.K / 8 * q.bits);
  l.group_log2 = log2_of(q.group);
  l.groups_per_row = static_cast<int>(q.K / q.group);
  l.token_pitch = l.steps_per_split * kStep + 16;
  l.token_threads_log2 = log2_of(kThreads) - std::min(4, log2_of(q.M));
  const int64_t scales = l.steps_per_split * kStep / q.group;
  l.scale_pitch = static_cast<int>(ceil_div(scales, 16) | 1) * 16;
  l.scale_width = 16;
  while (l.scale_width > 1 && (l.groups_per_row % l.scale_width || scales % l.scale_width || s_rel % l.scale_width))
    l.scale_width /= 2;
  if (l.scale_width == 8) l.scale_width = 4;
  if (l.scale_width == 2) l.scale_width = 1;
  l.copies = copies;
  l.scales_at = table_bytes(q.bits, copies);
  l.scale_bytes = kRows * l.warps_n * l.scale_pitch;
  l.buffers = l.tiles > clusters(l, device) ? 2 : 1;
  l.sums_at = l.scales_at + l.buffers * l.scale_bytes;
  l.sum_words = l.M * l.pitch();
  l.columns_at = l.sums_at + whole(l.buffers * 4 * l.sum_words, 16);
  l.tokens_at = l.columns_at + l.buffers * 8 * l.outputs();
  l.received_at = whole(l.tokens_at + q.M * l.token_pitch, 128);
  l.ring_at = whole(l.received_at + received_bytes(q.M * 4 * l.warps_n, l.splits), 128);
  const int stage = kWarps * stage_bytes(q.bits);
  const int left = token_blocks(q.M) == 1 ? kLeftSmem : 0;
  l.stages = std::clamp((device.smem_per_block - kReservedSmem - left - l.ring_at) / stage, 0, kMostStages);
  if (l.stages < 2) l.stages = std::clamp((device.smem_per_block - kReservedSmem - l.ring_at) / stage, 0, 2);
  l.bytes = l.ring_at + l.stages * stage;
  return l;
}

// With copies of the table's rows where they fit. At 6 bits a row is four bytes, and scales within four octaves of each other
// meet no bank twice as it is.
Layout lay_out(const Problem& q, const Plan& plan, const Device& device, uintptr_t s_rel = 0) {
  const Layout l = lay_out(q, plan, device, s_rel, q.bits == 4 ? kMostCopies : 1);
  return l.stages >= 2 ? l : lay_out(q, plan, device, s_rel, 1);
}

// Half way between the steps of the busiest warp and of all, since warps wait for each other's pipes as for the last one, with
// what a tile and the tokens cost besides; fitted to an H200 (docs/kernels/w4a8.md).
double cost(const Problem& q, const Plan& plan, const Device& device) {
  const Layout l = lay_out(q, plan, device);
  const double tiles = double(ceil_div(l.tiles, clusters(l, device)));
  const double busiest = double(ceil_div(l.steps_per_split, kWarps / l.warps_n));
  const double mean = double(l.steps_per_split) * l.warps_n / kWarps;
  const double round = (q.bits == 6 ? kSixBitsCost : 1.0) * (l.stages < 3 ? 1.0 + kFewStagesCost : 1.0);
  return tiles * (round * (busiest + mean) / 2 + kTileCost + kClusterCost[l.splits_log2]) +
         kTokenByteCost * l.M * l.steps_per_split * kStep;
}

template <class Config>
void launch(const ScaledMmParams& p, const Layout& layout, int64_t grid, cudaStream_t stream) {
  KernelParams params = {layout, p.a, p.codes, p.s_rel, p.codebook, epilogue_params(p)};
  const auto kernel = w4a8_stream<Config>;
  constexpr auto kCarveout = cudaFuncAttributePreferredSharedMemoryCarveout;
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, layout.bytes), "w4a8_stream");
  host::check(cudaFuncSetAttribute(kernel, kCarveout, cudaSharedmemCarveoutMaxShared), "w4a8_stream");
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (layout.splits > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(layout.splits), 1, 1};
  }
  if (p.programmatic_launch) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(layout.bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  host::check(cudaLaunchKernelEx(&config, kernel, params), "w4a8_stream");
}

template <int kBits>
void launch_bits(const ScaledMmParams& p, const Layout& layout, int64_t grid, cudaStream_t stream) {
  const bool one = token_blocks(p.M) == 1;
  if (p.group == 16) {
    return one ? launch<Config<kBits, true, 1>>(p, layout, grid, stream)
               : launch<Config<kBits, true, 2>>(p, layout, grid, stream);
  }
  one ? launch<Config<kBits, false, 1>>(p, layout, grid, stream) : launch<Config<kBits, false, 2>>(p, layout, grid, stream);
}

}  // namespace

Device query(int device) {
  return {host::attribute(cudaDevAttrMultiProcessorCount, device),
          host::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          host::attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9};
}

const char* unsupported(const Problem& q) {
  if (q.M < 1 || q.M > kMostTokens) return "takes 1 to 16 rows of a";
  if (q.N < 1 || q.K < 1 || q.N > kMostN) return "N or K is out of range";
  if (q.K > kMostK) return "K > 131071 can overflow the int32 sums";
  if (q.bits != 4 && q.bits != 6) return "bits must be 4 or 6";
  if (q.K % (q.bits == 4 ? 32 : 64) != 0) return "reads codes 16 bytes at a time: K must be a multiple of 32 (6 bits: of 64)";
  if (q.group < 16 || q.group > 256 || (q.group & (q.group - 1)) != 0) return "takes groups of 16, 32, 64, 128 and 256";
  return nullptr;
}

const char* rejected(const Problem& q, const Plan& plan, const Device& device) {
  if (plan.warps_n < 1 || plan.warps_n > kWarps || (plan.warps_n & (plan.warps_n - 1)) != 0)
    return "1, 2, 4, 8 or 16 warps go side by side";
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "K is split in 1, 2, 4 or 8";
  if (plan.splits > 1 && !device.has_clusters) return "a split K needs clusters";
  if (plan.splits > 1 && (plan.splits - 1) * ceil_div(ceil_div(q.K, kStep), plan.splits) >= ceil_div(q.K, kStep))
    return "a piece of K would be empty";
  if (lay_out(q, plan, device).stages < 2) return "its shared memory does not fit";
  return nullptr;
}

Plan choose_plan(const Problem& q, const Device& device) {
  Plan best = {1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int warps_n = 1; warps_n <= kWarps; warps_n *= 2) {
    for (int splits = 1; splits <= 8; splits *= 2) {
      const Plan plan = {warps_n, splits};
      if (rejected(q, plan, device) != nullptr) continue;
      const double c = cost(q, plan, device);
      if (c < least) least = c, best = plan;
    }
  }
  return best;
}

std::string describe(const Problem& q, const Plan& plan) {
  return "M=" + std::to_string(q.M) + " N=" + std::to_string(q.N) + " K=" + std::to_string(q.K) + " at " +
         std::to_string(q.bits) + " bits, groups of " + std::to_string(q.group) + ": " + std::to_string(16 * plan.warps_n) +
         " outputs a block, K in " + std::to_string(plan.splits) + " pieces";
}

void run(const ScaledMmParams& p, const Plan* forced, int device, cudaStream_t stream) {
  if (p.M == 0) return;
  const Problem problem = {p.M, p.N, p.K, p.bits, p.group};
  if (const char* reason = unsupported(problem)) {
    throw std::invalid_argument("w4a8_stream: " + describe(problem, {1, 1}) + ": " + reason);
  }
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  host::require((address(p.a) | address(p.codes) | address(p.codebook)) % 16 == 0,
                "w4a8_stream: a, the codes and the codebook must be aligned to 16 bytes");
  host::DeviceGuard guard(device);
  const Device facts = query(device);
  const Plan plan = forced != nullptr ? *forced : choose_plan(problem, facts);
  if (const char* reason = rejected(problem, plan, facts)) {
    throw std::invalid_argument("w4a8_stream: " + describe(problem, plan) + ": " + reason);
  }
  const Layout layout = lay_out(problem, plan, facts, address(p.s_rel));
  const int64_t grid = clusters(layout, facts) * layout.splits;
  p.bits == 4 ? launch_bits<4>(p, layout, grid, stream) : launch_bits<6>(p, layout, grid, stream);
}

}  // namespace kitchen::w4a8::stream
