#include "attention_loops.h"
#include "dispatch.h"
#include "vec_scalar.h"

namespace memkv {

constinit const AttentionKernels kScalarKernels = AttentionLoops<scalar::Vec>::kernels("scalar");

}  // namespace memkv
