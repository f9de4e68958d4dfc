"""What is evaluated: memkv's own policies on its engine, and peers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from memkv.engine.engine import Engine
from memkv.engine.generation import Generation, GenerationResult
from memkv.engine.request import GenerateRequest, Reuse
from memkv.engine.residency import ChunkRef
from memkv.engine.reuse import BlockMass, Exact, LookRequest, MappedChunk, ReusePolicy, Select, parse_policy
from memkv.engine.sampler import Sampling
from memkv.errors import BadRequestError
from memkv.eval.peers import Peer
from memkv.eval.prompts import Prompt
from memkv.kv.chunk import ChunkKV

FULL = "full"


class NoSource:
    """A KVSource that holds nothing: what is evaluated is computed here and stays in the pool."""

    def read(self, ref: ChunkRef) -> ChunkKV | None:
        return None

    def write(self, ref: ChunkRef, kv: ChunkKV) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy, a full prefill or a peer."""

    name: str
    policy: ReusePolicy = field(default_factory=Exact)
    reuse: Reuse = "auto"
    peer: Peer | None = None


def parse_subject(text: str) -> Subject:
    """A policy's name, `full`, `select+heads:r`, or a peer: `cacheblend:r`, `alone`, `temperature:t`.

    Raises `BadRequestError`.
    """
    name, _, parameter = text.partition(":")
    if text == FULL:
        return Subject(FULL, reuse="off")
    if text == "alone":
        return Subject(text, peer=Peer(behind_context=False))
    if name == "cacheblend":
        return Subject(text, peer=Peer(share=_fraction(text, parameter or "0.15")))
    if name == "select+heads":
        return Subject(text, Select(_fraction(text, parameter or "0.15"), heads=True))
    if name == "temperature":
        return Subject(text, peer=Peer(temperature=_fraction(text, parameter or "0.9")))
    policy = parse_policy(text)
    return Subject(policy.name, policy)


def _fraction(text: str, parameter: str) -> float:
    try:
        value = float(parameter)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1.0:
        name = text.partition(":")[0]
        raise BadRequestError(f"{text!r} is not possible", hint=f"a number up to 1, such as {name}:0.5")
    return value


@dataclass(frozen=True, slots=True)
class Scored:
    """Attributes:
    logits: [len(gold_ids), vocab_size].
    fresh_tokens: of the chunks.
    """

    logits: Tensor
    fresh_tokens: int


class _Recording(ReusePolicy):
    """A policy that remembers what it named, and otherwise is the one that it was made of."""

    def __init__(self, policy: ReusePolicy) -> None:
        self._policy = policy
        self.found: list[list[int]] | None = None

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def look(self) -> LookRequest | None:
        return self._policy.look

    def max_fresh_blocks(self, mapped: Sequence[MappedChunk]) -> int:
        return self._policy.max_fresh_blocks(mapped)

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        self.found = self._policy.fresh_blocks(mapped, look)
        return self.found


class EngineSubjects:
    """Scores the gold answers of some prompts under many policies, as many in a batch as the engine takes.

    A policy that looks must not see the gold answer: it looks in a pass of its own, whose question stands
    alone, and the blocks that it named are then computed in the pass that is scored.
    """

    def __init__(self, engine: Engine, prefix: ChunkRef, context: ChunkRef, block_size: int) -> None:
        self._engine = engine
        self._prefix = prefix
        self._context = context
        self._block_size = block_size
        self._source = NoSource()

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Prefills every chunk that is not resident."""
        refs = {chunk.input_key: chunk for prompt in prompts for chunk in prompt.chunks}
        self._engine.prefill(self._context, refs.values(), self._source, block_size=self._block_size)

    def scores(self, prompts: Sequence[Prompt], subjects: Sequence[Subject]) -> list[list[Scored]]:
        """For each prompt, in order, one for each subject."""
        looked = [[self._look(prompt, subject) for subject in subjects] for prompt in prompts]
        waiting: list[list[Generation]] = []
        for prompt, looks in zip(prompts, looked, strict=True):
            resolved = [
                subject if look is None else _resolve(subject, *look)
                for subject, look in zip(subjects, looks, strict=True)
            ]
            waiting.append([self._submit(prompt, subject, scored=True) for subject in resolved])
        return [
            [_scored(prompt, generation.result()) for generation in row]
            for prompt, row in zip(prompts, waiting, strict=True)
        ]

    def answer(self, prompt: Prompt, subject: Subject, max_tokens: int) -> Generation:
        """Greedy; ends early where the model ends."""
        return self._submit(prompt, subject, max_tokens=max_tokens)

    def ttft_ms(self, prompt: Prompt, subject: Subject) -> float:
        """From the request to the first token; chunks resident, nothing else running."""
        return self._submit(prompt, subject).result().timings.ttft_ms

    def _look(self, prompt: Prompt, subject: Subject) -> tuple[_Recording, Generation] | None:
        if subject.policy.look is None or subject.reuse == "off":
            return None
        recording = _Recording(subject.policy)
        return recording, self._submit(prompt, replace(subject, policy=recording))

    def _submit(
        self, prompt: Prompt, subject: Subject, *, scored: bool = False, max_tokens: int = 1
    ) -> Generation:
        gold = prompt.gold_ids[:-1] if scored else ()
        request = GenerateRequest(
            prefix=self._prefix,
            chunks=prompt.chunks,
            tail_ids=(*prompt.tail_ids, *gold),
            block_size=self._block_size,
            policy=subject.policy,
            reuse=subject.reuse,
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
            keep_logits=len(prompt.gold_ids) if scored else 0,
            queue_seconds=3600.0,
            context=self._context,
        )
        return self._engine.generate(request, self._source)


@dataclass(frozen=True, slots=True)
class _Fixed(ReusePolicy):
    """Blocks that were named before."""

    blocks: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        return "fixed"

    def fresh_blocks(self, mapped: Sequence[MappedChunk], look: BlockMass | None = None) -> list[list[int]]:
        return [list(indices) for indices in self.blocks]


def _resolve(subject: Subject, recording: _Recording, generation: Generation) -> Subject:
    generation.result()
    assert recording.found is not None, "bug: a policy that looks was not asked for blocks"
    return replace(subject, policy=_Fixed(tuple(map(tuple, recording.found))))


def _scored(prompt: Prompt, result: GenerationResult) -> Scored:
    assert result.logits is not None, "bug: logits were asked for"
    tail = len(prompt.tail_ids) + len(prompt.gold_ids) - 1
    fresh = min(result.usage.prefilled_tokens - tail, prompt.chunk_tokens)  # the prefix is nobody's chunk
    return Scored(result.logits[: len(prompt.gold_ids)], fresh)
