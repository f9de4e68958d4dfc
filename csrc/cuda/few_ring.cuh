// What a warp of few_queries.cuh reads: the blocks of its stages, on their way to shared memory.
#pragma once

#include "instructions.cuh"
#include "stages.cuh"

namespace memkv::cuda {

// Which blocks a stage has; the second is -1 where there is none.
struct StageBlocks {
  int32_t id[2];
};

// The blocks of a warp's stages, read 32 stages at a time: one for each lane.
class BlockList {
 public:
  __device__ __forceinline__
  BlockList(const Attention& call, const Work& work, int first_run, int end, int blocks_of_stage)
      : call_(call),
        work_(work),
        first_run_(first_run),
        end_(end),
        blocks_(blocks_of_stage),
        base_(INT32_MIN / 2),
        mine_{} {}

  // Of a stage; run is one that does not begin behind it. Stages never go back.
  __device__ __forceinline__ StageBlocks of(int stage, int run) {
    if (stage >= base_ + 32) {
      base_ = stage;
      read(run);
    }
    return {{__shfl_sync(0xffffffffu, mine_.id[0], stage - base_),
             blocks_ == 2 ? __shfl_sync(0xffffffffu, mine_.id[1], stage - base_) : -1}};
  }

 private:
  __device__ __forceinline__ void read(int run) {
    const int stage = base_ + int(threadIdx.x % 32);
    const int last = min(base_ + 31, end_ - 1);
    for (;; ++run) {
      const StageRun at = work_.runs[first_run_ + run];
      const int next = work_.runs[first_run_ + run + 1].stages_before;
      if (stage >= at.stages_before && stage < next && stage <= last) {
        const int first = (at.first_stage + stage - at.stages_before) * blocks_;
        const int32_t* ids = call_.plan.block_ids + at.first_entry + first;
        mine_.id[0] = __ldg(ids);
        if (blocks_ == 2) {
          mine_.id[1] = (first + 1) * call_.cache.block_size < at.num_tokens ? __ldg(ids + 1) : -1;
        }
      }
      if (last < next) break;
    }
  }

  const Attention& call_;
  const Work& work_;
  int first_run_, end_, blocks_, base_;
  StageBlocks mine_;
};

// One warp's stages in flight: K and V of each, or K only (kParts 1).
template <int kParts>
class StageRing {
 public:
  __device__ __forceinline__
  StageRing(const PagedCache& cache, uint32_t data, uint32_t barriers, int stages, int stage_tokens)
      : cache_(cache),
        data_(data),
        barriers_(barriers),
        block_bytes_(cache.head_dim * cache.block_size * 2),
        stage_bytes_(cache.head_dim * stage_tokens * 2),
        stages_(stages),
        slot_(0),
        parity_(0) {}

  __device__ __forceinline__ uint32_t keys() const { return data_ + slot_ * kParts * stage_bytes_; }
  __device__ __forceinline__ uint32_t values() const { return keys() + stage_bytes_; }

  // Asks for the K (part 0) or V (part 1) of a stage, `ahead` slots on.
  __device__ __forceinline__ void ask(int part, int ahead, const StageBlocks& blocks, int kv_head) {
    int slot = slot_ + ahead;
    if (slot >= stages_) slot -= stages_;
    const uint32_t to = data_ + (kParts * slot + part) * stage_bytes_;
    const char* base =
        static_cast<const char*>(part == 0 ? cache_.k : cache_.v) + int64_t{kv_head} * block_bytes_;
    const int64_t stride = (part == 0 ? cache_.k_block_stride : cache_.v_block_stride) * 2;
    const int count = blocks.id[1] >= 0 ? 2 : 1;
#ifdef MEMKV_BULK_COPY
    if (threadIdx.x % 32 == 0) {
      const uint32_t barrier = barriers_ + (kParts * slot + part) * 8;
      barrier_expect(barrier, count * block_bytes_);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == count) break;
        copy_bulk(to + i * block_bytes_, base + blocks.id[i] * stride, block_bytes_, barrier);
      }
    }
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == count) break;
      const char* from = base + blocks.id[i] * stride;
      for (int at = threadIdx.x % 32 * 16; at < block_bytes_; at += 32 * 16) {
        copy_async_16(to + i * block_bytes_ + at, from + at, 16);
      }
    }
#endif
  }

  // Ends an ask(), or stands for one where nothing was left to ask for.
  __device__ __forceinline__ void commit() const {
#ifndef MEMKV_BULK_COPY
    copy_async_commit();
#endif
  }

  __device__ __forceinline__ void wait(int part) const {
#ifdef MEMKV_BULK_COPY
    barrier_wait(barriers_ + (kParts * slot_ + part) * 8, (parity_ >> slot_) & 1);
#else
    // kParts * stages_ - 1 asked for later may still be under way.
    if (kParts * stages_ >= 6) {
      copy_async_wait<5>();
    } else if (kParts * stages_ == 4) {
      copy_async_wait<3>();
    } else {
      copy_async_wait<1>();
    }
    __syncwarp();
#endif
  }

  __device__ __forceinline__ void next_slot() {
    parity_ ^= 1u << slot_;
    slot_ = slot_ + 1 == stages_ ? 0 : slot_ + 1;
  }

 private:
  const PagedCache& cache_;
  uint32_t data_, barriers_;
  int block_bytes_, stage_bytes_, stages_;
  int slot_;
  uint32_t parity_;
};

}  // namespace memkv::cuda
