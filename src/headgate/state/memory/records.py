"""One record per key in memory: see ``backend.RecordBackend``. Counterpart: ``operators.reduce``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

import pyarrow as pa

from headgate.state.backend import Ownership, Record, restored_batches
from headgate.state.descriptors import Section
from headgate.state.files import StoredFiles
from headgate.state.frozen import FrozenState
from headgate.state.memory.cells import FrozenCells, MemoryCells
from headgate.state.memory.chunk_log import ChunkLog
from headgate.state.memory.chunked import ChunkedState
from headgate.state.memory.chunks import Change, Replaced
from headgate.state.memory.stored_chunks import gone_on_with
from headgate.state.row_values import python_values

_ENCODE_ROWS = 16_384


class _Frozen(ChunkedState):
    """The records at a barrier."""

    def __init__(self, log: ChunkLog, number: int, state: Replaced, cells: FrozenCells) -> None:
        super().__init__(log, number)
        self._state = state
        self._cells = cells

    def _rows(self) -> Mapping[str, int]:
        return {self._state.section.name: len(self._cells.objects)}

    def _changes(self, after: int | None) -> list[Change]:
        """A record never goes."""
        objects = self._cells.objects
        changed = None if after is None else self._cells.changes.after(after)
        found = objects.values() if changed is None else [objects[key] for key in changed]
        return [Change(self._state, list(_batches(self._state.section.schema, found)), is_whole=changed is None)]

    def _changed_counts(self, after: int) -> Mapping[str, int | None]:
        changed = self._cells.changes.after(after)
        return {self._state.section.name: None if changed is None else len(changed)}

    def _forget(self) -> None:
        self._cells.release()


def _batches(schema: pa.Schema, found: Iterable[Record]) -> Iterator[pa.RecordBatch]:
    records = iter(found)
    while part := list(islice(records, _ENCODE_ROWS)):  # in parts, because each holds up the processing thread
        columns = zip(*part, strict=True)
        arrays = [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class MemoryRecords:
    """See ``backend.RecordBackend``."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._log = ChunkLog()
        self._cells = MemoryCells(self._log.interval)
        self._key_of = itemgetter(*(section.schema.get_field_index(name) for name in section.key_names))

    def load(self, keys: Iterable[Any]) -> dict[Any, Record]:
        """See ``RecordBackend``."""
        self._cells.absorb()
        return self._cells.get_all(keys)

    def store(self, records: Mapping[Any, Record]) -> None:
        """See ``RecordBackend``."""
        self._cells.put_all(records)

    def freeze(self) -> FrozenState:
        """See ``StateBackend``; until a release, changes go to an overlay (OP8)."""
        cells = self._cells.freeze()
        return _Frozen(self._log, self._log.end_interval(), self._replaced, cells)

    @property
    def _replaced(self) -> Replaced:
        return Replaced(self._section, self._section.key_names)

    def go_on_with(self, stored: StoredFiles, owner: Ownership) -> bool:
        """See ``ContinuingBackend``."""
        if not gone_on_with(self, self._log, [self._replaced], stored, owner):
            return False
        self._cells.note_changes()
        return True

    def restore(self, sections: Mapping[str, memoryview], path: str, owner: Ownership) -> None:
        """See ``StateBackend``."""
        for batch in restored_batches(sections, self._section, path, owner):
            records = zip(*(python_values(column) for column in batch.columns), strict=True)
            self._cells.put_all({self._key_of(record): record for record in records})
