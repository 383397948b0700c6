"""The snapshot files of one pipeline: read, removed when nobody needs them, set aside (C10, C31, R51).

Counterparts: ``log``, which says what is completed, and ``snapshots``. Removes a file only when it was told that
nothing refers to it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest, StateHandle
from headgate.protocol.checkpoints.recovery import Damage, Gap, ObservedLog
from headgate.runtime.checkpoints.snapshots import read_snapshot
from headgate.storage.base import AlreadyExists, NotFound, Storage

_CHECKPOINT_OF = re.compile(r"/chk-(\d+)/")
_ASIDE = re.compile(r"/aside/(\d{10,})-(\d{10,})/")
_WHY = "why"


@dataclass(frozen=True, slots=True)
class Aside:
    """The checkpoints after ``above`` and before ``below`` are kept: a start could not use them. ``why`` names the
    damage."""

    above: CheckpointId
    below: CheckpointId
    why: str


class SnapshotFiles:
    """All files of snapshots below one pipeline's directory."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline

    def read(self, handle: StateHandle) -> bytes:
        """Return the payload of a snapshot after checking it.

        Raises:
            CorruptionError, NotFound, StorageError
        """
        return read_snapshot(self._storage, self._pipeline, handle)

    def verify(self, manifest: Manifest) -> list[Damage]:
        """Read every snapshot file of ``manifest`` and return what is wrong with them (I4)."""
        found = []
        for entry in manifest.entries:
            try:
                self.read(entry.handle)
            except CorruptionError as error:
                found.append(Damage(error.path, str(error)))
            except NotFound as error:
                found.append(Damage(error.path, "the file is missing"))
        return found

    def delete(self, handles: Sequence[StateHandle]) -> None:
        """Remove snapshot files that nothing refers to."""
        for handle in handles:
            if handle.path:
                self._storage.delete(f"{self._pipeline}/{handle.path}")

    def drop(self, checkpoint: CheckpointId) -> None:
        """Remove the snapshots up to a completed checkpoint (C31).

        Aborted checkpoints in between may have left files that nobody knows of: they go, too.
        """
        self._delete_snapshots(lambda found: found <= checkpoint)

    def sweep(self, keep: Sequence[CheckpointId], below: CheckpointId) -> None:
        """Remove snapshot files of checkpoints below ``below`` that are not kept: leftovers of dead generations."""
        self._storage.sweep_unfinished(self._pipeline)
        kept = {int(c) for c in keep}
        self._delete_snapshots(lambda found: found < below and found not in kept)

    def _delete_snapshots(self, is_garbage: Callable[[int], bool]) -> None:
        paths = self._storage.list(self._pipeline)
        ranges = _ranges_aside(paths)
        for path in paths:
            match = _CHECKPOINT_OF.search(path)
            if match and is_garbage(int(match.group(1))) and not _is_within(match, ranges):  # R51
                self._storage.delete(path)

    def set_aside(self, log: ObservedLog, gaps: Sequence[Gap]) -> None:
        """Keep what a start cannot use, until somebody removes it (R51): snapshots and log entries.

        Repeating it changes nothing.

        Raises:
            StorageError
        """
        paths = {entry.sequence: entry.path for entry in log.entries}
        for gap in gaps:
            name = f"{self._pipeline}/aside/{gap.above:010d}-{gap.below:010d}"
            for sequence in gap.sequences:
                with contextlib.suppress(AlreadyExists, NotFound, KeyError):  # a lost entry has no path
                    data = self._storage.get(paths[sequence])
                    self._storage.put_if_absent(f"{name}/log-{sequence:010d}", [data])
            why = "".join(f"{damage.path}: {damage.problem}\n" for damage in gap.damages)
            with contextlib.suppress(AlreadyExists):
                self._storage.put_if_absent(f"{name}/{_WHY}", [why.encode()])

    def aside(self) -> list[Aside]:
        """Return what was set aside, oldest first.

        Raises:
            StorageError
        """
        paths = [path for path in self._storage.list(f"{self._pipeline}/aside") if path.endswith(f"/{_WHY}")]
        return [Aside(*_range_of(path), self._storage.get(path).decode("utf-8", "replace").strip()) for path in paths]

    def discard_aside(self) -> int:
        """Remove what was set aside; return how many files of checkpoints that were. Snapshots first, reasons last.

        Raises:
            StorageError
        """
        paths = self._storage.list(self._pipeline)
        ranges = _ranges_aside(paths)
        files = [path for path in paths if (found := _CHECKPOINT_OF.search(path)) and _is_within(found, ranges)]
        for path in [*files, *sorted(p for p in paths if "/aside/" in p)]:
            self._storage.delete(path)
        return len(files)


def _range_of(path: str) -> tuple[CheckpointId, CheckpointId]:
    match = _ASIDE.search(path)
    assert match is not None
    return CheckpointId(int(match.group(1))), CheckpointId(int(match.group(2)))


def _ranges_aside(paths: Sequence[str]) -> set[tuple[CheckpointId, CheckpointId]]:
    return {_range_of(path) for path in paths if _ASIDE.search(path)}


def _is_within(match: re.Match[str], ranges: Collection[tuple[int, int]]) -> bool:
    return any(above < int(match.group(1)) < below for above, below in ranges)
