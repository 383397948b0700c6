"""The checkpoints under way: who has acknowledged, and which manifest is being written (rules C8, C12, C15, C17).

Part of the ``Coordinator``. A checkpoint leaves completed, or aborted as if it had never been triggered.
``MarkerPatience`` says how long it waits for sources that read towards its marker (rules EI34–EI37 of
docs/spec/induced.md): a restart would have such a source read the same records again, so that is no failure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field

from headgate.dataclass import dataclass
from headgate.model.config import ORDINARY, CheckpointOptions
from headgate.model.ids import CheckpointId, SubtaskId, VertexId
from headgate.model.manifest import Committable, Copied, HookState, SubtaskEntry
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    CancelTimer,
    DeleteParts,
    Effect,
    ExpiryTimer,
    HookTimer,
    NotifyAbort,
    SavepointOrder,
    WriteManifest,
)
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
        wait.reading.clear()
        if wait.timeouts < wait.timeouts_max:
            wait.timeouts += 1
            return None
        if wait.timeouts_max == TIMEOUTS_MAX:
            return AbortReason.MARKER_NOT_MET
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
