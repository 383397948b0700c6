"""Checkpoints under way, from their trigger (rules C2–C6, C26, E5) to their completion, or to their abort.

``PendingCheckpoints`` knows who has acknowledged, and which manifest is being written (rules C8, C12, C15, C17). A
checkpoint leaves completed, or aborted as if it had never been triggered. ``MarkerPatience`` says how long it waits for
sources that read towards its marker (rules EI34–EI37 of docs/spec/induced.md): a restart would have such a source read
the same records again, so that is no failure. ``Completion`` composes them with ``Triggering``, ``Retention``,
``Tolerance`` and the ``CommitQueue``; part of the ``Coordinator``, which knows the generation's phases.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field, replace
from enum import Enum

from headgate.dataclass import dataclass
from headgate.model.config import ORDINARY, CheckpointConfig, CheckpointKind, CheckpointOptions
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Committable, Copied, HookState, SubtaskEntry
from headgate.protocol.checkpoints.checkpoint_requests import Requests, Savepoints
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
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
    NotifyAbort,
    NotifyComplete,
    PauseTimer,
    ReserveId,
    SavepointOrder,
    SourceReadsOn,
    TriggerSources,
    WriteManifest,
)
from headgate.protocol.checkpoints.retention import Retention, Tolerance
from headgate.protocol.machine import Ignored

TIMEOUTS_MAX = 64
"""Timeouts within which a source that reads on must have met a marker: beyond them it has perhaps none (EI37)."""


@dataclass(slots=True)
class MarkerWait:
    """What is known of the sources that a pending checkpoint waits for.

    Attributes:
        timeouts_max: of how many timeouts it may take before they are cut.
        timeouts: of how many it has begun.
        uncut: sources that read and had not met the marker when they last said so.
        reading: those of them that have said so since the last timeout began.
    """

    timeouts_max: int = 1
    timeouts: int = 1
    uncut: set[SubtaskId] = field(default_factory=set)
    reading: set[SubtaskId] = field(default_factory=set)

    def record(self, subtask: SubtaskId, *, is_uncut: bool) -> bool:
        """A source has read on; return whether it was the last one that had to be cut."""
        if is_uncut:
            self.uncut.add(subtask)
            self.reading.add(subtask)
            return False
        is_known = subtask in self.uncut
        self.uncut.discard(subtask)
        self.reading.discard(subtask)
        return is_known and not self.uncut


class MarkerPatience:
    """How many timeouts the next checkpoint may take before its sources are cut."""

    def __init__(self, downstream: Mapping[VertexId, Collection[VertexId]]) -> None:
        """``downstream``: of each source, the vertices that its records may reach."""
        self._downstream = downstream
        self._timeouts = 1

    def begun(self) -> MarkerWait:
        """Return what a checkpoint that begins now may take."""
        return MarkerWait(self._timeouts)

    def expired(self, wait: MarkerWait, missing: Collection[SubtaskId]) -> AbortReason | None:
        """A timeout is over, and ``missing`` have not acknowledged. Return why to give up; None: wait for another."""
        if not self._only_reads(wait, missing):
            return AbortReason.EXPIRED
        # they have to say so again in the next timeout: a source that has hung since must not keep the checkpoint alive
        wait.reading.clear()
        if wait.timeouts < wait.timeouts_max:
            wait.timeouts += 1
            return None
        if wait.timeouts_max == TIMEOUTS_MAX:
            return AbortReason.MARKER_NOT_MET
        # doubled: a marker that is far away costs few checkpoints that are given up, and a near one no long wait
        self._timeouts = max(self._timeouts, 2 * wait.timeouts_max)
        return AbortReason.MARKER_AHEAD

    def completed(self, wait: MarkerWait) -> None:
        """The next one may take as long as this one did, and may take longer when it turns out that it must."""
        self._timeouts = wait.timeouts

    def _only_reads(self, wait: MarkerWait, missing: Collection[SubtaskId]) -> bool:
        """Whether only sources that said they read on, and vertices downstream of them, are missing."""
        waiting = wait.uncut.intersection(missing)
        if not waiting or not waiting <= wait.reading:
            return False
        downstream = {vertex for source in waiting for vertex in self._downstream.get(source.vertex, ())}
        return all(subtask in waiting or subtask.vertex in downstream for subtask in missing)


_OTHERS_ARE_MISSING = Ignored("other participants are missing")


@dataclass(slots=True)
class Pending:
    """A checkpoint that is neither completed nor aborted."""

    is_final: bool
    is_last: bool
    """Nothing else is wanted after it: final, or the one before a requested stop."""
    is_draining: bool
    """It began after the sources were asked to end."""
    options: CheckpointOptions = ORDINARY
    """What it is to be: decided when it began, whatever is wanted when the hooks have answered."""
    awaited: list[str] = field(default_factory=list)
    """Hooks that have not answered yet."""
    waits_for_hooks: bool = False
    """Its timeout has passed while a hook that is waited for had not answered (EI8)."""
    hooks: dict[str, bytes | None] = field(default_factory=dict)
    """What the others returned."""
    savepoint: SavepointOrder | None = None
    """What it carries."""
    acks: dict[SubtaskId, SubtaskEntry] = field(default_factory=dict)
    copies: dict[SubtaskId, Copied] = field(default_factory=dict)
    markers: MarkerWait = field(default_factory=MarkerWait)
    """What it knows of sources that read towards its marker."""

    @property
    def committables(self) -> tuple[Committable, ...]:
        """Everything prepared that it covers, in the order of commits (K2)."""
        found = {c for entry in self.acks.values() for c in entry.committables}
        return tuple(sorted(found, key=lambda c: (c.checkpoint, c.sink, c.subtask_index, c.generation)))


class PendingCheckpoints:
    """All pending checkpoints, and the id of the one that is writing its manifest."""

    def __init__(self, participants: tuple[SubtaskId, ...]) -> None:
        self._participants = participants
        self._members = frozenset(participants)
        self._pending: dict[CheckpointId, Pending] = {}
        self._writing: CheckpointId | None = None

    def __len__(self) -> int:
        """Return how many are under way."""
        return len(self._pending)

    def __contains__(self, checkpoint: object) -> bool:
        """Return whether it is under way."""
        return checkpoint in self._pending

    def __getitem__(self, checkpoint: CheckpointId) -> Pending:
        """Return a checkpoint that is under way."""
        return self._pending[checkpoint]

    @property
    def newest(self) -> CheckpointId:
        """The one that began last, 0 if none is under way."""
        return max(self._pending) if self._pending else CheckpointId(0)

    @property
    def ids(self) -> tuple[CheckpointId, ...]:
        """Of all of them, ascending."""
        return tuple(sorted(self._pending))

    @property
    def writing(self) -> CheckpointId | None:
        """The checkpoint that is writing its manifest."""
        return self._writing

    def has_last(self, *, is_final: bool) -> bool:
        """Whether a last checkpoint of this kind is under way."""
        return any(p.is_last and p.is_final == is_final for p in self._pending.values())

    def may_end(self, checkpoint: CheckpointId) -> bool:
        """Whether ``checkpoint`` can still be aborted."""
        # Not while its manifest is being written: that may be durable already, and then its output is promised.
        return checkpoint in self._pending and checkpoint != self._writing

    def missing(self, checkpoint: CheckpointId) -> tuple[SubtaskId, ...]:
        """Return who has not acknowledged."""
        return tuple(s for s in self._participants if s not in self._pending[checkpoint].acks)

    def is_full(self, checkpoint: CheckpointId) -> bool:
        """Whether everybody has acknowledged ``checkpoint``, and every hook has answered."""
        pending = self._pending[checkpoint]
        return len(pending.acks) == len(self._participants) and not pending.awaited

    def begin(self, checkpoint: CheckpointId, pending: Pending) -> None:
        """Barriers of ``checkpoint`` start."""
        assert checkpoint > self.newest, "ids rise (C2)"
        self._pending[checkpoint] = pending

    def acknowledge(self, checkpoint: CheckpointId, entry: SubtaskEntry, copied: Copied) -> bool:
        """Take what a participant has done for ``checkpoint``, once; return whether it was the first time.

        ``copied`` counts where the checkpoint carries a savepoint.
        """
        assert entry.subtask in self._members, "participants acknowledge (C8)"
        pending = self._pending[checkpoint]
        if entry.subtask in pending.acks:
            return False
        assert checkpoint != self._writing, "a manifest is written when all have acknowledged (C12)"
        pending.acks[entry.subtask] = entry
        if pending.savepoint is not None:
            pending.copies[entry.subtask] = copied
        return True

    def write_next(self, commits: CommitQueue) -> list[Effect]:
        """Write the newest fully acknowledged manifest; one at a time, so that ids complete in order (C15).

        It carries what ``commits`` has not confirmed yet (K7). One that carries a savepoint is not passed over (SV8).
        """
        if self._writing is not None:
            return [Ignored("a manifest is being written")]
        full = [c for c in self._pending if self.is_full(c)]
        if not full:
            return [_OTHERS_ARE_MISSING]
        # The newest one makes the older ones needless, so one slow write costs no queue of writes.
        checkpoint = min((c for c in full if self._pending[c].savepoint is not None), default=max(full))
        pending = self._pending[checkpoint]
        self._writing = checkpoint
        entries = tuple(pending.acks[s] for s in self._participants)
        hooks = tuple(HookState(hook, data) for hook, data in sorted(pending.hooks.items()))
        carried = commits.unconfirmed
        return [WriteManifest(checkpoint, entries, carried, pending.is_final, pending.is_draining, hooks)]

    def writing_over(self, checkpoint: CheckpointId) -> bool:
        """Take the outcome of a manifest; return whether it was asked for."""
        if self._writing != checkpoint:
            return False
        self._writing = None
        return True

    def complete(self, checkpoint: CheckpointId) -> tuple[Pending, list[Effect]]:
        """Take a completed checkpoint out, and all that it subsumes (C15)."""
        assert self._writing is None, "the outcome of its manifest was taken before (C12)"
        done = self._pending.pop(checkpoint)
        effects: list[Effect] = []
        for older in self.ids:
            if older < checkpoint:
                effects += self.subsume(older)
        return done, effects

    def subsume(self, checkpoint: CheckpointId) -> list[Effect]:
        """A newer checkpoint was completed first."""
        return self.abort(checkpoint, AbortReason.SUBSUMED)

    def abort(self, checkpoint: CheckpointId, reason: AbortReason) -> list[Effect]:
        """End ``checkpoint`` as if it had never been triggered (C17)."""
        assert checkpoint != self._writing, "what may be durable already is not aborted (C12)"
        pending = self._pending.pop(checkpoint)
        # What is still being uploaded is deleted when its late acknowledgement comes (C10), or swept.
        # only named here: whether a completed checkpoint shares one of them is judged when they are removed (SF5)
        files = tuple(part for entry in pending.acks.values() for part in entry.parts if part.path)
        effects: list[Effect] = [CancelTimer(ExpiryTimer(checkpoint))]
        effects += [CancelTimer(HookTimer(checkpoint, hook)) for hook in pending.awaited]
        effects.append(NotifyAbort(checkpoint, reason))
        return [*effects, DeleteParts(files)] if files else effects

    def check(self, last_completed: CheckpointId) -> None:
        """Assert the invariants. After every event, so it looks at no single acknowledgement (C64)."""
        assert not self._pending or min(self._pending) > last_completed, "completion subsumes what is older (C15)"
        assert self._writing is None or self._writing in self._pending, "only what is under way is written (C12)"
        for pending in self._pending.values():
            assert len(pending.acks) <= len(self._participants), "participants acknowledge, once each (C8)"
        assert self._writing is None or self.is_full(self._writing), "hooks are in the manifest (EI4)"


LAST_RETRY_MS_MIN = 200
"""Pause before a last checkpoint that failed is tried again: storage may recover."""


HOOK_IS_WAITED_FOR_MS = 365 * 86_400_000
"""A hook with such a timeout is waited for: the timeout of the checkpoint begins with its answer (EI8)."""


class Wanted(Enum):
    """Which checkpoints are wanted."""

    NONE = "not every participant runs, or all is over"
    PERIODIC = "one at every interval, and on request"
    LAST = "one, before a requested stop"
    FINAL = "one, after all input was processed"

    @property
    def is_last(self) -> bool:
        """Whether nothing else is wanted after it; it is not held back by limits and pauses."""
        return self in (Wanted.LAST, Wanted.FINAL)


class Triggering:
    """Begins one checkpoint at a time."""

    def __init__(self, config: CheckpointConfig, first: CheckpointId, savepoints: Savepoints) -> None:
        self._config = config
        self._savepoints = savepoints
        self._next = first
        self._reserving: CheckpointId | None = None
        self.is_due = False
        """A periodic checkpoint is due."""
        self.is_paused = False
        """No checkpoint may begin before the pause is over."""
        self.last_done: CheckpointId | None = None
        """The completed checkpoint that ended the run, if there is one."""
        self.is_last_done_final = False
        """Whether ``last_done`` was taken after all input had been processed."""
        self.wanted = Wanted.NONE

    @property
    def has_last(self) -> bool:
        """Whether the last checkpoint that is wanted is completed."""
        return self.last_done is not None and (self.wanted is not Wanted.FINAL or self.is_last_done_final)

    def request(self) -> None:
        """Request a checkpoint now, without waiting for the pause."""
        self.is_due, self.is_paused = True, False

    def begin(self, pending: PendingCheckpoints) -> list[Effect]:
        """Begin a checkpoint if one is wanted and allowed (C2, C3, C4)."""
        if self._reserving is not None or not self._wants(pending):
            return [Ignored("no checkpoint can begin now")]
        # A stop or a savepoint does not wait for checkpoints that may hang: it subsumes them when it completes.
        is_forced = self.wanted.is_last or self._savepoints.is_wanted  # SV8
        if not is_forced and len(pending) >= self._config.max_concurrent:
            return [Ignored("as many checkpoints are pending as allowed")]
        # The id is used up even if its reservation fails: whether the record of it was written may be unknown.
        checkpoint, self._next = self._next, CheckpointId(self._next + 1)
        assert checkpoint not in pending, "an id is used once (C2)"
        self.is_due = False
        self._reserving = checkpoint
        return [ReserveId(checkpoint)]

    def _wants(self, pending: PendingCheckpoints) -> bool:
        if self.wanted.is_last:
            return not pending.has_last(is_final=self.wanted is Wanted.FINAL) and not self.has_last
        is_due = self.is_due and not self.is_paused
        return self.wanted is Wanted.PERIODIC and (is_due or self._savepoints.is_wanted)

    def reservation_over(self, checkpoint: CheckpointId) -> bool:
        """Take the outcome of a reservation; return whether anybody waits for it."""
        if self._reserving != checkpoint:
            return False
        self._reserving = None
        return True

    def begun(self, checkpoint: CheckpointId, *, is_draining: bool) -> Pending:
        """Return the checkpoint whose barriers start now.

        It is final only if every subtask had finished *before* that (C26, E3): decided here.
        """
        savepoint = self._savepoints.begun(checkpoint, is_last=self.wanted.is_last)
        options = self._options(savepoint)
        return Pending(self.wanted is Wanted.FINAL, self.wanted.is_last, is_draining, options, savepoint=savepoint)

    def _options(self, savepoint: SavepointOrder | None) -> CheckpointOptions:
        """Return what a checkpoint that begins now is to be (GM2, GM3, UA3)."""
        is_cut = self.wanted.is_last or savepoint is not None  # SV9: a savepoint holds no records in flight
        may_overtake = self._config.alignment_timeout_ms is not None and not is_cut
        options = self._config.mode.options(is_last=self.wanted is Wanted.LAST, may_overtake=may_overtake)
        if savepoint is None:
            return options
        return replace(options, kind=CheckpointKind.SAVEPOINT, target=savepoint.target)  # SV1

    def again(self) -> list[Effect]:
        """A last checkpoint that failed is wanted again, after a pause in which storage may recover (E5)."""
        if self.wanted.is_last:
            return [ArmTimer(PauseTimer(), max(self._config.min_pause_ms, LAST_RETRY_MS_MIN))]
        return []

    def completed(self, checkpoint: CheckpointId, pending: Pending) -> list[Effect]:
        """A checkpoint is completed: the next one waits for the pause."""
        if pending.is_last:
            self.last_done, self.is_last_done_final = checkpoint, pending.is_final
        if self._config.min_pause_ms and self.wanted is Wanted.PERIODIC:
            self.is_paused = True
            return [ArmTimer(PauseTimer(), self._config.min_pause_ms)]
        return []

    def check(self, pending: PendingCheckpoints) -> None:
        """Assert the invariants."""
        assert pending.newest < self._next, "an id is used once, and they rise (C2)"
        assert self._reserving is None or self._reserving not in pending, "barriers follow the record of the id"


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
        downstream: Mapping[VertexId, Collection[VertexId]],
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
        self._patience = MarkerPatience(downstream)
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
        assert checkpoint > self.last_completed, "a checkpoint begins above all completed ones (C15)"
        pending = self.triggering.begun(checkpoint, is_draining=is_draining)
        pending.awaited = list(self._hooks)
        pending.markers = self._patience.begun()
        self.pending.begin(checkpoint, pending)
        self.requests.begun(checkpoint)
        effects: list[Effect] = [ArmTimer(ExpiryTimer(checkpoint), self._timeout_ms)]
        # the timer in front of the trigger: a checkpoint that gets no answer at all ends, too
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
        """Record the answer of a hook; the last answer triggers the sources (EI1)."""
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
        if pending.waits_for_hooks:  # EI8
            effects.append(ArmTimer(ExpiryTimer(event.checkpoint), self._timeout_ms))
        return [*effects, TriggerSources(event.checkpoint, pending.options)]

    def hook_failed(self, checkpoint: CheckpointId, hook: str, reason: AbortReason) -> list[Effect]:
        """One hook raised, or did not answer in time: the checkpoint is given up, and that counts (EI5)."""
        if checkpoint not in self.pending or hook not in self.pending[checkpoint].awaited:
            return [Ignored("the hook is not awaited any more")]
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
        if any(self._hooks[hook] >= HOOK_IS_WAITED_FOR_MS for hook in pending.awaited):  # EI8
            pending.waits_for_hooks = True
            return [ArmTimer(ExpiryTimer(checkpoint), self._timeout_ms)]
        if not pending.awaited:
            found = self._patience.expired(pending.markers, self.pending.missing(checkpoint))
            if found is None:
                return [ArmTimer(ExpiryTimer(checkpoint), self._timeout_ms)]
            reason = found
        return self._abort(checkpoint, reason)

    def source_reads_on(self, event: SourceReadsOn) -> list[Effect]:
        """Record that a source that sets its own barrier reads on; its last cut starts the timeout (EI35)."""
        if event.generation != self.generation or event.subtask not in self._participants:
            return [Ignored("a source of another generation")]
        cut = [c for c in self.pending.ids if self.pending[c].markers.record(event.subtask, is_uncut=c in event.uncut)]
        begun: list[Effect] = [ArmTimer(ExpiryTimer(checkpoint), self._timeout_ms) for checkpoint in cut]
        return begun or [Ignored("noted")]

    # -- the manifest -----------------------------------------------------------------------------------------------

    def written(self, checkpoint: CheckpointId) -> list[Effect]:
        """The durable point (C12). Then, in this order: retain, subsume, notify, commit."""
        assert checkpoint > self.last_completed, "checkpoints complete in order (C15)"
        passed = [older for older in self.pending.ids if older < checkpoint]
        pending, subsumed = self.pending.complete(checkpoint)
        assert all(other > checkpoint for other in self.pending.ids), "a completion ends everything older (C15)"
        self.last_completed = checkpoint
        self.tolerance.completed()
        self._patience.completed(pending.markers)
        effects: list[Effect] = [CancelTimer(ExpiryTimer(checkpoint)), *self.retention.completed(checkpoint)]
        effects += [*subsumed, NotifyComplete(checkpoint), *self.requests.completed(checkpoint)]
        for older in passed:
            effects += self.savepoints.failed(older, AbortReason.SUBSUMED)
        # From here on the sinks commit: the manifest is durable, so a crash finds in it what is still to be committed.
        effects += self._commits.completed(checkpoint, pending.committables)  # C16
        effects += self.triggering.completed(checkpoint, pending)
        self.savepoints.completed(checkpoint, pending.copies, is_end=self.triggering.has_last)
        # after the commits are queued: a savepoint counts only when its output is committed (SV2)
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

    # -- failures ---------------------------------------------------------------------------------------------------

    def _abort(self, checkpoint: CheckpointId, reason: AbortReason) -> list[Effect]:
        assert checkpoint in self.pending, "only a pending checkpoint is given up (C17)"
        is_last, savepoint = self.pending[checkpoint].is_last, self.pending[checkpoint].savepoint
        effects = self.pending.abort(checkpoint, reason) + self.requests.failed(checkpoint, reason.text)
        assert checkpoint not in self.pending, "a checkpoint that was given up is not pending (C17)"
        effects += self.savepoints.failed(checkpoint, reason)
        # a slow place of a savepoint says nothing about the pipeline's own storage
        is_excused = savepoint is not None and reason is AbortReason.EXPIRED  # SV7
        failed = [] if is_excused else self._count(checkpoint, reason)
        if failed:
            return effects + failed
        return effects + (self.triggering.again() if is_last else self.begin())

    def _count(self, checkpoint: CheckpointId, reason: AbortReason) -> list[Effect]:
        """Fail the generation when more than the tolerable number of failures came in a row (C22)."""
        # one that is older than a completed checkpoint is no failure in a row
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
