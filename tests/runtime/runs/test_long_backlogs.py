"""Sources whose markers are behind a backlog that takes many timeouts to read, with real workers (EI35–EI37)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import definition_of, pipeline_at

import headgate as hg
from headgate.connectors.base import CheckpointMarker, Source, SourceBatch, SourceContext
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import PipelineFailed

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Start = Any
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
