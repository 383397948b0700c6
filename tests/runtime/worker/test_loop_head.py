"""One loop head with hand-fed channels: what it reads first, what it logs, and when it hands its snapshot over."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.checkpoints.writing import inlined_sections
from tests.runtime.worker.test_chain import CREDIT, Sent

from headgate.codec.frames import Barrier, BatchElement, Element, EndOfData, Watermark, batch_element
from headgate.codec.snapshot import Buffer, encode_sections
from headgate.connectors.base import SealedTransaction, SinkWriter
from headgate.errors import UsageError
from headgate.model.graph import MAIN, Edge, Node, Partitioner, Role
from headgate.model.ids import ChannelIndex, CheckpointId, Generation, NodeName, SubtaskId, VertexId, WorkerIndex
from headgate.model.manifest import Copied, SubtaskEntry
from headgate.model.plan import Vertex
from headgate.operators.base import WATERMARK_MAX_MS, Operator, OperatorContext, RestoredState
from headgate.operators.loop_head import LoopHeadOperator, LoopHeadSpec
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.loop_prober import Probe
from headgate.protocol.subtasks import alignment, loops
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.subtasks.loops import LoopPlace
from headgate.protocol.subtasks.subtask import SnapshotWritten
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SnapshotWriter
from headgate.runtime.wire.channels import ChannelKey, FeedbackChannel, InputChannel
from headgate.runtime.wire.spill import SpillBudget
from headgate.runtime.worker.chain import Chain
from headgate.runtime.worker.deployment import SinkHead
from headgate.runtime.worker.loop_head import LoopHeadRunner, LoopLog, LoopState, log_owner, replay_logs
from headgate.runtime.worker.subtask_parts import SubtaskParts
from headgate.runtime.worker.subtask_runner import ELEMENTS_PER_TURN_MAX
from headgate.state.snapshot import FrozenState
from headgate.storage.memory import MemoryStorage

SUBTASK = SubtaskId(VertexId("loop"), 0)
PLAIN = pa.schema([("id", pa.int64())])
WITH_ROUND = pa.schema([("id", pa.int64()), ("round", pa.int64())])
OWNER = log_owner((), 128, 1, 0)
FIVE, SIX, SEVEN = (CheckpointId(n) for n in (5, 6, 7))
PROBE = Probe(1)


def batch(*ids: int) -> BatchElement:
    return batch_element(pa.record_batch({"id": pa.array(ids, pa.int64())}))


class Holding(Operator):
    """Holds records back until it is flushed, as partial aggregates are."""

    def __init__(self) -> None:
        self._held: list[pa.RecordBatch] = []

    def process(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)

    def before_barrier(self) -> None:
        held, self._held = self._held, []
        for one in held:
            self.output.emit(one)


class Writer(SinkWriter, SealedTransaction):
    """A sink that prepares the number of records since the last barrier."""

    def __init__(self) -> None:
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows

    def seal(self, checkpoint: CheckpointId) -> Writer:
        sealed, self._rows = Writer(), 0
        return sealed

    def prepare(self) -> bytes:
        return b"prepared"

    def close(self) -> None:
        pass


class Made:
    """A head at channel 0 (regular) and channels 1… (feedback), with an edge into its body and one out of the loop."""

    def __init__(
        self,
        *,
        feedback: int = 1,
        replay: Sequence[BatchElement] = (),
        credit: int = CREDIT,
        high_water: int = 1 << 20,
        spec: LoopHeadSpec | None = None,
        holding: bool = False,
        sink: bool = False,
        merge_bytes_max: int = 0,
        inner: bool = False,
    ) -> None:
        spec = spec or LoopHeadSpec((), PLAIN)
        self.body, self.outside = Sent(Partitioner.REBALANCE, 1, credit=credit), Sent(Partitioner.REBALANCE, 1)
        self.body.outlet.edge = replace(self.body.outlet.edge, nest=NodeName("loop"))
        self.budget = SpillBudget(1 << 24, 1 << 24)
        self.regular = InputChannel(
            ChannelKey(0, WorkerIndex(0), WorkerIndex(0)), CREDIT, lambda _: None, lambda _: None
        )
        self.feedback = [
            FeedbackChannel(
                ChannelKey(1, WorkerIndex(i), WorkerIndex(0)),
                spec.schema,
                self.budget,
                lambda _: None,
                merge_bytes_max=merge_bytes_max,
            )
            for i in range(feedback)
        ]
        self.reports: list[tuple[Any, ...]] = []
        self.committables: dict[CheckpointId, list[CheckpointId]] = {}
        self.log = LoopLog("loop 'loop'", spec.schema, OWNER, self.budget)
        self._writes: list[Any] = []
        self._pool = ThreadPoolExecutor(1)
        self.sinks = {"out": Writer()} if sink else {}
        channels = [ChannelIndex(1 + i) for i in range(feedback)]
        place = LoopPlace(
            inside=frozenset({ChannelIndex(0)}) if inner else frozenset(),
            outside=frozenset() if inner else frozenset({ChannelIndex(0)}),
            feedback=frozenset(channels),
        )
        chain = self._chain(spec, holding)
        parts = SubtaskParts(
            SUBTASK,
            chain,
            [self.regular, *self.feedback],
            [self.body.outlet, self.outside.outlet],
            self.sinks,
            None,
            self._writer,
            self,
            is_restored_finished=False,
            place=place,
        )
        replayed = iter([e.batch for e in replay])
        loop = LoopState(chain.head.operator, self.log, replayed, high_water)  # type: ignore[arg-type]
        self.runner = LoopHeadRunner(parts, loop)
        self.runner.start()
        if not replay:
            assert self.runner._step_input(), "the replay of an empty log is over"

    def _chain(self, spec: LoopHeadSpec, holding: bool) -> Chain:
        name = NodeName("loop")
        head = Node(name, Role.LOOP_HEAD, (), spec, loops=(name,))
        chain = Chain(Vertex(VertexId("loop"), (head,)))
        chain.add(head, None, LoopHeadOperator(spec), self._context("loop"), False)
        last = head
        if holding:
            last = Node(NodeName("holding"), Role.OPERATOR, (Edge(name),), None, loops=(name,))
            chain.add(last, last.inputs[0], Holding(), self._context("holding"), False)
        for node, writer in self.sinks.items():
            out = Node(NodeName(node), Role.SINK, (Edge(name),), None)
            chain.add(out, out.inputs[0], SinkHead(writer), self._context(node), False)
        chain.attach(last.name, MAIN, self.body.outlet)
        chain.attach(last.name, MAIN, self.outside.outlet)
        chain.open()
        return chain

    def _context(self, node: str) -> OperatorContext:
        return OperatorContext("p", node, 0, 1, 128, clock_ms=lambda: 0, diverts=False, flush_ms=5)

    def _writer(self) -> SnapshotWriter:
        to = SnapshotDestination(MemoryStorage(), "p", Generation(1), 1 << 20)
        written, errors = self._writes.append, self._writes.append
        return SnapshotWriter(SUBTASK, to, self._pool, lambda event, text: written((event, text)), errors)

    def acknowledge(self, checkpoint: CheckpointId, entry: SubtaskEntry, copied: Copied | None = None) -> None:
        self.reports.append(("acknowledged", checkpoint, inlined_sections(entry)))
        self.committables[checkpoint] = [c.checkpoint for c in entry.committables]

    def decline(self, subtask: SubtaskId, checkpoint: CheckpointId, reason: AbortReason, text: str) -> None:
        self.reports.append(("declined", checkpoint, reason))

    def finished(self, subtask: SubtaskId) -> None:
        self.reports.append(("finished",))

    def entrance_ended(self, subtask: SubtaskId, effect: loops.ReportEntranceEnded) -> None:
        self.reports.append(("entrance ended", effect.started_round, effect.highest_round))

    def probe_returned(self, subtask: SubtaskId, effect: loops.ReportProbe) -> None:
        self.reports.append(("probe returned", effect.number, effect.count))

    def reads_on(self, subtask: SubtaskId, uncut: tuple[CheckpointId, ...]) -> None:
        self.reports.append(("reads on", uncut))

    def snapshot_taken(self, subtask: SubtaskId, checkpoint: CheckpointId, align_us: int, freeze_us: int) -> None:
        self.reports.append(("snapshot", checkpoint))

    def writes(self) -> list[CheckpointId]:
        """Let the asynchronous part end, hand its outcome over, and return what was written."""
        self._pool.submit(lambda: None).result()
        done, self._writes[:] = list(self._writes), []
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
            self.runner.handle(*outcome)
        return [event.checkpoint for event, _ in done if isinstance(event, SnapshotWritten)]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.runner._step_input()

    def run(self) -> None:
        """Work until there is nothing to do."""
        while self.runner.step():
            pass

    def abort(self, checkpoint: CheckpointId) -> None:
        self.runner.handle(alignment.AbortReceived(checkpoint))

    def into_body(self) -> list[Element | list[int]]:
        return [e.batch.column("id").to_pylist() if isinstance(e, BatchElement) else e for e in self.body.elements[0]]

    def logged(self, checkpoint: CheckpointId) -> list[int]:
        """Return the ids in the log of an acknowledged checkpoint."""
        sections = next(r[2] for r in self.reports if r[:2] == ("acknowledged", checkpoint))
        state = RestoredState(0, 1, sections["state/loop"])
        return [i for found in replay_logs([state], PLAIN, OWNER, "loop") for i in found.column("id").to_pylist()]


# -- replay -----------------------------------------------------------------------------------------------------------


def test_the_restored_log_is_processed_before_feedback_and_regular_input() -> None:
    made = Made(replay=[batch(1), batch(2)])
    made.regular.put(batch(20))
    made.feedback[0].put(batch(10))
    made.run()
    assert made.into_body()[:2] == [[1], [2]]
    assert sorted(map(str, made.into_body()[2:])) == ["[10]", "[20]"]


def test_no_barrier_is_taken_before_the_replay_is_over() -> None:
    made = Made(replay=[batch(1), batch(2)])
    made.regular.put(Barrier(FIVE))
    made.step()
    assert made.into_body() == [[1]]
    made.run()
    assert made.into_body() == [[1], [2], Barrier(FIVE)]
    made.feedback[0].put(Barrier(FIVE))
    made.run()
    made.writes()
    assert made.logged(FIVE) == [], "what was replayed is in the body's state"


def test_a_replay_waits_for_credit() -> None:
    made = Made(replay=[batch(1), batch(2)], credit=1)
    made.run()
    assert made.into_body() == [[1]]
    assert made.runner.wakeup_ms(0) is None, "credit wakes the mailbox"
    made.body.channels[0].add_credit(CREDIT)
    made.run()
    assert made.into_body() == [[1], [2]]


# -- turns ------------------------------------------------------------------------------------------------------------


def test_feedback_is_read_before_regular_input_but_in_turns() -> None:
    made = Made()
    for number in range(3):
        made.feedback[0].put(batch(number))
    for number in (20, 21):
        made.regular.put(batch(number))
    made.step()  # the turn begins with one element of regular input …
    made.step(2)
    made.feedback[0].put(batch(3))  # … and ends with what was queued then, whatever came meanwhile
    made.step(3)
    assert made.into_body() == [[20], [0], [1], [2], [21], [3]]


def test_a_loop_that_always_has_feedback_does_not_starve_a_barrier() -> None:
    made = Made()
    for number in range(4):
        made.feedback[0].put(batch(number))
    made.step(2)
    made.regular.put(Barrier(FIVE))
    steps = 0
    while Barrier(FIVE) not in made.into_body():
        made.feedback[0].put(batch(99))
        made.step()
        steps += 1
    assert steps <= 4


def test_a_barrier_that_is_expected_waits_for_one_batch_of_a_long_queue_at_most() -> None:
    made = Made()
    for number in range(100):
        made.feedback[0].put(batch(number))
    made.step(2)  # a turn of a hundred has begun
    made.runner.expect(FIVE)
    made.regular.put(batch(200))
    made.regular.put(Barrier(FIVE))
    made.step(4)
    assert made.into_body() == [[0], [1], [2], [200], [3], Barrier(FIVE)]


def test_merged_batches_count_as_often_as_they_were_queued() -> None:
    made = Made(merge_bytes_max=1 << 20)
    for number in range(5):
        made.feedback[0].put(batch(number))
    made.step()
    made.regular.put(batch(20))
    made.feedback[0].put(batch(5))
    made.step(2)
    assert made.into_body() == [[0, 1, 2, 3, 4], [20], [5]]


def test_what_a_held_channel_still_had_does_not_delay_the_barrier_that_it_waits_for() -> None:  # L6
    made = Made(feedback=2)
    held, other = made.feedback
    held.put(Barrier(FIVE))
    for number in range(10):
        held.put(batch(number))
    other.put(batch(100))
    made.step(2)
    made.regular.put(Barrier(FIVE))
    other.put(batch(101))
    other.put(batch(102))
    made.step(2)
    assert made.into_body()[:2] == [[100], Barrier(FIVE)]


# -- a long queue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [0, 1_000, 1 << 24])
def test_a_log_is_complete_when_its_sentinel_is_queued_however_much_is_to_be_read_before(memory_bytes: int) -> None:
    made = Made(merge_bytes_max=1 << 20)
    made.budget.memory_bytes = memory_bytes
    for number in range(50):
        made.feedback[0].put(batch(number))
    made.regular.put(Barrier(FIVE))
    made.runner.expect(FIVE)
    made.step()
    made.feedback[0].put(batch(50))
    made.feedback[0].put(Barrier(FIVE))
    made.feedback[0].put(batch(51))
    before = made.into_body()
    made.step()
    assert made.writes() == [FIVE]
    read = [one for one in before if isinstance(one, list)]
    assert sum(map(len, read)) < 50, "the rest was not read yet"
    assert [*chain(*read), *made.logged(FIVE)] == list(range(51))
    made.run()
    assert [*chain(*(one for one in made.into_body() if isinstance(one, list)))] == list(range(52)), "it is read once"
    made.runner.close()
    for channel in made.feedback:
        channel.close()
    assert (made.budget.memory_used_bytes, made.budget.disk_used_bytes) == (0, 0)


def test_what_waits_is_in_the_logs_of_all_checkpoints_whose_sentinels_wait_behind_it() -> None:
    made = Made(feedback=2)
    one, other = made.feedback
    for checkpoint in (FIVE, SIX):
        made.regular.put(Barrier(checkpoint))
        made.runner.expect(checkpoint)
    made.step(2)
    for number, element in enumerate([batch(0), Barrier(FIVE), batch(1), Barrier(SIX), batch(2)]):
        one.put(element)
        other.put(batch(10 + number))
    other.put(Barrier(FIVE))
    other.put(Barrier(SIX))
    made.run()
    assert sorted(made.writes()) == [FIVE, SIX]
    assert sorted(made.logged(FIVE)) == [0, 10, 11, 12, 13, 14]
    assert sorted(made.logged(SIX)) == [0, 1, 10, 11, 12, 13, 14]


def test_what_waits_is_logged_in_its_next_round_without_those_that_had_their_last() -> None:
    made = Made(spec=LoopHeadSpec((), WITH_ROUND, round_column="round", max_rounds=3))
    made.budget.memory_bytes = 0
    rows = pa.record_batch({"id": pa.array([1, 2], pa.int64()), "round": pa.array([0, 2], pa.int64())})
    made.regular.put(Barrier(FIVE))
    made.step()
    made.feedback[0].put(batch_element(rows))
    made.feedback[0].put(Barrier(FIVE))
    made.step()
    assert made.writes() == [FIVE]
    sections = next(r[2] for r in made.reports if r[:2] == ("acknowledged", FIVE))
    (found,) = replay_logs([RestoredState(0, 1, sections["state/loop"])], WITH_ROUND, OWNER, "loop")
    assert found.to_pylist() == [{"id": 1, "round": 1}]


def test_a_sentinel_behind_the_end_of_data_is_read_in_order() -> None:  # L29
    made = Made()
    made.regular.put(Barrier(FIVE))
    made.step()
    for element in (EndOfData(), Barrier(FIVE)):
        made.feedback[0].put(element)
    made.run()
    assert made.writes() == [FIVE]
    assert made.logged(FIVE) == []


# -- throttling -------------------------------------------------------------------------------------------------------


def test_regular_input_waits_while_more_than_the_high_water_mark_is_queued() -> None:
    made = Made(high_water=0)
    made.regular.put(batch(20))
    made.feedback[0].put(batch(1))
    made.feedback[0].put(batch(2))
    made.step(2)
    assert made.into_body() == [[1], [2]]
    assert made.runner.progress().queued_batches == 0
    made.step()
    assert made.into_body()[2:] == [[20]]


def test_an_expected_barrier_is_let_through_and_then_input_waits_again() -> None:
    made = Made(high_water=0)
    made.regular.put(batch(20))
    made.regular.put(Barrier(FIVE))
    made.regular.put(batch(21))
    made.runner.expect(FIVE)
    for number in range(8):
        made.feedback[0].put(batch(number))
    made.step(1 + 8)
    for number in range(8):
        made.feedback[0].put(batch(number))
    made.step(1 + 8)
    made.feedback[0].put(batch(9))
    made.step()
    regular = [e for e in made.into_body() if e in ([20], [21], Barrier(FIVE))]
    assert regular == [[20], Barrier(FIVE)]


def test_a_barrier_that_was_quicker_than_the_message_is_not_expected_any_more() -> None:
    made = Made(high_water=0)
    made.regular.put(Barrier(FIVE))
    made.run()
    made.runner.expect(FIVE)
    made.feedback[0].put(batch(1))
    made.regular.put(batch(20))
    made.step()
    assert made.into_body() == [Barrier(FIVE), [1]]


def test_an_aborted_checkpoint_is_not_expected_while_others_still_are() -> None:
    made = Made(high_water=0)
    made.runner.expect(FIVE)
    made.runner.expect(SIX)
    made.abort(SIX)
    made.feedback[0].put(batch(1))
    made.regular.put(batch(20))
    made.step()
    assert made.into_body() == [[20]], "5 is still on its way"
    made.abort(FIVE)
    made.regular.put(batch(21))
    made.step()
    assert made.into_body() == [[20], [1]]


# -- probes and the end -----------------------------------------------------------------------------------------------


def test_what_operators_hold_back_goes_in_front_of_a_probe() -> None:  # L27
    made = Made(holding=True)
    made.feedback[0].put(batch(1))
    made.step()
    assert made.into_body() == []
    made.runner.handle(loops.ProbeOrdered(PROBE))
    assert made.into_body() == [[1], PROBE]


def test_what_operators_hold_back_goes_in_front_of_the_sentinel() -> None:
    made = Made(holding=True)
    made.body.outlet.edge = replace(made.body.outlet.edge, is_feedback=True)
    made.feedback[0].put(batch(1))
    made.step()
    made.regular.put(Barrier(FIVE))
    made.step()
    assert made.into_body() == [[1], Barrier(FIVE)]


def test_a_probe_does_not_leave_its_nest_and_counts_what_comes_back_behind_it() -> None:  # L34
    made = Made()
    made.regular.put(batch(20))
    made.regular.put(EndOfData())
    made.run()
    assert made.reports == [("entrance ended", -1, -1)]
    made.runner.handle(loops.ProbeOrdered(PROBE))
    made.feedback[0].put(batch(20))
    made.feedback[0].put(PROBE)
    made.run()
    assert made.into_body() == [[20], PROBE, [20]]
    assert PROBE not in made.outside.elements[0]
    assert made.reports[-1] == ("probe returned", 1, 1)


def test_the_last_watermark_goes_in_front_of_its_probe_and_no_other_one_before() -> None:  # L37
    made = Made()
    made.regular.put(Watermark(5))
    made.regular.put(EndOfData())
    made.feedback[0].put(Watermark(7))
    made.run()
    assert made.into_body() == []
    probe = Probe(1, is_last_watermark=True)
    made.runner.handle(loops.ProbeOrdered(probe))
    assert made.into_body() == [Watermark(WATERMARK_MAX_MS), probe]


def test_the_head_has_finished_when_the_end_is_back() -> None:  # L29
    made = Made(feedback=2)
    made.regular.put(EndOfData())
    made.run()
    made.runner.handle(machine.LoopEnded())
    assert made.into_body() == [Watermark(WATERMARK_MAX_MS), EndOfData()]
    made.feedback[0].put(EndOfData())
    made.run()
    assert ("finished",) not in made.reports
    made.feedback[1].put(EndOfData())
    made.run()
    assert made.reports[-1] == ("finished",)


def test_records_that_an_operator_sends_back_in_finish_are_the_users_error() -> None:  # L29
    made = Made()
    made.regular.put(EndOfData())
    made.run()
    made.runner.handle(machine.LoopEnded())
    made.feedback[0].put(batch(1, 2))
    with pytest.raises(UsageError, match=r"loop 'loop': 2 records came back after the loop had ended.*finish\(\)"):
        made.run()


def test_records_that_had_their_last_round_are_neither_logged_nor_processed() -> None:
    made = Made(spec=LoopHeadSpec((), WITH_ROUND, "round", max_rounds=2))
    made.regular.put(batch(7))
    made.run()
    made.regular.put(Barrier(FIVE))
    made.run()
    came_back = pa.record_batch({"id": pa.array([1, 2]), "round": pa.array([0, 1])}, schema=WITH_ROUND)
    made.feedback[0].put(batch_element(came_back))
    made.feedback[0].put(batch_element(came_back.slice(1)))
    made.run()
    assert made.into_body() == [[7], Barrier(FIVE), [1]]
    assert made.log.elements(FIVE) == 1
    assert made.runner.progress().came_back == 1


# -- the log ----------------------------------------------------------------------------------------------------------


def test_records_are_in_the_log_before_they_are_processed(monkeypatch: pytest.MonkeyPatch) -> None:  # L2
    made = Made()
    made.regular.put(Barrier(FIVE))
    made.run()
    seen: list[int] = []
    emit = LoopHeadOperator.forward

    def forward(operator: LoopHeadOperator, found: pa.RecordBatch) -> None:
        seen.append(made.log.elements(FIVE))
        emit(operator, found)

    monkeypatch.setattr(made.runner._loop.operator, "forward", lambda found: forward(made.runner._loop.operator, found))
    made.feedback[0].put(batch(1))
    made.run()
    assert seen == [1]


def test_a_snapshot_is_not_written_before_its_log_is_complete() -> None:  # L1, L4
    made = Made(feedback=2)
    made.regular.put(batch(20))
    made.regular.put(Barrier(FIVE))
    made.run()
    made.feedback[0].put(batch(1))
    made.feedback[0].put(Barrier(FIVE))
    made.feedback[0].put(batch(2))  # L11: behind its sentinel
    made.feedback[1].put(batch(3))
    made.run()
    assert made.writes() == []
    assert made.runner.progress().log_bytes > 0
    made.feedback[1].put(Barrier(FIVE))
    made.run()
    assert made.writes() == [FIVE]
    assert sorted(made.logged(FIVE)) == [1, 3]
    assert made.runner.progress().log_bytes == 0


def test_overlapping_checkpoints_have_a_log_each() -> None:
    made = Made()
    back = made.feedback[0]
    for checkpoint, number in ((FIVE, 1), (SIX, 2)):
        made.regular.put(Barrier(checkpoint))
        made.run()
        back.put(batch(number))
        made.run()
    for checkpoint, number in ((FIVE, 3), (SIX, 4)):
        back.put(Barrier(checkpoint))
        back.put(batch(number))
    made.run()
    assert made.writes() == [FIVE, SIX]
    assert (made.logged(FIVE), made.logged(SIX)) == ([1, 2], [2, 3])


def test_a_channel_is_held_behind_an_early_sentinel_until_its_barrier_or_an_abort() -> None:  # L5, L6
    made = Made()
    made.feedback[0].put(Barrier(FIVE))
    made.feedback[0].put(batch(1))
    made.run()
    assert made.into_body() == []
    assert made.runner.progress().held_channels == 1
    made.abort(FIVE)
    made.run()
    assert made.into_body() == [[1]]
    assert made.runner.progress().held_channels == 0


def test_what_was_to_be_logged_for_an_aborted_checkpoint_is_processed() -> None:  # L5
    made = Made()
    made.regular.put(Barrier(FIVE))
    made.run()
    made.feedback[0].put(batch(1))
    made.abort(FIVE)
    made.run()
    assert made.into_body() == [Barrier(FIVE), [1]]


def test_the_sealed_output_of_a_dropped_checkpoint_goes_into_the_next_snapshot() -> None:  # L5
    made = Made(sink=True)
    made.regular.put(batch(20))
    made.regular.put(Barrier(FIVE))
    made.run()
    made.abort(FIVE)
    assert made.writes() == []
    made.regular.put(Barrier(SIX))
    made.run()
    made.feedback[0].put(Barrier(SIX))
    made.run()
    assert made.writes() == [SIX]
    assert made.committables == {SIX: [FIVE, SIX]}


def test_the_output_of_a_dropped_checkpoint_does_not_go_into_an_older_one() -> None:  # L5, K3
    made = Made(sink=True)
    for checkpoint in (FIVE, SIX, SEVEN):
        made.regular.put(batch(20 + checkpoint))
        made.regular.put(Barrier(checkpoint))
    made.run()
    made.abort(SIX)
    assert made.writes() == []
    for checkpoint in (FIVE, SEVEN):
        made.feedback[0].put(Barrier(checkpoint))
    made.run()
    assert made.writes() == [FIVE, SEVEN]
    assert made.committables == {FIVE: [FIVE], SEVEN: [FIVE, SIX, SEVEN]}


class Kept(FrozenState):
    """A state that tells when it is released."""

    def __init__(self, released: list[Kept]) -> None:
        super().__init__()
        self._released = released

    def _rows(self) -> dict[str, int]:
        return {}

    def _encode(self) -> Sequence[Buffer]:
        return encode_sections({})

    def _forget(self) -> None:
        self._released.append(self)


def test_what_was_frozen_for_a_dropped_checkpoint_is_released_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # L5
    frozen: list[Kept] = []
    released: list[Kept] = []

    def freeze(operator: Operator) -> Kept:
        frozen.append(Kept(released))
        return frozen[-1]

    monkeypatch.setattr(Holding, "freeze", freeze)
    made = Made(holding=True)
    for checkpoint in (FIVE, SIX):
        made.regular.put(Barrier(checkpoint))
        made.run()
    made.feedback[0].put(batch(1))
    made.run()
    assert (len(frozen), released) == (2, [])
    made.abort(FIVE)
    assert released == [frozen[0]]
    made.feedback[0].put(Barrier(SIX))
    made.run()
    assert made.writes() == [SIX]
    assert released == frozen
    assert made.log.memory_bytes == 0, "a log that is written is given back"


def test_closing_with_an_open_log_gives_its_memory_back() -> None:
    made = Made()
    made.regular.put(Barrier(FIVE))
    made.run()
    made.feedback[0].put(batch(1))
    made.run()
    assert made.budget.memory_used_bytes > 0
    made.runner.close()
    assert made.budget.memory_used_bytes == 0


# -- beside other subtasks --------------------------------------------------------------------------------------------


def test_a_head_lets_other_subtasks_have_their_turn() -> None:
    made = Made()
    for number in range(ELEMENTS_PER_TURN_MAX + 1):
        made.feedback[0].put(batch(number))
    assert made.runner.step()
    assert len(made.into_body()) == ELEMENTS_PER_TURN_MAX


def test_a_head_without_credit_reads_nothing_and_keeps_what_comes_back() -> None:
    made = Made(credit=1)
    made.regular.put(batch(20))
    made.run()
    for number in range(3):
        made.feedback[0].put(batch(number))
    assert not made.runner.step()
    assert made.runner.progress().queued_batches == 3
    made.body.channels[0].add_credit(CREDIT)
    made.run()
    assert made.into_body() == [[20], [0], [1], [2]]
