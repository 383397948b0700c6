"""Barriers that overtake, with the real driver and real workers: what was in flight is restored, and processed once."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.test_process_results import events, generator, same

import headgate as hg
from headgate import fault_points
from headgate.codec.snapshot import IN_FLIGHT_PREFIX
from headgate.connectors.files.commit import read_committed
from headgate.model.definition import PipelineDefinition
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.backends import open_storage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
ROWS = 6_000


class Slowly:
    """A function that takes its time while a file is there: more each time, so that a busy machine sees no end."""

    def __init__(self, flag: Path, column: str) -> None:
        self._flag, self._column, self._slow_s = flag, column, 0.1

    def __call__(self, row: dict[str, Any]) -> bool:
        if row[self._column] % 20 == 0 and self._flag.exists():
            time.sleep(self._slow_s)  # slow work: not a wait for anything
            self._slow_s += 0.005
        return True


def slowed(root: Path, parallelism: int, timeout: Any = 0) -> PipelineDefinition:
    """Rows spread, joined and counted by key, all of them slowly; the source does not wait for anybody."""
    pipeline = pipeline_at(root, parallelism=parallelism, interval="100ms", alignment_timeout=timeout)
    source = replace(generator(ROWS, splits=4, batch=50), rows_per_second=100_000)
    rows = pipeline.source(source)
    spread = rows.rebalance().filter(lambda row: True, name="spread")
    even = rows.filter(lambda row: row["id"] % 2 == 0, name="even")
    odd = spread.filter(lambda row: row["id"] % 2 == 1, name="odd")
    joined = even.union(odd).filter(Slowly(root / "slow", "id"), name="joined")
    joined.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    ones = joined.select("key", n=pl.lit(1))
    counts = ones.key_by("key").reduce(added, name="sum").filter(Slowly(root / "slow", "n"))
    counts.sink(hg.FileSink(root / "sums", "parquet", roll_interval=0), name="sums")
    return definition_of(pipeline)


def added(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": total["n"] + row["n"]}


def newest(root: Path) -> Manifest:
    return candidates(CheckpointLog(open_storage(str(root / "checkpoints")), "p").observe())[0]


def in_flight(manifest: Manifest) -> dict[str, int]:
    """Return how many records were on their way, by the node that they were on their way to."""
    found: dict[str, int] = {}
    for part in (part for entry in manifest.entries for part in entry.parts if part.rows):
        if part.section.startswith(IN_FLIGHT_PREFIX):
            node = part.section.removeprefix(IN_FLIGHT_PREFIX)
            found[node] = found.get(node, 0) + sum((part.rows or {})[node].values())
    return found


def overtook(run: Run, root: Path, node: str = "joined") -> None:
    """Wait until records were on their way to ``node`` in a completed checkpoint."""
    run.wait_checkpoints(1)
    deadline = time.monotonic() + WAIT_S
    while node not in in_flight(newest(root)):
        assert time.monotonic() < deadline, "nothing was ever in flight"
        run.wait_checkpoints(1)


def check(root: Path) -> None:
    made = events(generator(ROWS, splits=4, batch=50))
    same(read_committed(str(root / "rows")).select("id", "key", "value"), made.select("id", "key", "value"))
    numbers = made.group_by("key").agg(n=pl.int_range(1, pl.len() + 1)).explode("n")
    same(read_committed(str(root / "sums")).select("key", "n"), numbers.with_columns(pl.col("n").cast(pl.Int32)))


@pytest.mark.parametrize("after", [2, 3, 1])
def test_what_was_in_flight_is_restored_at_another_parallelism(
    start: Start, tmp_path: Path, after: int
) -> None:  # UA14
    (tmp_path / "slow").touch()
    run = start(slowed(tmp_path, 2))
    overtook(run, tmp_path)
    run.kill(1)
    run.wait_restarts(1)
    overtook(run, tmp_path)
    run.driver.cancel()
    run.driver.join()
    assert in_flight(newest(tmp_path)), "a cancelled run takes no last checkpoint"
    run = start(slowed(tmp_path, after, timeout="50ms"))
    run.wait_checkpoints(1)
    (tmp_path / "slow").unlink()
    assert run.result().is_finished
    assert newest(tmp_path).is_final
    assert not in_flight(newest(tmp_path)), "the last checkpoint waits (UA3)"
    check(tmp_path)


@dataclass(frozen=True)
class KilledAt:
    """Has workers kill themselves at named points, each once."""

    root: Path
    points: tuple[tuple[str, int], ...]

    def __call__(self) -> None:
        entries = [f"{name}:{count}:{self.marker(i)}" for i, (name, count) in enumerate(self.points)]
        os.environ[fault_points.VARIABLE] = ";".join(entries)

    def marker(self, number: int) -> Path:
        return self.root / f"killed-{number}"

    def missing(self) -> list[tuple[str, int]]:
        return [point for i, point in enumerate(self.points) if not self.marker(i).exists()]


def test_workers_that_die_while_they_record_and_replay_do_it_again(start: Start, tmp_path: Path) -> None:  # UA11, UA13
    (tmp_path / "slow").touch()
    killed = KilledAt(tmp_path, (("overtook", 3), ("overtook", 10)))
    run = start(slowed(tmp_path, 2), prepare=killed)
    run.wait(lambda: not killed.missing(), "both died while they recorded")
    overtook(run, tmp_path)
    run.driver.cancel()
    run.driver.join()
    killed = KilledAt(
        tmp_path, (("in-replay", 1), ("in-replay", 2), ("in-replay", 3), ("after-snapshot-before-ack", 2))
    )
    for number in range(len(killed.points)):
        killed.marker(number).unlink(missing_ok=True)
    run = start(slowed(tmp_path, 3), prepare=killed)
    run.wait(lambda: not killed.missing(), "they died while they replayed")
    (tmp_path / "slow").unlink()
    assert run.result().is_finished
    check(tmp_path)


def changed(root: Path) -> PipelineDefinition:
    """The same state and the same rows, on other ways."""
    pipeline = pipeline_at(root, parallelism=2)
    rows = pipeline.source(generator(ROWS, splits=4, batch=50))
    rows.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    counts = rows.select("key", n=pl.lit(1)).key_by("key").reduce(added, name="sum")
    counts.sink(hg.FileSink(root / "sums", "parquet", roll_interval=0), name="sums")
    return definition_of(pipeline)


def test_a_stop_leaves_nothing_in_flight_and_a_changed_pipeline_goes_on(start: Start, tmp_path: Path) -> None:  # UA3
    (tmp_path / "slow").touch()
    run = start(slowed(tmp_path, 2))
    overtook(run, tmp_path)
    (tmp_path / "slow").unlink()
    run.driver.stop()
    assert not run.result().is_finished
    assert not in_flight(newest(tmp_path))
    assert start(changed(tmp_path)).result().is_finished
    check(tmp_path)


def test_a_changed_pipeline_is_refused_while_records_are_in_flight(start: Start, tmp_path: Path) -> None:  # UA16
    (tmp_path / "slow").touch()
    run = start(slowed(tmp_path, 2))
    overtook(run, tmp_path)
    run.driver.cancel()
    run.driver.join()
    run = start(changed(tmp_path))
    with pytest.raises(hg.HeadgateError, match=r"holds records on their way from .* stop it"):
        run.result()
