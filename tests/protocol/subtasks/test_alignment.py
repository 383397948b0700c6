"""Every cell of the aligner's table (reference of the rules: docs/spec/alignment.md)."""

from __future__ import annotations

import pytest
from tests.protocol.making import ch, cp

from headgate.errors import ProtocolViolation
from headgate.model.config import CheckpointKind, CheckpointOptions
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import STORY_MAX, Ignored, describe
from headgate.protocol.subtasks.alignment import (
    AbortedIds,
    AbortReceived,
    Aligner,
    BarrierReceived,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    Decline,
    EmitBarrier,
    EmitCancel,
    Event,
    Phase,
    TakeSnapshot,
    UnblockChannels,
)


def barrier(channel: int, checkpoint: int) -> BarrierReceived:
    return BarrierReceived(ch(channel), cp(checkpoint))


SAVEPOINT = CheckpointOptions(CheckpointKind.SAVEPOINT, target="s3://bucket/here")


# A11
def test_options_travel_from_the_barrier_to_the_snapshot_and_the_barriers_sent_on() -> None:
    aligner = Aligner(2)
    aligner.handle(BarrierReceived(ch(0), cp(1), SAVEPOINT))
    assert aligner.handle(BarrierReceived(ch(1), cp(1), SAVEPOINT))[:2] == [
        TakeSnapshot(cp(1), SAVEPOINT),
        EmitBarrier(cp(1), SAVEPOINT),
    ]
    aligner.handle(barrier(0, 2))
    assert aligner.handle(barrier(1, 2))[:2] == [TakeSnapshot(cp(2)), EmitBarrier(cp(2))], "they are not kept"


# A11
def test_barriers_of_one_checkpoint_with_other_options_are_a_violation() -> None:
    aligner = Aligner(2)
    aligner.handle(BarrierReceived(ch(0), cp(1), SAVEPOINT))
    with pytest.raises(ProtocolViolation, match="a barrier of 1 wants"):
        aligner.handle(barrier(1, 1))


def cancel(channel: int, checkpoint: int) -> CancelReceived:
    return CancelReceived(ch(channel), cp(checkpoint))


def abort(checkpoint: int) -> AbortReceived:
    return AbortReceived(cp(checkpoint))


def ended(channel: int) -> ChannelEnded:
    return ChannelEnded(ch(channel))


def unblocked(*channels: int) -> UnblockChannels:
    return UnblockChannels(tuple(ch(c) for c in channels))


def after(channels_count: int, *events: Event) -> Aligner:
    aligner = Aligner(channels_count)
    for event in events:
        aligner.handle(event)
    return aligner


OVERTAKEN = AbortReason.OVERTAKEN
UPSTREAM = AbortReason.CANCELLED_UPSTREAM

# -- while flowing ------------------------------------------------------------------------------------------------


def test_first_barrier_blocks_its_channel() -> None:  # A1
    aligner = after(2)
    assert aligner.handle(barrier(0, 1)) == [BlockChannel(ch(0))]
    assert (aligner.phase, aligner.current, aligner.blocked) == (Phase.ALIGNING, 1, {0})


def test_barrier_of_a_finished_checkpoint_is_ignored() -> None:  # A3
    aligner = after(3, barrier(0, 1), ended(1), cancel(0, 1))
    assert aligner.handle(barrier(2, 1)) == [Ignored("barrier of a finished checkpoint")]
    assert not aligner.blocked


def test_barrier_of_an_older_checkpoint_is_ignored_while_flowing() -> None:  # A3
    aligner = after(2, barrier(0, 5), barrier(1, 5))
    assert aligner.handle(barrier(0, 4)) == [Ignored("barrier of an older checkpoint")]


def test_cancel_of_a_finished_checkpoint_is_ignored() -> None:  # A5
    aligner = after(2, barrier(0, 1), barrier(1, 1))
    assert aligner.handle(cancel(0, 1)) == [Ignored("cancel marker of a finished checkpoint")]


def test_cancel_of_a_newer_checkpoint_while_flowing_is_forwarded_and_declined() -> None:  # A6
    aligner = after(2)
    assert aligner.handle(cancel(0, 3)) == [EmitCancel(cp(3)), Decline(cp(3), UPSTREAM)]
    assert aligner.handle(barrier(1, 3)) == [Ignored("barrier of a finished checkpoint")]


def test_cancel_of_an_older_checkpoint_is_ignored_while_flowing() -> None:  # A5
    aligner = after(2, barrier(0, 5), barrier(1, 5))
    assert aligner.handle(cancel(0, 4)) == [Ignored("cancel marker of an older checkpoint")]


def test_channel_that_ends_while_flowing_counts_as_aligned_later() -> None:  # A7
    aligner = after(2)
    assert aligner.handle(ended(1)) == [Ignored("an ended channel counts as aligned")]
    assert aligner.handle(barrier(0, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]


# -- while aligning -----------------------------------------------------------------------------------------------


def test_last_barrier_snapshots_then_emits_then_unblocks() -> None:  # A2
    aligner = after(3, barrier(2, 1), barrier(0, 1))
    assert aligner.handle(barrier(1, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1)), unblocked(0, 2)]
    assert (aligner.phase, aligner.blocked) == (Phase.FLOWING, frozenset())


def test_second_barrier_on_a_blocked_channel_is_a_violation() -> None:  # A10
    aligner = after(2, barrier(0, 1))
    with pytest.raises(ProtocolViolation, match="second barrier of 1 on channel 0"):
        aligner.handle(barrier(0, 1))


def test_newer_barrier_abandons_the_current_checkpoint_and_starts_the_next() -> None:  # A4
    aligner = after(3, barrier(0, 1), barrier(1, 1))
    assert aligner.handle(barrier(2, 2)) == [
        EmitCancel(cp(1)),
        Decline(cp(1), OVERTAKEN),
        unblocked(0, 1),
        BlockChannel(ch(2)),
    ]
    assert aligner.blocked == {2}


def test_newer_barrier_on_the_only_live_channel_abandons_and_completes() -> None:  # A2, A4
    aligner = after(3, barrier(0, 1), ended(1), ended(0))
    assert aligner.handle(barrier(2, 2)) == [
        EmitCancel(cp(1)),
        Decline(cp(1), OVERTAKEN),
        TakeSnapshot(cp(2)),
        EmitBarrier(cp(2)),
    ]


def test_barrier_of_an_older_checkpoint_is_ignored_while_aligning() -> None:  # A3
    aligner = after(2, barrier(0, 5))
    assert aligner.handle(barrier(1, 4)) == [Ignored("barrier of an older checkpoint")]
    assert aligner.blocked == {0}


def test_cancel_of_the_current_checkpoint_unblocks_declines_and_is_forwarded_once() -> None:  # A5
    aligner = after(3, barrier(0, 1))
    assert aligner.handle(cancel(1, 1)) == [EmitCancel(cp(1)), Decline(cp(1), UPSTREAM), unblocked(0)]
    assert aligner.handle(cancel(2, 1)) == [Ignored("cancel marker of a finished checkpoint")]


def test_cancel_of_a_newer_checkpoint_abandons_the_current_one_too() -> None:  # A6
    aligner = after(2, barrier(0, 1))
    assert aligner.handle(cancel(1, 2)) == [
        EmitCancel(cp(1)),
        Decline(cp(1), OVERTAKEN),
        unblocked(0),
        EmitCancel(cp(2)),
        Decline(cp(2), UPSTREAM),
    ]
    assert aligner.handle(barrier(0, 2)) == [Ignored("barrier of a finished checkpoint")]


def test_cancel_of_an_older_checkpoint_is_ignored_while_aligning() -> None:  # A5
    aligner = after(2, barrier(0, 5))
    assert aligner.handle(cancel(1, 4)) == [Ignored("cancel marker of an older checkpoint")]
    assert aligner.blocked == {0}


def test_last_missing_channel_that_ends_completes() -> None:  # A7
    aligner = after(2, barrier(0, 1))
    assert aligner.handle(ended(1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1)), unblocked(0)]


def test_channel_that_ends_while_others_are_missing_does_not_complete() -> None:  # A7
    aligner = after(3, barrier(0, 1))
    assert aligner.handle(ended(1)) == [Ignored("an ended channel counts as aligned")]
    assert aligner.handle(barrier(2, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1)), unblocked(0)]


@pytest.mark.parametrize("event", [barrier(0, 1), barrier(0, 9), cancel(0, 1), ended(0)], ids=repr)
@pytest.mark.parametrize("is_aligning", [False, True])
def test_any_event_on_an_ended_channel_is_a_violation(event: Event, is_aligning: bool) -> None:  # A10
    aligner = after(3, *([barrier(1, 1)] if is_aligning else []), ended(0))
    with pytest.raises(ProtocolViolation, match="channel 0, which has ended"):
        aligner.handle(event)


# -- one channel --------------------------------------------------------------------------------------------------


def test_single_channel_completes_at_once_and_never_blocks() -> None:  # A2
    aligner = after(1)
    assert aligner.handle(barrier(0, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]
    assert aligner.handle(barrier(0, 1)) == [Ignored("barrier of a finished checkpoint")]
    assert aligner.handle(cancel(0, 2)) == [EmitCancel(cp(2)), Decline(cp(2), UPSTREAM)]


# -- aborts by the coordinator ------------------------------------------------------------------------------------


def test_barrier_of_an_aborted_checkpoint_becomes_a_cancel_marker() -> None:  # A8
    aligner = after(2)
    assert aligner.handle(abort(1)) == [Ignored("abort remembered until the barrier comes")]
    assert aligner.handle(barrier(0, 1)) == [EmitCancel(cp(1))]
    assert aligner.handle(barrier(1, 1)) == [Ignored("barrier of a finished checkpoint")]


def test_barrier_of_an_aborted_checkpoint_still_abandons_an_older_one() -> None:  # A4, A8
    aligner = after(2, barrier(0, 1), abort(2))
    assert aligner.handle(barrier(1, 2)) == [
        EmitCancel(cp(1)),
        Decline(cp(1), OVERTAKEN),
        unblocked(0),
        EmitCancel(cp(2)),
    ]


def test_cancel_of_an_aborted_checkpoint_is_forwarded_without_a_decline() -> None:  # A8
    assert after(2, abort(1)).handle(cancel(0, 1)) == [EmitCancel(cp(1))]


def test_abort_of_the_checkpoint_being_aligned_releases_without_a_decline() -> None:  # A9
    aligner = after(2, barrier(0, 1))
    assert aligner.handle(abort(1)) == [EmitCancel(cp(1)), unblocked(0)]
    assert aligner.handle(barrier(1, 1)) == [Ignored("barrier of a finished checkpoint")]


def test_abort_of_an_older_checkpoint_changes_nothing() -> None:  # A9
    aligner = after(2, barrier(0, 5))
    assert aligner.handle(abort(4)) == [Ignored("abort of an older checkpoint")]
    assert aligner.blocked == {0}


def test_abort_of_a_finished_checkpoint_changes_nothing() -> None:  # A9
    aligner = after(1, barrier(0, 1))
    assert aligner.handle(abort(1)) == [Ignored("abort of a checkpoint that this subtask has finished")]


def test_remembered_aborts_are_bounded_and_the_oldest_is_forgotten() -> None:  # A8
    count = AbortedIds.COUNT_MAX + 1
    aligner = after(1, *(abort(i) for i in range(1, count + 1)))
    assert aligner.handle(barrier(0, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]
    assert aligner.handle(barrier(0, 2)) == [EmitCancel(cp(2))]
    assert aligner.handle(barrier(0, count)) == [EmitCancel(cp(count))]


# -- what every machine does --------------------------------------------------------------------------------------


def test_a_machine_that_broke_a_rule_stays_dead_and_tells_its_story() -> None:  # A10
    aligner = after(2, barrier(0, 1))
    with pytest.raises(ProtocolViolation) as first:
        aligner.handle(barrier(0, 1))
    with pytest.raises(ProtocolViolation) as second:
        aligner.handle(barrier(1, 1))
    assert second.value is first.value
    assert first.value.machine == "Aligner"
    assert first.value.story == (describe(barrier(0, 1)), describe(barrier(0, 1)))


def test_the_story_is_bounded() -> None:
    aligner = after(1, *(barrier(0, i) for i in range(1, STORY_MAX + 10)))
    assert len(aligner.story) == STORY_MAX
    assert aligner.story[-1] == describe(barrier(0, STORY_MAX + 9))


def test_aborted_ids_are_forgotten_once_they_are_met() -> None:
    aborted = AbortedIds()
    for number in (1, 2, 3, 5):
        aborted.add(cp(number))
    assert [aborted.discard_up_to(cp(number)) for number in (2, 2)] == [True, False]
    assert list(aborted) == [3, 5]
    assert [aborted.discard(cp(number)) for number in (3, 3, 4)] == [True, False, False]
    assert aborted.discard_up_to(cp(4)) is False
    assert list(aborted) == [5]
