// Query rows: where they are, how they turn; and what becomes of a row's result.
#pragma once

#include "instructions.cuh"
#include "memkv/rope.h"
#include "memkv/softmax_state.h"
#include "work.h"

namespace memkv::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

struct RowPlace {
  int64_t token;  // of q
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
    rotate_pair(a.x, a.y, __ldg(cos + d / 2), __ldg(sin + d / 2));
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
      rotate_pair(x, y, __ldg(cos + pair), __ldg(sin + pair));
      (i == 0 ? turned.x : turned.y) = second ? y : x;
    }
    return turned;
  }
  const bool second = d >= half;
  const int pair = second ? d - half : d;
  const float2 other = load(second ? pair : d + half);
  const float2 c = __ldg(reinterpret_cast<const float2*>(cos + pair));
  float2 s = __ldg(reinterpret_cast<const float2*>(sin + pair));
  if (!second) s = {-s.x, -s.y};
  return {a.x * c.x + other.x * s.x, a.y * c.y + other.y * s.y};
}

// Turns kRows rows of a lane, in the order of fragments: put(step, low, high) takes elements
// 16 * step + 2q, + 1 of each row, and those 8 further on. load(i, d) gives two elements of row i.
// Where both of a pair lie in this lane, which is the usual case, each is loaded once, and the
// angles of some steps are on their way together.
template <int kSteps, int kRows, int kAtOnce, typename Load, typename Put>
__device__ __forceinline__ void turn_rows(
    const float* turn, const RotaryPairs& pairs, int q, const Load& load, const Put& put) {
  const auto as_it_is = [&](int step) {
    float2 low[kRows], high[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      low[i] = load(i, 16 * step + 2 * q);
      high[i] = load(i, 16 * step + 2 * q + 8);
    }
    put(step, low, high);
  };
  if (turn == nullptr) {
#pragma unroll 4
    for (int step = 0; step < kSteps; ++step) as_it_is(step);
    return;
  }
  if (pairs.interleaved || pairs.count() % 16 != 0) {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      float2 low[kRows], high[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const auto of_row = [&](int d) { return load(i, d); };
        low[i] = turned_two(of_row, turn, pairs, 16 * step + 2 * q);
        high[i] = turned_two(of_row, turn, pairs, 16 * step + 2 * q + 8);
      }
      put(step, low, high);
    }
    return;
  }
  const int half = pairs.count() / 16;
  for (int base = 0; base < half; base += kAtOnce) {
    float2 cos[kAtOnce][2], sin[kAtOnce][2], a[kAtOnce][kRows][2], b[kAtOnce][kRows][2];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int step = min(base + j, half - 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int d = 16 * step + 8 * h + 2 * q;
        cos[j][h] = __ldg(reinterpret_cast<const float2*>(turn + d));
        sin[j][h] = __ldg(reinterpret_cast<const float2*>(turn + pairs.count() + d));
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          a[j][i][h] = load(i, d);
          b[j][i][h] = load(i, d + pairs.count());
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (base + j >= half) break;
      float2 first[2][kRows], second[2][kRows];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float2 x = a[j][i][h], y = b[j][i][h];
          rotate_pair(x.x, y.x, cos[j][h].x, sin[j][h].x);
          rotate_pair(x.y, y.y, cos[j][h].y, sin[j][h].y);
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

// What is kept of a row beside its output. The output is divided by `sum`, of the weights as they
// were rounded for the second product; the log-sum-exp is of `exact`, of those that were not.
struct __align__(16) RowSums { float max, sum, exact, unused; };

// Writes elements d and d + 1 of a finished row, and its log-sum-exp.
__device__ __forceinline__ void finish_row(
    const Attention& call, const RowPlace& place, int d, const RowSums& sums, float a, float b) {
  const SoftmaxState<float> state{sums.max, sums.sum};
  store_two(
      call.out, call.out.offset(place.token, place.head) + d, finish(state, a), finish(state, b));
  if (d == 0 && call.lse != nullptr) {
    call.lse[place.token * call.num_heads + place.head] =
        log_sum_exp(SoftmaxState<float>{sums.max, sums.exact});
  }
}

// A unit's partial of one range.
struct PartialView {
  float* out;     // [tile_rows, head_dim]
  RowSums* sums;  // [tile_rows]

  __device__ __forceinline__ PartialView(const Work& work, int32_t slot, int head_dim)
      : out(work.partials + slot * partial_floats(work.shape.tile_rows, head_dim)),
        sums(reinterpret_cast<RowSums*>(out + int64_t{work.shape.tile_rows} * head_dim)) {}
};

__device__ __forceinline__ RowSums load_sums(const RowSums* p) {
  const float4 x = __ldcg(reinterpret_cast<const float4*>(p));
  return {x.x, x.y, x.z, x.w};
}

// Partials of one row, in order. Their maxima come first, all of them, so that no load waits for
// the arithmetic of another: the weights of SoftmaxState, measured from the common maximum.
struct Merging {
  SoftmaxState<float> state = empty_softmax();
  float exact = 0.0f, a = 0.0f, b = 0.0f;

  __device__ __forceinline__ explicit Merging(float top) { state.raise(top); }
  __device__ __forceinline__ void add(const RowSums& sums, float2 out) {
    const float weight = state.weight(sums.max);
    state.add(sums.sum * weight);
    exact = exact + sums.exact * weight;
    a = a + out.x * weight;
    b = b + out.y * weight;
  }
  __device__ __forceinline__ RowSums sums() const { return {state.max, state.sum, exact, 0.0f}; }
};

// Called by all threads once this block's partial of the unit is written. Whoever comes last merges
// them all, in the order of the ranges, and writes the rows.
template <int kHeadDim>
__device__ void arrive_and_merge(const Attention& call,
                                 const Work& work,
                                 const QueryTile& tile,
                                 int32_t tile_index,
                                 int kv_head,
                                 const UnitParts& parts,
                                 int* came_last) {
  constexpr int kTwos = kHeadDim / 2, kAtOnce = 8;
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* arrived = work.arrived + tile_index * work.shape.num_kv_heads + kv_head;
    const bool last = arrive_at(arrived) == parts.count - 1;
    if (last) *arrived = 0;
    *came_last = last;
  }
  __syncthreads();
  if (*came_last) {
    const int64_t step = 2 * partial_floats(work.shape.tile_rows, kHeadDim);
    for (int item = threadIdx.x; item < tile.num_rows * kTwos; item += blockDim.x) {
      const int row = item / kTwos, d = item % kTwos * 2;
      // Part 0 is in a slot of its own, the others are evenly spaced.
      const PartialView first(work, parts.first_slot, kHeadDim);
      const PartialView rest(work, 2 * parts.first_range, kHeadDim);
      const RowSums first_sums = load_sums(first.sums + row);
      const float2 first_out =
          __ldcg(reinterpret_cast<const float2*>(first.out + row * kHeadDim + d));
      float top = first_sums.max;
      for (int base = 1; base < parts.count; base += kAtOnce) {
        float max[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int part = min(base + i, parts.count - 1);
          max[i] = __ldcg(reinterpret_cast<const float*>(rest.sums + row) + part * step);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, max[i]);
      }
      Merging merging(top);
      merging.add(first_sums, first_out);
      for (int base = 1; base < parts.count; base += kAtOnce) {
        RowSums sums[kAtOnce];
        float2 out[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int part = min(base + i, parts.count - 1);
          sums[i] = load_sums(reinterpret_cast<const RowSums*>(
              reinterpret_cast<const float*>(rest.sums + row) + part * step));
          out[i] =
              __ldcg(reinterpret_cast<const float2*>(rest.out + row * kHeadDim + d + part * step));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (base + i < parts.count) merging.add(sums[i], out[i]);
        }
      }
      finish_row(call, place_of(work, tile, kv_head, row), d, merging.sums(), merging.a, merging.b);
    }
  }
  __syncthreads();
}

// Rows that see no key: zeros, and -inf.
template <int kHeadDim>
__device__ void finish_blind_tiles(const Attention& call,
                                   const Work& work,
                                   const WorkHeader& header) {
  if (header.num_blind_tiles == 0) return;
  for (int index = blockIdx.x; index < header.num_tiles; index += gridDim.x) {
    const QueryTile tile = work.tiles[index];
    if (tile.num_stages > 0) continue;
    for (int kv_head = 0; kv_head < call.cache.num_kv_heads; ++kv_head) {
      for (int item = threadIdx.x; item < tile.num_rows * (kHeadDim / 2); item += blockDim.x) {
        const int row = item / (kHeadDim / 2), d = item % (kHeadDim / 2) * 2;
        const RowSums none{kMinusInfinity, 0.0f, 0.0f, 0.0f};
        finish_row(call, place_of(work, tile, kv_head, row), d, none, 0.0f, 0.0f);
      }
    }
  }
}

}  // namespace memkv::cuda
