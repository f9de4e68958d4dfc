#include "attention.h"

#include <cmath>
#include <vector>

#include "memkv/bfloat16.h"
#include "memkv/rope.h"
#include "memkv/softmax_state.h"
#include "thread_pool.h"

namespace memkv {
namespace {

float load(const HeadRows& rows, int64_t offset) {
  return rows.dtype == DType::kFloat32 ? static_cast<const float*>(rows.data)[offset]
                                       : to_float(static_cast<const bfloat16*>(rows.data)[offset]);
}

void store(const HeadRows& rows, int64_t offset, float value) {
  if (rows.dtype == DType::kFloat32) {
    static_cast<float*>(rows.data)[offset] = value;
  } else {
    static_cast<bfloat16*>(rows.data)[offset] = to_bfloat16(value);
  }
}

template <typename T>
void attend_row(const Attention& call, int64_t sequence, int64_t token, int head) {
  const PagedView<T> view = call.cache.view<T>();
  const StepPlan& plan = call.plan;
  const int head_dim = view.head_dim, block_size = view.block_size;
  const int kv_head = head / call.group();
  const RotaryPairs pairs{call.rotary_dim, call.interleaved};
  std::vector<float> query(head_dim), out(head_dim, 0.0f);
  std::vector<std::pair<int64_t, SoftmaxState<float>>> seen;
  SoftmaxState<float> state = empty_softmax();
  for (int64_t s = plan.segment_start[sequence]; s < plan.segment_start[sequence + 1]; ++s) {
    const Segment& segment = plan.segments[s];
    const TokenRange range = visible_tokens(segment, plan.query_position[token], call.window);
    for (int d = 0; d < head_dim; ++d) {
      query[d] = load(call.q, call.q.offset(token, head) + d) * call.scale;
    }
    const float* cos = call.turns + s * call.rotary_dim;
    for (int pair = 0; pair < pairs.count(); ++pair) {
      rotate_pair(query[pairs.first(pair)],
                  query[pairs.second(pair)],
                  cos[pair],
                  cos[pairs.count() + pair]);
    }
    for (int32_t key = range.begin; key < range.end; ++key) {
      const int64_t entry = segment.first_entry + key / block_size;
      const int32_t block = plan.block_ids[entry];
      const T* k_slab = view.k_slab(block, kv_head);
      const T* v_slab = view.v_slab(block, kv_head);
      float score = 0.0f;
      for (int d = 0; d < head_dim; ++d) {
        score = std::fma(query[d], to_float(k_slab[view.k_offset(key % block_size, d)]), score);
      }
      if (call.softcap > 0.0f) score = call.softcap * std::tanh(score / call.softcap);
      score *= kLog2E;
      const float keep = state.raise(score);
      const float weight = state.weight(score);
      state.add(weight);
      for (int d = 0; d < head_dim; ++d) {
        out[d] =
            std::fma(weight, to_float(v_slab[view.v_offset(key % block_size, d)]), out[d] * keep);
      }
      if (call.block_mass != nullptr) seen.push_back({entry, {score, weight}});
    }
  }
  for (int d = 0; d < head_dim; ++d) {
    store(call.out, call.out.offset(token, head) + d, finish(state, out[d]));
  }
  if (call.lse != nullptr) call.lse[token * call.num_heads + head] = log_sum_exp(state);
  for (const auto& [entry, key] : seen) {
    call.block_mass[head * plan.num_entries + entry] += state.weight(key.max) / state.sum;
  }
}

}  // namespace

void paged_attention(const Attention& call) {
  const StepPlan& plan = call.plan;
  parallel_for(plan.num_seqs * call.num_heads, [&](int64_t task) {
    const int64_t sequence = task / call.num_heads;
    const int head = int(task % call.num_heads);
    for (int64_t token = plan.query_start[sequence]; token < plan.query_start[sequence + 1];
         ++token) {
      call.cache.dtype == DType::kFloat32 ? attend_row<float>(call, sequence, token, head)
                                          : attend_row<bfloat16>(call, sequence, token, head);
    }
  });
}

}  // namespace memkv
