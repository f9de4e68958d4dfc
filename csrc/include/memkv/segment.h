// A segment of a block table, and which of its tokens a query sees.
#pragma once

#include <cstdint>

#include "memkv/host_device.h"

namespace memkv {

// One row of AttentionPlan.segments.
struct Segment {
  int32_t first_entry;      // in block_ids
  int32_t num_tokens;       // 0 is legal
  int32_t position;         // of its first token in the sequence
  int32_t stored_position;  // at which that token's key was rotated
};

struct TokenRange {
  int32_t begin, end;  // of tokens of a segment; empty where begin >= end

  MEMKV_HD bool empty() const { return begin >= end; }
};

MEMKV_HD int32_t clamp_token(int64_t token, int32_t num_tokens) {
  return token < 0 ? 0 : token > num_tokens ? num_tokens : int32_t(token);
}

// Keys at positions in (query - window, query]; window 0 is no window. Positions inside a segment
// are contiguous, so that visibility is one clamp for each end.
MEMKV_HD TokenRange visible_tokens(const Segment& segment, int32_t query_position, int32_t window) {
  const int64_t past_last = int64_t{query_position} - segment.position + 1;
  const int64_t first = window > 0 ? past_last - window : 0;
  return {clamp_token(first, segment.num_tokens), clamp_token(past_last, segment.num_tokens)};
}

}  // namespace memkv
