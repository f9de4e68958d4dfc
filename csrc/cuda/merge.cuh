// What becomes of a row's result: partials, their merge, the finished row.
//
//     range 0  |tile 0      |   a range that has a whole unit finishes its rows
//     range 1  |tile 1 |...     parts of a unit are partials; the block of threads that comes last
//     range 2  |... tile 1  |   merges them in the order of the ranges
//
// Where sequences share blocks (work.h), rows are kept instead of finished, and join.cu finishes
// them. Everything is added in one order: the same bits every time.
#pragma once

#include "rows.cuh"

namespace memkv::cuda {

// What is kept of a row beside its output. The output is divided by `sum`, of the weights as they
// were rounded for the second product; the log-sum-exp is of `exact`, of those that were not.
// weight is for merging.
struct __align__(16) RowSums { float max, sum, exact, weight; };

// Writes elements d .. d + 3 of a finished row, and its log-sum-exp.
__device__ __forceinline__ void finish_row(
    const Attention& call, const RowPlace& place, int d, const RowSums& sums, const float4& out) {
  const SoftmaxState<float> state{sums.max, sums.sum};
  const int64_t offset = call.out.offset(place.token, place.head) + d;
  store_two(call.out, offset, finish(state, out.x), finish(state, out.y));
  store_two(call.out, offset + 2, finish(state, out.z), finish(state, out.w));
  if (d == 0 && call.lse != nullptr) {
    call.lse[place.token * call.num_heads + place.head] =
        log_sum_exp(SoftmaxState<float>{sums.max, sums.exact});
  }
}

__device__ __forceinline__ RowSums load_sums(const RowSums* p) {
  const float4 x = __ldcg(reinterpret_cast<const float4*>(p));
  return {x.x, x.y, x.z, x.w};
}

__device__ __forceinline__ void add_weighted(float4& to, const float4& x, float weight) {
  to.x = to.x + x.x * weight;
  to.y = to.y + x.y * weight;
  to.z = to.z + x.z * weight;
  to.w = to.w + x.w * weight;
}

// Parts of a row, in order, from their common maximum: the weights of SoftmaxState.
struct Merging {
  SoftmaxState<float> state = empty_softmax();
  float exact = 0.0f;

  __device__ __forceinline__ explicit Merging(float top) { state.raise(top); }
  __device__ __forceinline__ float add(const RowSums& sums) {
    const float weight = state.weight(sums.max);
    state.add(sums.sum * weight);
    exact = exact + sums.exact * weight;
    return weight;
  }
  __device__ __forceinline__ RowSums sums() const { return {state.max, state.sum, exact, 0.0f}; }
};

// A unit's partial of one range.
struct PartialView {
  float* out;     // [tile_rows, head_dim]
  RowSums* sums;  // [tile_rows]

  __device__ __forceinline__ PartialView(const Work& work, int32_t slot, int head_dim)
      : out(work.partials + slot * partial_floats(work.shape.tile_rows, head_dim)),
        sums(reinterpret_cast<RowSums*>(out + int64_t{work.shape.tile_rows} * head_dim)) {}
};

// Rows of a batch that shares blocks: what they found in each segment that is shared, and what they
// found alone.
struct KeptView {
  float* out;     // [kept_rows, num_heads, head_dim]
  RowSums* sums;  // [kept_rows, num_heads]

  __device__ __forceinline__ KeptView(const Attention& call, const SharedSegments& shared)
      : out(shared.kept),
        sums(reinterpret_cast<RowSums*>(shared.kept + int64_t{shared.kept_rows} * call.num_heads *
                                                          call.cache.head_dim)) {}
};

// Where the result of a tile's row goes: it is finished, or kept to be joined with others.
__device__ __forceinline__ void deliver_row(const Attention& call,
                                            const Work& work,
                                            const QueryTile& tile,
                                            int kv_head,
                                            int row,
                                            int d,
                                            const RowSums& sums,
                                            const float4& out) {
  const RowPlace place = place_of(work, tile, kv_head, row);
  if (work.shared.slots == nullptr) {
    finish_row(call, place, d, sums, out);
    return;
  }
  const KeptView kept(call, work.shared);
  const int64_t at = (tile.kept_row + place.token - tile.first_token) * call.num_heads + place.head;
  *reinterpret_cast<float4*>(kept.out + at * call.cache.head_dim + d) = out;
  if (d == 0) kept.sums[at] = sums;
}

// Merges the partials of a unit, in the order of the ranges: first each part's weight in each row,
// then the outputs. A thread sums four dimensions of a row after another, and has many of them on
// their way to places of its own in shared memory, as registers are short.
//
//     scratch   [parts][rows] of RowSums   [rows] of RowSums   [places][threads] of float4
template <int kHeadDim, int kTileRows>
__device__ __forceinline__ void merge_parts(const Attention& call,
                                            const Work& work,
                                            const QueryTile& tile,
                                            int kv_head,
                                            const UnitParts& parts,
                                            const Team& team,
                                            void* scratch,
                                            int scratch_bytes) {
  constexpr int kFours = kHeadDim / 4;
  constexpr int kStep = 2 * kTileRows * (kHeadDim + 4);  // floats from a part to the next
  const int count = parts.count, threads = team.threads;
  const int rows_at_once = min(tile.num_rows, max(1, scratch_bytes / 3 / (16 * (count + 1))));
  // Part 0 is in a slot of its own, the others are evenly spaced.
  const PartialView first(work, parts.first_slot, kHeadDim);
  const PartialView rest(work, 2 * parts.first_range, kHeadDim);
  for (int base = 0; base < tile.num_rows; base += rows_at_once) {
    const int rows = min(rows_at_once, tile.num_rows - base);
    RowSums* const sums = static_cast<RowSums*>(scratch);
    RowSums* const all = sums + count * rows;
    float4* const places = reinterpret_cast<float4*>(all + rows) + threadIdx.x;
    const int batch =
        (scratch_bytes - int(reinterpret_cast<char*>(all + rows) - static_cast<char*>(scratch))) /
        (16 * threads) / 2;

    for (int i = threadIdx.x; i < count * rows; i += threads) {
      const int part = i / rows, row = base + i % rows;
      sums[i] =
          load_sums(part == 0 ? first.sums + row : rest.sums + row + int64_t{part} * (kStep / 4));
    }
    team.sync();
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < rows; row += threads / 32) {  // a warp each
      float top = kMinusInfinity;
      for (int part = lane; part < count; part += 32) top = fmaxf(top, sums[part * rows + row].max);
#pragma unroll
      for (int across = 1; across < 32; across *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, across));
      }
      SoftmaxState<float> state{top, 0.0f};
      for (int part = lane; part < count; part += 32) {
        RowSums& of = sums[part * rows + row];
        of.weight = state.weight(of.max);
        of.sum = of.sum * of.weight;
        of.exact = of.exact * of.weight;
      }
      __syncwarp();
      if (lane == 0) {
        float exact = 0.0f;
#pragma unroll 8
        for (int part = 0; part < count; ++part) {
          state.add(sums[part * rows + row].sum);
          exact = exact + sums[part * rows + row].exact;
        }
        all[row] = {state.max, state.sum, exact, 0.0f};
      }
    }
    team.sync();

    // What this thread adds up, one after the other: the parts of item threadIdx.x, then of the item
    // so many threads further on.
    const int items = rows * kFours;
    struct Place {
      int item, part;
    };
    const auto next = [&](Place& at) {
      if (++at.part == count) at = {at.item + threads, 0};
    };
    Place asked{int(threadIdx.x), 0}, taken = asked;
    const auto ask = [&](int half) {
      for (int i = 0; i < batch && asked.item < items; ++i, next(asked)) {
        const int64_t at = (base + asked.item / kFours) * kHeadDim + asked.item % kFours * 4;
        const float* from = asked.part == 0 ? first.out : rest.out + int64_t{asked.part} * kStep;
        copy_async_16(shared_address(places + (half * batch + i) * threads), from + at, 16);
      }
      copy_async_commit();
    };
    ask(0);
    ask(1);
    float4 out{};
    for (int half = 0; taken.item < items; half ^= 1) {
      copy_async_wait<1>();
      for (int i = 0; i < batch && taken.item < items; ++i, next(taken)) {
        const int row = taken.item / kFours;
        add_weighted(
            out, places[(half * batch + i) * threads], sums[taken.part * rows + row].weight);
        if (taken.part == count - 1) {
          deliver_row(
              call, work, tile, kv_head, base + row, taken.item % kFours * 4, all[row], out);
          out = {};
        }
      }
      ask(half);
    }
    copy_async_wait<0>();
    team.sync();
  }
}

// Called by a team, all threads that wrote this block's partial of the unit. Whoever comes last
// merges them all; came_last is in shared memory.
template <int kHeadDim, int kTileRows>
__device__ __forceinline__ void arrive_and_merge(const Attention& call,
                                                 const Work& work,
                                                 const RangeStart& start,
                                                 const UnitParts& parts,
                                                 const Team& team,
                                                 void* scratch,
                                                 int scratch_bytes,
                                                 int* came_last) {
  team.sync();
  if (threadIdx.x == 0) {
    int32_t* arrived = work.arrived + start.tile * work.shape.num_kv_heads + start.kv_head;
    const bool last = arrive_at(arrived) == parts.count - 1;
    if (last) *arrived = 0;
    *came_last = last;
  }
  team.sync();
  if (*came_last) {
    merge_parts<kHeadDim, kTileRows>(
        call, work, start.of, start.kv_head, parts, team, scratch, scratch_bytes);
  }
  team.sync();
}

// Rows that see no key: zeros, and -inf.
template <int kHeadDim>
__device__ void finish_blind_tiles(const Attention& call,
                                   const Work& work,
                                   const WorkHeader& header,
                                   int threads) {
  if (header.num_blind_tiles == 0) return;
  constexpr int kFours = kHeadDim / 4;
  const int num_units = header.num_tiles * work.shape.num_kv_heads;
  for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    const QueryTile& tile = work.tiles[unit / work.shape.num_kv_heads];
    if (tile.num_stages > 0) continue;
    for (int item = threadIdx.x; item < tile.num_rows * kFours; item += threads) {
      const RowSums none{kMinusInfinity, 0.0f, 0.0f, 0.0f};
      deliver_row(call,
                  work,
                  tile,
                  unit % work.shape.num_kv_heads,
                  item / kFours,
                  item % kFours * 4,
                  none,
                  float4{});
    }
  }
}

}  // namespace memkv::cuda
