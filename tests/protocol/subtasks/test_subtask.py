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
from headgate.protocol.subtasks.subtask import (
    Acknowledge,
    CancelWrite,
    CompleteReceived,
    EmitEnd,
    EndReceived,
    Event,
    FinishOperators,
    InputResumed,
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
