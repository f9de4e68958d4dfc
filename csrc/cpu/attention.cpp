// Runs a call: cut it into units, attend each, merge the ranges of a tile in order, write the tile
// out. With block_mass a second pass scores once more, now that each row's sum is known: the work
// of half an attention, and no memory that grows with rows * blocks.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "dispatch.h"
#include "thread_pool.h"
#include "work_list.h"
#include "workspace.h"

namespace memkv {
namespace {

// Waking the pool costs some 20 us: as much as so many multiply-adds.
constexpr int64_t kWorthWaking = 1 << 20;

void* thread_workspace(const AttentionKernels& set, int head_dim) {
  thread_local Workspace workspace;
  return workspace.at_least(set.workspace_bytes(head_dim));
}

class Run {
 public:
  explicit Run(const Attention& call)
      : call_(call),
        set_(kernels()),
        list_(call),
        unfinished_(new std::atomic<int>[list_.num_groups]) {
    for (const RowTile& tile : list_.tiles) {
      for (int group = 0; group < num_groups(tile); ++group) {
        unfinished_[tile.first_group + group] = tile.num_ranges;
      }
    }
    if (call.block_mass != nullptr) {
      row_state_.resize(list_.tiles.size() * call.cache.num_kv_heads * kTileRows);
    }
  }

  void attend() {
    place_partials();
    const int threads = num_threads();
    run(int64_t(list_.units.size()),
        [this, threads](int64_t unit) { attend_unit(int(unit), preview(unit, unit + threads)); });
  }

  void add_mass() {
    std::vector<Piece> pieces;
    std::vector<Range> ranges;
    std::vector<std::pair<int, int>> tiles_of_range;
    for (size_t first = 0, end; first < list_.tiles.size(); first = end) {
      const int64_t sequence = list_.tiles[first].sequence;
      end = first;
      while (end < list_.tiles.size() && list_.tiles[end].sequence == sequence) ++end;
      const int32_t* position = call_.plan.query_position;
      const auto [least, most] =
          std::minmax_element(position + call_.plan.query_start[sequence],
                              position + call_.plan.query_start[sequence + 1]);
      cut_ranges(
          call_, sequence, *least, *most, kLeastRangeTokensFew, kRangeTokensFew, pieces, ranges);
      tiles_of_range.resize(ranges.size(), {int(first), int(end)});
    }
    const int num_kv_heads = call_.cache.num_kv_heads;
    run(int64_t(ranges.size()) * num_kv_heads, [&](int64_t task) {
      const Range& range = ranges[task / num_kv_heads];
      const int kv_head = int(task % num_kv_heads);
      const auto [first, end] = tiles_of_range[task / num_kv_heads];
      for (int tile = first; tile < end; ++tile) {
        set_.add_mass(list_.tile(call_, tile, kv_head, 1),
                      pieces.data() + range.first_piece,
                      range.num_pieces,
                      row_states(tile, kv_head),
                      thread_workspace(set_, call_.cache.head_dim));
      }
    });
  }

 private:
  template <typename Work>
  void run(int64_t count, Work work) {
    if (list_.work < kWorthWaking) {
      for (int64_t i = 0; i < count; ++i) work(i);
    } else {
      parallel_for(count, work);
    }
  }

  int num_groups(const RowTile& tile) const {
    return call_.cache.num_kv_heads / tile.heads_of_unit;
  }

  int rows_of_unit(const RowTile& tile) const { return tile.num_rows * tile.heads_of_unit; }

  size_t partial_floats(const RowTile& tile) const {
    return size_t(rows_of_unit(tile)) * (2 + call_.cache.head_dim);
  }

  // One partial for each unit of the tiles that are cut; a tile that is not has one in its thread's
  // own memory.
  void place_partials() {
    size_t floats = 0;
    for (const Unit& unit : list_.units) {
      const RowTile& tile = list_.tiles[unit.tile];
      partial_at_.push_back(floats);
      if (tile.num_ranges > 1) floats += partial_floats(tile);
    }
    thread_local Workspace partials;
    partials_ = static_cast<float*>(partials.at_least(floats * sizeof(float)));
  }

  Partial partial_in(float* floats, const RowTile& tile) const {
    static_assert(sizeof(SoftmaxState<float>) == 2 * sizeof(float));
    return {reinterpret_cast<SoftmaxState<float>*>(floats), floats + 2 * rows_of_unit(tile)};
  }

  Partial partial(int unit) const {
    return partial_in(partials_ + partial_at_[unit], list_.tiles[list_.units[unit].tile]);
  }

  SoftmaxState<float>* row_states(int tile, int kv_head) {
    return row_state_.data() + (int64_t{tile} * call_.cache.num_kv_heads + kv_head) * kTileRows;
  }

  // The first blocks of the unit that this thread will probably take next.
  Preview preview(int64_t unit, int64_t next) const {
    if (next >= int64_t(list_.units.size())) return {nullptr, 0, 0};
    const Unit& after = list_.units[next];
    const Range& range = list_.ranges[after.range];
    const int heads = list_.tiles[list_.units[unit].tile].heads_of_unit;
    if (range.num_pieces == 0 || list_.tiles[after.tile].heads_of_unit != heads) {
      return {nullptr, 0, 0};
    }
    const Piece& piece = list_.pieces[range.first_piece];
    const int32_t* ids = call_.plan.block_ids + call_.plan.segments[piece.segment].first_entry;
    return {ids + piece.first_block, piece.end_block - piece.first_block, after.kv_head};
  }

  void attend_unit(int index, const Preview& preview) {
    const Unit& unit = list_.units[index];
    const RowTile& cut = list_.tiles[unit.tile];
    const Range& range = list_.ranges[unit.range];
    const Tile tile = list_.tile(call_, unit.tile, unit.kv_head, cut.heads_of_unit);
    Partial found;
    if (cut.num_ranges > 1) {
      found = partial(index);
    } else {
      thread_local Workspace own;
      const size_t bytes = partial_floats(cut) * sizeof(float);
      found = partial_in(static_cast<float*>(own.at_least(bytes)), cut);
    }
    set_.attend(tile,
                list_.pieces.data() + range.first_piece,
                range.num_pieces,
                preview,
                found,
                thread_workspace(set_, call_.cache.head_dim));
    // Whoever finishes the last range of a tile's group merges all of them, in order.
    const int group = unit.kv_head / cut.heads_of_unit;
    std::atomic<int>& unfinished = unfinished_[cut.first_group + group];
    if (unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    if (cut.num_ranges > 1) found = merge(cut, group);
    set_.finish(tile, found);
    for (int head = 0; head < cut.heads_of_unit && !row_state_.empty(); ++head) {
      std::copy_n(found.state + head * cut.num_rows,
                  cut.num_rows,
                  row_states(unit.tile, unit.kv_head + head));
    }
  }

  Partial merge(const RowTile& tile, int group) const {
    std::vector<Partial> partials;
    for (int range = 0; range < tile.num_ranges; ++range) {
      partials.push_back(partial(tile.first_unit + range * num_groups(tile) + group));
    }
    set_.merge(partials.data(), tile.num_ranges, rows_of_unit(tile), call_.cache.head_dim);
    return partials[0];
  }

  const Attention& call_;
  const AttentionKernels& set_;
  const WorkList list_;
  std::unique_ptr<std::atomic<int>[]> unfinished_;  // ranges, of each group of each tile
  std::vector<size_t> partial_at_;                  // of each unit, in partials_
  float* partials_ = nullptr;
  std::vector<SoftmaxState<float>> row_state_;  // [tile][kv_head][kTileRows], for the mass
};

}  // namespace

void paged_attention(const Attention& call) {
  Run run(call);
  run.attend();
  if (call.block_mass != nullptr) run.add_mass();
}

}  // namespace memkv
