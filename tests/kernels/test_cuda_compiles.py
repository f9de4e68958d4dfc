"""The CUDA files compile for the architectures that matter, without a GPU, and no kernel spills a register.

Of the head dims, the commonest and that of the most registers; the others are the same templates with fewer.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
NVCC = shutil.which("nvcc")
ARCHITECTURES = ("80", "90a")
FILES = ("head_dim_256", "head_dim_128", "plan", "share", "join", "move_kv", "launch")
FLAGS = ("-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-Xcompiler=-Wall", "-Xptxas=-v")


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.timeout(600)
def test_every_kernel_compiles_and_none_spills(tmp_path: Path) -> None:
    jobs = [(name, arch) for name in FILES for arch in ARCHITECTURES]
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda job: _compile(*job, tmp_path), jobs))
    kernels = 0
    for (name, arch), report in zip(jobs, reports, strict=True):
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        kernels += len(re.findall("Compiling entry function", report))
        assert all(pair == ("0", "0") for pair in spills), f"{name}.cu spills on sm_{arch}:\n{report}"
        assert "warning" not in report, report
    assert kernels >= 2 * 2 * 10


def _compile(name: str, arch: str, folder: Path) -> str:
    target = f"arch=compute_{arch},code=sm_{arch}"
    command = [str(NVCC), *FLAGS, f"-gencode={target}", f"-I{CSRC}", f"-I{CSRC}/include", f"-I{CSRC}/cuda"]
    output = folder / f"{name}-{arch}.o"
    ran = subprocess.run(
        [*command, "-c", f"{CSRC}/cuda/{name}.cu", "-o", str(output)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_the_build_compiles_with_these_flags() -> None:
    build = (CSRC / "CMakeLists.txt").read_text()
    assert "-fmad=false" in build
    assert all(f"cuda/{path.name}" in build for path in (CSRC / "cuda").glob("*.cu"))
