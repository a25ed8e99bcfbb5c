// What gemm_sm90.cuh works on: tile shapes, a block's shared memory, and the order in which blocks take tiles.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace kitchen::gemm_sm90 {

constexpr int kStageBytesK = 128;         // bytes of K in a stage: one swizzle atom
constexpr int kConsumers = 2;             // warpgroups that multiply
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kSharedLimit = 227 * 1024;  // what a block may ask for on sm_90
constexpr int kReservedBytes = 512;       // barriers

enum class Schedule {
  kTogether,  // both warpgroups on one tile, 64 rows each, which they store before the next: the widest tiles
  kPingPong,  // a tile each, taking turns: one multiplies while the other stores
};

template <int kTileM_, int kTileN_, int kClusterM_, int kClusterN_, Schedule kSchedule_, bool kDualB_ = false>
struct TileConfig {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kClusterM = kClusterM_, kClusterN = kClusterN_;
  static constexpr Schedule kSchedule = kSchedule_;
  // Two boxes of B a tile, kTileN/2 rows each: a gate's rows and, `b_second_row` further, the matching up rows.
  static constexpr bool kDualB = kDualB_;
  static constexpr bool kPingPong = kSchedule == Schedule::kPingPong;
  static constexpr int kClusterSize = kClusterM * kClusterN;
  static constexpr int kBlocksM = kPingPong ? kTileM / 64 : 1;  // of a warpgroup
  static constexpr int kTileOutN = kDualB ? kTileN / 2 : kTileN;
  static constexpr int kBytesA = kTileM * kStageBytesK, kBytesB = kTileN * kStageBytesK;
  static constexpr int kBoxM = kTileM / kClusterN;
  static constexpr int kBoxN = kTileN / (kDualB && kClusterM == 1 ? 2 : kClusterM);
  // Accumulators, their epilogue and some addresses must fit; the three warpgroups share 64K registers.
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  // Pairs only: clusters of four leave SMs idle (an H200 keeps fewer than 32 of them resident, 2026-11-30), and
  // releasing a stage then has to name the blocks that share it.
  static_assert(kClusterSize <= 2, "a cluster is one block or a pair");
  static_assert(kPingPong || kTileM == 64 * kConsumers, "together: 64 rows a warpgroup");
  static_assert(kBlocksM >= 1 && kTileM % 64 == 0, "a warpgroup multiplies blocks of 64 rows");
  static_assert(kBoxM % 8 == 0 && kBoxN % 8 == 0, "a multicast slice is made of whole swizzle groups of 8 rows");
};

template <class Config, class Epilogue>
struct SharedStorage {
  static constexpr int kTilesAtOnce = Config::kPingPong ? kConsumers : 1;
  static constexpr int kOther = 4 * kConsumers * Epilogue::kStagingBytes +
                                kTilesAtOnce * static_cast<int>(sizeof(typename Epilogue::Columns)) + kReservedBytes;
  static constexpr int kStages = (kSharedLimit - kOther) / (Config::kBytesA + Config::kBytesB);
  static_assert(kStages >= 3, "fewer than three stages cannot hide the copies");
  alignas(1024) uint8_t a[kStages][Config::kBytesA];
  alignas(1024) uint8_t b[kStages][Config::kBytesB];
  alignas(1024) uint8_t staging[4 * kConsumers][Epilogue::kStagingBytes];
  alignas(16) typename Epilogue::Columns columns[kTilesAtOnce];
  uint64_t full[kStages];   // the copies of a stage have landed
  uint64_t empty[kStages];  // every reader of the stage, in both blocks of a pair, is done
  uint64_t columns_full[kTilesAtOnce], columns_empty[kTilesAtOnce];
  uint64_t turn[kConsumers];
  uint64_t of_warp[4 * kConsumers][2];  // one arrival: for an epilogue that wants barriers of its own
};

struct Problem {
  int k_stages;          // K in stages, rounded up
  int tiles_m, tiles_n;  // in tiles of a whole cluster
  int raster_group;      // rows of tiles walked together, so that their operands are still in L2
  int b_second_row;      // see kDualB
  int early_stages = 0;  // rows of B that may be copied before the grid in front has ended, in stages
  int M = 0, N = 0;      // where given, boxes of A without rows are not copied
  bool overlap = false;  // and the last tiles are moved back to overlap those before them, whose results they repeat
};

// Where a tile begins. Filling what lies beyond the matrix takes the copy engine longer than copying as much (an H200: 1.4
// times for a box of 128 rows that lacks half of them, 2026-11-30), so that tiles are moved rather than filled.
__device__ __forceinline__ int tile_begin(int index, int size, int length, bool overlap) {
  const int begin = index * size;
  return overlap && begin < length && length >= size ? min(begin, length - size) : begin;
}

template <class EpilogueParams>
struct KernelParams {
  CUtensorMap a, b;
  Problem problem;
  EpilogueParams epilogue;
};

struct NoPromotion {
  static constexpr int kSteps = 0;
};

// Position in the ring of stages; the phase flips each time around.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int count) {
    const int total = stage + count;
    stage = total % kStages;
    phase ^= (total / kStages) & 1;
  }
};

// The tiles of this block: every gridDim-th cluster tile, in an order that walks down groups of raster_group rows.
template <class Config>
struct TileWalk {
  const Problem& problem;
  int index, step, count, rank_m, rank_n;

  __device__ __forceinline__ explicit TileWalk(const Problem& p) : problem(p) {
    const int rank = blockIdx.x % Config::kClusterSize;
    rank_m = Config::kClusterM == 1 ? 0 : rank;
    rank_n = Config::kClusterN == 1 ? 0 : rank;
    index = blockIdx.x / Config::kClusterSize;
    step = gridDim.x / Config::kClusterSize;
    count = problem.tiles_m * problem.tiles_n;
  }
  __device__ __forceinline__ bool done() const { return index >= count; }
  __device__ __forceinline__ bool last() const { return index + step >= count; }
  __device__ __forceinline__ void next() { index += step; }

  // The tile of this block, in tiles of a block.
  __device__ __forceinline__ int2 tile() const {
    const int group = index / (problem.raster_group * problem.tiles_n);
    const int first = group * problem.raster_group;
    const int rows = min(problem.raster_group, problem.tiles_m - first);
    const int inside = index - first * problem.tiles_n;
    const int m = first + inside % rows, n = inside / rows;
    return {m * Config::kClusterM + rank_m, n * Config::kClusterN + rank_n};
  }
};

}  // namespace kitchen::gemm_sm90
