"""How processes that a daemon forked have ended, as the next one that it forks knows it."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest

from headgate.spark import worker_main
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


LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} (\w+) (\d+) (\S+): (.*)")


def written(tmp_path: Path, program: str) -> tuple[list[tuple[str, str, str]], str, str]:
    """Run ``program`` behind the beginning of a log; return its lines, and what came to both outputs."""
    begin = f"""
    import logging, sys, threading, warnings
    from pathlib import Path
    from headgate.spark import worker_main
    from headgate.spark.worker_main import WorkerLog
    running = [""]
    log = WorkerLog(Path({str(tmp_path)!r}), "p", 3)
    """
    text = textwrap.dedent(begin) + textwrap.dedent(program)
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = []
    for path in [*sorted((tmp_path / "p").glob("worker-3.log.*"), reverse=True), tmp_path / "p" / "worker-3.log"]:
        for line in path.read_text().splitlines() if path.exists() else ():
            found = LINE.fullmatch(line)
            lines.append((found[1], found[3], found[4]) if found else ("", "", line))
    return lines, ran.stdout, ran.stderr


def test_every_line_has_its_level_and_its_operator(tmp_path: Path) -> None:
    lines, out, err = written(
        tmp_path,
        """
        log.begin(lambda: running[0])
        running[0] = "shout"
        print("one"); print("two", 2, sep="\\n")
        sys.stdout.write("no end "); print("of line")
        print("to err", file=sys.stderr)
        logging.getLogger("library").warning("it says")
        logging.getLogger("library").debug("not this")
        warnings.warn("old")
        other = threading.Thread(target=lambda: print("beside")); other.start(); other.join()
        running[0] = ""
        print("nobody")
        """,
    )
    assert [line for line in lines if line[0] and "old" not in line[2]] == [
        ("INFO", "shout", "one"),
        ("INFO", "shout", "two"),
        ("INFO", "shout", "2"),
        ("INFO", "shout", "no end of line"),
        ("WARNING", "shout", "to err"),
        ("WARNING", "shout", "it says"),
        ("INFO", "-", "beside"),
        ("INFO", "-", "nobody"),
    ]
    assert any("old" in text and level == "WARNING" for level, _, text in lines)
    assert (out, err) == ("", "")


def test_a_handler_of_the_users_is_not_given_its_own_lines(tmp_path: Path) -> None:
    lines, _, err = written(
        tmp_path,
        """
        log.begin(lambda: "f")
        logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))
        logging.getLogger("mine").warning("once")
        """,
    )
    assert [text for _, _, text in lines] == ["once", "once"], "from the log, and from the user's own handler"
    assert err == ""


def test_files_are_rotated_and_a_process_that_is_used_again_writes_once(tmp_path: Path) -> None:
    lines, _, _ = written(
        tmp_path,
        """
        worker_main.FILE_BYTES_MAX = 2_000
        log.begin(lambda: "first")
        WorkerLog(log._path.parents[1], "p", 3).begin(lambda: "second")
        for number in range(300):
            print(number)
        """,
    )
    files = sorted(path.name for path in (tmp_path / "p").iterdir())
    assert files == ["worker-3.log", *(f"worker-3.log.{n}" for n in range(1, 5))]
    numbers = [text for _, who, text in lines if who == "second"]
    assert numbers == [str(n) for n in range(300 - len(numbers), 300)], "each once, the newest are kept"
    assert 100 < len(numbers) < 300


def test_a_log_that_cannot_be_written_fails_nobody(tmp_path: Path) -> None:
    (tmp_path / "p").touch()
    _, out, _ = written(
        tmp_path / "q",
        f"""
        try:
            WorkerLog(Path({str(tmp_path)!r}), "p", 3).begin(lambda: "f")
        except OSError:
            print("no log")
        log.begin(lambda: "f")
        sys.stdout._log.handlers[0].stream.close()
        print("lost")
        """,
    )
    assert out == "no log\n"


def test_logs_of_a_cluster_stay_with_spark_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(worker_main.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert worker_main.log_directory(is_local=True) == tmp_path / "headgate" / "logs"
    assert worker_main.log_directory(is_local=False) is None
    assert worker_main.spark_log("p") == tmp_path / "headgate" / "logs" / "p" / "spark.log"
    monkeypatch.setenv(worker_main.VARIABLE, str(tmp_path / "mine"))
    assert worker_main.log_directory(is_local=False) == tmp_path / "mine"
    (tmp_path / "mine").touch()
    assert worker_main.spark_log("p") is None, "there can be no such directory"


def test_what_goes_into_the_log_is_still_told_of_a_worker_that_is_lost(tmp_path: Path) -> None:
    lines, _, _ = written(
        tmp_path,
        """
        from headgate.spark.worker_main import SharedTail, TeeStream
        page = SharedTail()
        sys.stdout, sys.stderr = TeeStream(sys.stdout, page), TeeStream(sys.stderr, page)
        for _ in range(2):  # Spark uses a process again
            log.begin(lambda: "shout")
        print("the last words")
        print("and why", file=sys.stderr)
        assert page.written == "the last words\\nand why\\n", page.written
        """,
    )
    assert lines == [("INFO", "shout", "the last words"), ("WARNING", "shout", "and why")]
