#include "head_dim.cuh"

namespace memkv::cuda {

HeadDimKernels kernels_128() { return kernels_of_head_dim<128>(); }

}  // namespace memkv::cuda
