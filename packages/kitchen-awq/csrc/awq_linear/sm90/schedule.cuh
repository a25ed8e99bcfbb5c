// Which tiles, and which pieces of K of a tile, a block of the Hopper kernel multiplies.
//
//   tiles 0 .. cut_tiles - 1   in pieces of one length: stages of all these tiles in a row, cut into as many pieces as there are blocks
//   the rest                   whole, one a block in each round
//
// A block's first piece may be the middle or the end of a tile; it leaves its sums for the block that has the beginning, which is the
// block with the next higher index: whoever is waited for has been started before, and has its piece done first.
//
// A part of a weight is divided as the whole is: its tiles are some of the whole's, cut in the same places, so that its sums are added in
// the same order. The pieces of a position stay with one block; blocks without a position begin with tiles that are whole.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kitchen::awq {

struct Division {
  int tiles_m, tiles, stages;  // tiles of tokens; all tiles; stages of K
  int cut_tiles;
  int shares;  // not 0: each tile is cut into so many pieces of one length, one a cluster
  // Where pieces end is said by the whole weight: the stages of `whole_cut_tiles` in a row fall into `whole_positions` of one length. These
  // tiles begin with the whole's `first_tile`, and have pieces of `positions`, from `first_position` on.
  int whole_cut_tiles, whole_positions, first_tile, first_position, positions;
};

struct Piece {
  int row, token;     // in tiles
  int first, count;   // stages of K
  bool begins_tile;
  int position, last_position;  // whose piece it is; of those that have pieces of a tile whose beginning this is, the last
};

struct Pieces {
  const Division& division;
  int position, blocks;          // of this block among those that cut tiles, in the order of their pieces; below 0: it has none
  int64_t next_stage, end_stage; // of all cut tiles of the whole in a row
  int next_tile;

  __device__ __forceinline__ Pieces(const Division& d, int block, int grid) : division(d), position(d.positions - 1 - block), blocks(grid) {
    next_stage = max(begin_of(position), static_cast<int64_t>(d.first_tile) * d.stages);
    end_stage = min(begin_of(position + 1), static_cast<int64_t>(d.first_tile + d.cut_tiles) * d.stages);
    if (position < 0) end_stage = next_stage;
    next_tile = d.cut_tiles + block - d.positions + (block < d.positions ? grid : 0);
  }

  __device__ __forceinline__ int64_t begin_of(int at) const {
    return static_cast<int64_t>(division.whole_cut_tiles) * division.stages * (division.first_position + at) / division.whole_positions;
  }

  __device__ __forceinline__ bool next(Piece& piece) {
    int tile = next_tile;
    piece.first = 0, piece.count = division.stages, piece.begins_tile = true;
    piece.position = piece.last_position = position;
    if (next_stage < end_stage) {
      tile = static_cast<int>(next_stage / division.stages);
      const int64_t tile_end = static_cast<int64_t>(tile + 1) * division.stages;
      tile -= division.first_tile;
      piece.first = static_cast<int>(next_stage - (tile_end - division.stages));
      piece.count = static_cast<int>((end_stage < tile_end ? end_stage : tile_end) - next_stage);
      next_stage += piece.count;
      piece.begins_tile = piece.first == 0;
      if (piece.begins_tile) {
        while (begin_of(piece.last_position + 1) < tile_end) ++piece.last_position;
      }
    } else {
      next_tile += blocks;
    }
    piece.row = tile / division.tiles_m, piece.token = tile - piece.row * division.tiles_m;
    return tile < division.tiles;
  }
};

// Cuts tiles of `whole`, of `rows` weight rows each, and takes those that have rows of [first, first + N). Returns how many rows
// of the first of these tiles lie in front.
inline int64_t cut_tiles_of(Division& d, int64_t first, int64_t N, int64_t rows, int64_t whole, int64_t most) {
  // At least a tile's length each, so that two or three clusters share a tile, unless tiles are fewer than clusters.
  const int64_t positions = std::min(most, std::max<int64_t>(1, whole * d.stages / 2));
  const int64_t cut = whole < 2 * positions ? whole : whole % positions + positions, stages = cut * d.stages;
  const int64_t first_tile = first / rows * d.tiles_m, end_tile = (first + N + rows - 1) / rows * d.tiles_m, end_cut = std::min(end_tile, cut);
  const auto position_of = [&](int64_t stage) { return ((stage + 1) * positions - 1) / stages; };
  d.tiles = static_cast<int>(end_tile - first_tile);
  d.whole_cut_tiles = static_cast<int>(cut), d.whole_positions = static_cast<int>(positions), d.first_tile = static_cast<int>(first_tile);
  if (end_cut > first_tile) {
    d.cut_tiles = static_cast<int>(end_cut - first_tile);
    d.first_position = static_cast<int>(position_of(first_tile * d.stages));
    d.positions = static_cast<int>(position_of(end_cut * d.stages - 1)) + 1 - d.first_position;
  }
  return first % rows;
}

}  // namespace kitchen::awq
