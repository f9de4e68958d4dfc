// What the rows of a tile of many_queries.cuh give to each block of a stage: sums of their weights.
//
//     a lane      adds up its tokens of a block; four lanes have a row
//     a warp      keeps the sums of its 16 rows
//     all warps   after kKept stages add up rows of the same head, a warp for a stage and a head
//
// Everything is added in float32, in one order.
#pragma once

#include "many_products.cuh"
#include "rows.cuh"

namespace memkv::cuda {

template <typename Loop, int kBlockSize>
class StageMass {
  static constexpr int kTokens = Loop::kTokens, kBlocks = kTokens / kBlockSize;
  static constexpr int kRowFloats = Loop::kRowFloats;

 public:
  __device__ __forceinline__ StageMass(const Attention& call,
                                       const Work& work,
                                       const QueryTile& tile,
                                       int kv_head,
                                       unsigned char* shared,
                                       const Team& team)
      : call_(call),
        work_(work),
        tile_(tile),
        kv_head_(kv_head),
        sums_(reinterpret_cast<float*>(shared + Loop::kSumsAt)),
        team_(team),
        kept_(0),
        block_{} {}

  // Of this lane's rows, in units of log2. A row that sees nothing has weights of 0 whatever it is.
  __device__ __forceinline__ void read_lse(float (&lse)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
      const RowPlace place = place_of(work_, tile_, kv_head_, min(row, tile_.num_rows - 1));
      lse[i] = finite_or_zero(call_.lse[place.token * call_.num_heads + place.head]) * kLog2E;
    }
  }

  // block: of the stage, lane % kBlocks.
  __device__ __forceinline__ void begin_stage(const StageBlock& block) {
    if (kept_ == Loop::kKept) {
      finish();
      team_.sync();
      kept_ = 0;
    }
    if (kept_ == int(threadIdx.x / 32) % Loop::kKept) block_ = block;
    ++kept_;
  }

  // weight: fragments of this warp's 16 rows x the stage's tokens.
  __device__ __forceinline__ void keep(const float (&weight)[kTokens / 2]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float sum[2 * kBlocks];  // of row g, then of row g + 8
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const float* const of = weight + i % kBlocks * (kBlockSize / 2) + i / kBlocks * 2;
      sum[i] = of[0] + of[1];
#pragma unroll
      for (int n = 1; n < kBlockSize / 8; ++n) sum[i] += of[4 * n] + of[4 * n + 1];
    }
    // Lanes of a row divide its sums among them: row g + 8 is of odd ones.
    float half[kBlocks];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const float own = q % 2 == 0 ? sum[i] : sum[i + kBlocks];
      const float other = q % 2 == 0 ? sum[i + kBlocks] : sum[i];
      half[i] = own + __shfl_xor_sync(kAllLanes, other, 1);
    }
    float* const row = sums_of(kept_ - 1) + threadIdx.x / 32 * 16 + g + q % 2 * 8;
    if constexpr (kBlocks == 1) {
      half[0] += __shfl_xor_sync(kAllLanes, half[0], 2);
      if (q < 2) row[0] = half[0];
    } else {
#pragma unroll
      for (int i = 0; i < kBlocks / 2; ++i) {
        const float own = q < 2 ? half[i] : half[i + kBlocks / 2];
        const float other = q < 2 ? half[i + kBlocks / 2] : half[i];
        row[(q / 2 * (kBlocks / 2) + i) * kRowFloats] = own + __shfl_xor_sync(kAllLanes, other, 2);
      }
    }
  }

  // This warp sees nothing of the stage.
  __device__ __forceinline__ void keep_none() const {
    float* const rows = sums_of(kept_ - 1) + threadIdx.x / 32 * 16;
    for (int i = threadIdx.x % 32; i < kBlocks * 16; i += 32)
      rows[i / 16 * kRowFloats + i % 16] = 0;
  }

  // Writes what was kept.
  __device__ __forceinline__ void finish() const {
    team_.sync();
    const int warp = threadIdx.x / 32, stage = warp % Loop::kKept, group = work_.shape.group;
    if (stage >= kept_) return;
    constexpr int kParts = 32 / kBlocks;  // lanes that add up rows of a block
    static_assert(Loop::kWarps % Loop::kKept == 0 && 32 % kBlocks == 0);
    const int part = threadIdx.x % 32 / kBlocks;
    const float* const sums = sums_of(stage) + threadIdx.x % kBlocks * kRowFloats;
    for (int head = warp / Loop::kKept; head < group; head += Loop::kWarps / Loop::kKept) {
      float all = 0.0f;
      const int first = (head + group - tile_.first_head) % group;
#pragma unroll 4
      for (int row = first + part * group; row < tile_.num_rows; row += kParts * group) {
        all += sums[row];
      }
#pragma unroll
      for (int across = kBlocks; across < 32; across *= 2) {
        all += __shfl_xor_sync(kAllLanes, all, across);
      }
      if (part != 0 || block_.num_tokens == 0) continue;
      const int64_t plane = int64_t{tile_.index} * call_.num_heads;
      call_.block_mass[(plane + kv_head_ * group + head) * call_.plan.num_entries + block_.entry] =
          all;
    }
  }

 private:
  __device__ __forceinline__ float* sums_of(int kept) const {
    return sums_ + kept * (Loop::kSumBytes / 4);
  }

  const Attention& call_;
  const Work& work_;
  const QueryTile& tile_;
  int kv_head_;
  float* sums_;
  const Team& team_;
  int kept_;          // stages, this one included
  StageBlock block_;  // of the stage that this warp adds up
};

}  // namespace memkv::cuda
