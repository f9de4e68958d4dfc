"""Large collections searched on a GPU, where faiss was built for one and finds one.

The index on the CPU stays what it is; a copy of its vectors follows it when it is searched. What a GPU cannot
do, or has no memory for, is left to the CPU.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

import faiss
import numpy as np
import structlog
from numpy.typing import NDArray

_log = structlog.get_logger(__name__)

_FEWEST_VECTORS = 10_000  # a CPU looks through fewer about as fast as a GPU is asked
_MOST_NEIGHBOURS = 2048  # that faiss finds on a GPU
_SCRATCH_BYTES = 32 << 20


class Gpu:
    """The GPU that a store's collections are searched on: one call at a time, as faiss wants it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @cached_property
    def is_there(self) -> bool:
        return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0

    @cached_property
    def resources(self) -> Any:
        """Shared by all copies. Raises `RuntimeError` where the GPU has no room for them."""
        resources = faiss.StandardGpuResources()
        resources.setTempMemory(_SCRATCH_BYTES)
        return resources


class GpuCopy:
    """One flat index's vectors on the GPU. The caller sees to it that the index does not change meanwhile."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._copy: Any = None
        self._num_removals = 0  # of the index, when it was copied whole
        self._failed = False

    def search(
        self, index: faiss.IndexFlatIP, num_removals: int, query: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]] | None:
        """As `index.search` does, (scores, places), both [1, k]; None where the CPU is to do it.

        Args:
            num_removals: how often vectors were taken out of the index, or it was filled anew.
        """
        if index.ntotal < _FEWEST_VECTORS or k > _MOST_NEIGHBOURS or self._failed or not self._gpu.is_there:
            return None
        with self._gpu.lock:
            try:
                self._follow(index, num_removals)
                scores, places = self._copy.search(query, k)
            except RuntimeError as error:  # what faiss raises
                self._failed, self._copy = True, None
                _log.warning("gpu_search_failed", detail=str(error), vectors=index.ntotal)
                return None
        return scores, places

    def _follow(self, index: faiss.IndexFlatIP, num_removals: int) -> None:
        if self._copy is None:
            self._copy = faiss.GpuIndexFlatIP(self._gpu.resources, index.d)
            self._num_removals = -1
        if num_removals != self._num_removals:
            self._copy.copyFrom(index)
            self._num_removals = num_removals
        elif index.ntotal > self._copy.ntotal:
            first = self._copy.ntotal
            self._copy.add(index.reconstruct_n(first, index.ntotal - first))
