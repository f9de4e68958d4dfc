// How all threads of many_queries.cuh bring a stage into the ring, 16 bytes at a time.
#pragma once

#include "many_products.cuh"
#include "memkv/attention_args.h"

namespace memkv::cuda {

// Where a block's K and V begin, in bytes.
struct BlockOffsets {
  int64_t k, v;
};

// Where this thread's pieces of a stage are: one token of K, a piece of V of each block. Read from
// shared memory some time before they are needed.
template <typename Loop, int kBlockSize>
struct CopySources {
  int64_t k, v[Loop::kTokens / kBlockSize];

  __device__ __forceinline__ explicit CopySources(const BlockOffsets* blocks)
      : k(blocks[threadIdx.x % Loop::kTokens / kBlockSize].k) {
#pragma unroll
    for (int i = 0; i < Loop::kTokens / kBlockSize; ++i) v[i] = blocks[i].v;
  }
};

// Copies K and V of a stage, or K only; tokens past `valid` become zeros. The sources are of blocks
// that exist even where no token is used.
template <typename Loop, int kHeadDim, int kBlockSize, bool kMass>
__device__ __forceinline__ void copy_stage(const PagedCache& cache,
                                           const CopySources<Loop, kBlockSize>& sources,
                                           int valid,
                                           int kv_head,
                                           uint32_t to) {
  constexpr int kThreads = kManyWarps * 32, kTokens = Loop::kTokens;
  constexpr int kPieces = Loop::kKeyBytes / 16;
  constexpr int kSlabBytes = kHeadDim * kBlockSize * 2, kGroups = kBlockSize / 8;
  static_assert(kThreads % kTokens == 0);
  const int thread = threadIdx.x % kThreads;  // which says how large it is
  {  // 16 bytes of one token: a thread's token is always the same
    const int token = thread % kTokens;
    const int bytes = token < valid ? 16 : 0;
    const char* from = static_cast<const char*>(cache.k) + sources.k + kv_head * kSlabBytes +
                       (thread / kTokens * kBlockSize + token % kBlockSize) * 16;
#pragma unroll
    for (int i = 0; i < kPieces; i += kThreads) {
      if (kPieces % kThreads != 0 && i + thread >= kPieces) break;
      copy_async_16(to + (i + thread) * 16, from + i / kTokens * kBlockSize * 16, bytes);
    }
  }
  const char* const values = static_cast<const char*>(cache.v) + kv_head * kSlabBytes;
  const auto copy_values = [&](auto bytes_of) {  // 8 tokens of one dimension
#pragma unroll
    for (int i = 0; !kMass && i < kPieces; i += kThreads) {
      const int at = i + thread;
      if (kPieces % kThreads != 0 && at >= kPieces) break;
      const int block = at / (kHeadDim * kGroups), inside = at % (kHeadDim * kGroups);
      const int group = block * kGroups + inside % kGroups;
      copy_async_16(to + Loop::kKeyBytes + group * Loop::kValueGroupBytes + inside / kGroups * 16,
                    values + sources.v[block] + inside * 16,
                    bytes_of(group * 8));
    }
  };
  if (valid >= kTokens) {
    copy_values([](int) { return 16; });
  } else {
    copy_values([&](int token) { return min(8, max(0, valid - token)) * 2; });
  }
}

}  // namespace memkv::cuda
