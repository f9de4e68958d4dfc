// How the ring of many_queries.cuh is filled, by warps that do nothing else.
//
//     stage    | i | i+1 | i+2 | i+3 ...      full: the copies of all their threads are done
//     slot     | 0 |  1  |  2  |  0           empty: the threads that multiply have read it
#pragma once

#include "many_products.cuh"
#include "rows.cuh"
#include "stages.cuh"

namespace memkv::cuda {

// Where a warp is in the ring. All warps of the block pass the same stages.
template <int kStages>
class RingPlace {
 public:
  __device__ __forceinline__ explicit RingPlace(uint32_t barriers)
      : barriers_(barriers), slot_(0), phase_(0) {}

  // Once, by one thread, before any warp uses the ring.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers_ + i * 16, kCopyWarps * 32);
      barrier_init(barriers_ + i * 16 + 8, kManyWarps * 32);
    }
  }

  __device__ __forceinline__ int slot() const { return slot_; }
  __device__ __forceinline__ void wait_full() const {
    barrier_wait(barriers_ + slot_ * 16, phase_);
  }
  __device__ __forceinline__ void wait_empty() const {
    barrier_wait(barriers_ + slot_ * 16 + 8, phase_ ^ 1);
  }

  // What this thread copied into the slot is on its way.
  __device__ __forceinline__ void fill() const {
    barrier_arrive_after_copies(barriers_ + slot_ * 16);
  }
  // This thread has read a slot, this one or an earlier one.
  __device__ __forceinline__ void release(int slot) const {
    barrier_arrive(barriers_ + slot * 16 + 8);
  }
  __device__ __forceinline__ void pass() {
    if (++slot_ == kStages) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  uint32_t barriers_;
  int slot_;
  uint32_t phase_;
};

// Copies K and V of a stage, or K only; what of a block is not used becomes zeros. Lane i of each
// warp knows the stage's block i: where none is left, another one of which no token is used.
template <typename Loop, int kHeadDim, int kBlockSize, bool kMass>
__device__ __forceinline__ void copy_stage(
    const PagedCache& cache, int32_t block, int32_t used, int kv_head, uint32_t to) {
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
    const int of_block = __shfl_sync(kAllLanes, used, token / kBlockSize);
    const int bytes = token % kBlockSize < of_block ? 16 : 0;
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
      const int of_block = __shfl_sync(kAllLanes, used, of);
      const int group = of * kGroups + inside % kGroups;
      copy_async_16(to + Loop::kKeyBytes + group * Loop::kValueGroupBytes + inside / kGroups * 16,
                    values + id * cache.v_block_stride * 2 + inside * 16,
                    min(8, max(0, of_block - inside % kGroups * 8)) * 2);
    }
  }
}

// Copies the run that a stage is of, its blocks, and where the stage is the first of a run the turn.
template <typename Loop, int kBlocks>
__device__ __forceinline__ void copy_run(const Attention& call,
                                         const Work& work,
                                         int run,
                                         int first_block,
                                         int blocks_left,
                                         bool enters,
                                         uint32_t to) {
  constexpr int kRunPieces = int(sizeof(StageRun) / 16);
  const int thread = threadIdx.x % (kCopyWarps * 32);
  const StageRun* const from = work.runs + run;
  if (thread < kRunPieces) {
    copy_async_16(to + thread * 16, reinterpret_cast<const char*>(from) + thread * 16, 16);
  } else if (thread < kRunPieces + kBlocks) {
    const int block = thread - kRunPieces;
    const bool some = block < blocks_left;
    copy_async_16(
        to + thread * 16, work.packed.blocks + first_block + (some ? block : 0), some ? 16 : 0);
  }
  if (Loop::kHasTurns && enters && !work.shared.of_groups && thread < call.rotary_dim / 2) {
    const float* const turn = turn_of(call, from->segment(), from->index);
    if (turn != nullptr) copy_async_8(to + Loop::kTurnAt + thread * 8, turn + thread * 2);
  }
}

// Copies the stages of this part of a unit, as slots become empty. A stage's blocks are on their way from
// memory while the stage before it is copied.
template <typename Loop, int kHeadDim, int kBlockSize, bool kMass>
__device__ __forceinline__ void fill_ring(const Attention& call,
                                          const Work& work,
                                          const RangeWalk& walk,
                                          uint32_t ring,
                                          RingPlace<Loop::kStages>& place) {
  constexpr int kBlocks = Loop::kTokens / kBlockSize;
  const RangeStart& start = walk.start;
  const int end = walk.end;
  StageCursor cursor(work, start.of.first_run, start.of.num_runs, start.stage);
  const int lane = threadIdx.x % 32;
  struct {
    int32_t block, used;  // this lane's
    int run, first_block, blocks_left;
    bool enters;
  } next{};
  const auto fetch = [&](int stage) {
    if (stage >= end) return;
    next.enters = cursor.enter(stage) || stage == start.stage;
    next.run = start.of.first_run + cursor.run;
    const int before = cursor.stage_of_segment(stage) * kBlocks;
    next.first_block = cursor.segment().first_entry + before;
    next.blocks_left = cursor.segment().num_tokens / kBlockSize - before;
    if (lane < kBlocks) {
      const bool some = lane < next.blocks_left;
      const StageBlock* const from = work.packed.blocks + next.first_block + (some ? lane : 0);
      next.block = __ldg(&from->block);
      next.used = some ? __ldg(&from->num_tokens) : 0;
    }
  };
  fetch(start.stage);
  for (int stage = start.stage; stage < end; ++stage) {
    const auto now = next;
    fetch(stage + 1);
    place.wait_empty();
    copy_run<Loop, kBlocks>(call,
                            work,
                            now.run,
                            now.first_block,
                            now.blocks_left,
                            now.enters,
                            ring + Loop::kRunsAt + place.slot() * Loop::kRunBytes);
    copy_stage<Loop, kHeadDim, kBlockSize, kMass>(
        call.cache, now.block, now.used, start.kv_head, ring + place.slot() * Loop::kStageBytes);
    place.fill();
    place.pass();
  }
}

}  // namespace memkv::cuda
