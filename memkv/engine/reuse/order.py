"""`order`: exact, with the chunks in the order that makes most of the prompt known from earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkv.engine.reuse.policy import BlockMass, MappedChunk, PolicyForm, ReusePolicy


@dataclass(frozen=True, slots=True)
class Order(ReusePolicy):
    name: str = "order"

    @property
    def reorders(self) -> bool:
        return True

    @property
    def maps_other_contexts(self) -> bool:
        return False

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        return [[] if chunk.context_exact else list(range(chunk.num_blocks)) for chunk in mapped]


FORM = PolicyForm("order", lambda parameter: Order() if parameter is None else None)
