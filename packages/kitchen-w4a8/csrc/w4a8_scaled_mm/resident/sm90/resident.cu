// Launches resident.cuh: checks, the plan, shared memory. The kernels are compiled in this file.
#include "w4a8_scaled_mm/resident/resident.h"

#include <algorithm>
#include <limits>

#include "kitchen/host/device.h"
#include "w4a8_scaled_mm/resident/sm90/resident.cuh"

namespace kitchen::w4a8::resident {
namespace {

constexpr const char* kName = "w4a8_resident";
constexpr int64_t kMostTokens = 32, kMostK = 131071, kMostN = int64_t{1} << 30;
constexpr int kReservedSmem = 1024 + 1024;  // of a block, besides its dynamic shared memory
constexpr int kL1Bytes = 16 * 1024;         // left to L1, where codes land

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int log2_of(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}

int token_blocks(int64_t M) { return M <= 8 ? 1 : M <= 16 ? 2 : 4; }
int warps(int64_t M) { return warps_of(token_blocks(M)); }

Layout lay_out(const Problem& q, const Plan& plan) {
  const auto whole = [](int64_t bytes, int unit) { return ceil_div(bytes, unit) * unit; };
  Layout l = {};
  l.M = static_cast<int>(q.M), l.N = static_cast<int>(q.N);
  l.steps = static_cast<int>(ceil_div(q.K, kStep)), l.units = static_cast<int>(ceil_div(q.K, kUnit));
  l.splits = plan.splits, l.splits_log2 = log2_of(plan.splits);
  l.warps_n = plan.warps_n, l.warps_n_log2 = log2_of(plan.warps_n);
  l.tiles = static_cast<int>(ceil_div(q.N, kTileRows * plan.warps_n));
  l.units_per_split = static_cast<int>(ceil_div(l.units, plan.splits));
  l.group_log2 = log2_of(q.group);
  l.record_bytes = kTileRows * kStep / 8 * q.bits + kTileRows * kStep / q.group;
  l.token_pitch = l.units_per_split * kUnit + 16;
  l.token_threads_log2 = log2_of(32 * warps(q.M)) - std::min(4, log2_of(q.M));
  l.sums_at = kTableBytes;
  l.sum_words = l.M * l.pitch();
  int64_t at = l.sums_at + whole(2 * 4 * l.sum_words, 16);
  l.columns_at = static_cast<int>(at);
  at += whole(2 * 8 * l.outputs(), 16);
  l.tokens_at = static_cast<int>(at);
  at = whole(at + int64_t{l.token_pitch} * (q.M <= kTokenBlock ? q.M : kTokenBlock * token_blocks(q.M)), 128);
  l.received_at = static_cast<int>(at);
  at += received_bytes(q.M * 4 * l.warps_n, l.splits);
  l.bytes = static_cast<int>(std::min<int64_t>(at, std::numeric_limits<int>::max()));
  return l;
}

int blocks_per_sm(const Layout& l, const Device& device) {
  const int most = 16 / warps(l.M);
  return most * (l.bytes + kReservedSmem) <= device.smem_per_block - kL1Bytes ? most : 1;
}

// That run at once: of clusters of four and eight, fewer than would fill the chip stay resident.
int64_t clusters(const Layout& l, const Device& device) {
  const int blocks = device.sm_count * blocks_per_sm(l, device);
  const int most = l.splits <= 2 ? blocks / l.splits : blocks * 4 / 5 / l.splits;
  return std::min<int64_t>(l.tiles, std::max(1, most));
}

// Microseconds of an H200 (docs/kernels/w4a8.md): units of the warps, with what a tile, a second block of an SM and its tokens cost
// besides. Warps wait for each other's pipes more than for the busiest one; a block that has an SM alone is faster.
double cost(const Problem& q, const Plan& plan, const Device& device) {
  constexpr double kUnitCost = 2.0, kSixBitsCost = 1.4, kManyTokensCost = 1.35, kAloneCost = 0.75;  // the last three: times a unit
  constexpr double kTileCost = 1.4, kSecondBlockCost = 1.4, kTokenByteCost = 0.03 / 1024;
  constexpr double kClusterCost[] = {0.0, 0.6, 1.2, 1.5};  // by the splits' logarithm
  const Layout l = lay_out(q, plan);
  const int64_t side_by_side = clusters(l, device);
  const double tiles = double(ceil_div(l.tiles, side_by_side));
  const double blocks = double(std::min<int64_t>(blocks_per_sm(l, device), ceil_div(side_by_side * l.splits, device.sm_count)));
  const double busiest = double(ceil_div(l.units_per_split, warps(q.M) / l.warps_n));
  const double mean = double(l.units_per_split) * l.warps_n / warps(q.M);
  const double unit = kUnitCost * (q.bits == 6 ? kSixBitsCost : 1.0) *
                      (q.M > kTokenBlock ? kManyTokensCost : blocks == 1 ? kAloneCost : 1.0);
  return tiles * (unit * (0.2 * busiest + 0.8 * mean) + kTileCost + kClusterCost[l.splits_log2]) + kSecondBlockCost * (blocks - 1) +
         kTokenByteCost * blocks * l.M * l.units_per_split * kUnit;
}

template <class Config>
void launch(const ScaledMmParams& p, const Layout& layout, int64_t grid, cudaStream_t stream) {
  KernelParams params = {layout, p.a, p.codes, p.codebook, epilogue_params(p)};
  const auto kernel = w4a8_resident<Config>;
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, layout.bytes), kName);
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
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(layout.bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  host::check(cudaLaunchKernelEx(&config, kernel, params), kName);
}

template <int kBits, bool kGroup16>
void launch_tokens(const ScaledMmParams& p, const Layout& layout, int64_t grid, cudaStream_t stream) {
  switch (token_blocks(p.M)) {
    case 1: return launch<Config<kBits, kGroup16, 1>>(p, layout, grid, stream);
    case 2: return launch<Config<kBits, kGroup16, 2>>(p, layout, grid, stream);
    default: return launch<Config<kBits, kGroup16, 4>>(p, layout, grid, stream);
  }
}

}  // namespace

Device query(int device) {
  return {host::attribute(cudaDevAttrMultiProcessorCount, device),
          host::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          host::attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9};
}

const char* unsupported(const Problem& q) {
  if (q.M < 1 || q.M > kMostTokens) return "takes 1 to 32 rows of a";
  if (q.N < 1 || q.K < 1 || q.N > kMostN) return "N or K is out of range";
  if (q.K > kMostK) return "K > 131071 can overflow the int32 sums";
  if (q.bits != 4 && q.bits != 6) return "bits must be 4 or 6";
  if (q.group < 16 || q.group > 256 || (q.group & (q.group - 1)) != 0) return "takes groups of 16, 32, 64, 128 and 256";
  if (q.N % kTileRows != 0 || q.K % kStep != 0) return "the resident layout has N a multiple of 16 and K of 256";
  return nullptr;
}

const char* rejected(const Problem& q, const Plan& plan, const Device& device) {
  if (plan.warps_n < 1 || plan.warps_n > warps(q.M) || (plan.warps_n & (plan.warps_n - 1)) != 0)
    return "1, 2, 4, 8 or, from 9 rows on, 16 warps go side by side";
  if (plan.splits != 1 && plan.splits != 2 && plan.splits != 4 && plan.splits != 8) return "K is split in 1, 2, 4 or 8";
  if (plan.splits > 1 && !device.has_clusters) return "a split K needs clusters";
  if (plan.splits > 1 && (plan.splits - 1) * ceil_div(ceil_div(q.K, kUnit), plan.splits) >= ceil_div(q.K, kUnit))
    return "a piece of K would be empty";
  if (lay_out(q, plan).bytes > device.smem_per_block - kReservedSmem) return "its shared memory does not fit";
  return nullptr;
}

Plan choose_plan(const Problem& q, const Device& device) {
  Plan best = {1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int warps_n = 1; warps_n <= warps(q.M); warps_n *= 2) {
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
         std::to_string(q.bits) + " bits, groups of " + std::to_string(q.group) + ": " +
         std::to_string(16 * plan.warps_n) + " outputs a block, K in " + std::to_string(plan.splits) + " pieces";
}

void run(const ScaledMmParams& p, const Plan* forced, int device, cudaStream_t stream) {
  if (p.M == 0) return;
  const Problem problem = {p.M, p.N, p.K, p.bits, p.group};
  if (const char* reason = unsupported(problem)) {
    throw std::invalid_argument("w4a8_resident: " + describe(problem, {1, 1}) + ": " + reason);
  }
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  host::require((address(p.a) | address(p.codes) | address(p.codebook)) % 16 == 0,
                "w4a8_resident: a, the records and the codebook must be aligned to 16 bytes");
  host::DeviceGuard guard(device);
  const Device facts = query(device);
  const Plan plan = forced != nullptr ? *forced : choose_plan(problem, facts);
  if (const char* reason = rejected(problem, plan, facts)) {
    throw std::invalid_argument("w4a8_resident: " + describe(problem, plan) + ": " + reason);
  }
  const Layout layout = lay_out(problem, plan);
  const int64_t grid = clusters(layout, facts) * layout.splits;
  if (p.bits == 4) {
    p.group == 16 ? launch_tokens<4, true>(p, layout, grid, stream) : launch_tokens<4, false>(p, layout, grid, stream);
  } else {
    p.group == 16 ? launch_tokens<6, true>(p, layout, grid, stream) : launch_tokens<6, false>(p, layout, grid, stream);
  }
}

}  // namespace kitchen::w4a8::resident
