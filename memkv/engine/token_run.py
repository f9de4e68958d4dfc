"""The tokens of one block table that are still to be computed."""

from __future__ import annotations

from typing import Self

from memkv.kv.block_table import BlockTable


class TokenRun:
    """The tokens of one block table that have to be computed, in order of position.

    The order is what lets a long run be taken in parts: when a token is computed, every private key that it
    sees is written.
    """

    def __init__(self, table: BlockTable, token_ids: list[int], positions: list[int]) -> None:
        self.table = table
        self.token_ids = token_ids
        self.positions = positions
        self.done = 0

    @classmethod
    def of_private(cls, table: BlockTable, ids: list[int]) -> Self:
        """All tokens in private blocks of a table over the tokens `ids`."""
        private = (segment for segment in table.segments if segment.private)
        positions = [position for each in private for position in range(each.position, each.end)]
        return cls(table, [ids[position] for position in positions], positions)

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.done

    def append(self, token_id: int, position: int) -> None:
        self.token_ids.append(token_id)
        self.positions.append(position)
