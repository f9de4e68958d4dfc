#include "attention_loops.h"
#include "dispatch.h"
#include "vec_avx2.h"

namespace memkv {

constinit const AttentionKernels kAvx2Kernels = AttentionLoops<avx2::Vec>::kernels("avx2");

}  // namespace memkv
