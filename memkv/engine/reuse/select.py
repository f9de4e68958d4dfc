"""`select:r`: the blocks that the question looks at.

Of the chunks whose context differs, the fraction r of their blocks that receive most of the tail's
attention, with every chunk mapped, is computed afresh. The attention is a plain sum, over the looking tokens,
all heads and the last third of the layers: a block that is not full counts for what its tokens got, and
layers and heads count alike.

A chunk's first block is not taken for being first: with chunks of 150 tokens these blocks alone are a tenth
of all, and on real questions as many blocks chosen by attention lose less.
"""

from __future__ import annotations

import math
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
class Select(ReusePolicy):
    """The options beside the fraction are for measurements.

    Attributes:
        fraction: of the blocks of chunks whose context differs.
        layers, rows: as of `LookRequest`.
        heads: whether the first block of each chunk is taken however little it is looked at.
    """

    fraction: float = 0.15
    layers: tuple[float, float] = (2 / 3, 1.0)
    rows: int = 0
    heads: bool = False

    @property
    def name(self) -> str:
        """As it is parsed, with what differs from the parsed policy in brackets."""
        parsed = Select()
        options = (
            [f"layers {self.layers[0]:.3g}-{self.layers[1]:.3g}"] if self.layers != parsed.layers else []
        )
        options += [f"last {self.rows}"] if self.rows else []
        options += ["heads"] if self.heads else []
        return f"select:{self.fraction:g}" + (f"[{', '.join(options)}]" if options else "")

    @property
    def look(self) -> LookRequest:
        return LookRequest(self.layers, self.rows)

    def max_fresh_blocks(self, mapped: Sequence[MappedChunk]) -> int:
        total = sum(chunk.num_blocks for chunk in mapped if not chunk.context_exact)
        budget = math.ceil(self.fraction * total - 1e-9)  # 0.07 * 100 is a little above 7
        return max(budget, sum(map(len, self._heads(mapped))))

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        fresh = self._heads(mapped)
        left = self.max_fresh_blocks(mapped) - sum(map(len, fresh))
        if left == 0:
            return fresh
        assert look is not None, "bug: blocks were to be chosen without a look"
        candidates = [place for place in blocks_by_mass(mapped, look) if place[1] not in fresh[place[0]]]
        for chunk, block in candidates[:left]:
            fresh[chunk].append(block)
        return [sorted(blocks) for blocks in fresh]

    def _heads(self, mapped: Sequence[MappedChunk]) -> list[list[int]]:
        return [[0] if self.heads and not chunk.context_exact else [] for chunk in mapped]


def _parse(parameter: str | None) -> Select | None:
    if parameter is None:
        return Select()
    value = fraction(parameter)
    return None if value is None else Select(value)


FORM = PolicyForm("select:r", _parse)
