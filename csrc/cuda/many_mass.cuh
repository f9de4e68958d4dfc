// What the rows of a tile of many_queries.cuh give to each block of a stage: sums of their weights.
//
//     R = W I       16 rows x groups of 8 tokens      I: whether a token is in a group
//     M = H R       heads x groups                    H: whether a row is of a head
//
// Both on the tensor cores, in terms of bfloat16 that keep 16 and 24 digits. A warp's M goes where
// V of the stage would be, and one barrier later is added to those of the other warps, in order.
#pragma once

#include "many_products.cuh"
#include "rows.cuh"

namespace memkv::cuda {

inline constexpr int kManyMassGroup = 32;  // heads of a kv head, at most

// Where a stage's sums are, and the blocks that they are of.
struct MassEntries {
  const unsigned char* sums;
  int first;       // in block_ids
  int num_tokens;  // from the stage's first to the end of the segment
};

template <typename T, int kHeadDim, int kBlockSize>
class StageMass {
  using Loop = ManyQueries<T, kHeadDim>;
  using Numbers = Packed<__nv_bfloat16>;
  static constexpr int kGroups = Loop::kTokens / 8;  // of 8 tokens
  static_assert(kManyWarps * kManyMassGroup * 8 * 4 <= Loop::kValueBytes);

 public:
  __device__ __forceinline__
  StageMass(const Attention& call, const Work& work, const QueryTile& tile, int kv_head)
      : call_(call), work_(work), tile_(tile), kv_head_(kv_head) {}

  // Of this lane's rows, in units of log2. A row that sees nothing has weights of 0 whatever it is.
  __device__ __forceinline__ void read_lse(float (&lse)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i;
      const RowPlace place = place_of(work_, tile_, kv_head_, min(row, tile_.num_rows - 1));
      lse[i] = finite_or_zero(call_.lse[place.token * call_.num_heads + place.head]) * kLog2E;
    }
  }

  // weight: fragments of this warp's 16 rows x the stage's tokens.
  __device__ __forceinline__ void keep(const float (&weight)[8 * kGroups / 2],
                                       unsigned char* sums) const {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float rows[4] = {};
#pragma unroll
    for (int n = 0; n < kGroups / 2; ++n) {
      const float* const w = weight + 8 * n;
      const uint32_t low = g == 2 * n ? Numbers::kOnes : 0,
                     high = g == 2 * n + 1 ? Numbers::kOnes : 0;
      uint32_t term[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) split<__nv_bfloat16, 2>(w[2 * i], w[2 * i + 1], term[i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t a[4] = {term[0][i], term[1][i], term[2][i], term[3][i]};
        Numbers::multiply_add(rows, a, low, high);
      }
    }
    uint32_t first[3], second[3];  // of rows 0..7 and 8..15
    split<__nv_bfloat16, 3>(rows[0], rows[1], first);
    split<__nv_bfloat16, 3>(rows[2], rows[3], second);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      first[i] = transpose(first[i]);
      second[i] = transpose(second[i]);
    }
    float2* const mine = mine_of(sums);
    for (int head = 0; head < work_.shape.group; head += 16) {
      float heads[4] = {};
      const uint32_t a[4] = {is_of(head + g, 2 * q),
                             is_of(head + g + 8, 2 * q),
                             is_of(head + g, 2 * q + 8),
                             is_of(head + g + 8, 2 * q + 8)};
#pragma unroll
      for (int i = 0; i < 3; ++i) Numbers::multiply_add(heads, a, first[i], second[i]);
      if (head + g < work_.shape.group) mine[(head + g) * 4 + q] = {heads[0], heads[1]};
      if (head + g + 8 < work_.shape.group) mine[(head + g + 8) * 4 + q] = {heads[2], heads[3]};
    }
  }

  // This warp sees nothing of the stage.
  __device__ __forceinline__ void keep_none(unsigned char* sums) const {
    float2* const mine = mine_of(sums);
    for (int i = threadIdx.x % 32; i < work_.shape.group * 4; i += 32) mine[i] = {};
  }

  // Writes the sums of a stage that all warps kept before the last barrier.
  __device__ __forceinline__ void store(const MassEntries& of) const {
    if (of.sums == nullptr) return;
    constexpr int kBlocks = Loop::kTokens / kBlockSize;
    for (int i = threadIdx.x; i < work_.shape.group * kBlocks; i += kManyWarps * 32) {
      const int head = i / kBlocks, block = i % kBlocks;
      if (block * kBlockSize >= of.num_tokens) continue;
      const float* from =
          reinterpret_cast<const float*>(of.sums) + head * 8 + block * (kBlockSize / 8);
      float all = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kManyWarps; ++warp) {
#pragma unroll
        for (int j = 0; j < kBlockSize / 8; ++j) all += from[warp * kManyMassGroup * 8 + j];
      }
      const int64_t plane = int64_t{tile_.index} * call_.num_heads;
      call_.block_mass[(plane + kv_head_ * work_.shape.group + head) * call_.plan.num_entries +
                       of.first + block] = all;
    }
  }

 private:
  // This warp's sums: [head][8 groups].
  static __device__ __forceinline__ float2* mine_of(unsigned char* sums) {
    return reinterpret_cast<float2*>(sums) + threadIdx.x / 32 * kManyMassGroup * 4;
  }

  // 1 where row and row + 1 of this warp are of a head, as two numbers.
  __device__ __forceinline__ uint32_t is_of(int head, int row) const {
    const int first = threadIdx.x / 32 * 16 + row;
    const auto one = [&](int at) {
      return at < tile_.num_rows && head < work_.shape.group &&
             (tile_.first_head + at) % work_.shape.group == head;
    };
    return (one(first) ? Numbers::kOnes & 0xffffu : 0) |
           (one(first + 1) ? Numbers::kOnes & 0xffff0000u : 0);
  }

  const Attention& call_;
  const Work& work_;
  const QueryTile& tile_;
  int kv_head_;
};

}  // namespace memkv::cuda
