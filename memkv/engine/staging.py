"""Host arrays on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence

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
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)  # kept by torch until it is copied
    host = staged.numpy()
    places = [slice(start, start + array.nbytes) for start, array in zip([0, *ends], arrays, strict=False)]
    for place, array in zip(places, arrays, strict=True):
        host[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = staged.to(device, non_blocking=True)
    return [
        moved[place].view(torch.from_numpy(array).dtype).reshape(array.shape)
        for place, array in zip(places, arrays, strict=True)
    ]
