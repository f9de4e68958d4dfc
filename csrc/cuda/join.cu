// Finishes the rows of sequences that share blocks: what a row found alone, then what it found with
// its groups, in the order of its segments.
//
// A block of threads takes all rows of a (sequence, kv head); a thread four dimensions of one.
#include "launch.h"
#include "merge.cuh"

namespace memkv::cuda {
namespace {

__global__ void __launch_bounds__(256)
    join_kernel(const __grid_constant__ Attention call, const __grid_constant__ Work work) {
  constexpr int kAtOnce = 2;
  const int head_dim = call.cache.head_dim, fours = head_dim / 4;
  const KeptView kept(call, work.shared);
  const int num_units = work.header->num_tiles * work.shape.num_kv_heads;
  for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    const QueryTile tile = work.tiles[unit / work.shape.num_kv_heads];
    const int32_t* const slots = work.shared.slots + tile.first_segment;
    for (int item = threadIdx.x; item < tile.num_rows * fours; item += blockDim.x) {
      const RowPlace place = place_of(work, tile, unit % work.shape.num_kv_heads, item / fours);
      const int d = item % fours * 4, token = int(place.token - tile.first_token);
      const auto at = [&](int32_t slot) {
        return int64_t{slot + token} * call.num_heads + place.head;
      };
      RowSums sums = kept.sums[at(tile.kept_row)];
      float4 out = *reinterpret_cast<const float4*>(kept.out + at(tile.kept_row) * head_dim + d);
      for (int base = 0; base < tile.num_runs; base += kAtOnce) {
        int32_t slot[kAtOnce];
        RowSums other[kAtOnce];
        float4 x[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          slot[i] = base + i < tile.num_runs ? slots[base + i] : -1;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (slot[i] < 0) continue;
          other[i] = kept.sums[at(slot[i])];
          x[i] = *reinterpret_cast<const float4*>(kept.out + at(slot[i]) * head_dim + d);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (slot[i] < 0) continue;
          Merging merging(fmaxf(sums.max, other[i].max));
          float4 both{};
          add_weighted(both, out, merging.add(sums));
          add_weighted(both, x[i], merging.add(other[i]));
          sums = merging.sums();
          out = both;
        }
      }
      finish_row(call, place, d, sums, out);
    }
  }
}

}  // namespace

void join_shared(const Attention& call, const Work& work, Stream stream) {
  join_kernel<<<work.grid, 256, 0, cudaStream_t(stream)>>>(call, work);
  check_launch("join_shared");
}

}  // namespace memkv::cuda
