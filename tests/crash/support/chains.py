"""Two pipelines in a row that are kept running, as two programs, over streams, topics of Kafka, or tables.

Over streams one goes on by positions, one by a reader group. Over topics one counts by key, and one has windows. Over
tables one reads changes of PostgreSQL into Delta and Iceberg, and one follows the table of Delta into PostgreSQL.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from crash.support.processes import HOOK, STARTED_S, TESTS, kill
from crash.support.standing import MINUTES, TIMES, Process

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

KAFKA_PROGRAM = """
import sys
import polars as pl
import pyarrow as pa
import headgate as hg

name, brokers, files, end, checkpoints = sys.argv[1:]


class Count(hg.ProcessFunction):
    schema = {"id": pa.int64(), "key": pa.int64(), "n": pa.int64()}

    def open(self, state):
        self.count = state.value("count", pa.int64())

    def process(self, row, context):
        self.count.put(self.count.get(0) + 1)
        return [{"id": row["id"], "key": row["key"], "n": self.count.get()}]


pipeline = hg.Pipeline(
    name,
    parallelism=2,
    checkpointing=hg.Checkpointing(interval="200ms", dir=checkpoints),
    restart=hg.FixedDelay(delay="50ms"),
)
if name == "first":
    schema = {"id": int, "key": int}
    source = pipeline.source(hg.Kafka(brokers, "in", format="json", schema=schema, end=end or None), name="in")
    counted = source.key_by("key").process(Count(), name="count")
    # each key has one partition, as in the topic that is read, and the time of a record is its number
    placed = counted.with_columns(
        text=pl.col("key").cast(pl.String),
        part=(pl.col("key") % 2).cast(pl.Int32),
        at=pl.from_epoch(pl.col("id"), time_unit="ms"),
    )
    placed.sink(hg.KafkaSink(brokers, "middle", key="text", partition="part", timestamp="at"), name="out")
else:
    schema = {"id": int, "key": int, "n": int}
    reads = hg.Kafka(
        brokers, "middle", format="json", schema=schema, metadata={"at": "timestamp"}, end=end or None, group="second"
    )
    timed = pipeline.source(reads, name="in").with_timestamps("at", out_of_orderness="30s")
    windows = timed.key_by("key").window(hg.Tumbling("1s"))
    summed = windows.agg(records=pl.len(), ids=pl.col("id").sum(), counts=pl.col("n").sum())
    summed.sink(hg.FileSink(files, roll_interval=0), name="out")
"""

TABLES_PROGRAM = """
import sys
import headgate as hg

name, url, lake, checkpoints = sys.argv[1:]
pipeline = hg.Pipeline(
    name,
    parallelism=2,
    checkpointing=hg.Checkpointing(interval="1s", dir=checkpoints),
    restart=hg.FixedDelay(delay="50ms"),
)
if name == "first":
    changes = pipeline.source(hg.PostgresChanges(url, ["orders", "customers"]), name="in")
    spread = changes.rebalance()
    spread.sink(hg.DeltaSink(f"{lake}/changes", create=True), name="delta")
    catalog = {"type": "sql", "uri": f"sqlite:///{lake}/catalog.db", "warehouse": f"file://{lake}/warehouse"}
    spread.sink(hg.IcebergSink("lake.changes", properties=catalog, create=True), name="iceberg")
else:
    followed = pipeline.source(hg.Delta(f"{lake}/changes", follow=True, poll_interval="200ms"), name="in")
    followed.sink(hg.PostgresSink(url, "log", commit="prepared"), name="out")
"""


class Chain:
    """The two programs, each of them kept, and all that they have started."""

    def __init__(self, root: Path, program: str, *, with_spark: bool) -> None:
        self._root, self._with_spark = root, with_spark
        self._program = root / "program.py"
        self._program.write_text(program)
        self.links: list[Process] = []
        self._ended: list[Process] = []
        self._given: list[tuple[str, ...]] = []
        self.other_strikes: Sequence[tuple[str, Callable[[], None]]] = ()
        """What else can be killed, and how."""

    def start(self, *given: str) -> None:
        """Start one of them: its name, and what its program is given but for the directory of checkpoints."""
        self.links.append(self._started(given))
        self._given.append(given)

    def stop(self, link: Process) -> None:
        """Stop one of them by a signal; it goes well."""
        link.signal(signal.SIGTERM)
        assert link.exit_code(STARTED_S) == 0, link.tale("it did not stop")
        link.assert_gone()

    def start_again(self, link: Process, *given: str) -> Process:
        """Start one that has stopped with the same arguments, or others; return it."""
        at = self.links.index(link)
        self._ended.append(link)
        self.links[at] = self._started(given or self._given[at])
        return self.links[at]

    def _started(self, given: Sequence[str]) -> Process:
        hooks = [str(HOOK)] if self._with_spark else [str(TESTS / "crash" / "without_spark"), str(TESTS.parent)]
        paths = os.pathsep.join([*hooks, str(TESTS), str(TESTS.parent / "src")])
        command = [sys.executable, "-u", "-m", "headgate.cli", "run", "--json", "--supervised"]
        command += ["--restart", "fixed-delay:delay=50ms", "--", str(self._program)]
        command += [*given, str(self._root / "checkpoints")]
        return Process(command, self._root / given[0], {"PYTHONPATH": paths})

    def strike(self, dice: random.Random) -> str:
        """Kill somebody, or everybody but the supervisors; return whom, in words."""
        link = dice.choice(self.links)
        strikes: list[tuple[str, Callable[[], None]]] = [
            ("a worker", lambda: self._kill_below(link, dice)),
            ("a worker of each", lambda: [self._kill_below(x, dice) for x in self.links] and None),
            ("a driver", lambda: kill(link.driver().pid)),
            ("both drivers", lambda: [kill(x.driver().pid) for x in self.links] and None),
            ("a driver with all that it has started", lambda: _kill_all(link.driver())),
            *self.other_strikes,
        ]
        what, act = dice.choice(strikes)
        act()
        return what

    def stops(self, dice: random.Random) -> list[tuple[str, Callable[[], None]]]:
        """Return what stops one or both by a signal and starts them again, for ``other_strikes``."""

        def stop(count: int) -> None:
            stopped = dice.sample(self.links, count)
            for link in stopped:
                self.stop(link)
            for link in stopped:
                self.start_again(link)

        return [
            ("a pipeline, by SIGTERM,", lambda: stop(1)),
            ("both pipelines, by SIGTERM,", lambda: stop(2)),
        ]

    def strike_until_time_is_up(self, dice: random.Random) -> Counter[str]:
        """Strike again and again, each time with a checkpoint of both behind it; return how often which."""
        begun_s, told = time.monotonic(), Counter[str]()
        while not self.is_time_up(begun_s, told.total()):
            threading.Event().wait(dice.uniform(0.0, 1.0))  # the fault's time: not a wait for anything
            what = self.strike(dice)
            told[what] += 1
            print(f"{told.total()}: {time.monotonic() - begun_s:.0f} s: {what} killed", flush=True)
            self.checkpoint(STARTED_S)
        return told

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
        for link in [*self._ended, *self.links]:
            link.close()


def _is_worker(process: psutil.Process, driver: psutil.Process) -> bool:
    """Whether it is neither the JVM, nor what starts workers, nor the daemon that the JVM knows."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        is_of_worker = parent is not None and parent.pid != driver.pid and parent.name() != "java"
        return is_of_worker and not process.children() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kill_all(driver: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        for process in [driver, *driver.children(recursive=True)]:
            kill(process.pid)
