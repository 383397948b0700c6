"""Coverage marks (X5): a rare branch registers itself, and a test asserts that the smoke seeds reach every one."""

from __future__ import annotations

from enum import Enum


class Mark(Enum):
    """Situations that the simulator must not miss."""

    COMMIT_REPEATED_AFTER_UNKNOWN = "a commit with unknown outcome was repeated"
    COMMIT_REFUSED_FENCED = "a commit of an older generation was refused"
    PREPARE_REFUSED_FENCED = "a prepare of an older generation was refused"
    RECOVERY_COMMITTED = "recovery committed what the last driver had left prepared"
    RECOVERY_ABORTED = "recovery aborted what no completed checkpoint promised"
    CARRIED = "a manifest carried committables of an earlier checkpoint"
    SEVERAL_CHECKPOINTS_COMMITTED = "one checkpoint committed output sealed for several ids"
    LATE_ACK_DELETED = "the files of a late acknowledgement were deleted"
    STALE_ACK = "an acknowledgement of an older generation arrived"
    DUPLICATE_ACK = "an acknowledgement arrived twice"
    SUBSUMED = "a checkpoint was subsumed by a newer one"
    EXPIRED = "a checkpoint expired"
    DECLINED = "a checkpoint was declined"
    WRITE_CANCELLED = "the asynchronous part of a snapshot was cancelled"
    WRITTEN_AFTER_ABORT = "a snapshot was written after its checkpoint was aborted"
    ABORT_BEFORE_BARRIER = "an abort arrived before the barrier"
    CANCEL_MARKER = "a cancel marker reached an aligner"
    BARRIER_AFTER_END = "a barrier arrived on a channel that had delivered the end of data"
    ALIGNED = "a channel was blocked for alignment"
    STAGE_RETRY = "Spark retried the stage by itself"
    STAGE_RETRY_DEPLOYED = "the workers of a stage retry were deployed"
    WORKER_REFUSED = "a worker of a used-up attempt was refused"
    START_OVER_REFUSED = "a pipeline whose checkpoints were removed was refused by its sinks"
    TWO_DRIVERS = "two drivers ran at once"
    CLAIM_CONFLICT = "two drivers competed for one entry of the log"
    PRUNED_NUMBER = "a stopped driver filled a number of the log that had been used and pruned"
    SYNC_FAILED = "an entry of the log could be read and was not durable"
    POWER_CUT = "a power cut took an entry of the log that was not synced"
    CLAIMS_PRUNED = "claims that led nowhere were removed"
    LEFT_BY_REPLACED = "an entry that a replaced driver left in the log counted for nothing"
    ID_REFUSED = "a replaced driver was refused an id"
    ORPHANED_CLAIM = "a generation was claimed and never deployed"
    MANIFEST_UNKNOWN = "nobody could tell whether a manifest was written"
    MANIFEST_LATE = "a manifest write landed after it was given up"
    MANIFEST_READ_BACK = "a manifest write failed after it took effect and was read back"
    GENERATION_REPLACED = "a driver found the claim of a newer generation"
    REPLACED_DRIVER_STOPPED = "a replaced driver did not claim again"
    DAMAGED_NEWEST = "the newest checkpoint was damaged and the previous one used"
    TARGET_DENIED = "a target denied promised output to a running generation"
    TARGET_DENIED_IN_RECOVERY = "a target denied promised output in recovery"
    DAMAGED_REFUSED = "a damaged checkpoint was refused"
    LOST_ENTRY = "the newest entry of the log was missing and noticed by the hint"
    ALREADY_FINISHED = "a driver found the pipeline finished"
    RESTORED_FINISHED = "a subtask was restored that had finished before"
    RESUMED = "a subtask that was restored as finished got more input"
    RESUMED_BEHIND = "a subtask behind a source that was restored as finished got more input"
    RESCALED = "a checkpoint was restored at another parallelism"
    RESCALED_PARTLY_FINISHED = "a subtask was restored at another parallelism of which some had finished and some not"
    STARTED_FRESH_AGAIN = "a generation died before the first checkpoint and the next started fresh"
    FINAL_CHECKPOINT_FAILED = "a final checkpoint failed and was taken again"
    STOPPED_AND_CONTINUED = "a stopped pipeline was continued by a new driver"
    ZOMBIE_WORKER = "a worker ran while its replacement was deployed"
    SILENT_WORKER = "a worker was given up because it was silent"
    GAVE_UP = "the restart strategy gave up"
    FAILED_EARLY = "a worker failed before its deployment"
    PAUSED_DRIVER = "a driver was paused"
    FINISHED_BEFORE_STARTED = "a subtask finished before the coordinator had started"
    ENDED_EARLY = "a source was drained before its input had ended"
    DRAINED_ON = "a generation continued from a checkpoint that was taken while draining"
    DRAINED_PARTLY = "a drained pipeline ended with a part of its input"
    LOGGED = "a loop log was sealed that was not empty"
    TWO_LOGS = "the logs of two checkpoints were open at once"
    LOG_RELEASED = "a log was dropped because its checkpoint was aborted or subsumed"
    LOG_OVERTAKEN = "a log was dropped because its sentinel never came"
    CHANNEL_HELD = "a sentinel came before the barrier, and its channel was held"
    THROTTLED = "regular input waited because much feedback was queued"
    REPLAYED = "a loop log was restored that was not empty"
    RESCALED_LOG = "a loop log was restored at another parallelism"
    REPLAY_CRASHED = "a worker died while it replayed"
    ROUND_DROPPED = "records were dropped that came back after the last round"
    RESTORED_IN_ROUND = "a loop head was restored in the middle of a round"
    COMPLETED_WHILE_DRAINING = "a checkpoint completed after the input of a loop had ended and before the loop had"
    COMPLETED_IN_INNER_LOOP = "a checkpoint completed that holds records of an inner loop"
    AGAIN_AFTER_WATERMARK = "the last watermark made records that went round"
    DIED_AFTER_LOOP = "a generation died after a loop had ended and before the final checkpoint"


class Marks:
    """The marks that one run has reached."""

    def __init__(self) -> None:
        self._reached: dict[Mark, int] = {}

    def reach(self, mark: Mark) -> None:
        """Count ``mark``."""
        self._reached[mark] = self._reached.get(mark, 0) + 1

    @property
    def reached(self) -> dict[Mark, int]:
        """How often each mark was reached."""
        return dict(self._reached)
