// Runs a call: cut it into tiles and ranges, attend each range, merge the ranges of a tile in
// order, write the tile out. With block_mass a second pass scores once more, now that each row's
// sum is known: the work of half an attention, and no memory that grows with rows * blocks.
#include "attention.h"

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
        num_kv_heads_(call.cache.num_kv_heads),
        unfinished_(new std::atomic<int>[list_.tiles.size() * num_kv_heads_]) {
    for (size_t tile = 0; tile < list_.tiles.size(); ++tile) {
      for (int kv_head = 0; kv_head < num_kv_heads_; ++kv_head) {
        unfinished_[tile * num_kv_heads_ + kv_head] = list_.tiles[tile].num_ranges;
      }
    }
    if (call.block_mass != nullptr) {
      row_state_.resize(list_.tiles.size() * num_kv_heads_ * kTileRows);
    }
  }

  void attend() {
    place_partials();
    run(int64_t(list_.ranges.size()) * num_kv_heads_, [this](int64_t unit) {
      attend_range(int(unit / num_kv_heads_), int(unit % num_kv_heads_));
    });
  }

  void add_mass() {
    std::vector<Piece> pieces;
    std::vector<Range> ranges;
    std::vector<std::pair<int, int>> tiles_of_range;
    const StepPlan& plan = call_.plan;
    for (size_t first = 0, end; first < list_.tiles.size(); first = end) {
      const int64_t sequence = list_.tiles[first].sequence;
      end = first;
      while (end < list_.tiles.size() && list_.tiles[end].sequence == sequence) ++end;
      int32_t least = INT32_MAX, most = 0;
      for (int32_t i = plan.query_start[sequence]; i < plan.query_start[sequence + 1]; ++i) {
        least = std::min(least, plan.query_position[i]);
        most = std::max(most, plan.query_position[i]);
      }
      const int range_blocks = kRangeTokensFew / call_.cache.block_size;
      cut_ranges(call_, sequence, least, most, range_blocks, pieces, ranges);
      tiles_of_range.resize(ranges.size(), {int(first), int(end)});
    }
    run(int64_t(ranges.size()) * num_kv_heads_, [&](int64_t unit) {
      const Range& range = ranges[unit / num_kv_heads_];
      const int kv_head = int(unit % num_kv_heads_);
      const auto [first, end] = tiles_of_range[unit / num_kv_heads_];
      for (int tile = first; tile < end; ++tile) {
        set_.add_mass(list_.tile(call_, tile, kv_head),
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
    if (list_.work * num_kv_heads_ < kWorthWaking) {
      for (int64_t i = 0; i < count; ++i) work(i);
    } else {
      parallel_for(count, work);
    }
  }

  // One partial for each range and kv head of the tiles that are cut, and for each tile that is not
  // one in the thread's own memory.
  void place_partials() {
    size_t floats = 0;
    for (size_t range = 0; range < list_.ranges.size(); ++range) {
      const RowTile& tile = list_.tiles[list_.tile_of_range[range]];
      partial_at_.push_back(floats);
      if (tile.num_ranges > 1) floats += num_kv_heads_ * partial_floats(tile.num_rows);
    }
    thread_local Workspace partials;
    partials_ = static_cast<float*>(partials.at_least(floats * sizeof(float)));
  }

  size_t partial_floats(int num_rows) const {
    return size_t(num_rows) * (2 + call_.cache.head_dim);
  }

  Partial partial_in(float* floats, int num_rows) const {
    static_assert(sizeof(SoftmaxState<float>) == 2 * sizeof(float));
    return {reinterpret_cast<SoftmaxState<float>*>(floats), floats + 2 * num_rows};
  }

  Partial partial(int range, int kv_head) const {
    const int num_rows = list_.tiles[list_.tile_of_range[range]].num_rows;
    return partial_in(partials_ + partial_at_[range] + kv_head * partial_floats(num_rows),
                      num_rows);
  }

  SoftmaxState<float>* row_states(int tile, int kv_head) {
    return row_state_.data() + (int64_t{tile} * num_kv_heads_ + kv_head) * kTileRows;
  }

  void attend_range(int range, int kv_head) {
    const int index = list_.tile_of_range[range];
    const RowTile& cut = list_.tiles[index];
    const Tile tile = list_.tile(call_, index, kv_head);
    Partial found;
    if (cut.num_ranges > 1) {
      found = partial(range, kv_head);
    } else {
      thread_local Workspace own;
      const size_t bytes = partial_floats(cut.num_rows) * sizeof(float);
      found = partial_in(static_cast<float*>(own.at_least(bytes)), cut.num_rows);
    }
    set_.attend(tile,
                list_.pieces.data() + list_.ranges[range].first_piece,
                list_.ranges[range].num_pieces,
                found,
                thread_workspace(set_, call_.cache.head_dim));
    // Whoever finishes a tile's last range merges all of them, in order.
    std::atomic<int>& unfinished = unfinished_[int64_t{index} * num_kv_heads_ + kv_head];
    if (unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    if (cut.num_ranges > 1) found = merge(cut, kv_head);
    set_.finish(tile, found);
    if (!row_state_.empty()) {
      std::copy_n(found.state, cut.num_rows, row_states(index, kv_head));
    }
  }

  Partial merge(const RowTile& tile, int kv_head) const {
    std::vector<Partial> partials;
    for (int i = 0; i < tile.num_ranges; ++i) {
      partials.push_back(partial(tile.first_range + i, kv_head));
    }
    set_.merge(partials.data(), tile.num_ranges, tile.num_rows, call_.cache.head_dim);
    return partials[0];
  }

  const Attention& call_;
  const AttentionKernels& set_;
  const WorkList list_;
  const int num_kv_heads_;
  std::unique_ptr<std::atomic<int>[]> unfinished_;  // ranges, of each tile and kv head
  std::vector<size_t> partial_at_;                  // of each range, in partials_
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
