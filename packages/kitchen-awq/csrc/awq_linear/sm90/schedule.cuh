// Which tiles, and which pieces of K of a tile, a block of the Hopper kernel multiplies.
//
//   tiles 0 .. cut_tiles - 1   in pieces of one length: stages of all these tiles in a row, cut into as many pieces as there are blocks
//   the rest                   whole, one a block in each round
//
// A block's first piece may be the middle or the end of a tile; it leaves its sums for the block that has the beginning, which is the
// block with the next higher index: whoever is waited for has been started before, and has its piece done first.
#pragma once

#include <cstdint>

namespace kitchen::awq {

struct Division {
  int tiles_m, tiles, stages;  // tiles of tokens; all tiles; stages of K
  int cut_tiles;
  int shares;  // not 0: each tile is cut into so many pieces of one length, one a cluster
};

struct Piece {
  int row, token;     // in tiles
  int first, count;   // stages of K
  bool begins_tile;
  int last_position;  // of those that have pieces of a tile whose beginning this is
};

struct Pieces {
  const Division& division;
  int position, blocks;          // of this block among those that cut tiles, in the order of their pieces
  int64_t next_stage, end_stage; // of all cut tiles in a row
  int next_tile;

  __device__ __forceinline__ Pieces(const Division& d, unsigned block, unsigned grid)
      : division(d), position(static_cast<int>(grid - 1 - block)), blocks(static_cast<int>(grid)) {
    next_stage = begin_of(position), end_stage = begin_of(position + 1);
    next_tile = d.cut_tiles + static_cast<int>(block);
  }

  __device__ __forceinline__ int64_t begin_of(int at) const {
    return static_cast<int64_t>(division.cut_tiles) * division.stages * at / blocks;
  }

  __device__ __forceinline__ bool next(Piece& piece) {
    int tile = next_tile;
    piece.first = 0, piece.count = division.stages, piece.begins_tile = true, piece.last_position = position;
    if (next_stage < end_stage) {
      tile = static_cast<int>(next_stage / division.stages);
      const int64_t tile_end = static_cast<int64_t>(tile + 1) * division.stages;
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

}  // namespace kitchen::awq
