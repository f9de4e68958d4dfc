// What the rows of a tile of few_queries.cuh give to each block.
#pragma once

#include "rows.cuh"

namespace memkv::cuda {

// The softmax mass that each block receives from a tile's rows, which know their log-sum-exp. A
// stage is one warp's: it adds up tokens across lanes, then rows of the same head, and stores.
template <int kTiles>
class FewMass {
 public:
  // scratch: a float for each row, of this warp.
  __device__ __forceinline__ FewMass(
      const Attention& call, const Work& work, const QueryTile& tile, int kv_head, void* scratch)
      : call_(call),
        work_(work),
        tile_(tile),
        kv_head_(kv_head),
        rows_(static_cast<float*>(scratch)) {}

  // Of this lane's rows, in units of log2. A row that sees nothing has weights of 0 whatever it is.
  __device__ __forceinline__ void read_lse(float (&lse)[kTiles][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int row = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      const RowPlace place = place_of(work_, tile_, kv_head_, min(row, tile_.num_rows - 1));
      lse[i / 2][i % 2] =
          finite_or_zero(call_.lse[place.token * call_.num_heads + place.head]) * kLog2E;
    }
  }

  // Scores of 16 tokens, as a fragment.
  __device__ __forceinline__ void add(int tile,
                                      const float (&score)[4],
                                      const float (&lse)[2],
                                      bool first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = exp2_of(score[i] - lse[i % 2]);
      mass_[tile][i] = first ? weight : mass_[tile][i] + weight;
    }
  }

  // The stage is complete; first_token: its first in the segment.
  __device__ __forceinline__ void store(const Segment& segment, int first_token) {
    const int lane = threadIdx.x % 32, block_size = call_.cache.block_size;
    const int blocks = block_size == 8 ? 2 : 1;
    for (int block = 0; block < blocks; ++block) {
      if (first_token + block * 8 >= segment.num_tokens) break;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        const float(&of)[4] = mass_[i / 2];
        float sum = blocks == 1  ? of[i % 2] + of[i % 2 + 2]
                    : block == 0 ? of[i % 2]
                                 : of[i % 2 + 2];
#pragma unroll
        for (int across = 4; across < 32; across *= 2) {
          sum += __shfl_xor_sync(kAllLanes, sum, across);
        }
        if (lane < 4) rows_[i / 2 * 8 + lane * 2 + i % 2] = sum;
      }
      __syncwarp();
      const int group = work_.shape.group;
      if (lane < min(group, tile_.num_rows)) {
        float sum = 0.0f;
        for (int row = lane; row < tile_.num_rows; row += group) sum += rows_[row];
        const int head = kv_head_ * group + (tile_.first_head + lane) % group;
        call_.block_mass[(int64_t{tile_.index} * call_.num_heads + head) * call_.plan.num_entries +
                         segment.first_entry + first_token / block_size + block] = sum;
      }
    }
  }

 private:
  const Attention& call_;
  const Work& work_;
  const QueryTile& tile_;
  int kv_head_;
  float* rows_;
  float mass_[kTiles][4];
};

}  // namespace memkv::cuda
