"""The rows that a snapshot made of chunks has, as any backend restores them.

``incremental_snapshot`` wrote it. Chunks are read from the newest one to the oldest: what a newer one has, or
says has gone, is left out of those before it. A range of key groups is read at a time, those of one file of the first
chunk, so that not everything is in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headgate.codec.snapshot import Buffer, decode_sections, encode_sections
from headgate.errors import CorruptionError
from headgate.model.ids import key_groups_of_subtask
from headgate.model.manifest import KeyGroups
from headgate.state.backend import Ownership, StateBackend
from headgate.state.key_hash import hash_columns, key_groups
from headgate.state.key_index import KeyIndex, make_key_index
from headgate.state.memory.incremental_snapshot import (
    Change,
    ChunkFile,
    ChunkLog,
    Description,
    Replaced,
    decode_change,
    decode_description,
)
from headgate.state.snapshot import OwnedKeys, StoredFiles, UnsoundFiles, encode_batches
from headgate.state.ttl import EXPIRES_COLUMN
from headgate.state.values import Mask, to_numpy
from headgate.state.vectors import SlotArray

FileChange: TypeAlias = tuple[KeyGroups, Change]
"""What a file says of one state, and the key groups that the keys of the file are in."""


def read_description(stored: StoredFiles) -> Description:
    """Return what a snapshot made of chunks is.

    Raises:
        UnsoundFiles: it does not say so.
        CorruptionError, StorageError
    """
    data = stored.read(stored.description)
    try:
        return decode_description(data, stored.where)
    except CorruptionError as error:
        raise UnsoundFiles(stored.path_of(stored.description), 0, error.expected, error.found) from error


def portable_rows(stored: StoredFiles, groups: KeyGroups) -> list[Callable[[], memoryview]]:
    """Return what reads the rows of ``groups``, some key groups at a time.

    Raises:
        UnsoundFiles: as ``describe``.
        CorruptionError, StorageError
    """
    return PortableChunks(stored, read_description(stored), groups).parts


def schema_of(stored: StoredFiles, state: str) -> pa.Schema:
    """Return the columns of the rows of ``state``.

    Raises:
        CorruptionError
    """
    for one in read_description(stored).states:
        if one.section.name == state:
            return one.section.schema
    raise CorruptionError(stored.where, 0, f"chunks of state '{state}'", "none")


def continue_from(
    backend: StateBackend, log: ChunkLog, states: Sequence[Replaced], stored: StoredFiles, owner: Ownership
) -> bool:
    """Restore chunks in ``backend``, so that its next snapshot refers to them, if it has the same states.

    Args:
        backend: is empty, and notes what changes in ``log``.
        log: of the backend.
        states: that it has.
        stored: chunks, or the files of another backend.
        owner: of the keys.

    Returns:
        Whether that is so; if not, nothing was done, and the rows are restored.

    Raises:
        UnsoundFiles, CorruptionError, StorageError
    """
    if not stored.are_chunks:
        return False
    description = read_description(stored)
    groups = key_groups_of_subtask(owner.subtask_index, owner.max_parallelism, owner.parallelism)
    keys = OwnedKeys(KeyGroups(groups.start, len(groups)), owner.max_parallelism)
    if description.keys != keys or list(description.states) != list(states):
        return False
    for read in PortableChunks(stored, description, keys.groups).parts:
        backend.restore(decode_sections(read(), stored.where), stored.where, owner)
    parts = stored.files
    # after all parts: from now on the next snapshot refers to these chunks
    log.continue_from([(c.rows, tuple(parts[file.name] for file in c.files), c.whole) for c in description.chunks])
    return True


class PortableChunks:
    """What chunks come to, in parts by key group. When all were read, their rows are counted."""

    def __init__(self, stored: StoredFiles, description: Description, groups: KeyGroups) -> None:
        """``groups``: the wanted rows are theirs."""
        self._stored = stored
        self._description = description
        ranges = [file.groups for file in description.chunks[0].files]
        found = [one.common(groups) for one in ranges if one.overlaps(groups)]
        self.parts: list[Callable[[], memoryview]] = [partial(self.read, one) for one in found]
        self._left = dict.fromkeys(found)
        self._is_whole = groups.common(description.keys.groups) == description.keys.groups
        self._counts = {state.section.name: 0 for state in description.states}
        self._shared: dict[str, memoryview] = {}

    def read(self, groups: KeyGroups) -> memoryview:
        """Return a container with the rows of ``groups``.

        Raises:
            UnsoundFiles: it is as it was written, and holds something wrong.
            CorruptionError, StorageError
        """
        description = self._description
        rows: dict[str, Sequence[Buffer]] = {name: [data] for name, data in description.meta.items()}
        needed = [file for chunk in description.chunks for file in chunk.files if file.groups.overlaps(groups)]
        sections = {file.name: self._decoded(file) for file in needed}
        for state in description.states:
            latest = _latest(state, self._told(state, sections), groups, description)
            batches = [state.portable(batch) for batch in latest]
            rows[state.section.name] = encode_batches(state.section.schema, batches)
            # a part may be read again, after a try that failed: it is counted once
            if groups in self._left:
                self._counts[state.section.name] += sum(batch.num_rows for batch in batches)
        self._left.pop(groups, None)
        if not self._left:
            self._end()
        return memoryview(b"".join(memoryview(one) for one in encode_sections(rows)))

    def _told(self, state: Replaced, sections: Mapping[str, Mapping[str, memoryview]]) -> list[list[FileChange]]:
        """Return what each chunk says of ``state``, as far as its files, of which these are the sections, are read."""
        chunks, where = self._description.since(state.section.name), self._stored.where
        read = [[file for file in chunk.files if file.name in sections] for chunk in chunks]
        return [[(f.groups, decode_change(sections[f.name], state, where)) for f in files] for files in read]

    def _decoded(self, file: ChunkFile) -> dict[str, memoryview]:
        """Return the sections of a file; one of which several parts need something is read once."""
        data = self._shared.get(file.name)
        if data is None:
            part = self._stored.files.get(file.name)
            if part is None:
                where = self._stored.path_of(self._stored.description)
                raise UnsoundFiles(where, 0, f"the chunk {file.name} of a state", "no part with this name")
            data = self._stored.read(part)
            if sum(file.groups.overlaps(one) for one in self._left) > 1:
                self._shared[file.name] = data
        return decode_sections(data, self._stored.path_of(self._stored.files[file.name]))

    def _end(self) -> None:
        """Everything was read: as many rows as were frozen must have been there."""
        self._shared = {}
        if not self._is_whole:
            return
        recorded = (self._stored.description.rows or {}).values()
        wanted = {name: count for states in recorded for name, count in states.items()}
        for name, count in self._counts.items():
            if count != wanted.get(name, 0):
                where, expected = self._stored.path_of(self._stored.description), wanted.get(name, 0)
                raise UnsoundFiles(where, 0, f"{expected} rows of state '{name}'", f"{count} rows")


def _latest(
    state: Replaced, chunks: Sequence[Sequence[FileChange]], groups: KeyGroups, description: Description
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one state that are there, of chunks from the oldest to the newest.

    Args:
        state: that the rows are of.
        chunks: what the files of each say of it.
        groups: that the rows are wanted of.
        description: of all that.
    """
    seen = _ReplacedRows(state, state.identity)
    gone = _ReplacedRows(state, state.group) if state.group else seen
    found: list[list[pa.RecordBatch]] = []
    for place, files in reversed(list(enumerate(chunks))):
        rows = [batch for of, change in files for batch in _of_groups(state, of, change, groups, description.keys)]
        found.append([seen.left(batch) if gone is seen else gone.left(seen.left(batch)) for batch in rows])
        # after its own rows were looked at: those of one chunk do not replace each other
        if place:  # nothing is older than the first one
            for batch in rows:
                seen.add(batch)
            for batch in (batch for _, change in files for batch in change.gone):
                gone.add(batch)
    for batches in reversed(found):
        for batch in batches:
            living = _living(batch, description.now_ms)
            if living.num_rows:
                yield living


def _of_groups(
    state: Replaced, of: KeyGroups, change: Change, groups: KeyGroups, keys: OwnedKeys
) -> Sequence[pa.RecordBatch]:
    """Return the rows with keys in ``groups`` of a file with keys of ``of``."""
    is_inside = of.common(groups) == of
    return change.rows if is_inside else [_within(batch, state, groups, keys) for batch in change.rows]


def _within(batch: pa.RecordBatch, state: Replaced, groups: KeyGroups, keys: OwnedKeys) -> pa.RecordBatch:
    found = key_groups(hash_columns(batch, state.section.key_names), keys.max_parallelism)
    return _filtered(batch, (found >= groups.first) & (found < groups.first + groups.count))


def _living(batch: pa.RecordBatch, now_ms: int | None) -> pa.RecordBatch:
    """Return the rows that had not expired."""
    if now_ms is None or EXPIRES_COLUMN not in batch.schema.names:
        return batch
    return _filtered(batch, to_numpy(batch.column(EXPIRES_COLUMN)) > now_ms)


def _filtered(batch: pa.RecordBatch, mask: Mask) -> pa.RecordBatch:
    return batch if mask.all() else batch.filter(pa.array(mask))


class _ReplacedRows:
    """What newer chunks have, or say has gone, identified by some columns; nothing, if there are none."""

    def __init__(self, state: Replaced, columns: Sequence[str]) -> None:
        self._columns = columns
        types = [state.columns.field(name).type for name in columns]
        self._index: KeyIndex = make_key_index(types or [pa.bool_()])
        self._is_seen = SlotArray(np.bool_)
        self._is_empty = True

    def add(self, batch: pa.RecordBatch) -> None:
        """Those of ``batch`` are there from now on."""
        if batch.num_rows and self._columns:
            slots = self._index.slots([batch.column(name) for name in self._columns])
            self._is_seen.written(len(self._index))[slots] = True
            self._is_empty = False

    def left(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that no newer chunk has replaced."""
        if self._is_empty or not batch.num_rows:
            return batch
        slots = self._index.slots([batch.column(name) for name in self._columns])
        return _filtered(batch, ~self._is_seen.read(len(self._index)).take(slots))
