"""What ended answers leave to later ones: found by all tokens before it, used while tokens agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_harness import FAKE_LAYOUT, RandomPrompts
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_driver import Driver

from memkv.engine import continuations as module
from memkv.engine.continuations import Continuations, PromptOrigin
from memkv.engine.kv_cache import KVCache
from memkv.engine.request import GenerateRequest
from memkv.engine.residency import ChunkRef, Residency
from memkv.engine.reuse import Exact, Head, Map, Select
from memkv.engine.sequence import Sequence
from memkv.kv.block_pool import BlockPool
from memkv.kv.block_table import Segment

SIZE = FAKE_LAYOUT.block_size


@pytest.fixture
def driver() -> Driver:
    driver = Driver(continuation_share=0.5)
    a, b, c = (driver.prompts.chunk(size, name) for name, size in (("a", 40), ("b", 50), ("c", 33)))
    driver.store(a, b, c)
    driver.chunks = (a, b, c)  # type: ignore[attr-defined]
    return driver


def ask(driver: Driver, *chunks: ChunkRef, **changes: Any) -> Sequence:
    """Runs to the end: the answer is what a model makes that saw the whole prompt."""
    chunks = chunks or driver.chunks  # type: ignore[attr-defined]
    sequence = driver.submit(*(() if "pieces" in changes else chunks), **{"policy": Exact(), **changes})
    driver.finish(sequence)
    driver.assert_idle()
    return sequence


def prefilled(sequence: Sequence) -> int:
    usage = sequence.generation.result(0).usage
    assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
    return usage.prefilled_tokens


def test_a_repeated_question_computes_one_token(driver: Driver) -> None:
    tail = driver.prompts.ids(9)
    assert prefilled(ask(driver, tail=tail)) == 50 + 33 + 9
    for _ in range(3):
        again = ask(driver, tail=tail)
        assert prefilled(again) == 1
        usage = again.generation.result(0).usage
        assert usage.continued_tokens == 50 + 33 + 8
        assert usage.cached_tokens == 13 + 40 + 50 + 33 + 8
    assert driver.lane.continuations.num_blocks == 6  # 50 + 33 + 9 + 3 tokens, once


def test_another_question_over_the_same_chunks_computes_itself(driver: Driver) -> None:
    ask(driver, tail=driver.prompts.ids(9))
    for length in (7, 20, 40):
        assert prefilled(ask(driver, tail=driver.prompts.ids(length))) == length


def test_each_turn_of_a_conversation_computes_its_own_text(driver: Driver) -> None:
    a, b, _ = driver.chunks  # type: ignore[attr-defined]
    tail = driver.prompts.ids(30)
    turn = ask(driver, a, b, tail=tail, max_tokens=12)
    text: tuple[int, ...] = ()
    for _ in range(4):
        text = (*text, *tail, *turn.generation.result(0).token_ids)
        tail = driver.prompts.ids(25)
        turn = ask(driver, pieces=(a, b, text), tail=tail, max_tokens=12)
        assert prefilled(turn) == 25 + 1  # and the last token of the answer, which nobody fed back
    assert turn.run is not None
    assert [segment.private for segment in turn.run.table.segments] == [False] * 6 + [True]


def test_chunks_may_come_between_texts(driver: Driver) -> None:
    a, b, c = driver.chunks  # type: ignore[attr-defined]
    first, second = driver.prompts.ids(20), driver.prompts.ids(21)
    pieces = (a, first, b, second, c)
    assert prefilled(ask(driver, pieces=pieces, tail=7)) == 20 + 50 + 21 + 33 + 7
    assert prefilled(ask(driver, pieces=pieces, tail=7)) == 7
    assert prefilled(ask(driver, pieces=(first, a), tail=7)) == 20 + 40 + 7
    assert prefilled(ask(driver, pieces=(first, a), tail=7, policy=Map())) == 7 + 0
    assert prefilled(ask(driver, pieces=(a, second, b), tail=7, policy=Map())) == 21 + 7
    assert prefilled(ask(driver, pieces=(a, first, b), tail=7, policy=Map())) == 7
    assert prefilled(ask(driver, pieces=(a, second, b, c), tail=7, policy=Head(1))) == 21 + 2 * SIZE + 7
    ask(driver, pieces=(a, second, b, c), tail=7, policy=Select(0.5))


@pytest.mark.parametrize("policy", [Map(), Head(1), Select()])
def test_any_policy_reads_and_leaves_what_is_exact(driver: Driver, policy: Any) -> None:
    a, *_ = driver.chunks  # type: ignore[attr-defined]
    tail = driver.prompts.ids(SIZE)
    ask(driver, a, tail=tail, policy=policy)
    assert prefilled(ask(driver, a, tail=tail)) == 1
    assert prefilled(ask(driver, a, tail=tail, policy=policy)) == 1


@pytest.mark.parametrize("policy", [Map(), Head(1), Select()])
def test_what_is_not_exact_is_neither_left_nor_read(driver: Driver, policy: Any) -> None:
    tail = driver.prompts.ids(40)
    ask(driver, tail=tail, policy=policy)
    assert driver.lane.continuations.num_blocks == 0
    ask(driver, tail=tail)
    sequence = ask(driver, tail=tail, policy=policy)
    assert sequence.generation.result(0).usage.continued_tokens == 0


def test_off_neither_reads_nor_leaves_and_strict_reads(driver: Driver) -> None:
    tail = driver.prompts.ids(9)
    ask(driver, tail=tail, reuse="off")
    assert driver.lane.continuations.num_blocks == 0
    ask(driver, tail=tail)
    assert prefilled(ask(driver, tail=tail, reuse="off")) == 13 + 40 + 50 + 33 + 9
    assert prefilled(ask(driver, tail=tail, reuse="strict")) == 1


def test_logits_that_are_wanted_are_computed(driver: Driver) -> None:
    tail = driver.prompts.ids(9)
    ask(driver, tail=tail)
    again = ask(driver, tail=tail, keep_logits=4)
    assert prefilled(again) == 4
    assert again.generation.result(0).logit_positions == tuple(range(141, 145 + 3))
    assert prefilled(ask(driver, tail=tail, keep_logits=60)) == 60


def test_without_a_budget_nothing_is_kept() -> None:
    driver = Driver(continuation_share=0.0)
    driver.store()
    tail = driver.prompts.ids(40)
    assert [prefilled(ask_alone(driver, tail)) for _ in range(2)] == [40, 40]


def ask_alone(driver: Driver, tail: tuple[int, ...], **changes: Any) -> Sequence:
    sequence = driver.submit(tail=tail, policy=Exact(), **changes)
    driver.finish(sequence)
    driver.assert_idle()
    return sequence


def test_runs_shorter_than_a_block_are_not_kept() -> None:
    driver = Driver()
    driver.store()
    ask_alone(driver, driver.prompts.ids(SIZE - 1), max_tokens=1)
    assert driver.lane.continuations.num_blocks == 0
    ask_alone(driver, driver.prompts.ids(SIZE - 1), max_tokens=2)
    assert driver.lane.continuations.num_blocks == 1


def test_the_coldest_runs_make_room() -> None:
    driver = Driver(num_blocks=64, continuation_share=6 / 64)
    driver.store()
    tails = [driver.prompts.ids(2 * SIZE) for _ in range(4)]
    for tail in (tails[0], tails[1], tails[0], tails[2]):
        ask_alone(driver, tail, max_tokens=1)
    assert driver.lane.continuations.num_blocks == 6
    ask_alone(driver, tails[3], max_tokens=1)
    assert driver.lane.continuations.num_blocks == 6
    warm = [tail for tail in tails if continued(driver, tail)]
    assert warm == [tails[0], tails[2], tails[3]]
    ask_alone(driver, driver.prompts.ids(7 * SIZE), max_tokens=1)  # more than there may be
    assert driver.lane.continuations.num_blocks == 6


def continued(driver: Driver, tail: tuple[int, ...]) -> int:
    """Tokens of a prompt without chunks that runs hold, without any use of them."""
    ids = [*driver.prompts.prefix.token_ids, *tail]
    found = driver.lane.continuations.find("prefix", np.array(ids), 13, len(ids))
    return sum(piece.num_tokens for piece in found)


def test_a_chain_is_evicted_from_its_end() -> None:
    driver = Driver(num_blocks=64, continuation_share=6 / 64)
    driver.store()
    tail = driver.prompts.ids(2 * SIZE)
    for _ in range(3):
        sequence = ask_alone(driver, tail, max_tokens=1)
        tail = (*tail, *sequence.generation.result(0).token_ids, *driver.prompts.ids(2 * SIZE - 1))
    ask_alone(driver, driver.prompts.ids(2 * SIZE), max_tokens=1)
    assert continued(driver, tail) == 4 * SIZE


def test_room_for_a_query_comes_from_runs() -> None:
    driver = Driver(num_blocks=12, continuation_share=1.0)
    driver.store()
    tail = driver.prompts.ids(5 * SIZE)
    ask_alone(driver, tail, max_tokens=1)
    assert driver.lane.continuations.num_blocks == 5
    ask_alone(driver, driver.prompts.ids(11 * SIZE), max_tokens=1)
    assert driver.lane.continuations.num_blocks == 11
    assert continued(driver, tail) == 0


def test_a_run_that_leaves_no_room_for_the_request_is_not_waited_for() -> None:
    """Nine blocks are mapped for a few tokens of them, and six more are needed: the pool has twelve."""
    driver = Driver(num_blocks=12, continuation_share=1.0)
    driver.store()
    tail = driver.prompts.ids(9 * SIZE)
    ask_alone(driver, tail, max_tokens=1)
    sequence = ask_alone(driver, (*tail[:20], *driver.prompts.ids(9 * SIZE)), max_tokens=1)
    assert prefilled(sequence) == 20 + 9 * SIZE


def test_dropping_a_chunk_forgets_what_was_computed_behind_it(driver: Driver) -> None:
    a, b, c = driver.chunks  # type: ignore[attr-defined]
    tail = driver.prompts.ids(30)
    ask(driver, a, b, tail=tail)
    turn = ask(driver, pieces=(a, b, (*tail, *driver.prompts.ids(40))), tail=driver.prompts.ids(30))
    other = ask(driver, c, tail=tail)
    assert other.generation.result(0).finish_reason == "length"
    driver.lane.drop(["b"])
    driver.lane.check_integrity()
    assert prefilled(ask(driver, c, tail=tail)) == 1
    assert prefilled(ask(driver, a, b, tail=tail)) == 50 + 30
    driver.lane.drop(["prefix"])
    assert driver.lane.continuations.num_blocks == 0
    assert turn.is_finished


@pytest.mark.parametrize("moment", ["waiting", "running"])
def test_who_runs_while_a_chunk_is_dropped_leaves_nothing(driver: Driver, moment: str) -> None:
    sequence = driver.submit(*driver.chunks, policy=Exact(), max_tokens=6)  # type: ignore[attr-defined]
    if moment == "running":
        driver.step()
    driver.lane.drop(["c"])  # computed afresh, so it is not even pinned
    driver.finish(sequence)
    assert driver.lane.continuations.num_blocks == 0
    driver.assert_idle()


def test_who_maps_a_run_while_it_is_dropped_or_evicted_ends_well(driver: Driver) -> None:
    tail = driver.prompts.ids(30)
    ask(driver, tail=tail)
    second = driver.submit(*driver.chunks, policy=Exact(), tail=(*tail, 5), max_tokens=9)  # type: ignore[attr-defined]
    driver.step()
    driver.lane.drop(["b"])
    driver.finish(second)
    assert prefilled(second) == 1
    driver.assert_idle()


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_who_is_cancelled_or_fails_leaves_nothing(driver: Driver, end: str) -> None:
    sequence = driver.submit(*driver.chunks, policy=Exact(), max_tokens=9)  # type: ignore[attr-defined]
    driver.step()
    if end == "cancelled":
        driver.lane.cancel(sequence)
    else:
        driver.runner.before = fail
        driver.run()
    assert sequence.is_finished
    driver.settle()
    assert driver.lane.continuations.num_blocks == 0
    driver.assert_idle()


def fail(batch: object) -> None:
    raise RuntimeError("no luck")


def test_two_that_ask_the_same_at_the_same_time_are_both_right(driver: Driver) -> None:
    tail = driver.prompts.ids(30)
    both = [driver.submit(*driver.chunks, policy=Exact(), tail=tail) for _ in range(2)]  # type: ignore[attr-defined]
    for sequence in both:
        driver.finish(sequence)
        assert prefilled(sequence) == 50 + 33 + 30
    assert driver.lane.continuations.num_blocks == FAKE_LAYOUT.blocks_for(50 + 33 + 30 + 3)
    driver.assert_idle()


def test_the_same_tokens_behind_another_prefix_key_find_nothing(driver: Driver) -> None:
    """Another tenant's, or another model's: the key differs though every token is the same."""
    tail = driver.prompts.ids(30)
    ask(driver, tail=tail)
    foreign = ChunkRef("foreign", (), driver.prompts.prefix.token_ids)
    others = [ChunkRef(f"foreign {ref.input_key}", ref.context_ids, ref.token_ids) for ref in driver.chunks]  # type: ignore[attr-defined]
    sequence = ask(driver, *others, tail=tail, prefix=foreign)
    assert sequence.generation.result(0).usage.continued_tokens == 0


def test_the_same_tokens_at_another_place_find_nothing(driver: Driver) -> None:
    a, b, c = driver.chunks  # type: ignore[attr-defined]
    tail = driver.prompts.ids(30)
    ask(driver, a, b, tail=tail)
    assert ask(driver, a, c, b, tail=tail).generation.result(0).usage.continued_tokens == 0
    swapped = ChunkRef("swapped", a.context_ids, a.token_ids[::-1])
    driver.source.kept.pop("swapped", None)
    assert ask(driver, swapped, b, tail=tail).generation.result(0).usage.continued_tokens == 0


def test_a_hash_that_collides_maps_nothing_wrong(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "xxh3_64", lambda *data: SimpleNamespace(update=len, intdigest=lambda: 0))
    a, b, c = driver.chunks  # type: ignore[attr-defined]
    twin = ChunkRef("twin", a.context_ids, driver.prompts.ids(40))
    tail = driver.prompts.ids(30)
    for chunks in ((a, b), (twin, b), (a, c), (twin, c)):
        assert ask(driver, *chunks, tail=tail).generation.result(0).usage.continued_tokens == 0
    for chunks in ((a, b), (twin, b), (a, c), (twin, c)):
        assert prefilled(ask(driver, *chunks, tail=tail)) == 1


def test_a_run_that_begins_inside_another_is_reached_through_it(driver: Driver) -> None:
    """Of two runs that part, either beginning leads to what was computed behind the shorter agreement."""
    common, one, other = (driver.prompts.ids(n) for n in (20, 30, 30))
    ask(driver, tail=(*common, *one))
    assert prefilled(ask(driver, tail=(*common, *other))) == 30
    assert prefilled(ask(driver, tail=(*common, *other))) == 1
    assert prefilled(ask(driver, tail=(*common, *one))) == 1
    assert prefilled(ask(driver, tail=(*common, *other[:10], *one))) == 30


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_the_longest_known_beginning_is_found(data: st.DataObject) -> None:
    """Against trying everything: runs of few different tokens that share, part and follow each other."""
    residency = Residency(KVCache(FAKE_LAYOUT, 256), BlockPool(256))
    known = Continuations(residency, 256, block_size=1)
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)
    runs: list[tuple[list[int], int]] = []
    for _ in range(data.draw(st.integers(0, 8))):
        ids, start = data.draw(tokens), data.draw(st.integers(0, 6))
        if runs and data.draw(st.booleans()):
            ids = [*data.draw(st.sampled_from(runs))[0], *ids]
            start = data.draw(st.integers(0, len(ids) - 1))
        if start < len(ids):
            blocks = residency.allocate(FAKE_LAYOUT.blocks_for(len(ids) - start))
            run = Segment(tuple(blocks), len(ids) - start, start, start, private=True)
            if known.keep(PromptOrigin("prefix", ()), np.array(ids), run, start):
                runs.append((ids, start))
            else:
                residency.release(blocks)
            known.check_integrity()
    asked, start = data.draw(tokens), data.draw(st.integers(0, 4))
    if runs:
        asked = [*data.draw(st.sampled_from(runs))[0], *asked]
    end = data.draw(st.integers(0, len(asked)))
    found = known.find("prefix", np.array(asked), start, end)

    reach = start
    while True:  # a run that begins within reach extends it by the tokens that agree
        farther = [
            min(agreement(ids, asked), end)
            for ids, first in runs
            if start <= first <= reach and agreement(ids, asked) > first
        ]
        if max(farther, default=reach) <= reach:
            break
        reach = max(farther)
    assert (found[-1].end if found else start) == max(reach, start)
    position = start
    for piece in found:
        assert piece.position == position == piece.ref.stored_position and piece.num_tokens > 0
        assert list(piece.ref.context_ids) == asked[:position]
        assert list(piece.ref.token_ids[: piece.num_tokens]) == asked[position : piece.end]
        position = piece.end


def agreement(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_conversations_is_served_right(seed: int) -> None:
    """Questions, turns, cancels and drops at random in a small pool; books and answers are always checked."""
    driver = Driver(num_blocks=48, continuation_share=0.5, max_batch_tokens=50)
    driver.prompts = RandomPrompts(1000, seed=0)
    random = driver.prompts.random
    random.seed(seed)
    chunks = [driver.prompts.chunk(random.randint(10, 40), f"c{i}") for i in range(4)]
    driver.store(*chunks)
    texts = [driver.prompts.ids(random.randint(1, 30)) for _ in range(4)]
    running: list[Sequence] = []
    ended: list[Sequence] = []
    continued_tokens = 0
    for _ in range(150):
        if len(running) < 3:
            running.append(next_turn(driver, chunks, texts, ended))
        for _ in range(random.randint(0, 5)):
            driver.step()
        alive = [each for each in running if not each.is_finished]
        if alive and random.random() < 0.1:
            driver.lane.cancel(random.choice(alive))
        if random.random() < 0.05:
            driver.lane.drop([random.choice(chunks).input_key])
        driver.settle()
        for sequence in [each for each in running if each.is_finished]:
            running.remove(sequence)
            result = sequence.generation.result(0)
            if result.finish_reason == "length":
                driver.finish(sequence)
                ended.append(sequence)
                continued_tokens += result.usage.continued_tokens
    driver.run()
    driver.assert_idle()
    assert continued_tokens > 500


def next_turn(driver: Driver, chunks: Any, texts: Any, ended: list[Sequence]) -> Sequence:
    random = driver.prompts.random
    tail = random.choice(texts)
    policy = random.choice([Exact(), Exact(), Map(), Head(1), Select(0.3)])
    if ended and random.random() < 0.5:
        last: GenerateRequest = random.choice(ended[-4:]).request
        answer = random.choice(ended[-4:]).generation.result(0).token_ids
        if last.prompt_tokens < 200:
            pieces = (*last.pieces, (*last.tail_ids, *answer))
            return driver.submit(pieces=pieces, tail=tail, policy=policy, max_tokens=random.randint(1, 20))
    some = random.sample(chunks, random.randint(0, 3))
    return driver.submit(*some, tail=tail, policy=policy, max_tokens=random.randint(1, 20))
