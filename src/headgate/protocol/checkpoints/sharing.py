"""Which files of its former snapshots a subtask may refer to instead of writing them again (SF15).

A part of what writes a subtask's snapshots. A file may be shared that every snapshot has which may be the newest
completed one by now: the last one heard of, and all that were written since. Whichever of them it is, it stays until a
newer one is completed (C31), so the file does, whatever is aborted, dropped or swept meanwhile, and however many
notifications are lost (C14).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headgate.model.ids import CheckpointId
from headgate.model.manifest import SnapshotPart


class SharedFiles:
    """The files of one subtask, by the snapshots that have them."""

    def __init__(self, restored: Iterable[SnapshotPart] = ()) -> None:
        """``restored``: those of the completed checkpoint that this generation continues from, if they are here."""
        self._snapshots: dict[CheckpointId, dict[str, SnapshotPart]] = {CheckpointId(0): _files(restored)}
        """The first one is completed."""

    def wrote(self, checkpoint: CheckpointId, parts: Sequence[SnapshotPart]) -> None:
        """The snapshot of ``checkpoint`` is durable, and will be acknowledged."""
        self._snapshots[checkpoint] = _files(parts)

    def completed(self, checkpoint: CheckpointId) -> None:
        """``checkpoint`` is completed: nobody goes back behind it (C15). Without a part in it nothing is known."""
        if checkpoint in self._snapshots:
            self._snapshots = {one: files for one, files in self._snapshots.items() if one >= checkpoint}

    def shareable(self) -> tuple[SnapshotPart, ...]:
        """Return the parts that may be shared now."""
        first, *others = (self._snapshots[checkpoint] for checkpoint in sorted(self._snapshots))
        return tuple(part for path, part in first.items() if all(path in files for files in others))


def _files(parts: Iterable[SnapshotPart]) -> dict[str, SnapshotPart]:
    return {part.path: part for part in parts if part.path}
