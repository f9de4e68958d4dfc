#include "read_probe.h"

#include <atomic>

#include "dispatch.h"
#include "thread_pool.h"

namespace memkv {
namespace {

constexpr int64_t kFloatsPerTask = 1 << 18;  // 1 MiB

}  // namespace

float read_floats(const float* data, int64_t count) {
  const AttentionKernels& set = kernels();
  std::atomic<float> total{0.0f};
  parallel_for((count + kFloatsPerTask - 1) / kFloatsPerTask, [&](int64_t task) {
    const int64_t first = task * kFloatsPerTask;
    total.fetch_add(set.read(data + first, std::min(kFloatsPerTask, count - first)));
  });
  return total.load();
}

}  // namespace memkv
