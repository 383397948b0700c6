"""Brings checkpoints from their trigger to their completion, or to their abort.

Composes ``Triggering``, ``PendingCheckpoints``, ``Retention``, ``Tolerance`` and the ``CommitQueue``; part of the
``Coordinator``, which knows the phases of the generation. Order of durability: id reserved → barriers → every snapshot
durable → manifest durable (= completed) → commits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headgate.model.config import CheckpointConfig
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Committable
from headgate.model.savepoint import Copied
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.coordinator_events import (
    Acknowledged,
    AnnounceCheckpoint,
    ArmTimer,
    CallHook,
    CancelTimer,
    Declined,
    DeleteParts,
    Effect,
    ExpiryTimer,
    FailGeneration,
    HookAnswered,
    HookTimer,
    NotifyComplete,
    SourceReadsOn,
    TriggerSources,
)
from headgate.protocol.checkpoints.markers import MarkerPatience
from headgate.protocol.checkpoints.pending import Pending, PendingCheckpoints
from headgate.protocol.checkpoints.reasons import AbortReason
from headgate.protocol.checkpoints.requests import Requests
from headgate.protocol.checkpoints.retention import Retention, Tolerance
from headgate.protocol.checkpoints.savepoints import Savepoints
from headgate.protocol.checkpoints.triggering import Triggering
from headgate.protocol.machine import Ignored

NOT_COPIED = Copied(problem="it wrote nothing to the savepoint")


class Completion:
    """All checkpoints of one generation."""

    def __init__(
        self,
        generation: Generation,
        participants: tuple[SubtaskId, ...],
        config: CheckpointConfig,
        first_checkpoint: CheckpointId,
        retained: tuple[CheckpointId, ...],
        commits: CommitQueue,
        hooks: Mapping[str, int],
        behind: Mapping[VertexId, Collection[VertexId]],
    ) -> None:
        self.generation = generation
        self._participants = frozenset(participants)
        self._timeout_ms = config.timeout_ms
        self.savepoints = Savepoints()
        self.triggering = Triggering(config, first_checkpoint, self.savepoints)
        self.pending = PendingCheckpoints(participants)
        self.retention = Retention(config.retained, retained)
        self.tolerance = Tolerance(config.tolerable_failures)
        self._commits = commits
        self._hooks = hooks
        self._patience = MarkerPatience(behind)
        self.requests = Requests()
        self.last_completed = CheckpointId(0)

    # -- the beginning ----------------------------------------------------------------------------------------------

    def begin(self) -> list[Effect]:
        """Begin a checkpoint if one is wanted and allowed."""
        return self.triggering.begin(self.pending)

    def reserved(self, checkpoint: CheckpointId, *, is_draining: bool) -> list[Effect]:
        """The id is recorded: the barriers may start."""
        if not self.triggering.reservation_over(checkpoint):
            return [Ignored("an id that is not wanted any more")]
        pending = self.triggering.begun(checkpoint, is_draining=is_draining)
        pending.awaited = list(self._hooks)
        pending.markers = self._patience.begun()
        self.pending.begin(checkpoint, pending)
        self.requests.begun(checkpoint)
        effects: list[Effect] = [ArmTimer(ExpiryTimer(checkpoint), self._timeout_ms)]
        if not self._hooks:
            return [*effects, TriggerSources(checkpoint, pending.options)]
        effects.append(AnnounceCheckpoint(checkpoint, pending.options))
        for hook, timeout_ms in self._hooks.items():
            effects += [ArmTimer(HookTimer(checkpoint, hook), timeout_ms), CallHook(checkpoint, hook)]
        return effects

    def reserve_failed(self, checkpoint: CheckpointId) -> list[Effect]:
        """The id could not be recorded."""
        if not self.triggering.reservation_over(checkpoint):
            return [Ignored("an id that is not wanted any more")]
        reason = AbortReason.RESERVE_FAILED
        answers = self.requests.not_begun(reason.text) + self.savepoints.refuse(reason.text)
        return answers + (self._count(checkpoint, reason) or self.triggering.again())

    # -- what hooks say ---------------------------------------------------------------------------------------------

    def hook_answered(self, event: HookAnswered) -> list[Effect]:
        """One hook has done its part. Behind the last one the sources are triggered (EI1)."""
        if event.checkpoint not in self.pending:
            return [Ignored("a hook answered for a checkpoint that has ended")]
        pending = self.pending[event.checkpoint]
        if event.hook not in pending.awaited:
            return [Ignored("the hook has answered before")]
        pending.awaited.remove(event.hook)
        pending.hooks[event.hook] = event.data
        effects: list[Effect] = [CancelTimer(HookTimer(event.checkpoint, event.hook))]
        if pending.awaited:
            return effects
        if self.pending.is_full(event.checkpoint):  # EI7: all sources had met their markers meanwhile
            return effects + _wanted(self._write_next())
        return [*effects, TriggerSources(event.checkpoint, pending.options)]

    def hook_failed(self, checkpoint: CheckpointId, hook: str, reason: AbortReason) -> list[Effect]:
        """One hook raised, or did not answer in time: the checkpoint is given up, and that counts (EI5)."""
        if checkpoint not in self.pending or hook not in self.pending[checkpoint].awaited:
            return [Ignored("nobody waits for the hook any more")]
        return self._abort(checkpoint, reason)

    # -- what subtasks say ------------------------------------------------------------------------------------------

    def acknowledged(self, event: Acknowledged) -> list[Effect]:
        """One subtask has done its part."""
        if event.generation != self.generation:  # C9, C11: and the files are not ours to delete
            return [Ignored("acknowledgement of another generation")]
        entry = event.entry
        if event.checkpoint not in self.pending or entry.subtask not in self._participants:
            if event.checkpoint in self.retention:  # its manifest owns this very file (C10)
                return [Ignored("duplicate acknowledgement of a completed checkpoint")]
            files = tuple(part for part in entry.parts if part.path)
            return [DeleteParts(files)] if files else [Ignored("late acknowledgement")]
        if not self.pending.acknowledge(event.checkpoint, entry, event.copied or NOT_COPIED):
            return [Ignored("duplicate acknowledgement")]
        return self._write_next()

    def declined(self, event: Declined) -> list[Effect]:
        """One subtask gave it up."""
        if event.generation != self.generation:
            return [Ignored("decline of another generation")]
        if not self.pending.may_end(event.checkpoint):
            return [Ignored("late decline")]
        return self._abort(event.checkpoint, event.reason)

    def expired(self, checkpoint: CheckpointId) -> list[Effect]:
        """It took too long, unless sources still read towards its marker (EI36)."""
        if not self.pending.may_end(checkpoint):
            return [Ignored("the checkpoint has ended, or its manifest is being written")]
        pending, reason = self.pending[checkpoint], AbortReason.EXPIRED
        if not pending.awaited:
            found = self._patience.expired(pending.markers, self.pending.missing(checkpoint))
            if found is None:
                return [ArmTimer(ExpiryTimer(checkpoint), self._timeout_ms)]
            reason = found
        return self._abort(checkpoint, reason)

    def source_reads_on(self, event: SourceReadsOn) -> list[Effect]:
        """A source that sets its own barrier comes forward. Behind the last cut the timeout begins (EI35)."""
        if event.generation != self.generation or event.subtask not in self._participants:
            return [Ignored("a source of another generation")]
        cut = [c for c in self.pending.ids if self.pending[c].markers.told(event.subtask, is_uncut=c in event.uncut)]
        begun: list[Effect] = [ArmTimer(ExpiryTimer(checkpoint), self._timeout_ms) for checkpoint in cut]
        return begun or [Ignored("noted")]

    # -- the manifest -----------------------------------------------------------------------------------------------

    def written(self, checkpoint: CheckpointId) -> list[Effect]:
        """The durable point (C12). Then, in this order: retain, subsume, notify, commit."""
        passed = [older for older in self.pending.ids if older < checkpoint]
        pending, subsumed = self.pending.complete(checkpoint)
        self.last_completed = checkpoint
        self.tolerance.completed()
        self._patience.completed(pending.markers)
        effects: list[Effect] = [CancelTimer(ExpiryTimer(checkpoint)), *self.retention.completed(checkpoint)]
        effects += [*subsumed, NotifyComplete(checkpoint), *self.requests.completed(checkpoint)]
        for older in passed:
            effects += self.savepoints.failed(older, AbortReason.SUBSUMED)
        effects += self._commits.completed(checkpoint, self._committables(pending))
        effects += self.triggering.completed(checkpoint, pending)
        self.savepoints.completed(checkpoint, pending.copies, is_end=self.triggering.has_last)
        return effects + self.savepoints.advance(self._commits)

    def manifest_failed(self, checkpoint: CheckpointId) -> list[Effect]:
        """It is certainly not there."""
        effects = self._abort(checkpoint, AbortReason.MANIFEST_FAILED)
        return effects if failure_in(effects) else effects + _wanted(self._write_next())

    def go_on(self) -> list[Effect]:
        """After an ending: another manifest may be ready, another checkpoint may be due."""
        return _wanted(self._write_next() + self.begin())

    def _write_next(self) -> list[Effect]:
        return self.pending.write_next(self._commits)

    def _committables(self, pending: Pending) -> tuple[Committable, ...]:
        return pending.committables  # C16

    # -- failures ---------------------------------------------------------------------------------------------------

    def _abort(self, checkpoint: CheckpointId, reason: AbortReason) -> list[Effect]:
        is_last, savepoint = self.pending[checkpoint].is_last, self.pending[checkpoint].savepoint
        effects = self.pending.abort(checkpoint, reason) + self.requests.failed(checkpoint, reason.text)
        effects += self.savepoints.failed(checkpoint, reason)
        is_excused = savepoint is not None and reason is AbortReason.EXPIRED  # SV7
        failed = [] if is_excused else self._count(checkpoint, reason)
        if failed:
            return effects + failed
        return effects + (self.triggering.again() if is_last else self.begin())

    def _count(self, checkpoint: CheckpointId, reason: AbortReason) -> list[Effect]:
        """Fail the generation when more than the tolerable number of failures came in a row (C22)."""
        sentence = None if checkpoint <= self.last_completed else self.tolerance.failed(checkpoint, reason)
        return [] if sentence is None else [FailGeneration(Failure(FailureKind.LOST, sentence))]

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self.triggering.check(self.pending)
        self.pending.check(self.last_completed)
        self.retention.check(self.last_completed)
        self.requests.check(self.pending)
        self.savepoints.check(self.pending)
        self._commits.check(self.last_completed)


def failure_in(effects: list[Effect]) -> bool:
    """Whether ``effects`` end the generation."""
    return any(isinstance(effect, FailGeneration) for effect in effects)


def _wanted(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Ignored)]
