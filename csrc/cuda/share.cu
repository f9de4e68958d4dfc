// Plans what several sequences of a step read together: groups of segments that map the same blocks
// (shared_groups.h), the rows of each group, their tiles, equal ranges.
//
// One block of threads, once for all layers of a step that have the same window, in front of the
// planner of the sequences' own tiles. Only sequences of few rows take part: a tile of many rows
// reads its blocks once for all of them as it is.
#include "launch.h"
#include "memkv/shared_groups.h"
#include "plan.cuh"

namespace memkv::cuda {
namespace {

// What is known of each segment.
struct Segments {
  uint32_t keys[kMostSharedSegments];
  int32_t leaders[kMostSharedSegments];
  int32_t tokens[kMostSharedSegments];        // of its sequence's queries
  int32_t group_tokens[kMostSharedSegments];  // of a leader's group
  int32_t group_tile[kMostSharedSegments];    // its first
};
static_assert(sizeof(Segments) <= 46 * 1024);

// Calls visit(sequence, segment) for the segments of sequences that take part, a thread for each.
template <typename Visit>
__device__ __forceinline__ void for_each_segment(const StepPlan& plan,
                                                 const WorkShape& shape,
                                                 const Visit& visit) {
  for (int64_t sequence = threadIdx.x / 32; sequence < plan.num_seqs; sequence += kPlanWarps) {
    const int32_t rows =
        (plan.query_start[sequence + 1] - plan.query_start[sequence]) * shape.group;
    if (rows < shape.least_rows || rows > shape.most_rows) continue;
    const int32_t end = plan.segment_start[sequence + 1];
    for (int32_t i = plan.segment_start[sequence] + threadIdx.x % 32; i < end; i += 32) {
      visit(sequence, i);
    }
  }
  __syncthreads();
}

__device__ int32_t seen_at_most(const WorkShape& shape, const Segment& segment) {
  return shape.window > 0 ? min(segment.num_tokens, shape.window) : segment.num_tokens;
}

__device__ void plan_group_tile(const StepPlan& plan,
                                const Work& work,
                                const Segment& segment,
                                int32_t leader,
                                int32_t first_row,
                                int32_t num_rows,
                                int32_t first_shared_row,
                                int32_t tile) {
  const WorkShape& shape = work.shape;
  int32_t least = INT32_MAX, most = INT32_MIN;
  for (int32_t token = first_row / shape.group + threadIdx.x % 32;
       token <= (first_row + num_rows - 1) / shape.group;
       token += 32) {
    const int32_t position = work.shared.rows[first_shared_row + token].position;
    least = min(least, position);
    most = max(most, position);
  }
  for (int step = 16; step > 0; step /= 2) {
    least = min(least, __shfl_xor_sync(kPlanLanes, least, step));
    most = max(most, __shfl_xor_sync(kPlanLanes, most, step));
  }
  const Segment at_zero{segment.first_entry, segment.num_tokens, 0, 0};
  const PackedSegments& packed = work.packed;
  if (first_row == 0) {
    const int32_t blocks = divide_up(segment.num_tokens, packed.block_size);
    for (int32_t block = threadIdx.x % 32; block < blocks; block += 32) {
      packed.blocks[segment.first_entry + block] =
          stage_block(at_zero, plan.block_ids, block, packed.block_size);
    }
  }
  if (threadIdx.x % 32 != 0) return;
  const Stages stages = visible_stages(shape, at_zero, least, most);
  const int32_t tokens = divide_up(segment.num_tokens, packed.block_size) * packed.block_size;
  work.runs[2 * tile] = {0, stages.first, segment.first_entry, tokens, 0, 0, leader, 0};
  work.runs[2 * tile + 1] = {stages.count, 0, 0, 0, 0, 0, 0, 0};
  work.tiles[tile] = {first_shared_row + first_row / shape.group,
                      first_row % shape.group,
                      num_rows,
                      leader,
                      1,
                      2 * tile,
                      stages.count,
                      unit_length(shape, stages.count),
                      least,
                      most,
                      first_shared_row + first_row / shape.group,
                      0};
}

__global__ void __launch_bounds__(kPlanThreads, 1)
    share_kernel(StepPlan plan, Work work, int block_size, ShareRule rule) {
  __shared__ Segments of;
  const WorkShape& shape = work.shape;
  int32_t* const slots = work.shared.slots;
  const int32_t num_segments = plan.segment_start[plan.num_seqs];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto shares = [&](int32_t leader) {
    return leader >= 0 && of.group_tokens[leader] * shape.group >= rule.least_rows;
  };

  // 1. Segments with the same blocks have the same key.
  for (int32_t i = threadIdx.x; i < num_segments; i += kPlanThreads) {
    of.keys[i] = kNoKey;
    of.tokens[i] = of.group_tokens[i] = 0;
    slots[i] = -1;
  }
  __syncthreads();
  for_each_segment(plan, shape, [&](int64_t sequence, int32_t i) {
    of.keys[i] = share_key(plan.segments[i], plan.block_ids);
    of.tokens[i] = plan.query_start[sequence + 1] - plan.query_start[sequence];
  });

  // 2. Groups: a leader, and who has all its blocks.
  for (int32_t i = threadIdx.x; i < num_segments; i += kPlanThreads) {
    of.leaders[i] = leader_of(of.keys, i);
  }
  __syncthreads();
  for (int32_t i = warp; i < num_segments; i += kPlanWarps) {
    const int32_t leader = of.leaders[i];
    if (leader < 0 || leader == i) continue;
    const bool same =
        same_blocks(plan.segments[i], plan.segments[leader], plan.block_ids, block_size, lane, 32);
    if (!__all_sync(kPlanLanes, same) && lane == 0) of.leaders[i] = -1;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < num_segments; i += kPlanThreads) {
    if (of.leaders[i] >= 0) atomicAdd(of.group_tokens + of.leaders[i], of.tokens[i]);
  }
  __syncthreads();

  // 3. Whether it is worth it, and where each group's rows and tiles are.
  int32_t saved = 0, num_rows = 0, num_tiles = 0;
  for (int32_t base = 0; base < num_segments; base += kPlanThreads) {
    const int32_t i = base + threadIdx.x;
    const int32_t leader = i < num_segments ? of.leaders[i] : -1;
    const bool leads = leader == i && shares(leader);
    const int32_t tokens = leads ? of.group_tokens[i] : 0;
    const int32_t tiles = divide_up(int64_t{tokens} * shape.group, shape.tile_rows);
    int32_t all_saved, all_tokens, all_tiles;
    block_scan(leader != i && shares(leader) ? seen_at_most(shape, plan.segments[i]) : 0,
               all_saved);
    const int32_t row = block_scan(tokens, all_tokens), tile = block_scan(tiles, all_tiles);
    if (leads) {
      slots[i] = num_rows + row;  // of the leader first; the others' follow from it
      of.group_tile[i] = num_tiles + tile;
    }
    saved += all_saved;
    num_rows += all_tokens;
    num_tiles += all_tiles;
  }
  if (saved < rule.least_saved) num_tiles = 0;
  __syncthreads();

  // 4. Rows, then tiles.
  for_each_segment(plan, shape, [&](int64_t sequence, int32_t i) {
    const int32_t leader = of.leaders[i];
    if (num_tiles == 0 || !shares(leader)) {
      slots[i] = -1;
      return;
    }
    const int32_t slot = slots[leader] + tokens_before(of.leaders, of.tokens, i);
    if (leader != i) slots[i] = slot;
    const int32_t first = plan.query_start[sequence], at = plan.segments[i].position;
    for (int32_t token = 0; token < of.tokens[i]; ++token) {
      work.shared.rows[slot + token] = {
          first + token, plan.query_position[first + token] - at, i, 0};
    }
  });
  for (int32_t i = warp; num_tiles > 0 && i < num_segments; i += kPlanWarps) {
    if (of.leaders[i] != i || !shares(i)) continue;
    const int32_t rows = of.group_tokens[i] * shape.group;
    int32_t tile = of.group_tile[i];
    const int32_t most = rows_of_tiles(shape, rows);
    for (int32_t row = 0; row < rows; row += most) {
      plan_group_tile(
          plan, work, plan.segments[i], i, row, min(most, rows - row), slots[i], tile++);
    }
  }
  __syncthreads();
  cut_into_ranges(work, num_tiles);
}

}  // namespace

void plan_shared(
    const StepPlan& plan, const Work& work, int block_size, const ShareRule& rule, Stream stream) {
  share_kernel<<<1, kPlanThreads, 0, cudaStream_t(stream)>>>(plan, work, block_size, rule);
  check_launch("plan_shared");
}

}  // namespace memkv::cuda
