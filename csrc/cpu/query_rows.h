// The query rows of a tile, and what each sees of a piece.
#pragma once

#include "memkv/bfloat16.h"
#include "tile.h"

namespace memkv {

// query[d * stride] = row's element d, times `scale`.
MEMKV_HD void load_query(const Tile& tile, int row, float scale, float* query, int stride) {
  const HeadRows& q = tile.call->q;
  const int64_t offset = q.offset(tile.token(row), tile.head(row));
  const int head_dim = tile.call->cache.head_dim;
  if (q.dtype == DType::kFloat32) {
    const float* from = static_cast<const float*>(q.data) + offset;
    for (int d = 0; d < head_dim; ++d) query[d * stride] = from[d] * scale;
  } else {
    const bfloat16* from = static_cast<const bfloat16*>(q.data) + offset;
    for (int d = 0; d < head_dim; ++d) query[d * stride] = to_float(from[d]) * scale;
  }
}

// Scores are wanted in units of log2; a soft-cap comes before that.
MEMKV_HD float query_scale(const Attention& call) {
  return call.softcap > 0.0f ? call.scale / call.softcap : call.scale * kLog2E;
}

// The tokens of a piece: its last block may be partly filled.
template <int kBlock>
MEMKV_HD TokenRange tokens_of(const Piece& piece, const Segment& segment) {
  const int64_t end = int64_t{piece.end_block} * kBlock;
  return {piece.first_block * kBlock, clamp_token(end, segment.num_tokens)};
}

MEMKV_HD TokenRange visible_to_row(const Tile& tile, int row, const Segment& segment) {
  const Attention& call = *tile.call;
  return visible_tokens(segment, call.plan.query_position[tile.token(row)], call.window);
}

}  // namespace memkv
