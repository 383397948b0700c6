"""Two-phase commit: what a sink subtask holds until it is decided, who may decide, and what old checkpoints promise.

Counterpart machines: ``Precommit`` lives in each sink subtask (worker), ``CommitQueue`` in the coordinator. Source:
Flink's ``TwoPhaseCommitSinkFunction``; rules K1–K8 of docs/spec/two-phase-commit.md. Never commits by itself: it says
what may be committed, in which order, and by which proof. A checkpoint promises its output until a newer one no
longer does (rules SV26 and WS10 of docs/spec/savepoints.md): from then on it is committed, and targets may forget
that (K20). That is so only in one line of checkpoints: what the ones promised that a pipeline left by going back may
have been aborted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace

from headgate.dataclass import dataclass
from headgate.model.ids import CheckpointId, Generation
from headgate.model.lineage import NodeKind
from headgate.model.manifest import Committable, Left, Manifest
from headgate.model.plan import PipelineDefinition
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


def oldest_promised(retained: Iterable[Manifest]) -> CheckpointId | None:
    """Return the oldest checkpoint with output that a retained manifest promises; None without manifests (K20).

    No later restore needs an older one: a manifest promises its own output, and the committables that it carries.
    """
    needed = [min((c.checkpoint for c in m.committables), default=m.checkpoint) for m in retained]
    return min(needed, default=None)


def forgettable_before(log: ObservedLog) -> CheckpointId | None:
    """Return the checkpoint below which no outcome is asked for any more, by everything that ``log`` holds (K20).

    None if every outcome has to stay: there is no manifest, or an unreadable entry may be one that a user repairs.
    """
    contents = [entry.content for entry in log.entries]
    if log.lost() or any(isinstance(content, Damage) for content in contents):
        return None
    return oldest_promised(content for content in contents if isinstance(content, Manifest))


def promised_output(log: ObservedLog) -> tuple[Committable, ...]:
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
            # Output prepared after its own acknowledgement would be in no manifest, and would never be committed.
            assert committable.checkpoint > self._covered, "its checkpoint was acknowledged without it (K3)"
            assert not self._pending or self._pending[-1].checkpoint <= committable.checkpoint, (
                "output is prepared in the order of checkpoints (K3)"
            )
            self._pending.append(committable)
        assert len(self._pending) <= self.PENDING_MAX, "too much prepared output waits for a completion"

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
        """Committables of completed checkpoints, until their commit is confirmed."""
        return tuple(c for _, committables in self._queue for c in committables)

    @property
    def is_empty(self) -> bool:
        """Whether every completed checkpoint is committed."""
        return not self._queue

    def has_confirmed(self, checkpoint: CheckpointId) -> bool:
        """Whether everything that was queued up to ``checkpoint`` is committed."""
        return all(queued > checkpoint for queued, _ in self._queue)

    def completed(self, checkpoint: CheckpointId, committables: tuple[Committable, ...]) -> list[Commit]:
        """Queue the committables of a checkpoint with a durable manifest.

        Those still queued for an earlier checkpoint are left to it.
        """
        assert not self._queue or self._queue[-1][0] < checkpoint, "checkpoints complete in order (C15)"
        queued = set(self.unconfirmed)  # K7: by identity, never by number
        fresh = tuple(c for c in committables if c not in queued)
        if fresh:  # K4: an empty checkpoint commits nothing
            self._queue.append((checkpoint, fresh))
        return self._next()

    def succeeded(self, checkpoint: CheckpointId) -> list[Commit]:
        """The commit in flight has been confirmed; return the next one, if any."""
        assert self._is_in_flight, "a commit succeeded that was not under way"
        assert self._queue[0][0] == checkpoint, "commits succeed in the order of their checkpoints (K2)"
        self._queue.popleft()
        self._is_in_flight = False
        return self._next()

    def retry(self) -> list[Commit]:
        """Repeat the commit that failed (its outcome may be unknown: commits are idempotent)."""
        assert self._is_in_flight, "only a commit under way is repeated (K1)"
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
        # stays in the queue until it is confirmed: manifests that are written meanwhile carry it on (K7)
        checkpoint, committables = self._queue[0]
        return [Commit(CommitPermit(checkpoint, self._generation), committables)]


_Identity = tuple[str, int, int, int]


def is_in_line(checkpoint: CheckpointId, newer: Manifest) -> bool:
    """Whether ``newer`` descends from ``checkpoint`` of the same life, or is it."""
    return checkpoint <= newer.checkpoint and not _was_left(checkpoint, None, newer)


def left_since(base: Manifest, first: CheckpointId) -> tuple[Left, ...]:
    """Return what checkpoints from ``first`` on have to say, when they descend from ``base``, an older one."""
    is_anything_left = first > base.checkpoint + 1
    return (*base.left, Left(base.checkpoint, first)) if is_anything_left else base.left


def left_by_giving_up(base: Manifest, promised: Iterable[Committable]) -> tuple[Left, ...]:
    """Return what checkpoints that descend from ``base`` have to say when what it ``promised`` is given up (SV30).

    Their sinks may come back, and are no witness that it was committed. ``base`` itself stays in line.
    """
    oldest: dict[str, CheckpointId] = {}
    for one in promised:
        oldest[one.sink] = min(one.checkpoint, oldest.get(one.sink, one.checkpoint))
    below = CheckpointId(base.checkpoint + 1)
    return tuple(Left(CheckpointId(first - 1), below, sink) for sink, first in sorted(oldest.items()))


def settled(found: Manifest, newer: Manifest) -> frozenset[Committable]:
    """Return what ``found`` promised and was committed before ``newer`` was written, both of one life.

    What a sink promised that ``newer`` does not know is not, nor what was given up before that sink came back (SV30).
    """
    if not is_in_line(found.checkpoint, newer):
        return frozenset()
    still = _identities(newer.committables)
    promised = (c for c in found.committables if c.sink in newer.state_texts)
    promised = (c for c in promised if not _was_left(c.checkpoint, c.sink, newer))
    return frozenset(c for c in promised if _identity(c) not in still)


def still_promised(restored: Manifest, definition: PipelineDefinition) -> tuple[Committable, ...]:
    """Return what ``restored`` promised, but for sinks that were removed by name (SV30)."""
    here = definition.plan.state_texts()
    gone = {name for name in definition.config.start.allow_unclaimed_state if name not in here}
    return tuple(committable for committable in restored.committables if committable.sink not in gone)


def given_up(restored: Manifest, definition: PipelineDefinition) -> tuple[Left, ...]:
    """Return what checkpoints that descend from ``restored`` have to say about sinks that were removed by name."""
    here = still_promised(restored, definition)
    return left_by_giving_up(restored, [one for one in restored.committables if one not in here])


def among(committables: Iterable[Committable], promised: Iterable[Committable]) -> frozenset[Committable]:
    """Return those that are promised, by their identity (K8): where they are stored may differ."""
    identities = _identities(promised)
    return frozenset(c for c in committables if _identity(c) in identities)


def without(manifest: Manifest, committables: Collection[Committable]) -> Manifest:
    """Return ``manifest`` without the promise of ``committables``."""
    entries = tuple(
        replace(entry, committables=tuple(c for c in entry.committables if c not in committables))
        for entry in manifest.entries
    )
    return replace(manifest, entries=entries, carried=tuple(c for c in manifest.carried if c not in committables))


def for_other_targets(manifest: Manifest) -> Manifest:
    """Return ``manifest`` for another pipeline than the one that took it, or another life: the targets are that one's.

    So its sinks write elsewhere (LV2), and what they held goes there, too (EV16).
    """
    lineages = {
        name: replace(lineage, locations=()) if lineage.kind is NodeKind.SINK else lineage
        for name, lineage in manifest.lineages.items()
    }
    return replace(manifest, lineages=lineages)


def _was_left(checkpoint: CheckpointId, sink: str | None, newer: Manifest) -> bool:
    return any(left.sink == sink and left.above < checkpoint < left.below for left in newer.left)


def _identities(committables: Iterable[Committable]) -> set[_Identity]:
    return {_identity(committable) for committable in committables}


def _identity(committable: Committable) -> _Identity:
    return (committable.sink, committable.checkpoint, committable.subtask_index, committable.generation)
