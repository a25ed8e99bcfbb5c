// INT8 GEMM with a fused epilogue for Hopper (sm_90a).
//
//   acc[m, n] = sum over k of a[m, k] * b[n, k]                      int32, exact for K <= 131071
//   y = fma(float(acc) * a_scale[m], b_scale[n], bias[n])            float32; without bias: the product
//   y = fma(residual_scale[n], y, residual[m, n])                    where there is a residual
//   out[m, n] = y rounded once to out's type
//
//   a [M, K] int8, b [N, K] int8, both with K contiguous; a_scale [M], b_scale [N] or one value, float32;
//   bias [N] float32/float16/bfloat16; residual and out [M, N] of out's type; residual_scale [N] or one value.
//
// The main loop is kitchen/gemm/gemm_sm90.cuh; with few tiles, gemm_sm90_split.cuh (int8_gemm_split.cu). The epilogue is
// scale_epilogue.cuh. Measured: docs/kernels/int8_gemm_sm90.md.
#include "int8_gemm/sm90/int8_gemm.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "int8_gemm/sm90/int8_gemm_split.h"
#include "int8_gemm/sm90/scale_epilogue.cuh"
#include "kitchen/gemm/gemm_sm90.cuh"
#include "kitchen/host/device.h"

namespace kitchen::int8 {
namespace {

// Of rows of B, before the quantizer in front has ended: more would hold up its own reads.
constexpr int kEarlyStages = 2;

using sm90::Schedule;
using sm90::TileConfig;

// ---------------------------------------------------------------- launch

template <class Config, class T, ResidualBy kBy>
void launch_with(const Int8GemmParams& p, const LinearPlan& plan, cudaStream_t stream) {
  using Epilogue = ScaleEpilogue<T, Config::kTileM, Config::kTileN, kBy>;
  using Shared = sm90::SharedStorage<Config, Epilogue>;
  static_assert(sizeof(Shared) <= sm90::kSharedLimit, "the stages do not fit shared memory");
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = sm90::gemm_kernel<Config, MmaS8, Epilogue>;
  allow_shared_memory(kernel, sizeof(Shared), devices_done);

  sm90::KernelParams<EpilogueParams<T>> params{};
  params.a = operand_map(p.a, p.M, p.K, Config::kBoxM);
  params.b = operand_map(p.b, p.N, p.K, Config::kBoxN);
  params.problem = {static_cast<int>(ceil_div(p.K, sm90::kStageBytesK)),
                    static_cast<int>(ceil_div(p.M, Config::kTileM * Config::kClusterM)),
                    static_cast<int>(ceil_div(p.N, Config::kTileN * Config::kClusterN)), plan.raster_group, 0,
                    p.weights_early ? kEarlyStages : 0, static_cast<int>(p.M), static_cast<int>(p.N),
                    stores_may_repeat(p)};
  params.epilogue = epilogue_params<T, Config::kTileN>(p);

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(Config::kClusterSize), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.grid);
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = p.programmatic_launch ? 2 : 1;
  host::check(cudaLaunchKernelEx(&config, kernel, params), "int8_gemm_sm90: launch");
}

// Two blocks of 192 columns of sums leave no registers for a residual that is loaded.
template <class Config>
constexpr ResidualBy kResidualBy = Config::kBlocksM * Config::kTileN > 256 ? ResidualBy::kCopies
                                                                             : ResidualBy::kCopiesOrLoads;

template <class Config, class T>
void launch(const Int8GemmParams& p, const LinearPlan& plan, cudaStream_t stream) {
  if (p.residual == nullptr) return launch_with<Config, T, ResidualBy::kNone>(p, plan, stream);
  launch_with<Config, T, kResidualBy<Config>>(p, plan, stream);
}

// ---------------------------------------------------------------- plans

struct Variant {
  const char* name;
  int tile_m, tile_n, cluster_m, cluster_n;
  bool ping_pong, loads_residual, splits;
  void (*launch[3])(const Int8GemmParams&, const LinearPlan&, cudaStream_t);  // by DType
};

template <class Config>
constexpr Variant variant(const char* name) {
  return {name, Config::kTileM, Config::kTileN, Config::kClusterM, Config::kClusterN, Config::kPingPong,
          kResidualBy<Config> == ResidualBy::kCopiesOrLoads, false,
          {launch<Config, float>, launch<Config, __half>, launch<Config, __nv_bfloat16>}};
}

template <int kTileN>
void launch_split(const Int8GemmParams& p, const LinearPlan& plan, cudaStream_t stream) {
  int8_gemm_split(p, kTileN, plan.splits, p.weights_early ? kEarlyStages : 0, stream);
}

template <int kTileN>
constexpr Variant split_variant(const char* name) {
  constexpr auto kLaunch = launch_split<kTileN>;
  return {name, kSplitTileM, kTileN, 1, 1, false, true, true, {kLaunch, kLaunch, kLaunch}};
}

constexpr Variant kVariants[] = {
    variant<TileConfig<128, 256, 2, 1, Schedule::kTogether>>("128x256 together, cluster 2x1"),
    variant<TileConfig<128, 192, 2, 1, Schedule::kPingPong>>("128x192 ping-pong, cluster 2x1"),
    variant<TileConfig<128, 192, 2, 1, Schedule::kTogether>>("128x192 together, cluster 2x1"),
    variant<TileConfig<128, 144, 1, 2, Schedule::kPingPong>>("128x144 ping-pong, cluster 1x2"),
    variant<TileConfig<128, 128, 2, 1, Schedule::kPingPong>>("128x128 ping-pong, cluster 2x1"),
    variant<TileConfig<128, 128, 1, 2, Schedule::kPingPong>>("128x128 ping-pong, cluster 1x2"),
    variant<TileConfig<128, 96, 2, 1, Schedule::kTogether>>("128x96 together, cluster 2x1"),
    split_variant<64>("128x64, K split"),
    split_variant<96>("128x96, K split"),
    split_variant<128>("128x128, K split"),
};
constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

int64_t cluster_tiles(const LinearProblem& problem, const Variant& v) {
  return ceil_div(problem.M, v.tile_m * v.cluster_m) * ceil_div(problem.N, v.tile_n * v.cluster_n);
}

int cluster_slots(const LinearProblem& problem, const Variant& v) {
  return std::max(1, problem.sm_count / (v.cluster_m * v.cluster_n));
}

// Cycles of the busiest block. The constants are fitted to an H200 (docs/kernels/int8_gemm_sm90.md, 2026-11-30). Weights come
// from HBM once, whoever asks for them.
constexpr double kLaunch = 5000, kHbmBytesPerCycle = 1900;

double estimated_cycles(const LinearProblem& problem, const Variant& v) {
  constexpr double kMultipliesPerCycle = 4096 / 0.97;              // an SM's tensor cores
  constexpr double kBytesPerCycle = 52, kBytesWeight = 1.0 / 400;  // copies: their ceiling; what they take from wgmma
  constexpr double kStorePerColumn = 12;                           // of 64 rows
  constexpr double kUnfilled = 1.08;                               // boxes that hang over the last row
  const double multiply = double(v.tile_m) * v.tile_n * sm90::kStageBytesK / kMultipliesPerCycle;
  const double bytes = sm90::kStageBytesK * (double(v.tile_m) / v.cluster_n + double(v.tile_n) / v.cluster_m);
  const double stage = std::max(multiply + bytes * kBytesWeight, bytes / kBytesPerCycle);
  const double tile = double(ceil_div(problem.K, sm90::kStageBytesK)) * stage;
  const double store = kStorePerColumn * v.tile_n * (v.ping_pong ? v.tile_m / 64 : 1);
  const double rounds = double(ceil_div(cluster_tiles(problem, v), cluster_slots(problem, v)));
  // Ping-pong hides every store but the last, unless a store takes longer than a tile.
  const double work = v.ping_pong ? (rounds - 1) * std::max(tile, store / 2) + tile + store : rounds * (tile + store);
  const double cycles = kLaunch + std::max(work, double(problem.N) * problem.K / kHbmBytesPerCycle + store);
  return problem.M < v.tile_m ? kUnfilled * cycles : cycles;
}

// The same for tiles that are split over a cluster of `splits` blocks.
double estimated_split_cycles(const LinearProblem& problem, const Variant& v, int splits) {
  constexpr double kBytesPerCycle = 55, kExchange = 1200, kStorePerColumn = 8, kRefill = 5000;  // of a second round
  // Of the SMs, by clusters of 1 to 4: a GPC's do not divide evenly.
  constexpr double kUsable[kMostSplits] = {1, 1, 0.89, 0.91};
  const double slots = std::max(1.0, std::floor(problem.sm_count / splits * kUsable[splits - 1]));
  const double rounds = std::ceil(double(cluster_tiles(problem, v)) / slots);
  const double stages = double(ceil_div(ceil_div(problem.K, sm90::kStageBytesK), splits));
  const double multiply = double(v.tile_m) * v.tile_n * sm90::kStageBytesK / 4096;
  const double bytes = sm90::kStageBytesK * double(v.tile_m + v.tile_n);
  const double work = stages * std::max(multiply, bytes / kBytesPerCycle) * rounds;
  const double store = kStorePerColumn * v.tile_n + (splits > 1 ? kExchange : 0);
  return kLaunch + std::max(work, double(problem.N) * problem.K / kHbmBytesPerCycle) + store + (rounds - 1) * kRefill;
}

// nullptr, or why this variant cannot run the problem.
const char* rejected(const LinearProblem& problem, const Variant& v) {
  if (problem.residual && problem.loose_residual && !v.loads_residual) {
    return "its accumulators leave no registers for a residual that the copy engine cannot read";
  }
  constexpr int64_t kMostTiles = 65535;  // of a grid's second and third dimension
  const bool too_many = ceil_div(problem.M, kSplitTileM) > kMostTiles || ceil_div(problem.N, v.tile_n) > kMostTiles;
  return v.splits && too_many ? "its grid would be too large" : nullptr;
}

int most_splits(const LinearProblem& problem) {
  return static_cast<int>(std::min<int64_t>(kMostSplits, ceil_div(problem.K, sm90::kStageBytesK)));
}

// Cycles, and with how many splits: the fewest that are best.
std::pair<double, int> estimate(const LinearProblem& problem, const Variant& v) {
  if (!v.splits) return {estimated_cycles(problem, v), 1};
  std::pair<double, int> best = {estimated_split_cycles(problem, v, 1), 1};
  for (int splits = 2; splits <= most_splits(problem); ++splits) {
    const double cycles = estimated_split_cycles(problem, v, splits);
    if (cycles < best.first) best = {cycles, splits};
  }
  return best;
}

LinearPlan plan_for(const LinearProblem& problem, int index) {
  const Variant& v = kVariants[index];
  if (v.splits) {
    const int splits = estimate(problem, v).second;
    return {index, static_cast<int>(std::min<int64_t>(cluster_tiles(problem, v) * splits, 1 << 30)), 1, splits};
  }
  const int64_t clusters = std::min<int64_t>(cluster_tiles(problem, v), cluster_slots(problem, v));
  // Rows of A that are walked together stay in L2 while all of B passes once: up to 16 MB of them.
  const int64_t row_bytes = int64_t{v.tile_m} * v.cluster_m * problem.K;
  const int64_t group = std::clamp<int64_t>((int64_t{16} << 20) / row_bytes, 8, 16);
  return {index, static_cast<int>(clusters) * v.cluster_m * v.cluster_n, static_cast<int>(group), 1};
}

// What `forced` says, and the usual where it says nothing.
LinearPlan completed(const LinearProblem& problem, const LinearPlan& forced) {
  const auto refuse = [](const std::string& reason) { throw std::runtime_error("int8_gemm_sm90: " + reason); };
  if (forced.variant < 0 || forced.variant >= kVariantCount) {
    refuse("a forced plan names variant " + std::to_string(forced.variant) + ", not one of 0.." +
           std::to_string(kVariantCount - 1));
  }
  const Variant& v = kVariants[forced.variant];
  const std::string cannot = std::string("the forced plan cannot run: ") + v.name;
  if (const char* reason = rejected(problem, v)) refuse(cannot + ": " + reason);
  if (forced.splits < 0 || forced.splits > (v.splits ? most_splits(problem) : 1)) {
    refuse(cannot + " in " + std::to_string(forced.splits) + " pieces of K");
  }
  LinearPlan plan = plan_for(problem, forced.variant);
  if (forced.splits > 0) plan.splits = forced.splits;
  if (forced.grid > 0) plan.grid = forced.grid;
  if (forced.raster_group > 0) plan.raster_group = forced.raster_group;
  return plan;
}

}  // namespace

int hopper_variant_count() { return kVariantCount; }

LinearPlan choose_plan(const LinearProblem& problem) {
  int best = 0;  // takes everything
  for (int i = 1; i < kVariantCount; ++i) {
    if (rejected(problem, kVariants[i]) != nullptr) continue;
    if (estimate(problem, kVariants[i]).first < estimate(problem, kVariants[best]).first) best = i;
  }
  return plan_for(problem, best);
}

std::string describe(const LinearProblem& problem, const LinearPlan& plan) {
  const std::string walk = kVariants[plan.variant].splits
                               ? std::to_string(plan.splits) + " pieces of K"
                               : std::to_string(plan.grid) + " blocks, walking groups of " +
                                     std::to_string(plan.raster_group) + " rows of tiles";
  std::string text = "M=" + std::to_string(problem.M) + " N=" + std::to_string(problem.N) +
                     " K=" + std::to_string(problem.K) + (problem.residual ? " with a residual" : "") + ": " + walk +
                     "; estimated cycles:";
  for (int i = 0; i < kVariantCount; ++i) {
    const char* reason = rejected(problem, kVariants[i]);
    const auto [cycles, splits] = estimate(problem, kVariants[i]);
    text += std::string(i == plan.variant ? "\n* " : "\n  ") + kVariants[i].name + ": " +
            (reason != nullptr ? std::string(reason) : std::to_string(static_cast<int64_t>(cycles))) +
            (reason == nullptr && kVariants[i].splits ? " in " + std::to_string(splits) : "");
  }
  return text;
}

const char* int8_gemm_sm90_unsupported(const Int8GemmParams& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (p.M < 0 || p.N < 1 || p.K < 1 || p.M > kMost || p.N > kMost) return "M, N or K is out of range";
  if (p.K > 131071) return "K > 131071 can overflow the int32 sums";
  if (p.K % 16 != 0) return "the copy engine needs rows of a multiple of 16 bytes: K % 16 != 0";
  if (!aligned(p.a, 16) || !aligned(p.b, 16)) return "the copy engine needs 16-byte aligned a and b";
  if (host::find_tensor_map_encoder() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

void int8_gemm_sm90(const Int8GemmParams& p, cudaStream_t stream, const LinearPlan* forced) {
  if (const char* reason = int8_gemm_sm90_unsupported(p)) {
    throw std::runtime_error("int8_gemm_sm90: M=" + std::to_string(p.M) + " N=" + std::to_string(p.N) +
                             " K=" + std::to_string(p.K) + ": " + reason);
  }
  if (p.M == 0) return;
  int device = 0;
  host::check(cudaGetDevice(&device), "int8_gemm_sm90: cudaGetDevice");
  const int bytes = size_of(p.out_type);
  const LinearProblem problem{p.M, p.N, p.K, host::attribute(cudaDevAttrMultiProcessorCount, device),
                              p.residual != nullptr, !mappable(p.residual, p.N, bytes) || !mappable(p.out, p.N, bytes)};
  const LinearPlan plan = forced == nullptr ? choose_plan(problem) : completed(problem, *forced);
  kVariants[plan.variant].launch[static_cast<int>(p.out_type)](p, plan, stream);
}

}  // namespace kitchen::int8
