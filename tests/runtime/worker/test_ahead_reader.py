"""A source that is read ahead of what is processed."""

from __future__ import annotations

import pytest
from tests.runtime.worker.test_subtask_runner import Reader, batch

from headgate.model.ids import CheckpointId
from headgate.runtime.worker import source_runner
from headgate.runtime.worker.source_runner import AheadReader


def cp(number: int) -> CheckpointId:
    return CheckpointId(number)


def ids(reader: AheadReader) -> list[int]:
    found: list[int] = []
    while (polled := reader.poll()) is not None:
        found += polled.batch.column("id").to_pylist()
    return found


# GM31
def test_positions_of_a_snapshot_are_behind_what_is_held() -> None:
    reader = AheadReader(Reader([batch(1), batch(2), batch(3)]))
    assert reader.poll() is None
    assert reader.poll() is None
    assert reader.cut(cp(1), is_last=False) == {"s": b"2"}
    reader.completed(cp(1))
    assert ids(reader) == [1, 2]


# GM32
def test_the_last_positions_before_a_stop_are_in_front_of_what_is_held() -> None:
    reader = AheadReader(Reader([batch(1), batch(2), batch(3)]))
    reader.poll()
    reader.cut(cp(1), is_last=False)
    reader.completed(cp(1))
    first = reader.poll()
    assert first is not None
    assert reader.cut(cp(2), is_last=True) == {"s": b"1"}, "only the first was processed"
    reader.completed(cp(2))
    assert ids(reader) == [], "and nothing more will be"


def test_the_last_positions_are_the_readers_own_when_nothing_is_held() -> None:
    assert AheadReader(Reader([batch(1)])).cut(cp(1), is_last=True) == {"s": b"0"}


# SV9
def test_the_positions_of_a_savepoint_are_in_front_of_what_is_held() -> None:
    reader = AheadReader(Reader([batch(1), batch(2), batch(3)]))
    reader.poll()
    reader.poll()
    assert reader.cut(cp(1), is_last=False) == {"s": b"2"}
    assert reader.unprocessed_from == {"s": b"0"}, "nothing was processed yet"
    reader.completed(cp(1))
    assert ids(reader) == [1, 2], "and a savepoint stops nothing"
    assert reader.unprocessed_from == {"s": b"2"}


# GM36
def test_a_reader_that_holds_enough_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_runner, "HELD_BYTES_MAX", batch(1).nbytes)
    reader = AheadReader(Reader([batch(1), batch(2)]))
    reader.poll()
    reader.poll()
    assert reader.positions() == {"s": b"1"}
    assert reader.wakeup_ms() == source_runner.WAIT_MS
    reader.cut(cp(1), is_last=False)
    reader.completed(cp(1))
    assert reader.wakeup_ms() == 0
    assert ids(reader) == [1]
    assert reader.positions() == {"s": b"2"}, "there is room again"


# GM37
def test_a_source_ends_when_everything_it_holds_is_handed_over() -> None:
    reader = AheadReader(Reader([batch(1)]))
    reader.poll()
    assert not reader.is_finished()
    assert reader.wakeup_ms() == source_runner.WAIT_MS, "a checkpoint is waited for, not polled for"
    assert reader.splits() == ("s",)
    reader.cut(cp(1), is_last=False)
    reader.completed(cp(1))
    assert ids(reader) == [1]
    assert reader.is_finished()


# GM37
def test_a_drain_reads_no_more_and_hands_over_what_is_held() -> None:
    reader = AheadReader(Reader([batch(1), batch(2)]))
    reader.poll()
    reader.end()
    reader.poll()
    assert reader.cut(cp(1), is_last=False) == {"s": b"1"}
    assert not reader.is_finished()
    reader.completed(cp(1))
    assert ids(reader) == [1]
    assert reader.is_finished()
