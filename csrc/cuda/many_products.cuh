// The two products of many_queries.cuh on one stage of its ring: by warpgroups on sm_90a, warp by
// warp elsewhere.
//
//     K in shared memory  [head_dim / 8][stage tokens][8]   as in a block, but blocks side by side
//     V in shared memory  [block][head_dim][block size]     as in a block, pieces of 16 bytes swizzled
//
// For warpgroups, each block of V is followed by 8 rows of ones, as if head_dim were 8 more: the sum
// of the weights. With head_dim 256 they are apart.
#pragma once

#include <type_traits>

#include "stages.cuh"
#include "warpgroup.cuh"
#include "work.h"

namespace memkv::cuda {

inline constexpr int kCopyWarps = 4;  // that fill the ring; the others multiply

// What a block of threads is, with or without warpgroups, for attention or for block mass.
template <typename T, int kHeadDim, bool kMass, bool kWarpgroups>
struct ManyQueries {
  // That multiply: as many as registers and shared memory let.
  static constexpr int kWarps = !kWarpgroups || kHeadDim > 128 ? 8 : kMass ? 16 : 12;
  static constexpr int kThreads = (kWarps + kCopyWarps) * 32;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kTokens = kHeadDim > 128 ? 32 : 64;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kKeyBytes = kHeadDim * kTokens * 2;
  // Behind each block of V: 8 rows of ones. head_dim 256 has no room for them, and its ones apart.
  static constexpr bool kOnesApart = kHeadDim > 128;
  static constexpr int kOnesBytes = 128;  // of 8 tokens, where they are apart
  static constexpr int kValueRows = kHeadDim + (kOnesApart ? 0 : 8);
  static constexpr int kValueBytes = kMass ? 0 : kValueRows * kTokens * 2;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kQueryBytes = kSteps * 32 * 16;  // of one term of a warp
  static_assert(kKeyBytes % 512 == 0 && kStageBytes % 512 == 0, "eight swizzled rows of V");
  // Of the ring: as many as there is room for. Without warpgroups GPUs have 99 or 163 KiB.
  static constexpr int kStages = kWarpgroups ? (kHeadDim < 128 && !kMass ? 4 : 3)
                                             : (kHeadDim == 80 || kHeadDim == 128 ? 2 : 3);

  // Of each thread that multiplies and that copies: together as many as the block begins with.
  static constexpr int kRegisters = kWarps == 8 ? (kHeadDim > 128 ? 232 : 224) : kMass ? 112 : 160;
  static constexpr int kCopyRegisters = kWarps == 8 ? (kHeadDim > 128 ? 40 : 56) : 32;
  static_assert(kWarps * kRegisters + kCopyWarps * kCopyRegisters ==
                (kWarps + kCopyWarps) * (kWarps == 8 ? 168
                                         : kMass     ? 96
                                                     : 128));

  // Steps of a query's turn whose angles are on their way together. Twelve warps have registers for two
  // with bfloat16 only.
  static constexpr int kTurnsAtOnce =
      !kWarpgroups || kHeadDim > 128 || (kWarps == 12 && !std::is_same_v<T, __nv_bfloat16>) ? 1 : 2;

  // Beside each stage: the run that it is of, its blocks (at most those of 8 tokens), and the turn of
  // the run.
  static constexpr bool kHasTurns = kHeadDim <= 128;  // if there is room
  static constexpr int kBlocksAt = int(sizeof(StageRun));
  static constexpr int kTurnAt = kBlocksAt + kTokens / 8 * int(sizeof(StageBlock));
  static constexpr int kRunBytes = kTurnAt + (kHasTurns ? kHeadDim * 4 : 0);

  // Block mass: sums of the rows of each block of so many stages. Two blocks share no bank.
  static constexpr int kKept = 4;
  static constexpr int kRowFloats = kRows + 16;
  static constexpr int kSumBytes = kMass ? kTokens / 8 * kRowFloats * 4 : 0;

  static constexpr int kQueryAt = kStages * kStageBytes;
  static constexpr int kRunsAt = kQueryAt + kWarps * 2 * kQueryBytes;
  static constexpr int kOnesAt = kRunsAt + kStages * kRunBytes;
  static constexpr int kSumsAt = kOnesAt + (kOnesApart ? 2 * kOnesBytes : 0);
  // Where registers are short: each thread's part of the sums of its two rows' weights, which the
  // log-sum-exp takes.
  static constexpr bool kExactApart = !kMass && kWarps > 8;
  static constexpr int kExactAt = kSumsAt + kKept * kSumBytes;
  static constexpr int kPositionsAt = kExactAt + (kExactApart ? kWarps * 32 * 8 : 0);
  static constexpr int kWalksAt = kPositionsAt + kRows * 4;
  static constexpr int kBarriersAt = kWalksAt + (kWarps + kCopyWarps) * int(sizeof(RangeWalk));
  static constexpr int kFlagAt = kBarriersAt + kStages * 32;
  static constexpr int kBytes = kFlagAt + 16;
  static_assert(kBytes <= 227 * 1024);
};

// score [16 rows, stage tokens] and out [16 rows, head_dim + 8] are of a warp, in fragments of
// 16 x 8, the last of out the sum of the weights; weight is fragments of 16 x 16. In shared memory a
// term of the query is [head_dim / 8][64 rows][8], or without warpgroups [head_dim / 16][lane] of
// fragments.
template <typename T, int kHeadDim, int kBlockSize, bool kMass>
struct ManyProducts {
  using Loop = ManyQueries<T, kHeadDim, kMass, kHasWarpgroups>;
  static constexpr int kRowBytes = kBlockSize * 2;  // of V
  static constexpr int kSlabBytes = Loop::kValueRows * kRowBytes;
  using Numbers = Packed<T>;
  static constexpr bool kTogether = kHasWarpgroups;
  // Whether outputs of a stage are multiplied beside the next one's scores: registers are short at
  // head_dim 256.
  static constexpr bool kOverlaps = kTogether && kHeadDim <= 128 && !kMass;
  static constexpr int kRowsTogether = kTogether ? 64 : 16;  // that are multiplied at once
  static constexpr int kTermBytes = kRowsTogether / 16 * Loop::kQueryBytes;
  static constexpr int kSteps = Loop::kSteps, kTokens = Loop::kTokens, kTokenTiles = kTokens / 8;
  static constexpr int kOutputs = 4 * (2 * kSteps + 1);
  using Scores = float[4 * kTokenTiles];
  using Outputs = float[kOutputs];
  using Weights = uint32_t[kTokens / 16][4];

  // Elements 16 * step + 2q, + 1 and those 8 further on of rows g and g + 8 of this warp, of a term
  // of the query; g = lane / 4, q = lane % 4.
  static __device__ __forceinline__ void store_query(unsigned char* term,
                                                     int step,
                                                     const uint32_t (&two)[4]) {
    const int lane = lane_again();
    if constexpr (kTogether) {
      const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int piece = (2 * step + i / 2) * 64 + row + i % 2 * 8;
        *reinterpret_cast<uint32_t*>(term + piece * 16 + lane % 4 * 4) = two[i];
      }
    } else {
      reinterpret_cast<uint4*>(term)[step * 32 + lane] = {two[0], two[1], two[2], two[3]};
    }
  }

  // Adds to the scores.
  static __device__ __forceinline__ void scores(Scores& score, uint32_t term, uint32_t stage) {
    if constexpr (kTogether) {
      begin_scores(score, term, stage);
      wait_for_scores(score);
    } else {
      scores_apart(score, term, stage);
    }
  }

  // The same, with something done in between.
  static __device__ __forceinline__ void begin_scores(Scores& score,
                                                      uint32_t term,
                                                      uint32_t stage) {
    pin(score);
    const Matrices keys = Matrices::at<16>(stage, kTokens * 16);
    const Matrices rows = Matrices::at<16>(term, 64 * 16);
    begin_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Warpgroup<T, kTokens>::multiply_add(
          score, rows.further(step * 2 * (64 * 16)), keys.further(step * 2 * (kTokens * 16)));
    }
    commit_products();
  }
  static __device__ __forceinline__ void wait_for_scores(Scores& score) {
    wait_for_products<0>();
    pin(score);
  }

  // Begins to add to the scores, and weight times the V of another stage to out.
  static __device__ __forceinline__ void begin_scores_and_outputs(Scores& score,
                                                                  uint32_t term,
                                                                  uint32_t stage,
                                                                  Outputs& out,
                                                                  Weights& weight,
                                                                  uint32_t other_stage) {
    pin(out);
    pin_weights(weight);
    begin_scores(score, term, stage);
    begin_outputs(out, weight, other_stage, 0);
  }
  static __device__ __forceinline__ void wait_for_scores_alone(Scores& score) {
    wait_for_products<1>();
    pin(score);
  }
  static __device__ __forceinline__ void wait_for_outputs(Outputs& out, Weights& weight) {
    wait_for_products<0>();
    pin_weights(weight);
    pin(out);
  }

  // Adds weight times V to out, and times ones to the sum; ones: where they are, if apart.
  static __device__ __forceinline__ void outputs(Outputs& out,
                                                 Weights& weight,
                                                 uint32_t stage,
                                                 uint32_t ones) {
    if constexpr (kTogether) {
      pin(out);
      pin_weights(weight);
      begin_products();
      begin_outputs(out, weight, stage, ones);
      wait_for_outputs(out, weight);
    } else {
      const int lane = threadIdx.x % 32;
      const int row = lane % 8 + lane / 16 * 8;  // of 16 dimensions
      // 8 of 16 tokens, of this lane's row.
      const auto values_at = [&](int tokens) {
        const int group = tokens * 2 + lane / 8 % 2;
        const int piece = swizzled_piece<kRowBytes>(row, group % (kBlockSize / 8));
        return stage + Loop::kKeyBytes + group / (kBlockSize / 8) * kSlabBytes + row * kRowBytes +
               piece * 16;
      };
      constexpr uint32_t kOnes = Numbers::kOnes;
      constexpr int kBatch = 4, kBatches = (kSteps + kBatch - 1) / kBatch;
      Fragment v[2][kBatch];
      const auto load = [&](int batch) {  // of kBatches for each 16 tokens
        const uint32_t values = values_at(batch / kBatches);
        const int first = batch % kBatches * kBatch;
#pragma unroll
        for (int m = 0; m < kBatch; ++m) {
          if (first + m < kSteps) {
            v[batch % 2][m] = load_matrices(values + (first + m) * 16 * kRowBytes);
          }
        }
      };
      const auto fragment = [&](int n) -> float (&)[4] {
        return *reinterpret_cast<float (*)[4]>(out + 4 * n);
      };
      load(0);
#pragma unroll
      for (int batch = 0; batch < kTokens / 16 * kBatches; ++batch) {
        if (batch + 1 < kTokens / 16 * kBatches) load(batch + 1);
        const uint32_t (&a)[4] = weight[batch / kBatches];
        if (batch % kBatches == 0) Numbers::multiply_add(fragment(2 * kSteps), a, kOnes, kOnes);
#pragma unroll
        for (int m = 0; m < kBatch; ++m) {
          const int step = batch % kBatches * kBatch + m;
          if (step >= kSteps) break;
          const Fragment& of = v[batch % 2][m];
          Numbers::multiply_add(fragment(2 * step), a, of.r[0], of.r[1]);
          Numbers::multiply_add(fragment(2 * step + 1), a, of.r[2], of.r[3]);
        }
      }
    }
  }

 private:
  // Warp by warp.
  static __device__ __forceinline__ void scores_apart(Scores& score,
                                                      uint32_t query,
                                                      uint32_t stage) {
    const int lane = threadIdx.x % 32;
    // Where this lane's row of a fragment is: of tokens 0..7 and 8..15 in turn. Fragments of the
    // next step are on their way while this one is multiplied.
    const uint32_t keys = stage + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * (kTokens * 16);
    uint4 term[2];
    Fragment k[2][kTokenTiles / 2];
    const auto load = [&](int step) {
      term[step % 2] = load_shared_16(query + (step * 32 + lane) * 16);
#pragma unroll
      for (int n = 0; n < kTokenTiles; n += 2) {
        k[step % 2][n / 2] = load_matrices(keys + step * 2 * (kTokens * 16) + n * 8 * 16);
      }
    };
    load(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) load(step + 1);
      const uint4 x = term[step % 2];
      const uint32_t a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        float (&c)[4] = *reinterpret_cast<float (*)[4]>(score + 4 * n);
        const uint32_t* b = k[step % 2][n / 2].r + n % 2 * 2;
        Numbers::multiply_add(c, a, b[0], b[1]);
      }
    }
  }
  static __device__ __forceinline__ void begin_outputs(Outputs& out,
                                                       Weights& weight,
                                                       uint32_t stage,
                                                       uint32_t ones) {
    const Matrices values = Matrices::at<kRowBytes>(stage + Loop::kKeyBytes, kSlabBytes);
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) {
      const int block = n * 16 / kBlockSize;
      const Matrices of = values.further(block * kSlabBytes + (n * 16 - block * kBlockSize) * 2);
      if constexpr (Loop::kOnesApart) {
        Warpgroup<T, kHeadDim>::multiply_add(out, weight[n], of);
        Warpgroup<T, 8>::multiply_add(
            out + kHeadDim / 2, weight[n], Matrices::at<16>(ones, Loop::kOnesBytes));
      } else {
        Warpgroup<T, kHeadDim + 8>::multiply_add(out, weight[n], of);
      }
    }
    commit_products();
  }
  static __device__ __forceinline__ void pin_weights(Weights& weight) {
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) pin(weight[n]);
  }
};

}  // namespace memkv::cuda
