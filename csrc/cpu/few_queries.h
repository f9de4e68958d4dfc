// Few query rows over many keys: decode.
//
//     score = q · k                    lanes hold 4 partial sums for each of kLanes / 4 tokens
//     out   = sum of weight * v        lanes hold tokens, partial sums of one or more rows of V
//
// K and V of a block are read once for all rows, 2 * head_dim elements for each token and kv head.
// Nothing is transposed: partial sums are added up when the range ends.
//
//     K slab, bf16       piece 0: token 0 dims 0-7 | token 1 dims 0-7 | ...   piece 1: dims 8-15
//     a load of K        4 tokens x 8 dims, split into even and odd dims, each 4 tokens x 4 dims
//     V slab, 16 slots   row 0: tokens 0-15 | row 1: tokens 0-15 | ...
//     a load of V        2 rows x 16 tokens, split into even and odd tokens
//
//     blocks   7        2        9        4      |  5  ...
//     K        h0 h1 h2 h0 h1 h2 h0 h1 h2 h0 h1 h2  h0 h1 h2     heads of a unit lie side by side
//     V        h0 h1 h2 h0 h1 h2 h0 h1 h2 h0 h1 h2  h0 h1 h2
//              at work: head by head                asked for: in the order of memory
//
// While one tile of blocks is worked on, the next is asked for, line by line between the
// multiply-adds: memory reads random pages at two thirds of its best rate, and only if it is asked
// steadily, in long runs, into L2. The last tile of a range asks for what the thread will probably
// read after it.
#pragma once

#include <type_traits>

#include "memkv/rope.h"
#include "query_rows.h"
#include "vec_math.h"

namespace memkv {

template <typename Vec, typename T, int kBlock>
class FewQueries {
 public:
  static constexpr int kLanes = Vec::kLanes;

  static size_t workspace_floats(int head_dim) {
    return size_t(kFewRows) * (2 * head_dim + head_dim * kLanes + kLanes + kScoreStride) +
           size_t(head_dim) * kBlock;
  }

  FewQueries(const Tile& tile, float* workspace)
      : tile_(tile),
        call_(*tile.call),
        view_(call_.cache.view<const T>()),
        head_dim_(view_.head_dim),
        query_(workspace),
        turned_(query_ + kFewRows * head_dim_),
        out_(turned_ + kFewRows * head_dim_),
        sum_(out_ + kFewRows * head_dim_ * kLanes),
        score_(sum_ + kFewRows * kLanes),
        v_tail_(reinterpret_cast<T*>(score_ + kFewRows * kScoreStride)) {}

  void attend(const Piece* pieces, int num_pieces, const Preview& preview, const Partial& partial) {
    list_blocks(pieces, num_pieces, preview);
    ask_for_first_tile();
    begin();
    int listed = 0;
    for (int i = 0; i < num_pieces; ++i) {
      enter(pieces[i]);
      const int num_blocks = pieces[i].end_block - pieces[i].first_block;
      for (int first = 0; first < num_blocks; first += kTileBlocks) {
        const int count = num_blocks - first < kTileBlocks ? num_blocks - first : kTileBlocks;
        attend_blocks(listed + first, count, tokens_.begin + first * kBlock);
      }
      listed += num_blocks;
    }
    end(partial);
  }

 private:
  static constexpr int kTileBlocks = kTileTokens / kBlock;
  static constexpr int kScoreStride = kTileTokens + 2 * kLanes;  // lookup() reads past the end
  static constexpr int kTokensInLoad = kLanes / 4;               // of K
  static constexpr int kGroup = kLanes == 16 ? 4 : 2;            // rows held in registers
  static constexpr int kStepBytes = kTokensInLoad * 8 * int(sizeof(T));  // of K: 8 dims
  static constexpr int kSplit = sizeof(T) == 2 ? 2 : 1;  // registers that a load widens to
  static constexpr int kLoad = kLanes * kSplit;          // elements of V in a load
  static constexpr int kLoadsInRow = kBlock > kLoad ? kBlock / kLoad : 1;
  static constexpr int kRowsInLoad = kBlock < kLoad ? kLoad / kBlock : 1;
  static constexpr int kLanesOfRow = kLanes / kRowsInLoad;
  static_assert(8 % kRowsInLoad == 0, "head_dim is a multiple of 8");

  void list_blocks(const Piece* pieces, int num_pieces, const Preview& preview) {
    num_listed_ = 0;
    for (int i = 0; i < num_pieces; ++i) {
      const int32_t* ids =
          call_.plan.block_ids + call_.plan.segments[pieces[i].segment].first_entry;
      for (int b = pieces[i].first_block; b < pieces[i].end_block; ++b) {
        list(ids[b], tile_.kv_head);
      }
    }
    for (int b = 0; b < preview.num_blocks && b < kTileBlocks; ++b) {
      list(preview.block_ids[b], preview.kv_head);
    }
  }

  void list(int32_t block, int kv_head) {
    k_run_[num_listed_] = view_.k_slab(block, kv_head);
    v_run_[num_listed_] = view_.v_slab(block, kv_head);
    ++num_listed_;
  }

  int slab_bytes() const { return int(view_.slab_size() * sizeof(T)); }

  // What to ask for next, in the order in which it lies in memory: the heads of a block, the next
  // block. K and V have one each.
  struct Cursor {
    int block = 0;  // listed
    int at = 0;     // bytes into its heads' slabs
  };

  // Where the next `bytes` are, which divide a slab; past the last block, `otherwise`.
  const char* advance(Cursor& cursor, const T* const* runs, int bytes, const T* otherwise) const {
    if (cursor.block >= num_listed_) return reinterpret_cast<const char*>(otherwise);
    const char* at = reinterpret_cast<const char*>(runs[cursor.block]) + cursor.at;
    cursor.at += bytes;
    if (cursor.at == tile_.num_kv_heads * slab_bytes()) cursor = {cursor.block + 1, 0};
    return at;
  }

  static MEMKV_HD void ask(const char* line) { __builtin_prefetch(line, 0, 2); }  // into L2

  void ask_for_first_tile() {
    const int bytes = slab_bytes();
    while (cursor_k_.block < kTileBlocks && cursor_k_.block < num_listed_) {
      const char* k = advance(cursor_k_, k_run_, bytes, nullptr);
      const char* v = advance(cursor_v_, v_run_, bytes, nullptr);
      for (int i = 0; i < bytes; i += 64) {
        ask(k + i);
        ask(v + i);
      }
    }
  }

  const T* k_slab(int listed, int head) const { return k_run_[listed] + head * view_.slab_size(); }
  const T* v_slab(int listed, int head) const { return v_run_[listed] + head * view_.slab_size(); }

  void begin() {
    int32_t lane[kSplit][kLanes];
    for (int half = 0; half < kSplit; ++half) {
      for (int i = 0; i < kLanes; ++i) lane[half][i] = (kSplit * i + half) % kBlock;
      token_of_lane_[half] = Vec::index(lane[half]);
    }
    const float scale = query_scale(call_);
    for (int row = 0; row < tile_.num_rows(); ++row) {
      load_query(tile_, row, scale, turned_, 1);
      for (int d = 0; d < head_dim_; ++d) query_[row * head_dim_ + place_of_dim(d)] = turned_[d];
      state_[row] = empty_softmax();
    }
    const int floats = tile_.num_rows() * head_dim_ * kLanes / kRowsInLoad;
    for (int i = 0; i < floats; ++i) out_[i] = 0.0f;
    for (int i = 0; i < tile_.num_rows() * kLanes; ++i) sum_[i] = 0.0f;
  }

  // Where load_step() delivers dimension d of K: even ones of 8 first, if it splits them.
  static MEMKV_HD int place_of_dim(int d) {
    return kSplit == 2 ? d / 8 * 8 + d % 2 * 4 + d % 8 / 2 : d;
  }

  // Turns the queries for the piece's segment; finds what each row sees of it.
  void enter(const Piece& piece) {
    segment_ = &call_.plan.segments[piece.segment];
    tokens_ = tokens_of<kBlock>(piece, *segment_);
    for (int row = 0; row < tile_.num_rows(); ++row) {
      visible_[row] = visible_to_row(tile_, row, *segment_);
    }
    turn(call_.turns + int64_t{piece.segment} * call_.rotary_dim);
  }

  void turn(const float* cos) {
    const RotaryPairs pairs{call_.rotary_dim, call_.interleaved};
    const int half = pairs.count();
    const float* sin = cos + half;
    for (int i = 0; i < tile_.num_rows() * head_dim_; ++i) turned_[i] = query_[i];
    if (pairs.interleaved || half % 8 != 0) {
      for (int i = 0; i < half; ++i) {
        const int first = place_of_dim(pairs.first(i)), second = place_of_dim(pairs.second(i));
        for (int row = 0; row < tile_.num_rows(); ++row) {
          float* turned = turned_ + row * head_dim_;
          rotate_pair(turned[first], turned[second], cos[i], sin[i]);
        }
      }
      return;
    }
    // Both dimensions of a pair are at the same place in their half: whole rows turn at once.
    float cos_at[kMaxHeadDim / 2], sin_at[kMaxHeadDim / 2];
    for (int i = 0; i < half; ++i) {
      cos_at[place_of_dim(i)] = cos[i];
      sin_at[place_of_dim(i)] = sin[i];
    }
    for (int row = 0; row < tile_.num_rows(); ++row) {
      float* first = turned_ + row * head_dim_;
      float* second = first + half;
      for (int i = 0; i < half; i += 4) {
        for (int j = i; j < i + 4; ++j) rotate_pair(first[j], second[j], cos_at[j], sin_at[j]);
      }
    }
  }

  void attend_blocks(int listed, int count, int32_t first_token) {
    const int slots = count * kBlock;
    for (int head = 0; head < tile_.num_kv_heads; ++head) {
      for (int slot = 0; slot < slots; slot += kLanes) score_slots(head, listed, count, slot);
      const int first_row = head * tile_.rows_of_head;
      for (int row = 0; row < tile_.rows_of_head; ++row) weigh(first_row + row, slots, first_token);
      int i = 0;
      if constexpr (kGroup == 4) {
        for (; i + 3 < count; i += 4) add_values<4>(head, listed + i, i, first_token);
      }
      for (; i + 1 < count; i += 2) add_values<2>(head, listed + i, i, first_token);
      if (i < count) add_values<1>(head, listed + i, i, first_token);
    }
  }

  // Calls use(rows) for groups of a head's rows, as large as fit in registers.
  template <typename Use>
  MEMKV_HD void for_groups(int head, Use use) const {
    int row = head * tile_.rows_of_head;
    const int end = row + tile_.rows_of_head;
    for (; row + kGroup <= end; row += kGroup) use(row, std::integral_constant<int, kGroup>());
    if constexpr (kGroup == 4) {
      if (row + 3 == end) return use(row, std::integral_constant<int, 3>());
      if (row + 2 == end) return use(row, std::integral_constant<int, 2>());
    }
    if (row + 1 == end) use(row, std::integral_constant<int, 1>());
  }

  // Scores of kLanes tokens, from `slot` of the tile on. Slots past the last block repeat it.
  void score_slots(int head, int listed, int count, int slot) {
    const T* k[4];
    const char* ahead[4];
    for (int v = 0; v < 4; ++v) {
      const int at = slot + v * kTokensInLoad;
      const int block = at / kBlock < count ? at / kBlock : count - 1;
      k[v] = k_slab(listed + block, head) + at % kBlock * PagedView<T>::kPiece;
      ahead[v] = advance(cursor_k_, k_run_, head_dim_ / 8 * kStepBytes, k[v]);
    }
    for_groups(head, [&](int row, auto rows) { score_rows<rows()>(k, ahead, row, slot); });
  }

  // 8 dims of kTokensInLoad tokens, as two registers of 4 dims each.
  static MEMKV_HD void load_step(const bfloat16* k, Vec& a, Vec& b) { Vec::load_split(k, a, b); }
  static MEMKV_HD void load_step(const float* k, Vec& a, Vec& b) {
    a = Vec::load(k);
    b = Vec::load(k + kBlock * PagedView<T>::kPiece);
  }

  template <int kRows>
  void score_rows(const T* const k[4], const char* const ahead[4], int row, int slot) {
    const float* turned = turned_ + row * head_dim_;
    Vec sums[kRows][4];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < 4; ++v) sums[r][v] = Vec::zero();
    }
    for (int d = 0; d < head_dim_; d += 8) {
      Vec q[kRows][2];
      for (int r = 0; r < kRows; ++r) {
        q[r][0] = Vec::repeat4(turned + r * head_dim_ + d);
        q[r][1] = Vec::repeat4(turned + r * head_dim_ + d + 4);
      }
      for (int v = 0; v < 4; ++v) {
        Vec a, b;
        load_step(k[v] + d * kBlock, a, b);
        const int at = d / 8 * kStepBytes;
        if (at % 64 == 0) ask(ahead[v] + at);
        if constexpr (kStepBytes > 64) ask(ahead[v] + at + 64);
        for (int r = 0; r < kRows; ++r) {
          sums[r][v] = multiply_add(a, q[r][0], multiply_add(b, q[r][1], sums[r][v]));
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      sum_quads(sums[r]).store(score_ + (row + r) * kScoreStride + slot);
    }
  }

  // Scores of a row become weights; what it summed so far is brought down to the new maximum.
  void weigh(int row, int slots, int32_t first_token) {
    float* score = score_ + row * kScoreStride;
    const int32_t end = first_token + slots < tokens_.end ? first_token + slots : tokens_.end;
    const TokenRange seen = {visible_[row].begin,
                             visible_[row].end < end ? visible_[row].end : end};
    const bool all =
        seen.begin <= first_token && seen.end >= first_token + slots && slots % kLanes == 0;
    const Vec cap = Vec::all(call_.softcap * kLog2E);
    Vec top = Vec::all(kMinusInfinity);
    for (int i = 0; i < slots; i += kLanes) {
      Vec s = Vec::load(score + i);
      if (call_.softcap > 0.0f) s = cap * tanh_of(s);
      if (!all) s = mask(s, first_token + i, seen);
      top = larger(top, s);
      if (!all || call_.softcap > 0.0f) s.store(score + i);
    }
    const float highest = largest(top);
    if (highest > state_[row].max) scale_row(row, state_[row].raise(highest));
    const Vec max = Vec::all(finite_or_zero(state_[row].max));
    for (int i = 0; i < slots; i += kLanes) {
      exp2_of(Vec::load(score + i) - max).store(score + i);
    }
  }

  static MEMKV_HD Vec mask(Vec score, int32_t first_token, TokenRange seen) {
    const typename Vec::Index token = Vec::index_from(first_token);
    const typename Vec::Mask inside = Vec::both(Vec::less(Vec::index_all(seen.begin - 1), token),
                                                Vec::less(token, Vec::index_all(seen.end)));
    return Vec::select(inside, score, Vec::all(kMinusInfinity));
  }

  // Rows are worked on in groups of kGroup, the last of them smaller.
  struct RowPlace {
    int first, rows;  // of the group
    int within;
  };

  RowPlace place_of(int row) const {
    const int of_head = row % tile_.rows_of_head;
    const int within = of_head % kGroup;
    const int left = tile_.rows_of_head - (of_head - within);
    return {row - within, left < kGroup ? left : kGroup, within};
  }

  void scale_row(int row, float keep) {
    const int num_sums = head_dim_ / kRowsInLoad;
    const RowPlace place = place_of(row);
    float* out = out_ + place.first * num_sums * kLanes + place.within * kLanes;
    const Vec factor = Vec::all(keep);
    for (int n = 0; n < num_sums; ++n) {
      float* lanes = out + n * place.rows * kLanes;
      (Vec::load(lanes) * factor).store(lanes);
    }
    float* lanes = sum_ + row * kLanes;
    (Vec::load(lanes) * factor).store(lanes);
  }

  // V of kBlocks blocks, of which the first is number `in_tile` of the tile.
  template <int kBlocks>
  void add_values(int head, int listed, int in_tile, int32_t first_token) {
    const T* v[kBlocks];
    const char* ahead[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      v[b] = v_slab(listed + b, head);
      ahead[b] = advance(cursor_v_, v_run_, slab_bytes(), v[b]);
      const int32_t left = tokens_.end - (first_token + (in_tile + b) * kBlock);
      if (left < kBlock) v[b] = without_unused(v[b], left);
    }
    for_groups(head, [&](int row, auto rows) {
      add_rows<kBlocks, rows()>(v, ahead, row, in_tile * kBlock);
    });
  }

  // A weight of 0 does not silence a NaN: unused slots are copied as zeros.
  const T* without_unused(const T* v, int used) {
    for (int d = 0; d < head_dim_; ++d) {
      for (int slot = 0; slot < kBlock; ++slot) {
        v_tail_[d * kBlock + slot] = slot < used ? v[d * kBlock + slot] : T{};
      }
    }
    return v_tail_;
  }

  static MEMKV_HD void load_values(const bfloat16* v, Vec* x) { Vec::load_split(v, x[0], x[1]); }
  static MEMKV_HD void load_values(const float* v, Vec* x) { x[0] = Vec::load(v); }

  template <int kBlocks, int kRows>
  void add_rows(const T* const* slabs, const char* const* lines, int row, int weights) {
    const int num_sums = head_dim_ / kRowsInLoad;
    float* out = out_ + row * num_sums * kLanes;
    float* sum = sum_ + row * kLanes;
    const T* v[kBlocks];  // copies, so that stores to sums cannot be taken for changes of them
    const char* ahead[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      v[b] = slabs[b];
      ahead[b] = lines[b];
    }
    Vec weight[kBlocks][kLoadsInRow][kSplit][kRows];
    for (int r = 0; r < kRows; ++r) {
      // The sum of weights takes the steps that a row of V would: values of 1 give exactly 1.
      Vec total = Vec::load(sum + r * kLanes);
      for (int b = 0; b < kBlocks; ++b) {
        const float* of_block = score_ + (row + r) * kScoreStride + weights + b * kBlock;
        for (int i = 0; i < kLoadsInRow; ++i) {
          for (int half = 0; half < kSplit; ++half) {
            weight[b][i][half][r] = Vec::lookup(of_block + i * kLoad, token_of_lane_[half]);
            total = total + weight[b][i][half][r];
          }
        }
      }
      total.store(sum + r * kLanes);
    }
    for (int n = 0; n < num_sums; ++n) {
      Vec sums[kRows];
      for (int r = 0; r < kRows; ++r) sums[r] = Vec::load(out + (n * kRows + r) * kLanes);
      for (int b = 0; b < kBlocks; ++b) {
        for (int i = 0; i < kLoadsInRow; ++i) {
          const int at = (n * kLoadsInRow + i) * kLoad;
          Vec x[kSplit];
          load_values(v[b] + at, x);
          if (at * sizeof(T) % 64 == 0) ask(ahead[b] + at * sizeof(T));
          for (int half = 0; half < kSplit; ++half) {
            for (int r = 0; r < kRows; ++r) {
              sums[r] = multiply_add(x[half], weight[b][i][half][r], sums[r]);
            }
          }
        }
      }
      for (int r = 0; r < kRows; ++r) sums[r].store(out + (n * kRows + r) * kLanes);
    }
  }

  void end(const Partial& partial) {
    const int num_sums = head_dim_ / kRowsInLoad;
    float of_sum[4 * kRowsInLoad];
    for (int row = 0; row < tile_.num_rows(); ++row) {
      add_lanes(sum_ + row * kLanes, 0, 1, of_sum);
      state_[row].sum = of_sum[0];
      partial.state[row] = state_[row];
      const RowPlace place = place_of(row);
      const float* lanes = out_ + (place.first * num_sums + place.within) * kLanes;
      float* out = partial.out + row * head_dim_;
      for (int n = 0; n < num_sums; n += 4) {
        const int count = num_sums - n < 4 ? num_sums - n : 4;
        add_lanes(lanes + n * place.rows * kLanes, place.rows * kLanes, count, of_sum);
        for (int i = 0; i < count * kRowsInLoad; ++i) out[n * kRowsInLoad + i] = of_sum[i];
      }
    }
  }

  // Adds up the lanes of each row in up to 4 registers, `stride` floats apart.
  static MEMKV_HD void add_lanes(const float* lanes, int stride, int count, float* rows) {
    constexpr int kQuads = kLanesOfRow / 4;
    Vec x[4];
    for (int v = 0; v < 4; ++v) x[v] = v < count ? Vec::load(lanes + v * stride) : Vec::zero();
    float quads[kLanes];
    sum_quads(x).store(quads);
    for (int row = 0; row < 4 * kRowsInLoad; ++row) {
      rows[row] = quads[row * kQuads];
      for (int i = 1; i < kQuads; ++i) rows[row] += quads[row * kQuads + i];
    }
  }

  const Tile& tile_;
  const Attention& call_;
  const PagedView<const T> view_;
  const int head_dim_;
  float* query_;   // [row][head_dim] in load_step()'s order, scaled, as the model rotated it
  float* turned_;  // the same, turned for the segment
  float* out_;     // [group of rows][head_dim / kRowsInLoad][row of group][kLanes], partial sums
  float* sum_;     // [row][kLanes], partial sums of weights
  float* score_;   // [row][kScoreStride], scores, then weights, of the tile
  T* v_tail_;      // [head_dim][kBlock], the last block of a segment without its unused slots

  SoftmaxState<float> state_[kFewRows];  // its sum waits in sum_ until the end
  TokenRange visible_[kFewRows];         // of segment_
  const Segment* segment_ = nullptr;
  TokenRange tokens_{};                        // of the piece
  typename Vec::Index token_of_lane_[kSplit];  // of a load of V
  Cursor cursor_k_, cursor_v_;

  // Slabs of the unit's first head, in the range's blocks and then in the preview's; those of its
  // other heads follow each.
  int num_listed_ = 0;
  const T* k_run_[(kRangeTokensFew + kTileTokens) / kBlock];
  const T* v_run_[(kRangeTokensFew + kTileTokens) / kBlock];
};

}  // namespace memkv
