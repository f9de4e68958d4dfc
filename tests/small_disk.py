"""A real small disk to fill. Needs leave to mount a tmpfs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mounted)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def used(disk: Path) -> int:
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def fill(disk: Path, name: str) -> None:
    with suppress(OSError), (disk / name).open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
