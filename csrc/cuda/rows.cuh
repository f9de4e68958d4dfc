// Query rows: where they are, how they turn, what they see.
#pragma once

#include "instructions.cuh"
#include "memkv/rope.h"
#include "memkv/softmax_state.h"
#include "work.h"

namespace memkv::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

struct RowPlace {
  int64_t token;  // of q; where the tile is of a group, of its rows
  int head;
};

__device__ __forceinline__ RowPlace place_of(const Work& work,
                                             const QueryTile& tile,
                                             int kv_head,
                                             int row) {
  const uint32_t head = uint32_t(tile.first_head + row);
  const uint32_t token = head * work.group_magic >> 16;
  return {tile.first_token + int64_t{token},
          kv_head * work.shape.group + int(head - token * work.shape.group)};
}

// Elements d and d + 1 of a row; d is even, and so are the strides.
__device__ __forceinline__ float2 load_two(const HeadRows& rows, int64_t offset) {
  switch (rows.dtype) {
    case DType::kFloat32:
      return {static_cast<const float*>(rows.data)[offset],
              static_cast<const float*>(rows.data)[offset + 1]};
    case DType::kBFloat16:
      return Packed<__nv_bfloat16>::unpack(
          *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(rows.data) + offset));
    default:
      return Packed<__half>::unpack(
          *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(rows.data) + offset));
  }
}

__device__ __forceinline__ void store_two(const HeadRows& rows, int64_t offset, float a, float b) {
  switch (rows.dtype) {
    case DType::kFloat32:
      *reinterpret_cast<float2*>(static_cast<float*>(rows.data) + offset) = {a, b};
      return;
    case DType::kBFloat16:
      *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(rows.data) + offset) =
          Packed<__nv_bfloat16>::pack(a, b);
      return;
    default:
      *reinterpret_cast<uint32_t*>(static_cast<__half*>(rows.data) + offset) =
          Packed<__half>::pack(a, b);
  }
}

// The turn of a segment: cos, then sin; null where the query stays as it is.
__device__ __forceinline__ const float* turn_of(const Attention& call,
                                                const Segment& segment,
                                                int32_t index) {
  const bool stays = call.rotary_dim == 0 || segment.position == segment.stored_position;
  return stays ? nullptr : call.turns + int64_t{index} * call.rotary_dim;
}

// Elements d and d + 1 of a row, turned; load(d) gives those of the row as it arrived.
template <typename Load>
__device__ __forceinline__ float2
turned_two(const Load& load, const float* turn, const RotaryPairs& pairs, int d) {
  float2 a = load(d);
  if (turn == nullptr || d >= pairs.rotary_dim) return a;
  const float* cos = turn;
  const float* sin = turn + pairs.count();
  if (pairs.interleaved) {
    rotate_pair(a.x, a.y, cos[d / 2], sin[d / 2]);
    return a;
  }
  const auto one = [&](int i) { return i % 2 ? load(i - 1).y : load(i).x; };
  const int half = pairs.count();
  if (half % 2 != 0) {
    float2 turned;
    for (int i = 0; i < 2; ++i) {
      const bool second = d + i >= half;
      const int pair = second ? d + i - half : d + i;
      float x = one(pair), y = one(pair + half);
      rotate_pair(x, y, cos[pair], sin[pair]);
      (i == 0 ? turned.x : turned.y) = second ? y : x;
    }
    return turned;
  }
  const bool second = d >= half;
  const int pair = second ? d - half : d;
  const float2 other = load(second ? pair : d + half);
  const float2 c = *reinterpret_cast<const float2*>(cos + pair);
  float2 s = *reinterpret_cast<const float2*>(sin + pair);
  if (!second) s = {-s.x, -s.y};
  return {a.x * c.x + other.x * s.x, a.y * c.y + other.y * s.y};
}

// Turns kRows rows of a lane, in the order of fragments: put(step, low, high) takes elements
// 16 * step + 2q, + 1 of each row, and those 8 further on. load(i, d) gives two elements of row i,
// turns[i] is its turn; all are null or none. Where both of a pair lie in this lane, which is the
// usual case, each is loaded once, and the angles of kAtOnce steps are on their way together; 0 is
// for loops that are short of registers.
template <int kSteps, int kRows, int kAtOnce, typename Load, typename Put>
__device__ __forceinline__ void turn_rows(const float* const (&turns)[kRows],
                                          const RotaryPairs& pairs,
                                          int q,
                                          const Load& load,
                                          const Put& put) {
  const auto as_it_is = [&](int step) {
    float2 low[kRows], high[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      low[i] = load(i, 16 * step + 2 * q);
      high[i] = load(i, 16 * step + 2 * q + 8);
    }
    put(step, low, high);
  };
  if (turns[0] == nullptr) {
#pragma unroll 4
    for (int step = 0; step < kSteps; ++step) as_it_is(step);
    return;
  }
  if (kAtOnce == 0 || pairs.interleaved || pairs.count() % 16 != 0) {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      float2 low[kRows], high[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto of_row = [&](int d) { return load(i, d); };
        low[i] = turned_two(of_row, turns[i], pairs, 16 * step + 2 * q);
        high[i] = turned_two(of_row, turns[i], pairs, 16 * step + 2 * q + 8);
      }
      put(step, low, high);
    }
    return;
  }
  constexpr int kSome = kAtOnce > 0 ? kAtOnce : 1;
  const int half = pairs.count() / 16;
  for (int base = 0; base < half; base += kSome) {
    float2 cos[kSome][kRows][2], sin[kSome][kRows][2];
    float2 a[kSome][kRows][2], b[kSome][kRows][2];
#pragma unroll
    for (int j = 0; j < kSome; ++j) {
      const int step = min(base + j, half - 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int d = 16 * step + 8 * h + 2 * q;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          cos[j][i][h] = *reinterpret_cast<const float2*>(turns[i] + d);
          sin[j][i][h] = *reinterpret_cast<const float2*>(turns[i] + pairs.count() + d);
          a[j][i][h] = load(i, d);
          b[j][i][h] = load(i, d + pairs.count());
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kSome; ++j) {
      if (base + j >= half) break;
      float2 first[2][kRows], second[2][kRows];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float2 x = a[j][i][h], y = b[j][i][h];
          rotate_pair(x.x, y.x, cos[j][i][h].x, sin[j][i][h].x);
          rotate_pair(x.y, y.y, cos[j][i][h].y, sin[j][i][h].y);
          first[h][i] = x;
          second[h][i] = y;
        }
      }
      put(base + j, first[0], first[1]);
      put(base + j + half, second[0], second[1]);
    }
  }
  for (int step = 2 * half; step < kSteps; ++step) as_it_is(step);
}

// Products to scores in units of log2, capped where the layer wants it. Decided once for all scores
// of a stage, so that tanh stays out of the way of layers without a cap.
struct ScoreScale {
  float scale, inside, cap;

  __device__ __forceinline__ explicit ScoreScale(const Attention& call)
      : scale(call.scale * kLog2E),
        inside(call.softcap > 0.0f ? call.scale / call.softcap : 0.0f),
        cap(call.softcap * kLog2E) {}

  template <int kCount>
  __device__ __forceinline__ void operator()(float (&score)[kCount]) const {
    if (cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) score[i] = cap * tanhf(score[i] * inside);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) score[i] = score[i] * scale;
    }
  }

  // Where scaling keeps the order it can wait for the weights: those then are of products times
  // what is returned, and these need no operator().
  __device__ __forceinline__ float unit() const {
    return cap > 0.0f || !(scale > 0.0f) ? 1.0f : scale;
  }
};

// Which tokens of a segment the rows of a tile see: all of them [every_begin, every_end), some of
// them [some_begin, some_end).
struct TileView {
  int32_t some_begin, some_end, every_begin, every_end;

  __device__ __forceinline__ TileView(const Segment& segment,
                                      int32_t least,
                                      int32_t most,
                                      int32_t window) {
    const TokenRange of_least = visible_tokens(segment, least, window);
    const TokenRange of_most = visible_tokens(segment, most, window);
    some_begin = of_least.begin;
    some_end = of_most.end;
    every_begin = of_most.begin;
    every_end = of_least.end;
  }
};

}  // namespace memkv::cuda
