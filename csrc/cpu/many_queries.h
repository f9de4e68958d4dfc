// Many query rows over the same keys: prefill, recompute, a question's tokens.
//
//     S^T = K Q^T     [tokens, rows]      lanes hold rows: K is a scalar, broadcast
//     O^T = V^T P^T   [head_dim, rows]    lanes hold rows: V is a scalar, broadcast
//
// With rows in lanes neither K nor V is transposed, and the softmax has no sum across lanes: each
// row's maximum, sum and visible range are lanes too. K and V of a tile are widened to float32 once
// for all rows; a float32 cache is read in place. A micro-kernel holds kScalars * 3 registers of
// sums and reads, for each step, 3 registers of rows and kScalars scalars.
#pragma once

#include "memkv/rope.h"
#include "query_rows.h"
#include "vec_math.h"

namespace memkv {

template <typename Vec, typename T, int kBlock>
class ManyQueries {
 public:
  static constexpr int kLanes = Vec::kLanes;

  static size_t workspace_floats(int head_dim) {
    return size_t(head_dim) * (3 * kTileRows + 2 * kTileTokens) + kTileTokens * kTileRows +
           4 * kTileRows;
  }

  ManyQueries(const Tile& tile, float* workspace)
      : tile_(tile),
        call_(*tile.call),
        view_(call_.cache.view<const T>()),
        head_dim_(view_.head_dim),
        columns_((tile.num_rows() + kLanes - 1) / kLanes * kLanes),
        query_(workspace),
        turned_(query_ + head_dim_ * kTileRows),
        out_(turned_ + head_dim_ * kTileRows),
        keys_(out_ + head_dim_ * kTileRows),
        values_(keys_ + head_dim_ * kTileTokens),
        score_(values_ + head_dim_ * kTileTokens),
        max_(score_ + kTileTokens * kTileRows),
        sum_(max_ + kTileRows),
        keep_(sum_ + kTileRows),
        block_sum_(keep_ + kTileRows) {}

  void attend(const Piece* pieces, int num_pieces, const Partial& partial) {
    begin();
    for (int i = 0; i < num_pieces; ++i) {
      enter(pieces[i]);
      for (int32_t token = tokens_.begin; token < tokens_.end; token += kTileTokens) {
        const int count = count_of(token);
        if (!seen_by_any(token, count)) continue;
        score_tile(token, count);
        weigh(count);
        add_values(token, count);
      }
    }
    end(partial);
  }

  void add_mass(const Piece* pieces, int num_pieces, const SoftmaxState<float>* state) {
    begin();
    for (int row = 0; row < tile_.num_rows(); ++row) {
      max_[row] = finite_or_zero(state[row].max);
      sum_[row] = state[row].sum > 0.0f ? 1.0f / state[row].sum : 0.0f;
    }
    for (int i = 0; i < num_pieces; ++i) {
      enter(pieces[i]);
      for (int32_t token = tokens_.begin; token < tokens_.end; token += kTileTokens) {
        const int count = count_of(token);
        if (!seen_by_any(token, count)) continue;
        score_tile(token, count);
        for (int at = 0; at < count; at += kBlock) add_mass_of_block(token, at, count);
      }
    }
  }

 private:
  static constexpr int kScalars = kLanes == 16 ? 8 : 4;
  static constexpr int kX = PagedView<T>::kPiece;
  static constexpr int kWidest = 3;  // registers of rows in a micro-kernel
  static_assert(kTileRows % (kWidest * kLanes) == 0);
  static_assert(kBlock % kScalars == 0 && kTileTokens % kBlock == 0);

  int count_of(int32_t token) const {
    return tokens_.end - token < kTileTokens ? tokens_.end - token : kTileTokens;
  }

  void begin() {
    const float scale = query_scale(call_);
    for (int row = 0; row < columns_; ++row) {
      if (row < tile_.num_rows()) {
        load_query(tile_, row, scale, query_ + row, kTileRows);
      } else {
        for (int d = 0; d < head_dim_; ++d) query_[d * kTileRows + row] = 0.0f;
      }
      max_[row] = kMinusInfinity;
      sum_[row] = 0.0f;
    }
    for (int i = 0; i < head_dim_ * kTileRows; ++i) out_[i] = 0.0f;
  }

  // Turns the queries for the piece's segment; finds what each row sees of it.
  void enter(const Piece& piece) {
    segment_ = &call_.plan.segments[piece.segment];
    tokens_ = tokens_of<kBlock>(piece, *segment_);
    turn(call_.turns + int64_t{piece.segment} * call_.rotary_dim);
    seen_by_all_ = tokens_;
    seen_by_any_ = {tokens_.end, tokens_.begin};
    for (int row = 0; row < tile_.num_rows(); ++row) {
      const TokenRange seen = visible_to_row(tile_, row, *segment_);
      first_[row] = seen.begin;
      end_[row] = seen.end;
      if (seen.empty()) {
        seen_by_all_ = {0, 0};
        continue;
      }
      if (seen.begin > seen_by_all_.begin) seen_by_all_.begin = seen.begin;
      if (seen.end < seen_by_all_.end) seen_by_all_.end = seen.end;
      if (seen.begin < seen_by_any_.begin) seen_by_any_.begin = seen.begin;
      if (seen.end > seen_by_any_.end) seen_by_any_.end = seen.end;
    }
    // Lanes without a row see all, so that they never make a tile a masked one.
    for (int row = tile_.num_rows(); row < columns_; ++row) {
      first_[row] = 0;
      end_[row] = segment_->num_tokens;
    }
  }

  void turn(const float* cos) {
    const RotaryPairs pairs{call_.rotary_dim, call_.interleaved};
    const float* sin = cos + pairs.count();
    for (int i = 0; i < pairs.count(); ++i) {
      const int first = pairs.first(i) * kTileRows, second = pairs.second(i) * kTileRows;
      const Vec c = Vec::all(cos[i]), s = Vec::all(sin[i]);
      for (int row = 0; row < columns_; row += kLanes) {
        Vec a = Vec::load(query_ + first + row), b = Vec::load(query_ + second + row);
        rotate_pair(a, b, c, s);
        a.store(turned_ + first + row);
        b.store(turned_ + second + row);
      }
    }
    for (int i = pairs.rotary_dim * kTileRows; i < head_dim_ * kTileRows; ++i) {
      turned_[i] = query_[i];
    }
  }

  bool seen_by_any(int32_t token, int count) const {
    return token < seen_by_any_.end && token + count > seen_by_any_.begin;
  }

  int32_t block_of(int32_t token) const {
    return call_.plan.block_ids[segment_->first_entry + token / kBlock];
  }

  // A slab as float32: widened, or in place.
  static MEMKV_HD const float* widen(const float* slab, float*, int64_t) { return slab; }
  static MEMKV_HD const float* widen(const bfloat16* slab, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) Vec::load(slab + i).store(to + i);
    return to;
  }

  // Asks for what the next tile will read, one block for each block at work.
  void prefetch_after(int32_t token) const {
    if (token + kTileTokens >= tokens_.end) return;
    const int32_t block = block_of(token + kTileTokens);
    const char* k = reinterpret_cast<const char*>(view_.k_slab(block, tile_.kv_head));
    const char* v = reinterpret_cast<const char*>(view_.v_slab(block, tile_.kv_head));
    const int64_t bytes = view_.slab_size() * int64_t(sizeof(T));
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch(k + i, 0, 2);
      __builtin_prefetch(v + i, 0, 2);
    }
  }

  void score_tile(int32_t token, int count) {
    for (int at = 0; at < count; at += kBlock) {
      prefetch_after(token + at);
      const float* keys =
          widen(view_.k_slab(block_of(token + at), tile_.kv_head), keys_, view_.slab_size());
      const int slots = count - at < kBlock ? count - at : kBlock;
      for (int slot = 0; slot < slots; slot += kScalars) {
        score_panels(keys + slot * kX, score_ + (at + slot) * kTileRows);
      }
    }
    if (call_.softcap > 0.0f) {
      const Vec cap = Vec::all(call_.softcap * kLog2E);
      for (int t = 0; t < count; ++t) {
        for (int row = 0; row < columns_; row += kLanes) {
          float* score = score_ + t * kTileRows + row;
          (cap * tanh_of(Vec::load(score))).store(score);
        }
      }
    }
    if (token < seen_by_all_.begin || token + count > seen_by_all_.end) mask(token, count);
  }

  void score_panels(const float* keys, float* score) {
    int row = 0;
    for (; row + 3 * kLanes <= columns_; row += 3 * kLanes) score_panel<3>(keys, row, score);
    if (row + 2 * kLanes == columns_) score_panel<2>(keys, row, score);
    if (row + kLanes == columns_) score_panel<1>(keys, row, score);
  }

  // kScalars tokens against kWidth registers of rows.
  template <int kWidth>
  void score_panel(const float* keys, int row, float* score) {
    Vec sums[kScalars][kWidth];
    for (int t = 0; t < kScalars; ++t) {
      for (int w = 0; w < kWidth; ++w) sums[t][w] = Vec::zero();
    }
    const float* query = turned_ + row;
    for (int d = 0; d < head_dim_; d += kX) {
      const float* piece = keys + d * kBlock;
      for (int x = 0; x < kX; ++x) {
        Vec q[kWidth];
        for (int w = 0; w < kWidth; ++w) {
          q[w] = Vec::load(query + (d + x) * kTileRows + w * kLanes);
        }
        for (int t = 0; t < kScalars; ++t) {
          const Vec k = Vec::all(piece[t * kX + x]);
          for (int w = 0; w < kWidth; ++w) sums[t][w] = multiply_add(k, q[w], sums[t][w]);
        }
      }
    }
    for (int t = 0; t < kScalars; ++t) {
      for (int w = 0; w < kWidth; ++w) {
        sums[t][w].store(score + t * kTileRows + row + w * kLanes);
      }
    }
  }

  void mask(int32_t token, int count) {
    const Vec hidden = Vec::all(kMinusInfinity);
    for (int row = 0; row < columns_; row += kLanes) {
      const auto first = Vec::index(first_ + row), end = Vec::index(end_ + row);
      for (int t = 0; t < count; ++t) {
        float* score = score_ + t * kTileRows + row;
        const auto before = Vec::less(Vec::index_all(token + t), first);
        const auto inside = Vec::less(Vec::index_all(token + t), end);
        Vec::select(before, hidden, Vec::select(inside, Vec::load(score), hidden)).store(score);
      }
    }
  }

  // Scores become weights. The sum takes them in the order in which the values are added.
  void weigh(int count) {
    for (int row = 0; row < columns_; row += kLanes) {
      float* score = score_ + row;
      Vec top = Vec::load(score);
      for (int t = 1; t < count; ++t) top = larger(top, Vec::load(score + t * kTileRows));
      SoftmaxState<Vec> state{Vec::load(max_ + row), Vec::load(sum_ + row)};
      state.raise(top).store(keep_ + row);
      const Vec max = finite_or_zero(state.max);
      for (int t = 0; t < count; ++t) {
        const Vec weight = exp2_of(Vec::load(score + t * kTileRows) - max);
        state.add(weight);
        weight.store(score + t * kTileRows);
      }
      state.max.store(max_ + row);
      state.sum.store(sum_ + row);
    }
  }

  void add_values(int32_t token, int count) {
    const float* values[kTileTokens / kBlock];
    for (int at = 0; at < count; at += kBlock) {
      values[at / kBlock] = widen(view_.v_slab(block_of(token + at), tile_.kv_head),
                                  values_ + at * head_dim_,
                                  view_.slab_size());
    }
    for (int d = 0; d < head_dim_; d += kScalars) {
      int row = 0;
      for (; row + 3 * kLanes <= columns_; row += 3 * kLanes) value_panel<3>(values, d, row, count);
      if (row + 2 * kLanes == columns_) value_panel<2>(values, d, row, count);
      if (row + kLanes == columns_) value_panel<1>(values, d, row, count);
    }
  }

  // kScalars dims of V against kWidth registers of rows' weights, over the tile's tokens.
  template <int kWidth>
  void value_panel(const float* const* values, int d, int row, int count) {
    Vec sums[kScalars][kWidth];
    for (int w = 0; w < kWidth; ++w) {
      const Vec keep = Vec::load(keep_ + row + w * kLanes);
      for (int i = 0; i < kScalars; ++i) {
        sums[i][w] = Vec::load(out_ + (d + i) * kTileRows + row + w * kLanes) * keep;
      }
    }
    for (int at = 0; at < count; at += kBlock) {
      const float* v = values[at / kBlock] + d * kBlock;
      const float* weight = score_ + at * kTileRows + row;
      const int slots = count - at < kBlock ? count - at : kBlock;  // the rest may be NaN
      for (int slot = 0; slot < slots; ++slot) {
        Vec p[kWidth];
        for (int w = 0; w < kWidth; ++w) p[w] = Vec::load(weight + slot * kTileRows + w * kLanes);
        for (int i = 0; i < kScalars; ++i) {
          const Vec x = Vec::all(v[i * kBlock + slot]);
          for (int w = 0; w < kWidth; ++w) sums[i][w] = multiply_add(x, p[w], sums[i][w]);
        }
      }
    }
    for (int w = 0; w < kWidth; ++w) {
      for (int i = 0; i < kScalars; ++i) {
        sums[i][w].store(out_ + (d + i) * kTileRows + row + w * kLanes);
      }
    }
  }

  void add_mass_of_block(int32_t token, int at, int count) {
    const int slots = count - at < kBlock ? count - at : kBlock;
    for (int row = 0; row < columns_; row += kLanes) {
      const float* score = score_ + at * kTileRows + row;
      const Vec max = Vec::load(max_ + row);
      Vec total = Vec::zero();
      for (int t = 0; t < slots; ++t) {
        total = total + exp2_of(Vec::load(score + t * kTileRows) - max);
      }
      (total * Vec::load(sum_ + row)).store(block_sum_ + row);
    }
    const int64_t entry = segment_->first_entry + (token + at) / kBlock;
    for (int row = 0; row < tile_.num_rows(); ++row) {
      call_.block_mass[tile_.head(row) * call_.plan.num_entries + entry] += block_sum_[row];
    }
  }

  void end(const Partial& partial) {
    for (int row = 0; row < tile_.num_rows(); ++row) {
      partial.state[row] = {max_[row], sum_[row]};
      for (int d = 0; d < head_dim_; ++d) {
        partial.out[row * head_dim_ + d] = out_[d * kTileRows + row];
      }
    }
  }

  const Tile& tile_;
  const Attention& call_;
  const PagedView<const T> view_;
  const int head_dim_;
  const int columns_;  // rows, up to a multiple of kLanes
  float* query_;       // [head_dim][kTileRows], scaled, as the model rotated it
  float* turned_;      // [head_dim][kTileRows], turned for the segment
  float* out_;         // [head_dim][kTileRows], not yet divided
  float* keys_;        // K slab of one block as float32
  float* values_;      // V slabs of a tile as float32
  float* score_;       // [kTileTokens][kTileRows], scores, then weights
  float* max_;         // [kTileRows] each, from here on
  float* sum_;
  float* keep_;  // what out_ is still to be multiplied by
  float* block_sum_;

  int32_t first_[kTileRows], end_[kTileRows];  // what each row sees of segment_
  const Segment* segment_ = nullptr;
  TokenRange tokens_{};  // of the piece
  TokenRange seen_by_all_{}, seen_by_any_{};
};

}  // namespace memkv
