"""`map`: nothing is computed, every chunk stays as it was prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkv.engine.reuse.policy import BlockMass, MappedChunk, PolicyForm, ReusePolicy


@dataclass(frozen=True, slots=True)
class Map(ReusePolicy):
    name: str = "map"

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        return [[] for _ in mapped]


FORM = PolicyForm("map", lambda parameter: Map() if parameter is None else None)
