"""Every cell of the table of docs/spec/unaligned.md (rules UA3–UA10; A3–A11 where the aligner has them, too)."""

from __future__ import annotations

from dataclasses import replace

import pytest
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
