// Attention of many query rows: prefill, questions, recomputed blocks.
//
//     S = Q K^T      16 rows x 8 tokens, over head_dim        each of 8 to 16 warps has 16 rows of a tile
//     O = P V        16 rows x 8 dimensions, over 16 tokens
//
// Rows of a tile are query tokens times the heads of a kv head; their positions may be any. Grid:
// as many blocks as the device holds, some ranges of the flat work each (work_split.h), with stages
// of 64 tokens (32 where head_dim is 256) that all warps share: a ring, which four more warps fill
// (many_copies.cuh). A stage holds blocks of all segments that turn a query alike (packed_runs.h),
// and says where each block stands.
//
//     K in shared memory  [head_dim / 8][stage tokens][8]   as in a block, but blocks side by side
//     V in shared memory  [block][head_dim][block size]     as in a block, pieces of 16 bytes swizzled
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
  using Loop = ManyQueries<T, kHeadDim, kMass, kHasWarpgroups>;
  using Numbers = Packed<T>;
  constexpr int kSteps = Loop::kSteps, kTokens = Loop::kTokens, kTokenTiles = kTokens / 8;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp =
      __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // the same of every lane, evidently
  int32_t* const positions = reinterpret_cast<int32_t*>(shared + Loop::kPositionsAt);
  int* const flag = reinterpret_cast<int*>(shared + Loop::kFlagAt);
  const uint32_t ring = shared_address(shared);
  const ScoreScale scaled(call);
  const float unit = scaled.unit();
  const RotaryPairs pairs{call.rotary_dim, call.interleaved};
  using Products = ManyProducts<T, kHeadDim, kBlockSize, kMass>;
  constexpr bool kTogether = Products::kTogether, kOverlaps = Products::kOverlaps;
  constexpr int kNone = -1;
  const float loud_from = kLoud / fabsf(scaled.scale);
  constexpr int kRowsTogether = Products::kRowsTogether;
  const int together = warp * 16 / kRowsTogether, first_row = together * kRowsTogether;
  // Both terms of the query of those rows.
  unsigned char* const query = shared + Loop::kQueryAt + together * 2 * Products::kTermBytes;
  const uint32_t terms = shared_address(query);
  if constexpr (kTogether && !kMass) {
    constexpr int kOnes = Loop::kOnesApart ? 2 * Loop::kOnesBytes / 4 : 8 * kBlockSize / 2;
    constexpr int kBlocks = kTokens / kBlockSize;
    for (int i = threadIdx.x; i < (Loop::kOnesApart ? 1 : Loop::kStages * kBlocks) * kOnes;
         i += Loop::kThreads) {
      const int block = i / kOnes % kBlocks, stage = i / kOnes / kBlocks;
      const int at = Loop::kOnesApart
                         ? Loop::kOnesAt
                         : stage * Loop::kStageBytes + Loop::kKeyBytes +
                               block * Products::kSlabBytes + kHeadDim * kBlockSize * 2;
      *reinterpret_cast<uint32_t*>(shared + at + i % kOnes * 4) = Numbers::kOnes;
    }
  }
  RangeWalk& walk = reinterpret_cast<RangeWalk*>(shared + Loop::kWalksAt)[warp];
  const RangeStart& start = walk.start;
  using Slots = Ring<Loop>;
  Slots at_ring(shared_address(shared + Loop::kBarriersAt));
  if (warp == 0 && lane_again() == 0) at_ring.init();
  __syncthreads();

  if (warp >= Loop::kWarps) {
    give_registers_back<Loop::kCopyRegisters>();
    for_each_part(work, walk, [&] {
      fill_ring<Loop, kHeadDim, kBlockSize, kMass>(call, work, walk, ring, at_ring);
    });
    return;
  }
  take_registers<Loop::kRegisters>();
  const Team team{Loop::kWarps * 32, 1}, group{128, 2 + warp / 4};  // all; a warpgroup
  for_each_part(work, walk, [&] {
    const QueryTile& tile = start.of;

    // 1. Where the rows stand, while the first stages are copied.
    for (int row = threadIdx.x; row < Loop::kRows; row += team.threads) {
      const int64_t token = place_of(work, tile, start.kv_head, min(row, tile.num_rows - 1)).token;
      positions[row] = work.shared.of_groups ? work.shared.rows[token].position
                                             : call.plan.query_position[token];
    }
    team.sync();
    const int my_rows = min(16, tile.num_rows - warp * 16);  // may be 0 or less
    const bool takes_part = first_row < tile.num_rows;
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int row = lane; row < kRowsTogether; row += 32) {
      least = min(least, positions[first_row + row]);
      most = max(most, positions[first_row + row]);
    }
    least = __reduce_min_sync(kAllLanes, least);
    most = __reduce_max_sync(kAllLanes, most);

    float top[2] = {kMinusInfinity, kMinusInfinity};
    float in_registers[2];
    float* const exact = Loop::kExactApart
                             ? reinterpret_cast<float*>(shared + Loop::kExactAt) + threadIdx.x * 2
                             : in_registers;
    exact[0] = exact[1] = 0.0f;
    typename Products::Outputs out;
#pragma unroll
    for (int i = 0; i < Products::kOutputs; ++i) out[i] = 0.0f;

    // Where products overlap: the weights of the stage before, whose outputs are owed to `out`.
    // They are zeros where none are.
    typename Products::Weights weight{};
    int owed = kNone;  // the slot of that stage
    const auto stage_at = [&](int slot) { return ring + slot * Loop::kStageBytes; };
    const auto settle = [&] {
      if (!kOverlaps || owed == kNone) return;
      Products::outputs(out, weight, stage_at(owed), ring + Loop::kOnesAt);
      at_ring.template release<Slots::kValues>(owed);
      owed = kNone;
#pragma unroll
      for (int i = 0; i < Loop::kTokens / 4; ++i) weight[i / 4][i % 4] = 0;
    };

    StageMass<Loop, kBlockSize> mass(call, work, tile, start.kv_head, shared, team);
    if constexpr (kMass) mass.read_lse(top);

    // The first position that a row at one sees.
    const auto sees_from = [&](int32_t at) {
      return call.window > 0 ? int32_t(max(int64_t{at} - call.window + 1, int64_t{INT32_MIN}))
                             : INT32_MIN;
    };
    const int32_t from_least = sees_from(least), from_most = sees_from(most);

    // 2. Stage after stage. What is to be known of one is found beside the products of the one
    // before it.
    struct {
      RingSlot slot;
      int turns;
      unsigned seen, edge;  // lanes whose block is in sight, or is not wholly
    } next{};
    const auto blocks_at = [&](int slot) {
      return reinterpret_cast<const StageBlock*>(shared + Loop::kRunsAt + slot * Loop::kRunBytes +
                                                 Loop::kBlocksAt);
    };
    const auto block_of = [&](int slot) { return blocks_at(slot)[lane % (kTokens / kBlockSize)]; };
    const auto look_ahead = [&](bool is_any, const RingSlot* values) {
      if (is_any) at_ring.template wait_full<Slots::kKeys>(at_ring.next());
      if (!kMass && values != nullptr) at_ring.template wait_full<Slots::kValues>(*values);
      if constexpr (kTogether) fence_for_products();
      if (!is_any) return;
      next.slot = at_ring.next();
      at_ring.pass();
      const StageRun& run = *reinterpret_cast<const StageRun*>(shared + Loop::kRunsAt +
                                                               next.slot.index * Loop::kRunBytes);
      const StageBlock block = block_of(next.slot.index);
      const int32_t last = block.position + block.num_tokens - 1;
      next.turns = run.position - run.stored_position;
      const bool seen =
          takes_part && block.num_tokens > 0 && block.position <= most && last >= from_least;
      const bool whole =
          block.num_tokens == kBlockSize && last <= least && block.position >= from_most;
      next.seen = __ballot_sync(kAllLanes, seen);
      next.edge = __ballot_sync(kAllLanes, !whole);
    };
    int turned = 0;  // by how much the query is
    look_ahead(true, nullptr);
    for (int stage = start.stage; stage < walk.end; ++stage) {
      const auto now = next;
      const int slot = now.slot.index;
      const bool is_last = stage + 1 >= walk.end;
      const bool two_terms = call.rotary_dim > 0 && (work.shared.of_groups || now.turns != 0);
      // All warpgroups wait and vote equally often, which is how tools follow their barriers.
      if (stage == start.stage || now.turns != turned) {
        settle();
        turned = now.turns;
        if constexpr (kTogether) group.sync();  // nobody multiplies the query as it was
        if (takes_part) {
          const int g = lane_again() / 4, q = lane_again() % 4;
          unsigned char* const run_at = shared + Loop::kRunsAt + slot * Loop::kRunBytes;
          const StageRun& run = *reinterpret_cast<const StageRun*>(run_at);
          const Segment segment = run.segment();
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
              turn[i] = call.rotary_dim == 0 ? nullptr
                                             : call.turns + int64_t{of.segment} * call.rotary_dim;
            }
            row[i] = q_data + call.q.offset(place.token, place.head);
          }
          turn_rows<kSteps, 2, Loop::kTurnsAtOnce>(
              turn,
              pairs,
              q,
              [&](int i, int d) {
                return Numbers::unpack(__ldg(reinterpret_cast<const uint32_t*>(row[i] + d)));
              },
              [&](int step, const float2(&low)[2], const float2(&high)[2]) {
                uint32_t of[4][2], term[2][4];
                split<T, 2>(low[0].x, low[0].y, of[0]);
                split<T, 2>(low[1].x, low[1].y, of[1]);
                split<T, 2>(high[0].x, high[0].y, of[2]);
                split<T, 2>(high[1].x, high[1].y, of[3]);
#pragma unroll
                for (int i = 0; i < 8; ++i) term[i / 4][i % 4] = of[i % 4][i / 4];
                Products::store_query(query, step, term[0]);
                Products::store_query(query + Products::kTermBytes, step, term[1]);
              });
        }
        if constexpr (kTogether) {
          fence_for_products();
          group.sync();
        }
      }
      if (now.seen == 0) {
        settle();
        if constexpr (kMass) {
          mass.begin_stage(block_of(slot));
          mass.keep_none();
        }
        if (kTogether && two_terms) any_of_warpgroup(group.barrier, false);
        look_ahead(!is_last, &now.slot);
        at_ring.template release<Slots::kKeys>(slot);
        if constexpr (!kMass) at_ring.template release<Slots::kValues>(slot);
        continue;
      }

      // Scores.
      typename Products::Scores score;
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) score[i] = 0.0f;
      if constexpr (kOverlaps) {
        Products::begin_scores_and_outputs(
            score, terms, stage_at(slot), out, weight, stage_at(owed == kNone ? slot : owed));
        look_ahead(!is_last, &now.slot);
        Products::wait_for_scores_alone(score);
      } else if constexpr (kTogether) {
        Products::begin_scores(score, terms, stage_at(slot));
        look_ahead(!is_last, &now.slot);
        Products::wait_for_scores(score);
      } else {
        Products::scores(score, terms, stage_at(slot));
        look_ahead(!is_last, &now.slot);
      }
      const StageBlock* const blocks = blocks_at(slot);
      const auto hide = [&] {  // what is not seen is -inf
        if (now.edge == 0) return;
        const int g = lane_again() / 4, q = lane_again() % 4;
        const int32_t position[2] = {positions[warp * 16 + g], positions[warp * 16 + g + 8]};
        const int32_t from_position[2] = {sees_from(position[0]), sees_from(position[1])};
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
      const auto largest = [&](float (&most)[2]) {  // four chains of a row: they wait less
        float of[2][4];
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) {
          float& x = of[i / 2 % 2][i % 2 + i / 4 % 2 * 2];
          x = i < 8 ? score[i] : fmaxf(x, score[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          most[i] = fmaxf(fmaxf(of[i][0], of[i][1]), fmaxf(of[i][2], of[i][3]));
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
        if (kTogether ? any_of_warpgroup(group.barrier, loud) : __any_sync(kAllLanes, loud)) {
          Products::scores(score, terms + Products::kTermBytes, stage_at(slot));
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
      if constexpr (kMass) mass.begin_stage(block_of(slot));
      at_ring.template release<Slots::kKeys>(slot);
      if constexpr (kMass) {
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; ++i) {
          score[i] = exp2_of(fmaf(score[i], unit, -top[i / 2 % 2]));
        }
        mass.keep(score);
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
        }
      }
      const float from[2] = {finite_or_zero(top[0]), finite_or_zero(top[1])};
#pragma unroll
      for (int i = 0; i < 4 * kTokenTiles; ++i) {
        score[i] = exp2_of(fmaf(score[i], unit, -from[i / 2 % 2]));
      }
      if (call.lse != nullptr) {
        float sum[2] = {exact[0] * keep[0], exact[1] * keep[1]};
#pragma unroll
        for (int i = 0; i < 4 * kTokenTiles; i += 8) {
          const float* const s = score + i;
          sum[0] += (s[0] + s[1]) + (s[4] + s[5]);
          sum[1] += (s[2] + s[3]) + (s[6] + s[7]);
        }
        exact[0] = sum[0];
        exact[1] = sum[1];
      }

      // Outputs: of the stage before, or of this one.
      if constexpr (kOverlaps) {
        Products::wait_for_outputs(out, weight);
        if (owed != kNone) at_ring.template release<Slots::kValues>(owed);
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
        at_ring.template release<Slots::kValues>(slot);
      }
    }
    settle();

    if constexpr (kMass) {
      mass.finish();
      return;
    }

    // 3. The rows, or a partial of them: through shared memory, where queries were, so that
    // the code is short (it runs once for thousands of stages) and stores are whole lines.
    const UnitParts parts = parts_of(start.unit_begin, tile.num_stages, walk.header.range_length);
    const PartialView partial(work, parts.slot(walk.range - parts.first_range), kHeadDim);
    float* const mine = reinterpret_cast<float*>(shared + Loop::kQueryAt +
                                                 warp * 2 * Loop::kQueryBytes);  // [16, head_dim]
    static_assert(2 * Loop::kQueryBytes >= 16 * kHeadDim * 4);
    if constexpr (kTogether) group.sync();              // nobody multiplies the query any more
    constexpr int kMoved = kHeadDim % 32 == 0 ? 3 : 1;  // rows are moved by 8 against each other
    const int g = lane_again() / 4, q = lane_again() % 4;
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
    float whole[2] = {exact[0], exact[1]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      whole[i] += __shfl_xor_sync(kAllLanes, whole[i], 1);
      whole[i] += __shfl_xor_sync(kAllLanes, whole[i], 2);
    }
    const float sum[2] = {out[8 * kSteps], out[8 * kSteps + 2]};
    __syncwarp();
#pragma unroll 2
    for (int of = 0; of < my_rows; ++of) {
      const int row = warp * 16 + of, from = of % 8 * 4;
      const RowSums sums{__shfl_sync(kAllLanes, of < 8 ? top[0] : top[1], from),
                         __shfl_sync(kAllLanes, of < 8 ? sum[0] : sum[1], from),
                         __shfl_sync(kAllLanes, of < 8 ? whole[0] : whole[1], from),
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
      arrive_and_merge<kHeadDim, Loop::kRows>(call,
                                              work,
                                              start,
                                              parts,
                                              team,
                                              shared + Loop::kQueryAt,
                                              Loop::kWarps * 2 * Loop::kQueryBytes,
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
__global__ void __launch_bounds__(ManyQueries<T, kHeadDim, kMass, kHasWarpgroups>::kThreads, 1)
    many_queries_kernel(const __grid_constant__ Attention call, const __grid_constant__ Work work) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  constexpr int kSharedBytes = kSharedBytesBefore90;
#else
  constexpr int kSharedBytes = 227 * 1024;
#endif
  if constexpr (ManyQueries<T, kHeadDim, kMass, kHasWarpgroups>::kBytes <= kSharedBytes) {
    many_queries<T, kHeadDim, kBlockSize, kMass>(call, work);
  }
}

}  // namespace memkv::cuda
