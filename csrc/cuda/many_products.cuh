// The two products of many_queries.cuh on one stage of its ring: by warpgroups on sm_90a, warp by
// warp elsewhere.
//
//     K in shared memory  [head_dim / 8][stage tokens][8]   as in a block, but blocks side by side
//     V in shared memory  [stage tokens / 8][head_dim][8]   8 x 8 core matrices too: no bank twice
//
// For warpgroups, each group of 8 tokens of V is followed by 8 rows of ones: the sum of the weights.
#pragma once

#include "stages.cuh"
#include "warpgroup.cuh"
#include "work.h"

namespace memkv::cuda {

inline constexpr int kManyWarps = 8;  // that multiply
inline constexpr int kCopyWarps = 4;  // that fill the ring
inline constexpr int kManyThreads = (kManyWarps + kCopyWarps) * 32;
inline constexpr int kManyRows = 16 * kManyWarps;
inline constexpr int kManyStages = 3;

template <typename T, int kHeadDim>
struct ManyQueries {
  static constexpr int kTokens = kHeadDim > 128 ? 32 : 64;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kKeyBytes = kHeadDim * kTokens * 2;
  static constexpr int kOnesBytes = 128;  // 8 more rows of V
  // Between groups of 8 tokens, so that their copies share no bank; head_dim 256 has no room for it.
  static constexpr int kValuePad = kHeadDim > 128 ? 0 : 64;
  static constexpr int kValueGroupBytes = kHeadDim * 16 + kOnesBytes + kValuePad;
  static constexpr int kValueBytes = kTokens / 8 * kValueGroupBytes;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kQueryBytes = kSteps * 32 * 16;  // of one term of a warp

  // Of each thread that multiplies and that copies: together as many as the block begins with.
  static constexpr int kRegisters = kHeadDim > 128 ? 232 : 224;
  static constexpr int kCopyRegisters = kHeadDim > 128 ? 40 : 56;
  static_assert(kManyWarps * kRegisters + kCopyWarps * kCopyRegisters ==
                (kManyWarps + kCopyWarps) * 168);

  static constexpr int kQueryAt = kManyStages * kStageBytes;
  static constexpr int kPositionsAt = kQueryAt + kManyWarps * 2 * kQueryBytes;
  static constexpr int kWalksAt = kPositionsAt + kManyRows * 4;
  static constexpr int kBarriersAt = kWalksAt + (kManyWarps + kCopyWarps) * int(sizeof(RangeWalk));
  static constexpr int kFlagAt = kBarriersAt + 2 * kManyStages * 8;
  static constexpr int kBytes = kFlagAt + 16;
  static_assert(kBytes <= 227 * 1024);
};

// score [16 rows, stage tokens], out [16 rows, head_dim] and sum are of a warp, in fragments of
// 16 x 8; query and weight are fragments of 16 x 16.
template <typename T, int kHeadDim>
struct ManyProducts {
  using Loop = ManyQueries<T, kHeadDim>;
  using Numbers = Packed<T>;
  static constexpr bool kTogether = kHasWarpgroups;
  static constexpr int kSteps = Loop::kSteps, kTokens = Loop::kTokens, kTokenTiles = kTokens / 8;

  // Adds to the scores; query [kSteps][lane].
  static __device__ __forceinline__ void scores(float (&score)[4 * kTokenTiles],
                                                const uint4* query,
                                                uint32_t stage) {
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
        wait_for_products();
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

  // Adds weight [stage tokens / 16] times V to out, and times ones to sum.
  static __device__ __forceinline__ void outputs(float (&out)[2 * kSteps][4],
                                                 float (&sum)[4],
                                                 uint32_t (&weight)[kTokens / 16][4],
                                                 uint32_t stage) {
    if constexpr (kTogether) {
      float* const flat = &out[0][0];
      pin(sum);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) pin(out[i]);
      begin_products();
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n) {
        const auto matrices = [&](int d) {
          return core_matrices(stage + Loop::kKeyBytes + n * 2 * Loop::kValueGroupBytes + d * 16,
                               Loop::kValueGroupBytes);
        };
#pragma unroll
        for (int d = 0; d + 64 <= kHeadDim; d += 64) {
          Warpgroup<T, 64>::multiply_add(flat + d / 2, weight[n], matrices(d));
        }
        constexpr int kRest = kHeadDim % 64;
        if constexpr (kRest > 0) {
          Warpgroup<T, kRest>::multiply_add(
              flat + (kHeadDim - kRest) / 2, weight[n], matrices(kHeadDim - kRest));
        }
        Warpgroup<T, 8>::multiply_add(sum, weight[n], matrices(kHeadDim));
      }
      wait_for_products();
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n) pin(weight[n]);
      pin(sum);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) pin(out[i]);
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
      load(0);
#pragma unroll
      for (int batch = 0; batch < kTokens / 16 * kBatches; ++batch) {
        if (batch + 1 < kTokens / 16 * kBatches) load(batch + 1);
        const uint32_t(&a)[4] = weight[batch / kBatches];
        if (batch % kBatches == 0) Numbers::multiply_add(sum, a, kOnes, kOnes);
#pragma unroll
        for (int m = 0; m < kBatch; ++m) {
          const int step = batch % kBatches * kBatch + m;
          if (step >= kSteps) break;
          const Fragment& of = v[batch % 2][m];
          Numbers::multiply_add(out[2 * step], a, of.r[0], of.r[1]);
          Numbers::multiply_add(out[2 * step + 1], a, of.r[2], of.r[3]);
        }
      }
    }
  }
};

}  // namespace memkv::cuda
