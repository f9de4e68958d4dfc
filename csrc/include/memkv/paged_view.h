// Token to address. One layer of the pool, as vLLM 0.2.7 laid out K and V, the block outermost:
//
//     block b, layer l:   K [kv_head][head_dim / x][slot][x]     V [kv_head][head_dim][slot]
//                                                                x = 16 bytes / element
//     block_ids of a segment     7         2         9         4
//     tokens of the segment   |0 .. 15| |16 .. 31| |32 .. 47| |48 .. 53, unused|    (16 slots)
//
// A slab is what one kv head of one block holds of K, or of V: head_dim * block_size elements,
// contiguous. Unused slots may hold anything, NaN included.
#pragma once

#include <cstdint>

#include "memkv/host_device.h"

namespace memkv {

template <typename T>
struct PagedView {
  static constexpr int kPiece = 16 / int(sizeof(T));  // x

  T* k;  // of block 0, kv head 0
  T* v;
  int64_t k_block_stride;  // elements from block to block: all layers of a block lie between
  int64_t v_block_stride;
  int head_dim;
  int block_size;

  MEMKV_HD int64_t slab_size() const { return int64_t{head_dim} * block_size; }

  MEMKV_HD T* k_slab(int32_t block, int kv_head) const {
    return k + int64_t{block} * k_block_stride + kv_head * slab_size();
  }
  MEMKV_HD T* v_slab(int32_t block, int kv_head) const {
    return v + int64_t{block} * v_block_stride + kv_head * slab_size();
  }

  // Offsets inside a slab.
  MEMKV_HD int k_offset(int slot, int d) const {
    return (d / kPiece * block_size + slot) * kPiece + d % kPiece;
  }
  MEMKV_HD int v_offset(int slot, int d) const { return d * block_size + slot; }
};

}  // namespace memkv
