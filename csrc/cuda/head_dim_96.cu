#include "head_dim.cuh"

namespace memkv::cuda {

HeadDimKernels kernels_96() { return kernels_of_head_dim<96>(); }

}  // namespace memkv::cuda
