"""Barriers that overtake, with the real driver and real workers: what was in flight is restored, and processed once."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same

import headgate as hg
from headgate import fault_points
from headgate.codec.snapshot import IN_FLIGHT_PREFIX
from headgate.connectors.files.file_committer import read_committed
from headgate.model.config import StartConfig
from headgate.model.ids import Generation
from headgate.model.manifest import Manifest
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.driver.restart import NewGeneration, begin_generation
from headgate.runtime.driver.takeover import Takeover, taking_over
from headgate.storage.urls import open_storage

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


def slowed(
    root: Path, parallelism: int, timeout: Any = 0, *, name: str = "p", inline_bytes_max: int | None = None
) -> PipelineDefinition:
    """Rows spread, joined and counted by key, all of them slowly; the source does not wait for anybody."""
    pipeline = pipeline_at(root, parallelism=parallelism, interval="100ms", name=name, alignment_timeout=timeout)
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
    return definition_of(pipeline, inline_bytes_max=inline_bytes_max)


def added(total: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": total["n"] + row["n"]}


def log_of(root: Path, name: str = "p") -> CheckpointLog:
    return CheckpointLog(open_storage(str(root / "checkpoints")), name)


def newest(root: Path, name: str = "p") -> Manifest:
    return candidates(log_of(root, name).observe())[0]


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


def check(*roots: Path) -> None:
    """What pipelines wrote that went on one after another is everything, once."""
    made = events(generator(ROWS, splits=4, batch=50))
    same(committed("rows", *roots).select("id", "key", "value"), made.select("id", "key", "value"))
    numbers = made.group_by("key").agg(n=pl.int_range(1, pl.len() + 1)).explode("n")
    same(committed("sums", *roots).select("key", "n"), numbers.with_columns(pl.col("n").cast(pl.Int32)))


def committed(sink: str, *roots: Path) -> pl.DataFrame:
    found = [read_committed(str(root / sink)) for root in roots]
    return pl.concat([frame for frame in found if frame.height])


@pytest.mark.parametrize("after", few([3, 2, 1], 1))
def test_what_was_in_flight_is_restored_at_another_parallelism(start: Start, tmp_path: Path, after: int) -> None:
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


def test_workers_that_die_while_they_record_and_replay_do_it_again(start: Start, tmp_path: Path) -> None:
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


def test_a_changed_pipeline_is_refused_while_records_are_in_flight(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    run = start(slowed(tmp_path, 2))
    overtook(run, tmp_path)
    run.driver.cancel()
    run.driver.join()
    run = start(changed(tmp_path))
    with pytest.raises(hg.HeadgateError, match=r"holds records on their way from .* stop it"):
        run.result()


# -- named: by a path, in another directory, under another name, at another parallelism -------------------------------


def named(definition: PipelineDefinition, where: Path) -> PipelineDefinition:
    return replace(definition, config=replace(definition.config, start=StartConfig(str(where))))


def cancelled_with_records_in_flight(start: Start, root: Path) -> Manifest:
    """Return the newest checkpoint of a pipeline that is over; what it promised is committed, and nothing else."""
    root.mkdir()
    (root / "slow").touch()
    run = start(slowed(root, 2, inline_bytes_max=0))
    overtook(run, root)
    run.driver.cancel()
    run.driver.join()
    begun = begin_generation(slowed(root, 2), log_of(root), "whoever settles it", print)
    assert isinstance(begun, NewGeneration)
    begun.commits.close()
    assert in_flight(newest(root))
    return newest(root)


@pytest.mark.parametrize(("by_id", "parallelism"), [(False, 3), (True, 1)])
def test_an_unaligned_checkpoint_is_restored_by_its_path(
    start: Start, tmp_path: Path, by_id: bool, parallelism: int
) -> None:
    """Also when the first worker dies before the new pipeline has a checkpoint of its own."""
    here, there = tmp_path / "a", tmp_path / "b"
    found = cancelled_with_records_in_flight(start, here)
    where = here / "checkpoints" / "p" / (f"chk-{found.checkpoint}" if by_id else "")
    there.mkdir()
    killed = KilledAt(there, (("in-replay", 1),))
    second = named(slowed(there, parallelism, "50ms", name="q", inline_bytes_max=0), where)
    run = start(second, prepare=killed)
    run.wait(lambda: not killed.missing(), "a worker died while it replayed")
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    shutil.rmtree(here / "checkpoints")  # from now on the pipeline needs nothing from there
    run.kill(0)
    assert run.result().is_finished
    check(here, there)


def test_a_savepoint_that_is_asked_for_while_barriers_overtake_has_nothing_in_flight(
    start: Start, tmp_path: Path
) -> None:  # UA3, SV8
    here, there = tmp_path / "a", tmp_path / "b"
    here.mkdir()
    (here / "slow").touch()
    run = start(slowed(here, 2))
    overtook(run, here)
    run.wait(lambda: run.driver.progress.pending_checkpoint is not None, "a checkpoint is under way")
    asked = run.driver.end_with_savepoint(str(tmp_path / "taken"), drain=False)
    run.driver.is_asked_to_end = True
    (here / "slow").unlink()
    run.result()
    assert asked.result().savepoint is not None, asked.result().reason
    assert not in_flight(SavepointDirectory(str(tmp_path / "taken")).read().manifest)
    there.mkdir()
    assert start(named(slowed(there, 3, name="q"), tmp_path / "taken")).result().is_finished
    check(here, there)


def test_a_savepoint_of_a_pipeline_that_goes_on_has_nothing_in_flight(start: Start, tmp_path: Path) -> None:  # UA3, SV8
    """It is taken while records wait, and the checkpoints around it overtake them."""
    (tmp_path / "slow").touch()
    run = start(slowed(tmp_path, 2))
    overtook(run, tmp_path)
    asked = run.driver.take_savepoint(str(tmp_path / "taken"))
    run.wait(asked.done, "the savepoint")
    taken = SavepointDirectory(str(tmp_path / "taken")).read().manifest
    assert not in_flight(taken)
    assert asked.result().checkpoint == taken.checkpoint
    overtook(run, tmp_path)
    (tmp_path / "slow").unlink()
    assert run.result().is_finished
    check(tmp_path)


def test_a_start_that_is_repeated_goes_on_from_records_in_flight_of_its_own(
    start: Start, tmp_path: Path
) -> None:  # SV24, KR10
    """As a supervisor repeats it: with the same name, behind the generation that the driver before had claimed."""
    here, there = tmp_path / "a", tmp_path / "b"
    cancelled_with_records_in_flight(start, here)
    there.mkdir()
    (there / "slow").touch()
    definition = named(slowed(there, 2, name="q"), here / "checkpoints" / "p")
    claimed: list[Generation] = []
    with taking_over(Takeover("supervisor", None, claimed.append)):
        run = start(definition)
    run.wait_checkpoints(1)
    own = run.checkpoints[-1]
    run.driver.cancel()
    run.driver.join()
    (there / "slow").unlink()
    with taking_over(Takeover("supervisor", claimed[-1], claimed.append)):
        again = start(definition)
    assert again.result().is_finished
    assert any("was restored before; the pipeline goes on from its own newest checkpoint" in n for n in again.notes)
    went_on = [n for n in again.notes if "continues from checkpoint" in n]
    assert int(went_on[0].rpartition(" ")[2]) >= own
    check(here, there)
