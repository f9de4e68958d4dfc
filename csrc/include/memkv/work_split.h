// How a step is cut for a GPU: tiles of query rows, stages of keys, equal ranges for its workers.
//
//     tile     up to tile_rows query rows of one sequence; it has a unit for each kv head
//     stage    stage_tokens tokens of one segment, loaded together
//     run      the stages of one segment that some row of the tile sees; for many rows (packed_runs.h)
//              those of all segments that turn a query alike
//
//     segments of a sequence   [0 1 2 3][4 5 6 7 8 9][10 11]        stage 0 is not visible
//     runs of a tile           [  1 2 3][4 5 6 7 8 9][10 11]        stages_before: 0, 3, 9, 11
//     units, laid end to end   |..tile 0, head 0  |..tile 1, head 0  |..tile 0, head 1 |...
//     flat ranges              |----- 0 -----|----- 1 -----|----- 2 -----|--...    range_length each
//     whole ranges             |- 0 --|- 1 --|- 2 --|- 3 --|- 4 --|- 5 --|...       within a unit each
//
// A worker takes a range, or some in turn. Flat ranges are alike but for the last, wherever they begin
// and end: no worker waits for another because its sequence is longer, but most have parts of two
// units, and begin and end twice. Whole ranges have part of one unit: better where units divide evenly
// among the workers, which the planner looks for. Units of a kv head lie together, so that workers are
// in the same heads at a time. What two ranges find of one unit are partials, merged in the order of
// the ranges. In front of each unit of a flat cut `lead` stages are left free, for what it takes to
// begin and to end one.
#pragma once

#include <cstdint>

#include "memkv/host_device.h"
#include "memkv/segment.h"

namespace memkv {

struct WorkShape {
  int32_t tile_rows;
  int32_t stage_tokens;  // a multiple of the block size
  int32_t group;         // query heads of a kv head
  int32_t num_kv_heads;
  int32_t window;
  int32_t least_rows, most_rows;  // sequences with fewer or more rows are left to another kernel
  int32_t workers;                // at a time, with a processor each
  int32_t max_ranges;             // however they are cut
  int32_t flat_ranges;            // of a flat cut
  int32_t whole_ranges;           // of a whole one; 0: the cut is flat
  int32_t least_range;            // stages that a worker's warps read at once: no range is shorter
  int32_t fixed_range;  // stages of every range, each within one unit; 0: as balance wants it
  int32_t lead;         // what a unit costs beside its stages, in stages; 0 where ranges are fixed
  int32_t part_cost;    // what a worker's second unit costs, in stages
};

struct alignas(16) QueryTile {
  int32_t first_token, first_head;  // of row 0: in q, in the group; rows go on head by head
  int32_t num_rows;
  int32_t first_segment, num_runs;
  int32_t first_run;
  int32_t num_stages;                     // of each unit
  int32_t unit_length;                    // with its lead, or rounded up to whole ranges
  int32_t least_position, most_position;  // of its rows
  int32_t kept_row;                       // of first_token, where rows are kept to be joined
  int32_t index;                          // of the sequence's tiles
};

struct alignas(16) StageRun {
  int32_t stages_before;  // of this run, in the tile
  int32_t first_stage;    // in the segment
  int32_t first_entry;    // of the segment, in block_ids; of several, in PackedSegments::blocks
  int32_t num_tokens;     // and the rest of the segment, so that nothing has to wait for it; of
                          // several, as if all blocks were full
  int32_t position, stored_position;
  int32_t index;  // of the segment, or of the first of several, among all
  int32_t unused;

  MEMKV_HD Segment segment() const { return {first_entry, num_tokens, position, stored_position}; }
};

// A block of a segment, where stages hold blocks of several.
struct alignas(16) StageBlock {
  int32_t block;       // of the pool
  int32_t position;    // of its first token
  int32_t num_tokens;  // that are used; 0: no block
  int32_t entry;       // in block_ids
};

struct WorkHeader {
  int32_t num_tiles;
  int32_t num_blind_tiles;  // that see no key
  int32_t length;           // of all units
  int32_t range_length;
  int32_t num_ranges;
};

struct alignas(16) RangeStart {
  int32_t tile, kv_head, stage;
  int32_t unit_begin;  // of that unit's first stage, in all units
  QueryTile of;        // the tile, so that nothing has to wait for it
};

// Where the partials of a unit are: one for each range that has a part of it.
struct UnitParts {
  int32_t first_range;
  int32_t count;
  int32_t first_slot;

  // A range has at most two units that it shares: the one it begins in and the one it ends in.
  MEMKV_HD int32_t slot(int32_t part) const {
    return part == 0 ? first_slot : 2 * (first_range + part);
  }
};

MEMKV_HD int32_t divide_up(int64_t a, int64_t b) { return int32_t((a + b - 1) / b); }

MEMKV_HD int32_t tiles_of(const WorkShape& shape, int32_t num_query_tokens) {
  const int64_t rows = int64_t{num_query_tokens} * shape.group;
  return rows < shape.least_rows || rows > shape.most_rows ? 0 : divide_up(rows, shape.tile_rows);
}

// Rows of each tile of a sequence but the last: as few as so many tiles need, by 64 where tiles are
// large, since rows are multiplied by 64.
MEMKV_HD int32_t rows_of_tiles(const WorkShape& shape, int64_t num_rows) {
  const int32_t step = shape.tile_rows % 64 == 0 ? 64 : shape.tile_rows;
  return divide_up(divide_up(num_rows, divide_up(num_rows, shape.tile_rows)), step) * step;
}

struct Stages {
  int32_t first, count;
};

// Of a segment, for rows at positions [least, most].
MEMKV_HD Stages visible_stages(const WorkShape& shape,
                               const Segment& segment,
                               int32_t least_position,
                               int32_t most_position) {
  const int32_t begin = visible_tokens(segment, least_position, shape.window).begin;
  const int32_t end = visible_tokens(segment, most_position, shape.window).end;
  if (begin >= end) return {0, 0};
  const int32_t first = begin / shape.stage_tokens;
  return {first, (end - 1) / shape.stage_tokens + 1 - first};
}

MEMKV_HD int32_t round_up(int32_t x, int32_t step) { return divide_up(x, step) * step; }

// Where ranges are flat or fixed.
MEMKV_HD int32_t unit_length(const WorkShape& shape, int32_t num_stages) {
  if (num_stages == 0) return 0;
  return shape.fixed_range > 0 ? round_up(num_stages, shape.fixed_range) : num_stages + shape.lead;
}

// Of a flat cut, or a fixed one.
MEMKV_HD int32_t range_length(const WorkShape& shape, int32_t length) {
  if (shape.fixed_range > 0) return shape.fixed_range;
  const int32_t balanced = divide_up(length, shape.flat_ranges);
  return balanced > shape.least_range ? balanced : shape.least_range;
}

// The lengths of whole ranges that are worth trying: as long as it takes at least, and no longer than
// what a flat cut costs. The shortest at which the units of a kv head make no more than `ranges` is
// the best.
struct WholeLengths {
  int32_t least, most, ranges;
};

// length: of all units, as for a flat cut; stages: of the units of a kv head, without leads.
MEMKV_HD WholeLengths whole_lengths(const WorkShape& shape, int32_t length, int32_t stages) {
  const int32_t ranges = shape.whole_ranges / shape.num_kv_heads;
  if (ranges == 0) return {1, 0, 0};
  const int32_t balanced = divide_up(stages, ranges);
  const int32_t flat = divide_up(length, shape.workers);
  const int32_t flat_cost =
      (flat > shape.least_range ? flat : shape.least_range) + flat / 32 + shape.part_cost;
  return {balanced > shape.least_range ? balanced : shape.least_range,
          flat_cost / divide_up(shape.whole_ranges, shape.workers) - shape.lead,
          ranges};
}

// unit_begin: of the unit's first stage.
MEMKV_HD UnitParts parts_of(int32_t unit_begin, int32_t num_stages, int32_t range_length) {
  const int32_t first = unit_begin / range_length;
  const int32_t last = (unit_begin + num_stages - 1) / range_length;
  return {first, last - first + 1, 2 * first + (unit_begin % range_length != 0 ? 1 : 0)};
}

}  // namespace memkv
