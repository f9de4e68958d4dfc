// The unit of work on a CPU: a tile of query rows, some kv heads, a range of blocks.
//
//     rows     a sequence's query tokens, each with the heads that share a kv head:
//              row r is token r / group, head kv_head * group + r % group
//     pieces   runs of visible blocks, each within one segment, in the table's order
//
//     blocks of the table   [0 1 2 3][4 5 6 7 8 9][10 11]       3 segments
//     pieces                [  1 2 3][4 5 6][7 8 9][10 11]      0 is not visible; a range ends at 7
//     ranges                 0 -----------> 1 ----------->
//
// Where a range ends depends on the sequence alone, never on the batch or the threads: so neither
// does a bit of the result. Ranges of a tile merge in order, by SoftmaxState::merge.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memkv/attention_args.h"
#include "memkv/softmax_state.h"

namespace memkv {

inline constexpr int kTileRows = 48;    // a multiple of 3 registers of any instruction set
inline constexpr int kTileTokens = 64;  // keys that are scored before their values are added
inline constexpr int kFewRows = 16;     // of a unit: up to so many, K and V stream once
inline constexpr int kMaxHeadDim = 512;

// Tokens of a range. More make a unit's beginning and end cheaper, fewer share the work better.
inline constexpr int kLeastRangeTokensFew = 512;
inline constexpr int kRangeTokensFew = 2048;
inline constexpr int kRangeTokensMany = 4096;

static_assert(kFewRows <= kTileRows);
static_assert(kTileTokens % 32 == 0, "a tile holds whole blocks");

struct Piece {
  int32_t segment;
  int32_t first_block, end_block;  // within the segment
};

struct Tile {
  const Attention* call;
  int64_t first_token;  // the row of q that row 0 belongs to
  int first_row;        // of the sequence's rows, in [0, tokens * group)
  int rows_of_head;     // rows of each kv head; those of the first come first
  int kv_head;
  int num_kv_heads;  // from kv_head on

  MEMKV_HD int num_rows() const { return rows_of_head * num_kv_heads; }
  MEMKV_HD int64_t token(int row) const {
    return first_token + (first_row + row % rows_of_head) / call->group();
  }
  MEMKV_HD int head(int row) const {
    return (kv_head + row / rows_of_head) * call->group() +
           (first_row + row % rows_of_head) % call->group();
  }
};

// Where the thread will probably read next: blocks to ask memory for while the range at hand ends.
// A guess, for speed alone; num_blocks may be 0.
struct Preview {
  const int32_t* block_ids;
  int num_blocks;
  int kv_head;  // and as many more as the tile at hand has
};

// What a tile found over one range; out is not yet divided by sum.
struct Partial {
  SoftmaxState<float>* state;  // [num_rows]
  float* out;                  // [num_rows, head_dim]
};

// One instruction set's loops. Workspaces are 64-byte aligned, one for each thread.
struct AttentionKernels {
  const char* name;
  size_t (*workspace_bytes)(int head_dim);
  void (*attend)(const Tile& tile,
                 const Piece* pieces,
                 int num_pieces,
                 const Preview& preview,
                 const Partial& partial,
                 void* workspace);
  // partial[0] := partial[0] merged with partial[1], ..., partial[count - 1]
  void (*merge)(const Partial* partials, int count, int num_rows, int head_dim);
  // Divides, converts and writes out, and lse where the call wants it.
  void (*finish)(const Tile& tile, const Partial& partial);
  // Adds to block_mass what the rows give to the blocks of the pieces; state[row] is final.
  void (*add_mass)(const Tile& tile,
                   const Piece* pieces,
                   int num_pieces,
                   const SoftmaxState<float>* state,
                   void* workspace);
  float (*read)(const float* data, int64_t count);  // the sum; for measuring bandwidth
};

}  // namespace memkv
