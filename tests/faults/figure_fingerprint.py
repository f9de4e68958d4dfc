"""G5: one input of the fingerprint changes; no block made before it is used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

from fault_life import NAME
from fault_model import (
    FakeRunner,
    document_text,
    fake_model,
    fake_models,
    fault_config,
    notes_of,
    question_for,
)
from fault_place import Outcome, Place, Stage

from memkv.errors import FingerprintMismatch
from memkv.kv.fingerprint import Fingerprint
from memkv.memory import Memory, collections
from memkv.wire import CollectionCreate, DocumentCreate, QueryRequest, StoreCollection

_NOTES = range(20)


def matrix(place: Place, *, questions: int = 20) -> Outcome:
    outcome = Outcome()
    names = [each.name for each in fields(Fingerprint)]
    with place.store() as stage:
        for name in names:
            outcome.violations += [f"{name}: {each}" for each in _run(stage, name, "", questions)]
            outcome.runs += questions
    outcome.notes["fields"] = len(names)
    with place.store() as stage:
        for name in names:
            found = _run(stage, name, f"fingerprint_without:{name}", min(questions, 2))
            outcome.control_detected[name] = any("wrong answer" in each for each in found)
    return outcome


def _run(stage: Stage, name: str, weakness: str, questions: int) -> list[str]:
    result = stage.directory / "result"
    result.unlink(missing_ok=True)
    status = stage.nursery.run(
        "figure_fingerprint:change", weakness,
        data_dir=str(stage.directory / f"data-{name}"), url=None, result=str(result), field=name,
        questions=questions,
    )  # fmt: skip
    if status != 0:
        return [f"ended with {status}: {stage.nursery.last_words(500)}"]
    return json.loads(result.read_text())  # type: ignore[no-any-return]


# In the child


def change(data_dir: str, url: str | None, result: str, field: str, questions: int) -> None:
    """A memory, the same with one field changed, and the first again."""
    found: list[str] = []
    with fake_models(), Memory.open(fault_config(data_dir, url)) as memory:
        memory.create_collection(CollectionCreate(name=NAME))
        document = DocumentCreate(text=document_text(_NOTES), external_id="d")
        memory.ingest(NAME, [document], wait=60)
        found += [f"before: {each}" for each in _ask(memory, questions)]
    with fake_models(), _changed(field), Memory.open(fault_config(data_dir, url)) as memory:
        try:
            found += _ask(memory, questions)
            found.append("blocks of another fingerprint are served")
        except FingerprintMismatch as error:
            if not re.search(rf"\b{field}\b", error.detail):
                found.append(f"the refusal does not name the field: {error.detail}")
        if memory.store_stats().stale != [NAME]:
            found.append("stats do not show the stale collection")
        work = memory.reprefill(StoreCollection(collection=NAME))
        if work.job is None or memory.wait_job(work.job.id, 60).status != "succeeded":
            found.append("reprefill did not renew the collection")
        else:
            found += [f"renewed: {each}" for each in _ask(memory, questions)]
            if memory.store_stats().counters.get("published", 0) < len(_NOTES):
                found.append("reprefill kept old blocks")
    Path(result).write_text(json.dumps(found))


def _ask(memory: Memory, questions: int) -> list[str]:
    found = []
    for turn in range(questions):
        note = _NOTES[turn % len(_NOTES)]
        request = QueryRequest(query=question_for(note), collection=NAME, policy="map", top_k=2)
        response = memory.query(request)
        named = [number for chunk in response.chunks for number in notes_of(chunk.text)]
        if notes_of(response.answer) != named or note not in named:
            found.append(f"a wrong answer: {response.answer!r} for {named}")
    return found


@contextmanager
def _changed(field: str) -> Iterator[None]:
    """One field differs, and with it, as in life, all keys and values."""
    plain = collections.fingerprint_of

    def fingerprint(*arguments: object) -> Fingerprint:
        made = plain(*arguments)  # type: ignore[arg-type]
        value = getattr(made, field)
        other = value + 1 if isinstance(value, int | float) else f"other {value}"
        return replace(made, **{field: other})

    def runner(_: object) -> FakeRunner:
        return FakeRunner(fake_model(), salt=f"changed {field}")

    with (
        mock.patch("memkv.memory.collections.fingerprint_of", fingerprint),
        mock.patch("memkv.engine.engine.ModelRunner", runner),
    ):
        yield
