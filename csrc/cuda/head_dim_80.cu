#include "head_dim.cuh"

namespace memkv::cuda {

HeadDimKernels kernels_80() { return kernels_of_head_dim<80>(); }

}  // namespace memkv::cuda
