"""A subtask whose barriers may overtake: when its snapshot is written and acknowledged (UA3, UA8, UA10)."""

from __future__ import annotations

import pytest
from tests.protocol.making import ch, committable, cp, entry_of, file_part, inline_part
from tests.protocol.subtasks.test_unaligned import OVER, TIMED, arrived, read, timeout

from headgate.errors import ProtocolViolation
from headgate.model.config import ORDINARY, Alignment, CheckpointOptions
from headgate.protocol.checkpoints.coordinator_events import AbortReason
from headgate.protocol.machine import Ignored
from headgate.protocol.subtasks.alignment import (
    AbortReceived,
    BlockChannel,
    Decline,
    EmitBarrier,
    EmitCancel,
    TakeSnapshot,
    UnblockChannels,
)
from headgate.protocol.subtasks.loops import LoopPlace
from headgate.protocol.subtasks.subtask import (
    Acknowledge,
    CompleteReceived,
    Event,
    SnapshotFailed,
    SnapshotWritten,
    Subtask,
    TriggerReceived,
)
from headgate.protocol.subtasks.unaligned import AllRecorded, CancelArrived, DropRecording, RecordChannels

PART = inline_part()


def after(channels_count: int, *events: Event, is_immediate: bool = False) -> Subtask:
    made = Subtask(channels_count, alignment=Alignment.TIMED, is_immediate=is_immediate)
    for event in events:
        made.handle(event)
    return made


def written(checkpoint: int) -> SnapshotWritten:
    return SnapshotWritten(cp(checkpoint), entry_of(PART))


def recording() -> Subtask:
    """Checkpoint 1 is being recorded: on channel 0 it is, channel 1 is held."""
    return after(2, arrived(0, 1), timeout(1))


def test_a_snapshot_is_acknowledged_when_all_is_recorded_and_written() -> None:  # UA8
    made = recording()
    assert made.recording == 1
    effects = made.handle(arrived(1, 1))
    assert effects == [RecordChannels(cp(1), (ch(1),)), UnblockChannels((ch(1),)), AllRecorded(cp(1))]
    assert made.recording is None
    assert made.handle(written(1)) == [Acknowledge(cp(1), entry_of(PART))]


def test_a_snapshot_written_before_all_is_recorded_is_a_violation() -> None:  # UA8
    with pytest.raises(ProtocolViolation, match="before all was recorded"):
        recording().handle(written(1))


def test_an_abort_of_what_is_recorded_drops_it_and_cancels_no_write() -> None:  # UA10
    made = recording()
    assert made.handle(AbortReceived(cp(1))) == [DropRecording(cp(1)), UnblockChannels((ch(1),))]
    assert made.handle(SnapshotFailed(cp(1))) == [Ignored("failed after the checkpoint was aborted")]
    made = recording()
    made.handle(arrived(1, 1))
    assert [type(e).__name__ for e in made.handle(AbortReceived(cp(1)))] == ["CancelWrite"], "it was being written"


def test_output_prepared_for_a_dropped_recording_travels_with_the_next() -> None:  # UA10, T5
    made = recording()
    made.handle(AbortReceived(cp(1)))
    for event in (arrived(0, 2), arrived(1, 2), read(0, 2), read(1, 2)):
        made.handle(event)
    output = committable(1)
    found = made.handle(SnapshotWritten(cp(2), entry_of(PART, (output,))))
    assert found == [Acknowledge(cp(2), entry_of(PART, (output,)))]


def test_a_completion_drops_an_older_recording() -> None:  # UA10, C15
    made = recording()
    assert made.handle(CompleteReceived(cp(2))) == [DropRecording(cp(1)), UnblockChannels((ch(1),))]
    assert made.recording is None


def test_a_recording_that_is_given_up_is_declined_and_may_not_be_acknowledged() -> None:  # UA10
    made = recording()
    effects = made.handle(CancelArrived(ch(1), cp(1)))
    assert effects == [
        DropRecording(cp(1)),
        Decline(cp(1), AbortReason.CANCELLED_UPSTREAM),
        UnblockChannels((ch(1),)),
    ]
    assert made.handle(written(1)) == [Ignored("written after the checkpoint was aborted")]
    late = made.handle(SnapshotWritten(cp(1), entry_of(file_part("chk/a"))))
    assert late == [Acknowledge(cp(1), entry_of(file_part("chk/a")))], "so that the file is deleted (C10)"


def test_a_source_sends_its_barrier_when_it_is_triggered() -> None:
    for is_immediate, options in ((False, TIMED), (True, OVER)):
        source = after(0, is_immediate=is_immediate)
        effects = source.handle(TriggerReceived(cp(1), TIMED))
        assert [e for e in effects if isinstance(e, TakeSnapshot | EmitBarrier)] == [
            TakeSnapshot(cp(1), options),
            EmitBarrier(cp(1), options),
        ]
        assert source.recording is None
        assert source.handle(written(1)) == [Acknowledge(cp(1), entry_of(PART))]


def test_barriers_that_may_and_may_not_overtake_are_taken_but_tracked_ones_are_not() -> None:  # UA3
    made = after(2, arrived(0, 1, ORDINARY))
    assert made.handle(read(0, 1, ORDINARY)) == [BlockChannel(ch(0))]
    tracked = CheckpointOptions(alignment=Alignment.TRACKED)
    for event in (arrived(0, 1, tracked), read(0, 1, tracked)):
        with pytest.raises(ProtocolViolation, match="TRACKED"):
            after(2, event)


def test_where_no_barrier_may_overtake_one_that_did_is_a_violation() -> None:  # GM2, UA3
    for options in (TIMED, OVER):
        with pytest.raises(ProtocolViolation, match=f"{options.alignment}"):
            Subtask(2).handle(read(0, 1, options))
    with pytest.raises(ProtocolViolation, match="where no barrier may overtake"):
        Subtask(2).handle(timeout(1))


def test_no_barrier_overtakes_in_a_loop() -> None:  # UA2
    with pytest.raises(AssertionError, match="UA2"):
        Subtask(1, alignment=Alignment.TIMED, place=LoopPlace(inside=frozenset({ch(0)})))


def test_a_cancel_marker_goes_on_downstream_only_where_no_barrier_went() -> None:  # UA10
    aligning = after(2, arrived(0, 1))
    assert EmitCancel(cp(1)) in aligning.handle(CancelArrived(ch(1), cp(1)))
    assert EmitCancel(cp(1)) not in recording().handle(CancelArrived(ch(1), cp(1)))
