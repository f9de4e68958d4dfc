// Checks csrc/include/memkv: the algebra that every kernel shares. Prints what fails;
// test_headers.py runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "memkv/attention_args.h"
#include "memkv/bfloat16.h"
#include "memkv/packed_runs.h"
#include "memkv/paged_view.h"
#include "memkv/rope.h"
#include "memkv/segment.h"
#include "memkv/shared_groups.h"
#include "memkv/softmax_state.h"
#include "memkv/work_split.h"

using namespace memkv;

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (!holds) {
    std::printf("%s\n", what);
    ++failures;
  }
}

bool near(double a, double b) { return std::fabs(a - b) <= 1e-5 * (1 + std::fabs(b)); }

// Scores and values one by one: state and output.
struct Summed {
  SoftmaxState<float> state = empty_softmax();
  float out = 0.0f;

  void add(float score, float value) {
    const float keep = state.raise(score);
    const float weight = state.weight(score);
    state.add(weight);
    out = out * keep + weight * value;
  }
  void merge(const Summed& other) {
    const MergeFactors<float> factors = state.merge(other.state);
    out = out * factors.ours + other.out * factors.theirs;
  }
};

void softmax_state() {
  const std::vector<float> score = {3.0f, -2.0f, 90.0f, 88.5f, -400.0f, 12.0f, 89.0f};
  for (size_t cut = 0; cut <= score.size(); ++cut) {
    Summed whole, left, right;
    for (size_t i = 0; i < score.size(); ++i) {
      whole.add(score[i], float(i));
      (i < cut ? left : right).add(score[i], float(i));
    }
    left.merge(right);
    expect(left.state.max == whole.state.max, "merge: max of the union");
    expect(near(left.state.sum, whole.state.sum), "merge: sum of the union");
    expect(near(finish(left.state, left.out), finish(whole.state, whole.out)), "merge: output");
  }
  Summed none;
  none.merge(Summed{});
  expect(finish(none.state, none.out) == 0.0f, "a row that sees no key is 0");
  expect(log_sum_exp(none.state) == kMinusInfinity, "its log-sum-exp is -inf");
  none.add(kMinusInfinity, 5.0f);
  expect(none.state.sum == 0.0f && none.out == 0.0f, "a masked score weighs nothing");
  none.add(4.0f, 2.0f);
  expect(finish(none.state, none.out) == 2.0f, "the first key after masked ones");
  expect(near(log_sum_exp(none.state), 4.0 * std::log(2.0)), "scores are in units of log2");
}

void rope() {
  float a = 3.0f, b = 4.0f;
  rotate_pair(a, b, 0.0f, 1.0f);
  expect(a == -4.0f && b == 3.0f, "a quarter turn");
  const RotaryPairs halves{8, false}, neighbours{8, true};
  expect(halves.first(1) == 1 && halves.second(1) == 5, "pairs of halves");
  expect(neighbours.first(1) == 2 && neighbours.second(1) == 3, "pairs of neighbours");
}

void turned_rows() {
  const float row[6] = {1, 2, 3, 4, 5, 6}, cos[2] = {0.0f, 1.0f}, sin[2] = {1.0f, 0.0f};
  for (const bool interleaved : {false, true}) {
    const RotaryPairs pairs{4, interleaved};
    float turned[6] = {1, 2, 3, 4, 5, 6};
    for (int pair = 0; pair < 2; ++pair) {
      rotate_pair(turned[pairs.first(pair)], turned[pairs.second(pair)], cos[pair], sin[pair]);
    }
    for (int d = 0; d < 6; ++d) {
      expect(turned_element(row, cos, sin, pairs, d) == turned[d], "one element of a turned row");
    }
  }
}

// The planner of cuda/plan.cu in a straight line: every stage that some row sees is in one range.
void work_split() {
  std::mt19937 random(1);
  const auto pick = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  int num_whole = 0;
  for (int round = 0; round < 300; ++round) {
    WorkShape shape{pick(1, 3) * 8,
                    16,
                    pick(1, 5),
                    pick(1, 4),
                    pick(0, 1) * pick(1, 90),
                    1,
                    INT32_MAX,
                    pick(1, 40),
                    0,
                    0,
                    0,
                    pick(1, 4),
                    pick(0, 2) == 0 ? pick(1, 9) : 0,
                    0,
                    0};
    shape.flat_ranges = shape.workers * pick(1, 2);
    if (shape.fixed_range == 0) {
      shape.lead = pick(0, 5);
      shape.whole_ranges = pick(0, 2 * shape.workers);
      shape.part_cost = pick(0, 40);
    }
    struct Tile {
      int32_t num_stages, unit_begin;
    };
    std::vector<Tile> tiles;
    int32_t of_head = 0;
    for (int sequence = pick(1, 5); sequence > 0; --sequence) {
      const int num_tiles = tiles_of(shape, pick(0, 12));
      std::vector<Segment> segments;
      for (int i = pick(0, 4), position = 0; i > 0; --i) {
        segments.push_back({0, pick(0, 200), position, 0});
        position += segments.back().num_tokens + pick(0, 5);
      }
      for (int tile = 0; tile < num_tiles; ++tile) {
        const int least = pick(0, 500), most = least + pick(0, 60);
        int32_t num_stages = 0;
        for (const Segment& segment : segments) {
          const Stages stages = visible_stages(shape, segment, least, most);
          for (int position = least; position <= most; ++position) {
            const TokenRange sees = visible_tokens(segment, position, shape.window);
            if (sees.empty()) continue;
            expect(
                sees.begin >= stages.first * 16 && sees.end <= (stages.first + stages.count) * 16,
                "stages: what a row sees");
          }
          num_stages += stages.count;
        }
        tiles.push_back({num_stages, of_head});
        of_head += unit_length(shape, num_stages);
      }
    }
    int32_t length = of_head * shape.num_kv_heads;
    if (length == 0) continue;
    int32_t stages_of_head = 0;
    for (const Tile& tile : tiles) stages_of_head += tile.num_stages;
    const WholeLengths lengths = whole_lengths(shape, length, stages_of_head);
    int32_t whole = 0;
    for (int32_t at = lengths.least; at <= lengths.most && whole == 0; ++at) {
      int32_t ranges = 0;
      for (const Tile& tile : tiles) ranges += divide_up(tile.num_stages, at);
      if (ranges <= lengths.ranges) whole = at;
    }
    num_whole += whole > 0;
    const auto length_of = [&](int32_t num_stages) {
      return whole > 0 ? round_up(num_stages, whole) : unit_length(shape, num_stages);
    };
    if (whole > 0) {
      const int32_t flat = std::max(divide_up(length, shape.workers), shape.least_range);
      expect((whole + shape.lead) * divide_up(shape.whole_ranges, shape.workers) <=
                 flat + flat / 32 + shape.part_cost,
             "whole ranges: no longer than a flat cut costs");
      of_head = 0;
      for (Tile& tile : tiles) {
        tile.unit_begin = of_head;
        of_head += length_of(tile.num_stages);
      }
      length = of_head * shape.num_kv_heads;
      shape.lead = 0;
    }
    const int32_t step = whole > 0 ? whole : range_length(shape, length);
    const int32_t num_ranges = divide_up(length, step);
    if (shape.fixed_range == 0) {
      expect(num_ranges <= (whole > 0 ? shape.whole_ranges : shape.flat_ranges),
             "ranges: no more than asked");
    }
    std::set<int32_t> slots;
    int64_t found = 0, wanted = 0;
    for (const Tile& tile : tiles) {
      const int32_t unit = length_of(tile.num_stages);
      for (int head = 0; head < shape.num_kv_heads && unit > 0; ++head) {
        const int32_t begin = head * of_head + tile.unit_begin + shape.lead;
        const UnitParts parts = parts_of(begin, tile.num_stages, step);
        wanted += tile.num_stages;
        for (int part = 0; part < parts.count; ++part) {
          const int32_t range = parts.first_range + part;
          const int32_t from = std::max(begin, range * step);
          const int32_t to = std::min(begin + tile.num_stages, (range + 1) * step);
          expect(from < to && range < num_ranges, "ranges: no part is empty");
          found += to - from;
          if (parts.count == 1) continue;
          expect(slots.insert(parts.slot(part)).second, "partials: one slot each");
          expect(parts.slot(part) / 2 == range, "partials: two slots a range");
          if (shape.fixed_range > 0 || whole > 0) {
            expect((from - begin) % step == 0, "a whole range begins where the unit says");
          }
        }
      }
    }
    expect(found == wanted, "ranges: every stage once");
  }
  expect(num_whole > 50, "both cuts were tried");
}

// The planner of cuda/pack.cuh in a straight line: every block once, and what is seen of each run.
void packed_runs() {
  std::mt19937 random(3);
  const auto pick = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  for (int round = 0; round < 300; ++round) {
    const int block_size = 8 << pick(0, 2);
    WorkShape shape{};
    shape.stage_tokens = 64;
    shape.window = pick(0, 1) * pick(1, 300);
    std::vector<Segment> segments;
    std::vector<int32_t> ids, order;
    for (int i = pick(1, 12), position = pick(0, 9); i > 0; --i) {
      const int num_tokens = pick(0, 3) * pick(0, 60), turn = pick(0, 2) * 7;
      if (pick(0, 9) == 0) position -= pick(0, std::min(position, 20));  // over the one before
      segments.push_back({int32_t(ids.size()), num_tokens, position, position + turn});
      for (int block = 0; block * block_size < num_tokens; ++block) ids.push_back(pick(0, 99));
      position += num_tokens + pick(0, 3);
    }
    for (int32_t i = 0; i < int32_t(segments.size()); ++i) order.push_back(i);
    std::sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
      return packs_before(segments.data(), i, j);
    });
    std::vector<StageBlock> blocks;
    std::vector<int32_t> begins;
    std::set<int32_t> entries;
    for (size_t at = 0; at < order.size(); ++at) {
      const Segment& of = segments[order[at]];
      if (at == 0 || !packs_with(segments[order[at - 1]], of)) begins.push_back(blocks.size());
      for (int block = 0; block * block_size < of.num_tokens; ++block) {
        blocks.push_back(stage_block(of, ids.data(), block, block_size));
        expect(entries.insert(blocks.back().entry).second, "packed: an entry once");
        expect(blocks.back().block == ids[blocks.back().entry], "packed: its block");
      }
    }
    expect(entries.size() == ids.size(), "packed: every entry");
    begins.push_back(blocks.size());
    const int at_once = shape.stage_tokens / block_size;
    for (size_t run = 0; run + 1 < begins.size(); ++run) {
      const StageBlock* const of = blocks.data() + begins[run];
      const int count = begins[run + 1] - begins[run];
      const int least = pick(0, 400), most = least + pick(0, 60);
      const Stages stages = visible_stages_of(shape, of, count, block_size, least, most);
      int first = count, last = -1;
      for (int i = 0; i < count; ++i) {
        const int end = of[i].position + of[i].num_tokens;
        if (i > 0)
          expect(of[i - 1].position + of[i - 1].num_tokens <= of[i].position, "packed: rising");
        const bool seen =
            of[i].position <= most && (shape.window == 0 || end - 1 > least - shape.window);
        if (!seen) continue;
        first = std::min(first, i);
        last = i;
      }
      expect(stages.count == (last < 0 ? 0 : last / at_once - first / at_once + 1),
             "packed: stages");
      expect(last < 0 || stages.first == first / at_once, "packed: the first stage");
    }
  }
}

// The planner of cuda/share.cu in a straight line, against groups found by comparing everything.
void shared_groups() {
  std::mt19937 random(2);
  const auto pick = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  for (int round = 0; round < 300; ++round) {
    std::vector<Segment> segments;
    std::vector<int32_t> ids, tokens, leaders;
    for (int i = pick(1, 30); i > 0; --i) {
      const int num_tokens = pick(0, 2) * 16 + pick(0, 1) * 5;
      segments.push_back({int32_t(ids.size()), num_tokens, pick(0, 99), pick(0, 99)});
      for (int block = 0; block * 16 < num_tokens; ++block) ids.push_back(pick(0, 1));
      tokens.push_back(pick(1, 4));
    }
    const int count = int(segments.size());
    const auto blocks = [&](int i) {
      const auto first = ids.begin() + segments[i].first_entry;
      return std::vector<int32_t>(first, first + (segments[i].num_tokens + 15) / 16);
    };
    std::vector<uint32_t> keys;
    for (const Segment& segment : segments) keys.push_back(share_key(segment, ids.data()));
    for (int i = 0; i < count; ++i) leaders.push_back(leader_of(keys.data(), i));
    for (int i = 0; i < count; ++i) {
      bool same = leaders[i] >= 0;
      for (int lane = 0; lane < 3 && same; ++lane) {
        same = same_blocks(segments[i], segments[leaders[i]], ids.data(), 16, lane, 3);
      }
      if (!same) leaders[i] = -1;
    }
    for (int i = 0; i < count; ++i) {
      const int leader = leaders[i];
      if (leader < 0) continue;
      expect(blocks(i) == blocks(leader), "groups: the same blocks");
      expect(segments[i].num_tokens == segments[leader].num_tokens, "groups: as many tokens");
      expect(leaders[leader] == leader && leader <= i, "groups: the leader is the first");
      int before = 0;
      for (int j = 0; j < i; ++j) before += leaders[j] == leader ? tokens[j] : 0;
      expect(tokens_before(leaders.data(), tokens.data(), i) == before, "groups: tokens in front");
    }
    for (int i = 0; i < count; ++i) {
      for (int j = 0; j < i; ++j) {  // where the first of a key is a leader, no equal is left out
        const bool same = segments[i].num_tokens > 0 && keys[i] == keys[j] &&
                          segments[i].num_tokens == segments[j].num_tokens &&
                          blocks(i) == blocks(j);
        if (same && leaders[j] == j) expect(leaders[i] == j, "groups: all that are the same");
      }
    }
  }
}

void visibility() {
  const Segment segment{0, 10, 100, 7};
  const auto is = [&](int query, int window, int begin, int end) {
    const TokenRange range = visible_tokens(segment, query, window);
    return range.empty() ? begin >= end : range.begin == begin && range.end == end;
  };
  expect(is(99, 0, 0, 0), "nothing before the segment");
  expect(is(100, 0, 0, 1), "its own position is visible");
  expect(is(104, 0, 0, 5) && is(500, 0, 0, 10), "up to the query, or to the end");
  expect(is(104, 3, 2, 5), "a window of 3 ends at the query");
  expect(is(111, 3, 9, 10) && is(112, 3, 0, 0), "a window passes by");
  expect(is(INT32_MAX, INT32_MAX, 0, 10) && is(0, INT32_MAX, 0, 0), "no overflow");
}

void addresses() {
  bfloat16* const base = nullptr;
  const PagedView<bfloat16> view{base, base, 1 << 20, 1 << 20, 64, 16};
  expect(view.k_slab(5000, 2) - base == int64_t{5000} * (1 << 20) + 2 * 64 * 16, "64-bit offsets");
  expect(view.k_offset(3, 21) == (21 / 8 * 16 + 3) * 8 + 21 % 8, "K is [head_dim / x][slot][x]");
  expect(view.v_offset(3, 21) == 21 * 16 + 3, "V is [head_dim][slot]");
}

void bfloat() {
  expect(to_bfloat16(1.0f + 1.0f / 256).bits == 0x3f80, "a tie goes to even, down");
  expect(to_bfloat16(1.0f + 3.0f / 256).bits == 0x3f82, "a tie goes to even, up");
  expect(to_bfloat16(3.4e38f).bits == 0x7f80, "too large is infinite");
  expect(std::isnan(to_float(to_bfloat16(std::nanf("")))), "a NaN stays one");
  expect(to_float(bfloat16{0xc040}) == -3.0f, "widening");
}

}  // namespace

int main() {
  softmax_state();
  rope();
  turned_rows();
  work_split();
  packed_runs();
  shared_groups();
  visibility();
  addresses();
  bfloat();
  return failures;
}
