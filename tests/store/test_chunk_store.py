"""Publishing, loading, healing and reclaiming KV, also by many threads at once and on a failing disk."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_samples import (
    FINGERPRINT,
    LAYOUT,
    PREFIX,
    Sample,
    commit,
    found_texts,
    ingest,
    kv_of,
    load,
    new_collection,
    samples_of,
)

from memkv.errors import (
    DatabaseUnavailable,
    InsufficientStorageError,
    MemKVError,
    ServiceUnavailableError,
)
from memkv.store import DEFAULT_TENANT, Store
from memkv.store.chunk_store import PublishItem
from memkv.store.rows import NewDocument

T = DEFAULT_TENANT


@pytest.fixture
def plain_store(tmp_path: Path) -> Iterator[Store]:
    """On SQLite: what is tested does not depend on the database."""
    with Store.open(tmp_path / "data", busy_seconds=5) as store:
        yield store


def path_of(store: Store, item: PublishItem) -> Path:
    [path] = (store.data_dir / "blocks" / item.input_key[:2]).glob(f"{item.input_key}.*")
    return path


def quarantined(store: Store) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (store.data_dir / "quarantine").glob("*.json")]


def is_exact(store: Store, sample: Sample) -> bool:
    kv = load(store, sample.item)
    return kv is not None and bytes(kv.data) == bytes(sample.item.kv.data)


def test_published_chunks_are_read_only_named_by_content_and_leave_no_draft(store: Store) -> None:
    samples = samples_of(store, "one\ntwo\nthree")
    items = [sample.item for sample in samples]
    assert store.catalog.existing_keys(T, [item.input_key for item in items]) == set()
    assert store.chunks.publish(items) == 3
    assert store.chunks.publish([*items, *items]) == 0
    assert store.catalog.existing_keys(T, [item.input_key for item in items]) == {i.input_key for i in items}
    for sample in samples:
        path = path_of(store, sample.item)
        assert path.stat().st_mode & 0o777 == 0o400
        assert path.parent.stat().st_mode & 0o777 == 0o700
        row = store.catalog.file_for(T, sample.item.input_key)
        assert row is not None
        assert path.name == f"{row.input_key}.{row.file_digest}.kv"
        assert path.stat().st_size == row.num_bytes
        assert is_exact(store, sample)
    assert list((store.data_dir / "tmp").iterdir()) == []
    assert (store.data_dir).stat().st_mode & 0o777 == 0o700
    assert store.chunks.stats()["published"] == 3
    assert store.chunks.publish([]) == 0


def test_the_first_writer_of_a_key_stays(plain_store: Store) -> None:
    first, second = (samples_of(plain_store, "one", seed=seed)[0] for seed in (0, 1))
    plain_store.chunks.publish([first.item])
    assert plain_store.chunks.publish([second.item]) == 0
    assert is_exact(plain_store, first)
    assert plain_store.verify(full=True) == []


def replace_by(make: Callable[[Path], object]) -> Callable[[Path, Path], object]:
    """Puts something else in the place of a file."""

    def damage(path: Path, _: Path) -> None:
        path.unlink()
        make(path)

    return damage


def put_file_over_shard(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "flipped header": lambda path, _: flip(path, 100),
    "flipped block": lambda path, _: flip(path, 5000),
    "flipped last bit": lambda path, _: flip(path, -1),
    "cut": lambda path, _: rewrite(path, path.read_bytes()[:-1]),
    "cut to the header": lambda path, _: rewrite(path, path.read_bytes()[:4096]),
    "empty": lambda path, _: rewrite(path, b""),
    "grown": lambda path, _: rewrite(path, path.read_bytes() + b"x"),
    "missing": lambda path, _: path.unlink(),
    "another chunk's": lambda path, other: rewrite(path, other.read_bytes()),
    "symlink": replace_by(lambda path: path.symlink_to("/etc/hostname")),
    "fifo": replace_by(os.mkfifo),
    "directory": replace_by(Path.mkdir),
    "shard is a file": replace_by(put_file_over_shard),
}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    rewrite(path, bytes(data))


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_detected_quarantined_and_healed(plain_store: Store, damage: str) -> None:
    store = plain_store
    hurt, *others = samples_of(store, "the hurt one\n" + "\n".join(f"the other {n:02d}" for n in range(10)))
    other = next(o for o in others if o.item.input_key[:2] != hurt.item.input_key[:2])  # another directory
    store.chunks.publish([hurt.item, other.item])
    path = path_of(store, hurt.item)
    DAMAGES[damage](path, path_of(store, other.item))
    assert load(store, hurt.item) is None
    assert store.catalog.file_for(T, hurt.item.input_key) is None
    gone = damage in ("missing", "shard is a file")
    assert len(quarantined(store)) == (0 if gone else 1)
    if not gone:
        [reason] = quarantined(store)
        assert reason["name"] == path.name
        assert reason["kind"] in ("tokens", "digest", "size", "irregular", "input_key")
        assert reason["detail"]
    assert load(store, hurt.item) is None, "a second load after the first"
    assert store.chunks.publish([hurt.item]) == 1
    assert is_exact(store, hurt)
    assert is_exact(store, other)
    assert store.verify(full=True) == []
    counts = store.chunks.stats()
    assert sum(count for name, count in counts.items() if name.startswith("damaged_")) == 1


def test_many_random_damages_through_the_store(plain_store: Store) -> None:
    store = plain_store
    [sample] = samples_of(store, "some text of a chunk")
    dice = random.Random(5)
    for _ in range(60):
        store.chunks.publish([sample.item])
        path = path_of(store, sample.item)
        data = path.read_bytes()
        if dice.random() < 0.5:
            flip(path, dice.randrange(len(data)))
        else:
            rewrite(path, data[: dice.randrange(len(data))])
        assert load(store, sample.item) is None
    store.chunks.publish([sample.item])
    assert is_exact(store, sample)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint_digest": "77" * 32},
        {"token_ids": tuple(b"other tokens")},
        {"context_ids": (1, 2, 3)},
        {"kv": kv_of(tuple(b"some tokens!"))},
    ],
)
def test_kv_of_anything_but_what_was_asked_for_is_not_returned(
    plain_store: Store, change: dict[str, Any]
) -> None:
    """A key that collides, or a caller that changed its model under the same key."""
    [sample] = samples_of(plain_store, "some tokens.")
    plain_store.chunks.publish([sample.item])
    asked = replace(sample.item, **change)
    if "kv" in change:
        layout = replace(LAYOUT, num_layers=1, num_kv_heads=2)
        asked = replace(sample.item, kv=type(asked.kv)(layout, 12, bytes(layout.bytes_for(12))))
    assert load(plain_store, asked) is None


def test_colliding_keys_never_mix_chunks_up(plain_store: Store) -> None:
    """Input keys cut to four bits: every answer is right or a miss."""
    store = plain_store
    samples = samples_of(store, "\n".join(f"chunk {number}" for number in range(100)))
    weak = [
        replace(sample, item=replace(sample.item, input_key=f"{int(sample.item.input_key, 16) % 16:064x}"))
        for sample in samples
    ]
    wrong = hits = 0
    for sample in weak:
        store.chunks.publish([sample.item])
        kv = load(store, sample.item)
        hits += kv is not None
        wrong += kv is not None and bytes(kv.data) != bytes(sample.item.kv.data)
    assert wrong == 0
    assert 16 <= hits < 100
    assert store.chunks.stats()["damaged_tokens"] + store.chunks.stats().get("damaged_size", 0) > 0


def test_threads_that_publish_load_damage_and_heal_one_key(plain_store: Store) -> None:
    store = plain_store
    samples = samples_of(store, "one key\nand two")
    stop = threading.Event()
    wrong: list[str] = []
    loaded = [0]

    def heal(seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            sample = dice.choice(samples)
            try:
                kv = load(store, sample.item)
            except MemKVError as error:
                wrong.append(repr(error))
                return
            if kv is None:
                store.chunks.publish([sample.item])
            elif bytes(kv.data) != bytes(sample.item.kv.data):
                wrong.append("other bytes")
            else:
                loaded[0] += 1

    threads = [threading.Thread(target=heal, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    dice = random.Random(9)
    for _ in range(60):
        for path in list((store.data_dir / "blocks").glob("*/*.kv")):
            try:
                if dice.random() < 0.5:
                    path.unlink()
                else:
                    data = bytearray(path.read_bytes())
                    data[dice.randrange(len(data))] ^= 1
                    replacement = store.data_dir / "replacement"
                    replacement.write_bytes(data)
                    replacement.rename(path)
            except FileNotFoundError:
                continue
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert loaded[0] > 0
    for sample in samples:
        if load(store, sample.item) is None:
            store.chunks.publish([sample.item])
        assert is_exact(store, sample)
    assert store.verify(full=True) == []
    assert list((store.data_dir / "tmp").iterdir()) == []


def test_deleting_while_the_same_text_is_ingested_leaves_no_row_without_its_file(store: Store) -> None:
    """Two collections share every key; one side deletes what the other side publishes."""
    first = store.catalog.create_collection(T, new_collection("first"))
    second = store.catalog.create_collection(T, new_collection("second"))
    text = "shared one\nshared two"
    failures: list[str] = []

    def churn(collection: Any) -> None:
        try:
            for _ in range(12):
                ingest(store, collection, text, external_id="e")
                store.delete_document(T, collection.id, "e")
        except MemKVError as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=churn, args=(collection,)) for collection in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.verify(full=True) == []
    ingest(store, first, text, external_id="e")
    assert all(is_exact(store, sample) for sample in samples_of(store, text))


def test_a_file_that_nobody_names_is_an_orphan_and_goes_when_asked(plain_store: Store) -> None:
    store = plain_store
    [kept, lost] = samples_of(store, "kept\nlost")
    store.chunks.publish([kept.item, lost.item])
    row = store.catalog.file_for(T, lost.item.input_key)
    assert row is not None
    store.catalog.drop_file(T, row.input_key, row.file_digest)
    assert [problem.kind for problem in store.verify()] == ["orphan"]
    assert store.chunks.publish([lost.item]) == 1, "the same bytes stood there already"
    assert store.verify(full=True) == []
    store.catalog.drop_file(T, row.input_key, row.file_digest)
    [problem] = store.verify(repair=True)
    assert problem.repaired
    assert store.verify(full=True) == []
    assert is_exact(store, kept)


def test_a_damaged_orphan_does_not_block_its_name(plain_store: Store) -> None:
    store = plain_store
    [sample] = samples_of(store, "text")
    store.chunks.publish([sample.item])
    row = store.catalog.file_for(T, sample.item.input_key)
    assert row is not None
    store.catalog.drop_file(T, row.input_key, row.file_digest)
    flip(path_of(store, sample.item), 4200)
    assert store.chunks.publish([sample.item]) == 1
    assert is_exact(store, sample)
    assert len(quarantined(store)) == 1


def test_verify_finds_and_repairs_each_kind(store: Store) -> None:
    texts = ["flipped", "cut", "missing", "fifo", "sound"]
    samples = dict(zip(texts, samples_of(store, "\n".join(texts)), strict=True))
    store.chunks.publish([sample.item for sample in samples.values()])
    flip(path_of(store, samples["flipped"].item), 4500)
    rewrite(path_of(store, samples["cut"].item), b"short")
    path_of(store, samples["missing"].item).unlink()
    fifo = path_of(store, samples["fifo"].item)
    fifo.unlink()
    os.mkfifo(fifo)
    (store.data_dir / "blocks" / "notes.txt").write_text("someone's notes")
    (store.data_dir / "blocks" / "ab").mkdir(exist_ok=True)
    (store.data_dir / "blocks" / "ab" / "README").write_text("more notes")
    assert sorted(problem.kind for problem in store.verify()) == ["irregular", "missing", "size"]
    progress: list[tuple[int, int]] = []
    found = store.verify(full=True, on_progress=lambda done, total: progress.append((done, total)))
    assert progress == [(done, 5) for done in range(5)]
    assert sorted(problem.kind for problem in found) == ["digest", "irregular", "missing", "size"]
    assert not any(problem.repaired for problem in found)
    assert store.catalog.kv_totals()[0] == 5, "verify changed something without being told to"
    assert all(problem.repaired for problem in store.verify(full=True, repair=True))
    assert store.verify(full=True) == []
    assert is_exact(store, samples["sound"])
    assert store.catalog.kv_totals()[0] == 1


def test_steps_of_a_publication_come_in_the_order_that_survives(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data before the name, the name before the row: recorded at the calls themselves."""
    store = plain_store
    steps: list[tuple[str, str]] = []
    by_fd: dict[int, str] = {}
    guard = threading.Lock()
    real_open, real_fsync, real_link, real_unlink = os.open, os.fsync, os.link, os.unlink

    def note(step: str, name: object) -> None:
        with guard:
            steps.append((step, Path(str(name)).name))

    def noting_open(path: Any, *arguments: Any, **options: Any) -> int:
        fd = real_open(path, *arguments, **options)
        by_fd[fd] = str(path)
        return fd

    def noting_fsync(fd: int) -> None:
        real_fsync(fd)
        note("fsync", by_fd[fd])

    def noting_link(source: Any, target: Any, **options: Any) -> None:
        note("link", source)
        real_link(source, target, **options)
        note("named", target)

    register = store.catalog.register_files

    def noting_register(rows: Any) -> Any:
        for row in rows:
            note("row", f"{row.input_key}.{row.file_digest}.kv")
        return register(rows)

    monkeypatch.setattr(os, "open", noting_open)
    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "link", noting_link)
    monkeypatch.setattr(store.catalog, "register_files", noting_register)
    items = [sample.item for sample in samples_of(store, "\n".join(f"c{number}" for number in range(12)))]
    store.chunks.publish(items)
    monkeypatch.undo()
    assert real_unlink is os.unlink
    for item in items:
        name = path_of(store, item).name
        draft = steps[steps.index(("named", name)) - 1][1]
        order = [
            steps.index(("fsync", draft)),
            steps.index(("link", draft)),
            steps.index(("named", name)),
            max(at for at, step in enumerate(steps) if step == ("fsync", name[:2])),
            steps.index(("row", name)),
        ]
        assert order == sorted(order)
    shards = [name for step, name in steps if step == "fsync" and len(name) == 2]
    assert len(shards) == len(set(shards)), "a directory was synced twice"


FAILING = ["open", "posix_fallocate", "write", "fsync", "link", "mkdir"]


@pytest.mark.parametrize("call", FAILING)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_leaves_nothing_and_the_next_try_works(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    store = plain_store
    collection = store.catalog.create_collection(T, new_collection())
    samples = samples_of(store, "\n".join(f"chunk {number}" for number in range(4)))
    real = getattr(os, call)
    calls = [0]
    guard = threading.Lock()
    fail_from = 2 if call != "mkdir" else 1  # the database's own calls do not come through `os`

    def failing(*arguments: Any, **options: Any) -> Any:
        with guard:
            calls[0] += 1
            if calls[0] >= fail_from:
                raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    expected = InsufficientStorageError if code == errno.ENOSPC else ServiceUnavailableError
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(expected) as caught:
            store.chunks.publish([sample.item for sample in samples])
    assert caught.value.hint
    assert str(store.data_dir) not in str(caught.value)
    assert list((store.data_dir / "tmp").iterdir()) == []
    assert store.catalog.kv_totals() == (0, 0)
    assert store.verify() == [], "something was left behind"
    ingest(store, collection, "\n".join(sample.text for sample in samples))
    assert all(is_exact(store, sample) for sample in samples)


def test_a_failed_fsync_is_not_tried_again(plain_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    [sample] = samples_of(plain_store, "text")
    tried: list[int] = []

    def failing(fd: int) -> None:
        tried.append(fd)
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(ServiceUnavailableError):
            plain_store.chunks.publish([sample.item])
    assert len(tried) == 1


def test_a_database_that_fails_after_the_files_are_named_leaves_nothing_visible(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = plain_store
    samples = samples_of(store, "one\ntwo")

    def fail(rows: Any) -> Any:
        raise DatabaseUnavailable("the database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "register_files", fail)
        with pytest.raises(DatabaseUnavailable):
            store.chunks.publish([sample.item for sample in samples])
    assert [load(store, sample.item) for sample in samples] == [None, None]
    assert list((store.data_dir / "tmp").iterdir()) == []
    assert store.chunks.publish([sample.item for sample in samples]) == 2
    assert all(is_exact(store, sample) for sample in samples)
    assert store.verify(full=True) == []


def test_a_load_that_cannot_write_to_the_database_still_answers(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = plain_store
    [sample] = samples_of(store, "text")
    store.chunks.publish([sample.item])
    flip(path_of(store, sample.item), 4200)

    def fail(*_: Any) -> bool:
        raise DatabaseUnavailable("the database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "drop_file", fail)
        assert load(store, sample.item) is None
    assert quarantined(store) == [], "the file went before its row"
    assert load(store, sample.item) is None
    assert len(quarantined(store)) == 1


def test_a_process_short_of_descriptors_does_not_throw_files_away(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = plain_store
    [sample] = samples_of(store, "text")
    store.chunks.publish([sample.item])
    real = os.open

    def short(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(".kv"):
            raise OSError(errno.EMFILE, "too many open files")
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", short)
        assert load(store, sample.item) is None
    assert is_exact(store, sample)


def test_a_link_in_the_place_of_a_directory_is_not_followed(plain_store: Store, tmp_path: Path) -> None:
    store = plain_store
    [sample] = samples_of(store, "text")
    outside = tmp_path / "outside"
    outside.mkdir()
    (store.data_dir / "blocks" / sample.item.input_key[:2]).symlink_to(outside)
    store.chunks.publish([sample.item])
    assert list(outside.iterdir()) == []
    assert is_exact(store, sample)


def test_open_files_do_not_grow(plain_store: Store) -> None:
    store = plain_store
    collection = store.catalog.create_collection(T, new_collection())

    def one_round(number: int) -> None:
        ingest(store, collection, f"text {number}", external_id="e")
        [sample] = samples_of(store, f"text {number}")
        assert is_exact(store, sample)
        flip(path_of(store, sample.item), 4100)
        assert load(store, sample.item) is None
        found_texts(store, collection, "x")

    for number in range(3):
        one_round(number)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        one_round(number)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_document_is_committed_without_kv_and_gets_it_later(store: Store) -> None:
    """prefill = on_first_use: searchable at once, KV when a query brings it."""
    collection = store.catalog.create_collection(T, new_collection(prefill="on_first_use"))
    accepted = store.accept_documents(T, collection.id, [NewDocument("lazy")])
    commit(store, accepted.documents[0].document, "lazy", publish=False)
    [sample] = samples_of(store, "lazy")
    assert found_texts(store, collection, "lazy") == ["lazy"]
    assert load(store, sample.item) is None
    store.chunks.publish([sample.item])
    assert is_exact(store, sample)


def test_prefix_kv_is_kept_under_its_own_key(store: Store) -> None:
    collection = store.catalog.create_collection(T, new_collection())
    prefix = PublishItem(collection.prefix_key, FINGERPRINT, (), PREFIX, kv_of(PREFIX))
    store.chunks.publish([prefix])
    ingest(store, collection, "text", external_id="e")
    store.delete_document(T, collection.id, "e")
    kv = load(store, prefix)
    assert kv is not None
    assert kv.num_tokens == len(PREFIX)
