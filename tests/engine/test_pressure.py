"""A pool of 64 blocks, 200 requests and 20 that can never fit, from several threads, with cancels."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
from engine_harness import (
    FAKE_VOCAB,
    FakeRunner,
    MemorySource,
    RandomPrompts,
    config,
    fake_answer,
    fake_model,
)

from memkv.engine.engine import Engine
from memkv.engine.request import GenerateRequest
from memkv.engine.reuse import Exact, Head, Map, Select
from memkv.engine.sampler import Sampling
from memkv.errors import ContextTooLong, Overloaded

NUM_BLOCKS = 64
SIZE = 16
BLOCK_BYTES = 2 * 8 * SIZE * 4


class Clients:
    """Threads that ask, check what they get, and sometimes walk away."""

    def __init__(self, engine: Engine, requests: int, impossible: int) -> None:
        self._engine = engine
        self._left = ["possible"] * requests + ["impossible"] * impossible
        Random(1).shuffle(self._left)
        self._lock = threading.Lock()
        self.outcomes: dict[str, int] = {}
        self.slowest_refusal = 0.0
        self.errors: list[str] = []
        prompts = RandomPrompts(FAKE_VOCAB)
        self._prefix = prompts.prefix
        self._chunks = [prompts.chunk(10 + 9 * index, f"c{index}") for index in range(12)]
        self._source = MemorySource()

    def run(self, seed: int) -> None:
        random = Random(seed)
        while True:
            with self._lock:
                if not self._left:
                    return
                kind = self._left.pop()
            try:
                outcome = self._impossible(random) if kind == "impossible" else self._possible(random)
            except Exception as error:  # noqa: BLE001
                self.errors.append(f"{type(error).__name__}: {error}")
                outcome = "failed"
            with self._lock:
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def _possible(self, random: Random) -> str:
        """Between 40 and 63 blocks in all."""
        chunks = random.sample(self._chunks, random.randint(0, 4))
        used = 1 + sum(-(-chunk.num_tokens // SIZE) for chunk in chunks)
        room = random.randint(40, 63) * SIZE - used * SIZE - sum(chunk.num_tokens for chunk in chunks) - 13
        way = random.choice(["wait", "wait", "walk away", "walk away after some"])
        if way == "wait":
            request = self._request(random, chunks, max(1, room - 10), random.randint(1, 10))
        else:
            request = self._request(random, chunks, random.randint(1, 9), max(1, room - 9))
        generation = self._engine.generate(request, self._source)
        if way == "walk away":
            time.sleep(random.random() * 0.01)
            generation.cancel()
        elif way == "walk away after some":
            for _ in zip(range(random.randint(1, 4)), generation, strict=False):
                pass
            generation.cancel()
        try:
            result = generation.result(60)
        except Overloaded:
            return "overloaded"
        assert result.token_ids == fake_answer(request.prompt_ids.tolist(), len(result.token_ids))
        if result.finish_reason == "length":
            assert len(result.token_ids) == request.sampling.max_tokens
        return result.finish_reason

    def _request(self, random: Random, chunks: list, tail: int, max_tokens: int) -> GenerateRequest:  # type: ignore[type-arg]
        return GenerateRequest(
            self._prefix,
            tuple(chunks),
            tuple(random.randrange(3, FAKE_VOCAB - 1) for _ in range(tail)),
            SIZE,
            random.choice([Exact(), Map(), Head(1), Select(0.3)]),
            random.choice(["auto", "auto", "off"]),
            Sampling(max_tokens=max_tokens),
        )

    def _impossible(self, random: Random) -> str:
        request = self._request(random, [], random.randint(1, 9), (NUM_BLOCKS + random.randint(1, 20)) * SIZE)
        started = time.thread_time()  # not wall time: what else the machine does is not the engine's doing
        with pytest.raises(ContextTooLong):
            self._engine.generate(request, self._source)
        self.slowest_refusal = max(self.slowest_refusal, time.thread_time() - started)
        return "refused"


@pytest.mark.timeout(120)
def test_a_small_pool_serves_or_refuses_and_never_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    monkeypatch.setattr("memkv.engine.engine.ModelRunner", lambda model: runner)
    values = config(pool_bytes=NUM_BLOCKS * BLOCK_BYTES, queue_seconds=10.0, max_batch_tokens=256)
    engine = Engine(fake_model(), "float32", values, poison=True)
    clients = Clients(engine, 200, 20)
    threads = [threading.Thread(target=clients.run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        engine.check_integrity()
        time.sleep(0.02)
    assert clients.errors == []
    assert sum(clients.outcomes.values()) == 220
    assert clients.outcomes["refused"] == 20
    assert clients.slowest_refusal < 0.1
    assert clients.outcomes["length"] >= 60 and clients.outcomes["cancelled"] >= 20
    blocks = engine.stats().lanes[0].blocks
    assert blocks.pinned == blocks.private == 0
    assert blocks.free + blocks.cached == NUM_BLOCKS
    engine.close()
    engine.check_integrity()
