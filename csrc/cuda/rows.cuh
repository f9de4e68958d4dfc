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

__device__ __forceinline__ RowPlace place_of(const Attention& call,
                                             const QueryTile& tile,
                                             int kv_head,
                                             int row) {
  const int group = call.group(), of_sequence = tile.first_row + row;
  return {call.plan.query_start[tile.sequence] + of_sequence / group,
          kv_head * group + of_sequence % group};
}

// Elements d and d + 1 of a row; d is even.
__device__ __forceinline__ float2 load_two(const HeadRows& rows, int64_t offset) {
  switch (rows.dtype) {
    case DType::kFloat32:
      return {static_cast<const float*>(rows.data)[offset],
              static_cast<const float*>(rows.data)[offset + 1]};
    case DType::kBFloat16: {
      const auto* p = static_cast<const __nv_bfloat16*>(rows.data) + offset;
      return {__bfloat162float(p[0]), __bfloat162float(p[1])};
    }
    default: {
      const auto* p = static_cast<const __half*>(rows.data) + offset;
      return {__half2float(p[0]), __half2float(p[1])};
    }
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
__device__ __forceinline__ float2 turned_two(
    const Load& load, const float* turn, const RotaryPairs& pairs, int d) {
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

// In units of log2, capped where the layer wants it.
struct ScoreScale {
  float scale, softcap;

  __device__ __forceinline__ float operator()(float product) const {
    if (softcap > 0.0f) return softcap * tanhf(product * scale / softcap) * kLog2E;
    return product * (scale * kLog2E);
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

// Writes elements d .. d + 3 of a finished row, and its log-sum-exp.
__device__ __forceinline__ void finish_row(const Attention& call,
                                           const QueryTile& tile,
                                           int kv_head,
                                           int row,
                                           int d,
                                           const SoftmaxState<float>& state,
                                           const float4& out) {
  const RowPlace place = place_of(call, tile, kv_head, row);
  const int64_t offset = call.out.offset(place.token, place.head) + d;
  store_two(call.out, offset, finish(state, out.x), finish(state, out.y));
  store_two(call.out, offset + 2, finish(state, out.z), finish(state, out.w));
  if (d == 0 && call.lse != nullptr) {
    call.lse[place.token * call.num_heads + place.head] = log_sum_exp(state);
  }
}

// A unit's partial of one range.
struct PartialView {
  float* out;  // [tile_rows, head_dim]
  float* state;  // [tile_rows, 2]

  __device__ __forceinline__ PartialView(const Work& work, int32_t slot, int head_dim)
      : out(work.partials + slot * partial_floats(work.shape.tile_rows, head_dim)),
        state(out + int64_t{work.shape.tile_rows} * head_dim) {}
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
  constexpr int kFours = kHeadDim / 4;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* arrived = work.arrived + tile_index * work.shape.num_kv_heads + kv_head;
    const bool last = atomicAdd(arrived, 1) == parts.count - 1;
    if (last) *arrived = 0;
    *came_last = last;
  }
  __syncthreads();
  if (*came_last) {
    __threadfence();
    for (int item = threadIdx.x; item < tile.num_rows * kFours; item += blockDim.x) {
      const int row = item / kFours, d = item % kFours * 4;
      float top = kMinusInfinity;
#pragma unroll 8
      for (int part = 0; part < parts.count; ++part) {
        const PartialView partial(work, parts.slot(part), kHeadDim);
        top = larger(top, __ldcg(partial.state + 2 * row));
      }
      SoftmaxState<float> merged = empty_softmax();
      merged.raise(top);
      float4 out{};
#pragma unroll 8
      for (int part = 0; part < parts.count; ++part) {
        const PartialView partial(work, parts.slot(part), kHeadDim);
        const float2 state = __ldcg(reinterpret_cast<const float2*>(partial.state + 2 * row));
        const float4 x =
            __ldcg(reinterpret_cast<const float4*>(partial.out + row * kHeadDim + d));
        const float factor = merged.weight(state.x);
        merged.add(state.y * factor);
        out.x += x.x * factor;
        out.y += x.y * factor;
        out.z += x.z * factor;
        out.w += x.w * factor;
      }
      finish_row(call, tile, kv_head, row, d, merged, out);
    }
  }
  __syncthreads();
}

// Rows that see no key: zeros, and -inf.
template <int kHeadDim>
__device__ void finish_blind_tiles(const Attention& call, const Work& work, const WorkHeader& header) {
  if (header.num_blind_tiles == 0) return;
  for (int index = blockIdx.x; index < header.num_tiles; index += gridDim.x) {
    const QueryTile tile = work.tiles[index];
    if (tile.num_stages > 0) continue;
    for (int kv_head = 0; kv_head < call.cache.num_kv_heads; ++kv_head) {
      for (int item = threadIdx.x; item < tile.num_rows * (kHeadDim / 4); item += blockDim.x) {
        finish_row(call,
                   tile,
                   kv_head,
                   item / (kHeadDim / 4),
                   item % (kHeadDim / 4) * 4,
                   empty_softmax(),
                   float4{});
      }
    }
  }
}

}  // namespace memkv::cuda
