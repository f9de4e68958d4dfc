// Makes an instruction set's AttentionKernels from its Vec: the only place that picks a loop.
#pragma once

#include "few_queries.h"
#include "many_queries.h"

namespace memkv {

template <typename Vec>
class AttentionLoops {
 public:
  static constexpr AttentionKernels kernels(const char* name) {
    return {name, &workspace_bytes, &attend, &merge, &finish, &add_mass, &read};
  }

 private:
  static size_t workspace_bytes(int head_dim) {
    const size_t few = FewQueries<Vec, float, 32>::workspace_floats(head_dim);
    const size_t many = ManyQueries<Vec, float, 32>::workspace_floats(head_dim);
    return sizeof(float) * (few > many ? few : many);
  }

  // Calls use(Loop) with the tile's dtype and block size as types.
  template <template <typename, typename, int> class Loop, typename Use>
  static void with_loop(const Tile& tile, void* workspace, Use use) {
    const PagedCache& cache = tile.call->cache;
    float* floats = static_cast<float*>(workspace);
    if (cache.dtype == DType::kFloat32) {
      if (cache.block_size == 8) run<Loop<Vec, float, 8>>(tile, floats, use);
      if (cache.block_size == 16) run<Loop<Vec, float, 16>>(tile, floats, use);
      if (cache.block_size == 32) run<Loop<Vec, float, 32>>(tile, floats, use);
    } else {
      if (cache.block_size == 8) run<Loop<Vec, bfloat16, 8>>(tile, floats, use);
      if (cache.block_size == 16) run<Loop<Vec, bfloat16, 16>>(tile, floats, use);
      if (cache.block_size == 32) run<Loop<Vec, bfloat16, 32>>(tile, floats, use);
    }
  }

  template <typename Loop, typename Use>
  static void run(const Tile& tile, float* workspace, Use use) {
    Loop loop(tile, workspace);
    use(loop);
  }

  static void attend(const Tile& tile,
                     const Piece* pieces,
                     int num_pieces,
                     const Preview& preview,
                     const Partial& partial,
                     void* workspace) {
    if (tile.rows_of_head <= kFewRows) {
      with_loop<FewQueries>(
          tile, workspace, [&](auto& loop) { loop.attend(pieces, num_pieces, preview, partial); });
    } else {
      with_loop<ManyQueries>(
          tile, workspace, [&](auto& loop) { loop.attend(pieces, num_pieces, partial); });
    }
  }

  static void add_mass(const Tile& tile,
                       const Piece* pieces,
                       int num_pieces,
                       const SoftmaxState<float>* state,
                       void* workspace) {
    with_loop<ManyQueries>(
        tile, workspace, [&](auto& loop) { loop.add_mass(pieces, num_pieces, state); });
  }

  static void merge(const Partial* partials, int count, int num_rows, int head_dim) {
    const Partial& into = partials[0];
    for (int i = 1; i < count; ++i) {
      for (int row = 0; row < num_rows; ++row) {
        const MergeFactors<float> factors = into.state[row].merge(partials[i].state[row]);
        float* ours = into.out + row * head_dim;
        const float* theirs = partials[i].out + row * head_dim;
        for (int d = 0; d < head_dim; ++d) {
          ours[d] = ours[d] * factors.ours + theirs[d] * factors.theirs;
        }
      }
    }
  }

  static void finish(const Tile& tile, const Partial& partial) {
    const Attention& call = *tile.call;
    const int head_dim = call.cache.head_dim;
    for (int row = 0; row < tile.num_rows(); ++row) {
      const SoftmaxState<float> state = partial.state[row];
      const float* from = partial.out + row * head_dim;
      const int64_t offset = call.out.offset(tile.token(row), tile.head(row));
      if (call.out.dtype == DType::kFloat32) {
        float* to = static_cast<float*>(call.out.data) + offset;
        for (int d = 0; d < head_dim; ++d) to[d] = memkv::finish(state, from[d]);
      } else {
        bfloat16* to = static_cast<bfloat16*>(call.out.data) + offset;
        for (int d = 0; d < head_dim; ++d) to[d] = to_bfloat16(memkv::finish(state, from[d]));
      }
      if (call.lse != nullptr) {
        call.lse[tile.token(row) * call.num_heads + tile.head(row)] = log_sum_exp(state);
      }
    }
  }

  static float read(const float* data, int64_t count) {
    Vec sums[8];
    for (Vec& sum : sums) sum = Vec::zero();
    for (int64_t i = 0; i + 8 * Vec::kLanes <= count; i += 8 * Vec::kLanes) {
      for (int j = 0; j < 8; ++j) sums[j] = sums[j] + Vec::load(data + i + j * Vec::kLanes);
    }
    for (int j = 1; j < 8; ++j) sums[0] = sums[0] + sums[j];
    return largest(sums[0]);
  }
};

}  // namespace memkv
