"""What went wrong in a step, as an error for those who were in it."""

from __future__ import annotations

import torch

from memkv.errors import InternalServerError, MemKVError, Overloaded


def typed_error(error: BaseException) -> MemKVError:
    """A new error for one consumer; several may fail with the same cause, each in its own thread."""
    if isinstance(error, MemKVError):
        fresh: MemKVError = type(error)(error.detail, hint=error.hint)
    elif _is_out_of_memory(error):
        fresh = Overloaded(
            "memory ran out while the step was computed", hint="lower engine.max_batch_tokens or pool_bytes"
        )
    else:
        fresh = InternalServerError(f"the engine failed on this request: {type(error).__name__}: {error}")
    fresh.__cause__ = error
    return fresh


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # the CPU allocator of torch has no type of its own for it
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
