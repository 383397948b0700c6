"""When a savepoint is taken, and when it counts (docs/spec/savepoints.md)."""

from __future__ import annotations

from dataclasses import replace

from tests.protocol.checkpoints.coordinating import (
    INTERVAL,
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
    manifest,
    reserved,
    written,
)
from tests.protocol.making import committable, cp, file_part, sub

from headgate.model.config import Alignment, CheckpointKind, CheckpointOptions, Guarantee
from headgate.model.ids import SubtaskId
from headgate.model.manifest import Committable, Copied, SubtaskEntry
from headgate.protocol.checkpoints.commit import Commit
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    Acknowledged,
    AnswerRequest,
    ArmTimer,
    CommitSucceeded,
    ConcludeGeneration,
    DrainRequested,
    DropSavepoint,
    Effect,
    Event,
    FailGeneration,
    PauseTimer,
    ReserveId,
    SavepointFailed,
    SavepointOrder,
    SavepointRequested,
    SavepointWritten,
    StopRequested,
    TimerFired,
    TriggerSources,
    WriteSavepoint,
)
from headgate.protocol.machine import Ignored

HERE, THERE = "files-1@/here", "files-2@/there"
ASKED = SavepointRequested(SavepointOrder(1, HERE))


def part_of(subtask: SubtaskId, checkpoint: int) -> Copied:
    return Copied(file_part(f"chk-{checkpoint}/{subtask}-copy"))


def copied_ack(subtask: SubtaskId, checkpoint: int, *committables: Committable, problem: str = "") -> Acknowledged:
    copied = Copied(problem=problem) if problem else part_of(subtask, checkpoint)
    return replace(ack(subtask, checkpoint, *committables), copied=copied)


def both(checkpoint: int, *committables: Committable) -> tuple[Event, ...]:
    return (copied_ack(A, checkpoint, *committables), copied_ack(B, checkpoint))


def write(checkpoint: int, target: str = HERE, *, is_end: bool = False) -> WriteSavepoint:
    entries = tuple(SubtaskEntry(subtask, part_of(subtask, checkpoint).parts) for subtask in (A, B))
    return WriteSavepoint(cp(checkpoint), target, entries, is_end)


def of_kind(effects: list[Effect], *kinds: type[object]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kinds)]


def answers(effects: list[Effect]) -> list[Effect]:
    return of_kind(effects, AnswerRequest, DropSavepoint, ConcludeGeneration, WriteSavepoint, ReserveId)


def begun(*events: Event, target: str = HERE, **config: int) -> Coordinator:
    """A coordinator whose checkpoint 10 carries a savepoint."""
    machine = coordinator(STARTED, ASKED, *events, **config)
    (trigger,) = of_kind(machine.handle(reserved(10)), TriggerSources)
    assert trigger == TriggerSources(cp(10), CheckpointOptions(CheckpointKind.SAVEPOINT, target=target))
    return machine


def test_a_savepoint_is_written_when_its_output_is_committed() -> None:  # SV2
    machine = begun()
    out = committable(10)
    after(machine, *both(10, out))
    effects = machine.handle(written(10))
    assert of_kind(effects, Commit)
    assert not of_kind(effects, WriteSavepoint), "its output is not visible yet"
    assert of_kind(machine.handle(CommitSucceeded(cp(10))), WriteSavepoint) == [write(10)]
    assert answers(machine.handle(SavepointWritten(cp(10)))) == [AnswerRequest(1, cp(10))]


def test_a_savepoint_waits_for_output_of_earlier_checkpoints_too() -> None:  # SV2
    machine = coordinator(STARTED, *completed(10, committable(10)), ASKED, reserved(11), *both(11))
    assert not of_kind(machine.handle(written(11)), WriteSavepoint)
    assert of_kind(machine.handle(CommitSucceeded(cp(10))), WriteSavepoint) == [write(11)]


def test_a_savepoint_waits_for_nothing() -> None:  # SV8: neither for the interval, nor for the pause, nor for others
    machine = coordinator(STARTED, *completed(10), min_pause_ms=700)
    assert answers(machine.handle(ASKED)) == [ReserveId(cp(11))]
    machine = coordinator(STARTED, *begin(10))
    assert answers(machine.handle(ASKED)) == [ReserveId(cp(11))], "one is under way, and no more are allowed"


def test_savepoints_are_taken_one_after_another() -> None:  # SV8
    machine = begun()
    assert answers(machine.handle(SavepointRequested(SavepointOrder(2, THERE)))) == []
    after(machine, *both(10), written(10))
    effects = machine.handle(SavepointWritten(cp(10)))
    assert answers(effects) == [AnswerRequest(1, cp(10)), ReserveId(cp(11))]
    (trigger,) = of_kind(machine.handle(reserved(11)), TriggerSources)
    assert trigger == TriggerSources(cp(11), CheckpointOptions(CheckpointKind.SAVEPOINT, target=THERE))


def test_a_checkpoint_with_a_savepoint_is_not_subsumed() -> None:  # SV8: while another manifest is written, both fill
    machine = coordinator(STARTED, *begin(10), max_concurrent=3)
    after(machine, *acked(10), ASKED, reserved(11), INTERVAL, reserved(12))
    after(machine, *both(11), *acked(12))
    assert manifest(11) in machine.handle(written(10)), "the newer one comes after it"
    assert manifest(12) in machine.handle(written(11))


def test_a_savepoint_that_cannot_be_written_fails_alone() -> None:  # SV7
    machine = begun()
    after(machine, copied_ack(A, 10), copied_ack(B, 10, problem="no space"))
    effects = machine.handle(written(10))
    assert machine.last_completed == 10
    assert answers(effects) == [AnswerRequest(1, None, f"{B}: no space"), DropSavepoint(HERE)]
    machine = after(begun(), *both(10), written(10))
    effects = machine.handle(SavepointFailed(cp(10), "no space"))
    assert answers(effects) == [AnswerRequest(1, None, "no space"), DropSavepoint(HERE)]


def test_a_subtask_that_says_nothing_about_a_savepoint_has_not_written_it() -> None:  # SV2
    machine = after(begun(), copied_ack(A, 10), ack(B, 10))
    assert not of_kind(machine.handle(written(10)), WriteSavepoint)


def test_an_aborted_checkpoint_takes_its_savepoint_with_it() -> None:  # SV7: as C61
    effects = begun().handle(decline(10))
    assert answers(effects) == [AnswerRequest(1, None, AbortReason.OVERTAKEN.text), DropSavepoint(HERE)]


def test_an_expired_checkpoint_with_a_savepoint_does_not_count() -> None:  # SV7
    effects = begun().handle(expiry(10))
    assert not of_kind(effects, FailGeneration)
    assert answers(effects) == [AnswerRequest(1, None, AbortReason.EXPIRED.text), DropSavepoint(HERE)]
    assert of_kind(coordinator(STARTED, *begin(10)).handle(expiry(10)), FailGeneration)


def test_barriers_of_a_savepoint_are_those_of_the_mode() -> None:  # SV9
    machine = coordinator(STARTED, ASKED, mode=Guarantee.AT_LEAST_ONCE)  # type: ignore[arg-type]
    (trigger,) = of_kind(machine.handle(reserved(10)), TriggerSources)
    assert trigger == TriggerSources(cp(10), CheckpointOptions(CheckpointKind.SAVEPOINT, Alignment.TRACKED, HERE))


def test_a_savepoint_outside_the_run_is_refused() -> None:  # SV8: as C62
    for events in ((), (STARTED, finish(A), finish(B))):
        effects = coordinator(*events).handle(ASKED)
        assert effects[1:] == [DropSavepoint(HERE)]
        assert isinstance(effects[0], AnswerRequest)
        assert effects[0].checkpoint is None


def test_a_savepoint_that_waits_when_the_end_begins_is_refused() -> None:
    machine = begun()
    machine.handle(SavepointRequested(SavepointOrder(2, THERE)))
    said = answers(machine.handle(StopRequested()))
    assert said[0] == AnswerRequest(2, None, "the pipeline stops, and takes its last checkpoint")


# -- the end --------------------------------------------------------------------------------------------------------


def test_a_stop_with_a_savepoint_ends_when_it_is_written() -> None:  # SV10
    machine = coordinator(STARTED, StopRequested(SavepointOrder(1, HERE)))
    (trigger,) = of_kind(machine.handle(reserved(10)), TriggerSources)
    assert trigger == TriggerSources(cp(10), CheckpointOptions(CheckpointKind.SAVEPOINT, target=HERE))
    after(machine, *both(10))
    assert answers(machine.handle(written(10))) == [write(10, is_end=True)], "it does not end yet"
    assert answers(machine.handle(SavepointWritten(cp(10)))) == [
        AnswerRequest(1, cp(10)),
        ConcludeGeneration(cp(10), is_final=False),
    ]


def test_a_stop_ends_although_its_savepoint_cannot_be_written() -> None:  # SV10
    machine = coordinator(STARTED, StopRequested(SavepointOrder(1, HERE)), reserved(10), *both(10), written(10))
    assert answers(machine.handle(SavepointFailed(cp(10), "no space"))) == [
        AnswerRequest(1, None, "no space"),
        DropSavepoint(HERE),
        ConcludeGeneration(cp(10), is_final=False),
    ]


def test_a_last_checkpoint_that_is_tried_again_carries_the_savepoint_again() -> None:  # SV10, E5
    machine = coordinator(STARTED, StopRequested(SavepointOrder(1, HERE)), reserved(10), tolerable_failures=1)
    effects = machine.handle(decline(10, AbortReason.SNAPSHOT_FAILED))
    assert not of_kind(effects, AnswerRequest, DropSavepoint)
    assert of_kind(effects, ArmTimer)
    after(machine, TimerFired(PauseTimer()))
    (trigger,) = of_kind(machine.handle(reserved(11)), TriggerSources)
    assert isinstance(trigger, TriggerSources)
    assert trigger.options.target == HERE


def test_a_stop_does_not_wait_for_ever_for_a_place_that_is_too_slow() -> None:  # SV10, SV7
    machine = coordinator(STARTED, StopRequested(SavepointOrder(1, HERE)), reserved(10))
    effects = machine.handle(expiry(10))
    assert answers(effects) == [AnswerRequest(1, None, AbortReason.EXPIRED.text), DropSavepoint(HERE)]
    after(machine, TimerFired(PauseTimer()), reserved(11), *acked(11))
    assert ConcludeGeneration(cp(11), is_final=False) in machine.handle(written(11))


def test_the_savepoint_of_a_stop_goes_with_the_checkpoint_that_is_the_last() -> None:  # SV10: the input ends meanwhile
    machine = coordinator(STARTED, StopRequested(SavepointOrder(1, HERE)), reserved(10), finish(A), finish(B))
    after(machine, reserved(11), *both(10))
    assert not of_kind(machine.handle(written(10)), WriteSavepoint), "more is committed behind it"
    after(machine, *both(11))
    assert of_kind(machine.handle(written(11)), WriteSavepoint) == [write(11, is_end=True)]
    assert ConcludeGeneration(cp(11), is_final=True) in machine.handle(SavepointWritten(cp(11)))


def test_nothing_follows_the_checkpoint_that_the_savepoint_of_a_stop_is_of() -> None:  # SV10: the input ends behind it
    out = committable(10)
    machine = coordinator(STARTED, StopRequested(SavepointOrder(1, HERE)), reserved(10), *both(10, out), written(10))
    after(machine, finish(A))
    assert machine.handle(finish(B)) == [Ignored("the run ends with the checkpoint that its savepoint is of")]
    assert of_kind(machine.handle(CommitSucceeded(cp(10))), WriteSavepoint) == [write(10, is_end=True)]
    assert answers(machine.handle(SavepointWritten(cp(10)))) == [
        AnswerRequest(1, cp(10)),
        ConcludeGeneration(cp(10), is_final=False),
    ]


def test_a_drain_with_a_savepoint_carries_it_with_the_final_checkpoint() -> None:  # SV10
    machine = coordinator(STARTED, *begin(10), DrainRequested(SavepointOrder(1, HERE)))
    after(machine, *acked(10))
    assert not of_kind(machine.handle(written(10)), WriteSavepoint)
    after(machine, finish(A), finish(B), reserved(11), *both(11))
    assert of_kind(machine.handle(written(11)), WriteSavepoint) == [write(11, is_end=True)]


def test_an_end_has_one_savepoint() -> None:  # SV10
    machine = coordinator(STARTED, DrainRequested(SavepointOrder(1, HERE)))
    effects = machine.handle(DrainRequested(SavepointOrder(2, THERE)))
    assert effects == [AnswerRequest(2, None, "the end of the pipeline has a savepoint already")]
    effects = coordinator(STARTED, StopRequested()).handle(StopRequested(SavepointOrder(2, THERE)))
    assert effects[1:] == [DropSavepoint(THERE)]


def test_a_savepoint_under_way_is_finished_before_the_end() -> None:  # SV8
    machine = begun()
    after(machine, StopRequested(), reserved(11), *both(10), *acked(11), written(10))
    assert not of_kind(machine.handle(written(11)), ConcludeGeneration)
    assert answers(machine.handle(SavepointWritten(cp(10)))) == [
        AnswerRequest(1, cp(10)),
        ConcludeGeneration(cp(11), is_final=False),
    ]


def test_a_stranger_has_no_part() -> None:
    machine = after(begun(), replace(ack(sub("x"), 10), copied=part_of(A, 10)), *both(10))
    assert of_kind(machine.handle(written(10)), WriteSavepoint) == [write(10)]
