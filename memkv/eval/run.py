"""An evaluation: the same prompts under every policy and under a full prefill, compared token by token.

tasks ─► prompts ─► groups:  prefill chunks ─► full, policies, peers (one batch) ─► scores ─► rows
                    a few:   one request at a time                              ─► time to first token
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import msgspec
import torch

from memkv.config import Config
from memkv.engine.engine import Engine
from memkv.engine.environment import cpu_name, versions
from memkv.errors import BadRequestError
from memkv.eval.peers import PrivateCopies
from memkv.eval.prompts import Form, Prompt, PromptMaker
from memkv.eval.scores import Score, f1, rouge_l, score
from memkv.eval.statistics import bootstrap
from memkv.eval.study import Row, Study
from memkv.eval.subjects import FULL, EngineSubjects, Scored, Subject, parse_subject
from memkv.eval.tasks import Task
from memkv.memory.collections import fingerprint_of, template_of
from memkv.memory.parts import load_embedder, load_language_model
from memkv.text.tokenizer import TextTokenizer

Tell = Callable[[str], None]
_KEEP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is evaluated.

    Attributes:
        subjects: policies and peers; a full prefill is always among them.
        timed: so many prompts, the first of them, are also answered one by one for the time to first token.
        answer_tokens: greedy answers of at most so many tokens are compared with the gold ones by F1 and
            ROUGE-L; 0 writes none.
        group: prompts in one batch.
        scored: whether quality is measured; without, only times are.
        kinds: of tasks that are asked; empty: all.
        questions: at most so many are asked, the first ones; 0: all.
    """

    subjects: tuple[Subject, ...]
    form: Form = field(default_factory=Form)
    timed: int = 3
    answer_tokens: int = 0
    group: int = 1
    scored: bool = True
    kinds: tuple[str, ...] = ()
    questions: int = 0


def run_evaluation(
    config: Config,
    tasks: Sequence[Task],
    data: str,
    plan: Plan,
    tell: Tell = lambda words: None,
    keep: Callable[[Study], None] = lambda study: None,
) -> Study:
    """Measures every policy on every task, or on those of the kinds that the plan names.

    Args:
        tasks: those that are not asked still serve as distractors.
        data: what the tasks are, for the record.
        tell: is told what is being done, and what could not be.
        keep: is given what was found so far, now and then.

    Raises:
        BadRequestError: there is nothing to evaluate, or no task fits into the model's context.
        MemKVError: whatever stops an engine from working.
    """
    if not plan.subjects:
        raise BadRequestError("no policy to evaluate", hint="name at least one, for example map")
    if not any(not plan.kinds or task.kind in plan.kinds for task in tasks):
        raise BadRequestError("no task of the kinds asked for", hint="leave the kinds out to ask all")
    tell(f"loading {config.model.model}")
    model = load_language_model(config)
    embedder = load_embedder(config)
    tokenizer = TextTokenizer(model.tokenizer)
    template = template_of(tokenizer, plan.form.system_prompt)
    tell("cutting and embedding contexts")
    room = max(0, model.spec.max_context - plan.answer_tokens)
    maker = PromptMaker(tasks, tokenizer, template, embedder, plan.form, room)
    asked = [task for task in tasks if not plan.kinds or task.kind in plan.kinds]
    asked = asked[: plan.questions or None]
    prompts = list(_that_fit(maker, asked, tell))
    started = time.perf_counter()
    alone = replace(config.engine, continuation_share=0.0)  # no answer leaves anything to the next one
    with Engine(model, kv_dtype=config.kv.dtype, config=alone) as engine:
        layout = engine.layout(config.kv.block_size)
        run = _Run(
            EngineSubjects(engine, maker.prefix, maker.context, config.kv.block_size),
            PrivateCopies(model, layout),
            layout.bytes_per_token,
            tokenizer,
            plan,
            tell,
        )
        gpu = torch.device(model.device).type == "cuda"
        study = Study(
            model=model.name,
            fingerprint_digest=fingerprint_of(model, layout, maker.context.token_ids).digest,
            data=data,
            form=asdict(plan.form),
            dtype=model.dtype,
            kv_dtype=layout.dtype,
            block_size=layout.block_size,
            prefix_tokens=maker.prefix.num_tokens,
            chunk_tokens_mean=statistics.mean(prompt.chunk_tokens for prompt in prompts),
            device=torch.cuda.get_device_name(model.device) if gpu else cpu_name(),
            versions=versions(),
            seconds=0.0,
            rows=[],
            left_out=len(asked) - len(prompts),
        )
        kept = time.perf_counter()
        for _ in run.steps(prompts, maker):
            if time.perf_counter() - kept > _KEEP_SECONDS:
                keep(_so_far(study, run, started))
                kept = time.perf_counter()
    return _so_far(study, run, started)


def _so_far(study: Study, run: _Run, started: float) -> Study:
    return msgspec.structs.replace(study, rows=run.rows(), seconds=time.perf_counter() - started)


def _that_fit(maker: PromptMaker, tasks: Sequence[Task], tell: Tell) -> Iterator[Prompt]:
    """Prompts that say something: a single chunk is exact under every policy."""
    left_out: BadRequestError | None = None
    found = 0
    for task in tasks:
        try:
            prompt = maker.make(task)
            if len(prompt.chunks) < 2:
                raise BadRequestError(
                    f"task {task.id} has one chunk, which every policy maps exactly",
                    hint="raise --length, or lower --chunk-tokens",
                )
        except BadRequestError as error:
            tell(f"left out: {error.detail}")
            left_out = error
            continue
        found += 1
        yield prompt
    if not found and left_out is not None:
        raise left_out


@dataclass(slots=True)
class _Measured:
    """What was found of one policy on tasks of one kind."""

    scores: list[Score] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    mapped_tokens: list[int] = field(default_factory=list)
    private_tokens: list[int] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    rouge_l: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)


class _Run:
    def __init__(
        self,
        engine: EngineSubjects,
        copies: PrivateCopies,
        bytes_per_token: int,
        tokenizer: TextTokenizer,
        plan: Plan,
        tell: Tell,
    ) -> None:
        self._engine = engine
        self._copies = copies
        self._bytes_per_token = bytes_per_token
        self._tokenizer = tokenizer
        self._plan = plan
        self._tell = tell
        self._checkable: set[str] = set()  # kinds whose every task has one right answer
        self._found: dict[tuple[str, str], _Measured] = defaultdict(_Measured)  # by kind and policy

    def steps(self, prompts: Sequence[Prompt], maker: PromptMaker) -> Iterator[None]:
        """Measures; each time it yields, what is found is whole."""
        named = {subject.name: subject for subject in (parse_subject(FULL), *self._plan.subjects)}
        subjects = list(named.values())  # each once, the full prefill first
        own = [subject for subject in subjects if subject.peer is None]
        peers = [subject for subject in subjects if subject.peer is not None]
        free = {prompt.task.kind for prompt in prompts if not prompt.task.answer_start}
        self._checkable = {prompt.task.kind for prompt in prompts} - free
        for kind in dict.fromkeys(prompt.task.kind for prompt in prompts):
            self._time([prompt for prompt in prompts if prompt.task.kind == kind][: self._plan.timed], own)
            yield
        if self._plan.scored:
            for start in range(0, len(prompts), self._plan.group):
                self._tell(f"question {start + 1} of {len(prompts)}")
                self._score(prompts[start : start + self._plan.group], maker, own, peers)
                yield

    def rows(self) -> list[Row]:
        """Of what was found so far."""
        return [self._row(kind, policy, found) for (kind, policy), found in self._found.items()]

    def _time(self, prompts: Sequence[Prompt], subjects: Sequence[Subject]) -> None:
        """One request at a time, the policies in turn; the first prompt goes round once more, untimed."""
        for number, prompt in enumerate((*prompts[:1], *prompts)):
            self._engine.prepare([prompt])
            for subject in subjects:
                self._tell(f"first token, round {number} of {len(prompts)}: {subject.name}")
                taken = self._engine.ttft_ms(prompt, subject)
                if number:
                    self._found[prompt.task.kind, subject.name].ttft_ms.append(taken)

    def _score(
        self,
        prompts: Sequence[Prompt],
        maker: PromptMaker,
        own: Sequence[Subject],
        peers: Sequence[Subject],
    ) -> None:
        self._engine.prepare(prompts)
        for prompt, scored in zip(prompts, self._engine.scores(prompts, own), strict=True):
            full = scored[0]
            for subject, one in zip(own, scored, strict=True):
                self._note(prompt, subject.name, one, full)
            later = prompt.chunk_tokens - prompt.chunks[0].num_tokens
            ways = [subject.peer for subject in peers if subject.peer is not None]
            logits = self._copies.logits(prompt, maker.prefix, ways) if ways else []
            for subject, way, row in zip(peers, ways, logits, strict=True):
                self._note(prompt, subject.name, Scored(row, round(way.share * later)), full)
        if self._plan.answer_tokens:
            self._answer(prompts, own)

    def _note(self, prompt: Prompt, policy: str, scored: Scored, full: Scored) -> None:
        found = self._found[prompt.task.kind, policy]
        found.scores.append(score(scored.logits, full.logits, prompt.gold_ids))
        found.fresh.append(scored.fresh_tokens / prompt.chunk_tokens)
        found.mapped_tokens.append(prompt.chunk_tokens - scored.fresh_tokens)
        found.private_tokens.append(scored.fresh_tokens + len(prompt.tail_ids))

    def _answer(self, prompts: Sequence[Prompt], subjects: Sequence[Subject]) -> None:
        waiting = [
            (prompt, subject, self._engine.answer(prompt, subject, self._plan.answer_tokens))
            for prompt in prompts
            for subject in subjects
        ]
        for prompt, subject, generation in waiting:
            text = self._tokenizer.decode(generation.result().token_ids)
            found = self._found[prompt.task.kind, subject.name]
            found.f1.append(f1(text, prompt.task.answers))
            found.rouge_l.append(rouge_l(text, prompt.task.answers))

    def _row(self, kind: str, policy: str, found: _Measured) -> Row:
        full = self._found[kind, FULL]
        kl = bootstrap([one.kl for one in found.scores] or [0.0])
        dnll = bootstrap([one.dnll for one in found.scores] or [0.0])
        ttft = statistics.median(found.ttft_ms) if found.ttft_ms else None
        full_ttft = statistics.median(full.ttft_ms) if full.ttft_ms else None
        return Row(
            kind=kind,
            policy=policy,
            questions=len(found.scores),
            checkable=kind in self._checkable,
            fresh=_mean(found.fresh),
            endpoint="kl",
            value=kl.mean,
            low=kl.low,
            high=kl.high,
            accuracy=_mean([one.right for one in found.scores]),
            accuracy_full=_mean([one.right_full for one in found.scores]),
            agreement=_mean([one.agreement for one in found.scores]),
            nll_full=_mean([one.nll_full for one in found.scores]),
            kl=kl.mean,
            dnll=dnll.mean,
            dnll_low=dnll.low,
            dnll_high=dnll.high,
            mapped_bytes=_mean(found.mapped_tokens) * self._bytes_per_token,
            private_bytes=_mean(found.private_tokens) * self._bytes_per_token,
            f1=statistics.mean(found.f1) if found.f1 else None,
            f1_full=statistics.mean(full.f1) if full.f1 else None,
            rouge_l=statistics.mean(found.rouge_l) if found.rouge_l else None,
            rouge_l_full=statistics.mean(full.rouge_l) if full.rouge_l else None,
            ttft_ms=ttft,
            ttft_speedup=full_ttft / ttft if ttft and full_ttft else None,
        )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
