"""What an installation puts within reach of `import`, and what not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_server_and_the_migrations_are_parts_of_memkv(tmp_path: Path) -> None:
    done = run("import memkv.api, memkv.migrations", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["api", "migrations", "tests", "csrc"])
def test_nothing_of_memkv_answers_to_a_bare_name(tmp_path: Path, name: str) -> None:
    done = run(f"import {name}", tmp_path)
    assert "ModuleNotFoundError" in done.stderr
