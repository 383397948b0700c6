"""Checkpoints on request: who is answered when, and with what.

Random lives of a coordinator that is asked for savepoints, against a naive model of what is visible (SV2, SV8).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tests.protocol.checkpoints.coordinating import (
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
    manifest,
    reserved,
    written,
)
from tests.protocol.checkpoints.test_coordinator_machine import CoordinatorMachine
from tests.protocol.making import committable, cp, file_part, sub

from headgate.model.config import Alignment, CheckpointKind, CheckpointOptions, Guarantee
from headgate.model.ids import SubtaskId
from headgate.model.manifest import Committable, Copied, SubtaskEntry
from headgate.protocol.checkpoints.commit import Commit
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    Acknowledged,
    AnnounceCheckpoint,
    AnswerRequest,
    ArmTimer,
    CheckpointRequested,
    CommitSucceeded,
    ConcludeGeneration,
    DrainRequested,
    DropSavepoint,
    Effect,
    Event,
    FailGeneration,
    PauseTimer,
    ReserveFailed,
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


def answers(machine: Coordinator, *events: Event) -> list[AnswerRequest]:
    return [e for event in events for e in machine.handle(event) if isinstance(e, AnswerRequest)]


# C60
def test_a_request_is_answered_when_its_checkpoint_is_completed() -> None:
    machine = coordinator(STARTED, min_pause_ms=700)
    assert machine.handle(CheckpointRequested(1)) == [ReserveId(cp(10))]
    assert answers(machine, reserved(10), *acked(10)) == []
    assert answers(machine, written(10)) == [AnswerRequest(1, cp(10))]
    assert answers(machine, PAUSE, *begin(11), *acked(11), written(11)) == [], "once"


# C60
def test_a_checkpoint_that_had_begun_before_serves_no_request() -> None:
    machine = coordinator(STARTED, *begin(10))
    assert answers(machine, CheckpointRequested(1), CheckpointRequested(2), *acked(10), written(10)) == []
    assert answers(machine, reserved(11), *acked(11), written(11)) == [
        AnswerRequest(1, cp(11)),
        AnswerRequest(2, cp(11)),
    ], "the next one serves both"


# C61
def test_a_newer_completion_answers_too() -> None:
    machine = coordinator(STARTED, max_concurrent=2)
    machine.handle(CheckpointRequested(1))
    assert answers(machine, reserved(10), *begin(11), *acked(11), written(11)) == [AnswerRequest(1, cp(11))]


# C61
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (expiry(10), AbortReason.EXPIRED),
        (decline(10, AbortReason.SNAPSHOT_FAILED), AbortReason.SNAPSHOT_FAILED),
        (decline(10), AbortReason.OVERTAKEN),
    ],
)
def test_a_request_is_answered_with_the_reason_of_a_failure(event: Event, reason: AbortReason) -> None:  # C61
    machine = coordinator(STARTED, CheckpointRequested(1), reserved(10), tolerable_failures=2)
    assert answers(machine, event) == [AnswerRequest(1, None, reason.text)]
    assert answers(machine, *begin(11), *acked(11), written(11)) == []


# C61
def test_a_request_whose_id_cannot_be_recorded_is_answered() -> None:
    machine = coordinator(STARTED, CheckpointRequested(1), tolerable_failures=2)
    assert answers(machine, ReserveFailed(cp(10))) == [AnswerRequest(1, None, AbortReason.RESERVE_FAILED.text)]


# C62
def test_requests_are_refused_outside_the_run() -> None:
    assert answers(coordinator(), CheckpointRequested(1)) == [AnswerRequest(1, None, "not every subtask runs yet")]
    (stopping,) = answers(coordinator(STARTED, StopRequested()), CheckpointRequested(1))
    assert stopping.reason == "the pipeline stops, and takes its last checkpoint"
    (ending,) = answers(coordinator(STARTED, finish(A), finish(B)), CheckpointRequested(1))
    assert ending.reason == "all input is processed, and the final checkpoint is being taken"


# C60
def test_a_request_that_waits_when_the_pipeline_is_stopped_gets_the_last_checkpoint() -> None:
    machine = coordinator(STARTED, *begin(10), CheckpointRequested(1))
    assert answers(machine, INTERVAL, StopRequested(), reserved(11), *acked(11)) == []
    assert answers(machine, written(11)) == [AnswerRequest(1, cp(11))]


# C60, C62
def test_a_request_made_while_an_id_is_recorded_is_served_by_that_checkpoint() -> None:
    machine = coordinator(STARTED, INTERVAL, CheckpointRequested(1), finish(A), finish(B))
    assert answers(machine, reserved(10), *acked(10)) == []
    assert answers(machine, written(10)) == [AnswerRequest(1, cp(10))], "though it turned out to be the final one"


class SavepointMachine(CoordinatorMachine):
    """The same surroundings, and a user who wants savepoints, some of them of the end."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered: dict[int, int] = {}
        """Savepoints that are not answered, and the newest checkpoint that had begun when they were asked for."""
        self.orders_count = 1_000
        self.carried: dict[int, str] = {}
        self.saving: list[WriteSavepoint] = []
        self.saved: set[str] = set()
        self.dropped: set[str] = set()
        self.is_healing = False

    def feed(self, event: Event) -> None:
        if isinstance(event, Acknowledged):
            event = replace(event, copied=Copied(problem="no space" if event.checkpoint % 7 == 0 else ""))
        super().feed(event)
        while self.is_healing and self.saving:
            self.saves(is_written=True)

    def follow(self, effect: Effect) -> None:
        match effect:
            case AnswerRequest() if effect.request > 1_000:
                newest_before = self.ordered.pop(effect.request)
                target = f"files-{effect.request}@/here"
                assert (effect.checkpoint is not None) == (target in self.saved)
                assert effect.checkpoint is None or effect.checkpoint > newest_before, "it began after it was asked for"
                return
            case TriggerSources() | AnnounceCheckpoint() if effect.options.target is not None:
                self.carried[effect.checkpoint] = effect.options.target
            case WriteSavepoint():
                assert self.carried[effect.checkpoint] == effect.target
                assert effect.checkpoint in self.completed
                assert effect.checkpoint % 7 != 0, "who could not write it has said so"
                covered = {c for c in self.promised if c.checkpoint <= effect.checkpoint}
                assert covered <= set(self.visible), "all output in front of it is visible (SV2)"
                assert effect.target not in self.dropped
                self.saving.append(effect)
                assert len(self.saving) <= 2, "one at a time, and that of the end"
                return
            case DropSavepoint():
                assert effect.target not in self.saved, "what is one is never removed (SV5)"
                self.dropped.add(effect.target)
                return
            case ConcludeGeneration():
                assert not self.ordered, "everybody who asked was answered"
                assert not self.saving
        super().follow(effect)

    @precondition(lambda self: self.done is None)
    @rule(ends=st.sampled_from([False, False, True]))
    def somebody_wants_a_savepoint(self, ends: bool) -> None:
        self.orders_count += 1
        order = SavepointOrder(self.orders_count, f"files-{self.orders_count}@/here")
        self.ordered[order.request] = max(self.triggered, default=0)
        self.feed(DrainRequested(order) if ends else SavepointRequested(order))

    @precondition(lambda self: self.saving)
    @rule(is_written=st.sampled_from([True, True, False]))
    def saves(self, is_written: bool) -> None:
        saving = self.saving.pop(0)
        if is_written:
            self.saved.add(saving.target)
            self.feed(SavepointWritten(saving.checkpoint))
        else:
            self.feed(SavepointFailed(saving.checkpoint, "no space"))

    @rule()
    def somebody_says_what_nobody_asked(self) -> None:
        self.feed(SavepointWritten(cp(9_999)))

    @invariant()
    def pending_is_what_was_triggered_and_has_not_ended(self) -> None:
        gone = self.aborted | set(self.completed)
        assert set(self.machine.pending) == self.triggered - gone
        forced = {c for c in self.machine.pending if c in self.carried}
        assert len(self.machine.pending) <= self.max_concurrent + 2
        assert len(forced) <= 2, "one at a time, and that of the end"

    def teardown(self) -> None:
        self.is_healing = True
        while self.saving:
            self.saves(is_written=True)
        super().teardown()


TestSavepointMachine = SavepointMachine.TestCase
pytest.mark.long(TestSavepointMachine)
TestSavepointMachine.settings = settings(max_examples=60, stateful_step_count=40)


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


def savepoint_answers(effects: list[Effect]) -> list[Effect]:
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
    assert savepoint_answers(machine.handle(SavepointWritten(cp(10)))) == [AnswerRequest(1, cp(10))]


def test_a_savepoint_waits_for_output_of_earlier_checkpoints_too() -> None:  # SV2
    machine = coordinator(STARTED, *completed(10, committable(10)), ASKED, reserved(11), *both(11))
    assert not of_kind(machine.handle(written(11)), WriteSavepoint)
    assert of_kind(machine.handle(CommitSucceeded(cp(10))), WriteSavepoint) == [write(11)]


def test_a_savepoint_waits_for_nothing() -> None:  # SV8: neither for the interval, nor for the pause, nor for others
    machine = coordinator(STARTED, *completed(10), min_pause_ms=700)
    assert savepoint_answers(machine.handle(ASKED)) == [ReserveId(cp(11))]
    machine = coordinator(STARTED, *begin(10))
    assert savepoint_answers(machine.handle(ASKED)) == [ReserveId(cp(11))], "one is under way, and no more are allowed"


def test_savepoints_are_taken_one_after_another() -> None:  # SV8
    machine = begun()
    assert savepoint_answers(machine.handle(SavepointRequested(SavepointOrder(2, THERE)))) == []
    after(machine, *both(10), written(10))
    effects = machine.handle(SavepointWritten(cp(10)))
    assert savepoint_answers(effects) == [AnswerRequest(1, cp(10)), ReserveId(cp(11))]
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
    assert savepoint_answers(effects) == [AnswerRequest(1, None, f"{B}: no space"), DropSavepoint(HERE)]
    machine = after(begun(), *both(10), written(10))
    effects = machine.handle(SavepointFailed(cp(10), "no space"))
    assert savepoint_answers(effects) == [AnswerRequest(1, None, "no space"), DropSavepoint(HERE)]


def test_a_subtask_that_says_nothing_about_a_savepoint_has_not_written_it() -> None:  # SV2
    machine = after(begun(), copied_ack(A, 10), ack(B, 10))
    assert not of_kind(machine.handle(written(10)), WriteSavepoint)


def test_an_aborted_checkpoint_takes_its_savepoint_with_it() -> None:  # SV7: as C61
    effects = begun().handle(decline(10))
    assert savepoint_answers(effects) == [AnswerRequest(1, None, AbortReason.OVERTAKEN.text), DropSavepoint(HERE)]


def test_an_expired_checkpoint_with_a_savepoint_does_not_count() -> None:  # SV7
    effects = begun().handle(expiry(10))
    assert not of_kind(effects, FailGeneration)
    assert savepoint_answers(effects) == [AnswerRequest(1, None, AbortReason.EXPIRED.text), DropSavepoint(HERE)]
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
    said = savepoint_answers(machine.handle(StopRequested()))
    assert said[0] == AnswerRequest(2, None, "the pipeline stops, and takes its last checkpoint")


# -- the end --------------------------------------------------------------------------------------------------------


def test_a_stop_with_a_savepoint_ends_when_it_is_written() -> None:  # SV10
    machine = coordinator(STARTED, StopRequested(SavepointOrder(1, HERE)))
    (trigger,) = of_kind(machine.handle(reserved(10)), TriggerSources)
    assert trigger == TriggerSources(cp(10), CheckpointOptions(CheckpointKind.SAVEPOINT, target=HERE))
    after(machine, *both(10))
    assert savepoint_answers(machine.handle(written(10))) == [write(10, is_end=True)], "it does not end yet"
    assert savepoint_answers(machine.handle(SavepointWritten(cp(10)))) == [
        AnswerRequest(1, cp(10)),
        ConcludeGeneration(cp(10), is_final=False),
    ]


def test_a_stop_ends_although_its_savepoint_cannot_be_written() -> None:  # SV10
    machine = coordinator(STARTED, StopRequested(SavepointOrder(1, HERE)), reserved(10), *both(10), written(10))
    assert savepoint_answers(machine.handle(SavepointFailed(cp(10), "no space"))) == [
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
    assert savepoint_answers(effects) == [AnswerRequest(1, None, AbortReason.EXPIRED.text), DropSavepoint(HERE)]
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
    assert savepoint_answers(machine.handle(SavepointWritten(cp(10)))) == [
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
    assert savepoint_answers(machine.handle(SavepointWritten(cp(10)))) == [
        AnswerRequest(1, cp(10)),
        ConcludeGeneration(cp(11), is_final=False),
    ]


def test_a_stranger_has_no_part() -> None:
    machine = after(begun(), replace(ack(sub("x"), 10), copied=part_of(A, 10)), *both(10))
    assert of_kind(machine.handle(written(10)), WriteSavepoint) == [write(10)]
