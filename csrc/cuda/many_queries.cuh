// Attention of many query rows: prefill, questions, recomputed blocks.
//
//     S = Q K^T      16 rows x 8 tokens, over head_dim        each of 8 warps has 16 rows of a tile
//     O = P V        16 rows x 8 dimensions, over 16 tokens
//
// Rows of a tile are query tokens times the heads of a kv head; their positions may be any. Grid
// and ranges as in few_queries.cuh, with stages of 64 tokens (32 where head_dim is 256) that all
// warps share: a ring of three, which four more warps fill (many_copies.cuh).
//
//     K in shared memory  [head_dim / 8][stage tokens][8]   as in a block, but blocks side by side
//     V in shared memory  [stage tokens / 8][head_dim][8]   8 x 8 core matrices too: no bank twice
//
// What a block holds past the segment's end is not copied: zeros take its place. A turned query has
// more digits than it came with; its first term keeps as many as it had. Where scores are loud
// (kLoud, in units of log2) that is not enough, and the second term is multiplied too.
//
// With kMass the loop ends at the weights: rows know their log-sum-exp, V is not read, and
// many_mass.cuh adds the weights up.
#pragma once

#include "many_copies.cuh"
#include "many_mass.cuh"
#include "many_products.cuh"
#include "merge.cuh"
#include "stages.cuh"

namespace memkv::cuda {

inline constexpr float kLoud = 12.0f;

template <typename T, int kHeadDim, int kBlockSize, bool kMass>
__device__ __forceinline__ void many_queries(const Attention& call, const Work& work) {
  using Loop = ManyQueries<T, kHeadDim>;
  using Numbers = Packed<T>;
  constexpr int kSteps = Loop::kSteps, kTokens = Loop::kTokens, kTokenTiles = kTokens / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int warp =
      __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // the same of every lane, evidently
  uint4* const query =
      reinterpret_cast<uint4*>(shared + Loop::kQueryAt + warp * 2 * Loop::kQueryBytes);
  int32_t* const positions = reinterpret_cast<int32_t*>(shared + Loop::kPositionsAt);
  int* const flag = reinterpret_cast<int*>(shared + Loop::kFlagAt);
  const uint32_t ring = shared_address(shared);
  const ScoreScale scaled(call);
  const float unit = scaled.unit();
  const RotaryPairs pairs{call.rotary_dim, call.interleaved};
  using Products = ManyProducts<T, kHeadDim>;
  constexpr bool kTogether = Products::kTogether;
  constexpr int kRowsTogether = kTogether ? 64 : 16;  // rows that are multiplied at once
  const int first_row = warp * 16 / kRowsTogether * kRowsTogether;
  if constexpr (kTogether && !kMass) {  // behind each group of 8 tokens of V
    constexpr int kOnesAt = Loop::kKeyBytes + kHeadDim * 16, kGroups = kTokens / 8;
    for (int i = threadIdx.x; i < kManyStages * kGroups * 32; i += kManyThreads) {
      const int group = i / 32 % kGroups, stage = i / 32 / kGroups;
      *reinterpret_cast<uint32_t*>(shared + stage * Loop::kStageBytes + kOnesAt +
                                   group * Loop::kValueGroupBytes + i % 32 * 4) = Numbers::kOnes;
    }
  }
  RangeWalk& walk = reinterpret_cast<RangeWalk*>(shared + Loop::kWalksAt)[warp];
  const RangeStart& start = walk.start;
  RingPlace at_ring(shared_address(shared + Loop::kBarriersAt));
  if (threadIdx.x == 0) at_ring.init();
  __syncthreads();

  if (warp >= kManyWarps) {
    give_registers_back<Loop::kCopyRegisters>();
    for_each_part(work, walk, [&] {
      fill_ring<Loop, kHeadDim, kBlockSize, kMass>(call, work, walk, ring, at_ring);
    });
    return;
  }
  take_registers<Loop::kRegisters>();
  const Team team{kManyWarps * 32, 3};
  for_each_part(work, walk, [&] {
    const QueryTile& tile = start.of;

    // 1. Where the rows stand, while the first stages are copied.
    for (int row = threadIdx.x; row < kManyRows; row += team.threads) {
      const int64_t token = place_of(work, tile, start.kv_head, min(row, tile.num_rows - 1)).token;
      positions[row] = work.shared.of_groups ? work.shared.rows[token].position
                                             : call.plan.query_position[token];
    }
    team.sync();
    const int my_rows = min(16, tile.num_rows - warp * 16);  // may be 0 or less
    const bool takes_part = first_row < tile.num_rows;
    const int32_t position[2] = {positions[warp * 16 + g], positions[warp * 16 + g + 8]};
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int row = lane; row < kRowsTogether; row += 32) {
      least = min(least, positions[first_row + row]);
      most = max(most, positions[first_row + row]);
    }
#pragma unroll
    for (int across = 1; across < 32; across *= 2) {
      least = min(least, __shfl_xor_sync(kAllLanes, least, across));
      most = max(most, __shfl_xor_sync(kAllLanes, most, across));
    }

    float top[2] = {kMinusInfinity, kMinusInfinity}, exact[2] = {0.0f, 0.0f}, sum[4] = {};
    float out[2 * kSteps][4];
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
    }

    const StageMass<T, kHeadDim, kBlockSize> mass(call, work, tile, start.kv_head);
    MassEntries entries{};
    if constexpr (kMass) mass.read_lse(top);

    // 2. Stage after stage.
    StageCursor taken_from(work, tile.first_run, tile.num_runs, start.stage);
    Segment segment{};
    TileView view(segment, 0, 0, 0);
    TokenRange sees[2]{};
    bool two_terms = false;
    const auto turns_here = [&] {
      return work.shared.of_groups ? call.rotary_dim > 0
                                   : turn_of(call, taken_from.segment(), 0) != nullptr;
    };
    for (int stage = start.stage; stage < walk.end; ++stage) {
      at_ring.wait_full();
      if constexpr (kTogether) fence_for_products();
      if constexpr (kMass) team.sync();  // all have kept the stage before
      const bool enters = taken_from.enter(stage) || stage == start.stage;
      if (enters) two_terms = turns_here();
      if (enters && takes_part) {
        segment = taken_from.segment();
        view = TileView(segment, least, most, call.window);
        sees[0] = visible_tokens(segment, position[0], call.window);
        sees[1] = visible_tokens(segment, position[1], call.window);
        const uint16_t* const q_data = static_cast<const uint16_t*>(call.q.data);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {  // rows g and g + 8, one after the other
          const float* turn[] = {turn_of(call, segment, tile.first_segment + taken_from.run)};
          RowPlace place =
              place_of(work, tile, start.kv_head, min(warp * 16 + g + 8 * i, tile.num_rows - 1));
          if (work.shared.of_groups) {  // each turns as its own segment asks, if only by 0
            const SharedRow& of = work.shared.rows[place.token];
            place.token = of.token;
            turn[0] =
                call.rotary_dim == 0 ? nullptr : call.turns + int64_t{of.segment} * call.rotary_dim;
          }
          const uint16_t* const row = q_data + call.q.offset(place.token, place.head);
          uint32_t* const to = reinterpret_cast<uint32_t*>(query + lane) + i;
          turn_rows<kSteps, 1, (kSteps > 8 ? 1 : 2)>(
              turn,
              pairs,
              q,
              [&](int, int d) {
                return Numbers::unpack(__ldg(reinterpret_cast<const uint32_t*>(row + d)));
              },
              [&](int step, const float2(&low)[1], const float2(&high)[1]) {
                uint32_t first[2], second[2];
                split<T, 2>(low[0].x, low[0].y, first);
                split<T, 2>(high[0].x, high[0].y, second);
#pragma unroll
                for (int term = 0; term < 2; ++term) {
                  uint32_t* const at = to + (term * kSteps + step) * (32 * 4);
                  at[0] = first[term];
                  at[2] = second[term];
                }
              });
        }
      }
      const int first_token = taken_from.stage_of_segment(stage) * kTokens;
      const uint32_t here = ring + at_ring.slot() * Loop::kStageBytes;
      unsigned char* const values = shared + at_ring.slot() * Loop::kStageBytes + Loop::kKeyBytes;
      if constexpr (kMass) {
        mass.store(entries);  // of the stage before
        entries = {values,
                   taken_from.segment().first_entry + first_token / kBlockSize,
                   taken_from.segment().num_tokens - first_token};
      }
      if (!takes_part || first_token >= view.some_end || first_token + kTokens <= view.some_begin) {
        at_ring.read();
        if constexpr (kMass) mass.keep_none(values);
        // Both warpgroups vote equally often, which is how tools follow their barriers.
        if (kTogether && two_terms) any_of_warpgroup(1 + warp / 4, false);
        continue;
      }

      // Scores.
      float score[4 * kTokenTiles];
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) score[i] = 0.0f;
      Products::scores(score, query, here);
      const bool edge = first_token < view.every_begin || first_token + kTokens > view.every_end;
      const auto largest = [&](float(&most)[2]) {  // and what is not seen is -inf
        if (edge) {
#pragma unroll
          for (int i = 0; i < 4 * kTokenTiles; ++i) {
            const int token = first_token + i / 4 * 8 + 2 * q + i % 2, of = i / 2 % 2;
            score[i] = token >= sees[of].begin && token < sees[of].end ? score[i] : kMinusInfinity;
          }
        }
        most[0] = most[1] = kMinusInfinity;
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) {
          most[i / 2 % 2] = fmaxf(most[i / 2 % 2], score[i]);
        }
      };
      float raised[2];
      largest(raised);
      if (two_terms) {
        // Only what is near a row's maximum weighs anything.
        const float allowed = kLoud / fabsf(scaled.scale);
        const bool loud = call.all_digits ||
                          (fabsf(raised[0]) > allowed && raised[0] > kMinusInfinity) ||
                          (fabsf(raised[1]) > allowed && raised[1] > kMinusInfinity);
        if (kTogether ? any_of_warpgroup(1 + warp / 4, loud) : __any_sync(kAllLanes, loud)) {
          Products::scores(score, query + kSteps * 32, here);
          largest(raised);
        }
      }

      // Weights.
      if (unit == 1.0f) {
        scaled(score);
        largest(raised);
      }
      if constexpr (kMass) {
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i)
          score[i] = exp2_of(fmaf(score[i], unit, -top[i / 2 % 2]));
        at_ring.read();
        mass.keep(score, values);
        continue;
      }
      raised[0] *= unit;
      raised[1] *= unit;
      if (__any_sync(kAllLanes, raised[0] > top[0] || raised[1] > top[1])) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          raised[i] = fmaxf(raised[i], __shfl_xor_sync(kAllLanes, raised[i], 1));
          raised[i] = fmaxf(raised[i], __shfl_xor_sync(kAllLanes, raised[i], 2));
        }
        SoftmaxState<float> state[2] = {{top[0], 0.0f}, {top[1], 0.0f}};
        const float keep[2] = {state[0].raise(raised[0]), state[1].raise(raised[1])};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          top[i] = state[i].max;
          exact[i] *= keep[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i] *= keep[i / 2];
#pragma unroll
          for (int n = 0; n < 2 * kSteps; ++n) out[n][i] *= keep[i / 2];
        }
      }
      const float from[2] = {finite_or_zero(top[0]), finite_or_zero(top[1])};

      uint32_t weight[kTokens / 16][4];
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n) {  // 16 tokens
        float* const s = score + n * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = exp2_of(fmaf(s[i], unit, -from[i / 2 % 2]));
        if (call.lse != nullptr) {
          exact[0] += (s[0] + s[1]) + (s[4] + s[5]);
          exact[1] += (s[2] + s[3]) + (s[6] + s[7]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[n][i] = Numbers::pack(s[2 * i], s[2 * i + 1]);
      }
      Products::outputs(out, sum, weight, here);
      at_ring.read();
    }

    if constexpr (kMass) {
      team.sync();
      mass.store(entries);
      return;
    }

    // 3. The rows, or a partial of them: through shared memory, where the warp's query was, so
    // that the code is short (it runs once for thousands of stages) and stores are whole lines.
    const UnitParts parts = parts_of(start.unit_begin, tile.num_stages, work.header->range_length);
    const PartialView partial(work, parts.slot(walk.range - parts.first_range), kHeadDim);
    float* const mine = reinterpret_cast<float*>(query);  // [16, head_dim]
    static_assert(2 * Loop::kQueryBytes >= 16 * kHeadDim * 4);
    constexpr int kMoved = kHeadDim % 32 == 0 ? 3 : 1;  // rows are moved by 8 against each other
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(mine + (g + 8 * i) * kHeadDim +
                                   ((8 * n + 2 * q) ^ (g & kMoved) * 8)) =
            float2{out[n][2 * i], out[n][2 * i + 1]};
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exact[i] += __shfl_xor_sync(kAllLanes, exact[i], 1);
      exact[i] += __shfl_xor_sync(kAllLanes, exact[i], 2);
    }
    __syncwarp();
#pragma unroll 1
    for (int of = 0; of < my_rows; ++of) {
      const int row = warp * 16 + of, from = of % 8 * 4;
      const RowSums sums{__shfl_sync(kAllLanes, of < 8 ? top[0] : top[1], from),
                         __shfl_sync(kAllLanes, of < 8 ? sum[0] : sum[2], from),
                         __shfl_sync(kAllLanes, of < 8 ? exact[0] : exact[1], from),
                         0.0f};
#pragma unroll 1
      for (int d = 4 * lane; d < kHeadDim; d += 128) {
        const float4 four =
            *reinterpret_cast<const float4*>(mine + of * kHeadDim + (d ^ (of & kMoved) * 8));
        if (parts.count == 1) {
          deliver_row(call, work, tile, start.kv_head, row, d, sums, four);
        } else {
          *reinterpret_cast<float4*>(partial.out + row * kHeadDim + d) = four;
          if (d == 0) partial.sums[row] = sums;
        }
      }
    }
    if (parts.count > 1) {
      arrive_and_merge<kHeadDim, kManyRows>(call,
                                            work,
                                            start,
                                            parts,
                                            team,
                                            shared + Loop::kQueryAt,
                                            kManyWarps * 2 * Loop::kQueryBytes,
                                            flag);
    } else {
      team.sync();
    }
  });
  if constexpr (!kMass) finish_blind_tiles<kHeadDim>(call, work, *work.header, team.threads);
}

// The most shared memory that code for architectures before sm_90 may ask for.
inline constexpr int kSharedBytesBefore90 = 163 * 1024;

// Empty where no GPU of the architecture has so much shared memory: the loop of few rows serves it.
template <typename T, int kHeadDim, int kBlockSize, bool kMass>
__global__ void __launch_bounds__(kManyThreads, 1)
    many_queries_kernel(const __grid_constant__ Attention call, const __grid_constant__ Work work) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr int kSharedBytes = kSharedBytesBefore90;
#else
  constexpr int kSharedBytes = 227 * 1024;
#endif
  if constexpr (ManyQueries<T, kHeadDim>::kBytes <= kSharedBytes) {
    many_queries<T, kHeadDim, kBlockSize, kMass>(call, work);
  }
}

}  // namespace memkv::cuda
