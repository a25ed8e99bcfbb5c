// What the skeletons for mma.sync share (gemm_sm80.cuh, gemm_sm75.cuh): the shape of a block's tile, its walk over the output,
// operands in shared memory as MMA fragments, and the way of the accumulators out to rows.
//
// A stage of an operand holds kRows x kTileK bytes, K contiguous, swizzled (smem/swizzle.h). A warp multiplies kWarpM x kWarpN of
// the tile in steps of 32 bytes of K; with kWarpsK > 1 the steps of a stage are dealt out to that many warps, which sum their
// accumulators at the end.
#pragma once

#include <cstdint>
#include <cstring>

#include "kitchen/ptx/ldmatrix.h"
#include "kitchen/smem/swizzle.h"

namespace kitchen::gemm {

constexpr int kStepBytesK = 32;      // of one MMA
constexpr int kRowColumns = 8;       // neighbouring columns that a lane finishes in the epilogue
constexpr int kExchangePad = 8;      // words between rows of the exchange: writes of 8 rows x 8 bytes meet no bank twice

template <int kTileM_, int kTileN_, int kTileK_, int kWarpM_, int kWarpN_, int kWarpsK_, int kBlocksPerSm_>
struct TileConfig {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileK_, kWarpM = kWarpM_, kWarpN = kWarpN_;
  static constexpr int kWarpsM = kTileM / kWarpM, kWarpsN = kTileN / kWarpN, kWarpsK = kWarpsK_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN * kWarpsK;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;  // that registers are kept for
  static constexpr int kSteps = kTileK / kStepBytesK / kWarpsK;  // of a warp in a stage
  static constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 16;  // of 16 rows of A and of B
  static constexpr int kStageBytes = (kTileM + kTileN) * kTileK;
  static constexpr int kExchangeBytes = (kThreads / 32) * 16 * (kWarpN + kExchangePad) * 4;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "fragments are loaded 16 rows at a time");
  static_assert(kTileM % kWarpM == 0 && kTileN % kWarpN == 0, "warps cover the tile");
  static_assert(kSteps % 2 == 0, "fragments alternate between two buffers, also from stage to stage");
  static_assert(kExchangeBytes <= 2 * kStageBytes, "the exchange reuses the stages, of which there are at least two");
};

struct Problem {
  int M, N, K;
  int tiles_m, tiles_n;   // rounded up
  int raster_group;       // rows of tiles that are walked together, so that their operands are still in L2
  int k_tiles_per_split;  // K is cut into pieces of that many stages, a block each
};

template <class A, class B, class Epilogue>
struct KernelParams {
  Problem problem;
  int stages;  // of the ring, at least 2
  typename A::Params a;
  typename B::Params b;
  typename Epilogue::Params epilogue;
};

// Where a block works. One dimension of blocks, so that no count is limited to 65535.
struct BlockTile {
  int m, n, split;
  int first_k_tile, k_tiles;

  template <class Config>
  __device__ __forceinline__ static BlockTile of(const Problem& p, unsigned block) {
    const unsigned tiles = static_cast<unsigned>(p.tiles_m) * p.tiles_n;
    const int split = static_cast<int>(block / tiles);
    const unsigned in_split = block % tiles;
    const unsigned group = in_split / (static_cast<unsigned>(p.raster_group) * p.tiles_n);
    const int first_m = static_cast<int>(group) * p.raster_group;
    const unsigned in_group = in_split - static_cast<unsigned>(first_m) * p.tiles_n;
    const int rows = min(p.raster_group, p.tiles_m - first_m);
    const int all = (p.K + Config::kTileK - 1) / Config::kTileK;
    const int first = split * p.k_tiles_per_split;
    const int tile_m = first_m + static_cast<int>(in_group % rows), tile_n = static_cast<int>(in_group / rows);
    return {tile_m * Config::kTileM, tile_n * Config::kTileN, split, first, min(p.k_tiles_per_split, all - first)};
  }
};

template <class Config>
struct Warp {
  int m, n, k, lane;  // of the warp in its tile: first row, first column, which of the kWarpsK

  __device__ __forceinline__ static Warp of(unsigned thread) {
    const int warp = static_cast<int>(thread) / 32;
    return {warp % Config::kWarpsM * Config::kWarpM, warp / Config::kWarpsM % Config::kWarpsN * Config::kWarpN,
            warp / (Config::kWarpsM * Config::kWarpsN), static_cast<int>(thread) % 32};
  }
};

template <class Config, class Number>
using Accumulators = Number[Config::kBlocksM][2 * Config::kBlocksN][4];

template <class Config>
struct Fragments {
  // Of 16 rows, in the order that an MMA takes without moves between registers:
  uint32_t a[Config::kBlocksM][4];  // rows 0-7 and 8-15 of the first 16 bytes of K, then of the second
  uint32_t b[Config::kBlocksN][4];  // both 16 bytes of rows 0-7, then of rows 8-15

  template <class Mma>
  __device__ __forceinline__ void multiply(Accumulators<Config, typename Mma::Accumulator>& acc) const {
#pragma unroll
    for (int i = 0; i < Config::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * Config::kBlocksN; ++j) {
        Mma::multiply(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

enum class Side { kA, kB };

// A warp's view of an operand tile that holds int8 codes as they are multiplied. Another format puts its decoder here.
template <class Config, Side kSide>
struct CodeTile {
  int row_offset, chunk_bits;  // of the 16 bytes whose address this lane gives to ldmatrix

  __device__ __forceinline__ CodeTile(int first_row, const Warp<Config>& warp) {
    const int high = warp.lane / 8 % 2, higher = warp.lane / 16;  // of the number of the lane's 8x8 matrix
    const int row = first_row + warp.lane % 8 + 8 * (kSide == Side::kA ? high : higher);
    row_offset = row * Config::kTileK;
    chunk_bits = 16 * ((kSide == Side::kA ? higher : high) ^ smem::swizzle_of<Config::kTileK>(row));
    if (Config::kWarpsK > 1) chunk_bits ^= 32 * Config::kSteps * warp.k;
  }

  template <int kBlocks>
  __device__ __forceinline__ void load(uint32_t (&blocks)[kBlocks][4], uint32_t tile, int step) const {
    const uint32_t first = tile + row_offset + (chunk_bits ^ (32 * step));
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) ptx::ldmatrix_x4(blocks[i], first + i * 16 * Config::kTileK);
  }
};

template <class Number>
__device__ __forceinline__ void store_2(Number* to, Number first, Number second) {
  const Number pair[2] = {first, second};
  uint2 words;
  memcpy(&words, pair, sizeof(words));
  *reinterpret_cast<uint2*>(to) = words;
}

template <class Number>
__device__ __forceinline__ void load_4(Number (&to)[4], const Number* from) {
  static_assert(sizeof(Number) == 4, "16 bytes are four of them");
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  memcpy(to, &words, sizeof(words));
}

// Hands every row of the tile to the epilogue, kRowColumns neighbouring columns a lane, the sums of all kWarpsK warps added up.
// An epilogue has, in the order of their calls,
//   Columns load_columns(column)                              once a lane
//   float load_row(row)                                       once a row of it, all before the first store
//   Ahead load_ahead(row, column)                             once a row of it, before the exchange of 16 rows
//   store(row, column, columns, row_value, ahead, values)     once a row of it
// `shared` must be free: a barrier after the last read of a stage.
template <class Config, class Number, class Epilogue>
__device__ __forceinline__ void store_tile(const Accumulators<Config, Number>& acc, uint8_t* shared, const Warp<Config>& warp,
                                           const BlockTile& tile, const Epilogue& epilogue) {
  constexpr int kPitch = Config::kWarpN + kExchangePad, kSlab = 16 * kPitch;
  constexpr int kLanesPerRow = Config::kWarpN / kRowColumns, kRowsAtOnce = 32 / kLanesPerRow, kPasses = 16 / kRowsAtOnce;
  constexpr int kWarpsMN = Config::kWarpsM * Config::kWarpsN;
  Number* const slabs = reinterpret_cast<Number*>(shared);
  const int place = warp.m / Config::kWarpM + warp.n / Config::kWarpN * Config::kWarpsM;
  Number* const mine = slabs + (warp.k * kWarpsMN + place) * kSlab;
  const int lane_row = warp.lane / kLanesPerRow, lane_column = warp.lane % kLanesPerRow * kRowColumns;
  const int column = tile.n + warp.n + lane_column;
  const auto columns = epilogue.load_columns(column);
  const int first_row = tile.m + warp.m + lane_row;
  float row_values[Config::kBlocksM][kPasses];
#pragma unroll
  for (int i = 0; i < Config::kBlocksM * kPasses; ++i) {
    row_values[i / kPasses][i % kPasses] = epilogue.load_row(first_row + 16 * (i / kPasses) + i % kPasses * kRowsAtOnce);
  }
  const bool second_first = warp.lane & 4;  // half of the lanes read their second 16 bytes first: no bank twice
#pragma unroll
  for (int i = 0; i < Config::kBlocksM; ++i) {
    typename Epilogue::Ahead ahead[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) ahead[pass] = epilogue.load_ahead(first_row + 16 * i + pass * kRowsAtOnce, column);
#pragma unroll
    for (int j = 0; j < 2 * Config::kBlocksN; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Number* const to = mine + (warp.lane / 4 + 8 * half) * kPitch + 8 * j + 2 * (warp.lane % 4);
        store_2(to, acc[i][j][2 * half], acc[i][j][2 * half + 1]);
      }
    }
    Config::kWarpsK > 1 ? __syncthreads() : __syncwarp();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (Config::kWarpsK > 1 && pass % Config::kWarpsK != warp.k) continue;
      const int slab_row = pass * kRowsAtOnce + lane_row;
      Number values[kRowColumns] = {};
#pragma unroll
      for (int k = 0; k < Config::kWarpsK; ++k) {
        const Number* const from = slabs + (k * kWarpsMN + place) * kSlab + slab_row * kPitch + lane_column;
        Number low[4], high[4];
        load_4(low, from + (second_first ? 4 : 0));
        load_4(high, from + (second_first ? 0 : 4));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          values[e] += second_first ? high[e] : low[e];
          values[4 + e] += second_first ? low[e] : high[e];
        }
      }
      epilogue.store(first_row + 16 * i + pass * kRowsAtOnce, column, columns, row_values[i][pass], ahead[pass], values);
    }
    Config::kWarpsK > 1 ? __syncthreads() : __syncwarp();
  }
}

}  // namespace kitchen::gemm
