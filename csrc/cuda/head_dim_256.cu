#include "head_dim.cuh"

namespace memkv::cuda {

HeadDimKernels kernels_256() { return kernels_of_head_dim<256>(); }

}  // namespace memkv::cuda
