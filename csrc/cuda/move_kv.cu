// New tokens into their slots, and whole blocks from one place to another.
//
//     K[block][kv_head][d / 8][slot][8] = k[token][kv_head][d]
//     V[block][kv_head][d][slot]        = v[token][kv_head][d]
//
// A block of threads takes 32 tokens of one kv head, its lanes the tokens: a thread reads 16 bytes'
// worth of one row, and lanes whose tokens are neighbours write neighbouring slots. Any dtype in,
// the cache's dtype out. A slot of -1 is no slot: nothing is written for that row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "instructions.cuh"
#include "launch.h"

namespace memkv::cuda {
namespace {

constexpr int kLanes = 32, kWarps = 8;
constexpr int kPiece = 8;  // elements of 16 bytes, in a cache of 2-byte numbers

__device__ float widen(float x) { return x; }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float widen(__half x) { return __half2float(x); }
__device__ void narrow(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ void narrow(__half* to, float x) { *to = __float2half_rn(x); }

// kPiece elements of a row, in as few loads as its alignment lets.
template <typename From>
__device__ __forceinline__ void load_piece(const From* from, float (&x)[kPiece]) {
  __align__(16) From piece[kPiece];
  constexpr int kLoads = kPiece * int(sizeof(From)) / 16;
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      reinterpret_cast<uint4*>(piece)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece[i] = from[i];
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) x[i] = widen(piece[i]);
}

template <typename To, typename From>
__global__ void __launch_bounds__(kLanes* kWarps)
    write_kv_kernel(PagedCache cache, HeadRows k, HeadRows v, const int64_t* slots, int64_t count) {
  wait_for_predecessor();
  const int64_t token = int64_t{blockIdx.x} * kLanes + threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes, kv_head = blockIdx.y;
  if (token >= count) return;
  const int64_t slot = slots[token];
  if (slot < 0 || slot >= cache.num_blocks * cache.block_size) return;
  const PagedView<To> view = cache.view<To>();
  const int32_t block = int32_t(slot / cache.block_size);
  const int at = int(slot % cache.block_size);
  const From* k_row = static_cast<const From*>(k.data) + k.offset(token, kv_head);
  const From* v_row = static_cast<const From*>(v.data) + v.offset(token, kv_head);
  To* const k_slab = view.k_slab(block, kv_head);
  To* const v_slab = view.v_slab(block, kv_head);
  for (int d = warp * kPiece; d < cache.head_dim; d += kWarps * kPiece) {
    __align__(16) To piece[kPiece];
    float key[kPiece], value[kPiece];
    load_piece(k_row + d, key);
    load_piece(v_row + d, value);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) narrow(piece + i, key[i]);
    *reinterpret_cast<uint4*>(k_slab + view.k_offset(at, d)) =
        *reinterpret_cast<const uint4*>(piece);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) narrow(v_slab + view.v_offset(at, d + i), value[i]);
  }
}

template <typename To>
void write_as(const PagedCache& cache,
              const HeadRows& k,
              const HeadRows& v,
              const int64_t* slots,
              int64_t count,
              cudaStream_t stream) {
  const dim3 grid(unsigned((count + kLanes - 1) / kLanes), unsigned(cache.num_kv_heads));
  const int threads = kLanes * kWarps;
  switch (k.dtype) {
    case DType::kFloat32:
      write_kv_kernel<To, float><<<grid, threads, 0, stream>>>(cache, k, v, slots, count);
      return;
    case DType::kBFloat16:
      write_kv_kernel<To, __nv_bfloat16><<<grid, threads, 0, stream>>>(cache, k, v, slots, count);
      return;
    case DType::kFloat16:
      write_kv_kernel<To, __half><<<grid, threads, 0, stream>>>(cache, k, v, slots, count);
  }
}

// 16 bytes a thread and step; blockIdx.y is the block.
__global__ void __launch_bounds__(256) copy_kernel(const uint4* source,
                                                   const int64_t* source_ids,
                                                   uint4* target,
                                                   const int64_t* target_ids,
                                                   int64_t num_blocks,
                                                   int64_t pieces) {
  for (int64_t i = blockIdx.y; i < num_blocks; i += gridDim.y) {
    const uint4* from = source + (source_ids == nullptr ? i : source_ids[i]) * pieces;
    uint4* to = target + (target_ids == nullptr ? i : target_ids[i]) * pieces;
    for (int64_t at = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; at < pieces;
         at += int64_t{gridDim.x} * blockDim.x) {
      to[at] = from[at];
    }
  }
}

// Reads all of it once: what memory gives when nothing else is asked of the device.
__global__ void __launch_bounds__(512)
    read_kernel(const uint4* data, int64_t count, uint32_t* sink) {
  constexpr int kAtOnce = 8;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  uint32_t mixed = 0;
  int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (; i + (kAtOnce - 1) * stride < count; i += kAtOnce * stride) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) x[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) mixed ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  for (; i < count; i += stride) mixed ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  if (mixed == 0x9e3779b9u) *sink = mixed;  // so that the loads stay
}

}  // namespace

void read_memory(const void* data, int64_t bytes, uint32_t* sink, Stream stream) {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  read_kernel<<<processors * 4, 512, 0, cudaStream_t(stream)>>>(
      static_cast<const uint4*>(data), bytes / 16, sink);
  check_launch("read_memory");
}

void write_kv(const PagedCache& cache,
              const HeadRows& k,
              const HeadRows& v,
              const int64_t* slots,
              int64_t num_tokens,
              Stream stream) {
  if (num_tokens == 0) return;
  cache.dtype == DType::kBFloat16
      ? write_as<__nv_bfloat16>(cache, k, v, slots, num_tokens, cudaStream_t(stream))
      : write_as<__half>(cache, k, v, slots, num_tokens, cudaStream_t(stream));
  check_launch("write_kv");
}

void copy_blocks(const void* source,
                 const int64_t* source_ids,
                 void* target,
                 const int64_t* target_ids,
                 int64_t num_blocks,
                 int64_t bytes_per_block,
                 Stream stream) {
  if (num_blocks == 0) return;
  const int64_t pieces = bytes_per_block / 16;
  const int64_t wide = (pieces + 4 * 256 - 1) / (4 * 256);
  const dim3 grid(unsigned(wide < 64 ? wide : 64), unsigned(num_blocks < 4096 ? num_blocks : 4096));
  copy_kernel<<<grid, 256, 0, cudaStream_t(stream)>>>(static_cast<const uint4*>(source),
                                                      source_ids,
                                                      static_cast<uint4*>(target),
                                                      target_ids,
                                                      num_blocks,
                                                      pieces);
  check_launch("copy_blocks");
}

}  // namespace memkv::cuda
