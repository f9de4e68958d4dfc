"""What an engine and its lanes say of themselves."""

from __future__ import annotations

from dataclasses import dataclass

from memkv.engine.generation import Timings
from memkv.engine.host_pool import HostCounts
from memkv.engine.residency import BlockCounts
from memkv.engine.threads import Threads


@dataclass(slots=True)
class LaneCounters:
    """What a lane has done so far."""

    steps: int = 0  # passes through the model for generations
    fill_steps: int = 0  # and for chunks
    generated_tokens: int = 0
    looked_tokens: int = 0  # tokens of looking passes
    prefilled_tokens: int = 0  # prompt tokens of generations
    filled_tokens: int = 0  # tokens of chunks, healed ones included
    failed_tasks: int = 0
    host_loaded_bytes: int = 0  # copied from host memory to the device
    host_load_seconds: float = 0.0  # that the device took for it
    source_loaded_bytes: int = 0  # read from where chunks are stored, verified
    source_load_seconds: float = 0.0  # that those reads took, several at a time
    answers: int = 0  # that came to their end; the time that they spent in all,
    queue_seconds: float = 0.0  # until they had blocks,
    load_seconds: float = 0.0  # until their chunks were in place,
    look_seconds: float = 0.0  # until their policy had seen where the question looks,
    prefill_seconds: float = 0.0  # until the first token,
    decode_seconds: float = 0.0  # and until the last

    def count(self, timings: Timings) -> None:
        """One more answer."""
        self.answers += 1
        self.queue_seconds += timings.queue_ms / 1e3
        self.load_seconds += timings.load_ms / 1e3
        self.look_seconds += timings.look_ms / 1e3
        self.prefill_seconds += timings.prefill_ms / 1e3
        self.decode_seconds += (timings.total_ms - timings.ttft_ms) / 1e3


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane as of the end of the last step."""

    block_size: int
    blocks: BlockCounts
    host_blocks: HostCounts
    counters: LaneCounters
    healed_chunks: int  # chunks that had no valid KV when a query needed them
    waiting: int
    loading: int
    running: int
    jobs: int
    kept_blocks: int  # of runs that ended generations left behind, in use or not
    fill_tokens_per_second: float  # 0 before the first


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine as of the end of the last step; `alive` says whether its thread takes requests."""

    alive: bool
    threads: Threads
    lanes: tuple[LaneStats, ...]
