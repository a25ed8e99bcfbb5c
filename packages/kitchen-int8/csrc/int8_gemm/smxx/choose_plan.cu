// Which tile, how many stages and pieces of K: the only place where the portable path decides.
#include <algorithm>
#include <cmath>
#include <limits>

#include "int8_gemm/smxx/tiles.h"

namespace kitchen::int8::portable {
namespace {

constexpr int kSplits[] = {1, 2, 3, 4, 6, 8, 12, 16};
constexpr int kStages[] = {4, 3, 6, 2};  // the first of equals is taken
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t block_count(const LinearProblem& problem, const TileShape& tile) {
  return ceil_div(problem.M, tile.m) * ceil_div(problem.N, tile.n);
}

// Blocks that an SM holds with so many stages.
int resident_blocks(const TileTable& table, const TileShape& tile, int stages, const Device& device) {
  const int by_smem = device.smem_per_sm / (stages * tile.stage_bytes() + table.reserved_smem);
  return std::max(1, std::min(tile.blocks_per_sm, by_smem));
}

// Rates of one SM in clock cycles, fitted to the times of all plans on an H200, sm_75's path forced there: 2026-11-30,
// docs/kernels/int8_gemm_portable.md. Other chips' numbers differ, but the order of plans follows from ratios between them.
struct Rates {
  double multiplies, shared_bytes, l2_bytes;  // a cycle
  double latency, alone, barrier;             // of a load; how much longer a block alone takes, and its wait at a stage's end
  double stores, tile;                        // results a cycle, and what comes with a tile
  double sums, sum_bytes;                     // the launch of the second phase, and its bytes a cycle
  double memory_bytes, start;
  double barrier_together;                    // what is left of a stage's barrier where blocks share the SM
};
constexpr Rates kRatesSm80 = {1790, 137, 62, 1180, 0.92, 138, 7.4, 4010, 2390, 24, 14.2, 4760, 55};
constexpr Rates kRatesSm75 = {1000, 57, 45, 1520, 2.7, 244, 2.2, 0, 7700, 13, 17, 3130, 0};  // multiplies: a T4's, datasheet

double estimated_cycles(const Rates& rate, const TileTable& table, const LinearProblem& problem, const LinearPlan& plan,
                        const Device& device) {
  const TileShape& tile = table.tiles[plan.tile];
  const double warps_n = double(tile.n) / tile.warp_n, warps_m = double(tile.m) / tile.warp_m;
  const double k_tiles = double(ceil_div(ceil_div(problem.K, tile.k), plan.splits));
  const double blocks = double(block_count(problem, tile)) * plan.splits;
  const double on_an_sm = std::ceil(blocks / device.sm_count);
  const double together = std::min(on_an_sm, double(resident_blocks(table, tile, plan.stages, device)));
  const double multiply = double(tile.m) * tile.n * tile.k / rate.multiplies;
  const double shared = tile.k * (tile.m * (warps_n + 1) + tile.n * (warps_m + 1)) / rate.shared_bytes;
  const double copy = tile.stage_bytes() / rate.l2_bytes;
  // A block alone waits for its loads and barriers; others on the SM fill the gaps.
  const double alone = std::max(rate.latency / (plan.stages - 1), rate.alone * std::max(multiply, shared) + rate.barrier);
  const double stage = std::max({multiply, shared, copy, alone / together}) + rate.barrier_together;
  const double store = double(tile.m) * tile.n / rate.stores + rate.tile;
  const double results = double(problem.M) * double(problem.N);
  const double bytes = double(problem.N) * double(problem.K) + double(problem.M) * double(problem.K) + 2 * results;
  const double sums = plan.splits == 1 ? 0 : rate.sums + 8 * results * plan.splits / (rate.sum_bytes * device.sm_count);
  const double tiles_time = on_an_sm * (k_tiles * stage + store / together);
  const double memory_time = bytes / (rate.memory_bytes * device.sm_count);
  return rate.start + sums + std::max(tiles_time, memory_time) + 0.1 * std::min(tiles_time, memory_time);
}

int raster_group(const LinearProblem& problem, const TileShape& tile) {
  // Rows of A that are walked together stay in L2 while all of B passes once: up to 16 MB of them.
  return static_cast<int>(std::clamp<int64_t>((int64_t{16} << 20) / (tile.m * problem.K), 4, 16));
}

}  // namespace

int tile_count(Path path) { return table_of(path).count; }

const char* unsupported(Path path, const LinearProblem& problem, const LinearPlan& plan, const Device& device) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const TileTable table = table_of(path);
  if (problem.M < 0 || problem.N < 1 || problem.K < 1) return "M, N or K is out of range";
  if (problem.M > kMost || problem.N > kMost) return "M or N is above 2^30";
  if (problem.K > 131071) return "K > 131071 can overflow the int32 sums";
  if (plan.tile < 0 || plan.tile >= table.count) return "there is no such tile";
  const TileShape& tile = table.tiles[plan.tile];
  if (!problem.aligned && !tile.any_alignment) return "this tile takes rows aligned to 16 bytes only";
  if (plan.stages < table.least_stages || plan.stages > table.most_stages) return "there cannot be so many stages";
  if (plan.stages * tile.stage_bytes() > device.smem_per_block) return "the stages do not fit shared memory";
  if (plan.splits < 1 || plan.raster_group < 1) return "splits and the raster group count from 1";
  const int64_t k_tiles = ceil_div(problem.K, tile.k);
  if (ceil_div(k_tiles, ceil_div(k_tiles, plan.splits)) != plan.splits) return "K does not fall into so many pieces";
  if (block_count(problem, tile) * plan.splits > kMostBlocks) return "more than 2^31 - 1 blocks";
  return nullptr;
}

LinearPlan choose_plan(Path path, const LinearProblem& problem, const Device& device) {
  const TileTable table = table_of(path);
  const Rates& rate = path == Path::kSm75 ? kRatesSm75 : kRatesSm80;
  LinearPlan best = {-1, 2, 1, 1};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < table.count; ++i) {
    const TileShape& tile = table.tiles[i];
    const int64_t k_tiles = ceil_div(problem.K, tile.k);
    for (const int splits : kSplits) {
      if (splits > 1 && (k_tiles / splits < 3 || block_count(problem, tile) * splits > 6 * device.sm_count)) break;
      for (const int stages : kStages) {
        const LinearPlan plan = {i, stages, splits, raster_group(problem, tile)};
        if (unsupported(path, problem, plan, device) != nullptr) continue;
        const double cycles = estimated_cycles(rate, table, problem, plan, device);
        if (cycles < least) {
          least = cycles;
          best = plan;
        }
      }
    }
  }
  return best;
}

std::string describe(Path path, const LinearProblem& problem, const LinearPlan& plan) {
  const TileTable table = table_of(path);
  std::string text = "M=" + std::to_string(problem.M) + " N=" + std::to_string(problem.N) + " K=" + std::to_string(problem.K) +
                     (problem.aligned ? "" : ", unaligned") + ": tile ";
  if (plan.tile < 0 || plan.tile >= table.count) return text + std::to_string(plan.tile);
  const TileShape& tile = table.tiles[plan.tile];
  return text + std::to_string(tile.m) + "x" + std::to_string(tile.n) + "x" + std::to_string(tile.k) + ", " +
         std::to_string(plan.stages) + " stages, K in " + std::to_string(plan.splits) + " pieces, " +
         std::to_string(block_count(problem, tile) * plan.splits) + " blocks";
}

int64_t workspace_bytes(const LinearProblem& problem, const LinearPlan& plan) {
  return plan.splits == 1 ? 0 : int64_t{4} * plan.splits * problem.M * problem.N;
}

}  // namespace kitchen::int8::portable
