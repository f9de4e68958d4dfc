#include "dispatch.h"

namespace memkv {

std::vector<const AttentionKernels*> runnable_kernels() {
  std::vector<const AttentionKernels*> sets = {&kScalarKernels};
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) sets.push_back(&kAvx2Kernels);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back(&kAvx512Kernels);
  }
  return sets;
}

}  // namespace memkv
