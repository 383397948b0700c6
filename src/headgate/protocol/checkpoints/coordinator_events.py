"""What happens to the checkpoints of one generation and what is ordered: the vocabulary of ``coordinator``.

Counterpart: the interpreter, which reports the events and runs the effects. Source: rules C2–C38 and E1–E10. It never
decides. Why a checkpoint did not complete is a closed list, each with a text and whether it counts (C23, C25).
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.model.config import ORDINARY, CheckpointOptions
from headgate.model.failure import Failure
from headgate.model.ids import CheckpointId, Generation, SubtaskId, WorkerIndex
from headgate.model.manifest import Committable, Copied, HookState, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.commit import Commit
from headgate.protocol.machine import Ignored


class AbortReason(Enum):
    """Reason for an abort or a decline."""

    EXPIRED = "it did not complete within its timeout"
    SNAPSHOT_FAILED = "a subtask could not write its snapshot"
    MANIFEST_FAILED = "its manifest could not be written"
    RESERVE_FAILED = "its id could not be recorded in the checkpoint storage"
    HOOK_FAILED = "a hook of the coordinator failed"
    HOOK_TIMED_OUT = "a hook of the coordinator did not answer within its timeout"
    MARKER_MISSED = "a source went past its marker without having met it everywhere"
    MARKER_AHEAD = "a source still reads towards its marker, for which the next one has more time"
    MARKER_NOT_MET = "a source met no marker however long it read"
    SUBSUMED = "a newer checkpoint completed first"
    OVERTAKEN = "a newer barrier arrived before it was aligned"
    CANCELLED_UPSTREAM = "an upstream subtask gave it up"

    @property
    def text(self) -> str:
        """The reason as a clause."""
        return self.value

    @property
    def counts_as_failure(self) -> bool:
        """Whether it counts towards ``tolerable_failures``."""
        return self in _COUNTED


_COUNTED = frozenset(
    {
        AbortReason.EXPIRED,
        AbortReason.SNAPSHOT_FAILED,
        AbortReason.MANIFEST_FAILED,
        AbortReason.RESERVE_FAILED,
        AbortReason.HOOK_FAILED,
        AbortReason.HOOK_TIMED_OUT,
        AbortReason.MARKER_MISSED,
        AbortReason.MARKER_NOT_MET,
    }
)


@dataclass(frozen=True, slots=True)
class IntervalTimer:
    """The next periodic checkpoint is due."""


@dataclass(frozen=True, slots=True)
class PauseTimer:
    """The minimum pause after a completion is over."""


@dataclass(frozen=True, slots=True)
class ExpiryTimer:
    """``checkpoint`` took too long."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class CommitRetryTimer:
    """A failed commit is tried again."""


@dataclass(frozen=True, slots=True)
class HookTimer:
    """``hook`` did not answer for ``checkpoint`` in time (EI5)."""

    checkpoint: CheckpointId
    hook: str


Timer: TypeAlias = IntervalTimer | PauseTimer | ExpiryTimer | CommitRetryTimer | HookTimer


@dataclass(frozen=True, slots=True)
class Started:
    """EVENT: every participant runs. ``first_delay_ms``: random, within one interval (C5)."""

    first_delay_ms: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """EVENT: an armed timer fired."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """EVENT: a checkpoint is requested now; it does not wait for the interval or the pause.

    ``request`` is answered with ``AnswerRequest``; None: no answer is expected.
    """

    request: int | None = None


@dataclass(frozen=True, slots=True)
class SavepointOrder:
    """Who waits for a savepoint (answered with ``AnswerRequest``), and where it goes."""

    request: int
    target: str


@dataclass(frozen=True, slots=True)
class SavepointRequested:
    """EVENT: a savepoint is requested now; it waits only for other savepoints (SV8)."""

    order: SavepointOrder


@dataclass(frozen=True, slots=True)
class StopRequested:
    """EVENT: take one last checkpoint, commit it, then stop (E6). The input is not drained.

    ``savepoint``: that checkpoint carries it (SV10).
    """

    savepoint: SavepointOrder | None = None


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """EVENT: end the sources as if their input had ended; everything in flight is processed (E7).

    ``savepoint``: the last checkpoint carries it (SV10).
    """

    savepoint: SavepointOrder | None = None


@dataclass(frozen=True, slots=True)
class IdReserved:
    """EVENT: the id is recorded durably, so that no later generation uses it."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class ReserveFailed:
    """EVENT: the id could not be recorded."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class HookAnswered:
    """EVENT: ``hook`` has done its part of ``checkpoint``; ``data`` belongs into the manifest."""

    checkpoint: CheckpointId
    hook: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class HookFailed:
    """EVENT: ``hook`` raised, or returned what no manifest can hold."""

    checkpoint: CheckpointId
    hook: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """EVENT: a subtask of ``generation`` has made its part of ``checkpoint`` durable."""

    generation: Generation
    checkpoint: CheckpointId
    entry: SubtaskEntry
    copied: Copied | None = None
    """What it wrote to the savepoint that the checkpoint carries."""


@dataclass(frozen=True, slots=True)
class Declined:
    """EVENT: ``subtask`` of ``generation`` gave ``checkpoint`` up."""

    generation: Generation
    subtask: SubtaskId
    checkpoint: CheckpointId
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class SourceReadsOn:
    """EVENT: source ``subtask`` of ``generation`` sets its own barrier, and has read on since it last said so.

    ``uncut``: checkpoints with markers that it has not met. It has been cut for others that it named before (EI34).
    """

    generation: Generation
    subtask: SubtaskId
    uncut: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class FinishReported:
    """EVENT: ``subtask`` of ``generation`` has processed all its bounded input; it lives on (E1)."""

    generation: Generation
    subtask: SubtaskId


@dataclass(frozen=True, slots=True)
class ListenerFound:
    """EVENT: ``worker`` has listeners for completed checkpoints; ``CompletionReported`` follows each."""

    generation: Generation
    worker: WorkerIndex


@dataclass(frozen=True, slots=True)
class CompletionReported:
    """EVENT: who listens in ``worker`` of ``generation`` has heard that ``checkpoint`` is completed."""

    generation: Generation
    worker: WorkerIndex
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """EVENT: the manifest is durable under its final name: the checkpoint is completed (C12)."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class ManifestFailed:
    """EVENT: the manifest was certainly not written."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class ManifestUnknown:
    """EVENT: it is unknown whether the manifest was written (time-out, and reading it back failed too)."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class SavepointWritten:
    """EVENT: the savepoint that ``checkpoint`` carried is complete, durably."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class SavepointFailed:
    """EVENT: it could not be written."""

    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationReplaced:
    """EVENT: the log holds the claim of a newer generation: this one is over (C38)."""

    newest: Generation


@dataclass(frozen=True, slots=True)
class CommitSucceeded:
    """EVENT: everything of this permit is visible at its target."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """EVENT: a commit failed, perhaps after it took effect. ``is_transient``: trying again may help."""

    checkpoint: CheckpointId
    reason: str
    is_transient: bool


Event: TypeAlias = (
    Started
    | TimerFired
    | CheckpointRequested
    | SavepointRequested
    | StopRequested
    | DrainRequested
    | IdReserved
    | ReserveFailed
    | HookAnswered
    | HookFailed
    | Acknowledged
    | Declined
    | SourceReadsOn
    | FinishReported
    | ListenerFound
    | CompletionReported
    | ManifestWritten
    | ManifestFailed
    | ManifestUnknown
    | SavepointWritten
    | SavepointFailed
    | GenerationReplaced
    | CommitSucceeded
    | CommitFailed
)


@dataclass(frozen=True, slots=True)
class ArmTimer:
    """EFFECT: report ``TimerFired(timer)`` after ``after_ms``; re-arming replaces."""

    timer: Timer
    after_ms: int


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """EFFECT: the timer is no longer wanted (firing it anyway is harmless)."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class ReserveId:
    """EFFECT: record durably that ``checkpoint`` is in use, then report ``IdReserved`` or ``ReserveFailed``."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class AnnounceCheckpoint:
    """EFFECT: tell sources that ``checkpoint`` has begun, and what it is to be; the hooks are called next (EI1).

    Those that are triggered wait for that; those that set their own barrier may set it from now on (EI20).
    """

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class CallHook:
    """EFFECT: have ``hook`` do its part of ``checkpoint``, unless that is aborted before its turn comes.

    Report ``HookAnswered`` or ``HookFailed``.
    """

    checkpoint: CheckpointId
    hook: str


@dataclass(frozen=True, slots=True)
class TriggerSources:
    """EFFECT: ask every source subtask for ``checkpoint``."""

    checkpoint: CheckpointId
    options: CheckpointOptions = ORDINARY


@dataclass(frozen=True, slots=True)
class DrainSources:
    """EFFECT: tell every source subtask to read nothing more and to end (E7)."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """EFFECT: write the manifest durably as the next log entry, once (C12); report one ``Manifest…`` event."""

    checkpoint: CheckpointId
    entries: tuple[SubtaskEntry, ...]
    carried: tuple[Committable, ...]
    is_final: bool
    is_draining: bool = False
    """Sources may have ended before their input did: a restore from it goes on draining (E9)."""
    hooks: tuple[HookState, ...] = ()


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """EFFECT: tell every subtask, best effort (C14)."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class NotifyAbort:
    """EFFECT: tell every subtask, best effort (C17)."""

    checkpoint: CheckpointId
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class DeleteParts:
    """EFFECT: these parts belong to no checkpoint: remove their files, unless another one needs them (C10, SF5)."""

    parts: tuple[SnapshotPart, ...]


@dataclass(frozen=True, slots=True)
class DropCheckpoint:
    """EFFECT: remove a completed checkpoint beyond the retained ones; only after the newer one is durable (C31)."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class WriteSavepoint:
    """EFFECT: write the file that makes a savepoint, if absent; report ``SavepointWritten`` or ``SavepointFailed``.

    ``checkpoint`` is completed and committed; ``entries`` say what the subtasks wrote to ``target`` (SV2).
    ``is_end``: the pipeline processes nothing after it (SV10).
    """

    checkpoint: CheckpointId
    target: str
    entries: tuple[SubtaskEntry, ...]
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class DropSavepoint:
    """EFFECT: there will be no savepoint at ``target``: remove what was written there, best effort (SV4)."""

    target: str


@dataclass(frozen=True, slots=True)
class FailGeneration:
    """EFFECT: this generation cannot go on; the supervisor decides about a restart."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ConcludeGeneration:
    """EFFECT: all is committed. ``is_final``: all input was processed; else a requested stop."""

    checkpoint: CheckpointId | None
    is_final: bool


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """EFFECT: tell who made ``request`` that ``checkpoint`` is completed, or for which reason there is none (C61)."""

    request: int
    checkpoint: CheckpointId | None
    reason: str = ""


Effect: TypeAlias = (
    ArmTimer
    | CancelTimer
    | ReserveId
    | AnnounceCheckpoint
    | CallHook
    | TriggerSources
    | DrainSources
    | WriteManifest
    | NotifyComplete
    | NotifyAbort
    | DeleteParts
    | DropCheckpoint
    | WriteSavepoint
    | DropSavepoint
    | Commit
    | FailGeneration
    | ConcludeGeneration
    | AnswerRequest
    | Ignored
)
