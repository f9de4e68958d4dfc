// The unit of work on a CPU: a tile of query rows of one kv head, over a range of blocks.
//
//     rows     a sequence's query tokens, each with the heads that share a kv head:
//              row r is token r / group, head kv_head * group + r % group
//     pieces   runs of visible blocks, each within one segment, in the table's order
//
//     blocks of the table   [0 1 2 3][4 5 6 7 8 9][10 11]        3 segments
//     pieces                [. 1 2 3][4 5 6] [7 8 9][10 11]      0 is not visible; a range ends at
//     7 ranges                 0 ------------>  1 ------------>
//
// Where a range ends depends on the sequence alone, never on the batch or the threads: so neither
// does a bit of the result. Ranges of a tile merge in order, by SoftmaxState::merge.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memkv/attention_args.h"
#include "memkv/softmax_state.h"

namespace memkv {

inline constexpr int kTileRows = 48;    // a multiple of every instruction set's lanes times 3
inline constexpr int kTileTokens = 64;  // keys scored at a time
inline constexpr int kFewTileTokens = 128;
inline constexpr int kFewRows = 16;  // up to so many rows, keys and values stream once
inline constexpr int kRangeTokensFew = 2048;
inline constexpr int kRangeTokensMany = 4096;
inline constexpr int kLeastBlock = 8;
inline constexpr int kMaxHeadDim = 512;

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
  int num_rows;
  int kv_head;

  MEMKV_HD int64_t token(int row) const { return first_token + (first_row + row) / call->group(); }
  MEMKV_HD int head(int row) const {
    return kv_head * call->group() + (first_row + row) % call->group();
  }
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
