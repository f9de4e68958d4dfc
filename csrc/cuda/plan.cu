// Plans a step on the device: tiles, runs, equal ranges; and the rotation of each segment.
//
// One block of threads, once for all layers of a step that have the same window. Warps take tiles,
// lanes take segments, or packed runs of them (pack.cuh); what a tile sees of its segments is
// summed up with a scan. Nothing comes back to the host: kernels read counts where this one wrote
// them, so that a captured graph serves whatever the step's integers have become.
#include "launch.h"
#include "pack.cuh"

namespace memkv::cuda {
namespace {

__device__ int32_t num_tokens_of(const StepPlan& plan, int64_t sequence) {
  return plan.query_start[sequence + 1] - plan.query_start[sequence];
}

// Which tiles there are, and where their runs will be.
__device__ int32_t lay_out_tiles(const StepPlan& plan, const Work& work) {
  int32_t tiles_before = 0, runs_before = 0;
  for (int64_t base = 0; base < plan.num_seqs; base += kPlanThreads) {
    const int64_t sequence = base + threadIdx.x;
    int32_t tiles = 0, runs = 0;
    if (sequence < plan.num_seqs) {
      tiles = tiles_of(work.shape, num_tokens_of(plan, sequence));
      runs = tiles * (plan.segment_start[sequence + 1] - plan.segment_start[sequence] + 1);
    }
    int32_t all_tiles, all_runs;
    const int32_t tile = block_scan(tiles, all_tiles), run = block_scan(runs, all_runs);
    if (sequence < plan.num_seqs) {
      work.first_tile[sequence] = tiles_before + tile;
      work.first_run[sequence] = runs_before + run;
    }
    tiles_before += all_tiles;
    runs_before += all_runs;
  }
  __syncthreads();
  return tiles_before;
}

__device__ void plan_tile(const StepPlan& plan, const Work& work, int64_t sequence, int32_t tile) {
  const WorkShape& shape = work.shape;
  const int lane = threadIdx.x % 32;
  const int32_t first_token = plan.query_start[sequence];
  const int32_t num_rows = num_tokens_of(plan, sequence) * shape.group;
  const int32_t most_rows = rows_of_tiles(shape, num_rows), first_row = tile * most_rows;
  const int32_t rows = min(most_rows, num_rows - first_row);
  int32_t least = INT32_MAX, most = 0;
  for (int32_t token = first_row / shape.group + lane;
       token <= (first_row + rows - 1) / shape.group;
       token += 32) {
    const int32_t position = plan.query_position[first_token + token];
    least = min(least, position);
    most = max(most, position);
  }
  for (int step = 16; step > 0; step /= 2) {
    least = min(least, __shfl_xor_sync(kPlanLanes, least, step));
    most = max(most, __shfl_xor_sync(kPlanLanes, most, step));
  }
  const int32_t first_segment = plan.segment_start[sequence];
  const int32_t num_segments = plan.segment_start[sequence + 1] - first_segment;
  StageRun* runs = work.runs + work.first_run[sequence] + tile * (num_segments + 1);
  const PackedSegments& packed = work.packed;
  const int32_t first_run = packed.blocks == nullptr ? 0 : packed.of_sequence[2 * sequence];
  const int32_t num_runs =
      packed.blocks == nullptr ? num_segments : packed.of_sequence[2 * sequence + 1] - first_run;
  int32_t before = 0;
  for (int32_t base = 0; base < num_runs; base += 32) {
    Stages stages{0, 0};
    Segment segment{};
    int32_t index = first_segment + base + lane;
    if (base + lane < num_runs && packed.blocks != nullptr) {
      const PackedRun run = packed.runs[first_run + base + lane];
      const int32_t blocks = packed.runs[first_run + base + lane + 1].first_block - run.first_block;
      index = run.first_segment;
      segment = plan.segments[index];
      segment.first_entry = run.first_block;
      segment.num_tokens = blocks * packed.block_size;
      stages = visible_stages_of(
          shape, packed.blocks + run.first_block, blocks, packed.block_size, least, most);
    } else if (base + lane < num_runs) {
      segment = plan.segments[index];
      const bool own = work.shared.slots == nullptr || work.shared.slots[index] < 0;
      if (own) stages = visible_stages(shape, segment, least, most);
    }
    const int32_t sum = warp_scan(stages.count);
    if (base + lane < num_runs) {
      runs[base + lane] = {before + sum - stages.count,
                           stages.first,
                           segment.first_entry,
                           segment.num_tokens,
                           segment.position,
                           segment.stored_position,
                           index,
                           0};
    }
    before += __shfl_sync(kPlanLanes, sum, 31);
  }
  if (lane == 0) {
    const SharedSegments& shared = work.shared;  // each of its sequences has one tile
    const int32_t kept_row = shared.own_rows + work.first_tile[sequence] * shared.tile_tokens;
    runs[num_runs] = {before, 0, 0, 0, 0, 0, 0, 0};
    work.tiles[work.first_tile[sequence] + tile] = {first_token + first_row / shape.group,
                                                    first_row % shape.group,
                                                    rows,
                                                    first_segment,
                                                    num_runs,
                                                    int32_t(runs - work.runs),
                                                    before,
                                                    unit_length(shape, before),
                                                    least,
                                                    most,
                                                    kept_row,
                                                    tile};
  }
}

__global__ void __launch_bounds__(kPlanThreads) plan_kernel(StepPlan plan, Work work) {
  const WorkShape& shape = work.shape;
  const int warp = threadIdx.x / 32;
  if (work.packed.blocks != nullptr) pack_segments(plan, work);

  // Tiles and their runs.
  const int32_t num_tiles = lay_out_tiles(plan, work);
  for (int64_t sequence = 0; sequence < plan.num_seqs; ++sequence) {
    const int32_t tiles = tiles_of(shape, num_tokens_of(plan, sequence));
    // Tiles of all sequences in turn, so that many short sequences keep every warp busy too.
    const int32_t first = work.first_tile[sequence];
    for (int32_t tile = (warp + kPlanWarps - first % kPlanWarps) % kPlanWarps; tile < tiles;
         tile += kPlanWarps) {
      plan_tile(plan, work, sequence, tile);
    }
  }
  __syncthreads();

  cut_into_ranges(work, num_tiles);
}

// turns[segment] = cos, then sin, of (stored_position - position) * inv_freq; float64 until then.
__global__ void turn_kernel(const Segment* segments,
                            int64_t num_segments,
                            const double* inv_freq,
                            int num_pairs,
                            float* turns) {
  const int64_t count = num_segments * num_pairs;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t segment = i / num_pairs;
    const int pair = int(i % num_pairs);
    const Segment& of = segments[segment];
    double sin, cos;
    sincos((double(of.stored_position) - double(of.position)) * inv_freq[pair], &sin, &cos);
    float* row = turns + segment * 2 * num_pairs;
    row[pair] = float(cos);
    row[num_pairs + pair] = float(sin);
  }
}

}  // namespace

void plan_work(const StepPlan& plan, const Work& work, Stream stream) {
  plan_kernel<<<1, kPlanThreads, 0, cudaStream_t(stream)>>>(plan, work);
  check_launch("plan_work");
}

void turn_rows(const Segment* segments,
               int64_t num_segments,
               const double* inv_freq,
               int num_pairs,
               float* turns,
               Stream stream) {
  const int64_t count = num_segments * num_pairs;
  if (count == 0) return;
  const int blocks = int(count < 256 * 1024 ? (count + 255) / 256 : 1024);
  turn_kernel<<<blocks, 256, 0, cudaStream_t(stream)>>>(
      segments, num_segments, inv_freq, num_pairs, turns);
  check_launch("turn_rows");
}

}  // namespace memkv::cuda
