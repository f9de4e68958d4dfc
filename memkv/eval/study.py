"""What an evaluation finds, as it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from memkv.errors import BadRequestError
from memkv.store.rows import GateRow

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]

_HINT = "give a file that `memkv eval run` wrote"
_ROUNDING = 1e-6  # nats


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on tasks of one kind, against a full prefill of the same prompts by the same engine.

    `endpoint`, `value`, `low` and `high` repeat the first of the two primary endpoints, the KL divergence.

    Attributes:
        fresh: share of the chunks' tokens that were computed for the question.
        checkable: whether an answer is right or wrong word for word; otherwise `accuracy` says nothing.
        accuracy: share of the questions that greedy decoding answers with the gold answer's own words, from
            their first.
        accuracy_full: the same of a full prefill.
        agreement: share of the gold tokens for which both have the same most likely one.
        nll_full: negative log-likelihood of the gold answer under a full prefill, nats a token.
        kl, dnll: nats a token of the gold answer, with 95 % intervals.
        f1, f1_full, rouge_l, rouge_l_full: of greedy answers, over words; None where no answers were written.
        ttft_ms: median time to the first token, chunks resident, looking pass included, retrieval not; None
            where it was not timed.
        ttft_speedup: a full prefill's time divided by it.
        mapped_bytes, private_bytes: KV read where it lay and KV written for one question; means.
    """

    kind: Name
    policy: Name
    questions: Annotated[int, Meta(ge=0, le=10_000_000)]
    checkable: bool
    fresh: Share
    endpoint: str
    value: float
    low: float
    high: float
    accuracy: Share
    accuracy_full: Share
    agreement: float
    kl: float
    dnll: float
    dnll_low: float
    dnll_high: float
    mapped_bytes: float
    private_bytes: float
    nll_full: float | None = None
    f1: float | None = None
    f1_full: float | None = None
    rouge_l: float | None = None
    rouge_l_full: float | None = None
    ttft_ms: float | None = None
    ttft_speedup: float | None = None


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    fingerprint_digest: of a collection whose chunks would be prefilled as these were.
    data: what was asked: a file's name and digest, or how tasks were generated.
    form: how prompts were made.
    device: what computed.
    left_out: tasks that were not asked, for want of room or of a second chunk; None where that was not kept.
    """

    model: str
    fingerprint_digest: Name
    data: Name
    form: dict[str, int | str]
    dtype: str
    kv_dtype: str
    block_size: int
    prefix_tokens: int
    chunk_tokens_mean: Annotated[float, Meta(ge=0.0)]
    device: str
    versions: dict[str, str]
    seconds: float
    rows: list[Row]
    left_out: int | None = None

    def gate_rows(self) -> list[GateRow]:
        """What the gate goes by: the policies whose quality was measured.

        `length` is what prompts really had where they had room for another chunk.

        Raises `BadRequestError` where there is none, or where the prompts were not those of collections.
        """
        if self.form.get("primer") == "stored" or self.form.get("order") != "retrieved":
            raise BadRequestError(
                "these prompts are not made as a server makes them",
                hint="measure with --order retrieved, and without --primer stored",
            )
        chunk_tokens = self.form.get("chunk_tokens")
        if not isinstance(chunk_tokens, int) or not 16 <= chunk_tokens <= 4096:
            raise BadRequestError(f"no collection has chunks of {chunk_tokens} tokens", hint=_HINT)
        length = self.form.get("length")
        if not isinstance(length, int) or not 16 <= length < 2**31:
            raise BadRequestError(f"no prompt has chunks of {length} tokens together", hint=_HINT)
        if self.chunk_tokens_mean + chunk_tokens <= length:  # there were too few contexts to fill prompts
            length = int(self.chunk_tokens_mean)
        rows = [
            GateRow(
                data=self.data,
                chunk_tokens=chunk_tokens,
                length=length,
                kind=row.kind,
                policy=row.policy,
                questions=row.questions,
                fresh=row.fresh,
                dnll_high=row.dnll_high,
                accuracy_full=row.accuracy_full if row.checkable else 1.0,
            )
            for row in self.rows
            if row.questions and row.policy != "full"
        ]
        if not rows:
            raise BadRequestError("no policy was measured to go by", hint="name some with --policy")
        return rows


def read_study(path: Path) -> Study:
    """Raises `BadRequestError`."""
    try:
        study = msgspec.json.decode(path.read_bytes(), type=Study)
    except OSError as error:
        raise BadRequestError(f"{path} cannot be read: {error.strerror or error}", hint=_HINT) from None
    except msgspec.DecodeError as error:
        raise _no_result(path, str(error)) from None
    if not study.rows:
        raise _no_result(path, "it has no rows")
    names = [(row.kind, row.policy) for row in study.rows]
    if len(set(names)) < len(names):
        raise _no_result(path, "a policy stands there twice for the same tasks")
    for row in study.rows:
        if not (_between(row.low, row.value, row.high) and _between(row.dnll_low, row.dnll, row.dnll_high)):
            raise _no_result(path, f"an interval of {row.policy} does not hold its mean")
    return study


def _between(low: float, mean: float, high: float) -> bool:
    return low - _ROUNDING <= mean <= high + _ROUNDING


def _no_result(path: Path, why: str) -> BadRequestError:
    return BadRequestError(f"{path} is no result of an evaluation: {why}", hint=_HINT)
