// The tiles of the GEMM: how a block's threads, fragments and shared memory are cut. Compile-time only.
#pragma once

namespace kitchen::volta {

// kFragsM x kFragsN fragments of 16 x 16 a warp, kWarpsM x kWarpsN warps a tile; with kWarpsK > 1 the steps of a stage are
// dealt out to that many warps, which add their sums at the end. Rows in shared memory are 16 bytes longer than their
// kTileK halves: an odd number of 16-byte units, so that rows a quarter of a warp stores to, or reads of B, lie in
// different banks.
template <int kWarpsM_, int kWarpsN_, int kWarpsK_, int kFragsM_, int kFragsN_, int kTileK_>
struct TileConfig {
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsK = kWarpsK_;
  static constexpr int kFragsM = kFragsM_, kFragsN = kFragsN_;
  static constexpr int kTileM = 16 * kWarpsM * kFragsM, kTileN = 16 * kWarpsN * kFragsN, kTileK = kTileK_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN * kWarpsK;
  static constexpr int kSteps = kTileK / 16 / kWarpsK;  // of a warp in a stage
  static constexpr int kPitch = kTileK + 8;             // halves
  static constexpr int kStageBytes = 2 * kPitch * (kTileM + kTileN);
  static constexpr int kStages = 2;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // The exchange of sums, in words: all rows of the tile at once where they fit into the stages, else a row of fragments of
  // each warp. Scales of the tile's rows lie behind it.
  static constexpr int kExchangePitch = kTileN + 4;
  static constexpr int kPassFrags = 4 * kWarpsK * kTileM * kExchangePitch <= kSharedBytes ? kFragsM : 1;
  static constexpr int kExchangeBytes = 4 * kWarpsK * 16 * kWarpsM * kPassFrags * kExchangePitch;
  // Stages between two flushes of a warp's sums: 1022 columns at most, see Sums.
  static constexpr int kFlushStages = 1022 / (16 * kSteps);
  // Fragments are loaded half a step ahead where half a step has products enough to hide that.
  static constexpr bool kFragmentsAhead = kFragsN % 4 == 0 && kSteps % 2 == 0;
  static_assert(kTileK % 64 == 0 && kSteps * kWarpsK * 16 == kTileK, "whole steps, and rows of an odd number of 16-byte units");
  static_assert(kExchangeBytes + 4 * kTileM <= kSharedBytes, "the exchange and the scales reuse the stages");
};

using Large = TileConfig<4, 2, 1, 2, 4, 64>;   // 128 x 128, 256 threads, one block an SM by its registers
using Medium = TileConfig<2, 2, 1, 2, 2, 64>;  // 64 x 64, 128 threads, two blocks an SM of a V100 by shared memory
using Small = TileConfig<1, 1, 8, 2, 2, 128>;  // 32 x 32, 256 threads that share K: few rows

}  // namespace kitchen::volta
