"""The shim counts every call that strace sees, and the fake model notices whatever is wrong with KV."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fault_model import FakeRunner, fake_model, text_tokenizer
from fault_process import HERE, SIGKILLED, Nursery, build_shim

CALLS = (
    "write,pwrite64,fsync,fdatasync,rename,link,linkat,unlink,unlinkat,mkdir,rmdir,ftruncate,fallocate,fchmod"
)
CODE = """
import os, sys
sys.path[:0] = sys.argv[2:]
from fault_journal import Journal
from fault_life import NAME, delete, end, put
from fault_model import fake_models, fault_config
from fault_process import shim
from memkv.memory import Memory
from memkv.wire import CollectionCreate, StoreGC
from pathlib import Path
os.access("/fault/begin", os.F_OK)
shim().fault_arm(0, 0, 0)
with fake_models(), Memory.open(fault_config(sys.argv[1])) as memory:
    memory.create_collection(CollectionCreate(name=NAME))
    put(memory, Journal(sys.argv[1] + ".journal"), "d", [1, 2])
    delete(memory, Journal(sys.argv[1] + ".journal"), "d")
    end(memory, memory.admin.gc(StoreGC()))
count = shim().fault_count()
os.access("/fault/end", os.F_OK)
print(count)
"""


def test_no_call_escapes_the_shim(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("no strace to compare with")
    trace = tmp_path / "trace"
    places = [str(HERE), str(HERE.parent / "store"), str(HERE.parent)]
    done = subprocess.run(
        ["strace", "-f", "-qq", "-y", "-o", str(trace), "-e", f"trace={CALLS},openat,access,faccessat",
         "-E", f"LD_PRELOAD={build_shim()}",
         sys.executable, "-c", CODE, str(tmp_path / "data"), *places],
        stdout=subprocess.PIPE, text=True, check=False, timeout=240, env=dict(os.environ),
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip("strace may not trace here")
    lines = trace.read_text().splitlines()
    begin = next(index for index, line in enumerate(lines) if "/fault/begin" in line)
    end = next(index for index, line in enumerate(lines) if "/fault/end" in line)
    seen = [line for line in lines[begin + 1 : end] if _changes_something(line)]
    assert int(done.stdout) == pytest.approx(len(seen), abs=2), "\n".join(seen[-20:])
    assert len(seen) > 60


def _changes_something(line: str) -> bool:
    call = line.split(None, 1)[1]
    if call.startswith("openat"):
        return "O_CREAT" in call
    if call.startswith("write("):  # of regular files; the journal is written by another call
        return "<pipe:" not in call and "<socket:" not in call and "<anon_inode" not in call
    return not call.startswith(("access", "faccessat", "+++", "---", "<..."))


def test_the_fake_model_tells_any_wrong_slot() -> None:
    runner = FakeRunner(fake_model())
    other = FakeRunner(fake_model("finetuned"))
    tokens, positions = np.arange(3, 40), np.arange(37)
    keys, values = runner._kv(tokens, positions, 0)
    assert (keys[:, 0] == tokens).all()
    for changed in (
        runner._kv(tokens, positions + 1, 0),
        runner._kv(tokens + 1, positions, 0),
        runner._kv(tokens, positions, 1),
        other._kv(tokens, positions, 0),
    ):
        different = (changed[0][:, 1:] != keys[:, 1:]).any(axis=1) | (changed[1] != values).any(axis=1)
        assert different.all()


def test_a_note_is_one_token() -> None:
    ids = text_tokenizer().encode("Kept in note 0042 for")
    assert text_tokenizer().encode(" 0042")[0] in ids
    assert len(text_tokenizer().encode(" 0042")) == 1
    assert len(text_tokenizer().encode("#0042")) > 1


def test_a_number_that_comes_again_is_another_process(tmp_path: Path) -> None:
    last = Path("/proc/sys/kernel/ns_last_pid")
    with Nursery(tmp_path) as nursery:
        ended = nursery.start("gc:collect")
        assert ended.wait() == 0
        for _ in range(50):  # another process may take the number
            try:
                last.write_text(str(ended.pid - 1))
            except OSError:
                pytest.skip("process numbers cannot be chosen here")
            again = nursery.start("signal:pause")
            if again.pid == ended.pid:
                assert again.poll() is None
                assert again.kill() == SIGKILLED
                return
            again.kill()
    pytest.skip("other processes take the number")
