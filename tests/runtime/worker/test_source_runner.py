"""Sources of a subtask: barriers set by the reader, reading ahead, and reports about markers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tests.runtime.worker.test_subtask_runner import Made, Reader, batch

from headgate.codec.frames import Barrier, Cancel, EndOfData, Watermark
from headgate.codec.snapshot import POSITIONS_PREFIX
from headgate.connectors.base import CheckpointMarker, SourceBatch, SplitPosition
from headgate.errors import BadRecord, UsageError
from headgate.model.config import ORDINARY, CheckpointOptions, Guarantee
from headgate.model.ids import CheckpointId, NodeName
from headgate.model.progress import SourceProgress
from headgate.operators.user_functions import bad_records
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.subtasks import alignment
from headgate.protocol.subtasks import subtask as machine
from headgate.runtime.worker import source_runner, subtask_runner
from headgate.runtime.worker.source_runner import AheadReader

LAST = CheckpointOptions(is_last=True)


class Marked:
    """Reads lists of numbers, one at a time; a negative one is the marker of a checkpoint. Splits in turn."""

    def __init__(self, *, is_careless: bool = False, **splits: Sequence[int]) -> None:
        self._splits = {name: list(items) for name, items in splits.items()}
        self.at = dict.fromkeys(splits, 0)
        self.still: set[str] = set()
        self._is_careless = is_careless
        self.is_bounded = True

    def add(self, split: str, *items: int) -> None:
        self._splits[split] += items

    def splits(self) -> Sequence[str]:
        return [
            n for n, items in self._splits.items() if not self.is_bounded or self.at[n] < len(items) or n in self.still
        ]

    def poll(self) -> SourceBatch | CheckpointMarker | None:
        for name, items in self._splits.items():
            if name in self.still or self.at[name] == len(items):
                continue
            item = items[self.at[name]]
            self.at[name] += 1
            if item < 0:
                self.still |= set() if self._is_careless else {name}
                return CheckpointMarker(name, -item)
            return SourceBatch(name, batch(item))
        return None

    def read_on(self, splits: Sequence[str]) -> None:
        self.still -= set(splits)

    def is_finished(self) -> bool:
        return self.is_bounded and not self.splits()

    def positions(self) -> dict[str, bytes]:
        return {name: str(at).encode() for name, at in self.at.items()}

    def wakeup_ms(self) -> int:
        return 0

    def close(self) -> None:
        pass


def made_of(reader: Any, **options: Any) -> Made:
    return Made(reader=reader, **options)


def steps(made: Made) -> None:
    """Give it enough turns: one that reads ahead, or lets splits go on, does not say so."""
    for _ in range(30):
        made.runner.step()


def out_of(made: Made) -> list[Any]:
    return [element for element in made.out() if not isinstance(element, Watermark)]


def positions(made: Made) -> dict[int, dict[str, bytes]]:
    return {r[1]: msgspec.msgpack.decode(r[2][f"{POSITIONS_PREFIX}a"]) for r in made.reports if r[0] == "acknowledged"}


def test_the_barrier_goes_out_between_the_right_records() -> None:  # EI20, EI21
    made = made_of(Marked(a=[1, -5, 2], b=[3, 4, -5, 5]))
    made.runner.announce(CheckpointId(5), ORDINARY)
    steps(made)
    sent = out_of(made)
    at = sent.index(Barrier(CheckpointId(5)))
    assert sorted(n for e in sent[:at] if isinstance(e, list) for n in e) == [1, 3, 4]
    assert sorted(n for e in sent[at:] if isinstance(e, list) for n in e) == [2, 5]
    made.runner.trigger(CheckpointId(5), ORDINARY)
    made.upload()
    assert positions(made) == {5: {"a": b"2", "b": b"3"}}


def test_a_reader_that_waits_for_a_message_asks_for_no_turns() -> None:  # EI22
    reader = Marked(a=[1, -5, 2])
    made = made_of(reader)
    steps(made)
    assert reader.at == {"a": 2}
    assert made.runner.wakeup_ms(0) is None
    made.runner.announce(CheckpointId(5), ORDINARY)
    assert made.runner.wakeup_ms(0) == 0
    assert out_of(made) == [[1], Barrier(CheckpointId(5))]


def test_records_behind_a_marker_are_refused() -> None:  # EI21
    made = made_of(Marked(is_careless=True, a=[-5, 1]))
    made.runner.step()
    with pytest.raises(UsageError, match=r"returned records of split 'a' behind a marker before read_on\(\)"):
        made.runner.step()
    made = made_of(Marked(is_careless=True, a=[-5, -6, 1]))
    made.runner.step()
    with pytest.raises(UsageError, match=r"checkpoint 6 in split 'a', and had gone on in it before read_on\(\)"):
        made.runner.step()


def test_a_marker_of_an_unknown_split_is_refused() -> None:  # EI21
    reader = Marked(a=[-5])
    made = made_of(reader)
    reader.splits = list  # type: ignore[method-assign]
    reader.is_finished = lambda: False  # type: ignore[method-assign]
    made.runner.step()
    assert out_of(made) == [], "its end is behind the marker"
    reader.positions = dict  # type: ignore[method-assign, assignment]
    reader.add("a", -6)
    reader.still.clear()
    with pytest.raises(UsageError, match="which it does not own"):
        made.runner.step()


def test_an_end_counts_as_cut_and_so_does_a_drain() -> None:  # EI25, EI26
    made = made_of(Marked(a=[-5], b=[1]))
    made.runner.announce(CheckpointId(5), ORDINARY)
    steps(made)
    made.runner.trigger(CheckpointId(6), ORDINARY)
    assert out_of(made) == [[1], Barrier(CheckpointId(5)), EndOfData(), Barrier(CheckpointId(6))]
    reader = Marked(a=[1, 2, -5], b=[-5])
    made = made_of(reader)
    made.runner.announce(CheckpointId(5), ORDINARY)
    made.runner.step()
    made.runner.drain()
    steps(made)
    assert out_of(made) == [[1], Barrier(CheckpointId(5)), EndOfData()]
    made.upload()
    assert positions(made)[5] == {"a": b"1", "b": b"0"}


def test_a_lost_marker_is_told_of_as_soon_as_it_shows() -> None:  # EI24, EI27
    reader = Marked(a=[-5, 1], b=[2, -6, 3])
    reader.is_bounded = False
    made = made_of(reader)
    made.runner.announce(CheckpointId(5), ORDINARY)
    steps(made)
    assert ("declined", 5, AbortReason.MARKER_MISSED) in made.reports
    assert Cancel(CheckpointId(5)) in out_of(made)
    made.runner.announce(CheckpointId(6), ORDINARY)
    made.runner.handle(alignment.AbortReceived(CheckpointId(6)))
    steps(made)
    assert sorted(n for e in out_of(made) if isinstance(e, list) for n in e) == [1, 2, 3], (
        "nobody stands still for ever"
    )


def test_at_most_once_a_marker_counts_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_at_most_once(Marked(a=[1, 2, -5, 3]), monkeypatch)
    made.runner.announce(CheckpointId(5), ORDINARY)
    steps(made)
    assert out_of(made) == [Barrier(CheckpointId(5))], "nothing is processed before a checkpoint covers it"
    made.runner.handle(machine.CompleteReceived(CheckpointId(5)))
    steps(made)
    assert out_of(made) == [Barrier(CheckpointId(5)), [1], [2]]
    made.upload()
    assert positions(made) == {5: {"a": b"3"}}


def test_a_source_that_holds_enough_is_cut_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_runner, "HELD_BYTES_MAX", 1)
    made = made_at_most_once(Marked(a=[1, 2, -5]), monkeypatch)
    steps(made)
    made.runner.announce(CheckpointId(5), ORDINARY)
    assert out_of(made) == [Barrier(CheckpointId(5))]
    made.runner.handle(machine.CompleteReceived(CheckpointId(5)))
    steps(made)
    assert out_of(made) == [Barrier(CheckpointId(5)), [1]]
    made.upload()
    assert positions(made) == {5: {"a": b"1"}}


def made_at_most_once(reader: Marked, monkeypatch: pytest.MonkeyPatch) -> Made:
    real = subtask_runner.SubtaskParts

    def parts(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **{**options, "mode": Guarantee.AT_MOST_ONCE})

    monkeypatch.setattr("tests.runtime.worker.test_subtask_runner.SubtaskParts", parts)
    return made_of(reader)


def test_behind_the_last_barrier_nothing_is_read_to_its_marker() -> None:  # EI26, GM3
    reader = Marked(a=[1, -5, 2, -6])
    made = made_of(reader)
    made.runner.announce(CheckpointId(5), LAST)
    steps(made)
    assert out_of(made) == [[1], Barrier(CheckpointId(5), LAST)]
    made.runner.handle(alignment.AbortReceived(CheckpointId(5)))
    made.runner.announce(CheckpointId(6), LAST)
    assert out_of(made) == [[1], Barrier(CheckpointId(5), LAST), Barrier(CheckpointId(6), LAST)]
    assert reader.at == {"a": 2}


def test_an_ordinary_source_hears_no_announcement() -> None:  # EI32
    from tests.runtime.worker.test_subtask_runner import Reader

    made = made_of(Reader([batch(1)]))
    made.runner.announce(CheckpointId(5), ORDINARY)
    assert out_of(made) == []
    made.runner.trigger(CheckpointId(5), ORDINARY)
    assert out_of(made) == [Barrier(CheckpointId(5))]
    assert pa.__version__


# -- a source that is read ahead of what is processed -----


def cp(number: int) -> CheckpointId:
    return CheckpointId(number)


def ids(reader: AheadReader) -> list[int]:
    found: list[int] = []
    while (polled := reader.poll()) is not None:
        found += polled.batch.column("id").to_pylist()
    return found


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


# -- a source that sets its own barrier tells that it reads towards a marker, and when it has been cut (e -----


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


def test_at_most_once_reading_ahead_is_progress() -> None:  # EI34
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


class Measured(Marked):
    """Says how far it has read."""

    def __init__(self, **splits: Sequence[int]) -> None:
        super().__init__(**splits)
        self.problem: Exception | None = None

    def progress(self) -> dict[str, SplitPosition]:
        if self.problem is not None:
            raise self.problem
        return {name: SplitPosition(at, len(self._splits[name]), "bytes") for name, at in self.at.items()}


def progress_of(made: Made) -> SourceProgress:
    found = made.runner.source_progress()
    assert found is not None
    return found


def seen(made: Made) -> dict[str, tuple[int | None, int | None, int]]:
    return {one.split: (one.position, one.lag, one.records) for one in progress_of(made).most_lagging}


def test_each_split_reports_how_far_it_was_read_until_it_has_ended() -> None:
    reader = Measured(x=[1, 2, 3], y=[4, 5])
    reader.is_bounded = False
    made = made_of(reader)
    made.runner.start()
    assert seen(made) == {"x": (0, 3, 0), "y": (0, 2, 0)}
    made.runner.step()
    assert seen(made) == {"x": (1, 2, 1), "y": (0, 2, 0)}
    steps(made)
    assert seen(made) == {"x": (3, 0, 3), "y": (2, 0, 2)}
    assert (progress_of(made).unit, progress_of(made).lag) == ("bytes", 0)


def test_a_split_that_has_ended_is_not_reported() -> None:
    made = made_of(Marked(x=[1, 2]))
    made.runner.start()
    made.runner.step()
    assert seen(made) == {"x": (None, None, 1)}, "a reader need not say anything: its records are counted"
    made.runner._source.process(SourceBatch("x", batch(2), is_split_finished=True))
    assert progress_of(made) == SourceProgress(NodeName("a"))


def test_bad_records_are_read_too() -> None:
    reader = Measured(x=[1])
    reader.is_bounded = False
    made = made_of(reader)
    made.runner.start()
    bad = bad_records("a", ["torn"], ["x 1"], ["?"])
    with contextlib.suppress(BadRecord):  # no dead letters here
        made.runner._source.process(SourceBatch("x", batch(1).slice(0, 0), bad))
    assert seen(made)["x"] == (0, 1, 1)


def test_what_is_read_ahead_is_read() -> None:
    reader = Measured(x=[1, 2])
    reader.is_bounded = False
    made = made_of(reader, mode=Guarantee.AT_MOST_ONCE)
    made.runner.start()
    made.runner.step()
    assert seen(made) == {"x": (1, 1, 0)}


def test_a_reader_that_fails_to_report_is_read_on(caplog: pytest.LogCaptureFixture) -> None:
    reader = Measured(x=[1, 2])
    reader.is_bounded = False
    made = made_of(reader)
    made.runner.start()
    reader.problem = RuntimeError("no idea")
    assert progress_of(made) == SourceProgress(NodeName("a"))
    assert progress_of(made) == SourceProgress(NodeName("a"))
    assert [record.getMessage() for record in caplog.records] == ["the reader of source 'a' reports no progress"]
    reader.problem = None
    steps(made)
    assert seen(made) == {"x": (2, 0, 2)}
