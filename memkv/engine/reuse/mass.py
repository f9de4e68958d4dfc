"""`mass:p`: the fewest blocks that hold the share p of the question's attention.

Attention as `select` measures it, on the chunks whose context differs; never more than half of their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memkv.engine.reuse.policy import (
    BlockMass,
    LookRequest,
    MappedChunk,
    PolicyForm,
    ReusePolicy,
    blocks_by_mass,
    fraction,
)


@dataclass(frozen=True, slots=True)
class Mass(ReusePolicy):
    """`layers` and `rows` as of `LookRequest`."""

    share: float = 0.9
    layers: tuple[float, float] = (2 / 3, 1.0)
    rows: int = 0

    @property
    def name(self) -> str:
        return f"mass:{self.share:g}"

    @property
    def look(self) -> LookRequest:
        return LookRequest(self.layers, self.rows)

    def max_fresh_blocks(self, mapped: Sequence[MappedChunk]) -> int:
        return -(-sum(chunk.num_blocks for chunk in mapped if not chunk.context_exact) // 2)

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        fresh: list[list[int]] = [[] for _ in mapped]
        most = self.max_fresh_blocks(mapped)
        if most == 0:
            return fresh
        assert look is not None, "bug: blocks were to be chosen without a look"
        places = blocks_by_mass(mapped, look)
        wanted = self.share * sum(look[chunk][block] for chunk, block in places)
        held = 0.0
        for chunk, block in places[:most]:
            if held >= wanted:
                break
            held += look[chunk][block]
            fresh[chunk].append(block)
        return [sorted(blocks) for blocks in fresh]


def _parse(parameter: str | None) -> Mass | None:
    if parameter is None:
        return Mass()
    value = fraction(parameter)
    return None if value is None else Mass(value)


FORM = PolicyForm("mass:p", _parse)
