"""A coordinator at work: what the coordinator's tests share."""

from __future__ import annotations

from tests.protocol.making import cp, file_part, gen, inline_part, sub

from headgate.model.config import CheckpointConfig
from headgate.model.ids import SubtaskId
from headgate.model.manifest import Committable, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    Acknowledged,
    ArmTimer,
    Declined,
    Effect,
    Event,
    ExpiryTimer,
    FinishReported,
    IdReserved,
    IntervalTimer,
    ManifestWritten,
    PauseTimer,
    Started,
    TimerFired,
    TriggerSources,
    WriteManifest,
)

A, B = sub("a"), sub("b")
GENERATION = gen(3)
INTERVAL, PAUSE = TimerFired(IntervalTimer()), TimerFired(PauseTimer())


def coordinator(
    *events: Event,
    retained: tuple[int, ...] = (),
    retained_count: int = 2,
    hooks: dict[str, int] | None = None,
    **config: int,
) -> Coordinator:
    """Return a coordinator of two subtasks, first checkpoint 10, that has handled ``events``."""
    settings = CheckpointConfig(retained=retained_count, **{"interval_ms": 1_000, "timeout_ms": 60_000, **config})
    made = Coordinator(GENERATION, (A, B), settings, cp(10), tuple(cp(c) for c in retained), hooks)
    return after(made, *events)


def after(machine: Coordinator, *events: Event) -> Coordinator:
    for event in events:
        machine.handle(event)
    return machine


STARTED = Started(300)


def reserved(checkpoint: int) -> IdReserved:
    return IdReserved(cp(checkpoint))


def handle_of(subtask: SubtaskId, checkpoint: int) -> tuple[SnapshotPart, ...]:
    return file_part(f"chk-{checkpoint}/{subtask}")


def ack(subtask: SubtaskId, checkpoint: int, *committables: Committable, generation: int = 3) -> Acknowledged:
    return Acknowledged(
        gen(generation), cp(checkpoint), SubtaskEntry(subtask, handle_of(subtask, checkpoint), committables)
    )


def inline_ack(subtask: SubtaskId, checkpoint: int, generation: int = 3) -> Acknowledged:
    return Acknowledged(gen(generation), cp(checkpoint), SubtaskEntry(subtask, inline_part()))


def decline(
    checkpoint: int,
    reason: AbortReason = AbortReason.OVERTAKEN,
    subtask: SubtaskId = A,
    generation: int = 3,
) -> Declined:
    return Declined(gen(generation), subtask, cp(checkpoint), reason)


def finish(subtask: SubtaskId, generation: int = 3) -> FinishReported:
    return FinishReported(gen(generation), subtask)


def expiry(checkpoint: int) -> TimerFired:
    return TimerFired(ExpiryTimer(cp(checkpoint)))


def written(checkpoint: int) -> ManifestWritten:
    return ManifestWritten(cp(checkpoint))


def begin(checkpoint: int) -> tuple[Event, ...]:
    """Events that make ``checkpoint`` pending when a periodic one is due."""
    return (INTERVAL, reserved(checkpoint))


def acked(checkpoint: int, *committables: Committable) -> tuple[Event, ...]:
    return (ack(A, checkpoint, *committables), ack(B, checkpoint))


def completed(checkpoint: int, *committables: Committable) -> tuple[Event, ...]:
    """Events from the trigger to the durable manifest."""
    return (*begin(checkpoint), *acked(checkpoint, *committables), written(checkpoint))


def triggered(checkpoint: int, timeout_ms: int = 60_000) -> list[Effect]:
    return [ArmTimer(ExpiryTimer(cp(checkpoint)), timeout_ms), TriggerSources(cp(checkpoint))]


def entry(subtask: SubtaskId, checkpoint: int, *committables: Committable) -> SubtaskEntry:
    return SubtaskEntry(subtask, handle_of(subtask, checkpoint), committables)


def manifest(
    checkpoint: int,
    *committables: Committable,
    carried: tuple[Committable, ...] = (),
    is_final: bool = False,
    is_draining: bool = False,
) -> WriteManifest:
    entries = (entry(A, checkpoint, *committables), entry(B, checkpoint))
    return WriteManifest(cp(checkpoint), entries, carried, is_final, is_draining)
