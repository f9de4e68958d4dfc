"""The looking pass of a sequence: what the blocks of its mapped chunks get of the tail's attention."""

from __future__ import annotations

import torch
from torch import Tensor

from memkv.engine.placement import MappedPiece, Placement
from memkv.engine.request import GenerateRequest
from memkv.engine.reuse import BlockMass, LookRequest


class Look:
    """Gathers mass over the steps of one pass over a placement in which every chunk is mapped.

    Attributes:
        wanted: by the policy.
    """

    def __init__(self, wanted: LookRequest, request: GenerateRequest, placement: Placement) -> None:
        self.wanted = wanted
        tail = len(request.tail_ids)
        self._rows = min(wanted.rows or tail, tail)
        self._num_chunks = len(request.chunks)
        self._placement = placement
        self._masses: list[Tensor] = []  # on the device

    def rows_of(self, count: int, left: int) -> int:
        """How many of the pass's next `count` tokens look, counted from the last; `left` come behind them."""
        return max(0, min(count, self._rows - left))

    def add(self, mass: Tensor) -> None:
        """Mass [n] of the table's first n blocks, in order of position, from some of the rows."""
        self._masses.append(mass)

    def block_mass(self) -> BlockMass:
        """Per chunk and block, when the pass is over."""
        total = torch.zeros(max(map(len, self._masses)))
        for mass in self._masses:
            total[: len(mass)] += mass.cpu()
        masses = total.tolist()
        of_mapped: list[list[float]] = []
        first = 0
        size = self._placement.block_size
        for piece in self._placement.pieces:
            num_blocks = -(-piece.num_tokens // size)
            if isinstance(piece, MappedPiece):
                of_mapped.append(masses[first : first + num_blocks])
            first += num_blocks
        return of_mapped[len(of_mapped) - self._num_chunks :]  # the prefix is in front, if it has tokens
