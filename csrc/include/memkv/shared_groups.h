// Which segments of a batch map the same blocks: a group, whose first segment is its leader.
//
//     segment     0     1     2     3     4     5
//     blocks      7 2   5     7 2   7 3   5     5
//     leader      0     1     0     3     1     1        0 and 3 have the same key, and differ
//     tokens      1     1     2     1     1     1        of their sequences' queries
//     before      0     0     1     0     1     2        query tokens of the group in front
//
// A planner calls each function for all segments before the next one.
#pragma once

#include <cstdint>

#include "memkv/host_device.h"
#include "memkv/segment.h"

namespace memkv {

// When reading a group's blocks once is worth the passes that it takes.
struct ShareRule {
  int32_t least_rows;   // query rows of a kv head that a group has at least
  int32_t least_saved;  // tokens that are not read again, of all groups together
};

inline constexpr uint32_t kNoKey = 0;  // of a segment that is not to be shared

MEMKV_HD uint32_t share_key(const Segment& segment, const int32_t* block_ids) {
  if (segment.num_tokens == 0) return kNoKey;
  const uint32_t key =
      uint32_t(block_ids[segment.first_entry]) * 2654435761u ^ uint32_t(segment.num_tokens);
  return key == kNoKey ? 1 : key;
}

// The first segment with the same key; -1 for none.
MEMKV_HD int32_t leader_of(const uint32_t* keys, int32_t segment) {
  const uint32_t key = keys[segment];
  if (key == kNoKey) return -1;
  int32_t leader = 0;
  while (keys[leader] != key) ++leader;
  return leader;
}

// Whether two segments map the same blocks, looked at in steps: true only if it is for every lane.
MEMKV_HD bool same_blocks(const Segment& a,
                          const Segment& b,
                          const int32_t* block_ids,
                          int block_size,
                          int lane,
                          int lanes) {
  if (a.num_tokens != b.num_tokens) return false;
  const int32_t count = (a.num_tokens - 1) / block_size + 1;
  bool same = true;
  for (int32_t i = lane; i < count; i += lanes) {
    same = same && block_ids[a.first_entry + i] == block_ids[b.first_entry + i];
  }
  return same;
}

// Query tokens of a segment's group in front of its own.
MEMKV_HD int32_t tokens_before(const int32_t* leaders, const int32_t* tokens, int32_t segment) {
  int32_t before = 0;
  for (int32_t i = leaders[segment]; i < segment; ++i) {
    if (leaders[i] == leaders[segment]) before += tokens[i];
  }
  return before;
}

}  // namespace memkv
