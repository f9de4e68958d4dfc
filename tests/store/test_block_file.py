"""Damage to a block file: every kind is seen before a byte is returned, and what is seen names its place."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import LAYOUT, kv_of

from memkv.kv.chunk import ChunkKV
from memkv.kv.fingerprint import token_digest
from memkv.kv.layout import KVLayout
from memkv.store import block_file
from memkv.store.block_file import (
    BlockFileIdentity,
    check_block_file,
    encode_header,
    file_digest,
    file_name,
    parse_file_name,
    read_block_file,
)
from memkv.store.durable_files import Damage, read_file, write_new_file
from memkv.store.rows import KVFileRow

CONTEXT, TOKENS = (1, 2, 3), tuple(range(100, 119))
IDENTITY = BlockFileIdentity("ab" * 32, "cd" * 32, token_digest(CONTEXT, TOKENS), LAYOUT, 3, len(TOKENS))


@pytest.fixture
def sound(tmp_path: Path) -> tuple[Path, str]:
    """A sound file and its digest."""
    kv = kv_of(TOKENS)
    parts = [encode_header(IDENTITY, kv), kv.data]
    path = tmp_path / "file.kv"
    write_new_file(path, parts, mode=0o600)
    return path, file_digest(parts)


def row_of(digest: str) -> KVFileRow:
    return KVFileRow(
        IDENTITY.input_key, "default", IDENTITY.fingerprint_digest, digest, len(TOKENS), IDENTITY.file_bytes
    )


def test_a_file_is_an_aligned_header_and_the_blocks(sound: tuple[Path, str]) -> None:
    path, digest = sound
    data = path.read_bytes()
    assert len(data) == IDENTITY.file_bytes == 4096 + LAYOUT.bytes_for(len(TOKENS))
    assert data[4096:] == kv_of(TOKENS).data
    found = read_block_file(path, IDENTITY, digest)
    assert isinstance(found, ChunkKV)
    assert (found.layout, found.num_tokens, bytes(found.data)) == (LAYOUT, len(TOKENS), kv_of(TOKENS).data)
    assert memoryview(found.data).readonly
    assert check_block_file(path, row_of(digest)) is None


@given(
    layers=st.integers(1, 40),
    heads=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    block_size=st.sampled_from([8, 16, 32]),
    tokens=st.integers(1, 9000),
)
@settings(max_examples=100, deadline=None)
def test_headers_of_any_layout_are_aligned_and_hold_every_sum(
    layers: int, heads: int, dtype: str, block_size: int, tokens: int
) -> None:
    layout = KVLayout(layers, heads, 8, block_size, dtype)
    identity = replace(IDENTITY, layout=layout, num_tokens=tokens)
    assert identity.header_bytes % 4096 == 0
    assert identity.header_bytes >= 168 + 8 * identity.num_blocks + 8
    assert identity.header_bytes < 168 + 8 * identity.num_blocks + 8 + 4096


def test_every_bit_of_the_header_is_watched(sound: tuple[Path, str]) -> None:
    path, digest = sound
    data = bytearray(path.read_bytes())
    for bit in range(IDENTITY.header_bytes * 8):
        data[bit // 8] ^= 1 << bit % 8
        seen = block_file._check_header(memoryview(data)[:4096], IDENTITY)
        assert isinstance(seen, Damage), f"bit {bit} of the header was not seen"
        data[bit // 8] ^= 1 << bit % 8
    for bit in (0, 8 * 16, 8 * 4095 + 7):
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert isinstance(read_block_file(path, IDENTITY, digest), Damage)
        data[bit // 8] ^= 1 << bit % 8


def damaged_copies(data: bytes, count: int) -> Any:
    """(what was done, bytes): flipped bits, zeroed stretches, cut and grown files."""
    dice = random.Random(11)
    for _ in range(count):
        flipped = bytearray(data)
        bit = dice.randrange(len(data) * 8)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(flipped)
    for _ in range(count // 10):
        zeroed = bytearray(data)
        start = dice.randrange(len(data) - 512)
        zeroed[start : start + 512] = bytes(512)
        if zeroed != data:
            yield f"512 bytes zeroed at {start}", bytes(zeroed)
    for length in [
        *range(0, 200),
        4095,
        4096,
        4097,
        *(dice.randrange(len(data)) for _ in range(count // 10)),
    ]:
        yield f"cut to {length}", data[:length]
    yield "grown", data + b"\0"
    yield "grown by a page", data + bytes(4096)


def test_every_damage_is_detected(sound: tuple[Path, str]) -> None:
    path, digest = sound
    data = path.read_bytes()
    tried = 0
    for what, damaged in damaged_copies(data, 1500):
        path.write_bytes(damaged)
        assert isinstance(read_block_file(path, IDENTITY, digest), Damage), what
        tried += 1
    assert tried > 1900
    path.write_bytes(data)
    assert isinstance(read_block_file(path, IDENTITY, digest), ChunkKV)


def test_without_the_digest_damage_would_pass(
    sound: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above: its cases do reach a reader that does not verify."""
    path, digest = sound
    data = path.read_bytes()
    monkeypatch.setattr(block_file, "file_digest", lambda parts: digest)
    passed = 0
    for _, damaged in damaged_copies(data, 300):
        path.write_bytes(damaged)
        passed += isinstance(read_block_file(path, IDENTITY, digest), ChunkKV)
    assert passed > 50


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"input_key": "ac" * 32}, "input_key"),
        ({"fingerprint_digest": "ce" * 32}, "fingerprint"),
        ({"token_digest": token_digest((1, 2), (3, *TOKENS))}, "tokens"),
        ({"token_digest": token_digest(CONTEXT, TOKENS[::-1])}, "tokens"),
        ({"context_tokens": 4}, "tokens"),
        ({"num_tokens": 18}, "tokens"),  # as many blocks
        ({"num_tokens": 9}, "size"),
        ({"layout": KVLayout(1, 2, 8, 8, "float32")}, "layout"),  # of equal size
        ({"layout": KVLayout(2, 1, 16, 8, "bfloat16")}, "layout"),
        ({"layout": KVLayout(2, 1, 16, 8, "float16")}, "layout"),
        ({"layout": KVLayout(3, 1, 8, 8, "float32")}, "size"),
    ],
)
def test_a_sound_file_of_something_else_is_refused(
    sound: tuple[Path, str], change: dict[str, Any], kind: str
) -> None:
    path, digest = sound
    found = read_block_file(path, replace(IDENTITY, **change), digest)
    assert isinstance(found, Damage)
    assert found.kind == kind


def test_another_writers_bytes_for_the_same_key_are_refused(sound: tuple[Path, str]) -> None:
    path, digest = sound
    kv = kv_of(TOKENS, seed=1)
    path.write_bytes(encode_header(IDENTITY, kv) + bytes(kv.data))
    found = read_block_file(path, IDENTITY, digest)
    assert found == Damage("digest", "a sound file, but not the one that was written")


def test_damaged_blocks_are_named(sound: tuple[Path, str]) -> None:
    path, digest = sound
    data = bytearray(path.read_bytes())
    data[4096 + LAYOUT.bytes_per_block] ^= 1
    data[-1] ^= 1
    path.write_bytes(data)
    assert read_block_file(path, IDENTITY, digest) == Damage("digest", "damaged blocks: 1, 2")
    found = check_block_file(path, row_of(digest))
    assert found is not None
    assert found.kind == "digest"


def test_a_scrubber_sees_a_file_under_a_foreign_name(sound: tuple[Path, str]) -> None:
    path, digest = sound
    row = row_of(digest)
    garbage = bytes(row.num_bytes)
    for changed, content, kind in (
        (replace(row, input_key="ee" * 32), None, "input_key"),
        (replace(row, fingerprint_digest="ee" * 32), None, "fingerprint"),
        (replace(row, num_bytes=row.num_bytes - 1), None, "size"),
        (replace(row, file_digest=file_digest([garbage])), garbage, "header"),
        (replace(row, num_bytes=5, file_digest=file_digest([b"short"])), b"short", "header"),
    ):
        if content is not None:
            path.write_bytes(content)
        found = check_block_file(path, changed)
        assert found is not None
        assert found.kind == kind


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["missing", "directory", "symlink", "fifo", "socket", "device"])
def test_whatever_stands_there_is_never_waited_for_nor_followed(sound: tuple[Path, str], what: str) -> None:
    path, digest = sound
    real = path.rename(path.with_name("moved"))
    if what == "directory":
        path.mkdir()
    elif what == "symlink":
        path.symlink_to(real)
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.close()
    elif what == "device":
        path.symlink_to("/dev/zero")
    found = read_block_file(path, IDENTITY, digest)
    assert isinstance(found, Damage)
    assert found.kind == ("missing" if what == "missing" else "irregular")
    assert isinstance(read_block_file(real, IDENTITY, digest), ChunkKV)


@pytest.mark.parametrize(
    ("error", "transient"),
    [(PermissionError(13, "no"), False), (OSError(5, "EIO"), False), (OSError(24, "EMFILE"), True)],
)
def test_an_error_of_the_disk_is_damage_and_one_of_the_process_is_not(
    sound: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, error: OSError, transient: bool
) -> None:
    path, digest = sound

    def fail(*_: object, **__: object) -> None:
        raise error

    for name in ("open", "readv", "fstat"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            found = read_block_file(path, IDENTITY, digest)
        assert isinstance(found, Damage), name
        assert (found.kind, found.transient) == ("unreadable", transient)


def test_a_file_that_shrinks_while_it_is_read_is_damage(
    sound: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = sound
    stated = os.fstat

    def shrink(fd: int) -> os.stat_result:
        found = stated(fd)
        os.truncate(path, 5000)
        return found

    monkeypatch.setattr(os, "fstat", shrink)
    found = read_block_file(path, IDENTITY, digest)
    assert isinstance(found, Damage)
    assert found.kind == "size"


def test_reads_in_pieces_are_put_together(sound: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, digest = sound
    read, write = os.readv, os.write
    monkeypatch.setattr(os, "readv", lambda fd, views: read(fd, [views[0][:1000]]))
    assert isinstance(read_block_file(path, IDENTITY, digest), ChunkKV)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:777]))
    copy = path.with_name("copy")
    write_new_file(copy, [path.read_bytes()], mode=0o400)
    assert isinstance(read_block_file(copy, IDENTITY, digest), ChunkKV)
    assert copy.stat().st_mode & 0o777 == 0o400


def test_files_beyond_a_limit_are_not_read(tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    assert isinstance(read_file(big, size=100), Damage)
    assert isinstance(read_file(big, limit=1 << 20), Damage)


def test_a_file_is_read_into_memory_that_nobody_filled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filling it would take as long as reading, and hold the interpreter: no other thread would run."""
    path = tmp_path / "large"
    path.write_bytes(b"x" * (32 << 20))
    readv, before = os.readv, 0.0

    def counted(fd: int, views: Sequence[memoryview]) -> int:
        nonlocal before
        before = before or time.thread_time() - started
        return readv(fd, views)

    monkeypatch.setattr(os, "readv", counted)
    started = time.thread_time()
    found = read_file(path)
    took = time.thread_time() - started
    assert before < 0.2 * took
    assert found == path.read_bytes()


@pytest.mark.parametrize(
    "name",
    ["", "x.kv", "../../etc/passwd", "a" * 64 + "." + "b" * 32 + ".kv\n", "a" * 64 + "." + "b" * 31 + ".kv",
     "A" * 64 + "." + "b" * 32 + ".kv", "a" * 64 + "." + "b" * 32 + ".tmp"],
)  # fmt: skip
def test_names_that_are_not_block_files(name: str) -> None:
    assert parse_file_name(name) is None
    assert parse_file_name(file_name("ab" * 32, "cd" * 16)) == ("ab" * 32, "cd" * 16)
