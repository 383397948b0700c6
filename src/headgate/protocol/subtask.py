"""One subtask's part in checkpoints and in the end of input (rules T1–T9 of docs/spec/subtask.md).

Composes the ``Aligner`` with the snapshot's asynchronous part, the precommitted output of its sinks, and the final
checkpoint. Counterparts: the ``Coordinator`` and the subtasks of the neighbouring vertices. It never touches
records: the interpreter runs operators and hands over opaque state handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.model.manifest import Committable, StateHandle
from headgate.protocol import align
from headgate.protocol.align import (
    Aligner,
    BlockChannel,
    Decline,
    EmitBarrier,
    EmitCancel,
    TakeSnapshot,
    UnblockChannels,
)
from headgate.protocol.commit import Precommit
from headgate.protocol.machine import Ignored, Machine
from headgate.protocol.reasons import AbortReason


@dataclass(frozen=True, slots=True)
class TriggerReceived:
    """EVENT (source subtasks): the coordinator asks for ``checkpoint``; the barrier goes out at this position."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """EVENT: the barrier of ``checkpoint`` reached the head of input ``channel``."""

    channel: ChannelIndex
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """EVENT: the cancel marker of ``checkpoint`` reached the head of input ``channel``."""

    channel: ChannelIndex
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class EndReceived:
    """EVENT: the end of data reached the head of input ``channel``. Barriers may still follow on it (T6)."""

    channel: ChannelIndex


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """EVENT (source subtasks): the reader has delivered all its bounded input."""


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """EVENT: the asynchronous part of ``checkpoint`` is durable.

    ``committables``: prepared by this write, in checkpoint order; it includes what an earlier, failed or cancelled
    write left unprepared.
    """

    checkpoint: CheckpointId
    handle: StateHandle
    committables: tuple[Committable, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """EVENT: the asynchronous part of ``checkpoint`` failed for good."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class AbortReceived:
    """EVENT: the coordinator aborted ``checkpoint``."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class CompleteReceived:
    """EVENT: the coordinator completed ``checkpoint``."""

    checkpoint: CheckpointId


Event: TypeAlias = (
    TriggerReceived
    | BarrierReceived
    | CancelReceived
    | EndReceived
    | SourceEnded
    | SnapshotWritten
    | SnapshotFailed
    | AbortReceived
    | CompleteReceived
)


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """EFFECT: tell the coordinator that this subtask's part of ``checkpoint`` is durable."""

    checkpoint: CheckpointId
    handle: StateHandle
    committables: tuple[Committable, ...]


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """EFFECT: stop the asynchronous part of ``checkpoint`` if it still runs; its sealed output stays sealed (C43)."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class FinishOperators:
    """EFFECT: pass the last watermark through the chain, then ``finish`` every operator, in chain order."""


@dataclass(frozen=True, slots=True)
class EmitEnd:
    """EFFECT: send the end of data on every output channel."""


@dataclass(frozen=True, slots=True)
class ReportFinished:
    """EFFECT: tell the coordinator that this subtask has processed all input."""


Effect: TypeAlias = align.Effect | Acknowledge | CancelWrite | FinishOperators | EmitEnd | ReportFinished


class Subtask(Machine):
    """Checkpoints and end of input of one subtask."""

    def __init__(self, channels_count: int, *, is_restored_finished: bool = False) -> None:
        """Make the machine of a subtask with ``channels_count`` inputs (0: a source).

        ``is_restored_finished``: the restored snapshot was taken after ``finish``, which must not run twice (T8).
        """
        super().__init__()
        self._is_source = channels_count == 0
        self._channels_count = channels_count
        self._aligner = Aligner(max(channels_count, 1))
        self._precommit = Precommit()
        self._ended: set[ChannelIndex] = set()
        self._is_finished = False
        self._were_operators_finished = is_restored_finished
        self._writing: set[CheckpointId] = set()
        self._last_snapshot = CheckpointId(0)

    @property
    def is_finished(self) -> bool:
        """Whether all input has ended and been processed. Part of the snapshot."""
        return self._were_operators_finished

    @property
    def blocked(self) -> frozenset[ChannelIndex]:
        """Input channels that must not be read now."""
        return self._aligner.blocked

    @property
    def pending_committables(self) -> tuple[Committable, ...]:
        """Prepared output not yet known to be covered by a completed checkpoint."""
        return self._precommit.pending

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order.

        Raises:
            ProtocolViolation: an event that no correct peer or interpreter can produce.
        """
        self._begin(event)
        match event:
            case TriggerReceived():
                effects = self._on_trigger(event)
            case BarrierReceived():
                effects = self._aligned(align.BarrierReceived(event.channel, event.checkpoint))
            case CancelReceived():
                effects = self._aligned(align.CancelReceived(event.channel, event.checkpoint))
            case EndReceived():
                effects = self._on_end(event)
            case SourceEnded():
                effects = self._on_source_ended()
            case SnapshotWritten():
                effects = self._on_written(event)
            case SnapshotFailed():
                effects = self._on_failed(event)
            case AbortReceived():
                effects = self._on_abort(event)
            case CompleteReceived():
                effects = self._on_complete(event)
            case _:
                assert_never(event)
        return effects

    def _on_trigger(self, event: TriggerReceived) -> list[Effect]:  # T1
        if not self._is_source:
            raise self._violation("only sources are triggered")
        return self._aligned(align.BarrierReceived(ChannelIndex(0), event.checkpoint))

    def _aligned(self, event: align.Event) -> list[Effect]:
        """Pass ``event`` to the aligner and note the snapshots it orders."""
        effects: list[Effect] = []
        for effect in self._aligner.handle(event):
            if isinstance(effect, TakeSnapshot):
                assert effect.checkpoint > self._last_snapshot, "snapshot ids increase (T2, C42)"
                self._last_snapshot = effect.checkpoint
                self._writing.add(effect.checkpoint)
            effects.append(effect)
        return effects

    def _on_end(self, event: EndReceived) -> list[Effect]:
        if event.channel in self._ended or self._is_source:
            raise self._violation(f"second end of data on channel {event.channel}")
        self._ended.add(event.channel)
        if len(self._ended) < self._channels_count:
            return [Ignored("other channels still deliver")]
        return self._finish()

    def _on_source_ended(self) -> list[Effect]:
        if not self._is_source:
            raise self._violation("only sources end by themselves")
        if self._is_finished:
            return [Ignored("already ended")]
        return self._finish()

    def _finish(self) -> list[Effect]:  # T7: the last watermark, finish, end of data, report
        effects: list[Effect] = [] if self._were_operators_finished else [FinishOperators()]
        self._is_finished = self._were_operators_finished = True
        return [*effects, EmitEnd(), ReportFinished()]

    def _on_written(self, event: SnapshotWritten) -> list[Effect]:
        self._precommit.prepared(event.committables)  # kept even when the checkpoint is gone (T5)
        if event.checkpoint not in self._writing and not event.handle.path:
            return [Ignored("written after the checkpoint was aborted")]
        # Too late, with a file: acknowledged all the same, so that the coordinator deletes the file (C10).
        self._writing.discard(event.checkpoint)
        covered = self._precommit.covered_by(event.checkpoint)  # T3
        return [Acknowledge(event.checkpoint, event.handle, covered)]

    def _on_failed(self, event: SnapshotFailed) -> list[Effect]:
        if event.checkpoint not in self._writing:
            return [Ignored("failed after the checkpoint was aborted")]
        self._writing.remove(event.checkpoint)
        return [Decline(event.checkpoint, AbortReason.SNAPSHOT_FAILED)]  # T4

    def _on_abort(self, event: AbortReceived) -> list[Effect]:
        if event.checkpoint in self._writing:
            self._writing.remove(event.checkpoint)
            return [CancelWrite(event.checkpoint)]
        return self._aligned(align.AbortReceived(event.checkpoint))

    def _on_complete(self, event: CompleteReceived) -> list[Effect]:
        self._precommit.completed(event.checkpoint)  # T9
        older: Sequence[CheckpointId] = sorted(c for c in self._writing if c < event.checkpoint)
        for checkpoint in older:  # subsumed (C15)
            self._writing.remove(checkpoint)
        return [CancelWrite(c) for c in older] or [Ignored("nothing of it is held here any more")]


__all__ = [
    "AbortReceived",
    "Acknowledge",
    "BarrierReceived",
    "BlockChannel",
    "CancelReceived",
    "CancelWrite",
    "CompleteReceived",
    "Decline",
    "Effect",
    "EmitBarrier",
    "EmitCancel",
    "EmitEnd",
    "EndReceived",
    "Event",
    "FinishOperators",
    "Ignored",
    "ReportFinished",
    "SnapshotFailed",
    "SnapshotWritten",
    "SourceEnded",
    "Subtask",
    "TakeSnapshot",
    "TriggerReceived",
    "UnblockChannels",
]
