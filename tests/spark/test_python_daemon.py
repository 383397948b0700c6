"""The process that workers are forked from: what its children can do, and what its import path leaves out."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest

from headgate.spark.early_daemon import ADDRESS, MODULE, OF_WORKERS, SOCKET_BYTES_MAX, EarlyDaemon

HOME = Path(pyspark.__file__).parent

CHILDREN = r"""
    import os, sys, traceback
    from headgate.spark import python_daemon as daemon

    daemon.prepare()
    loaded = set(sys.modules)
    ours = {name for name in loaded if name.startswith("headgate.")}

    def child():
        import numpy as np
        import polars as pl
        import pyarrow as pa
        import pyarrow.compute as pc

        random = np.random.randint(1 << 62)
        frame = pl.DataFrame({"key": np.arange(300_000) % 7, "value": np.arange(300_000)})
        counts = frame.lazy().group_by("key").agg(pl.len(), pl.col("value").sum()).collect()
        assert counts["len"].sum() == 300_000 and counts["value"].sum() == sum(range(300_000))
        order = pc.sort_indices(pa.array(np.arange(300_000)[::-1]))
        assert order[0].as_py() == 299_999
        assert {name for name in sys.modules if name.startswith("headgate.")} == ours
        os.write(1, b"%d\n" % random)  # one write: the children share the pipe

    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                child()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""

PATH = """
    import sys
    from headgate.spark import python_daemon as daemon

    given = {given!r}
    sys.path[:0] = given
    sys.path_importer_cache[given[0] + "/pyspark"] = None
    daemon.drop_archives_from_path()
    print([entry for entry in given if entry in sys.path], [c for c in sys.path_importer_cache if given[0] in c])
"""

THREADS = """
    import signal
    from pathlib import Path

    import pyspark.daemon
    from headgate.spark import python_daemon as daemon

    def manager():
        for status in Path("/proc/self/task").glob("*/status"):
            lines = dict(line.split(":\\t", 1) for line in status.read_text().splitlines())
            print(lines["Name"], int(lines["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1, sep=":")

    pyspark.daemon.manager = manager
    daemon.main()
"""


def _python(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_children_compute_with_the_imported_libraries_and_draw_different_random_numbers() -> None:
    drawn = _python(CHILDREN).split()
    assert len(drawn) == 3
    assert len(set(drawn)) == 3


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which signals a thread blocks")
def test_no_thread_of_the_daemon_takes_sigterm() -> None:  # Spark's handler would hang up on every worker
    threads = _python(THREADS).split("\n")[:-1]
    assert len(threads) > 1, "imported libraries have threads of their own"
    assert [thread for thread in threads if not thread.endswith(":1")] == []


def test_the_archive_of_the_installed_pyspark_and_sparks_core_leave_the_import_path() -> None:
    archive, core = f"{HOME}/python/lib/pyspark.zip", f"{HOME}/jars/spark-core_2.13-4.0.0.jar"
    py4j, users = f"{HOME}/python/lib/py4j-0.10.9-src.zip", "/somewhere/users.zip"
    assert _python(PATH.format(given=[archive, core, py4j, users])).strip() == f"{[py4j, users]} []"


def test_the_archive_of_another_pyspark_stays() -> None:
    other = "/opt/spark/python/lib/pyspark.zip"
    assert _python(PATH.format(given=[other])).strip() == f"{[other]} ['{other}/pyspark']"


EARLY = """
import os, sys
from headgate.spark.early_daemon import take_over
is_taken = take_over(sys.argv[1], lambda: print("ready", flush=True))
print(is_taken, os.environ.get("SPARK_REUSE_WORKER"), sys.argv[1:], flush=True)
"""
OURS = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
OF_SPARK = "from headgate.spark.early_daemon import hand_over; print(hand_over(), flush=True)"


def begin(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**OURS, **environment}, text=True)


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return os.path.relpath(tmp_path_factory.mktemp("early") / "socket")  # such a path may have 100 characters


@pytest.fixture
def early(address: str) -> Iterator[subprocess.Popen[str]]:
    with begin(EARLY, address) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def said(process: subprocess.Popen[str]) -> list[str]:
    """Return what a process says after its input has been closed."""
    return process.communicate()[0].splitlines()


def test_the_early_one_becomes_what_spark_begins(early: subprocess.Popen[str], address: str) -> None:
    told = said(begin(OF_SPARK, "pyspark.worker", **{ADDRESS: address, "SPARK_REUSE_WORKER": "1"}))
    assert told == ["True 1 ['pyspark.worker']", "True"], "the first of them says the other one, to the same output"
    assert said(early) == []
    assert not Path(address).parent.exists()


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "PYTHONHASHSEED"])
def test_an_early_one_with_other_settings_of_libraries_is_left_alone(
    early: subprocess.Popen[str], address: str, name: str
) -> None:
    assert said(begin(OF_SPARK, **{ADDRESS: address, name: "77"})) == ["False"]
    told = said(begin(OF_SPARK, **{ADDRESS: address}))
    assert told == ["True None []", "True"], "the next one that fits has it"
    assert said(early) == []


def test_an_early_one_that_is_not_needed_ends_with_the_process_that_began_it(
    early: subprocess.Popen[str], address: str
) -> None:
    assert said(early) == [f"False None {[address]}"]
    assert said(begin(OF_SPARK, **{ADDRESS: address})) == ["False"]
    assert said(begin(OF_SPARK, **{ADDRESS: ""})) == ["False"]


def test_none_is_begun_where_the_path_of_its_socket_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("d" * (SOCKET_BYTES_MAX - len(str(tmp_path))))
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    assert EarlyDaemon.begin(os.environ, "early-") is None
    assert list(place.iterdir()) == []


@pytest.mark.long
def test_workers_are_forked_by_the_early_one(address: str) -> None:
    daemon = EarlyDaemon(OURS, Path(address).absolute().parent)
    given: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-m", MODULE, "pyspark.worker"]
    seed = {name: OURS[name] for name in ["PYTHONHASHSEED"] if name in OURS}  # one that is set stays
    of_spark = {**OURS, **OF_WORKERS, **seed, ADDRESS: daemon.address}
    while not Path(address).exists():  # Spark takes longer than that to begin its own
        time.sleep(0.01)
    with subprocess.Popen(command, env=of_spark, **given) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        (port,) = struct.unpack(">i", process.stdout.read(4))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            (worker,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
            forked_by = psutil.Process(worker).ppid()
            assert forked_by in {child.pid for child in psutil.Process().children()} - {process.pid}
        process.stdin.close()
        assert process.wait() == 0
    daemon.end()
    assert not psutil.pid_exists(forked_by)
