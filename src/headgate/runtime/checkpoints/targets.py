"""Where one subtask writes one snapshot: small parts stay inline, the others share a few files (SF1, C13).

Counterparts: ``state.frozen`` writes itself to it, ``uploads`` decides when. Nothing counts before the manifest that
refers to it is durable, so a write that failed is simply begun again with another target: it writes the same files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from headgate.codec.snapshot import FILES_PREFIX, STATE_PREFIX, Buffer, encode_sections, section_views
from headgate.codec.snapshot_path import file_path, output_path, snapshot_path
from headgate.codec.state_rows import difference, stored_rows
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import BUNDLE, KeyGroups, Rows, SnapshotPart
from headgate.state.frozen import FrozenState, OwnedKeys
from headgate.storage.base import Storage

FILE_BYTES_MAX = 64 << 20
"""A file that has so many bytes is written, and the next one begun: so much is in memory until then."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where and as whom snapshots are written. ``keys``: what the subtask owns; None if its state is not cut."""

    storage: Storage
    pipeline: str
    generation: Generation
    inline_bytes_max: int
    keys: OwnedKeys | None = None


class SubtaskTarget:
    """Collects the parts of one snapshot."""

    def __init__(
        self,
        to: Destination,
        subtask: SubtaskId,
        checkpoint: CheckpointId,
        shareable: Sequence[SnapshotPart] | None = None,
    ) -> None:
        """``shareable``: files that may be shared (SF15); None: everything must be portable, as in a savepoint."""
        self._shareable = shareable
        self._to = to
        self._subtask = subtask
        self._checkpoint = checkpoint
        self._inline_bytes_left = to.inline_bytes_max
        self._parts: list[SnapshotPart] = []
        self._files_count = 0
        self._apart_count = 0
        self._waiting: list[memoryview] = []
        self._waiting_bytes = 0

    def put_bundle(self, sections: Mapping[str, bytes]) -> None:
        """Write small sections as one part.

        Raises:
            StorageError
        """
        self.put(BUNDLE, encode_sections({name: [data] for name, data in sections.items()}))

    def put_state(self, node: str, state: FrozenState, prefix: str = STATE_PREFIX) -> None:
        """Have ``state`` write itself, to sections of ``node`` that begin with ``prefix``.

        Raises:
            AssertionError: what it wrote is not what was frozen; such a checkpoint must not complete (U7).
            StorageError
        """
        target = _NodeTarget(self, node, self._to.keys, prefix)
        state.write_to(target)
        _refuse_difference(node, dict(state.rows()), target.rows)

    def put(
        self,
        section: str,
        chunks: Iterable[Buffer],
        rows: Rows | None = None,
        key_groups: KeyGroups | None = None,
        name: str = "",
    ) -> SnapshotPart:
        """Write one part and return the reference to it; it holds once ``finish`` was called.

        Raises:
            StorageError
        """
        buffers = [memoryview(chunk).cast("B") for chunk in chunks]
        size_bytes, checksum = _size_and_checksum(buffers)
        part = SnapshotPart(size_bytes, checksum, rows=rows, section=section, key_groups=key_groups, name=name)
        placed = self._placed(part, buffers)
        self._parts.append(placed)
        return placed

    def share(self, part: SnapshotPart) -> None:
        """Refer to a part that may be shared, instead of writing it again (SF6, SF15)."""
        self._parts.append(part)

    def shareable(self, section: str) -> dict[str, SnapshotPart] | None:
        """Return the files of ``section`` that may be shared, by name; None: portable parts are wanted."""
        if self._shareable is None:
            return None
        return {part.name: part for part in self._shareable if part.section == section}

    def put_apart(
        self, section: str, chunks: Iterable[Buffer], key_groups: KeyGroups | None, name: str
    ) -> SnapshotPart:
        """Write a part that is a file, which goes when the last checkpoint goes that refers to it (SF15).

        Raises:
            StorageError
        """
        buffers = [memoryview(chunk).cast("B") for chunk in chunks]
        path = file_path(self._checkpoint, self._subtask, self._to.generation, self._apart_count)
        self._to.storage.put(f"{self._to.pipeline}/{path}", buffers)
        self._apart_count += 1
        size_bytes, checksum = _size_and_checksum(buffers)
        part = SnapshotPart(size_bytes, checksum, path, section=section, key_groups=key_groups, name=name)
        self._parts.append(part)
        return part

    def finish(self) -> tuple[SnapshotPart, ...]:
        """Make everything durable; return all parts.

        Raises:
            StorageError
        """
        self._write_file()
        return tuple(self._parts)

    def _placed(self, part: SnapshotPart, buffers: Sequence[memoryview]) -> SnapshotPart:
        if part.size_bytes <= self._inline_bytes_left:  # C13
            self._inline_bytes_left -= part.size_bytes
            return replace(part, inline=b"".join(buffers))
        placed = replace(part, path=self._path(), offset=self._waiting_bytes)
        self._waiting += buffers
        self._waiting_bytes += part.size_bytes
        if self._waiting_bytes >= FILE_BYTES_MAX:
            self._write_file()
        return placed

    def _path(self) -> str:
        return snapshot_path(self._checkpoint, self._subtask, self._to.generation, self._files_count)

    def _write_file(self) -> None:
        if self._waiting:
            self._to.storage.put(f"{self._to.pipeline}/{self._path()}", self._waiting)
            self._files_count += 1
            self._waiting, self._waiting_bytes = [], 0


class _NodeTarget:
    """See ``state.frozen.SnapshotTarget``: the target of one operator's state. ``rows``: what was written so far."""

    def __init__(self, target: SubtaskTarget, node: str, keys: OwnedKeys | None, prefix: str) -> None:
        self._target = target
        self._node = node
        self.keys = keys
        self._section = f"{prefix}{node}"
        self._files = f"{FILES_PREFIX}{node}"
        self.rows: dict[str, int] = {}

    def put(
        self,
        chunks: Iterable[Buffer],
        rows: Mapping[str, int] | None,
        key_groups: KeyGroups | None = None,
        name: str = "",
    ) -> SnapshotPart:
        """See ``SnapshotTarget``."""
        written = list(chunks)
        if rows is not None:
            _refuse_difference(self._node, rows, stored_rows(section_views(written), f"the snapshot of '{self._node}'"))
        self._count(rows or {})
        of_node = None if rows is None else {self._node: dict(rows)}
        return self._target.put(self._section, written, of_node, key_groups, name)

    def share(self, part: SnapshotPart) -> None:
        """See ``SnapshotTarget``."""
        self._count((part.rows or {}).get(self._node, {}))
        self._target.share(part)

    @property
    def files(self) -> Mapping[str, SnapshotPart] | None:
        """See ``SnapshotTarget``."""
        return self._target.shareable(self._files)

    def put_file(self, name: str, chunks: Iterable[Buffer], key_groups: KeyGroups | None = None) -> SnapshotPart:
        """See ``SnapshotTarget``."""
        return self._target.put_apart(self._files, chunks, key_groups or self._groups, name)

    def describe_files(self, chunks: Iterable[Buffer], rows: Mapping[str, int], name: str = "") -> SnapshotPart:
        """See ``SnapshotTarget``."""
        self._count(rows)
        return self._target.put(self._files, chunks, {self._node: dict(rows)}, self._groups, name)

    @property
    def _groups(self) -> KeyGroups | None:
        return None if self.keys is None else self.keys.groups

    def _count(self, rows: Mapping[str, int]) -> None:
        for state, count in rows.items():
            self.rows[state] = self.rows.get(state, 0) + count


def _size_and_checksum(buffers: Sequence[memoryview]) -> tuple[int, int]:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return sum(len(buffer) for buffer in buffers), digest.intdigest()


def write_output(
    to: Destination, subtask: SubtaskId, checkpoint: CheckpointId, number: int, payload: bytes
) -> SnapshotPart:
    """Make a large payload durable that was prepared for ``checkpoint``, the ``number``-th of this subtask (SF9).

    Raises:
        StorageError
    """
    path = output_path(checkpoint, subtask, to.generation, number)
    to.storage.put(f"{to.pipeline}/{path}", [payload])
    return SnapshotPart(len(payload), xxhash.xxh3_64_intdigest(payload), path)


def _refuse_difference(node: str, expected: Mapping[str, int], found: Mapping[str, int]) -> None:
    problem = difference(expected, found)
    if problem is not None:
        raise AssertionError(f"the snapshot of operator '{node}' must have {problem[0]}, but has {problem[1]}")
