"""BlockTable: segments mapped and grown in any order, against a plain dict of positions."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memkv.kv.block_pool import BlockPool
from memkv.kv.block_table import BlockTable, Segment

Key = tuple[int, int, int]  # block, offset, stored position


class TableMachine(RuleBasedStateMachine):
    """The model maps each position to where its key lies and at which position it was rotated."""

    @initialize(size=st.sampled_from([8, 16, 32]))
    def make(self, size: int) -> None:
        self.size = size
        self.pool = BlockPool(4096)
        self.table = BlockTable(size)
        self.keys: dict[int, Key] = {}
        self.chunks: list[tuple[tuple[int, ...], int, int]] = []  # blocks, tokens, stored position
        self.shared: list[int] = []
        self.private: list[int] = []

    @rule(gap=st.integers(0, 5), tokens=st.integers(0, 100), stored=st.integers(0, 200))
    def map_new_chunk(self, gap: int, tokens: int, stored: int) -> None:
        blocks = tuple(self.pool.allocate(-(-tokens // self.size)))
        self.chunks.append((blocks, tokens, stored))
        self.map(gap, self.chunks[-1])

    @precondition(lambda self: self.chunks)
    @rule(gap=st.integers(0, 5), data=st.data())
    def map_known_chunk(self, gap: int, data: st.DataObject) -> None:
        self.map(gap, data.draw(st.sampled_from(self.chunks)))

    def map(self, gap: int, chunk: tuple[tuple[int, ...], int, int]) -> None:
        blocks, tokens, stored = chunk
        position = self.table.end + gap
        self.table.append(Segment(blocks, tokens, position, stored))
        self.pool.share(blocks)
        self.shared.extend(blocks)
        for i in range(tokens):
            self.keys[position + i] = (blocks[i // self.size], i % self.size, stored + i)

    @rule(gap=st.integers(0, 5), tokens=st.integers(0, 50))
    def append_private(self, gap: int, tokens: int) -> None:
        blocks = tuple(self.pool.allocate(-(-tokens // self.size)))
        position = self.table.end + gap
        self.table.append(Segment(blocks, tokens, position, position, private=True))
        self.write(position, tokens, blocks)

    def write(self, position: int, tokens: int, blocks: tuple[int, ...]) -> None:
        self.private.extend(blocks)
        for i in range(tokens):
            self.keys[position + i] = (blocks[i // self.size], i % self.size, position + i)

    @precondition(lambda self: self.table.segments and self.table.segments[-1].private)
    @rule(tokens=st.integers(0, 40))
    def grow(self, tokens: int) -> None:
        last = self.table.segments[-1]
        room = len(last.blocks) * self.size - last.num_tokens
        blocks = self.pool.allocate(-(-max(0, tokens - room) // self.size))
        self.table.grow(tokens, blocks)
        self.private.extend(blocks)
        whole = (*last.blocks, *blocks)
        for i in range(last.num_tokens, last.num_tokens + tokens):
            self.keys[last.position + i] = (whole[i // self.size], i % self.size, last.position + i)

    @invariant()
    def every_position_is_where_the_model_says(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_integrity()
        found: dict[int, Key] = {}
        for segment in self.table.segments:
            for i in range(segment.num_tokens):
                position = segment.position + i
                assert position not in found
                found[position] = (
                    segment.blocks[i // self.size],
                    i % self.size,
                    segment.stored_position + i,
                )
        assert found == self.keys
        assert self.table.num_tokens == len(self.keys)
        assert sorted(self.table.shared_blocks()) == sorted(self.shared)
        assert sorted(self.table.private_blocks()) == sorted(self.private)

    @invariant()
    def slots_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        for position in [*list(self.keys)[:5], *list(self.keys)[-5:]]:
            block, offset, _ = self.keys[position]
            assert self.table.slot(position) == block * self.size + offset
        gap = next((p for p in range(self.table.end + 1) if p not in self.keys), None)
        assert gap is not None
        with pytest.raises(KeyError):
            self.table.slot(gap)

    @invariant()
    def the_pool_agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        self.pool.check_integrity()
        for block in set(self.shared):
            assert self.pool.ref_count(block) == 1 + self.shared.count(block)
        for block in self.private:
            assert self.pool.ref_count(block) == 1


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    "segments",
    [
        [Segment((1, 2), 20, 0, 0), Segment((3,), 5, 19, 0)],  # overlap
        [Segment((1,), 20, 0, 0)],  # too few blocks
        [Segment((1, 2, 3), 20, 0, 0)],  # too many
        [Segment((1, 2), 20, 5, 4, private=True)],  # private, stored elsewhere
    ],
)
def test_unsound_segments_are_refused(segments: list[Segment]) -> None:
    table = BlockTable(16)
    *sound, last = segments
    for segment in sound:
        table.append(segment)
    with pytest.raises(AssertionError, match="bug"):
        table.append(last)


@pytest.mark.parametrize(
    "segments",
    [
        [Segment((1, 1), 20, 0, 0, private=True)],
        [Segment((1,), 5, 0, 0, private=True), Segment((1,), 5, 5, 5, private=True)],
        [Segment((1,), 5, 0, 0), Segment((1,), 5, 5, 5, private=True)],
    ],
)
def test_check_integrity_sees_a_private_block_twice(segments: list[Segment]) -> None:
    table = BlockTable(16)
    for segment in segments:
        table.append(segment)
    with pytest.raises(AssertionError, match="private"):
        table.check_integrity()


def test_only_a_private_segment_grows() -> None:
    table = BlockTable(16)
    table.append(Segment((1,), 4, 0, 0))
    with pytest.raises(AssertionError, match="private"):
        table.grow(1)
