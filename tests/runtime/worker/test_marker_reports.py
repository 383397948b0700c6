"""A source that sets its own barrier tells that it reads towards a marker, and when it has been cut (EI34)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime.worker.test_induced_runner import Marked, made_of
from tests.runtime.worker.test_subtask_runner import Made, Reader, batch

from headgate.connectors.base import SourceBatch
from headgate.model.checkpoint_options import ORDINARY, Guarantee
from headgate.model.ids import CheckpointId
from headgate.protocol.subtasks import alignment

PERIOD_MS = 100


def made_with(reader: Any, **options: Any) -> Made:
    made = made_of(reader, reads_on_ms=PERIOD_MS, **options)
    made.runner.tick(0)
    return made


def told(made: Made) -> list[tuple[int, ...]]:
    return [report[1] for report in made.reports if report[0] == "reads on"]


def announce(made: Made, *checkpoints: int) -> None:
    for checkpoint in checkpoints:
        made.runner.announce(CheckpointId(checkpoint), ORDINARY)


def turn(made: Made, now_ms: int, *, steps: int = 1) -> None:
    for _ in range(steps):
        made.runner.step()
    made.runner.tick(now_ms)


def test_a_source_tells_that_it_reads_towards_a_marker() -> None:  # EI34
    made = made_with(Marked(a=[*range(1, 9), -5, 9]))
    turn(made, 1_000)
    assert told(made) == [], "no checkpoint has begun"
    announce(made, 5)
    turn(made, 1_000)
    turn(made, 1_099)
    assert told(made) == []
    turn(made, 1_100)
    assert told(made) == [(5,)]
    turn(made, 1_150)
    assert told(made) == [(5,)], "not more often than it must"
    turn(made, 1_300)
    assert told(made) == [(5,), (5,)]


def test_a_cut_is_told_at_once_if_it_was_awaited() -> None:  # EI34, EI35
    made = made_with(Marked(a=[1, 2, 3, -5, 4]))
    announce(made, 5)
    turn(made, 0)
    turn(made, 100)
    turn(made, 101, steps=2)
    assert told(made) == [(5,), ()]
    turn(made, 1_000, steps=5)
    assert told(made) == [(5,), ()], "once"


def test_nothing_is_told_of_a_marker_that_is_met_soon() -> None:  # EI34
    made = made_with(Marked(a=[1, 2, -5, 3, 4, -6, 5]))
    for checkpoint, begun_ms in ((5, 0), (6, 500)):
        announce(made, checkpoint)
        for now_ms in range(begun_ms, begun_ms + PERIOD_MS, 30):
            turn(made, now_ms)
    assert told(made) == []


def test_a_source_that_stands_still_tells_nothing() -> None:  # EI27, EI34
    reader = Marked(a=[1, -5], b=[2])
    reader.is_bounded = False
    made = made_with(reader)
    announce(made, 5)
    turn(made, 0, steps=9)
    for now_ms in range(100, 1_000, 100):
        turn(made, now_ms)
    assert told(made) == [], "the marker in the other split is lost"
    reader.add("b", 3)
    turn(made, 1_000)
    assert told(made) == [(5,)]


def test_a_batch_without_records_is_no_progress() -> None:  # EI34
    class Empty(Marked):
        def poll(self) -> SourceBatch:  # type: ignore[override]
            return SourceBatch("a", batch())

    made = made_with(Empty(a=[1, -5]))
    announce(made, 5)
    for now_ms in range(0, 1_000, 50):
        turn(made, now_ms)
    assert told(made) == []


def test_a_checkpoint_that_is_over_is_told_of_no_more() -> None:  # EI34
    made = made_with(Marked(a=[*range(1, 30)]))
    announce(made, 5, 6)
    turn(made, 0)
    turn(made, 100)
    assert told(made) == [(5, 6)]
    made.runner.handle(alignment.AbortReceived(CheckpointId(5)))
    turn(made, 101)
    turn(made, 200)
    assert told(made) == [(5, 6), (6,), (6,)]


def test_at_most_once_reading_ahead_is_progress() -> None:  # EI30, EI34
    """Nothing is processed before the first checkpoint is completed, and all of it waits for the marker."""
    made = made_with(Marked(a=[1, 2, 3, -5]), mode=Guarantee.AT_MOST_ONCE)
    announce(made, 5)
    turn(made, 0)
    turn(made, 100)
    assert told(made) == [(5,)]
    turn(made, 101, steps=2)
    assert told(made) == [(5,), ()]


@pytest.mark.parametrize("reader", [Reader([batch(1), batch(2), batch(3)]), None])
def test_others_tell_nothing(reader: Reader | None) -> None:  # EI34
    made = made_with(reader, inputs=0 if reader else 1)
    announce(made, 5)
    for now_ms in range(0, 1_000, 100):
        turn(made, now_ms)
    assert told(made) == []
