"""Triggering, acknowledgements and endings of checkpoints (docs/spec/coordinator.md)."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from tests.protocol.checkpoints.coordinating import (
    GENERATION,
    INTERVAL,
    PAUSE,
    STARTED,
    A,
    B,
    ack,
    acked,
    after,
    begin,
    completed,
    coordinator,
    decline,
    expiry,
    finish,
    handle_of,
    inline_ack,
    manifest,
    reserved,
    triggered,
    written,
)
from tests.protocol.checkpoints.test_completion import FINISHED, NO_MORE_PERIODIC
from tests.protocol.making import committable, cp, gen, sub

from headgate.errors import ProtocolViolation
from headgate.model.config import Alignment, CheckpointConfig, CheckpointOptions, Guarantee
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import SubtaskId, VertexId
from headgate.model.manifest import Copied, SubtaskEntry
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.completion import Pending, PendingCheckpoints
from headgate.protocol.checkpoints.coordinator import Coordinator, Phase
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    Acknowledged,
    ArmTimer,
    CancelTimer,
    CheckpointRequested,
    ConcludeGeneration,
    DeleteParts,
    DrainRequested,
    DrainSources,
    DropCheckpoint,
    Event,
    ExpiryTimer,
    FailGeneration,
    FinishReported,
    GenerationReplaced,
    IdReserved,
    IntervalTimer,
    ManifestFailed,
    ManifestUnknown,
    NotifyAbort,
    NotifyComplete,
    PauseTimer,
    ReserveFailed,
    ReserveId,
    Started,
    StopRequested,
    TriggerSources,
)
from headgate.protocol.machine import Ignored

NOT_NOW = Ignored("no checkpoint can begin now")
NEXT_INTERVAL = ArmTimer(IntervalTimer(), 1_000)


def ended(checkpoint: int, reason: AbortReason) -> list[object]:
    return [CancelTimer(ExpiryTimer(cp(checkpoint))), NotifyAbort(cp(checkpoint), reason)]


def lost(reason: str) -> FailGeneration:
    return FailGeneration(Failure(FailureKind.LOST, reason))


# -- triggering -----------------------------------------------------------------------------------------------------


def test_the_first_periodic_checkpoint_waits_for_a_random_delay() -> None:  # C5
    assert coordinator().handle(Started(417)) == [ArmTimer(IntervalTimer(), 417)]


def test_an_interval_of_zero_switches_periodic_checkpoints_off() -> None:
    assert coordinator(interval_ms=0).handle(STARTED) == [Ignored("periodic checkpoints are off")]


def test_the_id_is_reserved_before_any_barrier_starts() -> None:  # R7
    machine = coordinator(STARTED)
    assert machine.handle(INTERVAL) == [NEXT_INTERVAL, ReserveId(cp(10))]
    assert machine.handle(reserved(10)) == triggered(10)
    assert machine.pending == (10,)


def test_nothing_begins_while_an_id_is_being_reserved() -> None:  # C2
    machine = coordinator(STARTED, INTERVAL)
    assert machine.handle(INTERVAL) == [NEXT_INTERVAL, NOT_NOW]
    assert machine.handle(CheckpointRequested()) == [NOT_NOW]


def test_no_more_checkpoints_are_pending_than_allowed() -> None:  # C3
    machine = coordinator(STARTED, *begin(10), *begin(11), max_concurrent=2)
    assert machine.handle(INTERVAL) == [NEXT_INTERVAL, Ignored("as many checkpoints are pending as allowed")]
    machine.handle(ack(A, 10))
    machine.handle(ack(B, 10))
    assert machine.handle(written(10))[-1] == ReserveId(cp(12)), "the one that is due begins as soon as it may"


def test_the_minimum_pause_counts_from_the_completion() -> None:  # C4
    machine = coordinator(STARTED, *begin(10), *acked(10), min_pause_ms=700)
    assert machine.handle(written(10))[-1] == ArmTimer(PauseTimer(), 700)
    assert machine.handle(INTERVAL) == [NEXT_INTERVAL, NOT_NOW]
    assert machine.handle(PAUSE) == [ReserveId(cp(11))]


def test_a_requested_checkpoint_waits_neither_for_interval_nor_pause() -> None:  # C4
    machine = coordinator(STARTED, *completed(10), min_pause_ms=700)
    assert machine.handle(CheckpointRequested()) == [ReserveId(cp(11))]


def test_a_request_before_every_participant_runs_is_refused() -> None:  # C6
    machine = coordinator()
    assert machine.handle(CheckpointRequested()) == [Ignored("not every participant runs yet")]
    machine.handle(STARTED)
    assert machine.handle(PAUSE) == [NOT_NOW]


def test_an_id_that_cannot_be_recorded_is_not_used_and_counts() -> None:  # C23
    machine = coordinator(STARTED, INTERVAL, tolerable_failures=1)
    assert machine.handle(ReserveFailed(cp(10))) == []
    assert machine.handle(INTERVAL) == [NEXT_INTERVAL, ReserveId(cp(11))]
    assert machine.handle(ReserveFailed(cp(11))) == [
        lost("checkpoint 11 failed (2 in a row): its id could not be recorded in the checkpoint storage")
    ]


@pytest.mark.parametrize("event", [reserved(9), ReserveFailed(cp(9))])
def test_the_outcome_of_a_reservation_nobody_waits_for_is_ignored(event: Event) -> None:
    assert coordinator(STARTED, INTERVAL).handle(event) == [Ignored("an id that is not wanted any more")]


# -- acknowledgements -----------------------------------------------------------------------------------------------


def test_every_subtask_must_acknowledge_before_the_manifest_is_written() -> None:  # C8
    machine = coordinator(STARTED, *begin(10))
    assert machine.handle(ack(B, 10)) == [Ignored("other participants are missing")]
    assert machine.missing(cp(10)) == (A,)
    assert machine.handle(ack(A, 10)) == [manifest(10)], "entries in the order of the participants"


def test_a_repeated_acknowledgement_is_ignored() -> None:  # C10
    machine = coordinator(STARTED, *begin(10), ack(A, 10))
    assert machine.handle(ack(A, 10)) == [Ignored("duplicate acknowledgement")]
    assert machine.missing(cp(10)) == (B,)


def test_a_repeated_acknowledgement_of_a_completed_checkpoint_keeps_its_file() -> None:  # C10
    machine = coordinator(STARTED, *completed(10))
    assert machine.handle(ack(A, 10)) == [Ignored("duplicate acknowledgement of a completed checkpoint")]


def test_a_late_acknowledgement_has_its_file_deleted() -> None:  # C10
    machine = coordinator(STARTED, *begin(10), decline(10))
    assert machine.handle(ack(A, 10)) == [DeleteParts(handle_of(A, 10))]
    assert machine.handle(inline_ack(A, 10)) == [Ignored("late acknowledgement")]


def test_an_acknowledgement_of_an_unknown_subtask_has_its_file_deleted() -> None:  # C10
    stranger = sub("c")
    assert coordinator(STARTED, *begin(10)).handle(ack(stranger, 10)) == [DeleteParts(handle_of(stranger, 10))]


@pytest.mark.parametrize("generation", [2, 4])
def test_messages_of_another_generation_change_nothing(generation: int) -> None:  # C9, C11
    machine = coordinator(STARTED, *begin(10))
    assert machine.handle(ack(A, 10, generation=generation)) == [Ignored("acknowledgement of another generation")]
    assert machine.handle(decline(10, generation=generation)) == [Ignored("decline of another generation")]
    assert machine.handle(finish(A, generation=generation)) == [Ignored("report of another generation")]
    assert machine.missing(cp(10)) == (A, B)


# -- endings --------------------------------------------------------------------------------------------------------


def test_a_decline_aborts_at_once_and_deletes_what_was_acknowledged() -> None:  # C17
    machine = coordinator(STARTED, *begin(10), ack(B, 10))
    assert machine.handle(decline(10)) == [
        *ended(10, AbortReason.OVERTAKEN),
        DeleteParts(handle_of(B, 10)),
        NOT_NOW,
    ]
    assert machine.pending == ()


def test_a_late_decline_is_ignored() -> None:
    machine = coordinator(STARTED, *begin(10), decline(10))
    assert machine.handle(decline(10)) == [Ignored("late decline")]


def test_an_expired_checkpoint_is_aborted_and_counts() -> None:  # C23
    machine = coordinator(STARTED, *begin(10))
    assert machine.handle(expiry(10)) == [
        *ended(10, AbortReason.EXPIRED),
        lost("checkpoint 10 failed: it did not complete within its timeout"),
    ]
    assert machine.phase is Phase.DONE


@pytest.mark.parametrize("events", [(decline(10),), acked(10), (*acked(10), written(10))])
def test_expiry_of_what_has_ended_or_is_being_written_is_ignored(events: tuple[Event, ...]) -> None:
    machine = coordinator(STARTED, *begin(10), *events)
    assert machine.handle(expiry(10)) == [Ignored("the checkpoint has ended, or its manifest is being written")]


def test_a_decline_cannot_take_back_what_everybody_acknowledged() -> None:  # C12
    machine = coordinator(STARTED, *begin(10), *acked(10))
    assert machine.handle(decline(10)) == [Ignored("late decline")]


def test_a_completion_retains_subsumes_notifies_in_this_order() -> None:  # C12, C15, C31
    machine = coordinator(STARTED, *begin(10), *begin(11), ack(A, 10), *acked(11), retained=(7, 9), max_concurrent=2)
    assert machine.handle(written(11)) == [
        CancelTimer(ExpiryTimer(cp(11))),
        DropCheckpoint(cp(7)),
        *ended(10, AbortReason.SUBSUMED),
        DeleteParts(handle_of(A, 10)),
        NotifyComplete(cp(11)),
    ]
    assert (machine.last_completed, machine.pending) == (11, ())


def test_a_subsumed_checkpoint_never_completes() -> None:  # C15
    machine = coordinator(STARTED, *begin(10), *begin(11), ack(A, 10), *acked(11), written(11), max_concurrent=2)
    assert machine.handle(ack(B, 10)) == [DeleteParts(handle_of(B, 10))]


def test_one_manifest_is_written_at_a_time_and_the_newest_first() -> None:  # C15
    machine = coordinator(STARTED, *begin(10), *begin(11), *begin(12), *acked(10), max_concurrent=3)
    assert machine.handle(ack(A, 11)) == [Ignored("a manifest is being written")]
    for event in (ack(B, 11), ack(A, 12), ack(B, 12)):
        machine.handle(event)
    assert machine.handle(written(10))[-1] == manifest(12)


def test_an_older_checkpoint_stays_until_the_newer_one_is_durable() -> None:  # C31
    machine = coordinator(STARTED, *completed(10), PAUSE, *begin(11), ack(A, 11), retained_count=1)
    assert machine.handle(ack(B, 11)) == [manifest(11)]
    assert DropCheckpoint(cp(10)) in machine.handle(written(11))


def test_checkpoints_beyond_the_retained_ones_are_dropped_oldest_first() -> None:  # C31, C35
    machine = coordinator(STARTED, *begin(10), *acked(10), retained=(3, 5, 8))
    drops = [e for e in machine.handle(written(10)) if isinstance(e, DropCheckpoint)]
    assert drops == [DropCheckpoint(cp(3)), DropCheckpoint(cp(5))]


def test_the_checkpoint_just_completed_is_never_dropped() -> None:  # C31
    machine = coordinator(STARTED, *begin(10), *acked(10), retained_count=0)
    assert not any(isinstance(e, DropCheckpoint) for e in machine.handle(written(10)))


# -- the manifest ---------------------------------------------------------------------------------------------------


def test_a_manifest_that_was_not_written_aborts_and_counts() -> None:  # C12, C23
    machine = coordinator(STARTED, *begin(10), *acked(10))
    assert machine.handle(ManifestFailed(cp(10))) == [
        *ended(10, AbortReason.MANIFEST_FAILED),
        DeleteParts(handle_of(A, 10) + handle_of(B, 10)),
        lost("checkpoint 10 failed: its manifest could not be written"),
    ]


def test_after_a_failed_manifest_the_next_one_that_is_ready_is_written() -> None:
    events = (*begin(10), *begin(11), *acked(10), *acked(11))
    machine = coordinator(STARTED, *events, max_concurrent=2, tolerable_failures=1)
    assert machine.handle(ManifestFailed(cp(10)))[-1] == manifest(11)


def test_nothing_is_deleted_when_nobody_knows_whether_the_manifest_was_written() -> None:  # C12
    machine = coordinator(STARTED, *begin(10), *acked(10))
    assert machine.handle(ManifestUnknown(cp(10))) == [
        lost("it is not known whether the manifest of checkpoint 10 was written")
    ]
    assert machine.handle(ack(A, 10)) == [Ignored("Acknowledged after the end of the generation")]


def test_a_replaced_generation_stops_for_good() -> None:  # C38
    machine = coordinator(STARTED, *begin(10), *acked(10))
    assert machine.handle(GenerationReplaced(gen(4))) == [
        FailGeneration(
            Failure(FailureKind.REPLACED, "generation 4 of this pipeline was started elsewhere; this one (3) stops")
        )
    ]
    assert machine.handle(written(10)) == [Ignored("ManifestWritten after the end of the generation")]


@pytest.mark.parametrize("event", [written(10), ManifestFailed(cp(10)), ManifestUnknown(cp(10))])
def test_the_outcome_of_a_manifest_that_was_not_asked_for_is_a_violation(event: Event) -> None:
    with pytest.raises(ProtocolViolation, match="a manifest of 10 was not asked for"):
        coordinator(STARTED, *begin(10)).handle(event)


# -- tolerable failures ---------------------------------------------------------------------------------------------


def test_more_failures_in_a_row_than_tolerable_fail_the_generation() -> None:  # C22
    machine = coordinator(STARTED, *begin(10), expiry(10), *begin(11), expiry(11), *begin(12), tolerable_failures=2)
    assert machine.handle(expiry(12))[-1] == lost(
        "checkpoint 12 failed (3 in a row): it did not complete within its timeout"
    )


def test_a_completion_forgets_earlier_failures() -> None:  # C22
    machine = coordinator(STARTED, *begin(10), expiry(10), *completed(11), *begin(12), tolerable_failures=1)
    assert machine.handle(expiry(12)) == [*ended(12, AbortReason.EXPIRED), NOT_NOW]


def test_two_concurrent_failures_count_twice_in_whatever_order_they_come() -> None:  # C22
    for first, second in ((10, 11), (11, 10)):
        machine = coordinator(STARTED, *begin(10), *begin(11), expiry(first), max_concurrent=2, tolerable_failures=1)
        assert isinstance(machine.handle(expiry(second))[-1], FailGeneration)


@pytest.mark.parametrize("reason", list(AbortReason))
def test_only_failures_of_storage_and_time_count(reason: AbortReason) -> None:  # C23, C25
    effects = coordinator(STARTED, *begin(10)).handle(decline(10, reason))
    assert reason.text
    assert isinstance(effects[-1], FailGeneration) == reason.counts_as_failure
    counted = {"EXPIRED", "SNAPSHOT_FAILED", "MANIFEST_FAILED", "RESERVE_FAILED"}
    counted |= {"HOOK_FAILED", "HOOK_TIMED_OUT", "MARKER_MISSED", "MARKER_NOT_MET"}
    assert reason.counts_as_failure == (reason.name in counted)


def test_after_the_end_everything_is_ignored_and_no_file_deleted() -> None:
    machine = coordinator(STARTED, *begin(10), expiry(10))
    for event in (ack(A, 10, committable(10)), decline(10), INTERVAL, CheckpointRequested(), finish(A), STARTED):
        assert machine.handle(event) == [Ignored(f"{type(event).__name__} after the end of the generation")]


# GM2, GM3
@pytest.mark.parametrize("mode", list(Guarantee))
def test_checkpoints_are_triggered_as_the_mode_wants_them(mode: Guarantee) -> None:  # GM2
    exact = mode is Guarantee.EXACTLY_ONCE
    alignment = Alignment.TRACKED if mode is Guarantee.AT_LEAST_ONCE else Alignment.ALIGNED
    machine = Coordinator(gen(3), (A, B), CheckpointConfig(mode=mode), cp(10))
    machine.handle(STARTED)
    machine.handle(INTERVAL)
    triggered = [e.options for e in machine.handle(IdReserved(cp(10))) if isinstance(e, TriggerSources)]
    assert triggered == [CheckpointOptions(alignment=alignment)]
    machine.handle(StopRequested())
    last = [e.options for e in machine.handle(IdReserved(cp(11))) if isinstance(e, TriggerSources)]
    assert last == [CheckpointOptions(alignment=alignment, is_last=not exact)]


def test_the_last_checkpoint_of_a_run_stays_aligned() -> None:  # UA3
    for is_stopped in (True, False):
        machine = Coordinator(gen(3), (A, B), CheckpointConfig(alignment_timeout_ms=0), cp(10))
        machine.handle(STARTED)
        machine.handle(INTERVAL)
        triggered = [e.options for e in machine.handle(IdReserved(cp(10))) if isinstance(e, TriggerSources)]
        assert triggered == [CheckpointOptions(alignment=Alignment.TIMED)]
        for event in (StopRequested(),) if is_stopped else (finish(A), finish(B)):
            machine.handle(event)
        found = [e.options for e in machine.handle(IdReserved(cp(11))) if isinstance(e, TriggerSources)]
        assert found == [CheckpointOptions()], "nothing is in flight when it is restored into a changed pipeline"


DRAIN = DrainRequested()


def test_a_drain_tells_the_sources_and_the_end_is_the_final_checkpoint() -> None:  # E7
    machine = coordinator(STARTED)
    assert machine.handle(DRAIN) == [DrainSources()]
    assert machine.phase is Phase.RUNNING
    assert machine.handle(finish(A)) == [Ignored("other subtasks still process")]
    assert machine.handle(FINISHED[1]) == [NO_MORE_PERIODIC, ReserveId(cp(10))]
    assert machine.handle(reserved(10)) == triggered(10)
    machine.handle(acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_final=True, is_draining=True)]
    assert machine.handle(written(10))[-1] == ConcludeGeneration(cp(10), is_final=True)


def test_a_drain_before_the_start_is_remembered() -> None:  # E7
    machine = coordinator()
    assert machine.handle(DRAIN) == [Ignored("remembered until every participant runs")]
    assert machine.is_draining
    assert machine.handle(STARTED) == [DrainSources(), ArmTimer(IntervalTimer(), 300)]


def test_a_drain_before_the_start_is_remembered_without_periodic_checkpoints() -> None:  # E7
    assert coordinator(DRAIN, interval_ms=0).handle(STARTED) == [DrainSources()]


def test_a_drain_asked_for_twice_is_one() -> None:  # E7
    assert coordinator(STARTED, DRAIN).handle(DRAIN) == [Ignored("already draining")]


@pytest.mark.parametrize("wish", [INTERVAL, CheckpointRequested()])
def test_checkpoints_are_taken_while_it_drains(wish: object) -> None:  # E7
    machine = coordinator(STARTED, DRAIN, finish(A))
    assert ReserveId(cp(10)) in machine.handle(wish)  # type: ignore[arg-type]


def test_a_checkpoint_that_began_while_draining_says_so() -> None:  # E9
    machine = coordinator(STARTED, *begin(10), DRAIN, acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_draining=False)], "its barrier went out before the drain"
    for event in (written(10), *begin(11), acked(11)[0]):
        machine.handle(event)
    assert machine.handle(acked(11)[1]) == [manifest(11, is_draining=True)]
    assert machine.handle(written(11)) == [CancelTimer(ExpiryTimer(cp(11))), NotifyComplete(cp(11))], "it goes on"


def test_an_id_being_reserved_when_the_drain_begins_is_marked() -> None:  # E9
    machine = coordinator(STARTED, INTERVAL, DRAIN)
    assert machine.handle(reserved(10)) == triggered(10)
    machine.handle(acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_draining=True)]


def test_a_stop_wins_over_a_drain() -> None:  # E10
    machine = coordinator(STARTED, DRAIN)
    assert machine.handle(StopRequested()) == [NO_MORE_PERIODIC, ReserveId(cp(10))]
    for event in (reserved(10), acked(10)[0]):
        machine.handle(event)
    assert machine.handle(acked(10)[1]) == [manifest(10, is_final=False, is_draining=True)], "the next run drains on"
    assert machine.handle(written(10))[-1] == ConcludeGeneration(cp(10), is_final=False)


def test_a_drain_after_a_stop_changes_nothing() -> None:  # E10
    machine = coordinator(STARTED, StopRequested(), reserved(10), acked(10)[0])
    assert machine.handle(DRAIN) == [Ignored("already ending")]
    assert machine.handle(acked(10)[1]) == [manifest(10)]


def test_a_drain_after_all_have_finished_changes_nothing() -> None:  # E10
    machine = coordinator(STARTED, *FINISHED)
    assert machine.handle(DRAIN) == [Ignored("already ending")]
    machine.handle(reserved(10))
    machine.handle(acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_final=True)]


class Counted(SubtaskId):
    """A subtask that counts how often some set or mapping looks for it."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()


def subtasks_of(count: int) -> tuple[Counted, ...]:
    return tuple(Counted(VertexId("v"), index) for index in range(count))


def acks_of(subtasks: tuple[Counted, ...], checkpoint: int) -> list[Acknowledged]:
    entries = [SubtaskEntry(subtask, handle_of(subtask, checkpoint)) for subtask in subtasks]
    return [Acknowledged(GENERATION, cp(checkpoint), entry) for entry in entries]


def looks_of_a_run(count: int) -> int:
    """Return the looks at ``count`` subtasks over a checkpoint, the end of all input, and the final checkpoint."""
    subtasks = subtasks_of(count)
    machine = after(Coordinator(GENERATION, subtasks, CheckpointConfig(), cp(1)), STARTED)
    Counted.looks = 0
    after(machine, INTERVAL, reserved(1), *acks_of(subtasks, 1), written(1))
    after(machine, *(FinishReported(GENERATION, subtask) for subtask in subtasks))
    after(machine, reserved(2), *acks_of(subtasks, 2), written(2))
    assert machine.last_completed == 2
    return Counted.looks


def test_ten_times_the_subtasks_are_ten_times_the_looks() -> None:  # C64
    assert looks_of_a_run(100) <= 10 * looks_of_a_run(10)


def test_what_is_not_committed_yet_is_not_looked_through_with_every_acknowledgement() -> None:  # C64
    subtasks, looks = subtasks_of(50), []
    machine = after(Coordinator(GENERATION, subtasks, CheckpointConfig(), cp(1)), STARTED)
    first, *others = acks_of(subtasks, 1)
    output = SubtaskEntry(subtasks[0], first.entry.parts, (committable(1),))
    after(machine, INTERVAL, reserved(1), Acknowledged(GENERATION, cp(1), output), *others, written(1))

    unconfirmed = CommitQueue.unconfirmed.fget
    assert unconfirmed is not None

    def counted(queue: CommitQueue) -> object:
        looks.append(queue)
        return unconfirmed(queue)

    with patch.object(CommitQueue, "unconfirmed", property(counted)):
        after(machine, INTERVAL, reserved(2), *acks_of(subtasks, 2))
    assert len(looks) == 1, "once, for the manifest that carries it"


def test_only_participants_acknowledge_and_once() -> None:
    known, stranger = subtasks_of(2)[0], SubtaskId(VertexId("w"), 0)
    pending = PendingCheckpoints((known,))
    pending.begin(cp(1), Pending(is_final=False, is_last=False, is_draining=False))
    entry = SubtaskEntry(known, ())
    assert pending.acknowledge(cp(1), entry, Copied())
    assert not pending.acknowledge(cp(1), entry, Copied())
    assert not pending.acknowledge(cp(1), SubtaskEntry(known, ()), Copied())
    with pytest.raises(AssertionError, match="participants acknowledge"):
        pending.acknowledge(cp(1), SubtaskEntry(stranger, ()), Copied())
