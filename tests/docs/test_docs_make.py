"""The Makefile on machines where something is missing: one line says what, one how to mend it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from readme_blocks import ROOT


def make(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    if path is not None:
        environment["PATH"] = path
    command = [shutil.which("make") or "make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def fake_python(directory: Path, refuses: str) -> Path:
    """A python that fails whatever mentions `refuses` and is this one otherwise."""
    script = directory / "python"
    script.write_text(f'#!/bin/sh\ncase "$*" in *"{refuses}"*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("refuses", "error", "hint"),
    [
        ("version_info", "is older than Python 3.11", "PYTHON=/path/to/python3"),
        ("ensurepip", "cannot make virtual environments", "apt install python3-venv"),
        ("Python.h", "has no headers", "apt install python3-dev"),
    ],
)
def test_a_python_that_will_not_do(tmp_path: Path, refuses: str, error: str, hint: str) -> None:
    result = make("check-machine", f"PYTHON={fake_python(tmp_path, refuses)}")
    assert result.returncode != 0
    said = result.stderr.splitlines()
    assert said[0].startswith("error: ")
    assert error in said[0]
    assert hint in said[1]


def test_no_python_at_all() -> None:
    result = make("check-machine", "PYTHON=")
    assert result.returncode != 0
    assert result.stderr.startswith("error: no Python 3.11 or newer was found\nhint: ")


def test_no_compiler(tmp_path: Path) -> None:
    for tool in ("bash", "sh", "find", "grep", "sort", "cmp", "mv", "rm", "mkdir", "uname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    result = make("check-machine", f"PYTHON={sys.executable}", path=str(tmp_path))
    assert result.returncode != 0
    assert "error: no C++ compiler was found" in result.stderr
    assert "apt install g++" in result.stderr


def test_this_machine_will_do() -> None:
    assert make("check-machine").returncode == 0


def test_help_lists_the_targets() -> None:
    said = make("help").stdout
    for target in ("demo", "test", "bench", "lint", "clean"):
        assert f"make {target}" in said


def test_the_hardware_decides_which_torch(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: a card'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with_gpu = make("-n", "install", "VENV=build/no-environment-yet", path=path).stdout
    without = make("-n", "install", "VENV=build/no-environment-yet", "HARDWARE=cpu").stdout
    assert '".[gpu,postgres,dev]"' in with_gpu
    assert '".[cpu,postgres,dev]"' in without
