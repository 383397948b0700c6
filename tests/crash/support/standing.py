"""Commands that keep a pipeline running (``--supervised``, ``--standby``), and what such a pipeline wrote.

With Spark, or with workers that are plain child processes (``without_spark``).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import psutil
import pytest

from crash.support.pacing import hurry
from crash.support.processes import STARTED_S, Child, Event, until, without_spark
from crash.support.results import assert_equal
from headgate.connectors.files.file_committer import read_committed

RATE = 2_000
TIMES = int(os.environ.get("HEADGATE_TEST_TIMES", "2"))
"""How often each test kills."""

MINUTES = float(os.environ.get("HEADGATE_TEST_MINUTES", "0"))
"""How long it goes on killing at least."""

WITH_SPARK = [pytest.param(False, id="processes"), pytest.param(True, id="spark", marks=pytest.mark.spark)]
"""For what Spark has a part in: its JVM and its workers end with a driver, or wait beside one."""

SPARK_IN_DEEP = [
    pytest.param(False, id="processes"),
    pytest.param(True, id="spark", marks=[pytest.mark.spark, pytest.mark.deep]),
]
"""For what supervisor, standby and driver decide among themselves: with Spark, each start costs twice the time."""

PROCESSES_IN_DEEP = [
    pytest.param(False, id="processes", marks=pytest.mark.deep),
    pytest.param(True, id="spark", marks=pytest.mark.spark),
]
"""For what is shown with Spark, and happens in the same way where processes stand in for its workers."""

PATIENT = "--silence=20s"
"""For a standby beside a driver that is not to be replaced while it lives, however busy the machine is."""

PROGRAM = """
import sys
import polars as pl
import headgate as hg
from crash.support.pacing import Paced

root, rows, rate, checkpoints = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
frames = [pl.DataFrame({"id": range(first, rows, 4)}).with_columns(key=pl.col("id") % 50) for first in range(4)]


def counted(so_far, row):
    return {"key": so_far["key"], "n": so_far["n"] + row["n"]}


pipeline = hg.Pipeline(
    "kept",
    parallelism=2,
    checkpointing=hg.Checkpointing(interval="200ms", dir=checkpoints),
    restart=hg.FixedDelay(delay="50ms"),
)
source = pipeline.source(Paced.of(frames, rate, root))
source.sink(hg.FileSink(f"{root}/rows", roll_interval=0), name="rows")
ones = source.filter(pl.col("id") % 20 == 0).select("key", n=pl.lit(1, pl.Int64))
ones.key_by("key").reduce(counted).sink(hg.FileSink(f"{root}/counts", roll_interval=0), name="counts")
"""


class Place:
    """One pipeline and the processes that a test starts for it."""

    def __init__(self, root: Path, *, with_spark: bool, checkpoints: str | None = None, rows: int = 0) -> None:
        self.root = root
        self.rows = rows or int(max(20_000, RATE * 60 * MINUTES))
        self.checkpoints = checkpoints or str(root / "checkpoints")
        self.program = root / "program.py"
        self.program.write_text(PROGRAM)
        self._with_spark = with_spark
        self.processes: list[Process] = []

    def run(self, *options: str, kill_at: str = "") -> Process:
        """Start the command with ``options``; each in a session of its own, and killed at ``kill_at`` once for all."""
        given = [str(self.root), str(self.rows), str(RATE), self.checkpoints]
        command = [sys.executable, "-u", "-m", "headgate.cli", "run", "--json", *options]
        command += ["--", str(self.program), *given]
        env = {} if self._with_spark else without_spark()
        if kill_at:
            env["HEADGATE_KILL_AT"] = f"{kill_at}:1:{self.root / f'killed-{kill_at}'}"
        started = Process(command, self.root / f"process-{len(self.processes)}", env)
        self.processes.append(started)
        return started

    def until_time_is_up(self, begun_s: float, count: int) -> bool:
        """Whether enough was killed, for long enough."""
        return count >= TIMES and time.monotonic() - begun_s >= 60 * MINUTES

    def hurry(self) -> None:
        hurry(self.root)

    def assert_exactly_once(self) -> None:
        """Everything was written, once."""
        ids = pl.DataFrame({"id": range(self.rows)})
        assert_equal(read_committed(str(self.root / "rows")).select("id"), ids, "rows")
        thin = ids.filter(pl.col("id") % 20 == 0).select(key=pl.col("id") % 50)
        counts = thin.select("key", n=(pl.int_range(pl.len()) + 1).over("key").cast(pl.Int64))
        assert_equal(read_committed(str(self.root / "counts")), counts, "counts")

    def close(self) -> None:
        for process in self.processes:
            process.close()


class Process(Child):
    """One of the commands."""

    cursor = 0

    def wait(self, what: str, is_wanted: Callable[[Event], bool], timeout_s: float = STARTED_S) -> Event:
        """Return the next wanted event."""
        index = self.wait_event(is_wanted, self.cursor, timeout_s, what)
        self.cursor = index + 1
        return self.events[index]

    def checkpoint(self) -> Event:
        return self.wait("a checkpoint", lambda e: e["event"] == "checkpoint")

    def notice(self, notice: str) -> Event:
        return self.wait(notice, lambda e: e["event"] == "standby" and e["notice"] == notice)

    def has(self, event: str, start: int = 0) -> bool:
        return any(e["event"] == event for e in self.events[start:])

    def stands_by(self) -> bool:
        """Whether it waits for the end of another driver, with a session that is ready."""
        notices = [event["notice"] for event in self.events if event["event"] == "standby"]
        return bool(notices) and notices[-1] == "watching"

    def driver(self) -> psutil.Process:
        """Return the process of the driver: the supervisor's child, or the command itself."""

        def find() -> psutil.Process | None:
            with contextlib.suppress(psutil.Error):
                me = psutil.Process(self.pid)
                if "headgate.cli.supervisor" not in me.cmdline():
                    return me
                found = [p for p in me.children() if "headgate.cli.__main__" in p.cmdline()]
                return found[0] if found and found[0].status() != psutil.STATUS_ZOMBIE else None
            return None

        found: psutil.Process = until(find, "the driver's process")
        return found


def freeze_workers(driver: psutil.Process) -> list[psutil.Process]:
    """Suspend what ``driver`` has started, so that no checkpoint completes; return that, but not its JVM."""
    frozen = []
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() != "java":
                process.suspend()
                frozen.append(process)
    return frozen


def thaw(frozen: list[psutil.Process]) -> None:
    """Let them go on, those that are still there."""
    for process in frozen:
        with contextlib.suppress(psutil.Error):
            process.resume()


def whoever_completes(processes: list[Process], timeout_s: float = STARTED_S) -> Process:
    """Return the first of ``processes`` that completes a checkpoint from now on."""
    starts = {process.pid: len(process.events) for process in processes}

    def find() -> Process | None:
        return next((p for p in processes if p.has("checkpoint", starts[p.pid])), None)

    found: Process = until(find, "a checkpoint of any of them", timeout_s)
    return found


def tale(processes: list[Process]) -> str:
    """Return what all of them told, for a failing test."""
    return "\n\n".join(process.tale(f"process {index}") for index, process in enumerate(processes))
