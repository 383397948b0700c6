"""Listeners, operator state and publishing with the real driver and worker processes that are killed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_results import events, generator

import headgate as hg
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
