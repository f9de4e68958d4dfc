// memkv._kernels: the table of contents. Pointers arrive as integers; memkv/kernels/ops.py checked
// what they point to. Every call releases the GIL; a C++ exception becomes a Python one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu/attention.h"
#include "cpu/dispatch.h"
#include "cpu/huge_pages.h"
#include "cpu/read_probe.h"
#include "cpu/thread_pool.h"
#include "cpu/write_kv.h"

namespace nb = nanobind;
using namespace memkv;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

PagedCache make_cache(uintptr_t k,
                      uintptr_t v,
                      int64_t k_block_stride,
                      int64_t v_block_stride,
                      int64_t num_blocks,
                      int num_kv_heads,
                      int head_dim,
                      int block_size,
                      int dtype) {
  return {pointer<void>(k),
          pointer<void>(v),
          k_block_stride,
          v_block_stride,
          num_blocks,
          num_kv_heads,
          head_dim,
          block_size,
          DType(dtype)};
}

StepPlan make_plan(uintptr_t query_start,
                   uintptr_t query_position,
                   uintptr_t segment_start,
                   uintptr_t segments,
                   uintptr_t block_ids,
                   int64_t num_seqs,
                   int64_t num_tokens,
                   int64_t num_entries) {
  return {pointer<int32_t>(query_start),
          pointer<int32_t>(query_position),
          pointer<int32_t>(segment_start),
          pointer<Segment>(segments),
          pointer<int32_t>(block_ids),
          num_seqs,
          num_tokens,
          num_entries};
}

HeadRows make_rows(uintptr_t data, int64_t token_stride, int64_t head_stride, int dtype) {
  return {pointer<void>(data), token_stride, head_stride, DType(dtype)};
}

}  // namespace

NB_MODULE(_kernels, m) {
  using nb::arg;
  using release = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<PagedCache>(m, "PagedCache");
  nb::class_<StepPlan>(m, "StepPlan");
  nb::class_<HeadRows>(m, "HeadRows");
  m.def("paged_cache",
        &make_cache,
        arg("k"),
        arg("v"),
        arg("k_block_stride"),
        arg("v_block_stride"),
        arg("num_blocks"),
        arg("num_kv_heads"),
        arg("head_dim"),
        arg("block_size"),
        arg("dtype"));
  m.def("step_plan",
        &make_plan,
        arg("query_start"),
        arg("query_position"),
        arg("segment_start"),
        arg("segments"),
        arg("block_ids"),
        arg("num_seqs"),
        arg("num_tokens"),
        arg("num_entries"));
  m.def(
      "head_rows", &make_rows, arg("data"), arg("token_stride"), arg("head_stride"), arg("dtype"));

  m.def(
      "write_kv",
      [](const PagedCache& cache,
         const HeadRows& k,
         const HeadRows& v,
         uintptr_t slots,
         int64_t num_tokens) { write_kv(cache, k, v, pointer<int64_t>(slots), num_tokens); },
      arg("cache"),
      arg("k"),
      arg("v"),
      arg("slots"),
      arg("num_tokens"),
      release());

  m.def(
      "paged_attention",
      [](const PagedCache& cache,
         const StepPlan& plan,
         const HeadRows& q,
         const HeadRows& out,
         int num_heads,
         uintptr_t turns,
         int rotary_dim,
         bool interleaved,
         float scale,
         float softcap,
         int window,
         uintptr_t lse,
         uintptr_t block_mass) {
        paged_attention({cache,
                         plan,
                         q,
                         out,
                         num_heads,
                         pointer<float>(turns),
                         rotary_dim,
                         interleaved,
                         scale,
                         softcap,
                         window,
                         pointer<float>(lse),
                         pointer<float>(block_mass)});
      },
      arg("cache"),
      arg("plan"),
      arg("q"),
      arg("out"),
      arg("num_heads"),
      arg("turns"),
      arg("rotary_dim"),
      arg("interleaved"),
      arg("scale"),
      arg("softcap"),
      arg("window"),
      arg("lse"),
      arg("block_mass"),
      release());

  m.def(
      "read_floats",
      [](uintptr_t data, int64_t count) { return read_floats(pointer<float>(data), count); },
      arg("data"),
      arg("count"),
      release());
  m.def(
      "prefer_huge_pages",
      [](uintptr_t begin, size_t bytes) { return prefer_huge_pages(pointer<void>(begin), bytes); },
      arg("begin"),
      arg("bytes"));
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, arg("count"), release());
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("set_isa", &set_isa, arg("name"));
  m.def("runnable_isas", [] {
    std::vector<std::string> names;
    for (const AttentionKernels* set : runnable_kernels()) names.push_back(set->name);
    return names;
  });
}
