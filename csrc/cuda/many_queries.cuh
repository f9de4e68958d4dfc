// Attention of many query rows: prefill, questions, recomputed blocks.
//
//     S = Q K^T      16 rows x 8 tokens, over head_dim        each of 8 warps has 16 rows of a tile
//     O = P V        16 rows x 8 dimensions, over 16 tokens
//
// Rows of a tile are query tokens times the heads of a kv head; their positions may be any. Grid
// and ranges as in few_queries.cuh, with stages of 64 tokens (32 where head_dim is 256) that all
// warps share: a ring of three, filled by cp.async, 16 bytes a thread.
//
//     K in shared memory   [head_dim / 8][stage tokens][8]    as in a block, but blocks side by side
//     V in shared memory   [stage tokens / 8][head_dim][8]    8 x 8 core matrices too: no bank twice
//
// What a block holds past the segment's end is not copied: zeros take its place. A segment that
// stands where it was stored needs no turn, and its query no second term: 3 products become 2.
#pragma once

#include "few_queries.cuh"
#include "rows.cuh"

namespace memkv::cuda {

inline constexpr int kManyWarps = 8;
inline constexpr int kManyRows = 16 * kManyWarps;
inline constexpr int kManyStages = 3;

template <typename T, int kHeadDim>
struct ManyQueries {
  static constexpr int kTokens = kHeadDim > 128 ? 32 : 64;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kKeyBytes = kHeadDim * kTokens * 2;
  static constexpr int kValuePad = 64;  // between groups of 8 tokens: their copies share no bank
  static constexpr int kValueGroupBytes = kHeadDim * 16 + kValuePad;
  static constexpr int kValueBytes = kTokens / 8 * kValueGroupBytes;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kQueryBytes = kSteps * 32 * 16;  // of one term of a warp

  static constexpr int kQueryAt = kManyStages * kStageBytes;
  static constexpr int kPositionsAt = kQueryAt + kManyWarps * 2 * kQueryBytes;
  static constexpr int kFlagAt = kPositionsAt + kManyRows * 4;
  static constexpr int kBytes = kFlagAt + 16;
  static_assert(kBytes <= 227 * 1024);
};

// Copies K and V of a stage; tokens past `valid` become zeros.
template <typename Loop>
__device__ __forceinline__ void copy_stage(const PagedCache& cache,
                                           const int32_t* ids,
                                           int valid,
                                           int kv_head,
                                           uint32_t to) {
  constexpr int kThreads = kManyWarps * 32, kTokens = Loop::kTokens;
  constexpr int kPieces = Loop::kKeyBytes / 16;
  const int block_size = cache.block_size, groups = block_size / 8;
  const int head_dim = cache.head_dim;
  const int64_t slab = int64_t{kv_head} * head_dim * block_size * 2;
#pragma unroll 4
  for (int i = threadIdx.x; i < kPieces; i += kThreads) {  // 16 bytes of one token
    const int piece = i / kTokens, token = i % kTokens;
    const bool used = token < valid;
    const int block = used ? token / block_size : 0, slot = token % block_size;
    const char* from = static_cast<const char*>(cache.k) +
                       __ldg(ids + block) * cache.k_block_stride * 2 + slab +
                       (piece * block_size + slot) * 16;
    copy_async_16(to + i * 16, from, used ? 16 : 0);
  }
  const int pieces_of_block = head_dim * groups;
#pragma unroll 4
  for (int i = threadIdx.x; i < kPieces; i += kThreads) {  // 8 tokens of one dimension
    const int block = i / pieces_of_block, inside = i % pieces_of_block;
    const int d = inside / groups, group = inside % groups;
    const int token = block * block_size + group * 8;
    const int count = min(8, valid - token);
    const char* from = static_cast<const char*>(cache.v) +
                       __ldg(ids + (count > 0 ? block : 0)) * cache.v_block_stride * 2 + slab +
                       inside * 16;
    copy_async_16(to + Loop::kKeyBytes + token / 8 * Loop::kValueGroupBytes + d * 16,
                  from,
                  count > 0 ? count * 2 : 0);
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kManyWarps * 32, 1)
    many_queries_kernel(const __grid_constant__ Attention call, const __grid_constant__ Work work) {
  using Loop = ManyQueries<T, kHeadDim>;
  using Numbers = Packed<T>;
  constexpr int kSteps = Loop::kSteps, kTokens = Loop::kTokens, kTokenTiles = kTokens / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  uint4* const query =
      reinterpret_cast<uint4*>(shared + Loop::kQueryAt + warp * 2 * Loop::kQueryBytes);
  int32_t* const positions = reinterpret_cast<int32_t*>(shared + Loop::kPositionsAt);
  int* const flag = reinterpret_cast<int*>(shared + Loop::kFlagAt);
  const uint32_t ring = shared_address(shared);
  const WorkHeader header = *work.header;
  const ScoreScale scaled{call.scale, call.softcap};
  const RotaryPairs pairs{call.rotary_dim, call.interleaved};
  const int blocks_of_stage = kTokens / call.cache.block_size;

  // Where this lane's row of a fragment is: of K tokens 0..7 and 8..15 in turn, of V dimensions.
  const uint32_t k_lane = (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * (kTokens * 16);
  const uint32_t v_lane = Loop::kKeyBytes + (lane % 8 + lane / 16 * 8) * 16 +
                          lane / 8 % 2 * Loop::kValueGroupBytes;

  for (int range = blockIdx.x; range < header.num_ranges; range += gridDim.x) {
    RangeStart start = work.ranges[range];
    int left = min(header.range_length, header.length - range * header.range_length);
    while (left > 0) {
      const QueryTile tile = work.tiles[start.tile];
      const int taken = min(left, tile.unit_length - start.stage);
      const int begin = start.stage, end = min(begin + taken, tile.num_stages);
      const int32_t first_segment = call.plan.segment_start[tile.sequence];
      const int num_segments = call.plan.segment_start[tile.sequence + 1] - first_segment;
      const Segment* segments = call.plan.segments + first_segment;

      // 1. Ask for the first stages.
      StageCursor asked(work.runs + tile.first_run, num_segments, begin);
      StageCursor taken_from = asked;
      Segment asked_of = segments[asked.run];
      const auto ask = [&](int stage, int slot) {
        if (asked.enter(stage)) asked_of = segments[asked.run];
        const int in_segment = asked.stage_of_segment(stage);
        copy_stage<Loop>(
            call.cache,
            call.plan.block_ids + asked_of.first_entry + in_segment * blocks_of_stage,
            asked_of.num_tokens - in_segment * kTokens,
            start.kv_head,
            ring + slot * Loop::kStageBytes);
      };
      for (int i = 0; i < kManyStages - 1; ++i) {
        if (begin + i < end) ask(begin + i, i);
        copy_async_commit();
      }

      // 2. Where the rows stand.
      for (int row = threadIdx.x; row < kManyRows; row += kManyWarps * 32) {
        positions[row] =
            call.plan
                .query_position[place_of(call, tile, start.kv_head, min(row, tile.num_rows - 1))
                                    .token];
      }
      __syncthreads();
      const int my_rows = min(16, tile.num_rows - warp * 16);  // may be 0 or less
      const int32_t position[2] = {positions[warp * 16 + g], positions[warp * 16 + g + 8]};
      int32_t least = min(position[0], position[1]), most = max(position[0], position[1]);
#pragma unroll
      for (int across = 4; across < 32; across *= 2) {
        least = min(least, __shfl_xor_sync(kAllLanes, least, across));
        most = max(most, __shfl_xor_sync(kAllLanes, most, across));
      }

      float top[2] = {kMinusInfinity, kMinusInfinity}, sum[4] = {}, out[2 * kSteps][4];
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
      }

      // 3. Stage after stage.
      Segment segment{};
      TileView view(segment, 0, 0, 0);
      TokenRange sees[2]{};
      bool two_terms = false;
      int slot = 0;
      for (int stage = begin; stage < end; ++stage) {
        copy_async_wait<kManyStages - 2>();
        __syncthreads();  // the stage is here, and its predecessor's place is free
        {
          const int next = stage + kManyStages - 1;
          if (next < end) ask(next, slot == 0 ? kManyStages - 1 : slot - 1);
          copy_async_commit();
        }
        if ((taken_from.enter(stage) || stage == begin) && my_rows > 0) {
          segment = segments[taken_from.run];
          view = TileView(segment, least, most, call.window);
          sees[0] = visible_tokens(segment, position[0], call.window);
          sees[1] = visible_tokens(segment, position[1], call.window);
          const float* turn = turn_of(call, segment, first_segment + taken_from.run);
          two_terms = turn != nullptr;
          int64_t offset[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int row = min(warp * 16 + g + 8 * i, tile.num_rows - 1);
            const RowPlace place = place_of(call, tile, start.kv_head, row);
            offset[i] = call.q.offset(place.token, place.head);
          }
          const T* const q_data = static_cast<const T*>(call.q.data);
          const auto load = [&](int i, int d) {
            const T* p = q_data + offset[i] + d;
            return float2{float(p[0]), float(p[1])};
          };
#pragma unroll 2
          for (int step = 0; step < kSteps; ++step) {
            uint32_t a[4][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float2 two = turned_two([&](int d) { return load(i % 2, d); },
                                            turn,
                                            pairs,
                                            16 * step + 2 * q + i / 2 * 8);
              split<T, 2>(two.x, two.y, a[i]);
            }
            query[step * 32 + lane] = {a[0][0], a[1][0], a[2][0], a[3][0]};
            query[(kSteps + step) * 32 + lane] = {a[0][1], a[1][1], a[2][1], a[3][1]};
          }
        }
        const int first_token = taken_from.stage_of_segment(stage) * kTokens;
        const uint32_t keys = ring + slot * Loop::kStageBytes + k_lane;
        const uint32_t values = ring + slot * Loop::kStageBytes + v_lane;
        slot = slot + 1 == kManyStages ? 0 : slot + 1;
        if (my_rows <= 0 || first_token >= view.some_end ||
            first_token + kTokens <= view.some_begin) {
          continue;
        }

        // Scores.
        float score[kTokenTiles][4];
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
        }
        const auto multiply = [&](const uint4* of_query) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const uint4 term = of_query[step * 32 + lane];
            const uint32_t a[4] = {term.x, term.y, term.z, term.w};
#pragma unroll
            for (int n = 0; n < kTokenTiles; n += 2) {
              const Fragment k = load_matrices(keys + step * 2 * (kTokens * 16) + n * 8 * 16);
              Numbers::multiply_add(score[n], a, k.r[0], k.r[1]);
              Numbers::multiply_add(score[n + 1], a, k.r[2], k.r[3]);
            }
          }
        };
        multiply(query);
        if (two_terms) multiply(query + kSteps * 32);

        // Weights.
        const bool edge =
            first_token < view.every_begin || first_token + kTokens > view.every_end;
        float raised[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float s = scaled(score[n][i]);
            if (edge) {
              const int token = first_token + n * 8 + 2 * q + i % 2;
              s = token >= sees[i / 2].begin && token < sees[i / 2].end ? s : kMinusInfinity;
            }
            score[n][i] = s;
            raised[i / 2] = larger(raised[i / 2], s);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          raised[i] = larger(raised[i], __shfl_xor_sync(kAllLanes, raised[i], 1));
          raised[i] = larger(raised[i], __shfl_xor_sync(kAllLanes, raised[i], 2));
        }
        if (__any_sync(kAllLanes, raised[0] > top[0] || raised[1] > top[1])) {
          SoftmaxState<float> state[2] = {{top[0], 0.0f}, {top[1], 0.0f}};
          const float keep[2] = {state[0].raise(raised[0]), state[1].raise(raised[1])};
          top[0] = raised[0];
          top[1] = raised[1];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[i] *= keep[i / 2];
#pragma unroll
            for (int n = 0; n < 2 * kSteps; ++n) out[n][i] *= keep[i / 2];
          }
        }
        const SoftmaxState<float> state[2] = {{top[0], 0.0f}, {top[1], 0.0f}};

        // Outputs.
        constexpr uint32_t kOnes = Numbers::kOnes;
#pragma unroll
        for (int n = 0; n < kTokenTiles; n += 2) {
          uint32_t weight[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* s = score[n + i / 2] + i % 2 * 2;
            weight[i] = Numbers::pack(state[i % 2].weight(s[0]), state[i % 2].weight(s[1]));
          }
          Numbers::multiply_add(sum, weight, kOnes, kOnes);
#pragma unroll
          for (int m = 0; m < kSteps; ++m) {
            const Fragment v =
                load_matrices(values + n * Loop::kValueGroupBytes + m * 16 * 16);
            Numbers::multiply_add(out[2 * m], weight, v.r[0], v.r[1]);
            Numbers::multiply_add(out[2 * m + 1], weight, v.r[2], v.r[3]);
          }
        }
      }

      // 4. The rows, or a partial of them.
      const UnitParts parts = parts_of(start.unit_begin, tile.num_stages, header.range_length);
      const PartialView partial(work, parts.slot(range - parts.first_range), kHeadDim);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = warp * 16 + g + 8 * i;
        if (row >= tile.num_rows) continue;
        const SoftmaxState<float> state{top[i], sum[2 * i]};
        if (parts.count == 1) {
          const RowPlace place = place_of(call, tile, start.kv_head, row);
          const int64_t offset = call.out.offset(place.token, place.head) + 2 * q;
#pragma unroll
          for (int n = 0; n < 2 * kSteps; ++n) {
            store_two(call.out,
                      offset + 8 * n,
                      finish(state, out[n][2 * i]),
                      finish(state, out[n][2 * i + 1]));
          }
          if (q == 0 && call.lse != nullptr) {
            call.lse[place.token * call.num_heads + place.head] = log_sum_exp(state);
          }
        } else {
#pragma unroll
          for (int n = 0; n < 2 * kSteps; ++n) {
            *reinterpret_cast<float2*>(partial.out + row * kHeadDim + 8 * n + 2 * q) = {
                out[n][2 * i], out[n][2 * i + 1]};
          }
          if (q == 0) *reinterpret_cast<float2*>(partial.state + 2 * row) = {state.max, state.sum};
        }
      }
      if (parts.count > 1) {
        arrive_and_merge<kHeadDim>(call, work, tile, start.tile, start.kv_head, parts, flag);
      } else {
        __syncthreads();
      }

      // 5. The next unit.
      left -= taken;
      start.stage = 0;
      start.unit_begin += tile.unit_length;
      if (++start.kv_head == call.cache.num_kv_heads) {
        start.kv_head = 0;
        do {
          ++start.tile;
        } while (left > 0 && work.tiles[start.tile].unit_length == 0);
      }
    }
  }
  finish_blind_tiles<kHeadDim>(call, work, header);
}

}  // namespace memkv::cuda
