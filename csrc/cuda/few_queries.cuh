// Attention of few query rows: decode, and questions of a token or two.
//
//     S^T = K Q^T        16 tokens x 8 rows, over head_dim
//     O^T = V^T P^T      head_dim x 8 rows, over 16 tokens
//
// Grid: a block for each processor, or as many as the device holds, one range of the flat work each
// (work_split.h). The stages of a range's part of a unit are dealt to the block's warps in runs, so
// that a warp turns its query once for a run. Each warp has a ring of some stages of its own in
// shared memory, which the copy engine fills (sm_90; cp.async before it): a slab of K or V is some
// KiB of linear memory, one instruction. No barrier between warps until the part is done.
//
//     ring of a warp     | K i | V i | K i+1 | V i+1 | K i+2 | V i+2 |      K i+3 is asked for when
//                          ^ S^T, then weights, then ^ O^T                  K i has been read
//
// K as it is stored is operand A (8 tokens x 16 bytes are a core matrix); V is operand A of the
// second product, as it is stored; P^T comes out of the accumulators through movmatrix. The sum of
// a row's weights is one more row of V, all ones: it takes the same steps as the output, and values
// that are all 1 give exactly 1. A query is kept as two bfloat16 terms, 16 digits, as turning it
// makes more digits than it had; float32 queries and their weights as three.
//
// With kMass the loop ends at the weights: rows know their log-sum-exp, V is not read, and what is
// stored is the mass of each block (FewMass).
//
// Bytes moved per token and kv head: 4 * head_dim. The turned query lies in shared memory, in the
// very order in which its lane reads it.
#pragma once

#include "few_mass.cuh"
#include "few_ring.cuh"
#include "merge.cuh"
#include "stages.cuh"

namespace memkv::cuda {

// Whether a run's turn is asked for while the run before it is read. Before sm_90 groups of cp.async are
// counted for the ring: there only the first is asked for early.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kTurnsAhead = false;
#else
inline constexpr bool kTurnsAhead = true;
#endif

inline constexpr int kMostFewWarps = 8;
inline constexpr int kMostFewStages = 4;

template <typename T, int kHeadDim, int kTiles, int kTerms>
struct FewQueries {
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kWeightTerms = kTerms == 3 ? 3 : 1;
  // Fragments on their way: as many as registers are left for.
  static constexpr int kAtOnce = kTiles * kSteps > 16 || (kSteps > 8 && kTerms == 3) ? 1
                                 : kTiles * kSteps > 8                               ? 4
                                 : kSteps % 4 == 0                                   ? 2
                                                                                     : 1;
  static constexpr bool kCopiesTurn = kTiles * kSteps <= 16;  // where registers allow
  static constexpr bool kCopiesLate = kHeadDim != 64;  // one that was not asked for ahead, too
  static constexpr int kTurnedAtOnce = kTiles * kSteps > 16 || kSteps % 4 != 0 ? 1 : 2;  // steps
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocksAtOnce = 1;  // of 8 warps: shared memory has no room for more
#else
  static constexpr int kBlocksAtOnce = kTiles == 1 && kSteps <= 8 && kTerms == 2 ? 2 : 1;
#endif
  static constexpr int kRowFloats = kHeadDim + 8;  // padded: 8 rows, no bank twice
  // [tile][step][term pair][lane]
  static constexpr int kQueryBytes = kTiles * kSteps * 32 * 8 * kTerms;
  // Of a warp: its query, and behind it a turn and the number of the run whose turn it is.
  static constexpr int kWarpBytes = kQueryBytes + kHeadDim * 4 + 16;
  static_assert(kHeadDim % 16 == 0);
  static_assert(kQueryBytes >= kRows * kHeadDim * 4, "partials take the place of the query");

  struct Layout {
    int ring, query, rows, states, starts, positions, barriers, flag, bytes;

    __host__ __device__ Layout(int warps, int stages, int stage_tokens) {
      const int slab = stage_tokens * kHeadDim * 2;
      ring = 0;
      query = ring + warps * stages * 2 * slab;
      rows = query + warps * kWarpBytes;
      states = rows + kRows * kRowFloats * 4;
      starts = states + warps * kRows * 16;
      positions = starts + warps * int(sizeof(RangeStart));
      barriers = positions + kRows * 4;
      flag = barriers + warps * stages * 2 * 8;
      bytes = flag + 16;
    }
  };
};

// Elements of a 16-token tile at or past `valid`, where memory may hold anything, become 0.
__device__ __forceinline__ void zero_unused(Fragment& f, int valid, int lane) {
  const int token = lane % 4 * 2;
  const auto mask = [&](int first) {
    return (first < valid ? 0x0000ffffu : 0u) | (first + 1 < valid ? 0xffff0000u : 0u);
  };
  const uint32_t low = mask(token), high = mask(token + 8);
  f.r[0] &= low;
  f.r[1] &= low;
  f.r[2] &= high;
  f.r[3] &= high;
}

template <typename T, int kHeadDim, int kTiles, int kTerms, bool kMass>
__global__ void __launch_bounds__(kMostFewWarps * 32,
                                  FewQueries<T, kHeadDim, kTiles, kTerms>::kBlocksAtOnce)
    few_queries_kernel(const __grid_constant__ Attention call, const __grid_constant__ Work work) {
  using Loop = FewQueries<T, kHeadDim, kTiles, kTerms>;
  using Numbers = Packed<T>;
  constexpr int kSteps = Loop::kSteps, kWeightTerms = Loop::kWeightTerms;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  const int block_size = call.cache.block_size, stage_tokens = work.shape.stage_tokens;
  const int num_warps = blockDim.x / 32, num_stages = work.stages;
  const int num_slots = kMass ? 2 * num_stages : num_stages;  // of the ring: K only takes half
  const typename Loop::Layout at(num_warps, num_stages, stage_tokens);
  uint4* const query = reinterpret_cast<uint4*>(shared + at.query + warp * Loop::kWarpBytes);
  float* const rows = reinterpret_cast<float*>(shared + at.rows);
  float* const next_turn =
      reinterpret_cast<float*>(reinterpret_cast<unsigned char*>(query) + Loop::kQueryBytes);
  int* const turn_here = reinterpret_cast<int*>(next_turn + kHeadDim);
  RowSums* const states = reinterpret_cast<RowSums*>(shared + at.states);
  int32_t* const positions = reinterpret_cast<int32_t*>(shared + at.positions);
  int* const flag = reinterpret_cast<int*>(shared + at.flag);
  prefetch(work.ranges + blockIdx.x);  // there are as many as blocks of threads, used or not
  const WorkHeader header = *work.header;
  const ScoreScale scaled(call);
  const RotaryPairs pairs{call.rotary_dim, call.interleaved};

  const uint32_t barriers = shared_address(shared + at.barriers) + warp * num_stages * 2 * 8;
#ifdef MEMKV_BULK_COPY
  if (lane < num_stages * 2) barrier_init(barriers + lane * 8, 1);
  fence_for_copies();
  __syncwarp();
#endif
  StageRing<kMass ? 1 : 2> ring(
      call.cache,
      shared_address(shared + at.ring) + warp * num_stages * 2 * stage_tokens * kHeadDim * 2,
      barriers,
      num_slots,
      stage_tokens);

  // Where this lane's row of a fragment is in a stage: K rows are tokens, V rows are dimensions.
  const int token_row = lane % 8 + (lane / 8 % 2) * 8, k_piece = lane / 16;
  const uint32_t k_lane = token_row / block_size * (kHeadDim * block_size * 2) +
                          token_row % block_size * 16 + k_piece * block_size * 16;
  const int v_token = lane / 16 * 8, v_row = lane % 16;
  const uint32_t v_lane = v_token / block_size * (kHeadDim * block_size * 2) +
                          v_token % block_size * 2 + v_row * block_size * 2;
  const uint32_t step_bytes = 2 * block_size * 16;  // of K and of V alike

  // Each warp has its own copy of where it is: in shared memory, as registers are short.
  RangeStart& start =
      *reinterpret_cast<RangeStart*>(shared + at.starts + warp * sizeof(RangeStart));
  constexpr int kStartInts = sizeof(RangeStart) / 4;
  constexpr int kTwos = kHeadDim / 2, kFours = kHeadDim / 4;
  bool waited = false;
  for (int range = blockIdx.x; range < header.num_ranges; range += gridDim.x) {
    if (lane < kStartInts) {
      reinterpret_cast<int32_t*>(&start)[lane] =
          reinterpret_cast<const int32_t*>(work.ranges + range)[lane];
    }
    __syncwarp();
    const int range_end = end_of_range(header, range);
    while (start.unit_begin < range_end) {
      const QueryTile& tile = start.of;
      const int begin = start.stage, end = min(tile.num_stages, range_end - start.unit_begin);

      // 1. Look up the first stages. The query rows are on their way while those are asked for.
      constexpr int kMine = 1;
      const auto load_query = [&](int i) {
        const int row = i / kTwos, d = i % kTwos * 2;
        if (row >= tile.num_rows) return float2{};
        const RowPlace place = place_of(work, tile, start.kv_head, row);
        return load_two(call.q, call.q.offset(place.token, place.head) + d);
      };
      const auto keep_query = [&](int i, float2 two) {
        *reinterpret_cast<float2*>(rows + i / kTwos * Loop::kRowFloats + i % kTwos * 2) = two;
      };
      int32_t my_position = 0;
      if (threadIdx.x < Loop::kRows) {
        const int row = min(int(threadIdx.x), tile.num_rows - 1);
        my_position =
            __ldg(call.plan.query_position + place_of(work, tile, start.kv_head, row).token);
      }
      const auto copy_turn = [&](int run) {
        copy_async_wait<0>();  // another one, that was not used
        __syncwarp();          // or is read
        const int i = 2 * lane_again();
        const float* const turn =
            call.turns + int64_t{tile.first_segment + run} * call.rotary_dim + i;
#pragma unroll
        for (int base = 0; base < kHeadDim; base += 64) {
          if (base + i < call.rotary_dim) {
            copy_async_8(shared_address(next_turn + i) + base * 4, turn + base);
          }
        }
        copy_async_commit();
        // The run whose turn is here, or on its way; registers are short.
        if (i == 0) *turn_here = run;
      };
      const int my_begin = begin + (end - begin) * warp / num_warps;
      const int my_end = begin + (end - begin) * (warp + 1) / num_warps;
      StageCursor taken_from(work, tile.first_run, tile.num_runs, my_begin);
      BlockList list(call, work, tile.first_run, my_end, stage_tokens / block_size);
      if (my_begin < my_end) {
        // The first turn is on its way too, to shared memory.
        if constexpr (Loop::kCopiesTurn) copy_turn(taken_from.run);
        list.of(my_begin, taken_from.run);
      }
      if (!waited) wait_for_predecessor();  // up to here only the plan was read
      waited = true;
      float2 early[kMine];
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        early[i] = load_query(min(int(threadIdx.x + i * blockDim.x), Loop::kRows * kTwos - 1));
      }
      for (int i = 0; i < num_slots; ++i) {
        const bool some = my_begin + i < my_end;
        StageBlocks blocks{{0, -1}};
        if (some) {
          blocks = list.of(my_begin + i, taken_from.run);
          ring.ask(0, i, blocks, start.kv_head);
        }
        ring.commit();
        if (kMass) continue;
        if (some) ring.ask(1, i, blocks, start.kv_head);
        ring.commit();
      }

      // 2. The query rows, and where they stand.
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const int at_row = threadIdx.x + i * blockDim.x;
        if (at_row < Loop::kRows * kTwos) keep_query(at_row, early[i]);
      }
      for (int i = threadIdx.x + kMine * blockDim.x; i < Loop::kRows * kTwos; i += blockDim.x) {
        keep_query(i, load_query(i));
      }
      if (threadIdx.x < Loop::kRows) positions[threadIdx.x] = my_position;
      if constexpr (Loop::kCopiesTurn) copy_async_wait<0>();
      __syncthreads();

      float top[kTiles][2], exact[kTiles][2], out[kTiles][kSteps][4], sum[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        top[t][0] = top[t][1] = kMinusInfinity;
        exact[t][0] = exact[t][1] = 0.0f;
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          out[t][m][0] = out[t][m][1] = out[t][m][2] = out[t][m][3] = 0.0f;
        }
        sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
      }

      FewMass<kTiles> mass(call, work, tile, start.kv_head, states + warp * Loop::kRows);
      if constexpr (kMass) mass.read_lse(top);

      // 3. Stage after stage.
      Segment segment{};
      TileView view(segment, 0, 0, 0);
      for (int stage = my_begin; stage < my_end; ++stage) {
        if (taken_from.enter(stage) || stage == my_begin) {
          segment = taken_from.segment();
          view = TileView(segment, tile.least_position, tile.most_position, call.window);
          const float* turn[] = {turn_of(call, segment, tile.first_segment + taken_from.run)};
          if constexpr (Loop::kCopiesTurn) {
            const bool is_here = taken_from.run == *turn_here;
            const bool comes = kTurnsAhead && Loop::kCopiesLate;
            if (turn[0] != nullptr && (comes || is_here)) {
              if (!is_here) copy_turn(taken_from.run);
              if (kTurnsAhead) copy_async_wait<0>();
              __syncwarp();
              turn[0] = next_turn;
            }
          }
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const float* row = rows + (t * 8 + g) * Loop::kRowFloats;
            turn_rows<kSteps, 1, Loop::kTurnedAtOnce>(
                turn,
                pairs,
                q,
                [&](int, int d) { return *reinterpret_cast<const float2*>(row + d); },
                [&](int step, const float2(&low)[1], const float2(&high)[1]) {
                  uint32_t b0[kTerms], b1[kTerms];
                  split<T, kTerms>(low[0].x, low[0].y, b0);
                  split<T, kTerms>(high[0].x, high[0].y, b1);
                  query[(t * kSteps + step) * 32 + lane] = {b0[0], b1[0], b0[1], b1[1]};
                  if constexpr (kTerms == 3) {
                    reinterpret_cast<uint2*>(query + kTiles * kSteps *
                                                         32)[(t * kSteps + step) * 32 + lane] = {
                        b0[2], b1[2]};
                  }
                });
          }
          if constexpr (Loop::kCopiesTurn && kTurnsAhead) {
            if (taken_from.run + 1 < tile.num_runs) copy_turn(taken_from.run + 1);
          }
        }
        const int stage_begin = taken_from.stage_of_segment(stage) * stage_tokens;
        ring.wait(0);
        StageBlocks later{{0, -1}};

        for (int part = 0; part < stage_tokens; part += 16) {
          const int first_token = stage_begin + part;
          const bool last_part = part + 16 >= stage_tokens;
          const uint32_t keys = ring.keys() + k_lane + part * 16;
          const uint32_t values = ring.values() + v_lane + part * 2;

          // Scores of 16 tokens, in sums of every other step: products in a row wait for each
          // other. Fragments are loaded some steps at once.
          float score[kTiles][3][4];  // [tile][first term, even and odd steps; the other terms]
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int i = 0; i < 12; ++i) score[t][i / 4][i % 4] = 0.0f;
          }
#pragma unroll
          for (int base = 0; base < kSteps; base += Loop::kAtOnce) {
            Fragment k[Loop::kAtOnce];
            uint4 b[kTiles][Loop::kAtOnce];
#pragma unroll
            for (int i = 0; i < Loop::kAtOnce; ++i) {
              if (base + i >= kSteps) break;
              k[i] = load_matrices(keys + (base + i) * step_bytes);
#pragma unroll
              for (int t = 0; t < kTiles; ++t) {
                b[t][i] = query[(t * kSteps + base + i) * 32 + lane];
              }
            }
#pragma unroll
            for (int i = 0; i < Loop::kAtOnce; ++i) {
              if (base + i >= kSteps) break;
#pragma unroll
              for (int t = 0; t < kTiles; ++t) {
                Numbers::multiply_add(score[t][i % 2], k[i].r, b[t][i].x, b[t][i].y);
                Numbers::multiply_add(score[t][2], k[i].r, b[t][i].z, b[t][i].w);
                if constexpr (kTerms == 3) {
                  const uint2 c = reinterpret_cast<const uint2*>(
                      query + kTiles * kSteps * 32)[(t * kSteps + base + i) * 32 + lane];
                  Numbers::multiply_add(score[t][2], k[i].r, c.x, c.y);
                }
              }
            }
          }
          if (last_part) {  // K is read: ask for what takes its place.
            __syncwarp();
            if (stage + num_slots < my_end) {
              later = list.of(stage + num_slots, taken_from.run);
              ring.ask(0, 0, later, start.kv_head);
            }
            ring.commit();
          }

          // Weights. The maximum of a row rises seldom: only then do lanes tell each other.
          const bool edge = first_token < view.every_begin || first_token + 16 > view.every_end;
          uint32_t weight[kTiles][kWeightTerms][2];
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            float s[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              s[i] = (score[t][0][i] + score[t][1][i]) + score[t][2][i];
            }
            scaled(s);
            if (edge) {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const TokenRange sees =
                    visible_tokens(segment, positions[t * 8 + 2 * q + i], call.window);
                const int low = first_token + g, high = low + 8;
                s[i] = low >= sees.begin && low < sees.end ? s[i] : kMinusInfinity;
                s[i + 2] = high >= sees.begin && high < sees.end ? s[i + 2] : kMinusInfinity;
              }
            }
            if constexpr (kMass) {
              mass.add(t, s, top[t], part == 0);
              continue;
            }
            float raised[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
            if (__any_sync(kAllLanes, raised[0] > top[t][0] || raised[1] > top[t][1])) {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int across = 4; across < 32; across *= 2) {
                  raised[i] = fmaxf(raised[i], __shfl_xor_sync(kAllLanes, raised[i], across));
                }
              }
              SoftmaxState<float> state[2] = {{top[t][0], 0.0f}, {top[t][1], 0.0f}};
              const float keep[2] = {state[0].raise(raised[0]), state[1].raise(raised[1])};
              top[t][0] = state[0].max;
              top[t][1] = state[1].max;
              exact[t][0] *= keep[0];
              exact[t][1] *= keep[1];
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sum[t][i] *= keep[i % 2];
#pragma unroll
                for (int m = 0; m < kSteps; ++m) out[t][m][i] *= keep[i % 2];
              }
            }
            const SoftmaxState<float> state[2] = {{top[t][0], 0.0f}, {top[t][1], 0.0f}};
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = state[i % 2].weight(s[i]);
            exact[t][0] += s[0] + s[2];
            exact[t][1] += s[1] + s[3];
            uint32_t low[kWeightTerms], high[kWeightTerms];
            split<T, kWeightTerms>(s[0], s[1], low);
            split<T, kWeightTerms>(s[2], s[3], high);
#pragma unroll
            for (int i = 0; i < kWeightTerms; ++i) {
              weight[t][i][0] = transpose(low[i]);
              weight[t][i][1] = transpose(high[i]);
            }
          }

          if constexpr (kMass) {
            if (last_part) mass.store(segment, stage_begin);
            continue;
          }

          // Outputs.
          if (part == 0) ring.wait(1);
          const int valid = segment.num_tokens - first_token;
#pragma unroll
          for (int base = 0; base < kSteps; base += Loop::kAtOnce) {
            Fragment v[Loop::kAtOnce];
#pragma unroll
            for (int i = 0; i < Loop::kAtOnce; ++i) {
              if (base + i < kSteps) v[i] = load_matrices(values + (base + i) * step_bytes);
            }
            if (valid < 16) {
#pragma unroll
              for (int i = 0; i < Loop::kAtOnce; ++i) zero_unused(v[i], valid, lane);
            }
#pragma unroll
            for (int i = 0; i < Loop::kAtOnce; ++i) {
              if (base + i >= kSteps) break;
#pragma unroll
              for (int t = 0; t < kTiles; ++t) {
#pragma unroll
                for (int term = 0; term < kWeightTerms; ++term) {
                  Numbers::multiply_add(
                      out[t][base + i], v[i].r, weight[t][term][0], weight[t][term][1]);
                }
              }
            }
          }
          constexpr uint32_t kOnes = Numbers::kOnes;
          const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int term = 0; term < kWeightTerms; ++term) {
              Numbers::multiply_add(sum[t], ones, weight[t][term][0], weight[t][term][1]);
            }
          }
        }
        if constexpr (!kMass) {
          __syncwarp();
          if (stage + num_stages < my_end) ring.ask(1, 0, later, start.kv_head);
          ring.commit();
        }
        ring.next_slot();
      }
      if constexpr (kMass) {
        __syncthreads();  // the query's rows are read
        next_part(work, start, range_end);
        continue;
      }

      if constexpr (kTurnsAhead) copy_async_wait<0>();  // partials will be there

      // 4. The warps' results, where their queries were. Banks: rows 2q are moved by 8q.
      constexpr int kMoved = kHeadDim % 32 == 0 ? 3 : 1;
      const auto place_in = [](int row, int d) {
        return row * kHeadDim + (d ^ (row / 2 & kMoved) * 8);
      };
      float* const mine = reinterpret_cast<float*>(query);
      __syncwarp();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = t * 8 + 2 * q + i;
#pragma unroll
          for (int m = 0; m < kSteps; ++m) {
            mine[place_in(row, 16 * m + g)] = out[t][m][i];
            mine[place_in(row, 16 * m + g + 8)] = out[t][m][i + 2];
          }
#pragma unroll
          for (int across = 4; across < 32; across *= 2) {
            exact[t][i] += __shfl_xor_sync(kAllLanes, exact[t][i], across);
          }
          if (g == 0) {
            states[warp * Loop::kRows + row] = {top[t][i], sum[t][i], exact[t][i], 0.0f};
          }
        }
      }
      __syncthreads();
      const UnitParts parts = parts_of(start.unit_begin, tile.num_stages, header.range_length);
      const PartialView partial(work, parts.slot(range - parts.first_range), kHeadDim);
      for (int item = threadIdx.x; item < tile.num_rows * kFours; item += blockDim.x) {
        const int row = item / kFours, d = item % kFours * 4;
        float common = kMinusInfinity;
        for (int of = 0; of < num_warps; ++of) {
          common = fmaxf(common, states[of * Loop::kRows + row].max);
        }
        Merging merging(common);
        float4 all{};
        for (int of = 0; of < num_warps; ++of) {
          const float weight = merging.add(states[of * Loop::kRows + row]);
          add_weighted(all,
                       *reinterpret_cast<const float4*>(shared + at.query + of * Loop::kWarpBytes +
                                                        place_in(row, d) * 4),
                       weight);
        }
        if (parts.count == 1) {
          deliver_row(call, work, tile, start.kv_head, row, d, merging.sums(), all);
        } else {
          *reinterpret_cast<float4*>(partial.out + row * kHeadDim + d) = all;
          if (d == 0) partial.sums[row] = merging.sums();
        }
      }
      if (parts.count > 1) {
        arrive_and_merge<kHeadDim, Loop::kRows>(
            call, work, start, parts, Team{int(blockDim.x), 0}, shared, at.rows, flag);
#ifdef MEMKV_BULK_COPY
        fence_for_copies();  // which next write where partials were
#endif
        __syncthreads();
      } else {
        __syncthreads();
      }

      // 5. The next unit.
      next_part(work, start, range_end);
    }
  }
  if (!waited) wait_for_predecessor();
  if constexpr (!kMass) finish_blind_tiles<kHeadDim>(call, work, header, blockDim.x);
}

}  // namespace memkv::cuda
