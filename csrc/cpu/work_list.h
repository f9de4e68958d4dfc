// Cuts a call into units of work: a tile of rows, some kv heads, a range of blocks.
#pragma once

#include <vector>

#include "tile.h"

namespace memkv {

// Pieces [first_piece, first_piece + num_pieces) of a WorkList.
struct Range {
  int first_piece;
  int num_pieces;
};

// Rows of a sequence, for all kv heads. Its units are [first_unit, first_unit + num_ranges *
// num_groups()), the groups of a range side by side: they read the same blocks.
struct RowTile {
  int64_t sequence;
  int first_row, num_rows;  // of each kv head
  int heads_of_unit;        // divides the number of kv heads
  int num_ranges;           // at least one, perhaps without pieces
  int first_range;
  int first_unit;
  int first_group;  // of all groups of all tiles
};

struct Unit {
  int tile;
  int range;
  int kv_head;  // the first
};

struct WorkList {
  std::vector<RowTile> tiles;
  std::vector<Unit> units;
  std::vector<Range> ranges;  // those of a tile in order
  std::vector<Piece> pieces;
  int num_groups = 0;  // of heads, over all tiles
  int64_t work = 0;    // multiply-adds, roughly

  explicit WorkList(const Attention& call);

  Tile tile(const Attention& call, int index, int kv_head, int num_kv_heads) const;

 private:
  void add_tile(const Attention& call, int64_t sequence, int first_row, int num_rows);
};

// The blocks that rows at positions [first_position, last_position] may see of a sequence, cut into
// some 6 ranges of one size, yet none longer than most_tokens, and fewer ranges rather than shorter
// than least_tokens; appended to pieces and ranges. Returns the number of visible blocks.
int64_t cut_ranges(const Attention& call,
                   int64_t sequence,
                   int32_t first_position,
                   int32_t last_position,
                   int least_tokens,
                   int most_tokens,
                   std::vector<Piece>& pieces,
                   std::vector<Range>& ranges);

}  // namespace memkv
