#include "head_dim.cuh"

namespace memkv::cuda {

HeadDimKernels kernels_64() { return kernels_of_head_dim<64>(); }

}  // namespace memkv::cuda
