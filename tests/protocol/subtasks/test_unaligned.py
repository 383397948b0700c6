"""Every cell of the table of docs/spec/unaligned.md (rules UA3–UA10; A3–A11 where the aligner has them, too)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import ch, cp

from headgate.errors import ProtocolViolation
from headgate.model.config import ORDINARY, Alignment, CheckpointOptions
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.alignment import (
    AbortedIds,
    AbortReceived,
    BarrierReceived,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
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
    Effect,
    Event,
    Phase,
    RecordChannels,
    TimeoutAligner,
)

TIMED = CheckpointOptions(alignment=Alignment.TIMED)
OVER = CheckpointOptions(alignment=Alignment.OVERTAKING)


def arrived(channel: int, checkpoint: int, options: CheckpointOptions = TIMED) -> BarrierArrived:
    return BarrierArrived(ch(channel), cp(checkpoint), options)


def read(channel: int, checkpoint: int, options: CheckpointOptions = TIMED) -> BarrierReceived:
    return BarrierReceived(ch(channel), cp(checkpoint), options)


def timeout(checkpoint: int) -> AlignmentTimedOut:
    return AlignmentTimedOut(cp(checkpoint))


def abort(checkpoint: int) -> AbortReceived:
    return AbortReceived(cp(checkpoint))


def end(channel: int) -> ChannelEnded:
    return ChannelEnded(ch(channel))


def after(
    channels_count: int, *events: Event, is_immediate: bool = False, late: tuple[int, ...] = ()
) -> TimeoutAligner:
    overtaker = TimeoutAligner(channels_count, is_immediate=is_immediate, late=frozenset(ch(c) for c in late))
    for event in events:
        overtaker.handle(event)
    return overtaker


def taken(checkpoint: int, options: CheckpointOptions = TIMED) -> list[Effect]:
    return [TakeSnapshot(cp(checkpoint), options), EmitBarrier(cp(checkpoint), options)]


def given_up(checkpoint: int, reason: AbortReason = AbortReason.OVERTAKEN) -> list[Effect]:
    return [EmitCancel(cp(checkpoint)), Decline(cp(checkpoint), reason)]


def dropped(checkpoint: int, reason: AbortReason = AbortReason.OVERTAKEN) -> list[Effect]:
    return [DropRecording(cp(checkpoint)), Decline(cp(checkpoint), reason)]


def record(checkpoint: int, *channels: int) -> RecordChannels:
    return RecordChannels(cp(checkpoint), tuple(ch(channel) for channel in channels))


def unblock(*channels: int) -> UnblockChannels:
    return UnblockChannels(tuple(ch(channel) for channel in channels))


def is_ignored(effects: list[Effect]) -> bool:
    return len(effects) == 1 and isinstance(effects[0], Ignored)


def recording(checkpoint: int = 1) -> TimeoutAligner:
    """Of four channels: 0 was read, on 1 the barrier has arrived, 2 and 3 are held."""
    return after(4, arrived(0, checkpoint), read(0, checkpoint), arrived(1, checkpoint), timeout(checkpoint))


# -- barriers that take credit ----------------------------------------------------------------------------------------


def test_nobody_goes_over_before_a_barrier_that_takes_credit_has_arrived() -> None:  # UA20
    overtaker = after(3, arrived(0, 1), read(0, 1), is_immediate=True, late=(2,))
    assert overtaker.blocked == {0}, "it aligns, and the others are read on"
    assert overtaker.handle(arrived(2, 1)) == [
        *taken(1, OVER),
        record(1, 2),
        unblock(0),
        BlockChannel(ch(1)),
    ]
    assert overtaker.handle(arrived(1, 1)) == [record(1, 1), unblock(1), AllRecorded(cp(1))]


def test_the_timeout_runs_from_the_last_barrier_that_takes_credit() -> None:  # UA20
    overtaker = after(3, late=(1, 2))
    assert is_ignored(overtaker.handle(arrived(0, 1)))
    assert is_ignored(overtaker.handle(arrived(1, 1)))
    assert overtaker.handle(arrived(2, 1)) == [ArmAlignmentTimer(cp(1))]
    assert overtaker.handle(timeout(1))[:2] == taken(1, OVER)


def test_a_barrier_that_overtook_waits_for_one_that_takes_credit() -> None:  # UA6, UA20
    overtaker = after(2, arrived(0, 1, OVER), late=(1,))
    assert overtaker.blocked == frozenset()
    assert overtaker.handle(arrived(1, 1)) == [*taken(1, OVER), record(1, 0, 1), AllRecorded(cp(1))]
    overtaker = after(2, arrived(0, 1, OVER), arrived(0, 2), late=(1,))
    assert overtaker.handle(arrived(1, 2)) == [ArmAlignmentTimer(cp(2))], "it was the barrier of an older checkpoint"


def test_the_end_of_a_channel_stands_for_a_barrier_that_takes_credit() -> None:  # A7, UA20
    assert after(3, arrived(0, 1), late=(2,)).handle(end(2)) == [ArmAlignmentTimer(cp(1))]
    assert after(3, arrived(0, 1), is_immediate=True, late=(2,)).handle(end(2))[:2] == taken(1, OVER)
    assert after(2, end(1), is_immediate=True, late=(1,)).handle(arrived(0, 1))[:2] == taken(1, OVER)
    overtaker = after(2, arrived(0, 1, OVER), read(0, 1, OVER), late=(1,))
    assert overtaker.handle(end(1)) == [*taken(1), unblock(0)], "nothing is left to be overtaken"


# -- aligned as long as it does not take too long ---------------------------------------------------------------------


def test_a_barrier_that_is_read_in_time_is_aligned() -> None:  # UA5
    overtaker = TimeoutAligner(2, is_immediate=False)
    assert overtaker.handle(arrived(0, 1)) == [ArmAlignmentTimer(cp(1))]
    assert overtaker.blocked == frozenset()
    assert overtaker.handle(read(0, 1)) == [BlockChannel(ch(0))]
    assert overtaker.blocked == {0}
    assert is_ignored(overtaker.handle(arrived(1, 1)))
    assert overtaker.handle(read(1, 1)) == [*taken(1), unblock(0)]
    assert overtaker.recording is None
    assert is_ignored(overtaker.handle(timeout(1)))


def test_one_channel_is_aligned_without_ever_being_blocked() -> None:  # UA5, A2
    overtaker = after(1, arrived(0, 1))
    assert overtaker.handle(read(0, 1)) == taken(1)


def test_barriers_that_may_not_overtake_wait_for_ever() -> None:  # UA3
    overtaker = TimeoutAligner(2, is_immediate=False)
    assert is_ignored(overtaker.handle(arrived(0, 1, ORDINARY)))
    assert overtaker.handle(read(0, 1, ORDINARY)) == [BlockChannel(ch(0))]
    assert overtaker.handle(read(1, 1, ORDINARY)) == [*taken(1, ORDINARY), unblock(0)]
    immediate = TimeoutAligner(2, is_immediate=True)
    assert is_ignored(immediate.handle(arrived(0, 1, ORDINARY)))
    assert immediate.phase is Phase.ALIGNING


def test_a_barrier_that_is_read_before_its_arrival_is_told_counts_once() -> None:  # UA4
    overtaker = TimeoutAligner(2, is_immediate=False)
    assert overtaker.handle(read(0, 1)) == [ArmAlignmentTimer(cp(1)), BlockChannel(ch(0))]
    assert is_ignored(overtaker.handle(arrived(0, 1)))
    overtaker = TimeoutAligner(2, is_immediate=True)
    assert overtaker.handle(read(0, 1))[:2] == taken(1, OVER)
    assert is_ignored(overtaker.handle(arrived(0, 1))), "nothing stands in front of what was read"
    overtaker = TimeoutAligner(1, is_immediate=True)
    assert overtaker.handle(read(0, 1)) == [*taken(1, OVER), AllRecorded(cp(1))]
    assert is_ignored(overtaker.handle(arrived(0, 1)))


# -- going over -------------------------------------------------------------------------------------------------------


def test_a_timeout_takes_the_snapshot_before_what_waits() -> None:  # UA6, UA7
    overtaker = after(3, arrived(0, 1), read(0, 1), arrived(1, 1), arrived(2, 1))
    assert overtaker.handle(timeout(1)) == [*taken(1, OVER), record(1, 1, 2), unblock(0), AllRecorded(cp(1))]
    assert overtaker.phase is Phase.FLOWING
    assert is_ignored(overtaker.handle(read(1, 1)))


def test_a_channel_without_its_barrier_is_held_until_it_arrives() -> None:  # UA7
    overtaker = after(4, arrived(0, 1), read(0, 1), arrived(1, 1))
    effects = overtaker.handle(timeout(1))
    assert effects == [*taken(1, OVER), record(1, 1), unblock(0), BlockChannel(ch(2)), BlockChannel(ch(3))]
    assert overtaker.blocked == {2, 3}
    assert overtaker.recording == 1
    assert is_ignored(overtaker.handle(read(1, 1))), "it was recorded"
    assert overtaker.handle(arrived(2, 1)) == [record(1, 2), unblock(2)]
    assert overtaker.handle(arrived(3, 1, OVER)) == [record(1, 3), unblock(3), AllRecorded(cp(1))]
    assert overtaker.recording is None
    assert is_ignored(overtaker.handle(read(2, 1)))
    assert is_ignored(overtaker.handle(timeout(1)))


def test_a_timeout_of_zero_goes_over_at_the_first_arrival() -> None:  # UA6
    overtaker = TimeoutAligner(2, is_immediate=True)
    assert overtaker.handle(arrived(0, 1)) == [*taken(1, OVER), record(1, 0), BlockChannel(ch(1))]
    assert overtaker.handle(arrived(1, 1)) == [record(1, 1), unblock(1), AllRecorded(cp(1))]


def test_a_barrier_that_overtook_makes_the_next_one_go_over_at_once() -> None:  # UA6
    overtaker = TimeoutAligner(2, is_immediate=False)
    assert overtaker.handle(arrived(0, 1, OVER)) == [*taken(1, OVER), record(1, 0), BlockChannel(ch(1))]
    overtaker = after(3, arrived(0, 1), read(0, 1))
    assert overtaker.handle(arrived(1, 1, OVER)) == [*taken(1, OVER), record(1, 1), unblock(0), BlockChannel(ch(2))]


def test_a_barrier_that_overtook_and_was_read_last_goes_over_with_nothing_in_flight() -> None:  # UA6
    overtaker = after(2, arrived(0, 1), read(0, 1))
    assert overtaker.handle(read(1, 1, OVER)) == [*taken(1, OVER), unblock(0), AllRecorded(cp(1))]


def test_a_timeout_of_another_checkpoint_changes_nothing() -> None:  # UA6
    overtaker = after(2, arrived(0, 2))
    assert is_ignored(overtaker.handle(timeout(1)))
    assert is_ignored(after(2).handle(timeout(1)))
    assert is_ignored(recording().handle(timeout(1)))


def test_barriers_of_one_checkpoint_differ_in_nothing_but_whether_they_overtook() -> None:  # UA3, A11
    for other in (ORDINARY, replace(TIMED, target="elsewhere"), replace(OVER, is_last=True)):
        with pytest.raises(ProtocolViolation, match="a barrier of 1 wants"):
            after(2, arrived(0, 1), arrived(1, 1, other))
    for first, second in ((TIMED, OVER), (OVER, TIMED)):
        after(2, arrived(0, 1, first), arrived(1, 1, second))


# -- newer and older ones ---------------------------------------------------------------------------------------------


def test_a_barrier_of_a_finished_or_older_checkpoint_is_ignored() -> None:  # A3
    overtaker = after(1, arrived(0, 5), read(0, 5))
    for event in (arrived(0, 5), read(0, 5), arrived(0, 4), read(0, 4)):
        assert is_ignored(overtaker.handle(event))
    aligning = after(2, arrived(0, 5))
    assert is_ignored(aligning.handle(arrived(1, 4)))
    assert is_ignored(aligning.handle(read(1, 4)))


def test_a_newer_barrier_that_arrives_gives_up_what_is_aligned() -> None:  # A4
    overtaker = after(2, arrived(0, 1), read(0, 1))
    assert overtaker.handle(arrived(1, 2)) == [*given_up(1), unblock(0), ArmAlignmentTimer(cp(2))]
    assert overtaker.current == 2
    assert is_ignored(overtaker.handle(arrived(1, 1)))
    assert overtaker.handle(read(1, 2)) == [BlockChannel(ch(1))], "it is the one that is aligned now"


def test_a_newer_barrier_gives_up_what_is_being_recorded() -> None:  # UA10
    overtaker = recording()
    assert overtaker.handle(arrived(0, 2)) == [*dropped(1), unblock(2, 3), ArmAlignmentTimer(cp(2))]
    assert overtaker.blocked == frozenset()
    assert overtaker.recording is None
    overtaker = recording()
    assert overtaker.handle(read(0, 2, ORDINARY)) == [*dropped(1), unblock(2, 3), BlockChannel(ch(0))]


def test_a_newer_barrier_that_overtook_begins_by_going_over() -> None:  # UA10, UA6
    effects = recording().handle(arrived(1, 2, OVER))
    holds = [BlockChannel(ch(channel)) for channel in (0, 2, 3)]
    assert effects == [*dropped(1), unblock(2, 3), *taken(2, OVER), record(2, 1), *holds]


# -- cancel markers and aborts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CancelArrived, CancelReceived])
def test_a_cancel_marker_gives_up_what_is_aligned(kind: type[CancelArrived] | type[CancelReceived]) -> None:  # A5
    overtaker = after(2, arrived(0, 1), read(0, 1))
    effects = overtaker.handle(kind(ch(1), cp(1)))
    assert effects == [*given_up(1, AbortReason.CANCELLED_UPSTREAM), unblock(0)]
    assert is_ignored(overtaker.handle(kind(ch(1), cp(1)))), "told as arrived, and read later"


@pytest.mark.parametrize("kind", [CancelArrived, CancelReceived])
def test_a_cancel_marker_gives_up_what_is_being_recorded(
    kind: type[CancelArrived] | type[CancelReceived],
) -> None:  # UA10
    overtaker = recording()
    effects = overtaker.handle(kind(ch(2), cp(1)))
    assert effects == [*dropped(1, AbortReason.CANCELLED_UPSTREAM), unblock(2, 3)], "downstream has the barrier"
    assert is_ignored(overtaker.handle(arrived(3, 1)))


@pytest.mark.parametrize("kind", [CancelArrived, CancelReceived])
def test_a_cancel_marker_of_a_newer_checkpoint_gives_up_both(
    kind: type[CancelArrived] | type[CancelReceived],
) -> None:  # A6
    overtaker = after(2, arrived(0, 1))
    effects = overtaker.handle(kind(ch(1), cp(2)))
    assert effects == [*given_up(1), *given_up(2, AbortReason.CANCELLED_UPSTREAM)]
    effects = recording().handle(kind(ch(0), cp(2)))
    assert effects == [*dropped(1), unblock(2, 3), *given_up(2, AbortReason.CANCELLED_UPSTREAM)]
    flowing = TimeoutAligner(2, is_immediate=False)
    assert flowing.handle(kind(ch(0), cp(1))) == given_up(1, AbortReason.CANCELLED_UPSTREAM)
    assert is_ignored(flowing.handle(arrived(1, 1))), "given up"
    assert is_ignored(after(2, arrived(0, 5)).handle(kind(ch(1), cp(4))))


def test_an_abort_while_aligning_releases_without_a_decline() -> None:  # A9
    overtaker = after(2, arrived(0, 1), read(0, 1))
    assert overtaker.handle(abort(1)) == [EmitCancel(cp(1)), unblock(0)]
    assert is_ignored(overtaker.handle(abort(1)))
    assert is_ignored(overtaker.handle(timeout(1)))


def test_an_abort_while_recording_releases_everything() -> None:  # UA10
    overtaker = recording()
    assert overtaker.handle(abort(1)) == [DropRecording(cp(1)), unblock(2, 3)]
    assert overtaker.blocked == frozenset()
    assert is_ignored(overtaker.handle(arrived(2, 1)))


def test_an_abort_before_the_first_barrier_is_remembered() -> None:  # A8
    for phase in (TimeoutAligner(4, is_immediate=False), after(4, arrived(0, 1)), recording()):
        assert is_ignored(phase.handle(abort(7)))
        assert phase.handle(arrived(1, 7, OVER))[-1] == EmitCancel(cp(7)), "no snapshot, but nobody waits"
        assert phase.phase is Phase.FLOWING
        assert is_ignored(phase.handle(read(1, 7)))
    aborted = after(1, abort(3))
    assert aborted.handle(CancelArrived(ch(0), cp(3))) == [EmitCancel(cp(3))], "the coordinator knows"


def test_at_most_as_many_aborted_ids_are_remembered_as_an_aligner_does() -> None:  # A8
    overtaker = after(1, *(abort(checkpoint) for checkpoint in range(1, AbortedIds.COUNT_MAX + 2)))
    assert overtaker.handle(arrived(0, 1)) == [ArmAlignmentTimer(cp(1))], "the oldest was forgotten"


# -- ends and what no correct peer sends ------------------------------------------------------------------------------


def test_a_channel_that_ends_counts_as_aligned() -> None:  # A7
    overtaker = after(3, arrived(0, 1), read(0, 1))
    assert is_ignored(overtaker.handle(end(1)))
    assert overtaker.handle(end(2)) == [*taken(1), unblock(0)]
    overtaker = after(2, end(1), arrived(0, 1))
    assert overtaker.handle(timeout(1)) == [*taken(1, OVER), record(1, 0), AllRecorded(cp(1))], "nothing is held"


def test_a_channel_that_ends_while_it_is_held_counts_as_recorded() -> None:  # A7
    overtaker = recording()
    assert overtaker.handle(end(2)) == []
    assert overtaker.handle(end(3)) == [AllRecorded(cp(1))]
    assert is_ignored(overtaker.handle(end(0)))


def test_a_second_barrier_is_a_violation() -> None:  # A10
    with pytest.raises(ProtocolViolation, match="second barrier of 1 on channel 0"):
        after(2, arrived(0, 1), arrived(0, 1))
    with pytest.raises(ProtocolViolation, match="second barrier of 1 on channel 0"):
        after(2, arrived(0, 1), read(0, 1), read(0, 1))
    with pytest.raises(ProtocolViolation, match="second barrier of 1 on channel 1"):
        recording().handle(arrived(1, 1))
    with pytest.raises(ProtocolViolation, match="channel 2, which is held"):
        recording().handle(read(2, 1))


@pytest.mark.parametrize(
    "event",
    [arrived(0, 1), read(0, 1), CancelArrived(ch(0), cp(1)), CancelReceived(ch(0), cp(1)), end(0)],
    ids=lambda event: type(event).__name__,
)
def test_any_event_on_an_ended_channel_is_a_violation(event: Event) -> None:  # A10
    with pytest.raises(ProtocolViolation, match="channel 0, which has ended"):
        after(2, end(0), event)


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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
