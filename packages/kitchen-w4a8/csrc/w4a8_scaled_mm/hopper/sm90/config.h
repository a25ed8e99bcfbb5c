// What hopper.cuh works on: tile sizes, a block's shared memory, parameters, and the order in which blocks take tiles.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <numeric>

#include "w4a8_scaled_mm/smxx/scale_epilogue.cuh"

namespace kitchen::w4a8::hopper {

constexpr int kStage = 128;  // columns
constexpr int kSteps = kStage / 32;  // instructions of a stage
constexpr int kSumPad = 4;
constexpr int kChunkTokens = 32;  // that leave at once
constexpr int kStoreColumns = 64;  // outputs of a warpgroup: 128 bytes of a 16-bit result
constexpr int kStoreBytes = kChunkTokens * kStoreColumns * 2;  // one of the two staging buffers of a warpgroup
constexpr int kSharedLimit = 227 * 1024, kReservedBytes = 512;

// A warpgroup has 64 outputs of a tile; three of them have no registers for the sums of 256 tokens.
template <int kBits_, int kRows_, int kTokens_, bool kPairs_>
struct Config {
  static constexpr int kBits = kBits_, kTokens = kTokens_;
  static constexpr bool kPairs = kPairs_;  // groups of 16, whose scales are read two at a time
  static constexpr int kRows = kRows_, kGroupThreads = 2 * kRows;
  static constexpr bool kWhole = kRows == 64;  // all sums at once
  static constexpr bool kAlone = kWhole && kTokens > 128;  // a block has one tile: no room for sums beside the stages
  static constexpr int kWarpgroups = !kWhole ? kRows / 64 : kTokens <= 160 ? 3 : 2;  // that multiply
  static constexpr int kConsumerThreads = 128 * kWarpgroups, kThreads = kConsumerThreads + 128;
  static constexpr int kGroups = kConsumerThreads / kGroupThreads;  // that take turns of stages
  // Up to 64 tokens there are registers and shared memory to spare for a block of the quantizer in front, beside which this one
  // can start: 0.2 to 0.5 us less. It is compiled for more threads than it has, so that it takes so few registers.
  static constexpr bool kShares = kWhole && kTokens <= 64;
  static constexpr int kMostThreads = kShares ? 640 : kThreads, kSpareBytes = kShares ? 20 * 1024 : 0;
  // Of a thread. What consumers gain, the producer's warpgroup gives: the block starts with equal shares, a multiple of 8.
  static constexpr int kConsumerRegisters = kShares ? 120 : kWarpgroups == 3 ? 160 : 240;
  static constexpr int kProducerRegisters = kShares || kWarpgroups == 2 ? 24 : 32;
  static constexpr int kFirstRegisters = 65536 / kMostThreads / 8 * 8;
  static_assert(kConsumerThreads * kConsumerRegisters + 128 * kProducerRegisters <= kThreads * kFirstRegisters,
                "consumers would wait for registers for ever");
  // Eight lanes read rows of the decode table at once, each that of a scale of its own: so each has a copy in banks of its own
  // (4 bytes at 6 bits, of which 32 lanes read at once: four lanes share a copy).
  static constexpr int kCopies = 8, kTableRow = kCopies * (kBits == 4 ? 16 : 4);
  static constexpr int kTableBytes = 256 * kTableRow;
  static constexpr int kTokenBytes = kTokens * kStage, kNibbleBytes = kRows * kStage / 2,
                       kTopBytes = kBits == 6 ? kRows * kStage / 4 : 0;
  static constexpr int kCodeBytes = kNibbleBytes + kTopBytes;
  static constexpr int kSumPitch = kRows + kSumPad;
  static constexpr int kTileSumBytes = 4 * kSumPitch * kTokens;
  static constexpr int kMostSplits = kAlone ? 2 : kWhole ? 8 : 4;
  // What a block is sent of a split K, and sums beside the stages.
  static constexpr int kSumBytes = kAlone   ? 4 * kRows * kTokens / kMostSplits
                                   : kWhole ? kTileSumBytes
                                            : 4 * kSumPitch * kChunkTokens;
  static constexpr int kOther = kTableBytes + kReservedBytes + 2 * (8 * kRows + 4 * kTokens) + 2048;
  // Codes come from far and are read into registers at once, tokens come from the L2 and are held while they are multiplied: so
  // each has a ring of its own, and more stages of codes are on their way.
  static constexpr int kRingBytes = kSharedLimit - kSpareBytes - kOther - kSumBytes;
  static constexpr int kTokenStages = kRingBytes / (kTokenBytes + (kWhole ? kCodeBytes * 3 / 2 : kCodeBytes));
  static constexpr int kCodeStages = (kRingBytes - kTokenStages * kTokenBytes) / kCodeBytes / kGroups * kGroups;
  // Barriers that say a stage has landed: for each place in a ring one of each group that meets it.
  static constexpr int kTokenTurns = std::lcm(kTokenStages, kGroups), kCodeTurns = std::lcm(kCodeStages, kGroups);
  static_assert(!kWhole || kGroups * kTileSumBytes <= kTokenStages * kTokenBytes + kCodeStages * kCodeBytes,
                "sums of each group take the place of the stages");
  static_assert(kWhole || kSumBytes >= 2 * kWarpgroups * kStoreBytes, "either way out takes the same place");
  static_assert(kWhole || kTileSumBytes <= kTokenStages * kTokenBytes + kCodeStages * kCodeBytes + kSumBytes,
                "sums of a split K take the place of the stages and of sums");
  static_assert(kTokens % kChunkTokens == 0, "sums leave by chunks");
  static_assert(kTokenStages >= 3 && kCodeStages >= 3, "fewer than three stages cannot hide the copies");
};

template <class Config>
struct TileScales {
  float2 columns[Config::kRows];  // b_scale and bias of the tile's outputs
  float tokens[Config::kTokens];  // a_scale
};

template <class Config>
struct SharedStorage {
  alignas(1024) uint8_t tokens[Config::kTokenStages][Config::kTokenBytes];
  alignas(128) uint8_t codes[Config::kCodeStages][Config::kCodeBytes];
  alignas(1024) uint8_t sums[Config::kSumBytes];
  alignas(128) uint8_t table[Config::kTableBytes];
  TileScales<Config> scales[2];  // of two tiles in turn
  uint64_t tokens_full[Config::kTokenTurns], codes_full[Config::kCodeTurns];  // a stage has landed
  uint64_t tokens_empty[Config::kTokenStages], codes_empty[Config::kCodeStages];  // every warp that wants it has read it
  uint64_t received;  // of store_async.h: the sums of the other blocks have come
};

struct Tiles {
  int M, N, K;
  int splits, stages_per_split;
  int tiles_m, tiles_n;
  int raster_group;  // rows of tiles (of tokens) walked together
  int group_log2, groups_per_row;
  int box_tokens;  // that are copied: of a tile, or all M where they are fewer
  bool alone;  // no block has a second tile
  bool overlap;  // the last tiles are moved back over those before them, whose results they repeat
  bool result_mapped;  // a 16-bit result without a residual, in rows that the copy engine can write
};

struct KernelParams {
  CUtensorMap tokens, nibbles, tops, result;
  Tiles tiles;
  const uint8_t* s_rel;
  const float* codebook;
  EpilogueParams epilogue;
};

// Of a stage in a ring: its place, and its barrier, of which there are kTurns.
// NOTE: kTurns is a multiple of the groups, so that a barrier has the stages of one group. Who waits for a phase of a barrier
// must have waited for the one before: else it may take that one, which has the other parity and is not yet over, for its own.
template <int kStages, int kTurns>
struct RingPosition {
  int stage = 0, turn = 0;
  uint32_t phase = 0;
  template <int kBy = 1>
  __device__ __forceinline__ void advance() {
    static_assert(kBy <= kStages && kTurns % kStages == 0 && kTurns % kBy == 0, "a step passes the end of the ring once");
    turn += kBy;
    if (turn >= kTurns) turn -= kTurns, phase ^= 1;
    stage = kTurns == kStages ? turn : stage + kBy < kStages ? stage + kBy : stage + kBy - kStages;
  }
};
template <class Config>
using TokenPosition = RingPosition<Config::kTokenStages, Config::kTokenTurns>;
template <class Config>
using CodePosition = RingPosition<Config::kCodeStages, Config::kCodeTurns>;

// Where a tile begins. Filling what lies beyond the matrix with zeros takes the copy engine longer than copying as much, so
// tiles are moved rather than filled.
__device__ __forceinline__ int tile_begin(int index, int size, int length, bool overlap) {
  return overlap && length >= size ? min(index * size, length - size) : index * size;
}

// The tiles of a block (of a cluster): x the first output, y the first token.
template <class Config>
struct Walk {
  const Tiles& t;
  int index, step;
  __device__ __forceinline__ explicit Walk(const Tiles& tiles)
      : t(tiles), index(static_cast<int>(blockIdx.x) / tiles.splits), step(static_cast<int>(gridDim.x) / tiles.splits) {}
  __device__ __forceinline__ bool done() const { return index >= t.tiles_m * t.tiles_n; }
  __device__ __forceinline__ void next() { index += step; }
  __device__ __forceinline__ int2 tile() const {
    const int group = index / (t.raster_group * t.tiles_n), first = group * t.raster_group;
    const int rows = min(t.raster_group, t.tiles_m - first), inside = index - first * t.tiles_n;
    return {tile_begin(inside / rows, Config::kRows, t.N, t.overlap),
            tile_begin(first + inside % rows, Config::kTokens, t.M, t.overlap)};
  }
};

}  // namespace kitchen::w4a8::hopper
