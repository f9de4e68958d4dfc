// The two products of many_queries.cuh on one stage of its ring: by warpgroups on sm_90a, warp by
// warp elsewhere.
//
//     K in shared memory  [head_dim / 8][stage tokens][8]   as in a block, but blocks side by side
//     V in shared memory  [stage tokens / 8][head_dim][8]   8 x 8 core matrices too: no bank twice
//
// For warpgroups, each group of 8 tokens of V is followed by 8 rows of ones, as if head_dim were 8
// more: the sum of the weights. With head_dim 256 they are apart.
#pragma once

#include "stages.cuh"
#include "warpgroup.cuh"
#include "work.h"

namespace memkv::cuda {

inline constexpr int kManyWarps = 8;  // that multiply
inline constexpr int kCopyWarps = 4;  // that fill the ring
inline constexpr int kManyThreads = (kManyWarps + kCopyWarps) * 32;
inline constexpr int kManyRows = 16 * kManyWarps;

template <typename T, int kHeadDim>
struct ManyQueries {
  static constexpr int kTokens = kHeadDim > 128 ? 32 : 64;
  static constexpr int kStages =
      kHeadDim > 128 ? 3 : 4;  // of the ring: as many as there is room for
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kKeyBytes = kHeadDim * kTokens * 2;
  // Behind 8 tokens of V: 8 rows of ones, and a space, so that copies of two groups share no bank.
  // head_dim 256 has no room for them, and its ones apart.
  static constexpr int kOnesBytes = 128;
  static constexpr bool kOnesApart = kHeadDim > 128;
  static constexpr int kValueGroupBytes = kHeadDim * 16 + (kOnesApart ? 0 : kOnesBytes + 64);
  static constexpr int kValueBytes = kTokens / 8 * kValueGroupBytes;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kQueryBytes = kSteps * 32 * 16;  // of one term of a warp

  // Of each thread that multiplies and that copies: together as many as the block begins with.
  static constexpr int kRegisters = kHeadDim > 128 ? 232 : 224;
  static constexpr int kCopyRegisters = kHeadDim > 128 ? 40 : 56;
  static_assert(kManyWarps * kRegisters + kCopyWarps * kCopyRegisters ==
                (kManyWarps + kCopyWarps) * 168);

  // Beside each stage: the run that it is of, its blocks (at most those of 8 tokens), and the turn of
  // the run.
  static constexpr bool kHasTurns = kHeadDim <= 128;  // if there is room
  static constexpr int kBlocksAt = int(sizeof(StageRun));
  static constexpr int kTurnAt = kBlocksAt + kTokens / 8 * int(sizeof(StageBlock));
  static constexpr int kRunBytes = kTurnAt + (kHasTurns ? kHeadDim * 4 : 0);

  static constexpr int kQueryAt = kStages * kStageBytes;
  static constexpr int kRunsAt = kQueryAt + kManyWarps * 2 * kQueryBytes;
  static constexpr int kOnesAt = kRunsAt + kStages * kRunBytes;
  static constexpr int kPositionsAt = kOnesAt + (kOnesApart ? 2 * kOnesBytes : 0);
  static constexpr int kWalksAt = kPositionsAt + kManyRows * 4;
  static constexpr int kBarriersAt = kWalksAt + (kManyWarps + kCopyWarps) * int(sizeof(RangeWalk));
  static constexpr int kFlagAt = kBarriersAt + 2 * kStages * 8;
  static constexpr int kBytes = kFlagAt + 16;
  static_assert(kBytes <= 227 * 1024);
};

// score [16 rows, stage tokens] and out [16 rows, head_dim + 8] are of a warp, in fragments of
// 16 x 8, the last of out the sum of the weights; query and weight are fragments of 16 x 16.
template <typename T, int kHeadDim>
struct ManyProducts {
  using Loop = ManyQueries<T, kHeadDim>;
  using Numbers = Packed<T>;
  static constexpr bool kTogether = kHasWarpgroups;
  // Whether queries stay in registers, and outputs of a stage are multiplied beside the next one's
  // scores: registers are short at head_dim 256.
  static constexpr bool kOverlaps = kTogether && kHeadDim <= 128;
  static constexpr int kSteps = Loop::kSteps, kTokens = Loop::kTokens, kTokenTiles = kTokens / 8;
  static constexpr int kOutputs = 4 * (2 * kSteps + 1);
  using Scores = float[4 * kTokenTiles];
  using Outputs = float[kOutputs];
  using Weights = uint32_t[kTokens / 16][4];
  using Query = uint32_t[kSteps][4];

  // query [kSteps][lane].
  static __device__ __forceinline__ void load_query(Query& a, const uint4* query) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4 x = query[step * 32 + threadIdx.x % 32];
      a[step][0] = x.x, a[step][1] = x.y, a[step][2] = x.z, a[step][3] = x.w;
    }
  }

  // Adds to the scores.
  static __device__ __forceinline__ void scores(Scores& score, Query& a, uint32_t stage) {
    begin_scores(score, a, stage);
    wait_for_scores(score, a);
  }

  // The same, with something done in between.
  static __device__ __forceinline__ void begin_scores(Scores& score, Query& a, uint32_t stage) {
    pin_query(a);
    pin(score);
    begin_products();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Warpgroup<T, kTokens>::multiply_add(
          score, a[step], core_matrices(stage + step * 2 * (kTokens * 16), kTokens * 16));
    }
    commit_products();
  }
  static __device__ __forceinline__ void wait_for_scores(Scores& score, Query& a) {
    wait_for_products<0>();
    pin_query(a);
    pin(score);
  }

  // Adds to the scores, while weight times the V of another stage is added to out: that is done
  // once wait_for_outputs() is.
  static __device__ __forceinline__ void scores_beside_outputs(Scores& score,
                                                               Query& a,
                                                               uint32_t stage,
                                                               Outputs& out,
                                                               Weights& weight,
                                                               uint32_t other_stage) {
    pin(out);
    pin_weights(weight);
    begin_scores(score, a, stage);
    begin_outputs(out, weight, other_stage, 0);
    wait_for_products<1>();
    pin_query(a);
    pin(score);
  }
  static __device__ __forceinline__ void wait_for_outputs(Outputs& out, Weights& weight) {
    wait_for_products<0>();
    pin_weights(weight);
    pin(out);
  }

  // Adds to the scores; query [kSteps][lane].
  static __device__ __forceinline__ void scores(Scores& score, const uint4* query, uint32_t stage) {
    const int lane = threadIdx.x % 32;
    if constexpr (kTogether) {
      constexpr int kAtOnce = kSteps > 8 ? 2 : kSteps;  // registers are short at head_dim 256
#pragma unroll
      for (int base = 0; base < kSteps; base += kAtOnce) {
        uint32_t a[kAtOnce][4];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const uint4 x = query[(base + i) * 32 + lane];
          a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
        }
        pin(score);
        begin_products();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          Warpgroup<T, kTokens>::multiply_add(
              score, a[i], core_matrices(stage + (base + i) * 2 * (kTokens * 16), kTokens * 16));
        }
        commit_products();
        wait_for_products<0>();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) pin(a[i]);
        pin(score);
      }
    } else {
      // Where this lane's row of a fragment is: of tokens 0..7 and 8..15 in turn. Fragments of the
      // next step are on their way while this one is multiplied.
      const uint32_t keys = stage + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * (kTokens * 16);
      uint4 term[2];
      Fragment k[2][kTokenTiles / 2];
      const auto load = [&](int step) {
        term[step % 2] = query[step * 32 + lane];
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
          float(&c)[4] = *reinterpret_cast<float(*)[4]>(score + 4 * n);
          const uint32_t* b = k[step % 2][n / 2].r + n % 2 * 2;
          Numbers::multiply_add(c, a, b[0], b[1]);
        }
      }
    }
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
      const uint32_t values = stage + Loop::kKeyBytes + (lane % 8 + lane / 16 * 8) * 16 +
                              lane / 8 % 2 * Loop::kValueGroupBytes;
      constexpr uint32_t kOnes = Numbers::kOnes;
      constexpr int kBatch = 4, kBatches = (kSteps + kBatch - 1) / kBatch;
      Fragment v[2][kBatch];
      const auto load = [&](int batch) {  // of kBatches for each 16 tokens
        const int n = batch / kBatches * 2, first = batch % kBatches * kBatch;
#pragma unroll
        for (int m = 0; m < kBatch; ++m) {
          if (first + m < kSteps) {
            v[batch % 2][m] =
                load_matrices(values + n * Loop::kValueGroupBytes + (first + m) * 16 * 16);
          }
        }
      };
      const auto fragment = [&](int n) -> float(&)[4] {
        return *reinterpret_cast<float(*)[4]>(out + 4 * n);
      };
      load(0);
#pragma unroll
      for (int batch = 0; batch < kTokens / 16 * kBatches; ++batch) {
        if (batch + 1 < kTokens / 16 * kBatches) load(batch + 1);
        const uint32_t(&a)[4] = weight[batch / kBatches];
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
  static __device__ __forceinline__ void begin_outputs(Outputs& out,
                                                       Weights& weight,
                                                       uint32_t stage,
                                                       uint32_t ones) {
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) {
      const auto matrices = [&](int d) {
        return core_matrices(stage + Loop::kKeyBytes + n * 2 * Loop::kValueGroupBytes + d * 16,
                             Loop::kValueGroupBytes);
      };
      if constexpr (Loop::kOnesApart) {
        Warpgroup<T, kHeadDim>::multiply_add(out, weight[n], matrices(0));
        Warpgroup<T, 8>::multiply_add(
            out + kHeadDim / 2, weight[n], core_matrices(ones, Loop::kOnesBytes));
      } else {
        Warpgroup<T, kHeadDim + 8>::multiply_add(out, weight[n], matrices(0));
      }
    }
    commit_products();
  }
  static __device__ __forceinline__ void pin_query(Query& a) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pin(a[step]);
  }
  static __device__ __forceinline__ void pin_weights(Weights& weight) {
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) pin(weight[n]);
  }
};

}  // namespace memkv::cuda
