// The functions of launch.h where the extension was built without CUDA.
#include <stdexcept>

#include "launch.h"

namespace memkv::cuda {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "memkv's kernels were built without CUDA; MEMKV_CUDA=ON builds them with it");
}

}  // namespace

bool built() { return false; }

LoopShape loop_shape(Loop, const PagedCache&, int, bool, int, int) { refuse(); }
int64_t work_bytes(const WorkShape&, int64_t, int64_t, int64_t, const PackedSize&) { refuse(); }
Work work_at(void*,
             float*,
             const WorkShape&,
             int64_t,
             int64_t,
             int64_t,
             const PackedSize&,
             int32_t,
             int32_t,
             int32_t) {
  refuse();
}
void plan_work(const StepPlan&, const Work&, Stream) { refuse(); }
void plan_shared(const StepPlan&, const Work&, int, const ShareRule&, Stream) { refuse(); }
void turn_rows(const Segment*, int64_t, const double*, int, float*, Stream) { refuse(); }
void write_kv(
    const PagedCache&, const HeadRows&, const HeadRows&, const int64_t*, int64_t, Stream) {
  refuse();
}
void attend(const Attention&, const Work&, Loop, bool, bool, Stream) { refuse(); }
void join_shared(const Attention&, const Work&, Stream) { refuse(); }
void add_block_mass(const Attention&, const Work&, Loop, bool, Stream) { refuse(); }
void copy_blocks(const void*, const int64_t*, void*, const int64_t*, int64_t, int64_t, Stream) {
  refuse();
}
void read_memory(const void*, int64_t, uint32_t*, Stream) { refuse(); }

}  // namespace memkv::cuda
