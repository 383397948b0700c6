"""The coordinator of one generation's checkpoints (rules C2–C38; docs/spec/coordinator.md says which apply here).

One ``Coordinator`` per generation. It decides when a checkpoint is triggered, when it is completed, and what may be
committed; the interpreter writes manifests, sends messages and runs timers. Counterparts: the ``Subtask`` machines,
and the ``Supervisor``, which replaces this machine with the next generation's.
Order of durability: id reserved → barriers → every snapshot durable → manifest durable (= completed) → commits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import assert_never

from headgate.model.config import CheckpointConfig
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import Committable, StateHandle, SubtaskEntry
from headgate.protocol.checkpoints.commit import Commit, CommitQueue
from headgate.protocol.checkpoints.coordinator_events import (
    Acknowledged,
    ArmTimer,
    CancelTimer,
    CheckpointRequested,
    CommitFailed,
    CommitRetryTimer,
    CommitSucceeded,
    Declined,
    DeleteHandles,
    DrainRequested,
    DrainSources,
    DropCheckpoint,
    Effect,
    Event,
    ExpiryTimer,
    FailGeneration,
    FinishReported,
    GenerationDone,
    GenerationReplaced,
    IdReserved,
    IntervalTimer,
    ManifestFailed,
    ManifestUnknown,
    ManifestWritten,
    NotifyAbort,
    NotifyComplete,
    PauseTimer,
    ReserveFailed,
    ReserveId,
    Started,
    StopRequested,
    Timer,
    TimerFired,
    TriggerSources,
    WriteManifest,
)
from headgate.protocol.checkpoints.reasons import AbortReason
from headgate.protocol.machine import Ignored, Machine


class Phase(Enum):
    """What the coordinator waits for."""

    CREATED = "every participant to run"
    RUNNING = "timers and acknowledgements"
    STOPPING = "the last checkpoint before a requested stop"
    ENDING = "the final checkpoint: all input has been processed"
    DONE = "nothing"


LEGAL_PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.CREATED: frozenset({Phase.RUNNING, Phase.DONE}),
    Phase.RUNNING: frozenset({Phase.STOPPING, Phase.ENDING, Phase.DONE}),
    Phase.STOPPING: frozenset({Phase.ENDING, Phase.DONE}),
    Phase.ENDING: frozenset({Phase.DONE}),
    Phase.DONE: frozenset(),
}


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is neither completed nor aborted."""

    is_final: bool
    is_last: bool
    """Nothing else is wanted after it: final, or the one before a requested stop."""
    is_draining: bool
    """It began after the sources were told to end."""
    acks: dict[SubtaskId, SubtaskEntry] = field(default_factory=dict)


class Coordinator(Machine):
    """Triggers, completes and aborts the checkpoints of one generation, and orders their commits."""

    COMMIT_RETRY_MS = (100, 200, 500, 1_000, 2_000, 5_000)
    """Pauses between tries of a commit; the last one repeats: prepared output is never given up (K1)."""

    def __init__(
        self,
        generation: Generation,
        participants: tuple[SubtaskId, ...],
        config: CheckpointConfig,
        first_checkpoint: CheckpointId,
        retained: tuple[CheckpointId, ...] = (),
    ) -> None:
        """Make the coordinator of ``generation``.

        ``participants`` are all subtasks (C8). ``retained`` are the sound completed checkpoints in storage, the
        restored one included (C35), ascending.
        """
        super().__init__()
        assert participants
        self._generation = generation
        self._participants = participants
        self._expected = frozenset(participants)
        self._config = config
        self._next = first_checkpoint
        self._retained = list(retained)
        self._phase = Phase.CREATED
        self._reserving: CheckpointId | None = None
        self._pending: dict[CheckpointId, _Pending] = {}
        self._writing: CheckpointId | None = None
        self._last_completed = CheckpointId(0)
        self._failures_count = 0
        self._finished: set[SubtaskId] = set()
        self._is_draining = False
        self._commits = CommitQueue(generation)
        self._commit_tries = 0
        self._is_due = False
        self._is_paused = False
        self._last_done: CheckpointId | None = None
        self._is_last_done_final = False

    @property
    def phase(self) -> Phase:
        """What the coordinator waits for."""
        return self._phase

    @property
    def is_draining(self) -> bool:
        """Whether the sources are, or will be, told to end."""
        return self._is_draining

    @property
    def pending(self) -> tuple[CheckpointId, ...]:
        """Checkpoints that are neither completed nor aborted, ascending."""
        return tuple(sorted(self._pending))

    @property
    def last_completed(self) -> CheckpointId:
        """Newest checkpoint completed by this generation (0: none)."""
        return self._last_completed

    @property
    def retained(self) -> tuple[CheckpointId, ...]:
        """Completed checkpoints that must stay in storage, ascending."""
        return tuple(self._retained)

    def oldest_retained(self, checkpoint: CheckpointId) -> CheckpointId:
        """Return the oldest checkpoint that is retained once ``checkpoint``, which is being written, is completed."""
        return [*self._retained, checkpoint][-max(self._config.retained, 1) :][0]

    def missing(self, checkpoint: CheckpointId) -> tuple[SubtaskId, ...]:
        """Return the subtasks that have not acknowledged a pending ``checkpoint`` yet."""
        acks = self._pending[checkpoint].acks
        return tuple(s for s in self._participants if s not in acks)

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order."""
        self._begin(event)
        effects = self._dispatch(event)
        self._check()
        return effects

    def _dispatch(self, event: Event) -> list[Effect]:
        if self._phase is Phase.DONE:
            return self._after_the_end(event)
        match event:
            case Started():
                return self._on_started(event)
            case TimerFired():
                return self._on_timer(event.timer)
            case CheckpointRequested():
                return self._on_requested()
            case StopRequested():
                return self._on_stop()
            case DrainRequested():
                return self._on_drain()
            case IdReserved():
                return self._on_reserved(event)
            case ReserveFailed():
                return self._on_reserve_failed(event)
            case Acknowledged():
                return self._on_acknowledged(event)
            case Declined():
                return self._on_declined(event)
            case FinishReported():
                return self._on_finish_reported(event)
            case ManifestWritten():
                return self._on_manifest_written(event)
            case ManifestFailed():
                return self._on_manifest_failed(event)
            case ManifestUnknown():
                return self._on_manifest_unknown(event)
            case GenerationReplaced():
                return self._on_replaced(event)
            case CommitSucceeded():
                return self._on_commit_succeeded(event)
            case CommitFailed():
                return self._on_commit_failed(event)
            case _:
                assert_never(event)

    # -- triggering ---------------------------------------------------------------------------------------------

    def _on_started(self, event: Started) -> list[Effect]:
        self._enter(Phase.RUNNING)
        if len(self._finished) == len(self._participants):
            return self._on_all_finished()
        effects: list[Effect] = [DrainSources()] if self._is_draining else []
        if self._config.interval_ms == 0:
            return effects or [Ignored("periodic checkpoints are off")]
        return [*effects, ArmTimer(IntervalTimer(), event.first_delay_ms)]

    def _on_requested(self) -> list[Effect]:
        if self._phase is Phase.CREATED:  # C6: refused, and not counted as a failure
            return [Ignored("not every participant runs yet")]
        self._is_due = True
        self._is_paused = False
        return self._try_trigger()

    def _on_timer(self, timer: Timer) -> list[Effect]:
        match timer:
            case IntervalTimer():
                if self._phase is not Phase.RUNNING:
                    return [Ignored("no periodic checkpoint is wanted any more")]
                self._is_due = True
                return [ArmTimer(IntervalTimer(), self._config.interval_ms), *self._try_trigger()]
            case PauseTimer():
                self._is_paused = False
                return self._try_trigger()
            case ExpiryTimer():
                if timer.checkpoint not in self._pending or timer.checkpoint == self._writing:
                    return [Ignored("the checkpoint has ended, or its manifest is being written")]
                return self._abort(timer.checkpoint, AbortReason.EXPIRED)
            case CommitRetryTimer():
                return list(self._commits.retry())
            case _:
                assert_never(timer)

    def _try_trigger(self) -> list[Effect]:
        """Begin a checkpoint if one is wanted and allowed (C2, C3, C4)."""
        if self._reserving is not None or not self._wants_checkpoint():
            return [Ignored("no checkpoint can begin now")]
        is_forced = self._phase in (Phase.STOPPING, Phase.ENDING)  # not held back by the limit
        if not is_forced and len(self._pending) >= self._config.max_concurrent:
            return [Ignored("as many checkpoints are pending as allowed")]
        checkpoint, self._next = self._next, CheckpointId(self._next + 1)
        self._is_due = False
        self._reserving = checkpoint
        return [ReserveId(checkpoint)]

    def _wants_checkpoint(self) -> bool:
        if self._phase in (Phase.STOPPING, Phase.ENDING):
            is_final = self._phase is Phase.ENDING
            is_pending = any(p.is_last and p.is_final == is_final for p in self._pending.values())
            return not is_pending and not self._has_last()
        return self._phase is Phase.RUNNING and self._is_due and not self._is_paused

    def _has_last(self) -> bool:
        """Whether the checkpoint that this phase waits for is completed."""
        return self._last_done is not None and (self._phase is not Phase.ENDING or self._is_last_done_final)

    def _on_reserved(self, event: IdReserved) -> list[Effect]:
        if self._reserving != event.checkpoint:
            return [Ignored("an id that is not wanted any more")]
        self._reserving = None
        # Final only if everybody had finished *before* the barrier starts (C26, E3): decided here, at the trigger.
        is_final = self._phase is Phase.ENDING
        is_last = self._phase in (Phase.STOPPING, Phase.ENDING)
        self._pending[event.checkpoint] = _Pending(is_final, is_last, self._is_draining)
        expiry = ArmTimer(ExpiryTimer(event.checkpoint), self._config.timeout_ms)
        return [expiry, TriggerSources(event.checkpoint)]

    def _on_reserve_failed(self, event: ReserveFailed) -> list[Effect]:
        if self._reserving != event.checkpoint:
            return [Ignored("an id that is not wanted any more")]
        self._reserving = None
        return self._count(event.checkpoint, AbortReason.RESERVE_FAILED) or self._retry_if_last()

    def _retry_if_last(self) -> list[Effect]:
        """A last checkpoint that failed is wanted again, after a pause in which storage may recover (E5)."""
        if self._phase in (Phase.STOPPING, Phase.ENDING):
            return [ArmTimer(PauseTimer(), max(self._config.min_pause_ms, 200))]
        return []

    # -- acknowledgements and endings ---------------------------------------------------------------------------

    def _on_acknowledged(self, event: Acknowledged) -> list[Effect]:
        if event.generation != self._generation:  # C9, C11: and the files are not ours to delete
            return [Ignored("acknowledgement of another generation")]
        pending = self._pending.get(event.checkpoint)
        if pending is None or event.subtask not in self._expected:
            if event.checkpoint in self._retained:  # its manifest owns this very file (C10)
                return [Ignored("duplicate acknowledgement of a completed checkpoint")]
            return self._delete(event.handle, "late acknowledgement")
        if event.subtask in pending.acks:
            return [Ignored("duplicate acknowledgement")]
        pending.acks[event.subtask] = SubtaskEntry(event.subtask, event.handle, event.committables)
        return self._write_next()

    def _write_next(self) -> list[Effect]:
        """Write the newest fully acknowledged manifest; one at a time, so that ids complete in order (C15)."""
        if self._writing is not None:
            return [Ignored("a manifest is being written")]
        full = [c for c, p in self._pending.items() if len(p.acks) == len(self._participants)]
        if not full:
            return [Ignored("other participants are missing")]
        checkpoint = max(full)
        pending = self._pending[checkpoint]
        self._writing = checkpoint
        entries = tuple(pending.acks[s] for s in self._participants)
        carried = self._commits.unconfirmed
        return [WriteManifest(checkpoint, entries, carried, pending.is_final, pending.is_draining)]

    def _on_declined(self, event: Declined) -> list[Effect]:
        if event.generation != self._generation:
            return [Ignored("decline of another generation")]
        if event.checkpoint not in self._pending or event.checkpoint == self._writing:
            return [Ignored("late decline")]
        return self._abort(event.checkpoint, event.reason)

    def _abort(self, checkpoint: CheckpointId, reason: AbortReason) -> list[Effect]:
        """End a pending checkpoint as if it had never been triggered (C17)."""
        pending = self._pending.pop(checkpoint)
        effects: list[Effect] = [CancelTimer(ExpiryTimer(checkpoint)), NotifyAbort(checkpoint, reason)]
        files = [entry.handle for entry in pending.acks.values() if entry.handle.path]
        if files:
            effects.append(DeleteHandles(tuple(files)))
        failed = self._count(checkpoint, reason)
        if failed:
            return effects + failed
        return effects + (self._retry_if_last() if pending.is_last else self._try_trigger())

    def _count(self, checkpoint: CheckpointId, reason: AbortReason) -> list[Effect]:
        """Count a failure; fail the generation when more than the tolerable number came in a row (C22)."""
        if not reason.counts_as_failure or checkpoint <= self._last_completed:
            return []
        self._failures_count += 1
        if self._failures_count <= self._config.tolerable_failures:
            return []
        many = f" ({self._failures_count} in a row)" if self._failures_count > 1 else ""
        return self._fail(f"checkpoint {checkpoint} failed{many}: {reason.text}")

    def _on_manifest_written(self, event: ManifestWritten) -> list[Effect]:
        """The durable point (C12). Then, in this order: retain, subsume, notify, commit."""
        self._expect_writing(event.checkpoint)
        pending = self._pending.pop(event.checkpoint)
        self._last_completed = event.checkpoint
        self._failures_count = 0
        effects: list[Effect] = [CancelTimer(ExpiryTimer(event.checkpoint))]
        self._retained.append(event.checkpoint)
        while len(self._retained) > max(self._config.retained, 1):  # never the one just completed
            effects.append(DropCheckpoint(self._retained.pop(0)))
        for older in [c for c in sorted(self._pending) if c < event.checkpoint]:
            effects += self._abort_subsumed(older)
        effects.append(NotifyComplete(event.checkpoint))
        committables = self._committables(pending)
        effects += self._commits.completed(event.checkpoint, committables)
        if pending.is_last:
            self._last_done, self._is_last_done_final = event.checkpoint, pending.is_final
        if self._config.min_pause_ms and self._phase is Phase.RUNNING:
            self._is_paused = True
            effects.append(ArmTimer(PauseTimer(), self._config.min_pause_ms))
        return effects + self._end_if_done() + self._continue()

    def _committables(self, pending: _Pending) -> tuple[Committable, ...]:
        found = {c for entry in pending.acks.values() for c in entry.committables}
        return tuple(sorted(found, key=lambda c: (c.checkpoint, c.sink, c.subtask_index, c.generation)))

    def _abort_subsumed(self, checkpoint: CheckpointId) -> list[Effect]:
        pending = self._pending.pop(checkpoint)
        files = tuple(e.handle for e in pending.acks.values() if e.handle.path)
        effects: list[Effect] = [CancelTimer(ExpiryTimer(checkpoint)), NotifyAbort(checkpoint, AbortReason.SUBSUMED)]
        return [*effects, DeleteHandles(files)] if files else effects

    def _continue(self) -> list[Effect]:
        """After an ending: another manifest may be ready, another checkpoint may be due."""
        if self._phase is Phase.DONE:
            return []
        return [e for e in self._write_next() + self._try_trigger() if not isinstance(e, Ignored)]

    def _on_manifest_failed(self, event: ManifestFailed) -> list[Effect]:
        self._expect_writing(event.checkpoint)
        effects = self._abort(event.checkpoint, AbortReason.MANIFEST_FAILED)
        if self._phase is Phase.DONE:
            return effects
        return effects + [e for e in self._write_next() if not isinstance(e, Ignored)]

    def _on_manifest_unknown(self, event: ManifestUnknown) -> list[Effect]:
        """Delete nothing: recovery reads the log and knows (§4, row "unknown outcome")."""
        self._expect_writing(event.checkpoint)
        return self._fail(f"nobody can tell whether the manifest of checkpoint {event.checkpoint} was written")

    def _expect_writing(self, checkpoint: CheckpointId) -> None:
        if self._writing != checkpoint:
            raise self._violation(f"a manifest of {checkpoint} was not asked for")
        self._writing = None

    # -- the end ------------------------------------------------------------------------------------------------

    def _on_finish_reported(self, event: FinishReported) -> list[Effect]:  # E2
        if event.generation != self._generation:
            return [Ignored("report of another generation")]
        assert event.subtask in self._expected
        if event.subtask in self._finished:
            return [Ignored("duplicate report")]
        self._finished.add(event.subtask)
        if len(self._finished) < len(self._participants):
            return [Ignored("other subtasks still process")]
        if self._phase is Phase.CREATED:
            return [Ignored("remembered until every participant runs")]
        return self._on_all_finished()

    def _on_all_finished(self) -> list[Effect]:
        """Take the final checkpoint at once, without waiting for the interval (C26)."""
        self._enter(Phase.ENDING)
        return [CancelTimer(IntervalTimer()), *self._try_trigger()]

    def _on_stop(self) -> list[Effect]:
        if self._phase in (Phase.STOPPING, Phase.ENDING):
            return [Ignored("already ending")]
        if self._phase is Phase.CREATED:
            self._enter(Phase.DONE)
            return [GenerationDone(None, is_final=False)]
        self._enter(Phase.STOPPING)
        return [CancelTimer(IntervalTimer()), *self._try_trigger()]

    def _on_drain(self) -> list[Effect]:
        """Checkpoints go on as before, now marked (E9); the end comes when all have reported (E7)."""
        if self._phase in (Phase.STOPPING, Phase.ENDING):  # E10
            return [Ignored("already ending")]
        if self._is_draining:
            return [Ignored("already draining")]
        self._is_draining = True
        if self._phase is Phase.CREATED:
            return [Ignored("remembered until every participant runs")]
        return [DrainSources()]

    def _end_if_done(self) -> list[Effect]:
        """Done when the last checkpoint is completed and nothing of it is left to commit (C27, E4)."""
        if self._phase is Phase.DONE or not self._has_last() or not self._commits.is_empty:
            return []
        self._enter(Phase.DONE)
        return [GenerationDone(self._last_done, self._is_last_done_final)]

    def _on_commit_succeeded(self, event: CommitSucceeded) -> list[Effect]:
        self._commit_tries = 0
        return [*self._commits.succeeded(event.checkpoint), *self._end_if_done()] or [Ignored("nothing more to commit")]

    def _on_commit_failed(self, event: CommitFailed) -> list[Effect]:
        if not event.is_transient:  # K5: the target says aborted or unknown
            self._enter(Phase.DONE)
            reason = f"cannot commit checkpoint {event.checkpoint}: {event.reason}"
            return [FailGeneration(Failure(FailureKind.DETERMINISTIC, reason))]
        pause = self.COMMIT_RETRY_MS[min(self._commit_tries, len(self.COMMIT_RETRY_MS) - 1)]
        self._commit_tries += 1
        return [ArmTimer(CommitRetryTimer(), pause)]

    def _on_replaced(self, event: GenerationReplaced) -> list[Effect]:
        self._enter(Phase.DONE)
        reason = (
            f"generation {event.newest} of this pipeline was started elsewhere; this one ({self._generation}) stops"
        )
        return [FailGeneration(Failure(FailureKind.REPLACED, reason))]

    def _fail(self, reason: str) -> list[Effect]:
        self._enter(Phase.DONE)
        return [FailGeneration(Failure(FailureKind.LOST, reason))]

    def _after_the_end(self, event: Event) -> list[Effect]:
        """Nothing is decided any more; files of late acknowledgements stay for recovery to judge."""
        return [Ignored(f"{type(event).__name__} after the end of the generation")]

    def _delete(self, handle: StateHandle, why: str) -> list[Effect]:
        return [DeleteHandles((handle,))] if handle.path else [Ignored(why)]

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} → {phase}"
        self._phase = phase

    def _check(self) -> None:
        assert all(c > self._last_completed for c in self._pending), "completion subsumes what is older (C15)"
        assert self._writing is None or self._writing in self._pending or self._phase is Phase.DONE
        assert all(c < self._next for c in self._pending)
        assert len(self._retained) <= max(self._config.retained, 1) or self._last_completed == 0


__all__ = [
    "LEGAL_PHASES",
    "Acknowledged",
    "ArmTimer",
    "CancelTimer",
    "CheckpointRequested",
    "Commit",
    "CommitFailed",
    "CommitRetryTimer",
    "CommitSucceeded",
    "Coordinator",
    "Declined",
    "DeleteHandles",
    "DrainRequested",
    "DrainSources",
    "DropCheckpoint",
    "Effect",
    "Event",
    "ExpiryTimer",
    "FailGeneration",
    "FinishReported",
    "GenerationDone",
    "GenerationReplaced",
    "IdReserved",
    "Ignored",
    "IntervalTimer",
    "ManifestFailed",
    "ManifestUnknown",
    "ManifestWritten",
    "NotifyAbort",
    "NotifyComplete",
    "PauseTimer",
    "Phase",
    "ReserveFailed",
    "ReserveId",
    "Started",
    "StopRequested",
    "Timer",
    "TimerFired",
    "TriggerSources",
    "WriteManifest",
]
