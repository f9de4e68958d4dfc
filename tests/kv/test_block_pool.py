"""BlockPool: allocate, share and release in any order, against a model that only counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memkv.errors import PoolExhausted
from memkv.kv.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Every holder is a list of block ids; the model is how often each id is held."""

    @initialize(num_blocks=st.integers(1, 24))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holders: list[list[int]] = []

    @rule(wanted=st.integers(0, 10))
    def allocate(self, wanted: int) -> None:
        free = self.pool.num_free
        if wanted > free:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(wanted)
            assert self.pool.num_free == free  # all or nothing
            return
        held = set().union(*map(set, self.holders))
        blocks = self.pool.allocate(wanted)
        assert len(set(blocks)) == wanted
        assert held.isdisjoint(blocks)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        part = data.draw(st.lists(st.sampled_from(blocks), unique=True)) if blocks else []
        self.pool.share(part)
        self.holders.append(part)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = Counter(block for holder in self.holders for block in holder)
        assert [self.pool.ref_count(block) for block in range(self.pool.num_blocks)] == [
            held[block] for block in range(self.pool.num_blocks)
        ]
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        self.pool.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_free_block_is_neither_shared_nor_released() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="bug"):
        pool.share([block])
    with pytest.raises(AssertionError, match="bug"):
        pool.release([block])


@pytest.mark.parametrize("damage", ["free twice", "lost", "freed while held"])
def test_check_integrity_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    if damage == "free twice":
        pool._free.append(pool._free[0])
    elif damage == "lost":
        pool._free.pop()
    else:
        pool._free.append(held[0])
    with pytest.raises(AssertionError, match="bug"):
        pool.check_integrity()
