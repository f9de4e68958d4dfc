// How the ring of many_queries.cuh is filled, by warps that do nothing else.
//
//     stage    | i | i+1 | i+2 | i+3 ...      full: the copies of all their threads are done
//     slot     | 0 |  1  |  2  |  0           empty: the warps that multiply have read it
#pragma once

#include "many_products.cuh"
#include "stages.cuh"

namespace memkv::cuda {

// Where a warp is in the ring. All warps of the block pass the same stages.
class RingPlace {
 public:
  __device__ __forceinline__ explicit RingPlace(uint32_t barriers)
      : barriers_(barriers), slot_(0), phase_(0) {}

  // Once, by one thread, before any warp uses the ring.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kManyStages; ++i) {
      barrier_init(barriers_ + i * 16, kCopyWarps * 32);
      barrier_init(barriers_ + i * 16 + 8, kManyWarps);
    }
  }

  __device__ __forceinline__ int slot() const { return slot_; }
  __device__ __forceinline__ void wait_full() const {
    barrier_wait(barriers_ + slot_ * 16, phase_);
  }
  __device__ __forceinline__ void wait_empty() const {
    barrier_wait(barriers_ + slot_ * 16 + 8, phase_ ^ 1);
  }

  // Moves on: what this thread copied into the slot is on its way, or this warp has read the slot.
  __device__ __forceinline__ void filled() {
    barrier_arrive_after_copies(barriers_ + slot_ * 16);
    next();
  }
  __device__ __forceinline__ void read() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers_ + slot_ * 16 + 8);
    next();
  }

 private:
  __device__ __forceinline__ void next() {
    if (++slot_ == kManyStages) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

  uint32_t barriers_;
  int slot_;
  uint32_t phase_;
};

// Copies K and V of a stage, or K only; tokens past `valid` become zeros. Lane i of each warp knows
// the stage's block i, which exists even where none of its tokens is used.
template <typename Loop, int kHeadDim, int kBlockSize, bool kMass>
__device__ __forceinline__ void copy_stage(
    const PagedCache& cache, int32_t block, int valid, int kv_head, uint32_t to) {
  constexpr int kThreads = kCopyWarps * 32, kTokens = Loop::kTokens;
  constexpr int kPieces = Loop::kKeyBytes / 16;
  constexpr int kSlabBytes = kHeadDim * kBlockSize * 2, kGroups = kBlockSize / 8;
  static_assert(kThreads % kTokens == 0 && kPieces % kThreads == 0);
  const int thread = threadIdx.x % kThreads;
  {  // 16 bytes of one token: a thread's token is always the same
    const int token = thread % kTokens;
    const int64_t id = __shfl_sync(kAllLanes, block, token / kBlockSize);
    const char* const from = static_cast<const char*>(cache.k) + id * cache.k_block_stride * 2 +
                             kv_head * kSlabBytes +
                             (thread / kTokens * kBlockSize + token % kBlockSize) * 16;
    const int bytes = token < valid ? 16 : 0;
#pragma unroll
    for (int i = 0; i < kPieces; i += kThreads) {
      copy_async_16(to + (i + thread) * 16, from + i / kTokens * kBlockSize * 16, bytes);
    }
  }
  if constexpr (!kMass) {
    const char* const values = static_cast<const char*>(cache.v) + kv_head * kSlabBytes;
    constexpr int kAtOnce = kHeadDim > 128 ? 1 : 2;  // registers are short
#pragma unroll kAtOnce
    for (int i = 0; i < kPieces; i += kThreads) {  // 8 tokens of one dimension
      const int at = i + thread;
      const int of = at / (kHeadDim * kGroups), inside = at % (kHeadDim * kGroups);
      const int64_t id = __shfl_sync(kAllLanes, block, of);
      const int group = of * kGroups + inside % kGroups;
      copy_async_16(to + Loop::kKeyBytes + group * Loop::kValueGroupBytes + inside / kGroups * 16,
                    values + id * cache.v_block_stride * 2 + inside * 16,
                    min(8, max(0, valid - group * 8)) * 2);
    }
  }
}

// Copies the stages of this part of a unit, as slots become empty. A stage's block ids are on their way
// from memory while the stage before it is copied.
template <typename Loop, int kHeadDim, int kBlockSize, bool kMass>
__device__ __forceinline__ void fill_ring(const Attention& call,
                                          const Work& work,
                                          const RangeWalk& walk,
                                          uint32_t ring,
                                          RingPlace& place) {
  constexpr int kBlocks = Loop::kTokens / kBlockSize;
  const RangeStart& start = walk.start;
  const int end = walk.end;
  StageCursor cursor(work, start.of.first_run, start.of.num_runs, start.stage);
  const int lane = threadIdx.x % 32;
  int32_t next_block = 0;
  int next_valid = 0;
  const auto fetch = [&](int stage) {
    if (stage >= end) return;
    cursor.enter(stage);
    const int in_segment = cursor.stage_of_segment(stage);
    next_valid = cursor.segment().num_tokens - in_segment * Loop::kTokens;
    if (lane < kBlocks) {
      const bool used = lane * kBlockSize < next_valid;
      next_block = __ldg(call.plan.block_ids + cursor.segment().first_entry + in_segment * kBlocks +
                         (used ? lane : 0));
    }
  };
  fetch(start.stage);
  for (int stage = start.stage; stage < end; ++stage) {
    const int32_t block = next_block;
    const int valid = next_valid;
    fetch(stage + 1);
    place.wait_empty();
    copy_stage<Loop, kHeadDim, kBlockSize, kMass>(
        call.cache, block, valid, start.kv_head, ring + place.slot() * Loop::kStageBytes);
    place.filled();
  }
}

}  // namespace memkv::cuda
