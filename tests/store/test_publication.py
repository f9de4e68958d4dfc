"""The steps of a publication: their order, and what a failing disk or database leaves."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from store_samples import (
    damages,
    flip,
    ingest,
    is_exact,
    load,
    new_collection,
    path_of,
    quarantined,
    samples_of,
)

from memkv.errors import (
    DatabaseUnavailable,
    InsufficientStorageError,
    ServiceUnavailableError,
)
from memkv.store import DEFAULT_TENANT, Store

T = DEFAULT_TENANT


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
    assert damages(store) == []


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
