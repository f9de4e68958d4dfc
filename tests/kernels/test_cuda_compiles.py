"""The CUDA files compile for the architectures that matter, without a GPU, and no kernel spills a register.

Files of two head dims, the commonest and that of the most registers, are compiled as they are. Of the others
the bfloat16 kernels are, in one file for each architecture: float16 takes the same registers.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
NVCC = shutil.which("nvcc")
ARCHITECTURES = ("80", "90a")
OTHER_HEAD_DIMS = (64, 80, 96)
FILES = ("head_dim_256", "head_dim_128", "plan", "share", "join", "move_kv", "launch")
FLAGS = ("-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-Xcompiler=-Wall", "-Xptxas=-v")


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.timeout(600)
def test_every_kernel_compiles_and_none_spills(tmp_path: Path) -> None:
    others = tmp_path / "others.cu"
    others.write_text(_kernels_of_the_others())
    files = [others, *(CSRC / "cuda" / f"{name}.cu" for name in FILES)]
    jobs = [(path, arch) for path in files for arch in ARCHITECTURES]
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda job: _compile(*job, tmp_path), jobs))
    kernels = 0
    for (path, arch), report in zip(jobs, reports, strict=True):
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        kernels += len(re.findall("Compiling entry function", report))
        assert all(pair == ("0", "0") for pair in spills), f"{path.name} spills on sm_{arch}:\n{report}"
        assert "warning" not in report, report
    assert kernels >= 2 * (2 * 10 + 8 * len(OTHER_HEAD_DIMS))


def _kernels_of_the_others() -> str:
    kernels = [
        kernel
        for head_dim, mass in itertools.product(OTHER_HEAD_DIMS, ("false", "true"))
        for kernel in (
            *(
                f"few_queries_kernel<__nv_bfloat16, {head_dim}, {of}, {mass}>"
                for of in ("1, 2", "2, 2", "1, 3")
            ),
            f"many_queries_kernel<__nv_bfloat16, {head_dim}, 16, {mass}>",
        )
    ]
    arguments = "const __grid_constant__ Attention, const __grid_constant__ Work"
    lines = [f"template __global__ void {kernel}({arguments});" for kernel in kernels]
    return "\n".join(['#include "head_dim.cuh"', "namespace memkv::cuda {", *lines, "}", ""])


def _compile(path: Path, arch: str, folder: Path) -> str:
    target = f"arch=compute_{arch},code=sm_{arch}"
    command = [str(NVCC), *FLAGS, f"-gencode={target}", f"-I{CSRC}", f"-I{CSRC}/include", f"-I{CSRC}/cuda"]
    output = folder / f"{path.stem}-{arch}.o"
    ran = subprocess.run(
        [*command, "-c", str(path), "-o", str(output)],
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
