"""A pipeline with loops in memory: the real machines, FIFO channels, and records that say where they have been.

One ``random.Random`` decides what happens next: which channel is read, when a control message arrives, when a write is
over. The world checks while it runs; docs/spec/loops.md says what.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random

from tests.protocol.making import entry_of, inline_part

from headgate.model.graph import Edge, Graph, Node, Partitioner, Role
from headgate.model.ids import ChannelIndex, CheckpointId, NodeName, SubtaskId
from headgate.model.plan import Plan, PlanEdge, make_plan
from headgate.protocol import loop_prober
from headgate.protocol.loop_prober import LoopProber, Probe
from headgate.protocol.subtasks import alignment, loops
from headgate.protocol.subtasks import subtask as machine
from headgate.protocol.subtasks.loops import NO_ROUNDS, LoopPlace, RoundProgress

ALL, FORWARD = Partitioner.REBALANCE, Partitioner.FORWARD


def edge(upstream: str, partitioner: Partitioner = ALL) -> Edge:
    return Edge(NodeName(upstream), partitioner)


def source(name: str) -> Node:
    return Node(NodeName(name), Role.SOURCE, (), None)


def sink(name: str, *inputs: Edge) -> Node:
    return Node(NodeName(name), Role.SINK, inputs, None)


def body(name: str, *inputs: Edge, loops: str = "H") -> Node:
    return Node(NodeName(name), Role.OPERATOR, inputs, None, loops=tuple(map(NodeName, loops)))


def head(name: str, *inputs: Edge, feedback: tuple[Edge, ...], loops: str = "") -> Node:
    names = tuple(map(NodeName, loops or name))
    return Node(NodeName(name), Role.LOOP_HEAD, inputs, None, feedback=feedback, loops=names)


SHAPES: dict[str, tuple[Node, ...]] = {
    "shuffle in the body": (
        source("s"),
        head("H", edge("s", FORWARD), feedback=(edge("b", FORWARD),)),
        body("b", edge("H")),
        sink("k", edge("b")),
    ),
    "pointwise body, shuffled feedback": (  # L6: a sentinel or a probe may come back before its head has passed it
        source("s"),
        head("H", edge("s"), feedback=(edge("b"),)),
        body("b", edge("H", FORWARD)),
        sink("k", edge("b")),
    ),
    "several feedback channels": (  # L11
        source("s"),
        head("H", edge("s"), feedback=(edge("b"), edge("c", FORWARD), edge("H"))),
        body("b", edge("H")),
        body("c", edge("b")),
        sink("k", edge("c")),
    ),
    "input from outside": (  # the body waits for a barrier from outside the loop
        source("s"),
        source("t"),
        head("H", edge("s"), feedback=(edge("b"),)),
        body("b", edge("H", FORWARD), edge("t", FORWARD)),
        sink("k", edge("b")),
    ),
    "leaf": (
        source("s"),
        head("H", edge("s"), feedback=(edge("b"),)),
        body("b", edge("H")),
        body("leaf", edge("b"), edge("H")),
        sink("k", edge("leaf")),
    ),
    "loop within a loop": (
        source("s"),
        head("H", edge("s"), feedback=(edge("b"),)),
        head("I", edge("H"), feedback=(edge("i"),), loops="HI"),
        body("i", edge("I"), loops="HI"),
        body("b", edge("i"), edge("H")),
        sink("k", edge("b")),
    ),
    "pointwise loop within a loop": (
        source("s"),
        source("t"),
        head("H", edge("s"), feedback=(edge("b"),)),
        head("I", edge("H", FORWARD), feedback=(edge("i"),), loops="HI"),
        body("i", edge("I", FORWARD), edge("t", FORWARD), loops="HI"),
        body("b", edge("i", FORWARD)),
        sink("k", edge("b")),
    ),
    "two loops within a loop": (
        source("s"),
        head("H", edge("s"), feedback=(edge("b"),)),
        head("I", edge("H"), feedback=(edge("i"),), loops="HI"),
        body("i", edge("I"), edge("H", FORWARD), loops="HI"),
        head("J", edge("i"), feedback=(edge("j"), edge("J")), loops="HJ"),
        body("j", edge("J"), loops="HJ"),
        body("b", edge("j"), edge("i", FORWARD)),
        sink("k", edge("b")),
    ),
}


def plan_of(shape: str, parallelism: int) -> Plan:
    return make_plan(Graph(SHAPES[shape]), parallelism, 128)


def place_of(plan: Plan, subtask: SubtaskId) -> LoopPlace | None:
    """Return where ``subtask`` stands in its nest, as the runtime finds out."""
    if plan.vertex(subtask.vertex).nest is None:
        return None
    inputs = plan.inputs(subtask)
    return LoopPlace(
        inside=frozenset(i.channel for i in inputs if i.edge.nest is not None and not i.edge.is_feedback),
        outside=frozenset(i.channel for i in inputs if i.edge.nest is None),
        feedback=frozenset(i.channel for i in inputs if i.edge.is_feedback),
        is_leaf=all(out.nest is None for out in plan.outputs(subtask.vertex)),
    )


@dataclass(frozen=True, slots=True)
class Record:
    """``trips`` that it may still make over feedback edges, ``made`` so far, and its round in the outermost loop."""

    name: str
    trips: int
    made: int = 0
    round_: int = 0


@dataclass(slots=True)
class State:
    """What a snapshot holds of one subtask."""

    position: int = 0
    born: list[str] = field(default_factory=list)
    died: list[Record] = field(default_factory=list)
    trips: list[str] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    has_fired: bool = False
    is_finished: bool = False
    progress: RoundProgress = NO_ROUNDS
    log: list[Record] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier, or on a feedback channel a sentinel."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Cancel:
    """A cancel marker."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class End:
    """The end of data."""


Element = Record | Barrier | Cancel | End | Probe


@dataclass(slots=True)
class Channel:
    """A FIFO channel, with all that went through it: where each checkpoint cut it, and what was logged of it."""

    edge: PlanEdge
    queue: deque[Element] = field(default_factory=deque)
    sent: list[Record] = field(default_factory=list)
    taken_count: int = 0
    cut_sent: dict[CheckpointId, int] = field(default_factory=dict)
    cut_taken: dict[CheckpointId, int] = field(default_factory=dict)
    logs: dict[CheckpointId, list[Record]] = field(default_factory=dict)


@dataclass(slots=True)
class LiveSubtask:
    """One subtask, and what a worker would keep for it."""

    live: machine.Subtask
    state: State
    inputs: list[Channel]
    outputs: list[tuple[PlanEdge, list[Channel]]]
    records: list[Record]
    """Sources only: everything there is to read."""
    is_head: bool
    is_in_nest: bool
    replay: deque[Record] = field(default_factory=deque)
    control: deque[machine.Event] = field(default_factory=deque)
    frozen: dict[CheckpointId, State] = field(default_factory=dict)
    writing: set[CheckpointId] = field(default_factory=set)
    is_over: bool = False
    has_reported: bool = False


def check_logs(subtask: LiveSubtask, checkpoint: CheckpointId, logs: list[list[Record]]) -> None:
    """The log of each channel: sent before its sentinel, and not processed before the head's barrier."""
    for channel, log in zip(subtask.inputs, logs, strict=True):
        if channel.edge.is_feedback and checkpoint in channel.cut_sent:
            transit = channel.sent[channel.cut_taken[checkpoint] : channel.cut_sent[checkpoint]]
            assert [r.name for r in log] == [r.name for r in transit]


def check_cut(subtasks: Iterable[LiveSubtask], checkpoint: CheckpointId) -> None:
    """Every channel is cut: nothing was processed that the sender's snapshot does not know to be sent."""
    for subtask in subtasks:
        for channel in subtask.inputs:
            sent, taken = channel.cut_sent[checkpoint], channel.cut_taken[checkpoint]
            assert taken <= sent if channel.edge.is_feedback else taken == sent


class World:
    """One generation."""

    def __init__(
        self,
        plan: Plan,
        records: dict[SubtaskId, list[Record]],
        random: Random,
        *,
        has_rounds: bool,
        restored: dict[SubtaskId, State] | None = None,
    ) -> None:
        self.plan, self.random, self.has_rounds, self.restored = plan, random, has_rounds, restored
        self.completed: dict[CheckpointId, dict[SubtaskId, State]] = {}
        self.finished_rounds: list[int] = []
        self.has_ended = False
        self.started_after_empty = 0
        self._checkpoint = 0
        self._acknowledged: dict[CheckpointId, dict[SubtaskId, State]] = {}
        self._aborted: list[CheckpointId] = []
        (nest,) = plan.nests()
        every = range(plan.parallelism)
        self._heads = [SubtaskId(v, i) for v in nest.heads for i in every]
        self.prober = LoopProber(
            [SubtaskId(v, i) for v in nest.entrances for i in every],
            [SubtaskId(nest.heads[0], i) for i in every],
            [SubtaskId(v, i) for v in nest.heads[1:] for i in every],
            [SubtaskId(v, i) for v in nest.leaves for i in every],
            has_rounds=has_rounds,
        )
        self.outer_head = nest.heads[0]
        self.subtasks: dict[SubtaskId, LiveSubtask] = {}
        for subtask in plan.subtasks():
            self._add(subtask, records.get(subtask, []), None if restored is None else restored[subtask])
        for subtask in plan.subtasks():
            for one, channel in zip(plan.inputs(subtask), self.subtasks[subtask].inputs, strict=True):
                outputs = self.subtasks[one.upstream].outputs
                if not any(edge == one.edge for edge, _ in outputs):
                    outputs.append((one.edge, []))
                next(channels for edge, channels in outputs if edge == one.edge).append(channel)

    def _add(self, subtask: SubtaskId, records: list[Record], restored: State | None) -> None:
        vertex = self.plan.vertex(subtask.vertex)
        state = State() if restored is None else copy.deepcopy(restored)
        inputs = [Channel(one.edge) for one in self.plan.inputs(subtask)]
        live = machine.Subtask(
            sum(not channel.edge.is_feedback for channel in inputs),
            is_restored_finished=state.is_finished,
            place=place_of(self.plan, subtask),
            rounds=state.progress,
        )
        replay, state.log = deque(state.log), []
        is_in_nest = vertex.nest is not None
        self.subtasks[subtask] = LiveSubtask(
            live, state, inputs, [], records, vertex.is_loop_head, is_in_nest, replay, is_over=state.is_finished
        )

    # -- what may happen next -----------------------------------------------------------------------------------

    def step(self, *, may_checkpoint: bool = True) -> bool:
        """Do one thing; return whether there was anything to do."""
        moves: list[Callable[[], None]] = []
        for name, subtask in self.subtasks.items():
            moves += self._moves(name, subtask)
        if may_checkpoint and self.random.random() < 0.05:
            is_room = len(self._acknowledged) < 3
            moves = [self._trigger_next if is_room and self.random.random() < 0.8 else self._abort]
        if not moves:
            return False
        self.random.choice(moves)()
        return True

    def _moves(self, name: SubtaskId, subtask: LiveSubtask) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        if subtask.control:
            moves.append(lambda: self._handle(name, subtask.control.popleft()))
        moves += [lambda c=c: self._end_write(name, c) for c in sorted(subtask.writing)]  # type: ignore[misc]
        if not subtask.inputs and not subtask.live.is_finished | subtask.has_reported:
            moves.append(lambda: self._read_source(name))
        elif not subtask.inputs and not subtask.has_reported:
            moves.append(lambda: self._handle(name, machine.SourceEnded()))
        if subtask.replay:
            return [*moves, lambda: self._forward(name, subtask.replay.popleft())]
        for at, channel in enumerate(subtask.inputs):
            if channel.queue and ChannelIndex(at) not in subtask.live.blocked:
                moves.append(lambda at=at, channel=channel: self._take(name, at, channel))  # type: ignore[misc]
        return moves

    def trigger(self) -> CheckpointId:
        """Begin the next checkpoint at all sources."""
        self._checkpoint += 1
        checkpoint = CheckpointId(self._checkpoint)
        self._acknowledged[checkpoint] = {}
        for subtask in self.subtasks.values():
            if not subtask.inputs:
                subtask.control.append(machine.TriggerReceived(checkpoint))
        return checkpoint

    def _trigger_next(self) -> None:
        self.trigger()

    def _abort(self, checkpoint: CheckpointId | None = None) -> None:
        """Abort a pending checkpoint, or tell everybody again that one was aborted."""
        if checkpoint is None:
            known = [*self._acknowledged, *self._aborted]
            if not known:
                return
            checkpoint = self.random.choice(known)
        if self._acknowledged.pop(checkpoint, None) is not None:
            self._aborted.append(checkpoint)
        for subtask in self.subtasks.values():
            subtask.control.append(alignment.AbortReceived(checkpoint))

    def _end_write(self, name: SubtaskId, checkpoint: CheckpointId) -> None:
        self.subtasks[name].writing.remove(checkpoint)
        if self.random.random() < 0.02:
            self._handle(name, machine.SnapshotFailed(checkpoint))
        else:
            self._handle(name, machine.SnapshotWritten(checkpoint, entry_of(inline_part())))

    # -- records ------------------------------------------------------------------------------------------------

    def _read_source(self, name: SubtaskId) -> None:
        subtask = self.subtasks[name]
        if subtask.state.position == len(subtask.records):
            self._handle(name, machine.SourceEnded())
            return
        record = subtask.records[subtask.state.position]
        subtask.state.position += 1
        subtask.state.born.append(record.name)
        self._send_on(name, record)

    def _take(self, name: SubtaskId, at: int, channel: Channel) -> None:
        element, index = channel.queue.popleft(), ChannelIndex(at)
        match element:
            case Record():
                channel.taken_count += 1
                if channel.edge.is_feedback:
                    self._come_back(name, index, element)
                else:
                    self._process(name, element)
            case Barrier():
                self._handle(name, alignment.BarrierReceived(index, element.checkpoint))
            case Cancel():
                self._handle(name, alignment.CancelReceived(index, element.checkpoint))
            case End():
                self._handle(name, machine.EndReceived(index))
            case Probe():
                self._handle(name, loop_prober.ProbeReceived(index, element))

    def _come_back(self, name: SubtaskId, channel: ChannelIndex, record: Record) -> None:
        subtask = self.subtasks[name]
        is_outer = name.vertex == self.outer_head
        record = replace(record, round_=record.round_ + is_outer)
        effects = subtask.live.handle(loops.FeedbackReceived(channel))
        assert effects[-1] == loops.ForwardFeedback()  # L2: logged first
        for effect in effects[:-1]:
            assert isinstance(effect, loops.LogFeedback)
            for checkpoint in effect.checkpoints:
                subtask.inputs[channel].logs[checkpoint].append(record)
        self._forward(name, record)

    def _forward(self, name: SubtaskId, record: Record) -> None:
        subtask = self.subtasks[name]
        self._handle(name, loops.FeedbackForwarded(record.round_))
        subtask.state.trips.append(record.name)
        self._process(name, record)

    def _process(self, name: SubtaskId, record: Record) -> None:
        subtask = self.subtasks[name]
        assert not (self.has_ended and subtask.is_in_nest), "the loop was ended with a record in it"
        if self.has_rounds and subtask.is_in_nest:
            assert not subtask.state.closed or record.round_ > subtask.state.closed[-1], "its round is over here"
        if record.trips and self.random.random() < 0.1:  # one becomes two
            subtask.state.died.append(record)
            for suffix in "ab":
                half = replace(record, name=record.name + suffix, made=0, trips=record.trips - 1)
                subtask.state.born.append(half.name)
                self._send_on(name, half)
        else:
            self._send_on(name, record)

    def _send_on(self, name: SubtaskId, record: Record) -> None:
        subtask = self.subtasks[name]
        ways = [(edge, channels) for edge, channels in subtask.outputs if record.trips or not edge.is_feedback]
        if not ways:
            subtask.state.died.append(record)
            return
        edge, channels = self.random.choice(ways)
        if edge.is_feedback:
            record = replace(record, trips=record.trips - 1, made=record.made + 1)
        channel = self.random.choice(channels)
        channel.queue.append(record)
        channel.sent.append(record)

    # -- effects ------------------------------------------------------------------------------------------------

    def _handle(self, name: SubtaskId, event: machine.Event) -> None:
        for effect in self.subtasks[name].live.handle(event):
            self._run(name, self.subtasks[name], effect)

    def _run(self, name: SubtaskId, subtask: LiveSubtask, effect: machine.Effect) -> None:
        match effect:
            case alignment.TakeSnapshot():
                self._take_snapshot(subtask, effect.checkpoint)
            case alignment.EmitBarrier():
                self._broadcast(subtask, Barrier(effect.checkpoint))
                if not subtask.is_head:
                    subtask.writing.add(effect.checkpoint)
            case alignment.EmitCancel():
                self._broadcast(subtask, Cancel(effect.checkpoint))
            case loops.OpenLog():
                for channel in subtask.inputs:
                    channel.logs[effect.checkpoint] = []
            case loops.SealLog():
                logs = [channel.logs.pop(effect.checkpoint) for channel in subtask.inputs]
                subtask.frozen[effect.checkpoint].log = [record for log in logs for record in log]
                check_logs(subtask, effect.checkpoint, logs)
                subtask.writing.add(effect.checkpoint)
            case loops.DropLog():
                del subtask.frozen[effect.checkpoint]
                for channel in subtask.inputs:
                    del channel.logs[effect.checkpoint]
            case machine.CancelWrite():
                subtask.writing.discard(effect.checkpoint)
            case alignment.Decline():
                self._abort(effect.checkpoint)
            case machine.Acknowledge():
                self._acknowledge(name, effect.checkpoint, subtask.frozen[effect.checkpoint])
            case machine.EmitEnd():
                self._broadcast(subtask, End())
            case machine.ReportFinished():
                assert not subtask.has_reported
                subtask.has_reported = True
            case loop_prober.PassProbe():
                for edge, channels in subtask.outputs:
                    for channel in channels if edge.nest is not None else ():
                        channel.queue.append(effect.probe)
            case loop_prober.CloseRound():
                subtask.state.closed.append(effect.round_)
                self._on_round(name, subtask, effect.round_)
            case loops.AdvanceToEnd():
                self._fire(name, subtask)
            case loops.ReportEntranceEnded():
                self._probe(loop_prober.EntranceEnded(name, effect.started_round, effect.highest_round))
            case loops.ReportProbe():
                self._probe(loop_prober.ProbeReturned(name, effect.number, effect.count, effect.highest_round))

    def _broadcast(self, subtask: LiveSubtask, element: Element) -> None:
        for _, channels in subtask.outputs:
            for channel in channels:
                channel.queue.append(element)
                if isinstance(element, Barrier):
                    channel.cut_sent[element.checkpoint] = len(channel.sent)

    def _take_snapshot(self, subtask: LiveSubtask, checkpoint: CheckpointId) -> None:
        assert not subtask.replay, "no barrier before the replay is over"
        state = copy.deepcopy(subtask.state)
        state.is_finished, state.progress = subtask.live.is_finished, subtask.live.rounds
        subtask.frozen[checkpoint] = state
        for channel in subtask.inputs:
            channel.cut_taken[checkpoint] = channel.taken_count

    def _fire(self, name: SubtaskId, subtask: LiveSubtask) -> None:
        """A window in the head's chain fires at the end of event time."""
        if not self.has_rounds and not subtask.state.has_fired and subtask.outputs:
            subtask.state.has_fired = True
            self._bear(name, subtask, Record(f"fired by {name}", 2))

    def _on_round(self, name: SubtaskId, subtask: LiveSubtask, round_: int) -> None:
        """An operator sends something when a round ends: it belongs to that round, and comes back in the next."""
        if round_ == 1 and subtask.outputs:
            self._bear(name, subtask, Record(f"round {round_} of {name}", 1, 0, round_))

    def _bear(self, name: SubtaskId, subtask: LiveSubtask, record: Record) -> None:
        back = [channels for edge, channels in subtask.outputs if edge.is_feedback and edge.target == self.outer_head]
        subtask.state.born.append(record.name)
        if not self.has_rounds:
            self._send_on(name, record)
        elif back:
            channel = back[0][0]
            record = replace(record, trips=record.trips - 1, made=1)
            channel.queue.append(record)
            channel.sent.append(record)
        else:
            subtask.state.died.append(record)

    # -- the driver ---------------------------------------------------------------------------------------------

    def _acknowledge(self, name: SubtaskId, checkpoint: CheckpointId, state: State) -> None:
        if checkpoint not in self._acknowledged:
            return
        self._acknowledged[checkpoint][name] = state
        if len(self._acknowledged[checkpoint]) == len(self.subtasks):
            check_cut(self.subtasks.values(), checkpoint)
            self.completed[checkpoint] = self._acknowledged.pop(checkpoint)
            for older in [c for c in self._acknowledged if c < checkpoint]:  # subsumed
                del self._acknowledged[older]
                self._aborted.append(older)
            for subtask in self.subtasks.values():
                subtask.control.append(machine.CompleteReceived(checkpoint))

    def _probe(self, event: loop_prober.ProberEvent) -> None:
        for effect in self.prober.handle(event):
            match effect:
                case loop_prober.StartProbe():
                    self.started_after_empty += not self.records_in_nest()
                    for head in self._heads:
                        if head.vertex == self.outer_head:
                            self.subtasks[head].control.append(loops.ProbeOrdered(effect.probe))
                case loop_prober.RoundFinished():
                    alive = [r.round_ for r in self.records_in_nest()]
                    assert all(round_ > effect.round_ for round_ in alive), "its round is not over"
                    self.finished_rounds.append(effect.round_)
                case loop_prober.EndLoop():
                    assert not self.records_in_nest(), "a record is in the loop that ends"
                    self.has_ended = True
                    for head in self._heads:
                        self.subtasks[head].control.append(machine.LoopEnded())

    def records_in_nest(self) -> list[Record]:
        """Return every record that is under way within the nest, or on its way into it."""
        found: list[Record] = []
        for subtask in self.subtasks.values():
            found += subtask.replay
            if subtask.is_in_nest:
                for channel in subtask.inputs:
                    is_back = channel.edge.is_feedback and channel.edge.target == self.outer_head
                    records = (e for e in channel.queue if isinstance(e, Record))
                    found += [replace(r, round_=r.round_ + is_back) for r in records]
        return found

    @property
    def pending(self) -> bool:
        return bool(self._acknowledged or self._aborted)

    @property
    def is_finished(self) -> bool:
        return all(subtask.has_reported for subtask in self.subtasks.values())
