"""`exact`: everything whose context differs is computed, so that the answer equals a full prefill's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkv.engine.reuse.policy import BlockMass, MappedChunk, PolicyForm, ReusePolicy


@dataclass(frozen=True, slots=True)
class Exact(ReusePolicy):
    name: str = "exact"

    @property
    def maps_other_contexts(self) -> bool:
        return False

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        return [[] if chunk.context_exact else list(range(chunk.num_blocks)) for chunk in mapped]


FORM = PolicyForm("exact", lambda parameter: Exact() if parameter is None else None)
