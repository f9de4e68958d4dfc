// Attention of many query rows: prefill, questions, recomputed blocks.
//
//     S = Q K^T      16 rows x 8 tokens, over head_dim        each of 8 warps has 16 rows of a tile
//     O = P V        16 rows x 8 dimensions, over 16 tokens
//
// Rows of a tile are query tokens times the heads of a kv head; their positions may be any. Grid
// and ranges as in few_queries.cuh, with stages of 64 tokens (32 where head_dim is 256) that all
// warps share: a ring, which four more warps fill (many_copies.cuh). A stage holds blocks of all
// segments that turn a query alike (packed_runs.h), and says where each block stands.
//
//     K in shared memory  [head_dim / 8][stage tokens][8]   as in a block, but blocks side by side
//     V in shared memory  [stage tokens / 8][head_dim][8]   8 x 8 core matrices too: no bank twice
//
// On sm_90a, up to head_dim 128, outputs are one stage behind scores, so that the tensor cores have
// work while weights are found:
//
//     scores of i | outputs of i - 1        on the tensor cores
//                 | weights of i            beside them
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
  constexpr bool kTogether = Products::kTogether, kOverlaps = Products::kOverlaps;
  constexpr int kNone = -1;
  const float loud_from = kLoud / fabsf(scaled.scale);
  constexpr int kRowsTogether = kTogether ? 64 : 16;  // rows that are multiplied at once
  const int first_row = warp * 16 / kRowsTogether * kRowsTogether;
  if constexpr (kTogether && !kMass) {
    constexpr int kGroups = kTokens / 8, kOnes = Loop::kOnesBytes / 4;
    for (int i = threadIdx.x; i < (Loop::kOnesApart ? 2 : Loop::kStages * kGroups) * kOnes;
         i += kManyThreads) {
      const int group = i / kOnes % kGroups, stage = i / kOnes / kGroups;
      const int at = Loop::kOnesApart ? Loop::kOnesAt + group * Loop::kOnesBytes
                                      : stage * Loop::kStageBytes + Loop::kKeyBytes +
                                            group * Loop::kValueGroupBytes + kHeadDim * 16;
      *reinterpret_cast<uint32_t*>(shared + at + i % kOnes * 4) = Numbers::kOnes;
    }
  }
  RangeWalk& walk = reinterpret_cast<RangeWalk*>(shared + Loop::kWalksAt)[warp];
  const RangeStart& start = walk.start;
  RingPlace<Loop::kStages> at_ring(shared_address(shared + Loop::kBarriersAt));
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

    float top[2] = {kMinusInfinity, kMinusInfinity}, exact[2] = {0.0f, 0.0f};
    typename Products::Outputs out;
#pragma unroll
    for (int i = 0; i < Products::kOutputs; ++i) out[i] = 0.0f;

    // Where products overlap: the query as it is in this run, and the weights of the stage before,
    // whose outputs are owed to `out`. Weights are zeros where none are.
    typename Products::Query terms;
    typename Products::Weights weight{};
    int owed = kNone;  // the slot of that stage
    const auto stage_at = [&](int slot) { return ring + slot * Loop::kStageBytes; };
    const auto settle = [&] {
      if (!kOverlaps || owed == kNone) return;
      Products::outputs(out, weight, stage_at(owed), ring + Loop::kOnesAt);
      at_ring.release(owed);
      owed = kNone;
#pragma unroll
      for (int i = 0; i < Loop::kTokens / 4; ++i) weight[i / 4][i % 4] = 0;
    };

    StageMass<T, kHeadDim, kBlockSize> mass(call, work, tile, start.kv_head, shared, team);
    if constexpr (kMass) mass.read_lse(top);
    // Scores of the stage before, whose weights are found beside the products of this one.
    typename Products::Scores late;
    bool is_late = false;
    const auto keep_late = [&] {
      if (!is_late) return;
      is_late = false;
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) {
        late[i] = exp2_of(fmaf(late[i], unit, -top[i / 2 % 2]));
      }
      mass.keep(late);
    };

    // The first position that a row at one sees.
    const auto sees_from = [&](int32_t at) {
      return call.window > 0 ? int32_t(max(int64_t{at} - call.window + 1, int64_t{INT32_MIN}))
                             : INT32_MIN;
    };
    const int32_t from_position[2] = {sees_from(position[0]), sees_from(position[1])};
    const int32_t from_least = sees_from(least), from_most = sees_from(most);

    // 2. Stage after stage.
    Segment segment{};
    bool two_terms = false;
    int turned = 0;  // by how much the query is
    for (int stage = start.stage; stage < walk.end; ++stage) {
      at_ring.wait_full();
      const int slot = at_ring.slot();
      unsigned char* const run_at = shared + Loop::kRunsAt + slot * Loop::kRunBytes;
      const StageRun& run = *reinterpret_cast<const StageRun*>(run_at);
      const bool begins = stage == start.stage, enters = begins || stage == run.stages_before;
      if (enters) {
        segment = run.segment();
        two_terms = call.rotary_dim > 0 &&
                    (work.shared.of_groups || segment.position != segment.stored_position);
      }
      const int turns = segment.position - segment.stored_position;
      if (takes_part && (begins || turns != turned)) {
        settle();
        turned = turns;
        const uint16_t* const q_data = static_cast<const uint16_t*>(call.q.data);
        const float* turn[2];
        const uint16_t* row[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // rows g and g + 8
          turn[i] = turn_of(call, segment, run.index);
          if (Loop::kHasTurns && turn[i] != nullptr) {
            turn[i] = reinterpret_cast<const float*>(run_at + Loop::kTurnAt);
          }
          RowPlace place =
              place_of(work, tile, start.kv_head, min(warp * 16 + g + 8 * i, tile.num_rows - 1));
          if (work.shared.of_groups) {  // each turns as its own segment asks, if only by 0
            const SharedRow& of = work.shared.rows[place.token];
            place.token = of.token;
            turn[i] =
                call.rotary_dim == 0 ? nullptr : call.turns + int64_t{of.segment} * call.rotary_dim;
          }
          row[i] = q_data + call.q.offset(place.token, place.head);
        }
        turn_rows<kSteps, 2, (kSteps > 8 || !kTogether ? 1 : 2)>(
            turn,
            pairs,
            q,
            [&](int i, int d) {
              return Numbers::unpack(__ldg(reinterpret_cast<const uint32_t*>(row[i] + d)));
            },
            [&](int step, const float2(&low)[2], const float2(&high)[2]) {
              uint32_t terms_of[4][2];
              split<T, 2>(low[0].x, low[0].y, terms_of[0]);
              split<T, 2>(low[1].x, low[1].y, terms_of[1]);
              split<T, 2>(high[0].x, high[0].y, terms_of[2]);
              split<T, 2>(high[1].x, high[1].y, terms_of[3]);
#pragma unroll
              for (int term = 0; term < 2; ++term) {
                query[(term * kSteps + step) * 32 + lane] = {
                    terms_of[0][term], terms_of[1][term], terms_of[2][term], terms_of[3][term]};
              }
            });
        if constexpr (kOverlaps) Products::load_query(terms, query);
      }
      if constexpr (kTogether) fence_for_products();
      const StageBlock* const blocks =
          reinterpret_cast<const StageBlock*>(run_at + Loop::kBlocksAt);
      const StageBlock block = blocks[lane % (kTokens / kBlockSize)];
      const int32_t last = block.position + block.num_tokens - 1;
      const bool seen = __any_sync(
          kAllLanes, block.num_tokens > 0 && block.position <= most && last >= from_least);
      if (!takes_part || !seen) {
        settle();
        at_ring.release(slot);
        at_ring.pass();
        if constexpr (kMass) {
          keep_late();
          mass.begin_stage(block);
          mass.keep_none();
        }
        // Both warpgroups vote equally often, which is how tools follow their barriers.
        if (kTogether && two_terms) any_of_warpgroup(1 + warp / 4, false);
        continue;
      }

      // Scores.
      typename Products::Scores score;
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) score[i] = 0.0f;
      if constexpr (kOverlaps && kMass) {
        Products::begin_scores(score, terms, stage_at(slot));
        keep_late();
        mass.begin_stage(block);
        Products::wait_for_scores(score, terms);
      } else if constexpr (kOverlaps) {
        Products::scores_beside_outputs(
            score, terms, stage_at(slot), out, weight, stage_at(owed == kNone ? slot : owed));
      } else {
        Products::scores(score, query, stage_at(slot));
      }
      const bool edge = !__all_sync(
          kAllLanes,
          block.num_tokens == kBlockSize && last <= least && block.position >= from_most);
      const auto hide = [&] {  // what is not seen is -inf
        if (!edge) return;
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {  // 8 tokens
          const StageBlock& of = blocks[n / (kBlockSize / 8)];
          const int first = n % (kBlockSize / 8) * 8 + 2 * q;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = first + i % 2, at = of.position + token;
            const bool sees =
                token < of.num_tokens && at <= position[i / 2] && at >= from_position[i / 2];
            score[4 * n + i] = sees ? score[4 * n + i] : kMinusInfinity;
          }
        }
      };
      const auto largest = [&](float(&most)[2]) {
        most[0] = most[1] = kMinusInfinity;
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) {
          most[i / 2 % 2] = fmaxf(most[i / 2 % 2], score[i]);
        }
      };
      float raised[2];
      hide();
      if (!kMass || two_terms) largest(raised);
      if (two_terms) {
        // Only what is near a row's maximum weighs anything.
        const bool loud = call.all_digits ||
                          (fabsf(raised[0]) > loud_from && raised[0] > kMinusInfinity) ||
                          (fabsf(raised[1]) > loud_from && raised[1] > kMinusInfinity);
        if (kTogether ? any_of_warpgroup(1 + warp / 4, loud) : __any_sync(kAllLanes, loud)) {
          if constexpr (kOverlaps) {
            Products::load_query(terms, query + kSteps * 32);
            Products::scores(score, terms, stage_at(slot));
            Products::load_query(terms, query);
          } else {
            Products::scores(score, query + kSteps * 32, stage_at(slot));
          }
          hide();
          if (!kMass) largest(raised);
        }
      }

      // Weights.
      if (unit == 1.0f) {
        scaled(score);
        hide();
        if (!kMass) largest(raised);
      }
      if constexpr (kMass) {
        at_ring.release(slot);
        at_ring.pass();
        if constexpr (!kOverlaps) mass.begin_stage(block);
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) late[i] = score[i];
        is_late = true;
        if constexpr (!kOverlaps) keep_late();
        continue;
      }
      raised[0] *= unit;
      raised[1] *= unit;
      const bool rises = __any_sync(kAllLanes, raised[0] > top[0] || raised[1] > top[1]);
      float keep[2] = {1.0f, 1.0f};
      if (rises) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          raised[i] = fmaxf(raised[i], __shfl_xor_sync(kAllLanes, raised[i], 1));
          raised[i] = fmaxf(raised[i], __shfl_xor_sync(kAllLanes, raised[i], 2));
          SoftmaxState<float> state{top[i], 0.0f};
          keep[i] = state.raise(raised[i]);
          top[i] = state.max;
          exact[i] *= keep[i];
        }
      }
      const float from[2] = {finite_or_zero(top[0]), finite_or_zero(top[1])};
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) {
        score[i] = exp2_of(fmaf(score[i], unit, -from[i / 2 % 2]));
      }
      if (call.lse != nullptr) {
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; i += 8) {
          const float* const s = score + i;
          exact[0] += (s[0] + s[1]) + (s[4] + s[5]);
          exact[1] += (s[2] + s[3]) + (s[6] + s[7]);
        }
      }

      // Outputs: of the stage before, or of this one.
      if constexpr (kOverlaps) {
        Products::wait_for_outputs(out, weight);
        if (owed != kNone) at_ring.release(owed);
        owed = slot;
      }
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        weight[i / 4][i % 4] = Numbers::pack(score[2 * i], score[2 * i + 1]);
      }
      if (rises) {
#pragma unroll
        for (int i = 0; i < Products::kOutputs; ++i) out[i] *= keep[i / 2 % 2];
      }
      if constexpr (!kOverlaps) {
        Products::outputs(out, weight, stage_at(slot), ring + Loop::kOnesAt);
        at_ring.release(slot);
      }
      at_ring.pass();
    }
    settle();

    if constexpr (kMass) {
      keep_late();
      mass.finish();
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
            float2{out[4 * n + 2 * i], out[4 * n + 2 * i + 1]};
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exact[i] += __shfl_xor_sync(kAllLanes, exact[i], 1);
      exact[i] += __shfl_xor_sync(kAllLanes, exact[i], 2);
    }
    const float sum[2] = {out[8 * kSteps], out[8 * kSteps + 2]};
    __syncwarp();
#pragma unroll 2
    for (int of = 0; of < my_rows; ++of) {
      const int row = warp * 16 + of, from = of % 8 * 4;
      const RowSums sums{__shfl_sync(kAllLanes, of < 8 ? top[0] : top[1], from),
                         __shfl_sync(kAllLanes, of < 8 ? sum[0] : sum[1], from),
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
