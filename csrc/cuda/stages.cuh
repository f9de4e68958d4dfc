// How a worker walks its range: unit after unit, stage after stage.
#pragma once

#include "work.h"

namespace memkv::cuda {

// Stages of a tile, one after the other; a run is the stages of one segment, or of several.
class StageCursor {
 public:
  int run;  // in the tile, as the segment in the sequence

  __device__ __forceinline__ StageCursor(const Work& work, int first_run, int num_runs, int stage)
      : run(0), work_(work), first_run_(first_run), at_{}, end_(0) {
    const int lane = threadIdx.x % 32;
    for (int base = 0; base < num_runs; base += 31) {  // a lane's run ends where the next begins
      const StageRun mine = work.runs[first_run + min(base + lane, num_runs)];
      const int end = __shfl_down_sync(0xffffffffu, mine.stages_before, 1);
      const unsigned found = __ballot_sync(0xffffffffu, lane < 31 && end > stage);
      if (found == 0) continue;
      const int of = __ffs(found) - 1;
      run = base + of;
      end_ = __shfl_sync(0xffffffffu, end, of);
      at_ = {__shfl_sync(0xffffffffu, mine.stages_before, of),
             __shfl_sync(0xffffffffu, mine.first_stage, of),
             __shfl_sync(0xffffffffu, mine.first_entry, of),
             __shfl_sync(0xffffffffu, mine.num_tokens, of),
             __shfl_sync(0xffffffffu, mine.position, of),
             __shfl_sync(0xffffffffu, mine.stored_position, of),
             __shfl_sync(0xffffffffu, mine.index, of),
             0};
      return;
    }
  }

  // Moves to the run that holds the stage; true if that is another one. Never goes back.
  __device__ __forceinline__ bool enter(int stage) {
    if (stage < end_) return false;
    do {
      ++run;
      at_ = work_.runs[first_run_ + run];
      end_ = work_.runs[first_run_ + run + 1].stages_before;
    } while (stage >= end_);
    return true;
  }

  __device__ __forceinline__ int stage_of_segment(int stage) const {
    return at_.first_stage + stage - at_.stages_before;
  }
  __device__ __forceinline__ Segment segment() const { return at_.segment(); }
  __device__ __forceinline__ int segment_index() const { return at_.index; }

 private:
  const Work& work_;
  int first_run_;
  StageRun at_;
  int end_;
};

// From the end of a unit to the next, over tiles that see nothing; from the last tile of a kv head
// to the first of the next.
__device__ __forceinline__ void next_unit(const Work& work,
                                          int num_tiles,
                                          RangeStart& at,
                                          int range_end) {
  at.stage = 0;
  at.unit_begin += at.of.unit_length;
  if (at.unit_begin >= range_end) return;
  do {
    if (++at.tile == num_tiles) {
      at.tile = 0;
      ++at.kv_head;
    }
    at.of = work.tiles[at.tile];
  } while (at.of.unit_length == 0);
}

// Behind the part of a range that was of one unit. `start` is the warp's own.
__device__ __forceinline__ void next_part(const Work& work, RangeStart& start, int range_end) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) next_unit(work, work.header->num_tiles, start, range_end);
  __syncwarp();
}

// Where a range ends, in all units.
__device__ __forceinline__ int end_of_range(const WorkHeader& header, int range) {
  return min((range + 1) * header.range_length, header.length);
}

// Where a warp is in its block's ranges; in shared memory, as registers are short.
struct RangeWalk {
  RangeStart start;
  int32_t range, range_end;
  int32_t end;  // of this part of the unit, which begins at start.stage
  WorkHeader header;
  int32_t unused[3];
};

// Calls visit() for the part of a unit that this block has, for one unit after the other. Every warp
// that calls it has a walk of its own.
template <typename Visit>
__device__ __forceinline__ void for_each_part(const Work& work,
                                              RangeWalk& walk,
                                              const Visit& visit) {
  constexpr int kStartInts = sizeof(RangeStart) / 4;
  const QueryTile& tile = walk.start.of;
  if (lane_again() == 0) walk.header = *work.header;
  __syncwarp();
  for (int first = blockIdx.x; first < walk.header.num_ranges;
       first = walk.range + blocks_again()) {
    const int lane = lane_again();
    if (lane < kStartInts) {
      reinterpret_cast<int32_t*>(&walk.start)[lane] =
          reinterpret_cast<const int32_t*>(work.ranges + first)[lane];
    }
    if (lane == 0) {
      walk.range = first;
      walk.range_end = end_of_range(walk.header, first);
    }
    __syncwarp();
    while (walk.start.unit_begin < walk.range_end) {
      if (lane_again() == 0)
        walk.end = min(tile.num_stages, walk.range_end - walk.start.unit_begin);
      __syncwarp();
      visit();
      __syncwarp();
      if (lane_again() == 0) next_unit(work, walk.header.num_tiles, walk.start, walk.range_end);
      __syncwarp();
    }
  }
}

}  // namespace memkv::cuda
