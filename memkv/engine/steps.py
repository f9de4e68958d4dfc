"""What a pass through the model does to the sequences and chunks of a lane.

generate   build the batch, run it, sample: submitted to the device, not waited for
collect    wait for the tokens, hand them out                        the host's time in between is free
fill       build the batch, run it

Where a device works on its own, the next step of an answer is submitted before the token that it begins with
has come to the host: the device finds it where it was sampled. What turns out to stand behind the end of an
answer is not handed out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from memkv.engine.batch import Batch, Part
from memkv.engine.kv_cache import KVCache
from memkv.engine.model_runner import ModelRunner
from memkv.engine.pace import Pace
from memkv.engine.prefill import ChunkFill
from memkv.engine.residency import Residency
from memkv.engine.sampler import sample
from memkv.engine.sequence import Sequence
from memkv.engine.staging import to_device, to_host
from memkv.engine.stats import LaneCounters
from memkv.engine.stopwatch import Stopwatch
from memkv.engine.timeline import Timeline
from memkv.engine.token_run import TokenRun
from memkv.engine.work import Agenda, Work
from memkv.errors import ModelError

# Of prompts, in a step that answers share. On a CPU thread prompts of SmolLM2 took 12 % longer in parts of 64
# tokens (163 ms) than in one, and 64 % longer in parts of 32 (119 ms): every part reads all the weights.
_LEAST_PROMPT_TOKENS = 64


class Steps:
    """The passes of one lane. Belongs to the engine's thread.

    Args:
        residency: gives blocks to the tokens of answers.
        agenda: takes what follows from a step.
        accept: takes a sampled token.
        choose: called when all of a look was made.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv_cache: KVCache,
        residency: Residency,
        agenda: Agenda,
        *,
        accept: Callable[[Sequence, int], None],
        choose: Callable[[Sequence], None],
    ) -> None:
        self.counters = LaneCounters()
        self.timeline = Timeline()
        self.pace = Pace()  # of chunks
        self.prompt_pace = Pace(_LEAST_PROMPT_TOKENS)
        self._runner = runner
        self._kv_cache = kv_cache
        self._residency = residency
        self._agenda = agenda
        self._accept = accept
        self._choose = choose
        self._sampled: deque[_Sampled] = deque()  # what `collect` waits for
        self._watched: deque[tuple[Pace, int, Stopwatch]] = deque()  # steps under way

    def generate(self, parts: list[Part[Sequence]]) -> None:
        """Submits a step of generations."""
        num_prompt = sum(part.count for part in parts if not part.owner.is_answering)
        looks = any(part.look is not None for part in parts)
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
        self.timeline.watch("looking pass" if looks else "fresh pass" if num_prompt else "token", watch)
        if num_prompt >= _LEAST_PROMPT_TOKENS:
            self._watch(self.prompt_pace, num_prompt, watch)

    def collect(self, *, is_last: bool) -> Work | None:
        """What waits for the oldest tokens that were not collected; None without any.

        Args:
            is_last: False where one more step of generations was just submitted: then one step's tokens may
                wait, if the device works on its own.
        """
        keep = 1 if self._runner.runs_ahead and not is_last else 0
        if len(self._sampled) <= keep and not (self._sampled and self._sampled[0].is_here):
            return None
        sampled = self._sampled.popleft()
        return Work(partial(self._hand_out, sampled), lambda: [sequence for sequence, _ in sampled.runs])

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
            [sequence.number for sequence in sequences],
        )
        for row, sequence in enumerate(sequences):
            sequence.sampled(tokens, row)
        runs = [(sequence, sequence.run) for sequence in sequences]
        self._sampled.append(_Sampled(runs, to_host(tokens), Stopwatch(self._runner.device)))
        if self._runner.runs_ahead:
            for sequence in sequences:
                sequence.go_ahead(self._residency)

    def _hand_out(self, sampled: _Sampled) -> None:
        sampled.watch.wait()
        for (sequence, run), token in zip(sampled.runs, sampled.tokens.tolist(), strict=True):
            accept = partial(self._accept_finite, sequence, run, token)
            self._agenda.follow(Work(accept, partial(_only, sequence)))

    def _accept_finite(self, sequence: Sequence, run: TokenRun | None, token: int) -> None:
        if sequence.is_finished or sequence.run is not run:  # cancelled meanwhile, or interrupted
            return
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


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Tokens on their way to the host, the sequences they belong to, and the runs that these had then."""

    runs: list[tuple[Sequence, TokenRun | None]]
    tokens: Tensor
    watch: Stopwatch

    @property
    def is_here(self) -> bool:
        return self.watch.is_over


def _only(sequence: Sequence) -> tuple[Sequence]:
    return (sequence,)
