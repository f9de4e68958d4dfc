// The CUDA kernels as the host calls them. Without nvcc, no_cuda.cpp has the same functions.
// Everything is put on the stream and nothing waits; errors of a launch are std::runtime_error.
#pragma once

#include <cstdint>

#include "memkv/attention_args.h"
#include "memkv/shared_groups.h"
#include "work.h"

namespace memkv::cuda {

using Stream = uintptr_t;  // cudaStream_t

bool built();

// Which loop: tiles of 8 or 16 rows for decode, of 128 and more for prefill and questions. Block mass
// of many rows has tiles of its own.
enum class Loop : int { kFew = 0, kMany = 1, kManyMass = 2 };

struct LoopShape {
  int32_t tile_rows;
  int32_t stage_tokens;
  int32_t warps;
  int32_t stages;
  int32_t workers;  // blocks of threads that the device holds at once; 0: it cannot run the loop
};

// tile_rows: 8 or 16 rows for Loop::kFew. exact: the queries' dtype is not the cache's. warps and
// stages 0: as many as fit.
LoopShape loop_shape(
    Loop loop, const PagedCache& cache, int tile_rows, bool exact, int warps, int stages);

// Of a work whose stages hold blocks of several segments, as all but Loop::kFew's do; else zeros.
struct PackedSize {
  int64_t num_entries;
  int64_t num_segments;
  int32_t block_size;
};

// Bytes of device memory for a Work of at most so many tiles, runs and sequences; and the Work that
// lies there.
int64_t work_bytes(const WorkShape& shape,
                   int64_t num_seqs,
                   int64_t max_tiles,
                   int64_t max_runs,
                   const PackedSize& packed);
Work work_at(void* memory,
             float* partials,
             const WorkShape& shape,
             int64_t num_seqs,
             int64_t max_tiles,
             int64_t max_runs,
             const PackedSize& packed,
             int32_t grid,
             int32_t warps,
             int32_t stages);

void plan_work(const StepPlan& plan, const Work& work, Stream stream);
// Finds what sequences of shape.least_rows .. most_rows rows share, for a work whose tiles are of
// groups (Loop::kMany). The works that have the same `shared` are planned, and attend, after it.
// At most kMostSharedSegments segments.
void plan_shared(
    const StepPlan& plan, const Work& work, int block_size, const ShareRule& rule, Stream stream);
inline constexpr int kMostSharedSegments = 2048;
void turn_rows(const Segment* segments,
               int64_t num_segments,
               const double* inv_freq,
               int num_pairs,
               float* turns,
               Stream stream);

void write_kv(const PagedCache& cache,
              const HeadRows& k,
              const HeadRows& v,
              const int64_t* slots,
              int64_t num_tokens,
              Stream stream);

// Writes the rows of the sequences that the work has tiles for. overlap: the kernel may begin while
// the one before it on the stream still runs, and waits for it before it reads anything but the
// plan; so that one must not be the planner.
void attend(
    const Attention& call, const Work& work, Loop loop, bool exact, bool overlap, Stream stream);
// Finishes the rows of a work whose sequences share blocks, once it and the work of groups attended.
void join_shared(const Attention& call, const Work& work, Stream stream);
// For rows that attend() was called for; with the same work where that is of few rows, else with one
// of Loop::kManyMass: call.lse is read, call.block_mass written.
void add_block_mass(const Attention& call, const Work& work, Loop loop, bool exact, Stream stream);

// target[target_ids[i]] = source[source_ids[i]]; null ids count up from 0.
void copy_blocks(const void* source,
                 const int64_t* source_ids,
                 void* target,
                 const int64_t* target_ids,
                 int64_t num_blocks,
                 int64_t bytes_per_block,
                 Stream stream);

// Reads memory in order, for measuring; bytes are a multiple of 16.
void read_memory(const void* data, int64_t bytes, uint32_t* sink, Stream stream);

// For the .cu files.
void check_launch(const char* what);

}  // namespace memkv::cuda
