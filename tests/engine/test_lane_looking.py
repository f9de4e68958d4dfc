"""A policy that looks: one pass of the tail over the mapped prompt, then one over what was chosen.

The fake model's attention gives every block its own number for each looking row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
from engine_harness import FAKE_LAYOUT
from lane_driver import Driver

from memkv.engine.reuse import BlockMass, LookRequest, Map, MappedChunk, ReusePolicy, Select
from memkv.engine.sequence import Sequence
from memkv.errors import MemKVError

SIZE = FAKE_LAYOUT.block_size


@dataclass(frozen=True)
class Given(ReusePolicy):
    """Named blocks, whatever it sees; at most `most`."""

    fresh: list[list[int]]
    most: int
    rows: int = 0
    name: str = "given"

    @property
    def look(self) -> LookRequest:
        return LookRequest(rows=self.rows)

    def max_fresh_blocks(self, mapped: Seq[MappedChunk]) -> int:
        return self.most

    def fresh_blocks(self, mapped: Seq[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        assert look is not None and [len(each) for each in look] == [chunk.num_blocks for chunk in mapped]
        SEEN.append(look)
        return self.fresh


SEEN: list[BlockMass] = []


@pytest.fixture
def driver() -> Driver:
    SEEN.clear()
    driver = Driver()
    a, b, c = (driver.prompts.chunk(size, name) for name, size in (("a", 40), ("b", 50), ("c", 33)))
    driver.store(a, b, c)
    driver.chunks = (a, b, c)  # type: ignore[attr-defined]
    return driver


def submit(driver: Driver, policy: ReusePolicy, **changes: int) -> Sequence:
    return driver.submit(*driver.chunks, policy=policy, **changes)  # type: ignore[attr-defined]


def test_it_looks_chooses_and_computes(driver: Driver) -> None:
    """40 + 50 + 33 tokens in 3 + 4 + 3 blocks, seven of them behind another context."""
    sequence = submit(driver, Given([[], [1, 2], [2]], 5), tail=7, max_tokens=20)
    driver.settle()
    assert sequence.look is not None and sequence.run is not None
    assert len(sequence.private_blocks) == 5 + 1  # the worst choice; the tail
    blocks = [list(s.blocks) for s in sequence.run.table.segments if not s.private]
    driver.step("generation")  # the look
    assert driver.runner.batches[-1].logit_rows == []
    assert driver.runner.batches[-1].num_tokens == 7
    assert [[[7.0 * block for block in each] for each in blocks[1:]]] == SEEN
    assert sequence.look is None
    assert len(sequence.private_blocks) == 2 + 1 + 1  # two were spared, and are free again
    driver.lane.check_integrity()
    driver.step("generation")
    assert driver.runner.batches[-1].num_tokens == 2 * SIZE + 1 + 7
    driver.finish(sequence)
    result = sequence.generation.result(0)
    assert result.usage.prefilled_tokens == 2 * SIZE + 1 + 7
    assert result.usage.looked_tokens == 7
    assert result.usage.cached_tokens == 13 + 40 + 18 + 32
    assert result.usage.blocks_fresh == 3 + 1
    assert driver.lane.steps.counters.looked_tokens == 7
    assert driver.lane.steps.counters.prefilled_tokens == 2 * SIZE + 1 + 7
    driver.assert_idle()


def test_its_time_is_part_of_the_first_tokens(driver: Driver) -> None:
    sequence = submit(driver, Select())
    driver.finish(sequence)
    t = sequence.generation.result(0).timings
    assert t.look_ms > 0
    assert t.queue_ms + t.load_ms + t.look_ms + t.prefill_ms == pytest.approx(t.ttft_ms, abs=1e-6)
    plain = submit(driver, Map())
    driver.finish(plain)
    assert plain.generation.result(0).timings.look_ms == 0


def test_a_chunk_that_is_chosen_throughout_joins_the_private_run(driver: Driver) -> None:
    sequence = submit(driver, Given([[], [], [0, 1, 2]], 7), tail=15, max_tokens=1)
    driver.finish(sequence)
    assert len(sequence.generation.result(0).token_ids) == 1
    assert sequence.placement.num_private_blocks == 3  # 33 + 15 tokens
    driver.assert_idle()


@pytest.mark.parametrize(("wanted", "rows"), [(0, 9), (1, 1), (4, 4), (50, 9)])
def test_only_the_rows_asked_for_look(driver: Driver, wanted: int, rows: int) -> None:
    driver.finish(submit(driver, Given([[], [0], []], 1, wanted), tail=9))
    prompt = 13 + 40 + 50 + 33 + 9
    assert driver.runner.looking_rows == [list(range(prompt - rows, prompt))]


def test_a_look_taken_in_parts_adds_up() -> None:
    driver = Driver(max_batch_tokens=4)
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(50, "b")
    driver.store(a, b)
    SEEN.clear()
    sequence = driver.submit(a, b, policy=Given([[], [0]], 1, 6), tail=11)
    driver.settle()
    assert sequence.run is not None
    blocks = [list(s.blocks) for s in sequence.run.table.segments if not s.private]
    driver.finish(sequence)
    assert [len(rows) for rows in driver.runner.looking_rows] == [3, 3]
    assert [[[6.0 * block for block in each] for each in blocks[1:]]] == SEEN


def test_looks_prompts_and_answers_share_a_step(driver: Driver) -> None:
    running = submit(driver, Map(), max_tokens=9)
    driver.step("generation")
    looking = [submit(driver, Select(), tail=6), submit(driver, Given([[], [], []], 0 + 1), tail=8)]
    plain = submit(driver, Map(), tail=3)
    driver.step("generation")
    batch = driver.runner.batches[-1]
    assert sorted(map(len, batch.positions)) == [1, 3, 6, 8]
    assert len(batch.looks) == 2 and len(batch.logit_rows) == 2
    for sequence in (running, *looking, plain):
        driver.finish(sequence)
    driver.assert_idle()


def test_nobody_looks_where_everything_is_exact_or_off(driver: Driver) -> None:
    a, *_ = driver.chunks  # type: ignore[attr-defined]
    for sequence in (driver.submit(a, policy=Select()), driver.submit(a, policy=Select(), reuse="off")):
        driver.finish(sequence)
        assert sequence.generation.result(0).usage.looked_tokens == 0
    assert driver.runner.looking_rows == []


@pytest.mark.parametrize("moment", ["before", "amid", "behind"])
def test_cancel_gives_everything_back(moment: str) -> None:
    driver = Driver(max_batch_tokens=4)
    a, b = driver.prompts.chunk(40, "a"), driver.prompts.chunk(50, "b")
    driver.store(a, b)
    sequence = driver.submit(a, b, policy=Select(0.5), tail=10)
    driver.settle()
    for _ in range({"before": 0, "amid": 1, "behind": 3}[moment]):
        driver.step("generation")
    assert (sequence.look is None) == (moment == "behind")
    driver.lane.cancel(sequence)
    driver.settle()
    driver.assert_idle()
    usage = sequence.generation.result(0).usage
    assert usage.prefilled_tokens == 0
    assert usage.looked_tokens == {"before": 0, "amid": 4, "behind": 10}[moment]


def test_a_policy_that_fails_fails_its_own_request(driver: Driver) -> None:
    class Fails(Given):
        def fresh_blocks(self, mapped: Seq[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
            raise RuntimeError("no idea")

    bad, good = submit(driver, Fails([], 1)), submit(driver, Select())
    driver.finish(good)
    with pytest.raises(MemKVError, match="no idea"):
        bad.generation.result(0)
    driver.assert_idle()


def test_a_policy_that_wants_more_than_it_said_is_a_bug(driver: Driver) -> None:
    submit(driver, Given([[], [0, 1], []], 1))
    with pytest.raises(AssertionError, match="more blocks"):
        driver.run()


def test_a_failed_look_leaves_the_books_balanced(driver: Driver) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("the device is on fire")

    sequence = submit(driver, Select())
    driver.runner.before = fail
    driver.run()
    with pytest.raises(MemKVError, match="on fire"):
        sequence.generation.result(0)
    driver.assert_idle()
