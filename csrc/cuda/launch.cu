#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "head_dims.h"
#include "launch.h"

namespace memkv::cuda {
namespace {

HeadDimKernels kernels_for(int head_dim) {
  switch (head_dim) {
    case 64:
      return kernels_64();
    case 80:
      return kernels_80();
    case 96:
      return kernels_96();
    case 128:
      return kernels_128();
    case 256:
      return kernels_256();
    default:
      throw std::invalid_argument("no CUDA kernel for head_dim " + std::to_string(head_dim));
  }
}

constexpr int64_t kAlign = 16;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Hands out consecutive arrays of a piece of memory; counts only where that is null.
class Arrays {
 public:
  explicit Arrays(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    T* const array = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += aligned(count * int64_t{sizeof(T)});
    return array;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

void lay_out(Arrays& arrays,
             Work& work,
             int64_t num_seqs,
             int64_t max_tiles,
             int64_t max_runs,
             const PackedSize& packed) {
  work.header = arrays.take<WorkHeader>(1);
  work.tiles = arrays.take<QueryTile>(max_tiles);
  work.unit_begin = arrays.take<int32_t>(max_tiles);
  work.runs = arrays.take<StageRun>(max_runs);
  work.ranges = arrays.take<RangeStart>(work.shape.max_ranges);
  work.arrived = arrays.take<int32_t>(max_tiles * work.shape.num_kv_heads);
  work.first_tile = arrays.take<int32_t>(num_seqs);
  work.first_run = arrays.take<int32_t>(num_seqs);
  if (packed.num_entries == 0) return;
  work.packed.blocks = arrays.take<StageBlock>(packed.num_entries);
  work.packed.runs = arrays.take<PackedRun>(packed.num_segments + 1);
  work.packed.order = arrays.take<int32_t>(packed.num_segments);
  work.packed.first_block = arrays.take<int32_t>(packed.num_segments);
  work.packed.of_sequence = arrays.take<int32_t>(2 * num_seqs);
  work.packed.block_size = packed.block_size;
}

}  // namespace

bool built() { return true; }

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

LoopShape loop_shape(
    Loop loop, const PagedCache& cache, int tile_rows, bool exact, int warps, int stages) {
  return kernels_for(cache.head_dim).loop_shape(loop, cache, tile_rows, exact, warps, stages);
}

int64_t work_bytes(const WorkShape& shape,
                   int64_t num_seqs,
                   int64_t max_tiles,
                   int64_t max_runs,
                   const PackedSize& packed) {
  Arrays arrays(nullptr);
  Work work{};
  work.shape = shape;
  lay_out(arrays, work, num_seqs, max_tiles, max_runs, packed);
  return arrays.bytes();
}

Work work_at(void* memory,
             float* partials,
             const WorkShape& shape,
             int64_t num_seqs,
             int64_t max_tiles,
             int64_t max_runs,
             const PackedSize& packed,
             int32_t grid,
             int32_t warps,
             int32_t stages) {
  Arrays arrays(memory);
  Work work{};
  work.shape = shape;
  lay_out(arrays, work, num_seqs, max_tiles, max_runs, packed);
  work.partials = partials;
  work.max_tiles = int32_t(max_tiles);
  work.group_magic = 65536u / uint32_t(shape.group) + 1;
  work.grid = grid;
  work.warps = warps;
  work.stages = stages;
  return work;
}

void attend(
    const Attention& call, const Work& work, Loop loop, bool exact, bool overlap, Stream stream) {
  kernels_for(call.cache.head_dim).attend(call, work, loop, exact, overlap, stream);
  check_launch("paged_attention");
}

void add_block_mass(const Attention& call, const Work& work, Loop loop, bool exact, Stream stream) {
  kernels_for(call.cache.head_dim).add_block_mass(call, work, loop, exact, stream);
  check_launch("block_mass");
}

}  // namespace memkv::cuda
