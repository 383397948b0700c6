"""What happens to one subtask and what it orders: events and effects of ``protocol.subtasks.subtask``.

Those of the machines that it is composed of are in their own modules; what reaches one of them as it comes is one class
(barriers, cancel markers, their arrival, aborts, feedback, probes). Counterparts: the interpreter, which reports
the events and runs the effects. Source: rules T1–T10 of docs/spec/subtask.md. Never decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headgate.model.ids import ChannelIndex, CheckpointId
from headgate.model.manifest import Committable, SnapshotPart
from headgate.model.options import ORDINARY, CheckpointOptions
from headgate.model.savepoint import Copied
from headgate.protocol.checkpoints import align, overtake
from headgate.protocol.checkpoints.align import AbortReceived, BarrierReceived, CancelReceived
from headgate.protocol.checkpoints.overtake import AlignmentTimedOut, BarrierArrived, CancelArrived
from headgate.protocol.loops import head as loop_head
from headgate.protocol.loops import part as loop_part
from headgate.protocol.loops.head import FeedbackReceived
from headgate.protocol.loops.part import FeedbackForwarded, ProbeOrdered
from headgate.protocol.loops.rounds import ProbeReceived
from headgate.protocol.subtasks.induced import ReadOn


@dataclass(frozen=True, slots=True)
class TriggerReceived:
    """EVENT (source subtasks): the coordinator asks for ``checkpoint``; the barrier goes out at this position."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class CheckpointAnnounced:
    """EVENT (sources that set their own barrier): ``checkpoint`` has begun."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class MarkerMet:
    """EVENT (sources that set their own barrier): in ``split`` the reader is behind the marker of ``checkpoint``."""

    split: str
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class SplitsSeen:
    """EVENT (sources that set their own barrier): these splits have not ended.

    ``is_read``: the reader reads those on that do not stand still.
    """

    splits: tuple[str, ...]
    is_read: bool = True


@dataclass(frozen=True, slots=True)
class EndReceived:
    """EVENT: the end of data reached the head of input ``channel``. Barriers may still follow on it (T6, L28)."""

    channel: ChannelIndex


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """EVENT (source subtasks): the reader has delivered all its bounded input."""


@dataclass(frozen=True, slots=True)
class InputResumed:
    """EVENT: there is more input than when the restored snapshot was taken, which says that all had ended.

    A source: its reader has something to read. Others: records have come; this is reported before they are processed.
    """


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """EVENT: the asynchronous part of ``checkpoint`` is durable.

    ``committables``: prepared by this write, in checkpoint order; it includes what an earlier, failed or cancelled
    write left unprepared.
    """

    checkpoint: CheckpointId
    parts: tuple[SnapshotPart, ...]
    committables: tuple[Committable, ...] = ()
    copied: Copied | None = None
    """What was written to the savepoint that the checkpoint carries."""


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """EVENT: the asynchronous part of ``checkpoint`` failed for good."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """EVENT (loop heads): the driver found the nest of loops empty: end of data follows (L29)."""


@dataclass(frozen=True, slots=True)
class CompleteReceived:
    """EVENT: the coordinator completed ``checkpoint``."""

    checkpoint: CheckpointId


Event: TypeAlias = (
    TriggerReceived
    | CheckpointAnnounced
    | MarkerMet
    | SplitsSeen
    | BarrierReceived
    | CancelReceived
    | BarrierArrived
    | CancelArrived
    | AlignmentTimedOut
    | EndReceived
    | SourceEnded
    | InputResumed
    | SnapshotWritten
    | SnapshotFailed
    | AbortReceived
    | CompleteReceived
    | FeedbackReceived
    | FeedbackForwarded
    | ProbeReceived
    | ProbeOrdered
    | LoopEnded
)


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """EFFECT: tell the coordinator that this subtask's part of ``checkpoint`` is durable."""

    checkpoint: CheckpointId
    parts: tuple[SnapshotPart, ...]
    committables: tuple[Committable, ...]
    copied: Copied | None = None


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """EFFECT: stop the asynchronous part of ``checkpoint`` if it still runs; its sealed output stays sealed (T4)."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class FinishOperators:
    """EFFECT: pass the last watermark through the chain, then ``finish`` every operator, in chain order."""


@dataclass(frozen=True, slots=True)
class ResumeOperators:
    """EFFECT: tell every operator that input goes on after the end that its restored state knows of."""


@dataclass(frozen=True, slots=True)
class EmitEnd:
    """EFFECT: send the end of data on every output channel."""


@dataclass(frozen=True, slots=True)
class ReportFinished:
    """EFFECT: tell the coordinator that this subtask has processed all input."""


Effect: TypeAlias = (
    align.Effect
    | overtake.Effect
    | loop_head.Effect
    | loop_part.Effect
    | ReadOn
    | Acknowledge
    | CancelWrite
    | FinishOperators
    | ResumeOperators
    | EmitEnd
    | ReportFinished
)
