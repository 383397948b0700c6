"""Commits, the final checkpoint and a requested stop (docs/spec/final-checkpoint.md, two-phase-commit.md).

Hooks of the coordinator: when they are called, and what their answers do (EI1–EI7).

How long a checkpoint waits for sources that read towards its marker (EI34–EI37).

The pipeline: two sources that set their own barriers, an ordinary one, and an operator behind all of them.
"""

from __future__ import annotations

from typing import Any

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
    entry,
    expiry,
    finish,
    manifest,
    reserved,
    triggered,
    written,
)
from tests.protocol.making import committable, cp, gen, sub

from headgate.model.config import CheckpointConfig, CheckpointOptions, Guarantee
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import SubtaskId, WorkerIndex
from headgate.model.manifest import HookState
from headgate.protocol.checkpoints.commit import Commit, CommitPermit
from headgate.protocol.checkpoints.completion import TIMEOUTS_MAX
from headgate.protocol.checkpoints.coordinator import Coordinator, Phase
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    AnnounceCheckpoint,
    AnswerRequest,
    ArmTimer,
    CallHook,
    CancelTimer,
    CheckpointRequested,
    CommitFailed,
    CommitRetryTimer,
    CommitSucceeded,
    CompletionReported,
    ConcludeGeneration,
    Effect,
    Event,
    ExpiryTimer,
    FailGeneration,
    HookAnswered,
    HookFailed,
    HookTimer,
    IntervalTimer,
    ListenerFound,
    ManifestFailed,
    NotifyAbort,
    NotifyComplete,
    PauseTimer,
    ReserveFailed,
    ReserveId,
    SavepointOrder,
    SavepointRequested,
    SourceReadsOn,
    StopRequested,
    TimerFired,
    TriggerSources,
    WriteManifest,
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


X, Y = "x", "y"


def hooked(*events: Event, **config: Any) -> Coordinator:
    """Return a coordinator of two subtasks and two hooks, first checkpoint 10, that has handled ``events``."""
    settings = CheckpointConfig(**{"interval_ms": 1_000, "timeout_ms": 60_000, **config})
    return after(Coordinator(GENERATION, (A, B), settings, cp(10), (), {X: 500, Y: 700}), *events)


def answered(hook: str, checkpoint: int = 10, data: bytes | None = b"data") -> HookAnswered:
    return HookAnswered(cp(checkpoint), hook, data)


def late(hook: str, checkpoint: int = 10) -> TimerFired:
    return TimerFired(HookTimer(cp(checkpoint), hook))


def test_hooks_are_called_behind_the_announcement_and_before_any_source_is_triggered() -> None:  # EI1
    machine = hooked(STARTED)
    assert machine.handle(begin(10)[0])[-1] == ReserveId(cp(10))
    assert machine.handle(reserved(10)) == [
        ArmTimer(ExpiryTimer(cp(10)), 60_000),
        AnnounceCheckpoint(cp(10)),
        ArmTimer(HookTimer(cp(10), X), 500),
        CallHook(cp(10), X),
        ArmTimer(HookTimer(cp(10), Y), 700),
        CallHook(cp(10), Y),
    ]
    assert machine.handle(answered(Y)) == [CancelTimer(HookTimer(cp(10), Y))]
    assert machine.awaited_hooks(cp(10)) == (X,)
    assert machine.handle(answered(X)) == [CancelTimer(HookTimer(cp(10), X)), TriggerSources(cp(10))]


def test_what_hooks_return_is_in_the_manifest() -> None:  # EI4
    machine = hooked(STARTED, *begin(10), answered(X, data=b"at 7"), answered(Y, data=None), ack(A, 10))
    assert machine.handle(ack(B, 10)) == [
        WriteManifest(
            cp(10),
            (entry(A, 10), entry(B, 10)),
            (),
            is_final=False,
            hooks=(HookState(X, b"at 7"), HookState(Y, None)),
        )
    ]


def test_a_checkpoint_that_everybody_acknowledged_completes_with_the_last_answer() -> None:  # EI7
    machine = hooked(STARTED, *begin(10), answered(X), ack(A, 10))
    assert machine.handle(ack(B, 10)) == [Ignored("other participants are missing")]
    effects = machine.handle(answered(Y))
    assert effects[0] == CancelTimer(HookTimer(cp(10), Y))
    assert [type(effect) for effect in effects[1:]] == [WriteManifest]


def test_a_hook_that_fails_or_is_late_aborts_the_checkpoint_and_that_counts() -> None:  # EI5
    for event, reason in ((HookFailed(cp(10), X), AbortReason.HOOK_FAILED), (late(X), AbortReason.HOOK_TIMED_OUT)):
        machine = hooked(STARTED, *begin(10), tolerable_failures=1)
        assert machine.handle(event) == [
            CancelTimer(ExpiryTimer(cp(10))),
            CancelTimer(HookTimer(cp(10), X)),
            CancelTimer(HookTimer(cp(10), Y)),
            NotifyAbort(cp(10), reason),
            Ignored("no checkpoint can begin now"),
        ]
        assert reason.counts_as_failure
        again = after(machine, *begin(11)).handle(HookFailed(cp(11), Y))
        assert any(isinstance(effect, FailGeneration) for effect in again), "more failures than tolerable"


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    machine = hooked(STARTED, *begin(10), answered(X), answered(Y), tolerable_failures=5)
    for event in (answered(X), HookFailed(cp(10), X), late(X)):
        assert [type(effect) for effect in machine.handle(event)] == [Ignored]
    assert machine.pending == (10,)
    machine.handle(expiry(10))
    for event in (answered(X), HookFailed(cp(10), X), late(X), answered(X, 99)):
        assert [type(effect) for effect in machine.handle(event)] == [Ignored]


def test_a_checkpoint_whose_hook_is_awaited_may_expire_or_be_subsumed() -> None:
    machine = hooked(STARTED, *begin(10), *begin(11), max_concurrent=2)
    ended = after(machine, answered(X, 11), answered(Y, 11), ack(A, 11), ack(B, 11)).handle(written(11))
    assert NotifyAbort(cp(10), AbortReason.SUBSUMED) in ended
    assert CancelTimer(HookTimer(cp(10), X)) in ended
    assert machine.pending == ()


def test_what_a_checkpoint_is_to_be_does_not_change_while_its_hooks_are_awaited() -> None:  # EI1
    machine = hooked(STARTED, *begin(10), StopRequested(), mode=Guarantee.AT_MOST_ONCE)
    effects = after(machine, answered(X)).handle(answered(Y))
    assert effects[-1] == TriggerSources(cp(10), CheckpointOptions(is_last=False))
    last = machine.handle(reserved(11))
    assert last[1] == AnnounceCheckpoint(cp(11), CheckpointOptions(is_last=True))


def test_who_asked_for_a_checkpoint_hears_that_a_hook_failed() -> None:
    machine = hooked(STARTED, CheckpointRequested(1), reserved(10), tolerable_failures=3)
    assert AnswerRequest(1, None, AbortReason.HOOK_FAILED.text) in machine.handle(HookFailed(cp(10), Y))


def test_without_hooks_sources_are_triggered_at_once() -> None:
    machine = after(Coordinator(GENERATION, (A, B), CheckpointConfig(), cp(10)), STARTED, begin(10)[0])
    assert machine.handle(reserved(10))[-1] == TriggerSources(cp(10))


TAPE, OTHER_TAPE, ORDINARY, JOINED = sub("tape"), sub("other-tape"), sub("ordinary"), sub("joined")
BEHIND = {source.vertex: frozenset({JOINED.vertex}) for source in (TAPE, OTHER_TAPE, ORDINARY)}
AHEAD = AbortReason.MARKER_AHEAD


def marked(*events: Event, hooks: dict[str, int] | None = None, **config: Any) -> Coordinator:
    """Return a started coordinator of the pipeline above, first checkpoint 10, that has handled ``events``."""
    settings = CheckpointConfig(**{"interval_ms": 1_000, "timeout_ms": 60_000, **config})
    participants = (TAPE, OTHER_TAPE, ORDINARY, JOINED)
    return after(Coordinator(GENERATION, participants, settings, cp(10), (), hooks, BEHIND), STARTED, *events)


def reads(*uncut: int, source: SubtaskId = TAPE, generation: int = 3) -> SourceReadsOn:
    return SourceReadsOn(gen(generation), source, tuple(cp(checkpoint) for checkpoint in uncut))


def waits_on(checkpoint: int) -> list[Effect]:
    return [ArmTimer(ExpiryTimer(cp(checkpoint)), 60_000)]


def aborted(effects: list[Effect]) -> list[AbortReason]:
    return [effect.reason for effect in effects if isinstance(effect, NotifyAbort)]


def fails(effects: list[Effect]) -> bool:
    return any(isinstance(effect, FailGeneration) for effect in effects)


def all_but_one(checkpoint: int) -> tuple[Event, ...]:
    """The first tape's cut is missing, and what is behind it."""
    return (*begin(checkpoint), ack(ORDINARY, checkpoint), ack(OTHER_TAPE, checkpoint))


def expired(machine: Coordinator, checkpoint: int, *, reports: int = TIMEOUTS_MAX) -> tuple[list[AbortReason], int]:
    """Let timeouts of ``checkpoint`` pass while its source reads on; return how it ended, and behind how many."""
    for timeouts in range(1, reports + 1):
        machine.handle(reads(checkpoint))
        effects = machine.handle(expiry(checkpoint))
        if effects != waits_on(checkpoint):
            assert fails(effects) == (AbortReason.MARKER_NOT_MET in aborted(effects))
            return aborted(effects), timeouts
    return [], reports


# -- before the cut ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_whose_sources_read_towards_its_marker_is_no_failure() -> None:  # EI36
    machine = marked(*all_but_one(10), reads(10))
    effects = machine.handle(expiry(10))
    assert aborted(effects) == [AHEAD]
    assert not fails(effects), "none is tolerable, and this is none"
    for checkpoint in range(11, 15):
        after(machine, *all_but_one(checkpoint))
        assert expired(machine, checkpoint)[0] == [AHEAD]


def test_each_checkpoint_that_did_not_wait_long_enough_gives_the_next_one_twice_the_time() -> None:  # EI37
    machine = marked()
    waited = []
    for checkpoint in range(10, 16):
        after(machine, *all_but_one(checkpoint))
        waited.append(expired(machine, checkpoint))
    assert waited == [([AHEAD], timeouts) for timeouts in (1, 2, 4, 8, 16, 32)]
    after(machine, *all_but_one(16))
    assert expired(machine, 16) == ([AbortReason.MARKER_NOT_MET], TIMEOUTS_MAX)
    assert AbortReason.MARKER_NOT_MET.counts_as_failure
    assert not AHEAD.counts_as_failure


def test_a_marker_that_is_never_met_counts_again_and_again() -> None:  # EI37
    machine = marked(tolerable_failures=1)
    for checkpoint in range(10, 16):
        after(machine, *all_but_one(checkpoint))
        expired(machine, checkpoint)
    for checkpoint, failed in ((16, False), (17, True)):
        after(machine, *all_but_one(checkpoint))
        for _ in range(TIMEOUTS_MAX):
            machine.handle(reads(checkpoint))
            effects = machine.handle(expiry(checkpoint))
        assert (aborted(effects), fails(effects)) == ([AbortReason.MARKER_NOT_MET], failed)


def test_a_completion_leaves_the_next_checkpoint_the_time_that_it_took() -> None:  # EI37
    machine = marked()
    for checkpoint in (10, 11):
        after(machine, *all_but_one(checkpoint))
        expired(machine, checkpoint)
    after(machine, *all_but_one(12))
    assert expired(machine, 12, reports=2) == ([], 2), "it has four"
    after(machine, reads(), ack(TAPE, 12), ack(JOINED, 12), written(12))
    after(machine, *all_but_one(13))
    assert expired(machine, 13) == ([AHEAD], 3), "the first of them it was given, two it was left"
    after(machine, *begin(14), *(ack(s, 14) for s in (TAPE, OTHER_TAPE, ORDINARY, JOINED)), written(14))
    after(machine, *all_but_one(15))
    assert expired(machine, 15) == ([AHEAD], 1), "a marker that is lost later costs one timeout"


def test_a_source_that_stands_still_counts() -> None:  # EI27, EI36
    machine = marked(*all_but_one(10))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED], "it never came forward"
    machine = marked(*all_but_one(10), reads(10), expiry(10), tolerable_failures=1)
    after(machine, *all_but_one(11), reads(11))
    assert machine.handle(expiry(11)) == waits_on(11)
    assert aborted(machine.handle(expiry(11))) == [AbortReason.EXPIRED], "it has come forward, but not since"


def test_every_source_that_is_not_cut_must_come_forward() -> None:  # EI36
    first = (*begin(10), ack(ORDINARY, 10))
    both = marked(*first, reads(10), reads(10, source=OTHER_TAPE))
    assert aborted(both.handle(expiry(10))) == [AHEAD]
    one = marked(*first, reads(10))
    assert aborted(one.handle(expiry(10))) == [AbortReason.EXPIRED], "the other never said that it reads"
    machine = marked(*all_but_one(10), reads(10), expiry(10), tolerable_failures=1)
    after(machine, *begin(11), ack(ORDINARY, 11), reads(11), reads(11, source=OTHER_TAPE), expiry(11))
    assert machine.pending == (11,)
    after(machine, reads(11))
    assert aborted(machine.handle(expiry(11))) == [AbortReason.EXPIRED], "one of them stands still"


def test_whoever_is_not_behind_such_a_source_counts() -> None:  # EI36
    machine = marked(*begin(10), ack(OTHER_TAPE, 10), reads(10))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED], "an ordinary source is stuck"


def test_a_hook_that_is_awaited_counts() -> None:  # EI5, EI36
    machine = marked(*all_but_one(10), reads(10), hooks={"x": 99_000, "y": 99_000}, tolerable_failures=1)
    after(machine, HookAnswered(cp(10), "x", None))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED]
    after(machine, *all_but_one(11), reads(11), HookAnswered(cp(11), "x", None), HookAnswered(cp(11), "y", None))
    assert aborted(machine.handle(expiry(11))) == [AHEAD]


def test_a_checkpoint_waits_for_a_hook_with_a_timeout_of_a_year() -> None:  # EI8
    year = 365 * 86_400_000
    machine = marked(*begin(10), hooks={"x": year})
    assert machine.handle(expiry(10)) == waits_on(10)
    found = machine.handle(HookAnswered(cp(10), "x", None))
    assert waits_on(10)[0] in found, "its timeout begins with the answer"
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED]


# -- behind the cut ---------------------------------------------------------------------------------------------------


def test_the_timeout_begins_when_the_last_source_has_been_cut() -> None:  # EI35
    machine = marked(*begin(10), reads(10), reads(10, source=OTHER_TAPE))
    assert machine.handle(reads()) == [Ignored("noted")], "the other one reads"
    assert machine.handle(reads(source=OTHER_TAPE)) == waits_on(10)
    assert machine.handle(reads(source=OTHER_TAPE)) == [Ignored("noted")], "once"
    after(machine, ack(TAPE, 10), ack(OTHER_TAPE, 10), ack(ORDINARY, 10))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED], "all are cut, so it is no marker that is late"


def test_a_source_that_is_cut_and_does_not_write_its_snapshot_counts() -> None:  # EI35, EI36
    machine = marked(*all_but_one(10), reads(10), reads(), reads(11))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED], "however much it reads"


def test_markers_that_nobody_waits_for_change_nothing() -> None:  # EI34
    machine = marked(*all_but_one(10), reads(10, generation=2), reads(10, source=sub("stranger")))
    assert aborted(machine.handle(expiry(10))) == [AbortReason.EXPIRED]
    machine = marked(*all_but_one(10), reads(10), ack(TAPE, 10))
    assert [type(e) for e in machine.handle(ack(JOINED, 10))] == [WriteManifest]
    assert machine.handle(expiry(10)) == [Ignored("the checkpoint has ended, or its manifest is being written")]
    after(machine, written(10))
    assert machine.handle(reads(10)) == [Ignored("noted")]
    assert machine.pending == ()


# -- meanwhile --------------------------------------------------------------------------------------------------------


def test_checkpoints_that_overlap_wait_for_themselves() -> None:  # EI28, EI37
    machine = marked(*all_but_one(10), *all_but_one(11), max_concurrent=2)
    machine.handle(reads(10, 11))
    assert aborted(machine.handle(expiry(10))) == [AHEAD]
    machine.handle(reads(11))
    assert aborted(machine.handle(expiry(11))) == [AHEAD]
    after(machine, *all_but_one(12))
    assert expired(machine, 12) == ([AHEAD], 2), "both had one timeout, so it has two"


def test_a_newer_checkpoint_whose_marker_is_met_ends_the_wait() -> None:  # EI24, C15
    machine = marked(*all_but_one(10), *all_but_one(11), reads(10, 11), max_concurrent=2)
    assert machine.handle(reads(10)) == waits_on(11)
    after(machine, ack(TAPE, 11), ack(JOINED, 11))
    assert aborted(machine.handle(written(11))) == [AbortReason.SUBSUMED]


def test_a_stop_waits_for_its_marker_as_any_checkpoint_does() -> None:  # EI26, EI36, EI37
    machine = marked(*all_but_one(10), reads(10))
    assert ReserveId(cp(11)) in machine.handle(StopRequested())
    after(machine, reserved(11), ack(ORDINARY, 11), ack(OTHER_TAPE, 11), reads(10, 11))
    effects = machine.handle(expiry(11))
    assert aborted(effects) == [AHEAD]
    assert ArmTimer(PauseTimer(), 200) in effects, "the last one is wanted until it is there"
    after(machine, TimerFired(PauseTimer()), reserved(12), ack(ORDINARY, 12), ack(OTHER_TAPE, 12), reads(10, 12))
    assert machine.handle(expiry(12)) == waits_on(12)


def test_the_savepoint_of_a_stop_goes_with_the_next_last_checkpoint() -> None:  # SV10, EI36
    machine = marked(StopRequested(SavepointOrder(1, "there")), reserved(10), ack(ORDINARY, 10))
    after(machine, ack(OTHER_TAPE, 10), reads(10))
    effects = machine.handle(expiry(10))
    assert aborted(effects) == [AHEAD]
    assert not any(isinstance(effect, AnswerRequest) for effect in effects), "it is not the savepoint that is slow"
    after(machine, TimerFired(PauseTimer()))
    assert machine.handle(reserved(11))[-1].options.target == "there"  # type: ignore[union-attr]


def test_whoever_asked_hears_that_a_source_still_reads() -> None:  # C61, SV7, EI36
    machine = marked(CheckpointRequested(1), reserved(10), ack(ORDINARY, 10), ack(OTHER_TAPE, 10), reads(10))
    assert AnswerRequest(1, None, AHEAD.text) in machine.handle(expiry(10))
    after(machine, SavepointRequested(SavepointOrder(2, "there")), reserved(11), ack(ORDINARY, 11))
    after(machine, ack(OTHER_TAPE, 11), reads(11))
    assert machine.handle(expiry(11)) == waits_on(11)
    after(machine, reads(11))
    assert AnswerRequest(2, None, AHEAD.text) in machine.handle(expiry(11))


def test_a_new_generation_begins_with_one_timeout() -> None:  # EI37
    """Whether or not the driver is the same: what sources had read is read again."""
    machine = marked()
    for checkpoint in (10, 11):
        after(machine, *all_but_one(checkpoint))
        expired(machine, checkpoint)
    again = marked(*all_but_one(10))
    assert expired(again, 10) == ([AHEAD], 1)
