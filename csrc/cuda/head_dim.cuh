// The kernels of one head_dim: how they are launched. head_dim_*.cu instantiate this, one each, so
// that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

#include "block_mass.cuh"
#include "few_queries.cuh"
#include "head_dims.h"
#include "many_queries.cuh"

namespace memkv::cuda {

inline int max_shared_bytes() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

// Blocks of threads that the device holds at once.
template <typename Kernel>
int workers(Kernel kernel, int threads, int shared_bytes) {
  const int most = max_shared_bytes();
  if (shared_bytes > most) return 0;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  int device = 0, processors = 0, blocks = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes);
  cudaGetLastError();  // a kernel that has no code for this device: 0 blocks
  return blocks * processors;
}

template <typename T, int kHeadDim, int kTiles, int kTerms>
struct FewLaunch {
  static int bytes(int warps, int stages, int stage_tokens) {
    return
        typename FewQueries<T, kHeadDim, kTiles, kTerms>::Layout(warps, stages, stage_tokens).bytes;
  }

  static LoopShape shape(int stage_tokens, int warps, int stages) {
    const auto kernel = few_queries_kernel<T, kHeadDim, kTiles, kTerms>;
    LoopShape best{8 * kTiles, stage_tokens, 0, 0, 0};
    int64_t best_bytes = 0;
    for (int w = kMostFewWarps; w > 0; --w) {
      if (warps > 0 && w != warps) continue;
      for (int s = kMostFewStages; s > 0; --s) {
        if (stages > 0 && s != stages) continue;
        // As many warps as fit, so that one's arithmetic covers another's wait; then stages.
        const int found = workers(kernel, 32 * w, bytes(w, s, stage_tokens));
        const int64_t in_flight = int64_t{found} * w * 16 + s;
        if (found > 0 && in_flight > best_bytes) {
          best_bytes = in_flight;
          best = {8 * kTiles, stage_tokens, w, s, found};
        }
      }
    }
    return best;
  }

  static void attend(const Attention& call, const Work& work, bool overlap, cudaStream_t stream) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(unsigned(work.grid));
    launch.blockDim = dim3(unsigned(32 * work.warps));
    launch.dynamicSmemBytes = size_t(bytes(work.warps, work.stages, work.shape.stage_tokens));
    launch.stream = stream;
    launch.attrs = &attribute;
    launch.numAttrs = overlap ? 1 : 0;
    cudaLaunchKernelEx(&launch, few_queries_kernel<T, kHeadDim, kTiles, kTerms>, call, work);
  }
};

template <typename T, int kHeadDim>
auto many_kernel(int block_size) {
  return block_size == 8    ? many_queries_kernel<T, kHeadDim, 8>
         : block_size == 16 ? many_queries_kernel<T, kHeadDim, 16>
                            : many_queries_kernel<T, kHeadDim, 32>;
}

template <typename T, int kHeadDim>
LoopShape loop_shape_of(
    Loop loop, int block_size, int tile_rows, bool exact, int warps, int stages) {
  using Many = ManyQueries<T, kHeadDim>;
  using Mass = BlockMass<T, kHeadDim>;
  const int stage_tokens = block_size < 16 ? 16 : block_size;
  switch (loop) {
    case Loop::kFew:
      if (exact) return FewLaunch<T, kHeadDim, 1, 3>::shape(stage_tokens, warps, stages);
      return tile_rows == 8 ? FewLaunch<T, kHeadDim, 1, 2>::shape(stage_tokens, warps, stages)
                            : FewLaunch<T, kHeadDim, 2, 2>::shape(stage_tokens, warps, stages);
    case Loop::kMany:
      return {kManyRows,
              Many::kTokens,
              kManyWarps,
              kManyStages,
              workers(many_kernel<T, kHeadDim>(block_size), kManyWarps * 32, Many::kBytes)};
    default:
      return {
          INT32_MAX,
          stage_tokens,
          kMassWarps,
          0,
          workers(block_mass_kernel<T, kHeadDim>, kMassWarps * 32, typename Mass::Layout().bytes)};
  }
}

template <typename T, int kHeadDim>
void attend_of(const Attention& call,
               const Work& work,
               Loop loop,
               bool exact,
               bool overlap,
               cudaStream_t stream) {
  if (loop == Loop::kMany) {
    const auto kernel = many_kernel<T, kHeadDim>(call.cache.block_size);
    kernel<<<work.grid, kManyWarps * 32, ManyQueries<T, kHeadDim>::kBytes, stream>>>(call, work);
  } else if (exact) {
    FewLaunch<T, kHeadDim, 1, 3>::attend(call, work, overlap, stream);
  } else if (work.shape.tile_rows == 8) {
    FewLaunch<T, kHeadDim, 1, 2>::attend(call, work, overlap, stream);
  } else {
    FewLaunch<T, kHeadDim, 2, 2>::attend(call, work, overlap, stream);
  }
}

template <int kHeadDim>
HeadDimKernels kernels_of_head_dim() {
  using B = __nv_bfloat16;
  using H = __half;
  return {[](Loop loop, const PagedCache& cache, int tile_rows, bool exact, int warps, int stages) {
            return cache.dtype == DType::kBFloat16
                       ? loop_shape_of<B, kHeadDim>(
                             loop, cache.block_size, tile_rows, exact, warps, stages)
                       : loop_shape_of<H, kHeadDim>(
                             loop, cache.block_size, tile_rows, exact, warps, stages);
          },
          [](const Attention& call,
             const Work& work,
             Loop loop,
             bool exact,
             bool overlap,
             Stream stream) {
            call.cache.dtype == DType::kBFloat16
                ? attend_of<B, kHeadDim>(call, work, loop, exact, overlap, cudaStream_t(stream))
                : attend_of<H, kHeadDim>(call, work, loop, exact, overlap, cudaStream_t(stream));
          },
          [](const Attention& call, const Work& work, Stream stream) {
            const int bytes = typename BlockMass<B, kHeadDim>::Layout().bytes;
            const auto kernel = call.cache.dtype == DType::kBFloat16
                                    ? block_mass_kernel<B, kHeadDim>
                                    : block_mass_kernel<H, kHeadDim>;
            kernel<<<work.grid, kMassWarps * 32, bytes, cudaStream_t(stream)>>>(call, work);
          }};
}

}  // namespace memkv::cuda
