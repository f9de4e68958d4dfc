// Which segments of a sequence share stages: those that turn a query alike, in order of position.
//
//     segments, as mapped    A0 fresh A1 fresh B0 A2        fresh ones are not turned
//     packed runs            A0 A1 A2 | B0 | fresh fresh    blocks side by side, stages full but the last
//
// Attention does not depend on the order of keys, and visibility goes by position: each block of a
// packed run has its own. Positions rise in a run, so that what a row sees of it is one stretch.
#pragma once

#include <cstdint>

#include "memkv/segment.h"
#include "memkv/work_split.h"

namespace memkv {

// Where a packed run begins: in blocks, and with which segment.
struct PackedRun {
  int32_t first_block, first_segment;
};

MEMKV_HD int32_t turn_by(const Segment& segment) {
  return segment.position - segment.stored_position;
}

// Whether segment i lies in front of segment j of its sequence.
MEMKV_HD bool packs_before(const Segment* segments, int32_t i, int32_t j) {
  const Segment &a = segments[i], &b = segments[j];
  if (turn_by(a) != turn_by(b)) return turn_by(a) < turn_by(b);
  return a.position != b.position ? a.position < b.position : i < j;
}

// Whether a segment goes on with the run of the one in front of it.
MEMKV_HD bool packs_with(const Segment& before, const Segment& segment) {
  return turn_by(before) == turn_by(segment) &&
         int64_t{before.position} + before.num_tokens <= segment.position;
}

MEMKV_HD StageBlock stage_block(const Segment& segment,
                                const int32_t* block_ids,
                                int32_t block,
                                int32_t block_size) {
  const int32_t first = block * block_size, left = segment.num_tokens - first;
  return {block_ids[segment.first_entry + block],
          segment.position + first,
          left < block_size ? left : block_size,
          segment.first_entry + block};
}

// Of a packed run, for rows at positions [least, most]; its blocks, their size.
MEMKV_HD Stages visible_stages_of(const WorkShape& shape,
                                  const StageBlock* blocks,
                                  int32_t num_blocks,
                                  int32_t block_size,
                                  int32_t least,
                                  int32_t most) {
  int32_t low = 0, high = num_blocks;  // blocks in front of the first behind `most`
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (blocks[middle].position <= most) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int32_t end = low;
  low = 0;
  high = shape.window > 0 ? end : 0;  // blocks that lie behind every window
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    const int64_t last = int64_t{blocks[middle].position} + blocks[middle].num_tokens - 1;
    if (last <= int64_t{least} - shape.window) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low >= end) return {0, 0};
  const int32_t at_once = shape.stage_tokens / block_size, first = low / at_once;
  return {first, (end - 1) / at_once + 1 - first};
}

}  // namespace memkv
