"""Archives: what was written comes back, and nothing else is let in."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash

from memkv.errors import BadRequestError, ConfigError, ServiceUnavailableError
from memkv.store import archive as archive_module
from memkv.store.archive import ArchiveReader, ArchiveWriter

MANIFEST = json.dumps({"format_version": 1, "collections": []}).encode()
DOCUMENTS = "collections/0000.jsonl"
KV = f"kv/{'a' * 64}.{'b' * 32}.kv"


def write(path: Path) -> Path:
    with ArchiveWriter(path) as archive:
        archive.add("manifest.json", MANIFEST)
        archive.add(DOCUMENTS, b'{"text":"one"}\n{"text":"two"}\n')
        archive.add(KV, bytes(range(256)) * 64)
    return path


def craft(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], *, digests: object = None) -> Path:
    """A tar of anything, with the digests that its plain members would have."""
    found = {m.name: xxhash.xxh3_128(data).hexdigest() for m, data in members if m.isreg()}
    trailer = json.dumps(found if digests is None else digests).encode()
    with tarfile.open(path, "w") as tar:
        for member, data in [*members, (plain("digests.json", trailer), trailer)]:
            tar.addfile(member, io.BytesIO(data))
    return path


def plain(name: str, data: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member


def special(kind: bytes, name: str = DOCUMENTS, target: str = "/etc/passwd") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


HEAD = (plain("manifest.json", MANIFEST), MANIFEST)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar")
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"]
    with ArchiveReader(path) as archive:
        assert archive.manifest["format_version"] == 1
        assert archive.names("kv/") == [KV]
        assert [json.loads(line)["text"] for line in archive.lines(DOCUMENTS)] == ["one", "two"]
        assert archive.read(KV) == bytes(range(256)) * 64
        assert archive.head(KV, 3) == b"\0\1\2"
        with pytest.raises(BadRequestError, match="missing"):
            archive.read("collections/0001.jsonl")
        with pytest.raises(BadRequestError, match="more than 10"):
            archive.read(KV, limit=10)
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["manifest.json", DOCUMENTS, KV, "digests.json"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with suppress(ZeroDivisionError), ArchiveWriter(tmp_path / "a.tar") as archive:
        archive.add("manifest.json", MANIFEST)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a.tar")
    with pytest.raises(ConfigError, match="exists"):
        ArchiveWriter(tmp_path / "a.tar")
    with pytest.raises(ConfigError):
        ArchiveWriter(tmp_path / "no" / "a.tar")


HOSTILE: dict[str, Callable[[Path], Path]] = {
    "symlink": lambda p: craft(p, [HEAD, (special(tarfile.SYMTYPE), b"")]),
    "hard link": lambda p: craft(p, [HEAD, (special(tarfile.LNKTYPE, target="manifest.json"), b"")]),
    "device": lambda p: craft(p, [HEAD, (special(tarfile.CHRTYPE), b"")]),
    "fifo": lambda p: craft(p, [HEAD, (special(tarfile.FIFOTYPE), b"")]),
    "directory": lambda p: craft(p, [HEAD, (special(tarfile.DIRTYPE, "kv"), b"")]),
    "sparse": lambda p: craft(p, [HEAD, (special(tarfile.GNUTYPE_SPARSE), b"")]),
    "absolute": lambda p: craft(p, [HEAD, (plain("/etc/passwd", b"x"), b"x")]),
    "up": lambda p: craft(p, [HEAD, (plain("../../etc/passwd", b"x"), b"x")]),
    "up inside": lambda p: craft(p, [HEAD, (plain("kv/../manifest.json", b"x"), b"x")]),
    "newline": lambda p: craft(p, [HEAD, (plain(DOCUMENTS + "\n", b"x"), b"x")]),
    "other digits": lambda p: craft(p, [HEAD, (plain("collections/000\u0660.jsonl", b"x"), b"x")]),
    "twice": lambda p: craft(p, [HEAD, (plain(DOCUMENTS, b"x"), b"x"), (plain(DOCUMENTS, b"y"), b"y")]),
    "not named by the digests": lambda p: craft(p, [HEAD, (plain(KV, b"x"), b"x")], digests={}),
    "digests are a list": lambda p: craft(p, [HEAD], digests=[]),
    "no manifest": lambda p: craft(p, []),
    "manifest is no JSON": lambda p: craft(p, [(plain("manifest.json", b"{"), b"{")]),
    "manifest is deep": lambda p: craft(p, [(plain("manifest.json", b"[" * 200_000), b"[" * 200_000)]),
    "manifest is a list": lambda p: craft(p, [(plain("manifest.json", b"[]"), b"[]")]),
    "another format": lambda p: craft(
        p, [(plain("manifest.json", b'{"format_version":2}'), b'{"format_version":2}')]
    ),
    "gzip": lambda p: _write_bytes(p, gzip.compress(write(p.with_suffix(".whole")).read_bytes())),
    "empty": lambda p: _write_bytes(p, b""),
    "zeros": lambda p: _write_bytes(p, bytes(1 << 20)),
    "noise": lambda p: _write_bytes(p, random.Random(1).randbytes(1 << 16)),
    "cut": lambda p: _write_bytes(p, write(p.with_suffix(".whole")).read_bytes()[:3000]),
    "a directory": lambda p: (p.mkdir(), p)[1],
    "not there": lambda p: p,
}


def _write_bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_memkv_did_not_write_is_refused(tmp_path: Path, kind: str) -> None:
    path = HOSTILE[kind](tmp_path / "a.tar")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadRequestError) as caught:
        ArchiveReader(path)
    assert caught.value.hint
    assert sorted(tmp_path.rglob("*")) == before, "something was unpacked"


def test_every_flipped_bit_of_a_member_is_seen(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        spans = [(m.offset_data, m.size) for m in tar.getmembers() if m.name != "digests.json"]
    dice = random.Random(2)
    for _ in range(200):
        start, size = dice.choice(spans)
        data = bytearray(whole)
        data[start + dice.randrange(size)] ^= 1 << dice.randrange(8)
        (tmp_path / "b.tar").write_bytes(data)
        with pytest.raises(BadRequestError):
            ArchiveReader(tmp_path / "b.tar")


def test_a_member_of_more_bytes_than_the_file_is_refused(tmp_path: Path) -> None:
    member = tarfile.TarInfo(DOCUMENTS)
    member.size = 1 << 40
    (tmp_path / "a.tar").write_bytes(member.tobuf() + bytes(1024))
    with pytest.raises(BadRequestError):
        ArchiveReader(tmp_path / "a.tar")


def test_what_cannot_be_read_or_named_leaves_no_archive(tmp_path: Path) -> None:
    """A source that fails, and a file that took the name meanwhile."""

    class Broken:
        def read(self, size: int) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(ServiceUnavailableError), ArchiveWriter(tmp_path / "a.tar") as archive:
        archive.add_file(DOCUMENTS, Broken(), 10)
    writer = ArchiveWriter(tmp_path / "b.tar")
    writer.add("manifest.json", MANIFEST)
    (tmp_path / "b.tar").write_text("another's")
    with pytest.raises(ServiceUnavailableError):
        writer.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar"]
    assert (tmp_path / "b.tar").read_text() == "another's"


def test_too_much_of_anything_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ArchiveReader(write(tmp_path / "a.tar")) as found:
        monkeypatch.setattr(archive_module, "MAX_LINE_BYTES", 15)
        assert len(list(found.lines(DOCUMENTS))) == 2
        monkeypatch.setattr(archive_module, "MAX_LINE_BYTES", 14)
        with pytest.raises(BadRequestError, match="a line of more than 14 bytes"):
            list(found.lines(DOCUMENTS))
        with pytest.raises(BadRequestError, match=r"collections/0007\.jsonl is missing"):
            list(found.lines("collections/0007.jsonl"))
    monkeypatch.setattr(archive_module, "MAX_MEMBERS", 3)
    with pytest.raises(BadRequestError, match="more than 3 members"):
        ArchiveReader(tmp_path / "a.tar")


class TestDrafts:
    """Left by a kill, and removed by the next writer of the same archive alone."""

    def draft(self, tmp_path: Path, name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(b"half of it")
        return path

    def test_what_a_killed_writer_left_is_removed(self, tmp_path: Path) -> None:
        left = self.draft(tmp_path, "a.tar.0123abcd.part")
        others = [
            self.draft(tmp_path, name)
            for name in ("b.tar.0123abcd.part", "a.tar.part", "a.tar.0123abcg.part", "xa.tar.0123abcd.part")
        ]
        path = write(tmp_path / "a.tar")
        assert not left.exists()
        assert sorted(tmp_path.iterdir()) == sorted([path, *others])

    def test_what_is_being_written_is_left_alone(self, tmp_path: Path) -> None:
        with ArchiveWriter(tmp_path / "a.tar") as first:
            first.add("manifest.json", MANIFEST)
            second = write(tmp_path / "a.tar")
            with suppress(ConfigError):
                ArchiveWriter(tmp_path / "a.tar")
            first.add(DOCUMENTS, b"")
            whole = second.read_bytes()
            second.unlink()
        assert (tmp_path / "a.tar").read_bytes() != whole, "the first one's own archive"
        assert ArchiveReader(tmp_path / "a.tar").names("kv/") == []
        assert list(tmp_path.glob("*.part")) == []

    def test_a_draft_that_cannot_be_looked_at_stops_nobody(self, tmp_path: Path) -> None:
        (tmp_path / "a.tar.0123abcd.part").mkdir()
        assert write(tmp_path / "a.tar").exists()
        with pytest.raises(ConfigError, match="cannot be written"):
            ArchiveWriter(tmp_path / "nowhere" / "a.tar")
