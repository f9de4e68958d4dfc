"""Host arrays on their way to a device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

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
        self._memory = torch.zeros(sum(map(_aligned, sizes)), dtype=torch.uint8, device=device)
        self.tensors = {
            name: self._memory[self._places[name]].view(dtype).reshape(shape)
            for name, (dtype, shape) in shapes.items()
        }

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets each tensor to an array of its dtype, or to one with fewer rows and 0 behind them."""
        staged = torch.zeros(
            self._memory.shape, dtype=torch.uint8, pin_memory=self._memory.is_cuda
        )  # kept by torch until it is copied
        host = staged.numpy()
        for name, array in arrays.items():
            place = self._places[name]
            assert array.nbytes <= place.stop - place.start, "bug: an array is larger than its tensor"
            host[place.start : place.start + array.nbytes] = _bytes_of(array)
        self._memory.copy_(staged, non_blocking=True)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _places(sizes: Sequence[int]) -> list[slice]:
    """Where things of so many bytes lie one behind the other."""
    starts = itertools.accumulate(map(_aligned, sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
