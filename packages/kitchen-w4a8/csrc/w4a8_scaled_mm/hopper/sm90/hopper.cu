// Launches hopper.cuh and chunked.cu: checks, the plan, tensor maps. The kernels of hopper.cuh are compiled in this file.
#include "w4a8_scaled_mm/hopper/hopper.h"

#include <algorithm>
#include <limits>

#include "kitchen/host/check.h"
#include "kitchen/host/device.h"
#include "kitchen/host/tensor_map.h"
#include "order_tokens/order_tokens.h"
#include "w4a8_scaled_mm/hopper/sm90/chunked.h"
#include "w4a8_scaled_mm/hopper/sm90/hopper.cuh"

namespace kitchen::w4a8::hopper {
namespace {

constexpr int64_t kMost = int64_t{1} << 30, kMostK = 131071;

// Cycles of 128 columns at 4 and at 6 bits, and of a tile's end: fitted to all plans of 624 linears (docs/kernels/w4a8.md).
struct Tile {
  int rows, tokens;
  double four, six, store;
};
constexpr Tile kTiles[] = {
    {64, 32, 420, 550, 1000},     {64, 64, 390, 520, 3600},     {64, 128, 510, 620, 4100},    {64, 160, 580, 650, 4700},
    {64, 256, 790, 870, 5600},    {192, 64, 1100, 1510, 1000},  {192, 128, 1340, 1710, 3100}, {192, 160, 1360, 1770, 5400},
    {192, 192, 1440, 1830, 7700}, {128, 256, 1250, 1500, 4100},
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int log2_of(int64_t power) {
  int log = 0;
  while (int64_t{1} << log < power) ++log;
  return log;
}
const Tile* find_tile(const Plan& plan) {
  const auto found = std::find_if(std::begin(kTiles), std::end(kTiles), [&](const Tile& tile) {
    return tile.rows == plan.rows && tile.tokens == plan.tokens;
  });
  return found == std::end(kTiles) ? nullptr : found;
}
bool decodes_first(const Plan& plan) { return plan.tokens == 0; }

CUtensorMap byte_map(const void* data, int64_t rows, int64_t columns, int64_t pitch, int box_rows, int box_columns,
                     bool swizzle) {
  return host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, data, rows, columns, pitch, box_rows, box_columns,
                                  swizzle ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE});
}

Tiles tiles_of(const Problem& q, const Plan& plan) {
  Tiles t = {};
  t.M = static_cast<int>(q.M), t.N = static_cast<int>(q.N), t.K = static_cast<int>(q.K);
  t.splits = plan.splits;
  t.stages_per_split = static_cast<int>(ceil_div(ceil_div(q.K, kStage), plan.splits));
  t.tiles_m = static_cast<int>(ceil_div(q.M, plan.tokens));
  t.tiles_n = static_cast<int>(ceil_div(q.N, plan.rows));
  // Tokens that are walked together stay in the L2 while all codes pass once: up to 16 MB of them.
  t.raster_group = static_cast<int>(std::clamp<int64_t>((int64_t{16} << 20) / (plan.tokens * q.K), 1, 16));
  t.group_log2 = log2_of(q.group);
  t.groups_per_row = static_cast<int>(q.K / q.group);
  return t;
}

// Of so many blocks: a GPC's SMs do not divide evenly (an H200: 132, 66, 39, 30 and about 12).
double clusters_at_once(int splits, int sm_count) {
  const double usable = splits <= 2 ? 1.0 : splits == 3 ? 0.89 : splits == 4 ? 0.91 : 0.75;
  return std::max(1.0, std::floor(sm_count * usable / splits));
}

// Whether a block has one tile and ends (Config::kAlone, and every split K), or walks over tiles.
bool takes_one_tile(const Plan& plan) { return plan.splits > 1 || (plan.rows == 64 && plan.tokens > 128); }

// Cycles of the busiest SM.
double cost(const Problem& q, const Plan& plan, int sm_count) {
  constexpr double kStart = 5300, kCluster = 1600, kClusterLarge = 6600;
  const Tiles t = tiles_of(q, plan);
  const Tile& c = *find_tile(plan);
  const double tile = t.stages_per_split * (q.bits == 6 ? c.six : c.four) + c.store;
  const double exchange = plan.splits == 1 ? 0 : plan.rows == 64 ? kCluster : kClusterLarge;
  const double rounds = std::ceil(double(t.tiles_m) * t.tiles_n / clusters_at_once(plan.splits, sm_count));
  return takes_one_tile(plan) ? rounds * (kStart + tile + exchange) : kStart + rounds * tile;
}

template <class Config>
void launch(const ScaledMmParams& p, const Plan& plan, int sm_count, cudaStream_t stream) {
  static_assert(sizeof(SharedStorage<Config>) <= static_cast<size_t>(kSharedLimit), "the stages do not fit shared memory");
  const Problem problem = problem_of(p);
  KernelParams params = {};
  params.tiles = tiles_of(problem, plan);
  const int64_t padded = ceil_div(p.K, kStage) * kStage, pitch = p.K / 8 * p.bits;
  params.tiles.box_tokens = static_cast<int>(std::min<int64_t>(p.M, Config::kTokens));
  params.tokens = byte_map(p.a, p.M, padded, padded, params.tiles.box_tokens, kStage, true);
  params.nibbles = byte_map(p.codes, p.N, p.K / 2, pitch, Config::kRows, kStage / 2, false);
  params.tops = params.nibbles;
  if (p.bits == 6) params.tops = byte_map(p.codes + p.K / 2, p.N, p.K / 4, pitch, Config::kRows, kStage / 4, false);
  params.s_rel = p.s_rel;
  params.codebook = p.codebook;
  params.epilogue = epilogue_params(p);
  params.tiles.overlap = p.residual == nullptr;  // which may be the result itself

  const bool aligned = p.N % 8 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
  const bool plain = p.residual == nullptr && p.out_type != DType::kFloat32;
  params.tiles.result_mapped = !Config::kWhole && plan.splits == 1 && plain && aligned;
  params.result = params.nibbles;
  if (params.tiles.result_mapped) {
    const bool half = p.out_type == DType::kFloat16;
    const auto type = half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    params.result = host::encode_matrix_map(
        {type, 2, p.out, p.M, p.N, 2 * p.N, kChunkTokens, kStoreColumns, CU_TENSOR_MAP_SWIZZLE_128B});
  }

  const auto kernel = w4a8_hopper<Config>;
  constexpr int kBytes = sizeof(SharedStorage<Config>);
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "w4a8_hopper");
  const int64_t tiles = int64_t{params.tiles.tiles_m} * params.tiles.tiles_n;
  const int64_t clusters = takes_one_tile(plan) ? tiles : std::min<int64_t>(tiles, sm_count);
  params.tiles.alone = clusters == tiles;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.attrs = attributes;
  if (plan.splits > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(plan.splits), 1, 1};
  }
  if (p.programmatic_launch) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  config.gridDim = dim3(static_cast<unsigned>(clusters * plan.splits));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  host::check(cudaLaunchKernelEx(&config, kernel, params), "w4a8_hopper");
}

template <int kBits, bool kPairs>
void launch_tile(const ScaledMmParams& p, const Plan& plan, int sm_count, cudaStream_t stream) {
  switch (1000 * plan.rows + plan.tokens) {
    case 64032: return launch<Config<kBits, 64, 32, kPairs>>(p, plan, sm_count, stream);
    case 64064: return launch<Config<kBits, 64, 64, kPairs>>(p, plan, sm_count, stream);
    case 64128: return launch<Config<kBits, 64, 128, kPairs>>(p, plan, sm_count, stream);
    case 64160: return launch<Config<kBits, 64, 160, kPairs>>(p, plan, sm_count, stream);
    case 64256: return launch<Config<kBits, 64, 256, kPairs>>(p, plan, sm_count, stream);
    case 192064: return launch<Config<kBits, 192, 64, kPairs>>(p, plan, sm_count, stream);
    case 192128: return launch<Config<kBits, 192, 128, kPairs>>(p, plan, sm_count, stream);
    case 192160: return launch<Config<kBits, 192, 160, kPairs>>(p, plan, sm_count, stream);
    case 192192: return launch<Config<kBits, 192, 192, kPairs>>(p, plan, sm_count, stream);
    default: return launch<Config<kBits, 128, 256, kPairs>>(p, plan, sm_count, stream);
  }
}

template <int kBits>
void launch_group(const ScaledMmParams& p, const Plan& plan, int sm_count, cudaStream_t stream) {
  p.group == 16 ? launch_tile<kBits, true>(p, plan, sm_count, stream)
                : launch_tile<kBits, false>(p, plan, sm_count, stream);
}

}  // namespace

const char* unsupported(const Problem& q) {
  if (q.M < 1 || q.N < 1 || q.K < 1 || q.M > kMost || q.N > kMost) return "M, N or K is out of range";
  if (q.K > kMostK) return "K > 131071 can overflow the int32 sums";
  if (q.bits != 4 && q.bits != 6) return "bits must be 4 or 6";
  if (q.K % (q.bits == 4 ? 32 : 64) != 0)
    return "the copy engine needs rows of 16 bytes: K must be a multiple of 32 (6 bits: of 64)";
  if (q.group < 16 || q.group > 256 || (q.group & (q.group - 1)) != 0) return "takes groups of 16, 32, 64, 128 and 256";
  if (q.K / q.group * q.N >= int64_t{1} << 32) return "more than 2^32 - 1 scales";
  if (host::find_tensor_map_encoder() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

Problem problem_of(const ScaledMmParams& p) {
  return {p.M, p.N, p.K, p.bits, p.group, chunked::unsupported(p) == nullptr};
}

const char* rejected(const Problem& q, const Plan& plan) {
  if (decodes_first(plan) && !q.copies_result) return "rows of the result and the residual must be aligned to 16 bytes";
  if (decodes_first(plan)) return plan.splits == 1 ? nullptr : "decoded first, K is not split";
  if (find_tile(plan) == nullptr)
    return "tiles have 64 outputs x 32, 64, 128, 160 or 256 tokens, 192 x 64, 128, 160 or 192, or 128 x 256; 0 x 0 decodes first";
  if (plan.splits < 1 || plan.splits > 8 || (plan.splits > 4 && plan.splits < 8)) return "K is split in 1, 2, 3, 4 or 8";
  if (plan.splits == (plan.rows == 64 ? 3 : 8)) return "tiles of 64 outputs split K in 1, 2, 4 or 8, others in 1, 2, 3 or 4";
  if (plan.rows == 64 && plan.tokens > 128 && plan.splits > 2)
    return "tiles of 64 outputs and more than 128 tokens split K in 1 or 2";
  if ((plan.splits - 1) * ceil_div(ceil_div(q.K, kStage), plan.splits) >= ceil_div(q.K, kStage)) return "a piece of K would be empty";
  if (ceil_div(q.M, plan.tokens) * ceil_div(q.N, plan.rows) * plan.splits > (int64_t{1} << 31) - 1)
    return "more than 2^31 - 1 tiles";
  return nullptr;
}

Plan choose_plan(const Problem& q, int sm_count) {
  Plan best = {128, 256, 1};
  double least = std::numeric_limits<double>::infinity();
  for (const Tile& tile : kTiles) {
    for (const int splits : {1, 2, 3, 4, 8}) {
      const Plan plan = {tile.rows, tile.tokens, splits};
      if (rejected(q, plan) != nullptr) continue;
      const double c = cost(q, plan, sm_count);
      if (c < least) least = c, best = plan;
    }
  }
  const Plan decoded = {0, 0, 1};
  if (rejected(q, decoded) == nullptr && chunked::estimated_cycles({q.M, q.N, q.K}, sm_count) < least) return decoded;
  return best;
}

int64_t workspace_bytes(const Problem& q, const Plan& plan) {
  if (decodes_first(plan)) return chunked::workspace_bytes(q.N, q.K);
  return q.M * ceil_div(q.K, kStage) * kStage;  // the activations as order_tokens makes them
}

int8::CodeOrder token_order(const Plan& plan) {
  if (decodes_first(plan)) return int8::CodeOrder::kColumns;
  return int8::CodeOrder::kLanes;
}

std::string describe(const Problem& q, const Plan& plan) {
  const std::string what = "M=" + std::to_string(q.M) + " N=" + std::to_string(q.N) + " K=" + std::to_string(q.K) + " at " +
                           std::to_string(q.bits) + " bits, groups of " + std::to_string(q.group) + ": ";
  if (decodes_first(plan)) return what + "decoded first, " + std::to_string(chunked::chunk_rows(q.N, q.K)) + " outputs at once";
  return what + "tiles of " + std::to_string(plan.rows) + " outputs x " + std::to_string(plan.tokens) +
         " tokens, K in " + std::to_string(plan.splits) + " pieces";
}

void run(const ScaledMmParams& given, int8_t* workspace, const Plan* forced, int device, cudaStream_t stream) {
  if (given.M == 0) return;
  ScaledMmParams p = given;
  const Problem problem = problem_of(p);
  if (const char* reason = unsupported(problem)) {
    throw std::invalid_argument("w4a8_hopper: " + describe(problem, {64, 32, 1}) + ": " + reason);
  }
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  host::require((address(p.a) | address(p.codes)) % 16 == 0, "w4a8_hopper: a and the codes must be aligned to 16 bytes");
  host::require(address(p.s_rel) % 2 == 0, "w4a8_hopper: s_rel must be aligned to 2 bytes");
  host::DeviceGuard guard(device);
  const int sm_count = host::attribute(cudaDevAttrMultiProcessorCount, device);
  const Plan plan = forced != nullptr ? *forced : choose_plan(problem, sm_count);
  if (const char* reason = rejected(problem, plan)) {
    throw std::invalid_argument("w4a8_hopper: " + describe(problem, plan) + ": " + reason);
  }
  if (decodes_first(plan)) return chunked::run(p, workspace, device, stream);
  if (!p.ordered) {
    order_tokens({p.a, workspace, p.M, static_cast<int>(p.K), p.programmatic_launch}, device, stream);
    p.a = workspace;
    p.programmatic_launch = true;  // what is in front now made the activations alone, after all that came before
  }
  p.bits == 4 ? launch_group<4>(p, plan, sm_count, stream) : launch_group<6>(p, plan, sm_count, stream);
}

}  // namespace kitchen::w4a8::hopper
