// What the planner leaves for the kernels of a step, in device memory.
#pragma once

#include <cstdint>

#include "memkv/attention_args.h"
#include "memkv/work_split.h"

namespace memkv::cuda {

struct Work {
  WorkShape shape;
  WorkHeader* header;
  QueryTile* tiles;     // [max_tiles]
  int32_t* unit_begin;  // [max_tiles + 1], of a tile's first unit, in all units
  StageRun* runs;       // [max_runs]
  RangeStart* ranges;   // [max_ranges]
  int32_t* arrived;     // [max_tiles, num_kv_heads], 0 between calls
  int32_t* first_tile;  // [num_seqs], of a sequence; for the planner
  int32_t* first_run;   // [num_seqs]
  float* partials;      // [2 * max_ranges] of partial_floats()
  int32_t max_tiles;
  uint32_t group_magic;  // x / group is x * group_magic >> 16, for x up to a tile's rows and heads
  int32_t grid;          // blocks of threads
  int32_t warps;         // of a block, and stages of a warp's ring: for few queries
  int32_t stages;
};

// A partial: out [tile_rows, head_dim], then a RowSums for each row.
MEMKV_HD int64_t partial_floats(int tile_rows, int head_dim) {
  return int64_t{tile_rows} * (head_dim + 4);
}

}  // namespace memkv::cuda
