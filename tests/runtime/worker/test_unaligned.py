"""A subtask with unaligned barriers and hand-fed channels: what it records, holds, sends, writes and replays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from tests.runtime.worker.test_subtask_runner import Made, Reader, Sink, batch

from headgate.codec.frames import Barrier, Cancel, EndOfData, Idle, Watermark, batch_element
from headgate.codec.snapshot import IN_FLIGHT_PREFIX, decode_sections
from headgate.model.config import ORDINARY, Alignment, CheckpointOptions
from headgate.model.graph import MAIN, Partitioner
from headgate.model.ids import ChannelIndex, CheckpointId, NodeName, SubtaskId, VertexId
from headgate.model.manifest import SnapshotDelays
from headgate.model.plan import InputChannel, PlanEdge
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.subtasks import alignment
from headgate.protocol.subtasks import subtask as machine
from headgate.runtime.checkpoints.channel_state import EdgeName, NamedChannel
from headgate.runtime.worker.unaligned import ChannelRecorder, UnalignedOptions
from headgate.state.snapshot import decode_batches

SCHEMA = batch(1).schema
TIMED = CheckpointOptions(alignment=Alignment.TIMED)
OVER = CheckpointOptions(alignment=Alignment.OVERTAKING)
SECTION = f"{IN_FLIGHT_PREFIX}v"


class Timed(Made):
    """A runner with some inputs, a clock that stands still, and a timeout of 10 ms."""

    def __init__(
        self,
        inputs: int = 2,
        *,
        timeout_ms: int = 10,
        replay: Iterable[tuple[int, pa.RecordBatch]] = (),
        **options: Any,
    ) -> None:
        self.now_ms = 1_000
        self.arrivals = 0
        self.is_interrupted = False
        edge = PlanEdge(0, VertexId("u"), NodeName("u"), MAIN, VertexId("v"), Partitioner.REBALANCE, ())
        name = EdgeName("u", MAIN, "v", "main", "rebalance", (), 0)
        channels = [InputChannel(ChannelIndex(i), edge, SubtaskId(VertexId("u"), i)) for i in range(inputs)]
        ways = [NamedChannel(channel, name, SCHEMA) for channel in channels]
        replays = iter([(ChannelIndex(channel), restored) for channel, restored in replay])
        super().__init__(
            inputs=inputs,
            on_arrival=self._arrived,
            recorder=ChannelRecorder(ways, replays if replay else None),
            unaligned=UnalignedOptions(timeout_ms, lambda: self.now_ms, lambda: self.is_interrupted),
            **options,
        )

    def _arrived(self) -> None:
        self.arrivals += 1

    def give(self, channel: int, *elements: Any) -> None:
        for element in elements:
            self.inputs[channel].put(batch_element(element) if isinstance(element, pa.RecordBatch) else element)

    def pass_time(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.runner.tick(self.now_ms)

    def in_flight(self, checkpoint: int) -> dict[int, list[int]]:
        """Return what an acknowledged snapshot has recorded, by channel."""
        found = {}
        for name, _, sections in (r for r in self.reports if r[0] == "acknowledged" and r[1] == checkpoint):
            assert name
            stored = decode_sections(sections[SECTION], "test") if SECTION in sections else {}
            for channel, data in stored.items():
                ids = [i for b in decode_batches(data, SCHEMA, "test") for i in b.column("id").to_pylist()]
                found[int(channel.rpartition("/")[2])] = ids
        return found

    def is_acknowledged(self, checkpoint: int) -> bool:
        return any(report[:2] == ("acknowledged", checkpoint) for report in self.reports)


def barrier(checkpoint: int, options: CheckpointOptions = TIMED) -> Barrier:
    return Barrier(CheckpointId(checkpoint), options)


def drained(made: Made) -> Sequence[Any]:
    while made.runner.step():
        pass
    return made.out()


def test_a_barrier_is_noticed_when_it_arrives() -> None:  # UA4
    made = Timed()
    made.give(0, batch(1), batch(2))
    assert made.arrivals == 0
    made.give(0, barrier(1), Cancel(CheckpointId(1)))
    assert made.arrivals == 2
    made.give(0, EndOfData(), Watermark(1))
    assert made.arrivals == 2, "nobody asks for these"
    plain = Made(inputs=1)
    plain.inputs[0].put(barrier(1, ORDINARY))
    assert plain.inputs[0].arrived() is None, "without a timeout nothing is kept"


def test_a_timeout_snapshots_at_once_and_records_what_waits() -> None:  # UA7
    made = Timed(sink=Sink())
    made.give(0, batch(1), batch(2), barrier(1), batch(3))
    made.give(1, batch(11), Watermark(5), Idle(True), batch(12), barrier(1), batch(13))
    made.runner.step = lambda: False  # type: ignore[method-assign]  # it has no credit
    made.runner.note_arrivals()
    assert made.out() == []
    assert made.runner.wakeup_ms(made.now_ms) == 10
    made.pass_time(9)
    assert made.out() == []
    made.pass_time(1)
    assert made.out() == [barrier(1, OVER)], "in front of everything that waits"
    del made.runner.step  # type: ignore[method-assign]
    out = drained(made)
    assert sorted(i for ids in out if isinstance(ids, list) for i in ids) == [1, 2, 3, 11, 12, 13]
    made.upload()
    assert made.in_flight(1) == {0: [1, 2], 1: [11, 12]}, "nothing from behind, and no event time"
    assert made.committables[CheckpointId(1)] == [], "what was not processed is in no output"


def test_the_timeout_runs_from_the_trigger() -> None:  # UA6
    made = Timed()
    made.runner.note_trigger(CheckpointId(1))
    made.pass_time(7)
    made.give(0, batch(1), barrier(1))
    made.runner.note_arrivals()
    made.pass_time(2)
    assert made.out() == []
    made.pass_time(1)
    assert made.out() == [barrier(1, OVER)], "those in front of it have waited for 7 ms of the 10 already"


def test_a_barrier_that_comes_behind_the_timeout_overtakes_at_once() -> None:  # UA6
    made = Timed()
    made.runner.note_trigger(CheckpointId(1))
    made.pass_time(50)
    made.give(0, batch(1), barrier(1))
    made.runner.note_arrivals()
    assert made.runner.wakeup_ms(made.now_ms) == 0
    made.pass_time(0)
    assert made.out() == [barrier(1, OVER)]


def test_a_barrier_that_comes_before_its_trigger_or_behind_another_one_counts_from_its_arrival() -> None:  # UA6
    made = Timed()
    made.runner.note_trigger(CheckpointId(1))
    made.pass_time(50)
    made.give(0, batch(1), barrier(2))
    made.runner.note_arrivals()
    made.pass_time(9)
    assert made.out() == []
    made.pass_time(1)
    assert made.out() == [barrier(2, OVER)]


def test_a_barrier_that_takes_credit_has_all_of_the_timeout() -> None:  # UA6, UA20
    made = Timed(late_inputs=frozenset({ChannelIndex(1)}))
    made.runner.note_trigger(CheckpointId(1))
    made.pass_time(50)
    for channel in (0, 1):
        made.give(channel, batch(channel), barrier(1))
        made.runner.note_arrivals()
    made.pass_time(9)
    assert made.out() == [], "its source had to read up to its marker first"
    made.pass_time(1)
    assert made.out() == [barrier(1, OVER)]


def test_what_was_set_aside_has_nothing_in_flight() -> None:  # UA7
    made = Timed(timeout_ms=10)
    made.give(0, batch(1), barrier(1), batch(2))
    made.runner.note_arrivals()
    drained(made)
    assert made.out() == [[1]], "aligned so far"
    made.give(1, batch(11), barrier(1))
    made.runner.note_arrivals()
    made.pass_time(10)
    assert drained(made)[:2] == [[1], barrier(1, OVER)]
    assert sorted(made.out()[2:]) == [[2], [11]], "channel 0 is read again"
    made.upload()
    assert made.in_flight(1) == {1: [11]}


def test_a_channel_without_its_barrier_is_not_read_until_it_comes() -> None:  # UA7, UA8
    made = Timed(timeout_ms=0)
    made.give(1, batch(11))
    made.give(0, batch(1), barrier(1))
    made.runner.note_arrivals()
    assert drained(made) == [barrier(1, OVER), [1]], "11 is held"
    made.give(1, batch(12))
    assert drained(made) == [barrier(1, OVER), [1]]
    made.give(1, barrier(1), batch(13))
    made.runner.note_arrivals()
    assert drained(made)[2:] == [[11], [12], [13]]
    made.upload()
    assert made.in_flight(1) == {0: [1], 1: [11, 12]}


def test_nothing_is_written_before_all_is_recorded() -> None:  # UA8
    made = Timed(timeout_ms=0)
    made.give(0, barrier(1))
    made.runner.note_arrivals()
    made.upload()
    assert not made.is_acknowledged(1)
    assert not made.reports[1:], "only that the snapshot was taken"


def test_an_aligned_snapshot_has_nothing_in_flight() -> None:  # UA5
    made = Timed()
    for channel in (0, 1):
        made.give(channel, batch(channel), barrier(1))
    made.runner.note_arrivals()
    assert drained(made) == [[0], [1], barrier(1)]
    made.pass_time(100)
    made.upload()
    assert made.is_acknowledged(1)
    assert made.in_flight(1) == {}


def test_the_sealed_output_of_a_dropped_recording_goes_into_the_next_snapshot() -> None:  # UA10
    made = Timed(timeout_ms=0, sink=Sink())
    made.give(0, batch(1))
    drained(made)
    made.give(0, barrier(1))
    made.runner.note_arrivals()
    made.runner.handle(alignment.AbortReceived(CheckpointId(1)))
    made.give(0, batch(2), barrier(2))
    made.give(1, batch(11), barrier(2))
    made.runner.note_arrivals()
    drained(made)
    made.upload()
    assert not made.is_acknowledged(1)
    assert made.in_flight(2) == {0: [2], 1: [11]}, "and nothing of the dropped one"
    assert made.committables == {CheckpointId(1): [1], CheckpointId(2): []}


def test_a_recording_that_is_given_up_is_declined() -> None:  # UA10
    made = Timed(timeout_ms=0)
    made.give(0, barrier(1))
    made.runner.note_arrivals()
    made.give(1, batch(11), Cancel(CheckpointId(1)))
    made.runner.note_arrivals()
    assert ("declined", 1, AbortReason.CANCELLED_UPSTREAM) in made.reports
    assert drained(made) == [barrier(1, OVER), [11]], "no marker: downstream has the barrier"


def test_a_turn_ends_when_a_barrier_arrives() -> None:  # UA4
    made = Timed(inputs=1)
    made.give(0, *(batch(i) for i in range(5)))
    made.is_interrupted = True
    made.runner.step()
    assert made.out() == [[0]], "one element is under way, and no more"
    made.is_interrupted = False
    assert len(drained(made)) == 5


def test_sources_send_their_barrier_without_credit() -> None:
    made = Timed(inputs=0, reader=Reader([batch(1), batch(2)]), credit=1)
    made.runner.step()
    assert not made.runner.can_send
    made.runner.note_trigger(CheckpointId(1))
    made.runner.handle(machine.TriggerReceived(CheckpointId(1), TIMED))
    assert made.out() == [[1], barrier(1)]
    made.upload()
    assert made.is_acknowledged(1)


def test_a_subtask_without_credit_goes_over() -> None:  # UA4
    made = Timed(inputs=1, credit=1)
    made.give(0, batch(1), batch(2), barrier(1))
    made.runner.step()
    assert not made.runner.can_send
    made.runner.note_arrivals()
    assert made.runner.wakeup_ms(made.now_ms) == 10, "it must wake up for that"
    made.pass_time(10)
    assert made.out() == [[1], barrier(1, OVER)]
    made.upload()
    assert made.in_flight(1) == {0: [2]}


# -- replay -----------------------------------------------------------------------------------------------------------


def test_restored_records_come_before_anything_new() -> None:
    made = Timed(replay=[(0, batch(1)), (1, batch(2)), (0, batch(3))])
    made.give(0, batch(100), Watermark(7))
    made.give(1, Watermark(9), batch(101))
    assert drained(made) == [[1], [2], [3], [100], Watermark(7), [101]]


def test_a_replay_waits_for_credit() -> None:
    made = Timed(replay=[(0, batch(1)), (0, batch(2))], credit=1)
    drained(made)
    assert made.out() == [[1]]
    made.sent.channels[0].add_credit(1 << 20)
    assert drained(made) == [[1], [2]]


def test_what_is_left_of_a_replay_is_recorded_again() -> None:
    made = Timed(timeout_ms=0, credit=1, replay=[(0, batch(1)), (1, batch(2)), (0, batch(3))])
    made.runner.step()
    made.give(0, batch(100), barrier(1))
    made.give(1, barrier(1), batch(101))
    made.runner.note_arrivals()
    assert made.out() == [[1], barrier(1, OVER)]
    made.sent.channels[0].add_credit(1 << 20)
    assert drained(made) == [[1], barrier(1, OVER), [2], [3], [100], [101]]
    made.upload()
    assert made.in_flight(1) == {0: [3, 100], 1: [2]}


def test_no_barrier_is_read_before_the_replay_is_over() -> None:
    made = Timed(credit=1, replay=[(0, batch(1)), (0, batch(2))])
    made.give(0, barrier(1, ORDINARY))
    made.give(1, barrier(1, ORDINARY))
    made.runner.note_arrivals()
    made.runner.step()
    made.pass_time(1_000)
    assert made.out() == [[1]], "it may not overtake, so it waits"
    made.sent.channels[0].add_credit(1 << 20)
    assert drained(made) == [[1], [2], barrier(1, ORDINARY)]


def test_a_dropped_recording_of_a_replay_is_recorded_by_the_next() -> None:  # UA10
    made = Timed(timeout_ms=0, credit=1, replay=[(0, batch(1)), (0, batch(2)), (0, batch(3))])
    made.runner.step()
    made.give(0, barrier(1))
    made.runner.note_arrivals()
    made.runner.handle(alignment.AbortReceived(CheckpointId(1)))
    made.give(0, barrier(2))
    made.give(1, barrier(2))
    made.runner.note_arrivals()
    made.upload()
    assert made.in_flight(2) == {0: [2, 3]}
    made.sent.channels[0].add_credit(1 << 20)
    assert [ids for ids in drained(made) if isinstance(ids, list)] == [[1], [2], [3]]


# -- what it tells ----------------------------------------------------------------------------------------------------


def test_a_subtask_reports_its_delays() -> None:
    made = Timed(timeout_ms=40)
    made.runner.note_trigger(CheckpointId(1))
    made.pass_time(30)
    made.give(0, batch(1), barrier(1))
    made.runner.note_arrivals()
    made.pass_time(4)
    made.give(1, barrier(1))
    made.runner.note_arrivals()
    made.pass_time(6)
    made.upload()
    assert made.entries[CheckpointId(1)].delays == SnapshotDelays(30, 10)
    drained(made)
    plain = Made(inputs=1)
    plain.inputs[0].put(barrier(1, ORDINARY))
    drained(plain)
    plain.upload()
    assert plain.entries[CheckpointId(1)].delays is None


def test_a_barrier_that_is_read_late_does_not_count_for_the_next_delay() -> None:
    made = Timed(inputs=1, credit=1)
    made.give(0, batch(1), batch(2), barrier(1))
    made.runner.note_arrivals()
    made.runner.step()
    made.pass_time(10)
    made.give(0, barrier(2))
    made.runner.note_arrivals()
    made.pass_time(5)
    made.sent.channels[0].add_credit(1 << 20)
    drained(made)
    made.upload()
    assert made.entries[CheckpointId(2)].delays == SnapshotDelays(0, 5)
