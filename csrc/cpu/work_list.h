// Cuts a call into tiles of rows and ranges of blocks.
#pragma once

#include <vector>

#include "tile.h"

namespace memkv {

// Pieces [first_piece, first_piece + num_pieces) of a WorkList.
struct Range {
  int first_piece;
  int num_pieces;
};

// A tile without its kv head: all kv heads of a sequence are cut alike.
struct RowTile {
  int64_t sequence;
  int first_row, num_rows;
  int first_range, num_ranges;  // at least one, perhaps without pieces
};

struct WorkList {
  std::vector<RowTile> tiles;
  std::vector<Range> ranges;  // those of a tile in order
  std::vector<int> tile_of_range;
  std::vector<Piece> pieces;
  int64_t work = 0;  // multiply-adds of one kv head, roughly

  explicit WorkList(const Attention& call);

  Tile tile(const Attention& call, int index, int kv_head) const;
};

// The blocks that rows at positions [first_position, last_position] may see of a sequence, cut into
// ranges of `range_blocks`; appended to pieces and ranges. Returns the number of visible blocks.
int64_t cut_ranges(const Attention& call,
                   int64_t sequence,
                   int32_t first_position,
                   int32_t last_position,
                   int range_blocks,
                   std::vector<Piece>& pieces,
                   std::vector<Range>& ranges);

}  // namespace memkv
