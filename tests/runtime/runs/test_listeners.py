"""Listeners, operator state and publishing with the real driver and worker processes that are killed."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator
from tests.support import sqlite_sinks
from tests.support.sqlite_sinks import SqliteLedgerSink, SqliteSink

import headgate as hg
from headgate.connectors.base import Source, SourceContext
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed, UsageError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Start = Any


def note(path: Path, line: str) -> None:
    """Add a line in one write, whoever else does the same."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class Published(hg.PublishOnCheckpoint):
    """Publishes the id of each record: a file is made for it, and a line says so each time."""

    item_type = int

    def __init__(self, root: Path, fails: int = 0) -> None:
        self.root = root
        self.fails = fails

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.ready(row["id"])
        return row

    def publish(self, items: list[int]) -> None:
        for number in range(self.fails):
            try:
                os.close(os.open(self.root / f"failed-{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            raise OSError("the target cannot be reached")
        for item in items:
            (self.root / "public" / str(item)).touch()
            note(self.root / "log", str(item))


def publishing(root: Path, source: hg.Generator, *, fails: int = 0, **options: Any) -> hg.Pipeline:
    (root / "public").mkdir(exist_ok=True)
    pipeline = pipeline_at(root, **options)
    stream = pipeline.source(source).map(Published(root, fails), name="publish")
    stream.sink(hg.FileSink(root / "out", "parquet", roll_interval="50ms"), name="out")
    return pipeline


def ids(source: hg.Generator) -> list[int]:
    found: list[int] = events(source)["id"].to_list()
    return found


def public(root: Path) -> list[int]:
    return sorted(int(path.name) for path in (root / "public").iterdir())


@pytest.mark.parametrize("stage_attempts", few([1, 4], 1))
def test_what_is_published_on_completion_is_public_once_when_workers_are_killed(
    start: Start, tmp_path: Path, stage_attempts: int
) -> None:
    source = generator(3_000, 3_000, batch=50)
    run = start(definition_of(publishing(tmp_path, source)), stage_attempts=stage_attempts)
    for kill in range(2):
        run.wait_checkpoints(2)
        run.kill(kill)
        run.wait_restarts(kill + 1)
    assert run.result().is_finished
    assert public(tmp_path) == ids(source)
    assert read_committed(str(tmp_path / "out"))["id"].sort().to_list() == ids(source)


def test_the_final_checkpoint_is_told_before_a_bounded_pipeline_ends(start: Start, tmp_path: Path) -> None:  # HL7
    source = generator(500)
    run = start(definition_of(publishing(tmp_path, source, interval=None)))
    assert run.result().is_finished
    assert len(run.checkpoints) == 1, "nothing but the final checkpoint"
    assert public(tmp_path) == ids(source)
    assert len(lines(tmp_path / "log")) == 500, "nobody had a reason to publish anything twice"


def test_a_requested_stop_publishes_what_its_last_checkpoint_covers(start: Start, tmp_path: Path) -> None:  # HL7
    source = generator(3_000, 1_000, batch=50)
    run = start(definition_of(publishing(tmp_path, source, interval=None)))
    run.pids()
    run.driver.stop()
    assert not run.result().is_finished
    assert len(run.checkpoints) == 1
    before = len(lines(tmp_path / "log"))
    run = start(definition_of(publishing(tmp_path, source, interval=None)))
    assert run.result().is_finished
    assert public(tmp_path) == ids(source)
    assert 0 <= len(lines(tmp_path / "log")) - 3_000 <= before, "what the stop had published comes once more"


def test_a_listener_that_fails_at_the_end_is_told_once_more_by_a_restart(start: Start, tmp_path: Path) -> None:
    source = generator(500)
    run = start(definition_of(publishing(tmp_path, source, fails=2, interval=None, parallelism=1)))
    assert run.result().is_finished
    assert len(run.restarts) == 2
    assert public(tmp_path) == ids(source)
    assert re.fullmatch(r"operator 'publish': .+; its notify_checkpoint_complete\(\d+\) failed", run.restarts[0])
    assert re.search("operator 'publish': .+; its restore\\(\\) failed", run.restarts[1])


def test_a_listener_that_never_heard_of_the_end_is_told_by_the_next_start(start: Start, tmp_path: Path) -> None:
    source = generator(500)
    options: dict[str, Any] = {"interval": None, "parallelism": 1}
    run = start(definition_of(publishing(tmp_path, source, fails=1, restart=hg.NoRestart(), **options)))
    with pytest.raises(PipelineFailed, match="notify_checkpoint_complete"):
        run.result()
    assert public(tmp_path) == []
    again = start(definition_of(publishing(tmp_path, source, fails=1, restart=hg.NoRestart(), **options)))
    assert again.result().is_finished
    assert public(tmp_path) == ids(source)
    assert any("notified once more" in text for text in again.notes)
    assert read_committed(str(tmp_path / "out"))["id"].sort().to_list() == ids(source), "nothing was read again"


class Failing(hg.CheckpointListener):
    """Fails at the first checkpoint, and says what it hears."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        note(self.root / "heard", str(checkpoint_id))
        if len(lines(self.root / "heard")) == 1:
            raise RuntimeError("the broker is gone")


def test_a_listener_that_fails_starts_the_pipeline_again_and_its_checkpoint_stays(start: Start, tmp_path: Path) -> None:
    pipeline = pipeline_at(tmp_path, parallelism=1)
    stream = pipeline.source(generator(1_000, 2_000, batch=20)).filter(Failing(tmp_path), name="listen")
    stream.sink(hg.Discard(), name="out")
    run = start(definition_of(pipeline))
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    assert run.result().is_finished
    heard = [int(line) for line in lines(tmp_path / "heard")]
    (why,) = run.restarts
    assert re.fullmatch(rf"operator 'listen': .+; its notify_checkpoint_complete\({heard[0]}\) failed", why)
    assert f"generation 2 continues from checkpoint {heard[0]}" in run.notes
    assert heard == sorted(set(heard))
    assert set(heard) <= set(run.checkpoints)


class Counting(hg.CheckpointedFunction):
    """Keeps the ids that it has seen in a list, and how many there were in a union."""

    def __init__(self, root: Path, kind: Any = int) -> None:
        self.root, self.kind = root, kind

    def restore(self, context: hg.RestoreContext) -> None:
        self.seen = context.list("seen", self.kind)
        self.counts = context.union("counts", int)
        if context.is_restored:
            note(self.root / "restored", f"{context.subtask_index}/{context.parallelism} {sum(self.counts.restored)}")
        self.index = context.subtask_index

    def snapshot(self, context: hg.SnapshotContext) -> None:
        self.counts.put([len(self.seen)])
        note(self.root / "snapshots", f"{context.checkpoint_id} {len(self.seen)}")

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.seen.append(row["id"])
        return [row]


def counting(root: Path, source: hg.Generator, function: Any, **options: Any) -> hg.Pipeline:
    pipeline = pipeline_at(root, interval=None, **options)
    pipeline.source(source).flat_map(function, name="count").sink(hg.Discard(), name="out")
    return pipeline


def totals(root: Path) -> dict[int, int]:
    """How many elements all subtasks had, by checkpoint."""
    found: dict[int, int] = {}
    for line in lines(root / "snapshots"):
        checkpoint, count = map(int, line.split())
        found[checkpoint] = found.get(checkpoint, 0) + count
    return found


def test_operator_state_survives_stops_and_kills_at_every_parallelism(start: Start, tmp_path: Path) -> None:
    source = generator(2_000, 1_500, batch=20)
    parallelisms = (2, 3, 3, 1)
    kept: list[int] = []
    for parallelism in parallelisms:
        run = start(definition_of(counting(tmp_path, source, Counting(tmp_path), parallelism=parallelism)))
        if kept and parallelism == 3:
            run.kill(2)
            run.wait_restarts(1)
        if parallelism == 1:
            assert run.result().is_finished
        else:
            run.pids()
            run.driver.stop()
            run.result()
        kept.append(totals(tmp_path)[max(totals(tmp_path))])
    assert kept == sorted(kept)
    assert kept[-1] == 2_000, "each record is counted once, whoever keeps it"
    restored = {tuple(map(int, re.findall(r"\d+", line))) for line in lines(tmp_path / "restored")}
    assert {(index, 3, kept[0]) for index in range(3)} <= restored, "everybody sees everybody's counts"
    assert {(index, 3, kept[1]) for index in range(3)} <= restored, "at the same parallelism, too"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda root: Counting(root, str),
            r"state 'seen' of operator 'count' is int64 in checkpoint \d+, but is declared as large_string",
        ),
        (
            lambda root: Failing(root),
            r"state 'counts' of operator 'count', a union of int64, which is not declared any more",
        ),
    ],
    ids=["another type", "none any more"],
)
def test_operator_state_that_does_not_fit_is_refused(start: Start, tmp_path: Path, function: Any, said: str) -> None:
    source = generator(200, 1_000, batch=20)
    run = start(definition_of(counting(tmp_path, source, Counting(tmp_path))))
    run.pids()
    run.driver.stop()
    run.result()
    again = start(definition_of(counting(tmp_path, source, function(tmp_path))))
    with pytest.raises(PipelineFailed, match=said):
        again.result()


class Both(hg.ProcessFunction, hg.CheckpointedFunction, hg.CheckpointListener):
    """Counts the records of each key in keyed state, and all that it sees in a list."""

    schema = {"key": int, "n": int}

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", int)

    def restore(self, context: hg.RestoreContext) -> None:
        self.seen = context.list("seen", int)

    def snapshot(self, context: hg.SnapshotContext) -> None:
        note(self.root / "snapshots", f"{context.checkpoint_id} {len(self.seen)}")

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        note(self.root / "heard", str(checkpoint_id))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> list[dict[str, Any]]:
        self.seen.append(row["id"])
        self.count.put(self.count.get(0) + 1)
        return [{"key": context.key, "n": self.count.get()}]


class BatchBoth(hg.BatchProcessFunction, hg.CheckpointedFunction, hg.CheckpointListener):
    """The same by batch."""

    schema = {"key": int, "n": int}

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, state: hg.BatchStateHandle) -> None:
        self.count = state.value("count", int)

    restore = Both.restore
    snapshot = Both.snapshot
    notify_checkpoint_complete = Both.notify_checkpoint_complete

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> pl.DataFrame:
        for row in batch["id"]:
            self.seen.append(row)
        before = self.count.get().fill_null(0)
        frame = batch.select("key", n=pl.int_range(1, pl.len() + 1).over("key").cast(pl.Int64) + before)
        self.count.put(frame["n"])
        return frame


@pytest.mark.parametrize("function", [Both, BatchBoth], ids=["by row", "by batch"])
def test_process_functions_keep_lists_beside_keyed_state_and_listen(
    start: Start, tmp_path: Path, function: Any
) -> None:
    source = generator(2_000, 2_000, batch=20)
    for parallelism in (2, 3):
        pipeline = pipeline_at(tmp_path, parallelism=parallelism)
        counts = pipeline.source(source).key_by("key").process(function(tmp_path), name="count")
        counts.sink(hg.FileSink(tmp_path / "out", "parquet", roll_interval="50ms"), name="out")
        run = start(definition_of(pipeline))
        run.wait_checkpoints(2)
        if parallelism == 2:
            run.driver.stop()
            run.result()
        else:
            run.kill(1)
            run.wait_restarts(1)
            assert run.result().is_finished
    assert totals(tmp_path)[max(totals(tmp_path))] == 2_000
    found = read_committed(str(tmp_path / "out")).group_by("key").agg(pl.col("n").max(), records=pl.len())
    assert (found["n"] == found["records"]).all()
    assert found["records"].sum() == 2_000
    assert set(map(int, lines(tmp_path / "heard"))) & set(run.checkpoints)


def test_a_function_with_a_method_that_nobody_would_call_is_refused() -> None:
    class Forgot(hg.ProcessFunction):
        def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    stream = hg.Pipeline("p").source(generator(10))
    with pytest.raises(UsageError, match=r"derive the class from headgate\.CheckpointListener"):
        stream.key_by("key").process(Forgot())

    class Called(Forgot):
        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return row

    with pytest.raises(UsageError, match=r"map: Called\.notify_checkpoint_complete would never be called"):
        stream.map(Called())


cloudpickle.register_pickle_by_value(sqlite_sinks)

ROWS = 1_500


class Hearing(hg.CheckpointListener):
    """Writes down what it hears; the first word of all may be one too many for it."""

    log: Path
    fails = False

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        note(self.log, str(checkpoint_id))
        if self.fails and len(lines(self.log)) == 1:
            raise RuntimeError("the broker is gone")


class TwoPhases(SqliteSink, Hearing):
    def __init__(self, root: Path, fails: bool = False) -> None:
        super().__init__(str(root / "target.db"))
        self.log, self.fails = root / "heard", fails


class Ledger(SqliteLedgerSink, Hearing):
    def __init__(self, root: Path, fails: bool = False) -> None:
        super().__init__(str(root / "target.db"))
        self.log, self.fails = root / "heard", fails


class Writing(hg.Discard, Hearing):
    """Neither of the two classes for sinks: its writer is an object of its own."""

    def __init__(self, root: Path, fails: bool = False) -> None:
        super().__init__()
        self.log, self.fails = root / "heard", fails


class Reading(Hearing, Source):
    """A source that listens; its reader does not."""

    def __init__(self, root: Path, fails: bool = False) -> None:
        self.source = generator(ROWS, 1_000, batch=50)
        self.log, self.fails = root / "heard", fails

    def schema(self) -> Any:
        return self.source.schema()

    def identity(self) -> str:
        return self.source.identity()

    def open(self, context: SourceContext) -> Any:
        return self.source.open(context)


def numbering(root: Path, place: type, *, fails: bool = False, **options: Any) -> hg.Pipeline:
    """A pipeline with ``place`` at its end, or at its beginning."""
    there = place(root, fails)
    pipeline = pipeline_at(root, **options)
    rows = pipeline.source(there if place is Reading else generator(ROWS, 1_000, batch=50), name="in")
    sink = hg.Discard() if place is Reading else there
    rows.select(number="id", text=pl.col("id").cast(pl.String)).sink(sink, name="out")
    return pipeline


def heard(root: Path) -> Counter[int]:
    return Counter(int(line) for line in lines(root / "heard"))


PLACES = [TwoPhases, Ledger, Writing, Reading]


@pytest.mark.parametrize("place", few(PLACES, 3))
def test_sources_and_sinks_that_listen_are_told(start: Start, tmp_path: Path, place: type) -> None:
    run = start(definition_of(numbering(tmp_path, place)))
    run.wait_checkpoints(2)
    assert run.result().is_finished
    told = heard(tmp_path)
    assert told[max(run.checkpoints)] == 2, "the end waited for the one of each worker"
    assert set(told) <= set(run.checkpoints)
    assert max(told.values()) == 2, "each hears of each checkpoint once"


@pytest.mark.parametrize("place", [TwoPhases, Ledger])
def test_a_sink_that_fails_when_it_is_told_starts_the_pipeline_again(start: Start, tmp_path: Path, place: type) -> None:
    run = start(definition_of(numbering(tmp_path, place, fails=True, interval=None, parallelism=1)))
    assert run.result().is_finished
    assert len(run.restarts) == 1
    assert "operator 'out': RuntimeError: the broker is gone; its notify_checkpoint_complete(" in run.restarts[0]
    assert len(heard(tmp_path)) == 2, "the final checkpoint was told, and once more"
    with sqlite_sinks.connect(str(tmp_path / "target.db")) as connection:
        (count,) = connection.execute("select count(*) from numbers").fetchone()
    assert count == ROWS


class Rounds(Hearing):
    """Hears of rounds and of checkpoints, in one thread."""

    def __init__(self, root: Path, fails: bool = False) -> None:
        self.log, self.fails = root / "heard", fails
        self.rounds: list[int] = []

    def __call__(self, round_: int) -> None:
        self.rounds.append(round_)


def looping(root: Path, rounds: Rounds) -> hg.Pipeline:
    def body(loop: hg.Stream) -> tuple[hg.Stream, hg.Stream]:
        trip = loop.with_columns(left=pl.col("left") - 1)
        return trip.filter(pl.col("left") > 0), trip.filter(pl.col("left") <= 0)

    pipeline = pipeline_at(root, interval=None)
    rows = pipeline.source(generator(200)).select("id", left=pl.lit(3, pl.Int64))
    rows.iterate(body, on_round=rounds, name="trips").sink(hg.Discard(), name="out")
    return pipeline


def test_who_hears_of_rounds_hears_of_checkpoints_before_the_end(start: Start, tmp_path: Path) -> None:
    rounds = Rounds(tmp_path)
    run = start(definition_of(looping(tmp_path, rounds)))
    assert run.result().is_finished
    assert rounds.rounds == [0, 1, 2]
    assert list(heard(tmp_path)) == run.checkpoints
    again = start(definition_of(looping(tmp_path, Rounds(tmp_path))))
    assert again.result().is_finished
    assert list(heard(tmp_path)) == run.checkpoints + again.checkpoints, "a finished pipeline tells once more"
    assert len(again.checkpoints) == 1


def test_who_hears_of_rounds_and_fails_at_the_end_is_told_once_more(start: Start, tmp_path: Path) -> None:
    run = start(definition_of(looping(tmp_path, Rounds(tmp_path, fails=True))))
    assert run.result().is_finished
    assert len(run.restarts) == 1
    assert "notify_checkpoint_complete" in run.restarts[0]
    assert "on_round of loop 'trips' failed" in run.restarts[0]
    assert list(heard(tmp_path)) == run.checkpoints
    assert len(run.checkpoints) == 2
