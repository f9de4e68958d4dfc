"""What commands say, word by word."""

from __future__ import annotations

import pytest

from memkv.cli.jobs import _show
from memkv.cli.output import Output, counted
from memkv.cli.progress import progress_text
from memkv.cli.query import usage_line
from memkv.errors import ConflictError, EmptyDocument
from memkv.wire import (
    FailedItem,
    Job,
    JobCounts,
    JobProgress,
    QueryResponse,
    ReuseReport,
    Timings,
    Usage,
    problem_for,
)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (JobProgress(done=1_500, total=12_000, unit="bytes"), "1.5 kB of 12.0 kB"),
        (JobProgress(done=1, total=3, unit="documents"), "1 of 3 documents"),
        (JobProgress(), "0 of 0"),
    ],
)
def test_progress_is_told_in_its_unit(progress: JobProgress, text: str) -> None:
    assert progress_text(progress) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 chunks"), (1, "1 chunk"), (2, "2 chunks")])
def test_a_count_agrees_with_its_noun(count: int, text: str) -> None:
    assert counted(count, "chunk") == text


def test_the_usage_line_counts_one_of_a_thing_as_one() -> None:
    response = QueryResponse(
        id="qry_1",
        answer="yes",
        finish_reason="length",
        citations=[],
        chunks=[],
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        reuse=ReuseReport(mode="auto", policy="map", healed_chunks=1),
        timings=Timings(total_ms=1000.0),
    )
    assert usage_line(response).split(" · ") == [
        "1 prompt token",
        "0 cached",
        "0 prefilled",
        "reuse auto, policy map",
        "first token 0 ms",
        "1 token in 1.0 s",
        "1 chunk healed",
    ]


def test_a_job_names_the_documents_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    problems = [
        problem_for(EmptyDocument("it holds no text")),
        problem_for(ConflictError("it was cancelled")),
    ]
    job = Job(
        id="job_1",
        kind="ingest",
        collection="c",
        status="partial",
        progress=JobProgress(),
        counts=JobCounts(),
        errors=problems,
        failed=[FailedItem(document_id="doc_1", problem=problems[0])],
        attempts=1,
        created_at="",
    )
    _show(job, Output())
    told = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["failed", "doc_1: it holds no text"] in told
    assert ["error", "it was cancelled"] in told
    assert ["error", "it holds no text"] not in told, "once is enough"
