#include "dispatch.h"

namespace memkv {

std::vector<const AttentionKernels*> runnable_kernels() { return {&kScalarKernels}; }

}  // namespace memkv
