"""Publishing, loading, healing and verifying KV."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_samples import (
    FINGERPRINT,
    LAYOUT,
    PREFIX,
    commit,
    damages,
    flip,
    found_texts,
    ingest,
    is_exact,
    kv_of,
    load,
    new_collection,
    path_of,
    quarantined,
    rewrite,
    samples_of,
)

from memkv.store import DEFAULT_TENANT, Store
from memkv.store.chunk_store import LoadTimes, PublishItem
from memkv.store.rows import NewDocument

T = DEFAULT_TENANT


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
    assert damages(plain_store) == []


def test_who_measures_is_told_of_each_load(plain_store: Store) -> None:
    sound, hurt = samples_of(plain_store, "sound\nhurt")
    plain_store.chunks.publish([sound.item, hurt.item])
    flip(path_of(plain_store, hurt.item), 5000)
    told: list[LoadTimes] = []
    plain_store.chunks.on_load = told.append
    assert is_exact(plain_store, sound)
    assert len(told) == 1
    assert load(plain_store, hurt.item) is None, "it is verified all the same"
    assert len(told) == 2
    assert all(times.began <= times.read <= times.verified for times in told)
    plain_store.chunks.on_load = None
    assert is_exact(plain_store, sound)
    assert len(told) == 2


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
    assert damages(store) == []
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


def test_a_file_that_nobody_names_is_an_orphan_and_goes_when_asked(plain_store: Store) -> None:
    store = plain_store
    [kept, lost] = samples_of(store, "kept\nlost")
    ingest(store, store.catalog.create_collection(T, new_collection()), "kept\nlost")
    row = store.catalog.file_for(T, lost.item.input_key)
    assert row is not None
    store.catalog.drop_file(T, row.input_key, row.file_digest)
    assert [problem.kind for problem in store.verify()] == ["orphan"]
    assert store.chunks.publish([lost.item]) == 1, "the same bytes stood there already"
    assert damages(store) == []
    store.catalog.drop_file(T, row.input_key, row.file_digest)
    [problem] = store.verify(repair=True)
    assert problem.repaired
    assert damages(store) == []
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
    ingest(store, store.catalog.create_collection(T, new_collection()), "\n".join(texts))
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
    assert damages(store) == []
    assert is_exact(store, samples["sound"])
    assert store.catalog.kv_totals()[0] == 1


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
