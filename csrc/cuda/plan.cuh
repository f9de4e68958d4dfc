// What planners of tiles share: scans over their one block of threads, and the cut into ranges.
#pragma once

#include "work.h"

namespace memkv::cuda {

inline constexpr int kPlanThreads = 1024;
inline constexpr int kPlanWarps = kPlanThreads / 32;
inline constexpr unsigned kPlanLanes = 0xffffffffu;

inline __device__ int32_t warp_scan(int32_t x) {  // inclusive
  for (int step = 1; step < 32; step *= 2) {
    const int32_t before = __shfl_up_sync(kPlanLanes, x, step);
    if (int(threadIdx.x % 32) >= step) x += before;
  }
  return x;
}

// Exclusive prefix of x over the threads; total is of all. Every thread takes part.
inline __device__ int32_t block_scan(int32_t x, int32_t& total) {
  __shared__ int32_t of_warp[kPlanWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t sum = warp_scan(x);
  __syncthreads();
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  if (warp == 0) of_warp[lane] = warp_scan(of_warp[lane]);
  __syncthreads();
  total = of_warp[kPlanWarps - 1];
  return sum - x + (warp > 0 ? of_warp[warp - 1] : 0);
}

// The length of whole ranges, or 0 where the flat cut is better: each thread tries another length.
// Called by all threads.
inline __device__ int32_t whole_length(const Work& work,
                                       int32_t num_tiles,
                                       int32_t length,
                                       int32_t stages) {
  __shared__ int32_t shortest;
  const WholeLengths lengths = whole_lengths(work.shape, length, stages);
  if (lengths.least > lengths.most) return 0;
  if (threadIdx.x == 0) shortest = INT32_MAX;
  __syncthreads();
  const int32_t step = divide_up(lengths.most - lengths.least + 1, kPlanThreads);
  const int32_t mine = lengths.least + threadIdx.x * step;
  if (mine <= lengths.most) {
    int32_t ranges = 0;
    for (int32_t tile = 0; tile < num_tiles && ranges <= lengths.ranges; ++tile) {
      ranges += divide_up(work.tiles[tile].num_stages, mine);
    }
    if (ranges <= lengths.ranges) atomicMin(&shortest, mine);
  }
  __syncthreads();
  return shortest == INT32_MAX ? 0 : shortest;
}

// Lays the units of planned tiles end to end and writes where ranges begin. Called by all threads,
// behind a barrier.
inline __device__ void cut_into_ranges(const Work& work, int32_t num_tiles) {
  const WorkShape& shape = work.shape;
  int32_t flat_of_head = 0, stages_of_head = 0;
  for (int32_t base = 0; shape.whole_ranges > 0 && base < num_tiles; base += kPlanThreads) {
    const int32_t tile = base + threadIdx.x;
    int32_t flat, stages;
    block_scan(tile < num_tiles ? work.tiles[tile].unit_length : 0, flat);
    block_scan(tile < num_tiles ? work.tiles[tile].num_stages : 0, stages);
    flat_of_head += flat;
    stages_of_head += stages;
  }
  const int32_t whole =
      whole_length(work, num_tiles, flat_of_head * shape.num_kv_heads, stages_of_head);

  // Units of a kv head end to end.
  int32_t of_head = 0, num_blind = 0;
  for (int32_t base = 0; base < num_tiles; base += kPlanThreads) {
    const int32_t tile = base + threadIdx.x;
    int32_t own = 0;
    if (tile < num_tiles) {
      int32_t& unit_length = work.tiles[tile].unit_length;
      if (whole > 0) unit_length = round_up(work.tiles[tile].num_stages, whole);
      own = unit_length;
    }
    int32_t all, blind;
    const int32_t before = block_scan(own, all);
    block_scan(tile < num_tiles && own == 0, blind);
    if (tile < num_tiles) work.unit_begin[tile] = of_head + before;
    of_head += all;
    num_blind += blind;
  }
  const int32_t length = of_head * shape.num_kv_heads;
  const int32_t step = whole > 0 ? whole : range_length(shape, length);
  const int32_t lead = whole > 0 ? 0 : shape.lead;
  const int32_t num_ranges = divide_up(length, step);
  if (threadIdx.x == 0) *work.header = {num_tiles, num_blind, length, step, num_ranges};
  __syncthreads();

  // Where ranges begin.
  for (int32_t range = threadIdx.x; range < num_ranges; range += kPlanThreads) {
    const int32_t at = range * step, head = at / of_head, in_head = at - head * of_head;
    int32_t low = 0, high = num_tiles;  // the last tile that begins at or before `in_head`
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (work.unit_begin[middle] <= in_head ? low : high) = middle;
    }
    const int32_t unit_begin = head * of_head + work.unit_begin[low] + lead;
    work.ranges[range] = {low, head, max(at - unit_begin, 0), unit_begin, work.tiles[low]};
  }
  for (int32_t unit = threadIdx.x; unit < num_tiles * shape.num_kv_heads; unit += kPlanThreads) {
    work.arrived[unit] = 0;
  }
}

}  // namespace memkv::cuda
