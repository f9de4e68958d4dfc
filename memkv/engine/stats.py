"""What an engine and its lanes say of themselves."""

from __future__ import annotations

from dataclasses import dataclass

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
