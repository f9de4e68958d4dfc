#include "work_list.h"

#include <algorithm>

namespace memkv {
namespace {

// Cuts pieces[first], ... so that every range has `size` blocks, the last perhaps fewer.
void cut(std::vector<Piece>& pieces, size_t first, int32_t size, std::vector<Range>& ranges) {
  const std::vector<Piece> whole(pieces.begin() + first, pieces.end());
  pieces.resize(first);
  ranges.push_back({int(first), 0});
  int32_t room = size;
  for (Piece piece : whole) {
    while (piece.first_block < piece.end_block) {
      if (room == 0) {
        ranges.push_back({int(pieces.size()), 0});
        room = size;
      }
      const int32_t taken = std::min(piece.end_block - piece.first_block, room);
      pieces.push_back({piece.segment, piece.first_block, piece.first_block + taken});
      ++ranges.back().num_pieces;
      piece.first_block += taken;
      room -= taken;
    }
  }
}

}  // namespace

int64_t cut_ranges(const Attention& call,
                   int64_t sequence,
                   int32_t first_position,
                   int32_t last_position,
                   int range_blocks,
                   std::vector<Piece>& pieces,
                   std::vector<Range>& ranges) {
  const StepPlan& plan = call.plan;
  const int block_size = call.cache.block_size;
  const size_t first_piece = pieces.size();
  int64_t num_blocks = 0;
  for (int32_t s = plan.segment_start[sequence]; s < plan.segment_start[sequence + 1]; ++s) {
    const Segment& segment = plan.segments[s];
    const int32_t begin = visible_tokens(segment, first_position, call.window).begin;
    const int32_t end = visible_tokens(segment, last_position, call.window).end;
    if (begin >= end) continue;
    pieces.push_back({s, begin / block_size, (end - 1) / block_size + 1});
    num_blocks += pieces.back().end_block - pieces.back().first_block;
  }
  // As few ranges as may be, all of one size but for the last.
  const int64_t num_ranges = std::max<int64_t>(1, (num_blocks + range_blocks - 1) / range_blocks);
  const int64_t size = (num_blocks + num_ranges - 1) / num_ranges;
  cut(pieces, first_piece, int32_t(size), ranges);
  return num_blocks;
}

WorkList::WorkList(const Attention& call) {
  const StepPlan& plan = call.plan;
  const int group = call.group();
  for (int64_t sequence = 0; sequence < plan.num_seqs; ++sequence) {
    const int32_t* position = plan.query_position + plan.query_start[sequence];
    const int num_rows = (plan.query_start[sequence + 1] - plan.query_start[sequence]) * group;
    const int range_tokens = num_rows <= kFewRows ? kRangeTokensFew : kRangeTokensMany;
    for (int row = 0; row < num_rows; row += kTileRows) {
      const int rows = std::min(kTileRows, num_rows - row);
      const auto [least, most] =
          std::minmax_element(position + row / group, position + (row + rows - 1) / group + 1);
      const int first_range = int(ranges.size());
      const int64_t num_blocks = cut_ranges(
          call, sequence, *least, *most, range_tokens / call.cache.block_size, pieces, ranges);
      const int num_ranges = int(ranges.size()) - first_range;
      tile_of_range.insert(tile_of_range.end(), num_ranges, int(tiles.size()));
      tiles.push_back({sequence, row, rows, first_range, num_ranges});
      // A row of few costs as much as many: widening and reading K and V weigh like 8 rows.
      work += num_blocks * call.cache.block_size * call.cache.head_dim * (rows + 8);
    }
  }
}

Tile WorkList::tile(const Attention& call, int index, int kv_head) const {
  const RowTile& tile = tiles[index];
  return {&call, call.plan.query_start[tile.sequence], tile.first_row, tile.num_rows, kv_head};
}

}  // namespace memkv
