"""The names under which a server writes and reads archives: none of them leads out of its folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from memkv.errors import (
    BadRequestError,
    ConfigError,
    ConflictError,
    InsufficientStorageError,
    NotFoundError,
    ServiceUnavailableError,
)
from memkv.store import archives as module
from memkv.store.archives import Archives

BAD_NAMES = [
    *("", ".", "..", ".tar", "a", "a.tar.gz", "a.tar\n", "a.TAR", "-a.tar", ".a.tar", "a b.tar", "ä.tar"),
    *("../a.tar", "a/b.tar", "/etc/a.tar", "..%2fa.tar", "a\\b.tar", "a\x00.tar", "~root.tar", "a.tar.part"),
    f"{'a' * 124}.tar",
]


@pytest.fixture
def archives(tmp_path: Path) -> Archives:
    return Archives(tmp_path)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_is_no_name_is_refused(archives: Archives, tmp_path: Path, name: str) -> None:
    for call in (archives.vacant, archives.for_writing, archives.existing, archives.delete):
        with pytest.raises(BadRequestError, match="no name of an archive"):
            call(name)
    assert list(tmp_path.iterdir()) == [], "something was made"


@pytest.mark.parametrize("name", ["a.tar", "A-1_b.2.tar", f"{'a' * 123}.tar"])
def test_what_is_a_name_is_a_file_of_the_folder(archives: Archives, tmp_path: Path, name: str) -> None:
    assert archives.vacant(name) == tmp_path / "archives" / name
    assert list(tmp_path.iterdir()) == [], "only asked"
    path = archives.for_writing(name)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.write_bytes(b"12345")
    assert archives.existing(name) == path
    [listed] = archives.list()
    assert (listed.name, listed.bytes) == (name, 5)
    assert listed.time.endswith("+00:00")
    for call in (archives.vacant, archives.for_writing):
        with pytest.raises(ConflictError, match="exists"):
            call(name)
    archives.delete(name)
    assert not path.exists()
    with pytest.raises(NotFoundError, match=r"put the file into archives/"):
        archives.existing(name)


def test_links_pipes_and_directories_are_not_there(archives: Archives, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    root = archives.for_writing("x.tar").parent
    (root / "link.tar").symlink_to(secret)
    (root / "dangling.tar").symlink_to("nowhere")
    os.mkfifo(root / "pipe.tar")
    (root / "folder.tar").mkdir()
    assert archives.list() == []
    for name in ("link.tar", "dangling.tar", "pipe.tar", "folder.tar"):
        for call in (archives.existing, archives.delete):
            with pytest.raises(NotFoundError):
                call(name)
        with pytest.raises(ConflictError):
            archives.for_writing(name)
    assert secret.read_text() == "of somebody else"


def test_a_folder_that_leads_elsewhere_is_refused(archives: Archives, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "archives").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link"):
        archives.for_writing("a.tar")


def test_a_disk_that_fails_is_told(
    archives: Archives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail)
        with pytest.raises(InsufficientStorageError):
            archives.for_writing("a.tar")
    archives.for_writing("a.tar").write_bytes(b"x")
    monkeypatch.setattr(module, "sync_directory", lambda _: fail())
    with pytest.raises(InsufficientStorageError):
        archives.delete("a.tar")


def test_a_folder_that_cannot_be_made_is_told(archives: Archives, tmp_path: Path) -> None:
    (tmp_path / "archives").write_text("a file in its place")
    with pytest.raises(ServiceUnavailableError):
        archives.for_writing("a.tar")
    assert archives.list() == []
