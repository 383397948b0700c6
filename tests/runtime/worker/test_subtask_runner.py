"""One subtask with a scripted source or hand-fed channels: what it sends, snapshots and reports, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pytest
from tests.runtime.checkpoints.writing import inlined_sections
from tests.runtime.worker.test_chain import CREDIT, Sent

from headgate.codec.frames import Barrier, BatchElement, Element, EndOfData, Watermark, batch_element
from headgate.codec.snapshot import FINISHED_PREFIX, POSITIONS_PREFIX
from headgate.connectors.base import SealedTransaction, SinkWriter, SourceBatch
from headgate.errors import UsageError
from headgate.model.config import CheckpointKind, CheckpointOptions
from headgate.model.graph import MAIN, Edge, Node, Partitioner, Role
from headgate.model.ids import ChannelIndex, CheckpointId, Generation, NodeName, SubtaskId, VertexId, WorkerIndex
from headgate.model.manifest import Copied, SubtaskEntry
from headgate.model.plan import Vertex
from headgate.operators.base import WATERMARK_MAX_MS, Operator, OperatorContext
from headgate.protocol.loop_prober import Probe
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.subtasks.loops import NO_ROUNDS, LoopPlace, RoundProgress
from headgate.protocol.watermarks import ChannelOrigin, Origin
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SnapshotWriter
from headgate.runtime.wire.channels import ChannelKey, InputChannel
from headgate.runtime.worker.chain import Chain
from headgate.runtime.worker.deployment import SinkHead
from headgate.runtime.worker.subtask_parts import SubtaskParts
from headgate.runtime.worker.subtask_runner import ELEMENTS_PER_TURN_MAX, SubtaskRunner
from headgate.storage.memory import MemoryStorage

SUBTASK = SubtaskId(VertexId("v"), 0)


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


class Passing(Operator):
    """Passes everything on; counts how often it was finished, and keeps what it was told."""

    finished = resumed = 0
    splits: ClassVar[list[tuple[str, ...]]] = []

    def process(self, batch: pa.RecordBatch) -> None:
        self.output.emit(batch)

    def finish(self) -> None:
        Passing.finished += 1

    def on_resumed(self) -> None:
        Passing.resumed += 1

    def on_splits(self, origins: Sequence[Origin]) -> None:
        Passing.splits.append(tuple(map(str, origins)))


class Holding(Operator):
    """Holds records back until something must not overtake them, as partial aggregates are."""

    def __init__(self) -> None:
        self._held: list[pa.RecordBatch] = []

    def process(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)

    def before_barrier(self) -> None:
        held, self._held = self._held, []
        for one in held:
            self.output.emit(one)

    def finish(self) -> None:
        self.before_barrier()


class Sealed(SealedTransaction):
    """What a ``Sink`` was given for one checkpoint."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def prepare(self) -> bytes:
        return bytes(self._ids)


class Sink(SinkWriter):
    """A sink whose prepared output names the records."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self.is_closed = False

    def write(self, batch: pa.RecordBatch) -> None:
        self._ids += batch.column("id").to_pylist()

    def seal(self, checkpoint: CheckpointId) -> Sealed:
        sealed, self._ids = Sealed(self._ids), []
        return sealed

    def close(self) -> None:
        self.is_closed = True


class Reader:
    """Delivers the given batches; a position is how many were taken."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = list(batches)
        self.taken = 0
        self.is_closed = False

    def splits(self) -> Sequence[str]:
        return [] if self.is_finished() else ["s"]

    def poll(self) -> SourceBatch | None:
        if self.is_finished():
            return None
        self.taken += 1
        return SourceBatch("s", self._batches[self.taken - 1])

    def is_finished(self) -> bool:
        return self.taken == len(self._batches)

    def positions(self) -> dict[str, bytes]:
        return {"s": str(self.taken).encode()}

    def wakeup_ms(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True


class Following(Reader):
    """Waits for splits that may come, and has none before it has looked."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        super().__init__(batches)
        self._has_looked = False

    def splits(self) -> Sequence[str]:
        return ["s"] if self._has_looked and self._batches else []

    def poll(self) -> SourceBatch | None:
        self._has_looked = True
        return super().poll() if self.taken < len(self._batches) else None

    def is_finished(self) -> bool:
        return False


class Made:
    """A runner with one operator and one edge to a single receiver, and everything it reported."""

    def __init__(
        self,
        *,
        reader: Reader | None = None,
        inputs: int = 0,
        credit: int = CREDIT,
        restored: bool = False,
        draining: bool = False,
        place: LoopPlace | None = None,
        rounds: RoundProgress = NO_ROUNDS,
        sink: Sink | None = None,
        on_arrival: Callable[[], None] | None = None,
        beside: Sequence[Sent] = (),
        **more: Any,
    ) -> None:
        """Make it; ``beside``: more edges out of it; ``more`` are further fields of ``SubtaskParts``."""
        Passing.finished = Passing.resumed = 0
        Passing.splits.clear()
        self.reader = reader
        self.sent = Sent(Partitioner.REBALANCE, 1, credit=credit, clock_ns=more.get("clock_ns", lambda: 0))
        node = Node(NodeName("a"), Role.OPERATOR, (), None)
        chain = Chain(Vertex(VertexId("v"), (node,)))
        context = OperatorContext("p", "a", 0, 1, 128, clock_ms=lambda: 0, diverts=False, flush_ms=5)
        chain.add(node, None, Passing(), context, False)
        outlets = [self.sent.outlet, *(one.outlet for one in beside)]
        chain.head.output.tagged(MAIN).outlets.extend(outlets)
        if sink is not None:
            holding = Node(NodeName("holding"), Role.OPERATOR, (Edge(node.name),), None)
            out = Node(NodeName("out"), Role.SINK, (Edge(holding.name),), None)
            chain.add(holding, holding.inputs[0], Holding(), context, False)
            chain.add(out, out.inputs[0], SinkHead(sink), context, False)
        chain.open()
        self.inputs = [
            InputChannel(
                ChannelKey(0, WorkerIndex(i), WorkerIndex(0)), CREDIT, lambda _: None, lambda _: None, on_arrival
            )
            for i in range(inputs)
        ]
        self.entries: dict[CheckpointId, SubtaskEntry] = {}
        self.reports: list[tuple[Any, ...]] = []
        self.committables: dict[CheckpointId, list[int]] = {}
        self.storage = MemoryStorage()
        self._pool = ThreadPoolExecutor(1)
        self._written: list[Any] = []
        to = SnapshotDestination(self.storage, "p", Generation(1), 1 << 20)
        self.runner = SubtaskRunner(
            SubtaskParts(
                SUBTASK,
                chain,
                self.inputs,
                outlets,
                {} if sink is None else {"out": sink},
                reader,
                lambda: SnapshotWriter(
                    SUBTASK,
                    to,
                    self._pool,
                    lambda event, text: self._written.append((event, text)),
                    self._written.append,
                ),
                self,
                is_restored_finished=restored,
                is_draining=draining,
                place=place,
                rounds=rounds,
                **more,
            )
        )
        self.runner.start()

    def acknowledge(self, checkpoint: CheckpointId, entry: SubtaskEntry, copied: Copied | None = None) -> None:
        self.entries[checkpoint] = entry
        self.reports.append(("acknowledged", checkpoint, inlined_sections(entry)))
        self.committables |= {c.checkpoint: list(c.payload) for c in entry.committables}

    def decline(self, subtask: SubtaskId, checkpoint: CheckpointId, reason: Any, text: str) -> None:
        self.reports.append(("declined", checkpoint, reason))

    def finished(self, subtask: SubtaskId) -> None:
        self.reports.append(("finished",))

    def reads_on(self, subtask: SubtaskId, uncut: tuple[CheckpointId, ...]) -> None:
        self.reports.append(("reads on", uncut))

    def snapshot_taken(self, subtask: SubtaskId, checkpoint: CheckpointId, align_us: int, freeze_us: int) -> None:
        self.reports.append(("snapshot", checkpoint))

    def upload(self) -> None:
        """Let the asynchronous part end and hand its outcome over, as the mailbox does."""
        self._pool.shutdown()
        for event, text in self._written:
            self.runner.handle(event, text)

    def out(self) -> list[Element | list[int]]:
        return [e.batch.column("id").to_pylist() if isinstance(e, BatchElement) else e for e in self.sent.elements[0]]


def test_the_position_in_a_snapshot_is_exactly_what_was_sent_before_its_barrier() -> None:
    made = Made(reader=Reader([batch(1), batch(2), batch(3)]))
    made.runner.step()
    made.runner.step()
    made.runner.handle(machine.TriggerReceived(CheckpointId(7)))
    made.runner.step()
    assert made.out() == [[1], [2], Barrier(CheckpointId(7)), [3]]
    made.upload()
    name, checkpoint, sections = made.reports[-1]
    assert (name, checkpoint) == ("acknowledged", 7)
    assert msgspec.msgpack.decode(sections[f"{POSITIONS_PREFIX}a"]) == {"s": b"2"}
    assert bytes(sections[f"{FINISHED_PREFIX}a"]) == b"\x00"


def test_the_totals_of_a_checkpoint_are_those_at_the_barrier() -> None:  # OM1
    made = Made(reader=Reader([batch(1, 2), batch(3), batch(4, 5, 6)]))
    made.runner.step()
    made.runner.handle(machine.TriggerReceived(CheckpointId(7)))
    made.runner.step()
    made.runner.handle(machine.TriggerReceived(CheckpointId(8)))
    made.runner.step()
    made.upload()
    counted = {checkpoint: entry.totals["a"]["records_out"] for checkpoint, entry in made.entries.items()}
    assert counted == {7: 2, 8: 3}


# A11
def test_the_options_of_a_trigger_go_out_with_the_barrier() -> None:
    savepoint = CheckpointOptions(CheckpointKind.SAVEPOINT)
    made = Made(reader=Reader([batch(1)]))
    made.runner.handle(machine.TriggerReceived(CheckpointId(7), savepoint))
    assert made.out() == [Barrier(CheckpointId(7), savepoint)]


def test_sinks_are_sealed_after_operators_have_sent_what_belongs_before_the_barrier() -> None:
    """What is behind the position in no checkpoint is lost, and what is in the wrong one is doubled by a restore."""
    made = Made(reader=Reader([batch(1), batch(2), batch(3)]), sink=Sink())
    for checkpoint, steps in ((7, 2), (8, 1), (9, 1)):
        for _ in range(steps):
            made.runner.step()
        made.runner.handle(machine.TriggerReceived(CheckpointId(checkpoint)))
    made.upload()
    assert made.committables == {7: [1, 2], 8: [3], 9: []}
    positions = [msgspec.msgpack.decode(r[2][f"{POSITIONS_PREFIX}a"]) for r in made.reports if r[0] == "acknowledged"]
    assert positions == [{"s": b"2"}, {"s": b"3"}, {"s": b"3"}]


def test_a_source_that_ended_finishes_its_operators_once_and_still_takes_checkpoints() -> None:
    made = Made(reader=Reader([batch(1)]))
    assert made.runner.step()
    assert made.runner.step()
    assert not made.runner.step()
    made.runner.handle(machine.TriggerReceived(CheckpointId(1)))
    assert made.out() == [[1], Watermark(2**63 - 1), EndOfData(), Barrier(CheckpointId(1))]
    assert ("finished",) in made.reports
    assert Passing.finished == 1
    made.upload()
    assert bytes(made.reports[-1][2][f"{FINISHED_PREFIX}a"]) == b"\x01"


def test_operators_that_were_finished_before_the_restore_are_not_finished_again() -> None:
    made = Made(reader=Reader([]), restored=True)
    made.runner.step()
    assert Passing.finished == 0
    assert made.out() == [EndOfData()]


def test_a_drained_source_ends_where_it_is_and_keeps_its_position() -> None:  # E7
    made = Made(reader=Reader([batch(1), batch(2), batch(3)]))
    made.runner.step()
    made.runner.drain()
    assert made.runner.step()
    assert not made.runner.step()
    made.runner.handle(machine.TriggerReceived(CheckpointId(1)))
    assert made.out() == [[1], Watermark(2**63 - 1), EndOfData(), Barrier(CheckpointId(1))]
    assert made.reports[0] == ("finished",)
    made.upload()
    assert msgspec.msgpack.decode(made.reports[-1][2][f"{POSITIONS_PREFIX}a"]) == {"s": b"1"}


def test_a_drained_source_without_credit_ends_when_there_is_room() -> None:  # E7
    made = Made(reader=Reader([batch(1), batch(2)]), credit=1)
    made.runner.step()
    made.runner.drain()
    assert not made.runner.step()
    assert made.runner.wakeup_ms(0) is None
    assert made.out() == [[1]]
    made.sent.channels[0].add_credit(1 << 20)
    assert made.runner.step()
    assert made.out()[1:] == [Watermark(2**63 - 1), EndOfData()]
    assert made.runner.wakeup_ms(0) is None, "nothing is left to wake up for"


def test_a_source_of_a_drained_checkpoint_is_not_read_again() -> None:  # E9
    made = Made(reader=Reader([batch(1), batch(2)]), restored=True, draining=True)
    made.runner.step()
    assert made.reader is not None
    assert made.reader.taken == 0
    assert made.out() == [EndOfData()]
    assert Passing.finished == 0


def test_a_source_restored_as_finished_reads_what_was_added() -> None:  # T10
    made = Made(reader=Reader([batch(1), batch(2)]), restored=True)
    while made.runner.step():
        pass
    assert made.out() == [[1], [2], Watermark(WATERMARK_MAX_MS), EndOfData()]
    assert (Passing.resumed, Passing.finished) == (1, 1)


def test_a_source_restored_as_finished_without_more_input_only_ends() -> None:  # T8
    made = Made(reader=Reader([]), restored=True)
    while made.runner.step():
        pass
    assert made.out() == [EndOfData()]
    assert (Passing.resumed, Passing.finished) == (0, 0)


def test_operators_restored_as_finished_go_on_with_the_first_records() -> None:  # T10
    made = Made(inputs=1, restored=True)
    for element in (Barrier(CheckpointId(1)), batch_element(batch(1)), Barrier(CheckpointId(2)), EndOfData()):
        made.inputs[0].put(element)
    while made.runner.step():
        pass
    made.upload()
    found = [report[2][f"{FINISHED_PREFIX}a"] for report in made.reports if report[0] == "acknowledged"]
    assert [bytes(flag) for flag in found] == [b"\x01", b"\x00"]
    assert (Passing.resumed, Passing.finished) == (1, 1)


def test_input_that_comes_after_the_rounds_of_its_loop_have_begun_is_refused() -> None:
    channel = ChannelIndex(0)
    nothing = frozenset[ChannelIndex]()
    place = LoopPlace(inside=nothing, outside=frozenset({channel}), feedback=nothing, is_leaf=True)
    made = Made(inputs=1, place=place, rounds=RoundProgress(closed=1))
    made.inputs[0].put(batch_element(batch(1)))
    with pytest.raises(UsageError, match=r"more input came to loop .* after its input had ended"):
        made.runner.step()
    made = Made(inputs=1, place=place)
    made.inputs[0].put(batch_element(batch(1)))
    made.runner.step()
    assert made.out() == [[1]]


def test_without_credit_nothing_is_polled_and_nobody_is_woken_for_it() -> None:
    made = Made(reader=Reader([batch(1), batch(2)]), credit=1)
    assert made.runner.wakeup_ms(0) == 0
    assert made.runner.step()
    assert not made.runner.step()
    assert made.reader is not None
    assert made.reader.taken == 1
    assert made.runner.wakeup_ms(0) is None, "waiting for credit must not spin"
    made.runner.handle(machine.TriggerReceived(CheckpointId(1)))
    assert made.out() == [[1], Barrier(CheckpointId(1))], "a barrier needs no credit"


def test_records_behind_a_barrier_wait_until_every_input_has_delivered_it() -> None:
    made = Made(inputs=2)
    early, late = made.inputs
    for element in (batch_element(batch(1)), Barrier(CheckpointId(1)), batch_element(batch(2))):
        early.put(element)
    late.put(batch_element(batch(10)))
    while made.runner.step():
        pass
    assert early.is_blocked
    assert sorted(row for e in made.out() if isinstance(e, list) for row in e) == [1, 10]
    late.put(batch_element(batch(11)))
    late.put(Barrier(CheckpointId(1)))
    while made.runner.step():
        pass
    assert made.out()[2:] == [[11], Barrier(CheckpointId(1)), [2]]
    assert not early.is_blocked
    assert ("snapshot", 1) in made.reports


def feeding_back() -> Made:
    """A subtask in the body of a loop, whose output goes back to the head."""
    place = LoopPlace(inside=frozenset({ChannelIndex(0), ChannelIndex(1)}))
    made = Made(inputs=2, place=place)
    made.sent.outlet.edge = replace(made.sent.outlet.edge, nest=NodeName("loop"), is_feedback=True)
    return made


def test_a_sentinel_goes_out_with_the_snapshot_and_before_it_is_acknowledged() -> None:
    made = feeding_back()
    early, late = made.inputs
    early.put(Barrier(CheckpointId(1)))
    assert made.runner.step()
    assert made.out() == []
    late.put(batch_element(batch(1)))
    late.put(Barrier(CheckpointId(1)))
    assert made.runner.step()
    assert made.out() == [[1], Barrier(CheckpointId(1))]
    assert made.reports == [("snapshot", 1)]


def test_a_probe_goes_back_in_line_with_records() -> None:
    made = feeding_back()
    for channel in made.inputs:
        channel.put(batch_element(batch(1)))
        channel.put(Probe(1))
    assert made.runner.step()
    assert made.out() == [[1], [1], Probe(1)]


def test_the_watermark_is_the_least_of_all_inputs_and_the_end_comes_after_all_ended() -> None:
    made = Made(inputs=2)
    one, other = made.inputs
    one.put(Watermark(9))
    other.put(Watermark(5))
    one.put(EndOfData())
    while made.runner.step():
        pass
    assert made.out() == [Watermark(5)]
    other.put(EndOfData())
    while made.runner.step():
        pass
    assert made.out() == [Watermark(5), Watermark(2**63 - 1), EndOfData()]
    assert made.reports == [("finished",)]


def test_operators_hear_that_a_channel_has_ended_behind_its_records(monkeypatch: pytest.MonkeyPatch) -> None:  # W5
    made = Made(inputs=2)
    heard: list[tuple[str, int]] = []
    monkeypatch.setattr(Passing, "on_split_finished", lambda _, origin: heard.append((origin, len(made.out()))))
    made.inputs[1].put(batch_element(batch(1)))
    made.inputs[1].put(EndOfData())
    while made.runner.step():
        pass
    assert heard == [(ChannelOrigin(ChannelIndex(1)), 1)]


def test_a_turn_is_bounded_so_that_others_come_to_theirs() -> None:
    made = Made(inputs=1)
    for number in range(ELEMENTS_PER_TURN_MAX + 1):
        made.inputs[0].put(batch_element(batch(number)))
    assert made.runner.step()
    assert len(made.inputs[0]) == 1


def test_operators_hear_that_a_source_owns_no_split_once_it_has_looked() -> None:  # W7
    made = Made(reader=Following([]))
    assert Passing.splits == []
    for _ in range(3):
        made.runner.step()
    assert Passing.splits == [()]


def test_nobody_is_without_splits_before_the_source_has_looked() -> None:  # W7: event time would pass over them
    made = Made(reader=Following([batch(1)]))
    for _ in range(3):
        made.runner.step()
    assert Passing.splits == [("s",)]
    assert made.out() == [[1]]


def test_closing_closes_the_source() -> None:
    made = Made(reader=Reader([batch(1)]))
    made.runner.close()
    assert made.reader is not None
    assert made.reader.is_closed
    made.upload()


def test_a_source_that_cannot_be_closed_leaves_nothing_open_behind_it() -> None:
    class Stuck(Reader):
        def close(self) -> None:
            super().close()
            raise SystemExit(1)

    sink = Sink()
    made = Made(reader=Stuck([]), sink=sink)
    with pytest.raises(SystemExit):
        made.runner.close()
    assert made.reader is not None
    assert made.reader.is_closed
    assert sink.is_closed


def test_operators_are_told_when_the_last_barrier_before_a_stop_has_passed() -> None:
    made = Made(reader=Reader([batch(1), batch(2)]))
    made.runner.step()
    for checkpoint, is_last in ((6, False), (7, True)):
        options = CheckpointOptions(is_last=is_last)
        made.runner.handle(machine.TriggerReceived(CheckpointId(checkpoint), options))
        assert {link.context.is_stopping for link in made.runner.chain.links} == {is_last}


# GM3
def test_a_source_sends_nothing_behind_the_last_barrier_before_a_stop() -> None:
    made = Made(reader=Reader([batch(1), batch(2)]))
    made.runner.step()
    made.runner.handle(machine.TriggerReceived(CheckpointId(7), CheckpointOptions(is_last=True)))
    assert not made.runner.step()
    assert made.runner.wakeup_ms(0) is None, "and does not ask for turns"
    assert made.out() == [[1], Barrier(CheckpointId(7), CheckpointOptions(is_last=True))]
