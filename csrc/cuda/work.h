// What the planner leaves for the kernels of a step, in device memory.
#pragma once

#include <cstdint>

#include "memkv/attention_args.h"
#include "memkv/packed_runs.h"
#include "memkv/work_split.h"

namespace memkv::cuda {

// A query token of a sequence that reads a segment together with others.
struct alignas(16) SharedRow {
  int32_t token;     // row of q
  int32_t position;  // of the token, where the segment's first token is at 0
  int32_t segment;   // of the sequence's own
  int32_t unused;
};

// Segments of different sequences that map the same blocks, at whatever positions, are a group:
//
//     sequence 0   [ A ][ B ][ own 0 ]        group 0   A: rows of sequences 0 and 1
//     sequence 1   [ B ][ A ][ own 1 ]        group 1   B: rows of sequences 0, 1 and 2
//     sequence 2   [ C ][ B ][ own 2 ]
//
// A group's blocks are read once for all its rows, each turned as its own segment asks.
struct SharedSegments {
  int32_t* slots;   // [num_segments], of a segment's first row in `rows`; -1: its sequence reads it
                    // alone. Null: nothing is shared
  SharedRow* rows;  // [own_rows], group after group
  float* kept;      // [kept_rows, num_heads, head_dim], then [kept_rows, num_heads] of RowSums
  int32_t own_rows;  // where in `kept` those begin that sequences found alone
  int32_t kept_rows;
  int32_t tile_tokens;  // from the first of a sequence's to the next's
  bool of_groups;       // the tiles of this work are of groups, their tokens are `rows`
};

// What stages of many rows hold (packed_runs.h).
struct PackedSegments {
  StageBlock* blocks;  // [num_entries]; of groups by entry, else run after run. Null: a stage is of
                       // one segment
  PackedRun* runs;     // [num_segments + 1], one behind the last
  int32_t* order;      // [num_segments], in which they are packed
  int32_t* first_block;  // [num_segments], in that order
  int32_t* of_sequence;  // [num_seqs, 2], its runs: first, and behind the last
  int32_t block_size;
};

struct Work {
  WorkShape shape;
  WorkHeader* header;
  QueryTile* tiles;     // [max_tiles]
  int32_t* unit_begin;  // [max_tiles], of a tile's unit and its lead, in all units of a kv head
  StageRun* runs;       // [max_runs]
  RangeStart* ranges;   // [max_ranges]
  int32_t* arrived;     // [max_tiles, num_kv_heads], 0 between calls
  int32_t* first_tile;  // [num_seqs], of a sequence; for the planner
  int32_t* first_run;   // [num_seqs]
  PackedSegments packed;
  float* partials;  // [2 * max_ranges] of partial_floats()
  int32_t max_tiles;
  uint32_t group_magic;  // x / group is x * group_magic >> 16, for x up to a tile's rows and heads
  int32_t grid;          // blocks of threads
  int32_t warps;         // of a block, that multiply
  int32_t stages;        // of its ring, or of each warp's: for few queries
  SharedSegments shared;
};

// A partial: out [tile_rows, head_dim], then a RowSums for each row.
MEMKV_HD int64_t partial_floats(int tile_rows, int head_dim) {
  return int64_t{tile_rows} * (head_dim + 4);
}

}  // namespace memkv::cuda
