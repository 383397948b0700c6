"""Two-phase commit: what a sink subtask holds until it is decided, and who may decide.

Counterpart machines: ``Precommit`` lives in each sink subtask (worker), ``CommitQueue`` in the coordinator.
Source: Flink's ``TwoPhaseCommitSinkFunction``; rules K1–K8 of docs/spec/two-phase-commit.md.
Never commits by itself: it says what may be committed, in which order, and on whose proof.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, Manifest
from headgate.protocol.checkpoints.recovery import Damage, ObservedLog


@dataclass(frozen=True, slots=True)
class CommitPermit:
    """Proof that ``checkpoint`` is completed; made only from its durable manifest (K1).

    ``generation`` is the life of the pipeline that uses the permit: the target refuses older ones (K14).
    """

    checkpoint: CheckpointId
    generation: Generation


@dataclass(frozen=True, slots=True)
class Commit:
    """EFFECT: commit these at their targets (idempotent), then report ``CommitSucceeded`` or ``CommitFailed``."""

    permit: CommitPermit
    committables: tuple[Committable, ...]


def promised_from(retained: Iterable[Manifest]) -> CheckpointId | None:
    """Return the least checkpoint whose output a retained manifest promises; None without manifests (K20).

    Whatever may be restored later asks for nothing below: a manifest promises its own output, and what it carries.
    """
    needed = [min((c.checkpoint for c in m.committables), default=m.checkpoint) for m in retained]
    return min(needed, default=None)


def forgettable(log: ObservedLog) -> CheckpointId | None:
    """Return the checkpoint below which no outcome is asked for any more, by everything that ``log`` holds (K20).

    None if nothing may be forgotten: there is no manifest, or what cannot be read may be one that somebody repairs.
    """
    contents = [entry.content for entry in log.entries]
    if log.lost() or any(isinstance(content, Damage) for content in contents):
        return None
    return promised_from(content for content in contents if isinstance(content, Manifest))


def promised_by(log: ObservedLog) -> tuple[Committable, ...]:
    """Return all that the manifests in ``log`` name: what is asked for again if one of them is restored (K20)."""
    manifests = [entry.content for entry in log.entries if isinstance(entry.content, Manifest)]
    return tuple(dict.fromkeys(c for manifest in manifests for c in manifest.committables))


class Precommit:
    """What one subtask has prepared and does not yet know to be covered by a completed checkpoint (K3).

    A checkpoint that was aborted discards nothing: its committables travel with the next one (C17).
    """

    PENDING_MAX = 10_000
    """Far above any number of checkpoints that can fail in a row before the pipeline itself fails."""

    def __init__(self) -> None:
        self._pending: list[Committable] = []
        self._covered = CheckpointId(0)

    @property
    def pending(self) -> tuple[Committable, ...]:
        """Everything prepared and undecided, in order of preparation."""
        return tuple(self._pending)

    def prepared(self, committables: tuple[Committable, ...]) -> None:
        """Record newly prepared committables, in checkpoint order."""
        for committable in committables:
            # What is prepared behind its own acknowledgement would be in no manifest, and nobody would ever commit it.
            assert committable.checkpoint > self._covered, "its checkpoint was acknowledged without it (K3)"
            assert not self._pending or self._pending[-1].checkpoint <= committable.checkpoint
            self._pending.append(committable)
        assert len(self._pending) <= self.PENDING_MAX

    def covered_by(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        """Return what the acknowledgement of ``checkpoint`` must carry: everything up to it (K3)."""
        # Nothing is taken out: if this checkpoint is aborted, the next one carries the same again.
        self._covered = max(self._covered, checkpoint)
        return tuple(c for c in self._pending if c.checkpoint <= checkpoint)

    def completed(self, checkpoint: CheckpointId) -> None:
        """Forget what the completed ``checkpoint`` covers; its manifest owns that now (C16)."""
        self._pending = [c for c in self._pending if c.checkpoint > checkpoint]


class CommitQueue:
    """Commits completed checkpoints in order, one at a time, each until it succeeded (K1, K2).

    Lives in the coordinator. What it has not confirmed yet is carried into every later manifest, so that a crash
    after any completed checkpoint finds it again.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._queue: deque[tuple[CheckpointId, tuple[Committable, ...]]] = deque()
        self._is_in_flight = False

    @property
    def unconfirmed(self) -> tuple[Committable, ...]:
        """Committables of completed checkpoints whose commit has not been confirmed."""
        return tuple(c for _, committables in self._queue for c in committables)

    @property
    def is_empty(self) -> bool:
        """Whether every completed checkpoint is committed."""
        return not self._queue

    def has_confirmed(self, checkpoint: CheckpointId) -> bool:
        """Whether everything that was queued up to ``checkpoint`` is committed."""
        return all(queued > checkpoint for queued, _ in self._queue)

    def completed(self, checkpoint: CheckpointId, committables: tuple[Committable, ...]) -> list[Commit]:
        """Queue the committables of a checkpoint whose manifest is durable.

        Those still queued for an earlier checkpoint are left to it.
        """
        assert not self._queue or self._queue[-1][0] < checkpoint
        queued = set(self.unconfirmed)  # K7: by identity, never by number
        fresh = tuple(c for c in committables if c not in queued)
        if fresh:  # K4: an empty checkpoint commits nothing
            self._queue.append((checkpoint, fresh))
        return self._next()

    def succeeded(self, checkpoint: CheckpointId) -> list[Commit]:
        """The commit in flight has been confirmed; return the next one, if any."""
        assert self._is_in_flight
        assert self._queue[0][0] == checkpoint
        self._queue.popleft()
        self._is_in_flight = False
        return self._next()

    def retry(self) -> list[Commit]:
        """Repeat the commit that failed (its outcome may be unknown: commits are idempotent)."""
        self._is_in_flight = False
        return self._next()

    def check(self, last_completed: CheckpointId) -> None:
        """Assert the invariants."""
        assert self._is_in_flight is bool(self._queue), "what waits to be committed is being committed, the first first"
        if self._queue:
            ids = [checkpoint for checkpoint, _ in self._queue]
            assert ids == sorted(set(ids)), "commits go in the order of their checkpoints (K2)"
            assert ids[-1] <= last_completed, "only what is completed is committed (K1)"

    def _next(self) -> list[Commit]:
        if self._is_in_flight or not self._queue:
            return []
        self._is_in_flight = True
        checkpoint, committables = self._queue[0]
        return [Commit(CommitPermit(checkpoint, self._generation), committables)]
