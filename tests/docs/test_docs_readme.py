"""The README says what is so: its commands run, its files exist, its generated parts are current.

`make demo` and `make test` are not run from here, they would run this: what `make -n` says they do is
checked, and `memkv demo` itself is run by `tests/cli/test_cli_demo.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from readme_blocks import ROOT, Step, blocks, steps
from write_readme import PAGES, PARTS, rendered

README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


class Reader:
    """Somebody who types the README's commands, one after the other, into one shell."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = str(port)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MEMKV_", "MAKE"))},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "MEMKV_PORT": self.port,
        }
        if models := os.environ.get("MEMKV_MODELS_DIR"):
            self.environment["MEMKV_MODELS_DIR"] = models
        self.background: list[subprocess.Popen[str]] = []

    def at_my_port(self, text: str) -> str:
        return text.replace(":8000", f":{self.port}")

    def type(self, step: Step) -> None:
        command = self.at_my_port(step.command)
        shown = Step(command, [self.at_my_port(line) for line in step.shown])
        if export := re.fullmatch(r"export (\w+)=(\S+)", command):
            self.environment[export[1]] = export[2]
        elif command.endswith("&"):
            self._start(command.removesuffix("&").split(), shown)
        elif command.startswith(("make ", "source ", "MEMKV_TEST_DATA=")):
            pass  # has a test of its own
        else:
            output = self.run(["bash", "-c", command])
            expected = "\n".join(shown.shown)
            assert shown.matches(output), f"$ {command}\n{output}\n--- the README shows:\n{expected}"

    def run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def _start(self, command: list[str], shown: Step) -> None:
        process = subprocess.Popen(
            command, cwd=self.directory, env=self.environment, stdout=subprocess.PIPE, text=True
        )
        self.background.append(process)
        assert process.stdout is not None
        assert shown.matches(process.stdout.readline())


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, smollm2: Path, minilm: Path) -> Iterator[Reader]:
    """In a directory where `memkv/demo` is what it is in the checkout."""
    directory = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "memkv" / "demo", directory / "memkv" / "demo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reader = Reader(directory, port)
    yield reader
    for process in reader.background:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def console() -> list[list[Step]]:
    return [steps(block) for block in blocks(README, "console")]


def test_every_command_gives_what_is_shown(reader: Reader) -> None:
    typed = [step for block in console() for step in block if not _about_postgres(block)]
    assert len(typed) >= 8
    for step in typed:
        reader.type(step)
    client, conversation = (
        reader.run([sys.executable, "-c", reader.at_my_port(code)]) for code in blocks(README, "python")
    )
    counts = r"\d+ tokens mapped, \d+ computed\n"
    assert re.fullmatch(rf"(?s).+\n{counts}", client)
    assert "blue" in client
    assert re.fullmatch(rf"(?s)(.+\n{counts}){{2}}", conversation)
    assert "Ingrid Moss" in conversation


def test_the_commands_for_postgresql(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "store"))
    from postgres_server import find_binaries, start_server

    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server binaries are installed")
    server = start_server(binaries)
    (block,) = [block for block in console() if _about_postgres(block)]
    reader = Reader(tmp_path, 0)
    for step in block:
        if step.command.startswith("export MEMKV_DATABASE_URL="):
            reader.environment["MEMKV_DATABASE_URL"] = server.url(server.create_database())
        else:
            reader.type(step)


def _about_postgres(block: list[Step]) -> bool:
    return any("MEMKV_DATABASE_URL" in step.command for step in block)


@pytest.mark.parametrize(
    ("target", "last"), [("demo", "memkv demo"), ("test", "pytest --numprocesses=2 --dist=loadfile")]
)
def test_make_does_everything(target: str, last: str) -> None:
    """On a machine with nothing: environment, torch, kernels, models; then what it is for."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", target, "VENV=build/no-environment-yet"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout
    order = [
        "-m venv",
        "torch==",
        "--editable",
        "models install smollm2-135m-instruct all-minilm-l6-v2",
        last,
    ]
    places = [said.index(words) for words in order]
    assert places == sorted(places)
    assert said.rstrip().endswith(last)


def test_the_first_screen_has_the_two_commands() -> None:
    said = [step.command for block in console() for step in block]
    assert "make demo" in said
    assert "make test" in said


def test_generated_parts_are_current() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    for page in pages:
        assert rendered(page) == page, "run: python tests/docs/write_readme.py"
    for name in PARTS:
        assert sum(f"write_readme.py: {name} -->" in page for page in pages) == 1


def test_nothing_is_left_to_be_filled_in() -> None:
    assert not re.search(r"PLACEHOLDER|TODO|TBD|XXX|FIXME|\?\?\?", README)


def test_every_path_exists() -> None:
    places = set(re.findall(r"(?<![\w/.$-])((?:memkv|api|csrc|tests|migrations)/[\w./*-]*)", README))
    places |= {"LICENSE", "Makefile", "pyproject.toml", ".ci/run"}
    assert len(places) > 15
    missing = [place for place in sorted(places) if not (ROOT / place.rstrip(".")).exists()]
    assert missing == []


def test_every_module_exists() -> None:
    drawn = "\n".join(blocks(README, ""))
    modules = set(re.findall(r"\b(text|store|engine|kv|model)\.([a-z_]+)\b", drawn))
    assert modules
    for package, name in modules:
        assert (ROOT / "memkv" / package / f"{name}.py").is_file(), f"{package}.{name}"


def test_the_tree_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "memkv").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"^memkv/(\w+)/ ", README, re.MULTILINE))


def test_no_registry_is_named() -> None:
    for name in ("README.md", "Makefile", ".ci/run", "pyproject.toml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!127\.0\.0\.1)[\w.]+", text), name
