"""Host arrays on their way to a device."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of the same dtypes and shapes.

    On a CPU they share the arrays' memory. A GPU gets them by one copy out of pinned memory, which the host
    does not wait for.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    places = _places([array.nbytes for array in arrays])
    staged = torch.empty(places[-1].stop, dtype=torch.uint8, pin_memory=True)  # kept by torch until copied
    host = staged.numpy()
    for place, array in zip(places, arrays, strict=True):
        host[place] = _bytes_of(array)
    moved = staged.to(device, non_blocking=True)
    return [
        moved[place].view(torch.from_numpy(array).dtype).reshape(array.shape)
        for place, array in zip(places, arrays, strict=True)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in host memory; a GPU's copy of it is not waited for."""
    if tensor.device.type == "cpu":
        return tensor
    target = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


_STAGED_AT_ONCE = 2  # contents of static arrays on their way: a step runs while the next one is prepared


class StaticArrays:
    """Tensors that stay where they are and get new contents by one copy, as a CUDA graph wants them.

    Attributes:
        tensors: by name; 0 until they are filled.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values()]
        self._places = dict(zip(shapes, _places(sizes), strict=True))
        num_bytes = sum(map(_aligned, sizes))
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._staged = deque(_Staged(num_bytes, device) for _ in range(_STAGED_AT_ONCE))
        self.tensors = {
            name: self._memory[self._places[name]].view(dtype).reshape(shape)
            for name, (dtype, shape) in shapes.items()
        }

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets each tensor to an array of its dtype, or to one with fewer rows and 0 behind them."""
        staged = self._staged[0]
        self._staged.rotate(-1)
        staged.await_copy()
        for name, place in self._places.items():
            array = arrays[name]
            end = place.start + array.nbytes
            assert end <= place.stop, "bug: an array is larger than its tensor"
            staged.host[place.start : end] = _bytes_of(array)
            staged.host[end : place.stop] = 0
        staged.copy_to(self._memory)


class _Staged:
    """Host memory, pinned for a GPU, that is copied from again and again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.host = self._memory.numpy()

    def await_copy(self) -> None:
        """Until the last copy of it is done."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, target: Tensor) -> None:
        target.copy_(self._memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _places(sizes: Sequence[int]) -> list[slice]:
    """Where things of so many bytes lie one behind the other."""
    starts = itertools.accumulate(map(_aligned, sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
