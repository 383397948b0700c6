"""How processes that a daemon forked have ended, as the next one that it forks knows it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pyarrow as pa
import pytest

from headgate.spark.worker_main import ARROW_POOL, WRITTEN_CHARS, SharedTail, choose_memory_pool, how_ended

DAEMON = """
import os, signal, sys
from headgate.spark.worker_main import WATCH

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as Spark's daemon does
WATCH.begin()

def forked(function):
    pid = os.fork()
    if pid == 0:
        function()
        os._exit(0)
    return pid

def killed():
    print("in the child")
    print("to its error stream", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

def last():
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    grandchild = os.fork()  # of a worker: nobody watches it
    if grandchild == 0:
        os._exit(3)
    assert os.waitpid(grandchild, 0)[0] == grandchild
    for death in WATCH.known:
        os.write(1, repr((death.pid, death.how, death.written)).encode() + b"\\n")

pids = [forked(killed), forked(lambda: os._exit(7)), forked(lambda: None)]
alive = set(pids)
while alive:
    alive = {pid for pid in alive if os.path.exists(f"/proc/{pid}")}
os.write(1, repr(pids).encode() + b"\\n")
end = forked(last)
while os.path.exists(f"/proc/{end}"):
    pass
"""


def test_the_next_process_knows_how_the_former_ones_ended() -> None:
    told = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, timeout=120, check=True)
    first, *rest = [line for line in told.stdout.splitlines() if line != "in the child"]
    killed, failed, _ = eval(first)  # of this test
    deaths = {pid: (how, written) for pid, how, written in map(eval, rest)}
    assert deaths == {
        killed: (
            "was ended by SIGKILL, perhaps by the system for want of memory",
            "in the child\nto its error stream\n",
        ),
        failed: ("ended with exit code 7", ""),
    }
    assert told.stderr == "to its error stream\n"  # it goes where it always went
    assert "in the child" in told.stdout


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (0, ""),
        (signal.SIGSEGV, "was ended by SIGSEGV"),
        (signal.SIGKILL, "was ended by SIGKILL, perhaps by the system for want of memory"),
        (3 << 8, "ended with exit code 3"),
    ],
)
def test_a_status_is_told(status: int, told: str) -> None:
    assert how_ended(status) == told


def test_a_page_keeps_the_end_of_what_is_written() -> None:
    page = SharedTail()
    assert (page.pid, page.written) == (0, "")
    page.claim()
    page.add("ä" * WRITTEN_CHARS)
    page.add("the end")
    assert page.pid == os.getpid()
    assert page.written == "ä" * (WRITTEN_CHARS - 7) + "the end"
    page.add("€𝄞" * WRITTEN_CHARS)  # the widest characters fit, too
    assert page.written == "€𝄞" * (WRITTEN_CHARS // 2)
    page.close()


FREED = """
import resource
import sys
from headgate.spark.worker_main import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "kept":
    keep_freed_memory()
bytearray(4 << 20)
before = faults()
for _ in range(20):
    blocks = [bytearray(4 << 20) for _ in range(3)]
    del blocks
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told so")
def test_memory_of_a_batch_serves_the_next_one_without_the_system() -> None:
    pages = {
        how: int(subprocess.run([sys.executable, "-c", FREED, how], capture_output=True, check=True).stdout)
        for how in ("kept", "given back")
    }

    assert pages["kept"] < pages["given back"] / 5


@pytest.mark.parametrize(("named", "used"), [(None, "jemalloc"), ("system", "system")])
def test_arrow_takes_memory_by_jemalloc_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, named: str | None, used: str
) -> None:
    if "jemalloc" not in pa.supported_memory_backends():
        pytest.skip("this Arrow has no jemalloc")
    before = pa.default_memory_pool()
    monkeypatch.delenv(ARROW_POOL, raising=False)
    if named is not None:
        monkeypatch.setenv(ARROW_POOL, named)
    try:
        pa.set_memory_pool(pa.system_memory_pool())
        choose_memory_pool()
        assert pa.default_memory_pool().backend_name == used
    finally:
        pa.set_memory_pool(before)
