"""Two pipelines in a row that are kept running, as two programs: one goes on by positions, one by a reader group."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from crash.processes import HOOK, TESTS, kill
from crash.standing import MINUTES, TIMES, Process

PROGRAM = """
import sys
import pyarrow as pa
import headgate as hg

name, reads, writes, store, checkpoints = sys.argv[1:]


class Count(hg.ProcessFunction):
    schema = {"key": pa.string(), "value": pa.int64(), "count": pa.int64()}

    def open(self, state):
        self.count = state.value("count", pa.int64())

    def process(self, row, context):
        self.count.put(self.count.get(0) + 1)
        return [{"key": row["key"], "value": row["value"], "count": self.count.get()}]


pipeline = hg.Pipeline(
    name,
    parallelism=2,
    checkpointing=hg.Checkpointing(interval="200ms", dir=checkpoints),
    restart=hg.FixedDelay(delay="50ms"),
)
source = hg.StreamSource(reads, store=store) if name == "first" else hg.GroupSource(reads, "chain", store=store)
counted = pipeline.source(source, name="in").key_by("key").process(Count(), name="count")
counted.sink(hg.StreamSink(writes, store=store, routing_key="key", segments=2), name="out")
"""


class Chain:
    """The two programs, each of them kept, and all that they have started."""

    def __init__(self, root: Path, store: str, *, with_spark: bool) -> None:
        self._root, self._store, self._with_spark = root, store, with_spark
        self._program = root / "program.py"
        self._program.write_text(PROGRAM)
        self.links: list[Process] = []

    def start(self, name: str, reads: str, writes: str) -> None:
        """Start one of them."""
        hooks = [str(HOOK)] if self._with_spark else [str(TESTS / "crash" / "without_spark"), str(TESTS.parent)]
        paths = os.pathsep.join([*hooks, str(TESTS), str(TESTS.parent / "src")])
        command = [sys.executable, "-u", "-m", "headgate.cli.app", "run", "--json", "--supervised"]
        command += ["--restart", "fixed-delay:delay=50ms", "--", str(self._program)]
        given = [name, reads, writes, self._store, str(self._root / "checkpoints")]
        self.links.append(Process([*command, *given], self._root / name, {"PYTHONPATH": paths}))

    def strike(self, dice: random.Random) -> str:
        """Kill somebody, or everybody but the supervisors; return whom, in words."""
        link = dice.choice(self.links)
        strikes: list[tuple[str, Callable[[], None]]] = [
            ("a worker", lambda: self._kill_below(link, dice)),
            ("a worker of each", lambda: [self._kill_below(x, dice) for x in self.links] and None),
            ("a driver", lambda: kill(link.driver().pid)),
            ("both drivers", lambda: [kill(x.driver().pid) for x in self.links] and None),
            ("a driver with all that it has started", lambda: _kill_all(link.driver())),
        ]
        what, act = dice.choice(strikes)
        act()
        return what

    def _kill_below(self, link: Process, dice: random.Random) -> None:
        driver = link.driver()
        found = [process for process in driver.children(recursive=True) if _is_worker(process, driver)]
        if found:
            kill(dice.choice(found).pid)

    def checkpoint(self, patience_s: float) -> None:
        """Wait until both have completed a checkpoint from now on."""
        for link in self.links:
            link.cursor = len(link.events)
        for link in self.links:
            link.wait("a checkpoint", lambda e: e["event"] == "checkpoint", patience_s)

    def is_time_up(self, begun_s: float, count: int) -> bool:
        """Whether there were enough strikes, for long enough."""
        return count >= 2 * TIMES and time.monotonic() - begun_s >= 60 * MINUTES

    def tale(self) -> str:
        """Return what both told, for a failing test."""
        return "\n\n".join(link.tale(f"link {number}") for number, link in enumerate(self.links))

    def close(self) -> None:
        """End what is left."""
        for link in self.links:
            link.close()


def _is_worker(process: psutil.Process, driver: psutil.Process) -> bool:
    """Whether it is neither the JVM, or what starts plain workers, nor a daemon of Spark's that has workers."""
    with contextlib.suppress(psutil.Error):
        return process.ppid() != driver.pid and not process.children() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kill_all(driver: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        for process in [driver, *driver.children(recursive=True)]:
            kill(process.pid)
