"""What a pass through the model takes and returns, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from memkv.kernels import AttentionPlan


@dataclass(frozen=True, slots=True)
class MassRequest:
    """Entries of the packed block tables whose attention mass is wanted, and in which layers."""

    entries: slice
    layers: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One pass.

    Attributes:
        token_ids, positions, slots: int64 [total].
        sources: int64 [total], rows of `fed` that stand in the place of token ids; -1 where they do not.
        fed: int64 [n], tokens that were sampled and never were on the host.
        logit_rows: int64 [n], rows whose logits are wanted; without rows the head is not run.
        masses: empty, but where a policy looks.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sources: Tensor
    fed: Tensor
    logit_rows: Tensor
    plan: AttentionPlan
    masses: Sequence[MassRequest] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a pass returns.

    Attributes:
        logits: [len(logit_rows), vocab_size]; None without rows.
        masses: of each look of the batch, float32 [num_entries], summed over heads and layers.
    """

    logits: Tensor | None
    masses: list[Tensor] = field(default_factory=list)
