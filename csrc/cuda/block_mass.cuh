// The softmax mass that each block receives, once the log-sum-exp of every row is known: the first
// product again, no values.
//
//     mass(head, block) = sum over the sequence's query tokens, and tokens of the block, of
//                         exp(score - lse)
//
// A tile is all rows of a sequence, so that each (head, block) is summed by one warp, in one order,
// and stored once: no atomics. Grid and ranges as in few_queries.cuh. A part of a range within one
// segment is taken in batches of kMassStages stages; the query comes in chunks of four tiles of 8
// rows, turned by the four warps for all of them. A tile's rows are 8 tokens of one head; or, where
// there is one token, its heads. Keys go from memory to registers: a lane loads 16 bytes of its
// token, the dimensions 8 * (4j + q) .., and the query lies in the same order, which is all that a
// contraction asks for.
#pragma once

#include "few_queries.cuh"
#include "rows.cuh"

namespace memkv::cuda {

inline constexpr int kMassWarps = 4;
inline constexpr int kMassStages = 32;

template <typename T, int kHeadDim>
struct BlockMass {
  static constexpr int kChunks = (kHeadDim + 31) / 32;       // of 32 dimensions
  static constexpr int kQueryBytes = kChunks * 2 * 32 * 16;  // of 8 rows, two terms
  static constexpr int kMaxGroup = 64;

  struct Layout {
    int query, positions, lse, heads, sums, bytes;

    __host__ __device__ Layout() {
      query = 0;
      positions = query + kMassWarps * kQueryBytes;
      lse = positions + kMassWarps * 8 * 4;
      heads = lse + kMassWarps * 8 * 4;  // of the group, of each tile of a chunk
      sums = heads + kMassWarps * 4;
      bytes = sums + kMassStages * kMaxGroup * 2 * 4;
    }
  };
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kMassWarps * 32, 1)
    block_mass_kernel(const __grid_constant__ Attention call, const __grid_constant__ Work work) {
  using Loop = BlockMass<T, kHeadDim>;
  using Numbers = Packed<T>;
  constexpr int kChunks = Loop::kChunks;
  extern __shared__ __align__(128) unsigned char shared[];
  const typename Loop::Layout at;
  uint4* const queries = reinterpret_cast<uint4*>(shared + at.query);
  int32_t* const positions = reinterpret_cast<int32_t*>(shared + at.positions);
  float* const lses = reinterpret_cast<float*>(shared + at.lse);
  int* const heads_of = reinterpret_cast<int*>(shared + at.heads);
  float* const sums = reinterpret_cast<float*>(shared + at.sums);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  const WorkHeader header = *work.header;
  const ScoreScale scaled(call);
  const RotaryPairs pairs{call.rotary_dim, call.interleaved};
  const int block_size = call.cache.block_size, stage_tokens = work.shape.stage_tokens;
  const int blocks_of_stage = stage_tokens / block_size, group = work.shape.group;

  for (int range = blockIdx.x; range < header.num_ranges; range += gridDim.x) {
    RangeStart start = work.ranges[range];
    int left = min(header.range_length, header.length - range * header.range_length);
    while (left > 0) {
      const QueryTile& tile = start.of;
      const int taken = min(left, tile.unit_length - start.stage);
      const int end = start.stage + taken;
      const int64_t first_token = tile.first_token;
      const int num_tokens = tile.num_rows / group;
      const bool by_head = num_tokens == 1 && group <= 8;  // a row is a head, not a token
      const int tiles_of_head = by_head ? 1 : (num_tokens + 7) / 8;
      const int num_tiles = by_head ? 1 : group * tiles_of_head;
      StageCursor cursor(work, tile.first_run, tile.num_runs, start.stage);

      for (int begin = start.stage; begin < end;) {
        cursor.enter(begin);
        const Segment segment = call.plan.segments[tile.first_segment + cursor.run];
        const int batch_end = min(min(end, begin + kMassStages), cursor.end());
        const int count = batch_end - begin, in_segment = cursor.stage_of_segment(begin);
        const TileView view(segment, tile.least_position, tile.most_position, call.window);
        const float* turn = turn_of(call, segment, tile.first_segment + cursor.run);
        for (int i = threadIdx.x; i < count * group * 2; i += kMassWarps * 32) sums[i] = 0.0f;

        for (int chunk = 0; chunk < num_tiles; chunk += kMassWarps) {
          __syncthreads();
          // This warp turns 8 rows.
          if (chunk + warp < num_tiles) {
            const int head = by_head ? min(g, group - 1) : (chunk + warp) / tiles_of_head;
            const int token = by_head ? 0 : (chunk + warp) % tiles_of_head * 8 + g;
            const bool used = by_head ? g < group : token < num_tokens;
            const int64_t row = first_token + min(token, num_tokens - 1);
            const int64_t offset = call.q.offset(row, start.kv_head * group + head);
            const auto load = [&](int d) { return used ? load_two(call.q, offset + d) : float2{}; };
            const auto put = [&](int j, const float2(&two)[4]) {  // dimensions 8 * (4j + q) ..
#pragma unroll
              for (int m = 0; m < 2; ++m) {
                uint32_t b0[2], b1[2];
                split<T, 2>(two[2 * m].x, two[2 * m].y, b0);
                split<T, 2>(two[2 * m + 1].x, two[2 * m + 1].y, b1);
                queries[((warp * kChunks + j) * 2 + m) * 32 + lane] = {b0[0], b1[0], b0[1], b1[1]};
              }
            };
            const int half = turn != nullptr && !pairs.interleaved && pairs.count() % 32 == 0
                                 ? pairs.count() / 32
                                 : 0;
            for (int j = 0; j < half; ++j) {  // both of a pair lie in this lane
              float2 a[4], b[4];
              float2 cos[4], sin[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int d = 8 * (4 * j + q) + 2 * i;
                a[i] = load(d);
                b[i] = load(d + pairs.count());
                cos[i] = __ldg(reinterpret_cast<const float2*>(turn + d));
                sin[i] = __ldg(reinterpret_cast<const float2*>(turn + pairs.count() + d));
              }
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                rotate_pair(a[i].x, b[i].x, cos[i].x, sin[i].x);
                rotate_pair(a[i].y, b[i].y, cos[i].y, sin[i].y);
              }
              put(j, a);
              put(j + half, b);
            }
            for (int j = 2 * half; j < kChunks; ++j) {
              const int d = 8 * (4 * j + q);
              float2 two[4] = {};
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                if (d < kHeadDim) two[i] = turned_two(load, turn, pairs, d + 2 * i);
              }
              put(j, two);
            }
            if (lane == 0) heads_of[warp] = (chunk + warp) / tiles_of_head;
            if (q == 0) {
              positions[warp * 8 + g] = used ? call.plan.query_position[row] : -1;  // sees nothing
              lses[warp * 8 + g] =
                  call.lse[row * call.num_heads + start.kv_head * group + head] * kLog2E;
            }
          }
          __syncthreads();

          const int tiles = min(kMassWarps, num_tiles - chunk);
          for (int s = warp; s < count; s += kMassWarps) {
            const int32_t* ids =
                call.plan.block_ids + segment.first_entry + (in_segment + s) * blocks_of_stage;
            for (int part = 0; part < stage_tokens; part += 16) {
              const int token0 = (in_segment + s) * stage_tokens + part;
              if (token0 >= segment.num_tokens) break;
              // Keys of tokens g and g + 8.
              uint4 k[2][kChunks];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const int token = part + g + 8 * i;
                const bool used = token0 + g + 8 * i < segment.num_tokens;
                const int block = used ? token / block_size : 0;
                const char* from = static_cast<const char*>(call.cache.k) +
                                   (__ldg(ids + block) * call.cache.k_block_stride +
                                    int64_t{start.kv_head} * kHeadDim * block_size) *
                                       2 +
                                   token % block_size * 16;
#pragma unroll
                for (int j = 0; j < kChunks; ++j) {
                  const int piece = 4 * j + q;
                  k[i][j] =
                      used && piece * 8 < kHeadDim
                          ? __ldg(reinterpret_cast<const uint4*>(from + piece * block_size * 16))
                          : uint4{};
                }
              }
              // Rows are all of use, and see all 16 tokens: the usual case needs no masks.
              const bool edge = by_head || (chunk + tiles) * 8 > group * num_tokens ||
                                token0 < view.every_begin || token0 + 16 > view.every_end ||
                                num_tokens % 8 != 0;
              float mass[2][2] = {};  // of rows 2q and 2q + 1, of tokens 0..7 and 8..15
              for (int t = 0; t < tiles; ++t) {
                float score[4] = {}, rest[4] = {};
#pragma unroll
                for (int j = 0; j < kChunks; ++j) {
                  const uint4 first = queries[((t * kChunks + j) * 2 + 0) * 32 + lane];
                  const uint4 second = queries[((t * kChunks + j) * 2 + 1) * 32 + lane];
                  const uint32_t a0[4] = {k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y};
                  const uint32_t a1[4] = {k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w};
                  Numbers::multiply_add(score, a0, first.x, first.y);
                  Numbers::multiply_add(rest, a0, first.z, first.w);
                  Numbers::multiply_add(score, a1, second.x, second.y);
                  Numbers::multiply_add(rest, a1, second.z, second.w);
                }
                const float2 lse = *reinterpret_cast<const float2*>(lses + t * 8 + 2 * q);
#pragma unroll
                for (int i = 0; i < 4; ++i) score[i] = score[i] + rest[i];
                scaled(score);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  score[i] = exp2_of(score[i] - (i % 2 == 0 ? lse.x : lse.y));
                }
                if (edge) {
#pragma unroll
                  for (int i = 0; i < 2; ++i) {
                    const TokenRange sees =
                        visible_tokens(segment, positions[t * 8 + 2 * q + i], call.window);
                    const int low = token0 + g, high = low + 8;
                    if (low < sees.begin || low >= sees.end) score[i] = 0.0f;
                    if (high < sees.begin || high >= sees.end) score[i + 2] = 0.0f;
                  }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) mass[i % 2][i / 2] += score[i];
                // The last tile of a head: lanes add up, once.
                const int of = heads_of[t];
                if (t + 1 < tiles && heads_of[t + 1] == of) continue;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  if (!by_head) mass[0][i] += mass[1][i];
#pragma unroll
                  for (int across = 4; across < 32; across *= 2) {
                    mass[0][i] += __shfl_xor_sync(kAllLanes, mass[0][i], across);
                    mass[1][i] += __shfl_xor_sync(kAllLanes, mass[1][i], across);
                  }
                  if (!by_head) {
                    mass[0][i] += __shfl_xor_sync(kAllLanes, mass[0][i], 1);
                    mass[0][i] += __shfl_xor_sync(kAllLanes, mass[0][i], 2);
                  }
                }
                if (by_head ? g == 0 : lane == 0) {
#pragma unroll
                  for (int i = 0; i < 2; ++i) {
                    const int head = by_head ? 2 * q + i : of + i * group;
                    if (head >= group) continue;
                    float* sum = sums + (s * group + head) * 2;
                    sum[0] += mass[i][0];
                    sum[1] += mass[i][1];
                  }
                }
                mass[0][0] = mass[0][1] = mass[1][0] = mass[1][1] = 0.0f;
              }
            }
          }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < count * group; i += kMassWarps * 32) {
          const int s = i / group, head = i % group;
          float* to = call.block_mass +
                      int64_t{start.kv_head * group + head} * call.plan.num_entries +
                      segment.first_entry + (in_segment + s) * blocks_of_stage;
          if (blocks_of_stage == 2) {
            to[0] = sums[2 * i];
            if (((in_segment + s) * 2 + 1) * block_size < segment.num_tokens)
              to[1] = sums[2 * i + 1];
          } else {
            to[0] = sums[2 * i] + sums[2 * i + 1];
          }
        }
        __syncthreads();
        begin = batch_end;
      }

      left -= taken;
      next_unit(work, start, left);
    }
  }
}

}  // namespace memkv::cuda
