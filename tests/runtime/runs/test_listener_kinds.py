"""Whatever object of a user listens to checkpoints is told, wherever it stands, with real processes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle
from tests import sqlite_sinks
from tests.conftest import few
from tests.runtime.running import definition_of, pipeline_at
from tests.runtime.runs.test_listeners import lines, note
from tests.runtime.runs.test_results import generator
from tests.sqlite_sinks import SqliteLedgerSink, SqliteSink

import headgate as hg
from headgate.connectors.base import Source, SourceContext

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests
cloudpickle.register_pickle_by_value(sqlite_sinks)

Start = Any
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
