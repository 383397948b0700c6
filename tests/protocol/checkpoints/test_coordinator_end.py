"""Commits, the final checkpoint and a requested stop (docs/spec/final-checkpoint.md, two-phase-commit.md)."""

from __future__ import annotations

import pytest
from tests.protocol.checkpoints.coordinating import (
    INTERVAL,
    PAUSE,
    STARTED,
    A,
    B,
    acked,
    after,
    begin,
    completed,
    coordinator,
    decline,
    expiry,
    finish,
    manifest,
    reserved,
    triggered,
    written,
)
from tests.protocol.making import committable, cp, gen

from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import WorkerIndex
from headgate.protocol.checkpoints.commit import Commit, CommitPermit
from headgate.protocol.checkpoints.coordinator import Coordinator, Phase
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    ArmTimer,
    CancelTimer,
    CommitFailed,
    CommitRetryTimer,
    CommitSucceeded,
    CompletionReported,
    ConcludeGeneration,
    Event,
    ExpiryTimer,
    FailGeneration,
    IntervalTimer,
    ListenerFound,
    ManifestFailed,
    NotifyAbort,
    NotifyComplete,
    PauseTimer,
    ReserveFailed,
    ReserveId,
    StopRequested,
    TimerFired,
)
from headgate.protocol.machine import Ignored

RETRY = TimerFired(CommitRetryTimer())
FINISHED = (finish(A), finish(B))
NO_MORE_PERIODIC = CancelTimer(IntervalTimer())


def commit(checkpoint: int, *checkpoints: int) -> Commit:
    return Commit(CommitPermit(cp(checkpoint), gen(3)), tuple(committable(c) for c in checkpoints or (checkpoint,)))


def committed(checkpoint: int) -> CommitSucceeded:
    return CommitSucceeded(cp(checkpoint))


def failed(checkpoint: int, *, is_transient: bool = True) -> CommitFailed:
    return CommitFailed(cp(checkpoint), "no space", is_transient)


# -- commits --------------------------------------------------------------------------------------------------------


def test_output_is_committed_only_after_the_manifest_is_durable() -> None:  # K1, C12
    machine = coordinator(STARTED, *begin(10))
    for event in acked(10, committable(10)):
        assert not any(isinstance(e, Commit) for e in machine.handle(event))
    assert machine.handle(written(10)) == [
        CancelTimer(ExpiryTimer(cp(10))),
        NotifyComplete(cp(10)),
        commit(10),
    ]
    assert machine.handle(committed(10)) == [Ignored("nothing more to commit")]


def test_commits_wait_for_the_one_before_and_are_carried_by_later_manifests() -> None:  # K1, K2
    machine = coordinator(STARTED, *completed(10, committable(10)), *begin(11), acked(11, committable(11))[0])
    assert machine.handle(acked(11)[1]) == [manifest(11, committable(11), carried=(committable(10),))]
    assert not any(isinstance(e, Commit) for e in machine.handle(written(11)))
    assert machine.handle(committed(10)) == [commit(11)]


def test_output_of_an_aborted_checkpoint_is_committed_with_the_next() -> None:  # C17, K3
    machine = coordinator(
        STARTED, *begin(10), *acked(10, committable(10)), ManifestFailed(cp(10)), tolerable_failures=1
    )
    for event in (*begin(11), *acked(11, committable(10), committable(11))):
        machine.handle(event)
    assert machine.handle(written(11))[-1] == commit(11, 10, 11)


def test_a_failed_commit_is_retried_with_growing_pauses_and_never_given_up() -> None:  # K1
    machine = coordinator(STARTED, *completed(10, committable(10)))
    pauses = []
    for _ in range(8):
        (pause,) = machine.handle(failed(10))
        assert isinstance(pause, ArmTimer)
        pauses.append(pause.after_ms)
        assert machine.handle(RETRY) == [commit(10)]
    assert pauses == [*Coordinator.COMMIT_RETRY_MS, 5_000, 5_000]
    machine.handle(committed(10))
    for event in completed(11, committable(11)):
        machine.handle(event)
    assert machine.handle(failed(11)) == [ArmTimer(CommitRetryTimer(), 100)], "a success starts over"


def test_a_target_that_denies_what_was_prepared_stops_the_pipeline() -> None:  # K5
    machine = coordinator(STARTED, *completed(10, committable(10)))
    assert machine.handle(failed(10, is_transient=False)) == [
        FailGeneration(Failure(FailureKind.DENIED, "cannot commit checkpoint 10: no space"))
    ]


# -- the final checkpoint -------------------------------------------------------------------------------------------


def test_the_final_checkpoint_is_triggered_at_once_when_all_have_finished() -> None:  # C26, E2
    machine = coordinator(STARTED)
    assert machine.handle(finish(A)) == [Ignored("other subtasks still process")]
    assert machine.handle(finish(B)) == [NO_MORE_PERIODIC, ReserveId(cp(10))]
    assert machine.handle(reserved(10)) == triggered(10)
    assert machine.phase is Phase.ENDING


def test_the_run_ends_when_the_final_checkpoint_is_committed() -> None:  # C27, E4
    machine = coordinator(STARTED, *FINISHED, reserved(10), acked(10, committable(10))[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, committable(10), is_final=True)]
    assert machine.handle(written(10)) == [CancelTimer(ExpiryTimer(cp(10))), NotifyComplete(cp(10)), commit(10)]
    assert machine.handle(committed(10)) == [ConcludeGeneration(cp(10), is_final=True)]
    assert machine.handle(INTERVAL) == [Ignored("TimerFired after the end of the generation")]


def test_without_output_the_run_ends_with_the_manifest() -> None:  # C27, E4
    machine = coordinator(STARTED, *FINISHED, reserved(10), *acked(10))
    assert machine.handle(written(10))[-1] == ConcludeGeneration(cp(10), is_final=True)


def test_a_checkpoint_that_started_before_everybody_finished_is_not_final() -> None:  # C26, E3
    machine = coordinator(STARTED, *begin(10), finish(A))
    assert machine.handle(finish(B)) == [NO_MORE_PERIODIC, ReserveId(cp(11))], "the limit does not hold it back"
    machine.handle(reserved(11))
    machine.handle(acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_final=False)]
    assert machine.handle(written(10)) == [CancelTimer(ExpiryTimer(cp(10))), NotifyComplete(cp(10))]
    machine.handle(acked(11)[0])
    assert machine.handle(acked(11)[1]) == [manifest(11, is_final=True)]


def test_an_id_being_reserved_when_all_finish_becomes_the_final_checkpoint() -> None:  # C26, E3
    machine = coordinator(STARTED, INTERVAL, *FINISHED)
    assert machine.handle(reserved(10)) == triggered(10)
    machine.handle(acked(10)[0])
    assert machine.handle(acked(10)[1]) == [manifest(10, is_final=True)]


def test_subtasks_that_finish_before_the_start_are_remembered() -> None:  # E2
    machine = coordinator(finish(A))
    assert machine.handle(finish(B)) == [Ignored("remembered until every participant runs")]
    assert machine.handle(STARTED) == [NO_MORE_PERIODIC, ReserveId(cp(10))]


def test_a_repeated_finish_report_changes_nothing() -> None:  # E2
    machine = coordinator(STARTED, *FINISHED)
    assert machine.handle(finish(B)) == [Ignored("duplicate report")]


def test_subtasks_take_part_in_checkpoints_after_they_finished() -> None:  # E1
    machine = coordinator(STARTED, finish(A), *begin(10), acked(10)[1])
    assert machine.missing(cp(10)) == (A,)
    assert machine.handle(acked(10)[0]) == [manifest(10, is_final=False)]


def test_no_periodic_checkpoint_starts_while_ending() -> None:
    machine = coordinator(STARTED, *FINISHED)
    assert machine.handle(INTERVAL) == [Ignored("no periodic checkpoint is wanted any more")]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (decline(10), AbortReason.OVERTAKEN),
        (expiry(10), AbortReason.EXPIRED),
    ],
)
def test_a_final_checkpoint_that_is_aborted_is_tried_again_after_a_pause(event: object, reason: AbortReason) -> None:
    machine = coordinator(STARTED, *FINISHED, reserved(10), tolerable_failures=1)  # E5
    assert machine.handle(event) == [  # type: ignore[arg-type]
        CancelTimer(ExpiryTimer(cp(10))),
        NotifyAbort(cp(10), reason),
        ArmTimer(PauseTimer(), 200),
    ]
    assert machine.handle(PAUSE) == [ReserveId(cp(11))]
    for later in (reserved(11), *acked(11)):
        machine.handle(later)
    assert machine.handle(written(11))[-1] == ConcludeGeneration(cp(11), is_final=True)


def test_a_final_manifest_that_failed_is_tried_again_after_a_pause_only() -> None:  # E5
    machine = coordinator(STARTED, *FINISHED, reserved(10), *acked(10), tolerable_failures=1)
    assert machine.handle(ManifestFailed(cp(10)))[-1] == ArmTimer(PauseTimer(), 200)
    assert machine.handle(PAUSE) == [ReserveId(cp(11))]


def test_a_final_id_that_cannot_be_recorded_is_tried_again_after_a_pause() -> None:  # E5
    machine = coordinator(STARTED, *FINISHED, tolerable_failures=1)
    assert machine.handle(ReserveFailed(cp(10))) == [ArmTimer(PauseTimer(), 200)]
    assert machine.handle(PAUSE) == [ReserveId(cp(11))]


# -- a requested stop -----------------------------------------------------------------------------------------------


def test_a_stop_takes_one_last_checkpoint_commits_it_and_ends() -> None:  # E6
    machine = coordinator(STARTED)
    assert machine.handle(StopRequested()) == [NO_MORE_PERIODIC, ReserveId(cp(10))]
    for event in (reserved(10), *acked(10, committable(10)), written(10)):
        machine.handle(event)
    assert machine.handle(StopRequested()) == [Ignored("already ending")]
    assert machine.handle(committed(10)) == [ConcludeGeneration(cp(10), is_final=False)]


def test_a_stop_does_not_count_a_checkpoint_that_started_before_it() -> None:  # E6
    machine = coordinator(STARTED, *begin(10), StopRequested(), reserved(11), *acked(10))
    assert machine.handle(written(10)) == [CancelTimer(ExpiryTimer(cp(10))), NotifyComplete(cp(10))]
    for event in acked(11):
        machine.handle(event)
    assert machine.handle(written(11))[-1] == ConcludeGeneration(cp(11), is_final=False)


def test_a_stop_before_the_start_ends_at_once() -> None:  # E6
    assert coordinator().handle(StopRequested()) == [ConcludeGeneration(None, is_final=False)]


def test_input_that_ends_during_a_stop_still_gets_its_final_checkpoint() -> None:  # E6
    machine = coordinator(STARTED, StopRequested(), reserved(10), finish(A))
    assert machine.handle(finish(B)) == [NO_MORE_PERIODIC, ReserveId(cp(11))]
    for event in (reserved(11), *acked(10)):
        machine.handle(event)
    assert not any(isinstance(e, ConcludeGeneration) for e in machine.handle(written(10)))
    for event in acked(11):
        machine.handle(event)
    assert machine.handle(written(11))[-1] == ConcludeGeneration(cp(11), is_final=True)


# -- listeners ------------------------------------------------------------------------------------------------------


def listening(worker: int, generation: int = 3) -> ListenerFound:
    return ListenerFound(gen(generation), WorkerIndex(worker))


def told(worker: int, checkpoint: int, generation: int = 3) -> CompletionReported:
    return CompletionReported(gen(generation), WorkerIndex(worker), cp(checkpoint))


@pytest.mark.parametrize("end", [FINISHED, (StopRequested(),)], ids=["finished", "stopped"])
def test_the_end_waits_until_listeners_have_heard_of_the_last_checkpoint(end: tuple[Event, ...]) -> None:  # HL7
    machine = coordinator(listening(0), listening(1), STARTED, *completed(10), told(0, 10), told(1, 10), *end)
    after(machine, reserved(11), *acked(11))
    is_final = end is FINISHED
    assert ConcludeGeneration(cp(11), is_final) not in machine.handle(written(11))
    assert machine.handle(told(1, 11)) == [Ignored("noted")]
    assert machine.handle(told(0, 10)) == [Ignored("noted")], "of an earlier one"
    assert machine.handle(told(0, 11, generation=2)) == [Ignored("of another generation")]
    assert machine.handle(told(0, 11)) == [ConcludeGeneration(cp(11), is_final)]
    assert machine.phase is Phase.DONE


def test_the_end_waits_for_commits_and_for_listeners_whichever_is_last() -> None:  # HL7, E4
    machine = coordinator(listening(0), STARTED, *FINISHED, reserved(10), *acked(10, committable(10)), written(10))
    assert machine.handle(told(0, 10)) == [Ignored("noted")]
    assert machine.handle(committed(10)) == [ConcludeGeneration(cp(10), is_final=True)]


def test_a_generation_without_listeners_does_not_wait() -> None:  # HL7
    machine = coordinator(STARTED, *FINISHED, reserved(10), *acked(10))
    assert ConcludeGeneration(cp(10), is_final=True) in machine.handle(written(10))


def test_every_checkpoint_that_began_ends_with_a_message_to_all() -> None:
    ends: dict[str, tuple[Event, ...]] = {
        "declined": (decline(10),),
        "expired": (expiry(10),),
        "not written": (*acked(10), ManifestFailed(cp(10))),
        "completed": (*acked(10), written(10)),
    }
    for name, events in ends.items():
        machine = coordinator(STARTED, *begin(10), tolerable_failures=9)
        effects = [effect for event in events for effect in machine.handle(event)]
        said = [e for e in effects if isinstance(e, NotifyAbort | NotifyComplete)]
        assert [e.checkpoint for e in said] == [cp(10)], name
    overlapping = coordinator(STARTED, *begin(10), max_concurrent=2)
    after(overlapping, INTERVAL, reserved(11), *acked(11))
    said = [e for e in overlapping.handle(written(11)) if isinstance(e, NotifyAbort | NotifyComplete)]
    assert said == [NotifyAbort(cp(10), AbortReason.SUBSUMED), NotifyComplete(cp(11))], "the older one ends before"
