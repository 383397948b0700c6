"""A subtask in a loop: barriers, logs, writes and the end together (docs/spec/loops.md)."""

from __future__ import annotations

import pytest
from tests.protocol.making import ch, cp, entry_of, file_part

from headgate.errors import ProtocolViolation
from headgate.model.config import Alignment, CheckpointOptions
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.loop_prober import PassProbe, Probe
from headgate.protocol.machine import Ignored
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
from headgate.protocol.subtasks.loops import (
    DropLog,
    FeedbackForwarded,
    FeedbackReceived,
    ForwardFeedback,
    LogFeedback,
    LoopPlace,
    OpenLog,
    ProbeOrdered,
    ReportEntranceEnded,
    RoundProgress,
    SealLog,
)
from headgate.protocol.subtasks.subtask import (
    Acknowledge,
    CancelWrite,
    CompleteReceived,
    EmitEnd,
    EndReceived,
    Event,
    FinishOperators,
    InputResumed,
    LoopEnded,
    ReportFinished,
    ResumeOperators,
    SnapshotFailed,
    SnapshotWritten,
    Subtask,
)

HANDLE = file_part("chk/a")
BACK = 2
"""A head's feedback channel; 0 and 1 are regular."""
STILL_CIRCULATING = Ignored("records may still circulate")


def head(*events: Event, feedback: int = 1, is_restored_finished: bool = False, closed: int = -1) -> Subtask:
    channels = frozenset(ch(BACK + i) for i in range(feedback))
    made = Subtask(
        2,
        is_restored_finished=is_restored_finished,
        place=LoopPlace(outside=frozenset({ch(0), ch(1)}), feedback=channels),
        rounds=RoundProgress(closed=closed),
    )
    for event in events:
        made.handle(event)
    return made


def barrier(channel: int, checkpoint: int) -> BarrierReceived:
    return BarrierReceived(ch(channel), cp(checkpoint))


def aligned(checkpoint: int) -> tuple[Event, ...]:
    return barrier(0, checkpoint), barrier(1, checkpoint)


def end(channel: int) -> EndReceived:
    return EndReceived(ch(channel))


def aborted(checkpoint: int) -> AbortReceived:
    return AbortReceived(cp(checkpoint))


def written(checkpoint: int) -> SnapshotWritten:
    return SnapshotWritten(cp(checkpoint), entry_of(HANDLE))


FEEDBACK = FeedbackReceived(ch(BACK))

# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_a_head_freezes_sends_the_barrier_and_opens_its_log() -> None:  # L1
    assert head(barrier(0, 1)).handle(barrier(1, 1)) == [
        TakeSnapshot(cp(1)),
        EmitBarrier(cp(1)),
        OpenLog(cp(1)),
        UnblockChannels((ch(0),)),
    ]


def test_feedback_is_never_aligned() -> None:  # L1
    aligning = head(barrier(0, 1))
    assert aligning.handle(FEEDBACK) == [ForwardFeedback()]
    assert aligning.blocked == {ch(0)}


def test_a_head_acknowledges_when_its_log_is_written() -> None:  # L4
    waiting = head(*aligned(1), FEEDBACK)
    assert waiting.handle(barrier(BACK, 1)) == [SealLog(cp(1))]
    assert waiting.handle(written(1)) == [Acknowledge(cp(1), entry_of(HANDLE))]


def test_a_snapshot_written_before_its_log_is_complete_is_refused() -> None:  # L4
    with pytest.raises(ProtocolViolation, match="written before its log was complete"):
        head(*aligned(1)).handle(written(1))


def test_an_abort_drops_an_open_log_and_cancels_a_write() -> None:  # L5
    late = Ignored("abort of a checkpoint that this subtask has finished")
    open_log = head(*aligned(1))
    assert open_log.handle(aborted(1)) == [DropLog(cp(1)), late]
    assert open_log.handle(aborted(1)) == [late]
    assert open_log.handle(FEEDBACK) == [ForwardFeedback()]
    assert open_log.handle(barrier(BACK, 1)) == [Ignored("a sentinel that no log waits for")]
    sealed = head(*aligned(1), barrier(BACK, 1))
    assert sealed.handle(aborted(1)) == [CancelWrite(cp(1))]
    assert sealed.handle(aborted(1)) == [late]


def test_an_abort_of_a_checkpoint_that_is_being_aligned_frees_the_held_channel() -> None:  # L5, L6
    aligning = head(barrier(BACK, 1), barrier(0, 1))
    assert aligning.blocked == {ch(0), ch(BACK)}
    assert aligning.handle(aborted(1)) == [
        UnblockChannels((ch(BACK),)),
        EmitCancel(cp(1)),
        UnblockChannels((ch(0),)),
    ]
    assert aligning.blocked == frozenset()


def test_an_abort_that_overtakes_everything_leaves_nothing_held() -> None:  # L5, L6
    early = head(aborted(1))
    assert early.handle(barrier(BACK, 1)) == [Ignored("a sentinel that no log waits for")]
    assert early.handle(barrier(0, 1)) == [EmitCancel(cp(1))]
    assert early.blocked == frozenset()


def test_a_barrier_that_overtakes_frees_the_channel_held_for_the_older_one() -> None:  # L6
    aligning = head(barrier(BACK, 1), barrier(0, 1))
    assert aligning.handle(barrier(1, 2)) == [
        EmitCancel(cp(1)),
        UnblockChannels((ch(BACK),)),
        Decline(cp(1), AbortReason.OVERTAKEN),
        UnblockChannels((ch(0),)),
        BlockChannel(ch(1)),
    ]


def test_a_cancelled_checkpoint_holds_no_channel() -> None:  # L6
    held = head(barrier(BACK, 1))
    assert held.handle(CancelReceived(ch(0), cp(1))) == [
        EmitCancel(cp(1)),
        UnblockChannels((ch(BACK),)),
        Decline(cp(1), AbortReason.CANCELLED_UPSTREAM),
    ]


def test_a_completed_checkpoint_subsumes_older_logs_and_writes() -> None:  # L5
    three = head(*aligned(1), *aligned(2), feedback=2)
    for event in (barrier(BACK, 1), barrier(BACK, 2), barrier(BACK + 1, 1)):
        three.handle(event)
    three.handle(barrier(0, 3))
    three.handle(barrier(1, 3))
    assert list(three.open_logs) == [2, 3]
    assert three.handle(CompleteReceived(cp(3))) == [CancelWrite(cp(1)), DropLog(cp(2))]
    assert list(three.open_logs) == [3]


def test_a_write_that_failed_while_its_log_was_open_drops_the_log() -> None:  # L5
    spilling = head(*aligned(1))
    assert spilling.handle(SnapshotFailed(cp(1))) == [DropLog(cp(1)), Decline(cp(1), AbortReason.SNAPSHOT_FAILED)]
    assert spilling.handle(SnapshotFailed(cp(1))) == [Ignored("failed after the checkpoint was aborted")]
    assert spilling.handle(barrier(BACK, 1)) == [Ignored("a sentinel that no log waits for")]


def test_a_declined_log_is_not_acknowledged() -> None:  # L3
    overtaken = head(*aligned(1))
    assert overtaken.handle(barrier(BACK, 2)) == [
        DropLog(cp(1)),
        Decline(cp(1), AbortReason.OVERTAKEN),
        BlockChannel(ch(BACK)),
    ]
    assert overtaken.handle(SnapshotFailed(cp(1))) == [Ignored("failed after the checkpoint was aborted")]


def test_a_tail_sends_its_sentinel_when_it_has_aligned() -> None:
    tail = Subtask(1, place=LoopPlace(inside=frozenset({ch(0)})))
    assert tail.handle(barrier(0, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]


def test_a_tail_that_gives_up_sends_a_cancel_marker_which_the_head_ignores() -> None:  # L10
    tail = Subtask(1, place=LoopPlace(inside=frozenset({ch(0)})))
    assert EmitCancel(cp(1)) in tail.handle(CancelReceived(ch(0), cp(1)))
    cancelled = head(*aligned(1))
    told = Ignored("the loop tail has informed the coordinator")
    assert cancelled.handle(CancelReceived(ch(BACK), cp(1))) == [told]
    assert cancelled.open_logs == (cp(1),)


# -- the end --------------------------------------------------------------------------------------------------------


def test_a_head_does_not_end_with_its_regular_input() -> None:  # L29, L34
    ending = head(end(0))
    assert ending.handle(end(1)) == [ReportEntranceEnded(-1, -1), STILL_CIRCULATING]
    assert not ending.is_finished
    assert ending.handle(FEEDBACK) == [ForwardFeedback()]


def test_a_head_has_finished_when_the_end_is_back_on_all_feedback_channels() -> None:  # L29
    empty = head(end(0), end(1), feedback=2)
    assert empty.handle(LoopEnded()) == [FinishOperators(), EmitEnd()]
    assert empty.handle(end(BACK)) == [Ignored("the end has not come back on other channels")]
    assert empty.handle(end(BACK + 1)) == [ReportFinished()]


def test_an_inner_head_ends_when_the_end_has_come_through_the_outer_loop() -> None:  # L29
    inner = Subtask(1, place=LoopPlace(inside=frozenset({ch(0)}), feedback=frozenset({ch(1)})))
    assert inner.handle(LoopEnded()) == [Ignored("the end has not come through the outer loop yet")]
    assert inner.handle(end(0)) == [FinishOperators(), EmitEnd()]
    assert inner.handle(end(1)) == [ReportFinished()]


def test_records_behind_the_end_are_refused() -> None:  # L29
    ended = head(end(0), end(1), LoopEnded())
    with pytest.raises(ProtocolViolation, match="records came back after the loop was found empty"):
        ended.handle(FEEDBACK)
    with pytest.raises(ProtocolViolation, match="feedback on channel 2, where none can come"):
        head(end(0), end(1), LoopEnded(), end(BACK)).handle(FEEDBACK)


def test_only_heads_are_told_of_the_end_and_once() -> None:  # L29
    with pytest.raises(ProtocolViolation, match="its heads alone"):
        Subtask(1).handle(LoopEnded())
    with pytest.raises(ProtocolViolation, match="and comes once"):
        head(LoopEnded()).handle(LoopEnded())


def test_checkpoints_go_on_while_a_loop_drains_and_after_its_end() -> None:  # L28
    draining = head(end(0), end(1), *aligned(1))
    assert draining.handle(FEEDBACK) == [LogFeedback((cp(1),)), ForwardFeedback()]
    assert draining.handle(barrier(BACK, 1)) == [SealLog(cp(1))]
    draining.handle(LoopEnded())
    draining.handle(end(BACK))
    draining.handle(barrier(0, 2))
    assert OpenLog(cp(2)) in draining.handle(barrier(1, 2))
    assert draining.handle(barrier(BACK, 2)) == [SealLog(cp(2))]


def test_a_head_restored_as_finished_goes_round_again_when_more_input_comes() -> None:  # T10, L29
    restored = head(is_restored_finished=True)
    assert restored.handle(InputResumed()) == [ResumeOperators()]
    assert restored.handle(FeedbackReceived(BACK)) == [ForwardFeedback()]
    for event in (end(0), end(1)):
        restored.handle(event)
    assert restored.handle(LoopEnded()) == [FinishOperators(), EmitEnd()]


def test_a_head_restored_as_finished_sends_the_end_round_again_without_finishing_twice() -> None:  # L29, T8
    restored = head(end(0), end(1), is_restored_finished=True)
    assert restored.handle(ProbeOrdered(Probe(1))) == [PassProbe(Probe(1))]
    assert restored.handle(LoopEnded()) == [EmitEnd()]
    assert restored.handle(end(BACK)) == [ReportFinished()]


def test_a_subtask_of_the_body_ends_like_any_other() -> None:  # L29
    inside = Subtask(2, place=LoopPlace(inside=frozenset({ch(0)}), outside=frozenset({ch(1)})))
    assert inside.handle(end(1)) == [ReportEntranceEnded(-1, -1)]
    assert inside.handle(end(0)) == [FinishOperators(), EmitEnd(), ReportFinished()]


# -- probes and rounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [FeedbackForwarded(), ProbeOrdered(Probe(1))])
def test_a_subtask_outside_loops_gets_no_probes(event: Event) -> None:
    with pytest.raises(ProtocolViolation, match="only subtasks in a loop"):
        Subtask(1).handle(event)


def test_rounds_are_part_of_the_snapshot() -> None:  # L36
    circling = head(FeedbackForwarded(3), ProbeOrdered(Probe(1, 2, is_closing=True)), closed=1)
    assert circling.rounds == RoundProgress(closed=2, started=2, highest=3)
    assert Subtask(1).rounds == RoundProgress()


# GM22
def test_a_head_that_tracks_begins_its_log_with_its_barrier() -> None:
    options = CheckpointOptions(alignment=Alignment.TRACKED)
    place = LoopPlace(inside=frozenset(), outside=frozenset({ch(0), ch(1)}), feedback=frozenset({ch(2)}))
    head = Subtask(2, place=place, alignment=Alignment.TRACKED)
    assert head.handle(BarrierReceived(ch(0), cp(1), options))[0] == Ignored("barriers are missing on other channels")
    assert head.handle(FeedbackReceived(ch(2))) == [ForwardFeedback()], "it is in front of the barrier"
    assert head.handle(BarrierReceived(ch(1), cp(1), options)) == [
        TakeSnapshot(cp(1), options),
        EmitBarrier(cp(1), options),
        OpenLog(cp(1)),
    ]
    assert head.handle(FeedbackReceived(ch(2))) == [LogFeedback((cp(1),)), ForwardFeedback()]
    assert head.handle(BarrierReceived(ch(2), cp(1), options)) == [SealLog(cp(1))]
