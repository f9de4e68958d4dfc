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
#include "cuda/launch.h"

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

WorkShape make_shape(int tile_rows,
                     int stage_tokens,
                     int group,
                     int num_kv_heads,
                     int window,
                     int least_rows,
                     int most_rows,
                     int workers,
                     int max_ranges,
                     int flat_ranges,
                     int whole_ranges,
                     int least_range,
                     int fixed_range,
                     int lead,
                     int part_cost) {
  return {tile_rows,
          stage_tokens,
          group,
          num_kv_heads,
          window,
          least_rows,
          most_rows,
          workers,
          max_ranges,
          flat_ranges,
          whole_ranges,
          least_range,
          fixed_range,
          lead,
          part_cost};
}

HeadRows make_rows(uintptr_t data, int64_t token_stride, int64_t head_stride, int dtype) {
  return {pointer<void>(data), token_stride, head_stride, DType(dtype)};
}

// What a kernel is called with, on a CPU and on a GPU.
Attention make_attention(const PagedCache& cache,
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
                         uintptr_t block_mass,
                         bool all_digits) {
  return {cache,
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
          all_digits,
          pointer<float>(block_mass)};
}

void add_cuda(nb::module_& m) {
  using nb::arg;
  using release = nb::call_guard<nb::gil_scoped_release>;

  nb::class_<WorkShape>(m, "WorkShape");
  nb::class_<cuda::PackedSize>(m, "PackedSize")
      .def(nb::init<int64_t, int64_t, int32_t>(),
           arg("num_entries"),
           arg("num_segments"),
           arg("block_size"));
  nb::class_<cuda::Work>(m, "Work");
  nb::class_<cuda::LoopShape>(m, "LoopShape")
      .def_ro("tile_rows", &cuda::LoopShape::tile_rows)
      .def_ro("stage_tokens", &cuda::LoopShape::stage_tokens)
      .def_ro("warps", &cuda::LoopShape::warps)
      .def_ro("stages", &cuda::LoopShape::stages)
      .def_ro("workers", &cuda::LoopShape::workers);
  nb::class_<Attention>(m, "Attention");
  m.def("cuda_attention",
        &make_attention,
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
        arg("all_digits"));
  m.def("cuda_built", &cuda::built);
  m.def(
      "cuda_loop_shape",
      [](int loop, const PagedCache& cache, int tile_rows, bool exact, int warps, int stages) {
        return cuda::loop_shape(cuda::Loop(loop), cache, tile_rows, exact, warps, stages);
      },
      arg("loop"),
      arg("cache"),
      arg("tile_rows"),
      arg("exact"),
      arg("warps"),
      arg("stages"));
  m.def("cuda_work_shape",
        &make_shape,
        arg("tile_rows"),
        arg("stage_tokens"),
        arg("group"),
        arg("num_kv_heads"),
        arg("window"),
        arg("least_rows"),
        arg("most_rows"),
        arg("workers"),
        arg("max_ranges"),
        arg("flat_ranges"),
        arg("whole_ranges"),
        arg("least_range"),
        arg("fixed_range"),
        arg("lead"),
        arg("part_cost"));
  m.def("cuda_work_bytes",
        &cuda::work_bytes,
        arg("shape"),
        arg("num_seqs"),
        arg("max_tiles"),
        arg("max_runs"),
        arg("packed"));
  m.def(
      "cuda_work",
      [](uintptr_t memory,
         uintptr_t partials,
         const WorkShape& shape,
         int64_t num_seqs,
         int64_t max_tiles,
         int64_t max_runs,
         const cuda::PackedSize& packed,
         int grid,
         int warps,
         int stages) {
        return cuda::work_at(pointer<void>(memory),
                             pointer<float>(partials),
                             shape,
                             num_seqs,
                             max_tiles,
                             max_runs,
                             packed,
                             grid,
                             warps,
                             stages);
      },
      arg("memory"),
      arg("partials"),
      arg("shape"),
      arg("num_seqs"),
      arg("max_tiles"),
      arg("max_runs"),
      arg("packed"),
      arg("grid"),
      arg("warps"),
      arg("stages"));
  m.def(
      "cuda_share",
      [](cuda::Work work,
         uintptr_t slots,
         uintptr_t rows,
         uintptr_t kept,
         int32_t own_rows,
         int32_t kept_rows,
         int32_t tile_tokens,
         bool of_groups) {
        work.shared = {pointer<int32_t>(slots),
                       pointer<cuda::SharedRow>(rows),
                       pointer<float>(kept),
                       own_rows,
                       kept_rows,
                       tile_tokens,
                       of_groups};
        return work;
      },
      arg("work"),
      arg("slots"),
      arg("rows"),
      arg("kept"),
      arg("own_rows"),
      arg("kept_rows"),
      arg("tile_tokens"),
      arg("of_groups"));
  m.def("cuda_plan_work", &cuda::plan_work, arg("plan"), arg("work"), arg("stream"), release());
  m.def(
      "cuda_plan_shared",
      [](const StepPlan& plan,
         const cuda::Work& work,
         int block_size,
         int32_t least_rows,
         int32_t least_saved,
         cuda::Stream stream) {
        cuda::plan_shared(plan, work, block_size, {least_rows, least_saved}, stream);
      },
      arg("plan"),
      arg("work"),
      arg("block_size"),
      arg("least_rows"),
      arg("least_saved"),
      arg("stream"),
      release());
  m.def(
      "cuda_turn_rows",
      [](uintptr_t segments,
         int64_t num_segments,
         uintptr_t inv_freq,
         int num_pairs,
         uintptr_t turns,
         cuda::Stream stream) {
        cuda::turn_rows(pointer<Segment>(segments),
                        num_segments,
                        pointer<double>(inv_freq),
                        num_pairs,
                        pointer<float>(turns),
                        stream);
      },
      arg("segments"),
      arg("num_segments"),
      arg("inv_freq"),
      arg("num_pairs"),
      arg("turns"),
      arg("stream"),
      release());
  m.def(
      "cuda_write_kv",
      [](const PagedCache& cache,
         const HeadRows& k,
         const HeadRows& v,
         uintptr_t slots,
         int64_t num_tokens,
         cuda::Stream stream) {
        cuda::write_kv(cache, k, v, pointer<int64_t>(slots), num_tokens, stream);
      },
      arg("cache"),
      arg("k"),
      arg("v"),
      arg("slots"),
      arg("num_tokens"),
      arg("stream"),
      release());
  m.def(
      "cuda_attend",
      [](const Attention& call,
         const cuda::Work& work,
         int loop,
         bool exact,
         bool overlap,
         cuda::Stream stream) {
        cuda::attend(call, work, cuda::Loop(loop), exact, overlap, stream);
      },
      arg("call"),
      arg("work"),
      arg("loop"),
      arg("exact"),
      arg("overlap"),
      arg("stream"),
      release());
  m.def("cuda_join_shared", &cuda::join_shared, arg("call"), arg("work"), arg("stream"), release());
  m.def(
      "cuda_add_block_mass",
      [](const Attention& call, const cuda::Work& work, int loop, bool exact, cuda::Stream stream) {
        cuda::add_block_mass(call, work, cuda::Loop(loop), exact, stream);
      },
      arg("call"),
      arg("work"),
      arg("loop"),
      arg("exact"),
      arg("stream"),
      release());
  m.def(
      "cuda_read_memory",
      [](uintptr_t data, int64_t bytes, uintptr_t sink, cuda::Stream stream) {
        cuda::read_memory(pointer<void>(data), bytes, pointer<uint32_t>(sink), stream);
      },
      arg("data"),
      arg("bytes"),
      arg("sink"),
      arg("stream"),
      release());
  m.def(
      "cuda_copy_blocks",
      [](uintptr_t source,
         uintptr_t source_ids,
         uintptr_t target,
         uintptr_t target_ids,
         int64_t num_blocks,
         int64_t bytes_per_block,
         cuda::Stream stream) {
        cuda::copy_blocks(pointer<void>(source),
                          pointer<int64_t>(source_ids),
                          pointer<void>(target),
                          pointer<int64_t>(target_ids),
                          num_blocks,
                          bytes_per_block,
                          stream);
      },
      arg("source"),
      arg("source_ids"),
      arg("target"),
      arg("target_ids"),
      arg("num_blocks"),
      arg("bytes_per_block"),
      arg("stream"),
      release());
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
        paged_attention(make_attention(cache,
                                       plan,
                                       q,
                                       out,
                                       num_heads,
                                       turns,
                                       rotary_dim,
                                       interleaved,
                                       scale,
                                       softcap,
                                       window,
                                       lse,
                                       block_mass,
                                       true));
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

  add_cuda(m);
}
