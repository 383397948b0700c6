"""Which completed checkpoints stay in storage, and which files may be removed then (C22, C31, C35, SF4–SF8).

``Retention`` and ``Tolerance`` are parts of the ``Coordinator``. ``FileRetention`` works beside the log, because it
has to know what every retained manifest refers to. The end of a run drops nothing here (C32): to give up all
checkpoints is to give up the log. Counterpart: ``runtime.checkpoints.snapshot_files``, which removes files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headgate.dataclass import dataclass
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import SnapshotPart
from headgate.protocol.checkpoints.coordinator_events import AbortReason, DropCheckpoint, Effect


class Retention:
    """Completed checkpoints, oldest first."""

    def __init__(self, count_max: int, retained: Sequence[CheckpointId]) -> None:
        """``retained``: the sound ones in storage, the restored one included (C35), ascending."""
        self._count_max = max(count_max, 1)  # never the one just completed
        self._retained = list(retained)

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        """Return whether ``checkpoint`` is completed and stays."""
        return checkpoint in self._retained

    @property
    def all(self) -> tuple[CheckpointId, ...]:
        """All of them, ascending."""
        return tuple(self._retained)

    def oldest_with(self, checkpoint: CheckpointId) -> CheckpointId:
        """Return the oldest one that stays once ``checkpoint`` is completed."""
        return [*self._retained, checkpoint][-self._count_max :][0]

    def completed(self, checkpoint: CheckpointId) -> list[Effect]:
        """Keep ``checkpoint``; drop what is too old."""
        assert not self._retained or checkpoint > self._retained[-1], "checkpoints complete in order (C15)"
        self._retained.append(checkpoint)
        dropped = self._retained[: -self._count_max]
        self._retained = self._retained[-self._count_max :]
        return [DropCheckpoint(old) for old in dropped]

    def check(self, last_completed: CheckpointId) -> None:
        """Assert the invariants; before the first completion there may be more, of another configuration."""
        assert last_completed == 0 or len(self._retained) <= self._count_max, "no more stay than configured (C31)"
        assert last_completed == 0 or self._retained[-1] == last_completed, "the newest one always stays (C31)"


class Tolerance:
    """Counts failures in a row (C22)."""

    def __init__(self, tolerable: int) -> None:
        self._tolerable = tolerable
        self._count = 0

    def completed(self) -> None:
        """Reset the count of failures after a completed checkpoint."""
        self._count = 0

    def failed(self, checkpoint: CheckpointId, reason: AbortReason) -> str | None:
        """Count a failure; return the sentence that ends the generation when it was one too many."""
        if not reason.counts_as_failure:
            return None
        self._count += 1
        if self._count <= self._tolerable:
            return None
        many = f" ({self._count} in a row)" if self._count > 1 else ""
        return f"checkpoint {checkpoint} failed{many}: {reason.text}"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is there: the upload that wrote it. Only manifests say who needs it."""

    path: str
    checkpoint: CheckpointId
    generation: Generation


class FileRetention:
    """Which files of snapshots may go, by reference.

    A file stays while a retained checkpoint refers to it (SF4), while an upload that is under way may write it or share
    it (SF5, SF6), and while it is of a time that was set aside (SF7). Everything else may go.
    """

    def __init__(
        self, generation: Generation, first: CheckpointId, retained: Mapping[CheckpointId, frozenset[str]]
    ) -> None:
        """Make the retention of ``generation``; its checkpoint ids begin at ``first``.

        ``retained`` are the files of each checkpoint that may be restored.
        """
        self._generation = generation
        self._first = first
        self._retained = dict(retained)
        self._bases: dict[CheckpointId, frozenset[str]] = {}
        self._aside_below = CheckpointId(0)

    @property
    def newest(self) -> CheckpointId:
        """The newest checkpoint that is completed, 0 if there is none: the base of the next one."""
        return max(self._retained, default=CheckpointId(0))

    def narrowed(self, retained: Iterable[CheckpointId]) -> None:
        """Only ``retained`` may be restored: the others were skipped, and are set aside or not needed (C35)."""
        kept = set(retained)
        self._retained = {checkpoint: files for checkpoint, files in self._retained.items() if checkpoint in kept}

    def set_aside(self, below: CheckpointId) -> None:
        """Keep every file written for a checkpoint before ``below`` (SF7); 0: none has to stay for that reason."""
        self._aside_below = below

    def began(self, checkpoint: CheckpointId) -> None:
        """Uploads of ``checkpoint`` may run: they share files of the newest one, whatever is dropped meanwhile."""
        assert checkpoint > self.newest, "ids rise (C2)"
        # A copy, not a reference to the checkpoint: it may be dropped while the upload still builds on its files.
        self._bases[checkpoint] = self._retained.get(self.newest, frozenset())
        self._check()

    def completed(self, checkpoint: CheckpointId, files: frozenset[str]) -> None:
        """The manifest of ``checkpoint`` is durable; uploads of older ones are over (C15)."""
        assert checkpoint > self.newest, "checkpoints complete in order (C15)"
        self._retained[checkpoint] = files
        # An older checkpoint cannot complete any more, so nothing else needs the files it was built on.
        self._bases = {pending: base for pending, base in self._bases.items() if pending > checkpoint}
        self._check()

    def dropped(self, checkpoint: CheckpointId) -> None:
        """Record that ``checkpoint`` and all older ones cannot be restored any more (C31)."""
        assert not self._retained or checkpoint < self.newest, "the newest one always stays (C31)"
        self._retained = {kept: files for kept, files in self._retained.items() if kept > checkpoint}
        self._check()

    def garbage(self, files: Iterable[StoredFile]) -> tuple[str, ...]:
        """Return which of ``files``, which are all that there are, may be removed."""
        needed = self._needed()
        return tuple(
            file.path
            for file in files
            if file.path not in needed and not self._may_be_written(file) and file.checkpoint >= self._aside_below
        )

    def unneeded(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return which files of a checkpoint that was given up may be removed: not those that it shares."""
        needed = self._needed()
        return tuple(path for path in dict.fromkeys(paths) if path not in needed)

    def _check(self) -> None:
        assert all(pending > self.newest for pending in self._bases), "a base is that of an upload under way (SF6)"

    def _needed(self) -> frozenset[str]:
        return frozenset().union(*self._retained.values(), *self._bases.values())

    def _may_be_written(self, file: StoredFile) -> bool:
        """Whether an upload that may still be acknowledged wrote it: of a later generation, or after the newest one.

        What was prepared for a checkpoint that was aborted belongs to the next one (C17), so it stays until that one
        is completed and says what it needs.
        """
        # A later generation is judged by its own driver alone: this one may be a zombie that knows nothing of it.
        if file.generation == self._generation:
            return file.checkpoint >= self._first and file.checkpoint > self.newest
        return file.generation > self._generation


class SharedFiles:
    """The files of one subtask, by the snapshots that have them."""

    def __init__(self, restored: Iterable[SnapshotPart] = ()) -> None:
        """``restored``: those of the completed checkpoint that this generation continues from, if they are here."""
        self._snapshots: dict[CheckpointId, dict[str, SnapshotPart]] = {CheckpointId(0): _files(restored)}
        """The first one is completed."""

    def wrote(self, checkpoint: CheckpointId, parts: Sequence[SnapshotPart]) -> None:
        """The snapshot of ``checkpoint`` is durable, and will be acknowledged."""
        assert checkpoint > max(self._snapshots), "snapshots of a subtask are written in order (K3)"
        self._snapshots[checkpoint] = _files(parts)

    def completed(self, checkpoint: CheckpointId) -> None:
        """Record that ``checkpoint`` is completed, so no restore goes back past it (C15).

        Nothing changes where the subtask had no part in it.
        """
        if checkpoint in self._snapshots:
            self._snapshots = {one: files for one, files in self._snapshots.items() if one >= checkpoint}

    def shareable(self) -> tuple[SnapshotPart, ...]:
        """Return the parts that may be shared now."""
        # A file that a newer snapshot lacks may be removed as soon as that one completes, while an upload still refers
        # to it: so only what all of them have is shared.
        first, *others = (self._snapshots[checkpoint] for checkpoint in sorted(self._snapshots))
        return tuple(part for path, part in first.items() if all(path in files for files in others))


def _files(parts: Iterable[SnapshotPart]) -> dict[str, SnapshotPart]:
    return {part.path: part for part in parts if part.path}
