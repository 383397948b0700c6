"""The coordinator of one generation's checkpoints (rules C2–C38; docs/spec/coordinator.md says which apply here).

One ``Coordinator`` per generation: it knows the generation's phases, how it ends, and what may be committed; about
single checkpoints it asks ``Completion``. The interpreter writes manifests, sends messages and runs timers.
Counterparts: the ``Subtask`` machines, and the ``Supervisor``, which replaces this machine with the next generation's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import assert_never

from headgate.model.config import CheckpointConfig
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId, WorkerIndex
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.completion import Completion, Wanted, failure_in
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    Acknowledged,
    AnswerRequest,
    ArmTimer,
    CancelTimer,
    CheckpointRequested,
    CommitFailed,
    CommitRetryTimer,
    CommitSucceeded,
    CompletionReported,
    ConcludeGeneration,
    Declined,
    DrainRequested,
    DrainSources,
    DropSavepoint,
    Effect,
    Event,
    ExpiryTimer,
    FailGeneration,
    FinishReported,
    GenerationReplaced,
    HookAnswered,
    HookFailed,
    HookTimer,
    IdReserved,
    IntervalTimer,
    ListenerFound,
    ManifestFailed,
    ManifestUnknown,
    ManifestWritten,
    PauseTimer,
    ReserveFailed,
    SavepointFailed,
    SavepointOrder,
    SavepointRequested,
    SavepointWritten,
    SourceReadsOn,
    Started,
    StopRequested,
    Timer,
    TimerFired,
)
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

WANTED: dict[Phase, Wanted] = {
    Phase.CREATED: Wanted.NONE,
    Phase.RUNNING: Wanted.PERIODIC,
    Phase.STOPPING: Wanted.LAST,
    Phase.ENDING: Wanted.FINAL,
    Phase.DONE: Wanted.NONE,
}
"""Which checkpoints each phase waits for."""


_REFUSED: dict[Phase, str] = {
    Phase.CREATED: "not every subtask runs yet",
    Phase.STOPPING: "the pipeline stops, and takes its last checkpoint",
    Phase.ENDING: "all input is processed, and the final checkpoint is being taken",
}
"""Why a request for a checkpoint is refused, by phase."""


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
        hooks: Mapping[str, int] | None = None,
        downstream: Mapping[VertexId, Collection[VertexId]] | None = None,
    ) -> None:
        """Make the coordinator of ``generation``.

        ``participants`` are all subtasks (C8). ``retained`` are the sound completed checkpoints in storage, the
        restored one included (C35), ascending. ``hooks`` are timeouts in milliseconds by name (EI5). ``downstream``:
        which vertices the records of each source may reach (EI36).
        """
        super().__init__()
        assert participants, "a checkpoint has participants (C8)"
        self._generation = generation
        self._participants = frozenset(participants)
        self._interval_ms = config.interval_ms
        self._phase = Phase.CREATED
        self._finished: set[SubtaskId] = set()
        self._is_draining = False
        self._commits = CommitQueue(generation)
        self._commit_tries = 0
        self._confirmed: dict[WorkerIndex, CheckpointId] = {}
        """Workers with listeners for completed checkpoints, and the newest that each confirmed (HL7)."""
        self._checkpoints = Completion(
            generation, participants, config, first_checkpoint, retained, self._commits, hooks or {}, downstream or {}
        )

    # -- what can be asked ------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """What the coordinator waits for."""
        return self._phase

    @property
    def is_draining(self) -> bool:
        """Whether the sources are, or will be, asked to end."""
        return self._is_draining

    @property
    def checkpoints(self) -> Completion:
        """The checkpoints of this generation; to be looked at."""
        return self._checkpoints

    @property
    def pending(self) -> tuple[CheckpointId, ...]:
        """Checkpoints that are neither completed nor aborted, ascending."""
        return self._checkpoints.pending.ids

    def missing(self, checkpoint: CheckpointId) -> tuple[SubtaskId, ...]:
        """Return the subtasks that have not acknowledged a pending ``checkpoint`` yet."""
        return self._checkpoints.pending.missing(checkpoint)

    def awaited_hooks(self, checkpoint: CheckpointId) -> tuple[str, ...]:
        """Return the hooks that have not answered for a pending ``checkpoint`` yet."""
        return tuple(self._checkpoints.pending[checkpoint].awaited)

    @property
    def last_completed(self) -> CheckpointId:
        """Newest checkpoint completed by this generation (0: none)."""
        return self._checkpoints.last_completed

    @property
    def retained(self) -> tuple[CheckpointId, ...]:
        """Completed checkpoints that must stay in storage, ascending."""
        return self._checkpoints.retention.all

    # -- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """Advance by one event; return the effects to run, in order."""
        self._begin(event)
        effects = self._dispatch(event)
        if self._phase is not Phase.DONE and failure_in(effects):
            self._enter(Phase.DONE)
        self._check()
        return effects

    def _dispatch(self, event: Event) -> list[Effect]:
        """Nothing is decided after the end; files of late acknowledgements stay for recovery to judge."""
        checkpoints = self._checkpoints
        if self._phase is Phase.DONE:
            return [Ignored(f"{type(event).__name__} after the end of the generation")]
        match event:
            case Acknowledged():  # first: one from every subtask
                return checkpoints.acknowledged(event)
            case Started():
                return self._on_started(event)
            case TimerFired():
                return self._on_timer(event.timer)
            case CheckpointRequested():
                return self._on_requested(event.request)
            case SavepointRequested():
                return self._on_savepoint_requested(event.order)
            case StopRequested():
                return self._on_stop(event.savepoint)
            case DrainRequested():
                return self._on_drain(event.savepoint)
            case IdReserved():
                return checkpoints.reserved(event.checkpoint, is_draining=self._is_draining)
            case ReserveFailed():
                return checkpoints.reserve_failed(event.checkpoint)
            case HookAnswered():
                return checkpoints.hook_answered(event)
            case HookFailed():
                return checkpoints.hook_failed(event.checkpoint, event.hook, AbortReason.HOOK_FAILED)
            case Declined():
                return checkpoints.declined(event)
            case SourceReadsOn():
                return checkpoints.source_reads_on(event)
            case FinishReported():
                return self._on_finish_reported(event)
            case ManifestWritten() | ManifestFailed() | ManifestUnknown():
                return self._on_manifest(event)
            case SavepointWritten():
                return self._on_savepoint(checkpoints.savepoints.written(event.checkpoint))
            case SavepointFailed():
                return self._on_savepoint(checkpoints.savepoints.not_written(event.checkpoint, event.reason))
            case GenerationReplaced():
                return self._on_replaced(event)
            case ListenerFound() | CompletionReported():
                return self._on_listener(event)
            case CommitSucceeded():
                return self._on_commit_succeeded(event)
            case CommitFailed():
                return self._on_commit_failed(event)
            case _:
                assert_never(event)

    def _on_started(self, event: Started) -> list[Effect]:
        self._enter(Phase.RUNNING)
        # short input may have ended everywhere before the last subtask was ready: those reports were kept for now
        if len(self._finished) == len(self._participants):
            return self._on_all_finished()
        effects: list[Effect] = [DrainSources()] if self._is_draining else []
        if self._interval_ms == 0:
            return effects or [Ignored("periodic checkpoints are off")]
        return [*effects, ArmTimer(IntervalTimer(), event.first_delay_ms)]

    def _on_requested(self, request: int | None) -> list[Effect]:
        refused = _REFUSED.get(self._phase)  # C6, C62: it does not count as a failure
        if refused is not None and request is not None:
            return [AnswerRequest(request, None, refused)]
        if self._phase is Phase.CREATED:
            return [Ignored("not every participant runs yet")]
        self._checkpoints.triggering.request()
        if request is not None:
            self._checkpoints.requests.ask(request)
        return self._checkpoints.begin()

    def _on_savepoint_requested(self, order: SavepointOrder) -> list[Effect]:
        refused = _REFUSED.get(self._phase)  # as C62
        if refused is not None:
            return [AnswerRequest(order.request, None, refused), DropSavepoint(order.target)]
        self._checkpoints.savepoints.ask(order)
        return self._checkpoints.begin()

    def _on_savepoint(self, effects: list[Effect]) -> list[Effect]:
        """A savepoint is there, or will not be: the end may have waited for it, or another one (SV8, SV10)."""
        effects = effects + self._end_if_done()
        return effects if self._phase is Phase.DONE else effects + self._checkpoints.go_on()

    def _on_timer(self, timer: Timer) -> list[Effect]:
        checkpoints = self._checkpoints
        match timer:
            case IntervalTimer():
                if self._phase is not Phase.RUNNING:
                    return [Ignored("no periodic checkpoint is wanted any more")]
                checkpoints.triggering.is_due = True
                # armed now, not when this one completes: the interval lies between beginnings
                return [ArmTimer(IntervalTimer(), self._interval_ms), *checkpoints.begin()]
            case PauseTimer():
                checkpoints.triggering.is_paused = False
                return checkpoints.begin()
            case ExpiryTimer():
                return checkpoints.expired(timer.checkpoint)
            case CommitRetryTimer():
                return list(self._commits.retry())
            case HookTimer():
                return checkpoints.hook_failed(timer.checkpoint, timer.hook, AbortReason.HOOK_TIMED_OUT)
            case _:
                assert_never(timer)

    def _on_manifest(self, event: ManifestWritten | ManifestFailed | ManifestUnknown) -> list[Effect]:
        if not self._checkpoints.pending.writing_over(event.checkpoint):
            raise self._violation(f"a manifest of {event.checkpoint} was not asked for")
        match event:
            case ManifestWritten():
                effects = self._checkpoints.written(event.checkpoint) + self._end_if_done()
                return effects if self._phase is Phase.DONE else effects + self._checkpoints.go_on()
            case ManifestFailed():
                return self._checkpoints.manifest_failed(event.checkpoint)
            case ManifestUnknown():  # delete nothing: recovery reads the log and knows (§4, row "unknown outcome")
                reason = f"it is not known whether the manifest of checkpoint {event.checkpoint} was written"
                return [FailGeneration(Failure(FailureKind.LOST, reason))]
            case _:
                assert_never(event)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _on_finish_reported(self, event: FinishReported) -> list[Effect]:  # E2
        if event.generation != self._generation:
            return [Ignored("report of another generation")]
        assert event.subtask in self._participants, "only participants finish (E2)"
        if event.subtask in self._finished:
            return [Ignored("duplicate report")]
        self._finished.add(event.subtask)
        if len(self._finished) < len(self._participants):
            return [Ignored("other subtasks still process")]
        if self._phase is Phase.CREATED:
            return [Ignored("remembered until every participant runs")]
        checkpoints = self._checkpoints
        if self._phase is Phase.STOPPING and checkpoints.triggering.has_last and not checkpoints.savepoints.is_idle:
            return [Ignored("the run ends with the checkpoint that its savepoint is of")]  # SV10
        return self._on_all_finished()

    def _on_all_finished(self) -> list[Effect]:
        """Take the final checkpoint at once, without waiting for the interval (C26)."""
        self._enter(Phase.ENDING)
        refused = self._checkpoints.savepoints.refuse(_REFUSED[Phase.ENDING])
        return [CancelTimer(IntervalTimer()), *refused, *self._checkpoints.begin()]

    def _on_stop(self, savepoint: SavepointOrder | None) -> list[Effect]:
        if self._phase in (Phase.STOPPING, Phase.ENDING):
            return self._too_late_for(savepoint)
        if self._phase is Phase.CREATED:
            self._enter(Phase.DONE)
            # nothing was processed yet: what was restored still stands, and needs no last checkpoint
            return [ConcludeGeneration(None, is_final=False)]
        self._enter(Phase.STOPPING)
        savepoints = self._checkpoints.savepoints
        answers = savepoints.end_with(savepoint) + savepoints.refuse(_REFUSED[Phase.STOPPING])
        return [CancelTimer(IntervalTimer()), *answers, *self._checkpoints.begin()]

    def _on_drain(self, savepoint: SavepointOrder | None) -> list[Effect]:
        """Checkpoints go on as before, now marked (E9); the end comes when all have reported (E7)."""
        if self._phase in (Phase.STOPPING, Phase.ENDING):  # E10
            return self._too_late_for(savepoint)
        answers = self._checkpoints.savepoints.end_with(savepoint)
        if self._is_draining:
            return answers or [Ignored("already draining")]
        self._is_draining = True
        if self._phase is Phase.CREATED:
            return answers or [Ignored("remembered until every participant runs")]
        return [*answers, DrainSources()]

    def _too_late_for(self, savepoint: SavepointOrder | None) -> list[Effect]:
        if savepoint is None:
            return [Ignored("already ending")]
        return [AnswerRequest(savepoint.request, None, _REFUSED[self._phase]), DropSavepoint(savepoint.target)]

    def _on_listener(self, event: ListenerFound | CompletionReported) -> list[Effect]:
        if event.generation != self._generation:
            return [Ignored("of another generation")]
        confirmed = event.checkpoint if isinstance(event, CompletionReported) else CheckpointId(0)
        self._confirmed[event.worker] = max(confirmed, self._confirmed.get(event.worker, CheckpointId(0)))
        return self._end_if_done() or [Ignored("noted")]

    def _end_if_done(self) -> list[Effect]:
        """Done when the last checkpoint is completed, nothing of it is left to commit, and listeners have heard of it
        (C27, E4, HL7)."""
        triggering = self._checkpoints.triggering
        if self._phase is Phase.DONE or not triggering.has_last or not self._commits.is_empty:
            return []
        if not self._checkpoints.savepoints.is_idle:  # SV10
            return []
        if any(confirmed < self.last_completed for confirmed in self._confirmed.values()):
            return []
        self._enter(Phase.DONE)
        return [ConcludeGeneration(triggering.last_done, triggering.is_last_done_final)]

    def _on_commit_succeeded(self, event: CommitSucceeded) -> list[Effect]:
        self._commit_tries = 0
        effects: list[Effect] = [*self._commits.succeeded(event.checkpoint)]
        effects += self._checkpoints.savepoints.advance(self._commits)
        return [*effects, *self._end_if_done()] or [Ignored("nothing more to commit")]

    def _on_commit_failed(self, event: CommitFailed) -> list[Effect]:
        if not event.is_transient:  # K5: the target says aborted or unknown
            reason = f"cannot commit checkpoint {event.checkpoint}: {event.reason}"
            return [FailGeneration(Failure(FailureKind.DENIED, reason))]
        pause = self.COMMIT_RETRY_MS[min(self._commit_tries, len(self.COMMIT_RETRY_MS) - 1)]
        # repeated without an end (K1): completed checkpoints promise this output, whatever the target says for now
        self._commit_tries += 1
        return [ArmTimer(CommitRetryTimer(), pause)]

    def _on_replaced(self, event: GenerationReplaced) -> list[Effect]:
        reason = (
            f"generation {event.newest} of this pipeline was started elsewhere; this one ({self._generation}) stops"
        )
        return [FailGeneration(Failure(FailureKind.REPLACED, reason))]

    def _enter(self, phase: Phase) -> None:
        assert phase in LEGAL_PHASES[self._phase], f"{self._phase} → {phase}"
        self._phase = phase
        self._checkpoints.triggering.wanted = WANTED[phase]

    def _check(self) -> None:
        assert self._checkpoints.triggering.wanted is WANTED[self._phase], "the phase decides what is wanted"
        assert len(self._finished) <= len(self._participants), "participants finish once each (E2)"
        has_finished = len(self._finished) == len(self._participants)
        assert self._phase is not Phase.ENDING or has_finished, "the final checkpoint follows the end of all input (E2)"
        self._checkpoints.check()
