// The kernels of one head_dim: how they are launched. head_dim_*.cu instantiate this, one each, so
// that they compile side by side.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>

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

template <typename Kernel>
void prefer_shared_memory(Kernel kernel) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared_bytes());
  cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

// Blocks of threads that the device holds at once.
template <typename Kernel>
int workers(Kernel kernel, int threads, int shared_bytes) {
  if (shared_bytes > max_shared_bytes()) return 0;
  prefer_shared_memory(kernel);
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
    const auto kernel = few_queries_kernel<T, kHeadDim, kTiles, kTerms, false>;
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

  template <bool kMass>
  static void launch(const Attention& call, const Work& work, bool overlap, cudaStream_t stream) {
    const auto kernel = few_queries_kernel<T, kHeadDim, kTiles, kTerms, kMass>;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(work.grid));
    config.blockDim = dim3(unsigned(32 * work.warps));
    config.dynamicSmemBytes = size_t(bytes(work.warps, work.stages, work.shape.stage_tokens));
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    if (kMass) prefer_shared_memory(kernel);
    cudaLaunchKernelEx(&config, kernel, call, work);
  }
};

template <typename T, int kHeadDim, bool kMass>
auto many_kernel(int block_size) {
  return block_size == 8    ? many_queries_kernel<T, kHeadDim, 8, kMass>
         : block_size == 16 ? many_queries_kernel<T, kHeadDim, 16, kMass>
                            : many_queries_kernel<T, kHeadDim, 32, kMass>;
}

// The two forms of the loop of many rows; which of them a kernel was compiled to is known by how many
// threads it takes, or, of a work, by its warps and stages.
template <typename T, int kHeadDim, bool kMass>
struct ManyLaunch {
  using Together = ManyQueries<T, kHeadDim, kMass, true>;
  using Apart = ManyQueries<T, kHeadDim, kMass, false>;

  template <typename Form>
  static LoopShape shape_of(int workers_at_once) {
    return {Form::kRows, Form::kTokens, Form::kWarps, Form::kStages, workers_at_once};
  }

  static LoopShape shape(int block_size) {
    const auto kernel = many_kernel<T, kHeadDim, kMass>(block_size);
    cudaFuncAttributes code{};
    cudaFuncGetAttributes(&code, kernel);
    cudaGetLastError();  // a kernel that has no code for this device: no threads
    const bool together = code.maxThreadsPerBlock == Together::kThreads && code.ptxVersion >= 90;
    if (together) {
      return shape_of<Together>(workers(kernel, Together::kThreads, Together::kBytes));
    }
    // A GPU that has no code of its own runs that of an older one, which may be empty.
    const bool empty = code.ptxVersion < 90 && Apart::kBytes > kSharedBytesBefore90;
    return shape_of<Apart>(empty ? 0 : workers(kernel, Apart::kThreads, Apart::kBytes));
  }

  static void launch(const Attention& call, const Work& work, cudaStream_t stream) {
    const auto kernel = many_kernel<T, kHeadDim, kMass>(call.cache.block_size);
    const bool together = work.warps == Together::kWarps && work.stages == Together::kStages;
    kernel<<<work.grid,
             together ? Together::kThreads : Apart::kThreads,
             together ? Together::kBytes : Apart::kBytes,
             stream>>>(call, work);
  }
};

template <typename T, int kHeadDim>
LoopShape loop_shape_of(
    Loop loop, int block_size, int tile_rows, bool exact, int warps, int stages) {
  const int stage_tokens = block_size < 16 ? 16 : block_size;
  if (loop == Loop::kMany) return ManyLaunch<T, kHeadDim, false>::shape(block_size);
  if (loop == Loop::kManyMass) return ManyLaunch<T, kHeadDim, true>::shape(block_size);
  if (exact) return FewLaunch<T, kHeadDim, 1, 3>::shape(stage_tokens, warps, stages);
  return tile_rows == 8 ? FewLaunch<T, kHeadDim, 1, 2>::shape(stage_tokens, warps, stages)
                        : FewLaunch<T, kHeadDim, 2, 2>::shape(stage_tokens, warps, stages);
}

// kMass: adds block mass instead.
template <typename T, int kHeadDim, bool kMass>
void attend_of(const Attention& call,
               const Work& work,
               Loop loop,
               bool exact,
               bool overlap,
               cudaStream_t stream) {
  if (loop != Loop::kFew) {
    ManyLaunch<T, kHeadDim, kMass>::launch(call, work, stream);
  } else if (exact) {
    FewLaunch<T, kHeadDim, 1, 3>::template launch<kMass>(call, work, overlap, stream);
  } else if (work.shape.tile_rows == 8) {
    FewLaunch<T, kHeadDim, 1, 2>::template launch<kMass>(call, work, overlap, stream);
  } else {
    FewLaunch<T, kHeadDim, 2, 2>::template launch<kMass>(call, work, overlap, stream);
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
            const auto attend = call.cache.dtype == DType::kBFloat16
                                    ? attend_of<B, kHeadDim, false>
                                    : attend_of<H, kHeadDim, false>;
            attend(call, work, loop, exact, overlap, cudaStream_t(stream));
          },
          [](const Attention& call, const Work& work, Loop loop, bool exact, Stream stream) {
            const auto add = call.cache.dtype == DType::kBFloat16 ? attend_of<B, kHeadDim, true>
                                                                  : attend_of<H, kHeadDim, true>;
            add(call, work, loop, exact, false, cudaStream_t(stream));
          }};
}

}  // namespace memkv::cuda
