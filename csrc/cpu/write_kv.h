#pragma once

#include <cstdint>

#include "memkv/attention_args.h"

namespace memkv {

// Puts k and v of new tokens into their slots, converted to the cache's dtype.
// slots[i] = block * block_size + offset. Throws std::invalid_argument, before anything is written,
// if a slot is outside the pool.
void write_kv(const PagedCache& cache,
              const HeadRows& k,
              const HeadRows& v,
              const int64_t* slots,
              int64_t num_tokens);

}  // namespace memkv
