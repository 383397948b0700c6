"""Hooks of the coordinator: when they are called, and what their answers do (EI1–EI7)."""

from __future__ import annotations

from typing import Any

from tests.protocol.checkpoints.coordinating import (
    GENERATION,
    STARTED,
    A,
    B,
    ack,
    after,
    begin,
    entry,
    expiry,
    reserved,
    written,
)
from tests.protocol.making import cp

from headgate.model.config import CheckpointConfig, CheckpointOptions, Guarantee
from headgate.model.manifest import HookState
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    AnnounceCheckpoint,
    AnswerRequest,
    ArmTimer,
    CallHook,
    CancelTimer,
    CheckpointRequested,
    Event,
    ExpiryTimer,
    FailGeneration,
    HookAnswered,
    HookFailed,
    HookTimer,
    NotifyAbort,
    ReserveId,
    StopRequested,
    TimerFired,
    TriggerSources,
    WriteManifest,
)
from headgate.protocol.machine import Ignored

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
