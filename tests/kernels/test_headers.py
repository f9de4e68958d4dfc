"""The shared headers compile alone, without Python or torch, and their algebra holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_algebra_of_the_headers(tmp_path: Path) -> None:
    program = tmp_path / "header_algebra"
    source = Path(__file__).with_name("header_algebra.cpp")
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/csrc/include"]
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


def test_the_essay_names_files_that_exist() -> None:
    csrc = ROOT / "csrc"
    text = (csrc / "README.md").read_text()
    names = set(re.findall(r"[\w/]+\.(?:h|cpp|cuh|cu|py)\b", text))
    assert len(names) > 10
    folders = (csrc, csrc / "include/memkv", ROOT)
    missing = {name for name in names if not any((folder / name).is_file() for folder in folders)}
    assert not missing


def test_every_header_compiles_alone(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    headers = sorted((ROOT / "csrc/include/memkv").glob("*.h"))
    assert headers
    for header in headers:
        alone = tmp_path / f"{header.stem}.cpp"
        alone.write_text(f'#include "memkv/{header.name}"\n')
        command = [COMPILER, "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        subprocess.run([*command, f"-I{ROOT}/csrc/include", str(alone)], check=True)
