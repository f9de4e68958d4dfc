// What a call of the kernels is told. Sizes and pointers are trusted: Python checked them.
#pragma once

#include <cstdint>

#include "memkv/paged_view.h"
#include "memkv/segment.h"

namespace memkv {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // the last on GPUs only

// One layer of the block pool.
struct PagedCache {
  void* k;                 // [num_blocks, num_kv_heads, head_dim / x, block_size, x]
  void* v;                 // [num_blocks, num_kv_heads, head_dim, block_size]
  int64_t k_block_stride;  // elements
  int64_t v_block_stride;
  int64_t num_blocks;
  int num_kv_heads;
  int head_dim;    // a multiple of 8
  int block_size;  // 8, 16 or 32
  DType dtype;

  template <typename T>
  MEMKV_HD PagedView<T> view() const {
    return {static_cast<T*>(k),
            static_cast<T*>(v),
            k_block_stride,
            v_block_stride,
            head_dim,
            block_size};
  }
};

// One step's integers; see AttentionPlan in memkv/kernels/plan.py.
struct StepPlan {
  const int32_t* query_start;     // [num_seqs + 1]
  const int32_t* query_position;  // [num_tokens]
  const int32_t* segment_start;   // [num_seqs + 1]
  const Segment* segments;        // [num_segments]
  const int32_t* block_ids;       // [num_entries]
  int64_t num_seqs;
  int64_t num_tokens;
  int64_t num_entries;
};

// Rows of a tensor whose last dimension is contiguous; strides in elements.
struct HeadRows {
  void* data;  // [num_tokens, heads, head_dim]
  int64_t token_stride;
  int64_t head_stride;
  DType dtype;

  MEMKV_HD int64_t offset(int64_t token, int head) const {
    return token * token_stride + head * head_stride;
  }
};

struct Attention {
  PagedCache cache;
  StepPlan plan;
  HeadRows q;
  HeadRows out;        // same shape and dtype as q
  int num_heads;       // a multiple of cache.num_kv_heads
  const float* turns;  // [num_segments, 2, rotary_dim / 2]: cos, then sin, of -d * inv_freq
  int rotary_dim;      // 0: the layer has no RoPE
  bool interleaved;
  float scale;
  float softcap;      // 0: none
  int window;         // 0: none
  float* lse;         // [num_tokens, num_heads], or null
  bool all_digits;    // the log-sum-exp shows what a query has more than its dtype, once turned
  float* block_mass;  // [num_heads, num_entries], zeroed, or null; on a GPU one such plane for each
                      // tile of many rows that a sequence has

  MEMKV_HD int group() const { return num_heads / cache.num_kv_heads; }
};

}  // namespace memkv
