#include "attention_loops.h"
#include "dispatch.h"
#include "vec_avx512.h"

namespace memkv {

constinit const AttentionKernels kAvx512Kernels = AttentionLoops<avx512::Vec>::kernels("avx512");

}  // namespace memkv
