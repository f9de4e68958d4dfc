// Which head dims there are kernels for.
#pragma once

#include "launch.h"

namespace memkv::cuda {

struct HeadDimKernels {
  LoopShape (*loop_shape)(
      Loop loop, const PagedCache& cache, int tile_rows, bool exact, int warps, int stages);
  void (*attend)(
      const Attention& call, const Work& work, Loop loop, bool exact, bool overlap, Stream stream);
  void (*add_block_mass)(
      const Attention& call, const Work& work, Loop loop, bool exact, Stream stream);
};

HeadDimKernels kernels_64();
HeadDimKernels kernels_80();
HeadDimKernels kernels_96();
HeadDimKernels kernels_128();
HeadDimKernels kernels_256();

}  // namespace memkv::cuda
