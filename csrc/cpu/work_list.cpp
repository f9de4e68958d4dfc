#include "work_list.h"

#include <algorithm>

namespace memkv {
namespace {

constexpr int64_t kRangesWanted = 6;  // of a tile, where that leaves each long enough
constexpr int64_t kRunBytes = 4096;   // of neighbouring slabs: a page

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

// Slabs of neighbouring kv heads are adjacent, and memory is read faster in long runs: a unit of
// few rows takes as many heads as make a run of kRunBytes, if their rows are few together.
int heads_of_unit(const PagedCache& cache, int num_rows) {
  const int element = cache.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t slab = int64_t{cache.head_dim} * cache.block_size * element;
  int heads = 1;
  for (int wider = 2; wider <= cache.num_kv_heads && heads * slab < kRunBytes; ++wider) {
    if (cache.num_kv_heads % wider == 0 && wider * num_rows <= kFewRows) heads = wider;
  }
  return heads;
}

}  // namespace

int64_t cut_ranges(const Attention& call,
                   int64_t sequence,
                   int32_t first_position,
                   int32_t last_position,
                   int least_tokens,
                   int most_tokens,
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
  const int64_t limit = std::clamp<int64_t>(
      num_blocks / kRangesWanted, least_tokens / block_size, most_tokens / block_size);
  const int64_t num_ranges = std::max<int64_t>(1, (num_blocks + limit - 1) / limit);
  const int64_t size = (num_blocks + num_ranges - 1) / num_ranges;  // all alike but the last
  cut(pieces, first_piece, int32_t(size), ranges);
  return num_blocks;
}

WorkList::WorkList(const Attention& call) {
  const StepPlan& plan = call.plan;
  for (int64_t sequence = 0; sequence < plan.num_seqs; ++sequence) {
    const int num_tokens = plan.query_start[sequence + 1] - plan.query_start[sequence];
    const int num_rows = num_tokens * call.group();
    for (int row = 0; row < num_rows; row += kTileRows) {
      add_tile(call, sequence, row, std::min(kTileRows, num_rows - row));
    }
  }
}

void WorkList::add_tile(const Attention& call, int64_t sequence, int first_row, int num_rows) {
  const int group = call.group();
  const int32_t* position = call.plan.query_position + call.plan.query_start[sequence];
  const auto [least, most] = std::minmax_element(position + first_row / group,
                                                 position + (first_row + num_rows - 1) / group + 1);
  const bool few = num_rows <= kFewRows;
  const int first_range = int(ranges.size());
  const int64_t num_blocks = cut_ranges(call,
                                        sequence,
                                        *least,
                                        *most,
                                        few ? kLeastRangeTokensFew : kRangeTokensMany,
                                        few ? kRangeTokensFew : kRangeTokensMany,
                                        pieces,
                                        ranges);
  const int heads = few ? heads_of_unit(call.cache, num_rows) : 1;
  const int num_ranges = int(ranges.size()) - first_range;
  for (int range = first_range; range < int(ranges.size()); ++range) {
    for (int kv_head = 0; kv_head < call.cache.num_kv_heads; kv_head += heads) {
      units.push_back({int(tiles.size()), range, kv_head});
    }
  }
  const int groups = call.cache.num_kv_heads / heads;
  tiles.push_back({sequence,
                   first_row,
                   num_rows,
                   heads,
                   num_ranges,
                   first_range,
                   int(units.size()) - num_ranges * groups,
                   num_groups});
  num_groups += groups;
  // Widening and reading K and V weigh like 8 rows.
  work += num_blocks * call.cache.block_size * call.cache.head_dim * (num_rows + 8) *
          call.cache.num_kv_heads;
}

Tile WorkList::tile(const Attention& call, int index, int kv_head, int num_kv_heads) const {
  const RowTile& tile = tiles[index];
  return {&call,
          call.plan.query_start[tile.sequence],
          tile.first_row,
          tile.num_rows,
          kv_head,
          num_kv_heads};
}

}  // namespace memkv
