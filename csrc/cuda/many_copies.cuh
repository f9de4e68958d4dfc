// How the ring of many_queries.cuh is filled, by warps that do nothing else.
//
//     stage    | i | i+1 | i+2 | i+3 ...      full: the copies of all their threads are done
//     slot     | 0 |  1  |  2  |  0           empty: the warps that multiply have read it
//
// K and V of a slot are filled and emptied apart: K of a stage is read once, V a stage later.
#pragma once

#include "many_products.cuh"
#include "rows.cuh"
#include "stages.cuh"

namespace memkv::cuda {

// Lanes of a warp that say it has read a slot: one, behind __syncwarp(). racecheck holds what the
// others have read for unguarded, and is answered by having all of them say so.
#ifdef MEMKV_EVERY_LANE_ARRIVES
inline constexpr int kArrivingLanes = 32;
#else
inline constexpr int kArrivingLanes = 1;
#endif

// A slot of the ring, and how often it was filled before, by parity.
struct RingSlot {
  int index;
  uint32_t phase;
};

// The ring's barriers, and which slot a warp comes to next. All warps of the block pass the same
// stages.
template <typename Loop>
class Ring {
  static constexpr int kStages = Loop::kStages;

 public:
  static constexpr int kKeys = 0, kValues = 16;  // which barriers of a slot

  __device__ __forceinline__ explicit Ring(uint32_t barriers) : barriers_(barriers), next_{0, 0} {}

  // Once, by one thread, before any warp uses the ring.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < 2 * kStages; ++i) {
      barrier_init(barriers_ + i * 16, kCopyWarps * 32);
      barrier_init(barriers_ + i * 16 + 8, Loop::kWarps * kArrivingLanes);
    }
  }

  __device__ __forceinline__ const RingSlot& next() const { return next_; }
  __device__ __forceinline__ void pass() {
    if (++next_.index == kStages) next_ = {0, next_.phase ^ 1};
  }

  template <int kOf>
  __device__ __forceinline__ void wait_full(const RingSlot& slot) const {
    barrier_wait(barriers_ + slot.index * 32 + kOf, slot.phase);
  }
  template <int kOf>
  __device__ __forceinline__ void wait_empty(const RingSlot& slot) const {
    barrier_wait(barriers_ + slot.index * 32 + kOf + 8, slot.phase ^ 1);
  }

  // What this thread copied is on its way.
  template <int kOf>
  __device__ __forceinline__ void fill(const RingSlot& slot) const {
    barrier_arrive_after_copies(barriers_ + slot.index * 32 + kOf);
  }
  // This warp has read it.
  template <int kOf>
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    barrier_arrive_if(threadIdx.x % 32 < kArrivingLanes, barriers_ + slot * 32 + kOf + 8);
  }

 private:
  uint32_t barriers_;
  RingSlot next_;
};

// Copies K of a stage; what of a block is not used becomes zeros. Lane i of each warp knows the
// stage's block i: where none is left, another one of which no token is used.
template <typename Loop, int kHeadDim, int kBlockSize>
__device__ __forceinline__ void copy_keys(
    const PagedCache& cache, int32_t block, int32_t used, int kv_head, uint32_t to) {
  constexpr int kThreads = kCopyWarps * 32, kTokens = Loop::kTokens;
  constexpr int kPieces = Loop::kKeyBytes / 16, kSlabBytes = kHeadDim * kBlockSize * 2;
  static_assert(kThreads % kTokens == 0 && kPieces % kThreads == 0);
  const int thread = threadIdx.x % kThreads;
  const int token = thread % kTokens;  // 16 bytes of one token: a thread's is always the same
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

// The same of V. Where whole blocks are copied at once, a thread's place in a block is always the
// same: then nothing is divided here.
template <typename Loop, int kHeadDim, int kBlockSize>
__device__ __forceinline__ void copy_values(
    const PagedCache& cache, int32_t block, int32_t used, int kv_head, uint32_t to) {
  constexpr int kThreads = kCopyWarps * 32, kPieces = Loop::kKeyBytes / 16;
  constexpr int kRowBytes = kBlockSize * 2, kRowPieces = kRowBytes / 16;
  constexpr int kBlockPieces = kHeadDim * kRowPieces;
  constexpr bool kWholeBlocks = kBlockPieces % kThreads == 0;
  const int thread = threadIdx.x % kThreads;
  const char* const values =
      static_cast<const char*>(cache.v) + kv_head * (kHeadDim * kBlockSize * 2);
  constexpr int kAtOnce = Loop::kCopyRegisters < 56 ? 1 : kWholeBlocks ? kPieces / kThreads : 2;
#pragma unroll kAtOnce
  for (int i = 0; i < kPieces; i += kThreads) {
    const int of = kWholeBlocks ? i / kBlockPieces : (i + thread) / kBlockPieces;
    const int first = kWholeBlocks ? i % kBlockPieces : 0;  // of the block, in front of `place`
    const int place = kWholeBlocks ? thread : (i + thread) % kBlockPieces;
    const int row = place / kRowPieces, piece = place % kRowPieces;
    const int64_t id = __shfl_sync(kAllLanes, block, of);
    const int of_block = __shfl_sync(kAllLanes, used, of);
    copy_async_16(to + row * kRowBytes + swizzled_piece<kRowBytes>(row, piece) * 16 +
                      (of * Loop::kValueRows * kRowBytes + first * 16),
                  values + id * cache.v_block_stride * 2 + (place + first) * 16,
                  min(8, max(0, of_block - piece * 8)) * 2);
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
                                          Ring<Loop>& at_ring) {
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
    using Slots = Ring<Loop>;
    const RingSlot& slot = at_ring.next();
    at_ring.template wait_empty<Slots::kKeys>(slot);
    copy_run<Loop, kBlocks>(call,
                            work,
                            now.run,
                            now.first_block,
                            now.blocks_left,
                            now.enters,
                            ring + Loop::kRunsAt + slot.index * Loop::kRunBytes);
    copy_keys<Loop, kHeadDim, kBlockSize>(
        call.cache, now.block, now.used, start.kv_head, ring + slot.index * Loop::kStageBytes);
    at_ring.template fill<Slots::kKeys>(slot);
    if constexpr (!kMass) {
      at_ring.template wait_empty<Slots::kValues>(slot);
      copy_values<Loop, kHeadDim, kBlockSize>(
          call.cache,
          now.block,
          now.used,
          start.kv_head,
          ring + slot.index * Loop::kStageBytes + Loop::kKeyBytes);
      at_ring.template fill<Slots::kValues>(slot);
    }
    at_ring.pass();
  }
}

}  // namespace memkv::cuda
