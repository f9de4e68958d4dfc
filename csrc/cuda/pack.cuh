// Packs the segments of sequences of many rows (packed_runs.h): their order, runs, blocks.
#pragma once

#include "plan.cuh"

namespace memkv::cuda {

inline __device__ int32_t sequence_of(const StepPlan& plan, int32_t segment) {
  int32_t low = 0, high = int32_t(plan.num_seqs);  // the last that begins at or before it
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (plan.segment_start[middle] <= segment ? low : high) = middle;
  }
  return low;
}

// Called by all threads of the planner. Sequences that have no tile of the work have no run.
inline __device__ void pack_segments(const StepPlan& plan, const Work& work) {
  const PackedSegments& packed = work.packed;
  const int32_t num_segments = plan.segment_start[plan.num_seqs];
  const auto takes_part = [&](int32_t sequence) {
    return tiles_of(work.shape, plan.query_start[sequence + 1] - plan.query_start[sequence]) > 0;
  };
  for (int32_t i = threadIdx.x; i < 2 * plan.num_seqs; i += kPlanThreads) packed.of_sequence[i] = 0;
  for (int32_t i = threadIdx.x; i < num_segments; i += kPlanThreads) {
    const int32_t sequence = sequence_of(plan, i);
    const int32_t begin = plan.segment_start[sequence], end = plan.segment_start[sequence + 1];
    int32_t at = i;
    if (takes_part(sequence)) {
      at = begin;
      for (int32_t j = begin; j < end; ++j) at += packs_before(plan.segments, j, i);
    }
    packed.order[at] = i;
  }
  __syncthreads();

  int32_t blocks_before = 0, runs_before = 0;
  for (int32_t base = 0; base < num_segments; base += kPlanThreads) {
    const int32_t at = base + threadIdx.x;
    int32_t sequence = 0, segment = 0, blocks = 0;
    bool starts = false, used = false;
    if (at < num_segments) {
      segment = packed.order[at];
      sequence = sequence_of(plan, segment);
      used = takes_part(sequence);
      const Segment& of = plan.segments[segment];
      if (used) {
        blocks = divide_up(of.num_tokens, packed.block_size);
        starts = at == plan.segment_start[sequence] ||
                 !packs_with(plan.segments[packed.order[at - 1]], of);
      }
    }
    int32_t all_blocks, all_runs;
    const int32_t block = blocks_before + block_scan(blocks, all_blocks);
    const int32_t run = runs_before + block_scan(starts, all_runs);
    if (used) {
      packed.first_block[at] = block;
      if (starts) packed.runs[run] = {block, segment};
      if (at == plan.segment_start[sequence]) packed.of_sequence[2 * sequence] = run;
      if (at + 1 == plan.segment_start[sequence + 1]) {
        packed.of_sequence[2 * sequence + 1] = run + starts;
      }
    }
    blocks_before += all_blocks;
    runs_before += all_runs;
  }
  if (threadIdx.x == 0) packed.runs[runs_before] = {blocks_before, 0};
  __syncthreads();

  for (int32_t at = threadIdx.x / 32; at < num_segments; at += kPlanWarps) {
    const int32_t segment = packed.order[at];
    if (!takes_part(sequence_of(plan, segment))) continue;
    const Segment& of = plan.segments[segment];
    const int32_t blocks = divide_up(of.num_tokens, packed.block_size);
    for (int32_t block = threadIdx.x % 32; block < blocks; block += 32) {
      packed.blocks[packed.first_block[at] + block] =
          stage_block(of, plan.block_ids, block, packed.block_size);
    }
  }
  __syncthreads();
}

}  // namespace memkv::cuda
