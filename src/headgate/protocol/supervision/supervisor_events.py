"""What happens in the life of a pipeline and what is ordered: vocabulary of ``protocol.supervision.supervisor``.

Counterpart: the interpreter, which reports the events and runs the effects. Source: rules G1–G12. Never decides.
"""

from __future__ import annotations

from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.model.failure import Failure
from headgate.model.ids import CheckpointId, Generation, WorkerIndex
from headgate.protocol.machine import Ignored


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One attempt of the Spark stage: our submission number, then Spark's attempt within it."""

    submission: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RegisterTimer:
    """The workers of a submission took too long to register."""

    submission: int


@dataclass(frozen=True, slots=True)
class RestartTimer:
    """The delay of the restart strategy is over."""


@dataclass(frozen=True, slots=True)
class JobEndTimer:
    """The Spark job took too long to end after its workers were stopped."""

    submission: int


@dataclass(frozen=True, slots=True)
class PeerTimer:
    """A worker that a peer blames took too long to say why it left."""

    generation: Generation


Timer: TypeAlias = RegisterTimer | RestartTimer | JobEndTimer | PeerTimer


@dataclass(frozen=True, slots=True)
class Begin:
    """EVENT: the driver, the supervisor of drivers or the standby starts its machine."""


@dataclass(frozen=True, slots=True)
class GenerationReady:
    """EVENT: the generation is claimed, the checkpoint chosen, the sinks fenced and recovered.

    ``workers_before``: how many there were when that checkpoint was taken; 0: the pipeline begins.
    """

    generation: Generation
    workers_before: int = 0


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """EVENT: the generation could not be claimed or the sinks not recovered."""

    failure: Failure
    at_ms: int = 0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class AlreadyFinished:
    """EVENT: the newest checkpoint is final; there is nothing to do."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """EVENT: a worker of this attempt is up and has a data address."""

    attempt: AttemptId
    worker: WorkerIndex


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """EVENT: a deployed worker has restored its state and connected to its peers."""

    generation: Generation
    worker: WorkerIndex


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """EVENT: the control connection of a worker broke, or it was silent for too long (``is_silent``)."""

    attempt: AttemptId
    worker: WorkerIndex
    reason: str
    at_ms: int
    jitter: float
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """EVENT: a worker reported that it cannot go on; because ``peer`` left, if that is given."""

    attempt: AttemptId
    worker: WorkerIndex
    failure: Failure
    at_ms: int
    jitter: float
    peer: WorkerIndex | None = None


@dataclass(frozen=True, slots=True)
class JobEnded:
    """EVENT: the Spark job of ``submission`` ended; ``failure`` is None when every task returned."""

    submission: int
    failure: Failure | None
    at_ms: int
    jitter: float


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """EVENT: the coordinator gave the generation up."""

    generation: Generation
    failure: Failure
    at_ms: int
    jitter: float


@dataclass(frozen=True, slots=True)
class GenerationDone:
    """EVENT: the coordinator completed the last checkpoint and everything is committed."""

    generation: Generation
    is_final: bool


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """EVENT: stop now, without another checkpoint. ``retain``: and keep all that there are, whatever is configured."""

    retain: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointsRemoved:
    """EVENT: the checkpoints are removed, or kept because something was in the way."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """EVENT: an armed timer fired."""

    timer: Timer
    at_ms: int
    jitter: float


Event: TypeAlias = (
    Begin
    | GenerationReady
    | ClaimFailed
    | AlreadyFinished
    | WorkerRegistered
    | WorkerReady
    | WorkerLost
    | WorkerFailed
    | JobEnded
    | GenerationFailed
    | GenerationDone
    | CancelRequested
    | CheckpointsRemoved
    | TimerFired
)


@dataclass(frozen=True, slots=True)
class ClaimGeneration:
    """EFFECT: claim the next generation, choose the checkpoint, recover the sinks; report the outcome."""


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """EFFECT: submit the Spark job that starts the workers."""

    submission: int


@dataclass(frozen=True, slots=True)
class CancelJob:
    """EFFECT: have Spark kill the tasks of this submission."""

    submission: int


@dataclass(frozen=True, slots=True)
class Deploy:
    """EFFECT: send every worker of ``attempt`` its deployment."""

    generation: Generation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    """EFFECT: every worker runs: start the coordinator of ``generation``."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class EndGeneration:
    """EFFECT: drop the coordinator and tell the workers of ``generation`` to stop. ``is_done``: they may return
    normally, so that Spark sees a success; else they must fail."""

    generation: Generation
    is_done: bool


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """EFFECT: tell this worker that its attempt is over."""

    attempt: AttemptId
    worker: WorkerIndex


@dataclass(frozen=True, slots=True)
class ArmTimer:
    """EFFECT: report ``TimerFired(timer)`` after ``after_ms``; re-arming replaces."""

    timer: Timer
    after_ms: int


@dataclass(frozen=True, slots=True)
class ReportRestart:
    """EFFECT: tell the user: what failed, and when the pipeline starts again."""

    failure: Failure
    delay_ms: int


@dataclass(frozen=True, slots=True)
class RemoveCheckpoints:
    """EFFECT: remove all checkpoints as far as that is safe, then report it (C71)."""


@dataclass(frozen=True, slots=True)
class Finish:
    """EFFECT: the run is over. ``failure`` None: success (``is_final``: all input processed)."""

    failure: Failure | None
    is_final: bool = False


Effect: TypeAlias = (
    ClaimGeneration
    | SubmitJob
    | CancelJob
    | Deploy
    | StartCoordinator
    | EndGeneration
    | RefuseWorker
    | ArmTimer
    | ReportRestart
    | RemoveCheckpoints
    | Finish
    | Ignored
)
