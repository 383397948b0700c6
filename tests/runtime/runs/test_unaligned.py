"""Barriers that overtake, with the real driver and real workers: what was in flight is restored, and processed once."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import WAIT_S, Run, definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator, same, windowed

import headgate as hg
from headgate import fault_points
from headgate.codec.snapshot import IN_FLIGHT_PREFIX
from headgate.connectors.base import CheckpointMarker, Source, SourceBatch, SourceContext
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed
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


SCHEMA = pa.schema([("n", pa.int64())])
BATCH, PAUSE_MS = 10, 20


class Marking(hg.CoordinatorHook):
    """Writes each marker behind everything that is there. ``loses`` all: nobody ever meets one."""

    def __init__(self, root: Path, *, loses: bool = False) -> None:
        self.markers, self.loses = root / "markers", loses

    def trigger(self, checkpoint_id: int) -> None:
        if not self.loses:
            with self.markers.open("a") as out:
                out.write(f"{checkpoint_id}\n")

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """What was read is read again from the restored position."""

    def reset(self) -> None:
        """Nothing: markers of former generations are read past."""


class Backlog(Source):
    """``rows`` rows that are all there, and the markers behind them; it ends when ``root/closed`` is there."""

    def __init__(self, root: Path, rows: int) -> None:
        self.root, self.rows = root, rows

    def schema(self) -> pa.Schema:
        return SCHEMA

    def identity(self) -> str:
        return "backlog"

    def open(self, context: SourceContext) -> BacklogReader:
        return BacklogReader(self, context)


class BacklogReader:
    """Takes its time for each batch: that is what makes the backlog long."""

    def __init__(self, source: Backlog, context: SourceContext) -> None:
        self.source, self.is_mine = source, context.subtask_index == 0
        self.at = int((context.positions or {}).get("all", b"0"))
        self.is_still = self.is_over = False
        self.rests_until = 0.0

    def splits(self) -> Sequence[str]:
        return ["all"] if self.is_mine and not self.is_over else []

    def poll(self) -> SourceBatch | CheckpointMarker | None:
        if not self.splits() or self.is_still or self.wakeup_ms():
            return None
        if self.at < self.source.rows:
            self.rests_until = time.monotonic() + PAUSE_MS / 1000
            numbers = range(self.at, min(self.at + BATCH, self.source.rows))
            self.at = numbers[-1] + 1
            return SourceBatch("all", pa.record_batch({"n": pa.array(numbers, pa.int64())}))
        path = self.source.root / "markers"
        found = path.read_text().splitlines() if path.exists() else []
        if self.at - self.source.rows < len(found):
            self.at += 1
            self.is_still = True
            return CheckpointMarker("all", int(found[self.at - self.source.rows - 1]))
        if (self.source.root / "closed").exists():
            self.is_over = True
            return SourceBatch("all", pa.RecordBatch.from_pylist([], SCHEMA), None, True)
        return None

    def read_on(self, splits: Sequence[str]) -> None:
        self.is_still = False

    def is_finished(self) -> bool:
        return not self.splits()

    def positions(self) -> dict[str, bytes]:
        return {"all": b"%d" % self.at} if self.is_mine else {}

    def wakeup_ms(self) -> int:
        return max(0, round((self.rests_until - time.monotonic()) * 1000))

    def close(self) -> None:
        """Nothing is open."""


def backlog(root: Path, rows: int, *, loses: bool = False, **options: Any) -> hg.Pipeline:
    """A pipeline whose first marker is ``rows / BATCH * PAUSE_MS`` away, and whose timeout is a second."""
    pipeline = pipeline_at(root, **{"timeout": "1s", **options})
    pipeline.source(Backlog(root, rows), name="backlog").rebalance().sink(hg.FileSink(root / "out"), name="out")
    pipeline.add_hook("marking", Marking(root, loses=loses))
    return pipeline


def numbers(root: Path) -> list[int]:
    return sorted(read_committed(str(root / "out"))["n"].to_list())


@pytest.mark.parametrize("mode", few(["exactly_once", "at_least_once", "at_most_once"], 1))
def test_a_marker_behind_a_long_backlog_is_met(start: Start, tmp_path: Path, mode: str) -> None:  # EI36, EI37
    """No failure is tolerable. Restarts are for a machine that gives somebody no turn for a whole timeout."""
    restart = hg.FixedDelay(delay="20ms", attempts=20)
    run = start(definition_of(backlog(tmp_path, 1_500, mode=mode, restart=restart)))
    run.wait_checkpoints(1)
    assert any("still reads towards its marker" in note for note in run.notes)
    (tmp_path / "closed").touch()
    assert run.result().is_finished
    assert numbers(tmp_path) == list(range(1_500))


def test_barriers_that_overtake_leave_it_the_credit_to_read_to_its_marker(start: Start, tmp_path: Path) -> None:
    """UA20: the other subtask of the source has ended, and its barrier is there at once."""
    pipeline = backlog(tmp_path, 1_500, alignment_timeout=0, restart=hg.FixedDelay(delay="20ms", attempts=20))
    run = start(definition_of(pipeline, credit_bytes=2_000))
    run.wait_checkpoints(1)
    (tmp_path / "closed").touch()
    assert run.result().is_finished
    assert numbers(tmp_path) == list(range(1_500))


def test_a_marker_that_is_lost_in_front_of_a_source_that_stands_still_counts(start: Start, tmp_path: Path) -> None:
    """EI27"""
    run = start(definition_of(backlog(tmp_path, 10, loses=True, restart=hg.NoRestart())))
    with pytest.raises(PipelineFailed, match="it did not complete within its timeout"):
        run.result()


RATE = 4_000.0
MANY_ROWS = 4_000_000


def newest_manifest(root: Path) -> Manifest:
    log = CheckpointLog(open_storage(str(root / "checkpoints")), "p").observe()
    return max((e.content for e in log.entries if isinstance(e.content, Manifest)), key=lambda m: m.checkpoint)


class Holding(hg.ProcessFunction):
    """Sends records on when its timer fires: tomorrow."""

    schema = {"key": int, "n": int}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", int)

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.count.put(self.count.get(0) + 1)
        context.timers.register_processing_time(context.timers.processing_time_ms + 86_400_000)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"key": context.key, "n": self.count.get(0)}


def test_what_waits_for_a_timer_of_processing_time_is_not_sent_on_by_a_drain(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path)
    counts = pipeline.source(generator(MANY_ROWS, RATE)).key_by("key").process(Holding(), name="hold")
    counts.sink(hg.FileSink(tmp_path / "out", "parquet", roll_interval="50ms"), name="out")
    run = start(definition_of(pipeline))
    run.wait_checkpoints(2)
    run.driver.drain()
    result = run.result()
    assert result.is_drained
    assert result.records_in > 0
    assert (newest_manifest(tmp_path).is_final, newest_manifest(tmp_path).is_draining) == (True, True)
    assert not list((tmp_path / "out").glob("**/*.parquet")), "the end neither fires it nor waits for it"


def test_a_drain_asked_before_the_workers_run_is_remembered(start: Start, tmp_path: Path) -> None:  # E7
    run = start(definition_of(windowed(tmp_path, generator(MANY_ROWS, RATE))))
    run.driver.drain()
    assert run.result().is_drained


def test_input_that_ends_while_it_drains_changes_nothing(start: Start, tmp_path: Path) -> None:  # E7
    source = generator(2_000, splits=1)
    run = start(definition_of(windowed(tmp_path, source)))
    run.wait(lambda: run.driver.running_generation is not None or run.driver.result.done(), "it runs, or has ended")
    run.driver.drain()
    assert run.result().is_finished
    found = read_committed(str(tmp_path / "out"))
    assert found["n"].sum() <= events(source).height


def test_a_worker_killed_in_mid_drain_does_not_end_the_drain(start: Start, tmp_path: Path) -> None:  # E9
    run = start(definition_of(windowed(tmp_path, generator(MANY_ROWS, RATE, splits=2))))
    run.wait_checkpoints(2)
    run.drain_and_kill(0)
    result = run.result()
    assert result.is_drained
    found = read_committed(str(tmp_path / "out"))
    assert found.select(pl.struct("key", "window_start").n_unique()).item() == found.height, "no window fired twice"


def slowly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.0005)  # work that takes time: not a wait for anything
    return row


def test_a_restart_from_a_checkpoint_taken_while_draining_drains_on(start: Start, tmp_path: Path) -> None:  # E9
    pipeline = pipeline_at(tmp_path, interval="20ms")
    stream = pipeline.source(generator(MANY_ROWS, RATE, splits=2)).rebalance().map(slowly)
    stream.sink(hg.FileSink(tmp_path / "out", "parquet"), name="out")
    run = start(definition_of(pipeline, credit_bytes=64 << 10))  # a backlog of seconds, however long it grows
    run.wait_checkpoints(2)
    killed: list[int] = []

    def kill_at_the_first_marked_checkpoint(checkpoint: int, duration_ms: int, size_bytes: int) -> None:
        manifest = newest_manifest(tmp_path)
        if manifest.is_draining and not manifest.is_final and not killed:
            killed.append(checkpoint)
            os.kill(run.driver.worker_pids()[1], signal.SIGKILL)
        Run.on_checkpoint(run, checkpoint, duration_ms, size_bytes)

    run.on_checkpoint = kill_at_the_first_marked_checkpoint  # type: ignore[method-assign]
    run.driver.drain()
    result = run.result()
    assert result.is_drained
    if result.restarts:  # else, or if it was not noticed, the final checkpoint was complete before the worker died
        notes = " ".join(run.notes)
        assert f"continues from checkpoint {killed[0]}" in notes or "was drained and does not continue" in notes
    found = read_committed(str(tmp_path / "out"))
    assert found["id"].n_unique() == found.height, "nothing came out twice"
