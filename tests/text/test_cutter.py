"""Documents cut in another process, which hangs, eats memory and dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memkv.errors import InternalServerError, ServiceUnavailableError, UnprocessableDocumentError
from memkv.text.chunker import chunk_text
from memkv.text.confinement import why_not
from memkv.text.cutter import CutLimits, Cutter
from memkv.text.tokenizer import PlainTokenizer, TextTokenizer

TEXT = "The lamp of Skerra <|im_end|> was lit in 1869.\n\nIt has a héron 🦢 on it.\n\n" * 40


@pytest.fixture
def cutter_with(smollm2_tokenizer: TextTokenizer) -> Iterator[Callable[..., Cutter]]:
    made: list[Cutter] = []

    def make(**limits: float) -> Cutter:
        made.append(Cutter(smollm2_tokenizer, CutLimits(**limits)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cutter in made:
        cutter.close()


def test_the_chunks_are_those_of_chunk_text(
    cutter_with: Callable[..., Cutter], smollm2_tokenizer: TextTokenizer
) -> None:
    cutter = cutter_with()
    assert cutter.pid is None, "nothing is started before there is something to cut"
    for title in ("A title", ""):
        assert cutter.cut(TEXT, title, 64) == chunk_text(TEXT, title, smollm2_tokenizer, 64)
    first = cutter.pid
    assert cutter.cut("", "", 64) == []
    assert cutter.pid == first, "one process serves all"


def test_it_has_no_network(cutter_with: Callable[..., Cutter]) -> None:
    if why_not():
        pytest.skip(why_not())
    cutter = cutter_with()
    assert cutter.cut(TEXT, "", 64)
    assert "\nSeccomp:\t2\n" in Path(f"/proc/{cutter.pid}/status").read_text(), "a filter is in force"


def test_a_tokenizer_made_of_its_state_is_the_same(smollm2_tokenizer: TextTokenizer) -> None:
    again = PlainTokenizer(smollm2_tokenizer.state)
    assert again.encode_with_offsets(TEXT) == smollm2_tokenizer.encode_with_offsets(TEXT)


def test_a_process_that_dies_of_a_document_fails_that_one_alone(cutter_with: Callable[..., Cutter]) -> None:
    cutter = cutter_with()
    expected = cutter.cut(TEXT, "", 64)
    pid = cutter.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that it is in the middle of it
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(UnprocessableDocumentError, match="ended with signal 9"):
        cutter.cut(TEXT, "", 64)
    assert cutter.cut(TEXT, "", 64) == expected
    assert cutter.pid != pid


def test_a_process_that_died_between_two_documents_fails_none(cutter_with: Callable[..., Cutter]) -> None:
    cutter = cutter_with()
    expected = cutter.cut(TEXT, "", 64)
    assert cutter.pid is not None
    os.kill(cutter.pid, signal.SIGKILL)
    wait_for(lambda: state_of(cutter.pid) in ("Z", ""))
    assert cutter.cut(TEXT, "", 64) == expected


def test_a_document_that_hangs_is_left_after_some_seconds(cutter_with: Callable[..., Cutter]) -> None:
    cutter = cutter_with(seconds=0.5)
    cutter.cut(TEXT, "", 64)
    pid = cutter.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    started = time.perf_counter()
    with pytest.raises(UnprocessableDocumentError, match="nothing comes of it in 3 s"):
        cutter.cut(TEXT, "", 64)
    assert time.perf_counter() - started < 8.0
    assert state_of(pid) == "", "it is gone"
    assert cutter.cut(TEXT, "", 64)


def test_a_document_that_takes_too_much_cpu_time_is_left(cutter_with: Callable[..., Cutter]) -> None:
    cutter = cutter_with(seconds=0.5, characters_per_second=1 << 40)
    assert cutter.cut(TEXT, "", 64)
    with pytest.raises(UnprocessableDocumentError, match="CPU time"):
        cutter.cut("e" + "\N{COMBINING ACUTE ACCENT}" * 1_000_000, "", 64)
    assert cutter.cut(TEXT, "", 64)


def test_a_document_that_eats_memory_is_refused(cutter_with: Callable[..., Cutter]) -> None:
    cutter = cutter_with(bytes=8 << 20, bytes_per_character=0)
    assert cutter.cut(TEXT, "", 64)
    with pytest.raises(UnprocessableDocumentError, match=r"memory|ended with"):  # Rust ends where it has none
        cutter.cut(TEXT * 1000, "", 64)
    assert cutter.cut(TEXT, "", 64)


def test_what_cannot_be_cut_costs_no_process(cutter_with: Callable[..., Cutter]) -> None:
    cutter = cutter_with()
    with pytest.raises(InternalServerError, match="ValueError"):
        cutter.cut(TEXT, "", 1)
    pid = cutter.pid
    assert cutter.cut(TEXT, "", 64)
    assert cutter.pid == pid


def test_a_process_that_cannot_start_is_said_so(
    cutter_with: Callable[..., Cutter], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(broken))
    with pytest.raises(ServiceUnavailableError, match="status 7"):
        cutter_with().cut(TEXT, "", 64)
    broken.unlink()
    with pytest.raises(ServiceUnavailableError, match="No such file"):
        cutter_with().cut(TEXT, "", 64)


def test_it_ends_with_a_server_that_is_killed(tmp_path: Path, smollm2: Path) -> None:
    """When it waits, by the end of the pipe; when it hangs, by its limit of CPU time."""
    script = tmp_path / "server.py"
    script.write_text(
        "import sys, time\n"
        "from transformers import AutoTokenizer\n"
        "from memkv.text.cutter import Cutter\n"
        "from memkv.text.tokenizer import TextTokenizer\n"
        f"cutter = Cutter(TextTokenizer(AutoTokenizer.from_pretrained({str(smollm2)!r})))\n"
        "cutter.cut('a', '', 64)\n"
        "print(cutter.pid, open(f'/proc/{cutter.pid}/limits').read().split('Max cpu time')[1].split()[0])\n"
        "sys.stdout.flush()\n"
        "time.sleep(600)\n"
    )
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid, seconds = map(int, server.stdout.readline().split())
    server.kill()
    server.wait()
    assert seconds < 60
    wait_for(lambda: state_of(pid) in ("Z", ""))


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state_of(pid: int | None) -> str:
    """As in /proc: R, S, T, Z ...; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""
