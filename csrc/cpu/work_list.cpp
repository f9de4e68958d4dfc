#include "work_list.h"

#include <algorithm>

namespace memkv {

int64_t cut_ranges(const Attention& call,
                   int64_t sequence,
                   int32_t first_position,
                   int32_t last_position,
                   int range_blocks,
                   std::vector<Piece>& pieces,
                   std::vector<Range>& ranges) {
  const StepPlan& plan = call.plan;
  const int block_size = call.cache.block_size;
  int64_t num_blocks = 0;
  ranges.push_back({int(pieces.size()), 0});
  int room = range_blocks;
  for (int32_t s = plan.segment_start[sequence]; s < plan.segment_start[sequence + 1]; ++s) {
    const Segment& segment = plan.segments[s];
    const int32_t begin = visible_tokens(segment, first_position, call.window).begin;
    const int32_t end = visible_tokens(segment, last_position, call.window).end;
    if (begin >= end) continue;
    int32_t block = begin / block_size;
    const int32_t end_block = (end - 1) / block_size + 1;
    num_blocks += end_block - block;
    while (block < end_block) {
      if (room == 0) {
        ranges.push_back({int(pieces.size()), 0});
        room = range_blocks;
      }
      const int32_t taken = std::min(end_block - block, room);
      pieces.push_back({s, block, block + taken});
      ++ranges.back().num_pieces;
      block += taken;
      room -= taken;
    }
  }
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
