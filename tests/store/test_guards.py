"""Guards that hardly anything reaches: a lock that fails, a write cut short, memory that runs out."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from store_samples import load, path_of, quarantined, samples_of

from memkv.errors import ConfigError, ServiceUnavailableError, StoreLocked
from memkv.kv.fingerprint import decode_tokens, encode_tokens
from memkv.kv.layout import KVLayout
from memkv.store import Store, durable_files
from memkv.store.block_file import BlockFileIdentity, decode_block_file
from memkv.store.durable_files import Damage, write_new_file
from memkv.store.lock import StoreLock


def failing(number: int) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_system_without_flock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(ConfigError, match="cannot be locked"):
        StoreLock(tmp_path / "lock")


def test_a_holder_that_has_not_said_its_pid_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = StoreLock(path)
    path.write_text("")
    later = threading.Timer(0.05, lambda: path.write_text("4711\n"))
    later.start()
    try:
        with pytest.raises(StoreLocked, match="4711"):
            StoreLock(path)
        path.write_text("")
        started = time.monotonic()
        with pytest.raises(StoreLocked, match="another process"):
            StoreLock(path)
        assert time.monotonic() - started < 2
    finally:
        later.join()
        lock.release()


def test_tokens_are_the_same_bytes_on_a_machine_of_the_other_byte_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = encode_tokens([1, 70_000])
    assert here == b"\1\0\0\0\x70\x11\1\0"
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    swapped = encode_tokens([1, 70_000])
    assert swapped == b"".join(here[at : at + 4][::-1] for at in (0, 4))
    assert decode_tokens(swapped) == [1, 70_000]


def test_bytes_of_another_length_are_no_block_file() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")
    identity = BlockFileIdentity("00" * 32, "00" * 32, bytes(32), layout, 0, 3)
    found = decode_block_file(bytes(identity.file_bytes - 1), identity, "00" * 16)
    assert isinstance(found, Damage)
    assert found.kind == "size"


def test_a_write_that_comes_out_short_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(fd: int, _parts: object) -> None:
        os.ftruncate(fd, 3)

    monkeypatch.setattr(durable_files, "_write_all", cut)
    with pytest.raises(ServiceUnavailableError):
        write_new_file(tmp_path / "file", [b"four"], mode=0o400)
    assert list(tmp_path.iterdir()) == []


def test_without_memory_to_read_a_file_the_file_stays(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    [sample] = samples_of(plain_store, "a line")
    plain_store.chunks.publish([sample.item])

    def no_memory(_fd: int, _buffer: bytearray) -> int:
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr(durable_files, "_read_into", no_memory)
        assert load(plain_store, sample.item) is None
    assert quarantined(plain_store) == []
    assert load(plain_store, sample.item) is not None


def test_what_stands_under_a_name_and_cannot_be_read_now_is_not_replaced(
    plain_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    [sample] = samples_of(plain_store, "a line")
    plain_store.chunks.publish([sample.item])
    path = path_of(plain_store, sample.item)
    kept = path.stat().st_ino
    row = plain_store.catalog.file_for(sample.item.tenant, sample.item.input_key)
    assert row is not None
    plain_store.catalog.drop_files_of_all_tenants([row])
    with monkeypatch.context() as short:
        short.setattr(durable_files, "_read_into", failing(errno.ENOMEM))
        with pytest.raises(ServiceUnavailableError):
            plain_store.chunks.publish([sample.item])
    assert path.stat().st_ino == kept
    assert plain_store.chunks.publish([sample.item]) == 1
    assert load(plain_store, sample.item) is not None
