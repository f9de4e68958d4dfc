"""What a pass through the model does to the sequences and chunks of a lane.

generate   build the batch, run it, sample: submitted to the device, not waited for
collect    wait for the tokens, hand them out                        the host's time in between is free
fill       build the batch, run it
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
from torch import Tensor

from memkv.engine.batch import Batch, Part
from memkv.engine.kv_cache import KVCache
from memkv.engine.model_runner import ModelRunner
from memkv.engine.pace import Pace
from memkv.engine.prefill import ChunkFill
from memkv.engine.sampler import sample
from memkv.engine.sequence import Sequence
from memkv.engine.staging import to_device
from memkv.engine.stats import LaneCounters
from memkv.engine.stopwatch import Stopwatch
from memkv.engine.work import Agenda, Work
from memkv.errors import ModelError

# Of prompts, in a step that answers share. On a CPU thread prompts of SmolLM2 took 12 % longer in parts of 64
# tokens (163 ms) than in one, and 64 % longer in parts of 32 (119 ms): every part reads all the weights.
_LEAST_PROMPT_TOKENS = 64


class Steps:
    """The passes of one lane. Belongs to the engine's thread.

    Args:
        agenda: takes what follows from a step.
        accept: takes a sampled token.
        choose: called when all of a look was made.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv_cache: KVCache,
        agenda: Agenda,
        *,
        accept: Callable[[Sequence, int], None],
        choose: Callable[[Sequence], None],
    ) -> None:
        self.counters = LaneCounters()
        self.pace = Pace()  # of chunks
        self.prompt_pace = Pace(_LEAST_PROMPT_TOKENS)
        self._runner = runner
        self._kv_cache = kv_cache
        self._agenda = agenda
        self._accept = accept
        self._choose = choose
        self._sampled: tuple[list[Sequence], Tensor] | None = None  # what `collect` waits for
        self._watched: deque[tuple[Pace, int, Stopwatch]] = deque()  # steps under way

    def generate(self, parts: list[Part[Sequence]]) -> None:
        """Submits a step of generations."""
        num_prompt = sum(part.count for part in parts if not part.owner.is_answering)
        batch = Batch.build(parts)
        watch = Stopwatch(self._runner.device)
        result = self._runner.run(batch, self._kv_cache)
        self.counters.steps += 1
        masses = iter(result.masses)
        done: list[tuple[Sequence, int]] = []  # with the row of logits behind its last token
        rows = itertools.accumulate((part.num_logits for part in parts), initial=0)
        for part, row in zip(parts, rows, strict=False):
            sequence, completes, positions = part.owner, part.completes, part.positions
            answering = sequence.is_answering
            part.run.done += part.count
            if sequence.look is not None:
                self._look(part, masses, completes)
                continue
            self.counters.prefilled_tokens += 0 if answering else part.count
            if part.num_logits:
                assert result.logits is not None
                end = row + part.num_logits
                sequence.keep(result.logits[row:end], positions[-part.num_logits :])
                if completes:
                    done.append((sequence, end - 1))
        if done:
            assert result.logits is not None
            self._sample(done, result.logits)
        watch.stop()
        if num_prompt >= _LEAST_PROMPT_TOKENS:
            self._watch(self.prompt_pace, num_prompt, watch)

    def collect(self) -> Work | None:
        """What waits for the tokens of the last step, where it sampled any."""
        if self._sampled is None:
            return None
        (sequences, tokens), self._sampled = self._sampled, None
        return Work(partial(self._hand_out, sequences, tokens), lambda: sequences)

    def fill(self, parts: list[Part[ChunkFill]]) -> list[ChunkFill]:
        """Submits a step of chunks. Returns those that it completes."""
        batch = Batch.build(parts)
        watch = Stopwatch(self._runner.device)
        self._runner.run(batch, self._kv_cache)
        watch.stop()
        self._watch(self.pace, batch.num_tokens, watch)
        self.counters.fill_steps += 1
        self.counters.filled_tokens += batch.num_tokens
        completed = [part.owner for part in parts if part.completes]
        for part in parts:
            part.run.done += part.count
        return completed

    def _look(self, part: Part[Sequence], masses: Iterator[Tensor], completes: bool) -> None:
        """Some or all of a looking pass was made."""
        sequence = part.owner
        self.counters.looked_tokens += part.count
        if part.look_rows:
            assert sequence.look is not None
            sequence.look.add(next(masses))
        if completes:
            self._agenda.follow(Work(partial(self._choose, sequence), partial(_only, sequence)))

    def _sample(self, done: list[tuple[Sequence, int]], logits: Tensor) -> None:
        sequences = [sequence for sequence, _ in done]
        if len(done) < len(logits):
            (rows,) = to_device([np.array([row for _, row in done])], logits.device)
            logits = logits[rows]
        tokens = sample(
            logits,
            [sequence.request.sampling for sequence in sequences],
            [sequence.random for sequence in sequences],
        )
        self._sampled = sequences, tokens

    def _hand_out(self, sequences: Iterable[Sequence], tokens: Tensor) -> None:
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            if not sequence.is_finished:  # cancelled meanwhile
                accept = partial(self._accept_finite, sequence, token)
                self._agenda.follow(Work(accept, partial(_only, sequence)))

    def _accept_finite(self, sequence: Sequence, token: int) -> None:
        if token < 0:
            raise ModelError(
                "the model's logits are not finite numbers", hint="load the weights in a wider dtype"
            )
        self.counters.generated_tokens += 1
        self._accept(sequence, token)

    def _watch(self, pace: Pace, num_tokens: int, watch: Stopwatch) -> None:
        """Notes how long steps took. Not more than one step is submitted ahead of the device."""
        self._watched.append((pace, num_tokens, watch))
        while self._watched and (len(self._watched) > 1 or self._watched[0][2].is_over):
            pace, num_tokens, watch = self._watched.popleft()
            pace.observe(num_tokens, watch.seconds())


def _only(sequence: Sequence) -> tuple[Sequence]:
    return (sequence,)
