"""One subtask's part in checkpoints and in the end of input (docs/spec/subtask.md)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import ch, committable, cp, entry_of, file_part, inline_part

from headgate.errors import ProtocolViolation
from headgate.model.config import Alignment, CheckpointOptions
from headgate.model.manifest import Committable
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
    SourceEnded,
    Subtask,
    TriggerReceived,
)

HANDLE = file_part("chk/a")


def trigger(checkpoint: int) -> TriggerReceived:
    return TriggerReceived(cp(checkpoint))


def barrier(channel: int, checkpoint: int) -> BarrierReceived:
    return BarrierReceived(ch(channel), cp(checkpoint))


def written(checkpoint: int, *committables: Committable) -> SnapshotWritten:
    return SnapshotWritten(cp(checkpoint), entry_of(HANDLE, committables))


def acknowledge(checkpoint: int, *committables: Committable) -> Acknowledge:
    return Acknowledge(cp(checkpoint), entry_of(HANDLE, committables))


def after(subtask: Subtask, *events: Event) -> Subtask:
    for event in events:
        subtask.handle(event)
    return subtask


# -- the snapshot ---------------------------------------------------------------------------------------------------


def test_a_trigger_is_the_barrier_of_a_source() -> None:  # T1
    assert Subtask(0).handle(trigger(1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]


def test_only_sources_are_triggered() -> None:  # T1
    with pytest.raises(ProtocolViolation, match="only sources are triggered"):
        Subtask(1).handle(trigger(1))


def test_a_repeated_or_older_trigger_takes_no_second_snapshot() -> None:  # T2
    source = after(Subtask(0), trigger(2))
    assert source.handle(trigger(2)) == [Ignored("barrier of a finished checkpoint")]
    assert source.handle(trigger(1)) == [Ignored("barrier of an older checkpoint")]


def test_barriers_and_cancel_markers_go_through_the_aligner() -> None:
    subtask = Subtask(2)
    assert subtask.handle(barrier(0, 1)) == [BlockChannel(ch(0))]
    assert subtask.blocked == {0}
    assert subtask.handle(barrier(1, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1)), UnblockChannels((ch(0),))]
    assert subtask.handle(CancelReceived(ch(0), cp(2))) == [
        EmitCancel(cp(2)),
        Decline(cp(2), AbortReason.CANCELLED_UPSTREAM),
    ]


def test_a_durable_snapshot_is_acknowledged_with_everything_prepared() -> None:  # T3, K3
    source = after(Subtask(0), trigger(1), trigger(2))
    assert source.handle(written(1, committable(1))) == [acknowledge(1, committable(1))]
    assert source.handle(written(2, committable(2))) == [acknowledge(2, committable(1), committable(2))]


def test_nothing_is_acknowledged_before_it_is_durable() -> None:  # T3
    source = Subtask(0)
    assert not any(isinstance(effect, Acknowledge) for effect in source.handle(trigger(1)))
    assert source.handle(written(1)) == [acknowledge(1)]


def test_a_failed_write_declines() -> None:  # T4
    source = after(Subtask(0), trigger(1))
    assert source.handle(SnapshotFailed(cp(1))) == [Decline(cp(1), AbortReason.SNAPSHOT_FAILED)]
    assert source.handle(SnapshotFailed(cp(1))) == [Ignored("failed after the checkpoint was aborted")]


def test_an_abort_cancels_the_write_and_discards_nothing() -> None:  # T4, C17
    source = after(Subtask(0), trigger(1), written(1, committable(1)), trigger(2))
    assert source.handle(AbortReceived(cp(2))) == [CancelWrite(cp(2))]
    assert source.handle(AbortReceived(cp(1))) == [Ignored("abort of an older checkpoint")]
    assert source.pending_committables == (committable(1),)


def test_an_abort_before_the_barrier_reaches_the_aligner() -> None:  # A8
    source = Subtask(0)
    assert source.handle(AbortReceived(cp(1))) == [Ignored("abort remembered until the barrier comes")]
    assert source.handle(trigger(1)) == [EmitCancel(cp(1))]


def test_output_prepared_for_an_aborted_checkpoint_travels_with_the_next() -> None:  # T5, C17
    source = after(Subtask(0), trigger(1), AbortReceived(cp(1)))
    assert source.handle(written(1, committable(1))) == [acknowledge(1, committable(1))]  # late: C10 deletes the file
    after(source, trigger(2))
    assert source.handle(written(2, committable(2))) == [acknowledge(2, committable(1), committable(2))]


def test_an_inline_snapshot_that_came_too_late_leaves_nothing_to_delete() -> None:  # T5
    source = after(Subtask(0), trigger(1), AbortReceived(cp(1)))
    late = SnapshotWritten(cp(1), entry_of(inline_part(), (committable(1),)))
    assert source.handle(late) == [Ignored("written after the checkpoint was aborted")]
    assert source.pending_committables == (committable(1),)


def test_a_write_that_fails_after_an_abort_declines_nothing() -> None:  # T4
    source = after(Subtask(0), trigger(1), AbortReceived(cp(1)))
    assert source.handle(SnapshotFailed(cp(1))) == [Ignored("failed after the checkpoint was aborted")]


# -- completion -----------------------------------------------------------------------------------------------------


def test_completion_drops_what_it_covers_and_nothing_newer() -> None:  # T9, C16
    source = after(Subtask(0), trigger(1), written(1, committable(1)), trigger(2), written(2, committable(2)))
    assert source.handle(CompleteReceived(cp(1))) == [Ignored("nothing of it is held here any more")]
    assert source.pending_committables == (committable(2),)


def test_completion_stops_the_writes_of_older_checkpoints_in_order() -> None:  # T9, C15
    source = after(Subtask(0), *(trigger(i) for i in (1, 2, 3, 4)), written(3))
    assert source.handle(CompleteReceived(cp(3))) == [CancelWrite(cp(1)), CancelWrite(cp(2))]
    assert source.handle(CompleteReceived(cp(3))) == [Ignored("nothing of it is held here any more")]
    assert source.handle(written(4)) == [acknowledge(4)]


def test_a_repeated_completion_changes_nothing() -> None:  # C14
    source = after(Subtask(0), trigger(1), written(1, committable(1)), CompleteReceived(cp(1)))
    assert source.handle(CompleteReceived(cp(1))) == [Ignored("nothing of it is held here any more")]


# -- the end of input -----------------------------------------------------------------------------------------------

FINISH = [FinishOperators(), EmitEnd(), ReportFinished()]


def test_operators_finish_once_when_the_last_input_has_ended() -> None:  # T7
    subtask = Subtask(2)
    assert subtask.handle(EndReceived(ch(1))) == [Ignored("other channels still deliver")]
    assert not subtask.is_finished
    assert subtask.handle(EndReceived(ch(0))) == FINISH
    assert subtask.is_finished


def test_a_source_finishes_when_its_reader_has_ended() -> None:  # T7
    source = Subtask(0)
    assert source.handle(SourceEnded()) == FINISH
    assert source.handle(SourceEnded()) == [Ignored("already ended")]


def test_barriers_follow_the_end_of_data() -> None:  # T6, C27
    subtask = after(Subtask(2), EndReceived(ch(0)), EndReceived(ch(1)))
    assert subtask.handle(barrier(0, 1)) == [BlockChannel(ch(0))]
    assert subtask.handle(barrier(1, 1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1)), UnblockChannels((ch(0),))]
    source = after(Subtask(0), SourceEnded())
    assert source.handle(trigger(1)) == [TakeSnapshot(cp(1)), EmitBarrier(cp(1))]


@pytest.mark.parametrize(("channels_count", "event"), [(0, SourceEnded()), (1, EndReceived(ch(0)))])
def test_operators_of_a_restored_finished_subtask_do_not_finish_again(channels_count: int, event: Event) -> None:  # T8
    subtask = Subtask(channels_count, is_restored_finished=True)
    assert subtask.is_finished
    assert subtask.handle(event) == [EmitEnd(), ReportFinished()]


@pytest.mark.parametrize(("channels_count", "event"), [(0, SourceEnded()), (1, EndReceived(ch(0)))])
def test_a_restored_finished_subtask_goes_on_when_more_input_comes(channels_count: int, event: Event) -> None:  # T10
    subtask = Subtask(channels_count, is_restored_finished=True)
    assert subtask.handle(InputResumed()) == [ResumeOperators()]
    assert not subtask.is_finished, "the next snapshot must say so"
    assert subtask.handle(InputResumed()) == [Ignored("its input had not ended")]
    assert subtask.handle(event) == [FinishOperators(), EmitEnd(), ReportFinished()]
    with pytest.raises(ProtocolViolation, match="input came after the end of data had gone out"):
        subtask.handle(InputResumed())


@pytest.mark.parametrize(
    ("subtask", "event", "problem"),
    [
        (after(Subtask(2), EndReceived(ch(0))), EndReceived(ch(0)), "second end of data on channel 0"),
        (Subtask(0), EndReceived(ch(0)), "second end of data"),
        (Subtask(1), SourceEnded(), "only sources end by themselves"),
    ],
)
def test_an_end_that_no_peer_can_send_is_a_violation(subtask: Subtask, event: Event, problem: str) -> None:  # T7
    with pytest.raises(ProtocolViolation, match=problem):
        subtask.handle(event)


# -- random histories -----------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.data())
def test_no_prepared_output_is_ever_lost(data: st.DataObject) -> None:  # T3, T5, T9
    """Writes end in order, as the one upload thread of a worker ends them; each prepares one committable."""
    source, next_checkpoint, writing = Subtask(0), 1, []
    unprepared: list[Committable] = []
    prepared: set[Committable] = set()
    owned_by_manifests: set[Committable] = set()
    acknowledged: dict[int, tuple[Committable, ...]] = {}
    ended: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(["trigger", "written", "failed", "abort", "complete"]))
        if kind == "trigger":
            source.handle(trigger(next_checkpoint))
            writing.append(next_checkpoint)
            next_checkpoint += 1
        elif kind == "abort":
            aborted = data.draw(st.integers(1, next_checkpoint))
            ended.add(aborted)
            acknowledged.pop(aborted, None)
            source.handle(AbortReceived(cp(aborted)))
        elif kind == "complete" and acknowledged:
            checkpoint = data.draw(st.sampled_from(sorted(acknowledged)))
            source.handle(CompleteReceived(cp(checkpoint)))
            owned_by_manifests.update(acknowledged[checkpoint])
            ended.update(range(1, checkpoint + 1))
            acknowledged = {c: a for c, a in acknowledged.items() if c > checkpoint}
        elif kind in ("written", "failed") and writing:
            checkpoint = writing.pop(0)
            unprepared.append(committable(checkpoint))
            if kind == "failed":
                source.handle(SnapshotFailed(cp(checkpoint)))
                continue
            prepared.update(unprepared)
            for effect in source.handle(written(checkpoint, *unprepared)):
                if isinstance(effect, Acknowledge) and checkpoint not in ended:
                    acknowledged[checkpoint] = effect.entry.committables
                    assert prepared - owned_by_manifests <= set(effect.entry.committables)
            unprepared = []
        assert prepared <= owned_by_manifests | set(source.pending_committables)


EXPECTED = {
    Alignment.ALIGNED: {Alignment.ALIGNED},
    Alignment.TRACKED: {Alignment.TRACKED},
    Alignment.TIMED: {Alignment.TIMED, Alignment.OVERTAKING, Alignment.ALIGNED},
}
"""What barriers may be, by what a run is; those of its last checkpoint do not overtake (UA3)."""


# GM2
@pytest.mark.parametrize("alignment", EXPECTED)
def test_a_barrier_of_another_alignment_than_the_runs_is_a_violation(alignment: Alignment) -> None:  # GM2
    for other in set(Alignment) - EXPECTED[alignment]:
        with pytest.raises(ProtocolViolation, match="a barrier of 1 is"):
            Subtask(2, alignment=alignment).handle(BarrierReceived(ch(0), cp(1), CheckpointOptions(alignment=other)))
    for other in EXPECTED[alignment]:
        Subtask(2, alignment=alignment).handle(BarrierReceived(ch(0), cp(1), CheckpointOptions(alignment=other)))


# GM10
def test_a_subtask_that_tracks_reads_on_and_takes_its_snapshot_with_the_last_barrier() -> None:
    options = CheckpointOptions(alignment=Alignment.TRACKED)
    subtask = Subtask(2, alignment=Alignment.TRACKED)
    subtask.handle(BarrierReceived(ch(0), cp(1), options))
    assert subtask.blocked == frozenset()
    effects = subtask.handle(BarrierReceived(ch(1), cp(1), options))
    assert effects == [TakeSnapshot(cp(1), options), EmitBarrier(cp(1), options)]


# GM3
def test_a_source_is_suspended_behind_the_last_barrier_and_stays_so() -> None:
    source = Subtask(0)
    source.handle(TriggerReceived(cp(1)))
    assert not source.is_suspended
    source.handle(TriggerReceived(cp(2), CheckpointOptions(is_last=True)))
    source.handle(AbortReceived(cp(2)))
    assert source.is_suspended, "another last one follows"


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


def aligned(checkpoint: int) -> tuple[Event, ...]:
    return barrier(0, checkpoint), barrier(1, checkpoint)


def end(channel: int) -> EndReceived:
    return EndReceived(ch(channel))


def aborted(checkpoint: int) -> AbortReceived:
    return AbortReceived(cp(checkpoint))


def loop_written(checkpoint: int) -> SnapshotWritten:
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
    assert waiting.handle(loop_written(1)) == [Acknowledge(cp(1), entry_of(HANDLE))]


def test_a_snapshot_written_before_its_log_is_complete_is_refused() -> None:  # L4
    with pytest.raises(ProtocolViolation, match="written before its log was complete"):
        head(*aligned(1)).handle(loop_written(1))


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
