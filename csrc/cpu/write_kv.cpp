// K[block][kv_head][d / x][offset][x] = k[token][kv_head][d]
// V[block][kv_head][d][offset]        = v[token][kv_head][d]
//
// 2 * kv_heads * head_dim elements read and written for each token. A value lands in a cache line
// of its own in V; new tokens are few beside those that attention reads.
#include "write_kv.h"

#include <stdexcept>
#include <string>

#include "memkv/bfloat16.h"
#include "thread_pool.h"

namespace memkv {
namespace {

constexpr int64_t kTokensPerTask = 32;

template <typename To, typename From>
void write_token(const PagedView<To>& view,
                 const PagedCache& cache,
                 const HeadRows& k,
                 const HeadRows& v,
                 int64_t token,
                 int64_t slot) {
  const int32_t block = int32_t(slot / cache.block_size);
  const int offset = int(slot % cache.block_size);
  for (int kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head) {
    const From* k_row = static_cast<const From*>(k.data) + k.offset(token, kv_head);
    const From* v_row = static_cast<const From*>(v.data) + v.offset(token, kv_head);
    To* k_slab = view.k_slab(block, kv_head);
    To* v_slab = view.v_slab(block, kv_head);
    for (int d = 0; d < cache.head_dim; ++d) {
      store_float(k_slab + view.k_offset(offset, d), to_float(k_row[d]));
      store_float(v_slab + view.v_offset(offset, d), to_float(v_row[d]));
    }
  }
}

template <typename To, typename From>
void write_tokens(const PagedCache& cache,
                  const HeadRows& k,
                  const HeadRows& v,
                  const int64_t* slots,
                  int64_t num_tokens) {
  const PagedView<To> view = cache.view<To>();
  const int64_t tasks = (num_tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(tasks, [&](int64_t task) {
    const int64_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      write_token<To, From>(view, cache, k, v, token, slots[token]);
    }
  });
}

}  // namespace

void write_kv(const PagedCache& cache,
              const HeadRows& k,
              const HeadRows& v,
              const int64_t* slots,
              int64_t num_tokens) {
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (slots[token] < 0 || slots[token] >= num_slots) {
      throw std::invalid_argument("slot " + std::to_string(slots[token]) + " of token " +
                                  std::to_string(token) + " is outside [0, " +
                                  std::to_string(num_slots) + ")");
    }
  }
  if (cache.dtype == DType::kFloat32) {
    k.dtype == DType::kFloat32 ? write_tokens<float, float>(cache, k, v, slots, num_tokens)
                               : write_tokens<float, bfloat16>(cache, k, v, slots, num_tokens);
  } else {
    k.dtype == DType::kFloat32 ? write_tokens<bfloat16, float>(cache, k, v, slots, num_tokens)
                               : write_tokens<bfloat16, bfloat16>(cache, k, v, slots, num_tokens);
  }
}

}  // namespace memkv
