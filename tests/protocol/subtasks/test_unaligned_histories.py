"""Random histories of a small graph whose barriers overtake, against a model of whole channels.

Two sources, two subtasks in the middle, two at the end, a channel between any two neighbours. For every checkpoint that
all acknowledge, each channel is cut exactly: what was sent in front of the barrier is what its reader had taken when it
froze, and then what it recorded, in this order. When nothing disturbs it a checkpoint completes, although nobody reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import ch, cp
from tests.protocol.subtasks.test_unaligned_machine import TIMED

from headgate.model.config import ORDINARY, Alignment, CheckpointOptions
from headgate.protocol.subtasks.alignment import (
    AbortReceived,
    BarrierReceived,
    BlockChannel,
    CancelReceived,
    Decline,
    EmitBarrier,
    EmitCancel,
    TakeSnapshot,
    UnblockChannels,
)
from headgate.protocol.subtasks.unaligned import (
    AlignmentTimedOut,
    AllRecorded,
    ArmAlignmentTimer,
    BarrierArrived,
    CancelArrived,
    DropRecording,
    Event,
    RecordChannels,
    TimeoutAligner,
)

Marker = BarrierArrived | CancelArrived

CREDIT = 2
"""Records that may wait in one channel, where that is limited."""


@dataclass
class Channel:
    """What was sent, what waits, and where barriers stand."""

    queue: deque[int | tuple[str, int, CheckpointOptions]] = field(default_factory=deque)
    untold: deque[tuple[str, int, CheckpointOptions]] = field(default_factory=deque)
    sent: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    before: dict[int, int] = field(default_factory=dict)
    """How many records stand in front of each barrier."""
    is_blocked: bool = False

    def send(self, record: int) -> None:
        self.sent.append(record)
        self.queue.append(record)

    def mark(self, kind: str, checkpoint: int, options: CheckpointOptions) -> None:
        if kind == "barrier":
            assert checkpoint not in self.before
            self.before[checkpoint] = len(self.sent)
        self.queue.append((kind, checkpoint, options))
        self.untold.append((kind, checkpoint, options))

    def in_front_of(self, checkpoint: int) -> list[int]:
        found: list[int] = []
        for item in self.queue:
            if isinstance(item, int):
                found.append(item)
            elif item[:2] == ("barrier", checkpoint):
                return found
        raise AssertionError("the barrier has not arrived")


class Node:
    """One subtask as its interpreter runs it."""

    def __init__(
        self, inputs: list[Channel], outputs: list[Channel], *, is_immediate: bool, late: tuple[int, ...] = ()
    ) -> None:
        late_channels = frozenset(ch(channel) for channel in late)
        self.overtaker = TimeoutAligner(max(len(inputs), 1), is_immediate=is_immediate, late=late_channels)
        self.inputs, self.outputs = inputs, outputs
        self.timers: list[int] = []
        self.frozen: dict[int, list[int]] = {}
        """By checkpoint how many records it had taken from each channel."""
        self.recorded: dict[int, dict[int, list[int]]] = {}
        self.acknowledged: list[int] = []
        self.given_up: set[int] = set()
        self.told: list[int] = []

    def feed(self, event: Event) -> None:
        for effect in self.overtaker.handle(event):
            match effect:
                case TakeSnapshot():
                    assert effect.checkpoint not in self.given_up
                    assert effect.checkpoint > max(self.frozen, default=0), "ids rise"
                    self.frozen[effect.checkpoint] = [len(channel.taken) for channel in self.inputs]
                    self.recorded[effect.checkpoint] = {}
                    if effect.options.alignment is not Alignment.OVERTAKING:
                        self.acknowledged.append(effect.checkpoint)
                case EmitBarrier():
                    self._mark("barrier", effect.checkpoint, effect.options)
                case EmitCancel():
                    self._mark("cancel", effect.checkpoint, ORDINARY)
                case RecordChannels():
                    for index in effect.channels:
                        assert index not in self.recorded[effect.checkpoint], "a channel is recorded once"
                        waiting = self.inputs[index].in_front_of(effect.checkpoint)
                        self.recorded[effect.checkpoint][index] = waiting
                case AllRecorded():
                    self.acknowledged.append(effect.checkpoint)
                case DropRecording():
                    assert effect.checkpoint not in self.acknowledged
                    self.given_up.add(effect.checkpoint)
                case Decline():
                    self.given_up.add(effect.checkpoint)
                case BlockChannel():
                    assert not self.inputs[effect.channel].is_blocked
                    self.inputs[effect.channel].is_blocked = True
                case UnblockChannels():
                    for index in effect.channels:
                        assert self.inputs[index].is_blocked
                        self.inputs[index].is_blocked = False
                case ArmAlignmentTimer():
                    self.timers.append(effect.checkpoint)
        blocked = {index for index, channel in enumerate(self.inputs) if channel.is_blocked}
        assert blocked == self.overtaker.blocked

    def _mark(self, kind: str, checkpoint: int, options: CheckpointOptions) -> None:
        assert checkpoint not in self.told, "one barrier or one cancel marker, never both"
        self.told.append(checkpoint)
        for channel in self.outputs:
            channel.mark(kind, checkpoint, options)

    def tell(self, index: int) -> None:
        kind, checkpoint, options = self.inputs[index].untold.popleft()
        arrived = BarrierArrived(ch(index), cp(checkpoint), options)
        self.feed(arrived if kind == "barrier" else CancelArrived(ch(index), cp(checkpoint)))

    def read(self, index: int) -> None:
        channel = self.inputs[index]
        item = channel.queue.popleft()
        if isinstance(item, int):
            channel.taken.append(item)
            if self.outputs:
                self.outputs[item % len(self.outputs)].send(item)
            return
        kind, checkpoint, options = item
        received = BarrierReceived(ch(index), cp(checkpoint), options)
        self.feed(received if kind == "barrier" else CancelReceived(ch(index), cp(checkpoint)))


class Graph:
    """The subtasks and what lies between them."""

    def __init__(self, *, is_immediate: bool, is_late: bool = False) -> None:
        """``is_late``: the barrier of the first source takes credit, which everybody behind it knows."""
        middle_late, end_late = ((0,), (0, 1)) if is_late else ((), ())
        ways = [[[Channel() for _ in range(2)] for _ in range(2)] for _ in range(2)]  # level, sender, receiver
        into = [[], *([[way[s][r] for s in range(2)] for r in range(2)] for way in ways)]
        self.sources = [Node([], ways[0][i], is_immediate=is_immediate) for i in range(2)]
        middle = [Node(into[1][i], ways[1][i], is_immediate=is_immediate, late=middle_late) for i in range(2)]
        ends = [Node(into[2][i], [], is_immediate=is_immediate, late=end_late) for i in range(2)]
        self.nodes = [*self.sources, *middle, *ends]
        self.newest = 0
        self.records = 0

    def trigger(self, options: CheckpointOptions) -> None:
        self.newest += 1
        for source in self.sources:
            source.feed(BarrierReceived(ch(0), cp(self.newest), options))

    def moves(self) -> list[tuple[str, Node, int]]:
        """What can happen to somebody now."""
        found: list[tuple[str, Node, int]] = []
        for node in self.nodes:
            for index, channel in enumerate(node.inputs):
                found += [("tell", node, index)] if channel.untold else []
                found += [("read", node, index)] if channel.queue and not channel.is_blocked else []
            found += [("timeout", node, timer) for timer in node.timers[:1]]
        return found

    def make(self, move: tuple[str, Node, int]) -> None:
        kind, node, at = move
        match kind:
            case "tell":
                node.tell(at)
            case "read":
                node.read(at)
            case _:
                node.timers.remove(at)
                node.feed(AlignmentTimedOut(cp(at)))

    def check(self) -> None:
        """Every checkpoint that all acknowledged is an exact cut of every channel."""
        complete = set.intersection(*(set(node.acknowledged) for node in self.nodes))
        for checkpoint in complete:
            for node in self.nodes:
                for index, channel in enumerate(node.inputs):
                    in_state = channel.taken[: node.frozen[checkpoint][index]]
                    in_flight = node.recorded[checkpoint].get(index, [])
                    assert in_state + in_flight == channel.sent[: channel.before[checkpoint]]


@settings(max_examples=250)
@given(st.data(), st.booleans())
def test_every_checkpoint_that_completes_is_an_exact_cut(data: st.DataObject, is_immediate: bool) -> None:
    graph = Graph(is_immediate=is_immediate)
    for _ in range(data.draw(st.integers(1, 60))):
        kind = data.draw(st.sampled_from(["send", "send", "move", "move", "move", "move", "trigger", "last", "abort"]))
        if kind == "send":
            graph.records += 1
            source = graph.sources[graph.records % 2]
            source.outputs[data.draw(st.integers(0, 1))].send(graph.records)
        elif kind == "trigger":
            graph.trigger(TIMED)
        elif kind == "last":
            graph.trigger(ORDINARY)
        elif kind == "abort" and graph.newest:
            checkpoint = data.draw(st.integers(max(graph.newest - 1, 1), graph.newest))
            data.draw(st.sampled_from(graph.nodes)).feed(AbortReceived(cp(checkpoint)))
        elif moves := graph.moves():
            graph.make(data.draw(st.sampled_from(moves)))
    while moves := graph.moves():
        graph.make(data.draw(st.sampled_from(moves)))
    graph.check()
    assert not any(channel.is_blocked for node in graph.nodes for channel in node.inputs), "nobody waits for ever"


@settings(max_examples=100)
@given(st.data(), st.booleans())
def test_a_checkpoint_completes_although_nobody_reads(data: st.DataObject, is_immediate: bool) -> None:
    graph = Graph(is_immediate=is_immediate)
    for _ in range(data.draw(st.integers(0, 30))):
        if data.draw(st.booleans()):
            graph.records += 1
            data.draw(st.sampled_from(graph.sources)).outputs[graph.records % 2].send(graph.records)
        elif reads := [move for move in graph.moves() if move[0] == "read"]:
            graph.make(data.draw(st.sampled_from(reads)))
    graph.trigger(TIMED)
    while moves := [move for move in graph.moves() if move[0] != "read"]:
        graph.make(data.draw(st.sampled_from(moves)))
    assert all(node.acknowledged == [1] for node in graph.nodes)
    assert not any(channel.is_blocked for node in graph.nodes for channel in node.inputs)
    graph.check()


def has_room(channels: list[Channel]) -> bool:
    return all(sum(isinstance(item, int) for item in channel.queue) < CREDIT for channel in channels)


@settings(max_examples=100)
@given(st.data(), st.booleans(), st.integers(0, 12))
def test_a_source_gets_the_credit_that_its_barrier_takes(
    data: st.DataObject, is_immediate: bool, backlog: int
) -> None:  # UA20
    """The first source sends records to its marker before its barrier; the other one has sent its barrier."""
    graph = Graph(is_immediate=is_immediate, is_late=True)
    patient, ordinary = graph.sources
    ordinary.feed(BarrierReceived(ch(0), cp(1), TIMED))
    while True:
        moves = [move for move in graph.moves() if move[0] != "read" or has_room(move[1].outputs)]
        if backlog and has_room(patient.outputs):
            moves.append(("send", patient, 0))
        elif not backlog and not patient.frozen:
            moves.append(("cut", patient, 0))
        if not moves:
            break
        kind, node, at = data.draw(st.sampled_from(moves))
        if kind == "send":
            backlog -= 1
            graph.records += 1
            node.outputs[graph.records % 2].send(graph.records)
        elif kind == "cut":
            node.feed(BarrierReceived(ch(0), cp(1), TIMED))
        else:
            graph.make((kind, node, at))
    assert all(node.acknowledged == [1] for node in graph.nodes)
    graph.check()
