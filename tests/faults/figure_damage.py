"""G3 and G4: damaged block files and damaged index files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from fault_life import NAME, replace_bytes
from fault_model import document_text, fake_models, fault_config, notes_of, question_for
from fault_place import Outcome, Place, Stage

from memkv.memory import Memory
from memkv.store.rows import KVFileRow
from memkv.wire import CollectionCreate, DocumentCreate, QueryRequest, SearchRequest

_DOCUMENTS = 40  # of five chunks
_BITS, _PAGES, _LENGTHS, _SWAPS = "bits", "pages", "lengths", "swaps"


def damaged_blocks(
    place: Place, *, bits: int = 10_000, pages: int = 1_000, lengths: int = 1_000, swaps: int = 200
) -> Outcome:
    """Bits flipped, pages zeroed, files truncated or grown, sound files under another's name."""
    counts = {_BITS: bits, _PAGES: pages, _LENGTHS: lengths, _SWAPS: swaps}
    outcome = Outcome()
    with place.store() as stage:
        found = _in_child(stage, "blocks", "", counts)
    outcome.runs = sum(counts.values())
    outcome.violations = found["violations"]
    outcome.notes = {"healed": found["healed"], **counts}
    few = {kind: min(count, 40) for kind, count in counts.items()}
    with place.store() as stage:
        weak = _in_child(stage, "blocks", "no_verification", few)
    outcome.control_detected["no_verification"] = any("wrong answer" in each for each in weak["violations"])
    return outcome


def damaged_indexes(place: Place, *, files: int = 1_000) -> Outcome:
    """Flipped bits, zeroed pages, truncations, older files and those of another collection."""
    outcome = Outcome(runs=files)
    with place.store() as stage:
        found = _in_child(stage, "indexes", "", {"files": files})
    outcome.violations = found["violations"]
    outcome.notes = {"rebuilt": found["healed"]}
    with place.store() as stage:
        weak = _in_child(stage, "indexes", "unchecked_index", {"files": min(files, 60)})
    outcome.control_detected["unchecked_index"] = bool(weak["violations"])
    return outcome


def _in_child(stage: Stage, what: str, weakness: str, counts: dict[str, int]) -> dict:  # type: ignore[type-arg]
    result = stage.directory / "result"
    child = stage.nursery.start(
        f"figure_damage:{what}", weakness,
        data_dir=str(stage.data_dir), url=stage.url, result=str(result), counts=counts,
    )  # fmt: skip
    status = child.wait(3600)
    if status != 0:
        return {"violations": [f"ended with {status}: {stage.nursery.last_words(600)}"], "healed": 0}
    return json.loads(result.read_text())  # type: ignore[no-any-return]


# In the child


class _Corpus:
    """A memory whose every document is known, and the file of each of its chunks."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        memory.create_collection(CollectionCreate(name=NAME))
        self.random = random.Random(7)
        for number in range(_DOCUMENTS):
            notes = range(number * 5, number * 5 + 5)
            document = DocumentCreate(text=document_text(notes), external_id=f"d{number}")
            assert memory.ingest(NAME, [document], wait=60).documents[0].status == "ready"
        opened = memory._collections.by_name("default", NAME)
        self.keys = {}
        for number in range(_DOCUMENTS):
            row = memory._store.catalog.get_document("default", opened.row.id, f"d{number}")
            for chunk in memory._store.catalog.chunks_of("default", row.id):
                [note] = notes_of(chunk.text)
                self.keys[note] = chunk.input_key

    def row(self, note: int) -> KVFileRow | None:
        return self.memory._store.catalog.file_for("default", self.keys[note])

    def path(self, note: int) -> Path:
        row = self.row(note)
        assert row is not None, "a chunk without KV"
        return self.memory._store.chunks._directory.path(row)

    def ask(self, note: int) -> tuple[str, int]:
        """What is wrong with the answer, and the chunks that were healed for it."""
        self.memory._parts.engine.drop([self.keys[note]])
        response = self.memory.query(
            QueryRequest(query=question_for(note), collection=NAME, policy="map", top_k=1)
        )
        if notes_of(response.answer) != [note] or len(response.answer) != 5:
            return f"a wrong answer: {response.answer!r} for {note}", 0
        return "", response.reuse.healed_chunks


def blocks(data_dir: str, url: str | None, result: str, counts: dict[str, int]) -> None:
    violations: list[str] = []
    healed = 0
    with fake_models(), Memory.open(fault_config(data_dir, url)) as memory:
        corpus = _Corpus(memory)
        for kind, count in counts.items():
            for turn in range(count):
                note = (turn * 7) % (_DOCUMENTS * 5)
                undo = _DAMAGE[kind](corpus, note, turn)
                wrong, mended = corpus.ask(note)
                healed += mended
                if wrong or not mended:
                    violations.append(f"{kind} {turn}: {wrong or 'not noticed'}")
                    undo()
                if len(violations) > 100:
                    break
            memory._store.upkeep.purge_quarantine()
        memory._parts.engine.check_integrity()
        left = [problem for problem in memory.verify_store(full=True).problems if problem.kind != "orphan"]
        violations += [f"at the end: {problem.kind} {problem.detail}" for problem in left]
    Path(result).write_text(json.dumps({"violations": violations, "healed": healed}))


def _flip_bit(corpus: _Corpus, note: int, turn: int) -> Callable[[], None]:
    """Anywhere in the file: header, payload, slots that no token fills."""
    path = corpus.path(note)
    data = path.read_bytes()
    changed = bytearray(data)
    at = corpus.random.randrange(len(data) * 8)
    changed[at // 8] ^= 1 << at % 8
    replace_bytes(path, changed)
    return lambda: replace_bytes(path, data)


def _zero_page(corpus: _Corpus, note: int, turn: int) -> Callable[[], None]:
    path = corpus.path(note)
    data = path.read_bytes()
    at = corpus.random.randrange(-(-len(data) // 4096)) * 4096
    replace_bytes(path, data[:at] + bytes(len(data[at : at + 4096])) + data[at + 4096 :])
    return lambda: replace_bytes(path, data)


def _change_length(corpus: _Corpus, note: int, turn: int) -> Callable[[], None]:
    path = corpus.path(note)
    data = path.read_bytes()
    if turn % 10 == 9:
        replace_bytes(path, data + bytes(512))
    else:
        replace_bytes(path, data[: 0 if turn == 0 else corpus.random.randrange(len(data))])
    return lambda: replace_bytes(path, data)


def _swap(corpus: _Corpus, note: int, turn: int) -> Callable[[], None]:
    path = corpus.path(note)
    data = path.read_bytes()
    replace_bytes(path, corpus.path((note + 1) % (_DOCUMENTS * 5)).read_bytes())
    return lambda: replace_bytes(path, data)


_DAMAGE = {_BITS: _flip_bit, _PAGES: _zero_page, _LENGTHS: _change_length, _SWAPS: _swap}


def indexes(data_dir: str, url: str | None, result: str, counts: dict[str, int]) -> None:
    violations: list[str] = []
    healed = 0
    with fake_models(), Memory.open(fault_config(data_dir, url)) as memory:
        corpus = _Corpus(memory)
        expected = _nearest(memory)
        indexes = memory._store.indexes
        collection_id = memory._collections.by_name("default", NAME).row.id
        indexes.save(collection_id)
        path = indexes._path(collection_id)
        sound = path.read_bytes()
        for turn in range(counts["files"]):
            path.write_bytes(_damage_index(sound, corpus.random, turn))
            rebuilt = indexes.stats()["rebuilt"]
            with indexes._guard:
                indexes._indexes.clear()  # as after a restart
            found = _nearest(memory)
            healed += indexes.stats()["rebuilt"] - rebuilt
            if found != expected or indexes.stats()["rebuilt"] == rebuilt:
                why = "other results" if found != expected else "taken as sound"
                violations.append(f"file {turn}: {why}")
    Path(result).write_text(json.dumps({"violations": violations[:100], "healed": healed}))


def _nearest(memory: Memory) -> list[list[str]]:
    """The ten best chunks for a few questions."""
    found = []
    for note in range(0, _DOCUMENTS * 5, 67):
        request = SearchRequest(query=question_for(note), collection=NAME, top_k=10, min_score=-1.0)
        found.append([hit.text for hit in memory.search(request).data])
    return found


def _damage_index(sound: bytes, chance: random.Random, turn: int) -> bytes:
    data = bytearray(sound)
    kind = turn % 10
    if kind < 6:
        at = chance.randrange(len(data) * 8)
        data[at // 8] ^= 1 << at % 8
    elif kind < 8:
        at = chance.randrange(len(data) // 4096) * 4096
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    else:
        del data[chance.randrange(len(data)) :]
    return bytes(data)
